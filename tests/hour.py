"""An hour of virtual traffic, and whether anything grows: `python -m tests.hour [--minutes 60]
[--rate 8] [--out FOLDER]`.

A modelled deployment gets `rate` requests a second; its pools are small, so that caches are full
after some minutes. At six moments the process's memory is read, the event log's size, what is under
way, and of each pool, from the events alone, how many pages are free, cached and owned. Exits 1
where a pool's pages do not add up, or memory grew by more than a tenth between the second moment
and the last.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import process_time
from typing import Any

from pddrt.run import Run
from pddrt.scenario import parse
from pddrt.trace import Event, RequestSent
from pddrt.types import SECOND, Ns

SCENARIO = """
name: hour
seed: 1
clock: virtual
model: tiny
links:
  rdma: {{between: [a, a], rate: 10 Gbit/s, delay: 5 us}}
  wan: {{between: [a, b], rate: 20 Mbit/s, delay: 15 ms, jitter: 1 ms}}
instances:
  p: {{role: prefill, site: a, count: 2, engine: model, chunk_tokens: 256, kv_memory: 2 MiB,
      chip: {{flops: 4 GFLOPS, memory: 1 GB, bandwidth: 200 MB/s}}}}
  rld: {{role: relay, site: a, count: 2, engine: model, kv_memory: 1 MiB,
        chip: {{flops: 2 GFLOPS, memory: 1 GB, bandwidth: 240 MB/s}}}}
  md: {{role: main, site: b, count: 2, engine: model, kv_memory: 2 MiB,
       chip: {{flops: 1 GFLOPS, memory: 1 GB, bandwidth: 300 MB/s}}}}
pipeline: {{policy: pdd, relay_above: 20 ms}}
deadline: 60 s
workload: {{kind: sessions, sessions: {sessions}, turns: 4, rate: {rate}/s, think: 500 ms,
           output_tokens: 16, prompts: random, prompt_tokens: {{min: 100, max: 300}}}}
"""
TURNS = 4
MOMENTS = 6
GROWTH = 0.1


def rss_mib() -> float:
    """Of this process, now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise OSError("no VmRSS in /proc/self/status")


@dataclass
class Watch:
    """Listens to a run, and looks at it at `MOMENTS` equal distances of `length`."""

    run: Run
    length: Ns
    rows: list[dict[str, Any]] = field(default_factory=list)
    sent: int = 0

    def __call__(self, event: Event) -> None:
        self.sent += isinstance(event, RequestSent)
        if event.t >= self.length * (len(self.rows) + 1) // MOMENTS and len(self.rows) < MOMENTS:
            self.look(event.t)

    def look(self, now: Ns) -> None:
        gc.collect()
        monitor, recorder = self.run.monitor, self.run.recorder
        row = {
            "minute": round(now / SECOND / 60, 2),
            "requests": self.sent,
            "events": self.run.trace.count,
            "log_mib": round((self.run.folder / "events.jsonl").stat().st_size / 2**20, 1),
            "rss_mib": round(rss_mib(), 1),
            "cpu_s": round(process_time(), 1),
            "records": len(recorder.requests),
            "accounts": monitor.open_accounts,
            "pools": {p.instance: p.balance() for p in monitor.pools()},
        }
        self.rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)

    def wrong(self) -> Iterator[str]:
        for row in self.rows:
            for name, (pages, free, cached, owned) in row["pools"].items():
                if free + cached + owned != pages:
                    yield f"minute {row['minute']}: {name}: {free} + {cached} + {owned} of {pages}"
        first, last = self.rows[1]["rss_mib"], self.rows[-1]["rss_mib"]
        if last > first * (1 + GROWTH):
            yield f"memory grew from {first} to {last} MiB"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hour", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    length = round(options.minutes * 60 * SECOND)
    sessions = max(1, round(options.rate * options.minutes * 60 / TURNS))
    text = SCENARIO.format(sessions=sessions, rate=options.rate / TURNS)
    with tempfile.TemporaryDirectory() as elsewhere:
        run = Run(parse(text, "hour"), out=options.out or Path(elsewhere) / "run", keep=100)
        run.prepare()
        watch = Watch(run, length)
        run.listen(watch)
        result = run.execute()
    summary = result.summary
    wrong = [*watch.wrong(), *summary["invariants"]["violations"]]
    print(json.dumps({
        "rows": watch.rows, "requests": summary["requests"], "wrong": wrong,
        "events": run.trace.count, "checked": summary["invariants"]["checked"],
    }))  # fmt: skip
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
