"""What users, tools and scripted models say: texts of a wanted length, in tokens.

Two sources: Python's own standard library, which reads like what coding agents read and is on every
machine, and random words, which no cache has seen before. A third, texts that the user gives, has
the lengths it has.

Pure but for reading the standard library, and the same for the same `random.Random`. Owns no state.
Lengths are whatever the caller's `count` says; what a chat template adds to them is a `Framing`.
"""

from __future__ import annotations

import functools
import random
import string
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pddrt.errors import CannotRun

CountTokens = Callable[[str], int]

CHARS_PER_TOKEN = 3.9
"""Measured: SmolLM2's tokenizer over the modules below (2.7 million characters)."""

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
    "In plain words, what is Python's module {name} for, and what does this part of it do?",
    "What should I know before I change this part of {name}?",
    "Explain to a new colleague what this part of {name} does.",
    "Summarise this part of {name} in a few sentences.",
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

SYSTEM = (
    "You are a careful programmer. You answer from the code that you are shown and say so where it "
    "does not tell. The tools that you may call, and their sources:"
)


@dataclass(frozen=True, slots=True)
class Writer:
    """Texts from one source: `stdlib`, `random`, or the user's own texts."""

    source: str | Sequence[str]
    count: CountTokens

    def conversation(self, index: int, turns: int, target: int, rng: random.Random) -> list[str]:
        """What the user of session `index` says, turn by turn. `target`: tokens of the first turn.

        The later ones are short, and as long as they happen to be.
        """
        if self.source == "stdlib":
            later = rng.sample(FOLLOW_UPS, min(turns - 1, len(FOLLOW_UPS)))
            first = _question(target, rng, self.count)
            return [first] + [later[n % len(later)] for n in range(turns - 1)]
        if self.source == "random":
            first = _words(target, rng, self.count)
            return [first] + [_words(16, rng, self.count) for _ in range(turns - 1)]
        return [self.source[(index * turns + number) % len(self.source)] for number in range(turns)]

    def opening(self, target: int, rng: random.Random) -> str:
        """A first turn of very nearly `target` tokens.

        It begins with a number of its own: the few questions there are would be prefix hits.
        """
        number = rng.randrange(1_000_000)
        return self._passage(f"{number:06} {rng.choice(QUESTIONS)}", target, rng)

    def addition(self, target: int, rng: random.Random) -> str:
        """A later turn of very nearly `target` tokens: a question, and what a tool has found."""
        return self._passage(rng.choice(FOLLOW_UPS), target, rng)

    def answer(self, target: int, rng: random.Random) -> str:
        return self._passage("", target, rng)

    def system(self, target: int, rng: random.Random) -> str:
        """A system prompt with its tool descriptions."""
        return self._passage(SYSTEM, target, rng)

    def _passage(self, lead: str, target: int, rng: random.Random) -> str:
        """`lead` and code (or random words), cut to `target` tokens or a little less."""
        if self.source != "stdlib":
            return _words(target, rng, self.count)
        names = rng.sample(MODULES, len(MODULES))
        text = lead.format(name=names[0])
        for number, name in enumerate(names):
            source = _source(name)
            if source is None:
                continue
            begin = 0 if number else rng.choice(_beginnings(source))
            text += ("\n\n" if text else "") + "\n".join(source[begin:])
            # a long text is slow to count: look at as much as is surely enough, then at all of it
            for part in (text[: 8 * target + 200], text):
                if self.count(part) >= target:
                    return _cut(part, target, self.count)
        if text == lead.format(name=names[0]):
            raise CannotRun(NO_SOURCE)
        return text


@dataclass(frozen=True, slots=True)
class Framing:
    """Tokens that a chat template adds to the texts of a prompt.

    `shared`: before the first user message, the same in every prompt. `first`: the rest of what is
    around the first user message. `later`: between an answer and a later message, and behind it.
    """

    shared: int = 0
    first: int = 0
    later: int = 0

    @classmethod
    def of(
        cls, chat: Callable[[Sequence[Mapping[str, str]]], Sequence[int]],
        follow_up: Callable[[str], Sequence[int]], count_tokens: CountTokens, system: bool,
    ) -> Framing:  # fmt: skip
        """As a tokenizer's two methods do it. `system`: whether a system prompt comes first."""
        words = "one", "two"  # unlike from their first token on
        begin = [{"role": "system", "content": words[0]}] if system else []
        one, two = (chat([*begin, {"role": "user", "content": word}]) for word in words)
        common = next(n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
        length = count_tokens(words[0])
        return cls(
            shared=common - (length if system else 0),
            first=len(one) - common - length,
            later=len(follow_up(words[0])) - length,
        )


def estimate(text: str) -> int:
    """Tokens of a text where no tokenizer is at hand."""
    return round(len(text) / CHARS_PER_TOKEN)


def _longest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest n in [1, limit] for which `fits(n)`, true up to some n; 1 if it never is."""
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _cut(text: str, target: int, count: CountTokens) -> str:
    """The longest beginning of `text` that has at most `target` tokens; one character at least."""
    return text[: _longest(len(text), lambda n: count(text[:n]) <= target)]


def _words(target: int, rng: random.Random, count: CountTokens) -> str:
    """Random lower-case words of `target` tokens, or a little less where they come in clumps."""
    letters = string.ascii_lowercase + " " * 5
    text = ""
    while count(text) < target:
        missing = max(16, target - count(text))
        text += "".join(rng.choices(letters, k=missing))
    return _cut(text, target, count)


# -- the standard library --------------------------------------------------------------------------

NO_SOURCE = (
    "prompts: stdlib needs the source of Python's standard library, which is not here; "
    "use prompts: random, or a list of texts"
)


def _question(target: int, rng: random.Random, count: CountTokens) -> str:
    """As many whole lines of a module as fit, and a question about them at the end, where a small
    model still has it in mind. If the module is too short, others follow.
    """
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
        raise CannotRun(NO_SOURCE)

    def asked(lines: Sequence[str]) -> str:
        code = "\n".join(lines).rstrip()
        return f"Part of Python's module {name}:\n\n{code}\n\n{question.format(name=name)}"

    if enough:
        lines = lines[: _longest(len(lines), lambda n: count(asked(lines[:n])) <= target)]
    return asked(lines)


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
