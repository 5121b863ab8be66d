"""Resizing and shuffling of images: index maps.

    aten.upsample_nearest2d(x, [2H, 2W])   ->  a repeated dimension behind H and behind W (free)
    aten.pixel_shuffle(x, 2)               ->  reshape, permute, reshape
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.ir.expr import Expr, as_expr, product
from dovetail.ops.build import Build, Value
from dovetail.ops.registry import decline_if, decomposes


def _repeats(small: Sequence[Expr], large: Sequence[Expr]) -> list[int]:
    """How often each size is repeated, if it is a whole number."""
    found = []
    for a, b in zip(small, large):
        decline_if(not (a.is_const and b.is_const) or a.value == 0 or b.value % a.value)
        found.append(b.value // a.value)
    return found


@decomposes(*(f"aten.{kind}{n}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in "123"))
def upsample_nearest(b: Build, x: Value, *args: Any, **kwargs: Any) -> Value:
    times = _repeats(x.shape[2:], b.out.shape[2:])
    decline_if(not all(_is_scale(scale, times) for scale in (*args[1:], *kwargs.values())))
    spread, places = list(x.shape[:2]), [0, 1]
    for size, n in zip(x.shape[2:], times):
        places.append(len(spread))
        spread += [size, as_expr(n)]
    return b.prim("copy", b.reshape(b.broadcast(x, spread, places), b.out.shape))


def _is_scale(scale: Any, times: list[int]) -> bool:
    """A given scale factor must agree with the sizes."""
    return scale is None or scale in times


@decomposes(*(f"aten.upsample_nearest{n}d_backward" for n in "123"))
def upsample_nearest_backward(b: Build, grad: Value, output_size: Any, size: Any, *scales: Any) -> Value:
    times = _repeats(b.out.shape[2:], grad.shape[2:])
    decline_if(not all(_is_scale(scale, times) for scale in scales) or grad.dtype.is_low_precision)
    split = list(grad.shape[:2])
    dims = []
    for size, n in zip(b.out.shape[2:], times):
        split += [size, as_expr(n)]
        dims.append(len(split) - 1)
    return b.reduce("sum", b.reshape(grad, split), dims)


@decomposes("aten.pixel_shuffle")
def pixel_shuffle(b: Build, x: Value, r: int) -> Value:
    lead, (c, h, w) = x.shape[:-3], x.shape[-3:]
    parts = b.permute(b.reshape(x, (product(lead), c // (r * r), r, r, h, w)), (0, 1, 4, 2, 5, 3))
    return b.prim("copy", b.reshape(parts, b.out.shape))
