"""Optimizers' list operations, one ordinary op per tensor, which then fuse as any pointwise work does.

    aten._foreach_add.List([p, q], [g, h], alpha=-0.1)  ->  (p - 0.1 * g, q - 0.1 * h)
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from dovetail.ir.types import TensorType
from dovetail.ops.build import Build, Value
from dovetail.ops.registry import DECOMPOSITIONS, Declined, decomposes

BINARY: Final = {
    "add": "aten.add.Tensor", "sub": "aten.sub.Tensor", "mul": "aten.mul.Tensor", "div": "aten.div.Tensor",
    "maximum": "aten.maximum.default", "minimum": "aten.minimum.default", "pow": "aten.pow.Tensor_Tensor",
    "clamp_min": "aten.maximum.default", "clamp_max": "aten.minimum.default",
}  # fmt: skip
UNARY: Final = (
    "abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor", "frac",
    "lgamma", "log", "log10", "log1p", "log2", "neg", "reciprocal", "round", "rsqrt", "sigmoid", "sign",
    "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip
TERNARY: Final = {"addcmul": "aten.addcmul.default", "addcdiv": "aten.addcdiv.default"}


def each(b: Build, rule: Callable[..., Any], columns: Sequence[Sequence[Any]], **kwargs: Any) -> list[Value]:
    """Apply a rule to every row of arguments, with that row's result type."""
    whole = b.out_type
    assert isinstance(whole, tuple)
    results = []
    for type, *row in zip(whole, *columns, strict=True):
        assert isinstance(type, TensorType)
        b.out_type = type
        results.append(rule(b, *row, **kwargs))
    b.out_type = whole
    return results


def _unary(op: str) -> Callable[..., list[Value]]:
    return lambda b, xs: each(b, DECOMPOSITIONS[op], [xs])


def _with_list(op: str) -> Callable[..., list[Value]]:
    return lambda b, xs, ys, **kwargs: each(b, DECOMPOSITIONS[op], [xs, ys], **kwargs)


def _with_one(op: str) -> Callable[..., list[Value]]:
    return lambda b, xs, y, **kwargs: each(b, DECOMPOSITIONS[op], [xs, [y] * len(xs)], **kwargs)


for _name in UNARY:
    decomposes(f"aten._foreach_{_name}")(_unary(f"aten.{_name}.default"))
for _name, _op in BINARY.items():
    decomposes(f"aten._foreach_{_name}.List", f"aten._foreach_{_name}.ScalarList")(_with_list(_op))
    if _name != "pow":
        decomposes(f"aten._foreach_{_name}.Scalar")(_with_one(_op))
for _name in ("add", "mul", "div"):
    decomposes(f"aten._foreach_{_name}.Tensor")(_with_one(BINARY[_name]))
decomposes("aten._foreach_pow.Scalar")(_with_one("aten.pow.Tensor_Scalar"))


@decomposes("aten._foreach_pow.ScalarAndTensor")
def pow_scalar_base(b: Build, base: float, exponents: Sequence[Value]) -> list[Value]:
    return each(b, DECOMPOSITIONS["aten.pow.Scalar"], [[base] * len(exponents), exponents])


def _three(op: str) -> Callable[..., list[Value]]:
    def rule(
        b: Build, xs: Sequence[Value], ys: Sequence[Value], zs: Sequence[Value], value: Any = 1
    ) -> list[Value]:
        if isinstance(value, Value):
            raise Declined
        values = value if isinstance(value, (tuple, list)) else [value] * len(xs)

        def one(b: Build, x: Value, y: Value, z: Value, v: Any) -> Any:
            return DECOMPOSITIONS[op](b, x, y, z, value=v)

        return each(b, one, [xs, ys, zs, values])

    return rule


for _name, _op in TERNARY.items():
    decomposes(*(f"aten._foreach_{_name}.{overload}" for overload in ("Scalar", "ScalarList", "Tensor")))(
        _three(_op)
    )


@decomposes("aten._foreach_lerp.List")
def lerp_list(b: Build, xs: Sequence[Value], ys: Sequence[Value], weights: Sequence[Value]) -> list[Value]:
    return each(b, DECOMPOSITIONS["aten.lerp.Tensor"], [xs, ys, weights])


@decomposes("aten._foreach_lerp.Scalar", "aten._foreach_lerp.ScalarList")
def lerp_scalar(b: Build, xs: Sequence[Value], ys: Sequence[Value], weight: Any) -> list[Value]:
    weights = weight if isinstance(weight, (tuple, list)) else [weight] * len(xs)
    return each(b, DECOMPOSITIONS["aten.lerp.Scalar"], [xs, ys, weights])


@decomposes("aten._foreach_norm.Scalar")
def norm(b: Build, xs: Sequence[Value], ord: float = 2, dtype: Any = None) -> list[Value]:
    return each(b, DECOMPOSITIONS["aten.linalg_vector_norm.default"], [xs, [ord] * len(xs)])


@decomposes("aten._foreach_copy")
def copy(b: Build, xs: Sequence[Value], ys: Sequence[Value], non_blocking: bool = False) -> list[Value]:
    return each(b, DECOMPOSITIONS["aten.copy.default"], [xs, ys])


@decomposes("aten._foreach_zero")
def zero(b: Build, xs: Sequence[Value]) -> list[Value]:
    return each(b, DECOMPOSITIONS["aten.zero.default"], [xs])


@decomposes("aten._foreach_clone")
def clone(b: Build, xs: Sequence[Value], *, memory_format: Any = None) -> list[Value]:
    return each(b, DECOMPOSITIONS["aten.clone.default"], [xs])
