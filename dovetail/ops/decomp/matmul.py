"""Products: library calls, with what surrounds them opened up for fusion.

    aten.addmm(bias, a, b) whose result feeds pointwise ops   ->  aten.mm + prims.add, which fuse
    aten.addmm(bias, a, b) otherwise                          ->  stays: the library adds the bias itself
    aten.mm(one row, weight.t()) on a GPU                     ->  prims.sum(weight * row): a reduction that
                                                                  runs at memory speed and fuses
    aten.bmm(many matrices of a few elements) on a GPU        ->  products of slices, added up
"""
from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, Final

from dovetail.ir.expr import ONE, Expr, as_expr, const, floordiv
from dovetail.ir.types import F32, tensor_type
from dovetail.ops.build import Build, Maybe, Number, Results, Value, compute_dtype
from dovetail.ops.registry import decline_if, decomposes

LARGE: Final = 1 << 18
"""Elements of a matrix below which a library call costs no more than a kernel of ours."""

SIDE, MANY = 8, 1024
"""Sides and number of matrices whose products are part of the kernels around them."""


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


@decomposes("aten.bmm")
def bmm(b: Build, x: Value, y: Value) -> Value:
    """Many small matrices on a GPU, whose library does little at a time: a few terms for each element."""
    decline_if(b.out.device.kind != "cuda" or not b.out.dtype.is_float or x.shape[0].lo < MANY)
    decline_if(not all(side.is_const and 0 < side.value <= SIDE for side in (*x.shape[1:], y.shape[2])))
    left, right = (v.to(compute_dtype(b.out.dtype)) for v in (x, y))
    ends = [(b.slice(left, 2, k, k + 1), b.slice(right, 1, k, k + 1)) for k in range(x.shape[2].value)]
    terms = [b.expand(column, b.out.shape) * b.expand(row, b.out.shape) for column, row in ends]
    return functools.reduce(operator.add, terms).to(b.out.dtype)


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


# -- attention of one query, as a decoder does for each token: reductions at memory speed ----------


@decomposes("aten._scaled_dot_product_cudnn_attention", "aten._scaled_dot_product_efficient_attention")
def one_query(
    b: Build, q: Value, k: Value, v: Value, bias: Maybe, statistics: bool, dropout: Number = 0.0,
    is_causal: bool = False, debug: bool = False, *, scale: Number | None = None,
) -> Results:  # fmt: skip
    """s = sum(q * k) * scale + bias, one row of scores;  e = exp(s - max(s));  o = sum(e * v) / sum(e)

    The libraries' kernels share their work out by blocks of queries, and of one query there are no blocks;
    they also want a head of keys for every head of queries, where reductions read a repeated one in place.
    Everything else about attention stays a library call."""
    depth = q.shape[-1]
    known = depth.is_const and isinstance(scale, (int, float, type(None)))
    is_gpu, is_plain = b.out.device.kind == "cuda", dropout == 0.0 and not is_causal and not debug
    decline_if(not is_gpu or not is_plain or q.shape[2] is not ONE or not known or b.used - {0})
    wide = compute_dtype(b.out.dtype)
    batch, heads, _, _ = q.shape
    length = k.shape[2]
    keys, values = (_heads(b, x, heads).to(wide) for x in (k, v))
    factor = 1.0 / math.sqrt(depth.value) if scale is None else float(scale)  # type: ignore[arg-type]
    scores = b.reduce("sum", b.expand(q.to(wide), keys.shape) * keys, (3,)) * factor
    if bias is not None:
        scores = scores + b.reshape(b.expand(bias.to(wide), (batch, heads, ONE, length)), scores.shape)
    top = b.reduce("max", scores, (2,), keepdim=True)
    weights = b.where(scores.eq(float("-inf")), 0.0, b.call("exp", scores - top))
    total = b.reduce("sum", weights, (2,), keepdim=True)
    mixed = b.reduce("sum", b.expand(b.unsqueeze(weights, (3,)), values.shape) * values, (2,))
    mean = b.where(b.expand(total, mixed.shape).eq(0.0), 0.0, mixed / b.expand(total, mixed.shape))
    found = b.reshape(mean.to(b.out.dtype), b.out.shape)
    return (found, *(None for _ in b.outs[1:]))


decomposes("aten._scaled_dot_product_flash_attention")(
    lambda b, q, k, v, *rest, **named: one_query(b, q, k, v, None, False, *rest, **named)
)


def _heads(b: Build, x: Value, heads: Expr) -> Value:
    """One for each head of the queries: groups of them may share."""
    batch, own, length, depth = x.shape
    if own is heads:
        return x
    repeated = b.expand(b.unsqueeze(x, (2,)), (batch, own, floordiv(heads, own), length, depth))
    return b.reshape(repeated, (batch, heads, length, depth))


# -- the gradient of a depthwise convolution's weights, for channels-last images on the CPU --------


