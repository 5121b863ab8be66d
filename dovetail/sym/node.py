"""Symbolic numbers for torch: torch.SymInt, SymFloat and SymBool over our expressions.

    s0 = make_symint(shapes, shapes.symbol(8))        a torch.SymInt that prints as s0
    s0 * 4 == 32                                      a SymBool; as a condition it asks Shapes.decide

torch calls the methods of a node by name, from C++ and from Python: they are the protocol, in tables
below. A node knows its expression and, while tracing, its value (`hint`).
"""
from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch

from dovetail.ir import expr as ir
from dovetail.ir.expr import Expr
from dovetail.ir.source import Computed
from dovetail.sym import real as reals
from dovetail.sym.real import Number, Real, iter_leaves
from dovetail.sym.shapes import Shapes

Method: TypeAlias = "Callable[..., Node]"
_CONSTANT: Final = frozenset({"const", "true", "false"})


class Node:
    """What a SymInt, SymFloat or SymBool holds. `expr` is an Expr, for floats a Real or a float."""

    __slots__ = ("expr", "hint", "known", "shapes")

    def __init__(self, shapes: Shapes, expr: Any, hint: Any) -> None:
        self.shapes, self.expr, self.hint = shapes, expr, hint
        self.known = hint if type(expr) is Expr and expr.op in _CONSTANT else None
        """The value where it is a constant: torch asks for it all the time."""

    # -- what it is

    is_int = lambda self: type(self.hint) is int
    is_bool = lambda self: type(self.hint) is bool
    is_float = lambda self: type(self.hint) is float
    is_constant = lambda self: self.known is not None
    # what torch asks and is always answered alike
    is_nested_int = lambda self: False
    is_symbolic = has_hint = lambda self: True
    constant_int = nested_int = lambda self: None
    maybe_as_int = maybe_as_bool = lambda self: self.known
    maybe_as_float = lambda self: self.expr if type(self.expr) is float else None
    clone = pos = lambda self: self

    told = 0
    """How often one was asked for a text: what C code showed of it is not what the program would see."""

    def str(self) -> builtins.str:
        Node.told += 1
        return f"{self.expr}"

    __str__ = __repr__ = _graph_repr = str

    # -- from plain numbers

    wrap_int = lambda self, value: Node(self.shapes, ir.const(value), int(value))
    wrap_bool = lambda self, value: Node(self.shapes, ir.TRUE if value else ir.FALSE, bool(value))
    wrap_float = lambda self, value: Node(self.shapes, float(value), float(value))

    # -- to plain numbers: this is where assumptions are made

    def guard_int(self, file: builtins.str = "", line: int = 0) -> int:
        return self.shapes.specialise(self.expr, "its value was used as a Python int")

    int_ = guard_int

    def guard_bool(self, file: builtins.str = "", line: int = 0) -> bool:
        return self.shapes.decide(self.expr) if self.known is None else self.known  # type: ignore[no-any-return]

    bool_ = expect_true = guard_size_oblivious = guard_or_false = guard_or_true = guard_bool

    def expect_size(self, file: builtins.str = "", line: int = 0) -> bool:
        return self.shapes.decide(ir.le(0, self.expr))

    def statically_known_true(self, file: builtins.str = "", line: int = 0) -> bool:
        return self.shapes.is_true(self.expr) is True

    def guard_float(self, file: builtins.str = "", line: int = 0) -> float:
        _fix(self, "its value was used as a Python float")
        return self.hint  # type: ignore[no-any-return]

    # -- integers and floats

    neg = lambda self: _unary(self, "neg", operator.neg, operator.neg)
    abs = lambda self: _unary(self, "abs", lambda x: ir.maximum(x, -x), builtins.abs)

    def sym_float(self) -> Node:
        return self if self.is_float() else Node(self.shapes, reals.ratio(self.expr), float(self.hint))

    def round(self, ndigits: int | None = None) -> Node:
        if self.is_int():
            return self
        if ndigits is not None:
            return self.wrap_float(round(self.guard_float(), ndigits))
        return _to_int(self, "round", round)

    def is_integer(self) -> Node:
        if self.is_int():
            return self.wrap_bool(True)
        if isinstance(self.expr, Real) and self.expr.op == "ratio":
            numerator, denominator = self.expr.args
            return _boolean(self.shapes, ir.eq(numerator % denominator, 0))  # type: ignore[operator]
        return self.wrap_bool(self.guard_float().is_integer())

    floor = lambda self: _to_int(self, "floor", math.floor)
    ceil = lambda self: _to_int(self, "ceil", math.ceil)
    trunc = sym_int = lambda self: _to_int(self, "trunc", math.trunc)

    def pow_by_natural(self, other: Node) -> Node:
        power = other.guard_int()
        return _integer(self.shapes, ir.product([self.expr] * power), self.hint**power)

    def truediv(self, other: Node) -> Node:
        return self.sym_float().float_truediv(other.sym_float())  # type: ignore[attr-defined, no-any-return]

    int_truediv = truediv

    def pow(self, other: Node) -> Node:
        if self.is_int() and other.is_int():
            return self.pow_by_natural(other)
        return self.sym_float().float_pow(other.sym_float())  # type: ignore[attr-defined, no-any-return]

    def sym_sum(self, args: Sequence[Node]) -> Node:
        return _integer(self.shapes, ir.total(node.expr for node in args), sum(node.hint for node in args))

    # -- booleans

    sym_not = lambda self: Node(self.shapes, ir.not_(self.expr), not self.hint)
    sym_ite = lambda self, yes, no: yes if self.guard_bool() else no


