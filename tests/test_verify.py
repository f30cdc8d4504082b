"""The token oracle: what it says of sound runs, of planted bugs, and of single positions."""

from __future__ import annotations

import copy
import json
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pddrt.engine import reference as reference_module
from pddrt.engine.models import load
from pddrt.engine.reference import Reference
from pddrt.engine.sampling import draw, gumbel_noise
from pddrt.engine.torch import TorchEngine
from pddrt.errors import CannotRun, Interrupted, RunFailed
from pddrt.frames import Frame
from pddrt.metrics import RequestRecord
from pddrt.netem.net import Connection
from pddrt.roles.decode import Decoder
from pddrt.run import Result, Run
from pddrt.scenario import parse
from pddrt.types import Sampling, Span
from pddrt.verify import EPS, NEAR, diverges, judge, verify

SCENARIO = """
name: verified
seed: 3
clock: virtual
model: tiny
dtype: float32
links:
  rdma: {between: [a, a], rate: 10 Gbit/s, delay: 5 us}
  wan:  {between: [a, b], rate: 50 Mbit/s, delay: 10 ms, jitter: 1 ms}
instances:
  p0:   {role: prefill, site: a, chunk_tokens: 64, kv_memory: 16 MiB, threads: 1, chip: &c {flops: 1 GFLOPS, memory: 1 GB, bandwidth: 60 MB/s}, step_time: chip}
  rld0: {role: relay,   site: a, kv_memory: 16 MiB, threads: 1, chip: *c, step_time: chip}
  md0:  {role: main,    site: b, kv_memory: 16 MiB, threads: 1, chip: *c, step_time: chip}
pipeline: {policy: pdd, relay_above: 1 ms}
workload: {kind: poisson, requests: 6, rate: 20/s, output_tokens: 40, prompts: random,
           prompt_tokens: {min: 80, max: 160}}
"""  # noqa: E501

HOT = ("sampling.temperature=0.8", "sampling.top_k=40", "sampling.top_p=0.9")


def prepared(tmp_path: Path, *overrides: str, name: str = "run", verify: bool = True) -> Run:
    the_run = Run(parse(SCENARIO, "verified.yaml", overrides), out=tmp_path / name, verify=verify)
    the_run.prepare()
    return the_run


