"""Activations and their gradients.

    aten.gelu.default(x)                   ->  0.5 * x * (1 + erf(x / sqrt(2)))
    aten.gelu_backward.default(grad, x)    ->  grad * (cdf + x * pdf)
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from dovetail.ops.build import Build, Results, Value, plain, rounded
from dovetail.ops.decomp.pointwise import clamp_values, finish, pointwise
from dovetail.ops.registry import decline_if, decomposes

SQRT_HALF: Final = math.sqrt(0.5)
SQRT_2_OVER_PI: Final = math.sqrt(2.0 / math.pi)
GELU_CUBE: Final = 0.044715


def _silu_backward(b: Build, grad: Value, x: Value) -> Value:
    s = 1.0 / (1.0 + b.call("exp", -x))
    return grad * s * (1.0 + x * (1.0 - s))


def _mish_gate(b: Build, x: Value) -> Value:
    return b.call("tanh", b.call("log1p", b.call("exp", x)))


def _mish_backward(b: Build, grad: Value, x: Value) -> Value:
    t = _mish_gate(b, x)
    return grad * (t + x * b.call("sigmoid", x) * (1.0 - t * t))


def _elu(b: Build, x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Value:
    below = b.call("expm1", x * plain(input_scale)) * (plain(alpha) * plain(scale))
    return b.where(x <= 0.0, below, x * plain(scale))


def _softplus(b: Build, x: Value, beta: float = 1, threshold: float = 20) -> Value:
    scaled = x * plain(beta)
    return b.where(scaled > plain(threshold), x, b.call("log1p", b.call("exp", scaled)) / plain(beta))


def _softplus_backward(b: Build, grad: Value, x: Value, beta: float, threshold: float) -> Value:
    z = b.call("exp", x * plain(beta))
    return b.where(x * plain(beta) > plain(threshold), grad, grad * z / (z + 1.0))


def _gelu_bend(b: Build, x: Value) -> Value:
    return b.call("tanh", SQRT_2_OVER_PI * (x + GELU_CUBE * (x * x * x)))


def _gelu(b: Build, x: Value, *, approximate: str = "none") -> Value:
    if approximate == "tanh":
        return 0.5 * x * (1.0 + _gelu_bend(b, x))
    return x * 0.5 * (1.0 + b.call("erf", x * SQRT_HALF))


def _gelu_backward(b: Build, grad: Value, x: Value, *, approximate: str = "none") -> Value:
    if approximate == "tanh":
        t = _gelu_bend(b, x)
        slope = SQRT_2_OVER_PI * (1.0 + (3.0 * GELU_CUBE) * (x * x))
        return grad * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope)
    cdf = 0.5 * (1.0 + b.call("erf", x * SQRT_HALF))
    pdf = b.call("exp", x * x * -0.5) * (1.0 / math.sqrt(2.0 * math.pi))
    return grad * (cdf + x * pdf)


def _is_beyond(b: Build, x: Value, by: float) -> Value:
    """On the CPU, eager's kernel rounds the bound to the half type it works on."""
    bound = rounded(plain(by), b.out.dtype) if b.out.device.kind == "cpu" else plain(by)
    return (x > bound) | (x < -bound)


