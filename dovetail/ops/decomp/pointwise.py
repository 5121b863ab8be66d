"""Pointwise arithmetic: one value in, one value out, element by element.

    aten.add.Tensor(x: bf16, y: f32[1], alpha=2)  ->  convert both, y * 2, add, convert back

Every op computes in the type in which eager computes (fp32 for half types) and rounds once, at the end.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch

from dovetail.ir.types import BOOL, DType
from dovetail.ops.build import Build, Number, Operand, Value, plain
from dovetail.ops.promote import compute_dtype, promoted, rounded
from dovetail.ops.registry import Declined, decomposes


def finish(b: Build, x: Value) -> Value:
    """Round to eager's result type, in eager's shape."""
    return b.expand(x.to(b.out.dtype), b.out.shape)


def pointwise(fn: Callable[..., Value]) -> Callable[..., Value]:
    """A rule on operands already in the compute type; the result is rounded."""

    def rule(b: Build, *args: Operand, **kwargs: Any) -> Value:
        return finish(b, fn(b, *ready(b, args), **kwargs))

    return rule


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
        dtype = promoted([x.type if isinstance(x, Value) else x for x in args])
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

FLOAT_UNARY: Final = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "asin",
    "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "lgamma",
    "digamma", "sigmoid", "reciprocal", "frac",
)  # fmt: skip


def _unary(prim: str) -> Callable[..., Value]:
    return pointwise(lambda b, x: b.call(prim, x))


for _name in FLOAT_UNARY:
    decomposes(f"aten.{_name}", prim=True)(_unary(_name))


def _rounding(prim: str) -> Callable[..., Value]:
    """floor, ceil... are the identity on integers."""

    def rule(b: Build, x: Value) -> Value:
        if not x.dtype.is_float:
            return b.prim("copy", x)
        return finish(b, b.call(prim, b.value(x)))

    return rule


for _name in ("floor", "ceil", "trunc", "round"):
    decomposes(f"aten.{_name}", prim=True)(_rounding(_name))


def _on_numbers(prim: str) -> Callable[..., Value]:
    """abs and sign are the identity on bools."""
    return lambda b, x: b.prim("copy", x) if x.dtype is BOOL else finish(b, b.call(prim, b.value(x)))


decomposes("aten.neg", prim=True)(_unary("neg"))
decomposes("aten.abs", prim=True)(_on_numbers("abs"))
decomposes("aten.sign", "aten.sgn", prim=True)(_on_numbers("sign"))


@decomposes("aten.round.decimals")
def round_decimals(b: Build, x: Value, *, decimals: int) -> Value:
    if not x.dtype.is_float:
        return b.prim("copy", x)
    scale = 10.0 ** abs(decimals)
    v = b.value(x)
    out = b.call("round", v * scale) / scale if decimals >= 0 else b.call("round", v / scale) * scale
    return finish(b, out)


@decomposes("aten.logical_not", prim=True)
def logical_not(b: Build, x: Value) -> Value:
    return finish(b, ~truth(b, x))


@decomposes("aten.bitwise_not", prim=True)
def bitwise_not(b: Build, x: Value) -> Value:
    return ~x if x.dtype is BOOL else b.call("bit_not", x)


@decomposes("aten.signbit", prim=True)
def signbit(b: Build, x: Value) -> Value:
    if x.dtype.is_float:
        return b.call("signbit", x.to(compute_dtype(x.dtype)))
    return b.full(x.shape, False, BOOL, x.type.device) if x.dtype is BOOL else x < 0


def _class_test(test: str | float) -> Callable[..., Value]:
    """A test that only floating point can pass."""

    def rule(b: Build, x: Value) -> Value:
        if not x.dtype.is_float:
            return b.full(x.shape, False, BOOL, x.type.device)
        v = x.to(compute_dtype(x.dtype))
        return b.call(test, v) if isinstance(test, str) else v.eq(test)

    return rule


for _name in ("isnan", "isinf"):
    decomposes(f"aten.{_name}", prim=True)(_class_test(_name))
decomposes("aten.isposinf")(_class_test(math.inf))
decomposes("aten.isneginf")(_class_test(-math.inf))


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


def _sinc(b: Build, x: Value) -> Value:
    scaled = x * math.pi
    return b.where(x.eq(0.0), 1.0, b.call("sin", scaled) / scaled)


def _entropy(b: Build, x: Value) -> Value:
    inside = b.where(x.eq(0.0), 0.0, b.where(x < 0.0, -math.inf, -x * b.call("log", x)))
    return b.where(b.call("isnan", x), x, inside)


def _heaviside(b: Build, x: Value, y: Value) -> Value:
    if x.dtype is BOOL:
        raise Declined
    return b.where(x.eq(0), y, b.where(x < 0, 0, 1, dtype=x.dtype))


def _log_add(exp: str, scale: float) -> Callable[..., Value]:
    def formula(b: Build, x: Value, y: Value) -> Value:
        gap = b.call("log1p", b.call(exp, -b.call("abs", x - y)))
        out = b.call("maximum", x, y) + (gap if scale == 1.0 else gap * scale)
        return b.where(b.call("isinf", x) & x.eq(y), x, out)

    return formula


FORMULAS: Final[dict[str, Callable[..., Value]]] = {
    "sinc": _sinc,
    "deg2rad": lambda b, x: x * (math.pi / 180.0),
    "rad2deg": lambda b, x: x * (180.0 / math.pi),
    "special_entr": _entropy,
    "heaviside": _heaviside,
    "logaddexp": _log_add("exp", 1.0),
    "logaddexp2": _log_add("exp2", 1.0 / math.log(2.0)),
    "ldexp.Tensor": lambda b, x, y: x * b.call("exp2", y),
    "threshold": lambda b, x, threshold, value: b.where(x <= threshold, value, x),
    "native_dropout_backward": lambda b, grad, mask, scale: grad * mask * scale,
}
for _name, _formula in FORMULAS.items():
    decomposes(f"aten.{_name}")(pointwise(_formula))


@decomposes("aten.logit")
def logit(b: Build, x: Value, eps: float | None = None) -> Value:
    v = b.value(x)
    if eps is not None:
        v = clamp_values(b, v, eps, 1.0 - eps)
    return finish(b, b.call("log", v / (1.0 - v)))


# -- binary ----------------------------------------------------------------------------------------


def truth(b: Build, x: Operand) -> Value:
    if not isinstance(x, Value):
        return b.full((), bool(x), BOOL, b.out.device)
    return x if x.dtype is BOOL else x.to(compute_dtype(x.dtype)).ne(0)


@decomposes("aten.add.Tensor", "aten.add.Scalar", prim=True)
def add(b: Build, x: Operand, y: Operand, alpha: Number = 1) -> Value:
    x, y = ready_rounded(b, (x, y))
    if b.out.dtype is BOOL:
        return finish(b, b.call("logical_or", x, y if alpha else False))
    return finish(b, b.call("add", x, _times(b, y, alpha)))


@decomposes("aten.sub.Tensor", "aten.sub.Scalar", prim=True)
def sub(b: Build, x: Operand, y: Operand, alpha: Number = 1) -> Value:
    x, y = ready_rounded(b, (x, y))
    return finish(b, b.call("sub", x, _times(b, y, alpha)))


decomposes("aten.rsub.Tensor", "aten.rsub.Scalar")(lambda b, x, y, alpha=1: sub(b, y, x, alpha))


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


@decomposes("aten.fmod.Tensor", "aten.fmod.Scalar", prim=True)
def fmod(b: Build, x: Operand, y: Operand) -> Value:
    x, y = ready_rounded(b, (x, _divisor(b, y)))
    if b.out.dtype.is_float:
        return finish(b, b.call("fmod", x, y))
    return finish(b, b.call("sub", x, b.call("mul", b.call("truncdiv", x, y), y)))


def _binary(prim: str, on_bool: str = "") -> Callable[..., Value]:
    return pointwise(lambda b, x, y: b.call(on_bool if on_bool and b.out.dtype is BOOL else prim, x, y))


for _name in ("atan2", "hypot", "nextafter"):
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


def _shift(prim: str) -> Callable[..., Value]:
    def rule(b: Build, x: Operand, y: Operand) -> Value:
        if b.out.dtype.is_float:
            raise Declined
        x, y = ready(b, (x, y))
        bits = b.out.dtype.bits
        if isinstance(y, int) and 0 <= y < bits:
            return finish(b, b.call(prim, x, y))
        # Past the width eager gives 0, and for >> of signed numbers the sign.
        amount = y if isinstance(y, Value) else b.full((), y, b.out.dtype, b.out.device)
        outside = (amount < 0) | (amount >= bits)
        if prim == "shl" or b.out.dtype.kind == "uint":
            return finish(b, b.where(outside, 0, b.call(prim, x, b.where(outside, 0, amount))))
        return finish(b, b.call("shr", x, b.where(outside, bits - 1, amount)))

    return rule


for _op, _prim in (("left_shift", "shl"), ("right_shift", "shr")):
    decomposes(f"aten.bitwise_{_op}.Tensor", f"aten.bitwise_{_op}.Tensor_Scalar")(_shift(_prim))
for _op, _prim in (("lshift", "shl"), ("rshift", "shr")):
    decomposes(f"aten.__{_op}__.Tensor", f"aten.__{_op}__.Scalar")(_shift(_prim))


@decomposes("aten.pow.Tensor_Scalar")
def pow_scalar(b: Build, x: Value, exponent: Number) -> Value:
    """Small exponents are products, as in eager's kernel."""
    v, e = ready_rounded(b, (x, exponent))
    if not isinstance(v, Value):
        raise Declined
    if not b.out.dtype.is_float:
        return _integer_pow(b, v, exponent)
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


