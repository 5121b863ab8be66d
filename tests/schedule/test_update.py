"""Writing new values of inputs over the old ones: the same results, and no copies."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail.events import EVENTS


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(size)) for size in ((7, 33), (33,), (), (4, 5, 6))]
    for each in made:
        each.grad = torch.randn_like(each)
    return made


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.1, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_equals_eager(name: str) -> None:
    ours, theirs = parameters(), parameters()
    compiled, eager = OPTIMIZERS[name](ours), OPTIMIZERS[name](theirs)
    step = dovetail.compile(compiled.step)
    for _ in range(4):
        step()
        eager.step()
    torch.testing.assert_close(ours, theirs)
    states = [list(state.values()) for state in compiled.state.values()]
    torch.testing.assert_close(states, [list(state.values()) for state in eager.state.values()])


def swap(a: torch.Tensor, b: torch.Tensor) -> None:
    old = a.clone()
    a.copy_(b)
    b.copy_(old)


def shifted(a: torch.Tensor, b: torch.Tensor) -> None:
    a.copy_(a.roll(1) + b)


def read_after(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    old = a * 2
    a.add_(b)
    return old + a


def old_value_returned(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    old = a.clone()
    a.mul_(b)
    return old


def softmaxed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.copy_(torch.softmax(a, -1))
    return (a * b).sum(-1)


def chained(a: torch.Tensor, b: torch.Tensor) -> None:
    a.mul_(0.9).add_(b)
    b.addcdiv_(a, a.sqrt() + 1, value=-0.1)


def turned(a: torch.Tensor, b: torch.Tensor) -> None:
    a.copy_(a.t() + b)


def row_then_points(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    row = a[0]
    y = b - row[:, None]
    row.copy_(row * 0.9 + b.mean(1))
    return y


PROGRAMS = [swap, shifted, read_after, old_value_returned, softmaxed, chained, turned, row_then_points]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_program_equals_eager(program: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    inputs = [torch.rand(40, 40), torch.rand(40, 40)]
    ours = copy.deepcopy(inputs)
    compiled = dovetail.compile(program)
    for _ in range(2):
        torch.testing.assert_close(compiled(*ours), program(*inputs))
        torch.testing.assert_close(ours, inputs)


def test_the_new_value_takes_the_old_ones_memory() -> None:
    dovetail.reset()
    a, b = torch.rand(300), torch.rand(300)
    dovetail.compile(chained, options={"cache": False})(a, b)
    *_, plan = [str(event["value"]) for event in EVENTS.of("stage") if event["stage"] == "70.plan"]
    assert plan.count("reuse of a") == plan.count("reuse of b") == 1
    assert ": output" not in plan
