"""Pooling with small windows: one shifted slice of the padded input per place in the window.

    aten.max_pool2d(x, 3, 2, 1)   ->  p = prims.pad(x, -inf);  the maximum of the 9 slices p[i::2, j::2]
    aten.avg_pool2d(x, 2)         ->  the sum of the 4 slices x[i::2, j::2], / 4
    aten.upsample_nearest2d(x, [2H, 2W])   ->  a repeated dimension behind H and behind W (free)
    aten.upsample_bilinear2d(x, ...)       ->  two elements along W, two such along H, by distance (on a GPU)

Slices are index maps, so the whole is one pointwise loop that reads its neighbours. Larger windows, and
gradients but those of averages over equal parts, stay library calls.
"""
from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import partial, reduce
from itertools import product as combinations
from typing import Any, Final

from dovetail.fake.rules import per_axis
from dovetail.ir.expr import ONE, ZERO, Expr, as_expr, product, row_major
from dovetail.ir.types import F32, F64, I64, DType
from dovetail.ops.build import Build, Value, compute_dtype, number
from dovetail.ops.decomp.copies import alternating
from dovetail.ops.decomp.index import check_room, move_first
from dovetail.ops.decomp.reductions import accumulate
from dovetail.ops.registry import decline_if, decomposes
from dovetail.util.noun import Noun

MOST_PLACES: Final = 32
"""Places in a window that are written out one by one."""


class Windows(Noun):
    """Along each of the last dimensions: size, step, padding, and distance of places within a window."""

    size: tuple[int, ...]
    step: tuple[int, ...]
    margin: tuple[int, ...]
    spread: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.size)

    @property
    def places(self) -> list[tuple[int, ...]]:
        return list(combinations(*map(range, self.size)))


def make_windows(
    rank: int, size: Sequence[int], step: Sequence[int] = (), margin: Sequence[int] | int = 0,
    spread: Sequence[int] | int = 1,
) -> Windows:  # fmt: skip
    sizes = per_axis(size, rank)
    decline_if(not 0 < math.prod(sizes) <= MOST_PLACES)
    return Windows(sizes, per_axis(step or sizes, rank), per_axis(margin, rank), per_axis(spread, rank))


def taps(b: Build, x: Value, windows: Windows, count: Sequence[Expr], fill: float) -> list[Value]:
    """For each place in the window, the value there of every window; `fill` beyond the edges."""
    lead = x.ndim - windows.rank
    before, after = [as_expr(0)] * x.ndim, [as_expr(0)] * x.ndim
    for d in range(windows.rank):
        reach = (count[d] - 1) * windows.step[d] + (windows.size[d] - 1) * windows.spread[d] + 1
        beyond = reach - x.shape[lead + d] - windows.margin[d]
        before[lead + d] = as_expr(windows.margin[d])
        if beyond.hi > 0:
            room = windows.margin[d] + windows.step[d] - 1
            after[lead + d] = beyond if beyond.lo >= 0 else as_expr(room)
    if any(side is not ZERO for side in (*before, *after)):
        x = b.prim("pad", x, tuple(before), tuple(after), fill)
    return [_tap(b, x, windows, count, place) for place in windows.places]


def _tap(b: Build, x: Value, windows: Windows, count: Sequence[Expr], place: tuple[int, ...]) -> Value:
    lead = x.ndim - windows.rank
    for d, at in enumerate(place):
        start = at * windows.spread[d]
        x = b.slice(x, lead + d, start, (count[d] - 1) * windows.step[d] + (start + 1), windows.step[d])
    return x


def _check(x: Value, rank: int) -> None:
    decline_if(not x.dtype.is_float or x.ndim < rank + 1 or any(size.lo == 0 for size in x.shape))


# -- maximum ---------------------------------------------------------------------------------------


def _positions(b: Build, x: Value, windows: Windows, found: list[Value], best: Value) -> Value:
    """Where in its plane each maximum is: the first of equal ones. A window of -inf alone, or with a NaN,
    points to its first element within the plane."""
    lead, device = x.ndim - windows.rank, x.type.device
    sizes = x.shape[lead:]
    steps = [[as_expr(at * gap) for at, gap in zip(place, windows.spread)] for place in windows.places]
    *others, last = (number(row_major(each, sizes), I64) for each in steps)
    shift = b.full(best.shape, last, I64, device)
    for tap, chosen in reversed([*zip(found, others)]):
        shift = b.where(tap.eq(best), chosen, shift)
    corner, inside = (b.full((), 0, I64, device) for _ in range(2))
    for d in range(windows.rank):
        line = b.iota(best.shape[lead + d], I64, device, start=-windows.margin[d], step=windows.step[d])
        along, size = b.broadcast(line, best.shape, (lead + d,)), number(sizes[d], I64)
        first = b.call("maximum", along, 0) if windows.margin[d] else along
        corner, inside = corner * size + along, inside * size + first
    plain = (best > -math.inf) & ~b.call("isnan", best)
    return b.where(plain, corner + shift, inside)


