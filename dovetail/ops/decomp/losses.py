"""Losses and their gradients.

    aten.mse_loss(x, y, 1)            ->  mean of (x - y) * (x - y)
    aten.nll_loss_forward(x, t, ...)  ->  (-sum of x[i, t[i]] / count, count)

reduction: 0 none, 1 mean, 2 sum.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from dovetail.ir.types import I64
from dovetail.ops.build import Build, Maybe, Number, Results, Value, common_shape, compute_dtype, plain
from dovetail.ops.decomp.index import as_position
from dovetail.ops.decomp.pointwise import clamp_values, finish
from dovetail.ops.decomp.reductions import as_float
from dovetail.ops.registry import decline_if, decomposes

NONE, MEAN, SUM = 0, 1, 2


def reduced(b: Build, loss: Value, reduction: int) -> Value:
    """Eager rounds the elementwise loss before reducing only for half types' results."""
    if reduction == NONE:
        return finish(b, loss)
    total = b.reduce("sum", loss, range(loss.ndim))
    if reduction == MEAN:
        total = total / as_float(loss.type.numel)
    return total.to(b.out.dtype)


def pair(b: Build, x: Value, y: Value) -> tuple[Value, Value]:
    shape = common_shape([x.shape, y.shape])
    return b.expand(b.value(x), shape), b.expand(b.value(y), shape)


def _loss(
    fn: Callable[..., Value], b: Build, x: Value, target: Value, reduction: int = MEAN, *rest: float
) -> Value:
    decline_if(b.out.dtype.is_low_precision and reduction != NONE)
    return reduced(b, fn(b, *pair(b, x, target), *rest), reduction)


def _loss_backward(
    fn: Callable[..., Value], b: Build, grad: Value, x: Value, target: Value, reduction: int = MEAN,
    *rest: float,
) -> Value:  # fmt: skip
    (v, t), g = pair(b, x, target), b.value(grad)
    return finish(b, fn(b, v, t, *rest) * (g / as_float(v.type.numel) if reduction == MEAN else g))


def _mse(b: Build, x: Value, y: Value) -> Value:
    gap = x - y
    return gap * gap


def _smooth_l1(b: Build, x: Value, y: Value, beta: float = 1.0) -> Value:
    gap = b.call("abs", x - y)
    if beta == 0:
        return gap
    return b.where(gap < plain(beta), 0.5 * gap * gap / plain(beta), gap - 0.5 * plain(beta))


def _smooth_l1_slope(b: Build, x: Value, y: Value, beta: float = 1.0) -> Value:
    gap = x - y
    if beta == 0:
        return b.call("sign", gap)
    return b.where(b.call("abs", gap) < plain(beta), gap / plain(beta), b.call("sign", gap))


LOSSES: Final[dict[str, tuple[Callable[..., Value], Callable[..., Value]]]] = {
    "mse_loss": (_mse, lambda b, x, y: (x - y) * 2.0),
    "smooth_l1_loss": (_smooth_l1, _smooth_l1_slope),
    "huber_loss": (
        lambda b, x, y, d=1.0: _smooth_l1(b, x, y, d) * plain(d),
        lambda b, x, y, d=1.0: clamp_values(b, x - y, -plain(d), plain(d))),
}
"""Of an input and a target: the loss of each element, and its slope."""
for _name, (_value, _slope) in LOSSES.items():
    decomposes(f"aten.{_name}")(partial(_loss, _value))
    decomposes(f"aten.{_name}_backward")(partial(_loss_backward, _slope))


@decomposes("aten.binary_cross_entropy_backward")
def bce_backward(b: Build, grad: Value, x: Value, y: Value, weight: Maybe = None, *reduction: int) -> Value:
    """The loss itself raises where x is no probability, and so stays the library's."""
    decline_if(weight is not None)
    slope = lambda b, x, y: (x - y) / b.call("maximum", (1.0 - x) * x, 1e-12)
    return _loss_backward(slope, b, grad, x, y, *reduction)


# -- negative log likelihood -----------------------------------------------------------------------


def _weights(b: Build, x: Value, target: Value, weight: Maybe, ignore: Number) -> tuple[Value, Value]:
    """(safe target, weight per target: 0 where ignored). On the CPU, eager adds up half types in an order and
    a precision of its own."""
    is_odd = x.dtype.is_low_precision and x.type.device.kind == "cpu"
    decline_if(is_odd or target.dtype is not I64 or x.ndim == 1 or x.type.numel.hi == 0)
    kept = target.ne(ignore)
    safe = as_position(b, b.where(kept, target, 0), x.shape[1])
    v = compute_dtype(x.dtype)
    if weight is None:
        per = b.where(kept, 1.0, 0.0, dtype=v)
    else:
        per = b.where(kept, b.prim("take", weight.to(v), (safe,), (0,)), 0.0)
    return safe, per


@decomposes("aten.nll_loss_forward", "aten.nll_loss2d_forward")
def nll_loss_forward(
    b: Build, x: Value, target: Value, weight: Maybe, reduction: int, ignore_index: Number
) -> Results:
    safe, per = _weights(b, x, target, weight, ignore_index)
    picked = b.reshape(b.prim("gather", x, 1, b.unsqueeze(safe, (1,))), target.shape)
    loss = -b.value(picked) * per
    if reduction == NONE:
        return b.results(loss, b.full((), 0, loss.dtype, x.type.device))
    count = b.reduce("sum", per, range(per.ndim))
    total = b.reduce("sum", loss, range(loss.ndim))
    return b.results(total / count if reduction == MEAN else total, count)


@decomposes("aten.nll_loss_backward", "aten.nll_loss2d_backward")
def nll_loss_backward(
    b: Build, grad: Value, x: Value, target: Value, weight: Maybe, reduction: int, ignore: Number, all: Value
) -> Value:
    """A one-hot comparison, so that it fuses with the gradient of log_softmax."""
    safe, per = _weights(b, x, target, weight, ignore)
    g = grad if reduction != MEAN else (b.value(grad) / b.value(all)).to(grad.dtype)
    value = -(b.expand(b.value(g), target.shape) * per).to(x.dtype)
    dims = [d for d in range(x.ndim) if d != 1]
    classes = b.broadcast(b.iota(x.shape[1], I64, x.type.device), x.shape, (1,))
    hit = classes.eq(b.broadcast(safe, x.shape, dims))
    return b.where(hit, b.broadcast(value, x.shape, dims), 0.0)
