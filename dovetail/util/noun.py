"""Classes of fields that are quick to declare and to make: dataclasses with slots.

    class Range(Noun): ...                      assigning to a field is an error to the type checker alone
    class Loops(Noun, eq=False): ...            two are equal only if they are one
    class Writer(Noun, frozen=False): ...       what changes
    class Device(Single, eq=False): ...         equal ones are one, so that comparing and hashing cost nothing

Frozen at run time, too, an object costs twice as much, and compiling a model makes tens of thousands. And a
class takes Python's library a tenth of a millisecond of the import; here half of that, and there are 150.
"""
from __future__ import annotations

import dataclasses
from dataclasses import MISSING, Field
from dataclasses import field as field
from dataclasses import fields as fields
from functools import lru_cache
from operator import attrgetter
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform
from weakref import WeakValueDictionary, _remove_dead_weakref, ref  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from dataclasses import replace as replace
else:

    def replace(it: Any, **changes: Any) -> Any:
        """A copy with these fields changed."""
        names = type(it).__match_args__
        return type(it)(*map(changes.get, names, [getattr(it, name) for name in names]))

PLAIN: Any = vars(dataclasses)["_FIELD"]
"""As Python's library marks fields."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class _Kind(type):
    def __new__(
        mcs, name: str, bases: tuple[type, ...], space: dict[str, Any], eq: bool = True, frozen: bool = True
    ) -> Any:
        if "__slots__" in space:
            return super().__new__(mcs, name, bases, space)
        found, own = declared(bases, space)
        given = [each for each in found.values() if each.init]
        has_more = "__post_init__" in space or any(hasattr(base, "__post_init__") for base in bases)
        members = {"__init__": initializer(given, has_more), "__repr__": show}
        members |= comparing(found, frozen) if eq else {}
        members |= {key: value for key, value in space.items() if key not in own}
        members |= {"__match_args__": tuple(each.name for each in given), "__dataclass_fields__": found}
        return super().__new__(mcs, name, bases, {**members, "__slots__": tuple(own)})


class Noun(metaclass=_Kind):
    __slots__ = ()
    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class _Single(_Kind):
    @lru_cache(1 << 14)  # noqa: B019
    def __call__(cls, *args: Any, **named: Any) -> Any:
        made = super().__call__(*args, **named)
        with _lock:  # two threads may make the same; only one may be kept
            return _singles.setdefault(made.__reduce__(), made)


class Single(Noun, metaclass=_Single):
    __slots__ = ("__weakref__",)

    def __reduce__(self) -> Any:
        return type(self), tuple([getattr(self, each.name) for each in fields(self)])


_lock, _singles = Lock(), WeakValueDictionary[Any, Any]()


def keep_weakly(table: dict[Any, Any], key: Any, value: Any) -> None:
    """As in a WeakValueDictionary, whose references take three times as long to make. (At the end of the
    process this module's names go before its objects.)"""
    remove = _remove_dead_weakref
    table[key] = ref(value, lambda _: remove(table, key))


def declared(bases: tuple[type, ...], space: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """All fields of a class, those of its bases first, and the names of its own."""
    found: dict[str, Any] = {}
    for base in reversed(bases):
        found |= getattr(base, "__dataclass_fields__", {})
    own = {n: kind for n, kind in space.get("__annotations__", {}).items() if "ClassVar" not in str(kind)}
    for name, kind in own.items():
        value = space.get(name, MISSING)
        each: Any = value if type(value) is Field else field(default=value)
        each.name, each.type, each._field_type = name, kind, PLAIN
        found[name] = each
    return found, list(own)


def initializer(given: list[Any], has_more: bool) -> Any:
    """An __init__ that takes these fields; `has_more`: there is a __post_init__."""
    scope: dict[str, Any] = {"MISSING": MISSING}
    takes, lines = ["self"], []
    for each in given:
        name, make = each.name, each.default_factory is not MISSING
        scope |= {f"default_{name}": each.default, f"make_{name}": each.default_factory}
        takes.append(f"{name}=default_{name}" if make or each.default is not MISSING else name)
        lines.append(f" self.{name} = {f'make_{name}() if {name} is MISSING else ' if make else ''}{name}")
    head, last = f"def __init__({', '.join(takes)}):", " self.__post_init__()" if has_more else " return"
    exec("\n".join([head, *lines, last]), scope)
    return scope["__init__"]


def comparing(found: dict[str, Any], has_hash: bool) -> dict[str, Any]:
    names = [each.name for each in found.values() if each.compare]
    values = attrgetter(*names) if names else lambda it: ()
    return {
        "__eq__": lambda a, b: values(a) == values(b) if type(a) is type(b) else NotImplemented,
        "__hash__": (lambda it: hash(values(it))) if has_hash else None,
    }


def show(it: Any) -> str:
    shown = [f"{each.name}={getattr(it, each.name)!r}" for each in fields(it) if each.repr]
    return f"{type(it).__qualname__}({', '.join(shown)})"
