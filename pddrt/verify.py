"""The token oracle (`--verify`): is every id of a run what one plain pass would have chosen?

**Teacher forcing.** The ids of a request are laid under the reference, one forward pass over prompt
and answer (`pddrt.engine.reference`), and every position is judged given the ids that really came
before it. So a rounding that tipped one choice does not spoil the rest, and every later position
still counts.

**The verdict** on a position:

- `equal`: the emitted id is the reference's own choice: the engine's sampler over the reference's
  logits, with the request's seed and the same position.
- `near_tie`: the reference's score of the emitted id lies within the **bound** of its best, 4 *
  eps(dtype) * max|logit|. Batches, chunks and attention kernels round differently, and may choose
  either.
- `different` otherwise.

A request is as bad as its worst position. Its first divergence is the first position with that
verdict; its margin is the largest of all positions, 1.0 being the bound.

**Sampled ids.** The score is logit + temperature * noise, which ranks as logit / temperature +
noise does and is in the unit of the bound. Top-k and top-p cut before the draw, and an id at the
edge may have been in for the engine and out for the reference, or the reverse. The **deficit** of
an id is therefore the least b such that logits which err by b / 2 each (so differences by b) can
make the sampler emit it:

- it may survive the cuts: under top-k its logit is within b of the k-th best; under top-p the odds
  of all that is better than it by more than b, reduced by exp(-b / temperature), are below p : 1 -
  p;
- its score is within b of every id that survives *surely*: whose logit is more than b above the
  best of those cut by top-k, and which top-p keeps even with all that may be better before it, at
  odds raised by exp(b / temperature).

Without cuts that is the best score minus the id's, as in greedy decoding. A flip at an edge is a
near tie if the edge is near, and different if it is not, whatever the noise says.

Where the instances of a request differ in dtype, the coarsest is the reference's and the bound's.

**Bans.** Ids that may not be drawn at a position (see `messages.banned`) are taken out of the
logits first, as the engine does; one that was emitted all the same is different.

Left out: whether the answer ended where it should (see the invariants).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pddrt.engine.sampling import allowed, draw, gumbel_noise
from pddrt.messages import Limits, banned
from pddrt.metrics import RequestRecord
from pddrt.types import Sampling

Verdict = Literal["equal", "near_tie", "different"]
Logits = NDArray[Any]
Reference = Callable[[Sequence[int], int], Iterable[Logits]]
"""`reference(ids, start)`: blocks of logits [rows, vocabulary], row by row the scores for the ids
at positions [start, len(ids))."""

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
NEAR = 4.0
SHOWN = 3
"""So many of the requests that are different are described in the message of a failed run."""


@dataclass(frozen=True, slots=True)
class Parity:
    """The judgement of one request. Positions count from the first id of the answer.

    `margin` is the largest deficit in units of its position's bound, `margin_logits` the same
    deficit in logits; None where an id is out of the vocabulary or the logits are not finite.
    """

    verdict: Verdict
    positions: int
    near_ties: int
    differences: int
    first_divergence: int | None
    margin: float | None
    margin_logits: float | None

    def to_json(self) -> dict[str, Any]:
        """`parity` of a line of requests.jsonl."""
        return {
            "equal": self.verdict == "equal",
            "verdict": self.verdict,
            "first_divergence": self.first_divergence,
            "margin": _rounded(self.margin),
            "margin_logits": _rounded(self.margin_logits),
            "positions": self.positions,
            "near_ties": self.near_ties,
            "differences": self.differences,
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


@dataclass(frozen=True, slots=True)
class Divergence:
    """A position whose id is not the reference's own choice. In logits; infinite: no choice."""

    position: int
    deficit: float
    bound: float

    @property
    def different(self) -> bool:
        return self.deficit > self.bound

    @property
    def margin(self) -> float:
        if not self.deficit:
            return 0.0
        return self.deficit / self.bound if self.bound else math.inf


