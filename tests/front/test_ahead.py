"""Backward's program is made while compilers are at work on forward's, where a training step is expected."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

import dovetail
from dovetail import lower
from dovetail.errors import InternalWarning
from dovetail.events import EVENTS


@pytest.fixture(autouse=True)
def unwatched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody wants to see every stage, so that programs are kept; none is known."""
    monkeypatch.delenv("DOVETAIL_CHECK")
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    dovetail.reset()
    EVENTS.clear()


def made(stage: str) -> list[str]:
    """Which graphs of the first program went through that stage."""
    return [event["unit"].partition("_")[2].partition("_")[2] for event in EVENTS.of("stage")
            if event["stage"] == stage]  # fmt: skip


class TwoHeads(nn.Module):
    """Outputs of which autograd knows that they share no history: a backward each."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.left(x)), torch.sigmoid(self.right(y)) * 2


def test_a_module_that_trains_has_its_backward_made_with_forward() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU())
    plain = deepcopy(model)
    x = torch.randn(5, 6)
    out = dovetail.compile(model)(x)
    assert made("80.program") == ["forward", "backward"]
    assert made("90.executable") == ["forward"]
    out.square().sum().backward()
    plain(x).square().sum().backward()
    assert made("80.program") == ["forward", "backward"]
    assert made("90.executable") == ["forward", "backward"]
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_outputs_that_are_not_tied_have_a_backward_each() -> None:
    model = TwoHeads()
    plain = deepcopy(model)
    x, y = torch.randn(5, 6), torch.randn(3, 6)
    left, right = dovetail.compile(model)(x, y)
    assert made("80.program") == ["forward", "backward", "backward"]
    (left.sum() + right.square().sum()).backward()
    a, b = plain(x, y)
    (a.sum() + b.square().sum()).backward()
    assert made("80.program") == ["forward", "backward", "backward"]
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_module_in_eval_mode_waits_for_backward() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU()).eval()
    out = dovetail.compile(model)(torch.randn(5, 6))
    assert made("80.program") == ["forward"]
    out.sum().backward()
    assert made("80.program") == ["forward", "backward"]


def test_what_fails_ahead_is_told_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = lower.lower

    def failing(graph: object) -> object:
        if graph.name.endswith("_backward"):  # type: ignore[attr-defined]
            raise ArithmeticError("no loops today")
        return original(graph)  # type: ignore[arg-type]

    monkeypatch.setattr(lower, "lower", failing)
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU())
    plain = deepcopy(model)
    x = torch.randn(5, 6)
    out = dovetail.compile(model)(x)
    with pytest.warns(InternalWarning, match="no loops today"):
        out.sum().backward()
    plain(x).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad)
