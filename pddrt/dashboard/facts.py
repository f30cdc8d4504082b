"""What the dashboard shows of a run under way: one immutable `Snapshot`, and what it is made of.

What a request is doing is one of its *phases*, which follow one another, as its client feels them:

    queue     at the gateway, or waiting for P
    prefill   P computes the prompt
    wait      the first token is made, but no decoder holds the KV yet; or its memory was lost again
    relay     RLD decodes
    handoff   RLD has stopped, and the client has no token of MD yet
    main      MD decodes
    alone     a prefill instance decodes by itself (policy colocated)

KV on its way to a decoder is beside these: a wire, which may last through several of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pddrt.types import Ns

Phase = Literal["queue", "prefill", "wait", "relay", "handoff", "main", "alone"]
DECODES: Mapping[str, Phase] = {"P": "alone", "R": "relay", "M": "main"}
Span = tuple[Phase, Ns, Ns | None]

ORDERS = ("arrival", "TTFT", "duration")
"""Of rows; the latter two with the longest first."""


@dataclass(frozen=True, slots=True)
class WireView:
    """KV to `dst`: `share` of what it lacked has arrived, at `rate` bytes/s (None: too early to
    tell). `ended`: None while under way.
    """

    dst: str
    to_main: bool
    began: Ns
    ended: Ns | None
    share: float
    rate: float | None
    bytes: int
    in_flight: int
    cancelled: bool


@dataclass(frozen=True, slots=True)
class RequestView:
    """`spans`: phases, (phase, from, to), the last without end while under way. `made`: tokens that
    the client got, by maker. `marks`: when something went wrong with it. `rounds`: when ids went to
    the main decoder, the latest of `sends` times; `handed`: how many ids. `hits`: tokens that each
    instance had cached. `prompt`: its beginning.
    """

    id: str
    prompt: str
    pipeline: str
    path: tuple[str | None, str | None, str | None]
    sent: Ns
    ended: Ns | None
    reason: str
    spans: tuple[Span, ...]
    wires: tuple[WireView, ...]
    marks: tuple[Ns, ...]
    rounds: tuple[Ns, ...]
    sends: int
    handed: int
    prompt_tokens: int
    hits: tuple[tuple[str, int], ...]
    max_tokens: int
    made: tuple[tuple[str, int], ...]
    ttft: Ns | None
    tpot: Ns | None
    attempts: int
    why: str

    @property
    def got(self) -> int:
        return sum(count for _, count in self.made)

    @property
    def phase(self) -> Phase:
        return self.spans[-1][0]


@dataclass(frozen=True, slots=True)
class InstanceView:
    """`waiting`: requests that have no memory here yet or, at P, whose prefill has not begun.
    `batch`: sequences in the last step, 0 while idle. `busy`, `kv`, `hit`: shares; `hit` of the
    prompt tokens that were cached here, None before the first request.
    """

    name: str
    role: str
    site: str
    down: bool
    waiting: int
    holding: int
    batch: int
    busy: float
    kv: float
    hit: float | None


@dataclass(frozen=True, slots=True)
class LinkView:
    """One direction. `cap`: bytes/s, None for no limit; `flows`: streams with KV on their way."""

    link: str
    src: str
    dst: str
    cap: int | None
    rate: float
    flows: int
    in_flight: int
    carried: int


@dataclass(frozen=True, slots=True)
class Notice:
    t: Ns
    what: str
    bad: bool


@dataclass(frozen=True, slots=True)
class Totals:
    """`goodput`: requests/s that finished inside every SLO, since the first was sent; `met`: their
    share of those that have ended. Times are (p50, p90) of the run so far, None where none is
    known.
    """

    sent: int
    under_way: int
    finished: int
    lost: int
    ttft: tuple[Ns, Ns] | None
    itl: tuple[Ns, Ns] | None
    goodput: float | None
    met: float | None
    tokens: int
    tokens_rate: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`rows`: the requests to be shown, in order; `hidden`: how many more there are. `followed` is
    the one whose text is shown.
    """

    name: str
    seed: int
    clock: str
    now: Ns
    totals: Totals
    rows: tuple[RequestView, ...]
    hidden: int
    followed: RequestView | None
    instances: tuple[InstanceView, ...]
    links: tuple[LinkView, ...]
    notices: tuple[Notice, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """What the user has asked to see. `follow`: a request; None for the board's own choice, the
    oldest that decodes.
    """

    order: str = ORDERS[0]
    ended: bool = True
    follow: str | None = None


DEFAULT_CHOICE = Choice()
