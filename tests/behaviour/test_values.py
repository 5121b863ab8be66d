"""SPEC C3, C4: kinds of values that live longer than a frame, each with the breaks it costs.

Iterators that existed before the frame, views of dicts ...: a table of (function, what makes its arguments).
"""
from __future__ import annotations

import array
import bisect
import collections
import contextlib
import copy
import dataclasses
import datetime
import decimal
import fractions
import functools
import heapq
import inspect
import io
import itertools
import math
import random
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dovetail
from tests.behaviour.running import check_same
from tests.capture.programs import Countdown

X = torch.ones(2)


def generate(xs: Any) -> Iterator[Any]:
    for x in xs:
        yield x + 1


ITERATORS: dict[str, Callable[[], Any]] = {
    "generator": lambda: generate([X, X * 2]),
    "list": lambda: iter([X, X * 2]),
    "map": lambda: map(lambda x: x + 1, [X, X * 2]),
    "zip": lambda: (a for a, _ in zip([X, X * 2], [1, 2])),
}


def use_all_and_print(it: Any, x: Any) -> Any:
    found = tuple(it)
    print(len(found))
    return x + len(found)


def use_two(it: Any, x: Any) -> Any:
    return next(it) * next(it) + x


def use_loop(it: Any, x: Any) -> Any:
    for step in it:
        x = x + step
        print("round")
    return x


def use_extend(it: Any, x: Any) -> Any:
    found: list[Any] = []
    found.extend(it)
    return found[0] + x


USES: dict[str, Callable[[Any, Any], Any]] = {
    "print": use_all_and_print,
    "next": use_two,
    "loop": use_loop,
    "extend": use_extend,
    "list": lambda it, x: torch.stack(list(it)) + x,
    "sum": lambda it, x: sum(it) + x,
    "unpack": lambda it, x: (lambda a, *b: a + x + len(b))(*it),
    "enumerate": lambda it, x: dict(enumerate(it))[1] + x,
    "zip": lambda it, x: [a + b for a, b in zip(it, [x, x])][1] + x,
    "map": lambda it, x: torch.cat(list(map(lambda a: a * 2, it))).sum() + x,
    "islice": lambda it, x: next(itertools.islice(it, 1, None)) + x,
    "deque": lambda it, x: collections.deque(it, maxlen=1)[0] + x,
    "class": lambda it, x: (x + 1, isinstance(it, Iterator), isinstance(it, types.GeneratorType), type(it).__name__),
}


def check(function: Callable[..., Any], make: Callable[[], tuple[Any, ...]], breaks: int = 9, recompiles: int = 0) -> None:
    """Three calls, in plain Python and compiled: the same results, and no more breaks and recompiles than these."""
    dovetail.reset()
    compiled = dovetail.compile(function, backend="eager")
    for _ in range(3):
        with contextlib.redirect_stdout(io.StringIO()) as plainly:
            wanted = function(*make())
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            check_same(compiled(*make()), wanted, "result")
        assert printed.getvalue() == plainly.getvalue()
    stats = dovetail.stats()
    assert stats["graphs"], stats
    assert stats["graph_breaks"] + stats["skips"] <= breaks and stats["recompiles"] <= recompiles, stats


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", ITERATORS)
def test_a_callers_iterator_is_stepped_once(kind: str, use: str) -> None:
    check(USES[use], lambda: (ITERATORS[kind](), X), breaks=2, recompiles=1)


def use_iterator_twice(items: Any, x: Any) -> Any:
    it = iter(items)
    x = x + next(it)
    print("one")
    x = x * 2 + next(it)
    print("two")
    return x + sum(it)


def change_through_view(registry: dict[str, int], keys: Any, x: Any) -> Any:
    registry["new"] = 5
    return x * len(keys)


class Registry:
    def __init__(self) -> None:
        self.entries = {"a": 1}
        self.public = types.MappingProxyType(self.entries)


def change_through_proxy(registry: Registry, x: Any) -> Any:
    before = len(registry.public)
    registry.entries["b"] = 2
    return x * len(registry.public) + before


def dict_and_view(is_first: bool) -> tuple[Any, ...]:
    made = {"a": 1}
    return (made, made.keys()) if is_first else (made.keys(), made)


GENERATOR = torch.Generator()


def draw(x: Any) -> Any:
    GENERATOR.manual_seed(5)
    return x + torch.rand(2, generator=GENERATOR)


