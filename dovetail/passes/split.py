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
NOTHING: Final = {"prims.sum": 0, "prims.prod": 1}
"""What rows are made longer with, where their length is not a multiple of the number of parts."""
UNEVEN: Final = 4
"""How many times too few parts are taken rather than that."""
MOST_ROWS: Final = 65536
LONG_ROW: Final = 1024
"""Rows that long, and no more of them, are parts as they are: softmaxes and norms fuse with those."""
SHORTEST: Final = 256
SHORTEST_COLUMN: Final = 64
"""Elements below which a partial reduction is not worth its result."""


def split_reductions(graph: Graph) -> Graph:
    if not any(_parts(node) for node in graph.nodes):
        return graph

    def change(b: Build, node: Node) -> Arg:
        parts = _parts(node)
        return _split(node, parts, b) if parts else None

    return replace_nodes(graph, change)


def _operand(node: Node) -> tuple[TensorType, tuple[int, ...]]:
    return cast(Node, node.args[0]).tensor, cast("tuple[int, ...]", node.args[1])


def _parts(node: Node) -> dict[int, int]:
    """Into how many parts each dimension is cut, the outermost in memory first, so that parts stay lines."""
    if node.op not in SPLITTABLE:
        return {}
    type, dims = _operand(node)
    if type.device.kind == "cpu" or not dims or not all(size.is_const for size in type.shape):
        return {}
    count = math.prod(type.shape[d].value for d in dims)
    results = math.prod(size.value for d, size in enumerate(type.shape) if d not in dims)
    rows = all(type.stride[d] is not ONE or d in dims for d in range(type.ndim) if type.shape[d] is not ONE)
    enough, shortest = (ENOUGH_ROWS, SHORTEST) if rows else (ENOUGH_COLUMNS, SHORTEST_COLUMN)
    if not results or count <= (LONGEST_ROW if rows else 16 * shortest):
        return {}
    wanted = min(enough // results, count // shortest)
    found: dict[int, int] = {}
    for d in sorted(dims, key=lambda d: (-type.stride[d].lo, d)):
        length = type.shape[d].value
        whole = length * math.prod(found.values())
        if rows and wanted < length and whole <= MOST_ROWS and count >= whole * LONG_ROW:
            return {**found, d: length}
        parts = next(k for k in range(max(min(wanted, length), 1), 0, -1) if length % k == 0)
        if parts * UNEVEN < min(wanted, length) and node.op in NOTHING:
            parts = wanted
        if parts > 1:
            found[d] = parts
        if parts != length:
            break
        wanted //= parts
    return found


def _split(node: Node, parts: dict[int, int], b: Build) -> Arg:
    type, dims = _operand(node)
    x = Value(cast(Node, node.args[0]), b)
    shape: list[Expr] = []
    inner: list[int] = []
    cut: list[int] = []
    for d, size in enumerate(type.shape):
        if d in parts:
            each = -(-size.value // parts[d])
            if rest := each * parts[d] - size.value:
                x = b.pad(x, d, 0, rest, NOTHING[node.op])
            cut.append(len(shape))
            shape.append(as_expr(parts[d]))
            size = as_expr(each)
        if d in dims:
            inner.append(len(shape))
        shape.append(size)
    order = [*cut, *(d for d in range(len(shape)) if d not in cut)]  # neighbouring results stay neighbours
    x, left = b.permute(b.reshape(x, shape), order), tuple(range(len(cut)))
    inner = [order.index(d) for d in inner]
    if node.op != "prims.welford":
        name = node.op.partition(".")[2]
        made = b.prim(name, b.prim(name, x, tuple(inner)), left)
        return b.graph.settle(made.node, node, node.type, node.name)
    count = math.prod(x.shape[d].value for d in inner)
    mean_of_part, square_of_part = b.prims("welford", x, tuple(inner))
    mean = b.prim("sum", mean_of_part, left) / float(math.prod(parts.values()))
    apart = mean_of_part - b.unsqueeze(mean, left)
    squares = b.prim("sum", square_of_part, left) + b.prim("sum", apart * apart, left) * float(count)
    return (mean.node, squares.node)