def lines(result: Result) -> list[dict[str, Any]]:
    text = (result.folder / "requests.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


# -- sound runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", ["virtual", "wall"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_sound_run_is_never_different(tmp_path: Path, dtype: str, clock: str) -> None:
    the_run = prepared(tmp_path, f"dtype={dtype}", f"clock={clock}")
    result = the_run.execute()
    result.raise_for_status()
    parity = result.summary["parity"]
    assert parity["checked"] == parity["equal"] + parity["near_ties"] == 6
    if dtype != "bfloat16":
        assert parity["equal"] == 6
    handed_over = 0
    for r in lines(result):
        assert r["parity"]["positions"] == r["output_tokens"]
        assert r["parity"]["equal"] == (r["parity"]["first_divergence"] is None)
        assert r["parity"]["margin"] <= 1
        handed_over += "R" in r["token_source"] and "M" in r["token_source"]
    # How often depends, on the wall clock, on how busy the machine is.
    least = 4 if clock == "virtual" else 1
    assert handed_over >= least, "the oracle must have looked across the handoff"


@pytest.mark.parametrize("model", ["tiny", "tiny-qwen2"])
def test_sampled_answers_are_the_references_own_draws(tmp_path: Path, model: str) -> None:
    result = prepared(tmp_path, *HOT, f"model={model}").execute()
    result.raise_for_status()
    assert result.summary["parity"] == {"checked": 6, "equal": 6, "near_ties": 0, "different": 0}
    greedy = prepared(tmp_path, f"model={model}", name="greedy").execute()
    assert [r["output_ids"] for r in lines(result)] != [r["output_ids"] for r in lines(greedy)]


def test_verifying_leaves_the_trace_as_it_is(tmp_path: Path) -> None:
    plain = prepared(tmp_path, name="plain", verify=False).execute()
    verified = prepared(tmp_path, name="verified").execute()
    assert plain.summary["parity"] is None
    assert {r["parity"] for r in lines(plain)} == {None}
    assert plain.summary["digest"] == verified.summary["digest"]


def test_every_turn_of_a_session_is_judged(tmp_path: Path) -> None:
    sessions = "{kind: sessions, sessions: 2, turns: 3, rate: 5/s, output_tokens: 20,"
    sessions += " prompts: random, prompt_tokens: 60}"
    result = prepared(tmp_path, f"workload={sessions}").execute()
    result.raise_for_status()
    assert result.summary["parity"]["equal"] == 6
    turns = {r["turn"]: r["prompt_tokens"] for r in lines(result)}
    assert turns[0] < turns[1] < turns[2]


def test_progress_is_told_from_nothing_to_all(tmp_path: Path) -> None:
    told: list[tuple[str, float | None]] = []
    prepared(tmp_path).execute(lambda stage, done: told.append((stage, done)))
    shares = [done for _, done in told]
    assert {stage for stage, _ in told} == {"verifying"}
    assert shares == sorted(shares, key=lambda s: s or 0.0)
    assert (shares[0], shares[-1], len(shares)) == (0.0, 1.0, 7)


def full() -> None:
    raise CannotRun("no memory")


@pytest.mark.parametrize(
    ("happens", "raised"),
    [(partial(signal.raise_signal, signal.SIGTERM), Interrupted), (full, RunFailed)],
    ids=["signal", "no memory"],
)
def test_what_was_judged_before_the_oracle_stopped_is_saved(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    happens: Callable[[], None],
    raised: type[Exception],
) -> None:
    passes = []
    real = Reference.__call__

    def third_stops(reference: Reference, ids: Sequence[int], start: int) -> Any:
        passes.append(start)
        if len(passes) == 3:
            happens()
        return real(reference, ids, start)

    monkeypatch.setattr(Reference, "__call__", third_stops)
    result = prepared(tmp_path).execute()
    with pytest.raises(raised):
        result.raise_for_status()
    assert result.summary["parity"]["checked"] == 2
    assert sum(r["parity"] is not None for r in lines(result)) == 2
    assert len(passes) == 3


# -- planted bugs ----------------------------------------------------------------------------------

Bend = Callable[[Frame, NDArray[np.uint8]], NDArray[np.uint8] | None]
"""From the KV of a frame, [layers, k/v, tokens, bytes], to what is written; None: as it is."""


class Touched:
    """The requests that a bug got at."""

    def __init__(self) -> None:
        self.requests: set[str] = set()

    def on_arrival(self, patch: pytest.MonkeyPatch, bend: Bend) -> None:
        """Bends the KV that arrives at the main decoder."""
        real = Decoder.on_kv

        def on_kv(node: Decoder, conn: Connection, frame: Frame) -> None:
            if node.spec.role == "main":
                layers = node.engine.layout.layers
                token_bytes = node.engine.layout.bytes_per_token // layers // 2
                kv = np.frombuffer(bytes(frame.payload), np.uint8)
                bent = bend(frame, kv.reshape(layers, 2, -1, token_bytes))
                if bent is not None:
                    self.requests.add(frame["request"])
                    frame = replace(frame, payload=bent.tobytes())
            real(node, conn, frame)

        patch.setattr(Decoder, "on_kv", on_kv)

    def on_extend(self, patch: pytest.MonkeyPatch) -> None:
        """Lets the main decoder rotate the ids of its extends as if they stood one further on."""
        make, forward = TorchEngine.__init__, TorchEngine._forward

        def named(engine: Any, *args: Any, name: str = "engine", **options: Any) -> None:
            make(engine, *args, name=name, **options)
            engine.instance = name

        def shifted(engine: Any, spans: Sequence[Span]) -> Any:
            extends = {s.request for s in spans if len(s.tokens) > 1}
            if engine.instance != "md0" or not extends:
                return forward(engine, spans)
            self.requests |= extends
            off = torch.tensor([[int(s.request in extends) for s in spans for _ in s.tokens]])
            module = engine._module
            engine._module = lambda position_ids, **rest: module(
                position_ids=position_ids + off, **rest
            )
            try:
                return forward(engine, spans)
            finally:
                engine._module = module

        patch.setattr(TorchEngine, "__init__", named)
        patch.setattr(TorchEngine, "_forward", shifted)


def shift_by_one(touched: Touched, patch: pytest.MonkeyPatch) -> None:
    """Position i gets the KV of i - 1; the first what an unused slot holds; the last is lost."""
    last: dict[str, NDArray[np.uint8]] = {}

    def bend(frame: Frame, kv: NDArray[np.uint8]) -> NDArray[np.uint8]:
        before = last.get(frame["request"], np.zeros_like(kv[:, :, :1]))
        last[frame["request"]] = kv[:, :, -1:]
        return np.concatenate([before, kv[:, :, :-1]], axis=2)

    touched.on_arrival(patch, bend)


def zero_one_chunk(touched: Touched, patch: pytest.MonkeyPatch) -> None:
    """The first chunk of a prompt that is not at its beginning arrives as zeros."""

    def bend(frame: Frame, kv: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        first = frame["start"] > 0 and frame["request"] not in touched.requests
        return np.zeros_like(kv) if first else None

    touched.on_arrival(patch, bend)


def stale_page(touched: Touched, patch: pytest.MonkeyPatch) -> None:
    """One page keeps what another request had there."""
    former: dict[str, NDArray[np.uint8]] = {}

    def bend(frame: Frame, kv: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        if frame["request"] in touched.requests or kv.shape[2] < 16:
            return None
        others = [page for request, page in former.items() if request != frame["request"]]
        former[frame["request"]] = kv[:, :, :16]
        return np.concatenate([others[-1], kv[:, :, 16:]], axis=2) if others else None

    touched.on_arrival(patch, bend)


def rotate_one_further(touched: Touched, patch: pytest.MonkeyPatch) -> None:
    """RoPE is off by one where the main decoder extends."""
    touched.on_extend(patch)


@pytest.mark.parametrize("bug", [shift_by_one, zero_one_chunk, stale_page, rotate_one_further])
def test_a_planted_bug_reads_different(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bug: Callable[[Touched, pytest.MonkeyPatch], None],
) -> None:
    """In float32; a bug can only be seen where it tips an id, so answers are of some length."""
    touched = Touched()
    bug(touched, monkeypatch)
    the_run = prepared(tmp_path, "workload.requests=20", "workload.output_tokens=160")
    result = the_run.execute()
    verdicts = {
        r["id"]: r["parity"]["verdict"]
        for r in lines(result)
        if "M" in r["token_source"] and r["id"] in touched.requests
    }
    found = [r for r, verdict in verdicts.items() if verdict == "different"]
    print(f"{bug.__name__}: {len(found)} of {len(verdicts)} requests that it touched")
    assert len(verdicts) >= 15
    assert len(found) >= 0.95 * len(verdicts)
    parity = result.summary["parity"]
    assert parity["different"] == len(found), "nobody else is accused"
    assert parity["equal"] == 20 - len(found)
    with pytest.raises(RunFailed, match=rf"{len(found)} of 20 requests differ.*s\d+\.0 in \d+ of"):
        result.raise_for_status()
    for r in lines(result):
        if r["id"] in found:
            assert r["token_source"][r["parity"]["first_divergence"]] == "M", "only M was wrong"
            assert r["parity"]["margin"] > 1


# -- the reference pass ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("model", ["tiny", "tiny-qwen2"])
def test_the_pass_is_transformers_own_to_the_last_bit(model: str, dtype: str) -> None:
    module: Any = load(model, dtype).module
    plain = copy.deepcopy(module)
    plain.set_attn_implementation("sdpa")
    rng = random.Random(5)
    reference = Reference(module)
    for length in (1, 2, 17, 300):
        ids = [rng.randrange(256) for _ in range(length + 1)]
        with torch.inference_mode():
            wanted = plain(torch.tensor([ids[:-1]]), use_cache=False).logits[0].double().numpy()
        rows = np.concatenate(list(reference(ids, 1)))
        assert rows.dtype == (np.float64 if dtype == "float64" else np.float32)
        assert np.array_equal(rows, wanted)


def test_a_long_answer_is_passed_over_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = load("tiny", "float64").module
    reference = Reference(module)
    ids = [(7 * i) % 256 for i in range(200)]
    whole = np.concatenate(list(reference(ids, 50)))
    passes = []
    real = module.forward

    def counted(*args: Any, **options: Any) -> Any:
        passes.append(options["input_ids"].shape[1])
        return real(*args, **options)

    monkeypatch.setattr(module, "forward", counted)
    monkeypatch.setattr(reference_module, "LOGITS_BYTES", 70 * 8 * module.config.vocab_size)
    parts = list(reference(ids, 50))
    assert passes == [119, 189, 199]
    assert [len(part) for part in parts] == [64, 6, 64, 6, 10]
    assert np.abs(np.concatenate(parts) - whole).max() < 1e-12


# -- one position ----------------------------------------------------------------------------------


def fixed(*rows: Sequence[float]) -> Callable[[Sequence[int], int], Iterator[NDArray[np.float64]]]:
    """A reference that says `rows` of every answer, in two blocks."""
    table = np.array(rows, dtype=np.float64)

    def reference(ids: Sequence[int], start: int) -> Iterator[NDArray[np.float64]]:
        assert len(ids) - start == len(table)
        yield table[:1]
        yield table[1:]

    return reference


def test_a_request_is_as_bad_as_its_worst_position() -> None:
    eps = 2.0**-7  # the bound is 4 * eps * 4 = 1/8
    own, near, far = [0.0, 4.0, 1.0], [3.9, 4.0, 1.0], [3.0, 4.0, 1.0]
    said = judge(fixed(own, near, far, near, far), [9], [1, 0, 0, 0, 1], Sampling(), eps)
    assert (said.verdict, said.first_divergence) == ("different", 2)
    assert (said.positions, said.near_ties, said.differences) == (5, 2, 1)
    assert said.margin == pytest.approx(8.0)
    assert said.margin_logits == pytest.approx(1.0)
    said = judge(fixed(own, near, far), [9], [1, 0, 1], Sampling(), eps)
    assert (said.verdict, said.first_divergence, said.margin) == (
        "near_tie",
        1,
        pytest.approx(0.8),
    )
    said = judge(fixed(own, near, far), [9], [1, 1, 1], Sampling(), eps)
    assert (said.verdict, said.first_divergence, said.margin) == ("equal", None, 0.0)


def test_equals_are_a_tie_and_the_lowest_id_is_the_choice() -> None:
    row = np.array([1.0, 2.0, 2.0], np.float32)
    assert diverges(row, 1, Sampling(), 5, EPS["float32"]) is None
    assert diverges(row, 2, Sampling(), 5, EPS["float32"]) == (0.0, NEAR * 2.0**-23 * 2.0)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, 5, 0.9, 3)])
