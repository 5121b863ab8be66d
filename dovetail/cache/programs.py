"""Programs by the graphs they were made of: a graph seen before skips lowering, scheduling and codegen.

    key = program_key(graph, options, target)
    programs.find(key) -> Program | None
    programs.keep(key, program)

A key is the content of the graph (ops, arguments, types, symbols with their ranges; not names, not the
user's lines), the options, the machine that is compiled for, torch's version, and the text of Dovetail
itself, so any change of the compiler is a miss. What is read back is only ever an `ir` noun.
"""
from __future__ import annotations

import functools
import hashlib
import io
import os
import pickle
from collections.abc import Iterable
from dataclasses import astuple
from pathlib import Path
from typing import Any, Final

from dovetail.cache.store import Store, key_of, short_parts, store_in
from dovetail.events import EVENTS
from dovetail.ir.expr import symbols
from dovetail.ir.graph import Graph, Node, exprs_in, swapped
from dovetail.ir.program import Program
from dovetail.ir.types import Type
from dovetail.options import Options

KIND: Final = "program"
PLAIN: Final = {"complex", "frozenset", "set", "slice", "range"}
"""Builtin types that a stored program may hold besides those pickle knows by itself."""


# -- keys ------------------------------------------------------------------------------------------


class _Place(str):
    """A node by its number; written without quotes, unlike a text."""

    __repr__ = str.__str__


def content_of(graph: Graph) -> str:
    """Equal for graphs that compute the same in the same way, whatever their values are called."""
    places: dict[Node, _Place] = {}
    types: dict[Type, str] = {}
    lines: list[str] = []
    for node in (*graph.inputs, *graph.nodes):
        text = types.get(node.type) or types.setdefault(node.type, repr(node.type))
        kwargs = node.kwargs and swapped(node.kwargs, places)
        lines.append(f"{node.op}{swapped(node.args, places)}{kwargs}{text}")
        places[node] = _Place(f"%{len(places)}")
    lines += [repr(swapped(graph.outputs, places)), repr(graph.updates)]
    found = {symbol: None for type in types for expr in exprs_in(type) for symbol in symbols(expr)}
    ranges = sorted(f"{symbol.name}:{symbol.lo}..{symbol.hi}" for symbol in found)
    return "\n".join([*lines, *ranges])


@functools.cache
def compiler_text() -> str:
    """A hash of Dovetail's own sources: what another version made is not taken."""
    digest = hashlib.sha256()
    for folder, inner, names in os.walk(os.path.dirname(os.path.dirname(__file__))):
        inner.sort()
        for name in sorted(name for name in names if name.endswith((".py", ".h"))):
            with open(os.path.join(folder, name), "rb", buffering=0) as file:
                digest.update(file.read())
    return digest.hexdigest()


def program_key(graph: Graph, options: Options, target: Iterable[str]) -> tuple[str, dict[str, str]]:
    """The key and what it was made of. `target` says what is compiled for: the CPU's vectors, a GPU's
    name, torch's version."""
    parts = {
        "graph": content_of(graph),
        "options": repr(astuple(options)),
        "target": " ".join(target),
        "compiler": compiler_text(),
    }
    return key_of(KIND, parts), short_parts(KIND, parts)


# -- programs --------------------------------------------------------------------------------------


class _Nouns(pickle.Unpickler):
    """Loads nothing but Dovetail's own nouns: a damaged or foreign file cannot do harm."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("dovetail.ir.") or (module == "builtins" and name in PLAIN):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a program")


@functools.cache
def programs_in(folder: Path) -> Programs:
    """One memory per folder and process."""
    return Programs(store_in(folder))


class Programs:
    """A memory of this process in front of the store on disk."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.known: dict[str, Program] = {}

    def find(self, key: str) -> Program | None:
        if key in self.known:
            return self.known[key]
        content = self.store.get(key)
        if content is None:
            return None
        try:
            program = _Nouns(io.BytesIO(content)).load()
            if not isinstance(program, Program):
                raise pickle.UnpicklingError(f"a {type(program).__name__}")
        except (pickle.PickleError, AttributeError, EOFError, IndexError, TypeError, ImportError) as error:
            EVENTS.emit("cache", what="damaged", key=key, text=str(error))
            return None
        self.known[key] = program
        return program

    def keep(self, key: str, program: Program, parts: dict[str, str]) -> None:
        self.known[key] = program
        try:
            content = pickle.dumps(program)
            _Nouns(io.BytesIO(content)).load()  # what cannot be read back is not written
        except (pickle.PickleError, AttributeError, TypeError) as error:
            EVENTS.emit("cache", what="uncachable", key=key, text=str(error))
            return
        self.store.put(key, content, parts)
