"""The client: plays a workload against the gateway, and stamps what a user would feel.

Every time a user can perceive is taken here, once: when a request was sent, when each token came,
when it ended. The client checks nothing; that the stream is contiguous is checked from the trace.

A session's next turn goes out when the former has ended and its think time has passed; it carries
the ids of the conversation so far, as they were made, never encoded again (a scripted answer, which
nobody made, is encoded once). A turn that was rejected
or aborted ends its session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace

from pddrt.env import Env
from pddrt.errors import BadFrame, ConnectionLost, PeerError
from pddrt.frames import Frame, pack_ids, unpack_ids
from pddrt.messages import unpack_logprobs
from pddrt.netem.net import Connection, Net
from pddrt.roles.node import Node
from pddrt.trace import Accepted, Finished, RequestSent, TokensReceived
from pddrt.types import SECOND, Ns, Sampling
from pddrt.workload import Session, Turn


@dataclass(slots=True)
class Call:
    """A request under way: its conversation so far, and its end."""

    ids: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""


class Client(Node):
    def __init__(
        self, env: Env, net: Net, name: str, gateway: str, sampling: Sampling, patience: Ns
    ) -> None:
        """`patience`: how long an end may take to come; longer than the gateway's deadline."""
        super().__init__(env, net, name)
        self.gateway = gateway
        self.sampling = sampling
        self.patience = patience
        self._calls: dict[str, Call] = {}
        self._pauses: list[asyncio.Future[None]] = []
        self._stopped = False

    async def play(self, sessions: Sequence[Session], concurrency: int | None = None) -> None:
        """Plays all sessions to their ends. `concurrency`: at most so many at a time, in order."""
        gate = asyncio.Semaphore(concurrency or max(1, len(sessions)))
        begin = self.env.now()
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                playing = self._session(session, begin, gate)
                group.create_task(playing, name=f"session {session.index}")

    async def _session(self, session: Session, begin: Ns, gate: asyncio.Semaphore) -> None:
        async with gate:
            await self._pause(begin + session.start_ns)
            history: list[int] = []
            answer: str | None = None
            for number, turn in enumerate(session.turns):
                if number:
                    await self._pause(self.env.now() + turn.think_ns)
                if self._stopped:
                    return
                before = history if turn.context == "follow" else []
                call = await self._ask(session, number, turn, before, answer)
                if call.reason not in ("stop", "length"):
                    return
                if turn.context != "aside":
                    answer = turn.answer
                    history = call.ids + (call.output if answer is None else [])

    async def _ask(
        self, session: Session, turn: int, what: Turn, history: list[int], answer: str | None
    ) -> Call:
        """Sends one request and waits for its end. `history` are the ids of the conversation so
        far; `answer`, the workload's own answer to its last turn, is to stand behind them.
        """
        request = f"s{session.index}.{turn}"
        call = self._calls[request] = Call()
        seed = self.env.rng(f"sampling/{request}").getrandbits(48)
        sampling = astuple(what.sampling or replace(self.sampling, seed=seed))
        self.env.trace.emit(
            RequestSent(self.env.now(), request, session.index, turn, what.text, sampling)
        )
        about = {
            "request": request,
            "session": f"s{session.index}",
            "text": what.text,
            "system": session.system,
            "answer": answer,
            "raw": what.ids is not None,
            "max_tokens": what.max_tokens,
            "sampling": sampling,
        }
        ids = history if what.ids is None else what.ids
        patience = self.env.call_at(self.env.now() + self.patience, self._give_up, request)
        try:
            if self.gateway not in self.peers:
                raise ConnectionLost("there is no control stream")
            await self.peers[self.gateway].send(Frame("submit", about, pack_ids(ids)))
        except ConnectionLost as error:
            self.fail(request, f"lost the gateway: {error}")
        await call.ended.wait()
        patience.cancel()
        del self._calls[request]
        return call

    def _give_up(self, request: str) -> None:
        """The gateway has said nothing, not even that the deadline is over."""
        self.cancel(request)
        self.fail(request, f"no end came from the gateway within {self.patience / SECOND:g} s")

    async def _pause(self, until: Ns) -> None:
        """Returns at `until`, or as soon as the client is stopped."""
        if self._stopped or until <= self.env.now():
            return
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self.env.call_at(until, _settle, over)
        self._pauses.append(over)
        try:
            await over
        finally:
            timer.cancel()
            self._pauses.remove(over)

    def stop(self) -> None:
        """Sends nothing more, and cancels what is under way."""
        self._stopped = True
        for over in self._pauses:
            _settle(over)
        for request in self._calls:
            self.post(self.gateway, "cancel", request=request)

    @property
    def under_way(self) -> tuple[str, ...]:
        """Requests that have not ended."""
        return tuple(request for request, call in self._calls.items() if not call.reason)

    def cancel(self, request: str) -> None:
        """The user does not want the answer any more."""
        self.post(self.gateway, "cancel", request=request)

    async def close(self) -> None:
        for request in list(self._calls):
            self.fail(request, "the run was ended")
        await super().close()

    # -- frames ------------------------------------------------------------------------------------

    def on_accepted(self, conn: Connection, frame: Frame) -> None:
        """From the gateway: these are the ids of the whole prompt."""
        if call := self._calls.get(frame["request"]):
            call.ids = unpack_ids(frame.payload)
            self.env.trace.emit(Accepted(self.env.now(), frame["request"], tuple(call.ids)))

    def on_answer(self, conn: Connection, frame: Frame) -> None:
        """Each position once, in order: what comes again is dropped, a gap cannot be filled."""
        request, ids = frame["request"], unpack_ids(frame.payload)
        call, start = self._calls.get(request), frame["start"]
        if call and not call.reason and start >= len(call.output):
            if start > len(call.output):
                raise BadFrame(f"an id at {start} where {len(call.output)} is next")
            call.output.extend(ids)
            self.env.trace.emit(
                TokensReceived(
                    self.env.now(),
                    request,
                    start,
                    start + len(ids),
                    frame["source"],
                    tuple(ids),
                    frame["text"],
                    tuple(unpack_logprobs(frame["logprobs"], len(ids))),
                )
            )

    def on_end(self, conn: Connection, frame: Frame) -> None:
        self._end(frame["request"], frame["reason"], frame["detail"], frame["retry_ns"])

    def _end(self, request: str, reason: str, detail: str, retry: Ns | None = None) -> None:
        call = self._calls.get(request)
        if call is not None and not call.reason:
            call.reason = reason
            about = (request, reason, len(call.output), detail, retry)
            self.env.trace.emit(Finished(self.env.now(), *about))
            call.ended.set()

    def heeds(self, peer: str, request: str) -> bool:
        return peer == self.gateway

    def fail(self, request: str, detail: str) -> None:
        self._end(request, "aborted", detail)

    def peer_lost(self, conn: Connection, error: PeerError) -> None:
        for request in list(self._calls):
            self.fail(request, f"lost the gateway: {error}")


def _settle(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)
