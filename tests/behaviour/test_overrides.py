"""SPEC C4, C9: __torch_function__ of tensor subclasses, of other classes and of modes is captured as the code it is."""
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

import dovetail
from tests.behaviour.running import Suite

suite = Suite()
case = suite.case


class Logged(torch.Tensor):
    seen: list[Any] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Logged.seen.append((func.__name__, [kind.__name__ for kind in types], len(args), kwargs))
        return super().__torch_function__(func, types, args, kwargs or {})


class Tagged(torch.Tensor):
    """Carries a tag, and gives it to what is computed of it. `meta` is also a name of capture's own."""

    meta: Any

    @staticmethod
    def __new__(cls, data: Any, meta: Any = None, **kwargs: Any) -> Any:
        return torch.Tensor._make_subclass(cls, torch.as_tensor(data, **kwargs))

    def __init__(self, data: Any, meta: Any = None, **kwargs: Any) -> None:
        self.meta = meta

    @property
    def title(self) -> str:
        return f"<{self.meta}>"

    @title.setter
    def title(self, value: str) -> None:
        self.meta = value.upper()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
        tags = [arg.meta for arg in args if isinstance(arg, Tagged)]
        if type(made) is torch.Tensor:
            made = made.as_subclass(cls)
            made.meta = tags[0] if tags else None
        return made


class Held:
    """No tensor, but one for torch's functions."""

    def __init__(self, data: Any, tag: Any = None) -> None:
        self.data, self.tag = torch.as_tensor(data), tag

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in RULES:
            return RULES[func](*args, **(kwargs or {}))
        tags = [arg.tag for arg in args if isinstance(arg, Held)]
        return Held(func(*[getattr(arg, "data", arg) if isinstance(arg, Held) else arg for arg in args], **(kwargs or {})), tags[0])


RULES: dict[Any, Any] = {torch.mean: lambda x: ("mean", x.tag)}


class Counts(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Steps(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] * 3 if func is F.relu else func(*args, **(kwargs or {}))


def shown(x: Any) -> Any:
    return type(x).__name__, getattr(x, "meta", None), x.as_subclass(torch.Tensor)


@case("C9")
def functions_methods_operators_and_attributes() -> Any:
    Logged.seen.clear()

    def f(x: Any, y: torch.Tensor) -> Any:
        z = torch.cat([x, y]) * 2 - y.sum()
        first = z[0], x[:2], len(x), (1 - x) ** 2, x == y, x.mT.shape, z.T.size(0)
        for row in x:
            z = z + row
        return z.as_subclass(torch.Tensor), [type(v).__name__ for v in (z, *first)], torch.max(x, 0).indices, x.split(1)[1]

    return f, [(torch.randn(3, 4).as_subclass(Logged), torch.randn(3, 4)) for _ in range(3)], lambda: [*Logged.seen]


@case("C9", recompiles=1)
def sizes_that_change() -> Any:
    Logged.seen.clear()
    return lambda x: (x.reshape(-1).sin(), x.shape[0] + 1), [(torch.randn(n, 3).as_subclass(Logged),) for n in (3, 4, 5)], lambda: [*Logged.seen]


@case("C9")
def writes_to_what_is_asked() -> Any:
    Logged.seen.clear()

    def f(x: Any, y: torch.Tensor) -> Any:
        x.mul_(2)
        y.add_(x)
        x[0] = 5
        x += 1
        return x, y

    return f, [(torch.randn(3).as_subclass(Logged), torch.randn(3)) for _ in range(2)], lambda: [*Logged.seen]


@case("C9")
def layers_and_their_gradients() -> Any:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 1))

    def f(x: Any, y: torch.Tensor) -> Any:
        loss = (model(x) * y).sum()
        return loss.as_subclass(torch.Tensor), type(loss).__name__

    return f, [(torch.randn(2, 3).as_subclass(Logged).requires_grad_(), torch.randn(2, 1, requires_grad=True)) for _ in range(2)]


