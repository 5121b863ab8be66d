"""Matrix products: library calls, with what surrounds them opened up for fusion.

    aten.addmm(bias, a, b) whose result feeds pointwise ops   ->  aten.mm + prims.add, which fuse
    aten.addmm(bias, a, b) otherwise                          ->  stays: the library adds the bias itself
"""
from __future__ import annotations

from dovetail.ir.expr import ONE
from dovetail.ir.types import tensor_type
from dovetail.ops.build import Build, Number, Value, plain
from dovetail.ops.registry import Declined, decomposes


@decomposes("aten.addmm")
def addmm(b: Build, bias: Value, x: Value, y: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    """Half types round once, inside the library, so they stay whole."""
    if beta != 1 or alpha != 1 or not b.feeds_pointwise or b.out.dtype.is_low_precision:
        raise Declined
    if not b.out.dtype.is_float:
        raise Declined
    product = b.extern("aten.mm.default", (x, y), tensor_type(b.out.shape, b.out.dtype, b.out.device))
    return product + b.expand(bias, b.out.shape)


@decomposes("aten.mv")
def mv(b: Build, x: Value, y: Value) -> Value:
    column = b.unsqueeze(y, (1,))
    kind = tensor_type((x.shape[0], ONE), b.out.dtype, b.out.device)
    return b.reshape(b.extern("aten.mm.default", (x, column), kind), b.out.shape)


@decomposes("aten.dot", "aten.vdot")
def dot(b: Build, x: Value, y: Value) -> Value:
    if not x.dtype.is_float or x.dtype.is_low_precision:
        raise Declined
    return b.reduce("sum", x * y, (0,))


@decomposes("aten.addmv")
def addmv(b: Build, bias: Value, x: Value, y: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    if not b.out.dtype.is_float or b.out.dtype.is_low_precision or x.shape[0].hi == 0 or x.shape[1].hi == 0:
        raise Declined
    product = mv(b, x, y)
    scaled = product if alpha == 1 else product * plain(alpha)
    return scaled + _weighted(b, bias, beta)


@decomposes("aten.addr")
def addr(b: Build, bias: Value, x: Value, y: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    if not b.out.dtype.is_float or b.out.dtype.is_low_precision:
        raise Declined
    outer = b.unsqueeze(x.to(b.out.dtype), (1,)) * b.unsqueeze(y.to(b.out.dtype), (0,))
    return _weighted(b, bias, beta) + (outer if alpha == 1 else outer * plain(alpha))


def _weighted(b: Build, bias: Value, beta: Number) -> Value:
    """beta * bias; a beta of 0 hides even NaN."""
    spread = b.expand(bias.to(b.out.dtype), b.out.shape)
    if plain(beta) == 0:
        return b.full(b.out.shape, 0, b.out.dtype, b.out.device)
    return spread if beta == 1 else spread * plain(beta)
