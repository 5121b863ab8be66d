"""The gradient of a depthwise convolution's weights, for channels-last images on the CPU.

    dw[i, j, c] = sum over n, y, x of grad[n, y, x, c] * padded[n, y + i, x + j, c]

oneDNN has fast code for it for filters of 3 by 3 only. A kernel of ours sums for all j of a row of the filter
at once: a vector of channels of `grad` is read once for them.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from dovetail.ir.expr import const
from dovetail.ir.types import F32
from dovetail.ops.build import Build, Value
from dovetail.ops.registry import decline_if, decomposes

LAST: Final = (0, 2, 3, 1)
"""The dimensions of images as they lie in memory."""
SMALL: Final = 9
"""Weights of a filter that the library is fast with."""
WIDEST: Final = 16
"""Sums that fit into registers."""


@decomposes("aten.convolution_backward")
def convolution_backward(b: Build, grad: Value, x: Value, weight: Value, *rest: Any) -> Any:
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