def judge(
    reference: Reference,
    prompt: Sequence[int],
    output: Sequence[int],
    sampling: Sampling,
    eps: float,
    ends: frozenset[int] = frozenset(),
) -> Parity:
    """Judges every id of `output`, the answer to `prompt`; neither may be empty. `ends`: the
    model's ids of the end of sequence.
    """
    assert prompt, "an answer to nothing"
    assert output, "nothing to judge"
    limits = Limits.of(len(prompt), len(output), ends, sampling)
    rows = (row for block in reference([*prompt, *output], len(prompt)) for row in block)
    found = []
    for at, (token, row) in enumerate(zip(output, rows, strict=True)):
        position = len(prompt) + at
        divergence = diverges(row, token, sampling, position, eps, banned(limits, position))
        if divergence is not None:
            found.append(Divergence(at, *divergence))
    different = [d for d in found if d.different]
    verdict: Verdict = "different" if different else "near_tie" if found else "equal"
    worst = max(found, key=lambda d: d.margin, default=Divergence(0, 0.0, 0.0))
    judged = math.isfinite(worst.margin)
    return Parity(
        verdict,
        len(output),
        len(found) - len(different),
        len(different),
        next((d.position for d in different or found), None),
        worst.margin if judged else None,
        worst.deficit if judged else None,
    )


def diverges(
    row: Logits,
    token: int,
    sampling: Sampling,
    position: int,
    eps: float,
    never: Collection[int] = (),
) -> tuple[float, float] | None:
    """None where `token` is what the sampler picks from `row`, but for what it may `never` pick;
    else its deficit and the bound.
    """
    if not 0 <= token < len(row) or token in never or not math.isfinite(row.max()):
        return math.inf, 0.0
    if draw(row, sampling, position, never) == token:
        return None
    scores: NDArray[np.float64] = row.astype(np.float64)
    bound = NEAR * eps * float(np.abs(scores[np.isfinite(scores)]).max())
    return _deficit(allowed(scores, never), token, sampling, position, bound), bound


def _deficit(
    logits: NDArray[np.float64], token: int, sampling: Sampling, position: int, bound: float
) -> float:
    """How far the reference is from emitting `token`, in logits (see the module's docstring)."""
    if sampling.temperature == 0:
        return float(logits.max() - logits[token])
    noise = gumbel_noise(sampling.seed, position, np.arange(len(logits)))
    scores = logits + sampling.temperature * noise
    if not 0 < sampling.top_k < len(logits) and sampling.top_p >= 1:
        return float(scores.max() - scores[token])
    cut = _Cut(logits, scores, token, sampling)
    # An error of `most` makes anything possible. The bound itself is asked first, so that the
    # verdict does not depend on how finely the deficit is found.
    most = float(max(logits.max() - logits[token], scores.max() - scores[token], bound))
    low, high = (0.0, bound) if cut.possible(bound) else (bound, most)
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if cut.possible(middle) else (middle, high)
    return high


class _Cut:
    """Can `token` be emitted if logits err? Everything is sorted by logit, best first."""

    def __init__(
        self,
        logits: NDArray[np.float64],
        scores: NDArray[np.float64],
        token: int,
        sampling: Sampling,
    ) -> None:
        order = np.argsort(-logits, kind="stable")
        self.logits = logits[order]
        self.rising = -self.logits  # as searchsorted wants it
        self.token = int(np.flatnonzero(order == token)[0])
        self.score = float(scores[token])
        self.best_score = np.maximum.accumulate(scores[order])
        self.temperature = sampling.temperature
        self.p = sampling.top_p
        self.k = sampling.top_k if 0 < sampling.top_k < len(order) else len(order)
        self.mass = np.exp((self.logits - self.logits[0]) / sampling.temperature)
        self.before = np.concatenate(([0.0], np.cumsum(self.mass)))
        """Mass of the first n."""

    def possible(self, error: float) -> bool:
        """Whether logits that err by `error` / 2 each can make the sampler emit the token."""
        if not self._may_stay(error):
            return False
        sure = bisect_left(range(self.k), True, key=lambda rank: not self._surely(rank, error))
        return sure == 0 or self.score >= self.best_score[sure - 1] - error

    def _may_stay(self, error: float) -> bool:
        if self.logits[self.token] < self.logits[self.k - 1] - error:
            return False
        better = int(np.searchsorted(self.rising, self.rising[self.token] - error))
        return self._within_p(self.before[min(better, self.k)], -error)

    def _surely(self, rank: int, error: float) -> bool:
        """Whether the id at `rank`, one of the first k, survives both cuts in any case."""
        if self.k < len(self.logits) and self.logits[rank] <= self.logits[self.k] + error:
            return False
        reach = np.searchsorted(self.rising, self.rising[rank] + error, side="right")
        return self._within_p(self.before[min(int(reach), self.k)] - self.mass[rank], error)

    def _within_p(self, mass: float, error: float) -> bool:
        """Whether top-p keeps what `mass` comes before, if odds err by exp(error / temperature)."""
        rest = self.before[self.k] - mass
        if self.p >= 1 or mass <= 0:
            return True
        if rest <= 0:
            return False
        odds = math.log(mass) - math.log(rest) + error / self.temperature
        return odds < math.log(self.p) - math.log1p(-self.p)


