"""What `scripts/bench` measures this program with. Its figures are for a quiet machine; here it is
checked that ways take turns, that figures are what they are called, and that each bench runs.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import overhead, sim
from benchmarks.rounds import against, by_turns, table

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "bench"


def test_ways_take_turns_and_the_first_round_is_not_counted() -> None:
    calls: list[str] = []

    def way(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    found = by_turns({name: lambda name=name: way(name) for name in "abc"}, 3)  # type: ignore[misc]
    rounds = ["".join(calls[at : at + 3]) for at in range(0, len(calls), 3)]
    assert rounds == ["cab", "abc", "bca", "cab"], "each round once each, in an order that turns"
    assert {name: len(of) for name, of in found.items()} == {"a": 3, "b": 3, "c": 3}
    assert found["a"] == [4.0, 9.0, 11.0]


def test_a_ratio_is_of_medians_and_has_the_range_of_rounds_beside_it() -> None:
    row = against([3.0, 1.0, 2.0, 9.0, 2.0], [1.0, 1.0, 1.0, 3.0, 2.0])
    assert row == {"measured": 2.0, "reference": 1.0, "ratio": 2.0, "ratios": [1.0, 3.0]}
    result = table("x", "s", {"row": row | {"limit": 1.5}}, rounds=5)
    assert (result["ratio"], result["limit"]) == ({"row": 2.0}, {"row": 1.5})
    assert result["rounds"] == 5


def test_the_script_knows_every_bench_and_no_other() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    files = (ROOT / "scripts/benchmarks").glob("*.py")
    ours = {path.stem for path in files} - {"__init__", "rounds"}
    told = re.search(r"\n  ([a-z |]+)\) run=\(python -m", text)
    assert told is not None
    assert set(told[1].split(" | ")) == ours
    allowed = re.search(r"allowed: ([a-z, ]+)\"", text)
    assert allowed is not None
    assert set(allowed[1].split(", ")) >= ours | {"handoff"}


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads(capsys.readouterr().out)
    return found


def test_sim_counts_what_a_run_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["sim", "--rounds", "1", "--requests", "8", "--json"])
    sim.main()
    result = printed(capsys)
    assert result["amounts"]["requests"] == 8
    assert result["amounts"]["events"] > 500
    rates = result["measured"]
    assert rates["events"] / rates["requests"] == pytest.approx(
        result["amounts"]["events"] / 8, rel=1e-3
    )


def test_overhead_measures_runs_that_lack_what_they_should(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs: dict[tuple[str, ...], overhead.Run] = {}

    class Kept(overhead.Run):
        def execute(self, *args: object) -> object:
            result = super().execute()
            runs[tuple(self._without)] = self
            assert (self.folder / "events.jsonl").exists() == ("events" not in self._without)
            return result

    monkeypatch.setattr(overhead, "Run", Kept)
    monkeypatch.setattr(sys, "argv", ["overhead", "--rounds", "1", "--requests", "8", "--json"])
    overhead.main()
    result = printed(capsys)
    assert result["ratio"].keys() == {"event log", "invariants"}
    assert {without: run.monitor.checked > 0 for without, run in runs.items()} == {
        (): True,
        ("events",): True,
        ("invariants",): False,
    }
    assert len({run.trace.count for run in runs.values()}) == 1