def test_what_is_no_choice_at_all_is_different(sampling: Sampling) -> None:
    sick, well = [0.0, float("nan"), 1.0], [0.0, 9.0, float("-inf")]
    for rows, ids in (([sick, well], [0, 1]), ([well, well], [1, 3])):
        said = judge(fixed(*rows), [9], ids, sampling, 2.0**-23)
        assert (said.verdict, said.margin, said.differences) == ("different", None, 1)
        json.dumps(said.to_json(), allow_nan=False)


def rounded_draws(
    rng: np.random.Generator, sampling: Sampling, error: float
) -> tuple[NDArray[np.float64], set[int]]:
    """Logits, and the ids that they yield at position 4 when each errs by up to error / 2."""
    logits = rng.normal(0.0, 1.5, 24).round(1)
    errors = rng.uniform(-error / 2, error / 2, (40, 24))
    return logits, {draw(logits + e, sampling, 4) for e in errors}


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1.0), (1, 1.0), (6, 1.0), (0, 0.8), (0, 0.99), (6, 0.7), (24, 0.5)]
)
def test_whatever_rounding_can_draw_is_within_its_error(top_k: int, top_p: float) -> None:
    rng = np.random.Generator(np.random.PCG64(top_k * 100 + int(100 * top_p)))
    flips = 0
    for seed in range(60):
        sampling = Sampling(0.7, top_k, top_p, seed)
        logits, drawn = rounded_draws(rng, sampling, 0.3)
        eps = 0.3 / NEAR / float(np.abs(logits).max())
        for token in drawn:
            if (found := diverges(logits, token, sampling, 4, eps)) is not None:
                flips += 1
                assert found[0] <= found[1]
    assert flips >= 10, "rounding must have tipped some draws"


