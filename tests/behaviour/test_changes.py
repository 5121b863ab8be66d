"""SPEC C2, further: what people rarely change between two calls, and what then has to be noticed as well.

A row is made of objects of its own: what is computed, and the change.
"""
from __future__ import annotations

import abc
import enum
import functools
import heapq
import inspect
import operator
import sys
import types
from collections import OrderedDict, defaultdict
from collections import abc as collections_abc
from collections.abc import Callable
from typing import Any, Final, Protocol, get_type_hints, runtime_checkable

import pytest
import torch

import dovetail
from tests.behaviour.test_guards import check_change

Row = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], Any]]
ROWS: Final[dict[str, Callable[[], Row]]] = {}


def row(make: Callable[[], Row]) -> Callable[[], Row]:
    ROWS[make.__name__] = make
    return make


class Shape(abc.ABC):  # noqa: B024
    ok = False


@runtime_checkable
class Named(Protocol):
    title: str


def a_class(**body: Any) -> Any:
    return type("Thing", (), body)


@row
def instance_of_a_registered_class() -> Row:
    kind = a_class()
    thing = kind()
    return lambda x: x + 1 if isinstance(thing, (str, Shape)) else x - 1, lambda: Shape.register(kind)


@row
def registered_subclass() -> Row:
    kind = a_class()
    return lambda x: x + 1 if issubclass(kind, Shape) else x - 1, lambda: Shape.register(kind)


@row
def registered_sequence() -> Row:
    kind = a_class()
    thing = kind()
    return (
        lambda x: x + 1 if isinstance(thing, collections_abc.Sequence) else x - 1,
        lambda: collections_abc.Sequence.register(kind),
    )


@row
def attribute_of_a_protocol() -> Row:
    thing = a_class()()
    return lambda x: x + 1 if isinstance(thing, Named) else x - 1, lambda: setattr(thing, "title", "a")


@row
def method_of_a_protocol() -> Row:
    kind = a_class()
    thing = kind()
    return lambda x: x + 1 if isinstance(thing, Named) else x - 1, lambda: setattr(kind, "title", "a")


@row
def bases() -> Row:
    first, second = type("First", (), {}), type("Second", (), {})
    kind = type("Kind", (first,), {})
    thing = kind()
    return lambda x: x + 1 if isinstance(thing, first) else x - 1, lambda: setattr(kind, "__bases__", (second,))


@row
def becomes_callable() -> Row:
    kind = a_class()
    thing = kind()
    return lambda x: x + 1 if callable(thing) else x - 1, lambda: setattr(kind, "__call__", lambda self: 0)


def an_enum() -> Any:
    class Color(enum.Enum):
        RED = 1

        def __init__(self, number: int) -> None:
            self.twice = number * 2

    return Color


@row
def value_of_an_enum() -> Row:
    color = an_enum()
    return lambda x: x * color.RED.value, lambda: setattr(color.RED, "_value_", 7)


@row
def name_of_an_enum() -> Row:
    color = an_enum()
    return lambda x: x * len(color.RED.name), lambda: setattr(color.RED, "_name_", "CRIMSON")


@row
def field_of_an_enum() -> Row:
    color = an_enum()
    return lambda x: x * color.RED.twice, lambda: setattr(color.RED, "twice", 7)


def of_a_function(field: str) -> Callable[[], Row]:
    def make() -> Row:
        def g() -> None:
            """Text."""

        return lambda x: x * len(getattr(g, field)), lambda: setattr(g, field, "another name")

    return make


def of_a_class(field: str) -> Callable[[], Row]:
    def make() -> Row:
        kind = a_class(__doc__="Text.")
        thing = kind()
        return lambda x: x * len(getattr(type(thing), field)), lambda: setattr(kind, field, "another name")

    return make


for field in ("__name__", "__qualname__", "__doc__", "__module__"):
    ROWS[f"function{field}"] = of_a_function(field)
    ROWS[f"class{field}"] = of_a_class(field)


@row
def annotations() -> Row:
    kind = a_class(__annotations__={"a": int})
    return lambda x: x * len(kind.__annotations__), lambda: kind.__annotations__.update(b=int)


@row
def call_of_a_metaclass() -> Row:
    meta = type("Meta", (type,), {"__call__": lambda cls: 3})
    kind = meta("Kind", (), {})
    return lambda x: x * kind(), lambda: setattr(meta, "__call__", lambda cls: 4)


@row
def order_of_an_ordered_dict() -> Row:
    table = OrderedDict(a=1.0, b=2.0)
    return lambda x: x * next(iter(table.values())), lambda: table.move_to_end("a")


@row
def factory_of_a_defaultdict() -> Row:
    table: Any = defaultdict(lambda: 2)

    def f(x: torch.Tensor) -> torch.Tensor:
        x = x * table["new"]
        del table["new"]
        return x

    return f, lambda: setattr(table, "default_factory", lambda: 5)


