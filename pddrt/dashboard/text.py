"""Lines of styled text, and an answer wrapped into such lines as it comes. Pure.

A `Line` is what one row of a terminal shows: runs of (text, style), styles by rich's names. Lines
are cheap to compare, so that only those that have changed are drawn again, and `as_text` makes
rich's own text of them. Widths are in cells: some characters take two, some none.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from rich.cells import cell_len
from rich.console import Group
from rich.text import Text

from pddrt import show

Line = tuple[tuple[str, str], ...]

TAB = 4
ASCII = str.maketrans(
    {
        "\N{HORIZONTAL ELLIPSIS}": ".",
        "\N{MIDDLE DOT}": ".",
        "\N{BOX DRAWINGS LIGHT HORIZONTAL}": "-",
        "\N{BOX DRAWINGS HEAVY HORIZONTAL}": "=",
        "\N{BOX DRAWINGS DOUBLE HORIZONTAL}": "#",
        "\N{BOX DRAWINGS LIGHT VERTICAL}": "|",
        "\N{BOX DRAWINGS LIGHT TRIPLE DASH HORIZONTAL}": "~",
        "\N{FULL BLOCK}": "#",
        "\N{UPWARDS ARROW}": "^",
        "\N{DOWNWARDS ARROW}": "v",
        "\N{MULTIPLICATION SIGN}": "x",
    }
)
"""For terminals that cannot show more."""


def line(*runs: tuple[str, str] | str) -> Line:
    """A bare string has no style."""
    return tuple((run, "") if isinstance(run, str) else run for run in runs)


def width_of(one: Line) -> int:
    return sum(len(text) if text.isascii() else cell_len(text) for text, _ in one)


def fit(one: Line, width: int, *, pad: bool = False) -> Line:
    """Cut to `width` cells; with `pad`, filled up to them."""
    room, kept = width, []
    for text, style in one:
        cells = len(text) if text.isascii() else cell_len(text)
        if cells > room:
            text = cut(text, room)
            kept.append((text, style))
            room -= cell_len(text)
            break
        kept.append((text, style))
        room -= cells
    if pad and room > 0:
        kept.append((" " * room, ""))
    return tuple(kept)


def cut(text: str, width: int) -> str:
    """The beginning of `text` that fits, with an ellipsis where it is not all of it."""
    if cell_len(text) <= width:
        return text
    kept, cells = [], 0
    for char in text:
        cells += cell_len(char)
        if cells > width - 1:
            break
        kept.append(char)
    return "".join(kept) + "\N{HORIZONTAL ELLIPSIS}" * (width > 0)


def right(text: str, width: int) -> str:
    """Aligned to the right of `width` cells, cut where it is longer."""
    return " " * (width - cell_len(text)) + cut(text, width)


def beside(left: Sequence[Line], other: Sequence[Line], width: int) -> list[Line]:
    """Two columns, the left one `width` cells wide; the shorter one has empty lines below."""
    lines = []
    for n in range(max(len(left), len(other))):
        one = left[n] if n < len(left) else ()
        if n < len(other):
            one = (*fit(one, width, pad=True), *other[n])
        lines.append(one)
    return lines


def encodable(one: Line, encoding: str) -> Line:
    """The same in characters that `encoding` has, cell for cell."""
    return tuple((_encodable(text, encoding), style) for text, style in one)


def _encodable(text: str, encoding: str) -> str:
    if text.isascii():
        return text

    def known(char: str) -> str:
        try:
            char.encode(encoding)
        except UnicodeEncodeError:
            return "?" * cell_len(char)
        return char

    return "".join(map(known, text.translate(ASCII)))


def speaks_boxes(encoding: str) -> bool:
    """Whether all that lines and bars are made of can be written in `encoding`."""
    try:
        "".join(map(chr, ASCII)).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def as_text(one: Line) -> Text:
    return Text.assemble(*one, no_wrap=True, overflow="crop")


def as_group(lines: Iterable[Line]) -> Group:
    """What rich prints, line by line."""
    return Group(*(as_text(one) for one in lines))


class Answer:
    """An answer wrapped to `width` as its pieces come: words stay whole where they fit, and each
    maker's part begins with its letter. Keeps the last `most` lines.
    """

    def __init__(self, width: int, most: int = 200) -> None:
        self.width = width
        self.pieces = 0
        """How many have been fed."""
        self._source = ""
        self._lines: deque[Line] = deque(maxlen=most)
        self._open: list[tuple[str, str]] = []
        self._cells = 0

    def feed(self, source: str, text: str) -> None:
        self.pieces += 1
        style = show.STYLE.get(source, "")
        if source != self._source:
            self._source = source
            if self._cells + 4 > self.width:
                self._break()
            for char in f" {source} ":
                self._put(char, f"bold color(231) on {style}" if style else "bold reverse")
        for part in re.split("(\n|\t)", show.clean(text)):
            if part == "\n":
                self._close()
            else:
                for char in " " * TAB if part == "\t" else part:
                    self._put(char, style)

    def lines(self, last: int) -> list[Line]:
        shown = [*self._lines, _runs(self._open)] if self._open else list(self._lines)
        return shown[-last:] if last > 0 else []

    def _put(self, char: str, style: str) -> None:
        if not char.isprintable():  # nobody knows how wide a terminal takes it to be
            char = " " if char.isspace() else "\N{REPLACEMENT CHARACTER}"
        cells = 1 if char.isascii() else cell_len(char)
        if self._cells + cells > self.width:
            if char == " ":
                self._close()
                return
            self._break()
        self._open.append((char, style))
        self._cells += cells

    def _break(self) -> None:
        """Goes on in a new line, with the word that does not fit if it is not too long."""
        at = next((n for n in range(len(self._open), 0, -1) if self._open[n - 1][0] == " "), 0)
        word = self._open[at:] if at else []
        self._open = self._open[:at] if at else self._open
        self._close()
        self._open = word
        self._cells = sum(cell_len(char) for char, _ in word)

    def _close(self) -> None:
        """Of several empty lines one is enough."""
        if self._open or (self._lines and self._lines[-1]):
            self._lines.append(_runs(self._open))
        self._open, self._cells = [], 0


def _runs(chars: Iterable[tuple[str, str]]) -> Line:
    return tuple(_joined(chars))


def _joined(chars: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for style, run in groupby(chars, key=lambda one: one[1]):
        yield "".join(char for char, _ in run), style
