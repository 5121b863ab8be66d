"""With background=True eager serves until the compiled graph is there."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import pytest
import torch
from torch import nn

import dovetail
from dovetail.errors import InternalWarning

COMPILER: Any = importlib.import_module("dovetail.compile")
OPTIONS = {"options": {"background": True}}
X = torch.randn(4, 8)


def f(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 2, -1)


def test_eager_serves_and_then_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, build = threading.Event(), COMPILER.build

    def slow_build(*args: Any) -> Any:
        assert gate.wait(60)
        return build(*args)

    monkeypatch.setattr(COMPILER, "build", slow_build)
    dovetail.reset()
    compiled = dovetail.compile(f, **OPTIONS)
    for _ in range(3):
        torch.testing.assert_close(compiled(X), f(X))
    assert dovetail.stats()["kernels"] == 0 and dovetail.stats()["graphs"] == 1
    gate.set()
    dovetail.wait()
    assert dovetail.stats()["kernels"] == 1
    torch.testing.assert_close(compiled(X), f(X))
    assert dovetail.stats()["graphs"] == 1, "the same entry goes on with the new graph"


def test_training() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    model(X).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    compiled = dovetail.compile(model, **OPTIONS)
    for _ in range(2):  # once in eager, once compiled
        model.zero_grad()
        compiled(X).sum().backward()
        for parameter, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, grad)
        dovetail.wait()


def test_a_failure_leaves_eager_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> object:
        raise ValueError("on purpose")

    monkeypatch.setattr(COMPILER, "build", fail)
    dovetail.reset()
    compiled = dovetail.compile(f, **OPTIONS)
    with pytest.warns(InternalWarning, match="on purpose"):
        compiled(X)
        dovetail.wait()
    torch.testing.assert_close(compiled(X), f(X))
    assert dovetail.stats()["fallbacks_to_eager"] == 1


def test_symbolic_sizes_and_modes_are_compiled_at_once() -> None:
    for settings, mode in (({"dynamic": True}, torch.no_grad()), ({}, torch.inference_mode())):
        dovetail.reset()
        with mode:
            torch.testing.assert_close(dovetail.compile(f, **OPTIONS, **settings)(X), f(X))
        assert dovetail.stats()["kernels"] == 1
