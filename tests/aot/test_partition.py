"""What is saved between forward and backward."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

import dovetail
from dovetail import aot, ops, passes
from dovetail.util.mincut import INFINITE, Network
from tests.aot.running import as_module, check


def _parts(f: Any, *examples: torch.Tensor, budget: float = 1.0) -> aot.Partition:
    joint = aot.trace_joint(as_module(f, len(examples)), examples)
    return aot.partition(passes.optimize(ops.decompose(joint.graph)), joint.signature, budget)


def _saved_bytes(parts: aot.Partition) -> int:
    return sum(s.bytes for s in parts.saved if s.source == "output")


def test_cut_is_the_cheapest() -> None:
    network = Network()
    for start, end, capacity in [
        ("s", "a", INFINITE),
        ("a", "b", 5),
        ("a", "c", 4),
        ("b", "t", 1),
        ("c", "t", 9),
    ]:
        network.edge(start, end, capacity)
    assert network.cut("s", "t") == {"s", "a", "b"}


def test_pointwise_chain_saves_only_its_input() -> None:
    parts = _parts(lambda x: x.sin().exp().tanh() * x, torch.randn(64, requires_grad=True))
    assert [s.source for s in parts.saved] == ["input"]


def test_matmul_is_not_recomputed() -> None:
    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    parts = _parts(lambda x, w: F.gelu(x @ w) @ w, x, w)
    assert sum("mm" in n.op for n in parts.forward.nodes) == 2
    assert sum("mm" in n.op for n in parts.backward.nodes) == 4
    assert _saved_bytes(parts) == 8 * 8 * 4


def test_what_a_library_call_computes_is_not_recomputed() -> None:
    parts = _parts(lambda x: (x * 1j).sqrt().real, torch.randn(64, requires_grad=True))
    assert any("aten.sqrt" in n.op for n in parts.forward.nodes)
    assert not any("sqrt" in n.op for n in parts.backward.nodes)


def test_a_view_is_saved_as_its_base() -> None:
    f = lambda x, w: (x @ w).view(4, 16).t().unsqueeze(0).sin() * 2  # noqa: E731
    make = lambda: [torch.randn(8, 8, requires_grad=True) for _ in range(2)]  # noqa: E731
    parts = _parts(f, *make())
    assert _saved_bytes(parts) == 8 * 8 * 4 and sum("mm" in n.op for n in parts.backward.nodes) == 2
    check(f, make)


def test_dropout_mask_is_saved_not_drawn_again() -> None:
    parts = _parts(lambda x: F.dropout(x.sin(), 0.5).exp(), torch.randn(64, requires_grad=True))
    assert not any("bernoulli" in n.op for n in parts.backward.nodes)


def test_unneeded_gradients_are_not_computed() -> None:
    x, w = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
    parts = _parts(lambda x, w: x @ w, x, w)
    assert sum("mm" in n.op for n in parts.backward.nodes) == 1


def _deep(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = torch.tanh(x @ w)
    return x


def test_budget_saves_less() -> None:
    x, w = torch.randn(32, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    full, half, none = (_saved_bytes(_parts(_deep, x, w, budget=b)) for b in (1.0, 0.5, 0.0))
    assert half <= full / 2 and none == 0


def test_budget_keeps_results() -> None:
    def make() -> list[torch.Tensor]:
        return [torch.randn(4, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True)]

    for budget in (0.0, 0.5, 0.75):
        check(_deep, make, budget=budget)
        check(lambda x, w: F.softmax(F.dropout(x, 0.3) @ w, -1).exp(), make, budget=budget)


def test_never_more_than_eager_saves() -> None:
    """Eager's saved tensors, counted by hooks, that are neither inputs nor views of one another."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + F.layer_norm(F.gelu(x @ w), (16,))
        return F.softmax(x, -1)

    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    storages: dict[int, Any] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: storages.setdefault(t.data_ptr(), t), lambda t: t
    ):
        program(x, w)
    eager = sum(t.nbytes for t in storages.values() if t.data_ptr() not in (x.data_ptr(), w.data_ptr()))
    assert _saved_bytes(_parts(program, x, w)) <= eager


def test_a_residual_stream_is_saved_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed from the half-sized values that were added to it, its end would need them all."""

    def stream(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(9):
            x = x + (F.layer_norm(x, (32,)).bfloat16() @ w).float()
        return x.sin()

    x, w = torch.randn(64, 32, requires_grad=True), torch.randn(32, 32).bfloat16().requires_grad_()
    check(stream, lambda: [torch.randn(64, 32, requires_grad=True), torch.randn(32, 32).bfloat16()])
    counts = []
    for most in (3, 100):
        monkeypatch.setattr(sys.modules["dovetail.aot.partition"], "MOST_SOURCES", most)
        saved = [entry for entry in _parts(stream, x, w).saved if entry.source == "output"]
        counts.append(sum(entry.bytes == x.numel() * 4 for entry in saved))
    assert counts[0] > counts[1] + 1


def test_of_a_checkpoint_only_its_inputs_are_saved() -> None:
    """Both layers are computed again, each from what it was given."""
    layers = torch.nn.ModuleList(
        torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)) for _ in range(3)
    )

    def run(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = x + torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return x.square().sum()

    x = torch.randn(16, 8, requires_grad=True)
    told = dovetail.explain(run)(x)
    assert told.partitions[0].bytes <= 3 * x.nbytes
    compiled = dovetail.compile(run)
    for ours, theirs in zip(*(torch.autograd.grad(f(x), [x, *layers.parameters()]) for f in (compiled, run))):
        torch.testing.assert_close(ours, theirs)
