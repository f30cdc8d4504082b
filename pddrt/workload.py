"""Workloads: from a description and a seed to a fixed plan of sessions and turns.

A plan is a function of the description, the seed and, for `prompts: stdlib`, of the Python whose
standard library is asked about. It holds texts, not ids: what comes before a turn's own text in its
prompt is the conversation so far, which only the client has.

    sessions   `sessions` conversations of `turns` turns; conversations arrive at `rate` (Poisson)
    poisson    `requests` single-turn requests that arrive at `rate` (Poisson)
    closed     `requests` single-turn requests, `concurrency` at a time: one ends, the next is sent

The first arrival of a Poisson process is put at 0, the others follow at exponential gaps.

Prompt lengths are in tokens where the caller lends a `count_tokens`; without one they are estimated
by `CHARS_PER_TOKEN`. Either way they are lengths of the text: what a chat template adds is on top.
"""

from __future__ import annotations

import functools
import random
import string
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    model_serializer,
    model_validator,
)  # fmt: skip
from pydantic_core import CoreSchema

from pddrt.errors import CannotRun
from pddrt.sections import Allowed, Later, Section
from pddrt.types import SECOND, Ns
from pddrt.units import Duration, Frequency

CountTokens = Callable[[str], int]

CHARS_PER_TOKEN = 3.9
"""Measured: SmolLM2's tokenizer over the modules below (2.7 million characters)."""

Count = Annotated[int, Field(ge=1, le=1_000_000), Allowed("a whole number from 1 to 1,000,000")]


class Range(Section):
    """A length drawn evenly from [min, max]. In YAML also a single number."""

    min: Count
    max: Count

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if self.min > self.max:
            raise ValueError(f"found min {self.min} above max {self.max}; allowed: min <= max")
        return self

    @model_serializer
    def _plain(self) -> int | dict[str, int]:
        return self.min if self.min == self.max else {"min": self.min, "max": self.max}


def _range(value: Any) -> Any:
    return {"min": value, "max": value} if type(value) is int else value


Lengths = Annotated[
    Range, BeforeValidator(_range), Allowed("a number of tokens, or {min: 500, max: 1500}")
]


class Short(Section):
    """An exact `fraction` of the first turns, at random places, has these lengths instead."""

    fraction: Annotated[float, Field(ge=0, le=1), Allowed("a number from 0 to 1")]
    prompt_tokens: Lengths


Texts = Annotated[
    tuple[Annotated[str, Field(min_length=1), Allowed("a text")], ...],
    Field(min_length=1, strict=False),
    Allowed("a list of texts, at least one"),
]


def _prompts_tag(value: Any) -> str:
    return "<texts>" if isinstance(value, (list, tuple)) else "<source>"


Prompts = Annotated[
    Annotated[
        Literal["stdlib", "random"], Tag("<source>"), Allowed("stdlib | random | a list of texts")
    ]
    | Annotated[Texts, Tag("<texts>")],
    Discriminator(_prompts_tag),
]


class _Workload(Section):
    """What all kinds share. `prompts`: questions on Python's source, random words, given texts."""

    kind: str
    output_tokens: Count
    prompts: Prompts = "stdlib"
    prompt_tokens: Lengths = Range(min=500, max=1500)
    short: Short | None = None
    answers: Annotated[Literal["live"], Later("scripted")] = "live"

    @property
    def concurrency_limit(self) -> int | None:
        """How many sessions may be under way at a time; None: as many as arrive."""
        return None


class Sessions(_Workload):
    kind: Literal["sessions"]
    sessions: Count
    turns: Annotated[int, Field(ge=1, le=1000), Allowed("a whole number from 1 to 1,000")] = 1
    rate: Frequency
    think: Duration = 0
    """Mean of the exponential pause between an answer's end and the next turn."""


class Poisson(_Workload):
    kind: Literal["poisson"]
    requests: Count
    rate: Frequency


class Closed(_Workload):
    kind: Literal["closed"]
    requests: Count
    concurrency: Count

    @property
    def concurrency_limit(self) -> int | None:
        return self.concurrency


