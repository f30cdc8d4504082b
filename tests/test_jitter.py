"""Jitter as a process: mean, variance, correlation and shape against closed form, over a million
draws each; tables; order."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from pddrt.netem.jitter import (
    SHAPES,
    Delay,
    Shape,
    autocorrelation,
    format_table,
    parse_table,
)
from pddrt.netem.link import Flow, Link
from pddrt.types import MS, SECOND, US

DRAWS = 1_000_000
KNOTS = 50_000
"""Correlation times that the draws are spread over. Means are as good as so many independent
draws, or better."""
STEP = KNOTS * MS // DRAWS
MEAN, JITTER = 100 * MS, 2 * MS
NAMED = [Shape(name) for name in SHAPES]


def draws(shape: Shape, step: int = 4 * STEP) -> np.ndarray:
    """Deviations from the mean, by default five in a correlation time."""
    at, count = Delay(MEAN, JITTER, "s", shape, correlation=MS).at, KNOTS * MS // step
    found = np.fromiter((at(k * step) for k in range(count)), np.float64, count)
    return (found - MEAN) / JITTER


@pytest.fixture(scope="module")
def normal() -> np.ndarray:
    found = draws(Shape("normal"), STEP)
    assert len(found) == DRAWS
    return found


def error(spread: float) -> float:
    """Four standard errors of a mean of KNOTS independent values."""
    return 4 * spread / math.sqrt(KNOTS)


def test_a_normal_jitter_has_its_moments_and_its_quantiles(normal: np.ndarray) -> None:
    assert abs(normal.mean()) < error(1)
    assert abs(normal.var() - 1) < error(math.sqrt(2))
    assert abs((normal**3).mean()) < error(math.sqrt(15))
    assert abs((normal**4).mean() - 3) < error(math.sqrt(96))
    for z in (-2.0, -1.0, 0.0, 1.0, 2.0):
        below = 0.5 * math.erfc(-z / math.sqrt(2))
        assert abs((normal < z).mean() - below) < error(math.sqrt(below * (1 - below)))


def test_the_correlation_is_that_of_knots_on_a_circle(normal: np.ndarray) -> None:
    per = DRAWS // KNOTS
    for lag in (0.25, 0.5, 1.0, 1.5, 2.0, 3.0):
        shift = round(lag * per)
        measured = float((normal[:-shift] * normal[shift:]).mean())
        assert abs(measured - autocorrelation(lag)) < error(1.5), lag


def test_the_correlation_is_one_at_once_a_third_in_its_time_and_gone_in_twice_that() -> None:
    assert autocorrelation(0) == 1
    assert autocorrelation(1) == pytest.approx(1 / math.pi)
    assert autocorrelation(2) == pytest.approx(0, abs=1e-12)
    assert autocorrelation(2.5) == 0
    for lag in (0.3, 1.0, 1.7):  # by the integral itself
        u = (np.arange(200_000) + 0.5) / 200_000
        a, b = np.floor(u + lag), (u + lag) % 1
        here = np.cos(np.pi / 2 * u), np.sin(np.pi / 2 * u)
        there = np.cos(np.pi / 2 * b), np.sin(np.pi / 2 * b)
        same = (a == 0) * (here[0] * there[0] + here[1] * there[1])
        assert autocorrelation(lag) == pytest.approx(
            float((same + (a == 1) * here[1] * there[0]).mean()), abs=1e-4
        )


@pytest.mark.parametrize("name", ["log-normal", "uniform", "pareto"])
def test_the_other_shapes_have_the_mean_and_the_deviation_that_were_set(name: str) -> None:
    found = draws(Shape(name))
    assert abs(found.mean()) < error(1)
    # the fourth moment of a pareto of shape 3 does not exist: its variance comes in slowly
    assert found.var() == pytest.approx(1, rel=0.25 if name == "pareto" else 0.02)
    if name == "uniform":
        assert found.min() >= -math.sqrt(3) - 1e-6
        assert found.max() <= math.sqrt(3) + 1e-6
        assert abs((found < 0.5).mean() - (0.5 + 0.5 / (2 * math.sqrt(3)))) < error(0.5)
    if name == "pareto":  # P(X > x) of the unmoved one is x ** -3
        for x in (1.5, 2.0, 4.0):
            share = x**-3
            standard = (x - 1.5) / (math.sqrt(3) / 2)
            assert abs((found > standard).mean() - share) < error(math.sqrt(share))
    if name == "log-normal":
        sigma = math.sqrt(math.log1p((JITTER / MEAN) ** 2))
        skew = (math.exp(sigma**2) + 2) * math.sqrt(math.expm1(sigma**2))
        assert (found**3).mean() == pytest.approx(skew, abs=error(4))


def test_a_table_is_drawn_from_evenly() -> None:
    shape = parse_table("# four\n8192 -8192\n0 24576\n", "t")
    assert shape.table == (-1.0, 0.0, 1.0, 3.0)
    found = draws(shape)
    for value in shape.table:
        assert abs((np.abs(found - value) < 1e-6).mean() - 0.25) < error(0.5)


@pytest.mark.parametrize("shape", NAMED[1:], ids=lambda shape: shape.name)
def test_a_shape_written_as_a_table_is_the_same_delay(shape: Shape) -> None:
    """But for a log-normal one, whose figure depends on mean and deviation."""
    table = parse_table(format_table(shape), "t")
    for k in range(2000):
        a = Delay(MEAN, JITTER, "s", shape, MS).at(k * 300 * US)
        b = Delay(MEAN, JITTER, "s", table, MS).at(k * 300 * US)
        assert abs(a - b) < 0.02 * JITTER or a - MEAN > 2.5 * JITTER or b < MEAN - 2.5 * JITTER


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "found 0 values"),
        ("1", "found 1 values"),
        ("1 2\n3 x", "line 2: found 'x'"),
        ("1 2\n3.5", "line 2: found '3.5'"),
        ("1 99999999", "line 1: found 99999999"),
        ("1 2 " * 40_000, "line 1: more than 65,536 values"),
    ],
)
def test_a_table_that_is_none_is_refused_with_its_line(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_table(text, "t")


# -- order, and what it costs ----------------------------------------------------------------------


def _delays(link: Link, every: int, count: int) -> Iterator[tuple[int, int]]:
    flow = Flow()
    for k in range(count):
        link.push(k * every, flow, 100)
    for item in link.advance(count * every + SECOND):
        yield item.finish, item.due


@pytest.mark.parametrize("shape", NAMED, ids=lambda shape: shape.name)
@pytest.mark.parametrize("correlation", [None, 5 * MS, 500 * US])
def test_no_shape_and_no_correlation_reorders_a_flow(shape: Shape, correlation: int | None) -> None:
    link = Link(None, 20 * MS, 5 * MS, "s", shape=shape, correlation=correlation)
    dues = [due for _, due in _delays(link, 100 * US, 20_000)]
    assert dues == sorted(dues)
    assert len(dues) == 20_000


def test_what_order_makes_of_a_jitter_is_foretold_and_measured() -> None:
    """50 +- 40 ms that changes within 1 ms: a flow that keeps its order waits for the longest of
    all that came before, some 130 ms. What is reported is that, not what was set."""
    delay = Delay(50 * MS, 40 * MS, "s", Shape("normal"), correlation=MS)
    told = delay.effective()
    link = Link(None, 50 * MS, 40 * MS, "s", shape=Shape("normal"), correlation=MS)
    assert sum(1 for _ in _delays(link, MS // 16, 20_000)) == 20_000
    mean, deviation = link.measured_delay()
    assert told.mean > 110 * MS
    assert mean == pytest.approx(told.mean, rel=0.03)
    assert deviation == pytest.approx(told.deviation, rel=0.1)


def test_with_the_default_correlation_order_costs_nothing() -> None:
    told = Delay(50 * MS, 5 * MS, "s").effective()
    assert told.mean == pytest.approx(50 * MS, rel=0.02)
    assert told.deviation == pytest.approx(5 * MS, rel=0.1)


def test_a_delay_that_does_not_vary_is_as_it_was_set() -> None:
    assert Delay(7 * MS, 0, "s").effective() == (7 * MS, 0)
    with pytest.raises(ValueError, match="impossible correlation"):
        Delay(MS, US, "s", correlation=0)
