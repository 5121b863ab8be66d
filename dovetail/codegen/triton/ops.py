"""Scalar operations as Triton text.

    TRITON["add"] = "({0} + {1})"        TRITON["exp"] = "libdevice.exp({0})"

An entry is a template over the operands, or a function (result dtype, operand dtypes) -> template.
The functions are the ones eager's CUDA kernels call (libdevice), and division and square root are
rounded, so that results equal eager's. `dv.` functions stand in the prelude of every kernel file.
"""
from __future__ import annotations

from typing import Final

from dovetail.codegen.analysis import neutral
from dovetail.codegen.cpp.ops import COMPARE, Entry, by_kind, logical, truth
from dovetail.ir.loop import FUNCTIONS
from dovetail.ir.types import BF16, BOOL, C32, C64, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64, DType

DTYPES: Final = (U8, U16, U32, U64, I8, I16, I32, I64, F16, BF16, F32, F64)
TL_TYPE: Final = {BOOL: "tl.int1", **{dtype: f"tl.{dtype.torch_name}" for dtype in DTYPES}}
POINTER: Final = {
    BOOL: "*i1", F16: "*fp16", F32: "*fp32", F64: "*fp64",
    **{dtype: f"*{dtype.name}" for dtype in DTYPES if dtype not in (F16, F32, F64)},
    C32: "*i32", C64: "*i64",  # loops only copy complex numbers
}  # fmt: skip


def _float_or(name: str, integer: str) -> Entry:
    return lambda result, args: f"libdevice.{name}({{0}})" if args[0].is_float else integer


TRITON: Final[dict[str, Entry]] = {
    **{name: f"libdevice.{name}({{0}})" for name in (*FUNCTIONS, "rsqrt")},
    "sqrt": lambda r, a: "tl.sqrt_rn({0})" if a[0] is F32 else "libdevice.sqrt({0})",
    **{name: _float_or(name, "{0}") for name in ("floor", "ceil", "trunc")},
    "round": _float_or("nearbyint", "{0}"),
    "frac": "({0} - libdevice.trunc({0}))",
    "sigmoid": lambda r, a: _div("1.0", "(1.0 + libdevice.exp(-{0}))", a[0]),
    "reciprocal": lambda r, a: _div("1.0", "{0}", a[0]),
    "pow": lambda r, a: "libdevice.pow({0}, {1})" if a[0].is_float else "dv.int_pow({0}, {1})",
    **{name: f"libdevice.{name}({{0}}, {{1}})" for name in ("atan2", "copysign")},
    "div": lambda r, a: _div("{0}", "{1}", a[0]),
    "neg": "(-{0})",
    "abs": by_kind("tl.abs({0})", "{0}"),
    "sign": lambda r, a: f"(({{0}} > 0).to({TL_TYPE[r]}) - ({{0}} < 0).to({TL_TYPE[r]}))",
    "add": by_kind("({0} + {1})", "({0} | {1})"),
    "sub": "({0} - {1})",
    "mul": by_kind("({0} * {1})", "({0} & {1})"),
    "maximum": lambda r, a: "dv.maximum({0}, {1})" if a[0].is_float else "tl.maximum({0}, {1})",
    "minimum": lambda r, a: "dv.minimum({0}, {1})" if a[0].is_float else "tl.minimum({0}, {1})",
    "fmax": "tl.maximum({0}, {1})",
    "fmin": "tl.minimum({0}, {1})",
    "remainder": lambda r, a: "dv.remainder({0}, {1})" if a[0].is_float else "dv.int_remainder({0}, {1})",
    "floordiv": lambda r, a: "dv.floordiv({0}, {1})" if a[0].is_float else "dv.int_floordiv({0}, {1})",
    "truncdiv": "({0} // {1})",
    "check_index": "dv.wrap({0}, {1}{inside})",
    **{f"bit_{name}": f"({{0}} {sign} {{1}})" for name, sign in (("and", "&"), ("or", "|"), ("xor", "^"))},
    "bit_not": by_kind("(~{0})", "({0} == 0)"),
    "where": "tl.where({0}, {1}, {2})",
    **{name: f"({{0}} {sign} {{1}})" for name, sign in COMPARE.items()},
    "isnan": "({0} != {0})",
    "isinf": "(tl.abs({0}) == float('inf'))",
    "logical_not": lambda r, a: f"({truth(0, a[0])} == 0)",
    "logical_and": logical("&"),
    "logical_or": logical("|"),
    "cast": lambda r, a: _cast(r, a[0]),
    "bitcast": lambda r, a: f"{{0}}.to({TL_TYPE[r]}, bitcast=True)",
}


LOG2_E: Final = 1.4426950408889634
FAST: Final[dict[str, Entry]] = {
    "exp": f"tl.exp2({{0}} * {LOG2_E})",
    "exp2": "tl.exp2({0})",
    "log": "tl.log({0})",
    "sqrt": "tl.sqrt({0})",
    "erf": "dv.erf({0})",
    "tanh": "dv.tanh({0})",
    "sigmoid": f"(1.0 / (1.0 + tl.exp2({{0}} * -{LOG2_E})))",
    "div": "({0} / {1})",
}
"""Good to two units in the last place of fp32, at a fraction of the instructions."""


def _div(a: str, b: str, dtype: DType) -> str:
    return f"tl.div_rn({a}, {b})" if dtype is F32 and a != "1.0" else f"({a} / {b})"


def _cast(result: DType, source: DType) -> str:
    if result is BOOL and source is not BOOL:
        return "({0} != 0)"
    if result.kind == "uint" and source.is_float:  # as eager: through a signed integer
        return f"{{0}}.to(tl.int64).to({TL_TYPE[result]})"
    return f"{{0}}.to({TL_TYPE[result]})"


def identity(kind: str, dtype: DType) -> str:
    """What a masked lane contributes to a reduction."""
    value = bool(neutral(kind, dtype)) if dtype is BOOL else neutral(kind, dtype)
    return f"float('{value}')" if isinstance(value, float) else str(value)


COMBINE: Final = {
    "sum": "({0} + {1})", "prod": "({0} * {1})", "any": "({0} | {1})", "all": "({0} & {1})",
    "max": "dv.maximum({0}, {1})", "min": "dv.minimum({0}, {1})",
}  # fmt: skip
"""Two partial results as one; min and max propagate NaN."""

REDUCE: Final = {
    "sum": "tl.sum({0}, {1})", "prod": "tl.reduce({0}, {1}, dv.product)",
    "any": "tl.max({0}.to(tl.int32), {1})",
    "all": "tl.min({0}.to(tl.int32), {1})",
    "max": "tl.reduce({0}, {1}, dv.maximum)", "min": "tl.reduce({0}, {1}, dv.minimum)",
}  # fmt: skip
"""A tile reduced along an axis."""

SEARCH: Final = {"argmax": "dv.greater_first", "argmin": "dv.less_first"}
"""Of two (value, position) pairs the better one."""
