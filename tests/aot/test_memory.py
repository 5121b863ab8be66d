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


def _peak(step: Callable[[], None]) -> int:
    step()
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        highest = max(highest, total)
    return highest


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


def test_training_step_stays_below_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    arenas: list[int] = []
    plan = schedule.plan
    monkeypatch.setattr(schedule, "plan", lambda s: arenas.append((p := plan(s)).arena_bytes.value) or p)
    x = torch.randn(1024, 64)
    peaks = {}
    for budget in (None, 1.0, 0.5):
        torch.manual_seed(0)
        arenas.clear()
        model = nn.Sequential(*[_Block() for _ in range(6)])
        options = {"activation_memory_budget": budget, "cache": False, "fallback_to_eager": False}
        run = model if budget is None else dovetail.compile(model, options=options)

        def step(run: nn.Module = run, model: nn.Module = model) -> None:
            model.zero_grad(set_to_none=True)
            run(x).square().mean().backward()

        # temporaries come from an arena that the allocator does not see
        peaks[budget] = _peak(step) + max(arenas, default=0)
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
