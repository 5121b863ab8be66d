"""Backward for outputs that nobody used.

    def backward(saved, tangent_0, tangent_1):         drop_tangents(backward, {tangent_1}):
        a = mul(tangent_0, saved)                          a = mul(tangent_0, saved)
        b = div(tangent_1, saved)                          b_missing = full(..., 0)
        return (add(a, b),)                                return (add(a, b_missing),)

An output without a gradient is not one with a gradient of zeros: where saved is 0, b would be NaN. Backward
is linear in its tangents, so what is computed from missing ones alone is nothing; eager does not compute it
either, and takes zeros for it where it meets something else.
"""
from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from dovetail.aot.joint import prune
from dovetail.ir.graph import Arg, Graph, Node, map_arg
from dovetail.ir.types import TensorType, contiguous_stride


def drop_tangents(backward: Graph, tangents: Collection[Node], missing: Collection[Node]) -> Graph:
    """The same inputs and outputs, computed from the other tangents only."""
    return _Dropper(tangents, missing).run(backward)


class _Dropper:
    def __init__(self, tangents: Collection[Node], missing: Collection[Node]) -> None:
        self.nodes: list[Node] = []
        self.tied, self.nothing = set(tangents), set(missing)
        """What depends on any tangent, and on missing ones alone."""
        self.new: dict[Node, Node] = {}

    def run(self, graph: Graph) -> Graph:
        for node in graph.nodes:
            tied = [operand for operand in node.operands if operand in self.tied]
            if tied:
                self.tied.add(node)
            if tied and self.nothing.issuperset(tied):
                self.nothing.add(node)
                continue
            self.nodes.append(self.rebuilt(node))
        outputs = tuple(map_arg(output, self.value) for output in graph.outputs)
        return prune(replace(graph, nodes=tuple(self.nodes), outputs=outputs))

    def rebuilt(self, node: Node) -> Node:
        if all(operand not in self.nothing and operand not in self.new for operand in node.operands):
            return node
        args = tuple(map_arg(arg, self.value) for arg in node.args)
        kwargs = tuple((name, map_arg(arg, self.value)) for name, arg in node.kwargs)
        made = self.new[node] = replace(node, args=args, kwargs=kwargs)
        return made

    def value(self, node: Node) -> Arg:
        if node in self.nothing and node not in self.new:
            kind = node.tensor
            zeros = TensorType(kind.shape, contiguous_stride(kind.shape), kind.dtype, kind.device)
            args: tuple[Arg, ...] = (kind.shape, 0, kind.dtype, kind.device)
            made = self.new[node] = Node("prims.full", args, zeros, f"{node.name}_missing", loc=node.loc)
            self.nodes.append(made)
        return self.new.get(node, node)
