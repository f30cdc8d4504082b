"""The seam measured: what one handoff was, and what it cost the others on the main decoder.

Fed with events, like `metrics`, which owns it. A `Seam` is one request's handoff: what the policy
was told and expected, what crossed, what was recomputed. `MainSteps` takes the gaps between the
tokens of requests that decode on a main decoder, and tells those in which it extended over
somebody else's handed ids from the quiet ones. They are times between steps on that instance; what
the way to the client adds is none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pddrt import trace as ev
from pddrt.distribution import Distribution
from pddrt.trace import Event
from pddrt.types import Ns


@dataclass(slots=True)
class Seam:
    """`lacking`: ids that the main decoder had not, at each decision. `expected`: what catch-up was
    expected not to get below, when it began. `wire_bytes`: frames with ids, header and all.
    """

    policy: str = ""
    expected: int | None = None
    lacking: list[int] = field(default_factory=list)
    ids_per_round: list[int] = field(default_factory=list)
    wire_bytes: int = 0
    extend_tokens: int = 0
    went_back: int = 0
    """Ids that the main decoder made and gave up, where both decoded."""
    pieces: int = 0
    """Rounds that the relay did not end with."""
    followed: bool = False
    ended: str = ""
    """Why the relay stopped; nothing where the answer ended before."""
    others_itl_max: Ns | None = None
    """The largest gap of another request on the main decoder that one of its extends lay in."""

    @property
    def mode(self) -> str:
        """What really happened, whatever the policy is called."""
        if self.followed:
            return "overlap"
        return "catch-up" if self.pieces else "one-shot"

    @property
    def rounds(self) -> int:
        """Frames with ids that were sent."""
        return len(self.ids_per_round)

    @property
    def ids(self) -> int:
        return sum(self.ids_per_round)

    def update(self, event: Event) -> None:
        match event:
            case ev.HandoffBegan():
                self.policy, self.expected = event.policy, event.expected
                self.lacking.append(event.lacking)
                self.followed = event.decision == "follow"
            case ev.HandoffCaughtUp():
                self.lacking.append(event.made - event.end)
            case ev.HandoffSent():
                self.ids_per_round.append(event.end - event.start)
                self.wire_bytes += event.bytes
                self.ended = event.reason if event.last else self.ended
                self.followed |= event.follows
                self.pieces += not (event.last or event.follows)
            case ev.HandoffEnded():
                self.ended = event.reason
            case ev.HandoffTaken():
                self.extend_tokens += event.extend_tokens
                self.went_back += event.back


@dataclass(slots=True)
class _Decoding:
    """A request that decodes on a main decoder; what happened since its last token there."""

    instance: str
    last: Ns
    beside: set[str] = field(default_factory=set)
    """Others that were extended."""
    extended: bool = False
    """It was itself."""


class MainSteps:
    """Gaps between tokens made by main decoders: `quiet`, and `beside` an extend for another."""

    def __init__(self, prompt_len: Callable[[str], int | None]) -> None:
        """`prompt_len`: of a request; None for what is none (a lesson)."""
        self._prompt_len = prompt_len
        self._running: dict[str, list[str]] = {}
        self._decoding: dict[str, _Decoding] = {}
        self.quiet = Distribution()
        self.beside = Distribution()
        self.worst: dict[str, Ns] = {}
        """By request that was extended: the largest gap of another beside it."""

    def began(self, e: ev.StepBegan) -> None:
        extended = []
        for owner, start, end in e.spans:
            length = self._prompt_len(owner) if end - start > 1 else None
            if length is not None and start >= length:
                extended.append(owner)
        self._running[e.instance] = extended

    def ended(self, e: ev.Step) -> None:
        extended = self._running.pop(e.instance, [])
        for request, now in self._decoding.items() if extended else ():
            if now.instance == e.instance:
                now.extended |= request in extended
                now.beside.update(other for other in extended if other != request)

    def made(self, e: ev.TokensMade) -> None:
        before = self._decoding.get(e.request)
        self._decoding[e.request] = _Decoding(e.instance, e.t)
        if before is None:
            return
        gap = e.t - before.last
        for other in before.beside:
            self.worst[other] = max(gap, self.worst.get(other, 0))
        if before.beside:
            self.beside.add(gap)
        elif not before.extended:
            self.quiet.add(gap)

    def stopped(self, request: str) -> None:
        """It is over there, or has to wait."""
        self._decoding.pop(request, None)

    def forget(self, request: str) -> None:
        """Nothing will be heard of it any more."""
        self.stopped(request)
        self.worst.pop(request, None)
