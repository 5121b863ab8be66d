"""Copies and rearrangements.

    aten.cat([a, b], 1)           ->  prims.cat (each element picks its part)
    aten.flip, roll, repeat, ...  ->  index maps
    aten._to_copy(x, dtype=...)   ->  prims.convert
    aten.zeros_like(x)            ->  prims.full
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from dovetail.ir.expr import ONE, ZERO, Expr, as_expr, product
from dovetail.ir.types import BOOL, I64
from dovetail.ops.build import Build, Number, Value
from dovetail.ops.decomp.views import Size, bounds, wrapped
from dovetail.ops.registry import Declined, decline_if, decomposes


def to_copy(b: Build, x: Value, *wanted: object, **named: object) -> Value:
    """The result's type says all that is wanted."""
    decline_if(b.out.device != x.type.device)
    return b.prim("copy", x) if x.dtype is b.out.dtype else x.to(b.out.dtype)


decomposes("aten.clone", "aten._to_copy", prim=True)(to_copy)
decomposes("prims.convert_element_type")(to_copy)


@decomposes("aten.copy")
def copy(b: Build, x: Value, source: Value, non_blocking: bool = False) -> Value:
    decline_if(source.type.device != x.type.device)
    return b.prim("copy", b.expand(source.to(x.dtype), x.shape))


