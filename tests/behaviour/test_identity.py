"""Who is who, and how long it lives: id(), hash(), weak references, generators that are given up, sets that grow."""
from __future__ import annotations

import copy
import gc
import pickle
import sys
import types
import weakref
from typing import Any

import pytest
import torch

import dovetail
from dovetail.events import EVENTS
from tests.behaviour.running import ANY, Suite

suite = Suite()
case = suite.case


class Thing:
    number: int


def x4() -> torch.Tensor:
    return torch.randn(4, requires_grad=True)


@case("C4")
def keywords_that_a_builtin_does_not_take() -> Any:
    def f(x: torch.Tensor) -> Any:
        said = []
        for call in (lambda: isinstance(x, torch.Tensor, strict=True), lambda: len(obj=[1]), lambda: getattr(x, "T", default=1)):  # type: ignore[call-arg,call-overload]
            try:
                call()
            except TypeError as error:
                said.append(str(error))
        return x * 2, said

    return f, (x4(),)


@case("C4", breaks=1)
def a_view_of_what_the_program_made() -> Any:
    def f(x: torch.Tensor) -> Any:
        ones, sums = torch.ones(3, 2), x + 1
        views = ones.T, ones[0], sums[:2]
        print("here")
        return ones, views, [view._base is made for view, made in zip(views, (ones, ones, sums))], sums

    return f, (x4(),)


@case("C4", breaks=2)
def a_tuple_and_a_slice_stay_one_object() -> Any:
    kept = Thing()

    def f(x: torch.Tensor) -> Any:
        pair, part = (x + 1, 2), slice(0, 2)
        kept.pair, kept.part = pair, part  # type: ignore[attr-defined]
        print("here")
        return pair, [pair], kept.pair is pair, x[part], kept.part is part  # type: ignore[attr-defined]

    def are_one(x: torch.Tensor) -> Any:
        pair, [again], *said = f(x)
        return pair, pair is again, said

    return are_one, (x4(),)


class Doubling(list):  # type: ignore[type-arg]
    def append(self, item: Any) -> None:
        super().append(item)
        super().append(item)


class Noted(dict):  # type: ignore[type-arg]
    def __getitem__(self, key: Any) -> Any:
        return 100


@case("C4")
def methods_in_c_of_containers_with_a_class_of_their_own_that_were_bound_before() -> Any:
    rows, table = Doubling(), Noted(a=1)
    put, put_twice, get = super(Doubling, rows).append, rows.append, super(Noted, table).__getitem__
    store = super(Noted, table).__setitem__

    def f(x: torch.Tensor) -> Any:
        put(x * 2)
        put_twice(x * 3)
        store("b", x * 4)
        return x * get("a") + table["a"] + len(rows)

    return f, [(x4(),), (x4(),)], lambda: ([*rows], dict(table))


class Answering(type):
    def __getattribute__(cls, name: str) -> Any:
        return 3 if name == "scale" else super().__getattribute__(name)


class Answered(metaclass=Answering):
    scale, shift = 1, 2


@case("C4")
def a_metaclass_that_answers_for_its_classes() -> Any:
    def f(x: torch.Tensor) -> Any:
        return x * Answered.scale + Answered.shift + Answered().scale

    return f, (x4(),)


class Shared:
    def __init__(self, fields: dict[str, Any]) -> None:
        self.__dict__ = fields


@case("C4")
def attributes_of_one_object_copied_to_another() -> Any:
    one = Thing()
    one.number, one.rows = 2, [1]

    def f(x: torch.Tensor) -> Any:
        other, third, made = Thing.__new__(Thing), Thing(), Thing()
        object.__setattr__(other, "__dict__", copy.copy(one.__dict__))
        third.__dict__ = one.__dict__ | {"number": 3}
        made.__dict__ = {"scale": x} | third.__dict__
        other.number += 1
        other.rows.append(2)
        return x * other.number + one.number * third.number + made.scale, len(one.rows), sorted(made.__dict__)

    return f, [(x4(),), (x4(),)], lambda: vars(one)


