"""Backward for outputs that nobody used.

    def backward(saved, tangent_0, tangent_1):         def backward(saved, tangent_0):
        a = mul(tangent_0, saved)                          a = mul(tangent_0, saved)
        b = div(tangent_1, saved)                          b_missing = full(..., 0)
        return (add(a, b),)                                return (add(a, b_missing),)

An output without a gradient is not one with a gradient of zeros: where saved is 0, b would be NaN. Backward
is linear in its tangents, so what is computed from missing ones alone is nothing; eager does not compute it
either, and takes zeros for it where it meets something else. A gradient of nothing is None.
"""
from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from dovetail.aot.joint import prune
from dovetail.ir.graph import Arg, Graph, Node, moved_over
from dovetail.ir.types import contiguous_stride
from dovetail.ops.decompose import SUPPORTED


def narrowed(
    backward: Graph, tangents: Collection[Node], missing: Collection[Node], wanted: set[Arg]
) -> Graph:
    """The same outputs, computed from the other tangents only. None stands for an output that is not wanted,
    has no tangent, is an input or comes twice: who asks for those has them."""
    nodes: list[Node] = []
    tied, nothing = set(tangents), set(missing)
    """What depends on any tangent, and on missing ones alone."""
    new: dict[Node, Node] = {}
    for node in backward.nodes:
        given = [operand for operand in node.operands if operand in tied]
        if given:
            tied.add(node)
        if given and nothing.issuperset(given):
            nothing.add(node)
            continue
        for operand in given:
            if operand in nothing and operand not in new:
                new[operand] = _zeros_like(operand)
                nodes.append(new[operand])
        moved = moved_over(node, new)
        if moved is not node:
            new[node] = moved
        nodes.append(moved)
    left = wanted - nothing - set(backward.inputs)
    outputs: list[Arg] = []
    for output in backward.outputs:
        outputs.append(new.get(output, output) if output in left else None)  # type: ignore[arg-type, call-overload]
        left.discard(output)
    inputs = tuple(node for node in backward.inputs if node not in missing)
    return prune(replace(backward, inputs=inputs, nodes=tuple(nodes), outputs=tuple(outputs)))


def _zeros_like(node: Node) -> Node:
    kind = node.tensor
    zeros = replace(kind, stride=contiguous_stride(kind.shape))
    name = f"{node.name}_missing"
    if kind.dtype not in SUPPORTED:
        where = (("dtype", kind.dtype), ("device", kind.device))
        return Node("aten.zeros.default", (kind.shape,), zeros, name, where, node.loc)
    return Node("prims.full", (kind.shape, 0, kind.dtype, kind.device), zeros, name, loc=node.loc)
