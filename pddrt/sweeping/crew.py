"""The workers of a sweep: so many processes, each with a thread of ours that hands it cells.

See `worker` for what they are and how they are spoken to. A worker that dies takes its cell
with it, and a new one goes on; ending the crew ends all of them, whatever they are at.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from pddrt.sweeping.cells import Cell
from pddrt.sweeping.worker import Keep

Json = dict[str, Any]
Messages = SimpleQueue[tuple[str, Any, Any]]
"""(ended, cell, how), (share, cell, how far) or (stop, None, None)."""


class Crew:
    """So many worker processes, each with a thread of ours that hands it cells and listens."""

    def __init__(self, folder: Path, jobs: int, keep: Keep, messages: Messages) -> None:
        self._folder = folder
        self._jobs = jobs
        self._keep = keep
        self._messages = messages
        self._waiting: deque[Cell] = deque()
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._over = threading.Event()

    def work(
        self, cells: Sequence[Cell], heard: Callable[[Cell, Json], None],
        tell: Callable[[float, int, str], None],
    ) -> None:  # fmt: skip
        """Until all have ended, or a stop came, or `heard` has raised."""
        self._waiting.extend(cells)
        threads = [threading.Thread(target=self._serve, args=(n,), daemon=True)
                   for n in range(min(self._jobs, len(cells)))]  # fmt: skip
        ended, shares, last = 0, dict[str, float](), ""
        tell(0.0, 0, last)
        for thread in threads:
            thread.start()
        try:
            while ended < len(cells):
                kind, cell, value = self._messages.get()
                if kind == "stop":
                    return
                if kind == "share":
                    shares[cell.key] = value
                else:
                    shares.pop(cell.key, None)
                    ended, last = ended + 1, cell.name
                    heard(cell, value)
                tell(ended + sum(shares.values()), ended, last)
        finally:
            self._end(threads)

    def _end(self, threads: Sequence[threading.Thread]) -> None:
        self._over.set()
        self._waiting.clear()
        for process in list(self._processes.values()):
            process.kill()
        for thread in threads:
            thread.join()
        for path in (self._folder / "cells").glob("*.part"):
            shutil.rmtree(path, ignore_errors=True)

    def _serve(self, number: int) -> None:
        """Hands cells to one worker, and to a new one where it has died."""
        log = self._folder / f"worker-{number}.log"
        with log.open("w+", encoding="utf-8", errors="replace") as errors:
            while not self._over.is_set():
                try:
                    cell = self._waiting.popleft()
                except IndexError:
                    break
                process: subprocess.Popen[str] = self._processes.get(number) or self._start(
                    number, errors
                )
                told = self._run(process, cell)
                if told is None:  # it has died, of its cell or of us
                    process.wait()
                    del self._processes[number]
                    if self._over.is_set():
                        break
                    told = {"state": "failed", "failure": _epitaph(process.returncode, errors)}
                self._messages.put(("ended", cell, told))
            if number in self._processes:
                last = self._processes[number]
                assert last.stdin is not None
                last.stdin.close()
                last.wait()
        if not log.stat().st_size:
            log.unlink()

    def _start(self, number: int, errors: IO[str]) -> subprocess.Popen[str]:
        where = str(Path(__file__).parents[2])
        paths = [where, *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            [sys.executable, "-m", "pddrt.sweeping.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        self._processes[number] = process
        if self._over.is_set():
            process.kill()
        return process

    def _run(self, process: subprocess.Popen[str], cell: Cell) -> Json | None:
        """Its answer; None where it has died."""
        assert process.stdin is not None
        assert process.stdout is not None
        written = cell.setting.written
        job = {
            "file": written.file, "data": written.data, "seed": cell.seed, "keep": self._keep,
            "folder": str(self._folder / "cells" / cell.key),
        }  # fmt: skip
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        except OSError:
            return None
        for line in process.stdout:
            told: Json = json.loads(line)
            if "share" not in told:
                return told
            self._messages.put(("share", cell, told["share"]))
        return None


def _epitaph(code: int, errors: IO[str]) -> str:
    """What is known of a worker's end."""
    errors.flush()
    errors.seek(0)
    lines = errors.read().strip().splitlines()
    how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    return f"its worker died ({how})" + (f": {lines[-1][:300]}" if lines else "")