def _integer_pow(b: Build, v: Value, exponent: Number) -> Value:
    left = int(plain(exponent))
    if left < 0 or left > 64 or v.dtype is BOOL:
        raise Declined
    result, power = None, v
    while left:
        if left & 1:
            result = power if result is None else result * power
        power, left = power * power if left > 1 else power, left >> 1
    return result if result is not None else b.full(v.shape, 1, v.dtype, v.type.device)


@decomposes("aten.pow.Tensor_Tensor", "aten.pow.Scalar")
def pow_tensor(b: Build, x: Operand, y: Operand) -> Value:
    if not b.out.dtype.is_float:
        raise Declined
    x, y = ready_rounded(b, (x, y))
    return finish(b, b.call("pow", x, y))


def _x_log(log: str) -> Callable[..., Value]:
    """x * log(y), where 0 times anything is 0"""

    def formula(b: Build, x: Operand, y: Operand) -> Value:
        like = x if isinstance(x, Value) else y
        assert isinstance(like, Value)
        x, y = (v if isinstance(v, Value) else b.full((), v, like.dtype, like.type.device) for v in (x, y))
        product = x * b.call(log, y)
        return b.where(b.call("isnan", y), y, b.where(x.eq(0.0), 0.0, product))

    return pointwise(formula)


