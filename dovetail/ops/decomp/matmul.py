"""Matrix products: library calls, with what surrounds them opened up for fusion.

    aten.addmm(bias, a, b) whose result feeds pointwise ops   ->  aten.mm + prims.add, which fuse
    aten.addmm(bias, a, b) otherwise                          ->  stays: the library adds the bias itself
    aten.mm(one row, weight.t()) on a GPU                     ->  prims.sum(weight * row): a reduction that
                                                                  runs at memory speed and fuses
"""
from __future__ import annotations

from typing import Final

from dovetail.ir.expr import ONE
from dovetail.ir.types import tensor_type
from dovetail.ops.build import Build, Number, Value
from dovetail.ops.promote import compute_dtype
from dovetail.ops.registry import decline_if, decomposes

LARGE: Final = 1 << 18
"""Elements of a matrix below which a library call costs no more than a kernel of ours."""


def _is_row_times_weight(b: Build, x: Value, y: Value) -> bool:
    """A row times a large matrix whose columns are contiguous (a transposed weight), on a GPU."""
    known = x.shape[0] is ONE and y.shape[0].is_const and y.shape[1].is_const and y.type.stride[0] is ONE
    is_gpu = b.out.device.kind == "cuda" and b.out.dtype.is_float
    return known and is_gpu and y.shape[0].value * y.shape[1].value >= LARGE


def _row_times_weight(b: Build, x: Value, y: Value) -> Value:
    """In fp32 (or fp64), as the library accumulates; one value per column of y."""
    compute = compute_dtype(b.out.dtype)
    weight = b.permute(y, (1, 0)).to(compute)
    row = b.reshape(x, (x.shape[1],)).to(compute)
    return b.reduce("sum", weight * b.expand(row, weight.shape), (1,))


@decomposes("aten.mm")
def mm(b: Build, x: Value, y: Value) -> Value:
    decline_if(not _is_row_times_weight(b, x, y))
    return b.reshape(_row_times_weight(b, x, y).to(b.out.dtype), b.out.shape)


@decomposes("aten.addmm")
def addmm(b: Build, bias: Value, x: Value, y: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    """Half types round once, inside the library, so they stay whole; so do all on a GPU, whose library adds
    the bias for nothing."""
    if beta == alpha == 1 and bias.ndim == 1 and _is_row_times_weight(b, x, y):
        columns = _row_times_weight(b, x, y)
        return b.reshape((columns + bias.to(columns.dtype)).to(b.out.dtype), b.out.shape)
    decline_if(beta != 1 or alpha != 1 or not b.feeds_pointwise or b.out.dtype.is_low_precision)
    decline_if(not b.out.dtype.is_float or (b.out.device.kind == "cuda" and bias.ndim == 1))
    product = b.extern("aten.mm.default", (x, y), tensor_type(b.out.shape, b.out.dtype, b.out.device))
    return product + b.expand(bias, b.out.shape)


@decomposes("aten.dot", "aten.vdot")
def dot(b: Build, x: Value, y: Value) -> Value:
    decline_if(not x.dtype.is_float or x.dtype.is_low_precision)
    return b.reduce("sum", x * y, (0,))
