"""Matrix products of whole vectors, for the GPU's matrix units.

    y = aten.mm(h, w)     bf16[8192, 768] x [768, 50257]
        ->  p = prims.pad(w, ... 50264 columns);  q = aten.mm(h, p);  y = prims.slice(q, ... 50257)

The units move 16 bytes at a time: a product in whose operands or result rows start elsewhere gets
kernels several times slower. An operand that a kernel of ours writes is written padded to begin with;
any other costs a copy, and so does a result that the caller wants as it is. Both are weighed against
the time the product saves.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

from dovetail.ir.expr import ONE, ZERO, Expr, as_expr, const, mul
from dovetail.ir.graph import Arg, Graph, Node, nodes_in
from dovetail.ir.types import TensorType, contiguous_stride
from dovetail.ops.build import Build, Value, replace_nodes
from dovetail.ops.prims import kind_of

PRODUCTS: Final = {"aten.mm.default": 0, "aten.bmm.default": 0, "aten.addmm.default": 1}
"""Where the first matrix is among the arguments."""
VECTOR: Final = 16
"""Bytes."""
LEAST_WORK: Final = 1 << 30
"""Multiplications below which a product takes too little time to bother."""
WORK_PER_BYTE: Final = 40
"""Multiplications that an unaligned product loses in the time a byte is copied."""


def pad_products(graph: Graph) -> Graph:
    if not any(node.op in PRODUCTS and _extras(node) for node in graph.nodes):
        return graph
    names = {node.name for node in nodes_in(graph.outputs)}

    def change(b: Build, node: Node) -> Arg:
        extras = _extras(node) if node.op in PRODUCTS else ()
        return _padded(b, node, extras) if extras and _pays(node, extras, node.name in names) else None

    return replace_nodes(graph, change)


def matrices(node: Node) -> tuple[Node, Node]:
    first = PRODUCTS[node.op]
    return cast(Node, node.args[first]), cast(Node, node.args[first + 1])


def _extras(node: Node) -> tuple[int, ...]:
    """What to add to (rows, depth, columns) of the product; () for a product that is fine as it is."""
    a, b = (matrix.tensor for matrix in matrices(node))
    known = all(size.is_const for size in (*a.shape, *b.shape))
    if a.device.kind != "cuda" or not a.dtype.is_low_precision or not known:
        return ()
    if node.op == "aten.addmm.default" and (node.kwargs or cast(Node, node.args[0]).tensor.ndim != 1):
        return ()
    rows, depth, columns = a.shape[-2].value, a.shape[-1].value, b.shape[-1].value
    if rows * depth * columns < LEAST_WORK or min(rows, depth, columns) < VECTOR:
        return ()
    vector = VECTOR // a.dtype.bytes
    by_rows = a.stride[-2] is ONE  # the first matrix is transposed: its lines run along the rows
    extras = (-rows % vector if by_rows else 0, -depth % vector, -columns % vector)
    return extras if any(extras) else ()


def _pays(node: Node, extras: tuple[int, ...], is_returned: bool) -> bool:
    a, b = matrices(node)
    rows, depth, columns = extras
    work = a.tensor.numel.value * b.tensor.shape[-1].value
    copied = [m for m, grown in ((a, rows or depth), (b, depth or columns)) if grown and not _is_ours(m)]
    moved = sum(m.tensor.bytes.value for m in copied)
    moved += node.tensor.bytes.value if is_returned and columns else 0
    return work > WORK_PER_BYTE * moved


def _is_ours(node: Node) -> bool:
    """A kernel of ours writes it, wherever it is told to."""
    while kind_of(node.op) == "view" and node.op != "prims.as_strided":
        node = cast(Node, node.args[0])
    return kind_of(node.op) in ("pointwise", "join")


def _padded(b: Build, node: Node, extras: tuple[int, ...]) -> Arg:
    rows, depth, columns = extras
    first, second = matrices(node)
    left, right = _grown(b, first, (rows, depth)), _grown(b, second, (depth, columns))
    bias = [_grown(b, cast(Node, arg), (columns,)) for arg in node.args[: PRODUCTS[node.op]]]
    shape = (*left.tensor.shape[:-1], right.tensor.shape[-1])
    type = TensorType(shape, contiguous_stride(shape), node.tensor.dtype, node.tensor.device)
    name = f"{node.name}_padded"
    value: Node = b.graph.call(node.op, (*bias, left, right), type, name=name, loc=node.loc)
    for dim, extra in ((-2, rows), (-1, columns)):
        if extra:
            value = _cut(b, value, node.tensor.ndim + dim, node.tensor.shape[dim])
    # Typed as eager's result, whose strides whoever minds them gets by a copy.
    b.graph.nodes[-1] = Node(value.op, value.args, node.type, node.name, value.kwargs, node.loc)
    return b.graph.nodes[-1]


def _cut(b: Build, value: Node, dim: int, size: Expr) -> Node:
    shape = tuple(size if d == dim else n for d, n in enumerate(value.tensor.shape))
    type = TensorType(shape, value.tensor.stride, value.tensor.dtype, value.tensor.device)
    args = (value, dim, ZERO, size, 1)
    return b.graph.call("prims.slice", args, type, name=f"{value.name}_cut", loc=value.loc)


def _grown(b: Build, node: Node, extras: Sequence[int]) -> Node:
    """With zeros after the last dimensions, in the same order in memory."""
    if not any(extras):
        return node
    return _with_zeros(b, node, [*([0] * (node.tensor.ndim - len(extras))), *extras])


def _with_zeros(b: Build, node: Node, extras: Sequence[int]) -> Node:
    """`extras` after each dimension. A matrix and its transpose are views of one copy."""
    type = node.tensor
    if node.op == "prims.permute":
        dims = cast("tuple[int, ...]", node.args[1])
        grown = _with_zeros(b, cast(Node, node.args[0]), [extras[dims.index(d)] for d in range(type.ndim)])
        return b.permute(Value(grown, b), dims).node
    shape = tuple(const(n.value + more) for n, more in zip(type.shape, extras))
    order = sorted(range(type.ndim), key=lambda d: -type.stride[d].lo)
    strides, step = [ONE] * type.ndim, ONE
    for dim in reversed(order):
        strides[dim], step = step, mul(step, shape[dim])
    made = TensorType(shape, tuple(strides), type.dtype, type.device)
    args = (node, tuple(ZERO for _ in extras), tuple(map(as_expr, extras)), 0.0)
    return b.graph.call("prims.pad", args, made, name=f"{node.name}_padded", loc=node.loc)