@case("C4", breaks=ANY)
def attributes_that_a_new_object_shares() -> Any:
    one = Thing()
    one.number = 0

    def f(x: torch.Tensor) -> Any:
        other = Thing()
        other.__dict__ = one.__dict__
        other.number += 1
        return x * one.number

    return f, [(x4(),), (x4(),)], lambda: vars(one)


@case("C4", breaks=ANY)
def attributes_that_two_objects_share() -> Any:
    one, fields = Thing(), {"number": 0}
    one.number, own = 0, vars(one)
    first, second = Shared(fields), Shared(fields)

    def f(x: torch.Tensor) -> Any:
        one.number += 1
        own["number"] += 2
        first.number += 3
        second.number += 4
        return x * one.number + x * own["number"] * first.number + second.number

    return f, [(x4(),), (x4(),)], lambda: (own, fields)


@case("C4", breaks=ANY)
def the_attributes_of_an_object_and_of_a_module_as_a_dict_first() -> Any:
    one, module = Thing(), types.ModuleType("module")
    one.number = module.number = 1  # type: ignore[attr-defined]
    own, names = vars(one), vars(module)

    def count() -> int:
        own["number"] += 1
        one.number += 1
        return own["number"]

    def count_names() -> int:
        names["number"] += 1
        module.number += 1
        return names["number"]  # type: ignore[no-any-return]

    def f(x: torch.Tensor) -> Any:
        return x * count() + count_names()

    return f, [(x4(),), (x4(),)], lambda: (own, module.number)


@case("C3", breaks=ANY)
def an_iterator_outlives_the_call_that_refuses_it() -> Any:
    def f(x: torch.Tensor) -> Any:
        def steps() -> Any:
            yield from (1, 2)

        left, said = steps(), []
        for protocol in range(3):
            try:
                pickle.dumps(left, protocol)
            except TypeError as error:
                said.append(str(error))
        return x * 2, said, list(left)

    return f, (x4(),)


@case("C3", breaks=ANY)
def what_the_rest_lets_go_of_is_gone() -> Any:
    def f(x: torch.Tensor) -> Any:
        pair, several, thing, y = (x + 1, x + 2), [x + 3], Thing(), x * 5
        print("here")
        kept = [weakref.ref(item) for item in (pair[0], several[0], thing, y)]
        pair = several = thing = y = None  # type: ignore[assignment]
        print("there")
        return x + 1, [made() is None for made in kept]

    return f, (torch.ones(3),)


@case("C3", breaks=ANY)
def an_attribute_that_hides_the_method_it_calls() -> Any:
    class Counted:
        def __init__(self) -> None:
            self.update = self.counting(self.update)  # type: ignore[method-assign]

        def counting(self, update: Any) -> Any:
            def counted(x: torch.Tensor) -> Any:
                with torch.no_grad():
                    return update(x) + 1

            return counted

        def update(self, x: torch.Tensor) -> Any:
            print("update")
            return x * 2

    held = Counted()
    return lambda x: held.update(x), [(x4(),)] * 2


@case("C3", breaks=1)
def id_and_hash_after_a_break() -> Any:
    def f(x: torch.Tensor) -> Any:
        things, thing = [1], Thing()
        by_id, by_hash, y = {id(things): 1, id(x): 2}, {hash(thing): 3}, x + 1
        number = id(y)
        print("here")
        return by_id[id(things)], by_id[id(x)], by_hash[hash(thing)], number == id(y), y * 2

    return f, [(x4(),), (x4(),)]


@case("C4")
def identity_decides() -> Any:
    def f(xs: list[torch.Tensor]) -> Any:
        seen: set[int] = set()
        kept = [x * 2 for x in xs if id(x) not in seen and not seen.add(id(x))]  # type: ignore[func-returns-value]
        return kept, id(xs[0]) == id(xs[1])

    a, b = torch.randn(4), torch.randn(4)
    return f, [([a, b, a],), ([a, b, b],), ([b, b, a],), ([b, a, b],)]


@case("C2")
def identity_in_a_table_from_outside() -> Any:
    table: dict[int, int] = {}

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        if id(x) in table:
            return y * 3
        table[id(x)] = 1
        return y * 2

    a, b, y = torch.randn(4), torch.randn(4), x4()
    return f, [(a, y), (b, y), (a, y), (b, y), (a, y)]


