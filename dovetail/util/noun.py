"""Dataclasses that are quick to declare and to make.

    @dataclass(frozen=True, slots=True)      as that of Python's library; assigning to a field is an error to
    class Range: ...                         the type checker alone

Frozen at run time, too, an object costs twice as much, and compiling a model makes tens of thousands. And a
class of which each method is compiled from a text takes half a millisecond of the import.
"""
from __future__ import annotations

import dataclasses
from dataclasses import field as field
from dataclasses import fields as fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from dataclasses import replace as replace
else:

    def dataclass(*, slots: bool, frozen: bool = False, eq: bool = True) -> Any:
        def make(kind: type) -> type:
            made = dataclasses.dataclass(kind, slots=slots, eq=False, repr=False)
            methods = {"__repr__": show, **(comparing(made, frozen) if eq else {})}
            for name, method in methods.items():
                if name not in vars(kind):
                    setattr(made, name, method)
            return made

        return make

    def replace(it: Any, **changes: Any) -> Any:
        """A copy with these fields changed."""
        names = type(it).__match_args__
        return type(it)(*[changes[name] if name in changes else getattr(it, name) for name in names])


def comparing(kind: type, has_hash: bool) -> dict[str, Any]:
    names = [each.name for each in fields(kind) if each.compare]
    hashed = [each.name for each in fields(kind) if (each.compare if each.hash is None else each.hash)]
    values, hashed_values = (attrgetter(*found) if found else lambda it: () for found in (names, hashed))
    return {
        "__eq__": lambda a, b: values(a) == values(b) if type(a) is type(b) else NotImplemented,
        "__hash__": (lambda it: hash(hashed_values(it))) if has_hash else None,
    }


def show(it: Any) -> str:
    shown = [f"{each.name}={getattr(it, each.name)!r}" for each in fields(it) if each.repr]
    return f"{type(it).__qualname__}({', '.join(shown)})"