# -- results -----------------------------------------------------------------------------------------


def _integer(shapes: Shapes, expr: Expr, hint: int) -> Node:
    expr = shapes.simplify(expr)
    if expr.lo <= -ir.INF or expr.hi >= ir.INF:
        return _within_64_bits(shapes, expr, hint)
    return Node(shapes, expr, hint)


def _within_64_bits(shapes: Shapes, expr: Expr, hint: int) -> Node:
    """Python's ints have no limit, compiled code's have. No tensor is so large that its sizes could reach
    it; other numbers (hashes, seeds) are checked by a guard, or are taken as they are."""
    if all(symbol.lo >= 0 for symbol in ir.symbols(expr)):
        return Node(shapes, expr, hint)
    if abs(hint) >= ir.INF:
        shapes.specialise_symbols(expr, "it takes more than 64 bits")
        return Node(shapes, ir.const(hint), hint)
    shapes.assume(ir.le(expr, ir.INF - 1), "it fits 64 bits")
    shapes.assume(ir.le(1 - ir.INF, expr), "it fits 64 bits")
    return Node(shapes, expr, hint)


def _boolean(shapes: Shapes, condition: Expr) -> Node:
    known = shapes.is_true(condition)
    if known is not None:
        return Node(shapes, ir.TRUE if known else ir.FALSE, known)
    condition = shapes.simplify(condition)
    return Node(shapes, condition, bool(shapes.hint(condition)))


def _fix(node: Node, reason: str) -> None:
    """Assume the value of every symbol in a float."""
    for leaf in iter_leaves(node.expr):
        if isinstance(leaf, Expr):
            node.shapes.specialise_symbols(leaf, reason)
        else:
            node.shapes.fix_float(leaf)


def _compare_reals(op: str, a: Node, b: Node) -> bool:
    """Whether it holds now, which is assumed of one run-time float; of more, their values are assumed."""
    holds: bool = getattr(operator, op)(a.hint, b.hint)
    compared = Real(op, (_as_float(a), _as_float(b)))
    names = {*iter_leaves(compared)}
    symbol = a.shapes.floats.get(str(*names)) if len(names) == 1 else None
    if symbol is None or isinstance(symbol.source, Computed) or symbol.name in a.shapes.drawn:
        for node in (a, b):
            _fix(node, "its value was compared")
    else:
        a.shapes.conditions[f"({compared}) is {holds}"] = (symbol, a.shapes.where())
    return holds


def _to_int(node: Node, op: str, on_hint: Callable[[float], int]) -> Node:
    if node.is_int():
        return node
    found = reals.to_integer(op, node.expr)
    if found is None:
        return node.wrap_int(on_hint(node.guard_float()))
    return _integer(node.shapes, found, on_hint(node.hint))


def _unary(node: Node, op: str, on_expr: Callable[[Expr], Expr], on_hint: Callable[[Any], Any]) -> Node:
    if node.is_float():
        return Node(node.shapes, reals.unary(op, node.expr), on_hint(node.hint))
    return _integer(node.shapes, on_expr(node.expr), on_hint(node.hint))


def _as_float(node: Node) -> Number:
    return node.expr if node.is_float() else reals.ratio(node.expr)  # type: ignore[no-any-return]


# -- the tables --------------------------------------------------------------------------------------

_ARITHMETIC: Final[dict[str, Callable[..., Any]]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "mod": operator.mod,
    "floordiv": operator.floordiv, "int_floordiv": operator.floordiv, "sym_min": min, "sym_max": max,
}  # fmt: skip
_EXTREMES: Final = {"sym_min": ("min", ir.minimum), "sym_max": ("max", ir.maximum)}
"""Those that are no operators: how a Real calls them, and what they are of expressions."""
_COMPARISONS: Final[dict[str, tuple[str, bool, bool]]] = {
    "eq": ("eq", False, False), "ne": ("eq", False, True), "lt": ("lt", False, False),
    "gt": ("lt", True, False), "le": ("le", False, False), "ge": ("le", True, False),
}  # fmt: skip
"""Name -> the comparison it is, whether its sides are swapped, whether it is negated."""