@case("C9")
def tags_that_are_carried_on() -> Any:
    def f(x: Any, y: torch.Tensor) -> Any:
        new = Tagged(y * 2, meta=("new", x.meta))
        new.title = f"{x.title}!"
        last = torch.add(y, new.relu())
        return [shown(v) for v in (x + 1, new, last, torch.stack([new, new]), Tagged([1.0, 2.0]))], isinstance(last, Tagged)

    return f, [(Tagged(torch.randn(3), meta=f"m{i % 2}"), torch.randn(3, requires_grad=True)) for i in range(3)]


@case("C9")
def two_classes() -> Any:
    Logged.seen.clear()

    class More(Logged):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs) if func is not torch.sub else NotImplemented

    def f(x: Any) -> Any:
        more = x.as_subclass(More)
        return [shown(v) for v in (x + more, more * x, torch.Tensor.as_subclass(more, torch.Tensor) + 1)]

    return f, [(torch.randn(3).as_subclass(Logged),)] * 2, lambda: [*Logged.seen]


@case("C9")
def what_is_no_tensor() -> Any:
    def f(x: torch.Tensor, held: Held) -> Any:
        made = torch.mul(held, x), torch.add(torch.sin(Held(x, "own")), 2), x + held
        return [(h.tag, h.data) for h in made], torch.mean(held)

    return f, [(torch.randn(3), Held(torch.randn(3), i % 2)) for i in range(3)]


def scaled(x: Any, by: float = 2.0) -> Any:
    if has_torch_function((x,)):
        return handle_torch_function(scaled, (x,), x, by=by)
    return x * by


@case("C9")
def functions_of_the_users_own() -> Any:
    Logged.seen.clear()
    return lambda x, y: (shown(scaled(x)), scaled(y, 3.0)), [(torch.randn(3).as_subclass(Logged), torch.randn(3))] * 2, lambda: [*Logged.seen]


class Off(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


@case("C9")
def class_that_is_not_asked() -> Any:
    return lambda x: (x * 2, x, type(x + 1).__name__), [(torch.randn(3).as_subclass(Off),)] * 2


@case("C9")
def modes() -> Any:
    def f(x: torch.Tensor) -> Any:
        x = x + 1
        with Counts() as outer, Steps():
            y = F.relu(x.sin() + torch.ones(3)) * x.shape[0]
            with Counts() as inner, torch._C.DisableTorchFunction():
                y = y.exp()
        return F.relu(y), outer.seen, inner.seen

    return f, [(torch.randn(3, requires_grad=True),)] * 2


@case("C3", breaks=1)
def break_under_a_mode() -> Any:
    def f(x: torch.Tensor) -> Any:
        with Counts() as mode:
            y = x.sin()
            print("so")
            y = y + 1
        return y * 2, mode.seen

    return f, [(torch.randn(3),)] * 2


@case("C9")
def parameter_made_inside() -> Any:
    def f(x: torch.Tensor) -> Any:
        weight = nn.Parameter(torch.ones(3))
        return (x * weight).sum(), type(weight).__name__, weight.requires_grad, isinstance(weight, nn.Parameter)

    return f, [(torch.randn(3, requires_grad=True),)] * 2


class Picture(torch.Tensor):
    """Only some functions keep the class, and attributes are read past it."""

    def __new__(cls, data: Any, *, dtype: Any = None) -> Any:
        return torch.as_tensor(data, dtype=dtype).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **kwargs or {})
        if func in KEPT and isinstance(args[0], cls):
            return made.as_subclass(cls)
        return made.as_subclass(torch.Tensor) if isinstance(made, cls) else made

    @property
    def shape(self) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return super().shape

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return "Picture"


KEPT = {torch.Tensor.clone, torch.Tensor.to}


class Unit(torch.Tensor):
    def __new__(cls, data: Any, unit: str) -> Any:
        return super().__new__(cls, data)

    def __init__(self, data: Any, unit: str) -> None:
        super().__init__()
        self.unit = unit

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        units = [arg.unit for arg in args if isinstance(arg, Unit)]
        if func in (torch.Tensor.add, torch.add) and len({*units}) > 1:
            raise ValueError(f"units {units}")
        made = super().__torch_function__(func, types, args, kwargs)
        if isinstance(made, Unit) and units:
            made.unit = units[0]
        return made


