"""The grammar of `expression`: text to tokens, tokens to a tree. Pure.

    or                          lowest
    and
    not
    = == != < <= > >= ~ !~      one of them between two values, never a chain
    + -
    * /
    - (sign), ( )               highest

What is wrong is BadInput, with the column.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from pddrt.errors import BadInput
from pddrt.types import SECOND
from pddrt.units import parse_duration, parse_rate, parse_size, shown

Value = float | str | bool | None

MAX_LENGTH = 4_000
MAX_DEPTH = 60
"""Of parentheses, signs and `not`s in one another."""

UNITS = "s, ms, us, min, h; B, kB, MB, GB, KiB, MiB, GiB; Mbit/s, MB/s and the like; %"
KEYWORDS = {"and", "or", "not"}
WORDS: dict[str, bool | None] = {"true": True, "false": False, "none": None, "null": None}

_PART = r"(?:\w+|`[^`]*`)"
_TOKEN = re.compile(
    rf"""
    (?P<number> (?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
        (?:\s*(?P<unit>%|(?!(?:and|or|not)\b)[A-Za-zµμ]+(?:/s\b)?))?
  | (?P<name>   (?:[^\W\d]\w*|`[^`]*`)(?:[.:-]{_PART})*)
  | (?P<text>   '[^']*'|"[^"]*")
  | (?P<sign>   ==|!=|<=|>=|!~|[-=<>~+*/()])
    """,
    re.VERBOSE,
)

SAME = ("=", "==", "!=", "~", "!~")
ORDERED = ("<", "<=", ">", ">=")


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    column: int
    value: Value = None


@dataclass(frozen=True, slots=True)
class Node:
    """`op`: value, name, word (a bare word that stands for itself), or what is done to `parts`."""

    op: str
    column: int
    value: Value = None
    parts: tuple[Node, ...] = ()


def wrong(text: str, column: int, message: str) -> NoReturn:
    raise BadInput(f"{shown(text, 120)}, column {column}: {message}")


def tree(text: str) -> tuple[Node, tuple[str, ...]]:
    """The root, and every name in it, in order."""
    if len(text) > MAX_LENGTH:
        raise BadInput(f"found an expression of {len(text):,} characters; allowed: {MAX_LENGTH:,}")
    tokens = list(_tokens(text))
    root = _Parser(text, tokens).whole()
    return root, tuple(dict.fromkeys(_name(t) for t in tokens if t.kind == "name"))


# -- text to tokens --------------------------------------------------------------------------------


def _tokens(text: str) -> Iterator[_Token]:
    at = 0
    while True:
        while at < len(text) and text[at].isspace():
            at += 1
        if at == len(text):
            yield _Token("end", "", at + 1)
            return
        match = _TOKEN.match(text, at)
        if match is None:
            wrong(text, at + 1, f"found {shown(text[at])}; {_unreadable(text[at])}")
        kind = match.lastgroup or ""
        if match["number"] is not None:
            yield _Token("number", match[0], at + 1, _number(text, match, at + 1))
        elif kind == "name" and match[0].lower() in KEYWORDS:
            yield _Token(match[0].lower(), match[0], at + 1)
        elif kind == "name" and match[0].lower() in WORDS:
            yield _Token("constant", match[0], at + 1, WORDS[match[0].lower()])
        elif kind == "text":
            yield _Token("text", match[0], at + 1, match[0][1:-1])
        else:
            yield _Token(kind if kind == "name" else match[0], match[0], at + 1)
        at = match.end()


def _unreadable(character: str) -> str:
    if character in "'\"`":
        return "the quote is never closed"
    if character in "&|!":
        return "allowed: and, or, not"
    return "allowed: names, numbers with units, texts in quotes, = != < <= > >= ~ + - * / ( )"


def _number(text: str, match: re.Match[str], column: int) -> float:
    unit = match["unit"]
    if unit is None or unit == "%":
        number = float(match["number"])
        return number / 100 if unit else number
    quantity = f"{match['number']} {unit}"
    for parse_as, per in ((parse_duration, SECOND), (parse_size, 1), (parse_rate, 1)):
        try:
            return parse_as(quantity) / per
        except ValueError as error:
            if "unit" not in str(error):  # the unit is one, the number is too large for it
                wrong(text, column, str(error))
    wrong(text, column, f"found {shown(quantity)}, a unit that is unknown; allowed: {UNITS}")


def _name(token: _Token) -> str:
    return token.text.replace("`", "")


# -- tokens to a tree ------------------------------------------------------------------------------


class _Parser:
    def __init__(self, text: str, tokens: list[_Token]) -> None:
        self._text = text
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    def whole(self) -> Node:
        root = self._any()
        if self._next.kind != "end":
            self._expected("and, or, or the end")
        return root

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _take(self, *kinds: str) -> _Token | None:
        token = self._next
        if token.kind not in kinds:
            return None
        self._at += 1
        return token

    def _expected(self, what: str) -> NoReturn:
        token = self._next
        found = "the end" if token.kind == "end" else shown(token.text)
        wrong(self._text, token.column, f"found {found}; expected {what}")

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            wrong(self._text, self._next.column, f"nested deeper than {MAX_DEPTH}")

    def _any(self) -> Node:
        node = self._all()
        while token := self._take("or"):
            node = Node("or", token.column, None, (node, self._all()))
        return node

    def _all(self) -> Node:
        node = self._negated()
        while token := self._take("and"):
            node = Node("and", token.column, None, (node, self._negated()))
        return node

    def _negated(self) -> Node:
        if token := self._take("not"):
            self._deeper()
            inner = self._negated()
            self._depth -= 1
            return Node("not", token.column, None, (inner,))
        return self._compared()

    def _compared(self) -> Node:
        node = self._sum()
        if token := self._take(*SAME, *ORDERED):
            node = Node(token.kind, token.column, None, (node, self._sum()))
            if self._next.kind in (*SAME, *ORDERED):
                self._expected("and: comparisons make no chain")
        return node

    def _sum(self) -> Node:
        node = self._product()
        while token := self._take("+", "-"):
            node = Node(token.kind, token.column, None, (node, self._product()))
        return node

    def _product(self) -> Node:
        node = self._signed()
        while token := self._take("*", "/"):
            node = Node(token.kind, token.column, None, (node, self._signed()))
        return node

    def _signed(self) -> Node:
        if token := self._take("-"):
            self._deeper()
            inner = self._signed()
            self._depth -= 1
            return Node("sign", token.column, None, (inner,))
        return self._single()

    def _single(self) -> Node:
        if token := self._take("("):
            self._deeper()
            node = self._any()
            self._depth -= 1
            if self._take(")") is None:
                self._expected(f"')' for the '(' in column {token.column}")
            return node
        if token := self._take("name"):
            return Node("name", token.column, _name(token))
        if token := self._take("number", "text", "constant"):
            return Node("value", token.column, token.value)
        self._expected("a name, a number, a text in quotes or '('")
