"""SPEC C9: a whole training step in one compiled function: zero_grad, forward, backward, optimizer, schedule."""
from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

import dovetail
from tests.behaviour.running import check_same
from tests.sweeps.peers import Observed, find_peer

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, 0.1),
    "sgd_momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: optim.Adam(p, 0.1),
    "adam_foreach": lambda p: optim.Adam(p, 0.1, foreach=True),
    "adamw_amsgrad": lambda p: optim.AdamW(p, 0.1, amsgrad=True),
    "adamw_tensor_lr": lambda p: optim.AdamW(p, torch.tensor(0.1)),
}
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda opt: optim.lr_scheduler.CosineAnnealingLR(opt, 10),
    "lambda": lambda opt: optim.lr_scheduler.LambdaLR(opt, lambda epoch: 1 / (1 + epoch)),
    "step": lambda opt: optim.lr_scheduler.StepLR(opt, 2, 0.5),
}


def train(make: Callable[[Any], optim.Optimizer], schedule: Any, wrap: Callable[[Any], Any], steps: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = make(model.parameters())
    scheduler = schedule(optimizer) if schedule is not None else None

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        return loss.detach()

    run = wrap(step)
    losses = [run(torch.randn(3, 4), torch.randn(3, 2)) for _ in range(steps)]
    return losses, list(model.parameters()), [p.grad for p in model.parameters()]


def compare(make: Any, schedule: Any, backend: str, steps: int) -> Observed:
    dovetail.reset()
    plain = train(make, schedule, lambda f: f, steps)
    peer = find_peer("dovetail")
    seen = peer.observe(lambda: train(make, schedule, lambda f: peer.compile(f, backend=backend), steps))
    check_same(seen.result, plain, "training")
    return seen


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_step(name: str) -> None:
    seen = compare(OPTIMIZERS[name], None, "eager", 4)
    assert seen.breaks == 1, seen.reasons
    assert seen.graphs <= 4, "forward, the optimizer's first step and its other steps"


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_does_not_recompile_each_step(name: str) -> None:
    seen = compare(OPTIMIZERS["adam"], SCHEDULES[name], "dovetail", 7)
    assert seen.recompiles <= 2 and len(set(seen.reasons)) == 2, seen.reasons


def test_factors_of_a_list_that_are_tensors() -> None:
    compare(lambda p: optim.Adamax(p, 0.1, foreach=True), None, "dovetail", 3)


def test_kernels_over_whole_lists_are_left_to_python() -> None:
    compare(lambda p: optim.Adam(p, 0.1, fused=True), None, "dovetail", 3)


def test_arithmetic_on_a_changing_number_is_done_before_the_graph() -> None:
    def f(x: torch.Tensor, step: int, rate: float) -> Any:
        return x * math.cos(math.pi * step / 10) * (1 - rate) + 1 / (step + rate), rate * 2

    compiled = dovetail.compile(f)
    peer = find_peer("dovetail")
    calls = [(torch.ones(3), step, 0.1 / step) for step in range(1, 8)]
    seen = peer.observe(lambda: [compiled(*args) for args in calls])
    check_same(seen.result, [f(*args) for args in calls], "result")
    assert seen.recompiles == 1, seen.reasons


def test_zero_grad_notices_another_parameter() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        return x * 2

    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([first], 0.1)
    compiled = dovetail.compile(f, fullgraph=True, backend="eager")
    for parameters in ([first], [first, second]):
        for parameter in parameters:
            parameter.grad = torch.ones(2)
        compiled(torch.ones(2))
        assert all(parameter.grad is None for parameter in parameters)
        if len(parameters) == 1:
            optimizer.add_param_group({"params": [second]})


class Preactivated(nn.Module):
    """Writes to its input, which another module has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.linear = nn.ReLU(inplace=True), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x[:, 0] *= 2
        x = self.act(x)
        return self.linear(x) + x


@pytest.mark.parametrize("backend", ["eager", "dovetail"])
def test_an_input_with_a_history_is_written_to(backend: str) -> None:
    torch.manual_seed(0)
    stem, block = nn.Linear(4, 4), Preactivated()
    compiled = dovetail.compile(block, backend=backend, fullgraph=True)
    for rows in (3, 5):
        data, gradients = torch.randn(rows, 4), []
        for forward in (block, compiled):
            hidden = stem(data)
            loss = (forward(hidden) * hidden).sum()
            gradients.append([loss, *torch.autograd.grad(loss, [*stem.parameters(), *block.parameters()])])
        check_same(gradients[1], gradients[0], "gradient")
    leaf = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf"):
        dovetail.compile(block, backend=backend)(leaf)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm(5)], ids=lambda norm: type(norm).__name__)
def test_gradients_of_parameters_wider_than_what_they_scale(norm: nn.Module, dynamic: bool) -> None:
    """As autocast makes them: gradients of fp32 parameters are not rounded to what flows through."""
    torch.manual_seed(0)
    x, tangent = (torch.randn(6, 4, 5, 5).bfloat16() for _ in range(2))
    got = torch.autograd.grad(dovetail.compile(norm, dynamic=dynamic)(x), [*norm.parameters()], tangent)
    double = copy.deepcopy(norm).double()
    exact = torch.autograd.grad(double(x.double()), [*double.parameters()], tangent.double())
    torch.testing.assert_close(got, tuple(t.float() for t in exact))


@pytest.mark.parametrize("views", [lambda v: v.chunk(2), lambda v: v.split(2), lambda v: v.unbind(0)])
def test_one_of_many_views_is_not_written_to(views: Callable[[torch.Tensor], Any]) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        v = x * 2
        views(v)[0].fill_(2.0)
        return v

    for run in (f, dovetail.compile(f)):
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            run(torch.randn(4, 3, requires_grad=True))


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", ["Adam", "NAdam", "Adamax", "RAdam", "ASGD", "Adafactor", "Muon"])
def test_counts_of_steps_are_as_precise_as_in_eager(name: str, lr: Any) -> None:
    """`1 - beta ** step` in single precision is wrong in its fourth digit; a factor is not rounded to bfloat16."""
    dovetail.reset()
    torch.manual_seed(0)
    start, grads = torch.randn(8, 8), torch.randn(8, 8, 8)
    ends = []
    for wrap in (lambda step: step, lambda step: dovetail.compile(lambda: step(), backend="eager")):
        parameter = nn.Parameter(start.clone())
        optimizer: Any = getattr(optim, name)([parameter], lr=lr)
        step = wrap(optimizer.step)
        for grad in grads:
            parameter.grad = grad.clone()
            step()
        ends.append(parameter.detach())
    torch.testing.assert_close(ends[1], ends[0], atol=1e-7, rtol=3e-7)
    stats = dovetail.stats()
    assert stats["graph_breaks"] <= 1 and stats["recompiles"] <= 1


def test_half_parameters_are_rounded_once() -> None:
    torch.manual_seed(0)
    x, y, t = torch.randn(999).bfloat16(), torch.randn(999).bfloat16(), torch.tensor(0.6123)

    def f(x: torch.Tensor, y: torch.Tensor, t: Any) -> Any:
        return x.add(y, alpha=t), x.clone().addcdiv_(y, y + 3, value=t), x.sub(y, alpha=t)

    got = dovetail.compile(f, backend="eager", fullgraph=True)(x, y, t)
    for mine, eager, exact in zip(got, f(x, y, t.item()), f(x.double(), y.double(), t.item())):
        error, expected = ((made.double() - exact).abs().sum() for made in (mine, eager))
        assert mine.dtype is torch.bfloat16 and error < 1.01 * expected


def test_an_optimizer_that_calls_back_runs_as_it_is() -> None:
    weight = nn.Parameter(torch.tensor([2.0, 3.0]))
    other = nn.Parameter(weight.detach().clone())

    def step_of(weight: nn.Parameter) -> Callable[[], torch.Tensor]:
        optimizer = optim.LBFGS([weight], 0.5, max_iter=4)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = ((weight - 1) ** 2).sum()
            loss.backward()
            return loss

        return lambda: optimizer.step(closure).detach()

    plain, peer = step_of(other), find_peer("dovetail")
    compiled = peer.compile(step_of(weight))
    seen = peer.observe(lambda: [compiled() for _ in range(3)])
    check_same(seen.result, [plain() for _ in range(3)], "loss")
    check_same(weight, other, "weight")
    assert seen.breaks <= 2 and seen.recompiles == 0, seen.reasons


def test_a_step_of_an_optimizer_is_one_graph() -> None:
    """torch breaks the graph around each step for the sake of its own compiler."""
    dovetail.reset()
    called: list[str] = []
    model = nn.Linear(4, 4)
    optimizer = optim.AdamW(model.parameters(), 0.1)
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    step = dovetail.compile(optimizer.step, fullgraph=True)
    for _ in range(3):
        model(torch.ones(2, 4)).square().mean().backward()
        step()
    seen = dovetail.report()
    assert called == ["after"] * 3 and torch.is_grad_enabled()
    assert [graph.function for graph in seen.graphs] == ["Adam.step"] * 2 and not seen.breaks


def test_an_optimizer_that_runs_in_eager_says_why() -> None:
    dovetail.reset()
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    dovetail.compile(optim.RAdam([weight], 0.1).step)()
    (seen,) = dovetail.report().breaks
    assert seen.function == "RAdam.step" and "branches on numbers in its tensors" in seen.reason