@decomposes("aten.cat", prim=True)
def cat(b: Build, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Eager ignores 1-d empty tensors."""
    parts = [p.to(b.out.dtype) for p in tensors if not (p.ndim == 1 and p.shape[0] is ZERO)]
    if not parts:
        return b.full(b.out.shape, 0, b.out.dtype, b.out.device)
    return b.prim("copy", parts[0]) if len(parts) == 1 else b.cat(parts, dim % b.out.ndim)


@decomposes("aten.stack")
def stack(b: Build, tensors: Sequence[Value], dim: int = 0) -> Value:
    at = dim % b.out.ndim
    return cat(b, [b.unsqueeze(t, (at,)) for t in tensors], at)


@decomposes("aten.constant_pad_nd")
def constant_pad_nd(b: Build, x: Value, pad: Sequence[Size], value: Number = 0) -> Value:
    """Pairs from the last dimension backwards; negative sizes cut."""
    before, after = [as_expr(0)] * x.ndim, [as_expr(0)] * x.ndim
    for pair in range(len(pad) // 2):
        dim = x.ndim - 1 - pair
        low, high = as_expr(pad[2 * pair]), as_expr(pad[2 * pair + 1])
        decline_if((low.lo < 0 < low.hi) or (high.lo < 0 < high.hi))
        first = low * -1 if low.hi < 0 else as_expr(0)
        last = x.shape[dim] + high if high.hi < 0 else x.shape[dim]
        x = b.slice(x, dim, first, last)
        before[dim], after[dim] = (as_expr(0) if side.hi < 0 else side for side in (low, high))
    if all(side is ZERO for side in (*before, *after)):
        return b.prim("copy", x)
    if x.type.numel is ZERO:
        return b.full(b.out.shape, value, x.dtype, x.type.device)
    return b.prim("pad", x, tuple(before), tuple(after), value)


@decomposes("aten.flip", prim=True)
def flip(b: Build, x: Value, dims: Sequence[int]) -> Value:
    if not x.ndim or not dims:
        return b.prim("copy", x)
    return b.prim("flip", x, tuple(sorted({d % x.ndim for d in dims})))


@decomposes("aten.roll")
def roll(b: Build, x: Value, shifts: Sequence[Size], dims: Sequence[int] = ()) -> Value:
    if not dims:
        flat = b.reshape(x, (product(x.shape),))
        return b.reshape(_rolled(b, flat, 0, as_expr(shifts[0])), x.shape)
    for shift, dim in zip(shifts, dims):
        x = _rolled(b, x, dim % x.ndim, as_expr(shift))
    return b.prim("copy", x)


def _rolled(b: Build, x: Value, dim: int, shift: Expr) -> Value:
    size = x.shape[dim]
    decline_if(not shift.is_const or not size.is_const)
    if size.value == 0 or shift.value % size.value == 0:
        return x
    cut = size.value - shift.value % size.value
    return b.cat([b.slice(x, dim, cut, size), b.slice(x, dim, 0, cut)], dim)


@decomposes("aten.repeat")
def repeat(b: Build, x: Value, repeats: Sequence[Size]) -> Value:
    return tile(b, x, [ONE] * (len(repeats) - x.ndim) + list(x.shape), repeats, 0)


def tile(b: Build, x: Value, sizes: Sequence[Expr], times: Sequence[Size], side: int) -> Value:
    """A new dimension before each (side 0), or behind it (1), so long; then merged."""
    spread = [end for pair in zip(map(as_expr, times), sizes) for end in pair[:: 1 - 2 * side]]
    wide = b.broadcast(b.reshape(x, sizes), spread, range(1 - side, len(spread), 2))
    return b.prim("copy", b.reshape(wide, b.out.shape))


def positions(b: Build, x: Value, dim: int) -> Value:
    """The index along one dimension, spread over x's shape."""
    return b.broadcast(b.iota(x.shape[dim], I64, x.type.device), x.shape, (dim,))


def _triangle(keeps: str, b: Build, x: Value, diagonal: Number = 0) -> Value:
    rows, columns = positions(b, x, x.ndim - 2), positions(b, x, x.ndim - 1)
    return b.where(b.call(keeps, columns, rows + diagonal), x, _zero(x))


decomposes("aten.triu")(partial(_triangle, "ge"))
decomposes("aten.tril")(partial(_triangle, "le"))


def _zero(x: Value) -> Number:
    return False if x.dtype is BOOL else 0.0 if x.dtype.is_float else 0


# -- writing into part of a tensor -----------------------------------------------------------------


def _spaced(b: Build, x: Value, dim: int, start: Expr, step: int, size: Expr) -> Value:
    """x at start, start + step, ... of a dimension of that size, and zeros in between."""
    wide = b.pad(b.unsqueeze(x, (dim + 1,)), dim + 1, 0, step - 1, _zero(x))
    length = x.shape[dim] * step
    line = b.reshape(wide, [length if d == dim else n for d, n in enumerate(x.shape)])
    line = b.slice(line, dim, 0, length - (step - 1))  # nothing follows the last one
    after = size - start - line.shape[dim]
    decline_if(after.lo < 0 or start.lo < 0 or x.shape[dim].lo < 1)
    return b.pad(line, dim, start, after, _zero(x))


@decomposes("aten.slice_scatter")
def slice_scatter(
    b: Build, x: Value, src: Value, dim: int = 0, start: Size | None = None, end: Size | None = None,
    step: int = 1,
) -> Value:  # fmt: skip
    dim %= x.ndim
    size = x.shape[dim]
    first, last = bounds(size, start, end)
    src = src.to(x.dtype)
    if first is ZERO and last is size and step == 1:
        return b.prim("copy", src)
    if step == 1:
        parts = [b.slice(x, dim, 0, first), src, b.slice(x, dim, last, size)]
        kept = [p for p in parts if p.shape[dim] is not ZERO]
        return b.cat(kept, dim) if len(kept) > 1 else b.prim("copy", kept[0])
    spread = _spaced(b, src, dim, first, step, size)
    along = positions(b, x, dim)
    hit = (b.call("remainder", along - first, step).eq(0)) & (along >= first) & (along < last)
    return b.where(hit, spread, x)


@decomposes("aten.select_scatter")
def select_scatter(b: Build, x: Value, src: Value, dim: int, index: Size) -> Value:
    dim %= x.ndim
    place = wrapped(as_expr(index), x.shape[dim], is_inside=True)
    spread = b.expand(b.unsqueeze(src.to(x.dtype), (dim,)), x.shape)
    return b.where(positions(b, x, dim).eq(place), spread, x)


@decomposes("aten.slice_backward")
def slice_backward(
    b: Build, grad: Value, input_sizes: Sequence[Size], dim: int, start: Size, end: Size, step: int
) -> Value:
    dim %= grad.ndim
    size = as_expr(input_sizes[dim])
    first, last = bounds(size, start, end)
    if step != 1:
        return b.prim("copy", _spaced(b, grad, dim, first, step, size))
    return b.pad(grad, dim, first, size - last, _zero(grad))


@decomposes("aten.select_backward")
def select_backward(b: Build, grad: Value, input_sizes: Sequence[Size], dim: int, index: Size) -> Value:
    dim %= len(input_sizes)
    size = as_expr(input_sizes[dim])
    first = wrapped(as_expr(index), size, is_inside=True)
    return b.pad(b.unsqueeze(grad, (dim,)), dim, first, size - first - 1, _zero(grad))


# -- tensors from nothing: constants and counts, computed where they are read ----------------------


def _filled(value: Number, b: Build, *args: Any, **kwargs: Any) -> Value:
    return b.full(b.out.shape, value, b.out.dtype, b.out.device)


decomposes("aten.zeros", "aten.zeros_like", "aten.new_zeros", prim=True)(partial(_filled, 0))
decomposes("aten._efficientzerotensor", "aten.zero")(partial(_filled, 0))
decomposes("aten.ones", "aten.ones_like", "aten.new_ones", prim=True)(partial(_filled, 1))


decomposes(
    "aten.empty.memory_format", "aten.empty_like", "aten.new_empty", "aten.empty_strided",
    "aten.new_empty_strided", "aten.empty_permuted",
)(lambda b, *args, **kwargs: b.prim("empty", b.out.shape, b.out.dtype, b.out.device))  # fmt: skip


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
