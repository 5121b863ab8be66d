"""Matrix products as sums of our own, which fuse with what is around them.

    y = aten.mm(a, b)     ->  s = prims.sum(a[:, None, :] * b.t()[None, :, :], (2,));  y = convert(s, bf16)

Only where it pays. On a CPU, that is where a product is computed before a library has been called; on a GPU,
`choose(node)` says into how many parts the sum is to be split, whose sums a second kernel adds up; 0 leaves
the library's call.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, cast

from dovetail.ir.expr import ONE, ZERO, Expr, add, as_expr
from dovetail.ir.graph import INPUT, Arg, Graph, GraphBuilder, Node
from dovetail.ir.types import F32, MATRIX_STEP, TensorType
from dovetail.ops.build import Build, Value, replace_nodes
from dovetail.ops.promote import compute_dtype
from dovetail.passes.pad import PRODUCTS, matrices

SMALL: Final = 1 << 20
"""Terms that are added up in less time than a library's kernel takes to get going."""

TINY: Final = 1 << 12
"""The same of a CPU."""
MANY: Final = 16
"""Columns that fill vectors, in which what follows is computed too."""
FEW: Final = 64
"""Results for which that may be done one by one."""


def open_products(graph: Graph, choose: Callable[[Node], int]) -> Graph:
    def change(b: Build, node: Node) -> Arg:
        parts = 0 if not can_open(node) else 1 if node.tensor.device.kind == "cpu" else choose(node)
        return opened(b, node, parts) if parts else None

    if not any(map(can_open, graph.nodes)):
        return graph
    return replace(replace_nodes(graph, change), updates=graph.updates)


def can_open(node: Node) -> bool:
    """Of known sizes: tiny and of fp32; on a GPU of 16 bits (or small and of fp32) and not of vectors."""
    if node.op not in PRODUCTS or node.kwargs:
        return False
    if node.op == "aten.addmm.default" and cast(Node, node.args[0]).tensor.ndim != 1:
        return False
    kinds = [matrix.tensor for matrix in matrices(node)]
    sizes = [size.value if size.is_const else 0 for kind in kinds for size in kind.shape]
    dtype = node.tensor.dtype
    if any(kind.dtype is not dtype for kind in kinds) or min(sizes) < 1:
        return False
    terms = node.tensor.numel.value * sizes[-2]
    if node.tensor.device.kind == "cpu":
        down, across = kinds[1].stride[-2:]
        in_vectors = across is ONE and sizes[-1] >= MANY
        is_fast = in_vectors or down is ONE or terms <= TINY // 4
        return dtype is F32 and terms <= TINY and is_fast and (in_vectors or node.tensor.numel.value <= FEW)
    if min(sizes) < 2 or sizes[-2] % MATRIX_STEP:
        return False
    is_small = dtype is F32 and terms <= SMALL
    return dtype.is_low_precision or is_small


def opened(b: Build, node: Node, parts: int) -> Node:
    a, y = (Value(matrix, b) for matrix in matrices(node))
    wide, depth, last = compute_dtype(node.tensor.dtype), a.shape[-1], a.ndim - 1
    *batch, rows = a.shape[:-1]
    columns, ranks = y.shape[-1], tuple(range(last - 1))
    shape: tuple[Expr, ...] = (*batch, rows, columns, depth)
    left = b.broadcast(a.to(wide), shape, (*ranks, last - 1, last + 1))
    turned = b.permute(y, (*ranks, last, last - 1)).to(wide)
    product = left * b.broadcast(turned, shape, (*ranks, last, last + 1))
    if parts > 1:
        split = (*shape[:-1], as_expr(parts), as_expr(depth.value // parts))
        sums = b.reduce("sum", b.reshape(product, split), (last + 2,))
        total = b.reduce("sum", sums, (last + 1,))
    else:
        total = b.reduce("sum", product, (last + 1,))
    if node.op == "aten.addmm.default":
        total = total + Value(cast(Node, node.args[0]), b).to(wide)
    made = total.to(node.tensor.dtype)
    if made.type == node.tensor:
        return made.node
    return b.graph.call("prims.copy", (made.node,), node.tensor, name=f"{node.name}_laid", loc=node.loc)


def alone(op: str, kinds: list[TensorType], out: TensorType, parts: int) -> Graph:
    """A graph of nothing but an opened product of such matrices, to be timed."""
    b = Build(GraphBuilder())
    given = [b.graph.input(f"x{i}", kind) for i, kind in enumerate(kinds)]
    node = Node(op, tuple(given), out, "y")
    b.begin(node)
    return b.graph.finish((opened(b, node, parts),))


# -- rows times several weights in one kernel ------------------------------------------------------


def join_rows(graph: Graph) -> Graph:
    """q = sum(wq * x, (1,)); k = sum(wk * x, (1,))  ->  s = sum(cat(wq, wk) * x, (1,)); q, k = parts of s

    Each product alone is over before the GPU has filled up; together they are one long read. The weights are
    not joined in memory: each row of the reduction reads its own."""
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
