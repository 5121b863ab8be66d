"""Tensors from nothing: constants and counts, computed where they are read.

    aten.arange.start_step(0, 8, 2, dtype=i64)   ->  prims.iota
    aten.zeros_like(x)                           ->  prims.full
    aten.empty_like(x)                           ->  prims.empty
"""
from __future__ import annotations

from functools import partial
from typing import Any

from dovetail.ir.expr import Expr
from dovetail.ir.types import I64
from dovetail.ops.build import Build, Number, Value
from dovetail.ops.registry import Declined, decomposes


def _filled(value: Number, b: Build, *args: Any, **kwargs: Any) -> Value:
    return b.full(b.out.shape, value, b.out.dtype, b.out.device)


decomposes("aten.zeros", "aten.zeros_like", "aten.new_zeros", prim=True)(partial(_filled, 0))
decomposes("aten._efficientzerotensor", "aten.zero")(partial(_filled, 0))
decomposes("aten.ones", "aten.ones_like", "aten.new_ones", prim=True)(partial(_filled, 1))


@decomposes("aten.empty.memory_format", "aten.empty_like", "aten.new_empty", "aten.empty_strided",
            "aten.new_empty_strided", "aten.empty_permuted")  # fmt: skip
def empty(b: Build, *args: Any, **kwargs: Any) -> Value:
    return b.empty(b.out.shape, b.out.dtype, b.out.device)


def full(b: Build, *args: Any, **kwargs: Any) -> Value:
    value = kwargs["fill_value"] if "fill_value" in kwargs else args[-1]
    if isinstance(value, Value):
        return b.prim("copy", b.expand(value.to(b.out.dtype), b.out.shape))
    if isinstance(value, complex):
        raise Declined
    return b.full(b.out.shape, value, b.out.dtype, b.out.device)


decomposes("aten.full", "aten.full_like", "aten.new_full", "aten.scalar_tensor", prim=True)(full)
decomposes("aten.fill.Scalar", "aten.fill.Tensor")(full)


@decomposes("aten.arange", "aten.arange.start", "aten.arange.start_step")
def arange(b: Build, start: Number, end: Number | None = None, step: Number = 1, **kwargs: Any) -> Value:
    """Eager accumulates in double (or i64) and rounds once."""
    if end is None:  # the only argument
        start = 0
    dtype = b.out.dtype
    if dtype.is_integer and all(isinstance(x, (int, Expr)) for x in (start, step)):
        return b.iota(b.out.shape[0], dtype, b.out.device, start, step)
    if not dtype.is_integer and all(isinstance(x, int) for x in (start, step)) and dtype.bits >= 32:
        return b.iota(b.out.shape[0], I64, b.out.device, start, step).to(dtype)
    raise Declined
