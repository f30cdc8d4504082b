"""What a cell of a sweep is: one setting with one seed, and the digest of all it follows from.

The digest takes in the scenario with nothing left open, its seed, the files it names, the source of
the user's policies (their own file, not what that imports), and the source of all that a run can
import of this package. Two cells with one digest come to the same numbers under the virtual clock,
so that one of them can be kept for the other.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from pddrt.comparing.grid import Setting
from pddrt.hosting import cores


@dataclass(slots=True)
class Cell:
    """One run. `state`: waiting, kept (from an earlier sweep), finished, failed; `told`: how it
    ended; `metrics`: the chosen numbers.
    """

    setting: Setting
    seed: int
    key: str
    state: str = "waiting"
    failure: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        if "seed" in self.setting.changes and f"seed={self.seed}" in self.setting.name.split():
            return self.setting.name
        return f"{self.setting.name} seed={self.seed}".strip()


def keys(setting: Setting, seeds: Sequence[int]) -> list[str]:
    """The digests of its cells."""
    digest = xxhash.xxh3_128(code().encode())
    text = setting.scenario.model_copy(update={"seed": 0}).dump(cores())
    digest.update(text.encode())
    for content in _files(setting):
        digest.update(content)
    return [xxhash.xxh3_128_hexdigest(digest.digest() + str(seed).encode())[:20] for seed in seeds]


@cache
def code() -> str:
    """A digest of the source of all that a run can import of this package: another version may
    measure something else. What only shows results is not in it.
    """
    digest, root = xxhash.xxh3_128(), Path(__file__).parents[2]
    found: set[Path] = set()
    waiting = [root / "pddrt/sweeping/worker.py"]
    while waiting:
        path = waiting.pop()
        if path not in found and path.is_file():
            found.add(path)
            if path != root / "pddrt" / "__init__.py":  # names all, and imports it when asked for
                waiting += _imported(path.read_text(encoding="utf-8"), root)
    for path in sorted(found):
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


_IMPORT = re.compile(
    r"^\s*(?:from (pddrt[\w.]*) import (\([^)]*\)|[^\n]*)|import (pddrt[\w.]*))", re.MULTILINE
)


def _imported(source: str, root: Path) -> Iterator[Path]:
    """Files that this package's modules of such a source may be, wherever it imports them."""
    for module, names, plain in _IMPORT.findall(source):
        dotted = [module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))]
        for name in dotted if module else [plain]:
            path = root.joinpath(*name.split("."))
            yield from (path.with_suffix(".py"), path / "__init__.py")


def _files(setting: Setting) -> Iterator[bytes]:
    """The contents of what the scenario names: traces, profiles, models' folders, policies."""
    here = setting.scenario.folder or Path()
    for text in _texts(setting.scenario.model_dump(mode="python")):
        name = text.removeprefix("measured:")
        module, colon, _ = name.partition(":")
        if colon and all(part.isidentifier() for part in module.split(".")):
            yield from _source(module, here)
            continue
        name = os.path.expanduser(os.path.expandvars(name))
        for path in (here / name, Path(name)):
            try:
                if path.is_file():
                    yield path.read_bytes()
                    break
                if path.is_dir() and any(path.glob("*.json")):  # a model or a trace: large
                    yield repr(sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns)
                                      for p in path.iterdir())).encode()  # fmt: skip
                    break
            except (OSError, ValueError):
                continue


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if 0 < len(value) < 4096:
            yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)


def _source(module: str, here: Path) -> Iterator[bytes]:
    """Of a user's policy: where `plugins` would find it."""
    steps = module.split(".")
    for base in (here, Path(), *map(Path, sys.path)):
        for path in (
            base.joinpath(*steps).with_suffix(".py"),
            base.joinpath(*steps, "__init__.py"),
        ):
            if path.is_file():
                yield path.read_bytes()
                return
