"""Pictures of requests: everything that is in the records is in them, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pddrt.errors import BadInput
from pddrt.report.story import Case, picture, read

from .recordings import handed_over

ROOT = Path(__file__).parent.parent
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return handed_over(tmp_path_factory.mktemp("runs") / "run")


def relayed(folder: Path) -> Case:
    for n in range(4):
        case = read(folder, f"s{n}.0", f"request {n}")
        if case.record.switch is not None:
            return case
    raise AssertionError("no request was handed over")


def drawn(case: Case) -> ElementTree.Element:
    return ElementTree.fromstring(picture([case], "title"))


def boxes(root: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [r for r in root.iter(f"{SVG}rect") if f"c-{kind}" in r.get("class", "")]


def test_every_token_is_a_mark_of_its_maker(folder: Path) -> None:
    case = relayed(folder)
    root = drawn(case)
    for letter, kind in (("P", "prefill"), ("R", "relay_decode"), ("M", "main_decode")):
        marks = [r for r in boxes(root, kind) if r.get("width") == "1.2"]
        assert len(marks) == case.record.sources.count(letter) > 0
    at = [float(r.get("x", "")) for r in root.iter(f"{SVG}rect") if r.get("width") == "1.2"]
    assert at == sorted(at)


def test_all_rounds_are_shown_with_their_ids(folder: Path) -> None:
    case = relayed(folder)
    rounds = case.timeline.handoffs[case.record.id].sent
    assert len(rounds) > 1
    tips = [r.findtext(f"{SVG}title") for r in boxes(drawn(case), "handoff_gap")]
    assert [t for t in tips if t and t.endswith("ids")] == [f"{n} ids" for _, n, _ in rounds]


def test_what_is_quoted_is_what_was_measured(folder: Path) -> None:
    case = relayed(folder)
    text = " ".join(t.text or "" for t in drawn(case).iter(f"{SVG}text"))
    gap = case.record.gap
    assert case.record.ttft is not None
    assert gap is not None
    assert f"TTFT {case.record.ttft / 1e6:.0f} ms" in text
    assert f"gap {gap / 1e6:.3g} ms" in text


def test_requests_share_one_axis(folder: Path) -> None:
    case = relayed(folder)
    alone = {r.get("x") for r in boxes(drawn(case), "relay_decode")}
    both = ElementTree.fromstring(picture([case, case], "twice"))
    assert {r.get("x") for r in boxes(both, "relay_decode")} == alone
    assert len(boxes(both, "relay_decode")) == 2 * len(boxes(drawn(case), "relay_decode"))


def test_what_comes_later_is_cut_off(folder: Path) -> None:
    case = relayed(folder)
    assert case.record.ttft is not None
    root = ElementTree.fromstring(picture([case], "title", until=case.record.ttft))
    assert not [r for r in boxes(root, "main_decode") if r.get("width") == "1.2"]
    right = max(float(r.get("x", "")) + float(r.get("width", "")) for r in root.iter(f"{SVG}rect"))
    assert right <= 860


def test_it_stands_alone(folder: Path) -> None:
    text = picture([relayed(folder)], "title")
    assert "prefers-color-scheme: dark" in text
    assert not re.findall(r"(?:href|src)=|url\(", text)
    used = set(re.findall(r'class="[^"]*\b(c-\w+)', text))
    assert all(f".{c}" in text for c in used), "each colour has its rule"


def test_a_request_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(BadInput, match=r"no request s9\.9"):
        read(folder, "s9.9", "x")
