"""Every check and every path of ir/guard.py and ir/source.py, natively: that it holds, that it fails when what
it watches changes, also after it was remembered, and what it says then."""
from __future__ import annotations

import copy
import gc
import operator
import sys
import types
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dovetail
from dovetail._native import Guards
from dovetail.ir import expr, guard, source
from dovetail.ir.guard import (
    Bare,
    Check,
    ClassIs,
    DictKeys,
    Equals,
    Guard,
    Holds,
    Is,
    Lacks,
    Length,
    Predicate,
    SameAs,
    State,
    TensorIs,
    TypeIs,
)
from dovetail.ir.source import (
    Arg,
    Attr,
    Cell,
    Const,
    DictAttr,
    DictKey,
    Item,
    Size,
    Source,
    Stride,
    cell_of,
)
from dovetail.runtime.guards import LOADS, NUMBER_OF, emit_postfix, make_guards
from dovetail.util.torch_state import read_state

X, Y = Arg(0, "x"), Arg(1, "y")


class Box:
    """An instance with a dict."""

    limit = 3

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    @property
    def computed(self) -> Any:
        return self.value


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Frame:
    """Checks guards twice, so that the second time goes through the memo, and asks why."""

    def __init__(self, *guards: Guard, closure: tuple[Any, ...] | None = None, scope: dict[str, Any] | None = None):
        self.native: Guards = make_guards(guards)
        self.closure, self.scope = closure, {} if scope is None else scope

    def __call__(self, *args: Any) -> bool:
        answers = {self.native.check(args, self.closure, self.scope) for _ in range(3)}
        assert len(answers) == 1
        holds = answers.pop()
        assert (self.native.why(args, self.closure, self.scope) is None) == holds
        return holds

    def why(self, *args: Any) -> str:
        found = self.native.why(args, self.closure, self.scope)
        assert found is not None
        return found


def tensor_is(t: torch.Tensor, **changes: Any) -> TensorIs:
    fields = dict(
        type=type(t), dtype=t.dtype, device_kind=t.device.type, device_index=-1, requires_grad=t.requires_grad,
        shape=tuple(t.shape), stride=t.stride(), dispatch=torch._C._dispatch_keys(t).raw_repr(),
    )  # fmt: skip
    return TensorIs(**{**fields, **changes})  # type: ignore[arg-type]


# -- paths


@pytest.mark.parametrize(
    ("path", "written"),
    [
        (Item(DictAttr(Item(DictAttr(X, "_modules"), "layers"), "_modules"), "0"), "x.layers[0]"),
        (Item(DictAttr(Item(DictAttr(X, "_modules"), "0"), "_parameters"), "weight"), "x[0].weight"),
        (Item(DictAttr(Item(Const("user_globals", {}), "config"), "sizes"), "a b"), "config.sizes['a b']"),
        (Item(DictAttr(X, "_modules"), "a.b"), "x._modules['a.b']"),
    ],
)  # fmt: skip
def test_a_path_reads_as_the_user_would_write_it(path: Source, written: str) -> None:
    assert str(path) == written


def test_roots() -> None:
    cell = types.CellType(5)
    constant, scope = object(), {"g": 7}
    frame = Frame(
        Guard(Y, Equals(2)), Guard(Cell(0, "c"), Equals(5)),
        Guard(Item(Const("user_globals", scope), "g"), Equals(7)),
        Guard(Const("k", constant), Is(constant)), closure=(cell,), scope=scope,
    )  # fmt: skip
    assert frame(1, 2)
    assert not frame(1, 3) and frame.why(1, 3) == "y: expected 2, got 3"
    cell.cell_contents = 6
    assert not frame(1, 2) and frame.why(1, 2).startswith("c: ")
    cell.cell_contents = 5
    frame.scope["g"] = 8
    assert not frame(1, 2) and frame.why(1, 2).startswith("g: ")
    del frame.scope["g"]
    assert not frame(1, 2) and "no longer there" in frame.why(1, 2)
    frame.scope.update(other=1, g=7)
    assert frame(1, 2)


