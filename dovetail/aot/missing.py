"""Backward for outputs that nobody used.

    def backward(saved, tangent_0, tangent_1):         def backward(saved, tangent_0):
        a = mul(tangent_0, saved)                          a = mul(tangent_0, saved)
        b = div(tangent_1, saved)                          return (a,)
        return (add(a, b),)

An output without a gradient is not one with a gradient of zeros: where saved is 0, b would be NaN. Backward
is linear in its tangents, so what is computed from missing ones alone is nothing; eager does not compute it
either, and takes zeros for it where it meets something else. A gradient of nothing is None.

Outputs that autograd does not tie have a backward each, for which the others' tangents are always missing.
"""
from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from dovetail.aot.joint import prune
from dovetail.aot.partition import Partition, dependents, with_symbols
from dovetail.ir.graph import Arg, Graph, Node, moved_over, nodes_in, swapped
from dovetail.ir.types import contiguous_stride
from dovetail.ops.decompose import SUPPORTED


def narrowed(
    backward: Graph, tangents: Collection[Node], missing: Collection[Node], wanted: set[Arg]
) -> Graph:
    """The same outputs, computed from the other tangents only. None stands for an output that is not wanted,
    has no tangent, is an input or comes twice: who asks for those has them."""
    graph = without(backward, tangents, missing)
    left = wanted - set(backward.inputs)
    outputs: list[Arg] = []
    for before, output in zip(backward.outputs, graph.outputs):
        outputs.append(output if before in left else None)
        left.discard(before)
    return prune(replace(graph, outputs=tuple(outputs)))


def without(backward: Graph, tangents: Collection[Node], missing: Collection[Node]) -> Graph:
    """The same outputs, computed from the other tangents only; None for those that nothing is left of."""
    nodes: list[Node] = []
    tied, nothing = set(tangents), set(missing)
    """What depends on any tangent, and on missing ones alone."""
    new: dict[Node, Node] = {}
    for node in backward.nodes:
        given = [operand for operand in node.operands if operand in tied]
        rest = [operand for operand in node.operands if operand not in nothing]
        if node.op == "prims.add" and len(node.operands) == 2 and [x.type for x in rest] == [node.type]:
            new[node] = new.get(rest[0], rest[0])  # also a gradient that is zero whatever comes
            tied.update((node,) if rest[0] in tied else ())
            continue
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
    outputs = swapped([None if output in nothing else output for output in backward.outputs], new)
    inputs = tuple(node for node in backward.inputs if node not in missing)
    return replace(backward, inputs=inputs, nodes=tuple(nodes), outputs=outputs)


def by_group(whole: Partition) -> list[Partition]:
    """A backward for each group of outputs, with what it needs saved."""
    signature, backward = whole.signature, whole.backward
    if backward is None or len(signature.groups) < 2:
        return [whole]
    tangents = backward.inputs[len(whole.saved) :]
    found: list[Partition] = []
    tied = dependents(backward, tangents)
    reached_from = dict(zip(signature.tangents, signature.reached))
    for group in signature.groups:
        reached = frozenset[int]().union(*(reached_from[i] for i in group))
        missing = [node for node, i in zip(tangents, whole.tangents) if i not in group]
        pairs = zip(backward.outputs, signature.grad_inputs)  # a gradient of nothing but zeros is not tied
        outputs = tuple(output if output in tied or i in reached else None for output, i in pairs)
        graph = without(replace(backward, outputs=outputs), tangents, missing)
        kept = [n for n, output in enumerate(graph.outputs) if output is not None]
        graph = prune(replace(graph, outputs=tuple(graph.outputs[n] for n in kept)))
        used = {*nodes_in(graph.outputs), *(operand for node in graph.nodes for operand in node.operands)}
        own = [entry for entry in zip(backward.inputs, whole.saved) if entry[0] in used]
        left = [i for i in whole.tangents if i in group]
        inputs = (*(node for node, _ in own), *graph.inputs[len(graph.inputs) - len(left) :])
        grads = tuple(signature.grad_inputs[n] for n in kept)
        ways = tuple(reached_from[i] for i in group)
        part = replace(signature, tangents=group, grad_inputs=grads, reached=ways)
        saved = tuple(entry for _, entry in own)
        graph, saved = with_symbols(replace(graph, inputs=inputs), saved)
        found.append(replace(whole, backward=graph, signature=part, saved=saved, tangents=tuple(left)))
    return found


def _zeros_like(node: Node) -> Node:
    kind = node.tensor
    zeros = replace(kind, stride=contiguous_stride(kind.shape))
    name = f"{node.name}_missing"
    if kind.dtype not in SUPPORTED:
        where = (("dtype", kind.dtype), ("device", kind.device))
        return Node("aten.zeros.default", (kind.shape,), zeros, name, where, node.loc)
    return Node("prims.full", (kind.shape, 0, kind.dtype, kind.device), zeros, name, loc=node.loc)
