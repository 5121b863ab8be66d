"""Split long reductions with few results, so that a whole GPU works on them.

    s = prims.sum(x: f32[8192, 768] cuda, (0,))
                                        ->  p = prims.sum(prims.reshape(x, (64, 128, 768)), (1,))
                                            s = prims.sum(p: f32[64, 768], (0,))

A program of a kernel makes one result of a contiguous row, or a few dozen neighbouring ones of columns;
with fewer programs than the GPU has room for, most of it would idle. The partial results are small. On
the CPU, threads split the work inside the kernel instead.
"""
from __future__ import annotations

import math
from typing import Final, cast

from dovetail.ir.expr import ONE, Expr, as_expr
from dovetail.ir.graph import Arg, Graph, Node
from dovetail.ir.types import TensorType
from dovetail.ops.build import Build, Value, replace_nodes
from dovetail.ops.prims import PRIMS

SPLITTABLE: Final = frozenset(
    op for op, prim in PRIMS.items() if prim.kind == "reduction" and not op.startswith("prims.arg")
)
ENOUGH_COLUMNS: Final = 65536
ENOUGH_ROWS: Final = 1024
"""Partial results that keep every multiprocessor busy with several programs."""
LONGEST_ROW: Final = 16384
"""Elements that one program reduces at once; fewer take it less time than a second kernel would."""
SHORTEST: Final = 256
SHORTEST_COLUMN: Final = 64
"""Elements below which a partial reduction is not worth its result."""


def split_reductions(graph: Graph) -> Graph:
    if not any(node.op in SPLITTABLE and _parts(node) > 1 for node in graph.nodes):
        return graph

    def change(b: Build, node: Node) -> Arg:
        parts = _parts(node) if node.op in SPLITTABLE else 1
        return _split(node, parts, b) if parts > 1 else None

    return replace_nodes(graph, change)


def _operand(node: Node) -> tuple[TensorType, tuple[int, ...]]:
    return cast(Node, node.args[0]).tensor, cast("tuple[int, ...]", node.args[1])


def _place(type: TensorType, dims: tuple[int, ...]) -> int:
    """The dimension to split: the outermost in memory of those reduced, so that parts stay lines."""
    return max(dims, key=lambda d: (type.stride[d].lo, -d))


def _parts(node: Node) -> int:
    """Into how many parts; 1 is not at all."""
    type, dims = _operand(node)
    if type.device.kind == "cpu" or not dims or not all(size.is_const for size in type.shape):
        return 1
    count = math.prod(type.shape[d].value for d in dims)
    results = math.prod(size.value for d, size in enumerate(type.shape) if d not in dims)
    length = type.shape[_place(type, dims)].value
    rows = all(type.stride[d] is not ONE or d in dims for d in range(type.ndim) if type.shape[d] is not ONE)
    enough, shortest = (ENOUGH_ROWS, SHORTEST) if rows else (ENOUGH_COLUMNS, SHORTEST_COLUMN)
    if not results or count <= (LONGEST_ROW if rows else 16 * shortest):
        return 1
    wanted = min(enough // results, count // shortest, length)
    return max((k for k in range(1, wanted + 1) if length % k == 0), default=1)


def _split(node: Node, parts: int, b: Build) -> Arg:
    type, dims = _operand(node)
    place = _place(type, dims)
    shape: list[Expr] = list(type.shape)
    shape[place : place + 1] = [as_expr(parts), as_expr(type.shape[place].value // parts)]
    x = b.reshape(Value(cast(Node, node.args[0]), b), shape)
    inner = tuple(d + 1 if d >= place else d for d in dims)
    part = place - sum(d < place for d in inner)  # where the parts end up among what is left
    if node.op != "prims.welford":
        name = node.op.partition(".")[2]
        first = b.prim(name, x, inner)
        last = b.prim(name, first, (part,))
        return _typed(last, node, b)
    count = math.prod(shape[d].value for d in inner)
    mean_of_part, square_of_part = b.prims("welford", x, inner)
    mean = b.prim("sum", mean_of_part, (part,)) / float(parts)
    apart = mean_of_part - b.unsqueeze(mean, (part,))
    squares = b.prim("sum", square_of_part, (part,)) + b.prim("sum", apart * apart, (part,)) * float(count)
    return (mean.node, squares.node)


def _typed(value: Value, node: Node, b: Build) -> Node:
    """The result under the name and layout of what it replaces."""
    old = value.node
    made = Node(old.op, old.args, node.type, node.name, old.kwargs, node.loc)
    b.graph.nodes[b.graph.nodes.index(old)] = made
    return made
