"""Step profiles: a formula fitted to samples, read back, charged in integers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from pddrt.calibrate import calibrate, shapes
from pddrt.errors import BadInput
from pddrt.profiles import NARROW, Sample, Shape, StepProfile, fit, read
from pddrt.run import Run
from pddrt.scenario import parse
from pddrt.types import Span

from .test_run import SCENARIO, requests

ABOUT = {
    "model": "tiny", "fingerprint": "f", "dtype": "float64", "device": "cpu", "threads": 1,
    "machine": "none",
}  # fmt: skip


def machine(shape: Shape) -> int:
    """A machine that is as the formula says: 2 ms and 10 us a row, 50 us a span, and attention."""
    rows = sum(n for n, _ in shape)
    narrow = sum(start + n for n, start in shape if n <= NARROW)
    wide = sum(n * start + n * (n + 1) // 2 for n, start in shape if n > NARROW)
    return 2_000_000 + 10_000 * rows + 50_000 * len(shape) + 200 * narrow + 3 * wide


def profile(noise: float = 0.0) -> StepProfile:
    rng = random.Random(5)
    samples = [
        Sample(tuple(s), round(machine(s) * (1 + rng.uniform(-noise, noise))), 5)
        for s in shapes(2048)
    ]
    return fit(samples, **ABOUT)


def test_a_machine_that_is_like_the_formula_is_found() -> None:
    fitted = profile()
    assert max(map(abs, fitted.errors)) < 1e-3
    for shape in ([(1, 700)] * 6, [(40, 300)], [(1, 90), (200, 0)], [(700, 10)]):
        assert fitted.of(shape) == pytest.approx(machine(shape), rel=0.02)


def test_noise_is_averaged_and_nothing_becomes_negative() -> None:
    fitted = profile(noise=0.1)
    assert list(fitted.base_ns) == sorted(fitted.base_ns)
    assert min(*fitted.base_ns, fitted.span_ns, fitted.read_ps, fitted.pair_ps) >= 0
    assert fitted.of([(1, 700)] * 6) == pytest.approx(machine([(1, 700)] * 6), rel=0.1)


def test_beyond_what_was_measured_the_formula_goes_on_straight() -> None:
    fitted = profile()
    first, second, third = (fitted.of([(n, 0)]) for n in (512, 1024, 1536))
    pairs = [n * (n + 1) // 2 * fitted.pair_ps // 1000 for n in (512, 1024, 1536)]
    assert second - first - (pairs[1] - pairs[0]) == pytest.approx(
        third - second - (pairs[2] - pairs[1]), rel=1e-6
    )


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(profile().dump())
    assert read(path) == profile()
    span = Span("x", (1, 2, 3), 40, (), None)
    assert read(path).cost([span]) == profile().of([(3, 40)])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2}', "\x00\x01", '{"schema": 1}'])
def test_what_is_no_profile_is_said_to_be_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=r"p\.json: not a step profile"):
        read(path)
    with pytest.raises(BadInput, match="cannot be read"):
        read(tmp_path / "none.json")


def test_the_tiny_model_is_measured_and_charged_by_its_profile(tmp_path: Path) -> None:
    """Calibrate, run by it under the virtual clock, and run the saved scenario again."""
    measured = calibrate("tiny", "float64", rounds=1)
    (tmp_path / "tiny.json").write_text(measured.dump())
    text = SCENARIO.format(model="tiny").replace("step_time: chip", "step_time: measured:tiny.json")

    def run(text: str, folder: Path, out: str) -> tuple[str, list[dict[str, object]]]:
        the_run = Run(parse(text, str(folder / "s.yaml")), out=tmp_path / out)
        the_run.prepare()
        result = the_run.execute()
        result.raise_for_status()
        return result.summary["digest"], requests(result)

    digest, done = run(text, tmp_path, "one")
    events = (tmp_path / "one" / "events.jsonl").read_text().splitlines()
    steps = [e for e in map(json.loads, events) if e["event"] == "Step" and e["sequences"] == 1]
    alone = [s for s in steps if s["decode_tokens"] == 1]
    assert alone, "some steps decode one sequence"
    fastest, slowest = measured.of([(1, 1)]), measured.of([(1, 400)])
    for s in alone:
        assert fastest - 1 <= round(1e9 * (s["t_s"] - s["start_s"])) <= slowest + 1
    saved = (tmp_path / "one" / "scenario.yaml").read_text()
    assert "measured:p0.profile.json" in saved
    assert run(saved, tmp_path / "one", "two") == (digest, done)


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(profile().dump().replace('"tiny"', '"large"'))
    text = SCENARIO.format(model="tiny").replace(
        "step_time: chip", "step_time: measured:other.json"
    )
    with pytest.raises(BadInput, match="is of large in float64; needed: tiny in float64"):
        parse(text, str(tmp_path / "s.yaml"))
    missing = text.replace("other.json", "none.json")
    with pytest.raises(BadInput, match="cannot be read: No such file"):
        parse(missing, str(tmp_path / "s.yaml"))
