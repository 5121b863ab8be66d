"""SPEC C3, C6, C7: what cannot be captured runs in Python at its place, once, and capture resumes after it."""
from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import gc
import itertools
import logging
import math
import random
import threading
import time
import warnings
import weakref
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import GraphBreakError
from tests.behaviour.running import ANY, Suite

suite = Suite()
case = suite.case


def x4() -> torch.Tensor:
    return torch.randn(4, requires_grad=True)


@case("C3", breaks=2)
def the_address_of_what_the_graph_made() -> Any:
    def f(x: torch.Tensor) -> Any:
        y = x + 1
        return y.data_ptr() == y[0].data_ptr(), y

    return f, (torch.ones(3),)


@case("C3", breaks=1)
def print_in_the_middle() -> Any:
    def f(x: torch.Tensor) -> Any:
        y = x * 2
        print("shape", tuple(y.shape))
        return y + 1

    return f, [(x4(),), (x4(),)]


@case("C3", breaks=1)
def user_break() -> Any:
    def f(x: torch.Tensor) -> Any:
        y = x.sin()
        dovetail.graph_break()
        return y.cos()

    return f, (x4(),)


@case("C3", breaks=ANY)
def data_dependent_branch_both_arms() -> Any:
    def f(x: torch.Tensor) -> Any:
        y = x * 2
        if y.sum() > 0:
            return y + 1
        return y - 1

    return f, [(torch.ones(4),), (-torch.ones(4),), (torch.ones(4) * 3,)]


@case("C3", breaks=ANY)
def item_and_tolist() -> Any:
    def f(x: torch.Tensor) -> Any:
        n = x.sum().item()
        k = int(x[0])
        values = (x * 2).tolist()
        return x * n + k, values, bool(x[1] > 0), float(x[2])

    return f, (torch.tensor([1.0, 2.0, 3.0, 4.0]),)


@case("C3", breaks=ANY)
def break_in_loop() -> Any:
    def f(x: torch.Tensor) -> Any:
        for i in range(4):
            x = x + i
            print("step", i)
            x = x * 2
        return x

    return f, [(x4(),), (x4(),)]


@case("C3", breaks=ANY)
def break_in_while_on_data() -> Any:
    def f(x: torch.Tensor) -> Any:
        steps = 0
        while x.abs().max() > 1:
            x = x / 2
            steps += 1
        return x, steps

    return f, [(torch.full((4,), 10.0),), (torch.ones(4),)]


@case("C3", breaks=ANY)
def break_in_with_block() -> Any:
    def f(x: torch.Tensor) -> Any:
        with torch.no_grad():
            y = x * 2
            print("inside", torch.is_grad_enabled())
            y = y + 1
        return y, x * 3, torch.is_grad_enabled()

    return f, (x4(),)


@case("C3", breaks=ANY)
def break_in_try_block() -> Any:
    def f(x: torch.Tensor) -> Any:
        try:
            y = x * 2
            print("trying")
            raise ValueError("no")
        except ValueError as e:
            y = x + len(str(e))
        finally:
            print("finally")
        return y

    return f, (x4(),)


