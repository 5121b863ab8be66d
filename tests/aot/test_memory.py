"""Peak memory of a training step, compiled against eager: live tensor bytes as the allocator reports them."""

from __future__ import annotations

import pytest
import torch

import dovetail
from tests.aot.training import BUDGETS, TRAININGS, peak_bytes


@pytest.mark.parametrize("name", TRAININGS)
def test_trainings_stay_below_eager(name: str) -> None:
    if name == "bert":
        pytest.importorskip("transformers")
    eager, full, half = (peak_bytes(name, budget) for budget in (None, *BUDGETS))
    assert half < full <= eager


def test_saved_tensors_are_kept_when_the_graph_is() -> None:
    x = torch.randn(8, 8, requires_grad=True)
    call = dovetail.compile(lambda x: torch.tanh(x @ x).exp())
    out = call(x).sum()
    first = torch.autograd.grad(out, x, retain_graph=True)
    second = torch.autograd.grad(out, x)
    torch.testing.assert_close(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, x)
