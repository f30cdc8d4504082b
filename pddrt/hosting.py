"""What anything that is run here needs of this machine: a loop, a net, engines, signals, a folder;
and what is said of the machine beside the numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pddrt import __version__
from pddrt.alarm import attentive
from pddrt.engine.base import Engine
from pddrt.engine.model import ModelEngine
from pddrt.engine.models import LoadedModel
from pddrt.engine.outline import Outline
from pddrt.env import Env, wall_stamp
from pddrt.errors import BadInput, CannotRun
from pddrt.netem.fidelity import LATE_LIMIT, Kept, judge, too_fast
from pddrt.netem.net import Topology
from pddrt.simloop import SimLoop
from pddrt.trace import Seconds
from pddrt.types import Ns, StepCost

if TYPE_CHECKING:
    from pddrt.netem.simnet import SimNet
    from pddrt.netem.tcpnet import TcpNet

FAST = 100_000_000
"""Bytes a second that any machine moves."""


def new_loop(clock: str, shuffle: int | None = None) -> asyncio.AbstractEventLoop:
    """`shuffle`: a seed for the order of what the virtual clock has due at one instant."""
    if clock == "virtual":
        return SimLoop(shuffle)  # type: ignore[abstract]
    import uvloop

    return uvloop.new_event_loop()


def net_for(env: Env, topology: Topology) -> SimNet | TcpNet:
    """In memory under the virtual clock, over sockets on the wall clock."""
    if env.virtual:
        from pddrt.netem.simnet import SimNet

        return SimNet(env, topology)
    from pddrt.netem.tcpnet import TcpNet

    return TcpNet(env, topology)


def peak_for(clock: str, topology: Topology, strict: bool) -> int | None:
    """Bytes a second that this machine moves, measured where a link is fast enough for it to matter
    (a tenth of a second); None where none is. Raises CannotRun if `strict` and a link is too fast.
    """
    specs = [way for link in topology.links for way in (link, link.back) if way is not None]
    rate, name = max(((spec.rate or 0, spec.name) for spec in specs), default=(0, ""))
    if clock == "virtual" or rate <= FAST:
        return None
    from pddrt.netem.throughput import peak

    with attentive(), asyncio.Runner(loop_factory=lambda: new_loop(clock)) as runner:
        moved = runner.run(peak())
    if strict and (why := too_fast(rate, moved)):
        raise CannotRun(f"links.{name}.rate: {why}; without --strict it runs, and is `degraded`")
    return moved


def engine_for(
    env: Env,
    model: LoadedModel | Outline,
    slots: int,
    *,
    name: str,
    device: str,
    threads: int,
    cost: StepCost | None,
    vocab: int | None = None,
    eos_ids: Collection[int] = (),
) -> Engine:
    """An engine for `model` with so many KV slots, torch's or a modelled one. `cost`: what a step
    is charged, None for as long as it takes. A modelled one draws ids below `vocab` (None: all of
    the model's), none of `eos_ids`.
    """
    if isinstance(model, Outline):
        assert cost is not None, "a modelled step has no time of its own"
        return ModelEngine(
            env,
            model.layout,
            slots,
            vocab=model.vocab_size if vocab is None else vocab,
            max_context=model.max_context,
            step_cost=cost,
            eos_ids=frozenset(eos_ids),
        )
    from pddrt.engine.torch import TorchEngine

    return TorchEngine(
        model.module,
        model.layout,
        slots,
        env,
        max_context=model.max_context,
        device=device,
        threads=threads,
        step_cost=cost,
        name=name,
    )


@contextlib.contextmanager
def signals_to(callback: Callable[[], None]) -> Iterator[None]:
    """Inside, SIGINT and SIGTERM call `callback`, between any two instructions of this thread. In
    any other than the main one nothing changes: signals do not come there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(s, lambda *_: callback()) for s in signals]
    try:
        yield
    finally:
        for s, handler in zip(signals, previous, strict=True):
            signal.signal(s, handler)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotRun(f"cannot write the run folder {folder}: {error.strerror}") from None


def claim(folder: Path, mark: str) -> None:
    """Makes the folder, with an empty file `mark` that says at once whose it is and replaces that
    of an earlier one."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / mark).write_text("{}\n", encoding="utf-8")


def free_folder(
    out: Path | None, name: str, mark: str = "scenario.yaml", what: str = "run"
) -> Path:
    """The folder to write to. One that holds something, but no file `mark`, is refused."""
    if out is None:
        base = Path("runs") / f"{name}-{wall_stamp()}"
        folder, number = base, 2
        while folder.exists():
            folder, number = base.with_name(f"{base.name}-{number}"), number + 1
        return folder
    try:
        there = next(p for p in (out, *out.parents) if p.exists())
        taken = there == out and out.is_dir() and any(out.iterdir())
    except OSError as error:
        raise BadInput(f"--out {out}: {error.strerror}") from None
    if not there.is_dir():
        raise BadInput(f"--out {out}: found a file, {there}; allowed: a folder")
    if taken and not (out / mark).exists():
        raise BadInput(
            f"--out {out}: found something that is not a {what}; allowed: a new or empty folder, "
            f"or that of an older {what}"
        )
    return out


def provenance(
    model: LoadedModel | Outline,
    threads: Mapping[str, int],
    virtual: bool,
    late: Ns,
    kept: Sequence[Kept] = (),
    peak: int | None = None,
    priority: str = "normal",
) -> dict[str, Any]:
    """What ran where, and whether this machine kept the network's times: `late` is the p99 of
    (sent - due) on the worst link, `kept` says it of each link, against `peak` (see `peak_for`).
    """
    found = judge(kept, peak)
    if not kept and late > LATE_LIMIT:
        found["verdict"] = "degraded"
    return {
        "versions": {
            "pddrt": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "transformers", "uvloop")},
        },
        "machine": {"system": platform.platform(), "cores": cores(), "cpu": cpu_name()},
        "threads": dict(threads),
        "model": {
            "name": model.name,
            "fingerprint": model.fingerprint,
            "parameters": model.parameters,
        },
        "fidelity": {
            **({"verdict": "exact"} if virtual else {**found, "priority": priority}),
            "late_p99_s": Seconds(late),
            "limit_s": Seconds(LATE_LIMIT),
        },
    }


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's name, where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
