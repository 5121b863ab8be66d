"""Integer expressions with ranges: the arithmetic of shapes and loop indices.

    Expr = const | sym | add | mul | floordiv | mod | min | max        integers
         | eq | ne | lt | le | and | or | not                          booleans

Every expression is interned and kept in normal form, so equality is `is` and common subexpressions
are free. Sums are polynomials: a constant plus coefficient-weighted terms in a fixed order.

    i, j = sym("i", 0, 7), sym("j", 0, 63)
    (i * 64 + j) // 64      ->  i            because 0 <= j < 64
    (i * 64 + j) % 64       ->  j
    (x // 64) * 64 + x % 64 ->  x

Division is Python's (floor), for a positive divisor. SymPy is the oracle in the tests, not the engine.
"""
from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial, reduce
from math import gcd
from threading import Lock
from typing import Final, TypeAlias, TypeVar

from dovetail.util.noun import keep_weakly

INF: Final = 1 << 62
"""A bound that stands for 'unbounded'; no tensor has that many elements."""

IntLike: TypeAlias = "int | Expr"
T = TypeVar("T")


class Expr:
    """One interned node. Build with the functions below or with operators, never directly."""

    __slots__ = ("op", "args", "lo", "hi", "is_const", "serial", "_parts", "_symbols", "__weakref__")

    op: str
    args: tuple[object, ...]
    lo: int
    hi: int
    is_const: bool
    serial: int
    _parts: tuple[int, tuple[tuple[Expr, int], ...]] | None
    """As a sum, where that was asked for."""
    _symbols: frozenset[Expr] | None

    def __add__(self, other: IntLike) -> Expr:
        return add(self, other)

    def __sub__(self, other: IntLike) -> Expr:
        return add(self, mul(other, -1))

    def __rsub__(self, other: IntLike) -> Expr:
        return add(other, mul(self, -1))

    def __mul__(self, other: IntLike) -> Expr:
        return mul(self, other)

    def __neg__(self) -> Expr:
        return mul(self, -1)

    def __floordiv__(self, other: IntLike) -> Expr:
        return floordiv(self, other)

    def __mod__(self, other: IntLike) -> Expr:
        return mod(self, other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __repr__(self) -> str:
        return show_expr(self)

    def __reduce__(self) -> tuple[object, ...]:
        return (_make, (self.op, self.args, self.lo, self.hi))

    @property
    def value(self) -> int:
        """The integer of a constant."""
        if self.op != "const":
            raise ValueError(f"{self} is not a constant")
        return self.args[0]  # type: ignore[return-value]

    @property
    def name(self) -> str:
        if self.op != "sym":
            raise ValueError(f"{self} is not a symbol")
        return self.args[0]  # type: ignore[return-value]

    @property
    def operands(self) -> tuple[Expr, ...]:
        """The sub-expressions, whatever the kind of node."""
        if self.op in ("const", "sym"):
            return ()
        if self.op == "add":
            return tuple(term for term, _ in self.args[1])  # type: ignore[attr-defined]
        return self.args  # type: ignore[return-value]


_references: Final[dict[tuple[object, ...], Callable[[], Expr | None]]] = {}
_lock: Final = Lock()
_serial = 0


def _find(op: str, args: tuple[object, ...]) -> Expr | None:
    reference = _references.get((op, args))
    return None if reference is None else reference()


def _make(op: str, args: tuple[object, ...], lo: int, hi: int) -> Expr:
    global _serial
    found = _find(op, args)
    if found is not None:
        return found
    node = object.__new__(Expr)
    node.op, node.args, node.lo, node.hi = op, args, max(lo, -INF), min(hi, INF)
    node.is_const = op == "const"
    node._parts = node._symbols = None
    with _lock:  # two threads may make the same node; only one may be kept
        found = _find(op, args)
        if found is not None:
            return found
        node.serial = _serial = _serial + 1
        keep_weakly(_references, (op, args), node)
    return node


_remembered: Final = lru_cache(1 << 15)
"""The same sums and products are asked for again and again; this also keeps them alive."""


@_remembered
def const(value: int) -> Expr:
    value = int(value)
    return _make("const", (value,), value, value)


def sym(name: str, lo: int = 0, hi: int = INF, size: Expr | None = None) -> Expr:
    """A symbol in [lo, hi]. `size` says that it is also below that expression (a loop over `size`)."""
    return _make("sym", (name, lo, hi, size), lo, hi)


ZERO, ONE = const(0), const(1)
TRUE, FALSE = _make("true", (), 1, 1), _make("false", (), 0, 0)


def as_expr(value: IntLike) -> Expr:
    return value if isinstance(value, Expr) else const(value)


# -- sums and products ---------------------------------------------------------------------------

Terms: TypeAlias = "dict[Expr, int]"


def _split(value: Expr) -> tuple[int, Terms]:
    """value == constant + sum(coefficient * term); the dict is the caller's."""
    constant, terms = _parts_of(value)
    return constant, dict(terms)


def _parts_of(value: Expr) -> tuple[int, tuple[tuple[Expr, int], ...]]:
    op = value.op
    if op == "add":
        return value.args  # type: ignore[return-value]
    if op == "const":
        return value.args[0], ()  # type: ignore[return-value]
    if op != "mul" or value.args[0].op != "const":  # type: ignore[attr-defined]
        return 0, ((value, 1),)
    found = value._parts
    if found is None:
        rest = value.args[1:]
        factor = rest[0] if len(rest) == 1 else _make_product(rest)  # type: ignore[arg-type]
        found = value._parts = (0, ((factor, value.args[0].value),))  # type: ignore[attr-defined, assignment]
    return found  # type: ignore[return-value]


def _join(constant: int, terms: Terms) -> Expr:
    items = [item for item in terms.items() if item[1]]
    if not items:
        return const(constant)
    if len(items) == 1:
        if not constant:
            term, n = items[0]
            return term if n == 1 else _scaled(term, n)
    else:
        items.sort(key=lambda item: item[0].serial)
    args, parts = (constant, tuple(items)), ((term.lo, term.hi, n) for term, n in items)
    return _find("add", args) or _make("add", args, *_sum_range(constant, parts))


def _sum_range(constant: int, parts: Iterable[tuple[int, int, int]]) -> tuple[int, int]:
    """Of n times what is between two bounds, added up."""
    lo = hi = constant
    for low, high, n in parts:
        low, high = (low, high) if n > 0 else (high, low)
        lo, hi = _bound(lo + _bound(n * low)), _bound(hi + _bound(n * high))
    return lo, hi


def _bound(value: int) -> int:
    return -INF if value < -INF else INF if value > INF else value


def _scaled(term: Expr, n: int) -> Expr:
    factors = term.args if term.op == "mul" else (term,)
    args = (const(n), *factors)
    return _find("mul", args) or _make("mul", args, *_sum_range(0, [(term.lo, term.hi, n)]))


def _make_product(factors: Iterable[Expr]) -> Expr:
    ordered = tuple(sorted(factors, key=lambda f: f.serial))
    if len(ordered) == 1:
        return ordered[0]
    ranges = ((factor.lo, factor.hi) for factor in ordered)
    return _find("mul", ordered) or _make("mul", ordered, *_product_range([*ranges]))


@_remembered
def add(left: IntLike, right: IntLike) -> Expr:
    a = left if isinstance(left, Expr) else const(left)
    b = right if isinstance(right, Expr) else const(right)
    if b is ZERO:
        return a
    if a is ZERO:
        return b
    constant, terms = _split(a)
    more, others = _parts_of(b)
    for term, n in others:
        terms[term] = terms.get(term, 0) + n
    if any(term.op == "mod" for term in terms):
        more += _merge_div_mod(terms)
    return _join(constant + more, terms)


def _merge_div_mod(terms: Terms) -> int:
    """c*k*(x // k) + c*(x % k)  ->  c*x. Edits terms; returns what must be added to the constant."""
    extra, count = 0, len(terms)
    for term in [t for t in terms if t.op == "mod"]:
        x, k = term.args
        n = terms.get(term, 0)
        quotient = floordiv(x, k)  # type: ignore[arg-type]
        if n and k.op == "const" and terms.get(quotient) == n * k.value:  # type: ignore[attr-defined]
            del terms[term], terms[quotient]
            constant, parts = _split(x)  # type: ignore[arg-type]
            extra += n * constant
            for part, m in parts.items():
                terms[part] = terms.get(part, 0) + n * m
    return extra if len(terms) == count else extra + _merge_div_mod(terms)  # what was merged may merge again


@_remembered
def mul(left: IntLike, right: IntLike) -> Expr:
    a = left if isinstance(left, Expr) else const(left)
    b = right if isinstance(right, Expr) else const(right)
    if a is ONE:
        return b
    if b is ONE:
        return a
    if a is ZERO or b is ZERO:
        return ZERO
    if b.op == "const":
        a, b = b, a
    if a.op == "const":
        factor = a.value
        constant, parts = _parts_of(b)
        return _join(constant * factor, {term: n * factor for term, n in parts})
    if b.op == "add":
        a, b = b, a
    if a.op == "add":  # distribute: sums stay polynomials
        constant, parts = _parts_of(a)
        return total([mul(b, constant), *(mul(mul(term, b), n) for term, n in parts)])
    (_, ((fa, na),)), (_, ((fb, nb),)) = _parts_of(a), _parts_of(b)
    factors = [f for x in (fa, fb) for f in (x.args if x.op == "mul" else (x,))]
    product = _make_product(factors)  # type: ignore[arg-type]
    return product if na * nb == 1 else _scaled(product, na * nb)


# -- division ------------------------------------------------------------------------------------


def is_below(value: Expr, limit: Expr) -> bool:
    """Proved that 0 <= value < limit."""
    is_bounded = value.op == "sym" and value.args[3] is limit or value.op == "mod" and value.args[1] is limit
    return value.lo >= 0 and (value.hi < limit.lo or is_bounded)


def _divide_exactly(term: Expr, divisor: Expr) -> Expr | None:
    """term / divisor if it divides without remainder; a term is a product or a single factor."""
    if term is divisor:
        return ONE
    factors = list(term.operands) if term.op == "mul" else [term]
    for needed in divisor.operands if divisor.op == "mul" else (divisor,):
        if needed in factors:
            factors.remove(needed)
        elif needed.op == "const" and factors[0].op == "const":
            if factors[0].value % needed.value:
                return None
            factors[0] = const(factors[0].value // needed.value)  # type: ignore[attr-defined]
        else:
            return None
    return product(factors)


def _split_multiple(value: Expr, divisor: Expr) -> tuple[Expr, Expr]:
    """value == divisor * quotient + rest, taking out every term that divides exactly."""
    constant, terms = _split(value)
    quotient, rest = ZERO, const(constant)
    if divisor.op == "const":
        quotient, rest = const(constant // divisor.value), const(constant % divisor.value)
    for term, n in terms.items():
        part = mul(term, n)
        exact = _divide_exactly(part, divisor)
        if exact is None:
            rest = add(rest, part)
        else:
            quotient = add(quotient, exact)
    return quotient, rest


def floordiv(left: IntLike, right: IntLike) -> Expr:
    a, b = as_expr(left), as_expr(right)
    if b is ONE:
        return a
    if a.op == "const" and b.op == "const":
        return const(a.value // b.value)
    if is_below(a, b):
        return ZERO
    quotient, rest = _split_multiple(a, b)
    if quotient is not ZERO or rest is not a:
        if rest is ZERO or is_below(rest, b):
            return quotient
        if quotient is not ZERO:
            return add(quotient, floordiv(rest, b))
    if b.op == "const":
        common = common_divisor(a, b.value)
        if common > 1:
            return floordiv(_without_factor(a, common), b.value // common)
        if a.op == "floordiv" and a.args[1].op == "const":  # type: ignore[attr-defined]
            return floordiv(a.args[0], a.args[1].value * b.value)  # type: ignore[arg-type, attr-defined]
    lo, hi = -INF, INF
    if b.lo > 0 and a.lo >= 0:
        lo, hi = a.lo // max(b.hi, 1), a.hi // b.lo
    elif b.op == "const" and b.value > 0:
        lo, hi = a.lo // b.value, a.hi // b.value
    return _make("floordiv", (a, b), lo, hi)


def common_divisor(value: Expr, limit: int) -> int:
    """The common divisor of all coefficients of value and of limit."""
    constant, terms = _parts_of(value)
    return gcd(limit, constant, *(n for _, n in terms))


def _without_factor(value: Expr, common: int) -> Expr:
    constant, terms = _parts_of(value)
    return _join(constant // common, {term: n // common for term, n in terms})


def mod(left: IntLike, right: IntLike) -> Expr:
    a, b = as_expr(left), as_expr(right)
    if b is ONE:
        return ZERO
    if a.op == "const" and b.op == "const":
        return const(a.value % b.value)
    if is_below(a, b):
        return a
    quotient, rest = _split_multiple(a, b)
    if quotient is not ZERO:
        return mod(rest, b)
    if b.op == "const":
        common = common_divisor(a, b.value)
        if common > 1:
            return mul(mod(_without_factor(a, common), b.value // common), common)
        if a.op == "mod" and a.args[1].op == "const" and a.args[1].value % b.value == 0:  # type: ignore[attr-defined]
            return mod(a.args[0], b)  # type: ignore[arg-type]
    return _make("mod", (a, b), 0, b.hi - 1)


def is_at_most(a: Expr, b: Expr) -> bool:
    """a <= b for every value of the symbols, by the ranges of both or of their difference."""
    return a.hi <= b.lo or add(b, mul(a, -1)).lo >= 0


def _extreme(op: str, a: Expr, b: Expr, pick: Callable[[int, int], int]) -> Expr:
    for low, high in ((a, b), (b, a)):
        if low is high or is_at_most(low, high):
            return low if op == "min" else high
    a, b = sorted((a, b), key=lambda x: x.serial)
    return _make(op, (a, b), pick(a.lo, b.lo), pick(a.hi, b.hi))


def minimum(left: IntLike, right: IntLike) -> Expr:
    return _extreme("min", as_expr(left), as_expr(right), min)


def maximum(left: IntLike, right: IntLike) -> Expr:
    return _extreme("max", as_expr(left), as_expr(right), max)


def ceildiv(left: IntLike, right: IntLike) -> Expr:
    return floordiv(add(left, add(right, -1)), right)


def product(values: Iterable[IntLike]) -> Expr:
    return reduce(mul, values, ONE)


def total(values: Iterable[IntLike]) -> Expr:
    return reduce(add, values, ZERO)


def row_major(index: Iterable[Expr], shape: Iterable[Expr]) -> Expr:
    """The position of an element counted through."""
    return reduce(lambda flat, at: add(mul(flat, at[1]), at[0]), zip(index, shape), ZERO)


# -- comparisons and booleans ----------------------------------------------------------------------


def _truth(value: bool) -> Expr:
    return TRUE if value else FALSE


def eq(left: IntLike, right: IntLike) -> Expr:
    difference = add(left, mul(right, -1))
    if difference.op == "const":
        return _truth(difference.value == 0)
    if difference.lo > 0 or difference.hi < 0:
        return FALSE
    a, b = sorted((as_expr(left), as_expr(right)), key=lambda x: x.serial)
    return _make("eq", (a, b), 0, 1)


def le(left: IntLike, right: IntLike) -> Expr:
    difference = add(right, mul(left, -1))
    if difference.lo >= 0:
        return TRUE
    if difference.hi < 0:
        return FALSE
    return _make("le", (as_expr(left), as_expr(right)), 0, 1)


def lt(left: IntLike, right: IntLike) -> Expr:
    difference = add(right, mul(left, -1))
    if difference.lo > 0 or is_below(as_expr(left), as_expr(right)):
        return TRUE
    if difference.hi <= 0:
        return FALSE
    return _make("lt", (as_expr(left), as_expr(right)), 0, 1)


def ge(left: IntLike, right: IntLike) -> Expr:
    return le(right, left)


_NEGATED: Final = {"lt": lambda a, b: le(b, a), "le": lambda a, b: lt(b, a)}


def not_(value: Expr) -> Expr:
    if value is TRUE or value is FALSE:
        return _truth(value is FALSE)
    if value.op == "not":
        return value.args[0]  # type: ignore[return-value]
    if value.op in _NEGATED:
        return _NEGATED[value.op](*value.args)  # type: ignore[arg-type]
    return _make("not", (value,), 0, 1)


def and_(left: Expr, right: Expr) -> Expr:
    if left is FALSE or right is FALSE:
        return FALSE
    if left is TRUE or left is right:
        return right
    if right is TRUE:
        return left
    return _make("and", (left, right), 0, 1)


def or_(left: Expr, right: Expr) -> Expr:
    return not_(and_(not_(left), not_(right)))


# -- walks -----------------------------------------------------------------------------------------

_BUILD: Final = {
    "floordiv": floordiv, "mod": mod, "min": minimum, "max": maximum,
    "eq": eq, "lt": lt, "le": le, "not": not_, "and": and_,
}  # fmt: skip


@lru_cache(4096)
def rebuild(value: Expr, operands: tuple[Expr, ...]) -> Expr:
    """The same node over other operands, simplified anew. (Layers repeat.)"""
    if value.op == "add":
        constant, terms = value.args
        return total([constant, *(mul(x, n) for x, (_, n) in zip(operands, terms))])  # type: ignore[call-overload, list-item]
    if value.op == "mul":
        return product(operands)
    if not operands:
        return value
    return _BUILD[value.op](*operands)  # type: ignore[operator, no-any-return]


def substitute(value: Expr, env: Mapping[Expr, IntLike]) -> Expr:
    """Replace symbols (or whole sub-expressions) and simplify."""
    found = env.get(value)
    if found is not None:
        return found if type(found) is Expr else const(found)  # type: ignore[arg-type]
    operands = value.operands
    if not operands:
        return value
    changed = tuple([substitute(x, env) for x in operands])
    return value if changed == operands else rebuild(value, changed)


def symbols(value: Expr) -> frozenset[Expr]:
    if value.op == "sym":
        return frozenset((value,))
    found = value._symbols
    if found is None:
        found = value._symbols = frozenset().union(*map(symbols, value.operands))
    return found


def fold_expr(
    value: Expr, leaf: Callable[[Expr], T], call: Callable[..., T], memo: dict[Expr, T] | None = None
) -> T:
    """Something built bottom up: leaf(a number, symbol or truth), call(op, left, right), call("not", value).
    What `memo` has is not built again."""
    if not value.operands:
        return leaf(value)
    if memo is not None and value in memo:
        return memo[value]
    parts = [fold_expr(x, leaf, call, memo) for x in value.operands]
    if value.op == "add":
        constant, terms = value.args
        factors = [n for _, n in terms]  # type: ignore[attr-defined]
        parts = [x if n == 1 else call("mul", x, leaf(const(n))) for x, n in zip(parts, factors)]
        parts += [leaf(const(constant))] if constant else []  # type: ignore[arg-type]
    made = call("not", *parts) if value.op == "not" else reduce(partial(call, value.op), parts)
    if memo is not None:
        memo[value] = made
    return made


_VALUE: Final[dict[str, Callable[..., int]]] = {
    "add": operator.add, "mul": operator.mul, "floordiv": operator.floordiv, "mod": operator.mod,
    "min": min, "max": max, "eq": lambda a, b: int(a == b), "lt": lambda a, b: int(a < b),
    "le": lambda a, b: int(a <= b), "not": lambda a: 1 - a, "and": lambda a, b: a and b,
}  # fmt: skip


def evaluate(value: Expr, env: Mapping[str, int]) -> int:
    """The number, given one for every symbol name. Booleans come out as 0 or 1."""
    leaf = lambda x: env[x.name] if x.op == "sym" else x.lo
    return fold_expr(value, leaf, lambda op, *parts: _VALUE[op](*parts))


def range_in(value: Expr, env: Mapping[Expr, tuple[int, int]]) -> tuple[int, int]:
    """The range of value when the symbols of env have these ranges, which may be narrower than their own."""
    found = substitute(value, {symbol: sym(symbol.name, lo, hi) for symbol, (lo, hi) in env.items()})
    return found.lo, found.hi


def _product_range(ranges: list[tuple[int, int]]) -> tuple[int, int]:
    lo, hi = ranges[0]
    for low, high in ranges[1:]:
        if lo >= 0 and low >= 0:
            lo, hi = _bound(lo * low), _bound(hi * high)
            continue
        corners = [_bound(a * b) for a in (lo, hi) for b in (low, high)]
        lo, hi = min(corners), max(corners)
    return lo, hi


def linear_in(value: Expr, variable: Expr) -> tuple[Expr, Expr] | None:
    """(coefficient, rest) with value == coefficient * variable + rest, or None if it is not linear."""
    if variable not in symbols(value):
        return ZERO, value
    constant, terms = _split(value)
    coefficient, rest = ZERO, const(constant)
    for term, n in terms.items():
        factors = list(term.args) if term.op == "mul" else [term]
        if variable in factors:
            factors.remove(variable)
            others = product(factors)  # type: ignore[arg-type]
            if variable in symbols(others):
                return None
            coefficient = add(coefficient, mul(others, n))
        elif variable in symbols(term):
            return None
        else:
            rest = add(rest, mul(term, n))
    return coefficient, rest


# -- text ------------------------------------------------------------------------------------------

FORMS: Final = {
    "true": "True", "false": "False", "not": "(not {0})", "and": "({0} and {1})", "min": "min({0}, {1})",
    "max": "max({0}, {1})", "eq": "({0} == {1})", "lt": "({0} < {1})", "le": "({0} <= {1})",
    **dict.fromkeys(("floordiv", "floordiv_any"), "({0} // {1})"),
    **dict.fromkeys(("mod", "mod_any"), "({0} % {1})"),
}  # fmt: skip


def show_expr(value: Expr) -> str:
    """Python text; parentheses wherever precedence could matter."""
    text = spell(value, FORMS)
    return text[1:-1] if text.startswith("(") else text


def spell(
    value: Expr, words: Mapping[str, str], leaf: Callable[[Expr], str] = lambda x: str(x.args[0])
) -> str:
    """The text in some language: `words` has a format over the operands' texts for each op, `leaf` makes
    that of a number or symbol. Divisions of what may be negative are words of their own, `floordiv_any`
    and `mod_any`."""
    op = value.op
    if op in ("const", "sym"):
        return leaf(value)
    texts = [spell(x, words, leaf) for x in value.operands]
    if op == "mul":
        return f"({'*'.join(texts)})"
    if op == "add":
        constant, factors = value.args[0], [n for _, n in value.args[1]]  # type: ignore[attr-defined]
        texts = [x[1:-1] if term.op == "mul" else x for term, x in zip(value.operands, texts)]
        signed = [x if n == 1 else f"-{x}" if n == -1 else f"{n}*{x}" for x, n in zip(texts, factors)]
        return f"({' + '.join([*signed, str(constant)] if constant else signed)})".replace("+ -", "- ")
    if op in ("floordiv", "mod") and not (value.operands[0].lo >= 0 and value.operands[1].lo > 0):
        op = f"{op}_any"
    return words[op].format(*texts)
