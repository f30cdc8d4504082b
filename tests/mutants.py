"""Planted bugs, each switched on by name, to see that the swarm's checkers find them.

Each is a mistake that somebody could make in pddrt, put in by patching one function while a `with`
is open. `scripts/mutants` looks for every one of them; none may survive 200 seeds. Nothing in
pddrt knows of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from pddrt import frames
from pddrt.errors import BadFrame
from pddrt.frames import unpack_ids
from pddrt.kv.memory import KVMemory
from pddrt.messages import KVAssembly, Manifest
from pddrt.policy.admission import Door
from pddrt.protocol import Action, Decode, MainSide, RelaySide, SendIds, State, _Side
from pddrt.roles import gateway
from pddrt.roles.answer import Answer
from pddrt.roles.client import Client
from pddrt.roles.decode import Decoder
from pddrt.roles.gateway import Gateway
from pddrt.roles.instance import Instance
from pddrt.roles.node import Node
from pddrt.roles.receive import Receiver
from pddrt.roles.send import Sender
from pddrt.roles.solo import Solo
from pddrt.roles.transfer import Lane
from pddrt.sched import Scheduler
from pddrt.trace import TokensReceived

Change = Callable[[Callable[..., Any]], Callable[..., Any]]
"""From the function as it is to the one with the bug."""


@dataclass(frozen=True)
class Mutant:
    """`what` is wrong. `patches`: owner, name, change."""

    what: str
    patches: tuple[tuple[Any, str, Change], ...]

    @contextmanager
    def planted(self) -> Iterator[None]:
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in self.patches]
        try:
            for (owner, name, change), (_, _, now) in zip(self.patches, before, strict=True):
                setattr(owner, name, change(now))
            yield
        finally:
            for owner, name, was in before:
                setattr(owner, name, was)


MUTANTS: dict[str, Mutant] = {}


def plant(owner: Any, method: str, what: str) -> Callable[[Change], Change]:
    """Registers a change of `owner.method` under the change's name."""

    def register(change: Change) -> Change:
        name = change.__name__.replace("_", "-")
        MUTANTS[name] = Mutant(what, ((owner, method, change),))
        return change

    return register


def nothing(*_args: Any, **_more: Any) -> None:
    """In place of something that should be done."""


# -- pages -----------------------------------------------------------------------------------------

MUTANTS["freed-under-a-step"] = Mutant(
    "pages are free again while a step may still write into them",
    ((KVMemory, "pin", lambda _pin: nothing), (KVMemory, "unpin", lambda _unpin: nothing)),
)


@plant(Instance, "give_back", "a request that ends in the middle of an answer keeps its pages")
def forgotten_release(give_back: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Instance, request: str) -> None:
        seq = self.sched.sequences.get(request)
        if seq is not None and seq.computed > seq.prompt_len:
            self.sched.drop(request)
        else:
            give_back(self, request)

    return planted


@plant(Sender, "on_close", "a cancel does not reach P")
def cancel_not_heard_by_p(on_close: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Sender, conn: Any, frame: Any) -> None:
        if frame["answered"]:
            on_close(self, conn, frame)

    return planted


@plant(Receiver, "on_close", "a cancel does not reach decoders")
def cancel_not_heard_by_decoders(on_close: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Receiver, conn: Any, frame: Any) -> None:
        if frame["answered"]:
            on_close(self, conn, frame)

    return planted


@plant(KVMemory, "reserve", "a cached prefix is not locked while a request uses it")
def prefix_unlocked_too_early(reserve: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: KVMemory, request: str, *about: Any, **more: Any) -> bool:
        reserved: bool = reserve(self, request, *about, **more)
        if reserved:
            lock, root = self.holding(request).lock, self.cache._root
            self.cache._hold(root)
            self.cache._drop(lock.node)
            lock.node = root
        return reserved

    return planted


@plant(Instance, "keep", "the cache is given ids whose KV was not computed yet")
def kept_before_computed(keep: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Instance, request: str, ids: Any) -> None:
        seq = self.sched.sequences.get(request)
        if seq is not None and self.memory.holds(request):
            room = len(self.memory.holding(request).table) * self.memory.page_tokens
            ids = seq.ids[:room]
        keep(self, request, ids)

    return planted


@plant(Instance, "_copy_tail", "what a hit has of its last page is not copied")
def tail_not_copied(_copy_tail: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Instance, request: str) -> None:
        if self.memory.tail(request):
            self.memory.copied(request)

    return planted