STEPS: list[tuple[Any, Any, Any]] = [
    # an object with something 1 at the path, the path, what changes it to 2
    (Box(value=1), DictAttr(X, "value"), lambda o: setattr(o, "value", 2)),
    (Box(value=1), Attr(X, "value"), lambda o: o.__dict__.update(value=2)),
    (Box(value=1), Attr(X, "computed"), lambda o: setattr(o, "value", 2)),
    (Box(value=1), DictAttr(X, "value"), lambda o: setattr(o, "__dict__", {"value": 2})),
    (Slots(1), Attr(X, "value"), lambda o: setattr(o, "value", 2)),
    (types.ModuleType("m"), Attr(X, "value"), lambda o: setattr(o, "value", 2)),
    ([0, 1], Item(X, 1), lambda o: operator.setitem(o, 1, 2)),
    ([0, 1], Item(X, -1), lambda o: o.append(2)),
    ({"k": 1}, Item(X, "k"), lambda o: o.update(k=2)),
    (OrderedDict(k=1), Item(X, "k"), lambda o: o.update(k=2)),
    ({1: 0}, DictKey(X, 0), lambda o: (o.clear(), o.update({2: 0}))),
    (Box(d={"k": [1]}), Item(Item(DictAttr(X, "d"), "k"), 0), lambda o: operator.setitem(o.d["k"], 0, 2)),
    (Box(d={"k": [1]}), Item(Item(DictAttr(X, "d"), "k"), 0), lambda o: o.d.update(k=[2])),
    (Box(d={"k": [1]}), Item(Item(DictAttr(X, "d"), "k"), 0), lambda o: setattr(o, "d", {"k": (2,)})),
    (Box(t=(0, (1,))), Item(Item(DictAttr(X, "t"), 1), 0), lambda o: setattr(o, "t", (0, (2,)))),
]  # fmt: skip
STEPS[5][0].value = 1


@pytest.mark.parametrize("number", range(len(STEPS)))
def test_steps(number: int) -> None:
    original, path, change = STEPS[number]
    obj = original if isinstance(original, types.ModuleType) else copy.deepcopy(original)
    frame = Frame(Guard(path, Equals(1)))
    assert frame(obj) and frame(obj)
    change(obj)
    assert not frame(obj)
    assert "got 2" in frame.why(obj)
    if isinstance(obj, types.ModuleType):
        obj.value = 1


def test_missing_steps_fail() -> None:
    for path in (DictAttr(X, "a"), Attr(X, "a"), Item(X, "a"), DictKey(X, 0), cell_of(X, 0), Size(X, 0)):
        assert not Frame(Guard(path, Equals(1)))(Box())
    assert not Frame(Guard(Item(X, 3), Equals(1)))([1])
    assert not Frame(Guard(Y, Equals(1)))(1)


def test_type_and_closure() -> None:
    def make(value: Any) -> Any:
        def inner() -> Any:
            return value

        def change(new: Any) -> None:
            nonlocal value
            value = new

        inner.change = change  # type: ignore[attr-defined]
        return inner

    f = make(1)
    box = Box(f=f)
    frame = Frame(Guard(cell_of(DictAttr(X, "f"), 0), Equals(1)), Guard(X, TypeIs(Box)))
    assert frame(box)
    f.change(2)
    assert not frame(box)
    f.change(1)
    assert frame(box)

    class Other(Box):
        pass

    box.__class__ = Other
    assert not frame(box) and "Other" in frame.why(box)


def test_parts_of_functions() -> None:
    def f(a: int = 1, *, b: int = 2) -> int:
        return a + b

    box = Box(f=f)
    path = DictAttr(X, "f")
    frame = Frame(
        Guard(Item(Attr(path, "__defaults__"), 0), Equals(1)), Guard(Attr(path, "__code__"), Is(f.__code__)),
        Guard(Item(Attr(path, "__kwdefaults__"), "b"), Equals(2)), Guard(Attr(path, "__closure__"), Is(None)),
    )  # fmt: skip
    assert frame(box)
    for name, value in (("__defaults__", (3,)), ("__kwdefaults__", {"b": 4}), ("__code__", (lambda a, b: a).__code__)):
        before = getattr(f, name)
        setattr(f, name, value)
        assert not frame(box), name
        setattr(f, name, before)
        assert frame(box), name
    assert f.__kwdefaults__ is not None
    f.__kwdefaults__["b"] = 5
    assert not frame(box)


