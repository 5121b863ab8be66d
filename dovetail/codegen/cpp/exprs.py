"""Integer expressions as C++ text.

c_expr(64*i + j // 2)                 "(64*i + (j / 2))"
vector_expr(j < s0, j, "i32v", 16)    a comparison of all lanes at once
"""
from __future__ import annotations

from collections.abc import Mapping

from dovetail.ir.expr import Expr

_COMPARE = {"eq": "==", "lt": "<", "le": "<="}


def c_expr(value: Expr, names: Mapping[Expr, str] | None = None) -> str:
    """int64 text; `names` replaces symbols (a loop variable by `(r0 + l)`, say)."""
    op = value.op
    if op == "const":
        return str(value.value) if abs(value.value) < 2**31 else f"{value.value}l"
    if op == "sym":
        return names[value] if names and value in names else value.name
    if op in ("true", "false"):
        return op
    if op == "add":
        return "(" + " + ".join(_terms(value, names)).replace("+ -", "- ") + ")"
    texts = [c_expr(x, names) for x in value.operands]
    if op == "mul":  # in parentheses: the text may become a divisor
        return f"({'*'.join(texts)})"
    if op == "not":
        return f"!{texts[0]}"
    if op == "and":
        return f"({texts[0]} && {texts[1]})"
    if op in ("min", "max"):
        return f"{op}_i({texts[0]}, {texts[1]})"
    if op in _COMPARE:
        return f"({texts[0]} {_COMPARE[op]} {texts[1]})"
    a, b = value.operands
    if a.lo >= 0 and b.lo > 0:
        return f"({texts[0]} {'/' if op == 'floordiv' else '%'} {_divisor(texts[1])})"
    return f"{op}_i({texts[0]}, {texts[1]})"


def _divisor(text: str) -> str:
    return text if text.isalnum() or text.startswith("(") else f"({text})"


def _terms(value: Expr, names: Mapping[Expr, str] | None) -> list[str]:
    constant, terms = value.args
    parts = []
    for term, n in terms:  # type: ignore[attr-defined]
        text = c_expr(term, names)
        parts.append(text if n == 1 else f"-{text}" if n == -1 else f"{n}*{text}")
    if constant:
        parts.append(str(constant))
    return parts


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
