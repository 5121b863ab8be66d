"""Pointwise arithmetic: one value in, one value out, element by element.

    aten.add.Tensor(x: bf16, y: f32[1], alpha=2)  ->  convert both, y * 2, add, convert back

Every op computes in the type in which eager computes (fp32 for half types) and rounds once, at the end.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from dovetail.ir.loop import FLOAT_UNARY
from dovetail.ir.types import BOOL, DType
from dovetail.ops.build import Build, Number, Operand, Value, compute_dtype, plain, promoted, rounded
from dovetail.ops.registry import Declined, decline_if, decomposes


def finish(b: Build, x: Value) -> Value:
    """Round to eager's result type, in eager's shape."""
    return b.expand(x.to(b.out.dtype), b.out.shape)


def pointwise(fn: Callable[..., Value]) -> Callable[..., Value]:
    """A rule on operands already in the compute type; the result is rounded."""
    return lambda b, *args, **kwargs: finish(b, fn(b, *ready(b, args), **kwargs))


def ready(b: Build, args: tuple[Operand, ...]) -> tuple[Operand, ...]:
    got = b.operands(*args)
    if not any(isinstance(x, Value) for x in got):
        return (b.value(args[0]), *got[1:])
    return got


def ready_rounded(b: Build, args: tuple[Operand, ...]) -> tuple[Any, ...]:
    """As `ready`, where eager's CPU kernel rounds numbers and 0-d tensors to the half type it works on.
    (Multiplication and division do not; nor do the GPU's kernels.)"""
    dtype = b.out.dtype
    if dtype is BOOL:
        dtype = promoted(args)
    if not dtype.is_low_precision or b.out.device.kind != "cpu":
        return ready(b, args)
    return ready(b, tuple(_rounded(b, x, dtype) for x in args))


def _rounded(b: Build, x: Operand, dtype: DType) -> Operand:
    if isinstance(x, Value):
        return x.to(dtype) if not x.ndim else x
    if isinstance(x, (int, float)):
        return rounded(float(x), dtype)
    return b.full((), x, dtype, b.out.device)


# -- unary -----------------------------------------------------------------------------------------


def _unary(prim: str) -> Callable[..., Value]:
    return pointwise(lambda b, x: b.call(prim, x))


for _name in FLOAT_UNARY:
    decomposes(f"aten.{_name}", prim=True)(_unary(_name))


def _changing(prim: str, is_changed: Callable[[DType], bool]) -> Callable[..., Value]:
    """Functions that are the identity on other types."""
    return lambda b, x: finish(b, b.call(prim, b.value(x))) if is_changed(x.dtype) else b.prim("copy", x)


ROUNDINGS: Final = ("floor", "ceil", "trunc", "round")
for _name in ROUNDINGS:
    decomposes(f"aten.{_name}", prim=True)(_changing(_name, lambda dtype: dtype.is_float))
decomposes("aten.neg", "aten._neg_view", prim=True)(_unary("neg"))
decomposes("aten.abs", prim=True)(_changing("abs", lambda dtype: dtype is not BOOL))
decomposes("aten.sign", "aten.sgn", prim=True)(_changing("sign", lambda dtype: dtype is not BOOL))
decomposes("aten.logical_not", prim=True)(lambda b, x: finish(b, ~truth(b, x)))
decomposes("aten.bitwise_not", prim=True)(lambda b, x: ~x if x.dtype is BOOL else b.call("bit_not", x))


def _class_test(prim: str, b: Build, x: Value) -> Value:
    """A test that only floating point can pass."""
    if not x.dtype.is_float:
        return b.full(x.shape, False, BOOL, x.type.device)
    return b.call(prim, x.to(compute_dtype(x.dtype)))


for _name in ("isnan", "isinf"):
    decomposes(f"aten.{_name}", prim=True)(partial(_class_test, _name))


@decomposes("aten.nan_to_num")
def nan_to_num(
    b: Build, x: Value, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Value:
    if not x.dtype.is_float:
        return b.prim("copy", x)
    top = torch.finfo(getattr(torch, x.dtype.torch_name)).max
    v = b.value(x)
    out = b.where(b.call("isnan", v), 0.0 if nan is None else float(nan), v)
    out = b.where(v.eq(math.inf), top if posinf is None else float(posinf), out)
    return finish(b, b.where(v.eq(-math.inf), -top if neginf is None else float(neginf), out))


FORMULAS: Final[dict[str, Callable[..., Value]]] = {
    "deg2rad": lambda b, x: x * (math.pi / 180.0),
    "rad2deg": lambda b, x: x * (180.0 / math.pi),
    "threshold": lambda b, x, threshold, value: b.where(x <= threshold, value, x),
    "native_dropout_backward": lambda b, grad, mask, scale: grad * mask * scale,
    "addcmul": lambda b, x, y, z, value=1: x + (y * z if value == 1 else y * z * b.operands(value)[0]),
    "addcdiv": lambda b, x, y, z, value=1: x + (y if value == 1 else y * b.operands(value)[0]) / z,
}
for _name, _formula in FORMULAS.items():
    decomposes(f"aten.{_name}")(pointwise(_formula))


# -- binary ----------------------------------------------------------------------------------------


def truth(b: Build, x: Operand) -> Value:
    if not isinstance(x, Value):
        return b.full((), bool(x), BOOL, b.out.device)
    return x if x.dtype is BOOL else x.to(compute_dtype(x.dtype)).ne(0)


def _sum(prim: str, b: Build, x: Operand, y: Operand, alpha: Number = 1) -> Value:
    """add, and sub, which eager has not for bools"""
    x, y = ready_rounded(b, (x, y))
    if b.out.dtype is BOOL:
        return finish(b, b.call("logical_or", x, y if alpha else False))
    return finish(b, b.call(prim, x, _times(b, y, alpha)))


for _name in ("add", "sub"):
    decomposes(f"aten.{_name}.Tensor", f"aten.{_name}.Scalar", prim=True)(partial(_sum, _name))
decomposes("aten.rsub.Tensor", "aten.rsub.Scalar")(lambda b, x, y, alpha=1: _sum("sub", b, y, x, alpha))


def _times(b: Build, x: Operand, alpha: Number) -> Operand:
    if isinstance(alpha, (int, float)) and alpha == 1:
        return x
    scale: Operand = ready_rounded(b, (x, alpha))[1]
    return b.value(x) * scale


def _divisor(b: Build, y: Operand) -> Operand:
    """On the CPU integers are not divided by zero: eager's own kernel says so where it may happen."""
    if b.out.dtype.is_integer and b.out.device.kind == "cpu" and (isinstance(y, Value) or y == 0):
        raise Declined
    return y


@decomposes("aten.div.Tensor_mode", "aten.div.Scalar_mode", "aten.floor_divide", "aten.floor_divide.Scalar")
def div_rounded(b: Build, x: Operand, y: Operand, *, rounding_mode: str | None = "floor") -> Value:
    mode = rounding_mode
    x, y = ready(b, (x, _divisor(b, y)))
    if mode is None:
        return finish(b, b.call("div", x, y))
    if mode == "trunc" and b.out.dtype.is_float:
        quotient = b.call("div", x, y)
        rounded = quotient.to(b.out.dtype).to(quotient.dtype)  # as eager does in between
        return finish(b, b.call("trunc", rounded))
    return finish(b, b.call("truncdiv" if mode == "trunc" else "floordiv", x, y))


@decomposes("aten.remainder.Tensor", "aten.remainder.Scalar", "aten.remainder.Scalar_Tensor", prim=True)
def remainder(b: Build, x: Operand, y: Operand) -> Value:
    return finish(b, b.call("remainder", *ready_rounded(b, (x, _divisor(b, y)))))


@decomposes("aten.fmod.Tensor", "aten.fmod.Scalar")
def fmod(b: Build, x: Operand, y: Operand) -> Value:
    decline_if(not b.out.dtype.is_float)
    x, y = ready_rounded(b, (x, y))
    size = b.call("abs", y) if isinstance(y, Value) else abs(plain(y))
    return finish(b, b.call("copysign", b.call("remainder", b.call("abs", x), size), x))


def _binary(prim: str, on_bool: str = "") -> Callable[..., Value]:
    return pointwise(lambda b, x, y: b.call(on_bool if on_bool and b.out.dtype is BOOL else prim, x, y))


for _name in ("atan2", "hypot"):
    decomposes(f"aten.{_name}", prim=True)(_binary(_name))
decomposes("aten.copysign.Tensor", "aten.copysign.Scalar", prim=True)(_binary("copysign"))
for _name, _on_bool in (("fmax", "or"), ("fmin", "and"), ("maximum", "or"), ("minimum", "and")):
    decomposes(f"aten.{_name}", prim=True)(_binary(_name, f"logical_{_on_bool}"))
decomposes("aten.mul.Tensor", "aten.mul.Scalar", prim=True)(_binary("mul", "logical_and"))
decomposes("aten.div.Tensor", "aten.div.Scalar", prim=True)(_binary("div"))


def _compare(prim: str) -> Callable[..., Value]:
    return lambda b, x, y: finish(b, b.call(prim, *ready_rounded(b, (x, y))))


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    decomposes(f"aten.{_name}.Tensor", f"aten.{_name}.Scalar", prim=True)(_compare(_name))


def _logical(prim: str) -> Callable[..., Value]:
    return lambda b, x, y: finish(b, b.call(prim, truth(b, x), truth(b, y)))


decomposes("aten.logical_and", prim=True)(_logical("logical_and"))
decomposes("aten.logical_or", prim=True)(_logical("logical_or"))
decomposes("aten.logical_xor", prim=True)(_logical("ne"))
for _name, _on_bool in (("and", "logical_and"), ("or", "logical_or"), ("xor", "ne")):
    names = f"aten.bitwise_{_name}.Tensor", f"aten.bitwise_{_name}.Scalar"
    decomposes(*names, prim=True)(_binary(f"bit_{_name}", _on_bool))


@decomposes("aten.pow.Tensor_Scalar", "aten.pow.Tensor_Tensor", "aten.pow.Scalar")
def power(b: Build, x: Operand, exponent: Operand) -> Value:
    """Small exponents are products, as in eager's kernel."""
    decline_if(not b.out.dtype.is_float)
    v, e = ready_rounded(b, (x, exponent))
    special: dict[Number, Callable[[Value], Value]] = {
        0.0: lambda v: b.full(v.shape, 1, v.dtype, v.type.device),
        1.0: lambda v: b.prim("copy", v),
        2.0: lambda v: v * v,
        3.0: lambda v: v * v * v,
        0.5: lambda v: b.call("sqrt", v),
        -0.5: lambda v: b.call("rsqrt", v),
        -1.0: lambda v: b.call("reciprocal", v),
        -2.0: lambda v: b.call("reciprocal", v * v),
    }
    rule = special.get(e) if isinstance(e, float) else None
    return finish(b, rule(v) if rule else b.call("pow", v, e))


# -- three operands --------------------------------------------------------------------------------


def clamp_values(b: Build, v: Value, low: Operand | None, high: Operand | None) -> Value:
    """NaN stays NaN, and what equals a bound stays as it is (-0); the upper bound wins if they cross."""
    if low is not None:
        v = b.call("maximum", low, v)
    return v if high is None else b.call("minimum", high, v)


@decomposes("aten.clamp", "aten.clamp.Tensor", "aten.clamp_min", "aten.clamp_min.Tensor")
def clamp(b: Build, x: Value, min: Operand | None = None, max: Operand | None = None) -> Value:
    decline_if(b.out.dtype is BOOL)
    v = b.value(x)
    low, high = (None if bound is None else b.operands(bound)[0] for bound in (min, max))
    return finish(b, clamp_values(b, v, low, high))


decomposes("aten.clamp_max", "aten.clamp_max.Tensor")(lambda b, x, max: clamp(b, x, None, max))


@decomposes("aten.where.self", prim=True)
def where(b: Build, condition: Value, x: Operand, y: Operand) -> Value:
    dtype = b.out.dtype
    x, y = (v.to(dtype) if isinstance(v, Value) else v for v in (x, y))
    return b.expand(b.where(truth(b, condition), x, y, dtype=dtype), b.out.shape)


names = "aten.masked_fill.Scalar", "aten.masked_fill.Tensor"
decomposes(*names)(lambda b, x, mask, value: where(b, mask, value, x))


@decomposes("aten.lerp.Scalar", "aten.lerp.Tensor")
@pointwise
def lerp(b: Build, start: Value, end: Value, weight: Operand) -> Value:
    gap = end - start
    if isinstance(weight, float):
        return start + gap * weight if abs(weight) < 0.5 else end - gap * (1.0 - weight)
    if not isinstance(weight, Value):
        weight = b.full((), weight, start.dtype, start.type.device)
    near, far = start + gap * weight, end - gap * (1.0 - weight)
    return b.where(b.call("abs", weight) < 0.5, near, far)
