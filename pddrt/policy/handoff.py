"""How a relay decoder hands a request over: when to send which ids, and when to stop.

A handoff policy is a class with `decide(facts) -> Decision`, asked when the main decoder holds the
KV, and again whenever it has caught up with a piece. It sees `Facts` and nothing else, so that it
can be tried on paper; times in them may be stale, or 0 where nobody knows yet.

    Finish   send all ids, stop decoding, free the request
    Piece    send so many ids, decode on; asked again when the main decoder has computed their KV
    Follow   let the main decoder decode too, until it is first or the bound is reached

- `OneShot`: Finish. The gap is 2 d + the extend over everything + the rest of a running step.
- `CatchUp`: pieces of at most `max_ids_per_round` while more than `threshold` ids are lacking; then
  Finish. With acknowledged rounds over a one-way delay d, an extend cost a + b k and the relay's
  step time tau, a round over k ids takes 2 d + a + b k, in which the relay makes 1 / tau ids a
  second: what is lacking tends to k* = (2 d + a) / (tau - b), and its distance from there shrinks
  to b / tau of itself in a round. It never gets below k*, and for b >= tau it grows: so there are
  at most `max_rounds`, and two in a row that did not help are the last.
- `Adaptive`: one-shot up to a threshold, catch-up above it, down to the threshold. The relay's load
  moves it: threshold / (1 - pressure), where pressure is the larger of its memory's and its batch's
  occupancy, and 1 where anybody waits for memory: a full relay hands over at once.
- `Overlap`: Follow where the main decoder steps faster, so that it can pass the relay within the
  bound of max_ids_per_round * max_rounds ids; else as `CatchUp`.

Facts from the theory above are functions here, for policies to use: `round_time`, `equilibrium`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from pddrt.policy.route import no_text
from pddrt.types import SECOND, Ns


@dataclass(frozen=True, slots=True)
class Facts:
    """What a relay decoder knows of one handoff.

    `lacking`: ids made that the main decoder has not been sent, the one that a running step will
    yield among them. `before`: what was lacking at the decisions before this one. `left`: ids that
    the answer may still have. `step`: the relay's step time; `main_step` and `main_token`: the main
    decoder's, and what each further token adds to it; `round_trip`: two delays of the path. Times
    in ns, 0 where they are not known. `pressure`: 0 to 1, see the module.
    """

    lacking: int
    before: tuple[int, ...]
    left: int
    step: Ns
    main_step: Ns
    main_token: Ns
    round_trip: Ns
    pressure: float

    @property
    def rounds(self) -> int:
        """Pieces sent and acknowledged so far."""
        return len(self.before)


@dataclass(frozen=True, slots=True)
class Finish:
    """Send everything and stop; `reason` is for people."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """Send the next `ids` ids and decode on. One id always stays for the end (that which a running
    step will yield, or else the newest): where there is no other, this finishes.
    """

    ids: int


@dataclass(frozen=True, slots=True)
class Follow:
    """Let the main decoder decode too; stop after `most` more ids if it is not first by then."""

    most: int


Decision = Finish | Piece | Follow


class Policy(Protocol):
    def decide(self, facts: Facts) -> Decision: ...


# -- what follows from the facts -------------------------------------------------------------------


def round_time(facts: Facts, ids: int) -> Ns:
    """How long a round over `ids` ids should take: 2 d + a + b k, where `main_step` is a + b."""
    return facts.round_trip + max(0, facts.main_step - facts.main_token) + facts.main_token * ids


def equilibrium(facts: Facts) -> int | None:
    """k*, the ids that catch-up cannot get below (see the module), rounded up. None where it does
    not converge, or nobody knows.
    """
    if not facts.step or not facts.main_step or facts.main_token >= facts.step:
        return None
    return -(-round_time(facts, 0) // (facts.step - facts.main_token))


PATIENCE: Ns = SECOND
"""The least time that an answer to a piece is waited for."""


def patience(facts: Facts, ids: int) -> Ns:
    """After how long the answer to a piece of `ids` ids is overdue, and the relay finishes: four
    rounds as they should be, but not less than PATIENCE.
    """
    return max(PATIENCE, 4 * round_time(facts, ids))


# -- the policies ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OneShot:
    def decide(self, facts: Facts) -> Decision:
        return Finish("one-shot")


@dataclass(frozen=True, slots=True)
class CatchUp:
    threshold: int = 64
    max_ids_per_round: int = 32
    max_rounds: int = 8

    def decide(self, facts: Facts) -> Decision:
        if facts.lacking <= self.threshold:
            return Finish("within the threshold")
        if facts.rounds >= self.max_rounds:
            return Finish("the last round")
        if facts.rounds >= 2 and facts.lacking >= facts.before[-1] >= facts.before[-2]:
            return Finish("does not converge")
        return Piece(self.max_ids_per_round)


@dataclass(frozen=True, slots=True)
class Adaptive(CatchUp):
    def decide(self, facts: Facts) -> Decision:
        if facts.pressure >= 1:
            return Finish("the relay is full")
        if facts.lacking * (1 - facts.pressure) <= self.threshold:
            return Finish("within the threshold at the relay's load")
        return CatchUp.decide(self, facts)


@dataclass(frozen=True, slots=True)
class Overlap(CatchUp):
    def decide(self, facts: Facts) -> Decision:
        if facts.rounds or not self._passes(facts):
            return CatchUp.decide(self, facts)
        return Follow(self.most)

    @property
    def most(self) -> int:
        """Ids that both may make: as many as catch-up could send."""
        return self.max_ids_per_round * self.max_rounds

    def _passes(self, facts: Facts) -> bool:
        """Whether the main decoder will be first within the bound.

        It begins behind by what the relay makes in the round over what is lacking, and gains 1 -
        main_step / step of an id on each of the relay's. Where nobody knows its step, it may try.
        """
        if not facts.step or not facts.main_step:
            return True
        gain = facts.step - facts.main_step
        return gain > 0 and round_time(facts, facts.lacking) <= gain * self.most


MODES: Mapping[str, type[OneShot] | type[CatchUp]] = {
    "one-shot": OneShot,
    "catch-up": CatchUp,
    "adaptive": Adaptive,
    "overlap": Overlap,
}
"""The names that a scenario knows."""


@dataclass(frozen=True, slots=True)
class Custom:
    """A policy of the user's, under the name that the scenario has for it."""

    name: str
    decide: Callable[[Facts], Decision]


def objection(decision: Decision) -> str:
    """What is wrong with a decision; nothing, if it is one."""
    match decision:
        case Piece(count) | Follow(count) if type(count) is not int or count < 1:
            kind = type(decision).__name__
            return f"found {kind}({count!r}); allowed: a whole number of ids from 1"
        case Finish(reason) if wrong := no_text(reason):
            return f"found Finish of {wrong}"
    return ""


def name_of(policy: Policy) -> str:
    """As a scenario would name it."""
    if isinstance(policy, Custom):
        return policy.name
    kind = type(policy)
    known = (name for name, mode in MODES.items() if mode is kind)
    return next(known, f"{kind.__module__}:{kind.__qualname__}")