@row
def module_in_sys_modules() -> Row:
    first, second = types.ModuleType("replaced_later"), types.ModuleType("replaced_later")
    first.k, second.k = 2, 7  # type: ignore[attr-defined]
    sys.modules["replaced_later"] = first

    def f(x: torch.Tensor) -> torch.Tensor:
        import replaced_later  # type: ignore[import-not-found]

        return x * replaced_later.k  # type: ignore[no-any-return]

    return f, lambda: sys.modules.update(replaced_later=second)


@row
def cache_cleared() -> Row:
    table = [2]
    cached = functools.lru_cache(lambda: table[0])
    return lambda x: x * cached(), lambda: (table.append(table.pop() + 3), cached.cache_clear())


class Holder:
    def __init__(self) -> None:
        self.value = 1.0

    def __get__(self, owner: Any, kind: Any = None) -> float:
        return self.value


class Setter(Holder):
    def __set__(self, owner: Any, value: float) -> None:
        self.value = value


@row
def state_of_a_descriptor() -> Row:
    held = Holder()
    thing = a_class(field=held)()
    return lambda x: x * thing.field, lambda: setattr(held, "value", 8.0)


@row
def state_of_a_descriptor_that_is_set() -> Row:
    thing = a_class(field=Setter())()
    return lambda x: x * thing.field, lambda: setattr(thing, "field", 8.0)


@row
def keywords_of_a_partial_method() -> Row:
    def scale(self: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    kind = a_class(twice=functools.partialmethod(scale, factor=2.0))
    thing = kind()
    return lambda x: thing.twice(x), lambda: vars(kind)["twice"].keywords.update(factor=8.0)


@row
def type_hints_of_a_class() -> Row:
    kind = type("Thing", (), {"__annotations__": {"a": int}})
    return lambda x: x * len(get_type_hints(kind)), lambda: kind.__annotations__.update(b=float)


@row
def default_in_a_signature() -> Row:
    def scale(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return x * factor

    change = lambda: setattr(scale, "__defaults__", (8.0,))  # noqa: B010
    return lambda x: x * inspect.signature(scale).parameters["factor"].default, change


@row
def object_in_place_of_a_module() -> Row:
    stands = types.SimpleNamespace(factor=2.0)
    sys.modules["stands_for_a_module"] = stands  # type: ignore[assignment]

    def f(x: torch.Tensor) -> torch.Tensor:
        import stands_for_a_module  # type: ignore[import-not-found]

        return x * stands_for_a_module.factor  # type: ignore[no-any-return]

    return f, lambda: setattr(stands, "factor", 8.0)


class Documented(property):
    pass


@row
def attribute_behind_a_property_of_a_class_of_ones_own() -> Row:
    thing = a_class(k=2.0, twice=Documented(lambda self: self.k * 2))()
    return lambda x: x * thing.twice, lambda: setattr(thing, "k", 8.0)


def changed_for_a_while(make: Callable[[], Any], change: Any, read: Any, undo: Any) -> Callable[[], Row]:
    """Two containers or objects, one of which is changed and changed back; then there is only one."""

    def make_row() -> Row:
        box = {"one": make(), "other": make()}

        def f(x: torch.Tensor) -> torch.Tensor:
            change(box["one"])
            result = x * read(box["other"])
            undo(box["one"])
            return result

        return f, lambda: box.update(other=box["one"])

    return make_row


def tagged() -> Any:
    tensor: Any = torch.ones(1)
    tensor.k = 1.0
    return tensor


ROWS |= {
    f"{name}_for_a_while": changed_for_a_while(*parts)
    for name, parts in {
        "appended": (lambda: [1.0], lambda it: it.append(2.0), len, lambda it: it.pop()),
        "extended": (lambda: [1.0], lambda it: operator.iadd(it, [2.0]), len, lambda it: it.__delitem__(-1)),
        "heaped": (lambda: [1.0], lambda it: heapq.heappush(it, 0.0), len, heapq.heappop),
        "added": (lambda: {1}, lambda it: it.add(2), len, lambda it: it.discard(2)),
        "item": (lambda: {"k": 1.0}, lambda it: it.update(k=5.0), lambda it: it["k"],
                 lambda it: it.update(k=1.0)),
        "attribute": (lambda: types.SimpleNamespace(k=1.0), lambda it: setattr(it, "k", 5.0),
                      lambda it: it.k, lambda it: setattr(it, "k", 1.0)),
        "tag": (tagged, lambda it: setattr(it, "k", 5.0), lambda it: it.k, lambda it: setattr(it, "k", 1.0)),
    }.items()
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_change_is_noticed(name: str) -> None:
    f, change = ROWS[name]()
    check_change(f, (torch.arange(4.0),), change, "eager")


def test_a_descriptor_set_in_the_function_keeps_its_state() -> None:
    thing = a_class(field=Setter())()

    def f(x: torch.Tensor) -> torch.Tensor:
        thing.field = thing.field + 1
        return x * thing.field

    compiled = dovetail.compile(f, backend="eager", fullgraph=True)
    assert [compiled(torch.ones(1)).item() for _ in range(3)] == [2.0, 3.0, 4.0]
    assert thing.field == 4.0
