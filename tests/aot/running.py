"""Run a function through trace, partition, the graph interpreter and bind, and compare with eager.

check(lambda x: x.sin(), lambda: [torch.randn(3, requires_grad=True)])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from dovetail import aot
from dovetail.ir.verify import check_graph


def as_module(f: Callable[..., Any], count: int) -> GraphModule:
    """A captured program with one node: the call of f."""
    graph = Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(count)]
    graph.output(graph.call_function(f, tuple(inputs)))
    return GraphModule(torch.nn.Module(), graph)


def compiled(f: Callable[..., Any], examples: Sequence[Any], budget: float = 1.0) -> aot.Bound:
    joint = aot.trace_joint(as_module(f, len(examples)), examples)
    check_graph(joint.graph, "joint")
    parts = aot.partition(joint.graph, joint.signature, budget)
    check_graph(parts.forward, "forward")
    run = lambda graph: lambda *inputs: aot.run_graph(graph, inputs)  # noqa: E731
    if parts.backward is not None:
        check_graph(parts.backward, "backward")
    return aot.bind(run(parts.forward), run, parts, joint)


def flat(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (list, tuple)) else [results]


def sharing(tensors: Sequence[Any]) -> list[int]:
    """For each tensor, the first one that has the same memory."""
    memory = [t.untyped_storage()._cdata if isinstance(t, torch.Tensor) else id(t) for t in tensors]
    return [memory.index(m) for m in memory]


def _loss(results: Sequence[Any]) -> Any:
    total: Any = 0.0
    for i, r in enumerate(results):
        if isinstance(r, torch.Tensor) and r.requires_grad:
            weight = torch.linspace(0.5, 1.5, r.numel(), dtype=torch.float64).reshape(r.shape).to(r.dtype)
            total = total + ((r * weight).sum() * (i + 1)).abs()
    return total


def same(a: Any, b: Any, what: str) -> None:
    if isinstance(b, torch.Tensor):
        torch.testing.assert_close(a, b, equal_nan=True, msg=lambda m: f"{what}: {m}")
        assert a.stride() == b.stride() or b.numel() < 2, f"{what}: strides {a.stride()}, eager {b.stride()}"
        assert a.requires_grad == b.requires_grad, f"{what}: requires_grad"
    else:
        assert a == b, what


def run(f: Callable[..., Any], make: Callable[[], list[Any]], wrap: bool, budget: float) -> list[Any]:
    """Everything a caller can see: outputs, inputs after, sharing, gradients."""
    torch.manual_seed(0)
    leaves = make()
    inputs = [x * 1 if isinstance(x, torch.Tensor) and x.requires_grad and x.dim() else x for x in leaves]
    call = f
    if wrap:
        torch.manual_seed(0)
        examples = [
            x * 1 if isinstance(x, torch.Tensor) and x.requires_grad and x.dim() else x for x in make()
        ]
        call = compiled(f, examples, budget)
    torch.manual_seed(1)
    results = flat(call(*inputs))
    wanted = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    loss = _loss([*results, *inputs])
    grads: Sequence[Any] = []
    if isinstance(loss, torch.Tensor) and wanted:
        grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [results, inputs, sharing([*results, *inputs]), list(grads)]


def check(
    f: Callable[..., Any], make: Callable[[], list[Any]], budget: float = 1.0, share: bool = True
) -> None:
    try:
        expected = run(f, make, False, budget)
    except RuntimeError as refused:
        eager_error = refused
    else:
        got = run(f, make, True, budget)
        assert len(got[0]) == len(expected[0])
        for kind, ours, theirs in zip(("output", "input"), got[:2], expected[:2]):
            for i, (a, b) in enumerate(zip(ours, theirs)):
                same(a, b, f"{kind} {i}")
        if share:
            assert got[2] == expected[2], f"sharing {got[2]}, eager {expected[2]}"
        for i, (a, b) in enumerate(zip(got[3], expected[3])):
            assert (a is None) == (b is None), f"gradient {i} is {a}, eager {b}"
            if b is not None:
                torch.testing.assert_close(a, b, equal_nan=True, msg=lambda m, i=i: f"gradient {i}: {m}")
        return
    try:
        run(f, make, True, budget)
    except Exception:  # noqa: BLE001  eager refuses, so any refusal will do
        return
    raise AssertionError(f"eager raises {eager_error}, and we do not")