class UnknownKind(Section):
    """A workload whose kind is none of these: never valid, and only its kind is complained of."""

    model_config = ConfigDict(extra="ignore")
    kind: Annotated[Literal["sessions", "poisson", "closed"], Later("trace")]


_KINDS: dict[str, type[Section]] = {"sessions": Sessions, "poisson": Poisson, "closed": Closed}


def _kind_tag(value: Any) -> str:
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    known = _KINDS.get(kind, UnknownKind) if isinstance(kind, str) else UnknownKind
    return f"<{known.__name__}>"


class _ByKind:
    """Marker of the union below: validates by kind, and lets `UnknownKind` complain of the kind."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        unknown = Annotated[UnknownKind, Tag("<UnknownKind>")]
        return handler.generate_schema(Annotated[source | unknown, Discriminator(_kind_tag)])


Workload = Annotated[
    Annotated[Sessions, Tag("<Sessions>")]
    | Annotated[Poisson, Tag("<Poisson>")]
    | Annotated[Closed, Tag("<Closed>")],
    _ByKind(),
    Allowed("a mapping with kind: sessions | poisson | closed"),
]


# -- the plan --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user adds: `text`, sent `think_ns` after the former turn's answer has ended."""

    text: str
    max_tokens: int
    think_ns: Ns = 0


@dataclass(frozen=True, slots=True)
class Session:
    index: int
    start_ns: Ns
    turns: tuple[Turn, ...]


def plan(workload: Workload, seed: int, count_tokens: CountTokens | None = None) -> list[Session]:
    """The sessions in order of arrival. Play them with `workload.concurrency_limit`.

    Raises CannotRun if `prompts: stdlib` finds no source of the standard library.
    """
    count = workload.sessions if isinstance(workload, Sessions) else workload.requests
    turns, think = (workload.turns, workload.think) if isinstance(workload, Sessions) else (1, 0)
    rate = None if isinstance(workload, Closed) else workload.rate
    starts = _arrivals(count, rate, _rng(seed, "arrivals"))
    short = _short_ones(count, workload.short, _rng(seed, "short"))
    plan = []
    for index, (start, is_short) in enumerate(zip(starts, short, strict=True)):
        rng = _rng(seed, f"session/{index}")
        lengths = (
            workload.short.prompt_tokens if is_short and workload.short else workload.prompt_tokens
        )
        texts = _texts(workload.prompts, index, turns, lengths, rng, count_tokens or _estimate)
        plan.append(Session(index, start, tuple(
            Turn(text, workload.output_tokens, _exponential(think, rng) if number else 0)
            for number, text in enumerate(texts)
        )))  # fmt: skip
    return plan


def plan_one(text: str, max_tokens: int) -> list[Session]:
    """A single request at once, in place of a workload."""
    return [Session(0, 0, (Turn(text, max_tokens),))]


def _rng(seed: int, name: str) -> random.Random:
    return random.Random(f"{seed}/workload/{name}")


def _estimate(text: str) -> int:
    return round(len(text) / CHARS_PER_TOKEN)


def _exponential(mean: Ns, rng: random.Random) -> Ns:
    return round(rng.expovariate(1.0) * mean)


def _arrivals(count: int, rate: float | None, rng: random.Random) -> list[Ns]:
    if rate is None:
        return [0] * count
    starts = [0]
    while len(starts) < count:
        starts.append(starts[-1] + _exponential(round(SECOND / rate), rng))
    return starts


def _short_ones(count: int, short: Short | None, rng: random.Random) -> list[bool]:
    number = round(count * short.fraction) if short else 0
    flags = [index < number for index in range(count)]
    rng.shuffle(flags)
    return flags


def _texts(
    prompts: str | Sequence[str],
    index: int,
    turns: int,
    lengths: Range,
    rng: random.Random,
    count: CountTokens,
) -> list[str]:
    """What the user says, turn by turn."""
    target = rng.randint(lengths.min, lengths.max)
    if prompts == "stdlib":
        later = rng.sample(FOLLOW_UPS, min(turns - 1, len(FOLLOW_UPS)))
        return [_question(target, rng, count)] + [later[n % len(later)] for n in range(turns - 1)]
    if prompts == "random":
        return [_words(target, rng, count)] + [_words(16, rng, count) for _ in range(turns - 1)]
    return [prompts[(index * turns + number) % len(prompts)] for number in range(turns)]