def test_class_attributes_with_a_metaclass() -> None:
    class Meta(type):
        pass

    class Model(metaclass=Meta):
        fields = {"a": 1}

    frame = Frame(Guard(Item(Attr(Const("Model", Model), "fields"), "a"), Equals(1)))
    assert frame()
    Model.fields = {"a": 2}
    assert not frame()
    Model.fields = {"a": 1}
    assert frame()
    Meta.fields = property(lambda cls: {"a": 3})  # type: ignore[attr-defined]
    assert not frame()


# -- checks


@pytest.mark.parametrize(
    ("value", "same", "others"),
    [
        (1, 1, [True, 1.0, 2, None, "1"]),
        (0.0, 0.0, [-0.0, 0, False]),
        (float("nan"), float("nan"), [0.0]),
        (1 << 80, 1 << 80, [1]),
        ("text", "te" + "xt", ["other", b"text"]),
        ((1, (2.0, "a")), (1, (2.0, "a")), [(1, (2, "a")), (1,), [1, (2.0, "a")]]),
        (complex(0, 1), complex(0, 1), [complex(-0.0, 1), 1]),
        (torch.float32, torch.float32, [torch.float64]),
        (torch.device("cpu"), torch.device("cpu"), [torch.device("meta")]),
        (torch.Size([2, 3]), torch.Size([2, 3]), [(2, 3), torch.Size([2])]),
        (slice(1, 2), slice(1, 2), [slice(1, 3)]),
        (None, None, [0, False]),
    ],
)
def test_equals(value: Any, same: Any, others: list[Any]) -> None:
    for path, wrap in ((X, lambda v: v), (DictAttr(X, "v"), lambda v: Box(v=v)), (Item(X, 0), lambda v: [v])):
        frame = Frame(Guard(path, Equals(value)))
        assert frame(wrap(same))
        for other in others:
            assert not frame(wrap(other)), other


def test_is_length_keys_lacks() -> None:
    token = object()
    assert Frame(Guard(X, Is(token)))(token) and not Frame(Guard(X, Is(token)))(object())
    box = Box(items=[1], table={"a": 1, "b": 2}, group={1, 2}, text="ab", none={})
    frame = Frame(
        Guard(DictAttr(X, "items"), Length(1)), Guard(DictAttr(X, "table"), DictKeys(("a", "b"))),
        Guard(DictAttr(X, "table"), Lacks("c")), Guard(X, Bare(["extra"], ["none"])),
        Guard(DictAttr(X, "group"), Length(2)), Guard(DictAttr(X, "text"), Length(2)),
        Guard(DictAttr(X, "table"), Length(2)), Guard(X, TypeIs(Box)),
    )  # fmt: skip
    changes: list[tuple[Any, Any, str]] = [
        (lambda: box.items.append(1), lambda: box.items.pop(), "expected 1 items, got 2"),
        (lambda: box.table.update(c=3), lambda: box.table.pop("c"), "keys"),
        (lambda: box.table.update(a=3), lambda: None, ""),
        (lambda: box.table.update(a=box.table.pop("a")), lambda: box.table.update(b=box.table.pop("b")), "keys"),
        (lambda: setattr(box, "extra", 1), lambda: delattr(box, "extra"), "now has 'extra'"),
        (lambda: box.none.update(a=1), lambda: box.none.clear(), "x.none: expected 0 items, got 1"),
        (lambda: box.group.add(3), lambda: box.group.discard(3), "expected 2 items, got 3"),
        (lambda: setattr(box, "unrelated", 1), lambda: delattr(box, "unrelated"), ""),
    ]
    for change, undo, text in changes:
        assert frame(box)
        change()
        assert frame(box) == (not text)
        if text:
            assert text in frame.why(box)
        undo()
    assert frame(box)
    assert not frame(Box(items=[1])) and not frame(3)


def test_same_as() -> None:
    a, b = Box(), Box()
    same, other = Frame(Guard(X, SameAs(Y))), Frame(Guard(X, SameAs(Y, same=False)))
    assert same(a, a) and not same(a, b) and other(a, b) and not other(a, a)
    assert "no longer the same object as y" in same.why(a, b)
    holder = Box(p=a, q=a)
    frame = Frame(Guard(DictAttr(X, "p"), SameAs(DictAttr(X, "q"))), Guard(DictAttr(X, "p"), SameAs(Y)))
    assert frame(holder, a) and not frame(holder, b)
    holder.q = b
    assert not frame(holder, a)


