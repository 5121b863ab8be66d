"""torch.cond and while_loop: one arm runs, chosen by a tensor, also under fullgraph=True; with gradients."""
from __future__ import annotations

from typing import Any

import torch
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.while_loop import while_loop
from torch._higher_order_ops.wrap import wrap

import dovetail
from tests.behaviour.running import ANY, Program, Suite

suite = Suite()
case = suite.case


def x4() -> torch.Tensor:
    return torch.randn(4, requires_grad=True)


def arms_with_what_they_close_over() -> Any:
    w, v = x4(), x4()

    def f(x: torch.Tensor) -> Any:
        y = x * 2
        return torch.cond(x.sum() > 0, lambda a: (a * w).sin() + y, lambda a: a.cos() + w * v, (x,)) * 2

    return f, [(torch.ones(4, requires_grad=True),), (-torch.ones(4, requires_grad=True),)]


def arms_with_two_results() -> Any:
    def f(x: torch.Tensor) -> Any:
        a, b = torch.cond(x[0] > 0, lambda a: (a + 1, a.sum()), lambda a: (a * 2, a.max()), (x,))
        return a + 1, b

    return f, [(torch.ones(4, requires_grad=True),), (-torch.ones(4, requires_grad=True),)]


def arms_of_the_op_itself() -> Any:
    def f(x: torch.Tensor) -> Any:
        return cond_op(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (x,)) + 1

    return f, [(torch.ones(4),), (-torch.ones(4),)]


def an_arm_that_must_not_run() -> Any:
    def f(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda a: a.sqrt(), lambda a: a * 0, (x,))

    return f, [(torch.ones(4, requires_grad=True),), (torch.zeros(4, requires_grad=True),)]


def arms_within_arms() -> Any:
    def inner(a: torch.Tensor) -> Any:
        return torch.cond(a[0] > 0, lambda b: b + 1, lambda b: b - 1, (a,))

    def f(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, inner, torch.cos, (x,))

    return f, [(torch.tensor([k, 3.0], requires_grad=True),) for k in (1.0, -1.0, -5.0)]


def modules_as_arms() -> Any:
    class Choice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return torch.cond(x.sum() > 0, self.a, self.b, (x,)).relu()

    return Choice(), [(torch.ones(2, 4),), (-torch.ones(2, 4),)]


def a_loop_until_large() -> Any:
    w = torch.rand(4)

    def f(x: torch.Tensor) -> Any:
        count, y = while_loop(lambda i, a: a.sum() < 100, lambda i, a: (i + 1, a * 2 + w), (torch.tensor(0), x + 1))
        return count, y - 1

    return f, [(torch.rand(4),), (torch.rand(4) + 100,)]


PROGRAMS = (
    arms_with_what_they_close_over, arms_with_two_results, an_arm_that_must_not_run, arms_within_arms,
    modules_as_arms, a_loop_until_large, arms_of_the_op_itself,
)  # fmt: skip
for made in PROGRAMS:
    case("C9")(made)
    if made is not modules_as_arms:  # plain Python gives no gradient to the arm that did not run, torch.cond zeros
        suite.programs.append(Program("C9 broken", made.__name__, made, breaks=ANY))
test_program = suite.test()


def test_a_function_that_torch_wraps_is_captured() -> None:
    x = torch.randn(4)
    assert torch.equal(dovetail.compile(lambda x: wrap(torch.sin, x) + 1, fullgraph=True)(x), x.sin() + 1)
