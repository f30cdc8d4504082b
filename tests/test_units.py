"""Quantities: what is read, exactly; what is refused, and how; formatting inverts parsing."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pddrt import units
from pddrt.types import MS, SECOND, US


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("300 Mbit/s", 37_500_000),
        ("300mbit", 37_500_000),
        ("300 Mbps", 37_500_000),
        ("1 Gb/s", 125_000_000),
        ("100 Gbit/s", 12_500_000_000),
        ("50 MB/s", 50_000_000),
        ("3.35 TB/s", 3_350_000_000_000),
        ("2 KiB/s", 2048),
        ("0.1 Gbit/s", 12_500_000),
        ("1e3 kbit/s", 125_000),
        ("8 bit/s", 1),
        ("0 Mbit/s", 0),
        (0, 0),
    ],
)
def test_rates(text: object, bytes_per_s: int) -> None:
    assert units.parse_rate(text) == bytes_per_s


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("15 ms", 15 * MS), ("5us", 5 * US), ("5 µs", 5 * US), ("3 s", 3 * SECOND),
        ("2 min", 120 * SECOND), ("1.5 h", 5400 * SECOND), ("7 ns", 7), ("0.1 s", 100 * MS),
        ("0 s", 0), (0, 0), ("1e-3 s", MS),
    ],
)  # fmt: skip
def test_durations(text: object, ns: int) -> None:
    assert units.parse_duration(text) == ns


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1 GiB", 1 << 30), ("50 KB", 50_000), ("50 kB", 50_000), ("93 MB", 93_000_000),
        ("256MiB", 256 << 20), ("1.5 KiB", 1536), ("17 B", 17), ("17 bytes", 17),
    ],
)  # fmt: skip
def test_sizes(text: object, size: int) -> None:
    assert units.parse_size(text) == size


def test_frequencies_and_compute() -> None:
    assert units.parse_frequency("0.5/s") == 0.5
    assert units.parse_frequency("30/min") == 0.5
    assert units.parse_frequency("36 / hour") == 0.01
    assert units.parse_compute("989.4 TFLOPS") == 989_400_000_000_000
    assert units.parse_compute("2 GFLOP/s") == 2_000_000_000


PARSERS: list[tuple[Callable[[object], object], str, str]] = [
    (units.parse_rate, "1 Mbit/s", units.RATES),
    (units.parse_duration, "1 ms", units.DURATIONS),
    (units.parse_size, "1 MB", units.SIZES),
    (units.parse_frequency, "1/s", units.FREQUENCIES),
    (units.parse_compute, "1 GFLOPS", units.COMPUTES),
]


@pytest.mark.parametrize(("parse", "good", "allowed"), PARSERS)
@pytest.mark.parametrize(
    "bad",
    [
        5, 1.5, "5", -5, float("nan"), float("inf"), True, None, [], {}, "", "ms", "1 parsec",
        "nan ms", "inf s", "1_000 ms", "1e999999999 ms", "1e400 Mbit/s", "0x10 MB", "\u0661 ms",
        "9" * 40_000, "1 ms 2", "1,5 ms", "1e-40 s",
    ],
)  # fmt: skip
def test_refused_with_what_was_found_and_what_is_allowed(
    parse: Callable[[object], object], good: str, allowed: str, bad: object
) -> None:
    parse(good)
    with pytest.raises(ValueError, match=r"^found ") as error:
        parse(bad)
    message = str(error.value)
    assert message.endswith(f"allowed: {allowed}")
    assert len(message) < 300
    assert "\n" not in message


def test_messages_say_which_mistake_it_was() -> None:
    def message(parse: Callable[[object], object], value: object) -> str:
        with pytest.raises(ValueError) as error:
            parse(value)
        return str(error.value)

    assert "a number without a unit" in message(units.parse_rate, 50)
    assert "a number without a unit" in message(units.parse_duration, "50")
    assert "negative" in message(units.parse_duration, "-5 ms")
    assert "unit 'Mb' is unknown" in message(units.parse_size, "5 Mb")
    assert "unit 'MB' is unknown" in message(units.parse_rate, "5 MB")
    assert "below the smallest step" in message(units.parse_rate, "1 bit/s")
    assert "below the smallest step" in message(units.parse_duration, "0.1 ns")
    assert "out of all proportion" in message(units.parse_size, "1e30 GB")
    assert "no usable frequency" in message(units.parse_frequency, "0/s")


ROUND_TRIPS = [
    (units.parse_rate, units.format_rate), (units.parse_duration, units.format_duration),
    (units.parse_size, units.format_size), (units.parse_compute, units.format_compute),
]  # fmt: skip


@given(value=st.integers(0, units.LARGEST), which=st.sampled_from(ROUND_TRIPS))
def test_formatting_is_exact(
    value: int, which: tuple[Callable[[object], int], Callable[[int], str]]
) -> None:
    parse, show = which
    assert parse(show(value)) == value


@given(value=st.floats(1e-9, 1e9))
def test_frequency_formatting_is_exact(value: float) -> None:
    assert units.parse_frequency(units.format_frequency(value)) == value


@given(value=st.integers(1, units.LARGEST), digits=st.integers(1, 6))
def test_short_formatting_is_close(value: int, digits: int) -> None:
    shown = units.format_rate(value, digits=digits)
    error = abs(Fraction(units.parse_rate(shown)) - value)
    assert error <= max(Fraction(value) / 10 ** (digits - 1), 1)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (units.format_rate(37_500_000), "300 Mbit/s"),
        (units.format_rate(12_345_678, digits=3), "98.8 Mbit/s"),
        (units.format_duration(600 * SECOND), "10 min"),
        (units.format_duration(1_500_000), "1.5 ms"),
        (units.format_duration(0), "0 s"),
        (units.format_duration(1_234_567_890, digits=3), "1.23 s"),
        (units.format_size(1 << 30), "1 GiB"),
        (units.format_size(93_000_000), "93 MB"),
        (units.format_size(23_040_000, digits=3), "23 MB"),
        (units.format_compute(989_400_000_000_000), "989.4 TFLOPS"),
        (units.format_frequency(0.5), "0.5/s"),
    ],
)
def test_formats(shown: str, expected: str) -> None:
    assert shown == expected


def test_shown_is_short_printable_and_one_line() -> None:
    assert units.shown("a\nb\x1b[31m") == r"'a\nb\x1b[31m'"
    assert len(units.shown("x" * 10_000)) < 60
    assert units.shown([1, 2]) == "a list of 2"
    assert units.shown(None) == "nothing"
