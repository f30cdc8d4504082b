"""A deployment whose steps take exact times, for measuring what a handoff costs and whom.

On the main decoder a step takes A, and B more for each id of an extend or a prompt; on the relay it
takes TAU. So a decode costs the same however many are batched, and what a handoff adds is all that
there is to see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pddrt import trace as ev
from pddrt.metrics import RequestRecord
from pddrt.policy.handoff import Policy
from pddrt.policy.route import Pdd
from pddrt.types import MS, SECOND, US, Ns, Span
from pddrt.workload import Session, Turn

from .cluster import LAYOUT, Cluster, Played, oracle

TAU: Ns = 10 * MS
A: Ns = 8 * MS
B: Ns = 100 * US
DELAY: Ns = 15 * MS
PROMPT = 400
"""Characters of the prompt that is relayed; others have ten, and go to the main decoder at once."""


def steady(a: Ns, b: Ns) -> Callable[[Sequence[Span]], Ns]:
    """a for a step, b for each token of a span of several."""
    return lambda spans: a + b * sum(len(s.tokens) for s in spans if len(s.tokens) > 1)


@dataclass(frozen=True)
class Bench:
    """One relayed request that lacks about `lacking` ids when the main decoder is ready, beside
    `others` that decode there.
    """

    handoff: Policy
    lacking: int = 150
    others: int = 3
    tau: Ns = TAU
    a: Ns = A
    b: Ns = B
    delay: Ns = DELAY
    max_tokens: int = 400
    piece: int | None = 32

    @property
    def rate(self) -> int:
        """So that the KV crosses while the relay makes `lacking` ids."""
        kv = (PROMPT + 30) * LAYOUT.bytes_per_token
        return kv * SECOND // (self.lacking * self.tau)

    def play(self) -> Played:
        beside = [
            Session(i + 1, 0, (Turn(f"{i}" * 10, self.max_tokens + 200),))
            for i in range(self.others)
        ]
        measured = Session(0, 300 * MS, (Turn("x" * PROMPT, self.max_tokens),))
        played = Cluster(
            pages=512,
            chunk_tokens=512,
            rate=self.rate,
            delay=self.delay,
            policy=Pdd(relay_above=self.lacking * self.tau // 2),
            handoff=self.handoff,
            piece=self.piece,
            relay_cost=lambda _spans: self.tau,
            main_cost=steady(self.a, self.b),
        ).play([*beside, measured])
        played.assert_sound()
        r = relayed(played)
        assert r.ids == oracle(r.prompt_ids, len(r.ids))
        return played

    def wire(self, r: RequestRecord) -> Ns:
        """What a frame with ids, and the one with the first answer to it, take at the rate."""
        return -(-(r.seam.wire_bytes + 1000) * SECOND // self.rate)


def relayed(played: Played) -> RequestRecord:
    (r,) = (r for r in played.records if r.session == 0)
    assert r.pipeline == "P-RLD-MD"
    return r


def ids_bytes(played: Played) -> int:
    """What the links counted as ids."""
    return sum(e.ids_bytes for e in played.events(ev.LinkTotal) if isinstance(e, ev.LinkTotal))
