"""Policies of the user's own: `package.module:Class` to a class, its mistakes kept apart from ours.

    load      the class, from the scenario's folder, the current one or an installed package
    make      an object of it
    guarded   a method of that object, for use during a run

What is wrong with the user's code is said of the user's code: every message names the class, and
the file and line where it went wrong. Before the run it is BadInput, during the run RunFailed; no
message shows a line of ours.

Modules are imported as usual and stay imported, but those from one scenario's folder are not taken
for another's of the same name: `load` forgets what it has loaded from other folders before. While
a module is imported its folder leads `sys.path`, as for a script; afterwards it does not, so what
stands beside it has to be imported at its top.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar

from pddrt.errors import BadInput, RunFailed
from pddrt.sections import unknown_name
from pddrt.units import shown

P = ParamSpec("P")
R = TypeVar("R")

_OURS = Path(__file__).parent
_MARK = "__pddrt_plugin_of__"
"""Set in the modules that a load has brought: the folders it looked in."""


def load(name: str, kind: str, methods: Sequence[str], folder: str | Path | None = None) -> type:
    """The class called `name`, package.module:Class.

    `kind` is what it should be, for messages ("pipeline policy"); `methods` what it must have, with
    the arguments it is called with: `route(facts)`; an attribute without: `pipelines`. `folder` is
    the scenario's. Raises BadInput with a line for each thing that is missing or wrong.
    """
    path, colon, class_name = name.partition(":")
    if not colon or not all(part.isidentifier() for part in [*path.split("."), class_name]):
        raise BadInput(f"found {shown(name)}; allowed: package.module:Class")
    folders = [str(Path(place).resolve()) for place in (*([folder] if folder else []), Path.cwd())]
    module = _imported(path, tuple(dict.fromkeys(folders)))
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise BadInput(_no_class(module, class_name, found, kind))
    problems = [text for method in methods if (text := _lack(found, method))]
    if problems:
        raise BadInput([f"{text} (it is to be a {kind})" for text in problems])
    return found


def make(cls: type, **options: Any) -> Any:
    """An object of a loaded class. Raises BadInput where it does not take these options."""
    try:
        inspect.signature(cls).bind(**options)
    except TypeError as error:
        raise BadInput(
            f"{_where(cls)}: {cls.__name__}{inspect.signature(cls)} cannot be made of the options "
            f"({', '.join(options)}): {error}"
        ) from None
    except ValueError:  # nobody knows its signature: it will say so itself
        pass
    try:
        return cls(**options)
    except (Exception, SystemExit) as error:
        raise BadInput(f"{_blame(error, _file(cls))}: {cls.__name__}(): {_said(error)}") from error


def guarded(
    call: Callable[P, R], returns: type[R] | tuple[type, ...],
    check: Callable[[R], str] | None = None, passes: tuple[type[Exception], ...] = (),
) -> Callable[P, R]:  # fmt: skip
    """A user's bound method, for use during a run.

    Where it raises anything but `passes`, returns something else than `returns`, or something in
    which `check` finds a mistake (a text; "" for none), the call raises RunFailed.
    """
    name = getattr(call, "__qualname__", type(call).__name__).rpartition("<locals>.")[2]
    types = returns if isinstance(returns, tuple) else (returns,)
    allowed = " or ".join("None" if t is type(None) else t.__name__ for t in types)

    @functools.wraps(call)
    def guard(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            value = call(*args, **kwargs)
        except passes as error:
            try:
                str(error).encode()
            except UnicodeEncodeError:
                raise RunFailed(
                    f"{_blame(error, _file(call))}: {name} raised {type(error).__name__}"
                    f"({str(error)!a}); allowed: a text without lone surrogates"
                ) from error
            raise
        except (Exception, SystemExit) as error:
            where = _blame(error, _file(call))
            raise RunFailed(f"{where}: {name} raised {_said(error)}") from error
        wrong = ""
        if not isinstance(value, types):
            wrong = f"found {_kind(value)}; allowed: {allowed}"
            if inspect.iscoroutine(value):
                value.close()
        elif check is not None:
            wrong = check(value)
        if wrong:
            raise RunFailed(f"{_where(call)}: what {name} returned is wrong: {wrong}")
        return value

    return guard


# -- importing -------------------------------------------------------------------------------------


def _imported(path: str, folders: tuple[str, ...]) -> ModuleType:
    """The module, from one of the folders or from what is installed. Raises BadInput."""
    _forget_others(folders)
    before = set(sys.modules)
    with _leading(folders):
        importlib.invalidate_caches()
        try:
            module = importlib.import_module(path)
        except (Exception, SystemExit) as error:
            for new in _users(set(sys.modules) - before, folders):
                del sys.modules[new]
            raise BadInput(_import_failed(path, folders, error)) from error
        for new in _users(set(sys.modules) - before, folders):
            vars(sys.modules[new])[_MARK] = folders
    top = path.partition(".")[0]
    own = PathFinder.find_spec(top, list(folders))
    taken = getattr(sys.modules[top], "__file__", None)
    if own and own.origin and (not taken or Path(taken).resolve() != Path(own.origin).resolve()):
        raise BadInput(
            f"{_short(own.origin)}: the name {top} is taken by {_short(taken or 'Python itself')}; "
            "allowed: a name that no other module has"
        )
    return module


@contextlib.contextmanager
def _leading(folders: Sequence[str]) -> Iterator[None]:
    before = list(sys.path)
    sys.path[:0] = folders
    try:
        yield
    finally:
        sys.path[:] = before


def _forget_others(folders: tuple[str, ...]) -> None:
    """Modules that were loaded for a scenario of another folder: its names are not ours."""
    for name, module in list(sys.modules.items()):
        if getattr(module, "__dict__", {}).get(_MARK, folders) != folders:
            del sys.modules[name]


def _users(names: Iterable[str], folders: Sequence[str]) -> Iterator[str]:
    """Those that were found in one of the folders: the user's own, nothing installed, not ours."""
    for name in names:
        about = getattr(sys.modules[name], "__dict__", {})
        depth = name.count(".") + ("__path__" in about)
        if (file := about.get("__file__")) and name.partition(".")[0] != _OURS.name:
            above = Path(file).parents
            if depth < len(above) and str(above[depth]) in folders:
                yield name


