"""Traces: the same blocks give the same ids, scaled or not; broken rows are named.

What the public traces themselves hold is checked where they are: in the folder that PDDRT_TRACES
names, else in `shared/traces` beside this checkout. They are no part of it.
"""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from pddrt import traces
from pddrt.errors import BadInput
from pddrt.types import MS, SECOND
from pddrt.workload import Session, Workload, plan, summary
from tests.prefixes import Played, play

ADAPTER: TypeAdapter[Any] = TypeAdapter(Workload)
IDS = range(10, 50_000)
Row = dict[str, Any]


def replay(path: Path, format_name: str, seed: int = 1, **fields: Any) -> list[Session]:
    found = {"kind": "trace", "path": str(path), "format": format_name, **fields}
    return plan(ADAPTER.validate_python(found), seed, vocabulary=IDS)


def prompts(sessions: Sequence[Session]) -> list[tuple[int, ...]]:
    return [t.ids or () for s in sessions for t in s.turns]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def row(at: float, length: int, hashes: list[int], output: int = 7) -> Row:
    return {
        "timestamp": at, "input_length": length, "output_length": output, "hash_ids": hashes,
    }  # fmt: skip


def jsonl(folder: Path, *rows: Row | str) -> Path:
    path = folder / "some.jsonl"
    lines = [r if isinstance(r, str) else json.dumps(r) for r in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# -- mooncake --------------------------------------------------------------------------------------


def test_equal_blocks_are_equal_ids_and_others_are_not(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path,
        row(0, 1500, [1, 2, 3]),
        row(10, 2000, [1, 2, 4, 5]),
        row(10, 1500, [1, 2, 3]),
        row(20, 600, [6, 7]),
    )
    one, two, again, other = prompts(replay(path, "mooncake"))
    assert [len(ids) for ids in (one, two, again, other)] == [1500, 2000, 1500, 600]
    assert common(one, two) == 1024
    assert one == again
    assert common(one, other) == 0
    assert all(token in IDS for ids in (one, two, other) for token in ids)
    assert len(set(two)) > 1900
    expected = [
        t.expected.hit_tokens for s in replay(path, "mooncake") for t in s.turns if t.expected
    ]
    assert expected == [0, 1024, 1499, 0]  # the last position is always computed


def test_a_row_is_a_session_that_starts_when_it_came(tmp_path: Path) -> None:
    path = jsonl(tmp_path, row(5, 10, [1]), row(5.5, 10, [1]), "", row(3005, 10, [2], output=0))
    sessions = replay(path, "mooncake")
    assert [s.start_ns for s in sessions] == [0, MS // 2, 3000 * MS]
    assert [s.index for s in sessions] == [0, 1, 2]
    assert [[t.max_tokens for t in s.turns] for s in sessions] == [[7], [7], [1]]
    slower = replay(path, "mooncake", time_scale=2.5)
    assert [s.start_ns for s in slower] == [0, 5 * MS // 4, 7500 * MS]
    assert [s.start_ns for s in replay(path, "mooncake", time_scale=0.0)] == [0, 0, 0]


@pytest.mark.parametrize("scale", [1 / 512, 0.004, 0.01, 1 / 64, 0.1, 1 / 3, 0.7, 1.5])
def test_scaled_prompts_share_what_they_shared_in_proportion(tmp_path: Path, scale: float) -> None:
    path = jsonl(
        tmp_path,
        *(row(n, 512 * n + 100, [*range(n), 1000 + n]) for n in range(1, 20)),
    )
    scaled = prompts(replay(path, "mooncake", length_scale=scale))
    for n, ids in enumerate(scaled, 1):
        assert abs(len(ids) - scale * (512 * n + 100)) <= 0.5 or len(ids) == 1
        for m in range(1, n):
            shared = min(common(ids, scaled[m - 1]), len(scaled[m - 1]))
            assert shared == pytest.approx(scale * 512 * m, abs=0.5 + 1e-9)
    outputs = [t.max_tokens for s in replay(path, "mooncake", length_scale=scale) for t in s.turns]
    assert set(outputs) == {max(1, int(7 * scale + 0.5))}


def test_a_scale_that_leaves_nothing_of_a_block_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path, row(0, 1000, [1, 2]))
    with pytest.raises(
        BadInput, match=r"workload\.length_scale: found 0.001.* 0.00195312 and more"
    ):
        replay(path, "mooncake", length_scale=0.001)


def test_the_seed_decides_and_the_limit_changes_nothing_before_it(tmp_path: Path) -> None:
    path = jsonl(tmp_path, *(row(n, 900, [n % 3, 10 + n]) for n in range(9)))
    whole = replay(path, "mooncake")
    assert replay(path, "mooncake") == whole
    assert replay(path, "mooncake", limit=4) == whole[:4]
    assert prompts(replay(path, "mooncake", seed=2))[0] != prompts(whole)[0]


def test_nothing_is_read_past_the_limit(tmp_path: Path) -> None:
    path = jsonl(tmp_path, row(0, 10, [1]), row(1, 10, [1]), "{broken", *["x" * 1000] * 20_000)
    tracemalloc.start()
    assert len(replay(path, "mooncake", limit=2)) == 2
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5_000_000


GOOD = row(100, 600, [1, 2])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("{", "found no JSON: "),
        ('{"timestamp": 100} x', "found no JSON: Extra data (column 20)"),
        ("\udcff", "found no JSON: "),
        ("[" * 100_000, "found no JSON: "),
        ("9" * 10_000, "found no JSON: "),
        ("[1, 2]", "found a list of 2; allowed: an object"),
        ("{}", "found an empty object; needed: timestamp and others"),
        ({**GOOD, "timestamp": -1}, "timestamp: found -1; allowed: a number from 0"),
        ({**GOOD, "timestamp": 99}, "timestamp: found 99 after 100; allowed: no earlier time"),
        ({**GOOD, "timestamp": float("nan")}, "timestamp: found nan; allowed: a number from 0"),
        ({**GOOD, "timestamp": "now"}, "timestamp: found 'now'; allowed: a number"),
        ({**GOOD, "timestamp": None}, "timestamp: found nothing; needed: a number"),
        ({**GOOD, "input_length": 0}, "input_length: found 0; allowed: a whole number from 1"),
        ({**GOOD, "input_length": 600.0}, "input_length: found 600.0; allowed: a whole number"),
        ({**GOOD, "input_length": True}, "input_length: found true; allowed: a whole number"),
        (
            {**GOOD, "input_length": 10**9},
            "input_length: found 1000000000; allowed: a whole number",
        ),
        (
            {**GOOD, "input_length": 513 * 2},
            "hash_ids: found 2 of them; allowed: 3, one for each 512",
        ),
        ({**GOOD, "output_length": -4}, "output_length: found -4; allowed: a whole number from 0"),
        ({**GOOD, "hash_ids": 7}, "hash_ids: found 7; allowed: a list"),
        ({**GOOD, "hash_ids": [1, -2]}, "hash_ids[1]: found -2; allowed: a whole number from 0"),
        ({**GOOD, "hash_ids": [1, "a"]}, "hash_ids[1]: found 'a'; allowed: a whole number from 0"),
        (
            {k: v for k, v in GOOD.items() if k != "output_length"},
            "output_length: missing; needed: a",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_broken_row_is_named_by_line(tmp_path: Path, broken: Row | str, message: str) -> None:
    path = jsonl(tmp_path, GOOD, "", "?", GOOD)
    text = broken if isinstance(broken, str) else json.dumps(broken)
    path.write_bytes(path.read_bytes().replace(b"?", text.encode("utf-8", "surrogateescape")))
    with pytest.raises(BadInput) as error:
        replay(path, "mooncake")
    assert error.value.exit_code == 2
    assert len(error.value.problems) == 1, error.value.problems
    assert error.value.problems[0].startswith(f"{path}:3: {message}")


def test_broken_rows_are_all_listed_up_to_ten(tmp_path: Path) -> None:
    bad = {**GOOD, "output_length": -1}
    path = jsonl(tmp_path, *[GOOD, bad] * 4)
    with pytest.raises(BadInput) as error:
        replay(path, "mooncake")
    assert [p.split(": ")[0] for p in error.value.problems] == [f"{path}:{n}" for n in (2, 4, 6, 8)]
    with pytest.raises(BadInput) as error:
        replay(path, "mooncake", limit=3)
    assert len(error.value.problems) == 1
    with pytest.raises(BadInput) as error:
        replay(jsonl(tmp_path, *[bad] * 50), "mooncake")
    assert len(error.value.problems) == traces.MAX_PROBLEMS == 10


@pytest.mark.parametrize("format_name", ["mooncake", "weka"])
def test_what_cannot_be_read_is_said(
    tmp_path: Path, format_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput, match=r"absent\.json: no such file"):
        replay(tmp_path / "absent.json", format_name)
    with pytest.raises(BadInput, match=r"is a directory|found no requests"):
        replay(tmp_path, format_name)
    monkeypatch.delenv("PDDRT_NOWHERE", raising=False)
    with pytest.raises(BadInput, match="the environment variable PDDRT_NOWHERE is not set"):
        replay(Path("$PDDRT_NOWHERE/x"), format_name)
    empty = tmp_path / "empty.json"
    empty.write_text('{"block_size": 64, "requests": []}\n' if format_name == "weka" else "\n")
    with pytest.raises(BadInput, match=r"empty\.json: found no requests"):
        replay(empty, format_name)


def test_variables_in_a_path_are_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl(tmp_path, GOOD)
    monkeypatch.setenv("PDDRT_SOMEWHERE", str(tmp_path))
    assert len(replay(Path("$PDDRT_SOMEWHERE/some.jsonl"), "mooncake")) == 1


# -- weka ------------------------------------------------------------------------------------------


def request(at: float, length: int, hashes: list[int], **fields: Any) -> Row:
    return {
        "t": at, "type": "n", "in": length, "out": 5, "hash_ids": hashes,
        "api_time": 2.0, "think_time": 1.0, **fields,
    }  # fmt: skip


def session_file(
    folder: Path, *requests: Any, name: str = "one", indent: int | None = 1, **top: Any
) -> Path:
    path = folder / f"{name}.json"
    document = {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": requests, **top}
    path.write_text(json.dumps(document, indent=indent), encoding="utf-8")
    return path


def test_a_file_is_a_session_of_turns_with_think_times(tmp_path: Path) -> None:
    unknown: Row = request(30, 200, [1, 2, 3])
    del unknown["api_time"]
    path = session_file(
        tmp_path,
        request(0, 100, [1]),
        request(10, 140, [1, 2], think_time=8.5),
        unknown,
        request(
            50, 200, [1, 2, 3], think_time=38.0
        ),  # counts from the end of the last known answer
        request(53, 260, [1, 2, 3, 4]) | {"think_time": None},
    )
    text = path.read_text().replace('"think_time": null', '"ttft": 1')
    path.write_text(text)
    (session,) = replay(path, "weka")
    assert session.start_ns == 0
    assert [t.think_ns / SECOND for t in session.turns] == [0, 8.5, 1, 20, 1]
    assert [len(t.ids or ()) for t in session.turns] == [100, 140, 200, 200, 260]
    assert [t.expected.hit_tokens for t in session.turns if t.expected] == [0, 64, 128, 192, 192]
    (half,) = replay(path, "weka", time_scale=0.5)
    assert [t.think_ns / SECOND for t in half.turns] == [0, 4.25, 0.5, 10, 0.5]


def test_what_is_behind_the_blocks_hits_nothing(tmp_path: Path) -> None:
    path = session_file(
        tmp_path, request(0, 100, [1]), request(1, 100, [1]), request(2, 128, [1, 2])
    )
    one, same, longer = prompts(replay(path, "weka"))
    assert common(one, same) == common(one, longer) == 64


def test_a_subagent_is_a_session_beside_its_own(tmp_path: Path) -> None:
    nested = {
        "t": 10.0, "type": "subagent", "agent_id": "a",
        "requests": [request(0.5, 70, [1]), request(4, 140, [1, 9])],
    }  # fmt: skip
    path = session_file(tmp_path, request(0, 64, [1]), nested, request(20, 128, [1, 2]))
    main, beside = replay(path, "weka")
    assert [len(main.turns), len(beside.turns)] == [2, 2]
    assert [main.start_ns, beside.start_ns] == [0, 10.5 * SECOND]
    assert [t.expected.hit_tokens for t in beside.turns if t.expected] == [64, 64]
    assert [len(s.turns) for s in replay(path, "weka", limit=2)] == [1, 1]
    assert [s.start_ns for s in replay(path, "weka", time_scale=2.0)] == [0, 21 * SECOND]


def test_a_folder_is_all_of_its_sessions(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        session_file(tmp_path, request(3, 64, [1]), request(9, 128, [1, 2]), name=name)
    together = replay(tmp_path, "weka")
    assert [s.start_ns for s in together] == [3 * SECOND] * 3
    firsts = [s.turns[0].ids or () for s in together]
    assert all(common(firsts[0], other) < 64 for other in firsts[1:])  # hashes are local to a file
    assert [len(s.turns) for s in replay(tmp_path, "weka", limit=3)] == [2, 1]
    starts = [s.start_ns for s in replay(tmp_path, "weka", rate="0.1/s")]
    assert starts[0] == 3 * SECOND
    assert len(set(starts)) == 3


def test_hashes_of_global_scope_mean_the_same_in_every_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        session_file(tmp_path, request(0, 64, [1]), name=name, hash_id_scope="global")
    one, two = prompts(replay(tmp_path, "weka"))
    assert one == two


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (7, "{line}: requests[1]: found 7; allowed: an object"),
        (request(-1, 64, [1]), "{line}: requests[1].t: found -1; allowed: a number from 0"),
        (request(1, 0, [1]), "{line}: requests[1].in: found 0; allowed: a whole number from 1"),
        (request(1, 64, [1], out="5"), "{line}: requests[1].out: found '5'; allowed: a whole"),
        (request(1, 127, [1, 2]), "{line}: requests[1].hash_ids: found 2 of them; allowed: 1 at"),
        (request(1, 64, [1], api_time=-2), "{line}: requests[1].api_time: found -2; allowed: a"),
        ({"t": 1, "type": "subagent"}, "{line}: requests[1].requests: missing; needed: a list"),
        ({"t": 1, "type": "subagent", "requests": [request(0, 64, [1]), {"t": 0}]},
         "{line}: requests[1].requests[1].in: missing; needed: a whole number"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
@pytest.mark.parametrize("indent", [None, 2])
def test_a_broken_request_is_named_by_line_and_place(
    tmp_path: Path, broken: Any, message: str, indent: int | None
) -> None:
    path = session_file(tmp_path, request(0, 64, [1]), broken, request(2, 64, [1]), indent=indent)
    lines = path.read_text().splitlines()
    begins = [n for n, text in enumerate(lines, 1) if text.startswith("    {") or text == "    7,"]
    line = begins[1] if indent else 1
    with pytest.raises(BadInput) as error:
        replay(path, "weka")
    assert error.value.problems[0].startswith(f"{path}:{message.format(line=line)}")


@pytest.mark.parametrize(
    ("top", "message"),
    [
        ({"block_size": 0}, "block_size: found 0; allowed: a whole number from 1"),
        ({"hash_id_scope": "all"}, "hash_id_scope: found 'all'; allowed: local | global"),
        ({"requests": {}}, "requests: found a mapping; allowed: a list"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, top: Row, message: str) -> None:
    path = session_file(tmp_path, **top)
    with pytest.raises(BadInput, match="allowed") as error:
        replay(path, "weka")
    assert error.value.problems == (
        f"{path}:1: {message}{error.value.problems[0].split(message)[1]}",
    )
    path.write_text('{"block_size": 64,\n "requests": [}')
    with pytest.raises(BadInput, match=r"one\.json:2: found no JSON: "):
        replay(path, "weka")


# -- the public ones -------------------------------------------------------------------------------

FOLDER = Path(os.environ.get("PDDRT_TRACES", Path(__file__).parents[2] / "shared" / "traces"))
MOONCAKE, WEKA = FOLDER / "mooncake" / "synthetic_trace.jsonl", FOLDER / "weka"


def here(path: Path) -> Callable[[Callable[[], None]], Callable[[], None]]:
    reason = f"no {path.parent.name}/{path.name}; PDDRT_TRACES names the folder of public traces"
    return pytest.mark.skipif(not path.exists(), reason=reason)


def token_share(played: Sequence[Played]) -> float:
    return sum(p.hit for p in played) / sum(len(p.ids) for p in played)


@here(MOONCAKE)
def test_mooncake_hits_as_it_did() -> None:
    """65.1 % of the tokens under an infinite cache; 57.7 % of the requests below 90 %."""
    sessions = replay(MOONCAKE, "mooncake", length_scale=1 / 64)
    played = play(sessions)
    assert len(played) == 3993
    assert token_share(played) == pytest.approx(0.651, abs=0.003)
    assert sum(p.rate < 0.9 for p in played) / len(played) == pytest.approx(0.577, abs=0.01)
    found = summary(sessions)
    assert found["prefix_hits"]["of_tokens"] == pytest.approx(0.651, abs=0.003)
    assert found["arrivals"]["span_s"] == pytest.approx(1022.025)
    assert found["prompt_tokens"]["max"] == round(191378 / 64)


@here(WEKA)
@pytest.mark.parametrize("scale", [1 / 64, 1 / 13])
def test_weka_hits_as_it_did(scale: float) -> None:
    """Against the blocks of the files themselves: leading ones that a session has had before."""
    blocks = length = 0
    for path in sorted(WEKA.glob("*.json")):
        seen: set[int] = set()
        for request in json.loads(path.read_text())["requests"]:
            known = [block in seen for block in request["hash_ids"]]
            blocks += [*known, False].index(False)
            length += request["in"]
            seen.update(request["hash_ids"])
    sessions = replay(WEKA, "weka", length_scale=scale)
    assert len(sessions) == 12
    assert token_share(play(sessions)) == pytest.approx(64 * blocks / length, abs=0.001)


@here(MOONCAKE)
def test_a_little_of_a_large_trace_costs_little() -> None:
    tracemalloc.start()
    sessions = replay(MOONCAKE, "mooncake", limit=5, length_scale=1 / 16)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(sessions) == 5
    assert peak < 4_000_000