def test_an_id_far_below_the_cut_is_different_though_its_noise_is_best() -> None:
    logits = np.array([6.0, 5.0, 2.0, 1.0, 0.5])
    for sampling in (Sampling(3.0, top_k=2), Sampling(3.0, top_p=0.6)):
        lucky = next(seed for seed in range(1000) if draw(logits, Sampling(3.0, seed=seed), 7) == 3)
        found = diverges(logits, 3, replace(sampling, seed=lucky), 7, EPS["float32"])
        assert found is not None
        assert found[0] > 1.0
        # Only just outside, it is a near tie, and as near as the edge is.
        logits[3] = 5.0 - 1e-7
        near = diverges(logits, 3, Sampling(3.0, top_k=2, seed=lucky), 7, EPS["float32"])
        assert near is not None
        assert 0.9e-7 < near[0] < 1.1e-7 < near[1]
        logits[3] = 1.0


def test_without_cuts_the_deficit_is_what_the_noisy_scores_say() -> None:
    rng = np.random.Generator(np.random.PCG64(1))
    for seed in range(50):
        logits = rng.normal(0.0, 2.0, 30)
        scores = logits + 0.8 * gumbel_noise(seed, 4, np.arange(30))
        found = diverges(logits, int(scores.argsort()[-3]), Sampling(0.8, seed=seed), 4, 2.0**-7)
        assert found is not None
        assert found[0] == pytest.approx(np.sort(scores)[-1] - np.sort(scores)[-3])
        assert found[1] == 4 * 2.0**-7 * np.abs(logits).max()


def test_the_coarsest_dtype_of_a_request_is_the_references() -> None:
    dtypes = {"p0": "float64", "rld0": "bfloat16", "md0": "float32"}
    asked: list[str] = []

    def reference(dtype: str) -> Any:
        asked.append(dtype)
        return fixed([4.0, 3.999, 0.0])

    def record(name: str, relay: str | None) -> RequestRecord:
        about = {"prompt_ids": (9,), "ids": [1], "sources": "M"}
        return RequestRecord(name, 0, 0, 0, prefill="p0", relay=relay, main="md0", **about)

    relayed, straight = record("s0.0", "rld0"), record("s1.0", None)
    unanswered = RequestRecord("s2.0", 0, 0, 0)
    complaint = verify([relayed, straight, unanswered], dtypes, reference)
    assert asked == ["bfloat16", "float32"]
    assert relayed.parity is not None
    assert relayed.parity["verdict"] == "near_tie"
    assert straight.parity is not None
    assert straight.parity["verdict"] == "different"
    assert unanswered.parity is None
    assert complaint.startswith("1 of 2 requests differ from the reference: s1.0 in 1 of 1 tokens")
