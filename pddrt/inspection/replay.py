"""The same run again, to an event and on from there.

The stored scenario is run under the virtual clock, which repeats a run to the byte: each event is
held against the recorded line, and the first that differs stops the walk and is told. The roles are
alive there: beside what events say, `p` shows what none does (schedulers, pools, what the gateway
believes). The user's commands are read while the loop stands still; its clock does not mind.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.text import Text

from pddrt import scenario
from pddrt.deployment import Deployment
from pddrt.env import Env
from pddrt.errors import BadInput, RunFailed
from pddrt.hosting import signals_to
from pddrt.inspection.rebuild import Rebuild
from pddrt.inspection.recorded import Recorded
from pddrt.inspection.stepping import Left, Shown, Walk
from pddrt.netem.net import Net, Topology
from pddrt.run import Run
from pddrt.show import clean, duration, many
from pddrt.trace import Event, to_line


class _Again(Run):
    """A run whose roles can be looked at."""

    deployment: Deployment | None = None

    def _deploy(self, env: Env, net: Net, topology: Topology) -> Deployment:
        self.deployment = super()._deploy(env, net, topology)
        return self.deployment


def replay(
    run: Recorded, until: int, commands: Iterator[str], show: Callable[[Shown], None]
) -> None:
    """Runs the stored scenario again up to `until`, and walks on from there. Raises BadInput where
    the scenario is not whole or its run was not under the virtual clock, RunFailed at the end where
    it was another run.
    """
    again = scenario.load(run.folder / "scenario.yaml")
    if again.clock != "virtual":
        raise BadInput(
            f"{run.folder}: its clock was {again.clock}; only a run under the virtual clock "
            "repeats. Without --replay the recording is walked through"
        )
    with tempfile.TemporaryDirectory(prefix="pddrt-replay-") as folder:
        second = _Again(again, out=Path(folder) / "run")
        second.prepare()
        listener = _Replayed(run, second, commands, show, until)
        second.listen(listener)
        with (run.folder / "events.jsonl").open("rb") as lines:
            listener.lines = iter(lines)
            with contextlib.suppress(Left):
                second.execute()
            told = listener.verdict()
    if listener.differs:
        raise RunFailed(told)
    show(Text(told, "bold"))


class _Replayed:
    """Listens to the run that is made again."""

    def __init__(
        self,
        run: Recorded,
        second: _Again,
        commands: Iterator[str],
        show: Callable[[Shown], None],
        until: int,
    ) -> None:
        self.lines: Iterator[bytes] = iter(())
        self._second = second
        self._show = show
        self._state = Rebuild()
        self._walk = Walk(run, self._state, commands, show, until)
        self._walk.live = self._live
        self._walk.guard = lambda: signals_to(_leave)
        self._same = 0
        self.differs = ""
        self._left = False

    def __call__(self, event: Event) -> None:
        if self._left:
            return  # what is under way is being cancelled
        self._state(event)
        number = self._state.number
        if not self.differs:
            self._hold_against(number, to_line(event), next(self.lines, b"").rstrip(b"\n"))
        try:
            self._walk.at(number, event)
        except Left:
            self._left = True
            raise

    def _hold_against(self, number: int, line: str, recorded: bytes) -> None:
        if line.encode() == recorded:
            self._same = number
            return
        was = recorded.decode(errors="replace") or "nothing: the recording ends here"
        self.differs = f"event {number:,} is not the recorded one"
        self._show(Text(clean(f"{self.differs}.\n  recorded {was}\n  now      {line}"), "bold red"))
        self._walk.stop(number)

    def verdict(self) -> str:
        if self.differs:
            return f"{self.differs}; the {self._same:,} before it are the same to the byte"
        rest = 0 if self._left else sum(1 for _ in self.lines)
        more = f"; the recording has {rest:,} more" if rest else ""
        return f"replayed: {many(self._same, 'event')}, the same to the byte{more}"

    def _live(self, name: str | None) -> Iterator[str]:
        """What no event tells: queues, paces, what the gateway believes."""
        deployment = self._second.deployment
        if deployment is None:
            return
        for one in deployment.instances:
            if name is not None and name != one.name:
                continue
            memory, waiting = one.memory, len(one.admission)
            yield (
                f"live {one.name}: {many(len(one.sched.sequences), 'sequence')}, {waiting} waiting "
                f"for memory; pool {memory.used:,} used, {memory.cached:,} cached of "
                f"{memory.num_pages:,} pages; pace {duration(one.pace.step)} a step"
            )
            for sequence in one.sched.sequences.values():
                yield (
                    f"  {sequence.request}: computed {sequence.computed:,} of "
                    f"{len(sequence.ids):,} known ids{'' if sequence.active else ', not active'}"
                    f"{', in the step' if sequence.in_step else ''}"
                )
        if name is None:
            yield from _believed(deployment)


def _leave() -> None:
    """A signal while the user is asked: the run behind it has nothing to end gently."""
    raise Left


def _believed(deployment: Deployment) -> Iterator[str]:
    outlook: Any = deployment.gateway.outlook
    for name, capacity in outlook.instances.items():
        yield (
            f"live gateway: of {name} it thinks that {many(capacity.requests, 'request')} and "
            f"{capacity.tokens:,} tokens are before a new one"
        )
