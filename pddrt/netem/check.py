"""Does the emulated link do on this machine, now, what it says? `netem check` measures it.

Every measurement goes the whole way - frames through `TcpNet`, bytes through the proxy, over
loopback sockets and on this clock - and is set against a prediction: a rate, a delay, what the same
program does in virtual time. Each has a limit, and says whether it was kept:

    ok        within its limit
    off       not: this machine, as busy as it is now, does not keep the link
    skipped   cannot be measured here, and why

Figures taken where something is `off` are worth no more than that.

Leaves out how it is measured (`measure`), the kernel's own TCP, which `kernel` compares with, and
what it looks like (`commands.check`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pddrt.env import WallEnv
from pddrt.netem import measure
from pddrt.netem.fidelity import PEAK_SHARE
from pddrt.netem.flow import law_of
from pddrt.netem.predict import jain
from pddrt.netem.tcp_link import Tcp
from pddrt.netem.throughput import peak
from pddrt.trace import Trace
from pddrt.types import MS, US, Ns

Verdict = Literal["ok", "off", "skipped"]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table. `error` is what `limit` bounds, in the unit of both; `predicted` and
    `measured` are for people."""

    name: str
    predicted: str
    measured: str
    error: float | None
    limit: float | None
    unit: str
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.error is None:
            return "skipped"
        return "ok" if self.limit is None or self.error <= self.limit else "off"

    def as_json(self) -> dict[str, Any]:
        names = ("name", "predicted", "measured", "error", "limit", "unit", "note", "verdict")
        return {name: getattr(self, name) for name in names}


def skipped(name: str, why: str) -> Check:
    return Check(name, "", "", None, None, "", why)


# -- the list --------------------------------------------------------------------------------------

RATES = ((1_000_000, 0.1), (12_500_000, 0.1), (100_000_000, 0.1), (500_000_000, 0.5))
"""Bytes/s, and the error allowed in per cent."""
LATENCY_LIMIT = 0.25
"""Of the median error, in ms."""
OPENING = 2.0
"""Of a handshake, in ms: a socket is opened between the two ways, which takes some of it."""
JAIN_LIMIT = 0.001


