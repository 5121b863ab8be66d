"""One pass over a graph in which a node may become several.

    Graph, change -> Graph;  change(b, node) appends what the node becomes and returns its value, or None

A node with several results may become a tuple of values.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, cast

from dovetail.ir.graph import GET, Arg, Graph, GraphBuilder, Node, map_arg
from dovetail.ops.build import Build

Change: TypeAlias = "Callable[[Build, Node], Arg]"


def replace_nodes(graph: Graph, change: Change) -> Graph:
    """`change` gets each node over its new operands; one for which it returns None stays."""
    builder = GraphBuilder(graph.name, list(graph.inputs))
    for node in (*graph.inputs, *graph.nodes):
        builder.unique(node.name)
    b = Build(builder)
    env: dict[Node, Arg] = {node: node for node in graph.inputs}
    for node in graph.nodes:
        source = env[cast(Node, node.args[0])] if node.op == GET else None
        if isinstance(source, tuple):
            env[node] = source[cast(int, node.args[1])]
            continue
        args = tuple(map_arg(arg, lambda n: env[n]) for arg in node.args)
        kwargs = tuple((key, map_arg(value, lambda n: env[n])) for key, value in node.kwargs)
        moved = Node(node.op, args, node.type, node.name, kwargs, node.loc)
        b.begin(moved)
        value = change(b, moved)
        if value is None:
            builder.nodes.append(moved)
            value = moved
        env[node] = value
    return builder.finish(tuple(map_arg(out, lambda n: env[n]) for out in graph.outputs))
