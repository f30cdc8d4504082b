"""pddrt: a research runtime for cross-datacenter prefill-decode disaggregation of LLM inference.

From Python: `pddrt.run`, `pddrt.compare`, `pddrt.sweep` and `pddrt.open` (see `pddrt.api`). They
are imported when they are first asked for.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pddrt.api import compare, open, run, sweep
    from pddrt.results import Run

__version__ = "0.1.0"
__all__ = ["Run", "compare", "open", "run", "sweep", "__version__"]

_LAZY = frozenset(("Run", "compare", "open", "run", "sweep"))


class _Package(ModuleType):
    """`run` is a function of it and a module of it. Python puts a module that it has imported into
    its package, where it would stand in the function's way; `from pddrt.run import ...` needs it in
    sys.modules only.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _LAZY and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'pddrt' has no attribute {name!r}")
    found = getattr(importlib.import_module("pddrt.api"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Package
