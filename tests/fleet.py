"""Work by seed in several processes: each takes one task at a time, and whoever takes too long is
killed, told of, and replaced. Nothing is left behind, however this ends: Ctrl-C and SIGTERM end the
processes, and one whose parent is gone ends with its task.
"""

from __future__ import annotations

import multiprocessing as mp
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

HUNG = "it took too long and was killed"
_FORK = mp.get_context("fork")


@dataclass(eq=False)
class _Worker:
    process: Any
    line: Connection
    task: Any = None
    until: float = 0.0


def each(
    work: Callable[[Any], Any], tasks: Iterable[Any], jobs: int, limit_s: float
) -> Iterator[tuple[Any, Any, str]]:
    """(task, result, "") in order of completion; (task, None, what went wrong) where the process
    died or took more than `limit_s` over it. `tasks` is asked for the next one when somebody is
    free.
    """
    waiting, workers = iter(tasks), list[_Worker]()
    before = signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(SystemExit(143)))
    try:
        for _ in range(jobs):
            _feed(_hire(work, workers), waiting, workers, limit_s)
        while workers:
            soonest = min(w.until for w in workers)
            ready = wait([w.line for w in workers], max(0.0, soonest - monotonic()))
            for worker in list(workers):
                if worker.line in ready:
                    task = worker.task
                    try:
                        result, wrong = worker.line.recv(), ""
                    except EOFError:
                        result, wrong = None, "its process died"
                        _dismiss(worker, workers)
                        worker = _hire(work, workers)
                    _feed(worker, waiting, workers, limit_s)
                    yield task, result, wrong
                elif monotonic() >= worker.until:
                    _dismiss(worker, workers)
                    _feed(_hire(work, workers), waiting, workers, limit_s)
                    yield worker.task, None, HUNG
    finally:
        for worker in list(workers):
            _dismiss(worker, workers)
        signal.signal(signal.SIGTERM, before)


def _hire(work: Callable[[Any], Any], workers: list[_Worker]) -> _Worker:
    mine, theirs = _FORK.Pipe()
    others = [mine, *(w.line for w in workers)]  # else it would keep them open
    process = _FORK.Process(target=_serve, args=(work, theirs, others), daemon=True)
    process.start()
    theirs.close()
    workers.append(worker := _Worker(process, mine))
    return worker


def _serve(work: Callable[[Any], Any], line: Connection, others: list[Connection]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:
        other.close()
    while True:
        try:
            task = line.recv()
            line.send(work(task))
        except (EOFError, BrokenPipeError):
            return


def _feed(worker: _Worker, waiting: Iterator[Any], workers: list[_Worker], limit_s: float) -> None:
    for task in waiting:
        worker.task, worker.until = task, monotonic() + limit_s
        worker.line.send(task)
        return
    _dismiss(worker, workers)


def _dismiss(worker: _Worker, workers: list[_Worker]) -> None:
    workers.remove(worker)
    worker.process.kill()
    worker.process.join()
    worker.line.close()
