"""Optimizers' list operations, one ordinary op per tensor, which then fuse as any pointwise work does.

    aten._foreach_add.List([p, q], [g, h], alpha=-0.1)  ->  (p - 0.1 * g, q - 0.1 * h)
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
OTHERS: Final = {
    "pow.ScalarAndTensor": "aten.pow.Scalar", "pow.Scalar": "aten.pow.Tensor_Scalar",
    "lerp.List": "aten.lerp.Tensor", "lerp.Scalar": "aten.lerp.Scalar", "lerp.ScalarList": "aten.lerp.Scalar",
    "copy": "aten.copy.default", "zero": "aten.zero.default", "clone": "aten.clone.default",
}  # fmt: skip


def each(b: Build, rule: Callable[..., Any], *columns: Any, **kwargs: Any) -> list[Value]:
    """Apply a rule to every row of arguments, with that row's result type. What is no list is the same in
    every row."""
    whole = b.out_type
    assert isinstance(whole, tuple)
    listed = [x if isinstance(x, (tuple, list)) else [x] * len(whole) for x in columns]
    results = []
    for type, *row in zip(whole, *listed, strict=True):
        assert isinstance(type, TensorType)
        b.out_type = type
        results.append(rule(b, *row, **kwargs))
    b.out_type = whole
    return results


def _each(op: str) -> Callable[..., list[Value]]:
    return lambda b, *args, **kwargs: each(b, DECOMPOSITIONS[op], *args, **kwargs)


for _name in UNARY:
    decomposes(f"aten._foreach_{_name}")(_each(f"aten.{_name}.default"))
for _name, _op in BINARY.items():
    decomposes(f"aten._foreach_{_name}.List", f"aten._foreach_{_name}.ScalarList")(_each(_op))
    if _name != "pow":
        decomposes(f"aten._foreach_{_name}.Scalar")(_each(_op))
for _name in ("add", "mul", "div"):
    decomposes(f"aten._foreach_{_name}.Tensor")(_each(BINARY[_name]))
for _name, _op in OTHERS.items():
    decomposes(f"aten._foreach_{_name}")(_each(_op))


@decomposes("aten._foreach_norm.Scalar")
def norm(b: Build, xs: Sequence[Value], ord: float = 2, dtype: object = None) -> list[Value]:
    return each(b, DECOMPOSITIONS["aten.linalg_vector_norm.default"], xs, ord)


def _scaled(op: str, b: Build, xs: Any, ys: Any, zs: Any, value: Any = 1) -> list[Value]:
    """Ops whose fourth argument is a keyword of the single op."""
    if isinstance(value, Value):
        raise Declined
    one = DECOMPOSITIONS[op]
    return each(b, lambda b, x, y, z, factor: one(b, x, y, z, value=factor), xs, ys, zs, value)


for _name in ("addcmul", "addcdiv"):
    decomposes(f"aten._foreach_{_name}.Scalar", f"aten._foreach_{_name}.ScalarList",
               f"aten._foreach_{_name}.Tensor")(partial(_scaled, f"aten.{_name}.default"))  # fmt: skip