def draw_from_own(x: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    return x + torch.rand(2, generator=generator)


@functools.singledispatch
def encode(value: Any, x: Any) -> Any:
    return x


@encode.register(int)
def _encode_int(value: int, x: Any) -> Any:
    return x + value


@encode.register(list)
def _encode_list(value: list[Any], x: Any) -> Any:
    return sum(encode(item, x) for item in value)


class Tagging(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        made.tag = cls.__name__
        return made


class Tagged(metaclass=Tagging):
    def __init__(self, x: Any) -> None:
        self.x = x


def stack_of_exits(x: Any) -> Any:
    done: list[int] = []
    with contextlib.ExitStack() as exits:
        for i in range(3):
            exits.callback(done.append, i)
        with contextlib.suppress(KeyError):
            {}["a"]  # noqa: B018
        x = x + len(done)
    return x, done


VALUES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], int]] = {
    "iterator of a class": (use_loop, lambda: (Countdown(3), X), 9),
    "next twice": (use_iterator_twice, lambda: ([1, 2, 3, 4], X), 4),
    "next of a class": (use_iterator_twice, lambda: (Countdown(4), X), 2),
    "proxy": (lambda m, x: x * m["a"] + sum(m.values()), lambda: (types.MappingProxyType({"a": 2}), X), 0),
    "keys": (lambda m, x: x * len(m), lambda: ({"a": 2}.keys(), X), 0),
    "items": (lambda m, x: x * dict(m)["a"], lambda: ({"a": 2}.items(), X), 0),
    "values": (lambda m, x: [x * v for v in m], lambda: (collections.OrderedDict(a=X).values(), X), 0),
    "dict then its view": (change_through_view, lambda: (*dict_and_view(True), X), 1),
    "view then its dict": (lambda k, d, x: change_through_view(d, k, x), lambda: (*dict_and_view(False), X), 9),
    "tensors of items": (
        lambda x: (torch.tensor([x.sum(), 1]), torch.tensor([[x.long().sum(), 2]]), torch.Tensor([x.double().sum()]),
                   torch.tensor([x.sum() > 0])), lambda: (X,), 0),
    "typed tensors of sizes": (
        lambda x: (torch.Tensor(*x.shape).zero_() + x, torch.Tensor(torch.Size([3])).zero_(), torch.Tensor(),
                   torch.arange(0, 5, out=torch.LongTensor(5)), x.type(torch.LongTensor)), lambda: (X,), 0),
    "typed tensors": (lambda x: (x, torch.LongTensor([1, 2]), torch.Tensor([1, 2])), lambda: (X,), 0),
    "generator": (draw, lambda: (X,), 2),
    "generator of its own": (draw_from_own, lambda: (X,), 4),
    "generator as an argument": (lambda g, x: torch.rand(2, generator=g) + x, lambda: (torch.Generator().manual_seed(1), X), 1),
    "single dispatch": (lambda x: encode([1, "a", 2], x), lambda: (X,), 0),
    "metaclass": (lambda x: (Tagged(x).x + 1, Tagged(x).tag), lambda: (X,), 0),
    "exit stack": (stack_of_exits, lambda: (X,), 0),
    "proxy of a field": (change_through_proxy, lambda: (Registry(), X), 2),
}


@pytest.mark.parametrize("name", VALUES)
def test_value(name: str) -> None:
    function, make, breaks = VALUES[name]
    check(function, make, breaks, recompiles=1)


