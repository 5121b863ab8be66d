"""Dovetail compiles PyTorch programs: `model = dovetail.compile(model)`.

Importing this costs next to nothing: each name is loaded when it is first asked for.
"""
from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from dovetail.util.collection import no_collections

if TYPE_CHECKING:
    from dovetail.compile import wait
    from dovetail.control import (
        allow_in_graph,
        assume_constant_result,
        disable,
        graph_break,
        is_compiling,
        mark_dynamic,
        mark_static,
        set_stance,
    )
    from dovetail.differences import compare
    from dovetail.errors import DovetailError
    from dovetail.explain.query import Explanation, Report, stats
    from dovetail.front import compile, reset
    from dovetail.options import Options
    from dovetail.reporting import explain, report

__version__: Final = "0.1.0"

_HOMES: Final[dict[str, tuple[str, ...]]] = {
    "dovetail.front": ("compile", "reset"),
    "dovetail.reporting": ("explain", "report"),
    "dovetail.control": (
        "allow_in_graph", "assume_constant_result", "disable", "graph_break", "is_compiling",
        "mark_dynamic", "mark_static", "set_stance",
    ),
    "dovetail.compile": ("wait",),
    "dovetail.explain.query": ("Explanation", "Report", "stats"),
    "dovetail.differences": ("compare",),
    "dovetail.errors": ("DovetailError",),
    "dovetail.options": ("Options",),
}  # fmt: skip
_HOME: Final = {name: home for home, names in _HOMES.items() for name in names}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name == "errors":  # what programs catch
        return importlib.import_module("dovetail.errors")
    if name not in _HOME:
        raise AttributeError(f"module 'dovetail' has no attribute {name!r}")
    with no_collections():
        value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """`dovetail.compile` and `dovetail.explain` are functions, and also a file and a folder in here:
    importing those must not hide the functions."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _HOME and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
