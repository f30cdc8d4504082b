"""The guard behind each row of test_failures' table, and what is seen when it is taken out.

A removal patches one function, as `mutants` do; then at least one of the row's own tests must go
red, or the row is only a name. Some rows have several guards, each with its removal.

    python -m tests.guards            all rows, one process a removal
    python -m tests.guards F9 F21     some
    python -m tests.guards --json

Exit: 0 every removal was noticed, 1 one was not, 2 no such row.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pddrt import messages, verify
from pddrt import trace as ev
from pddrt.deployment import Deployment
from pddrt.engine.model import ModelEngine
from pddrt.kv import radix, trie
from pddrt.kv.memory import KVMemory
from pddrt.kv.radix import RadixCache
from pddrt.messages import KVAssembly
from pddrt.metrics import Recorder
from pddrt.netem.flow import Direction
from pddrt.netem.link import Link
from pddrt.netem.queues import Fair
from pddrt.policy import route
from pddrt.policy.route import Facts
from pddrt.roles.answer import Answer, StopText
from pddrt.roles.gateway import Gateway
from pddrt.roles.outlook import Capacity
from pddrt.roles.prefill import Prefill
from pddrt.roles.receive import Receiver
from pddrt.roles.send import Sender
from pddrt.roles.transfer import Lane
from pddrt.types import SECOND, US, Drawn, Ns

from . import test_failures
from .mutants import MUTANTS, Change, Mutant, nothing

COMMAND = ("-m", "tests.guards")
LIMIT_S = 240
"""Wall time for one row's tests; a removal that makes them hang is noticed, too."""

_ENTRY = re.compile(r"^(?P<row>[FE]\d+)? .*?(?P<module>test_\w+)\.(?P<test>test_\w+)$", re.M)


def rows() -> dict[str, list[str]]:
    """By row its tests, as pytest calls them."""
    found: dict[str, list[str]] = {}
    row = ""
    for entry in _ENTRY.finditer(test_failures.__doc__ or ""):
        row = entry["row"] or row
        found.setdefault(row, []).append(f"tests/{entry['module']}.py::{entry['test']}")
    return found


REMOVALS: dict[str, dict[str, Mutant]] = {}
"""By row and name."""


def take_out(row: str, owner: Any, name: str, what: str) -> Callable[[Change], Change]:
    """Registers what is put in place of `owner.name`."""

    def register(change: Change) -> Change:
        called = change.__name__.strip("_").replace("_", "-")
        REMOVALS.setdefault(row, {})[called] = Mutant(what, ((owner, name, change),))
        return change

    return register


def same(row: str, *names: str) -> None:
    """The guard is one that a planted bug of `mutants` takes out."""
    for name in names:
        REMOVALS.setdefault(row, {})[name] = MUTANTS[name]


def everywhere(function: Callable[..., Any], change: Change) -> tuple[tuple[Any, str, Change], ...]:
    """Patches of `function` in every module of ours that has imported it."""
    name = function.__name__
    owners = [m for n, m in sys.modules.items() if n.startswith("pddrt.")]
    return tuple((m, name, change) for m in owners if getattr(m, name, None) is function)


same("F1", "wrong-epoch-accepted", "stale-manifest-accepted")
same("F3", "lease-never-fires")


@take_out("F3", Prefill, "on_prefill", "P has no lease")
def no_lease_on_p(on_prefill: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Prefill, conn: Any, frame: Any) -> None:
        on_prefill(self, conn, frame)
        if entry := self._entries.get(frame["request"]):
            entry.lease.cancel()

    return planted


same("F4", "cancel-not-heard-by-p", "cancel-not-heard-by-decoders")
same("F6", "deadline-in-one-state-only")


@take_out("F6", Gateway, "_enter", "a request has no deadline until P has begun it")
def deadline_from_prefill_on(_enter: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Gateway, client: str, frame: Any) -> None:
        _enter(self, client, frame)
        if stream := self._streams.get(frame["request"]):
            stream.deadline.cancel()

    return planted


@take_out("F7", RadixCache, "unlock", "the pages of a hit stay locked when the request has ended")
def hit_never_unlocked(_unlock: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: RadixCache, lock: Any) -> None:
        del self._locks[lock.number]

    return planted


