"""Branches on tensors that only lead to an exception: one graph, and the same exception.

PYTEST_DONT_REWRITE: the programs assert as users do.
"""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributions as D

import dovetail
from tests.behaviour.running import Suite

suite = Suite()
case = suite.case


def x4() -> torch.Tensor:
    return torch.randn(4, requires_grad=True)


@case("C3")
def an_assertion() -> Any:
    def f(x: torch.Tensor) -> Any:
        assert x.sum() > -100, f"small: {x.sum():.3f}"
        return x * 2

    return f, [(x4(),), (x4() - 200,), (x4(),)]


@case("C6")
def effects_and_random_numbers_before_it() -> Any:
    log: list[int] = []

    def check(x: torch.Tensor, text: str) -> torch.Tensor:
        if not torch.isfinite(x).all():
            raise ValueError(f"{text} {x.sum()}")
        return x

    def f(x: torch.Tensor, *rest: int, k: int = 2, **named: int) -> Any:
        log.append(len(rest))
        y = check(x + torch.rand(4), f"{len(log)} {sorted(named)}")
        log.append(k)
        return check(y * k, "late")

    def g(x: torch.Tensor) -> Any:
        return f(x, 1, 2, k=3, z=4)

    return g, [(x4(),), (x4() / 0,), (x4(),)], lambda: log


@case("C3")
def a_check_inside_of_one_of_torchs_functions() -> Any:
    def f(x: torch.Tensor, var: torch.Tensor) -> Any:
        return torch.nn.functional.gaussian_nll_loss(x.sin(), x.detach(), var).exp()

    return f, [(x4(), torch.rand(4)), (x4(), -torch.rand(4)), (x4(), torch.rand(4))]


@case("C3", breaks=1)
def after_a_break() -> Any:
    def f(x: torch.Tensor) -> Any:
        assert x.sum() > 0, "negative"
        print("here")
        assert x.sum() < 100, "large"
        return x * 2

    return f, [(torch.ones(3),), (-torch.ones(3),), (torch.ones(3) * 100,)]


@case("C3", breaks=1)
def an_input_is_changed() -> Any:
    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        y.add_(1)
        assert x.sum() > 0
        y.mul_(2)
        return x + y

    return f, [(torch.ones(3), torch.ones(3)), (-torch.ones(3), torch.ones(3))]


@case("C3", breaks=1)
def the_exception_is_expected() -> Any:
    def f(x: torch.Tensor) -> Any:
        try:
            if x.sum() < 0:
                raise RuntimeError("negative")
            return x + 1
        except RuntimeError:
            return x - 1

    return f, [(torch.ones(3),), (-torch.ones(3),)]


@case("C9")
def a_normal_distribution() -> Any:
    def f(mean: torch.Tensor, scale: torch.Tensor) -> Any:
        p, q = D.Normal(mean, scale), D.Independent(D.Normal(mean * 0, scale * 2), 1)
        x = p.rsample()
        return x, p.log_prob(x), p.entropy(), p.sample(torch.Size([3])), D.kl_divergence(D.Independent(p, 1), q)

    return f, [(x4(), torch.rand(4) + 0.5), (x4(), -torch.rand(4)), (x4(), torch.rand(4) + 0.5)]


@case("C9")
def distributions_over_classes() -> Any:
    D.Distribution.set_default_validate_args(True)  # torch's own compiler turns it off when it is loaded

    def f(logits: torch.Tensor, value: torch.Tensor) -> Any:
        p, b = D.Categorical(logits=logits), D.Bernoulli(logits=logits)
        x, y = p.sample(), b.sample()
        return x, p.log_prob(x), p.entropy(), y, b.log_prob(y), p.log_prob(value)

    return f, [(torch.randn(3, 4, requires_grad=True), torch.tensor(k)) for k in (1, 9, 2)]


test_program = suite.test()


@pytest.mark.parametrize("backend", ["aot_eager", "dovetail"])
def test_what_was_counted_before_a_graph_raises_stays_counted(backend: str) -> None:
    """Outside of `try` too: the buffer that the graph writes, and the attribute beside it."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.count = 0

        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.count += 1
            return x[index]

    model, rows = Net(), torch.randn(3, 2)
    compiled = dovetail.compile(model, backend=backend)
    for k, index in enumerate((0, 7, 2)):
        if index == 7:
            with pytest.raises(IndexError):
                compiled(rows, torch.tensor([index]))
        else:
            assert torch.equal(compiled(rows, torch.tensor([index])), rows[index : index + 1])
        assert (model.calls.item(), model.count) == (k + 1, k + 1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "dovetail", lambda module, examples: module.forward])
def test_a_handler_runs_after_an_input_was_written(backend: Any) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        try:
            x.mul_(2)
            return torch.linalg.cholesky(x) + 1
        except RuntimeError:
            return x - 100

    compiled = dovetail.compile(program, backend=backend)
    for sign in (1.0, -1.0, 1.0):
        inputs = [torch.eye(3) * sign for _ in range(2)]
        results = [run(x) for run, x in zip((program, compiled), inputs, strict=True)]
        torch.testing.assert_close(results[1], results[0])
        torch.testing.assert_close(inputs[1], inputs[0])