@case("C3", breaks=ANY)
def arithmetic_on_an_id() -> Any:
    def f(x: torch.Tensor) -> Any:
        things = [1]
        return f"{id(things):x}" == f"{id(things):x}", id(things) % 8 == id(things) % 8, x + 1

    return f, (x4(),)


@case("C2", recompiles=3)
def objects_that_were_others_before() -> Any:
    """Identity decided in each of these ways; what was two objects is one in the next call."""
    one, other = Thing(), Thing()
    table = {one: 2.0, other: 3.0}

    def f(x: torch.Tensor, a: Any, b: Any) -> Any:
        said = [a is b, a == b, a in [b], (a, 1) == (b, 1), [a].count(b), a.__eq__ == b.__eq__, len({a: 1, b: 2})]
        return x * table[a], said

    things = [(one, other), (one, one), (other, one), (other, other), (one, other)]
    return f, [(x4(), a, b) for a, b in things]


@case("C2", recompiles=1)
def a_sentinel_arrives_later() -> Any:
    missing, found = Thing(), [1]

    def f(x: torch.Tensor, given: Any = missing, values: Any = found) -> Any:
        return x * 2 if given is missing else x + (1 if values is found else 3)

    return f, [(x4(), Thing()), (x4(), missing), (x4(), Thing()), (x4(),)]


@case("C2", recompiles=1)
def whether_an_input_is_a_leaf() -> Any:
    leaf = x4()

    def f(x: torch.Tensor) -> Any:
        return x * 2 if x.is_leaf else x + 1, x.grad_fn is None

    return f, [(leaf,), (leaf * 2,), (leaf * 3,)]


@case("C2", recompiles=1)
def texts_that_nobody_looks_at() -> Any:
    log: list[str] = []

    class Settings:
        def __init__(self, scale: float, name: str) -> None:
            self.scale, self.name = scale, name

    def f(batch: dict[str, Any], settings: Settings) -> Any:
        log.append("read " + batch["path"])
        label = f"{settings.name:>8}" + "!"
        return batch["x"] * settings.scale, label, batch["tags"]

    calls = [({"x": x4(), "path": f"{i}.png", "tags": [f"t{i}", "u"]}, Settings(i / 2, f"n{i}")) for i in range(10)]
    return f, calls, lambda: log


@case("C4")
def texts_that_decide() -> Any:
    def f(x: torch.Tensor, name: str) -> Any:
        match name:
            case "sin" | "cos":
                x = getattr(torch, name)(x)
        y = torch.nn.functional.pad(x, (1, 1), mode=name) if name == "constant" else x
        return y, {name: 1}, name.upper(), name in ("sin", "tan"), "sin" != name, sorted(name)

    return f, [(x4(), name) for name in ("sin", "cos", "constant", "other", "sin")]


@case("C2", breaks=1, recompiles=6)
def texts_that_are_always_others_are_left_to_python() -> Any:
    def f(x: torch.Tensor, name: str) -> Any:
        return {name: x.sin() * 2}

    return f, [(x4(), f"n{i}") for i in range(20)]


@case("C2", breaks=ANY, recompiles=14 if sys.version_info < (3, 12) else 12)  # where comprehensions are frames
def dicts_that_always_have_other_keys() -> Any:
    def f(x: torch.Tensor, batch: dict[str, Any]) -> Any:
        return {key: value * x.sin() for key, value in batch.items()}

    return f, [(x4(), {f"k{i}": x4()}) for i in range(30)]


class Tracked(set):  # type: ignore[type-arg]
    def add(self, item: Any) -> None:
        super().add(item.lower())

    def clear(self) -> None:
        raise RuntimeError("not to be cleared")


@case("C6", recompiles=1)
def sets_of_the_users() -> Any:
    names = Tracked("a")

    def f(x: torch.Tensor) -> Any:
        names.add("B")
        made = Tracked(["c"])
        made.add("d")
        return x * len(names), made, "a" in names

    return f, [(x4(),)] * 3, lambda: (sorted(names), type(names))


