"""A terminal that draws, for tests of what is drawn on one: a screen, its alternate, a cursor.

It knows the sequences that pddrt and rich use, and fails on any other.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.cells import cell_len

_PART = re.compile(r"\x1b\[[?\d;]*[A-Za-z]|\x1b.?|[^\x1b]", re.DOTALL)


class Screen:
    """What a terminal shows after what was fed to it."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.alternate, self.cursor = False, True
        self.frames = 0
        """How often the alternate screen was drawn on."""
        self.plain = ""
        """What was written outside the alternate screen, styles and all."""
        self._cells: dict[tuple[int, int], str] = {}
        self._x = self._y = 0
        self._half = ""
        self._right, self._bottom = columns, rows

    def resize(self, columns: int, rows: int) -> None:
        """What is drawn until the screen is cleared was made for the size before."""
        self._right, self._bottom = max(self._right, columns), max(self._bottom, rows)
        self.columns, self.rows = columns, rows

    def feed(self, text: str) -> None:
        text = self._half + text
        cut = re.search(r"\x1b(\[[?\d;]*)?$", text)
        text, self._half = (text[: cut.start()], cut[0]) if cut else (text, "")
        for part in _PART.findall(text):
            self._take(part)

    def _take(self, part: str) -> None:
        if part == "\x1b[?1049h":
            assert not self.alternate
            self.alternate = True
        elif part == "\x1b[?1049l":
            assert self.alternate
            self.alternate = False
        elif part in ("\x1b[?25l", "\x1b[?25h"):
            self.cursor = part.endswith("h")
        elif not self.alternate:
            self.plain += part
        elif part == "\x1b[2J":
            self._cells.clear()
            self._right, self._bottom = self.columns, self.rows
        elif part == "\x1b[K":
            for x in range(self._x, self._right):
                self._cells.pop((self._y, x), None)
        elif match := re.fullmatch(r"\x1b\[(\d+);(\d+)H", part):
            self._y, self._x = int(match[1]) - 1, int(match[2]) - 1
        elif part == "\x1b[?2026h":
            self.frames += 1
        elif part[0] == "\x1b":
            assert re.fullmatch(r"\x1b\[([\d;]*m|\?2026l)", part), f"{part!r} on a terminal"
        else:
            assert part.isprintable(), f"{part!r} moves the cursor"
            assert self._x + cell_len(part) <= self._right, f"{part!r} is past the right edge"
            assert self._y < self._bottom, f"{part!r} is below the last row"
            for n in range(cell_len(part)):
                self._cells[self._y, self._x + n] = "" if n else part
            self._x += cell_len(part)

    @property
    def lines(self) -> list[str]:
        """Of the alternate screen."""
        rows = (
            "".join(self._cells.get((y, x), " ") for x in range(self.columns))
            for y in range(self.rows)
        )
        return [row.rstrip() for row in rows]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


class Tty(io.StringIO):
    """A file that says it is a terminal."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return True


class Session:
    """A command on a terminal of its own. Waits on what it writes, never for a time."""

    PATIENCE_S = 120.0

    def __init__(
        self, command: Sequence[str], folder: Path, env: Mapping[str, str],
        columns: int = 100, rows: int = 30,
    ) -> None:  # fmt: skip
        self.screen = Screen(columns, rows)
        self.written = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.code: int | None = None
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe(command[0], list(command), dict(env))
        self.resize(columns, rows)
        self.modes = termios.tcgetattr(self._fd)
        """As they were before the command changed them, unless it was quick."""

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(columns, rows)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def until(self, holds: Callable[[Screen], object]) -> Screen:
        """Reads on until `holds(screen)`; fails if the command ends before, or says nothing."""
        while not holds(self.screen):
            assert self._read(), f"it ended before that:\n{self.screen.text}\n{self.screen.plain}"
        return self.screen

    def end(self) -> int:
        """Reads to the end. The exit code."""
        while self._read():
            pass
        return self._reap()

    def close(self) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._reap()
        os.close(self._fd)

    def attributes(self) -> list[object]:
        """The terminal's modes now."""
        return termios.tcgetattr(self._fd)

    def _reap(self) -> int:
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    def _read(self) -> bool:
        patience = time.monotonic() + self.PATIENCE_S
        ready, _, _ = select.select([self._fd], [], [], patience - time.monotonic())
        assert ready, f"nothing for {self.PATIENCE_S} s:\n{self.screen.text}"
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            return False
        text = self._decoder.decode(data)
        self.written += text
        self.screen.feed(text)
        return bool(data)