FORMULAS: Final[dict[str, Callable[..., Value]]] = {
    "relu": lambda b, x: b.call("maximum", 0.0 if x.dtype.is_float else 0, x),
    "silu": lambda b, x: x / (1.0 + b.call("exp", -x)),
    "silu_backward": _silu_backward,
    "sigmoid_backward": lambda b, grad, y: grad * (1.0 - y) * y,
    "tanh_backward": lambda b, grad, y: grad * (1.0 - y * y),
    "hardsigmoid": lambda b, x: clamp_values(b, x + 3.0, 0.0, 6.0) / 6.0,
    "hardsigmoid_backward": lambda b, grad, x: b.where((x > -3.0) & (x < 3.0), grad * (1.0 / 6.0), 0.0),
    "hardswish": lambda b, x: x * clamp_values(b, x + 3.0, 0.0, 6.0) / 6.0,
    "hardswish_backward": lambda b, grad, x: b.where(
        x <= -3.0, 0.0, b.where(x >= 3.0, grad, grad * (x / 3.0 + 0.5))),
    "_prelu_kernel": lambda b, x, weight: b.where(x > 0.0, x, weight * x),
    "mish": lambda b, x: x * _mish_gate(b, x),
    "mish_backward": _mish_backward,
    "hardtanh": lambda b, x, low=-1.0, high=1.0: clamp_values(b, x, low, high),
    "hardtanh_backward": lambda b, grad, x, low, high: b.where((x > low) & (x < high), grad, 0.0),
    "threshold_backward": lambda b, grad, x, threshold: b.where(
        x <= threshold, 0.0 if grad.dtype.is_float else 0, grad),
    "elu": _elu,
    "elu_backward": lambda b, grad, alpha, scale, by, is_result, x: grad * b.where(
        x <= 0.0, plain(by) * (x + plain(alpha) * plain(scale) if is_result else
        b.call("exp", x * plain(by)) * (plain(alpha) * plain(scale))), plain(scale)),
    "log_sigmoid_backward": lambda b, grad, x, kept: grad * b.call("sigmoid", -x),
    "logaddexp": lambda b, x, y: b.where(x.eq(y) & b.call("isinf", x), x, b.call("maximum", x, y)
        + b.call("log1p", b.call("exp", -b.call("abs", x - y)))),
    "xlogy.Tensor": lambda b, x, y: b.where(x.eq(0.0) & y.eq(y), 0.0, x * b.call("log", y)),
    "celu": lambda b, x, alpha=1.0: b.where(x > 0.0, x, b.call("expm1", x / plain(alpha)) * plain(alpha)),
    "leaky_relu": lambda b, x, slope=0.01: b.where(x > 0.0, x, x * slope),
    "leaky_relu_backward": lambda b, grad, x, slope, is_result: b.where(x > 0.0, grad, grad * slope),
    "softshrink": lambda b, x, by=0.5: b.where(
        x > plain(by), x - plain(by), b.where(x < -plain(by), x + plain(by), b.where(x.eq(x), 0.0, x))),
    "hardshrink": lambda b, x, by=0.5: b.where(_is_beyond(b, x, by) | x.ne(x), x, 0.0),
    **dict.fromkeys(("softshrink_backward", "hardshrink_backward"),
        lambda b, grad, x, by: b.where(_is_beyond(b, x, by), grad, 0.0)),
    "gelu": _gelu, "gelu_backward": _gelu_backward,
    "softplus": _softplus,
    "softplus_backward": _softplus_backward,
}  # fmt: skip


for _name, _formula in FORMULAS.items():
    decomposes(f"aten.{_name}", prim=_name == "relu")(pointwise(_formula))


@decomposes("aten.log_sigmoid_forward")
def log_sigmoid(b: Build, x: Value) -> tuple[Value, Value]:
    """And what eager keeps for the gradient, which on a GPU is nothing."""
    decline_if(x.dtype.is_low_precision)
    z = b.call("exp", -b.call("abs", x))
    kept = z if x.type.device.kind == "cpu" else b.full((0,), 0.0, x.dtype, x.type.device)
    return b.call("minimum", x, 0.0) - b.call("log1p", z), kept


@decomposes("aten._prelu_kernel_backward")
def prelu_backward(b: Build, grad: Value, x: Value, weight: Value) -> Results:
    g, v, w = map(b.value, (grad, x, weight))
    return b.results(b.where(v > 0.0, g, w * g), b.where(v > 0.0, 0.0, v * g))


def _halves(b: Build, x: Value, dim: int) -> tuple[Value, Value]:
    dim %= x.ndim
    size = x.shape[dim]
    return b.slice(x, dim, 0, size // 2), b.call("sigmoid", b.slice(x, dim, size // 2, size))


@decomposes("aten.glu")
def glu(b: Build, x: Value, dim: int = -1) -> Value:
    first, gate = _halves(b, b.value(x), dim)
    return finish(b, first * gate)


@decomposes("aten.glu_backward")
def glu_backward(b: Build, grad: Value, x: Value, dim: int) -> Value:
    g, (first, gate) = b.value(grad), _halves(b, b.value(x), dim)
    return finish(b, b.cat([g * gate, g * first * gate * (1.0 - gate)], dim % x.ndim))
