"""Rows times several weights in one kernel.

    q = sum(wq * x, (1,)); k = sum(wk * x, (1,))     ->     s = sum(cat(wq, wk) * x, (1,))
                                                            q = s[:4096]; k = s[4096:]

Each product alone is over before the GPU has filled up; together they are one long read. The weights are
not joined in memory: each row of the reduction reads its own.
"""
from __future__ import annotations

from typing import cast

from dovetail.ir.expr import ZERO, add
from dovetail.ir.graph import INPUT, Graph, Node
from dovetail.ops.build import Build, Value, replace_nodes


def join_rows(graph: Graph) -> Graph:
    if not any(node.op == "prims.sum" and node.tensor.device.kind == "cuda" for node in graph.nodes):
        return graph
    sets: dict[tuple[object, ...], list[Node]] = {}
    for node in graph.nodes:
        if (key := _row_of(node)) is not None:
            sets.setdefault(key, []).append(node)
    several = [group for group in sets.values() if len({node.tensor.shape for node in group}) > 1]
    joined = {group[0].name: group for group in several}
    parts: dict[str, Node] = {}

    def change(b: Build, node: Node) -> Node | None:
        if node.name in joined:
            parts.update(_join(b, node, joined[node.name]))
        return parts.get(node.name)

    return replace_nodes(graph, change) if joined else graph


def _weight_and_row(node: Node) -> tuple[Node, Node] | None:
    """Of sum(weight * row, (1,)): the weight as an input of the graph, and the row before its broadcast."""
    if node.op != "prims.sum" or node.args[1] != (1,):
        return None
    product = cast(Node, node.args[0])
    if product.op != "prims.mul" or not all(isinstance(arg, Node) for arg in product.args):
        return None
    weight, row = cast("tuple[Node, Node]", product.args)
    if weight.op == "prims.convert":
        weight = cast(Node, weight.args[0])
    spread = row.op == "prims.broadcast" and row.args[2] == (1,)
    return (weight, cast(Node, row.args[0])) if weight.op == INPUT and spread else None


def _row_of(node: Node) -> tuple[object, ...] | None:
    """What products that can be joined have in common."""
    found = _weight_and_row(node)
    if found is None or node.tensor.device.kind != "cuda":
        return None
    weight, row = found
    known = all(size.is_const for size in weight.tensor.shape) and weight.tensor.is_contiguous
    return (row, weight.tensor.dtype, node.tensor.dtype) if known else None


def _join(b: Build, first: Node, group: list[Node]) -> dict[str, Node]:
    """The joint product, at the place of the first; the value of each by its name."""
    pairs = [_weight_and_row(node) for node in group]
    weights = [Value(weight, b) for weight, _ in cast("list[tuple[Node, Node]]", pairs)]
    row = Value(cast(Node, cast(Node, cast(Node, first.args[0]).args[1]).args[0]), b)
    matrix = b.cat(weights, 0).to(first.tensor.dtype)
    total = b.reduce("sum", matrix * b.broadcast(row, matrix.shape, (1,)), (1,))
    found: dict[str, Node] = {}
    start = ZERO
    for node in group:
        stop = add(start, node.tensor.shape[0])
        args, name = (total.node, 0, start, stop, 1), f"{node.name}_part"
        found[node.name] = b.graph.call("prims.slice", args, node.type, name=name, loc=node.loc)
        start = stop
    return found
