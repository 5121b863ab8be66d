"""Normalisation layers and their gradients.

    aten.native_layer_norm(x, [64], w, b, eps)  ->  (out, mean, rstd):  welford, rsqrt, one pointwise body

Statistics are in fp32 for half types, and are returned in the type eager returns them in.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.ir.expr import Expr, product
from dovetail.ir.types import F64
from dovetail.ops.build import Build, Maybe, Results, Value, plain
from dovetail.ops.decomp.reductions import accumulate, as_float, check_not_empty, count, moments
from dovetail.ops.registry import Declined, decline_if, decomposes


def _rstd(b: Build, squares: Value, size: Expr, eps: float) -> Value:
    return b.call("rsqrt", squares / as_float(size) + plain(eps))


def _along(b: Build, x: Value, like: Value, dims: Sequence[int] = (1,)) -> Value:
    """A vector, per channel if nothing else is said, spread over `like`, in its type."""
    return b.broadcast(x.to(like.dtype), like.shape, dims)


def _affine(b: Build, y: Value, weight: Maybe, bias: Maybe = None, dims: Sequence[int] = (1,)) -> Value:
    if weight is not None:
        y = y * _along(b, weight, y, dims)
    return y if bias is None else y + _along(b, bias, y, dims)


def _normal(b: Build, v: Value, dims: Sequence[int], eps: float) -> tuple[Value, Value, Value]:
    """Distances from the mean in units of the spread; the mean, and 1 / the spread."""
    mean, squares = moments(b, v, dims, keepdim=True)
    rstd = _rstd(b, squares, count(v, dims), eps)
    return (v - mean) * rstd, mean, rstd


def _behind(
    b: Build, g: Value, normal: Value, rstd: Value, dims: Sequence[int], is_centred: bool = True
) -> Value:
    """The gradient by what was normalised."""
    size = as_float(count(g, dims))
    slope = b.reduce("sum", g * normal, dims, keepdim=True) / size
    centred = g - b.reduce("sum", g, dims, keepdim=True) / size if is_centred else g
    return (centred - normal * slope) * rstd


@decomposes("aten.native_layer_norm")
def layer_norm(
    b: Build, x: Value, normalized_shape: Sequence[Expr], weight: Maybe, bias: Maybe, eps: float
) -> Results:
    dims = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    check_not_empty(x, range(x.ndim))
    normal, mean, rstd = _normal(b, accumulate(x, x.dtype), dims, eps)
    return b.results(_affine(b, normal, weight, bias, dims), mean, rstd)


@decomposes("aten.native_layer_norm_backward")
def layer_norm_backward(
    b: Build, grad: Value, x: Value, normalized_shape: Sequence[Expr], mean: Maybe, rstd: Value,
    weight: Maybe, bias: Maybe, output_mask: Sequence[bool],
) -> Results:  # fmt: skip
    lead = x.ndim - len(normalized_shape)
    outer, inner = tuple(range(lead)), tuple(range(lead, x.ndim))
    check_not_empty(x, range(x.ndim))
    g, v = accumulate(grad, x.dtype), accumulate(x, x.dtype)
    scale = rstd.to(v.dtype)
    normal = (v if mean is None else v - mean.to(v.dtype)) * scale
    to_x = _behind(b, _affine(b, g, weight, dims=inner), normal, scale, inner, mean is not None)
    return b.results(to_x, b.reduce("sum", g * normal, outer), b.reduce("sum", g, outer))


decomposes("aten._fused_rms_norm_backward")(lambda b, grad, x, shape, rstd, weight, mask: (
    layer_norm_backward(b, grad, x, shape, None, rstd, weight, None, mask)
))  # fmt: skip


# -- batch norm: channels are dimension 1 ----------------------------------------------------------


def _exact(x: Value, like: Value) -> Value:
    """On the CPU, eager sums up a row-major batch's statistics in double precision."""
    return x.to(F64) if like.type.device.kind == "cpu" and like.type.is_contiguous else x


def _others(x: Value) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


def _normalise(b: Build, v: Value, mean: Value, rstd: Value, weight: Maybe, bias: Maybe) -> Value:
    """Eager folds the statistics into one multiply and one add per element."""
    alpha = rstd if weight is None else rstd * weight.to(v.dtype)
    beta = -mean * alpha if bias is None else bias.to(v.dtype) - mean * alpha
    return _affine(b, v, alpha, beta)