def test_class_changes() -> None:
    class Base:
        def method(self) -> int:
            return 1

    class Model(Base):
        scale = "2"
        calls = 0

    frame = Frame(Guard(X, TypeIs(Model)), Guard(Const("Model", Model), ClassIs(Model)))
    model = Model()
    assert frame(model)
    original = Base.method
    Base.method = lambda self: 3  # type: ignore[method-assign]
    assert not frame(model) and "was changed" in frame.why(model)
    Base.method = original  # type: ignore[method-assign]
    assert frame(model)  # as it was: the version is another, the contents are not
    Model.extra = 1  # type: ignore[attr-defined]
    assert not frame(model)
    del Model.extra  # type: ignore[attr-defined]
    assert frame(model)
    for i in range(3000):  # more changes than a class has versions for
        Model.scale = str(i)
    assert not frame(model)
    Model.scale = "2"
    assert frame(model)
    Model.calls = 1  # whoever reads a number guards it
    assert frame(model)
    assert not frame(Base())


def test_attribute_from_the_class() -> None:
    frame = Frame(Guard(Attr(X, "limit"), Equals(3)))
    box = Box()
    assert frame(box)
    box.limit = 4
    assert not frame(box)
    del box.limit
    Box.limit = 5
    try:
        assert not frame(box)
    finally:
        Box.limit = 3
    assert frame(box)
    by_class = Frame(Guard(Attr(Const("Box", Box), "limit"), Equals(3)))
    assert by_class()
    Box.limit = 4
    assert not by_class()
    Box.limit = 3
    assert by_class()


def test_predicate() -> None:
    frame = Frame(Guard(DictAttr(X, "items"), Predicate(lambda items: sum(items) < 5, "sum < 5")))
    box = Box(items=[1, 2])
    assert frame(box)
    box.items[0] = 7
    assert not frame(box)


# -- tensors


def example_tensors() -> list[torch.Tensor]:
    leaf = torch.randn(4, 6, requires_grad=True)
    with torch.inference_mode():
        inference = torch.ones(4, 6)
    return [
        torch.ones(4, 6), leaf, leaf * 2, torch.ones(6, 4).t(), torch.ones(4, 6, dtype=torch.float64),
        torch.ones(4, 6, device="meta"), torch.nn.Parameter(torch.ones(4, 6)), torch.ones(4), torch.ones(()),
        torch.nn.Parameter(torch.ones(4, 6), requires_grad=False), inference, torch.empty(1, 2, 3, 4, 5, 6, 7),
        torch.empty(1, 2, 3, 4, 5, 7, 6), torch.ones(4, 6, dtype=torch.complex64),
        torch.ones(4, 6, dtype=torch.complex64).conj(), leaf[:, :3], torch.ones(4, 6).to_sparse(),
    ]  # fmt: skip


def test_tensors_are_told_apart() -> None:
    """Each example fits its own guard and nobody else's, directly and below a remembered object."""
    tensors = example_tensors()
    described = [tensor_is(t) if t.layout is torch.strided else None for t in tensors]
    key = [(type(t), t.dtype, t.device.type, t.requires_grad, t.shape, d and d.stride, d and d.dispatch)
           for t, d in zip(tensors, described)]  # fmt: skip
    for i, check in enumerate(described):
        if check is None:
            continue
        direct, below = Frame(Guard(X, check)), Frame(Guard(DictAttr(X, "t"), check))
        box = Box()
        for j, other in enumerate(tensors):
            box.t = other
            assert direct(other) == below(box) == (key[i] == key[j]), (i, j)


def test_tensor_why() -> None:
    x = torch.ones(8, 4)
    assert Frame(Guard(X, tensor_is(x))).why(torch.ones(16, 4)) == "x: expected size 8 at dim 0, got 16"
    assert "stride" in Frame(Guard(X, tensor_is(x))).why(torch.ones(4, 8).t())
    assert "requires_grad=False" in Frame(Guard(X, tensor_is(x))).why(torch.ones(8, 4, requires_grad=True))
    assert "rank" in Frame(Guard(X, tensor_is(x))).why(torch.ones(8))
    assert "dtype" in Frame(Guard(X, tensor_is(x))).why(x.double())
    assert "got a int" in Frame(Guard(X, tensor_is(x))).why(3)
    free = Frame(Guard(X, tensor_is(x, shape=(None, 4), stride=(None, 1))))
    assert free(torch.ones(99, 4)) and not free(torch.ones(99, 5))


