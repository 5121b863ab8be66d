"""A process that compiles Triton texts, up as soon as can be.

    python -S -P triton_process.py < requests > answers      each a pickle

It answers one request after another (see triton_worker.py), and needs Triton and nothing of Dovetail or
torch. What Triton imports and reads at its start beside itself takes longer than the rest, and is left out.
"""
from __future__ import annotations

import importlib
import inspect
import linecache
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from types import CodeType, ModuleType
from typing import Any


def source_lines(function: Callable[..., Any]) -> tuple[list[str], int]:
    """inspect.getsourcelines() without reading the text token by token, for each of Triton's functions."""
    code, lines = function.__code__, linecache.getlines(function.__code__.co_filename)
    return lines[code.co_firstlineno - 1 : last_line(code)], code.co_firstlineno


def last_line(code: CodeType) -> int:
    inner = [last_line(part) for part in code.co_consts if isinstance(part, CodeType)]
    return max([end or 0 for _, end, _, _ in code.co_positions()] + inner)


def leave_out(name: str, **members: Any) -> None:
    """A module that others import for a name or two, which our kernels have no use for."""
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(members)


def import_compiler() -> Any:
    """Triton's, with our part. Its second language takes as long to import as all the rest of it."""
    inspect.getsourcelines = source_lines  # type: ignore[assignment]
    leave_out("importlib.metadata", entry_points=lambda **wanted: ())
    language = ModuleType("triton.experimental.gluon.language")
    language.__getattr__ = lambda name: object()  # type: ignore[method-assign]
    leave_out("triton.experimental.gluon", language=language)
    try:
        importlib.import_module("triton.compiler.code_generator")
    except (ImportError, AttributeError):  # it uses more of them than we know of
        del sys.modules["importlib.metadata"], sys.modules["triton.experimental.gluon"]
    return importlib.import_module("triton_worker")


def main() -> None:
    answers, requests = os.fdopen(os.dup(1), "wb"), sys.stdin.buffer
    os.dup2(2, 1)  # what compilers print must not get between the answers
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    worker = import_compiler()
    worker.hurry()
    with suppress(EOFError):  # whoever asked is done
        while True:
            pickle.dump(worker.compile_text(pickle.load(requests), is_alone=True), answers)
            answers.flush()


if __name__ == "__main__":
    main()
