"""Gradients of gradients through compiled regions: compiled themselves, and equal to eager's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dovetail
from dovetail.aot import double

compiler: Any = importlib.import_module("dovetail.compile")

Wrap = Callable[[Any], Any]


class _Wrong(torch.autograd.Function):
    """A gradient that is not the derivative: only the user's own backward gives it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * x * 3


def _without_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = x.exp()
    return x * x * scale


PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detached": lambda x: x * x.detach() * x,
    "no_grad": _without_grad,
    "autograd.Function": lambda x: _Wrong.apply(x) * x,
    "views": lambda x: (x.t()[1:] * 2).exp() @ x,
    "dropout": lambda x: F.dropout(x.sin(), 0.5) * x,
}


def _derivatives(call: Callable[[torch.Tensor], torch.Tensor], orders: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.rand(3, 4, dtype=torch.float64, requires_grad=True)
    value, found = call(x), []
    for _ in range(orders):
        (value,) = torch.autograd.grad((value * value).sum(), x, create_graph=True)
        found.append(value)
    return found


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_three_orders(program: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    build = double.Eager.as_program
    monkeypatch.setattr(double.Eager, "as_program", lambda self, *given: made.append(self) or build(self, *given))
    call = dovetail.compile(program, options={"fallback_to_eager": False})
    for ours, theirs in zip(_derivatives(call, 3), _derivatives(program, 3)):
        torch.testing.assert_close(ours, theirs)
    assert made


def _penalty(wrap: Wrap) -> list[torch.Tensor]:
    """As in a Wasserstein GAN: the norm of the gradient of the judge is part of its loss."""
    torch.manual_seed(0)
    judge = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.LeakyReLU(0.2), nn.Dropout(0.2),
                          nn.Flatten(), nn.Linear(4 * 16, 1)).double()  # fmt: skip
    run = wrap(judge)
    for step in range(2):
        torch.manual_seed(step)
        x = torch.randn(4, 3, 6, 6, dtype=torch.float64, requires_grad=True)
        score = run(x)
        (grad,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        ((grad.flatten(1).norm(dim=1) - 1).square().mean() + score.mean()).backward()
    return [p.grad for p in judge.parameters()]


def test_a_gradient_penalty() -> None:
    compiled = _penalty(lambda m: dovetail.compile(m, options={"fallback_to_eager": False}))
    for ours, theirs in zip(compiled, _penalty(lambda m: m)):
        torch.testing.assert_close(ours, theirs)


def test_a_loss_over_classes() -> None:
    """The sum of its gradient is known, that of its gradient's gradient is not."""

    def second(call: Any) -> torch.Tensor:
        x = torch.linspace(-1, 2, 12).reshape(3, 4).requires_grad_()
        (grad,) = torch.autograd.grad(call(x, torch.arange(3)), x, create_graph=True)
        return torch.autograd.grad((grad * torch.arange(12.0).reshape(3, 4)).sum(), x)[0]

    torch.testing.assert_close(second(dovetail.compile(F.cross_entropy)), second(F.cross_entropy))


@pytest.mark.parametrize("dynamic", [False, True])
def test_lazily_conjugated_tangents(dynamic: bool) -> None:
    def second(call: Any) -> Any:
        x, tangent = (torch.linspace(-1, 2, 6).requires_grad_() for _ in range(2))
        value = call(x)
        (grad,) = torch.autograd.grad(value, x, torch.complex(tangent, tangent.cos())[: len(value)].conj(), create_graph=True)
        return torch.autograd.grad(grad.square().sum(), (x, tangent), allow_unused=True)

    for program in (torch.fft.ihfft, lambda x: torch.polar(x, x.exp()) * x):
        torch.testing.assert_close(second(dovetail.compile(program, dynamic=dynamic)), second(program))


def test_many_sizes_end_in_eager() -> None:
    call = dovetail.compile(lambda x: x.sin().exp(), dynamic=True)
    for size in range(2, 9):
        x = torch.rand(size, requires_grad=True)
        (grad,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        torch.testing.assert_close(second, (x.cos() ** 2 - x.sin()) * x.sin().exp())


def _count(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    y = x * x * seen.exp()
    seen.add_(1)
    return y


def _fill(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """What is overwritten has a history, and takes no part."""
    table[:2] = (x[:2] * x[1:]).exp()
    return table.sum()


def _grow(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """It has one, and does."""
    table.mul_((x * x).exp())
    return table.sum()


@pytest.mark.parametrize("has_history", [False, True])
@pytest.mark.parametrize("program", [_count, _fill, _grow])
def test_the_gradient_of_a_gradient_has_the_old_values_of_inputs(program: Any, has_history: bool) -> None:
    def train(call: Any) -> list[Any]:
        x = torch.linspace(-1, 1, 3, requires_grad=True)
        other = (x * 2).sin() if has_history else torch.ones(3)
        y = call(x, other)
        grads = torch.autograd.grad(y.sum(), x, create_graph=True)
        more = torch.autograd.grad(grads[0].square().sum(), x, create_graph=True)
        return [y, other, *grads, *more, *torch.autograd.grad(more[0].exp().sum(), x)]

    torch.testing.assert_close(train(dovetail.compile(program)), train(program))


def test_forward_mode_keeps_its_tangents() -> None:
    call = dovetail.compile(lambda x: x.sin() * x)
    x = torch.rand(4)
    call(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(4))
        tangent = torch.autograd.forward_ad.unpack_dual(call(dual)).tangent
    torch.testing.assert_close(tangent, x.cos() * x + x.sin())
    torch.testing.assert_close(torch.func.grad(lambda x: call(x).sum())(x), x.cos() * x + x.sin())


def _products(stage: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many matrix products each program has that is built meanwhile."""
    found: list[int] = []
    build = compiler.build
    count = lambda graph: sum(node.op in ("aten.mm.default", "aten.addmm.default") for node in graph.nodes)  # noqa: E731
    monkeypatch.setattr(compiler, "build", lambda graph, *rest: found.append(count(graph)) or build(graph, *rest))
    stage()
    return found


def _net() -> tuple[nn.Module, torch.Tensor]:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    return net, torch.randn(4, 8, requires_grad=True)


def test_the_gradient_takes_what_forward_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = _net()

    def run() -> None:
        (du,) = torch.autograd.grad(dovetail.compile(net)(x).sum(), x, create_graph=True)
        du.sum().backward()

    forward, gradient, backward = _products(run, monkeypatch)
    assert (forward, gradient) == (3, 3)
    assert backward <= 3 + 2 * 3 + 2  # of each product of the gradient two, and what leads back through tanh


def test_gradients_that_nobody_asked_for_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = _net()
    call = dovetail.compile(net)
    got: list[Any] = []
    products = _products(lambda: got.extend(torch.autograd.grad(call(x).sum(), x)), monkeypatch)
    assert products == [3, 3]
    torch.testing.assert_close(got, list(torch.autograd.grad(net(x).sum(), x)))
    call(x).sum().backward()
    ours = [p.grad for p in (x, *net.parameters())]
    x.grad = None
    net.zero_grad()
    net(x).sum().backward()
    torch.testing.assert_close(ours, [p.grad for p in (x, *net.parameters())])


def test_the_gradient_of_one_layer_leads_no_further_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """And that of many takes the backward of all."""
    net, x = _net()
    *_, last = (p for p in net.parameters() if p.ndim == 2)
    call, wanted, got = dovetail.compile(net), [last], list[Any]()

    def ask() -> None:
        value = call(x).sum()
        got.extend(torch.autograd.grad(value, wanted, retain_graph=True))
        value.backward()

    assert _products(ask, monkeypatch)[:2] == [3, 1]
    torch.testing.assert_close(got, list(torch.autograd.grad(net(x).sum(), wanted)))
    assert all(p.grad is not None for p in (x, *net.parameters()))
    monkeypatch.setattr(double, "MOST_WANTED", 2)
    ours = torch.autograd.grad(call(x).sum(), list(net.parameters()))
    torch.testing.assert_close(ours, torch.autograd.grad(net(x).sum(), list(net.parameters())))


@pytest.mark.parametrize("zeros", [(), (2,), (2, 4)])
def test_products_so_far_with_zeros(zeros: tuple[int, ...]) -> None:
    """The first gradient is a few scans whatever the length; both are eager's behind zeros, too."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (torch.cumprod(x, -1) * w).sum() + x.cumprod(0).square().sum()

    torch.manual_seed(0)
    x, w = (torch.randn(5, 7, dtype=torch.float64) for _ in range(2))
    for place in zeros:
        x[:, place] = 0
    found = []
    for run in (program, dovetail.compile(program)):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(run(leaf, w), leaf)
        (again,) = torch.autograd.grad(run(leaf, w), leaf, create_graph=True)
        (second,) = torch.autograd.grad(again.square().sum(), leaf)
        found.append((first, again.detach(), second))
    for mine, eager in zip(found[1], found[0]):
        torch.testing.assert_close(mine, eager)


def test_symbolic_sizes_stay_symbolic(monkeypatch: pytest.MonkeyPatch) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    compiled, asked = dovetail.compile(net, dynamic=True), list[int]()
    as_program = double.Eager.as_program
    monkeypatch.setattr(double.Eager, "as_program", lambda self, *given: asked.append(1) or as_program(self, *given))

    def step(call: Any, x: torch.Tensor) -> list[torch.Tensor]:
        net.zero_grad()
        (grad,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
        return [grad.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]

    for size in (3, 5, 7, 9, 11, 13):
        x = torch.randn(size, 4, requires_grad=True)
        torch.testing.assert_close(step(compiled, x), step(net, x))
    assert len(asked) == 1


@pytest.mark.parametrize("program, is_read", [
    (lambda x, other: torch.cat([x, other])[1:3] * 2, False), (lambda x, other: (x + other.sum()).relu().t(), True),
    (lambda x, other: x.sin() + other, False), (lambda x, other: (x + 1, x * other)[0], False),
    (lambda x, other: x * other, True),
])  # fmt: skip
def test_inputs_may_be_written_to_that_the_gradient_does_not_depend_on(program: Any, is_read: bool) -> None:
    for run in (program, dovetail.compile(program)):
        x, other = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)
        out = run(x, other).sum()
        other.add_(1)
        if is_read and run is not program:
            with pytest.raises(RuntimeError, match="inplace"):
                torch.autograd.grad(out, x, create_graph=True)
        elif not is_read:
            (gradient,) = torch.autograd.grad(out, x, create_graph=True)
            torch.testing.assert_close(gradient, torch.autograd.grad(program(x, other).sum(), x)[0])


def test_the_gradient_of_what_keeps_nothing_is_there_after_a_backward() -> None:
    x = torch.ones(4, requires_grad=True)
    out = dovetail.compile(lambda x: (x + 1).view(2, 2))(x).sum()
    out.backward()
    torch.testing.assert_close(torch.autograd.grad(out, x, create_graph=True)[0], torch.ones(4))