def max_pool(
    rank: int, b: Build, x: Value, kernel_size: Sequence[int], stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0, dilation: Sequence[int] | int = 1, ceil_mode: bool = False,
) -> tuple[Value, Value]:  # fmt: skip
    windows = make_windows(rank, kernel_size, stride, padding, dilation)
    decline_if(any(step > 1 and margin for step, margin in zip(windows.spread, windows.margin)))
    _check(x, rank)
    # with channels innermost, the library finds positions in fewer instructions
    decline_if(1 in b.used and x.type.stride[-rank - 1] is ONE and x.type.device.kind == "cpu")
    found = taps(b, accumulate(x, x.dtype), windows, b.out.shape[-rank:], -math.inf)
    best = reduce(partial(b.call, "maximum"), found)
    return best.to(x.dtype), _positions(b, x, windows, found, best)


def _even(x: Value, count: Sequence[Expr]) -> Windows:
    """Windows that cut each dimension into equal parts."""
    return make_windows(len(count), _repeats(count, x.shape[-len(count) :]))


# -- average ---------------------------------------------------------------------------------------


def _divisor(
    b: Build, x: Value, windows: Windows, count: Sequence[Expr], include_pad: bool, override: int | None
) -> Value | float:
    """Places of each window that count: those of the padded plane, or of the plane itself."""
    if override:
        return float(override)
    lead = x.ndim - windows.rank
    shape = (*x.shape[:lead], *count)
    total: Value | float = 1.0
    for d in range(windows.rank):
        size, margin = x.shape[lead + d], windows.margin[d]
        low, high = (-margin, size + margin) if include_pad else (0, size)
        last = (count[d] - 1) * windows.step[d] - margin + windows.size[d]
        if (margin == 0 or include_pad) and (last - high).hi <= 0:
            total = total * float(windows.size[d])
            continue
        first = b.iota(count[d], I64, x.type.device, start=-margin, step=windows.step[d])
        stop = b.call("minimum", first + windows.size[d], high)
        places = (stop - b.call("maximum", first, low)).to(compute_dtype(x.dtype))
        total = b.broadcast(places, shape, (lead + d,)) * total
    return total


def _average(b: Build, x: Value, windows: Windows, count: Sequence[Expr], divisor: Value | float) -> Value:
    total = reduce(operator.add, taps(b, accumulate(x, x.dtype), windows, count, 0.0))
    return (total / divisor).to(x.dtype)


