"""Scalar operations as C++ text, one table for single values and one for vectors.

    CPP["add"] = "({0} + {1})"        CPP_VEC["lt"] = "to_mask({0} < {1})"

An entry is a template over the operands, or a function (result dtype, operand dtypes) -> template. A
trailing underscore marks a function of the prelude; `functions_of` lists those a template needs.
"""
from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from dovetail.codegen.analysis import neutral
from dovetail.ir.expr import Expr, spell
from dovetail.ir.loop import FLOAT_UNARY
from dovetail.ir.types import BF16, BOOL, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64, DType

C_TYPE: Final = {
    BOOL: "bool", U8: "uint8_t", U16: "uint16_t", U32: "uint32_t", U64: "uint64_t", I8: "int8_t",
    I16: "int16_t", I32: "int32_t", I64: "int64_t", F16: "f16", BF16: "bf16", F32: "float", F64: "double",
}  # fmt: skip
VECTOR_TYPE: Final = {dtype: "mask" if dtype is BOOL else f"{dtype.name}v" for dtype in C_TYPE}

Entry: TypeAlias = "str | Callable[[DType, tuple[DType, ...]], str]"


def by_kind(number: str, boolean: str) -> Entry:
    return lambda result, args: boolean if args[0] is BOOL else number


def _call(name: str, count: int) -> str:
    return f"{name}_({', '.join(f'{{{k}}}' for k in range(count))})"


def _float_or(name: str, count: int, integer: str) -> Entry:
    """A float function, and what an integer gets instead."""
    return lambda result, args: _call(name, count) if args[0].is_float else integer


_BINARY: Final = ("atan2", "hypot", "copysign", "remainder", "floordiv", "truncdiv", "pow")

_SHARED: Final[dict[str, Entry]] = {
    **{name: _call(name, 1) for name in FLOAT_UNARY},
    **{name: _float_or(name, 1, "{0}") for name in ("floor", "ceil", "round", "trunc")},
    **{name: _call(name, 2) for name in _BINARY},
    "sub": "({0} - {1})",
    "div": "({0} / {1})",
    "neg": "(-{0})",
    "abs": _float_or("abs", 1, "({0} < 0 ? -{0} : {0})"),
    **{f"bit_{name}": f"({{0}} {sign} {{1}})" for name, sign in (("and", "&"), ("or", "|"), ("xor", "^"))},
    "maximum": by_kind(_call("maximum", 2), "({0} | {1})"),
    "minimum": by_kind(_call("minimum", 2), "({0} & {1})"),
    "fmax": lambda result, args: _call("fmax" if args[0].is_float else "maximum", 2),
    "fmin": lambda result, args: _call("fmin" if args[0].is_float else "minimum", 2),
}

COMPARE: Final = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def truth(k: int, dtype: DType, test: str = "({})") -> str:
    return f"{{{k}}}" if dtype is BOOL else test.format(f"{{{k}}} != 0")


def logical(sign: str, test: str = "({})") -> Entry:
    return lambda result, args: f"({truth(0, args[0], test)} {sign} {truth(1, args[1], test)})"


def _entries(is_vector: bool) -> dict[str, Entry]:
    """In vectors a truth is -1, and so less than what is not."""
    test, no = ("to_mask({})", "~") if is_vector else ("({})", "!")
    truths = "({1} %s {0})" if is_vector else "({0} %s {1})"
    signs = "convert<{}>(({{0}} < 0) - ({{0}} > 0))" if is_vector else "(({{0}} > 0) - ({{0}} < 0))"
    return {
        **_SHARED,
        "add": by_kind("({0} + {1})", "({0} | {1})"),
        "mul": by_kind("({0} * {1})", "({0} & {1})"),
        "sign": lambda result, args: signs.format(VECTOR_TYPE[result]),
        "bit_not": by_kind("(~{0})", f"({no}{{0}})"),
        "where": "select({0}, {1}, {2})" if is_vector else "({0} ? {1} : {2})",
        **{op: by_kind(test.format(f"{{0}} {sign} {{1}}"), truths % sign) for op, sign in COMPARE.items()},
        "isnan": test.format("{0} != {0}"),
        "isinf": lambda result, args: test.format(f"abs_({{0}}) == ({C_TYPE[args[0]]})__builtin_inf()"),
        "logical_not": lambda result, args: f"({no}{truth(0, args[0], test)})",
        "logical_and": logical("&", test),
        "logical_or": logical("|", test),
        "check_index": "check_index({0}, {1}, {lanes}, bad)" if is_vector else "::check_index({0}, {1}, bad)",
    }


CPP: Final = _entries(is_vector=False)
CPP_VEC: Final = _entries(is_vector=True)


_FUNCTION: Final = re.compile(r"\b([a-z0-9]+)_\(")


def functions_of(template: str, args: tuple[DType, ...]) -> set[str]:
    """Names of the prelude functions a template calls."""
    found = set(_FUNCTION.findall(template))
    if found and args and args[-1].is_integer:
        return {"integers"}
    return found


# -- conversions -----------------------------------------------------------------------------------