@take_out("F7", KVMemory, "keep", "what the cache has got of a request counts as its own still")
def kept_and_freed(keep: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: KVMemory, request: str, ids: Any) -> int:
        taken: int = keep(self, request, ids)
        self.holding(request).own += taken
        return taken

    return planted


same("F8", "never-redialled")
same("F9", "cancel-not-heard-by-p", "cancel-not-heard-by-decoders", "lost-wake-up-for-pages")


@take_out("F11", Sender, "_cancel", "a decoder is not told that P has given a transfer up")
def withdrawn_without_a_word(_cancel: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Sender, entry: Any, transfer: Any, word: str = "withdraw") -> None:
        self.post = nothing  # type: ignore[method-assign]
        try:
            _cancel(self, entry, transfer, word)
        finally:
            del self.__dict__["post"]

    return planted


@take_out("F13", Sender, "_expect_answer", "nobody waits for the answer to an offer")
def silence_is_an_answer(_expect_answer: Callable[..., Any]) -> Callable[..., Any]:
    return nothing


@take_out("F14", Prefill, "admitted", "MD is offered a request before RLD has admitted it")
def offered_to_both_at_once(admitted: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Prefill, request: str, hit: int) -> None:
        admitted(self, request, hit)
        entry = self._entries.get(request)
        if entry and entry.relay and entry.main and not entry.going_to(entry.main):
            self._begin_transfer(entry, entry.main)

    return planted


@take_out("F16", Sender, "on_noted", "who queues for memory counts as silent")
def queueing_is_silence(_on_noted: Callable[..., Any]) -> Callable[..., Any]:
    return nothing


@take_out("F16", Receiver, "on_offer", "the lease runs while a request waits for memory")
def lease_while_it_queues(on_offer: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Receiver, conn: Any, frame: Any) -> None:
        on_offer(self, conn, frame)
        entry = self._entries.get(frame["request"])
        if entry is not None and not entry.admitted:
            due = self.env.now() + self.lease
            self.env.call_at(due, self.fail, entry.request, "lease expired")

    return planted


same("F18", "kv-taken-twice")


@take_out("F18", KVAssembly, "claim", "KV is taken in one order only")
def in_one_order_only(claim: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: KVAssembly, start: int, end: int) -> None:
        if start != self.prefix:
            raise messages.BadFrame("not the next")
        claim(self, start, end)

    return planted


@take_out("F20", Gateway, "_tell_end", "who cannot be routed is not told")
def refused_without_a_word(_tell_end: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Gateway, client: str, request: str, reason: str, *about: Any) -> None:
        if reason != "rejected":
            _tell_end(self, client, request, reason, *about)

    return planted


same("F21", "sent-before-its-step")


@take_out("F22", Deployment, "start", "nobody waits until an engine has started")
def engines_start_late(start: Callable[..., Any]) -> Callable[..., Any]:
    async def planted(self: Deployment) -> None:
        for instance in self.instances:
            starting = instance.engine.start()
            instance.engine.start = _at_once  # type: ignore[method-assign]
            self.env.spawn(starting, f"{instance.name} starts late")
        await start(self)

    return planted


async def _at_once() -> None:
    """Starts nothing."""


same("F24", "stale-manifest-accepted")