# -- a whole run -----------------------------------------------------------------------------------


def verify(
    requests: Iterable[RequestRecord],
    dtypes: Mapping[str, str],
    reference: Callable[[str], Reference],
    progress: Callable[[str, float], None] | None = None,
    ends: frozenset[int] = frozenset(),
) -> str:
    """Judges each request with an answer and keeps the verdict in its `parity`.

    `dtypes` are those of the instances, `reference(dtype)` is the pass in that dtype.
    `progress(stage, share done)` is called before each, `ends` are the model's ids of the end of
    sequence. Returns what is wrong, "" if nothing is.
    """

    def judged(r: RequestRecord) -> Parity:
        parts = (r.prefill, r.relay, r.main)
        dtype = max((dtypes[part] for part in parts if part is not None), key=EPS.__getitem__)
        return judge(reference(dtype), r.prompt_ids, r.ids, r.sampling, EPS[dtype], ends)

    return _judge_all(requests, judged, progress)


def verify_modelled(
    requests: Iterable[RequestRecord],
    oracle: Callable[[Sequence[int], Sequence[int], Sampling], Sequence[int]],
    progress: Callable[[str, float], None] | None = None,
) -> str:
    """As `verify`, where ids come from an oracle: equal or different, nothing between.

    `oracle(prompt, output, sampling)`: the ids that belong at the positions of `output`.
    """

    def judged(r: RequestRecord) -> Parity:
        wanted = oracle(r.prompt_ids, r.ids, r.sampling)
        wrong = [at for at, (a, b) in enumerate(zip(wanted, r.ids, strict=True)) if a != b]
        if not wrong:
            return Parity("equal", len(r.ids), 0, 0, None, 0.0, 0.0)
        return Parity("different", len(r.ids), 0, len(wrong), wrong[0], None, None)

    return _judge_all(requests, judged, progress)


def _judge_all(
    requests: Iterable[RequestRecord],
    judged: Callable[[RequestRecord], Parity],
    progress: Callable[[str, float], None] | None,
) -> str:
    answered = [r for r in requests if r.ids and r.prompt_ids]
    total = sum(len(r.prompt_ids) + len(r.ids) for r in answered)
    done = 0
    different = []
    for r in answered:
        if progress is not None:
            progress("verifying", done / total)
        parity = judged(r)
        r.parity = parity.to_json()
        if parity.verdict == "different":
            different.append(_line(r, parity))
        done += len(r.prompt_ids) + len(r.ids)
    if progress is not None:
        progress("verifying", 1.0)
    if not different:
        return ""
    shown = "; ".join(different[:SHOWN])
    more = f"; and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
    return f"{len(different)} of {len(answered)} requests differ from the reference: {shown}{more}"


def _line(r: RequestRecord, parity: Parity) -> str:
    at = parity.first_divergence
    assert at is not None
    margin = "by any measure"
    if parity.margin is not None:
        margin = f"by up to {parity.margin:.3g} times what counts as a near tie"
    return (
        f"{r.id} in {parity.differences} of {parity.positions} tokens from token {at} on "
        f"(made by {r.sources[at]}), {margin}"
    )
