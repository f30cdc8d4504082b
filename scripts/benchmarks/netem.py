"""What comes out of an emulated link on real sockets, against what was asked for:

rate        MB/s that one stream of frames gets
proxy       the same of plain bytes through the proxy
delay       ms that a small frame takes, one way
completion  ms of transfers that join and leave; reference: the same program in virtual time

`pddrt netem check` says whether each is within its limit; here are the figures, round by round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from statistics import median
from typing import Any

from benchmarks.rounds import Json, against, by_turns, options, show, table
from pddrt.alarm import attentive
from pddrt.env import WallEnv
from pddrt.hosting import new_loop
from pddrt.netem import check, measure
from pddrt.trace import Trace
from pddrt.types import MS

RATES = (1, 12.5, 100, 500)
DELAYS = (1, 15, 100)


def main() -> None:
    parser = options("netem", __doc__, rounds=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each rate; default: 1")
    given = parser.parse_args()
    ways: dict[str, Callable[[], float]] = {}
    asked: dict[str, float] = {}

    def way(name: str, reference: float, work: Callable[[], Coroutine[Any, Any, float]]) -> None:
        def once() -> float:
            with asyncio.Runner(loop_factory=lambda: new_loop("wall")) as runner:
                return runner.run(work())

        ways[name], asked[name] = once, reference

    async def delay(ms: int) -> float:
        took = await measure.latencies(measure.link(None, ms * MS), 100, 2 * MS)
        return median(t for _, t in took) / MS

    async def rate(mb: float) -> float:
        return await measure.rate(measure.link(round(mb * 1e6)), given.seconds) / 1e6

    async def proxy(mb: float) -> float:
        return await measure.proxy_rate(round(mb * 1e6), given.seconds) / 1e6

    async def longest() -> float:
        return max(await measure.completions(WallEnv(1, Trace()), spec, check.PLAN)) / MS

    spec = measure.link(12_500_000, 10 * MS)
    for mb in RATES:
        way(f"rate {mb:g} MB/s", mb, lambda mb=mb: rate(mb))
        way(f"proxy {mb:g} MB/s", mb, lambda mb=mb: proxy(mb))
    for ms in DELAYS:
        way(f"delay {ms} ms", ms, lambda ms=ms: delay(ms))
    way("completion", max(measure.predicted(spec, check.PLAN)) / MS, longest)
    with attentive() as priority:
        found = by_turns(ways, given.rounds)
    rows: dict[str, Json] = {
        name: against(values, [asked[name]] * len(values)) for name, values in found.items()
    }
    more = {"rounds": given.rounds, "priority": priority}
    show(table("netem", "", rows, **more), given.json)


if __name__ == "__main__":
    main()
