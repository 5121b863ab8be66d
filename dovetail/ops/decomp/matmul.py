"""Matrix products: library calls, with what surrounds them opened up for fusion.

    aten.addmm(bias, a, b) whose result feeds pointwise ops   ->  aten.mm + prims.add (fuses with what follows)
    aten.addmm(bias, a, b) otherwise                          ->  stays: the library adds the bias itself
"""
from __future__ import annotations

from dovetail.ir.expr import ONE
from dovetail.ir.types import tensor_type
from dovetail.ops.build import Build, Number, Value
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