@case("C3", breaks=ANY)
def break_in_callee() -> Any:
    def inner(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        print("inner")
        return y * 2

    def f(x: torch.Tensor) -> Any:
        a = x.sin()
        b = inner(a)
        return a + b, b.cos()

    return f, (x4(),)


@case("C3", breaks=ANY)
def break_in_deep_callee_with_locals() -> Any:
    def third(x: torch.Tensor, k: int) -> torch.Tensor:
        print("third", k)
        return x * k

    def second(x: torch.Tensor) -> torch.Tensor:
        parts = [third(x + i, i) for i in range(2)]
        return torch.stack(parts)

    def f(x: torch.Tensor) -> Any:
        names = {"a": x}
        out = second(names["a"])
        return out.sum(0) + names["a"]

    return f, (x4(),)


@case("C3", breaks=ANY)
def break_in_comprehension() -> Any:
    def f(x: torch.Tensor) -> Any:
        return [float((x * i).sum()) for i in range(3)], x + 1

    return f, (torch.ones(4),)


@case("C3", breaks=ANY)
def break_with_pending_stack() -> Any:
    def f(x: torch.Tensor) -> Any:
        return torch.stack([x + 1, x * float(x.sum().item()), x - 1]) + (x * 2 if x[0].item() > 0 else x)

    return f, (torch.ones(4),)


@case("C3", breaks=ANY)
def break_with_open_iterators() -> Any:
    def f(x: torch.Tensor) -> Any:
        total = x
        for i, (name, k) in enumerate(zip(["a", "b"], [2.0, 3.0], strict=True)):
            for j in range(2):
                print(name, i, j)
                total = total * k + j
        return total

    return f, (x4(),)


@case("C3", breaks=ANY)
def logging_and_warnings() -> Any:
    log = logging.getLogger("behaviour")

    def f(x: torch.Tensor) -> Any:
        log.info("x has %s elements", x.numel())
        y = x * 2
        warnings.warn("careful", stacklevel=1)
        return y + 1

    return f, (x4(),)


@case("C3", recompiles=0)
def logging_that_is_off() -> Any:
    log = logging.getLogger("behaviour.silent")
    log.setLevel(logging.WARNING)

    def f(x: torch.Tensor) -> Any:
        y = x * 2
        log.debug("y is %s, from %s", y, x)
        log.info(y)
        return y + 1

    return f, [(x4(),), (x4(),)]


@case("C3", breaks=ANY)
def nonzero_and_masks() -> Any:
    def f(x: torch.Tensor) -> Any:
        picked = x[x > 0]
        where = torch.nonzero(x > 0)
        return picked * 2, where, picked.numel(), torch.unique((x > 0).int())

    return f, [(torch.tensor([1.0, -1.0, 2.0]),), (torch.tensor([-1.0, -1.0, 2.0]),)]


@case("C3", breaks=ANY)
def super_called_after_a_break() -> Any:
    class Base:
        def run(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    class Derived(Base):
        def run(self, x: torch.Tensor) -> torch.Tensor:
            if not all(torch.equal(x, other) for other in [x, x]):
                return x
            return super().run(x) + 1

    return Derived().run, (torch.randn(3),)


@case("C3", breaks=ANY, tensors=False)
def sparse_tensor_made_inside() -> Any:
    def f(where: torch.Tensor, values: torch.Tensor, dense: torch.Tensor) -> Any:
        return torch.sparse.mm(torch.sparse_coo_tensor(where, values, (3, 3)), dense * 2) + dense

    return f, (torch.tensor([[0, 1], [1, 2]]), torch.randn(2), torch.randn(3, 2))


@case("C3", breaks=ANY)
def unknown_c_function() -> Any:
    def f(x: torch.Tensor) -> Any:
        stamp = time.time()
        y = x + 1
        r = random.Random(3).random()
        return y * r, stamp > 0

    return f, (x4(),)


@case("C3")
def python_random_matches() -> Any:
    def f(x: torch.Tensor) -> Any:
        random.seed(5)
        return x * random.random() + random.randint(1, 9)

    return f, [(x4(),), (x4(),)]


@case("C3", breaks=1)
def names_of_an_object() -> Any:
    def f(x: torch.Tensor) -> Any:
        torch.manual_seed(3)
        return x.sin() * len([name for name in dir(f) if name.startswith("__c")]) + torch.rand(4)

    return f, [(x4(),), (x4(),)]


@case("C3", breaks=ANY)
def disabled_function() -> Any:
    @dovetail.disable
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum())

    def f(x: torch.Tensor) -> Any:
        return opaque(x + 1) * 2

    return f, (torch.ones(3),)


@case("C3", breaks=ANY)
def torch_markers_recognised() -> Any:
    @torch.compiler.disable
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def f(x: torch.Tensor) -> Any:
        return opaque(x.sin()).cos()

    return f, (x4(),)


@case("C3", breaks=ANY)
def numpy_round_trip() -> Any:
    def f(x: torch.Tensor) -> Any:
        a = x.detach().numpy() * 2
        return torch.from_numpy(a) + 1

    return f, (torch.ones(4),)


@case("C3", breaks=ANY)
def early_return_in_loop_on_data() -> Any:
    def f(x: torch.Tensor) -> Any:
        for i in range(5):
            x = x * 2
            if x.max() > 6:
                return x, i
        return x, -1

    return f, [(torch.ones(3),), (torch.zeros(3),)]


@case("C3", breaks=ANY, tensors=False)
def generator_with_break_inside() -> Any:
    def f(x: torch.Tensor) -> Any:
        def g() -> Any:
            for i in range(3):
                print("yield", i)
                yield x * i

        return sum(g())

    return f, (x4(),)


# -- C6: side effects, in order, once --------------------------------------------------------------


COUNTER = {"n": 0}
TOTAL = 0


@case("C6")
def global_writes() -> Any:
    COUNTER["n"] = 0

    def f(x: torch.Tensor) -> Any:
        global TOTAL
        TOTAL = x.dim() + 5
        COUNTER["n"] += 1
        return x * COUNTER["n"]

    return f, [(torch.ones(2),)] * 3, lambda: (dict(COUNTER), TOTAL)


@case("C6")
def list_append_and_alias() -> Any:
    log: list[Any] = []
    alias = log

    def f(x: torch.Tensor) -> Any:
        log.append(x + 1)
        alias.append("second")
        return len(log)

    return f, [(torch.ones(2),), (torch.ones(2),)], lambda: (log, alias is log)


@case("C6")
def attribute_writes_in_order() -> Any:
    class Recorder:
        def __init__(self) -> None:
            object.__setattr__(self, "log", [])

        def __setattr__(self, name: str, value: Any) -> None:
            self.log.append(name)
            object.__setattr__(self, name, value)

    r = Recorder()

    def f(x: torch.Tensor) -> Any:
        r.b = x * 2
        r.a = 1
        r.b = x * 3
        return r.b + r.a

    return f, (torch.ones(2),), lambda: (r.log, r.a, r.b)


@case("C6")
def closure_cell_write() -> Any:
    count = 0

    def f(x: torch.Tensor) -> Any:
        nonlocal count
        count += 1
        return x + count

    return f, [(torch.ones(2),)] * 4, lambda: count


@case("C6", breaks=ANY)
def effects_around_a_break() -> Any:
    log: list[str] = []

    def f(x: torch.Tensor) -> Any:
        log.append("before")
        y = x + 1
        print(len(log))
        log.append("after")
        return y

    return f, [(torch.ones(2),)] * 2, lambda: log


@case("C6", breaks=ANY)
def effects_when_the_program_raises() -> Any:
    log: list[str] = []

    def f(x: torch.Tensor) -> Any:
        log.append("start")
        y = x + 1
        log.append("middle")
        if x.shape[0] == 2:
            raise KeyError("stop")
        log.append("end")
        return y

    return f, [(torch.ones(3),), (torch.ones(2),)], lambda: log


@case("C6")
def container_arguments_mutated() -> Any:
    def f(d: dict[str, Any], xs: list[Any]) -> Any:
        d["new"] = d["x"] * 2
        del d["gone"]
        xs.append(d["new"])
        xs[0] = "changed"
        return None

    return f, ({"x": torch.ones(2), "gone": 1}, ["first"])


@case("C6", tensors=False)
def returned_object_is_the_argument() -> Any:
    def f(xs: list[Any]) -> Any:
        xs.append(1)
        return xs, xs[0]

    shared = [torch.ones(2)]
    return f, (shared,), lambda: len(shared)


@case("C6")
def in_place_on_input_and_global_tensor() -> Any:
    state = torch.zeros(3)

    def f(x: torch.Tensor) -> Any:
        state.add_(x)
        x.mul_(2)
        return state + 1

    return f, [(torch.ones(3),)] * 3, lambda: state


@case("C6")
def set_and_deque_effects() -> Any:
    seen: set[int] = set()
    order: dict[int, int] = {}

    def f(x: torch.Tensor) -> Any:
        seen.add(x.dim())
        order[x.dim()] = order.get(x.dim(), 0) + 1
        return x * len(seen)

    return f, [(torch.ones(2),), (torch.ones(2, 2),), (torch.ones(2),)], lambda: (sorted(seen), order)


@case("C6")
def object_created_and_published() -> Any:
    registry: dict[str, Any] = {}

    class Item:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    def f(x: torch.Tensor) -> Any:
        item = Item(x * 2)
        registry["item"] = item
        registry["same"] = item
        item.value = item.value + 1
        return item.value

    return f, (torch.ones(2),), lambda: (registry["item"].value, registry["item"] is registry["same"])


@case("C3", breaks=ANY, recompiles=1)
def list_that_grows_in_a_loop_with_breaks() -> Any:
    def f(x: torch.Tensor) -> Any:
        losses = []
        for _ in range(12):
            x = x * 0.9
            losses.append(x.sum().item())
        return x, losses, len(losses)

    return f, [(torch.ones(3),), (torch.ones(3),)]


@case("C3", breaks=3, recompiles=0)
def comprehension_over_layers_that_print() -> Any:
    class Layer(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            print(tuple(y.shape))
            return y.relu()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = torch.nn.ModuleList([Layer(4, 4) for _ in range(12)])

        def forward(self, x: torch.Tensor) -> Any:
            return torch.stack([head(x) for head in self.heads]).sum(0)

    return Model(), [(torch.ones(2, 4),), (torch.ones(2, 4),)]


@case("C3", breaks=4, recompiles=2)
def many_layers_that_print() -> Any:
    class Layer(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            print(tuple(y.shape))
            return y.relu() + x

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer(4, 4, dtype=torch.float64) for _ in range(32)])

        def forward(self, x: torch.Tensor) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    x = torch.ones(2, 4, dtype=torch.float64)  # gradients grow to thousands and cancel: in float32 rounding shows
    return Model(), [(x,), (x,)]


@case("C6", recompiles=0)
def list_of_the_model_that_grows_with_each_call() -> Any:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.history: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> Any:
            self.history.append(x.sum())
            seen.append(x.dim())
            return x * 2

    seen: list[int] = []
    model = Model()
    return model, [(torch.ones(2),)] * 12, lambda: (model.history, seen)


@case("C6")
def list_that_is_appended_to_and_then_read() -> Any:
    def f(x: torch.Tensor, items: list[Any], same: list[Any]) -> Any:
        items.append(x)
        items.append(x + 1)
        same.append(len(items))
        return items[-1] * len(same), [item * 2 for item in items]

    one: list[Any] = [torch.ones(2)]
    return f, [(torch.ones(2), one, one), (torch.ones(2), [], [])]


@case("C3", breaks=1, recompiles=0)
def print_of_a_formatted_tensor() -> Any:
    def f(x: torch.Tensor) -> Any:
        y = x * 2
        print(f"mean {y.mean():.3f}, {[y]!r}", "%.2f of {}".format(y.dim()) % y.sum(), str(y[0]) + "!")
        return y + 1

    return f, [(torch.randn(4),) for _ in range(12)]


@case("C3", breaks=2, recompiles=1)
def print_and_compare_a_loss_that_was_read() -> Any:
    def f(x: torch.Tensor) -> Any:
        loss = (x * x).mean().item()
        if loss < 0.5:
            x = x + 1
        print(f"loss {loss:.4f}", ", ".join(f"{v:.1f}" for v in (loss, 2 * loss)))
        return x * loss

    return f, [(torch.full((4,), 0.1 * i),) for i in range(1, 6)]


@case("C4", breaks=0, recompiles=0)
def text_that_is_returned() -> Any:
    def f(x: torch.Tensor) -> Any:
        text = f"{x.sum():.2f}"
        return x + 1, text, isinstance(text, str), type(text) is str

    return f, [(torch.randn(4),) for _ in range(3)]


@case("C4")
def text_of_a_changing_number_used_as_a_name() -> Any:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for i in range(4):
                setattr(self, f"scale_{i}", float(i))

        def forward(self, x: torch.Tensor, i: int) -> Any:
            return x * getattr(self, f"scale_{i}"), {f"key {i}": x}, f"scale_{i}" == "scale_2", len(f"{i}")

    return Model(), [(torch.ones(2), i) for i in range(4)]


@case("C3", breaks=ANY)
def iterators_of_the_caller() -> Any:
    @torch.compiler.disable
    def made(n: float) -> Any:
        if n > 5:
            return (k for k in [7]), map(abs, [-1, 2, 3]), iter({n: 1})
        return iter([1, 2, 3]), iter(range(4)), iter([n, 2.0])

    def f(x: torch.Tensor, n: float) -> Any:
        some, more, last = made(n)
        first, rest = [list(itertools.islice(some, 1)), list(some)], [2 in more, tuple(more)]
        return x + len(rest[1]), first, rest, math.fsum(last), list(last)

    return f, [(x4(), 1.0), (x4(), 5.0), (x4(), 9.0)]


@case("C3", breaks=ANY)
def class_changed_under_an_operator() -> Any:
    class Amount:
        unit = "m"

        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    class Length(Amount):
        unit = "km"

    def f(x: torch.Tensor) -> Any:
        Amount.__add__ = lambda a, b: Amount(a.value + b.value)  # type: ignore[attr-defined]
        if "unit" in vars(Length):
            del Length.unit
        return (Amount(x) + Length(x)).value, Length.unit  # type: ignore[operator]

    return f, [(x4(),), (x4(),)], lambda: "unit" in vars(Length)


@case("C3", breaks=ANY)
def classes_made_on_the_way() -> Any:
    def f(x: torch.Tensor) -> Any:
        @dataclasses.dataclass
        class Config:
            scale: int = 2
            notes: list[str] = dataclasses.field(default_factory=list)

        made = type("Made", (), {"k": 3})
        kinds = enum.Enum("kinds", "A B")
        pair = collections.namedtuple("pair", "u v")  # type: ignore[misc]
        modules = [kind.__module__ for kind in (Config, made, kinds, pair)]
        return x * Config().scale, modules, [kind.name for kind in kinds], pair(x, 1).u

    return f, [(x4(),), (x4(),)]


@case("C3", breaks=ANY)
def functions_and_numbers_made_again() -> Any:
    class Named(int):
        def __new__(cls, value: int, name: str) -> Named:
            made = super().__new__(cls, value)
            made.name = name
            return made

        name: str

    def f(x: torch.Tensor) -> Any:
        @functools.wraps(x4)
        def inner(y: int, z: Any = None) -> Any:
            return x * y

        three = Named(3, "three")
        print("a break")
        return inner.__name__, inner.__doc__, inner.__annotations__, inner(2), three.name, three

    return f, [(x4(),), (x4(),)]


@case("C3", breaks=ANY)
def generator_exit_and_system_exit() -> Any:
    @contextlib.contextmanager
    def caught(kind: type[BaseException]) -> Any:
        try:
            yield
        except kind as error:
            print(type(error).__name__)

    def leave(n: int) -> None:
        raise SystemExit(n)

    def f(x: torch.Tensor) -> Any:
        with caught(GeneratorExit):
            raise GeneratorExit
        try:
            list(map(leave, [3]))
        except SystemExit as error:
            return x + error.code

    return f, (x4(),)


@case("C3", breaks=ANY)
def iterator_written_in_python_across_a_break() -> Any:
    class Count:
        def __init__(self) -> None:
            self.n = 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            self.n += 1
            if self.n > 3:
                raise StopIteration
            return self.n

    def f(x: torch.Tensor) -> Any:
        steps = iter(Count())
        first = next(steps)
        print(type(steps).__name__)
        return x + first, list(steps)

    return f, [(x4(),), (x4(),)]


@case("C3", breaks=ANY)
def all_variables_after_a_break() -> Any:
    def f(x: torch.Tensor, n: int) -> Any:
        z = 3
        print("a break")
        return sorted(locals()), "{n} {z}".format(**locals()), x + 1

    return f, [(x4(), 1), (x4(), 1)]


@case("C3", breaks=ANY)
def objects_with_an_end() -> Any:
    ended = []

    class Resource:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

        def __del__(self) -> None:
            ended.append(1)

    def f(x: torch.Tensor) -> Any:
        return Resource(x).x + 1

    return f, [(x4(),), (x4(),)], lambda: ended


@case("C3", breaks=ANY)
def attributes_that_are_elsewhere() -> Any:
    class Small:
        k = 1

    class Large(Small):
        k = 2

    here, small = threading.local(), Small()
    here.n = 2

    def f(x: torch.Tensor, z: torch.Tensor) -> Any:
        here.n += 1
        small.__class__ = Large
        z.real = 10
        return x * here.n, isinstance(small, Large), small.k, z + 1

    return f, [(x4(), torch.ones(2, dtype=torch.cfloat))] * 2, lambda: here.n


@case("C3", breaks=ANY)
def text_of_tensors_in_containers() -> Any:
    pair = collections.namedtuple("pair", "u v")  # type: ignore[misc]

    def f(x: torch.Tensor) -> Any:
        return x + 1, repr(torch.max(x, dim=0)), str(collections.deque([x])), repr(pair(x, 1)), f"{dict(a=x)}"

    return f, (x4().detach(),)


@case("C3", breaks=ANY, recompiles=8)
def a_loop_over_parameters_that_breaks_for_each() -> Any:
    """What a group holds is not compiled once per parameter."""
    group, state = {"params": [torch.ones(2) * i for i in range(12)], "lr": 0.1}, collections.defaultdict(dict)

    def f(x: torch.Tensor) -> Any:
        for p in group["params"]:
            own = state[p]
            if not own:
                own["sum"] = torch.zeros_like(p)
            size = (p * x).norm()
            if size > 4:
                size = size + 1
            own["sum"].add_(size)
            p.sub_(own["sum"], alpha=group["lr"])
        return x + 1

    return f, [(torch.ones(2),), (torch.ones(2),)], lambda: (group["params"], [own["sum"] for own in state.values()])


@case("C3", breaks=ANY)
def abandoned_generators_that_break_at_their_end() -> Any:
    def steps(log: list[Any]) -> Any:
        try:
            yield 1
        finally:
            log.append(torch.ones(2).tolist())

    def f(x: torch.Tensor, log: list[Any]) -> Any:
        a, b = steps(log), steps(log)
        first = next(a) + next(b)
        (a, b) = (x + first, 5)  # Python 3.13 does two stores in one instruction, or a store and a load
        c = steps(log)
        next(c)
        c = a * x
        return a + b + c

    return f, [(torch.ones(2), []), (torch.ones(2), [])]


@case("C3", breaks=ANY)
def abandoned_generators_in_other_iterators() -> Any:
    def steps(x: torch.Tensor, log: list[Any]) -> Any:
        try:
            yield x.sum().item()
            yield 2
        finally:
            log.append("closed")

    def f(x: torch.Tensor, log: list[Any]) -> Any:
        for i, (v, _) in enumerate(zip(steps(x, log), "ab")):
            if i == 1:
                break
        return x * v, list(log)

    return f, [(torch.ones(2), []), (torch.ones(2), [])]


@case("C3", breaks=ANY)
def generators_that_exceptions_leave_after_a_break() -> Any:
    def steps(x: torch.Tensor, log: list[Any]) -> Any:
        try:
            yield x
            yield x + 1
        finally:
            log.append("closed")

    def f(x: torch.Tensor, log: list[Any]) -> Any:
        try:
            with torch.no_grad():
                for v in steps(x, log):
                    try:
                        log.append(v.sum().item())
                        raise KeyError("left")
                    finally:
                        log.append("finally")
        except KeyError as error:
            log.append(repr(error))
        log.append("after")
        return x * 3, list(log)

    return f, [(x4().detach(), []) for _ in range(3)]


@case("C3", breaks=ANY)
def methods_of_containers_that_call_their_parents() -> Any:
    class Kept(set):  # type: ignore[type-arg]
        def add(self, item: Any) -> None:
            super().add(item * 2)

        def clear(self) -> None:
            super().clear()

    class Queue(collections.deque):  # type: ignore[type-arg]
        def append(self, item: Any) -> None:
            super().append(item + 1)

    kept, queue = Kept([1]), Queue([1])

    def f(x: torch.Tensor) -> Any:
        kept.add(3)
        queue.append(3)
        y = x * sum(queue) + len(kept)
        kept.clear()
        return y

    return f, [(x4(),), (x4(),)], lambda: (list(kept), list(queue))


@case("C3", breaks=ANY)
def super_in_a_resumed_method_left_to_eager() -> Any:
    class Base:
        def run(self, x: torch.Tensor) -> Any:
            return x + 1

    class Model(Base):
        name = ""

        def run(self, x: torch.Tensor) -> Any:
            read = lambda: self.name  # noqa: E731
            print("running")
            self.name += "a"  # another constant each time: compiled again up to the limit
            return super().run(x * len(read()))

    return Model().run, [(torch.ones(2),)] * 12


@case("C3", breaks=ANY)
def displays_with_stars_that_break() -> Any:
    def count(**named: Any) -> int:
        return len(named)

    def f(x: torch.Tensor, items: list[Any], table: dict[str, int]) -> Any:
        items.append(x)
        table[f"k{len(items)}"] = 1
        shown = [x, *(print(len(items)) or items), x * 2, *items]  # type: ignore[func-returns-value]
        return torch.stack(shown) + max(*items, x, key=id).sum() + count(**table)

    items: list[Any] = []
    table: dict[str, int] = {}
    return f, [(torch.ones(2), items, table)] * 12


@case("C5", breaks=ANY)
def weak_reference_that_tells() -> Any:
    ended: list[int] = []
    kept: list[Any] = []

    def f(x: torch.Tensor) -> Any:
        thing = Thing()
        kept.append(weakref.ref(thing, lambda _: ended.append(1)))
        return x * 2

    return f, [(x4(),)] * 3, lambda: ended


class Thing:
    pass


@case("C5", breaks=1, recompiles=0)
def break_beside_a_method_of_a_text() -> Any:
    """A bound method that waits on the stack is another object in each call, and the same one."""

    def f(x: torch.Tensor) -> Any:
        table = str.maketrans("ab", "cd")
        return x * len("abc".translate({**table, ord("c"): print("here")})), "abc".translate(table)

    return f, [(x4(),)] * 3


@case("C7", breaks=8)
def stars_take_what_an_iterator_left_to_python_gives() -> Any:
    def given(n: int) -> Any:
        print(n)
        return iter(range(n))

    def f(x: torch.Tensor) -> Any:
        y = x * 2
        a, *b = given(3)
        *c, d = given(2)
        y = y * 3
        try:
            e, *f, g = given(1)
        except ValueError as error:
            return y + a + d, b, c, str(error)

    return f, (torch.ones(2),)


test_program = suite.test()


# -- C7: fullgraph errors --------------------------------------------------------------------------


class Own(torch.Tensor):
    pass


@pytest.mark.parametrize("breaker", ["print", "item", "branch", "subclass", "user"])
def test_fullgraph_error_names_line_reason_and_fix(breaker: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        if breaker == "print":
            print(y)
        elif breaker == "item":
            y = y * hash(y.sum().item())
        elif breaker == "branch":
            if y.sum() > 0:
                y = y * 2
        elif breaker == "subclass":
            y = torch.Tensor._make_wrapper_subclass(Own, y.shape)
        else:
            dovetail.graph_break()
        return y

    with pytest.raises(GraphBreakError) as caught:
        dovetail.compile(f, fullgraph=True)(torch.ones(3))
    text = str(caught.value)
    assert "test_breaks.py:" in text, text
    assert "hint" in text or breaker == "user", text


def test_generators_that_a_break_leaves_behind_end_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", lambda what: said.append(what.exc_value))
    model = torch.nn.Linear(4, 4)

    def update() -> None:
        for own, other in zip(model.parameters(), model.parameters()):
            dovetail.graph_break()
            own.data = other.data * 0.5

    def f(x: torch.Tensor) -> torch.Tensor:
        update()
        return model(x)

    dovetail.reset()
    dovetail.compile(f, backend="eager")(x4())
    gc.collect()
    assert not said


def test_a_loop_over_tensors_that_are_also_read_elsewhere_is_not_compiled_for_each() -> None:
    tables = collections.namedtuple("tables", "signs steps")

    def program(x: torch.Tensor, table: Any) -> torch.Tensor:
        for _, (sign, step) in enumerate(zip(table.signs, table.steps)):
            if sign > 0:
                x = x + step
        return x + table.steps[-1]

    table = tables(torch.randn(12).double(), [torch.randn(3) for _ in range(12)])
    dovetail.reset()
    compiled = dovetail.compile(program, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            x = torch.randn(3)
            assert torch.equal(compiled(x, table), program(x, table))


ITERATED = {
    "ordered": lambda x: collections.OrderedDict(a=x, b=x + 1).values(),
    "ordered_keys": lambda x: map(collections.OrderedDict(a=x, b=x + 1).get, collections.OrderedDict(a=0, b=0)),
    "backwards": lambda x: reversed({"a": x, "b": x + 1}.values()),
    "deque": lambda x: collections.deque([x, x + 1]),
    "far": lambda x: map(lambda i: x * (i >> 70), range(1 << 70, (1 << 70) + 2)),
}


@pytest.mark.parametrize("name", ITERATED)
def test_iterators_are_carried_over_a_break(name: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        for item in ITERATED[name](x):
            if item.sum() > 1:
                x = x + item
        return x * 2

    dovetail.reset()
    compiled = dovetail.compile(program, backend="eager")
    for x in (torch.ones(2), -torch.ones(2)):
        assert torch.equal(compiled(x), program(x))
    assert dovetail.stats()["graphs"] > 1


class Recent(dict):  # type: ignore[type-arg]
    def __setitem__(self, key: Any, value: Any) -> None:
        print(end="")
        super().__setitem__(key, value)


def test_methods_of_dict_take_a_dict_that_is_left_to_python() -> None:
    kept = Recent()

    def program(x: torch.Tensor, key: int) -> torch.Tensor:
        kept[key, "key"] = x + 1
        return x + len(kept)

    compiled = dovetail.compile(program, backend="eager", options={"fallback_to_eager": False})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(7):
            assert compiled(torch.zeros(1), i).item() == i + 1


def test_arguments_have_any_name() -> None:
    def program(x: torch.Tensor) -> Any:
        return dict(fn=x + 1, trace=2, args=3, kwargs=4, cls=5, value=6), "{fn}".format(fn=3)

    compiled = dovetail.compile(program, backend="eager", options={"fallback_to_eager": False})
    assert str(compiled(torch.ones(2))) == str(program(torch.ones(2)))
