"""Run a Graph with torch's own kernels, one node at a time.

    run_graph(graph, [x, w]) -> [y]

The meaning of a graph: backend="aot_eager" runs it like this, and tests compare with it. Views copy
where the memory does not allow a view, since a functional graph has no memory.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from dovetail.fake import to_torch_device, to_torch_dtype
from dovetail.ir.expr import Expr, evaluate
from dovetail.ir.graph import GET, Arg, Graph, Node, nodes_in
from dovetail.ir.types import Device, DType, ScalarType, TensorType
from dovetail.util.library import MEANT, find_op, restride


def as_strided(x: torch.Tensor, size: Any, stride: Any, offset: int | None = None, root: Any = None) -> Any:
    """Graphs count the offset from the operand's first element, or that of what it is a view of."""
    return x.as_strided(size, stride, (x if root is None else root).storage_offset() + (offset or 0))


CALLS: Final[dict[str, Callable[..., Any]]] = {
    GET: lambda value, index: value[index],
    **dict.fromkeys(("aten.view.default", "aten._unsafe_view.default"), torch.reshape),
    "aten.as_strided.default": as_strided,
    **MEANT,
    "aten._conj.default": lambda x: x.conj().resolve_conj(),
    "aten._neg_view.default": torch.neg,
    "prims.full": lambda shape, value, dtype, device: torch.full(shape, value, dtype=dtype, device=device),
}
"""Ops whose graph meaning is not the dispatcher's call of that name."""


def _torch_value(arg: Arg, env: Mapping[Node, Any], symbols: Mapping[str, int]) -> Any:
    if isinstance(arg, Node):
        return env[arg]
    if isinstance(arg, tuple):
        return [_torch_value(item, env, symbols) for item in arg]
    if isinstance(arg, Expr):
        return evaluate(arg, symbols)
    if isinstance(arg, DType):
        return to_torch_dtype(arg)
    if isinstance(arg, Device):
        return to_torch_device(arg)
    if isinstance(arg, str) and arg.startswith("torch."):
        return getattr(torch, arg[len("torch.") :], arg)  # or the name of a function, for its errors
    return arg


def bind_symbols(graph: Graph, inputs: Sequence[Any]) -> dict[str, int]:
    """The value of every symbol that some input's type names."""
    found: dict[str, int] = {}
    for node, value in zip(graph.inputs, inputs):
        if isinstance(node.type, TensorType) and not value.is_mkldnn:
            pairs = zip((*node.type.shape, *node.type.stride), (*value.shape, *value.stride()))
            found.update((expr.name, int(size)) for expr, size in pairs if expr.op == "sym")
        elif isinstance(node.type, ScalarType) and node.type.expr is not None and node.type.expr.op == "sym":
            found[node.type.expr.name] = int(value)
    return found


def run_graph(graph: Graph, inputs: Sequence[Any]) -> list[Any]:
    """Outputs in order, each with memory of its own; a value is dropped after its last use."""
    env: dict[Node, Any] = dict(zip(graph.inputs, inputs))
    symbols = bind_symbols(graph, inputs)
    last = {used: node for node in graph.nodes for used in (node, *node.operands)}
    kept = set(nodes_in(graph.outputs))
    for node in graph.nodes:
        args = [_torch_value(arg, env, symbols) for arg in node.args]
        kwargs = {name: _torch_value(value, env, symbols) for name, value in node.kwargs}
        env[node] = (CALLS.get(node.op) or find_op(node.op))(*args, **kwargs)
        for dead in [used for used in {node, *node.operands} - kept if last[used] is node]:
            del env[dead]
    outputs = [_torch_value(output, env, symbols) for output in graph.outputs]
    return _own([_laid_out(x, node, symbols) for x, node in zip(outputs, graph.outputs)], inputs)


def _laid_out(value: Any, node: Arg, symbols: Mapping[str, int]) -> Any:
    """The value with the strides of the node's type, unless its elements overlap there."""
    if not isinstance(node, Node) or not isinstance(node.type, TensorType) or value.is_mkldnn:
        return value
    stride = tuple(evaluate(expr, symbols) for expr in node.type.stride)
    return value if value.stride() == stride or 0 in stride else restride(value, stride)


def _own(outputs: list[Any], inputs: Sequence[Any]) -> list[Any]:
    """Outputs that share memory with an input or an earlier output are copied."""
    taken = {_memory(x) for x in inputs if isinstance(x, torch.Tensor) and not x.is_mkldnn}
    made: list[Any] = []
    for output in outputs:
        if isinstance(output, torch.Tensor) and not output.is_mkldnn:
            if _memory(output) in taken:
                output = output.clone()
            taken.add(_memory(output))
        made.append(output)
    return made


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]