class Keeper(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.history: list[Any] = []
        self.table: dict[str, Any] = {}
        self.recent: collections.deque[Any] = collections.deque(maxlen=50)


class KeepsList(Keeper):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.history.append((y.detach(), len(self.history)))
        return y + torch.stack([entry for entry, _ in self.history[-3:]]).mean()


class KeepsDict(Keeper):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.table[f"step{len(self.table)}"] = y.detach()
        return y * len(self.table)


class KeepsDeque(Keeper):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.recent.append(y.detach().sum())
        return y + sum(self.recent) / len(self.recent)


def of_a_time(x: torch.Tensor, now: datetime.datetime) -> Any:
    later = now + datetime.timedelta(hours=now.day)
    return x * now.hour + math.sin(now.minute), f"{now:%H:%M}", later, (later - now).total_seconds()


def of_a_fraction(x: torch.Tensor, now: datetime.datetime) -> Any:
    part = fractions.Fraction(now.hour, 24) + fractions.Fraction(1, 3)
    return x * float(part), part, str(decimal.Decimal(now.hour) / 3), {part: now}


@pytest.mark.parametrize("function", [of_a_time, of_a_fraction])
def test_times_and_fractions_that_change(function: Any) -> None:
    dovetail.reset()
    compiled, counts = dovetail.compile(function, backend="eager"), []
    for i in range(24):
        given = X, datetime.datetime(2026, 1, 2, i, 30)
        check_same(compiled(*given), function(*given), "result")
        counts.append(dovetail.stats()["recompiles"])
    assert counts[-1] == counts[12] and not dovetail.stats()["fallbacks_to_eager"]


def test_a_namespace_is_returned() -> None:
    def f(x: torch.Tensor) -> Any:
        made = types.SimpleNamespace(x=x * 2, parts=[x])
        made.again = made.parts
        return made, made.again is made.parts

    got, is_same = dovetail.compile(f, fullgraph=True)(X)
    assert is_same and got.again is got.parts
    check_same(vars(got), vars(f(X)[0]), "result")


def test_the_method_append_by_itself() -> None:
    """How long a list is already does not matter to who only appends to it."""

    def f(x: torch.Tensor, log: list[Any]) -> Any:
        add = log.append
        for row in x:
            add(row * 2)
        return x + 1

    dovetail.reset()
    compiled = dovetail.compile(f, backend="eager", fullgraph=True)
    logs: tuple[list[Any], list[Any]] = ([], [])
    for _ in range(3):
        compiled(X, logs[0]), f(X, logs[1])
    check_same(logs[0], logs[1], "log")
    assert dovetail.stats()["recompiles"] == 0


@pytest.mark.parametrize("kind", [KeepsList, KeepsDict, KeepsDeque])
def test_what_grows_with_each_call_is_left_to_python(kind: type[Keeper]) -> None:
    dovetail.reset()
    torch.manual_seed(0)
    model = kind()
    compiled, counts = dovetail.compile(copy.deepcopy(model), backend="eager"), []
    for i in range(24):
        x = torch.full((2, 4), float(i))
        torch.testing.assert_close(compiled(x), model(x))
        counts.append(dovetail.stats()["recompiles"])
    assert counts[-1] == counts[12]


class Noted:
    def __init__(self) -> None:
        self.log: list[Any] = []

    def note(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append(x.shape[0])
        return x * len(self.log)


@pytest.mark.parametrize("gather", [set, frozenset, weakref.WeakSet, dict.fromkeys, lambda made: {(1, made[0]): 2}])
def test_objects_found_in_sets_and_among_keys_are_the_callers(gather: Any) -> None:
    """While capturing, nothing is done to them."""

    def f(x: torch.Tensor, found: Any) -> Any:
        for item in found:
            x = (item[1] if isinstance(item, tuple) else item).note(x)
        return x if found else x + 1

    compiled = dovetail.compile(f, backend="eager")
    made = [Noted(), Noted()]
    given = [gather(made[:1]), gather(made[1:])]
    for i in range(5):
        x = torch.ones(2 + i % 2)
        torch.testing.assert_close(compiled(x, given[0]), f(x, given[1]))
        assert made[0].log == made[1].log


def test_a_method_of_a_number_that_changes_is_left_to_python() -> None:
    compiled = dovetail.compile(lambda x: (x + 1, random.random().hex()), backend="eager")
    for seed in range(3):
        random.seed(seed)
        found = compiled(X)[1]
        random.seed(seed)
        assert found == random.random().hex()


class Measured(array.array):  # type: ignore[type-arg]
    def __new__(cls, items: Any, unit: str) -> Any:
        return array.array.__new__(cls, "d", items)

    def __init__(self, items: Any, unit: str) -> None:
        self.unit = unit


def test_an_object_of_a_class_of_c_is_made_in_python() -> None:
    def f(x: torch.Tensor) -> Any:
        made = Measured([1.0, 2.0], "m")
        dovetail.graph_break()
        return x + len(made), made.unit

    compiled = dovetail.compile(f, backend="eager", options={"fallback_to_eager": False})
    check_same(compiled(X), f(X), "result")


def test_the_factory_of_a_defaultdict_is_itself() -> None:
    def make() -> int:
        return 1

    def f(x: torch.Tensor) -> Any:
        table = collections.defaultdict(make, {1: 2})
        return x + table[3], table.default_factory is make, copy.copy(table).default_factory is make

    assert dovetail.compile(f, backend="eager", fullgraph=True)(X)[1:] == (True, True)


class Meta(type):
    log: list[Any] = []


class Place:
    def __init__(self) -> None:
        self.contents: list[Any] = []

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self


class Shared(metaclass=Meta):
    place = Place()
    items: list[Any] = []
    table: dict[str, Any] = {}

    @functools.cache  # noqa: B019
    def of(self, n: int) -> list[int]:
        return [n]

    def method(self) -> None:
        pass


def keep(x: Any, into: list[Any] = []) -> Any:  # noqa: B006
    return x


@functools.cache
def cached_list(n: int) -> list[Any]:
    return [n]


@functools.cache
def cached_tensor(n: int) -> torch.Tensor:
    return torch.arange(float(n))


SHARED = Shared()
PLACES: dict[str, Any] = {
    "an attribute of a metaclass": lambda: Shared.log,
    "the dict of a class": lambda: Shared.__dict__["items"],
    "vars of a class": lambda: vars(Shared)["table"].setdefault("new", []),
    "a default": lambda: inspect.signature(keep).parameters["into"].default,
    "a cache": lambda: cached_list(1),
    "a cache by object": lambda: SHARED.of(2),
    "a descriptor in the dict of a class": lambda: vars(Shared)["place"].contents,
    "the dict of a method": lambda: SHARED.method.__func__.__dict__.setdefault("log", []),  # type: ignore[attr-defined]
    "the globals of a method": lambda: SHARED.method.__globals__["SHARED"].items,  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("place", PLACES)
def test_what_lies_in_odd_places_is_the_programs_own(place: str) -> None:
    """While capturing nothing is done to it, and afterwards once."""
    find = PLACES[place]

    def f(x: torch.Tensor) -> Any:
        find().append(x.shape[0])
        return x * 2

    find().clear()
    compiled = dovetail.compile(f, backend="eager")
    for i in range(5):
        compiled(torch.ones(2 + i % 2))
        assert find() == [2, 3, 2, 3, 2][: i + 1]


def test_a_cache_holds_real_tensors() -> None:
    def f(x: torch.Tensor) -> Any:
        return x * cached_tensor(3), cached_tensor(x.shape[0] + 1).add_(1)

    dovetail.compile(f, fullgraph=True)(torch.ones(3))
    assert type(cached_tensor(3)) is torch.Tensor and cached_tensor(4).tolist() == [1, 2, 3, 4]


def test_random_numbers_in_a_cache_are_drawn_once_and_in_their_turn() -> None:
    class Noisy:
        @functools.lru_cache  # noqa: B019
        def of(self, n: int) -> torch.Tensor:
            return torch.randn(n)

    def run(compile: Any) -> Any:
        noise, noisy = functools.cache(lambda n: torch.randn(n)), Noisy()
        step = compile(lambda x: torch.rand(3) + x * noise(3) + noise(1) + torch.rand(3) + noisy.of(3))
        torch.manual_seed(0)
        return [step(torch.ones(3)) for _ in range(3)], torch.rand(2)

    check_same(run(functools.partial(dovetail.compile, backend="eager")), run(lambda f: f), "results")


def test_a_cached_function_with_effects_has_them_once_and_in_their_turn() -> None:
    def run(compile: Any) -> Any:
        log: list[Any] = []

        @functools.cache
        def scale(n: int) -> float:
            log.append(n)
            return 2.0 * n

        def f(x: torch.Tensor, n: int) -> Any:
            log.insert(0, "before")
            y = x * scale(n)
            log.append("after")
            return y, list(log)

        step = compile(f)
        return [step(torch.ones(3), n) for n in (3, 3, 4)]

    check_same(run(functools.partial(dovetail.compile, backend="eager")), run(lambda f: f), "results")


def test_a_counter_of_sizes() -> None:
    def f(x: torch.Tensor, seen: Any) -> Any:
        seen[x.shape[0]] += 1
        return x * sum(seen.values())

    dovetail.reset()
    compiled, counters = dovetail.compile(f, backend="eager"), (collections.Counter(), collections.Counter())
    for i in range(4):
        check_same(compiled(torch.ones(2 + i % 2), counters[0]), f(torch.ones(2 + i % 2), counters[1]), "result")
    assert counters[0] == counters[1] and not dovetail.stats()["fallbacks_to_eager"]


@pytest.mark.parametrize(("kind", "method"), [(int, "__int__"), (int, "__index__"), (float, "__float__"), (float, "__index__")])
def test_a_number_is_made_by_the_method_of_its_class(kind: Any, method: str) -> None:
    def answer(self: Any) -> Any:
        self.asked += 1
        return 2.5 if method == "__float__" else 2

    owner = type("Owner", (), {method: answer, "asked": 0})()
    call, x = dovetail.compile(lambda x: x * kind(owner), fullgraph=True), torch.ones(3)
    for times in (1, 2):
        assert torch.equal(call(x), x * (2.5 if method == "__float__" else 2)) and owner.asked == times


def test_unpacking_takes_no_more_than_it_needs() -> None:
    def program(x: torch.Tensor) -> Any:
        numbers = itertools.count()
        try:
            a, b = numbers
        except ValueError as error:
            return x + next(numbers), str(error)

    x = torch.ones(3)
    (got, said), (want, text) = dovetail.compile(program)(x), program(x)
    assert torch.equal(got, want) and said == text


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


class Ranked:
    """Its methods, which C code calls, look at what changes, and count."""

    def __init__(self, rank: float) -> None:
        self.rank, self.asked = rank, 0

    def ask(self) -> float:
        self.asked += 1
        return self.rank

    @decorated
    def __lt__(self, other: Any) -> bool:
        return self.ask() < other.rank

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranked) and self.ask() == other.rank

    def __hash__(self) -> int:
        return hash(self.ask())

    def __index__(self) -> int:
        return int(self.ask())

    def __repr__(self) -> str:
        return f"<{self.ask()}>"

    def __float__(self) -> float:
        return float(self.ask())

    def __floor__(self) -> int:
        return int(self.ask())

    def __bytes__(self) -> bytes:
        return b"x" * int(self.ask())

    @property
    def shown(self) -> float:
        return self.ask()


@functools.total_ordering
@dataclasses.dataclass(eq=True)
class Scored:
    rank: float

    def __lt__(self, other: Any) -> bool:
        return self.rank < other.rank


def in_a_heap(a: Any, b: Any) -> Any:
    heap: list[Any] = []
    for item in (b, a):
        heapq.heappush(heap, (0, item))
    return heapq.heappop(heap)[1].rank


CALLED: dict[str, Any] = {
    "sorted": lambda a, b: sorted([b, a])[0].rank,
    "min": lambda a, b: min(a, b).rank,
    "sort": lambda a, b: (items := [a, b], items.sort(reverse=True), items[0].rank)[2],
    "heap": in_a_heap,
    "bisect": lambda a, b: bisect.bisect([b], a),
    "tuples": lambda a, b: (1, a) < (1, b),
    "lists": lambda a, b: [a] == [b],
    "set": lambda a, b: len({a, b}),
    "dict": lambda a, b: {b: 5}.get(a, 7),
    "in": lambda a, b: a in {b},
    "count": lambda a, b: max(collections.Counter([a, b]).values()),
    "groups": lambda a, b: len(list(itertools.groupby([a, b]))),
    "item": lambda a, b: [1, 2, 4, 8][a],
    "range": lambda a, b: sum(range(a)),
    "slice": lambda a, b: sum([1, 2, 4, 8][:a]),
    "insert": lambda a, b: (items := [1, 2, 4], items.insert(a, 8), items[-1])[2],
    "pop": lambda a, b: [1, 2, 4, 8].pop(a),
    "hex": lambda a, b: int(hex(a), 16),
    "text": lambda a, b: len(f"{[a]}") + len("{}".format(a)) + len("%s" % (a,)) + len(repr({"a": a})),  # noqa: UP030, UP031, UP032
    "attribute": lambda a, b: len("{0.shown}{0.asked}".format(a)),  # noqa: UP030, UP032
    "math": lambda a, b: math.sqrt(a) + math.floor(a),
    "bytes": lambda a, b: len(bytes(a)),
}


@pytest.mark.parametrize("name", CALLED)
def test_methods_that_c_code_calls_are_the_programs(name: str) -> None:
    """What they read is guarded, and what they write waits."""
    function = CALLED[name]
    pairs = [(Ranked(0), Ranked(2)) for _ in range(2)]
    compiled = dovetail.compile(lambda x, a, b: x * function(a, b), backend="eager")
    for rank in (1, 3, 2, 0, 2):
        for a, _ in pairs:
            a.rank = rank
        got, want = compiled(X, *pairs[0]), X * function(*pairs[1])
        torch.testing.assert_close(got, want)
        assert [item.asked for item in pairs[0]] == [item.asked for item in pairs[1]]
    assert not dovetail.stats()["fallbacks_to_eager"]


def test_methods_made_by_python_that_c_code_calls() -> None:
    def f(x: torch.Tensor, a: Scored, b: Scored) -> Any:
        return x * max([a, b]).rank, x * sorted([a, b], reverse=True)[0].rank, x * (a in [b]), x * (a >= b)

    compiled = dovetail.compile(f, backend="eager")
    for rank in (1.0, 3.0, 2.0, 0.0):
        check_same(compiled(X, Scored(rank), Scored(2.0)), f(X, Scored(rank), Scored(2.0)), "result")
