"""Classes of fields that are quick to declare and to make: dataclasses with slots.

    class Range(Noun): ...                      assigning to a field is an error to the type checker alone
    class Loops(Noun, eq=False): ...            two are equal only if they are one
    class Writer(Noun, frozen=False): ...       what changes

Frozen at run time, too, an object costs twice as much, and compiling a model makes tens of thousands. And a
class of which each method is compiled from a text takes half a millisecond of the import.
"""
from __future__ import annotations

import dataclasses
from dataclasses import field as field
from dataclasses import fields as fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

if TYPE_CHECKING:
    from dataclasses import replace as replace
else:

    def replace(it: Any, **changes: Any) -> Any:
        """A copy with these fields changed."""
        names = type(it).__match_args__
        return type(it)(*[changes[name] if name in changes else getattr(it, name) for name in names])


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class _Kind(type):
    def __new__(
        mcs, name: str, bases: tuple[type, ...], space: dict[str, Any], eq: bool = True, frozen: bool = True
    ) -> Any:
        if "__slots__" in space:
            return super().__new__(mcs, name, bases, space)
        cell = space.pop("__classcell__", None)  # where super() finds the class
        kind: Any = super().__new__(mcs, name, bases, space)
        made: Any = dataclasses.dataclass(kind, slots=True, eq=False, repr=False)  # another class, with slots
        methods = {"__repr__": show, **(comparing(made, frozen) if eq else {})}
        for method in methods.keys() - vars(kind).keys():
            setattr(made, method, methods[method])
        if cell is not None:
            cell.cell_contents = made
        return made


class Noun(metaclass=_Kind):
    __slots__ = ()
    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


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