def _import_failed(path: str, folders: Sequence[str], error: BaseException) -> str:
    """Whether there is no such module, or what it raised, and where."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        parents = [path.rsplit(".", n)[0] for n in range(path.count(".") + 1)]
        if error.name in parents:
            here = os.fspath(Path.cwd())
            places = " and ".join(
                "the current folder" if folder == here else _short(folder) for folder in folders
            )
            inside = error.name.rpartition(".")[0]
            text = f"no module {error.name} in {places}, nor among what is installed"
            return f"{text} ({inside} is there)" if inside else text
    return f"{_blame(error)}: importing {path} raised {_said(error)}"


# -- what is there ---------------------------------------------------------------------------------


def _no_class(module: ModuleType, name: str, found: object, kind: str) -> str:
    file = _short(module.__file__) if module.__file__ else module.__name__
    if found is not None:
        place = _where(found) if isinstance(found, FunctionType) else file
        return f"{place}: {name} is {_kind(found)}; allowed: the name of a class, a {kind}"
    own = [k for k, v in vars(module).items()
           if isinstance(v, type) and v.__module__ == module.__name__]  # fmt: skip
    if not own:
        return f"{file}: there is no class {name}, nor any other; needed: a {kind}"
    return f"{file}: {unknown_name(name, own)}"


def _lack(cls: type, method: str) -> str:
    """What keeps a class from being called as `method` says, e.g. "route(facts)"; "" if nothing."""
    name, call, arguments = method.rstrip(")").partition("(")
    names = [a.strip() for a in arguments.split(",") if a.strip()]
    needed = f"def {name}({', '.join(['self', *names])})"
    there = inspect.getattr_static(cls, name, None)
    if there is None:
        return f"{_where(cls)}: {cls.__name__} has no {name}; needed: {needed if call else name}"
    if not call:
        return ""
    function = there.__func__ if isinstance(there, (staticmethod, classmethod)) else there
    if not callable(function):
        return f"{_where(cls)}: {cls.__name__}.{name} is {_kind(there)}; allowed: {needed}"
    if inspect.iscoroutinefunction(function):
        return (f"{_where(function)}: {cls.__name__}.{name} is async, but decisions take no time; "
                f"allowed: {needed}")  # fmt: skip
    try:
        signature = inspect.signature(function)
        signature.bind(*names if isinstance(there, staticmethod) else (cls, *names))
    except ValueError:  # nobody knows
        return ""
    except TypeError:
        taken = f"{cls.__name__}.{name}{signature}"
        return f"{_where(function)}: found {taken}; allowed: {needed}"
    return ""


# -- where, and what -------------------------------------------------------------------------------


def _where(thing: Any) -> str:
    """FILE:LINE of a class, function or method; its file or module where no line is known."""
    thing = inspect.unwrap(getattr(thing, "__func__", thing))
    if code := getattr(thing, "__code__", None):
        return f"{_short(code.co_filename)}:{code.co_firstlineno}"
    with contextlib.suppress(OSError, TypeError):
        return f"{_short(_file(thing))}:{inspect.getsourcelines(thing)[1]}"
    return _short(_file(thing))


def _file(thing: Any) -> str:
    """Where a class was written; its module's name where there is no file."""
    try:
        return inspect.getfile(thing)
    except (OSError, TypeError):
        return str(getattr(thing, "__module__", ""))


def _blame(error: BaseException, file: str | None = None) -> str:
    """FILE:LINE of the user's code: the last frame in the folder of `file`.

    Without one, of the first module that a failed import got to.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_short(error.filename)}:{error.lineno or 1}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if frame.filename != __file__ and not frame.filename.startswith("<")]  # fmt: skip
    if not file:
        frames = [f for f in frames if Path(f.filename).parent != Path(importlib.__file__).parent]
        file = frames[0].filename if frames else ""
    users = [f for f in frames if _in_folder(Path(f.filename), Path(file).parent)]
    if not users:
        return _short(file)
    return f"{_short(users[-1].filename)}:{users[-1].lineno}"


def _in_folder(file: Path, folder: Path) -> bool:
    """Whether it is the code of whoever owns the folder, and not installed there, nor ours."""
    if not file.is_relative_to(folder):
        return False
    ours = file.is_relative_to(_OURS) and not folder.is_relative_to(_OURS)
    return not ours and "site-packages" not in file.relative_to(folder).parts


def _short(file: str) -> str:
    """A path as the user would write it."""
    with contextlib.suppress(ValueError):
        return os.fspath(Path(file).relative_to(Path.cwd()))
    return file


def _said(error: BaseException) -> str:
    """An exception's type and message, on one line."""
    text = " ".join(str(error).split())
    return type(error).__name__ + (f": {shown(text, 200)[1:-1]}" if text else "")


def _kind(value: object) -> str:
    """What a value is, in words."""
    if value is None:
        return "None"
    if isinstance(value, ModuleType):
        return f"the module {value.__name__}"
    if isinstance(value, FunctionType):
        return "a function"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (str, int, float)):
        return f"{shown(value)} ({type(value).__name__})"
    return f"a {type(value).__name__}"
