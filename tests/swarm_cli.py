"""`scripts/swarm` and `scripts/mutants`: many seeds in several processes.

    swarm    plays seeds, prints what the faults hit and where nothing was hit; a seed that fails is
             made small and printed with the command that plays it again
    mutants  plants each bug of `mutants` and plays seeds until it is found

Progress goes to stderr, results to stdout; `--json`: one object there and nothing else. Exit: 0
nothing wrong, 1 a seed failed or a planted bug was not found, 2 a wrong option, 130 interrupted
(what was found so far is said).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import yaml

from . import fleet
from .coverage import Coverage
from .kept import KeptTrace
from .mutants import MUTANTS
from .shrink import shrink
from .swarm import Case, draw, failure, manner

HANG_S = 600.0
"""Wall time that one seed may take, on a machine that is busy with others, too; alone they take a
tenth of a second, a few with torch."""
SHRINK_S = 600.0
TOLD_EVERY_S = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        found: int = options.run(options)
    except KeyboardInterrupt:
        return 130
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts", description=__doc__.partition("\n")[0])
    kinds = parser.add_subparsers(required=True)
    many = kinds.add_parser("swarm", prog="scripts/swarm", help="play many seeds")
    many.set_defaults(run=_swarm)
    many.add_argument("--minutes", type=float, help="begin no seed after so long")
    many.add_argument("--trace", type=Path, metavar="FILE", help="events of the one seed played")
    many.add_argument("--case", type=Path, metavar="FILE", help="play this case, as it was printed")
    many.add_argument("--no-shrink", action="store_true", help="leave failing seeds as they are")
    bugs = kinds.add_parser("mutants", prog="scripts/mutants", help="look for planted bugs")
    bugs.set_defaults(run=_mutants)
    bugs.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(MUTANTS)}")
    for one, seeds in ((many, 1000), (bugs, 200)):
        one.add_argument("--seeds", type=_count, default=seeds, help=f"how many ({seeds})")
        one.add_argument("--jobs", type=_count, default=1, help="processes (1)")
        one.add_argument("--start", type=int, default=0, help="the first seed (0)")
        one.add_argument("--json", action="store_true", help="one object on stdout")
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a whole number from 1")
    return int(text)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- swarm -----------------------------------------------------------------------------------------


def _play(seed: int) -> tuple[str, Coverage]:
    """How a seed fails, if it does, and what it covered."""
    case, trace, coverage = draw(seed), KeptTrace(), Coverage()
    failed = failure(case, trace)
    coverage.add(case, trace.events)
    return failed, coverage


def _shrink(task: tuple[int, str]) -> tuple[Case, str]:
    seed, failed = task
    return shrink(draw(seed), failed)


def _swarm(options: argparse.Namespace) -> int:
    if options.case is not None or options.trace is not None:
        return _play_one(options)
    begun, told = monotonic(), monotonic()
    total, failures = Coverage(), dict[int, str]()

    def seeds() -> Iterator[int]:
        for seed in range(options.start, options.start + options.seeds):
            if options.minutes is not None and monotonic() - begun > 60 * options.minutes:
                return
            yield seed

    interrupted = False
    try:
        for seed, result, wrong in fleet.each(_play, seeds(), options.jobs, HANG_S):
            failed, coverage = result or (f"{wrong} ({HANG_S:g} s of wall time)", Coverage(seeds=1))
            total.merge(coverage)
            if failed:
                failures[seed] = failed
                say(f"swarm: seed {seed} fails: {failed[:200]}\n  {_again(seed)}")
            if monotonic() - told > TOLD_EVERY_S:
                told = monotonic()
                rate = total.seeds / (told - begun)
                say(f"swarm: {total.seeds} seeds, {len(failures)} failed, {rate:.1f}/s")
        small = {} if options.no_shrink else _made_small(failures, options.jobs)
    except KeyboardInterrupt:
        small, interrupted = {}, True
    _tell(options, total, failures, small, monotonic() - begun)
    return 130 if interrupted else int(bool(failures))


def _again(seed: int) -> str:
    return f"scripts/swarm --start {seed} --seeds 1 --trace events-{seed}.jsonl"


def _made_small(failures: dict[int, str], jobs: int) -> dict[int, tuple[Case, str]]:
    """One seed of each manner of failing."""
    first = {manner(failed): seed for seed, failed in reversed(failures.items())}
    tasks = [(seed, failures[seed]) for seed in sorted(first.values())]
    tasks = [task for task in tasks if fleet.HUNG not in task[1]]
    for seed, _ in tasks:
        say(f"swarm: making seed {seed} small")
    shrunk = fleet.each(_shrink, tasks, min(jobs, max(1, len(tasks))), SHRINK_S)
    return {task[0]: result for task, result, wrong in shrunk if not wrong}


def _tell(
    options: argparse.Namespace,
    total: Coverage,
    failures: dict[int, str],
    small: dict[int, tuple[Case, str]],
    wall_s: float,
) -> None:
    listed = [
        {
            "seed": seed,
            "failure": failed,
            "again": _again(seed),
            "case": small[seed][0].to_text() if seed in small else None,
        }
        for seed, failed in sorted(failures.items())
    ]
    if options.json:
        about = {"failures": listed, "wall_s": round(wall_s, 1), **total.to_json()}
        print(json.dumps(about))
        return
    print(total.table())
    print("\nnever hit (fault, where: phases):")
    blind: dict[tuple[str, str], list[str]] = {}
    for do, place, phase in total.blind():
        blind.setdefault((do, place), []).append(phase)
    for (do, place), phases in blind.items():
        print(f"  {do}, {place}: {', '.join(phases)}")
    told = total.to_json()
    for name in (
        "seeds",
        "virtual_s",
        "requests",
        "ends",
        "pipelines",
        "handoffs",
        "recovery",
        "faults",
    ):
        print(f"{name}: {_flat(told[name])}")
    print(f"failed: {len(failures)}")
    for one in listed:
        print(f"\nseed {one['seed']}: {one['failure']}\n  {one['again']}")
        if one["case"]:
            print(f"as small as it was made (scripts/swarm --case FILE):\n{one['case']}")


def _flat(value: Any) -> str:
    return (
        ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
    )


def _play_one(options: argparse.Namespace) -> int:
    """One case, here, with its events in a file."""
    try:
        case = draw(options.start) if options.case is None else _case(options.case)
        file = None if options.trace is None else options.trace.open("w")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or no case
        say(f"swarm: {' '.join(str(error).split())[:300]}")
        return 2
    trace = KeptTrace(file)
    try:
        failed = failure(case, trace)
    finally:
        if file is not None:
            trace.flush()
            file.close()
    if options.json:
        print(json.dumps({"seed": case.seed, "failure": failed, "case": case.to_text()}))
    else:
        print(case.to_text(), failed or "nothing wrong", sep="\n")
    return int(bool(failed))


def _case(file: Path) -> Case:
    """Raises OSError, or ValueError where there is no case in it."""
    text = file.read_text()
    try:
        return Case.parse(text)
    except (AttributeError, KeyError, LookupError, TypeError, ValueError, yaml.YAMLError) as error:
        raise ValueError(
            f"{file}: found no case ({type(error).__name__}: {error}); allowed: what a failing "
            "seed has printed"
        ) from None


# -- mutants ---------------------------------------------------------------------------------------


def hunt(name: str, start: int, seeds: int) -> tuple[int, int, str]:
    """Plants a bug and plays seeds until it is found: (how many it took, the seed, how it failed);
    a seed of -1 where it was not. A seed that fails without it does not count.
    """
    for number, seed in enumerate(range(start, start + seeds), 1):
        with MUTANTS[name].planted():
            failed = failure(draw(seed))
        if failed and not failure(draw(seed)):
            return number, seed, failed
    return seeds, -1, ""


def _mutants(options: argparse.Namespace) -> int:
    names = options.names or list(MUTANTS)
    if unknown := [name for name in names if name not in MUTANTS]:
        say(f"mutants: found {', '.join(unknown)}; allowed: {', '.join(MUTANTS)}")
        return 2
    work = partial(hunt, start=options.start, seeds=options.seeds)
    results: dict[str, dict[str, Any]] = {}
    for name, result, wrong in fleet.each(work, names, options.jobs, HANG_S * 5):
        seeds, seed, failed = result or (None, None, wrong)
        found = seed is None or seed >= 0  # a bug that hangs a seed is found, too
        results[name] = {"found": found, "seeds": seeds, "seed": seed, "failure": failed}
        say(f"mutants: {name}: {f'found, seed {seed}' if found else 'NOT FOUND'}")
    missed = [name for name in names if not results[name]["found"]]
    if options.json:
        print(json.dumps({"mutants": results, "missed": missed}))
    else:
        for name in names:
            one = results[name]
            told = f"in {one['seeds']} seeds" if one["found"] else "NOT FOUND"
            print(f"{name:<30} {told:<14} {MUTANTS[name].what}")
            print(f"{'':<30} {'':<14} {one['failure'][:120]}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
