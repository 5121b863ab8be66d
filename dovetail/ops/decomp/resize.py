"""Resizing, shuffling and border padding of images: index maps.

    aten.upsample_nearest2d(x, [2H, 2W])   ->  a repeated dimension behind H and behind W (free)
    aten.pixel_shuffle(x, 2)               ->  reshape, permute, reshape
    aten.reflection_pad2d(x, ...)          ->  flipped slices, joined
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dovetail.ir.expr import Expr, as_expr, product
from dovetail.ops.build import Build, Value
from dovetail.ops.registry import Declined, decomposes


def _repeats(small: Sequence[Expr], large: Sequence[Expr]) -> list[int]:
    """How often each size is repeated, if it is a whole number."""
    found = []
    for a, b in zip(small, large):
        if not (a.is_const and b.is_const) or a.value == 0 or b.value % a.value:
            raise Declined
        found.append(b.value // a.value)
    return found


@decomposes("aten.upsample_nearest1d", "aten.upsample_nearest2d", "aten.upsample_nearest3d",
            "aten._upsample_nearest_exact1d", "aten._upsample_nearest_exact2d",
            "aten._upsample_nearest_exact3d")  # fmt: skip
def upsample_nearest(b: Build, x: Value, *args: Any, **kwargs: Any) -> Value:
    times = _repeats(x.shape[2:], b.out.shape[2:])
    if not all(_is_scale(scale, times) for scale in (*args[1:], *kwargs.values())):
        raise Declined
    spread, places = list(x.shape[:2]), [0, 1]
    for size, n in zip(x.shape[2:], times):
        places.append(len(spread))
        spread += [size, as_expr(n)]
    return b.prim("copy", b.reshape(b.broadcast(x, spread, places), b.out.shape))


def _is_scale(scale: Any, times: list[int]) -> bool:
    """A given scale factor must agree with the sizes."""
    return scale is None or scale in times


@decomposes(
    "aten.upsample_nearest1d_backward", "aten.upsample_nearest2d_backward", "aten.upsample_nearest3d_backward"
)
def upsample_nearest_backward(
    b: Build, grad: Value, output_size: Any, input_size: Any, *scales: Any
) -> Value:
    times = _repeats(b.out.shape[2:], grad.shape[2:])
    if not all(_is_scale(scale, times) for scale in scales) or grad.dtype.is_low_precision:
        raise Declined
    split = list(grad.shape[:2])
    dims = []
    for size, n in zip(b.out.shape[2:], times):
        split += [size, as_expr(n)]
        dims.append(len(split) - 1)
    return b.reduce("sum", b.reshape(grad, split), dims)


def _regrouped(b: Build, x: Value, parts: Sequence[Expr | int], order: Sequence[int]) -> Value:
    return b.prim("copy", b.reshape(b.permute(b.reshape(x, parts), order), b.out.shape))


@decomposes("aten.pixel_shuffle")
def pixel_shuffle(b: Build, x: Value, r: int) -> Value:
    lead, (c, h, w) = x.shape[:-3], x.shape[-3:]
    return _regrouped(b, x, (product(lead), c // (r * r), r, r, h, w), (0, 1, 4, 2, 5, 3))


@decomposes("aten.pixel_unshuffle")
def pixel_unshuffle(b: Build, x: Value, r: int) -> Value:
    lead, (c, h, w) = x.shape[:-3], x.shape[-3:]
    return _regrouped(b, x, (product(lead), c, h // r, r, w // r, r), (0, 1, 3, 5, 2, 4))


@decomposes("aten.channel_shuffle")
def channel_shuffle(b: Build, x: Value, groups: int) -> Value:
    n, c = x.shape[:2]
    return _regrouped(b, x, (n, groups, c // groups, product(x.shape[2:])), (0, 2, 1, 3))


def _bordered(edge: Callable[..., Value], b: Build, x: Value, padding: Sequence[Any]) -> Value:
    """Pairs from the last dimension backwards."""
    for pair in range(len(padding) // 2):
        dim = x.ndim - 1 - pair
        low, high = as_expr(padding[2 * pair]), as_expr(padding[2 * pair + 1])
        known = low.is_const and high.is_const and x.shape[dim].is_const
        if not known or low.value < 0 or high.value < 0:
            raise Declined
        before = [edge(b, x, dim, 0, low.value)] if low.value else []
        after = [edge(b, x, dim, x.shape[dim].value - 1, high.value)] if high.value else []
        x = b.cat([*before, x, *after], dim)
    return b.prim("copy", x)


def _mirrored(b: Build, x: Value, dim: int, at: int, times: int) -> Value:
    """What lies beside the first or the last position."""
    start = at - times if at else 1
    return b.prim("flip", b.slice(x, dim, start, start + times), (dim,))


def _repeated(b: Build, x: Value, dim: int, at: int, times: int) -> Value:
    line = b.slice(x, dim, at, at + 1)
    shape = [as_expr(times) if d == dim else size for d, size in enumerate(x.shape)]
    kept = [d for d in range(x.ndim) if d != dim]
    return b.broadcast(b.reshape(line, [x.shape[d] for d in kept]), shape, kept)


for _rank in (1, 2, 3):
    decomposes(f"aten.reflection_pad{_rank}d")(partial(_bordered, _mirrored))
    decomposes(f"aten.replication_pad{_rank}d")(partial(_bordered, _repeated))


@decomposes("aten.rot90")
def rot90(b: Build, x: Value, k: int = 1, dims: Sequence[int] = (0, 1)) -> Value:
    first, second = dims[0] % x.ndim, dims[1] % x.ndim
    order = list(range(x.ndim))
    order[first], order[second] = order[second], order[first]
    turns = k % 4
    if turns == 1:
        x = b.permute(b.prim("flip", x, (second,)), order)
    elif turns == 2:
        return b.prim("flip", x, tuple(sorted((first, second))))
    elif turns == 3:
        x = b.prim("flip", b.permute(x, order), (second,))
    return b.prim("copy", x)