@take_out("F24", ModelEngine, "convert_kv", "KV of another dtype is taken as it is")
def not_converted(_convert_kv: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, payload, dtype: payload


@take_out("F25", trie, "_digest", "digests differ from process to process")
def digest_by_hash(_digest: Callable[..., Any]) -> Callable[..., Any]:
    return lambda data: (hash(data) % (1 << 64)).to_bytes(16, "big")


@take_out("F25", radix, "prefix_digest", "a page's digest says nothing of what is before it")
def digest_not_chained(prefix_digest: Callable[..., Any]) -> Callable[..., Any]:
    def planted(fingerprint: str, page_tokens: int, ids: Sequence[int]) -> str:
        last = (len(ids) - 1) // page_tokens * page_tokens
        found: str = prefix_digest(fingerprint, page_tokens, ids[max(0, last) :])
        return found

    return planted


REMOVALS["F26"] = {
    "hit-not-held": Mutant(
        "a locked hit can be evicted",
        ((RadixCache, "_hold", lambda _: nothing), (RadixCache, "_drop", lambda _: nothing)),
    )
}


@take_out("F26", RadixCache, "lock", "nobody looks whether a hit is still there when it is locked")
def locked_unseen(_lock: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, hit, owner: self._new_lock(owner, hit.node, hit.tail_node)


same("F28", "tail-not-copied")


@take_out("F28", trie.Node, "longest", "of a partial page only all of its tokens count")
def partial_page_all_or_nothing(longest: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: trie.Node, rest: bytes) -> tuple[trie.Node | None, int]:
        node, tokens = longest(self, rest)
        return node, len(node.key) // trie.ID_BYTES if node else tokens

    return planted


same("F29", "off-by-one-at-the-join")


@take_out("F29", KVAssembly, "__init__", "KV of the first id is waited for, too")
def one_more_position(init: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, length: init(self, length + 1)


@take_out("F30", verify, "diverges", "rounding counts as a mistake")
def no_near_ties(diverges: Callable[..., Any]) -> Callable[..., Any]:
    def planted(row: Any, token: int, sampling: Any, at: int, eps: float, *more: Any) -> Any:
        return diverges(row, token, sampling, at, eps / 8, *more)

    return planted


def _one_more(finish: Callable[..., Any]) -> Callable[..., Any]:
    def planted(limits: Any, position: int, token: int) -> Any:
        return finish(replace(limits, max_tokens=limits.max_tokens + 1), position, token)

    return planted


REMOVALS["F32"] = {
    "one-token-more": Mutant(
        "an answer may have one token more", everywhere(messages.finish, _one_more)
    )
}


def _not_the_first(finish: Callable[..., Any]) -> Callable[..., Any]:
    def planted(limits: Any, position: int, token: int) -> Any:
        first = position == limits.prompt_len and limits.max_tokens > 1
        return None if first else finish(limits, position, token)

    return planted


REMOVALS["F33"] = {
    "first-id-never-ends": Mutant(
        "the first id is not looked at", everywhere(messages.finish, _not_the_first)
    )
}


@take_out("F34", StopText, "push", "a stop string counts only within what comes at once")
def stop_state_forgotten(push: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: StopText, text: str, counts: bool = True) -> str:
        self._matched = [0] * len(self._stop)
        found: str = push(self, text, counts)
        return found

    return planted


@take_out("F36", Receiver, "_deliver", "what P said of the first id is not passed on")
def first_logprobs_lost(_deliver: Callable[..., Any]) -> Callable[..., Any]:
    def planted(
        self: Receiver, entry: Any, at: int, drawn: Drawn, *about: Any, **more: Any
    ) -> None:
        _deliver(self, entry, at, Drawn(drawn.token, None), *about, **more)

    return planted


same("F38", "seed-lost-at-the-handoff")


@take_out("F39", Answer, "take", "ids are taken in the order in which they come")
def position_not_looked_at(take: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Answer, _start: int, drawn: Any, source: str, _after: int) -> Iterator[Any]:
        yield from take(self, self.next, drawn, source, self._chain)

    return planted


same("F41", "resumed-without-its-kv")


@take_out("F42", Receiver, "_find", "whoever names the epoch speaks for a request")
def any_prefill_instance(_find: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Receiver, conn: Any, frame: Any) -> Any:
        entry = self._entries.get(frame["request"])
        return entry if entry and entry.manifest.epoch == frame["epoch"] else None

    return planted


@take_out("F43", Recorder, "_update", "who is admitted a second time is stamped again")
def stamped_again(update: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Recorder, record: Any, event: Any) -> None:
        if isinstance(event, ev.Admitted):
            for stamps in (record.admitted, record.hits):
                stamps.pop(event.instance, None)
        update(self, record, event)

    return planted


def _by_hit(_cheapest: Callable[..., Any]) -> Callable[..., Any]:
    return lambda instances: max(instances, key=lambda i: i.hit)


REMOVALS["F45"] = {
    "affinity-alone": Mutant(
        "who has most of a prompt gets it, whatever its load", everywhere(route.cheapest, _by_hit)
    ),
    "unseen-does-not-count": Mutant(
        "what was sent since the last report does not count",
        ((Capacity, "tokens", lambda _: property(lambda self: self.said.tokens)),),
    ),
}


@take_out("F46", Lane, "enter", "every transfer goes at once")
def no_places(_enter: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, transfer: True


@take_out("F47", Facts, "lacking", "the whole prompt counts, whatever of it is cached")
def whole_prompt_counts(_lacking: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, main: self.prompt_tokens * self.bytes_per_token


# -- network emulators -----------------------------------------------------------------------------


@take_out("E1", Link, "_finish", "each write is rounded up to a microsecond")
def rounded_up_by_write(_finish: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Link, finish: Ns) -> None:
        _finish(self, finish)
        self._tick = (finish + US) << 32

    return planted


@take_out("E2", Fair, "take", "each write waits out the delay of the one before it")
def delay_by_write(take: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Fair) -> Any:
        flow, item = take(self)
        flow.due += SECOND if flow.due else 0
        return flow, item

    return planted


@take_out("E3", Direction, "send_buffer", "a stream may queue whatever it likes")
def no_bound(_send_buffer: Any) -> Any:
    return property(lambda self: 64 << 20)


@take_out("E4", Link, "cancel", "what is queued when a stream ends is sent all the same")
def cancel_leaves_it_queued(_cancel: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, now, flow: 0


@take_out("E5", Fair, "take", "an item may overtake the one before it")
def jitter_reorders(take: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Fair) -> Any:
        flow, item = take(self)
        flow.due = 0
        return flow, item

    return planted


@take_out("E6", Fair, "need", "each flow gets the whole rate")
def one_cap_each(need: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Fair) -> int | None:
        left = need(self)
        return None if left is None else left // max(1, self._flows)

    return planted


@take_out("E7", Link, "set_rate", "a new rate holds when the old queue is empty")
def rate_waits_for_the_queue(set_rate: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Link, now: Ns, rate: int | None) -> None:
        self._to(now)
        if not self.active_flows:
            set_rate(self, now, rate)

    return planted


@take_out("E8", Direction, "send_buffer", "no more is on its way than goes out between two timers")
def one_load_at_a_time(_send_buffer: Any) -> Any:
    return property(lambda self: 64 << 10)


@take_out("E9", Link, "_finish", "each write begins a little after the one before it has ended")
def drifts(_finish: Callable[..., Any]) -> Callable[..., Any]:
    def planted(self: Link, finish: Ns) -> None:
        _finish(self, finish)
        self._tick += 1 << 32

    return planted


# -- running ---------------------------------------------------------------------------------------


def try_one(row: str, name: str) -> tuple[bool, str]:
    """Whether the row's tests notice that this guard is gone, and which of them; in a process of
    its own, since it patches ours.
    """
    command = [sys.executable, *COMMAND, "--planted", row, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return True, f"they hang ({LIMIT_S} s)"
    red = re.findall(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, re.M)
    if done.returncode == 1 and red:
        return True, red[0]
    return False, (done.stdout + done.stderr).strip().splitlines()[-1] if done.returncode else ""


def _planted(row: str, name: str) -> int:
    import pytest

    with REMOVALS[row][name].planted():
        quietly = [
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "--tb=no",
            "-o",
            "addopts=",
        ]
        return int(pytest.main([*quietly, "-rfE", *rows()[row]]))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.guards", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--planted", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    options = parser.parse_args(arguments)
    if options.planted:
        return _planted(*options.planted)
    if unknown := [row for row in options.rows if row not in REMOVALS]:
        print(f"found {', '.join(unknown)}; allowed: {', '.join(REMOVALS)}", file=sys.stderr)
        return 2
    results: dict[str, dict[str, Any]] = {}
    missed = []
    for row in options.rows or REMOVALS:
        for name, removal in REMOVALS[row].items():
            noticed, by = try_one(row, name)
            results.setdefault(row, {})[name] = {"noticed": noticed, "by": by}
            missed += [] if noticed else [f"{row} {name}"]
            if not options.json:
                print(f"{row:<4} {name:<30} {by if noticed else 'NOT NOTICED ' + by}", flush=True)
                print(f"{'':<35} {removal.what}")
    if options.json:
        print(json.dumps({"rows": results, "missed": missed}))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
