"""The gateway: where a request enters, gets its route, and becomes one contiguous stream of text.

It is the one accountant. It tokenises once, asks the policy for pipeline and instances, refuses
what can never fit, puts ids in order by position whoever made them, turns them into text, applies
`finish` to every id in order, and closes the request on every instance when it is over. It holds
the deadline of the whole request; each role holds a lease somewhat longer, so that a lost gateway
strands nothing.

Ids past the end of an answer, or of a position that was there before, are dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

from pddrt.engine.tokens import Detokenizer, Tokenizer
from pddrt.env import Env, Timer
from pddrt.errors import BadFrame, BadInput, PeerError
from pddrt.frames import Frame, pack_ids, unpack_ids
from pddrt.kv.memory import KVMemory
from pddrt.netem.net import Connection, LinkSpec, Net, Topology
from pddrt.policy.route import Facts, InstanceFacts, PathFacts, Policy, Route
from pddrt.protocol import Limits, finish
from pddrt.roles.node import Node
from pddrt.trace import Released, Routed
from pddrt.types import SECOND, Ns, Sampling

LEASE_GRACE: Ns = 5 * SECOND
"""By how much a role's lease outlasts the request's deadline at the gateway."""


MAX_LATE = 1000
"""How many answered requests are remembered whose KV is still crossing; a guess may be lost."""


@dataclass(slots=True)
class Capacity:
    """What an instance said of itself, and what it is thought to be doing and to have cached.

    `memory` is a guess at its prefix cache: the same cache, fed with what was sent there, page
    numbers that mean nothing. The instance is not asked; what it finds when it admits decides.
    """

    role: str
    kv_tokens: int
    max_context: int
    bytes_per_token: int
    memory: KVMemory
    requests: int = 0
    tokens: int = 0

    def remember(self, ids: Sequence[int]) -> None:
        """KV of `ids` has been there."""
        if ids and self.memory.reserve("", ids, len(ids)):
            if self.memory.tail(""):
                self.memory.copied("")
            self.memory.keep("", ids)
            self.memory.release("")


@dataclass(slots=True)
class Stream:
    """One request's answer as it grows. `ids` are the prompt's and those passed on, `next` is the
    absolute position of the next one, `tokens` where the longest answer ends.
    """

    request: str
    client: str
    route: Route
    limits: Limits
    ids: list[int]
    text: Detokenizer
    deadline: Timer
    next: int
    tokens: int
    kv_bytes: int
    """What was thought to be lacking at MD."""
    routed: Ns
    main_has_kv: bool = False
    last_maker: str = ""
    early: dict[int, tuple[int, str]] = field(default_factory=dict)


class Gateway(Node):
    def __init__(
        self,
        env: Env,
        net: Net,
        name: str,
        *,
        topology: Topology,
        policy: Policy,
        tokenizer: Tokenizer,
        eos_ids: frozenset[int],
        deadline: Ns,
    ) -> None:
        super().__init__(env, net, name)
        self.topology = topology
        self.policy = policy
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.deadline = deadline
        self.instances: dict[str, Capacity] = {}
        self._expected: tuple[str, ...] = ()
        self._introduced = asyncio.Event()
        self._streams: dict[str, Stream] = {}
        self._late: dict[str, tuple[str, list[int]]] = {}
        """Answered before their main decoder had the KV: which that is, and what it will hold."""

    async def dial(self, peers: Sequence[str]) -> None:
        """Connects to the instances and waits until each has said what it is."""
        self._expected = tuple(peers)
        await super().dial(peers)
        while len(self.instances) < len(peers):
            self._introduced.clear()
            await self._introduced.wait()
        self.instances = {name: self.instances[name] for name in peers}

    def on_hello(self, conn: Connection, frame: Frame) -> None:
        if conn.peer not in self._expected or conn.peer in self.instances:
            raise BadFrame(f"nobody asked {conn.peer} who it is")
        self.instances[conn.peer] = Capacity(
            frame["role"],
            frame["kv_tokens"],
            frame["max_context"],
            frame["bytes_per_token"],
            KVMemory(
                frame["kv_tokens"] // frame["page_tokens"],
                frame["page_tokens"],
                "",
                caching=frame["caching"],
            ),
        )
        self._introduced.set()

    # -- entering ----------------------------------------------------------------------------------

    def on_submit(self, conn: Connection, frame: Frame) -> None:
        """From a client: a text to answer, after the ids of the conversation so far (payload); or,
        `raw`, ids that are the whole prompt.
        """
        request = frame["request"]
        if request in self._streams:
            self._tell_end(conn.peer, request, "rejected", "a request of that id is under way")
            return
        try:
            ids = self._prompt(frame)
        except BadInput as error:
            self._tell_end(conn.peer, request, "rejected", str(error))
            return
        limits = Limits(len(ids), frame["max_tokens"], self.eos_ids)
        if refusal := self._refusal(limits):
            self._tell_end(conn.peer, request, "rejected", refusal)
            return
        facts = self._facts(limits, ids)
        route = self.policy.route(facts)
        kv_bytes = next(facts.lacking(main) for main in facts.mains if main.name == route.main)
        sampling = Sampling(*frame["sampling"])
        self._open(conn.peer, request, route, limits, ids, sampling, kv_bytes)

    def blame(self, conn: Connection, frame: Frame, request: str, detail: str) -> None:
        if frame.kind == "submit":
            self._tell_end(conn.peer, request, "rejected", detail)
        else:
            super().blame(conn, frame, request, detail)

    def _prompt(self, frame: Frame) -> list[int]:
        """The ids of the whole prompt. Ids of earlier turns are taken as they are; `answer` is the
        workload's own answer to the last of them, where it stands in for the model's.
        """
        history = unpack_ids(frame.payload)
        if frame["raw"]:
            return history
        if not history:
            system = [{"role": "system", "content": frame["system"]}] if frame["system"] else []
            return self.tokenizer.chat([*system, {"role": "user", "content": frame["text"]}])
        if frame["answer"] is not None:
            history += self.tokenizer.encode_within(frame["answer"])
        ended = history[-1] in self.eos_ids
        return history + self.tokenizer.follow_up(frame["text"], after_eos=ended)

    def _refusal(self, limits: Limits) -> str | None:
        """Why this request can never be served; None if it can."""
        if not limits.prompt_len:
            return "the prompt is empty"
        for role in ("prefill", "main"):
            if not self._reachable(role):
                return f"no {role} instance can be reached"
        needed = limits.prompt_len + limits.max_tokens
        context = min(i.max_context for i in self.instances.values())
        if needed > context:
            return (
                f"{limits.prompt_len} prompt + {limits.max_tokens} answer tokens are more than "
                f"the model's context of {context}"
            )
        for name, instance in self.instances.items():
            slots = limits.prompt_len if instance.role == "prefill" else limits.kv_tokens
            if slots > instance.kv_tokens:
                return f"{slots} tokens of KV can never fit into the {instance.kv_tokens} of {name}"
        return None

    def _reachable(self, role: str, ids: Sequence[int] = ()) -> list[InstanceFacts]:
        return [
            InstanceFacts(name, i.requests, i.tokens, i.memory.peek(ids))
            for name, i in self.instances.items()
            if i.role == role and name in self.peers
        ]

    def _facts(self, limits: Limits, ids: Sequence[int]) -> Facts:
        prefills, mains = self._reachable("prefill", ids), self._reachable("main", ids)
        paths: dict[tuple[str, str], PathFacts] = {}
        by_link: dict[str, PathFacts] = {}
        for p in prefills:
            for m in mains:
                link = self.topology.link_between(p.name, m.name)
                name = link.name if link else ""
                if name not in by_link:
                    by_link[name] = PathFacts(
                        link.rate if link else None,
                        link.delay if link else 0,
                        self._under_way(link),
                    )
                paths[p.name, m.name] = by_link[name]
        return Facts(
            prompt_tokens=limits.prompt_len,
            bytes_per_token=self.instances[prefills[0].name].bytes_per_token,
            prefills=prefills,
            relays=self._reachable("relay", ids),
            mains=mains,
            paths=paths,
        )

    def _under_way(self, link: LinkSpec | None) -> tuple[int, ...]:
        """What transfers to main decoders still have to carry over `link`, as far as can be known
        here: what was missing when they were routed, less their fair share of the time since.
        """
        if link is None or not link.rate:
            return ()
        streams = [
            s
            for s in self._streams.values()
            if not s.main_has_kv
            and self.topology.link_between(s.route.prefill, s.route.main) is link
        ]
        left = []
        for s in streams:
            share = link.rate * (self.env.now() - s.routed) // (SECOND * len(streams))
            left.append(max(0, s.kv_bytes - share))
        return tuple(left)

    def _open(
        self,
        client: str,
        request: str,
        route: Route,
        limits: Limits,
        ids: list[int],
        sampling: Sampling,
        kv_bytes: int,
    ) -> None:
        now = self.env.now()
        deadline = self.env.call_at(now + self.deadline, self.fail, request, "deadline exceeded")
        stream = Stream(
            request,
            client,
            route,
            limits,
            list(ids),
            Detokenizer(self.tokenizer),
            deadline,
            next=limits.prompt_len,
            tokens=limits.prompt_len + limits.max_tokens,
            kv_bytes=kv_bytes,
            routed=now,
        )
        self._streams[request] = stream
        self._count(stream, 1)
        self.env.trace.emit(
            Routed(
                now,
                request,
                route.pipeline,
                route.prefill,
                route.relay,
                route.main,
                limits.prompt_len,
                limits.max_tokens,
                route.wan_estimate,
                route.reason,
            )
        )
        packed = pack_ids(ids)
        self.post_when_room(client, lambda: True, "accepted", packed, request=request)
        self.post_when_room(
            route.prefill,
            lambda: self._streams.get(request) is stream,
            "prefill",
            packed,
            request=request,
            relay=route.relay,
            main=route.main,
            max_tokens=limits.max_tokens,
            sampling=astuple(sampling),
            lease_ns=self.deadline + LEASE_GRACE,
        )

    def _members(self, stream: Stream) -> list[str]:
        route = stream.route
        return [name for name in (route.prefill, route.relay, route.main) if name]

    def _count(self, stream: Stream, sign: int) -> None:
        for name in self._members(stream):
            self.instances[name].requests += sign
            self.instances[name].tokens += sign * stream.tokens

    # -- the answer --------------------------------------------------------------------------------

    def on_whole(self, conn: Connection, frame: Frame) -> None:
        """A decoder holds the whole KV of this request. If that is over, our `close` may have come
        there before P's offer did, and P may have nothing left to withdraw: say it again.
        """
        request = frame["request"]
        stream = self._streams.get(request)
        if stream is None:
            main, ids = self._late.get(request, ("", []))
            if conn.peer == main:
                self.instances[main].remember(ids)
                del self._late[request]
            self.post(conn.peer, "close", request=request, answered=True)
        elif conn.peer in self._members(stream):
            self.instances[conn.peer].remember(stream.ids[: stream.limits.prompt_len])
            stream.main_has_kv |= conn.peer == stream.route.main

    def on_tokens(self, conn: Connection, frame: Frame) -> None:
        """Ids from whoever made or delivers them, by absolute position."""
        stream = self._streams.get(frame["request"])
        if stream is None:
            return
        if conn.peer not in self._members(stream):
            raise PeerError(f"{conn.peer} has no part in {stream.request}")
        for position, token in enumerate(unpack_ids(frame.payload), frame["start"]):
            if stream.next <= position < stream.tokens:
                stream.early.setdefault(position, (token, frame["source"]))
        self._flush(stream)

    def _flush(self, stream: Stream) -> None:
        """Passes on every id whose turn has come."""
        while stream.next in stream.early:
            token, source = stream.early.pop(stream.next)
            position, first = stream.next, stream.next == stream.limits.prompt_len
            if first:
                now = self.env.now()
                self.env.trace.emit(Released(now, stream.request, now))
                self.instances[stream.route.prefill].remember(stream.ids)
            stream.next += 1
            stream.ids.append(token)
            stream.last_maker = source
            reason = finish(stream.limits, position, token)
            text = "" if reason == "stop" else stream.text.push(token)
            if reason:
                text += stream.text.finish()
            self.post(
                stream.client,
                "answer",
                pack_ids([token]),
                request=stream.request,
                start=position - stream.limits.prompt_len,
                source=source,
                text=text,
            )
            if reason:
                self._close(stream, reason, "")
                return

    # -- ends --------------------------------------------------------------------------------------

    def on_failed(self, conn: Connection, frame: Frame) -> None:
        """From an instance: it cannot go on with this request."""
        stream = self._streams.get(frame["request"])
        if stream is not None and conn.peer in self._members(stream):
            self.fail(stream.request, frame["detail"])

    def on_cancel(self, conn: Connection, frame: Frame) -> None:
        stream = self._streams.get(frame["request"])
        if stream is not None and conn.peer == stream.client:
            self.fail(stream.request, "cancelled by the client")

    def fail(self, request: str, detail: str) -> None:
        if stream := self._streams.get(request):
            self._close(stream, "aborted", detail)

    def _close(self, stream: Stream, reason: str, detail: str) -> None:
        del self._streams[stream.request]
        stream.deadline.cancel()
        self._count(stream, -1)
        self._tell_end(stream.client, stream.request, reason, detail)
        answered = reason in ("stop", "length")
        for name in self._members(stream):
            self.post(name, "close", request=stream.request, answered=answered)
        if answered:
            self._teach(stream)

    def _teach(self, stream: Stream) -> None:
        """P learns the answer, and MD does where it was made elsewhere: hits stay equal."""
        ids = stream.ids[:-1]  # nobody has KV of the last
        learners = [stream.route.prefill]
        if stream.last_maker != "M":
            learners.append(stream.route.main)
        packed = pack_ids(ids)
        for name in learners:
            self.post_when_room(
                name,
                lambda: True,
                "learn",
                packed,
                request=stream.request,
                prompt_tokens=stream.limits.prompt_len,
            )
        self.instances[stream.route.prefill].remember(ids)
        if stream.main_has_kv:
            self.instances[stream.route.main].remember(ids)
        else:
            self._late[stream.request] = stream.route.main, ids
            while len(self._late) > MAX_LATE:
                del self._late[next(iter(self._late))]

    def _tell_end(self, client: str, request: str, reason: str, detail: str) -> None:
        self.post(client, "end", request=request, reason=reason, detail=detail)

    def peer_lost(self, conn: Connection, error: PeerError) -> None:
        for stream in list(self._streams.values()):
            if conn.peer in (*self._members(stream), stream.client):
                self.fail(stream.request, f"{self.name} lost {conn.peer}: {error}")
