"""The index of a run folder: what it answers is what the files say, whatever is left of them."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pddrt import index
from pddrt import trace as ev
from pddrt.errors import BadInput
from pddrt.index import RunIndex
from pddrt.trace import request_of

from .recordings import copied, lines, stormy

Json = dict[str, Any]
NEWLINE = b"\n"


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With further attempts, aborted requests, and handoffs."""
    return stormy(tmp_path_factory.mktemp("storm") / "run")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexes of small runs are kept, too."""
    monkeypatch.setattr(index, "WORTH", 0)


def by_request(folder: Path) -> dict[str, list[Json]]:
    found: dict[str, list[Json]] = {}
    for event in lines(folder, "events.jsonl"):
        if "request" in event:
            found.setdefault(request_of(event["request"]), []).append(event)
    return found


def agrees(opened: RunIndex, folder: Path) -> None:
    """What the index says is what reading the files line by line says."""
    rows, events = lines(folder), lines(folder, "events.jsonl")
    assert list(opened.ids) == [r["id"] for r in rows]
    assert [opened.row(i) for i in range(len(opened))] == rows
    assert list(opened.events()) == events
    for name, of in by_request(folder).items():
        assert list(opened.events_of(name)) == of
    for number in (0, 63, 64, 65, len(events) - 1, -1):
        assert opened.event_at(number) == events[number]


def test_it_answers_what_the_files_say(storm: Path) -> None:
    opened = RunIndex.open(storm)
    agrees(opened, storm)
    assert not opened.missing


def test_columns_hold_every_scalar_field(storm: Path) -> None:
    opened, rows = RunIndex.open(storm), lines(storm)

    def at(row: Json, path: str) -> Any:
        value: Any = row
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    for name, column in opened.columns.items():
        if name == "sent_s":
            sent = {
                e["request"]: e["t_s"]
                for e in lines(storm, "events.jsonl")
                if e["event"] == "RequestSent"
            }
            assert column.tolist() == [sent[r["id"]] for r in rows]
        elif name.startswith("tokens."):
            assert column.tolist() == [r["token_source"].count(name[-1]) for r in rows]
        else:
            wanted = [at(r, name) for r in rows]
            found = [None if isinstance(v, float) and np.isnan(v) else v for v in column.tolist()]
            assert found == wanted, name
    assert {"ttft_s", "ttft_legs.prefill", "handoff.gap_s", "instances.relay", "slo_met"} <= set(
        opened.columns
    )
    assert opened.columns["prompt_tokens"].dtype == np.int64
    assert opened.columns["slo_met"].dtype == np.bool_


def test_every_event_of_a_request_names_it_first() -> None:
    """The index finds it there without parsing the line."""
    kinds = [k for k in vars(ev).values() if isinstance(k, type) and issubclass(k, ev.Event)]
    with_request = [k for k in kinds if "request" in {f.name for f in fields(k)}]
    assert len(with_request) > 20
    assert {fields(k)[1].name for k in with_request} == {"request"}


def test_names_and_texts_that_look_like_events_are_none(tmp_path: Path) -> None:
    odd = 'o"d\\é'
    told = [
        ev.RequestSent(1, odd, 0, 0, '{"event":"Freed","t_s":1,"request":"x"}\n'),
        ev.Freed(2, ev.attempt_name(odd, 1), "p0", 1),
        ev.StepBegan(3, "p0", ((odd, 0, 1),)),
    ]
    text = "".join(ev.to_line(e) + "\n" for e in told)
    (tmp_path / "events.jsonl").write_text(text, encoding="utf-8")
    opened = RunIndex.open(tmp_path)
    assert opened.unfinished == (odd,)
    assert [e["event"] for e in opened.events_of(odd)] == ["RequestSent", "Freed"]
    assert len(opened) == 0
    assert opened.missing == ("requests.jsonl is not there",)


def test_an_index_is_kept_and_used_again(
    storm: Path, tmp_path: Path, kept: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(storm, tmp_path / "run")
    RunIndex.open(folder)
    assert (folder / "index.npz").is_file()
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved, copy_function=shutil.copyfile)  # times of change are new

    def read_again(folder: Path) -> RunIndex:
        pytest.fail("the files were read, though their index is there")

    with monkeypatch.context() as only:
        only.setattr(RunIndex, "build", read_again)
        agrees(RunIndex.open(folder), folder)
        agrees(RunIndex.open(moved), moved)


def test_small_runs_need_no_index_file(storm: Path, tmp_path: Path) -> None:
    folder = copied(storm, tmp_path / "run")
    RunIndex.open(folder)
    assert not (folder / "index.npz").exists()


@pytest.mark.parametrize("file", ["requests.jsonl", "events.jsonl"])
def test_an_index_that_is_not_of_these_files_is_made_anew(
    storm: Path, tmp_path: Path, kept: None, file: str
) -> None:
    folder = copied(storm, tmp_path / "run")
    RunIndex.open(folder)
    whole = (folder / file).read_bytes().splitlines(keepends=True)
    (folder / file).write_bytes(b"".join(whole[:-3]))
    agrees(RunIndex.open(folder), folder)
    (folder / file).write_bytes(b"".join(whole[::-1]))  # as large, and other contents
    os.utime(folder / file, ns=(1, 1))
    agrees(RunIndex.open(folder), folder)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 0.999])
def test_a_damaged_index_is_made_anew(
    storm: Path, tmp_path: Path, kept: None, share: float
) -> None:
    folder = copied(storm, tmp_path / "run")
    RunIndex.open(folder)
    whole = (folder / "index.npz").read_bytes()
    at = int(share * len(whole))
    for damaged in (whole[:at], whole[:at] + bytes(16) + whole[at + 16 :]):
        (folder / "index.npz").write_bytes(damaged)
        agrees(RunIndex.open(folder), folder)


@pytest.mark.parametrize("share", [0.0, 0.31, 0.62, 0.93])
def test_files_cut_off_count_up_to_their_last_whole_line(
    storm: Path, tmp_path: Path, share: float
) -> None:
    def cut(file: str) -> bytes:
        whole = (storm / file).read_bytes()
        return whole[: int(share * len(whole)) + 7]

    rows, events = cut("requests.jsonl"), cut("events.jsonl")
    folder = copied(storm, tmp_path / "run", requests=rows, events=events)
    opened = RunIndex.open(folder)
    assert len(opened) == rows.count(b"\n")
    assert opened.num_events == events.count(b"\n")
    cuts = [f"{file} is cut off in line {text.count(NEWLINE) + 1:,}" for file, text in
            (("requests.jsonl", rows), ("events.jsonl", events))]  # fmt: skip
    assert list(opened.missing) == cuts
    for name in (*opened.ids, *opened.unfinished):
        assert all(request_of(e["request"]) == name for e in opened.events_of(name))
    for name in opened.unfinished:
        with pytest.raises(KeyError):
            opened.find(name)
    with pytest.raises(IndexError):
        opened.event_at(opened.num_events)


def test_a_broken_row_is_left_out_and_said(storm: Path, tmp_path: Path) -> None:
    whole = (storm / "requests.jsonl").read_bytes().splitlines(keepends=True)
    whole[2] = b'{"id": 7}\n'
    folder = copied(storm, tmp_path / "run", requests=b"".join(whole))
    opened = RunIndex.open(folder)
    assert len(opened) == len(whole) - 1
    assert opened.missing == ("requests.jsonl is broken in line 3",)
    assert opened.row(2) == json.loads(whole[3])
    assert opened.find(opened.row(2)["id"]) == 2


def test_a_row_that_is_not_there_any_more_is_an_error(storm: Path, tmp_path: Path) -> None:
    folder = copied(storm, tmp_path / "run")
    opened = RunIndex.open(folder)
    (folder / "requests.jsonl").write_bytes(b"")
    with pytest.raises(BadInput, match="has changed"):
        opened.row(0)
    with pytest.raises(BadInput, match="not a run folder"):
        RunIndex.open(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to_opens(storm: Path, tmp_path: Path, kept: None) -> None:
    folder = copied(storm, tmp_path / "run")
    folder.chmod(0o555)
    try:
        agrees(RunIndex.open(folder), folder)
    finally:
        folder.chmod(0o755)


def test_where_no_index_can_be_kept_the_run_opens_all_the_same(
    storm: Path, tmp_path: Path, kept: None
) -> None:
    folder = copied(storm, tmp_path / "run")
    (folder / "index.npz").mkdir()
    agrees(RunIndex.open(folder), folder)
    names = {"scenario.yaml", "events.jsonl", "requests.jsonl", "summary.json", "index.npz"}
    assert {p.name for p in folder.iterdir()} == names
