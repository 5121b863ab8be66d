"""Integer expressions as C++ text.

c_expr(64*i + j // 2)                 "(64*i + (j / 2))"
vector_expr(j < s0, j, "i32v")        a comparison of all lanes at once
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dovetail.ir.expr import Expr, spell

_COMPARE: Final = {"eq": "==", "lt": "<", "le": "<="}
_WORDS: Final = {
    "true": "true", "false": "false", "not": "!{0}", "and": "({0} && {1})",
    "min": "min_i({0}, {1})", "max": "max_i({0}, {1})", "floordiv": "({0} / {1})", "mod": "({0} % {1})",
    "floordiv_any": "floordiv_i({0}, {1})", "mod_any": "mod_i({0}, {1})",
    **{op: f"({{0}} {sign} {{1}})" for op, sign in _COMPARE.items()},
}  # fmt: skip
_VECTOR_WORDS: Final = {
    "true": "(~mask{{}})", "false": "mask{{}}", "not": "(~{0})", "and": "({0} & {1})",
    "min": "({0} < {1} ? {0} : {1})", "max": "({0} > {1} ? {0} : {1})",
    "floordiv": "({0} / {1})", "mod": "({0} % {1})",
    "floordiv_any": "vfloordiv_i({0}, {1})", "mod_any": "vmod_i({0}, {1})",
    **{op: f"to_mask({{0}} {sign} {{1}})" for op, sign in _COMPARE.items()},
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
