"""What a run writes into its folder while it runs: every event, and each request when nothing can
change it any more.

So a run that is killed leaves what there was until then. Of its requests it leaves those that were
over, in the order in which they were; a run that ends puts the lines into the order of sending,
which costs a copy of the file and 16 bytes a request.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from pddrt.hosting import cores
from pddrt.metrics import RequestRecord
from pddrt.scenario import ResolvedInstance, Scenario
from pddrt.summary import Tally, request_json
from pddrt.trace import Event, FaultInjected, FaultMissed, Trace, dumps
from pddrt.types import Ns

BUFFER = 1 << 16
INDEXED_BYTES = 32 << 20
"""Of events and requests: from half a second of reading on, a folder is indexed at once."""


class RunFiles:
    """The folder of one run, while that runs. `tally` has been told of all requests in it, `faults`
    says how many struck and how many found nothing to act on.
    """

    def __init__(
        self, folder: Path, slo_ttft: Ns | None, slo_tpot: Ns | None, *, events: bool = True
    ) -> None:
        """`events` off: no events.jsonl, nor a digest."""
        self.folder = folder
        self.tally = Tally(slo_ttft, slo_tpot)
        self.faults = {"injected": 0, "missed": 0}
        self._slos = (slo_ttft, slo_tpot)
        self._logs = events
        self._open = contextlib.ExitStack()

    def open(self, scenario: Scenario, instances: Sequence[ResolvedInstance]) -> Trace:
        """Makes the folder; what is left there of an older run goes. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in ("requests.jsonl", "summary.json", "index.npz"):
            (self.folder / old).unlink(missing_ok=True)
        (self.folder / "scenario.yaml").write_text(scenario.dump(cores()), encoding="utf-8")
        for instance in instances:
            if instance.profile is not None:
                copy = self.folder / instance.profile_copy
                copy.write_bytes(instance.profile.read_bytes())
        for used, name in scenario.link_files():
            (self.folder / name).write_bytes(used.read_bytes())
        path, file = self.folder / "events.jsonl", None
        if self._logs:
            file = self._open.enter_context(path.open("w", encoding="utf-8"))
        else:
            path.unlink(missing_ok=True)
        self._requests = RequestLog(self.folder / "requests.jsonl", *self._slos)
        self._trace = Trace(file, log=self._logs)
        self._trace.listen(self._hear)
        return self._trace

    def _hear(self, event: Event) -> None:
        if isinstance(event, FaultInjected):
            self.faults["injected"] += 1
        elif isinstance(event, FaultMissed):
            self.faults["missed"] += 1

    def add(self, record: RequestRecord) -> None:
        self.tally.add(record)
        self._requests.add(record)

    @property
    def error(self) -> OSError | None:
        """Why something could not be written."""
        return self._trace.error or self._requests.error

    def flush(self) -> None:
        """Writes what has not been written, for others to read."""
        self._trace.flush()
        self._requests.flush()

    def close_events(self) -> None:
        """Raises OSError where not every event could be written."""
        self._trace.flush()
        with self._open:
            if self._trace.error is not None:
                raise self._trace.error

    def close_requests(self) -> None:
        """Raises OSError where not every request could be written."""
        self._requests.close()

    def index(self, progress: Callable[[str, float | None], None] | None) -> None:
        """Of a folder that is large, so that who opens it need not wait (see `index`)."""
        files = (self.folder / name for name in ("events.jsonl", "requests.jsonl"))
        if sum(file.stat().st_size for file in files if file.exists()) < INDEXED_BYTES:
            return
        from pddrt.index import RunIndex

        if progress is not None:
            progress("indexing", None)
        RunIndex.build(self.folder)


class RequestLog:
    """One file of lines, one a request. After an error nothing more is written, and `close` raises
    it: those who tell of a request must not be the ones who fail.
    """

    def __init__(self, path: Path, slo_ttft: Ns | None, slo_tpot: Ns | None) -> None:
        self._path = path
        self._slos = (slo_ttft, slo_tpot)
        self._file = path.open("wb", buffering=BUFFER)
        self._numbers = array("q")
        self._ends = array("q", [0])
        self.error: OSError | None = None

    def add(self, record: RequestRecord) -> None:
        line = (dumps(request_json(record, *self._slos)) + "\n").encode()
        if self.error is not None:
            return
        try:
            self._file.write(line)
        except OSError as error:
            self.error = error
        self._numbers.append(record.number)
        self._ends.append(self._ends[-1] + len(line))

    def flush(self) -> None:
        """Writes what has not been written, for others to read."""
        if self.error is None:
            try:
                self._file.flush()
            except OSError as error:
                self.error = error

    def close(self) -> None:
        """Raises OSError where not every line could be written."""
        try:
            with self._file:
                if self.error is not None:
                    raise self.error
            order = sorted(range(len(self._numbers)), key=self._numbers.__getitem__)
            if order != list(range(len(order))):
                self._rewrite(order)
        finally:
            self._numbers, self._ends = array("q"), array("q", [0])

    def _rewrite(self, order: list[int]) -> None:
        """Lines in another order. The file is replaced at once: it never lacks any."""
        ordered = self._path.with_name(self._path.name + ".part")
        with self._path.open("rb") as source, ordered.open("wb", buffering=BUFFER) as to:
            for at in order:
                start, end = self._ends[at], self._ends[at + 1]
                source.seek(start)
                to.write(source.read(end - start))
        ordered.replace(self._path)
