"""Comparing settings: the same requests under each, and differences that are differences."""

from __future__ import annotations

import csv
import importlib
import json
import re
import signal
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pddrt import document
from pddrt.comparing import page as compare_page
from pddrt.comparing import show as compare_show
from pddrt.comparing.assertions import Assertion
from pddrt.comparing.axes import values
from pddrt.comparing.columns import FILE, Comparison, columns
from pddrt.comparing.contrast import mean, ratios
from pddrt.comparing.pairing import Outcome, other_prompt, pairs
from pddrt.errors import BadInput, RunFailed
from pddrt.metrics import LEGS
from pddrt.report.slowness import PARTS
from pddrt.run import Run
from pddrt.trace import Seconds, TokensReceived, dumps
from pddrt.workload_fields import Sessions

from .commands import Call, Done, called
from .recordings import SMALL

SCENARIO = (
    SMALL
    + """\
pipeline: {policy: pdd, relay_above: 20 ms}
workload: {kind: sessions, sessions: 4, turns: 2, rate: 4/s, output_tokens: 24, prompts: random,
           prompt_tokens: 150}
slo: {ttft: 150 ms}
"""
)
REAL = [f"instances.{name}.engine=torch" for name in ("p0", "rld0", "md0")]
Json = dict[str, Any]
run_module = importlib.import_module("pddrt.run")  # pddrt.run itself is a function


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A scenario in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(SCENARIO)
    return "small.yaml"


def compared(small: str, *overrides: str, vary: Sequence[str] = (), **options: Any) -> Json:
    """The table of a comparison in the folder `here`."""
    mine = {k: options.pop(k) for k in ("baseline", "repeat", "assertions") if k in options}
    made = columns(small, overrides, vary=vary, **options)
    comparison = Comparison(made, out=Path("here"), **mine)
    comparison.prepare()
    result = comparison.execute()
    result.raise_for_status()
    assert Path("here", FILE).read_text() == dumps(result.table) + "\n"
    return result.table


def leaves(value: Any) -> Iterator[Any]:
    for inner in value.values() if isinstance(value, dict) else ():
        yield from leaves(inner)
    if not isinstance(value, dict):
        yield value


def of(table: Json, column: str) -> Json:
    return next(c for c in table["columns"] if c["name"] == column)  # type: ignore[no-any-return]


def requests(folder: str) -> dict[str, Json]:
    lines = Path("here", folder, "requests.jsonl").read_text().splitlines()
    return {r["id"]: r for r in map(json.loads, lines)}


