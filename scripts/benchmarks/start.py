"""How long it takes to begin, wall time of whole processes:

help          `pddrt --help`, against importing typer and rich
run --help    the same of a command
first token   until the client has the first token of a model that is here: the first request of
              scenarios/quickstart.yaml, its prompt replaced by a short one; against importing
              what that takes: torch, the model class of transformers, uvloop, typer and rich
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import partial
from time import perf_counter

from benchmarks.overhead import ROOT
from benchmarks.rounds import against, by_turns, options, show, table

SCREEN = "import typer, rich.console, rich.table"
LIBRARIES = "import torch, transformers.models.llama.modeling_llama, uvloop, " + SCREEN[7:]
FIRST = """
import os
from pathlib import Path
from pddrt.run import Run
from pddrt.scenario import load
from pddrt.trace import TokensReceived
import typer, rich.console, rich.table

def first(event):
    if isinstance(event, TokensReceived):
        os._exit(0)

run = Run(load({scenario!r}, ["model={model}"]), out=Path({folder!r}), prompt="Hello.")
run.listen(first)
run.prepare()
run.execute()
os._exit(1)
"""
LIMITS = {"help": 1.5, "run --help": 1.5}


def took(*arguments: str) -> float:
    """Seconds of a Python with these arguments."""
    begun = perf_counter()
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"start: {done.stderr.decode()[-2000:]}")
    return perf_counter() - begun


def first_token(model: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        scenario = str(ROOT / "scenarios" / "quickstart.yaml")
        return took("-c", FIRST.format(scenario=scenario, model=model, folder=f"{folder}/run"))


def main() -> None:
    parser = options("start", __doc__, rounds=9)
    parser.add_argument("--model", default="smollm2-135m", help="default: smollm2-135m")
    given = parser.parse_args()
    ways = {
        "help": partial(took, "-m", "pddrt.cli", "--help"),
        "run --help": partial(took, "-m", "pddrt.cli", "run", "--help"),
        "screen": partial(took, "-c", SCREEN),
        "first token": partial(first_token, given.model),
        "libraries": partial(took, "-c", LIBRARIES),
    }
    found = by_turns(ways, given.rounds)
    pairs = {"help": "screen", "run --help": "screen", "first token": "libraries"}
    rows = {name: against(found[name], found[other]) for name, other in pairs.items()}
    for name, limit in LIMITS.items():
        rows[name]["limit"] = limit
    show(table("start", "s", rows, rounds=given.rounds, model=given.model), given.json)


if __name__ == "__main__":
    main()
