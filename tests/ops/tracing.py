"""One torch call as a graph, and what Dovetail makes of it, without code generation.

    graph, inputs = traced(torch.add, x, y)      ATen graph of the call, and its tensors
    check_call(torch.add, x, y)                  decompose, clean, lower, interpret; compare with eager
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule
from torch.utils._pytree import tree_flatten, tree_unflatten

from dovetail.aot.joint import trace_joint
from dovetail.ir.graph import Graph
from dovetail.ir.loop import Loops
from dovetail.lower import lower
from dovetail.ops import decompose
from dovetail.passes import optimize
from tests.lower.interpret import run_loops


def traced(op: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Graph, list[Any], Any]:
    """(graph, its inputs, joint)"""
    leaves, spec = tree_flatten((args, kwargs))
    fx = FxGraph()
    tensors: list[Any] = []
    placed: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            placed.append(fx.placeholder(f"x{len(tensors)}"))
            tensors.append(leaf)
        else:
            placed.append(leaf)
    fx_args, fx_kwargs = tree_unflatten(placed, spec)
    fx.output(fx.call_function(op, tuple(fx_args), fx_kwargs))
    with torch.no_grad():
        joint = trace_joint(GraphModule(torch.nn.Module(), fx), tensors)
    return joint.graph, [*tensors, *joint.constants], joint


def loops_of(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Loops:
    return lower(optimize(decompose(traced(op, *args, **kwargs)[0])))


def strides(x: torch.Tensor) -> list[int]:
    """Those that matter."""
    return [step for step, size in zip(x.stride(), x.shape) if size > 1]


def is_dense(x: torch.Tensor) -> bool:
    """Fills its memory; a view with gaps may come back compact where nobody shares it."""
    return torch.empty_like(x).stride() == x.stride()


def check_graph(graph: Graph, inputs: list[Any], **tolerance: Any) -> None:
    """The lowered graph computes what the ATen graph computes."""
    wanted = run_loops(lower(graph), inputs)
    got = run_loops(lower(optimize(decompose(graph))), inputs)
    for a, b in zip(got, wanted, strict=True):
        if isinstance(b, torch.Tensor) and is_dense(b):
            assert strides(a) == strides(b)
        torch.testing.assert_close(a, b, equal_nan=True, **tolerance)


def check_call(op: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    graph, inputs, _ = traced(op, *args, **kwargs)
    check_graph(graph, inputs)