def _quantile(values: Sequence[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def _off_rate(name: str, asked: int, got: float, limit: float, note: str = "") -> Check:
    error = abs(got / asked - 1) * 100
    return Check(name, _rate(asked), _rate(got), round(error, 4), limit, "%", note)


def _off_delay(name: str, delay: Ns, late: Sequence[float], limit: float = LATENCY_LIMIT) -> Check:
    """`late` in ms."""
    middle, most = _quantile(late, 0.5), _quantile(late, 0.99)
    measured = f"{delay / MS + middle:.3f} ms"
    error = round(abs(middle), 4)
    return Check(name, f"{delay / MS:g} ms", measured, error, limit, "ms", f"p99 {most:+.2f} ms")


def _rate(value: float) -> str:
    return f"{value / 1e6:.6g} MB/s"


@dataclass(frozen=True, slots=True)
class Effort:
    """How long things are measured: seconds of a rate, frames of a latency."""

    seconds: float
    frames: int


FULL, QUICK = Effort(2.0, 300), Effort(0.5, 60)


async def _timers(effort: Effort) -> Check:
    env = WallEnv(1, Trace())
    late = []
    for _ in range(effort.frames):
        due = env.now() + 300 * US
        await env.sleep_until(due)
        late.append((env.now() - due) / MS)
    middle, most = _quantile(late, 0.5), _quantile(late, 0.99)
    about = f"p50 {middle:.3f} ms, p99 {most:.3f} ms"
    return Check("timers: how late", "0", about, round(middle, 4), LATENCY_LIMIT, "ms")


async def _rates(effort: Effort, top: int, progress: Progress) -> AsyncIterator[Check]:
    for asked, limit in RATES:
        for way, measured in (("frames", None), ("proxy", measure.proxy_rate)):
            name = f"rate, {way}, {_rate(asked)}"
            progress(name)
            if asked > PEAK_SHARE * top:
                most = f"{PEAK_SHARE:.0%} of the {_rate(top)} that this machine moves"
                yield skipped(name, f"more than {most}")
            elif measured is None:
                yield _off_rate(
                    name, asked, await measure.rate(measure.link(asked), effort.seconds), limit
                )
            else:
                yield _off_rate(name, asked, await measured(asked, effort.seconds), limit)


async def _delays(effort: Effort, progress: Progress) -> AsyncIterator[Check]:
    for delay in (MS, 15 * MS, 100 * MS):
        name = f"delay, frames, {delay / MS:g} ms"
        progress(name)
        took = await measure.latencies(measure.link(None, delay), effort.frames, 2 * MS)
        yield _off_delay(name, delay, [(t - delay) / MS for _, t in took])
    progress("delay, proxy")
    late = await measure.proxy_latency(5 * MS, effort.frames // 2)
    yield _off_delay("delay, proxy, 5 ms", 5 * MS, [t / MS for t in late])
    progress("handshakes")
    nets, proxied = await measure.handshakes(10 * MS, 10)
    late = [t - 20 * MS for t in nets]
    yield _off_delay("handshake, frames, 2 x 10 ms", 20 * MS, [t / MS for t in late], OPENING)
    late = [t - 10 * MS for t in proxied]
    yield _off_delay("handshake, proxy, to the upstream", 10 * MS, [t / MS for t in late], OPENING)
    name = "delay 500 ms does not throttle"
    progress(name)
    asked = 12_500_000
    got = await measure.rate(measure.link(asked, 500 * MS), max(1.0, effort.seconds))
    yield _off_rate(name, asked, got, 0.5)


async def _jitter(effort: Effort) -> Check:
    """Against the very process that the link follows: what is left is this machine's."""
    spec = measure.link(None, 20 * MS, 2 * MS)
    took = await measure.latencies(spec, 2 * effort.frames, 2 * MS)
    law = law_of(spec, "1/netem/wan/a>b")
    expected = [law.delay.at(sent) for sent, _ in took]
    late = [(t - e) / MS for (_, t), e in zip(took, expected, strict=True)]
    mean = sum(t for _, t in took) / len(took) / MS
    planned = sum(expected) / len(expected) / MS
    middle, most = _quantile([abs(x) for x in late], 0.5), _quantile(late, 0.99)
    return Check(
        "jitter 20 +- 2 ms, against its process", f"mean {planned:.3f} ms", f"mean {mean:.3f} ms",
        round(middle, 4), LATENCY_LIMIT, "ms", f"p99 {most:+.2f} ms",
    )  # fmt: skip


async def _fairness(effort: Effort, progress: Progress) -> AsyncIterator[Check]:
    for flows in (2, 8, 64):
        name = f"fair shares of {flows}"
        progress(name)
        got = await measure.shares(
            flows, measure.link(12_500_000), max(effort.seconds, 0.05 * flows)
        )
        index = jain(got)
        error = round(max(0.0, 1 - index), 6)
        yield Check(name, "Jain's index 1", f"{index:.6f}", error, JAIN_LIMIT, "of the index")


PLAN = ((0, 2_000_000), (40 * MS, 1_000_000), (60 * MS, 500_000), (65 * MS, 30_000))


async def _completion(tcp: Tcp | None, say: str) -> list[Check]:
    """Transfers that join and leave, against the same program in virtual time."""
    spec = measure.link(12_500_000, 10 * MS, tcp=tcp)
    planned = await asyncio.to_thread(measure.predicted, spec, PLAN)
    took = await measure.completions(WallEnv(1, Trace()), spec, PLAN)
    return [
        Check(
            f"completion, {say}, {size / 1e6:g} MB from {start / MS:g} ms", f"{plan / MS:.2f} ms",
            f"{found / MS:.2f} ms", round(abs(found - plan) / MS, 3),
            round(1 + 0.005 * plan / MS, 2), "ms",
        )
        for (start, size), plan, found in zip(PLAN, planned, took, strict=True)
    ]  # fmt: skip


async def _while_busy(effort: Effort, progress: Progress) -> AsyncIterator[Check]:
    """With every core computing, the rate still holds; where it does not, the verdict says so."""
    for asked in (12_500_000, 100_000_000):
        name = f"rate while both cores compute, {_rate(asked)}"
        progress(name)
        with measure.busy(os.cpu_count() or 1):
            env = WallEnv(1, Trace())
            got, verdict = await measure.rate_and_verdict(env, measure.link(asked), effort.seconds)
        check = _off_rate(name, asked, got, 1.0, f"ledger: {verdict}")
        if check.verdict == "off" and verdict != "ok":
            check = skipped(name, f"{_rate(got)}: this machine cannot, and its ledger says so")
        yield check


async def checks(effort: Effort, progress: Progress) -> AsyncIterator[Check]:
    """All of them, one after the other."""
    progress("what this machine moves")
    top = await peak()
    yield Check("moved through frames, one process", "", _rate(top), 0.0, None, "")
    yield await _timers(effort)
    async for check in _rates(effort, top, progress):
        yield check
    async for check in _delays(effort, progress):
        yield check
    progress("jitter")
    yield await _jitter(effort)
    async for check in _fairness(effort, progress):
        yield check
    progress("completion times")
    for tcp, say in ((None, "fluid"), (Tcp("cubic"), "cubic")):
        for check in await _completion(tcp, say):
            yield check
    async for check in _while_busy(effort, progress):
        yield check
