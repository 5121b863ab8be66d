"""SPEC C2: after compilation, change each kind of thing capture may have read, and the change is noticed.

A row builds a function, an input, and a change. The compiled function is called before and after the
change, twice each, and always has to equal eager.
"""
from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any, Final

import pytest
import torch
from torch import nn

import dovetail

Row = Callable[[], tuple[Callable[..., Any], tuple[Any, ...], Callable[[], Any]]]
ROWS: Final[dict[str, Row]] = {}
SCALE = 2.0
TABLE = {"a": 1.0, "nested": {"b": 2.0}}


def row(make: Row) -> Row:
    ROWS[make.__name__] = make
    return make


class Inner(nn.Module):
    bonus = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.k = 2.0
        self.items = [1.0, 2.0]
        self.act = torch.relu
        self.register_buffer("buf", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.lin(x)) * self.k + self.bonus + sum(self.items) + self.buf


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Inner(), Inner()])
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.drop(x)


def of_module(change: Callable[[Outer], Any], training: bool = False) -> Any:
    m = Outer().train(training)
    return m, (torch.randn(3, 4),), lambda: change(m)


def set_attribute(path: str, value: Any) -> Callable[[Any], None]:
    def change(m: Any) -> None:
        *parts, last = path.split(".")
        for part in parts:
            m = m[int(part)] if part.isdigit() else getattr(m, part)
        setattr(m, last, value)

    return change


MODULE_CHANGES: Final[dict[str, Callable[[Any], Any]]] = {
    "submodule_replaced": lambda m: setattr(m.layers[1], "lin", nn.Linear(4, 4)),
    "submodule_kind_replaced": lambda m: setattr(m.layers[0], "lin", nn.Identity()),
    "list_item_replaced": lambda m: m.layers.__setitem__(0, Inner().eval()),
    "list_grows": lambda m: m.layers.append(Inner().eval()),
    "list_shrinks": lambda m: m.layers.__delitem__(0),
    "parameter_replaced": lambda m: setattr(m.layers[0].lin, "weight", nn.Parameter(torch.randn(4, 4))),
    "parameter_data_replaced": lambda m: setattr(m.layers[0].lin.weight, "data", torch.randn(4, 4)),
    "parameter_written_in_place": lambda m: m.layers[0].lin.weight.data.mul_(3),
    "parameter_to_double_and_back": lambda m: (m.double(), m.float()),
    "bias_removed": lambda m: setattr(m.layers[0].lin, "bias", None),
    "requires_grad_off": lambda m: m.layers[0].lin.weight.requires_grad_(False),
    "buffer_replaced": lambda m: setattr(m.layers[1], "buf", torch.full((4,), 5.0)),
    "buffer_written": lambda m: m.layers[1].buf.add_(1),
    "attribute_changed": lambda m: setattr(m.layers[1], "k", 7.0),
    "attribute_type_changed": lambda m: setattr(m.layers[1], "k", 7),
    "attribute_becomes_tensor": lambda m: setattr(m.layers[1], "k", torch.full((4,), 3.0)),
    "instance_attribute_shadows_class": lambda m: setattr(m.layers[0], "bonus", 9.0),
    "list_attribute_appended": lambda m: m.layers[0].items.append(4.0),
    "list_attribute_item_changed": lambda m: m.layers[0].items.__setitem__(0, 4.0),
    "function_attribute_changed": lambda m: setattr(m.layers[0], "act", torch.tanh),
    "instance_forward_overridden": lambda m: setattr(m.layers[0], "forward", lambda x: x * 11),
    "forward_hook_added": lambda m: m.layers[0].register_forward_hook(lambda mod, a, out: out * 5),
    "deep_hook_added": lambda m: m.layers[1].lin.register_forward_hook(lambda mod, a, out: out * 5),
    "pre_hook_added": lambda m: m.layers[0].register_forward_pre_hook(lambda mod, a: (a[0] + 1,)),
    "own_hook_added": lambda m: m.register_forward_hook(lambda mod, a, out: out - 1),
    "training_flag": lambda m: m.train(),
    "training_flag_of_one_child": lambda m: m.drop.train(),
    "class_changed": lambda m: setattr(m.layers[0], "__class__", type("Other", (Inner,), {"bonus": 30.0})),
    "load_state_dict": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    "module_attribute_deleted_to_class_default": lambda m: (setattr(m.layers[0], "bonus", 4.0), delattr(m.layers[0], "bonus")),
}