def test_tensor_changes_in_place_after_it_was_remembered() -> None:
    changes: list[Any] = [
        lambda p: setattr(p, "data", torch.ones(5, 3)),
        lambda p: setattr(p, "data", torch.ones(3, 4).t()),
        lambda p: setattr(p, "data", torch.ones(4, 3, dtype=torch.float64)),
        lambda p: p.requires_grad_(False),
        lambda p: setattr(p, "__class__", torch.Tensor),
        lambda p: p.detach().resize_(2, 3),
        lambda p: p.detach().t_(),
    ]
    for number, change in enumerate(changes):
        p = torch.nn.Parameter(torch.ones(4, 3))
        if number >= 5:
            p.requires_grad_(False)
        box = Box(p=p)
        frame = Frame(Guard(DictAttr(X, "p"), tensor_is(p)))
        assert frame(box)
        with torch.no_grad():
            p.add_(1)
        assert frame(box)
        before = (type(p), p.shape, p.stride(), p.dtype, p.requires_grad)
        change(p)
        assert frame(box) == ((type(p), p.shape, p.stride(), p.dtype, p.requires_grad) == before), number


def test_requires_grad_of_views_and_results() -> None:
    base = torch.ones(4)
    view = base[:2]
    box = Box(v=view)
    frame = Frame(Guard(DictAttr(X, "v"), tensor_is(view)))
    assert frame(box)
    base.mul_(torch.ones(4, requires_grad=True))  # the view now requires a gradient through its base
    assert view.requires_grad and not frame(box)
    leaf = torch.ones(2)
    box.v = leaf
    frame = Frame(Guard(DictAttr(X, "v"), tensor_is(leaf)))
    assert frame(box)
    leaf.mul_(torch.ones(2, requires_grad=True))
    assert not frame(box)
    assert not frame(Box(v=torch.ones(2, requires_grad=True)))


# -- sizes


