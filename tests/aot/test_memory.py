"""Peak memory of a training step, compiled against eager: live tensor bytes as the allocator reports them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import dovetail
from dovetail import schedule


def peak_of(step: Callable[[], None], model: nn.Module, arenas: list[int]) -> int:
    """The most bytes alive at once during a step that starts without gradients. Temporaries come from an
    arena that the allocator does not see: one of forward, one of backward."""
    step()
    step()
    model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    changes: list[tuple[int, int]] = []
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
        elif event.name() in ("CompiledFunction", "CompiledFunctionBackward"):
            bytes_ = arenas[event.name() == "CompiledFunctionBackward"]
            changes += [(event.start_ns(), bytes_), (event.start_ns() + event.duration_ns(), -bytes_)]
    total = highest = 0
    for _, change in sorted(changes):
        total += change
        highest = max(highest, total)
    return highest


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(4)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(8) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms):
            x = F.relu(x + norm(conv(x)))
        return x.mean((2, 3))


def _measure(
    make: Callable[[], nn.Module], x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> dict[float | None, int]:
    """Peak bytes by budget; None is eager."""
    arenas: list[int] = []
    plan = schedule.plan
    monkeypatch.setattr(schedule, "plan", lambda s: arenas.append((p := plan(s)).arena_bytes.value) or p)
    peaks: dict[float | None, int] = {}
    for budget in (None, 1.0, 0.5):
        torch.manual_seed(0)
        arenas.clear()
        model = make()
        options = {"activation_memory_budget": budget, "cache": False, "fallback_to_eager": False}
        run = model if budget is None else dovetail.compile(model, options=options)

        def step(run: nn.Module = run) -> None:
            run(x).square().mean().backward()

        peaks[budget] = peak_of(step, model, arenas)
    return peaks


def test_training_step_stays_below_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    make = lambda: nn.Sequential(*[_Block() for _ in range(6)])  # noqa: E731
    peaks = _measure(make, torch.randn(1024, 64), monkeypatch)
    assert peaks[1.0] <= peaks[None]
    assert peaks[0.5] < peaks[1.0]


def test_residuals_and_batch_norms_stay_below_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that two kernels need is kept once, not as its two terms."""
    peaks = _measure(_Residual, torch.randn(8, 8, 32, 32), monkeypatch)
    assert peaks[1.0] <= peaks[None]
    assert peaks[0.5] < peaks[1.0]


def test_saved_tensors_are_kept_when_the_graph_is() -> None:
    x = torch.randn(8, 8, requires_grad=True)
    call = dovetail.compile(lambda x: torch.tanh(x @ x).exp())
    out = call(x).sum()
    first = torch.autograd.grad(out, x, retain_graph=True)
    second = torch.autograd.grad(out, x)
    torch.testing.assert_close(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, x)
