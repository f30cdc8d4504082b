"""Workloads: from a description and a seed to a fixed plan of sessions and turns.

A plan is a function of the description, the seed and, for `prompts: stdlib`, of the Python whose
standard library is asked about. It holds texts, not ids: what comes before a turn's own text in its
prompt is the conversation so far, which only the client has. Traces have no texts: there, a plan
holds the ids of whole prompts.

    sessions   `sessions` conversations of `turns` turns; conversations arrive at `rate` (Poisson)
    poisson    `requests` single-turn requests that arrive at `rate` (Poisson)
    closed     `requests` single-turn requests, `concurrency` at a time: one ends, the next is sent
    trace      the requests of a public trace (see `traces`), when they came, as long as they were

The first arrival of a Poisson process is put at 0, the others follow at exponential gaps; in a
surge, at its rate.

Prompt lengths are in tokens where the caller lends a `count_tokens`; without one they are estimated
(see `prompts`). They are lengths of texts: what a chat template adds is on top, and known to the
plan where the caller lends a `Framing`.

`Turn.expected` is what a plan intends: how long the prompt will be, and how much of it an unbounded
prefix cache will hold (see `hitrate`) if requests are sent in the order of the plan. For `answers:
live` it takes every answer to be as long as it may be.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from pddrt import traces
from pddrt.errors import BadInput
from pddrt.hitrate import INTERVALS, Deck, apportion, interval
from pddrt.prompts import CountTokens, Framing, Writer, estimate
from pddrt.types import SECOND, Ns, Sampling
from pddrt.workload_fields import (
    HIT_RATES,
    Closed,
    Poisson,
    Range,
    Sessions,
    Short,
    Surge,
    SystemTokens,
    Trace,
    Workload,
)

__all__ = [
    "Workload", "Session", "Turn", "Expected", "Framing", "plan", "plan_one", "summary",
]  # fmt: skip

UNLIMITED = 1 << 40

Context = Literal["follow", "fresh", "aside"]
"""What comes before a turn's text. follow: the conversation so far. fresh: only the system prompt,
and the conversation starts over. aside: the same, but the conversation is left as it was."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Tokens of a prompt as intended, and those of them that an unbounded cache holds."""

    prompt_tokens: int
    hit_tokens: int

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens

    @property
    def interval(self) -> str:
        return INTERVALS[interval(self.hit_tokens, self.prompt_tokens)]


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user adds: `text`, sent `think_ns` after the former turn's answer has ended.

    `answer` goes into the history in place of the model's answer; None: the model's own does.
    `ids` is the whole prompt as it is, in place of system prompt, history, text and template.
    `sampling` is this request's own, seed included; None: the run's, with a seed of its own.
    """

    text: str
    max_tokens: int
    think_ns: Ns = 0
    answer: str | None = None
    ids: tuple[int, ...] | None = None
    context: Context = "follow"
    expected: Expected | None = None
    sampling: Sampling | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation that begins at `start_ns`.

    `system` begins every prompt that has no history, and so every conversation. It is the same in
    all sessions of a plan; "": none.
    """

    index: int
    start_ns: Ns
    turns: tuple[Turn, ...]
    system: str = ""


NO_FRAMING = Framing()


def plan(
    workload: Workload, seed: int, count_tokens: CountTokens | None = None, *,
    framing: Framing = NO_FRAMING, vocabulary: Sequence[int] | None = None,
) -> list[Session]:  # fmt: skip
    """The sessions in order of arrival. Play them with `workload.concurrency_limit`.

    `vocabulary`: the ids that a prompt of a trace is made of, all of a model's but the special
    ones; only traces need it, and all do. Raises CannotRun if `prompts: stdlib` finds no source of
    the standard library, BadInput if a trace cannot be read or lengths do not allow the hit rates.
    """
    if isinstance(workload, Trace):
        assert vocabulary is not None, "a trace needs the ids that its prompts may hold"
        return _replay(workload, seed, vocabulary)
    return _Planner(workload, seed, count_tokens or estimate, framing).sessions()


def plan_one(text: str, max_tokens: int) -> list[Session]:
    """A single request at once, in place of a workload."""
    return [Session(0, 0, (Turn(text, max_tokens),))]


# -- conversations ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Talk:
    """A conversation as planned so far.

    Tokens of its last prompt (0: nothing was said) and of the answer to that, and the number of
    that turn.
    """

    prompt: int = 0
    answer: int = 0
    last: int = 0