def prompts(folder: str) -> dict[str, list[int]]:
    lines = Path("here", folder, "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines if '"Accepted"' in line]
    return {e["request"]: e["prompt_ids"] for e in events}


# -- what is compared ------------------------------------------------------------------------------


def test_a_policy_compared_with_itself_shows_no_difference(small: str) -> None:
    table = compared(small, policies="pdd,pdd,naive,naive", baseline="naive")
    assert [c["name"] for c in table["columns"]] == ["naive", "pdd", "pdd-2", "naive-2"]
    base, same = of(table, "naive"), of(table, "naive-2")
    for column in (base, same):
        assert set(leaves(column["ratios"])) == {1.0, None}
    told = same["pairs"]
    assert (told["requests"], told["other_answers"], told["only_here"]) == (8, 0, 0)
    for measure in ("ttft", "e2e"):
        parts, change = told[measure].pop("parts"), told[measure].pop("change_s")
        assert told[measure] == {
            "compared": 8, "faster": 0, "slower": 0, "same": 8, "largest_wins": [],
            "largest_losses": [],
        }  # fmt: skip
        assert change.ns == 0
        assert {(part["change_s"].ns, part["mostly"]) for part in parts.values()} == {(0, 0)}
    for told in same["intervals"]["ratio"].values():
        assert {one for interval in told.values() for one in interval.values()} == {1.0}
    assert set(leaves(of(table, "pdd")["ratios"])) - {1.0, None}, "others do differ"


def test_numbers_are_those_of_the_runs(small: str) -> None:
    table = compared(small, policies="pdd,naive")
    for column in table["columns"]:
        (folder,) = column["folders"]
        summary = json.loads(Path("here", folder, "summary.json").read_text())
        mine = json.loads(dumps(column))
        for key in ("requests", "ttft_s", "e2e_s", "tokens", "goodput_rps", "cost"):
            assert mine[key] == summary[key]
        wan = summary["links"]["wan"]
        carried = {"kv": wan["kv_bytes"], "ids": wan["ids_bytes"], "all": wan["bytes"]}
        assert mine["wan_bytes"] == carried
    pdd, naive = table["columns"]
    assert (pdd["instances"]["used"], naive["instances"]["used"]) == (3, 2)
    assert naive["instances"]["by_role"]["relay"] == {"used": 0, "of": 1, "busy_fraction": None}
    assert (pdd["pipelines"], naive["pipelines"]) == ({"P-RLD-MD": 8}, {"P-MD": 8})
    for key in ("ttft_s", "e2e_s"):
        for what, ratio in naive["ratios"][key].items():
            assert ratio == naive[key][what].ns / pdd[key][what].ns
    assert naive["ratios"]["wan_bytes"]["ids"] == 0


def test_winners_and_losers_are_told_with_what_made_the_difference(small: str) -> None:
    table = compared(small, policies="pdd,naive")
    told = of(table, "naive")["pairs"]["ttft"]
    here, base = requests("naive"), requests("pdd")
    changes = {n: here[n]["ttft_s"] - base[n]["ttft_s"] for n in base}
    assert told["slower"] == sum(here[n]["ttft_s"] > 1.05 * base[n]["ttft_s"] for n in base) > 3
    worst = sorted(changes, key=lambda n: -changes[n])[:3]
    assert [one["id"] for one in told["largest_losses"]] == worst
    for one in json.loads(dumps(told["largest_losses"])):
        name, leg = one["id"], one["mostly"]
        assert (one["baseline_s"], one["here_s"]) == (base[name]["ttft_s"], here[name]["ttft_s"])
        legs = {k: here[name]["ttft_legs"][k] - base[name]["ttft_legs"][k] for k in LEGS}
        assert leg == max(legs, key=lambda k: legs[k]) == "transfer"
        assert one["mostly_s"] == pytest.approx(legs[leg], abs=1e-9)


def test_prompts_hold_nothing_that_a_column_has_made(small: str) -> None:
    """With live answers these two settings would ask other questions from the second turn on."""
    table = compared(small, *REAL, vary=["sampling.temperature=0.0,0.9"])
    told = table["columns"][1]["pairs"]
    assert told["other_answers"] > 0
    assert told["requests"] == 8
    assert prompts("temperature=0.0") == prompts("temperature=0.9")
    assert len(prompts("temperature=0.0")) == 8
    assert table["notes"] == [
        "answers in the prompts are scripted, where the scenario has the model's own"
    ]
    assert compared(small, "workload.turns=1", policies="pdd,naive")["notes"] == []


def test_a_prompt_that_differs_is_a_failure(small: str) -> None:
    comparison = Comparison(columns(small, policies="pdd,naive"), out=Path("here"))
    comparison.prepare()
    other = Run(columns(small, policies="pdd,naive", seed=4)[0].scenario)
    other.prepare()
    comparison._places[1].waiting[0]._sessions = other._sessions
    result = comparison.execute()
    with pytest.raises(RunFailed, match=r"^naive: not the requests of pdd: s0\.0 has other pr"):
        result.raise_for_status()
    assert of(result.table, "naive")["pairs"] is None
    assert of(result.table, "naive")["state"] == "failed"


def test_other_requests_that_were_asked_for_are_not_paired(small: str) -> None:
    table = compared(small, vary=["seed=1,2"])
    assert [c["seed"] for c in table["columns"]] == [1, 2]
    assert table["columns"][1]["pairs"] is None
    assert table["columns"][1]["not_paired"] == "seeds 2, where the baseline has 1"
    paired = compared(small, vary=["workload.rate=1/s,9/s"])["columns"][1]["pairs"]
    assert paired["requests"] == 8, "the same prompts at other times"


def test_a_trace_brings_its_own_prompts(small: str) -> None:
    rows = [{"timestamp": 500 * n, "input_length": 90 + n, "output_length": 7, "hash_ids": [n]}
            for n in range(3)]  # fmt: skip
    Path("some.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trace = "workload={kind: trace, format: mooncake, path: some.jsonl}"
    table = compared(small, trace, policies="pdd,naive")
    assert table["notes"] == []
    assert of(table, "naive")["pairs"]["requests"] == 3


def test_models_are_loaded_once(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load, loads = run_module.load, []

    def counted(*args: Any, **options: Any) -> Any:
        loads.append(args)
        return load(*args, **options)

    monkeypatch.setattr(run_module, "load", counted)
    made = columns(small, REAL, policies="pdd,naive", vary=["dtype=float64,float32"])
    Comparison(made).prepare()
    assert sorted(loads) == [("tiny", "float32", "cpu"), ("tiny", "float64", "cpu")]


# -- columns ---------------------------------------------------------------------------------------


def test_the_grid_is_the_product(small: str) -> None:
    vary = ["links.wan.rate=8 Mbit/s, 1 Gbit/s", "links.rdma.rate=9 Gbit/s", "seed=1,2"]
    made = columns(small, ["seed=9"], policies="pdd,naive", vary=vary, seed=8)
    assert len(made) == 8
    assert made[0].name == "pdd links.wan.rate=8 Mbit/s links.rdma.rate=9 Gbit/s seed=1"
    assert made[0].folder == "pdd-links.wan.rate=8-Mbit-s-links.rdma.rate=9-Gbit-s-seed=1"
    assert len({c.folder for c in made}) == 8
    last = made[-1].scenario
    assert (last.pipeline.policy, last.links["wan"].rate, last.seed) == ("naive", 125_000_000, 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1..2:x1.0000001 Mbit/s", "a range of more than 1000 values"),
        ("1..1e3:x2", "a range with an exponent"),
        ("1..1001:1", "a range of more than 1000 values"),
        ("1..1.0000001:x1.00000000001, 2", "a range of more than 1000 values"),
        (f"1..1.{'0' * 300}9:x1.{'0' * 300}1", "more than 1000 digits"),
        ("20..inf:1", "a range without an end"),
        ("nan..2:1", "a range without an end"),
        ("20..400 Mbit/s", "a range without a step"),
        ("1 Mbit/s..2 Mbit/s:x2", "a range with a unit before its dots"),
        ("-1..4:1", "a range with a sign"),
        ("..5:1", "a range with nothing before its dots"),
        ("1..", "a range with no number after its dots"),
        ("3..1:1", "a range that does not grow"),
        ("1..4:y", "a range whose step is no positive number"),
        ("(1,2 Mbit/s", "a bracket that is not closed"),
    ],
)
def test_a_range_that_is_none_says_why_at_once(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=f"^--vary '.*found .*{re.escape(said)}"):
        values(text)


def test_a_range_may_be_as_long_as_the_limit() -> None:
    assert values("1..1000:1 /s")[-1] == "1000/s"
    assert values("1..1024:x2")[-1] == "1024"
    assert values("../a.csv,../5") == ["../a.csv", "../5"]


def test_values_may_hold_commas_inside_brackets_and_quotes(small: str) -> None:
    vary = ["workload.prompt_tokens={min: 9, max: 10}, 20", "workload.system='a, b',it's"]
    asked = [c.scenario.workload for c in columns(small, vary=vary)]
    assert all(isinstance(workload, Sessions) for workload in asked)
    assert [(w.prompt_tokens.max, w.system) for w in asked if isinstance(w, Sessions)] == [
        (10, "a, b"), (10, "it's"), (20, "a, b"), (20, "it's"),
    ]  # fmt: skip


BAD: dict[str, tuple[list[str], list[str]]] = {
    "one column": (["--policies", "pdd"], ["found one setting, and nothing to compare it with"]),
    "none": ([], ["found one setting, and nothing to compare it with; allowed: at least two"]),
    "a hole": (["--policies", "pdd,,naive"], ["--policies 'pdd,,naive': found no value where"]),
    "no values": (["--vary", "seed"], ["--vary 'seed': write it as a.b=v1,v2"]),
    "twice": (["--vary", "seed=1,2", "--vary", "seed=3"], ["found seed a second time"]),
    "policy twice": (
        ["--policies", "pdd,naive", "--vary", "pipeline.policy=pdd"],
        ["--vary: found pipeline.policy a second time"],
    ),
    "answers": (["--vary", "workload.answers=live,scripted"], ["answers are always scripted here"]),
    "too many": (["--vary", "seed=" + ",".join("1" * 65)], ["found 65 settings in all; allowed: "]),
    "a role is missing": (
        ["--policies", "naive,pdd", "--set", "instances.rld0.role=main", "--set", "seed=x"],
        ["no instance of role relay; policy pdd needs at least one (for pdd)",
         "--set seed: seed: found 'x'; allowed: a whole number from 0 to 9,223,372,036,854,775,"],
    ),
    "in some columns": (
        ["--policies", "pdd,naive", "--vary", "links.wan.rate=3,x,1 Gbit/s"],
        ["links.wan.rate: found 3, a number without a unit; allowed: a rate such as 300 Mbit/s, "
         "10 Gbit/s or 50 MB/s (for pdd rate=3, naive rate=3)",
         "links.wan.rate: found 'x'; allowed: a rate such as"],
    ),
    "no such policy": (
        ["--policies", "pdd,frob"], ["--policies pipeline.policy: pipeline.policy: found 'frob'; "],
    ),
    "prompts too long for some": (
        ["--vary", "workload.prompt_tokens=100,5000"],
        ["the model's context of 4096 at most (for prompt_tokens=5000)"],
    ),
    "baseline": (["--policies", "pdd,naive", "--baseline", "nave"], ["did you mean 'naive'?"]),
    "rounds": (["--policies", "pdd,naive", "--repeat", "0"], ["--repeat: found 0; allowed: 1 to"]),
    "not our folder": (
        ["--policies", "pdd,naive", "--out", "."], ["--out .: found something that is not a comp"],
    ),
}  # fmt: skip


@pytest.fixture
def call(small: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    def call(*args: str) -> Done:
        return called(monkeypatch, capsys, "compare", small, *args)

    return call


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_before_anything_runs(call: Call, what: str) -> None:
    args, messages = BAD[what]
    done = call(*args)
    assert (done.code, done.out) == (2, "")
    for message in messages:
        assert message in done.err
    assert all(line.startswith("pddrt: ") for line in done.err.splitlines())
    assert {path.name for path in Path.cwd().iterdir()} == {"small.yaml"}


# -- the command -----------------------------------------------------------------------------------

TWO = ("--policies", "pdd,naive", "--out", "here")


def test_json_is_the_table_and_nothing_else(call: Call) -> None:
    done = call(*TWO, "--json")
    assert done.code == 0
    assert done.out == Path("here", FILE).read_text()
    assert [c["name"] for c in json.loads(done.out)["columns"]] == ["pdd", "naive"]
    assert done.err == "1/2 pdd\n2/2 naive\n"
    files = {path.name for path in Path("here", "naive").iterdir()}
    assert files >= {"scenario.yaml", "events.jsonl", "requests.jsonl", "summary.json"}


def test_an_older_comparison_is_replaced(call: Call) -> None:
    call(*TWO)
    again = call("--vary", "links.wan.delay=1 ms,90 ms", "--out", "here", "--json")
    assert [c["name"] for c in json.loads(again.out)["columns"]] == ["delay=1 ms", "delay=90 ms"]


def test_the_table_has_a_line_for_each_measure(call: Call) -> None:
    done = call(*TWO, "--verify")
    assert done.code == 0
    lines = [line.rstrip() for line in done.out.splitlines()]
    assert re.fullmatch(r" +pdd +naive", lines[2])
    for line in (
        r"requests finished +8 of 8 +8 of 8",
        r"by P-RLD-MD +8 +-",
        r"TTFT mean +\S+ ms = +\S+ ms \d\.\d\dx",
        r"handoff gap p99 +\S+ ms = +-",
        r"SLO met +100\.0 % = +\S+ % 0\.\d\dx",
        r"tokens by R +\d+ = +0 0\.00x",
        r"instances used +3 of 3 = +2 of 3 0\.67x",
        r"cost +- +-",
        r"verified: equal +8 +8",
        r"slower in TTFT +- +\d",
        r"  s\d\.\d  \S+ ms > \S+ ms  \d\.\d\dx  transfer \+\S+ ms",
        r"saved in here; to look at: here/compare\.html",
    ):
        assert [found for found in lines if re.fullmatch(line, found)], line
    assert "\x1b" not in done.out


def test_lost_requests_fail_it_after_all_columns_ran(call: Call) -> None:
    done = call("--policies", "naive,pdd", "--set", "deadline=270 ms", "--out", "here")
    assert done.code == 1
    table = json.loads(Path("here", FILE).read_text())
    assert [c["rounds"] for c in table["columns"]] == [1, 1]
    failed = [c["name"] for c in table["columns"] if c["state"] == "failed"]
    assert failed
    assert [line.split(":")[1].strip() for line in done.err.splitlines()[2:]] == failed
    assert "requests did not finish" in done.err


@pytest.mark.parametrize("number", [1, 2])
def test_ctrl_c_saves_what_was_measured(
    call: Call, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    execute, begun = Run.execute, []

    def pressed(self: Run, *args: Any) -> Any:
        begun.append(self)

        def press(event: object) -> None:
            if isinstance(event, TokensReceived) and len(begun) == number:
                signal.raise_signal(signal.SIGINT)
                begun.append(self)

        self.listen(press)
        return execute(self, *args)

    monkeypatch.setattr(Run, "execute", pressed)
    before = signal.getsignal(signal.SIGINT)
    done = call("--policies", "pdd,naive,pdd", "--out", "here")
    assert signal.getsignal(signal.SIGINT) is before
    assert done.code == 130
    assert done.err.endswith("pddrt: interrupted; what was measured is saved in here\n")
    table = json.loads(Path("here", FILE).read_text())
    states = ["finished"] * (number - 1) + ["interrupted"] + ["not run"] * (3 - number)
    assert [c["state"] for c in table["columns"]] == states
    assert table["interrupted"] is True
    assert f"{table['columns'][-1]['name']}: not run" in done.out


@pytest.mark.parametrize("policies", ["pdd,pdd", "pdd,naive"])
def test_nothing_is_held_against_a_column_that_was_interrupted(
    call: Call, monkeypatch: pytest.MonkeyPatch, policies: str
) -> None:
    execute, begun = Run.execute, []

    def pressed(self: Run, *args: Any) -> Any:
        begun.append(self)
        heard = iter(range(60))
        self.listen(
            lambda event: (
                self.interrupt()
                if len(begun) == 2 and isinstance(event, TokensReceived) and next(heard) == 50
                else None
            )
        )
        return execute(self, *args)

    monkeypatch.setattr(Run, "execute", pressed)
    done = call("--policies", policies, "--out", "here")
    assert done.code == 130
    assert "interrupted: " in done.out.splitlines()[1]
    assert "stopped (" in done.out.splitlines()[1]
    assert "x (" not in done.out
    table = json.loads(Path("here", FILE).read_text())
    base, here = table["columns"]
    assert base["ratios"]["ttft_s"]["mean"] == 1
    assert (here["ratios"], here["intervals"]) == (None, None)
    assert 0 < here["pairs"]["ttft"]["compared"] < base["requests"]["finished"]
    if policies == "pdd,pdd":
        assert here["pairs"]["ttft"]["same"] == here["pairs"]["ttft"]["compared"]
    assert "stopped (" in Path("here/compare.html").read_text()


def test_the_table_fits(small: str) -> None:
    table = compared(small, policies="pdd,naive", vary=["links.wan.delay=1 ms,20 ms,70 ms"])
    for width, blocks in {36: 6, 60: 5, 80: 2, 120: 1, None: 1}.items():
        console = Console(width=width or 10_000, no_color=True)
        with console.capture() as shown:
            for part in compare_show.results(table, width):
                console.print(part)
        lines = shown.get().splitlines()
        assert max(map(len, lines)) <= (width or 10_000)
        assert "…" not in shown.get(), "nothing is cut"
        assert sum(line.startswith("TTFT mean") for line in lines) == blocks
        words = set(shown.get().split())
        assert all(words >= set(column["name"].split()) for column in table["columns"])


# -- pairs, on paper -------------------------------------------------------------------------------


def outcome(ttft: int, *, transfer: int = 0, name: str = "s0.0", more: int = 100) -> Outcome:
    parts = dict.fromkeys(PARTS, 0) | {"transfer": transfer, "prefill": ttft - transfer}
    return Outcome(
        id=name, session=0, prompt="digest", prompt_tokens=9, max_tokens=5, answer="words",
        tokens=2, pipeline="P-MD", ttft=ttft, e2e=ttft + more, ttst=more, tpot=more, gap=None,
        gaps=array("q", [more]), parts={**parts, "main_decode": more},
    )  # fmt: skip


def of_seed(*outcomes: Outcome, seed: int = 1) -> dict[int, dict[str, Outcome]]:
    return {seed: {o.id: o for o in outcomes}}


@pytest.mark.parametrize(
    ("base", "here", "verdict"),
    [(100, 100, "same"), (100, 95, "same"), (100, 94, "faster"), (100, 105, "same"),
     (100, 106, "slower"), (0, 0, "same"), (0, 1, "slower")],
)  # fmt: skip
def test_five_percent_are_a_difference(base: int, here: int, verdict: str) -> None:
    told = pairs(of_seed(outcome(base)), of_seed(outcome(here)))["ttft"]
    assert {told[v] for v in ("faster", "slower", "same") if v == verdict} == {1}
    assert told["faster"] + told["slower"] + told["same"] == told["compared"] == 1


def test_requests_of_several_seeds_are_paired_seed_by_seed() -> None:
    base = of_seed(outcome(100)) | of_seed(outcome(300), seed=2)
    here = of_seed(outcome(50)) | of_seed(outcome(900), seed=2)
    told = pairs(base, here)["ttft"]
    assert (told["compared"], told["faster"], told["slower"]) == (2, 1, 1)
    assert [(one["seed"], one["here_s"].ns) for one in told["largest_losses"]] == [(2, 900)]
    assert told["change_s"].ns == (-50 + 600) // 2


def test_the_part_that_explains_a_difference_goes_its_way() -> None:
    here = of_seed(outcome(200, transfer=120, more=10))
    told = pairs(of_seed(outcome(300, transfer=200, more=500)), here)
    (ttft,), (e2e,) = (told[k]["largest_wins"] for k in ("ttft", "e2e"))
    assert (ttft["mostly"], ttft["mostly_s"].ns) == ("transfer", -80)
    assert (e2e["mostly"], e2e["mostly_s"].ns) == ("main_decode", -490)
    assert json.loads(dumps(ttft))["ratio"] == 2 / 3
    assert told["ttft"]["parts"]["transfer"]["mostly"] == 1
    assert told["ttft"]["parts"]["prefill"]["change_s"].ns == -20
    assert list(told["ttft"]["parts"]) == list(LEGS)
    for measure in ("ttft", "e2e"):
        parts = told[measure]["parts"].values()
        assert sum(of["change_s"].ns for of in parts) == told[measure]["change_s"].ns


def test_only_requests_of_both_are_paired() -> None:
    lost = replace(outcome(100), e2e=None, answer="cut")
    told = pairs(
        of_seed(outcome(100, name="a"), outcome(100, name="b")),
        of_seed(replace(lost, id="b"), outcome(9, name="c")),
    )
    assert (told["requests"], told["only_in_baseline"], told["only_here"]) == (1, 1, 1)
    assert (told["ttft"]["compared"], told["e2e"]["compared"]) == (1, 0)
    assert told["other_answers"] == 0, "an answer that was cut short is no other answer"


@pytest.mark.parametrize("change", [{"prompt": "other"}, {"max_tokens": 6}])
def test_requests_are_the_same_only_with_the_same_prompt_and_bound(change: Any) -> None:
    same, other = outcome(100), replace(outcome(100), **change)
    assert other_prompt(of_seed(same), of_seed(same)) == ""
    assert other_prompt(of_seed(same), of_seed(other)).startswith("s0.0 has other prompts")
    assert other_prompt(of_seed(same), of_seed(replace(other, prompt=""))) == "", "never accepted"


def test_several_seeds_are_told_by_their_means() -> None:
    trees = [
        {"a": Seconds(5), "b": {"c": 1.5, "d": None}, "e": "ok", "g": 8, "h": True},
        {"a": Seconds(1), "b": {"c": None, "d": None}, "e": "degraded", "g": 8, "h": False},
        {"a": Seconds(6), "b": {"c": 0.5, "d": None}, "e": "ok", "f": 2, "g": 8, "h": False},
    ]
    found = mean(trees)
    assert found["a"].ns == 4
    assert {**found, "a": 4} == {
        "a": 4, "b": {"c": 1.0, "d": None}, "e": "ok", "f": 2, "g": 8, "h": True,
    }  # fmt: skip
    assert isinstance(found["g"], int)
    assert mean([{"g": 1}, {"g": 2}]) == {"g": 1.5}


@pytest.mark.parametrize(
    ("here", "base", "ratio"),
    [(3, 2, 1.5), (0, 0, 1.0), (0, 4, 0.0), (4, 0, None), (None, 2, None), (2, None, None),
     (Seconds(10**9 + 1), Seconds(10**9 + 1), 1.0), ({"a": 1}, {}, {"a": None})],
)  # fmt: skip
def test_ratios(here: Any, base: Any, ratio: Any) -> None:
    assert ratios(here, base) == ratio


# -- several seeds ---------------------------------------------------------------------------------


def test_every_column_runs_the_same_seeds(small: str) -> None:
    less = ("workload.sessions=3", "workload.output_tokens=8")
    table = compared(small, *less, policies="pdd,naive", repeat=5)
    pdd, naive = table["columns"]
    assert pdd["seeds"] == naive["seeds"] == [3, 4, 5, 6, 7]
    assert naive["folders"] == [f"naive.{seed}" for seed in pdd["seeds"]]
    saved = [json.loads(Path("here", f, "summary.json").read_text()) for f in naive["folders"]]
    assert [s["seed"] for s in saved] == pdd["seeds"]
    times = [round(s["ttft_s"]["p90"] * 1e9) for s in saved]
    assert naive["ttft_s"]["p90"].ns == round(sum(times) / 5)
    assert naive["pairs"]["requests"] == 30
    found = naive["intervals"]
    assert (found["by"], found["of"]) == ("seeds", 5)
    for key in ("ttft_s", "e2e_s"):
        interval, ratio = found["ratio"][key]["p90"], naive["ratios"][key]["p90"]
        assert 1 < interval["low"] < ratio < interval["high"]
        own = found["own"][key]["p90"]
        assert own["low"].ns < naive[key]["p90"].ns < own["high"].ns
    assert set(pdd["intervals"]["ratio"]["ttft_s"]["p90"].values()) == {1.0}


def test_a_comparison_repeats_to_the_byte(small: str) -> None:
    less = ("workload.sessions=3", "workload.output_tokens=8")
    first = compared(small, *less, policies="pdd,naive")
    assert first["columns"][1]["intervals"]["by"] == "sessions"
    assert dumps(compared(small, *less, policies="pdd,naive")) == dumps(first)


def test_deltas_are_request_by_request_and_part_by_part(small: str) -> None:
    compared(small, policies="pdd,naive", repeat=2)
    with Path("here", "deltas.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["column"], r["seed"]) for r in rows] == [("naive", "3")] * 8 + [("naive", "4")] * 8
    here, base = requests("naive.3"), requests("pdd.3")
    for row in rows[:8]:
        name = row["request"]
        changes = {leg: here[name]["ttft_legs"][leg] - base[name]["ttft_legs"][leg] for leg in LEGS}
        for leg, change in changes.items():
            assert float(row[f"{leg}_change_s"]) == pytest.approx(change, abs=1e-9)
        assert float(row["ttft_change_s"]) == pytest.approx(sum(changes.values()), abs=1e-8)
        assert float(row["e2e_change_s"]) == pytest.approx(
            sum(float(row[f"{part}_change_s"]) for part in PARTS), abs=1e-8
        )


# -- what it must come to --------------------------------------------------------------------------


def test_an_assertion_that_holds_is_told(call: Call) -> None:
    done = call(*TWO, "--assert", "pdd.ttft_s.p90 < 0.6 * naive.ttft_s.p90")
    assert done.code == 0
    (told,) = [line for line in done.out.splitlines() if line.startswith("pdd.ttft_s.p90 < 0.6")]
    summaries = [json.loads(Path("here", n, "summary.json").read_text()) for n in ("pdd", "naive")]
    here, there = (s["ttft_s"]["p90"] for s in summaries)
    assert f"holds: pdd.ttft_s.p90 = {here:.6g}, naive.ttft_s.p90 = {there:.6g}" in told
    (one,) = json.loads(Path("here", FILE).read_text())["assertions"]
    assert one["holds"] is True


def test_an_assertion_that_does_not_hold_is_exit_1_with_both_values(
    call: Call,
) -> None:
    done = call(*TWO, "--assert", "pdd.ttft_s.p90 > 0.6 * naive.ttft_s.p90", "--json")
    assert done.code == 1
    said = json.loads(done.out)["assertions"][0]["values"]
    assert re.fullmatch(
        r"pdd\.ttft_s\.p90 = \S+, naive\.ttft_s\.p90 = \S+, 0\.6 \* naive\.ttft_s\.p90 = \S+", said
    )
    assert done.err.splitlines()[-1] == (
        f"pddrt: --assert pdd.ttft_s.p90 > 0.6 * naive.ttft_s.p90: false: {said}"
    )


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("pdd.ttft_s.p90 <", "found the end; expected a name"),
        ("nave.ttft_s.p90 < 1", "'nave.ttft_s.p90' is of no column; allowed: COLUMN.PATH"),
        ("ttft_s < 1", "'ttft_s' is of no column"),
    ],
)
def test_an_assertion_that_is_none_is_refused_before_anything_runs(
    call: Call, condition: str, message: str
) -> None:
    done = call(*TWO, "--assert", condition)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert not Path("here").exists()


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("pdd.ttft_s.p95 < 1", "'pdd.ttft_s.p95' is no number of a column; nearest: ttft_s.p9"),
        ("pdd.ttft_s < 1", "'pdd.ttft_s' is no number of a column; nearest: ttft_s."),
        ("pdd.ttft_s.p90 * 2", "allowed: a condition"),
    ],
)
def test_an_assertion_about_nothing_is_exit_2(call: Call, condition: str, message: str) -> None:
    done = call(*TWO, "--assert", condition)
    assert done.code == 2
    assert message in done.err
    assert json.loads(Path("here", FILE).read_text())["columns"][1]["rounds"] == 1, "it is saved"


def test_columns_go_by_name_label_and_place(small: str) -> None:
    vary = ["links.wan.delay=1 ms,50 ms"]
    conditions = [
        "`delay=1 ms`.ttft_s.p50 < 10",
        "delay_1_ms.ttft_s.p50 = c1.ttft_s.p50",
        "c2.links.wan.kv_bytes > 0 and c2.tokens.output = c1.tokens.output",
        "c2.intervals.ratio.e2e_s.mean.low > 1 and c2.ratios.e2e_s.mean > 1",
        "c2.pairs.e2e.faster = 0 and c2.state = 'finished'",
        "c1.cost = none",
    ]
    table = compared(small, vary=vary, assertions=conditions)
    assert [c["label"] for c in table["columns"]] == ["delay_1_ms", "delay_50_ms"]
    assert [a["holds"] for a in table["assertions"]] == [True] * len(conditions)


def test_a_missing_number_makes_an_assertion_false() -> None:
    judged = Assertion("a.x < 1", ["a"]).judge({"a": {"x": None}})
    assert (judged.holds, judged.said) == (False, "a.x = missing")
    with pytest.raises(BadInput, match="is no number of a column"):
        Assertion("a.y < 1", ["a"]).judge({"a": {"x": 1}})


# -- the page --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("page")
    written = document.parse(SCENARIO, "small.yaml")
    made = columns(written, policies="pdd,naive", vary=["links.wan.delay=1 ms,20 ms"])
    comparison = Comparison(made, out=folder, repeat=2, assertions=["c1.ttft_s.p50 > 1 h"])
    comparison.prepare()
    return compare_page.write(comparison.execute()).read_text(encoding="utf-8")


def test_the_page_needs_nothing_but_itself(page: str) -> None:
    assert "<script" not in page
    assert re.findall(r"(?:src|href)=\"(?!#)", page) == []
    assert "url(" not in page
    assert "default-src 'none'; style-src 'unsafe-inline'\"" in page
    anchors, ids = re.findall(r'href="#(\w+)"', page), re.findall(r'id="(\w+)"', page)
    assert set(anchors) <= set(ids)


def test_the_page_shows_every_column_everywhere(page: str) -> None:
    names = ["pdd delay=1 ms", "pdd delay=20 ms", "naive delay=1 ms", "naive delay=20 ms"]
    for name in names:
        assert page.count(name) > 4
    for title in ("TTFT: time to first token", "ITL: each gap", "E2E: sent to finished",
                  "Handoff gap"):  # fmt: skip
        assert page.count(f"<figcaption>{title}") == 1
    first = page.split("<figcaption>TTFT: time", 1)[1].split("</figure>", 1)[0]
    assert len(re.findall(r'<path class="line s\d"', first)) == 2 * len(names), "line and swatch"
    assert "<b>does not hold</b>: c1.ttft_s.p50 = 0.0" in page
    captions = re.findall(r"<figcaption>Who lost most to the first token with ([^<]+)", page)
    assert captions == names[1:], "pdd loses by delay, too"


def test_the_page_tells_bars_that_add_up(page: str) -> None:
    """The paired timelines: each bar ends where its label says."""
    chart = page.split("<figcaption>Who lost most to the first token with naive", 1)[1]
    chart = chart.split("</svg>", 1)[0]
    boxes = re.findall(
        r'<rect class="box c-(\w+)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"', chart
    )
    rows: dict[str, float] = {}
    for _, x, y, width in boxes:
        assert y not in rows or float(x) == pytest.approx(rows[y], abs=0.7)
        rows[y] = float(x) + float(width)
    assert len(rows) == 6, "three requests, each in the baseline and here"


def test_texts_of_a_scenario_are_no_markup(small: str) -> None:
    made = columns(small, vary=["workload.system='<script>1</script>',b"])
    comparison = Comparison(made, out=Path("here"))
    comparison.prepare()
    page = compare_page.write(comparison.execute()).read_text(encoding="utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;" in page
