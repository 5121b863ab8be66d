"""SPEC C4, C9: tensors around others, with a __torch_dispatch__, are captured as the code of their class."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

import dovetail

aten = torch.ops.aten


class Scaled(torch.Tensor):
    """8-bit integers and a factor for each row. Most ops are those of the numbers they stand for."""

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor) -> Any:
        like = {"dtype": torch.float32, "device": numbers.device}
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, strides=numbers.stride(), **like)

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def plain(self) -> torch.Tensor:
        return self.numbers.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.clone.default):
            made = cls(func(args[0].numbers), func(args[0].scale))
            return return_and_correct_aliasing(func, args, kwargs, made)
        if func is aten.t.default:
            return cls(args[0].numbers.t(), args[0].scale.t())
        if func is aten.mul.Tensor and not isinstance(args[1], torch.Tensor):
            return cls(args[0].numbers, args[0].scale * args[1])
        if func is aten.copy_.default and isinstance(args[0], Scaled):
            args[0].numbers.copy_((args[1] / args[0].scale).round())
            return args[0]
        as_plain = lambda x: x.plain() if isinstance(x, Scaled) else x
        return func(*tree_map(as_plain, args), **tree_map(as_plain, kwargs))


class Slotted(Scaled):
    """Keeps its parts in slots, and has functions of its own besides ops."""

    __slots__ = ("numbers", "scale")
    FUNCTIONS: dict[Any, Callable[..., Any]] = {
        F.linear: lambda x, w, bias=None: (x @ w.numbers.float().t()) * w.scale.t() + (0 if bias is None else bias)
    }

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls.FUNCTIONS:
            return cls.FUNCTIONS[func](*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def make(kind: type[Any], seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-127, 127, (8, 16), dtype=torch.int8, generator=generator)
    return kind(numbers, torch.rand(8, 1, generator=generator) * 0.1)


def several_results(x: Any, w: Any) -> Any:
    doubled = w * 2.0
    doubled.tag, doubled.extra = "a", x + 1
    return doubled, doubled, w, doubled.extra


def attributes(x: Any, w: Any) -> Any:
    facts = w.shape, w.dtype, w.device, w.ndim, w.requires_grad, w.size(0), w.is_contiguous(), len(w)
    return facts, isinstance(w, Scaled), type(w).__name__, x + 1


def written(x: Any, w: Any) -> Any:
    w.copy_(x[:1].expand(w.shape))
    return w.plain()


def halved(x: Any, w: Any) -> Any:
    sums = []
    for _ in range(3):
        w = w * 0.5
        sums.append((x @ w.t()).sum())
    return torch.stack(sums)


PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "linear": lambda x, w: F.linear(x, w, torch.ones(8)),
    "product": lambda x, w: (x @ w.t()).relu() + (x @ w.T),
    "operators": lambda x, w: (w + 1.0, 1.0 - w, w * x[:1], -w, w > 0, abs(w)),
    "indexed": lambda x, w: (w[0], w[:, 1:3], w[1, 2]),
    "methods": lambda x, w: (w.sum(), w.mean(dim=1), w.view(-1), w.reshape(2, -1), w.to(torch.float64)),
    "joined": lambda x, w: (torch.cat([w, w]), torch.stack([w, w]), torch.where(w > 0, w, 0.0)),
    "copied": lambda x, w: (w.detach(), w.clone(), w.clone().plain()),
    "made": lambda x, w: (s := type(w)(w.numbers, w.scale * 2), s + x.sum()),
    "looked up": lambda x, w: F.embedding(torch.tensor([0, 1]), w),
    "added to": lambda x, w: torch.zeros(w.shape).add_(w),
    "in containers": lambda x, w: {"all": [v.plain() for v in (w, w * 2.0)], "last": w * 3.0},
    **{function.__name__: function for function in (several_results, attributes, written, halved)},
}


def check_equal(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, (tuple, list)):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs):
            check_equal(mine, other)
    elif isinstance(ours, dict):
        check_equal([*ours.items()], [*theirs.items()])
    elif isinstance(ours, Scaled):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        check_equal((ours.numbers, ours.scale), (theirs.numbers, theirs.scale))
        check_equal(getattr(ours, "tag", None), getattr(theirs, "tag", None))
    elif isinstance(ours, torch.Tensor):
        torch.testing.assert_close(ours, theirs)
    else:
        assert ours == theirs


@pytest.mark.parametrize("backend", ["eager", "dovetail"])
@pytest.mark.parametrize("kind", [Scaled, Slotted])
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_is_one_graph(name: str, kind: type[Any], backend: str) -> None:
    dovetail.reset()
    function, x = PROGRAMS[name], torch.randn(5, 16)
    compiled = dovetail.compile(lambda x, w: function(x, w), backend=backend, fullgraph=True)
    for seed in range(2):  # the second time with other values, by the same code
        mine, other = make(kind, seed), make(kind, seed)
        check_equal(compiled(x, mine), function(x, other))
        check_equal(mine, other)
    assert dovetail.stats()["graphs"] == 1


def test_resumes_after_a_break() -> None:
    def function(x: Any, w: Any) -> Any:
        doubled = w * 2.0
        dovetail.graph_break()
        return doubled, doubled.plain() + x.sum()

    x = torch.randn(5, 16)
    check_equal(dovetail.compile(function)(x, make(Scaled)), function(x, make(Scaled)))


def test_weight_of_a_module_and_what_changes_in_it() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.GELU())
    model[0].weight = nn.Parameter(make(Slotted), requires_grad=False)
    compiled, x = dovetail.compile(model, fullgraph=True), torch.randn(5, 16)
    with torch.no_grad():
        check_equal(compiled(x), F.gelu(F.linear(x, model[0].weight.plain(), model[0].bias)))
        model[0].weight.scale = model[0].weight.scale * 3
        check_equal(compiled(x), F.gelu(F.linear(x, model[0].weight.plain(), model[0].bias)))
        model[0].weight = nn.Parameter(make(Slotted, 1).plain())
        check_equal(compiled(x), F.gelu(F.linear(x, model[0].weight, model[0].bias)))


def test_sizes_become_symbols() -> None:
    dovetail.reset()
    compiled = dovetail.compile(lambda w: w * 2.0 + 1.0)
    for rows in range(3, 9):
        w = Scaled(torch.ones(rows, 4, dtype=torch.int8), torch.rand(rows, 1))
        check_equal(compiled(w), w * 2.0 + 1.0)
    assert dovetail.stats()["graphs"] <= 2


def test_gradients_are_left_to_the_class() -> None:
    """Eager differentiates the op, not what the class does for it: here that would round."""
    class Rounded(Scaled):
        def plain(self) -> torch.Tensor:
            return (self.numbers.float() * self.scale).round()

    x = torch.randn(5, 16, requires_grad=True)
    function = lambda x, w: (w * x[:1]).sum()
    (mine,) = torch.autograd.grad(dovetail.compile(function)(x, make(Rounded)), x)
    (other,) = torch.autograd.grad(function(x, make(Rounded)), x)
    torch.testing.assert_close(mine, other)


class Bits(NamedTuple):
    most: int
    is_signed: bool = True


@dataclass
class Settings:
    bits: Bits
    name: str = "int8"
    inner: Settings | None = None


class Quantize(torch.autograd.Function):
    """Gives a tensor around others."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, settings: Settings) -> Any:
        scale = x.abs().amax(1, keepdim=True) / settings.bits.most
        return Scaled((x / scale).round().to(torch.int8), scale)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        return gradient, None


class QuantizedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, settings: Settings, bits: Bits) -> Any:
        ctx.save_for_backward(x, w)
        assert settings.inner is not None and bits.is_signed
        return Quantize.apply(x, settings) @ Quantize.apply(w, settings.inner).t()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        by_row = Quantize.apply(gradient, Settings(Bits(127)))
        return by_row @ w, gradient.t() @ x, None, None


def test_function_that_computes_with_them() -> None:
    settings = Settings(Bits(127), inner=Settings(Bits(63)))
    function = lambda x, w: QuantizedProduct.apply(x.sin(), w, settings, settings.bits).square().mean()
    compiled = dovetail.compile(function, fullgraph=True)
    for most in (127, 127, 15):
        settings.bits = Bits(most)
        given = [torch.randn(5, 16, requires_grad=True), torch.randn(8, 16, requires_grad=True)]
        mine, other = compiled(*given), function(*given)
        torch.testing.assert_close(mine, other)
        torch.testing.assert_close(torch.autograd.grad(mine, given), torch.autograd.grad(other, given))


def test_class_with_memory_of_its_own() -> None:
    """While no class is asked, tensors without data would be computed with."""
    class Counted(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))

    value = torch.Tensor._make_subclass(Counted, torch.ones(3))
    function = lambda x: (x.sin() + 1).sum()
    torch.testing.assert_close(dovetail.compile(function)(value), function(value))


def test_below_autograd_is_another_program() -> None:
    compiled, x = dovetail.compile(lambda x: x.sin() * 2), torch.randn(4, requires_grad=True)
    for _ in range(2):
        with torch._C._AutoDispatchBelowAutograd():
            assert not compiled(x).requires_grad
        (gradient,) = torch.autograd.grad(compiled(x).sum(), x)
        torch.testing.assert_close(gradient, 2 * x.cos())


class Sized(torch.Tensor):
    """A class that is asked for sizes, too, as that of nested tensors is."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        rest = (torch.contiguous_format, inner.dtype, torch.strided, inner.device, False, False, "sizes")
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, inner.stride(), 0, *rest)  # type: ignore[arg-type]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*tree_map(lambda x: x.inner if isinstance(x, Sized) else x, args), **kwargs or {})
        return Sized(made) if isinstance(made, torch.Tensor) else made


@pytest.mark.filterwarnings("error")
def test_a_class_that_says_what_sizes_it_has_is_left_to_python() -> None:
    compiled = dovetail.compile(lambda x: x.unflatten(-1, [2, 5]) + 1, backend="eager")
    x = torch.randn(3, 10)
    assert torch.equal(compiled(Sized(x)).inner, x.unflatten(-1, [2, 5]) + 1)