def avg_pool(
    rank: int, b: Build, x: Value, kernel_size: Sequence[int], stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0, ceil_mode: bool = False, count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:  # fmt: skip
    windows = make_windows(rank, kernel_size, stride, padding)
    _check(x, rank)
    count = b.out.shape[-rank:]
    divisor = _divisor(b, x, windows, count, count_include_pad, divisor_override)
    return _average(b, x, windows, count, divisor)


@decomposes("aten._adaptive_avg_pool2d", "aten._adaptive_avg_pool3d")
def adaptive_avg_pool(b: Build, x: Value, output_size: Sequence[Expr]) -> Value:
    count = b.out.shape[-len(output_size) :]
    windows = _even(x, count)
    _check(x, windows.rank)
    return _average(b, x, windows, count, float(len(windows.places)))


def _repeated(b: Build, x: Value, times: Sequence[int]) -> Value:
    """Each element of the last dimensions so often along each of them."""
    lead = x.ndim - len(times)
    shape = [*x.shape[:lead], *alternating(x.shape[lead:], times)]
    dims = [*range(lead), *range(lead, len(shape), 2)]
    return b.prim("copy", b.reshape(b.broadcast(x, shape, dims), b.out.shape)).to(b.out.dtype)


def adaptive_avg_pool_backward(rank: int, b: Build, grad: Value, x: Value) -> Value:
    windows = _even(x, grad.shape[-rank:])
    _check(x, rank)
    return _repeated(b, accumulate(grad, grad.dtype) / float(len(windows.places)), windows.size)


for _rank in (2, 3):
    for _name, _rule in (
        ("max_pool{}d_with_indices", max_pool), ("avg_pool{}d", avg_pool),
        ("_adaptive_avg_pool{}d_backward", adaptive_avg_pool_backward),
    ):  # fmt: skip
        decomposes(f"aten.{_name.format(_rank)}")(partial(_rule, _rank))


# -- resizing and shuffling of images: index maps --------------------------------------------------


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
    return _repeated(b, x, times)


def _is_scale(scale: Any, times: list[int]) -> bool:
    """A given scale factor must agree with the sizes."""
    return scale is None or scale in times


@decomposes(*(f"aten.upsample_nearest{n}d_backward" for n in "123"))
def upsample_nearest_backward(b: Build, grad: Value, output_size: Any, size: Any, *scales: Any) -> Value:
    times = _repeats(b.out.shape[2:], grad.shape[2:])
    decline_if(not all(_is_scale(scale, times) for scale in scales) or grad.dtype.is_low_precision)
    split = [*grad.shape[:2], *alternating(b.out.shape[2:], times)]
    return b.reduce("sum", b.reshape(grad, split), range(3, len(split), 2))


@decomposes("aten.upsample_linear1d", "aten.upsample_bilinear2d", "aten.upsample_trilinear3d")
def upsample_linear(b: Build, x: Value, size: Any, align_corners: bool, *scales: float | None) -> Value:
    """On a GPU: part of the kernels around it. The CPU's library shares work between channels."""
    small, large = x.shape[2:], b.out.shape[2:]
    decline_if(b.out.device.kind != "cuda" or not x.dtype.is_float)
    decline_if(not all(size.is_const for size in (*small, *large)))
    check_room(x)
    dtype, rank = F64 if x.dtype is F64 else F32, len(small)
    lines = [
        _neighbours(b, dtype, a.value, c.value, align_corners, scale)
        for a, c, scale in zip(small, large, scales or (None,) * rank)
    ]

    def blend(at: list[Value]) -> Value:
        """The mean of the elements around each place, the last dimension's first, as eager rounds."""
        if (d := len(at)) == rank:
            taken = b.prim("take", x, tuple(at), tuple(range(2, x.ndim)))
            return move_first(b, taken, rank, 2).to(dtype)
        first, second, apart = (b.broadcast(v, large, (d,)) for v in lines[d])
        apart = b.broadcast(apart, b.out.shape, range(2, x.ndim))
        return (1.0 - apart) * blend([*at, first]) + apart * blend([*at, second])

    return blend([]).to(x.dtype)


def _neighbours(
    b: Build, dtype: DType, small: int, large: int, align_corners: bool, scale: float | None
) -> tuple[Value, Value, Value]:
    """Along one dimension: the elements before and behind each place, and how far it is from the first."""
    place = b.iota(large, I64, b.out.device).to(dtype)
    if align_corners:
        place = place * ((small - 1) / max(large - 1, 1))
    else:
        place = b.call("maximum", (place + 0.5) * (1 / scale if scale else small / large) - 0.5, 0.0)
    first = b.call("minimum", place.to(I64), small - 1)
    return first, b.call("minimum", first + 1, small - 1), place - first.to(dtype)


@decomposes("aten.im2col")
def im2col(
    b: Build, x: Value, size: Sequence[int], spread: Sequence[int], margin: Sequence[int], step: Sequence[int]
) -> Value:
    """On a GPU: the places of all windows, read by the kernels around it."""
    lead = x.ndim - 2
    decline_if(b.out.device.kind != "cuda" or not all(length.is_const for length in x.shape))
    places = []
    shape = [as_expr(k) for k in size]
    for d in range(2):
        x = b.pad(x, lead + d, margin[d], margin[d], 0) if margin[d] else x
        count = (x.shape[lead + d] - spread[d] * (size[d] - 1) - 1) // step[d] + 1
        first = b.iota(count, I64, b.out.device, step=step[d])
        within = b.iota(size[d], I64, b.out.device, step=spread[d])
        shape.append(as_expr(count))
        places.append((within, first))
    at = [b.broadcast(k, shape, (d,)) + b.broadcast(n, shape, (2 + d,)) for d, (k, n) in enumerate(places)]
    taken = b.prim("take", x, tuple(at), (lead, lead + 1))
    return b.reshape(move_first(b, taken, 4, lead), b.out.shape)


def _shuffle(is_wider: bool, b: Build, x: Value, r: int) -> Value:
    """Pixels out of channels, or the other way round."""
    lead, (c, h, w) = product(x.shape[:-3]), x.shape[-3:]
    wider, narrower = (lead, c // (r * r), r, r, h, w), (lead, c, h // r, r, w // r, r)
    order = (0, 1, 4, 2, 5, 3) if is_wider else (0, 1, 3, 5, 2, 4)
    parts = b.permute(b.reshape(x, wider if is_wider else narrower), order)
    return b.prim("copy", b.reshape(parts, b.out.shape))


decomposes("aten.pixel_shuffle")(partial(_shuffle, True))
decomposes("aten.pixel_unshuffle")(partial(_shuffle, False))