class _Planner:
    """Plans all kinds but traces, request by request, in order of arrival."""

    def __init__(
        self, workload: Sessions | Poisson | Closed, seed: int, count: CountTokens, framing: Framing
    ) -> None:
        self.workload, self.seed, self.framing = workload, seed, framing
        self.count: CountTokens = lambda text: max(1, count(text))
        self.writer = Writer(workload.prompts, count)
        self.live = workload.answers == "live"
        self.turns = self._turn_numbers()
        self.total = sum(self.turns)
        self.long = self._long_ones()
        # before its first turn a conversation can have nothing but the system prompt in a cache
        self.opening = {0, *accumulate(self.turns[:-1])} | self.long
        self.system = self._system()
        self.shared = framing.shared + (self.count(self.system) if self.system else 0)
        self.sent = 0  # requests planned so far
        self.most = UNLIMITED
        self.shares: Mapping[str, float] = {}
        self.deck: Deck | None = None
        if isinstance(workload, Sessions):
            self.most = workload.max_prompt_tokens or UNLIMITED
            if self.most <= self.shared + framing.first:
                raise BadInput(
                    f"workload.max_prompt_tokens: found {self.most}; allowed: more than the "
                    f"{self.shared + framing.first} tokens that every prompt has"
                )
            rates = workload.hit_rates
            if rates is not None:
                self.shares = HIT_RATES[rates] if isinstance(rates, str) else rates
                rng = _rng(seed, "hit-rates")
                self.deck = Deck(self.shares, self.total, len(self.opening), rng)

    def _turn_numbers(self) -> list[int]:
        if not isinstance(self.workload, Sessions):
            return [1] * self.workload.requests
        turns, rng = self.workload.turns, _rng(self.seed, "turns")
        return [rng.randint(turns.min, turns.max) for _ in range(self.workload.sessions)]

    def _long_ones(self) -> set[int]:
        """Which requests, counted over all sessions, are long in and short out."""
        long_in = self.workload.long_in
        number = round(self.total * long_in.fraction) if long_in else 0
        return set(_rng(self.seed, "long-in").sample(range(self.total), number))

    def _system(self) -> str:
        system = self.workload.system
        if isinstance(system, SystemTokens):
            return self.writer.system(system.tokens, _rng(self.seed, "system"))
        return system or ""

    def sessions(self) -> list[Session]:
        workload = self.workload
        count, rng = len(self.turns), _rng(self.seed, "arrivals")
        if isinstance(workload, Closed):
            starts = _arrivals(count, None, rng)
        else:
            starts = _arrivals(count, workload.rate, rng, workload.surges)
        short = _short_ones(len(starts), workload.short, _rng(self.seed, "short"))
        found = [self._session(n, *what) for n, what in enumerate(zip(starts, short, strict=True))]
        if self.deck is not None:
            self._check_rates(self.deck)
        return found

    def _session(self, index: int, start: Ns, is_short: bool) -> Session:
        workload, turns = self.workload, self.turns[index]
        rng, more = (_rng(self.seed, f"session/{index}{part}") for part in ("", "/more"))
        short = workload.short if is_short else None
        first = _drawn(short.prompt_tokens if short else workload.prompt_tokens, rng)
        texts: list[str] = []
        if self.deck is None:
            texts = self.writer.conversation(index, turns, first, rng)
        think = workload.think if isinstance(workload, Sessions) else 0
        thinking = [_exponential(think, rng) if number else 0 for number in range(turns)]
        talk, planned = _Talk(), list[Turn]()
        for number, pause in enumerate(thinking):
            if self.sent in self.long:
                turn = self._long_turn(talk, more)
            elif self.deck is not None:
                turn = self._dealt_turn(self.deck, talk, planned, first, more)
            else:
                turn = self._given_turn(talk, planned, texts[number], more)
            planned.append(replace(turn, think_ns=pause))
        return Session(index, start, tuple(planned), self.system)

    def _long_turn(self, talk: _Talk, rng: random.Random) -> Turn:
        long_in = self.workload.long_in
        assert long_in is not None
        text = self.writer.opening(_drawn(long_in.prompt_tokens, rng), rng)
        return self._turn(talk, 0, text, _drawn(long_in.output_tokens, rng), "aside")

    def _given_turn(self, talk: _Talk, planned: list[Turn], text: str, rng: random.Random) -> Turn:
        """A turn of this text, whatever its length."""
        context: Context = "follow"
        if talk.prompt:
            answer = self.workload.output_tokens
            if self._history(talk, answer) + self.count(text) > self.most:
                context = "fresh"
            else:
                self._answer(talk, planned, answer, rng)
        return self._turn(talk, len(planned), text, self.workload.output_tokens, context)

    def _dealt_turn(
        self, deck: Deck, talk: _Talk, planned: list[Turn], first: int, rng: random.Random
    ) -> Turn:
        """A turn as long as the deck says. `first`: tokens of what opens a conversation."""
        longest = self.workload.output_tokens
        length = None
        if talk.prompt:
            least = self._history(talk, longest if self.live else 1) + 1
            length = deck.following(self._cached(talk, longest), least, self.most)
        if length is None:
            base = self.shared + self.framing.first
            length = deck.opening(self._cached(_Talk(), 0), base + first, base + 1, self.most)
            text = self.writer.opening(length - base, rng)
            context: Context = "fresh" if talk.prompt else "follow"
            return self._turn(talk, len(planned), text, longest, context)
        new = length - self._history(talk, 0)
        self._answer(talk, planned, max(1, min(longest, new // 2)), rng)
        text = self.writer.addition(length - self._history(talk, talk.answer), rng)
        return self._turn(talk, len(planned), text, longest, "follow")

    def _answer(self, talk: _Talk, planned: list[Turn], tokens: int, rng: random.Random) -> None:
        """The last answer is now known: the model's in full, or a scripted one of `tokens`."""
        talk.answer = self.workload.output_tokens
        if not self.live:
            text = self.writer.answer(tokens, rng)
            talk.answer = self.count(text)
            planned[talk.last] = replace(planned[talk.last], answer=text)

    def _history(self, talk: _Talk, answer: int) -> int:
        """Tokens of the next prompt before its own text, once the last answer has `answer`."""
        return talk.prompt + answer + self.framing.later

    def _cached(self, talk: _Talk, answer: int) -> int:
        """Tokens of the next prompt that a cache holds: of what requests have computed.

        No step has computed the KV of an answer's last token, and none that of a scripted answer.
        """
        if not talk.prompt:
            return self.shared if self.sent else 0
        return talk.prompt + answer - 1 if self.live else talk.prompt

    def _turn(
        self, talk: _Talk, number: int, text: str, max_tokens: int, context: Context
    ) -> Turn:  # fmt: skip
        """The next request; moves the conversation on, unless it is asked aside."""
        if context != "follow" or not talk.prompt:
            before, cached = self.shared + self.framing.first, self._cached(_Talk(), 0)
        else:
            before, cached = self._history(talk, talk.answer), self._cached(talk, talk.answer)
        prompt = before + self.count(text)
        expected = Expected(prompt, min(cached, prompt - 1))
        if self.deck is not None:
            hit, opening = expected.hit_tokens, self.sent in self.opening
            self.deck.settle(hit, prompt, opening=opening)
        if context != "aside":
            talk.prompt, talk.answer, talk.last = prompt, 0, number
        self.sent += 1
        return Turn(text, max_tokens, context=context, expected=expected)

    def _check_rates(self, deck: Deck) -> None:
        wanted = apportion(self.shares, self.total)
        worst = max(range(len(wanted)), key=lambda n: abs(deck.left[n]))
        if abs(deck.left[worst]) > max(2, self.total // 50):
            got = wanted[worst] - deck.left[worst]
            raise BadInput(
                f"workload.hit_rates: found {wanted[worst] / self.total:.1%} of the requests in "
                f"{INTERVALS[worst]}, where these lengths give {got / self.total:.1%}; allowed: "
                "such shares with a longer system or prompt_tokens (at 99 % each new token needs "
                "99 before it), with more turns (a first one hits only the system prompt), with "
                "a larger max_prompt_tokens, or shares nearer to what is given"
            )


def _rng(seed: int, name: str) -> random.Random:
    return random.Random(f"{seed}/workload/{name}")


def _drawn(lengths: Range, rng: random.Random) -> int:
    return rng.randint(lengths.min, lengths.max)


def _exponential(mean: Ns, rng: random.Random) -> Ns:
    return round(rng.expovariate(1.0) * mean)


def _arrivals(
    count: int, rate: float | None, rng: random.Random, surges: Sequence[Surge] = ()
) -> list[Ns]:
    if rate is None:
        return [0] * count
    starts, now = [0], 0
    while len(starts) < count:
        rate_now, until = _rate_at(now, rate, surges)
        now += _exponential(round(SECOND / rate_now), rng)
        if until is not None and now >= until:
            now = until  # a Poisson process has no memory: from here on at the next rate
        else:
            starts.append(now)
    return starts


def _rate_at(now: Ns, rate: float, surges: Sequence[Surge]) -> tuple[float, Ns | None]:
    """At which rate arrivals come now, and until when."""
    for surge in surges:
        if now < surge.at:
            return rate, surge.at
        if now < surge.end:
            return surge.rate, surge.end
    return rate, None


def _short_ones(count: int, short: Short | None, rng: random.Random) -> list[bool]:
    number = round(count * short.fraction) if short else 0
    flags = [index < number for index in range(count)]
    rng.shuffle(flags)
    return flags


# -- traces ----------------------------------------------------------------------------------------


def _replay(workload: Trace, seed: int, vocabulary: Sequence[int]) -> list[Session]:
    """One session for each conversation of the trace."""
    blocks = traces.Blocks(seed, vocabulary, workload.length_scale)
    streams: dict[str, list[traces.Row]] = {}
    turns: dict[str, list[Turn]] = {}
    path = traces.resolve(workload.path)
    for row in traces.rows(path, workload.format, workload.limit):
        stream = streams.setdefault(row.stream, [])
        think = _thinking(stream[-1], row) if stream else 0
        stream.append(replace(row, hash_ids=()))  # seen; a trace is mostly these
        prompt = blocks.prompt(row)
        turns.setdefault(row.stream, []).append(Turn(
            text="", max_tokens=blocks.tokens(row.output_tokens),
            think_ns=round(think * workload.time_scale), ids=prompt.ids,
            expected=Expected(len(prompt.ids), prompt.hit_tokens),
        ))  # fmt: skip
    files = list(dict.fromkeys(rows[0].file for rows in streams.values()))
    arrivals = _arrivals(len(files), workload.rate, _rng(seed, "arrivals"))
    begins = dict(zip(files, arrivals, strict=True))
    starts = {
        name: begins[rows[0].file] + round(rows[0].at * workload.time_scale)
        for name, rows in streams.items()
    }
    return [
        Session(index, starts[name], tuple(turns[name]))
        for index, name in enumerate(sorted(streams, key=lambda name: starts[name]))
    ]


def _thinking(before: traces.Row, row: traces.Row) -> Ns:
    """From an answer's end to the next request. Where nobody knows when the answer ended, from the
    request before: what is recorded as thinking then counts from an earlier one.
    """
    if row.think_ns is not None and before.api_ns is not None:
        return row.think_ns
    return max(0, row.at - before.at - (before.api_ns or 0))


# -- what a plan is --------------------------------------------------------------------------------


def summary(sessions: Sequence[Session]) -> dict[str, Any]:
    """A plan in figures: lengths in tokens, arrivals and pauses in seconds, expected prefix hits.

    Shares are of the requests whose prompts are known, all but those of `plan_one`.
    """
    turns = [turn for session in sessions for turn in session.turns]
    known = [turn.expected for turn in turns if turn.expected]
    places = [interval(e.hit_tokens, e.prompt_tokens) for e in known]
    starts = sorted(session.start_ns for session in sessions)
    span, prompts = starts[-1] - starts[0], sum(e.prompt_tokens for e in known)
    thinking = [turn.think_ns for session in sessions for turn in session.turns[1:]]
    return {
        "sessions": len(sessions),
        "requests": len(turns),
        "turns": _spread(len(session.turns) for session in sessions),
        "prompt_tokens": _spread(e.prompt_tokens for e in known),
        "new_tokens": _spread(e.prompt_tokens - e.hit_tokens for e in known),
        "output_tokens": _spread(turn.max_tokens for turn in turns),
        "arrivals": {
            "span_s": span / SECOND,
            "sessions_per_s": (len(starts) - 1) * SECOND / span if span else None,
        },
        "think_s": {name: value / SECOND for name, value in _spread(thinking).items()},
        "prefix_hits": {
            "of_tokens": sum(e.hit_tokens for e in known) / prompts if prompts else None,
            "intervals": {
                name: places.count(place) / len(known) for place, name in enumerate(INTERVALS)
            } if known else None,
            "above_95": sum(place > 1 for place in places) / len(known) if known else None,
        },
    }  # fmt: skip


def _spread(values: Iterable[int]) -> dict[str, float]:
    """Mean, percentiles (nearest rank) and largest; nothing of nothing."""
    ordered = sorted(values)
    if not ordered:
        return {}
    ranks = {name: -(-len(ordered) * percent // 100) for name, percent in PERCENTILES.items()}
    return {
        "mean": sum(ordered) / len(ordered),
        **{name: ordered[rank - 1] for name, rank in ranks.items()},
        "max": ordered[-1],
    }


PERCENTILES = {"p50": 50, "p90": 90, "p99": 99}