def test_holds() -> None:
    s, t, n = (expr.sym(name, 0, 1 << 40) for name in "stn")
    reads = (("s", Size(X, 0)), ("t", Stride(X, 0)), ("n", Y))
    conditions = [
        (expr.le(s * 4, 64), lambda s, t, n: s * 4 <= 64),
        (expr.eq(s % 8, 0), lambda s, t, n: s % 8 == 0),
        (expr.and_(expr.lt(s, n), expr.eq(t, 3)), lambda s, t, n: s < n and t == 3),
        (expr.not_(expr.eq(s // 3, n)), lambda s, t, n: s // 3 != n),
        (expr.le(expr.minimum(s, n), expr.maximum(t, 5) - 1), lambda s, t, n: min(s, n) <= max(t, 5) - 1),
    ]
    for condition, python in conditions:
        frame = Frame(Guard(X, Holds(condition, reads)))
        for size in (0, 1, 8, 16, 24):
            for number in (0, 2, 8, 20):
                assert frame(torch.empty(size, 3), number) == python(size, 3, number)
    text = Frame(Guard(X, Holds(conditions[0][0], reads))).why(torch.empty(20, 3), 1)
    assert "no longer holds" in text and "[20, 3, 1]" in text
    assert not Frame(Guard(X, Holds(expr.le(0, expr.sym("n", -5, 5)), (("n", Y),))))(1, 1 << 70)


EXPRESSIONS = st.recursive(
    st.one_of(st.integers(-9, 9).map(expr.const), st.sampled_from("abc").map(lambda n: expr.sym(n, -50, 50))),
    lambda inner: st.tuples(st.sampled_from("add mul floordiv mod minimum maximum".split()), inner, inner).map(
        lambda t: getattr(expr, t[0])(t[1], t[2] if t[0] not in ("floordiv", "mod") else 3)
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(EXPRESSIONS, EXPRESSIONS, st.tuples(*[st.integers(-50, 50)] * 3))
def test_conditions_agree_with_python(a: expr.Expr, b: expr.Expr, values: tuple[int, int, int]) -> None:
    reads = tuple((name, Arg(i, name)) for i, name in enumerate("abc"))
    env = dict(zip("abc", values))
    for make in (expr.le, expr.eq, expr.lt, lambda a, b: expr.not_(expr.eq(a, b))):
        condition = make(a, b)
        assert emit_postfix(condition, {"a": 0, "b": 1, "c": 2})
        native = make_guards([Guard(Arg(0, "a"), Holds(condition, reads))])
        assert native.check(values, None, {}) == bool(expr.evaluate(condition, env))


# -- torch's state


def test_state() -> None:
    frame = Frame(Guard(X, State(read_state())))
    assert frame(1)
    with torch.no_grad():
        assert not frame(1) and "grad_mode" in frame.why(1)
    with torch.inference_mode():
        assert not frame(1)
    for device in ("cpu", "cuda"):
        torch.set_autocast_enabled(device, True)
        try:
            assert not frame(1) and f"autocast_{device}" in frame.why(1)
        finally:
            torch.set_autocast_enabled(device, False)
    torch.set_default_dtype(torch.float64)
    try:
        assert not frame(1) and "default_dtype" in frame.why(1)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        assert not frame(1)
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.device("meta"):
        assert not frame(1) and "function_modes" in frame.why(1)
        inside = Frame(Guard(X, State(read_state())))
        assert inside(1)
        with torch.device("cpu"):
            assert not inside(1)
    with torch._C.DisableTorchFunction():
        assert not frame(1)
    assert frame(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = Frame(Guard(X, State(read_state())))
        assert inside(1)
        with torch.autocast("cpu", dtype=torch.float16):
            assert not inside(1)


# -- memos


def module_guards(module: torch.nn.Module) -> list[Guard]:
    """What capture would guard of a module tree: types, classes, training, hooks, children, parameters."""
    guards: list[Guard] = []

    def walk(m: torch.nn.Module, path: Any) -> None:
        guards.append(Guard(path, TypeIs(type(m))))
        guards.append(Guard(Const(type(m).__name__, type(m)), ClassIs(type(m))))
        guards.append(Guard(DictAttr(path, "training"), Is(m.training)))
        guards.append(Guard(path, Bare(["forward"], [])))
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            guards.append(Guard(DictAttr(path, hooks), Length(0)))
        for name, p in m._parameters.items():
            source = Item(DictAttr(path, "_parameters"), name)
            guards.append(Guard(source, Is(None) if p is None else tensor_is(p)))
        for name, child in m._modules.items():
            assert child is not None
            walk(child, Item(DictAttr(path, "_modules"), name))

    walk(module, X)
    return guards


def small_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Sequential(torch.nn.Linear(4, 2)))


def test_every_change_of_a_module_is_noticed() -> None:
    model: Any = small_model()
    frame = Frame(*module_guards(model))
    undo: Any
    handle: list[Any] = []
    changes: list[tuple[Any, Any]] = [
        (lambda: model.eval(), lambda: model.train()),
        (lambda: model[2][0].eval(), lambda: model.train()),
        (lambda: setattr(model[0], "bias", None), lambda: setattr(model[0], "bias", torch.nn.Parameter(torch.ones(4)))),
        (lambda: setattr(model[0], "weight", torch.nn.Parameter(torch.ones(4, 5))),
         lambda: setattr(model[0], "weight", torch.nn.Parameter(torch.ones(4, 3)))),
        (lambda: handle.append(model[1].register_forward_hook(lambda *a: None)), lambda: handle.pop().remove()),
        (lambda: model[1].requires_grad_(False), lambda: model[1].requires_grad_(True)),
        (lambda: model.double(), lambda: model.float()),
        (lambda: setattr(model[1], "forward", 1), lambda: delattr(model[1], "forward")),
        (lambda: model[2].__setitem__(0, torch.nn.Identity()), lambda: model[2].__setitem__(0, torch.nn.Linear(4, 2))),
        (lambda: setattr(torch.nn.LayerNorm, "probe", 1), lambda: delattr(torch.nn.LayerNorm, "probe")),
    ]  # fmt: skip
    for number, (change, undo) in enumerate(changes):
        assert frame(model), number
        change()
        assert not frame(model), number
        undo()
        model.step = number  # a counter must not matter
    assert frame(model)


def test_one_entry_for_many_layers() -> None:
    layers = [small_model() for _ in range(40)]
    frame = Frame(*module_guards(layers[0]))
    for _ in range(3):
        assert all(frame(layer) for layer in layers)
    layers[17].eval()
    assert [frame(layer) for layer in layers] == [i != 17 for i in range(40)]


def test_memos_keep_no_model_alive() -> None:
    model = small_model()
    frame = Frame(Guard(X, TypeIs(torch.nn.Sequential)), *[
        g for g in module_guards(model) if not isinstance(g.check, (Is,))
    ])  # fmt: skip
    assert frame(model)
    gone = weakref.ref(model), weakref.ref(model[0].weight)  # type: ignore[index]
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    for _ in range(20):  # other objects come to lie where the old ones were
        assert not frame(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(5), torch.nn.Identity()))
        assert frame(small_model())


def test_memos_keep_no_tensor_alive() -> None:
    """Tensors in tuples, lists and dicts of an object; the objects come and go."""
    gone = []
    t = torch.ones(2)
    paths = [Item(DictAttr(X, name), key) for name, key in (("a", 0), ("b", 0), ("c", "k"))]
    frame = Frame(*[Guard(path, tensor_is(t)) for path in paths], Guard(DictAttr(X, "a"), TypeIs(tuple)),
                  Guard(DictAttr(X, "a"), Length(1)))  # fmt: skip
    for _ in range(600):
        box = Box(a=(torch.ones(2),), b=[torch.ones(2)], c={"k": torch.ones(2)})
        gone.append(weakref.ref(box.a[0]))
        assert frame(box)
        box.a = (torch.ones(3),)
        assert not frame(box)
        box.a = [torch.ones(2)]
        assert not frame(box)
    del box
    assert not any(ref() is not None for ref in gone)


def test_numbers_at_reused_addresses() -> None:
    """A counter of large ints: each new one may lie where the last but one was."""
    box = Box(step=10**6)
    frame = Frame(Guard(DictAttr(X, "step"), Equals(10**6)))
    assert frame(box)
    for i in range(1, 200):
        box.step = 10**6 + i
        assert not frame(box)
        box.step = i
        box.step = 10**6
        assert frame(box)
    items = Box(numbers=[10**6])
    frame = Frame(Guard(Item(DictAttr(X, "numbers"), 0), Equals(10**6)))
    for i in range(200):
        items.numbers[0] = int("1000000")
        assert frame(items)
        items.numbers[0] = 10**6 + 1 + i
        assert not frame(items)


def test_arguments_in_tuples_and_dicts() -> None:
    frame = Frame(Guard(Item(X, 0), Equals(10**6)), Guard(Item(Y, "k"), tensor_is(torch.ones(2))))
    for i in range(100):
        assert frame((10**6,), {"k": torch.ones(2)})
        assert not frame((10**6 + 1 + i,), {"k": torch.ones(2)})
        assert not frame((10**6,), {"k": torch.ones(3)})


def test_guards_do_not_leak() -> None:
    token = object()
    box = Box(token=token, t=(token,))
    native = make_guards([Guard(DictAttr(X, "token"), TypeIs(object)), Guard(Item(DictAttr(X, "t"), 0), TypeIs(object)),
                          Guard(Attr(X, "computed"), TypeIs(object))])  # fmt: skip
    box.value = token
    assert native.check((box,), None, {})
    count = sys.getrefcount(token)
    for i in range(5000):
        box.other = i
        assert native.check((box,), None, {})
        native.why((box,), None, {})
    assert sys.getrefcount(token) == count
    box.t = (token, 1)
    assert native.check((box,), None, {}) and native.check((box,), None, {})
    del native, box
    gc.collect()
    assert sys.getrefcount(token) == 2


def test_every_source_and_check_has_a_native_form() -> None:
    for module, base, table in ((source, Source, LOADS), (guard, Check, NUMBER_OF)):
        kinds = {k for k in vars(module).values() if isinstance(k, type) and issubclass(k, base)}
        assert kinds - {Source, source.Step, source.Computed, Check} <= set(table)


def test_fetched_inputs_of_a_compiled_module() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(4)])
    compiled = dovetail.compile(model, backend="eager")
    x = torch.randn(2, 3)
    for step in range(4):
        torch.testing.assert_close(compiled(x), model(x))
        model[step] = torch.nn.Linear(3, 3)  # another parameter at the same path
        with torch.no_grad():
            model[0].weight.mul_(2)