@decomposes("aten._native_batch_norm_legit_functional", "aten.native_batch_norm")
def batch_norm(
    b: Build, x: Value, weight: Maybe, bias: Maybe, running_mean: Maybe, running_var: Maybe, training: bool,
    momentum: float, eps: float,
) -> Results:  # fmt: skip
    """With the new statistics, where there were old ones; who updates those in place is pure without."""
    if not training:
        return _batch_norm_eval(b, x, weight, bias, running_mean, running_var, eps)
    dims = _others(x)
    v = accumulate(x, x.dtype)
    size = count(x, dims)
    is_impure = len(b.outs) == 3 and (running_mean is not None or running_var is not None)
    decline_if(size.lo < 2 or is_impure)
    mean, squares = moments(b, _exact(v, x), dims, keepdim=False)
    rstd = _rstd(b, squares, size, eps)
    found = [_normalise(b, v, mean.to(v.dtype), rstd.to(v.dtype), weight, bias), mean, rstd]
    for old, now in ((running_mean, mean), (running_var, squares / as_float(size - 1))):
        if old is not None:
            found.append(now * plain(momentum) + old.to(mean.dtype) * (1.0 - plain(momentum)))
    return b.results(*found)


decomposes("aten._native_batch_norm_legit_no_training", "aten._batch_norm_no_update")(
    lambda b, x, weight, bias, mean, var, *rest: batch_norm(b, x, weight, bias, mean, var, False, *rest)
)


def _batch_norm_eval(
    b: Build, x: Value, weight: Maybe, bias: Maybe, mean: Maybe, var: Maybe, eps: float
) -> Results:
    """On the CPU eager shows no statistics."""
    if mean is None or var is None or len(b.outs) == 4:
        raise Declined
    v = accumulate(x, x.dtype)
    rstd = b.call("rsqrt", var.to(v.dtype) + plain(eps))
    y = _normalise(b, v, mean.to(v.dtype), rstd, weight, bias).to(x.dtype)
    zeros = (b.full(t.shape, 0, t.dtype, t.device) if t else None for t in b.outs[1:3])
    found = (y, *zeros) if x.type.device.kind == "cpu" else b.results(y, mean, rstd)
    return *found, *(b.prim("copy", old) for old in (mean, var) if len(b.outs) == 5)


@decomposes("aten.native_batch_norm_backward")
def batch_norm_backward(
    b: Build, grad: Value, x: Value, weight: Maybe, running_mean: Any, running_var: Any, save_mean: Any,
    save_invstd: Any, train: bool, eps: float, output_mask: Sequence[bool],
) -> Results:  # fmt: skip
    """With the statistics of the batch if it is training, else with the running ones."""
    g, v = accumulate(grad, x.dtype), accumulate(x, x.dtype)
    dims = _others(x)
    size = as_float(count(x, dims))
    mean = (save_mean if train else running_mean).to(v.dtype)
    rstd = save_invstd.to(v.dtype) if train else b.call("rsqrt", running_var.to(v.dtype) + plain(eps))
    centred = v - _along(b, mean, v)
    total = b.reduce("sum", g, dims)
    wide = _exact(v, x)
    dot = b.reduce("sum", _exact(g, x) * (wide - _along(b, mean, wide)), dims)
    scale = rstd if weight is None else rstd * weight.to(v.dtype)
    if train:
        slope = _along(b, dot * rstd.to(dot.dtype) * rstd.to(dot.dtype) / size, v)
        g = g - centred * slope - _along(b, total / size, v)
    return b.results(g * _along(b, scale, v), dot * rstd.to(dot.dtype), total)


# -- group norm ------------------------------------------------------------------------------------


def _grouped(b: Build, x: Value, group: int) -> Value:
    return b.reshape(x, (x.shape[0], group, x.shape[1] // group, product(x.shape[2:])))


@decomposes("aten.native_group_norm")
def group_norm(
    b: Build, x: Value, weight: Maybe, bias: Maybe, N: Expr, C: Expr, HxW: Expr, group: int, eps: float
) -> Results:
    check_not_empty(x, range(x.ndim))
    normal, *found = _normal(b, _grouped(b, accumulate(x, x.dtype), group), (2, 3), eps)
    mean, rstd = (b.reshape(each, each.shape[:2]) for each in found)
    return b.results(_affine(b, b.reshape(normal, x.shape), weight, bias), mean, rstd)


@decomposes("aten.native_group_norm_backward")
def group_norm_backward(
    b: Build, grad: Value, x: Value, mean: Value, rstd: Value, weight: Maybe, N: Expr, C: Expr,
    HxW: Expr, group: int, output_mask: Sequence[bool],
) -> Results:  # fmt: skip
    g, v = accumulate(grad, x.dtype), accumulate(x, x.dtype)
    centre, scale = (b.unsqueeze(each.to(v.dtype), (2, 3)) for each in (mean, rstd))
    normal = (_grouped(b, v, group) - centre) * scale
    to_x = _behind(b, _grouped(b, _affine(b, g, weight), group), normal, scale, (2, 3))
    to_weight = b.reduce("sum", g * b.reshape(normal, x.shape), others := _others(x))
    return b.results(b.reshape(to_x, x.shape), to_weight, b.reduce("sum", g, others))
