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

from dovetail.ir.expr import ONE, Expr, as_expr
from dovetail.ir.graph import Arg, Graph, GraphBuilder, Node
from dovetail.ir.product import STEP
from dovetail.ir.types import F32, TensorType
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
    if min(sizes) < 2 or sizes[-2] % STEP:
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
