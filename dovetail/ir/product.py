"""Sums that are matrix products.

    o[i, j] = sum over k of f32(a[i, k]) * f32(b[k, j])     ->  Product(a, b, rows (i,), columns (j,))

A tile of such a sum is made by the GPU's matrix units, if both factors have 16 bits. In fp32 it is worth a
tile's while where one side is short, so that the other is all that is read.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dovetail.ir.expr import Expr, product, symbols
from dovetail.ir.loop import Nest, Range, Scalar, iter_scalars
from dovetail.ir.types import F32

STEP: Final = 16
"""Matrix units take this many elements of a row at once."""
SHORT: Final = 128
"""Sums of fewer terms are as fast one by one."""


@dataclass(frozen=True, slots=True)
class Product:
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
    if write.reduce != "sum" or write.value.op != "mul":
        return None
    left, right = (_factor(x) for x in write.value.operands)
    if left.dtype is not right.dtype or not (left.dtype.is_low_precision or left.dtype is F32):
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
    if not known or not is_all or not rows or not columns:
        return None
    shortest = min(product(r.size for r in side).value for side in (rows, columns))
    is_slow = left.dtype is F32 and (shortest > STEP or length.value < SHORT)
    return None if is_slow else Product(left, right, rows, columns, batch)


def _factor(value: Scalar) -> Scalar:
    """Without a conversion that matrix units do themselves."""
    narrow = value.op == "cast" and value.operands[0].dtype.is_low_precision
    return value.operands[0] if narrow else value


def _varies_with(value: Scalar) -> set[Expr]:
    return {
        found
        for node in iter_scalars(value)
        for arg in node.args
        if isinstance(arg, Expr)
        for found in symbols(arg)
    }
