"""Bytes a second over loopback, from one process to another (see pddrt.netem.throughput):

frames    frames over a socket, with their checksums
link      the same through a link object without rate and delay
streams   64 of those at once, in sum; against one of them, and not against plain sockets
relay     plain sockets with a proxy in between, a third process

The reference: plain blocking sockets, the same congestion control and buffers, as many bytes from
memory to memory. Figures are GB/s, 64 MiB a round; the ways take turns.
"""

from __future__ import annotations

from statistics import median

from benchmarks.rounds import Json, against, options, show, table
from pddrt.netem.throughput import ROUND, WAYS, measure
from pddrt.units import parse_size

LEAST = {"frames": 0.85, "link": 0.7, "streams": 0.8, "relay": 0.5}


def main() -> None:
    parser = options("kv", __doc__, rounds=21)
    parser.add_argument("--frame", default="1 MiB", metavar="SIZE", help="default: 1 MiB")
    given = parser.parse_args()
    frame = min(max(parse_size(given.frame), 4096), ROUND)
    found = {
        way: [rate / 1e9 for rate in rates]
        for way, rates in measure(given.rounds, WAYS, frame_bytes=frame).items()
    }
    rows: dict[str, Json] = {}
    for way in WAYS[1:]:
        rows[way] = against(found[way], found["link" if way == "streams" else "plain"])
    missed = [way for way, least in LEAST.items() if rows[way]["ratio"] < least]
    more = {
        "least": LEAST,
        "missed": missed,
        "plain": round(median(found["plain"]), 3),
        "rounds": given.rounds,
        "frame_bytes": frame,
        "round_bytes": ROUND,
    }
    show(table("kv", "GB/s", rows, **more), given.json)


if __name__ == "__main__":
    main()
