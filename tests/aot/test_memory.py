"""Peak memory of a training step, compiled against eager: live tensor bytes as the allocator reports them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

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


def test_a_checkpoint_keeps_only_what_enters_it() -> None:
    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(6))

    def block(x: torch.Tensor, i: int) -> torch.Tensor:
        return torch.tanh(layers[i + 1](torch.relu(layers[i](x)))).softmax(-1)

    def program(x: torch.Tensor) -> torch.Tensor:
        for i in (0, 2, 4):
            x = checkpoint(block, x, i, use_reentrant=False)
        return x.sum()

    x = torch.randn(16, 8, requires_grad=True)
    loss = dovetail.compile(program, fullgraph=True)(x)
    saved = [t.shape for t in loss.grad_fn.saved_tensors if t.shape[0] == 16]  # type: ignore[union-attr]
    assert len(saved) == 3  # x and the values between the blocks
    wanted = torch.autograd.grad(program(x), [x, *layers.parameters()])
    torch.testing.assert_close(torch.autograd.grad(loss, [x, *layers.parameters()]), wanted)


def test_a_checkpoint_that_counts_counts_twice_as_in_eager() -> None:
    def train(compile: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh())
        program = lambda x: checkpoint(model, x, use_reentrant=False).sum()  # noqa: E731
        (dovetail.compile(program) if compile else program)(torch.randn(3, 4)).backward()
        return dict(model.state_dict())

    torch.testing.assert_close(train(True), train(False))
