"""A terminal to draw on and to read keys from; its modes are put back whatever ends it.

`Screen` draws on the alternate screen, and only lines that have changed. `Keyboard` reads keys
without waiting for a line; Ctrl-C and Ctrl-Z stay signals. Both do nothing before they are entered
and after they are left, and may be entered again (Ctrl-Z, then `fg`).
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
from collections.abc import Sequence
from functools import cache
from typing import Any

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

from pddrt.dashboard.text import Line, encodable, speaks_boxes, width_of

ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"
TOGETHER, SHOW = "\x1b[?2026h", "\x1b[?2026l"
"""What is between them appears at once, on terminals that know how."""
LEAVE = "\x1b[0m\x1b[?25h\x1b[?1049l"
COLOURS = {
    "standard": ColorSystem.STANDARD,
    "256": ColorSystem.EIGHT_BIT,
    "truecolor": ColorSystem.TRUECOLOR,
    "windows": ColorSystem.WINDOWS,
}
SEQUENCES = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down",
    b"\x1b[5~": "page up", b"\x1b[6~": "page down", b"\r": "enter", b"\n": "enter",
    b"\x1b": "esc", b"\x0c": "redraw", b" ": "p", b"k": "up", b"j": "down", b"h": "?",
}  # fmt: skip
ESC_WAIT_S = 0.05
"""After an ESC the rest of a key's sequence is there within this time, or it was the key itself."""

_style = cache(Style.parse)


class Screen:
    """What `console` is on. `size` is asked anew each time: windows change."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._colours = COLOURS.get(console.color_system or "")
        self._encoding = getattr(console.file, "encoding", None) or "utf-8"
        self._plain = not speaks_boxes(self._encoding)
        self._shown: list[Line] = []
        self._size = (0, 0)
        self.entered = False

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows."""
        size = self._console.size
        return size.width, size.height

    def enter(self) -> None:
        self.entered = True
        self.forget()
        self._write(ENTER)

    def leave(self) -> None:
        if self.entered:
            self.entered = False
            self._write(LEAVE)

    def forget(self) -> None:
        """What is on the screen is not known any more: the next frame is drawn as a whole."""
        self._size = (0, 0)

    def draw(self, lines: Sequence[Line], size: tuple[int, int]) -> None:
        """`lines`: a frame made for `size`."""
        parts = []
        if size != self._size:
            self._size, self._shown = size, []
            parts.append("\x1b[0m\x1b[2J")
        for row, one in enumerate(lines):
            before = self._shown[row] if row < len(self._shown) else ()
            if one != before:
                parts.append(f"\x1b[{row + 1};1H{self._encoded(one)}")
                if width_of(one) < size[0]:
                    parts.append("\x1b[K")
        if parts:
            self._write("".join([TOGETHER, *parts, SHOW]))
        self._shown = list(lines)

    def _encoded(self, one: Line) -> str:
        if self._plain:
            one = encodable(one, self._encoding)
        return "".join(
            _style(style).render(text, color_system=self._colours) if style else text
            for text, style in one
        )

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


class Keyboard:
    """Keys from stdin, if that is a terminal that this process may read."""

    def __init__(self) -> None:
        self._fd = _terminal_fd()
        self._before: Any = None
        self._rest = b""

    @property
    def there(self) -> bool:
        return self._fd is not None

    @property
    def ours(self) -> bool:
        """Whether this process is in the foreground of its terminal: else it must not draw."""
        if self._fd is None:
            return True
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:  # not our controlling terminal: nobody else's foreground either
            return True

    def enter(self) -> None:
        if self._fd is None or self._before is not None:
            return
        with contextlib.suppress(termios.error):
            before = termios.tcgetattr(self._fd)
            modes = termios.tcgetattr(self._fd)
            modes[3] &= ~(termios.ICANON | termios.ECHO)
            modes[6][termios.VMIN], modes[6][termios.VTIME] = 1, 0
            termios.tcsetattr(self._fd, termios.TCSADRAIN, modes)
            self._before = before

    def leave(self) -> None:
        """What has been typed and not read is thrown away: it was not meant for the shell."""
        before, self._before = self._before, None
        if before is not None and self._fd is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._fd, termios.TCSAFLUSH, before)

    def wait(self, timeout_s: float, waker: int) -> list[str]:
        """Names of the keys pressed within `timeout_s`, at the first of them; none where `waker`, a
        file descriptor, has something to read.
        """
        fds = [waker] if self._fd is None or self._before is None else [waker, self._fd]
        ready, _, _ = select.select(fds, [], [], timeout_s)
        if waker in ready or self._fd is None or self._fd not in ready:
            return []
        try:
            typed = os.read(self._fd, 256)
            while typed.endswith((b"\x1b", b"\x1b[", b"\x1bO", b"\x1b[5", b"\x1b[6")):
                if not select.select([self._fd], [], [], ESC_WAIT_S)[0]:
                    break
                typed += os.read(self._fd, 256)
        except OSError:
            typed = b""
        if not typed:  # the terminal is gone
            self._fd = None
        return keys_of(typed)


def keys_of(typed: bytes) -> list[str]:
    """Names of keys; those that nobody knows are left out."""
    keys = []
    while typed:
        known = max((s for s in SEQUENCES if typed.startswith(s)), key=len, default=b"")
        if known == b"\x1b" and typed[1:2] in (b"[", b"O"):  # of some other key
            length = next((n for n, c in enumerate(typed[2:], 3) if 0x40 <= c <= 0x7E), len(typed))
            typed = typed[length:]
            continue
        if known:
            keys.append(SEQUENCES[known])
        elif 0x20 < typed[0] < 0x7F:
            keys.append(chr(typed[0]))
        typed = typed[len(known) or 1 :]
    return keys


def _terminal_fd() -> int | None:
    try:
        fd = sys.stdin.fileno()
        return fd if os.isatty(fd) else None
    except (AttributeError, OSError, ValueError):  # closed, or no file at all
        return None
