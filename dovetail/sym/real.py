"""Symbolic floats: what Python arithmetic makes of symbolic sizes and of run-time floats.

    s0 / 2            Real("ratio", (s0, 2));  floor of it is the integer expression s0 // 2
    1 / s0 ** 0.5     Real("truediv", (1.0, Real("sqrt", ...)))

A ratio of an integer expression and a positive integer is kept exact, because sizes are made from it
(interpolation, ceil mode). Everything else is a tree that can be printed, evaluated and turned into
scalar nodes of a graph, but about which nothing is proved.
"""
from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Final, TypeAlias

from dovetail.ir import expr as ir
from dovetail.ir.expr import Expr
from dovetail.util.noun import Noun

Number: TypeAlias = "Real | float"


class Real(Noun):
    """`ratio` (Expr, int), `sym` (name,), or an op of UNARY or BINARY over Reals and floats."""

    op: str
    args: tuple[object, ...]

    def __str__(self) -> str:
        return show_real(self)


UNARY: Final[dict[str, Callable[[float], float]]] = {
    "neg": operator.neg,
    "abs": abs,
    **{x: getattr(math, x) for x in "sqrt exp log log2 sin cos tan sinh cosh tanh asin acos atan".split()},
}
BINARY: Final[dict[str, Callable[[float, float], float]]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv,
    "mod": operator.mod, "pow": operator.pow, "min": min, "max": max,
}  # fmt: skip
_SMALL: Final = 1 << 20
_ROUNDED: Final = {"floor": ir.floordiv, "ceil": ir.ceildiv}
COMPARED: Final = {"eq": ir.eq, "lt": ir.lt, "le": ir.le}


def ratio(numerator: Expr, denominator: int = 1) -> Real:
    """numerator / denominator, which is positive."""
    common = ir.common_divisor(numerator, denominator)
    if common > 1:
        numerator, denominator = ir.floordiv(numerator, common), denominator // common
    return Real("ratio", (numerator, denominator))


def _as_fraction(value: object) -> tuple[Expr, int] | None:
    """(numerator, denominator) of what is exact: a ratio, or a float with few digits."""
    if isinstance(value, Real):
        return value.args if value.op == "ratio" else None  # type: ignore[return-value]
    if isinstance(value, float) and math.isfinite(value):
        exact = Fraction(value)
        if exact.denominator <= _SMALL and abs(exact.numerator) <= _SMALL:
            return ir.as_expr(exact.numerator), exact.denominator
    return None


def binary(op: str, left: Number, right: Number) -> Number:
    """Exact where both sides are and the float result would be; a tree otherwise."""
    if isinstance(left, float) and isinstance(right, float):
        return BINARY[op](left, right)
    a, b = _as_fraction(left), _as_fraction(right)
    if a is not None and b is not None and all(n & (n - 1) == 0 for _, n in (a, b)):  # powers of two
        (na, da), (nb, db) = a, b
        if op == "truediv" and nb.op == "const" and nb.value > 0:
            return ratio(ir.mul(na, db), da * nb.value)
        if op == "mul":
            return ratio(ir.mul(na, nb), da * db)
        if op in ("add", "sub"):
            return ratio(ir.mul(na, db) + ir.mul(nb, da if op == "add" else -da), da * db)
    if op == "pow" and right == 0.5:
        return Real("sqrt", (left,))
    return Real(op, (left, right))


def unary(op: str, value: Number) -> Number:
    if isinstance(value, float):
        return UNARY[op](value)
    if op == "neg" and value.op == "ratio":
        numerator, denominator = value.args
        return Real("ratio", (ir.mul(numerator, -1), denominator))  # type: ignore[arg-type]
    return Real(op, (value,))


def to_integer(op: str, value: Number) -> Expr | None:
    """floor, ceil, trunc or round of an exact ratio as an expression; None where it is not one."""
    exact = _as_fraction(value)
    if exact is None:
        return None
    numerator, denominator = exact
    if denominator == 1:
        return numerator
    if op == "trunc" and numerator.lo >= 0:
        op = "floor"
    return _ROUNDED[op](numerator, denominator) if op in _ROUNDED else None


def compare(op: str, left: Number, right: Number) -> Expr | None:
    """eq, lt or le of exact ratios, by cross-multiplication; None where they are not exact."""
    a, b = _as_fraction(left), _as_fraction(right)
    if a is None or b is None:
        return None
    return COMPARED[op](ir.mul(a[0], b[1]), ir.mul(b[0], a[1]))


# -- walks -----------------------------------------------------------------------------------------


def iter_leaves(value: object) -> Iterator[Expr | str]:
    """Every integer symbol (an Expr) and every float symbol (its name)."""
    if isinstance(value, Expr):
        yield from sorted(ir.symbols(value), key=lambda s: s.name)
    elif isinstance(value, Real) and value.op == "sym":
        yield value.args[0]  # type: ignore[misc]
    elif isinstance(value, Real):
        for arg in value.args:
            yield from iter_leaves(arg)


_SIGNS: Final = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "mod": "%", "pow": "**", "eq": "==",
                 "lt": "<", "le": "<="}  # fmt: skip
_FORMS: Final = {"neg": "-({0})", "abs": "abs({0})", "min": "min({0}, {1})", "max": "max({0}, {1})",
                 **{op: f"({{0}}) {sign} ({{1}})" for op, sign in _SIGNS.items()}}  # fmt: skip


def show_real(value: Number) -> str:
    """Python text; `math` is in scope."""
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    if value.op == "ratio":
        return f"({ir.show_expr(value.args[0])}) / {value.args[1]}"  # type: ignore[arg-type]
    if value.op == "sym":
        return str(value.args[0])
    args = [show_real(arg) for arg in value.args]  # type: ignore[arg-type]
    return _FORMS.get(value.op, f"math.{value.op}({{0}})").format(*args)
