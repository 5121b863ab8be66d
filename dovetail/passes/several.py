"""One pass over a graph in which a node may become several.

    Graph, change -> Graph;  change(b, node) appends what the node becomes and returns its value, or None

A node with several results may become a tuple of values.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, cast

from dovetail.ir.graph import GET, Arg, Graph, GraphBuilder, Node, moved_over, swapped
from dovetail.ops.build import Build

Change: TypeAlias = "Callable[[Build, Node], Arg]"


def replace_nodes(graph: Graph, change: Change) -> Graph:
    """`change` gets each node over its new operands; one for which it returns None stays."""
    b = Build(GraphBuilder.after(graph))
    env: dict[Node, Arg] = {node: node for node in graph.inputs}
    for node in graph.nodes:
        source = env[cast(Node, node.args[0])] if node.op == GET else None
        if isinstance(source, tuple):
            env[node] = source[cast(int, node.args[1])]
            continue
        moved = moved_over(node, env)
        b.begin(moved)
        value = change(b, moved)
        if value is None:
            b.graph.nodes.append(moved)
            value = moved
        env[node] = value
    return b.graph.finish(swapped(graph.outputs, env))