@plant(Instance, "_resume", "a request that was preempted goes on as if its KV were still there")
def resumed_without_its_kv(_resume: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, seq, hit: _resume(self, seq, max(hit, seq.computed))


@plant(Instance, "_roomier", "pages that can be had again wake nobody who waits for them")
def lost_wake_up_for_pages(_roomier: Callable[..., Any]) -> Callable[..., Any]:
    return nothing


# -- transfers -------------------------------------------------------------------------------------


@plant(Sender, "_sendable", "KV is sent before the step that writes it has returned")
def sent_before_its_step(_sendable: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Sender, entry: Any) -> int:
        sendable: int = _sendable(self, entry)
        return len(entry.ids) if sendable and entry.seq.in_step else sendable

    return planted


@plant(Manifest, "objection", "a manifest is taken whatever it says")
def stale_manifest_accepted(_objection: Callable[..., Any]) -> Callable[..., Any]:
    return nothing


MUTANTS["wrong-epoch-accepted"] = Mutant(
    "words and KV of another transfer of the same request are taken for this one's",
    ((Receiver, "_find", lambda _find: lambda self, c, f: self._entries.get(f["request"])),),
)


@plant(KVAssembly, "claim", "KV that was there already is taken once more")
def kv_taken_twice(claim: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: KVAssembly, start: int, end: int) -> None:
        try:
            claim(self, start, end)
        except BadFrame:
            if not 0 <= start <= end <= self.length:
                raise

    return planted


@plant(Lane, "leave", "whoever waits for a place on a path is not told that there is one")
def lost_wake_up_on_a_path(_leave: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Lane, transfer: Any) -> None:
        if transfer in self._waiting:
            self._waiting.remove(transfer)
        elif transfer in self._inside:
            self._inside.remove(transfer)

    return planted


@plant(Receiver, "admitted", "a lease never ends")
def lease_never_fires(admitted: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Receiver, request: str, hit: int) -> None:
        admitted(self, request, hit)
        if (entry := self._entries.get(request)) and entry.lease is not None:
            entry.lease.cancel()

    return planted


@plant(frames, "decode", "a damaged frame is taken as it is")
def checksum_not_checked(decode: Callable[..., Any]) -> Callable[..., Any]:
    def planted(header: Any, payload: Any, checksum: int) -> Any:
        digest = xxhash.xxh3_64(header)
        digest.update(payload)
        return decode(header, payload, digest.intdigest())

    return planted


# -- the handoff -----------------------------------------------------------------------------------


@plant(Decoder, "_go_on", "the main decoder takes the KV of the first id for computed")
def off_by_one_at_the_join(_go_on: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Decoder, entry: Any, ids: Any, kept: int, draws: bool = True) -> None:
        fresh = entry.seq is None
        _go_on(self, entry, ids, kept, draws)
        if fresh and isinstance(entry.side, MainSide) and len(ids) > 1:
            entry.seq.computed += 1

    return planted


@plant(RelaySide, "_hand_over", "the last ids begin with one that was sent before")
def ids_resent(_hand_over: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: RelaySide) -> list[Action]:
        self.sent -= self.sent > 0
        found: list[Action] = _hand_over(self)
        return found

    return planted


@plant(RelaySide, "_hand_over", "the relay sends all but the ids that a running step yields")
def last_id_not_sent(_hand_over: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: RelaySide) -> list[Action]:
        [action] = _hand_over(self)
        assert isinstance(action, SendIds)
        return [replace(action, start=action.start + 1, ids=action.ids[1:] or action.ids)]

    return planted


@plant(Decoder, "_send_ids", "a piece of catch-up gets lost")
def catch_up_piece_dropped(_send_ids: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Decoder, entry: Any, action: SendIds) -> None:
        if not action.last:
            self.post = nothing  # type: ignore[method-assign]
        try:
            _send_ids(self, entry, action)
        finally:
            self.__dict__.pop("post", None)

    return planted


@plant(Gateway, "_let_follow", "one of the ids to follow gets lost")
def follow_ids_dropped(_let_follow: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Gateway, stream: Any, start: int, ids: Any) -> None:
        if start - stream.limits.prompt_len != 3:
            _let_follow(self, stream, start, ids)

    return planted


@plant(MainSide, "_catch_up", "the main decoder keeps ids of its own that are not the answer's")
def own_ids_not_given_up(_catch_up: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: MainSide) -> list[Action]:
        if len(self.ids) >= len(self.told):
            self.agreed = len(self.told)
            return []
        found: list[Action] = _catch_up(self)
        return found

    return planted


@plant(Answer, "_choose", "an id is passed on whatever it follows")
def chain_not_checked(_choose: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Answer, candidates: list[Any]) -> Any:
        return next((c for c in candidates if self.sole in ("", c.source)), None)

    return planted


@plant(Decoder, "_go_on", "the seed of the noise is lost at the handoff")
def seed_lost_at_the_handoff(_go_on: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Decoder, entry: Any, *about: Any, **more: Any) -> None:
        _go_on(self, entry, *about, **more)
        if isinstance(entry.side, MainSide) and entry.seq.sampling is not None:
            entry.seq.sampling = replace(entry.seq.sampling, seed=1)

    return planted


@plant(Decoder, "_go_on", "the main decoder does not know what may not be drawn yet")
def bans_lost_at_the_handoff(_go_on: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Decoder, entry: Any, *about: Any, **more: Any) -> None:
        _go_on(self, entry, *about, **more)
        if isinstance(entry.side, MainSide):
            entry.seq.limits = None

    return planted


@plant(_Side, "_decode", "an answer that ends with its first id goes on")
def first_id_does_not_end(_decode: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Any) -> list[Action]:
        self.state = State.DECODING
        return [Decode(tuple(self.ids), kept=len(self.ids))]

    return planted


# -- the gateway, the client, peers ----------------------------------------------------------------


@plant(Client, "on_answer", "the client takes an id that it has had")
def emitted_twice(_on_answer: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Client, conn: Any, frame: Any) -> None:
        request, ids, start = frame["request"], unpack_ids(frame.payload), frame["start"]
        call = self._calls.get(request)
        if call and not call.reason:
            call.output.extend(ids)
            about = (request, start, start + len(ids), frame["source"], tuple(ids), frame["text"])
            self.env.trace.emit(TokensReceived(self.env.now(), *about))

    return planted


@plant(Gateway, "_pass_on", "the deadline runs only until the first id is out")
def deadline_in_one_state_only(_pass_on: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Gateway, stream: Any, passed: Any) -> None:
        stream.deadline.cancel()
        _pass_on(self, stream, passed)

    return planted


@plant(gateway, "attempt_name", "a further attempt has the name of the first")
def attempts_of_one_name(_attempt_name: Callable[..., Any]) -> Callable[..., Any]:
    return lambda request, _number: request


@plant(gateway, "rest_of", "a further attempt may make as many ids as the first")
def budget_as_at_first(_rest_of: Callable[..., Any]) -> Callable[..., Any]:
    def planted(limits: Any, sampling: Any, made: int) -> Any:
        left, sampling = _rest_of(limits, sampling, made)
        return replace(left, max_tokens=limits.max_tokens), sampling

    return planted


@plant(Gateway, "begin", "a further attempt does not know the last id that the client has")
def attempt_lacks_an_id(begin: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Gateway, stream: Any, *about: Any) -> None:
        answer, made = stream.answer, stream.answer.ids
        answer.ids = made[: max(stream.limits.prompt_len, len(made) - 1)]
        try:
            begin(self, stream, *about)
        finally:
            answer.ids = made

    return planted


@plant(Receiver, "peer_lost", "a decoder goes on waiting for a peer that was lost")
def peer_lost_unheard(_peer_lost: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, conn, error: self.reports.forget(conn.peer)


@plant(Node, "redial", "nobody looks for a peer that was lost")
def never_redialled(_redial: Callable[..., Any]) -> Callable[..., Any]:
    return nothing


@plant(Scheduler, "abandon", "a step that failed counts as one that did not")
def failed_step_believed(_abandon: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Scheduler, batch: Any) -> list[str]:
        for span in batch.spans:
            seq = self.sequences.get(span.request)
            if seq is not None and seq.in_step:
                seq.in_step = seq.coming = False
                seq.computed = min(span.end, len(seq.ids) - 1)
        return []

    return planted


def _shown_again(begin_again: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Answer) -> None:
        self.ids = self.ids[: self.limits.prompt_len]
        begin_again(self)
        self._chain = 0

    return planted


MUTANTS["double-emit-after-retry"] = Mutant(
    "a further attempt shows the client what it has had, and the client takes it",
    (
        (Answer, "begin_again", _shown_again),
        (Client, "on_answer", emitted_twice),
    ),
)


# -- overload, strangers, wake-ups -----------------------------------------------------------------


@plant(Door, "left", "who was refused something still counts as under way")
def counted_for_ever(left: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Door, request: str) -> None:
        if request not in self.waiting:
            left(self, request)

    return planted


@plant(Solo, "begun", "who has begun is still thought to wait")
def begun_is_late(_begun: Callable[..., Any]) -> Callable[..., Any]:
    return nothing


MUTANTS["anybodys-mistake-counts"] = Mutant(
    "a frame that is wrong ends the request it names, whoever sent it",
    tuple((kind, "heeds", lambda _: lambda *_: True) for kind in (Gateway, Solo, Sender, Receiver)),
)


@plant(Instance, "wake", "the step loop is not woken while it waits for something to do")
def lost_wake_up_of_the_step_loop(wake: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Instance) -> None:
        if len(self.sched.sequences) != 1:
            wake(self)

    return planted
