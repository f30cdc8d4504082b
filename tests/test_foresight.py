"""What was believed against what came: figures from events; what the observer sees of caches."""

from __future__ import annotations

import pytest

from pddrt import foresight
from pddrt import trace as ev
from pddrt.foresight import BINS, Foresight
from pddrt.policy.anomaly import Anomaly
from pddrt.policy.route import Pdd
from pddrt.trace import Event, Seconds
from pddrt.types import MS, SECOND, US
from pddrt.workload import Session, Turn

from .cluster import Cluster, Played


def told(*events: Event) -> Foresight:
    hears = Foresight()
    for event in events:
        hears(event)
    return hears


def took(request: str, took_ms: int, expected_ms: int | None) -> ev.TransferTook:
    expected = None if expected_ms is None else expected_ms * MS
    return ev.TransferTook(0, request, "p0", "md0", 1000, took_ms * MS, expected, 5_000)


def test_an_estimates_error_has_a_sign() -> None:
    router = told(took("a", 10, 30), took("b", 50, 40), took("c", 9, None)).summary(SECOND)[
        "router"
    ]
    assert (router["transfers"], router["estimates"]) == (3, 2)
    error = {name: str(value) for name, value in router["error_s"].items()}
    assert error["mean"] == "-0.005000000"
    assert error["mean_abs"] == "0.015000000"
    assert (error["p10"], error["p90"]) == ("-0.020000000", "0.010000000")
    assert told().summary(0)["router"]["error_s"]["mean"] is None


def test_bets_are_right_unless_they_were_taken_back() -> None:
    routed = [
        ev.Routed(0, r, "P-RLD-MD", "p0", "rld0", "md0", 10, 5, None, "") for r in ("a", "b", "c")
    ]
    spared = [ev.Spared(0, "a", "held", 5, 10, 100), ev.Spared(0, "b", "cut", 5, 10, 40)]
    resumed = ev.Resumed(0, "a", 3, "the answer goes on")
    anomaly = told(*routed, *spared, resumed).summary(SECOND)["anomaly"]
    assert (anomaly["held"], anomaly["cut"], anomaly["right"], anomaly["wrong"]) == (1, 1, 1, 1)
    assert (anomaly["bytes_saved"], anomaly["tokens_unsent"]) == (40, 10)
    assert anomaly["share"] == 0.666667


def test_the_drift_is_a_series_of_bounded_length_and_what_is_left_of_each_session() -> None:
    samples = [
        ev.CacheSampled(n * MS, f"s{n % 3}.{n // 3}", 100, 80, 0, 80 - n // 10) for n in range(400)
    ]
    drift = told(*samples).summary(400 * MS)["cache_drift"]
    assert drift["samples"] == 400
    assert len(drift["series"]) == BINS
    assert sum(point["samples"] for point in drift["series"]) == 400
    first, last = drift["series"][0], drift["series"][-1]
    assert first["held_tokens"] == {"prefill": 80.0, "relay": 0.0, "main": 80.0}
    assert first["behind_tokens"] == 0
    assert last["behind_max_tokens"] == 39
    assert drift["sessions"] == {
        "count": 3,
        "behind_max_tokens": 39,
        "behind_mean_tokens": 39.0,
    }
    assert str(last["t_s"]) == str(Seconds(400 * MS * 47 // 48))


def test_a_series_of_many_samples_is_nearly_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Summed up as they come, a sample may count to the part beside its own, and none is lost."""
    samples = [
        ev.CacheSampled(n * n * US, f"s{n % 7}.{n // 7}", 100, 80, 0, 80 - n % 50)
        for n in range(3000)
    ]
    end = samples[-1].t + 1
    exact = told(*samples).summary(end)["cache_drift"]
    monkeypatch.setattr(foresight, "EXACT", 100)
    summed = told(*samples).summary(end)["cache_drift"]
    assert summed["sessions"] == exact["sessions"]
    assert sum(p["samples"] for p in summed["series"]) == summed["samples"] == 3000
    assert [p["t_s"].ns for p in summed["series"]] == [p["t_s"].ns for p in exact["series"]]
    for part, of in zip(summed["series"], exact["series"], strict=True):
        assert abs(part["samples"] - of["samples"]) <= 2 + of["samples"] // 16
        assert abs(part["behind_tokens"] - of["behind_tokens"]) < 1


def test_bets_of_a_request_that_is_over_still_count() -> None:
    def bet(name: str) -> ev.Spared:
        return ev.Spared(0, name, "held", 5, 10, 100)

    heard = told(bet("a"), bet("b"), ev.Resumed(0, "b", 3, "on"), bet("c"))
    before = heard.summary(SECOND)["anomaly"]
    for name in ("a", "b", "never heard of"):
        heard.forget(name)
    assert heard.summary(SECOND)["anomaly"] == before
    assert (before["right"], before["wrong"], before["bytes_saved"]) == (2, 1, 200)


def conversation(anomaly: Anomaly | None) -> Played:
    turns = tuple(Turn(letter * 100, 20, 2 * SECOND) for letter in "abcd")
    return Cluster(rate=500_000, policy=Pdd(0), anomaly=anomaly).play([Session(0, 0, turns)])


def test_spared_requests_let_the_main_decoders_cache_fall_behind() -> None:
    """P holds each former turn, and so does MD; but MD nothing at all where all was spared."""
    with_filter = conversation(Anomaly(0, 21, share=1.0))
    without = conversation(None)
    kept = without.events(ev.CacheSampled)
    spared = with_filter.events(ev.CacheSampled)
    for before, after in zip(kept, spared, strict=True):
        assert isinstance(before, ev.CacheSampled)
        assert isinstance(after, ev.CacheSampled)
        assert before.prefill == before.main
        assert after.prefill == before.prefill
        assert after.main == 0
    assert [e.prefill > 100 * n for n, e in enumerate(kept)] == [False, True, True, True]  # type: ignore[attr-defined]
