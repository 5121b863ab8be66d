"""Matrices whose rows start at whole vectors, where the GPU's matrix units will read or write them.

    Graph -> {node: its type with roomier rows}
    logits = mm(h, w)     bf16[8192, 50257]   ->   bf16[8192, 50257]{50264, 1}

The units move 16 bytes at a time: a matrix whose rows start elsewhere gets kernels several times
slower. What lies between our own kernels and matrix products may have any strides, so such rows get a
few unused elements. A value that the caller or another library call also wants, in eager's strides, is
left alone unless the product itself made it: one copy costs less than the slow product.
"""
from __future__ import annotations

from typing import Final, cast

from dovetail.ir.expr import ONE, Expr, const, mul
from dovetail.ir.graph import GET, Graph, Node, nodes_in
from dovetail.ir.types import TensorType
from dovetail.lower.decide import base_of
from dovetail.lower.nests import memory_order
from dovetail.ops.build import is_dense
from dovetail.ops.prims import kind_of

PRODUCTS: Final = frozenset(("aten.mm.default", "aten.bmm.default"))
VECTOR: Final = 16
"""Bytes."""
LEAST_DEPTH: Final = 128
"""Terms of each sum from which the product outweighs a copy of its result."""


def roomy_rows(graph: Graph) -> dict[Node, TensorType]:
    """Every node whose buffer had better have longer rows than its shape asks for."""
    products = [node for node in graph.nodes if node.op in PRODUCTS and _is_worth_it(node)]
    found: dict[Node, TensorType] = {}
    exact = _wanted_exactly(graph) if products else set()
    for product in products:
        for operand in product.operands:
            base = base_of(operand)
            if _is_ours(base) and base not in exact and _same_rows(operand.tensor, base.tensor):
                _add(found, base)
        _add(found, product)
    return found


def _is_worth_it(product: Node) -> bool:
    type = product.tensor
    depth = cast(Node, product.args[0]).tensor.shape[-1]
    return type.device.kind == "cuda" and type.dtype.is_low_precision and depth.lo >= LEAST_DEPTH


def _wanted_exactly(graph: Graph) -> set[Node]:
    """What the caller or a library call that minds strides gets to see."""
    wanted = {base_of(node) for node in nodes_in(graph.outputs)}
    for node in graph.nodes:
        if node.op == "prims.as_strided" or (kind_of(node.op) is None and node.op not in (*PRODUCTS, GET)):
            wanted.update(base_of(operand) for operand in node.operands)
    return wanted


def _is_ours(node: Node) -> bool:
    """Written by one of our own kernels, which take any strides."""
    return kind_of(node.op) == "pointwise"


def _row(type: TensorType) -> Expr | None:
    """The size of the dimension that is contiguous in memory."""
    rows = [size for size, stride in zip(type.shape, type.stride) if stride is ONE and size is not ONE]
    return rows[0] if len(rows) == 1 else None


def _same_rows(view: TensorType, base: TensorType) -> bool:
    return _row(view) is not None and _row(view) is _row(base)


def _add(found: dict[Node, TensorType], node: Node) -> None:
    type = node.tensor
    row, vector = _row(type), VECTOR // type.dtype.bytes
    if row is None or not row.is_const or row.value % vector == 0 or type.ndim < 2 or not is_dense(type):
        return
    strides, step = list(type.stride), const(-(-row.value // vector) * vector)
    for dim in reversed(memory_order(type.shape, type.stride)[:-1]):
        strides[dim] = step
        step = mul(step, type.shape[dim])
    found[node] = TensorType(type.shape, tuple(strides), type.dtype, type.device)
