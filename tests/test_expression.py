"""Conditions over named values: what they mean, and how mistakes in them are told."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pddrt.errors import BadInput
from pddrt.expression import Value, nearest, parse
from pddrt.grammar import MAX_DEPTH

ROW: dict[str, Value] = {
    "ttft_s": 2.5,
    "tpot_s": 0.02,
    "pipeline": "P-RLD-MD",
    "handoff.gap_s": None,
    "handoff.ids": 64,
    "wan_bytes.kv": 3 * 2**20,
    "slo_met": False,
    "finish_reason": "length",
    "a": 7,
    "b": 2,
    "links.wan.a>b.bytes": 10,
}


def value(text: str) -> Value:
    return parse(text).bound(ROW).value(ROW.__getitem__)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ttft_s>2 and pipeline=p-rld-md", True),
        ("ttft_s > 2 s and not slo_met", True),
        ("ttft_s > 2600ms", False),
        ("tpot_s <= 20 ms", True),
        ("wan_bytes.kv == 3 MiB", True),
        ("wan_bytes.kv < 100 Mbit/s * 1 s", True),
        ("a - b = 5", True),
        ("a -b = 5", True),
        ("2 + 3 * 4 - -1", 15),
        ("(2 + 3) * 4 / 8", 2.5),
        ("1 - 2 - 3", -4),
        ("50 % * 8", 4),
        ("not ttft_s > 2 or a = 7", True),
        ("a = 1 or a = 7 and b = 2", True),
        ("not (a = 1 or a = 7)", False),
        ("pipeline ~ '^p-.*md$'", True),
        ("finish_reason !~ 'abort|reject'", True),
        ("pipeline != 'p-md' and 'P-RLD-MD' = pipeline", True),
        ("p-rld-md = pipeline", True),
        ("slo_met = false", True),
        ("`links`.wan.`a>b`.bytes / 0 = none", True),
    ],
)
def test_what_expressions_come_to(text: str, expected: Value) -> None:
    assert value(text) == expected


@pytest.mark.parametrize("sign", ["=", "!=", "<", "<=", ">", ">="])
def test_what_is_missing_compares_with_nothing(sign: str) -> None:
    assert value(f"handoff.gap_s {sign} 1 s") is False
    assert value(f"handoff.gap_s + 1 {sign} 1 s") is False
    assert value("handoff.gap_s = none") is True
    assert value("handoff.ids != none and not handoff.ids = null") is True


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("ttft_s => 2", 9, "found '>'; expected a name, a number"),
        ("ttft_s > 2 &", 12, "allowed: and, or, not"),
        ("1 < ttft_s < 3", 12, "comparisons make no chain"),
        ("(ttft_s > 2", 12, r"expected '\)' for the '\(' in column 1"),
        ("ttft_s > 2 bananas", 10, "a unit that is unknown; allowed: s, ms"),
        ("pipeline = 'p-md", 12, "the quote is never closed"),
        ("", 1, "found the end; expected a name"),
        ("ttft_s pipeline", 8, "found 'pipeline'; expected and, or, or the end"),
        ("ttft > 2", 1, "found 'ttft', which is no field; nearest: ttft_s"),
        ("gap_s > 2", 1, "nearest: handoff.gap_s"),
        ("a-b > 2", 1, "for a difference write 'a - b'"),
        ("ttft_s = tpot", 10, "found 'tpot', which is no field; nearest: tpot_s"),
        ("p-md = pd", 1, "no field"),
        ("ttft_s > '2'", 10, "found the text '2'; expected a number"),
        ("ttft_s and a = 7", 1, r"found 2\.5; expected a condition"),
        ("ttft_s ~ '2'", 1, r"found 2\.5; expected a text"),
        ("pipeline ~ '('", 12, "is no regular expression"),
        ("pipeline ~ ttft_s", 12, "expected a text to search for"),
        ("pipeline = 3", 12, "compares the text 'P-RLD-MD' with the number 3"),
        ("9e40 h < 1", 1, "out of all proportion"),
        ("a # b", 3, "found '#'; allowed: names"),
        ("(" * 100 + "a", MAX_DEPTH + 2, "nested deeper"),
    ],
)
def test_mistakes_are_told_with_their_column(text: str, column: int, message: str) -> None:
    with pytest.raises(BadInput, match=rf"column {column}: .*{message}"):
        value(text)


def test_names_may_be_asked_for_before_anything_is_known() -> None:
    expression = parse("pdd.ttft_s.p90 < 0.6 * naive.ttft_s.p90 and kind = wan")
    assert expression.names == ("pdd.ttft_s.p90", "naive.ttft_s.p90", "kind", "wan")
    found: dict[str, Value] = {"pdd.ttft_s.p90": 1.0, "naive.ttft_s.p90": 2.0, "kind": "wan"}
    assert expression.value(found.__getitem__) is True
    assert expression.bound(found).names == ("pdd.ttft_s.p90", "naive.ttft_s.p90", "kind")
    del found["naive.ttft_s.p90"]
    with pytest.raises(BadInput, match=r"column 24: .*it has no such name"):
        expression.value(found.__getitem__)


def test_a_number_is_no_condition() -> None:
    with pytest.raises(BadInput, match=r"'ttft_s' comes to 2\.5; allowed: a condition"):
        parse("ttft_s").bound(ROW).holds(ROW.__getitem__)
    assert not parse("slo_met").bound(ROW).holds(ROW.__getitem__)


def test_the_nearest_names_are_those_that_end_alike_or_look_alike() -> None:
    known = ["handoff.gap_s", "ttft_s", "ttft_legs.prefill", "ttft_legs.transfer"]
    assert nearest("gap_s", known)[0] == "handoff.gap_s"
    assert nearest("ttft_legs", known)[:2] == ["ttft_legs.prefill", "ttft_legs.transfer"]
    assert nearest("zzz", known) == []


@given(st.text(max_size=40))
def test_any_text_is_an_expression_or_bad_input(text: str) -> None:
    with suppress(BadInput):
        expression = parse(text)
        assert expression.text == text
        expression.bound(ROW).value(ROW.__getitem__)


@given(
    st.recursive(
        st.integers(0, 99).map(str),
        lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
            lambda t: f"({t[0]} {t[1]} {t[2]})"
        ),
        max_leaves=12,
    )
)
def test_arithmetic_is_that_of_numbers(text: str) -> None:
    assert value(text) == eval(text)  # the same grammar, read by Python
