"""Shape symbols and what is assumed about them: one append-only list, from which guards are made last.

    shapes = Shapes()
    s0 = shapes.symbol(8, Size(Arg(0, "x"), 0))       an Expr; its hint is 8
    shapes.decide(eq(s0, s1))                         True by the hints; now assumed, with the user's line
    shapes.decide(lt(s0, s1))                         False: follows, nothing is added
    shapes.freeze()                                   (2 <= s0, s0 == s1)

Equalities are used at once: after s0 == s1, every new expression says s0.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dovetail.errors import DataDependentNumber
from dovetail.ir import expr as ir
from dovetail.ir.expr import Expr, symbols
from dovetail.ir.source import Size, Source
from dovetail.util.loc import Loc
from dovetail.util.noun import Noun, field


class Symbol(Noun):
    """An integer read at run time from `source`; `hint` is its value while tracing."""

    expr: Expr
    hint: int
    source: Source | None


class FloatSymbol(Noun):
    name: str
    hint: float
    source: Source | None


class Assumption(Noun):
    """A condition that held for the hints, and that the compiled code relies on."""

    condition: Expr
    loc: Loc | None
    reason: str

    def __str__(self) -> str:
        where = f"  # {self.loc}" if self.loc else ""
        return f"{self.condition}{where}  {self.reason}".rstrip()


class Shapes(Noun, frozen=False):
    """`where` says the user's line."""

    where: Callable[[], Loc | None] = lambda: None
    symbols: dict[str, Symbol] = field(default_factory=dict)
    floats: dict[str, FloatSymbol] = field(default_factory=dict)
    assumptions: list[Assumption] = field(default_factory=list)
    fixed_floats: list[FloatSymbol] = field(default_factory=list)
    """Run-time floats whose value was needed after all: guard them by value."""
    conditions: dict[str, tuple[FloatSymbol, Loc | None]] = field(default_factory=dict)
    """Comparisons of one run-time float that hold, as Python text."""
    restless: set[str] = field(default_factory=set)
    """Numbers that were others in each of many calls: rather than assume one of them, capture stops."""
    drawn: set[str] = field(default_factory=set)
    """Random numbers of Python's, made after the guards were looked at: nothing can be assumed of them."""
    remembered: dict[Any, Any] = field(default_factory=dict)
    """Results of shape rules, by what they were asked; see fake."""
    equalities: dict[Expr, Expr] = field(default_factory=dict)
    """A symbol -> what it was assumed to equal, in terms of symbols that are left."""
    _hints: dict[str, int] = field(default_factory=dict)
    _hint_of: dict[Expr, int] = field(default_factory=dict)
    _simple: dict[Expr, Expr] = field(default_factory=dict)
    _known: dict[Expr, bool] = field(default_factory=dict)
    _at_least: dict[Expr, int] = field(default_factory=dict)

    # -- symbols

    def symbol(self, hint: int, source: Source | None = None, lo: int = 2, hi: int = ir.INF) -> Expr:
        """A new symbol. Sizes 0 and 1 are specialised by the caller, so the range starts at 2."""
        return self.adopt(ir.sym(f"s{len(self.symbols)}", lo, hi), hint, source)

    def adopt(self, symbol: Expr, hint: int, source: Source | None = None) -> Expr:
        """A symbol that may be another's."""
        self.symbols[symbol.name], self._hints[symbol.name] = Symbol(symbol, hint, source), hint
        return symbol

    def float_symbol(self, hint: float, source: Source | None = None) -> str:
        name = f"f_{len(self.floats)}"  # f16 is a type in kernels
        self.floats[name] = FloatSymbol(name, hint, source)
        return name

    def hint(self, value: Expr) -> int:
        if value.op == "const":
            return value.value
        found = self._hint_of.get(value)
        if found is None:
            found = self._hint_of[value] = ir.evaluate(value, self._hints)
        return found

    # -- what is known

    def simplify(self, value: Expr) -> Expr:
        """The same value in terms of fewer symbols, by the equalities assumed so far."""
        if not self.equalities or value.op == "const":
            return value
        found = self._simple.get(value)
        if found is None:
            found = self._simple[value] = ir.substitute(value, self.equalities)
        return found

    def is_true(self, condition: Expr) -> bool | None:
        """What follows from ranges and assumptions, None if nothing does."""
        condition = self.simplify(condition)
        if condition is ir.TRUE or condition is ir.FALSE:
            return condition is ir.TRUE
        found = self._known.get(condition)
        if found is not None:
            return found
        if condition.op == "not":
            inner = self.is_true(condition.operands[0])
            return None if inner is None else not inner
        if condition.op == "and":
            parts = [self.is_true(part) for part in condition.operands]
            return False if False in parts else None if None in parts else True
        return self._by_bounds(condition)

    def _by_bounds(self, condition: Expr) -> bool | None:
        a, b = condition.operands
        lo, hi = self.bounds(ir.add(b, ir.mul(a, -1)))
        if condition.op == "eq":
            return False if lo > 0 or hi < 0 else None
        least = 0 if condition.op == "le" else 1
        return True if lo >= least else False if hi < least else None

    def bounds(self, value: Expr) -> tuple[int, int]:
        """A range of value: from the symbols' ranges, and from inequalities with the same terms."""
        constant, terms = _terms(value)
        negated = ir.mul(terms, -1)
        lo = max(self._least(terms), self._at_least.get(terms, -ir.INF))
        hi = -max(self._least(negated), self._at_least.get(negated, -ir.INF))
        return max(constant + lo, -ir.INF), min(constant + hi, ir.INF)

    def _least(self, terms: Expr) -> int:
        """A lower bound, with every symbol written as its least value plus something not negative:
        s0*s1 - s0 is then (2 + a)*(1 + b), which is at least 2."""
        found = symbols(terms)
        env = {s: (self._at_least.get(s, s.lo), -self._at_least.get(ir.mul(s, -1), -s.hi)) for s in found}
        lo, _ = ir.range_in(terms, env)
        if lo > 0 or terms.op != "add" or not found:
            return lo
        over = {s: ir.sym(f"{s.name}_over", 0, high - low) for s, (low, high) in env.items() if low > -ir.INF}
        shift = {s: ir.add(above, env[s][0]) for s, above in over.items()}
        return max(lo, ir.substitute(terms, shift).lo)

    # -- assuming

    def decide(self, condition: Expr, reason: str = "") -> bool:
        """Whether condition holds: proved, or by the hints, which is then assumed."""
        known = self.is_true(condition)
        if known is not None:
            return known
        condition = self.simplify(condition)
        holds = bool(self.hint(condition))
        self.assume(condition if holds else ir.not_(condition), reason)
        return holds

    def assume(self, condition: Expr, reason: str = "") -> None:
        """Append a condition that holds for the hints."""
        condition = self.simplify(condition)
        if self.is_true(condition):
            return
        assert self.hint(condition), f"assumed against the hints: {condition}"
        if condition.op == "and":
            for part in condition.operands:
                self.assume(part, reason)
            return
        self.check_steady({symbol.name for symbol in symbols(condition)}, self.drawn)
        self.assumptions.append(Assumption(condition, self.where(), reason))
        self._learn(condition)

    def specialise(self, value: Expr, reason: str = "") -> int:
        """The hint of value, assumed to be its value."""
        value = self.simplify(value)
        if value.op == "const":
            return value.value
        hint = self.hint(value)
        self.check_steady({symbol.name for symbol in symbols(value)}, self.restless)
        self.assume(ir.eq(value, hint), reason)
        return hint

    def check_steady(self, names: set[str], others: set[str]) -> None:
        if not others.isdisjoint(names):
            raise DataDependentNumber(self.where(), function="this line")

    def specialise_symbols(self, value: Expr, reason: str = "") -> int:
        """Fix every symbol of value, not only value itself."""
        for symbol in sorted(symbols(self.simplify(value)), key=lambda s: s.name):
            self.specialise(symbol, reason)
        return self.simplify(value).value

    def fix(self, reason: str) -> None:
        for symbol in self.symbols.values():
            self.specialise(symbol.expr, reason)
        for name in self.floats:
            self.fix_float(name)

    def fix_float(self, name: str) -> float:
        symbol = self.floats[name]
        self.check_steady({name}, self.restless | self.drawn)
        if symbol not in self.fixed_floats:
            self.fixed_floats.append(symbol)
        return symbol.hint

    def _learn(self, condition: Expr) -> None:
        self._known[condition] = True
        self._known[ir.not_(condition)] = False
        if condition.op == "eq":
            self._learn_equal(*condition.operands)
        elif condition.op in ("le", "lt"):
            a, b = condition.operands
            constant, terms = _terms(ir.add(b, ir.mul(a, -1)))
            least = -constant + (condition.op == "lt")
            self._at_least[terms] = max(least, self._at_least.get(terms, -ir.INF))

    def _learn_equal(self, a: Expr, b: Expr) -> None:
        solved = solve(ir.add(a, ir.mul(b, -1))) or _solve_division(a, b) or _solve_division(b, a)
        if solved is None:
            return
        symbol, value = solved
        self.equalities = {old: ir.substitute(new, {symbol: value}) for old, new in self.equalities.items()}
        self.equalities[symbol] = value
        self._simple.clear()
        self._known = {ir.substitute(c, {symbol: value}): holds for c, holds in self._known.items()}
        bounds = self._at_least
        self._at_least = {}
        for terms, least in bounds.items():
            constant, rest = _terms(ir.substitute(terms, {symbol: value}))
            if rest is not ir.ZERO:
                self._at_least[rest] = max(least - constant, self._at_least.get(rest, -ir.INF))

    # -- the end

    def freeze(self) -> tuple[Assumption, ...]:
        """The ranges and assumptions that guards must check, without those that follow from others."""
        conditions = [each for s in self.symbols.values() for each in self._range_conditions(s)]
        ranges = [Assumption(each, None, "sizes 0 and 1 are specialised") for each in conditions]
        trial = Shapes(symbols=self.symbols, _hints=self._hints)
        kept: list[Assumption] = []
        for assumption in reversed(self.assumptions):  # later ones are often the stronger
            if trial.is_true(assumption.condition) is not True:
                trial.assume(assumption.condition)
                kept.append(assumption)
        return (*ranges, *reversed(kept))

    def _range_conditions(self, entry: Symbol) -> list[Expr]:
        """The symbol's range as conditions, where they do not follow from what else is checked."""
        symbol = entry.expr
        natural = 0 if isinstance(entry.source, Size) else -ir.INF
        free = ir.sym(symbol.name, -ir.INF, ir.INF)  # a guard knows nothing of it yet
        final = self.simplify(symbol)
        least, most = final.lo, final.hi
        if final is symbol:
            least = max(natural, self._at_least.get(symbol, -ir.INF))
            most = -self._at_least.get(ir.mul(symbol, -1), -ir.INF)
        if symbol.name in self.drawn:
            return []
        below = [ir.le(symbol.lo, free)] if least < symbol.lo else []
        return below + ([ir.le(free, symbol.hi)] if most > symbol.hi else [])