LAST: Final = (0, 2, 3, 1)
"""The dimensions of images as they lie in memory."""
SMALL: Final = 9
"""Weights of a filter that the library is fast with."""
WIDEST: Final = 16
"""Sums that fit into registers."""


@decomposes("aten._cdist_forward")
def cdist(b: Build, x: Value, y: Value, p: float, mode: Any) -> Value:
    """Distances along the axes in a few dimensions, on a GPU, whose library takes a program for each pair."""
    decline_if(p != 1.0 or b.out.device.kind != "cuda" or not x.shape[-1].is_const or x.shape[-1].value > 64)
    apart = b.unsqueeze(x, (x.ndim - 1,)) - b.unsqueeze(y, (y.ndim - 2,))
    return b.reduce("sum", b.call("abs", apart), (apart.ndim - 1,))


@decomposes("aten.linalg_cross")
def linalg_cross(b: Build, x: Value, y: Value, dim: int = -1) -> Value:
    dim %= b.out.ndim
    wide = [b.expand(v, b.out.shape) for v in (x, y)]
    (x0, x1, x2), (y0, y1, y2) = ([b.slice(v, dim, k, k + 1) for k in range(3)] for v in wide)
    return b.cat([x1 * y2 - x2 * y1, x2 * y0 - x0 * y2, x0 * y1 - x1 * y0], dim)


@decomposes("aten.convolution")
def convolution(b: Build, x: Value, weight: Value, bias: Any, *rest: Any) -> Value:
    """On a GPU the library adds the bias in a pass of its own (but for depthwise ones); ours joins others."""
    decline_if(bias is None or b.out.device.kind != "cuda" or x.shape[1] is as_expr(rest[-1]))
    made = b.extern("aten.convolution.default", (x, weight, None, *rest), b.out)
    return b.call("add", *b.operands(made, b.broadcast(bias, b.out.shape, (1,)))).to(b.out.dtype)


@decomposes("aten.convolution_backward")
def convolution_backward(b: Build, grad: Value, x: Value, weight: Value, *rest: Any) -> Any:
    """dw[i, j, c] = sum over n, y, x of grad[n, y, x, c] * padded[n, y + i, x + j, c]

    oneDNN has fast code for it for filters of 3 by 3 only. A kernel of ours sums for all j of a row of the
    filter at once: a vector of channels of `grad` is read once for them."""
    _, stride, padding, dilation, transposed, _, groups, (to_x, to_weight, to_bias) = rest
    is_fit = x.ndim == 4 and x.dtype is F32 and x.type.device.kind == "cpu" and to_weight and not transposed
    decline_if(not is_fit or not all(n.is_const for n in (*grad.shape, *x.shape, *weight.shape)))
    outer, images = b.permute(grad, LAST), b.permute(x, LAST)
    decline_if(not outer.type.is_contiguous or not images.type.is_contiguous)
    filters, depth, *taps = (n.value for n in weight.shape)
    decline_if(filters != groups or depth != 1 or not len(stride) == len(padding) == len(dilation) == 2)
    decline_if(taps[0] * taps[1] <= SMALL or taps[1] > WIDEST or groups < WIDEST)
    below: Value | None = None
    if to_x:
        given, types = (grad, x, weight, *rest[:-1], (True, False, False)), (b.outs[0], None, None)
        call: Any = b.extern("aten.convolution_backward.default", given, types)
        below = Value(b.graph.get(call.node, 0), b)
    found = _weights(b, outer, images, taps, *zip(stride, padding, dilation))
    return below, b.reshape(found, weight.shape), b.reduce("sum", grad, (0, 2, 3)) if to_bias else None


def _weights(b: Build, grad: Value, images: Value, taps: list[int], *geometry: Sequence[Any]) -> Value:
    """[c, i, j]; `geometry` is stride, padding and gap along each dimension."""
    after = [0, 0]
    for d, (step, before, gap) in enumerate(geometry):
        needed = (grad.shape[d + 1].value - 1) * step + (taps[d] - 1) * gap + 1
        after[d] = max(needed - images.shape[d + 1].value - before, 0)
    (down, above, below), (along, left, beside) = geometry
    images = b.prim("pad", images, (0, above, left, 0), (0, *after, 0), 0.0)
    n, y, x, c = images.type.stride
    spread = b.broadcast(grad, [grad.shape[0], const(taps[0]), *grad.shape[1:]], (0, 2, 3, 4))
    rows: list[Value] = []
    for j in range(taps[1]):
        strides = (n, y * below, y * down, x * along, c)
        window = b.prim("as_strided", images, spread.shape, strides, x * (beside * j))
        rows.append(b.reduce("sum", spread * window, (0, 2, 3)))
    return b.permute(b.cat([b.unsqueeze(row, (1,)) for row in rows], 1), (2, 0, 1))
