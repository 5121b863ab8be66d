"""Sums that are matrix products.

    o[i, j] = sum over k of f32(a[i, k]) * f32(b[k, j])     ->  Product(a, b, rows (i,), columns (j,))

A tile of such a sum is made by the GPU's matrix units, if both factors have 16 bits.
"""
from __future__ import annotations

from typing import Final

from dovetail.ir.expr import Expr, product, symbols
from dovetail.ir.loop import Nest, Range, Scalar, iter_scalars
from dovetail.ir.types import F32
from dovetail.util.noun import Noun

STEP: Final = 16
"""Matrix units take this many elements of a row at once."""


class Product(Noun):
    """Either factor may be computed; `batch` are the loops that both vary with."""

    left: Scalar
    right: Scalar
    rows: tuple[Range, ...]
    columns: tuple[Range, ...]
    batch: tuple[Range, ...]

    @property
    def flipped(self) -> Product:
        return Product(self.right, self.left, self.columns, self.rows, self.batch)


def product_of(nest: Nest) -> Product | None:
    if not nest.reduce or len(nest.writes) != 1:
        return None
    (write,) = nest.writes
    if write.reduce != "sum" or write.value.op != "mul" or write.value.dtype is not F32:
        return None
    left, right = (x.operands[0] if x.op == "cast" else x for x in write.value.operands)
    if left.dtype is not right.dtype or not left.dtype.is_low_precision:
        return None
    inner, in_left, in_right = {r.var for r in nest.reduce}, _varies_with(left), _varies_with(right)
    length = product(r.size for r in nest.reduce)
    if not inner <= in_left & in_right or not length.is_const or length.value % STEP:
        return None
    rows = tuple(r for r in nest.ranges if r.var in in_left - in_right)
    columns = tuple(r for r in nest.ranges if r.var in in_right - in_left)
    batch = tuple(r for r in nest.ranges if r.var in in_left & in_right)
    is_all = len(rows) + len(columns) + len(batch) == len(nest.ranges)
    known = all(r.size.is_const for r in nest.ranges)
    return Product(left, right, rows, columns, batch) if known and is_all and rows and columns else None


def _varies_with(value: Scalar) -> set[Expr]:
    exprs = (arg for node in iter_scalars(value) for arg in node.args if isinstance(arg, Expr))
    return {found for expr in exprs for found in symbols(expr)}