_LOGIC: Final = {"and_": ir.and_, "sym_and": ir.and_, "or_": ir.or_, "sym_or": ir.or_}
_BITS: Final = {
    "lshift": operator.lshift, "rshift": operator.rshift, "bitwise_and": operator.and_,
    "bitwise_or": operator.or_, "bitwise_xor": operator.xor,
}  # fmt: skip


def _arithmetic(name: str, self: Node, other: Node) -> Node:
    on_hint = _ARITHMETIC[name]
    of_real, on_expr = _EXTREMES.get(name, (name, on_hint))
    if self.is_float() or other.is_float():
        if name not in ("floordiv", "int_floordiv"):
            value = reals.binary(of_real, _as_float(self), _as_float(other))
            return Node(self.shapes, value, float(on_hint(self.hint, other.hint)))
        return self.truediv(other).floor().sym_float()
    if abs(self.hint) >= ir.INF or abs(other.hint) >= ir.INF:
        for node in (self, other):
            node.shapes.specialise_symbols(node.expr, "it meets a number of more than 64 bits")
        return self.wrap_int(on_hint(self.hint, other.hint))
    if "div" in name or name == "mod":  # expressions divide by positive numbers only
        if not self.shapes.decide(ir.lt(0, other.expr)):
            return self.wrap_int(on_hint(self.guard_int(), other.guard_int()))
    return _integer(self.shapes, on_expr(self.expr, other.expr), on_hint(self.hint, other.hint))


def _comparison(name: str, self: Node, other: Node) -> Node:
    base, is_swapped, is_negated = _COMPARISONS[name]
    a, b = (other, self) if is_swapped else (self, other)
    condition: Expr | None
    if a.is_float() or b.is_float():
        condition = reals.compare(base, _as_float(a), _as_float(b))
        if condition is None:
            return self.wrap_bool(_compare_reals(base, a, b) is not is_negated)
    else:
        condition = reals.COMPARED[base](a.expr, b.expr)
    return _boolean(self.shapes, ir.not_(condition) if is_negated else condition)


def _logic(name: str, self: Node, other: Node) -> Node:
    if self.is_int():  # Python's & and | on ints
        return self.wrap_int(_BITS["bitwise_" + name.strip("_")](self.guard_int(), other.guard_int()))
    return _boolean(self.shapes, _LOGIC[name](self.expr, other.expr))


def _bits(name: str, self: Node, other: Node) -> Node:
    a, b = (node.guard_bool() if node.is_bool() else node.guard_int() for node in (self, other))
    value = _BITS[name](a, b)
    return self.wrap_bool(value) if self.is_bool() else self.wrap_int(value)


def _on_floats(name: str, self: Node, other: Node) -> Node:
    op = name.removeprefix("float_")
    value = reals.binary(op, _as_float(self), _as_float(other))
    return Node(self.shapes, value, float(reals.BINARY[op](self.hint, other.hint)))


def _math(name: str, self: Node) -> Node:
    name = name.removeprefix("sym_")
    return Node(self.shapes, reals.unary(name, _as_float(self)), reals.UNARY[name](self.hint))


def _method(function: Method, name: str) -> Method:
    return lambda self, *other: function(name, self, *other)


def _remembered(function: Method, name: str) -> Method:
    """Autograd asks the same of the same few sizes again and again: once, until more of them are equal."""

    def asked(self: Node, other: Node) -> Node:
        memo, key = self.shapes.remembered, (name, self.expr, other.expr, len(self.shapes.equalities))
        found: Node | None = memo.get(key)
        if found is None:
            found = memo[key] = function(name, self, other)
        return found

    return asked


_FUNCTIONS: Final = sorted(set(reals.UNARY) - {"neg", "abs"})
for _make, _function, _keys in (
    (_remembered, _arithmetic, _ARITHMETIC), (_remembered, _comparison, _COMPARISONS),
    (_method, _logic, _LOGIC), (_method, _bits, _BITS), (_method, _on_floats, ["float_truediv", "float_pow"]),
    (_method, _math, [*_FUNCTIONS, *(f"sym_{name}" for name in _FUNCTIONS)]),
):  # fmt: skip
    for _name in _keys:
        setattr(Node, _name, _make(_function, _name))


# -- making and reading ------------------------------------------------------------------------------


def make_symint(shapes: Shapes, expr: Expr, hint: int | None = None) -> torch.SymInt | int:
    """An int where the expression is a constant."""
    expr = shapes.simplify(expr)
    if expr.op == "const":
        return expr.value
    return torch.SymInt(Node(shapes, expr, shapes.hint(expr) if hint is None else hint))


def make_symfloat(shapes: Shapes, name: str) -> torch.SymFloat:
    """The run-time float of this name (see Shapes.float_symbol)."""
    return torch.SymFloat(Node(shapes, Real("sym", (name,)), shapes.floats[name].hint))


def hint_of(value: Any) -> Any:
    """The value while tracing of a symbolic number, or the number itself."""
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value
