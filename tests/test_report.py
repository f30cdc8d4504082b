"""The report of a recorded run: what it says, that it needs nothing else, and that any remains of a
run folder will do.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pddrt import recording
from pddrt.errors import BadInput, CannotRun
from pddrt.metrics import Recorder
from pddrt.recording import LEFT_OUT
from pddrt.report import slowness, svg
from pddrt.report.page import make
from pddrt.report.timeline import Timeline, covered
from pddrt.types import SECOND

from .recordings import copied, lines, recorded

VOID = {"meta", "br", "input", "link", "img", "hr"}


class Page(HTMLParser):
    """What a browser makes of a page: its elements, its text, what its scripts hold."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.inside: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style", "title", "desc"):
            self.inside.append(tag)
            if tag == "script":
                self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if self.inside and self.inside[-1] == tag:
            self.inside.pop()

    def handle_data(self, data: str) -> None:
        if "script" in self.inside:
            self.scripts[-1] += data
        elif not self.inside:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.elements if name == tag]

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.scripts[0])
        return found


def reported(folder: Path) -> Page:
    return Page(make(folder).html.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def queued(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long prompts that come at once, over a slow link: the slowest waits for its KV."""
    return recorded(
        tmp_path_factory.mktemp("runs") / "queued",
        "handoff.yaml",
        "workload.requests=5",
        "workload.rate=20/s",
        "workload.output_tokens=20",
        "pipeline.policy=naive",
    )


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One request loses both its streams of KV, and is tried again; another loses an instance."""
    return recorded(
        tmp_path_factory.mktemp("runs") / "again",
        "faults.yaml",
        "workload.sessions=8",
        "workload.turns=1",
        "faults=[{do: reset, on: {event: KVSent, dst: md-1, nth: 2}}, "
        "{do: crash, instance: rld-0, at: 400 ms, for: 100 ms}]",
    )


# -- what it says ----------------------------------------------------------------------------------


def test_the_first_sentence_names_the_slowest_request_and_its_largest_leg(queued: Path) -> None:
    row = max(lines(queued), key=lambda r: r["ttft_s"])
    leg = max(row["ttft_legs"], key=lambda name: row["ttft_legs"][name])
    assert leg == "transfer", "what this run is for"
    text = reported(queued).text
    said = re.search(
        r"The slowest to its first token was (\S+): .*? Its largest part was (\w+)", text
    )
    assert said is not None
    assert said.groups() == (row["id"], leg)
    assert "of KV from p0 to md0 over wan a>b" in text
    assert re.search(r"\d other transfers? shared", text), "why it took so long"


def test_parts_of_every_request_add_up_to_all_of_its_time(storm: Path, rounds: Path) -> None:
    rows = lines(storm) + lines(rounds)
    for row in rows:
        assert sum(slowness.parts(row).values()) == round(row["e2e_s"] * SECOND)
    assert any(slowness.parts(row)["handoff_gap"] for row in rows)
    assert any(slowness.parts(row)["no_token"] for row in rows), "one that was cancelled early"


def test_hidden_and_exposed_wire_time_are_all_wire_time(storm: Path) -> None:
    read = recording.opened(storm)
    recorder, timeline = Recorder(read.roles()), Timeline()
    for event in read.events():
        recorder(event)
        timeline(event)
    hidden = exposed = 0
    for record in recorder.requests.values():
        for wire in slowness.wire_times(record, timeline):
            pieces = timeline.wires[wire.attempt, wire.dst].pieces
            assert wire.hidden + wire.exposed == covered([(a, b) for a, b, _ in pieces])
            hidden, exposed = hidden + wire.hidden, exposed + wire.exposed
            if wire.first and record.legs is not None:
                assert wire.exposed <= record.legs["transfer"]
    assert hidden
    assert exposed


def test_what_went_wrong_and_what_became_of_it_comes_first(storm: Path, rounds: Path) -> None:
    page = reported(storm)
    box, _, rest = page.text.partition("finished / all requests")
    assert "What went wrong, and what became of it" in box
    assert "What made the slowest requests slow" in rest
    took = sum(e["event"] == "FaultInjected" for e in lines(storm, "events.jsonl"))
    assert f"{took} faults took effect" in box
    users = [r for r in lines(storm) if r["detail"] == "cancelled by the client"]
    assert f"{len(users)} cancelled by the user: {users[0]['id']}" in box
    assert "What went wrong" not in reported(rounds).text.partition("finished / all requests")[0]


def test_requests_that_were_tried_again_are_told_at_once(again: Path) -> None:
    box, _, rest = reported(again).text.partition("finished / all requests")
    tried = [r["id"] for r in lines(again) if r["attempts"] > 1]
    assert tried, "what this run is for"
    assert f"{len(tried)} answered by another attempt elsewhere: {tried[0]}" in box
    assert "No request failed." in box
    assert f"tried again elsewhere (answered): {tried[0]}" in rest


def test_the_table_of_faults_says_whom_each_hit_and_from_when_its_time_counts(storm: Path) -> None:
    text = reported(storm).text.partition("Whom a fault hit is read")
    (crash,) = (e for e in lines(storm, "events.jsonl")
                if e["event"] == "FaultInjected" and e["do"] == "crash")  # fmt: skip
    assert f"The workload began at {crash['t_s'] - 0.3:.3f} s" in text[0], "its fault is at 300 ms"
    for row in lines(storm):
        if row["detail"] == "cancelled by the client":
            assert f"the user cancels {row['id']}1 cancelled by the user: {row['id']}" in text[2]


def test_goodput_says_what_it_counts_and_over_which_time(storm: Path, queued: Path) -> None:
    assert "goodput: finished requests (no SLO is asked for); over" in reported(storm).text
    text = reported(queued).text
    assert "goodput: finished with TTFT at most 2 s, TPOT at most 30 ms, " in text
    assert re.search(r"of all requests; over [\d.]+ s, first arrival to last finish", text)


def test_every_request_is_in_a_table_that_needs_no_script(storm: Path) -> None:
    page = reported(storm)
    linked = [a["data-request"] for a in page.all("a") if "data-request" in a]
    assert {row["id"] for row in lines(storm)} <= set(linked)


def test_charts_say_what_they_show_and_use_letters(rounds: Path) -> None:
    text = make(rounds).html.read_text(encoding="utf-8")
    charts = re.findall(r"<svg .*?</svg>", text, re.S)
    titled = [chart for chart in charts if 'role="img"' in chart]
    assert len(titled) > 10
    for chart in titled:
        assert re.search(r'aria-label="[^"]+"><title>[^<]+</title><desc>[^<]+</desc>', chart), (
            chart[:200]
        )
    for letter in "PRM":
        assert f">{letter}</text>" in text


def test_figures_that_went_over_a_link_carry_the_fidelity_verdict(
    rounds: Path, tmp_path: Path
) -> None:
    summary = json.loads((rounds / "summary.json").read_text())
    summary["provenance"]["fidelity"]["verdict"] = "degraded"
    folder = copied(rounds, tmp_path / "run", summary=json.dumps(summary).encode())
    assert reported(rounds).text.count("network: exact") > 6
    page = reported(folder)
    assert "network: exact" not in page.text
    assert page.text.count("network: degraded") > 6
    assert "too busy to keep the network's times" in page.text


def test_violations_come_first_with_the_events_that_led_to_them(
    rounds: Path, tmp_path: Path
) -> None:
    summary = json.loads((rounds / "summary.json").read_text())
    summary["invariants"] |= {
        "violations": ["twice: s0.0 was freed twice"],
        "led_to": ["{the event}"],
    }
    folder = copied(rounds, tmp_path / "run", summary=json.dumps(summary).encode())
    text = reported(folder).text
    assert text.index("1 invariant violated.") < text.index("What made the slowest")
    assert "{the event}" in text


# -- the chart that moves --------------------------------------------------------------------------


def drawn_rows(page: Page) -> dict[str, tuple[dict[str, Any], list[tuple[str, int, int, int]]]]:
    """Each request of the chart by name: its fields, and its (kind, start, end, attempt)."""
    data, found = page.data, {}
    for shown in data["rows"]:
        row = dict(zip(data["fields"], shown, strict=True))
        flat = row["segments"]
        kinds = [data["kinds"][kind][0] for kind in flat[::4]]
        found[row["id"]] = row, list(zip(kinds, flat[1::4], flat[2::4], flat[3::4], strict=True))
    return found


def test_segments_of_a_request_are_what_its_record_says(rounds: Path) -> None:
    drawn = drawn_rows(reported(rounds))
    for row in lines(rounds):
        shown, segments = drawn[row["id"]]
        spans = {}
        for kind, start, end, attempt in segments:
            assert 0 <= start <= end
            assert attempt == 0
            spans.setdefault(kind, (start, end))
        times = [round(t * 1e9) // 1000 for t in row["token_times_s"]]
        assert spans["delivery"][1] == shown["ttft"] == times[0]
        assert spans["main_decode"][1] == times[-1]
        if row["handoff"] is None:
            assert "handoff_gap" not in spans
            continue
        start, end = spans["handoff_gap"]
        assert end - start == pytest.approx(row["handoff"]["gap_s"] * 1e6, abs=1)
        assert spans["relay_decode"] == (times[0], start)
        assert len(shown["rounds"]) == row["handoff"]["rounds"]
        assert sum(ids for _, ids, _ in shown["rounds"]) == row["handoff"]["ids"]


def test_parts_of_one_that_was_tried_again_follow_each_other_attempt_by_attempt(
    again: Path,
) -> None:
    drawn = drawn_rows(reported(again))
    tried = [row for row in lines(again) if row["attempts"] > 1]
    assert tried
    for row in tried:
        shown, segments = drawn[row["id"]]
        parts = [s for s in segments if not s[0].startswith("kv_")]
        assert [b for _, _, b, _ in parts[:-1]] == [a for _, a, _, _ in parts[1:]], "no overlap"
        assert parts[-1][2] == pytest.approx(row["e2e_s"] * 1e6, abs=1)
        assert "lost" in [kind for kind, *_ in parts]
        assert len(shown["attempts"]) == row["attempts"]
        assert len({attempt for *_, attempt in parts}) == row["attempts"]
        assert "attempt 1, by way of" in shown["story"]
        wires = [attempt for kind, *_, attempt in segments if kind.startswith("kv_")]
        assert row["attempts"] - 1 in wires, "KV of the attempt that counted"


def test_a_thousand_requests_make_a_page_of_less_than_three_megabytes(
    rounds: Path, tmp_path: Path
) -> None:
    """Copies of a run's requests, one after the other: what counts is what each adds."""
    once = lines(rounds)
    copies = -(-1000 // len(once))
    events = (rounds / "events.jsonl").read_text().splitlines()
    keep = [line for line in events if '"TokensMade"' not in line and '"StepBegan"' not in line
            and json.loads(line)["event"] not in LEFT_OUT]  # fmt: skip
    starting = [line for line in keep if '"request"' not in line]
    asked = [line for line in keep if '"request"' in line]
    many = [
        re.sub(r'"request":"s', f'"request":"c{i}s', line) for i in range(copies) for line in asked
    ]
    rows = [json.dumps({**row, "id": f"c{i}{row['id']}"}) for i in range(copies) for row in once]
    folder = copied(
        rounds,
        tmp_path / "run",
        events="\n".join([*starting, *many, ""]).encode(),
        requests="\n".join([*rows, ""]).encode(),
    )
    made = make(folder)
    assert len(Page(made.html.read_text()).data["rows"]) >= 1000
    assert made.html.stat().st_size < 3_000_000


# -- by itself, and safe ---------------------------------------------------------------------------


def test_the_page_needs_nothing_but_itself(storm: Path) -> None:
    page = reported(storm)
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        for name, value in attributes.items():
            assert not name.startswith("on"), f"<{tag} {name}>"
            if name in ("src", "href"):
                assert value is not None
                assert value.startswith("#")
    style = (Path(svg.__file__).parents[1] / "assets" / "report.css").read_text()
    assert "url(" not in style
    assert "@import" not in style


def test_the_only_script_that_may_run_is_ours(storm: Path) -> None:
    page = reported(storm)
    (policy,) = [m["content"] for m in page.all("meta") if m.get("http-equiv")]
    assert policy is not None
    kinds = [attributes.get("type") for attributes in page.all("script")]
    assert kinds == ["application/json", None]
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert policy.split("; ") == [
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        f"script-src 'sha256-{digest}'",
    ]


EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;<!--\u202e\x1b[2J\x00"


def test_texts_of_a_run_stay_texts(rounds: Path, tmp_path: Path) -> None:
    evil = json.dumps(EVIL + "\ud800")[1:-1]
    events = (rounds / "events.jsonl").read_text()
    events = re.sub(r'"prompt":"', lambda _: f'"prompt":"{evil}', events)
    events = re.sub(r'"text":"', lambda _: f'"text":"{evil}', events)
    events = re.sub(r'"reason":"length"', lambda _: f'"reason":"{evil}"', events)
    for name in ("p0", "s0.0"):
        events = events.replace(f'"{name}"', f'"{name}{evil}"')
    rows = (rounds / "requests.jsonl").read_text().replace('"s0.0"', f'"s0.0{evil}"')
    rows = rows.replace('"detail":""', f'"detail":"{evil}"').replace('"length"', f'"{evil}"')
    summary = json.loads((rounds / "summary.json").read_text())
    summary |= {"name": EVIL, "digest": EVIL}
    summary["provenance"]["machine"]["cpu"] = EVIL
    summary["invariants"]["violations"] = [EVIL]
    folder = copied(
        rounds,
        tmp_path / "run",
        events=events.encode(),
        requests=rows.encode(),
        summary=json.dumps(summary).encode(),
        scenario=(rounds / "scenario.yaml").read_bytes() + f"\n# {EVIL}\n".encode(),
    )
    page = reported(folder)
    assert len(page.scripts) == 2
    assert not page.all("img")
    assert "<script>alert(1)</script>" in page.text, "shown as what it is"
    for character in "\u202e\x1b\x00":
        assert character not in page.text
    at = page.data["fields"].index("prompt")
    assert page.data["rows"][0][at].startswith("</script>")


# -- what is left of a run -------------------------------------------------------------------------

FILES = {
    "events": "events.jsonl",
    "requests": "requests.jsonl",
    "summary": "summary.json",
    "scenario": "scenario.yaml",
}


def offsets(size: int) -> Sequence[int]:
    """Many places to cut: the ends, and a spread between them that no line's length divides."""
    spread = [size * i // 23 + 7 * i for i in range(1, 23)]
    return sorted({0, 1, 2, 40, size // 2, size - 2, size - 1, *spread} & set(range(size)))


@pytest.mark.parametrize("file", FILES)
def test_a_file_cut_off_anywhere_is_reported_as_such(
    rounds: Path, tmp_path: Path, file: str
) -> None:
    whole = (rounds / FILES[file]).read_bytes()
    for offset in offsets(len(whole)):
        folder = copied(rounds, tmp_path / f"at{offset}", **{file: whole[:offset]})
        made = make(folder)
        about = [what for what in made.missing if FILES[file] in what]
        # Without its last byte, a newline, a file is still all there, but for events: a digest.
        if offset < len(whole) - 1 or file == "events":
            assert about, f"{file} cut at {offset}: {made.missing}"
        page = Page(made.html.read_text(encoding="utf-8"))
        assert json.loads(made.trace.read_text())["traceEvents"]
        for what in made.missing:
            assert what in page.text
        if file != "events":
            assert all(row["id"] in page.text for row in lines(rounds))


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_not_there_is_reported_as_such(
    rounds: Path, tmp_path: Path, file: str
) -> None:
    folder = copied(rounds, tmp_path / "run", **{file: None})
    made = make(folder)
    assert any(f"{FILES[file]} is not there" in what for what in made.missing)
    text = Page(made.html.read_text(encoding="utf-8")).text
    assert all(row["id"] in text for row in lines(rounds))
    assert "Its largest part was" in text


def test_a_whole_run_lacks_nothing(rounds: Path, storm: Path) -> None:
    assert not make(rounds).missing
    assert not make(storm).missing
    assert "not complete" not in reported(storm).text


def test_events_alone_give_the_summary_and_the_requests_again(rounds: Path, tmp_path: Path) -> None:
    folder = copied(rounds, tmp_path / "run", requests=None, summary=None)
    read = recording.opened(folder)
    recorder = Recorder(read.roles())
    for event in read.events():
        recorder(event)
    read.complete(recorder)
    assert list(read.rows.values()) == lines(rounds)
    (before,) = lines(rounds, "summary.json")
    same = ("ttft_s", "itl_s", "handoff_gap_s", "handoffs", "links", "instances", "goodput_rps")
    assert {key: read.summary[key] for key in same} == {key: before[key] for key in same}


def test_unknown_and_broken_events_are_skipped_and_counted(rounds: Path, tmp_path: Path) -> None:
    known = (rounds / "events.jsonl").read_bytes().splitlines(keepends=True)
    strange = [
        b'{"event":"Telepathy","t_s":0.1,"request":"s0.0"}\n',
        b'{"event":"Telepathy","t_s":0.2}\n',
        b"no event at all\n",
        b'{"event":"Step","t_s":0.3,"instance":"md0"}\n',
        b'{"event":"KVSent","t_s":"soon","request":"s0.0"}\n',
        b'{"event":"Freed","t_s":1e999,"request":"s0.0","instance":"p0","pages":1}\n',
        b'{"event":"Freed","t_s":1.0,"request":["s0.0"],"instance":"p0","pages":1}\n',
        b"\xff\xfe\n",
    ]
    lived = b"".join([*known[:40], *strange, *known[40:]])
    folder = copied(rounds, tmp_path / "run", events=lived)
    made = make(folder)
    text = Page(made.html.read_text(encoding="utf-8")).text
    assert "events of kinds that are not known here were skipped: Telepathy (2)" in text
    assert "6 line(s) are no events of this format, the first is line 43" in text
    assert "not the file that the run wrote" in text
    assert all(row["id"] in text for row in lines(rounds))


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not a run folder"):
        make(tmp_path)
    with pytest.raises(BadInput, match="not a run folder"):
        make(tmp_path / "nowhere")


def test_a_folder_that_cannot_be_written_is_said(rounds: Path, tmp_path: Path) -> None:
    folder = copied(rounds, tmp_path / "run")
    (folder / "trace.json").mkdir()
    with pytest.raises(CannotRun, match="cannot make a report"):
        make(folder)