decomposes("aten.xlogy.Tensor", "aten.xlogy.Scalar_Other", "aten.xlogy.Scalar_Self")(_x_log("log"))
decomposes("aten.special_xlog1py", "aten.special_xlog1py.other_scalar",
           "aten.special_xlog1py.self_scalar")(_x_log("log1p"))  # fmt: skip


# -- three operands --------------------------------------------------------------------------------


def clamp_values(b: Build, v: Value, low: Operand | None, high: Operand | None) -> Value:
    """NaN stays NaN; where the bounds cross, the upper one wins."""
    if low is not None:
        v = b.call("maximum", v, low)
    return v if high is None else b.call("minimum", v, high)


@decomposes("aten.clamp", "aten.clamp.Tensor", "aten.clamp_min", "aten.clamp_min.Tensor")
def clamp(b: Build, x: Value, min: Operand | None = None, max: Operand | None = None) -> Value:
    if b.out.dtype is BOOL:
        raise Declined
    v = b.value(x)
    low, high = (None if bound is None else b.operands(bound)[0] for bound in (min, max))
    return finish(b, clamp_values(b, v, low, high))


decomposes("aten.clamp_max", "aten.clamp_max.Tensor")(lambda b, x, max: clamp(b, x, None, max))


@decomposes("aten.where.self", prim=True)
def where(b: Build, condition: Value, x: Operand, y: Operand) -> Value:
    dtype = b.out.dtype
    x, y = (v.to(dtype) if isinstance(v, Value) else v for v in (x, y))
    return b.expand(b.where(truth(b, condition), x, y, dtype=dtype), b.out.shape)


@decomposes("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(b: Build, x: Value, mask: Value, value: Operand) -> Value:
    fill = value.to(b.out.dtype) if isinstance(value, Value) else value
    return b.expand(b.where(mask, fill, x), b.out.shape)


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


@decomposes("aten.addcmul")
@pointwise
def addcmul(b: Build, x: Value, y: Value, z: Value, *, value: Number = 1) -> Value:
    return x + y * z * b.operands(value)[0] if value != 1 else x + y * z


@decomposes("aten.addcdiv")
@pointwise
def addcdiv(b: Build, x: Value, y: Value, z: Value, *, value: Number = 1) -> Value:
    return x + y / z if value == 1 else x + (y * b.operands(value)[0]) / z