def cast(to: DType, source: DType, text: str, is_vector: bool) -> str:
    """C++ for one conversion, with eager's meaning."""
    if to is source:
        return text
    if source in (BF16, F16):
        widened = f"to_f32v({text})" if is_vector else f"to_f32({text})"
        return widened if to is F32 else cast(to, F32, widened, is_vector)
    if to in (BF16, F16):
        narrow = f"to_{to.name}v" if is_vector else f"to_{to.name}"
        return f"{narrow}({cast(F32, source, text, is_vector)})"
    if not is_vector:
        if to is BOOL:
            return f"({text} != 0)"
        through = "(int64_t)" if to.kind == "uint" and source.is_float else ""
        return f"({C_TYPE[to]}){through}{text}"
    if to is BOOL:
        return f"to_mask({text} != 0)"
    if source is BOOL:
        return f"convert<{VECTOR_TYPE[to]}>(-{text})"
    if to.kind == "uint" and source.is_float and (to.bytes, source) != (1, F32):  # it ends in 0s above 2^31
        text = f"convert<i64v>({text})"
    return f"convert<{VECTOR_TYPE[to]}>({text})"


def bitcast(to: DType, source: DType, text: str, is_vector: bool) -> str:
    if is_vector:  # vectors of half types are structures around their bits
        bits = f"{text}.bits" if source in (BF16, F16) else text
        return f"{VECTOR_TYPE[to]}{{(u16v){bits}}}" if to in (BF16, F16) else f"({VECTOR_TYPE[to]}){bits}"
    return f"__builtin_bit_cast({C_TYPE[to]}, {text})"


def literal(value: float | int | bool, dtype: DType) -> str:
    """A C++ constant of exactly this value."""
    if dtype is BOOL:
        return "true" if value else "false"
    if dtype.is_integer:
        number = int(value)
        if number == -(2**63):
            return f"(-{2**63 - 1}l - 1)"
        if dtype is I64 or dtype is U64:
            return f"({number}l)" if number < 0 else f"{number}{'ul' if dtype is U64 else 'l'}"
        return f"({C_TYPE[dtype]}){number}"
    real = float(value)
    suffix = "f" if dtype is not F64 else ""
    if real != real:
        text = f'__builtin_nan{suffix}("")'
    elif real in (float("inf"), float("-inf")):
        text = f"{'-' if real < 0 else ''}__builtin_inf{suffix}()"
    elif real == struct.unpack("f", struct.pack("f", real))[0] if abs(real) < 1e38 else False:
        text = f"{real!r}{suffix}"
    else:
        text = f"{real.hex()}{suffix}"
    text = f"({text})" if text.startswith("-") else text
    return cast(dtype, F32, text, False) if dtype in (BF16, F16) else text


# -- reductions ------------------------------------------------------------------------------------


def identity(kind: str, dtype: DType) -> str:
    """What a reduction starts from."""
    return literal(neutral(kind, dtype), dtype)


def combine(kind: str, dtype: DType, is_vector: bool) -> str:
    """Template over (accumulator, value)."""
    table = CPP_VEC if is_vector else CPP
    name = {
        "sum": "add", "prod": "mul", "max": "maximum", "min": "minimum", "any": "bit_or", "all": "bit_and",
    }[kind]  # fmt: skip
    if kind in ("max", "min") and dtype.is_float:
        return f"{name}_({{1}}, {{0}})"  # whether the value is a NaN is known before the accumulator is
    return template(table, name, dtype, (dtype, dtype))


def template(table: dict[str, Entry], name: str, result: DType, args: tuple[DType, ...]) -> str:
    entry = table[name]
    return entry if isinstance(entry, str) else entry(result, args)


# -- integer expressions: 64*i + j // 2 is "(64*i + (j / 2))", and in vectors of all lanes at once ---

_ORDER: Final = {op: COMPARE[op] for op in ("eq", "lt", "le")}
_WORDS: Final = {
    "true": "true", "false": "false", "not": "!{0}", "and": "({0} && {1})",
    "min": "min_i({0}, {1})", "max": "max_i({0}, {1})", "floordiv": "({0} / {1})", "mod": "({0} % {1})",
    "floordiv_any": "floordiv_i({0}, {1})", "mod_any": "mod_i({0}, {1})",
    **{op: f"({{0}} {sign} {{1}})" for op, sign in _ORDER.items()},
}  # fmt: skip
_VECTOR_WORDS: Final = {
    **_WORDS, "true": "(~mask{{}})", "false": "mask{{}}", "not": "(~{0})", "and": "({0} & {1})",
    "min": "({0} < {1} ? {0} : {1})", "max": "({0} > {1} ? {0} : {1})",
    "floordiv_any": "vfloordiv_i({0}, {1})", "mod_any": "vmod_i({0}, {1})",
    **{op: f"to_mask({{0}} {sign} {{1}})" for op, sign in _ORDER.items()},
}  # fmt: skip


def c_expr(value: Expr, names: Mapping[Expr, str] | None = None) -> str:
    """int64 text; `names` replaces symbols (a loop variable by `(r0 + l)`, say)."""

    def leaf(x: Expr) -> str:
        if x.op == "const":
            return f"{x.value}l" if abs(x.value) >= 1 << 31 else str(x.value)
        return names[x] if names and x in names else x.name

    return spell(value, _WORDS, leaf)


def fits_int32(value: Expr) -> bool:
    return -(2**31) <= value.lo and value.hi < 2**31 and all(map(fits_int32, value.operands))


def vector_expr(value: Expr, var: Expr, kind: str) -> str:
    """All lanes of an expression as a vector of `kind` (i32v or i64v); comparisons give masks."""
    element, lanes = ("int32_t", "iota()") if kind == "i32v" else ("int64_t", "convert<i64v>(iota())")

    def leaf(x: Expr) -> str:
        same = f"splat<{kind}>(({element}){c_expr(x)})"
        return f"({same} + {lanes})" if x is var else same

    return spell(value, _VECTOR_WORDS, leaf)
