"""Views: index maps, free of charge.

    aten.select.int(x, 0, 3)      ->  slice, reshape
    aten.expand(x, [8, -1])       ->  broadcast
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from dovetail.ir.expr import Expr, add, as_expr, maximum, minimum
from dovetail.ir.types import TensorType
from dovetail.ops.build import Build, Value
from dovetail.ops.registry import Declined, decline_if, decomposes

Size: TypeAlias = "Expr | int"


@decomposes("aten.view", "aten._unsafe_view", "aten._reshape_alias", prim=True)
@decomposes("aten.squeeze", "aten.squeeze.dim", "aten.squeeze.dims", "aten.unsqueeze")
def regroup(b: Build, x: Value, *dims: object) -> Value:
    """Whatever the arguments say, the result's shape is known."""
    return b.reshape(x, b.out.shape)


names = "aten.alias", "aten.detach", "aten.lift_fresh", "aten.lift", "aten._conj"
decomposes(*names)(lambda b, x: x)
decomposes("aten.expand", prim=True)(lambda b, x, size, implicit=False: b.expand(x, b.out.shape))
decomposes("aten.permute", prim=True)(lambda b, x, dims: b.permute(x, [d % max(x.ndim, 1) for d in dims]))


@decomposes("aten.t", "aten.transpose.int")
def transpose(b: Build, x: Value, dim0: int = 0, dim1: int = -1) -> Value:
    if not x.ndim:
        return x
    both = dim0 % x.ndim, dim1 % x.ndim
    return b.permute(x, [sum(both) - d if d in both else d for d in range(x.ndim)])


@decomposes("aten.slice.Tensor", prim=True)
def slice_(
    b: Build, x: Value, dim: int = 0, start: Size | None = None, end: Size | None = None, step: int = 1
) -> Value:
    dim %= x.ndim
    first, last = bounds(x.shape[dim], start, end)
    if not isinstance(step, int):
        raise Declined
    return b.slice(x, dim, first, last, step)


def bounds(size: Expr, start: Size | None, end: Size | None) -> tuple[Expr, Expr]:
    """Python's slice bounds: wrapped, clamped, start <= end."""
    first = wrapped(as_expr(0 if start is None else start), size)
    last = wrapped(size if end is None else as_expr(end), size)
    first = minimum(maximum(first, 0), size)
    return first, maximum(minimum(maximum(last, 0), size), first)


def wrapped(value: Expr, size: Expr, is_inside: bool = False) -> Expr:
    """A negative bound counts from the end. What may be of either sign is known where an element is there."""
    if value.lo >= 0:
        return value
    if value.hi < 0:
        return add(value, size)
    decline_if(not is_inside)
    return value % size


@decomposes("aten.select.int")
def select(b: Build, x: Value, dim: int, index: Size) -> Value:
    dim %= x.ndim
    first = wrapped(as_expr(index), x.shape[dim], is_inside=True)
    return b.reshape(b.slice(x, dim, first, first + 1), [s for d, s in enumerate(x.shape) if d != dim])


@decomposes("aten.as_strided")
def as_strided(
    b: Build, x: Value, size: Sequence[Size], stride: Sequence[Size], storage_offset: Size | None = None
) -> Value:
    """Element addresses of x's own memory: x must lie in memory as eager laid it."""
    offset = as_expr(0 if storage_offset is None else storage_offset)
    sizes, strides = tuple(map(as_expr, size)), tuple(map(as_expr, stride))
    window, memory = TensorType(sizes, strides, x.dtype), x.type
    is_all = window.numel is memory.numel and offset is as_expr(0)
    if is_all and memory.is_contiguous and window.is_contiguous:
        return b.reshape(x, sizes)
    return b.prim("as_strided", x, sizes, strides, offset)


@decomposes("aten.unfold")
def unfold(b: Build, x: Value, dimension: int, size: int, step: int) -> Value:
    """Windows along one dimension, the window last: side by side they cut it into parts."""
    if not x.ndim:
        return b.reshape(x, b.out.shape)
    dim = dimension % x.ndim
    count = b.out.shape[dim]
    decline_if(size != step or count.lo < 1)
    whole = b.slice(x, dim, 0, count * size)
    parts = b.reshape(whole, [*x.shape[:dim], count, as_expr(size), *x.shape[dim + 1 :]])
    return b.permute(parts, [d for d in range(parts.ndim) if d != dim + 1] + [dim + 1])


@decomposes("aten.view.dtype")
def view_dtype(b: Build, x: Value, dtype: object) -> Value:
    decline_if(b.out.dtype.bits != x.dtype.bits or "bool" in (b.out.dtype.kind, x.dtype.kind))
    return x if b.out.dtype is x.dtype else b.prim("bitcast", x, b.out.dtype)