def _longest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest n in [1, limit] for which `fits(n)`, true up to some n; 1 if it never is."""
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _words(target: int, rng: random.Random, count: CountTokens) -> str:
    """Random lower-case words of `target` tokens, or a little less where they come in clumps."""
    letters = string.ascii_lowercase + " " * 5
    text = ""
    while count(text) < target:
        missing = max(16, target - count(text))
        text += "".join(rng.choices(letters, k=missing))
    return text[: _longest(len(text), lambda n: count(text[:n]) <= target)]


# -- questions about the standard library ----------------------------------------------------------

MODULES = (
    "argparse", "ast", "calendar", "cmd", "configparser", "contextlib", "copy", "csv",
    "dataclasses", "difflib", "dis", "doctest", "enum", "fileinput", "fractions", "functools",
    "gettext", "glob", "graphlib", "gzip", "heapq", "imaplib", "inspect", "ipaddress", "mailbox",
    "netrc", "optparse", "pickle", "pickletools", "pkgutil", "platform", "plistlib", "poplib",
    "pprint", "profile", "pstats", "queue", "random", "sched", "selectors", "shelve", "shlex",
    "shutil", "smtplib", "socketserver", "statistics", "string", "subprocess", "tarfile",
    "tempfile", "textwrap", "threading", "timeit", "tokenize", "trace", "traceback", "typing",
    "uuid", "warnings", "wave", "weakref", "webbrowser",
)  # fmt: skip
"""Modules written in Python in 3.11 to 3.14. A seed picks from this order: only ever append."""

QUESTIONS = (
    "Explain what this part of Python's module {name} does.",
    "What should I know before I change this code from Python's module {name}?",
    "Review this code from Python's module {name}.",
    "Summarise this part of Python's module {name} for a new colleague.",
)

FOLLOW_UPS = (
    "Which inputs would break it?",
    "Write one test for the most surprising case.",
    "What would you rename, and why?",
    "Which part is slowest, and how could it be faster?",
    "Say the same in two sentences.",
    "What does it assume about its caller?",
    "How would you split it into smaller functions?",
    "What happens if two threads use it at once?",
)


def _question(target: int, rng: random.Random, count: CountTokens) -> str:
    """A question and as many whole lines of a module as fit; if it is too short, others follow."""
    names = rng.sample(MODULES, len(MODULES))
    question = rng.choice(QUESTIONS)
    lines: list[str] = []
    name, enough = "", False
    for candidate in names:
        source = _source(candidate)
        if source is None:
            continue
        begin = 0 if lines else rng.choice(_beginnings(source))
        name = name or candidate
        lines += source[begin:]
        if count("\n".join(lines)) >= target:
            enough = True
            break
    if not lines:
        raise CannotRun(
            "prompts: stdlib needs the source of Python's standard library, which is not here; "
            "use prompts: random, or a list of texts"
        )
    question = question.format(name=name) + "\n\n"
    if enough:
        lines = lines[
            : _longest(len(lines), lambda n: count(question + "\n".join(lines[:n])) <= target)
        ]
    return question + "\n".join(lines).rstrip()


@functools.cache
def _source(name: str) -> tuple[str, ...] | None:
    """The lines of a module of the standard library; None where this Python has no source of it."""
    library = Path(
        sysconfig.get_path("stdlib")
    )  # not sys.path, where a user's module may shadow it
    for path in (library / f"{name}.py", library / name / "__init__.py"):
        if path.is_file():
            return tuple(path.read_text(encoding="utf-8").splitlines())
    return None


def _beginnings(source: Sequence[str]) -> list[int]:
    """Where reading may begin: the top, and top-level classes and functions of the first half."""
    half = source[: len(source) // 2]
    return [
        0,
        *(n for n, line in enumerate(half) if line.startswith(("class ", "def ", "async def "))),
    ]