def _terms(value: Expr) -> tuple[int, Expr]:
    """value == constant + terms."""
    if value.op == "const":
        return value.value, ir.ZERO
    constant = value.args[0] if value.op == "add" else 0
    return constant, ir.add(value, -constant)  # type: ignore[return-value, operator]


def solve(difference: Expr) -> tuple[Expr, Expr] | None:
    """(symbol, value) such that difference == 0 says symbol == value; the newest symbol that can."""
    for symbol in sorted(symbols(difference), key=lambda s: -s.serial):
        parts = ir.linear_in(difference, symbol)
        if parts is None:
            continue
        coefficient, rest = parts
        if coefficient.op != "const":
            continue
        if coefficient.value in (1, -1):
            return symbol, ir.mul(rest, -coefficient.value)
        if rest.op == "const" and rest.value % coefficient.value == 0:
            return symbol, ir.const(-rest.value // coefficient.value)
    return _solve_term(difference)


def _solve_term(difference: Expr) -> tuple[Expr, Expr] | None:
    """The same for a whole sub-expression: 2*(s0 // 4) - 8 == 0 says s0 // 4 == 4."""
    constant, terms = _terms(difference)
    if terms.op == "mul" and terms.operands[0].op == "const" and len(terms.operands) == 2:
        factor, term = terms.operands
        return (term, ir.const(-constant // factor.value)) if constant % factor.value == 0 else None
    if terms.op in ("floordiv", "mod", "min", "max", "mul"):
        return terms, ir.const(-constant)
    return None


def _solve_division(whole: Expr, value: Expr) -> tuple[Expr, Expr] | None:
    """4 * (x // 4) == x: every such product is x from now on."""
    if whole.op == "mul" and len(whole.operands) == 2:
        for divisor, quotient in (whole.operands, whole.operands[::-1]):
            if quotient.op == "floordiv" and quotient.operands == (value, divisor):
                return whole, value
    return None