@case("C9", recompiles=1)
def class_that_only_some_functions_keep() -> Any:
    def f(x: Any) -> Any:
        small = F.interpolate(x[None], size=(2, 2))
        return [shown(v) for v in (x.clone(), x * 2, x.to(torch.float64), small, Picture(x.sum()))], x.shape, f"{x}"

    return f, [(Picture(torch.randn(3, n, 4)),) for n in (4, 5, 6)]


@case("C9")
def units_that_do_not_fit() -> Any:
    def f(x: Any, y: Any) -> Any:
        try:
            return shown(x + y), shown(Unit(x * y, "square")), x.sum().unit
        except ValueError as error:
            return str(error), x * 2

    return f, [(Unit(torch.randn(3), "m"), Unit(torch.randn(3), unit)) for unit in ("m", "m", "s")]


@case("C9")
def buffer_of_a_subclass() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", Unit(torch.ones(3), "m"))
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> Any:
            self.last = self.scale * x
            self.scale.add_(1)
            return (self.weight * self.scale + x).as_subclass(torch.Tensor)

    model = Model()
    return model, [(torch.randn(3),) for _ in range(3)], lambda: [shown(model.last), shown(model.scale)]


@case("C3", breaks=1)
def break_with_a_subclass_at_hand() -> Any:
    def f(x: torch.Tensor) -> Any:
        own = Unit(x * 2, "m")
        print("so")
        return shown(own + 1), (own * 2).unit

    return f, [(torch.randn(3),)] * 2


@case("C9")
def many_of_a_subclass() -> Any:
    def f(items: list[Any]) -> Any:
        total = items[0]
        for item in items[1:]:
            total = total + item
            item.mul_(2)
        return total.unit, total

    return f, [([Unit(torch.randn(2), "m") for _ in range(6)],) for _ in range(2)]


@case("C9")
def error_under_a_mode() -> Any:
    class Limited(TorchFunctionMode):
        left = 2

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.left -= 1
            if self.left < 0:
                raise ValueError(func.__name__)
            return func(*args, **(kwargs or {}))

    def f(x: torch.Tensor) -> Any:
        with Limited() as mode:
            try:
                x = x.sin().cos().tan()
            except ValueError as error:
                said = str(error)
            mode.left = 5
            x = x + 1
        return x * 2, said, mode.left

    return f, [(torch.randn(3),)] * 2


class Sum(torch.Tensor):
    def __add__(self, other: Any) -> Any:
        return "sum", torch.Tensor.sub(self, other)


@case("C9", breaks=1)
def operators_of_its_own() -> Any:
    def f(x: torch.Tensor) -> Any:
        y = x * 2
        return y.as_subclass(Sum) + 1

    return f, [(torch.randn(3),)] * 2


@case("C4")
def names_that_are_no_text() -> Any:
    class Owner:
        pass

    def complaint(function: Any, *args: Any) -> str:
        try:
            function(*args)
        except TypeError as error:
            return str(error)
        return "none"

    def f(x: torch.Tensor, owner: Owner) -> Any:
        said = [complaint(function, each, 3) for function in (getattr, hasattr, delattr) for each in (x, owner)]
        return x + 1, said, complaint(setattr, owner, 3, 4), complaint(getattr, x, 3, None)

    return f, [(torch.randn(3), Owner())] * 2


test_program = suite.test()


@pytest.mark.parametrize("backend", ["eager", "dovetail"])
def test_a_changed_override_is_noticed(backend: str) -> None:
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs)

    compiled = dovetail.compile(lambda x: x.sin() + 1, backend=backend, fullgraph=True)
    x = torch.randn(3).as_subclass(Own)
    assert type(compiled(x)) is Own
    Own.__torch_function__ = classmethod(lambda cls, func, types, args=(), kwargs=None: 7)  # type: ignore[assignment, method-assign]
    assert compiled(x) == 8