@pytest.mark.parametrize("backend", ["eager", "dovetail"])
@pytest.mark.parametrize("change", MODULE_CHANGES)
def test_module_change_is_noticed(change: str, backend: str) -> None:
    torch.manual_seed(0)
    m = Outer().eval()
    check_change(m, (torch.randn(3, 4),), lambda: MODULE_CHANGES[change](m), backend)


def check_change(f: Callable[..., Any], args: tuple[Any, ...], change: Callable[[], Any], backend: str) -> None:
    dovetail.reset()
    compiled = dovetail.compile(f, backend=backend, options={"fallback_to_eager": False})
    with torch.no_grad():
        for _ in range(2):
            check_call(compiled, f, args)
        change()
        for _ in range(2):
            check_call(compiled, f, args)


def check_call(compiled: Callable[..., Any], f: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.manual_seed(5)
    want = f(*args)
    torch.manual_seed(5)
    got = compiled(*args)
    assert type(got) is type(want)
    torch.testing.assert_close(got, want)


def set_global(name: str, value: Any) -> None:
    globals()[name] = value


@row
def global_number() -> Any:
    set_global("SCALE", 2.0)
    return lambda x: x * SCALE, (torch.ones(3),), lambda: set_global("SCALE", 3.0)


@row
def global_function() -> Any:
    set_global("helper_fn", lambda x: x + 1)
    return lambda x: globals()["helper_fn"](x), (torch.ones(3),), lambda: set_global("helper_fn", lambda x: x - 1)


@row
def global_dict_value() -> Any:
    TABLE["a"], TABLE["nested"] = 1.0, {"b": 2.0}
    return lambda x: x * TABLE["a"] + TABLE["nested"]["b"], (torch.ones(3),), lambda: TABLE["nested"].update(b=9.0)


@row
def global_dict_key_added() -> Any:
    table = {"a": 1.0}
    return lambda x: x * len(table) + sum(table.values()), (torch.ones(3),), lambda: table.update(z=5.0)


@row
def closure_variable() -> Any:
    k = 2.0

    def bump() -> None:
        nonlocal k
        k = 5.0

    return lambda x: x * k, (torch.ones(3),), bump


@row
def closure_list_contents() -> Any:
    ks = [1.0, 2.0]
    return lambda x: x * ks[0] + ks[-1], (torch.ones(3),), lambda: ks.append(4.0)


@row
def closure_tensor_replaced() -> Any:
    box = {"t": torch.ones(3)}
    return lambda x: x + box["t"], (torch.ones(3),), lambda: box.update(t=torch.full((3,), 4.0))


@row
def function_code_replaced() -> Any:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def other(x: torch.Tensor) -> torch.Tensor:
        return x * 10

    return lambda x: inner(x), (torch.ones(3),), lambda: setattr(inner, "__code__", other.__code__)


@row
def function_default_replaced() -> Any:
    def inner(x: torch.Tensor, k: float = 1.0) -> torch.Tensor:
        return x * k

    return lambda x: inner(x), (torch.ones(3),), lambda: setattr(inner, "__defaults__", (6.0,))


@row
def class_attribute() -> Any:
    class Thing:
        k = 1.0

    t = Thing()
    return lambda x: x * t.k, (torch.ones(3),), lambda: setattr(Thing, "k", 4.0)


@row
def base_class_attribute() -> Any:
    class Base:
        k = 1.0

    class Thing(Base):
        pass

    t = Thing()
    return lambda x: x * t.k, (torch.ones(3),), lambda: setattr(Base, "k", 4.0)


@row
def class_method_replaced() -> Any:
    class Thing:
        def go(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    t = Thing()
    return lambda x: t.go(x), (torch.ones(3),), lambda: setattr(Thing, "go", lambda self, x: x * 9)


@row
def method_shadowed_by_instance() -> Any:
    class Thing:
        def go(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    t = Thing()
    return lambda x: t.go(x), (torch.ones(3),), lambda: setattr(t, "go", lambda x: x * 9)


@row
def property_replaced() -> Any:
    class Thing:
        @property
        def k(self) -> float:
            return 2.0

    t = Thing()
    return lambda x: x * t.k, (torch.ones(3),), lambda: setattr(Thing, "k", property(lambda self: 5.0))


@row
def missing_attribute_appears() -> Any:
    class Thing:
        pass

    t = Thing()
    return lambda x: x + (1.0 if hasattr(t, "flag") else 2.0), (torch.ones(3),), lambda: setattr(t, "flag", 1)


@row
def missing_key_appears() -> Any:
    d: dict[str, float] = {}
    return lambda x: x + d.get("k", 2.0), (torch.ones(3),), lambda: d.update(k=7.0)


@row
def module_forward_on_class() -> Any:
    class M(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    m = M()
    return lambda x: m(x), (torch.ones(3),), lambda: setattr(M, "forward", lambda self, x: x * 6)


@row
def argument_object_mutated() -> Any:
    class Config:
        k = 2.0

    c = Config()
    return lambda x, c: x * c.k, (torch.ones(3), c), lambda: setattr(c, "k", 3.0)


@row
def argument_list_mutated() -> Any:
    ks = [1.0, 2.0]
    return lambda x, ks: x * ks[1] + len(ks), (torch.ones(3), ks), lambda: ks.append(3.0)


@row
def argument_dict_order() -> Any:
    d = {"a": 1.0, "b": 2.0}
    return lambda x, d: x * list(d.values())[0], (torch.ones(3), d), lambda: d.update(a=d.pop("a"))


@row
def set_contents() -> Any:
    s = {1, 2}
    return lambda x: x * sum(s), (torch.ones(3),), lambda: s.add(7)


@row
def input_tensor_resized_in_place() -> Any:
    t = torch.ones(3)
    return lambda x: x * 2 + x.shape[0], (t,), lambda: t.set_(torch.ones(5))


@row
def input_tensor_transposed_in_place() -> Any:
    t = torch.randn(2, 3)
    return lambda x: x * 2, (t,), lambda: t.t_()


@row
def input_requires_grad_changes() -> Any:
    t = torch.randn(2, 3)
    return lambda x: x * 2 if x.requires_grad else x * 3, (t,), lambda: t.requires_grad_()


@row
def default_dtype() -> Any:
    return with_undo(lambda x: torch.zeros(3) + torch.tensor(1.5), lambda: torch.set_default_dtype(torch.float64),
                     lambda: torch.set_default_dtype(torch.float32))


@row
def grad_mode() -> Any:
    return with_undo(lambda x: x * 2 if torch.is_grad_enabled() else x * 3, lambda: torch.set_grad_enabled(False),
                     lambda: torch.set_grad_enabled(True))


@row
def autocast_mode() -> Any:
    context = torch.autocast("cpu", dtype=torch.bfloat16)
    return with_undo(lambda x: torch.ones(3, 3) @ torch.ones(3, 3), context.__enter__, lambda: context.__exit__(None, None, None))


@row
def deterministic_mode() -> Any:
    return with_undo(lambda x: x + torch.are_deterministic_algorithms_enabled(), lambda: torch.use_deterministic_algorithms(True),
                     lambda: torch.use_deterministic_algorithms(False))


@row
def torch_function_patched() -> Any:
    original = torch.nn.functional.relu
    return with_undo(lambda x: torch.nn.functional.relu(x - 2), lambda: setattr(torch.nn.functional, "relu", lambda x: x * 100),
                     lambda: setattr(torch.nn.functional, "relu", original))


@row
def builtin_patched() -> Any:
    original = builtins.hex
    return with_undo(lambda x: x + len(hex(3)), lambda: setattr(builtins, "hex", lambda n: "3"),
                     lambda: setattr(builtins, "hex", original))


@row
def missing_global_appears() -> Any:
    def f(x: torch.Tensor) -> Any:
        try:
            return x * appearing  # type: ignore[name-defined]
        except NameError:
            return x - 1

    return with_undo(f, lambda: set_global("appearing", 3.0), lambda: globals().pop("appearing"))


@row
def key_of_globals_appears() -> Any:
    f = lambda x: x * 2 if "appearing" in globals() else x - 1
    return with_undo(f, lambda: set_global("appearing", 3.0), lambda: globals().pop("appearing"))


@row
def metaclass_attribute() -> Any:
    class Meta(type):
        k = 2.0

    class Thing(metaclass=Meta):
        pass

    return lambda x: x * Thing.k, (torch.ones(3),), lambda: setattr(Meta, "k", 5.0)


@row
def descriptor_class_changed() -> Any:
    class Fixed:
        def __get__(self, owner: Any, kind: Any) -> float:
            return 2.0

    class Thing:
        k = Fixed()

    thing = Thing()
    return lambda x: x * thing.k, (torch.ones(3),), lambda: setattr(Fixed, "__get__", lambda *args: 5.0)


@row
def method_code_replaced() -> Any:
    class Thing:
        def go(self, x: torch.Tensor) -> Any:
            return x + 1

    thing, other = Thing(), lambda self, x: x * 7
    return lambda x: thing.go(x), (torch.ones(3),), lambda: setattr(Thing.go, "__code__", other.__code__)


class Width:
    def __init__(self, v: int) -> None:
        self.v = v

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Width) and self.v == other.v


@row
def attribute_compared_within_a_list() -> Any:
    a, b = Width(1), Width(1)
    return lambda x: x + 1 if [a] == [b] and not (1, a) != (1, b) else x - 1, (torch.ones(3),), lambda: setattr(a, "v", 2)


@row
def attribute_of_a_tensor_that_was_not_there() -> Any:
    t = torch.ones(3)
    return lambda x: x + 2 if hasattr(x, "mark") else x + 1, (t,), lambda: setattr(t, "mark", 1)


def scaled(x: torch.Tensor) -> torch.Tensor:
    kind: Any = scaled
    return x * kind.factor + (kind.extra if hasattr(kind, "extra") else 0.0)


@row
def function_attribute() -> Any:
    vars(scaled).update(factor=2.0)
    return lambda x: scaled(x), (torch.ones(3),), lambda: vars(scaled).update(factor=3.0)


@row
def function_attribute_that_was_not_there() -> Any:
    vars(scaled).update(factor=2.0)
    vars(scaled).pop("extra", None)
    return lambda x: scaled(x), (torch.ones(3),), lambda: vars(scaled).update(extra=3.0)


@row
def operator_replaced() -> Any:
    class Scale:
        def __matmul__(self, x: Any) -> Any:
            return x * 2

    scale = Scale()
    return lambda x: scale @ x, (torch.ones(3),), lambda: setattr(Scale, "__matmul__", lambda self, x: x * 3)


@row
def truth_that_was_not_there() -> Any:
    class Flag:
        pass

    flag = Flag()
    return lambda x: x * 2 if flag else x, (torch.ones(3),), lambda: setattr(Flag, "__bool__", lambda self: False)


@row
def setting_of_torch() -> Any:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * len(torch.get_float32_matmul_precision()) + torch.backends.mkldnn.enabled

    def set_both(precision: str, is_enabled: bool) -> None:
        torch.set_float32_matmul_precision(precision)
        torch.backends.mkldnn.set_flags(is_enabled)

    return with_undo(f, lambda: set_both("high", False), lambda: set_both("highest", True))


class Undo:
    def __init__(self, undo: Callable[[], Any]) -> None:
        self.undo = undo


def with_undo(f: Callable[..., Any], change: Callable[[], Any], undo: Callable[[], Any]) -> Any:
    def changed() -> Undo:
        change()
        return Undo(undo)

    return f, (torch.ones(3),), changed


@pytest.mark.parametrize("backend", ["eager", "dovetail"])
@pytest.mark.parametrize("name", ROWS)
def test_change_is_noticed(name: str, backend: str) -> None:
    torch.manual_seed(0)
    f, args, change = ROWS[name]()
    undo: list[Any] = []

    def remember() -> Any:
        undo.append(change())
        return undo[0]

    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [u.undo() for u in undo if isinstance(u, Undo)])
        check_change(f, args, remember, backend)


def test_two_instances_share_no_constants() -> None:
    class M(nn.Module):
        def __init__(self, k: float) -> None:
            super().__init__()
            self.k = k

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.k

    models = [dovetail.compile(M(float(k)), backend="eager") for k in range(4)]
    x = torch.ones(2)
    for _ in range(2):
        for k, model in enumerate(models):
            assert torch.equal(model(x), x * k)


class Named:
    def __init__(self, name: str) -> None:
        self.name = name


@pytest.mark.parametrize("sets", [
    [{frozenset("ab"), frozenset("bc")}, {frozenset("bc")}, set()], [{(1, (2,))}, {(1, (3,)), (2,)}, set()],
    [{Named("a")}, {Named("b"), Named("c")}, set()],
])  # fmt: skip
@pytest.mark.parametrize("kind", [set, frozenset])
def test_members_of_sets(sets: list[Any], kind: Any) -> None:
    def f(x: torch.Tensor, table: dict[str, Any]) -> Any:
        members = [member for key in "ab" for member in table[key]]
        return x * len(members), {*members} == table["a"], bool(table["a"]), [*map(type, table["b"])]

    compiled = dovetail.compile(f, backend="eager")
    for each in sets:
        table = {"a": kind(each), "b": kind({*each, (7, 8)})}
        ours, theirs = compiled(torch.ones(2), table), f(torch.ones(2), table)
        assert torch.equal(ours[0], theirs[0]) and ours[1:] == theirs[1:]


@pytest.mark.parametrize("kind", [set, frozenset])
def test_members_of_sets_come_in_the_order_of_the_set(kind: Any) -> None:
    """Which depends on what it was made of, and in which order; those of a frozenset of one call are another's."""

    def f(x: torch.Tensor, names: Any) -> Any:
        return x + 1, [name for name in names], list(names), 16 in names

    for members in ([0, 8, 16], [16, 8, 0], [f"name {i}" for i in range(100)], [*range(0, 4000, 8)]):
        names, compiled = set[Any](), dovetail.compile(f, backend="eager", fullgraph=True)
        for member in members:
            names.add(member)
        names -= {*members[3:50]}
        for given in (kind(names), kind(reversed([*names]))):
            assert compiled(torch.ones(2), given)[1:] == f(torch.ones(2), given)[1:]


def test_a_set_that_is_written_keeps_its_order() -> None:
    def f(x: torch.Tensor, names: Any) -> Any:
        names.add(5)
        names.discard(40)
        return x + 1

    names, others = {*range(0, 400, 8)}, {*range(0, 400, 8)}
    f(torch.ones(2), names), dovetail.compile(f, backend="eager", fullgraph=True)(torch.ones(2), others)
    assert [*names] == [*others]


def test_context_variables_are_read_in_the_context_of_the_call() -> None:
    scale: ContextVar[Any] = ContextVar("scale", default=2)
    shift: ContextVar[Any] = ContextVar("shift")
    seen: ContextVar[Any] = ContextVar("seen")

    def f(x: torch.Tensor) -> Any:
        seen.get().append(x + 1)
        try:
            shift.get()
        except LookupError:
            x = x * 100
        return x * scale.get() + scale.get(7) + shift.get(5)

    def outcome(function: Any) -> Any:
        results = []
        for variable, value in ((seen, []), (scale, 2), (shift, torch.ones(3)), (shift, 4), (seen, [1])):
            variable.set(value)
            results += [function(torch.arange(3.0)), len(seen.get())]
        return str(results)

    plain = copy_context().run(outcome, f)
    assert copy_context().run(outcome, dovetail.compile(f, backend="eager", fullgraph=True)) == plain