@case("C2")
def weak_references_do_not_hold() -> Any:
    things = [Thing()]
    things[0].number = 3
    reference = weakref.ref(things[0])

    def f(x: torch.Tensor) -> Any:
        thing = reference()
        return x if thing is None else x * thing.number

    def dies() -> Any:
        things.clear()
        gc.collect()
        return reference() is None, f(torch.ones(2))

    return f, [(x4(),), (x4(),)], dies


@case("C5")
def lists_of_one_object_that_are_one_list() -> Any:
    def f(x: torch.Tensor, thing: Any) -> Any:
        thing.log.append(1)
        return x * len(thing.other)

    one, two = types.SimpleNamespace(log=[1], other=[1]), types.SimpleNamespace(log=[1])
    two.other = two.log
    return f, [(x4(), one), (x4(), two), (x4(), one)]


def log_of_a_generator(x: torch.Tensor, log: list[str], leave: str) -> Any:
    def steps() -> Any:
        try:
            yield x
            yield x + 1
        finally:
            log.append("closed")

    try:
        for t in steps():
            print("in")
            if leave == "break":
                break
            if leave == "return":
                return t * 2
            raise ValueError("left")
    except ValueError as error:
        log.append(str(error))
    log.append("after")
    return x * 3


@case("C3", breaks=ANY)
def generators_that_are_given_up() -> Any:
    def f(x: torch.Tensor, leave: str) -> Any:
        log: list[str] = []
        y = log_of_a_generator(x, log, leave)
        log.append("back")
        return y, log

    return f, [(x4(), leave) for leave in ("break", "return", "raise")]


test_program = suite.test()


def grow_set(x: torch.Tensor, keys: range) -> Any:
    return x * sum({(print(k), k)[1] for k in keys})


def grow_dict(x: torch.Tensor, keys: range) -> Any:
    return {k: (print(k), x * k)[1] for k in keys}


SEEN: set[int] = set()


def grow_global(x: torch.Tensor, keys: range) -> Any:
    for k in keys:
        compiled_add(x, k)
    return len(SEEN)


@dovetail.compile(backend="eager")
def compiled_add(x: torch.Tensor, k: int) -> Any:
    SEEN.add(k)
    return x + 1


@pytest.mark.parametrize("grow", [grow_set, grow_dict, grow_global])
def test_what_grows_does_not_reach_the_recompile_limit(grow: Any, capsys: Any) -> None:
    dovetail.reset()
    EVENTS.clear()
    compiled = grow if grow is grow_global else dovetail.compile(grow, backend="eager")
    got = compiled(torch.ones(3), range(14))
    SEEN.clear()
    torch.testing.assert_close(got, grow(torch.ones(3), range(14)))
    assert not EVENTS.of("limit")


def count_to(n: int) -> int:
    total = 0
    for i in range(n):
        total += i % 7
    return total


def test_a_long_loop_of_tensors_is_left_to_python() -> None:
    def f(x: torch.Tensor) -> Any:
        for i in range(30_000):
            x = x + i
        return x

    EVENTS.clear()
    assert torch.equal(dovetail.compile(f, backend="eager")(torch.ones(3)), f(torch.ones(3)))
    assert any("goes on for more than" in event["text"] for event in EVENTS.of("skip"))


@pytest.mark.parametrize("is_called", [False, True])
def test_a_long_loop_is_left_to_python(is_called: bool) -> None:
    def loops(x: torch.Tensor, n: int) -> Any:
        y, total = x * 2, 0
        for i in range(n):
            total += i % 7
        return y + total

    def calls(x: torch.Tensor, n: int) -> Any:
        return x * 2 + count_to(n)

    f = calls if is_called else loops
    EVENTS.clear()
    x = torch.ones(3)
    assert torch.equal(dovetail.compile(f, backend="eager")(x, 200_000), f(x, 200_000))
    assert any("goes on for more than" in event["text"] for event in EVENTS.of("graph_break") + EVENTS.of("skip"))


class Layer(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width + 1)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        dovetail.graph_break()
        return y.relu()


def test_many_modules_of_one_class_are_all_compiled() -> None:
    model = torch.nn.Sequential(*[Layer(3 + i) for i in range(12)])
    EVENTS.clear()
    compiled, x = dovetail.compile(model, backend="eager"), torch.randn(2, 3)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x))
    assert not EVENTS.of("limit")
