"""Integer expressions as C++ text.

c_expr(64*i + j // 2)                 "(64*i + (j / 2))"
vector_expr(j < s0, j, "i32v", 16)    a comparison of all lanes at once
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dovetail.ir.expr import Expr, spell

_COMPARE: Final = {"eq": "==", "lt": "<", "le": "<="}
_WORDS: Final = {
    "large": "{0}l", "true": "true", "false": "false", "not": "!{0}", "and": "({0} && {1})",
    "min": "min_i({0}, {1})", "max": "max_i({0}, {1})", "floordiv": "({0} / {1})", "mod": "({0} % {1})",
    "floordiv_any": "floordiv_i({0}, {1})", "mod_any": "mod_i({0}, {1})",
    **{op: f"({{0}} {sign} {{1}})" for op, sign in _COMPARE.items()},
}  # fmt: skip


def c_expr(value: Expr, names: Mapping[Expr, str] | None = None) -> str:
    """int64 text; `names` replaces symbols (a loop variable by `(r0 + l)`, say)."""
    return spell(value, _WORDS, names)


def fits_int32(value: Expr) -> bool:
    return -(2**31) <= value.lo and value.hi < 2**31 and all(map(fits_int32, value.operands))


def vector_expr(value: Expr, var: Expr, kind: str, names: Mapping[Expr, str] | None = None) -> str:
    """All lanes of an expression as a vector of `kind` (i32v or i64v); comparisons give masks."""
    op = value.op
    element = "int32_t" if kind == "i32v" else "int64_t"
    if value is var:
        lanes = "iota()" if kind == "i32v" else "convert<i64v>(iota())"
        return f"(splat<{kind}>(({element}){c_expr(value, names)}) + {lanes})"
    if op in ("const", "sym"):
        return f"splat<{kind}>(({element}){c_expr(value, names)})"
    if op in ("true", "false"):
        return "(~mask{})" if op == "true" else "mask{}"
    texts = [vector_expr(x, var, kind, names) for x in value.operands]
    if op == "add":
        constant, terms = value.args
        parts = [text if n == 1 else f"{text} * ({element}){n}" for text, (_, n) in zip(texts, terms)]  # type: ignore[call-overload]
        if constant:
            parts.append(f"({element}){constant}")
        return "(" + " + ".join(parts) + ")"
    if op == "mul":
        return "(" + " * ".join(texts) + ")"
    if op == "not":
        return f"(~{texts[0]})"
    if op == "and":
        return f"({texts[0]} & {texts[1]})"
    if op in ("min", "max"):
        return f"({texts[0]} {'<' if op == 'min' else '>'} {texts[1]} ? {texts[0]} : {texts[1]})"
    if op in _COMPARE:
        return f"to_mask({texts[0]} {_COMPARE[op]} {texts[1]})"
    a, b = value.operands
    sign = "/" if op == "floordiv" else "%"
    if a.lo >= 0 and b.lo > 0:
        return f"({texts[0]} {sign} {texts[1]})"
    return f"v{op}_i({texts[0]}, {texts[1]})"
