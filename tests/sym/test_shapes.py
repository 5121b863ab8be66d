"""Assumptions: what is proved, what is assumed, and what is left to check at the end."""
from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.ir.expr import (
    Expr,
    add,
    const,
    eq,
    evaluate,
    floordiv,
    le,
    lt,
    maximum,
    minimum,
    mod,
    mul,
    not_,
)
from dovetail.ir.source import Arg, Size
from dovetail.sym import Shapes
from dovetail.util.loc import Loc


def conditions(shapes: Shapes) -> list[str]:
    return [str(a.condition) for a in shapes.freeze()]


def test_ranges_prove_without_assuming() -> None:
    shapes = Shapes()
    s0, s1 = shapes.symbol(8, Size(Arg(0, "x"), 0)), shapes.symbol(9, Size(Arg(0, "x"), 1))
    assert shapes.decide(lt(1, s0)) and not shapes.decide(eq(mul(s0, s1), 1))
    assert not shapes.decide(eq(mul(s0, add(s1, -1)), 0)), "s0*(s1 - 1) is at least 2"
    assert shapes.decide(le(add(s0, s1), mul(s0, s1))), "true of numbers from 2"
    assert conditions(shapes) == ["2 <= s0", "2 <= s1"]


def test_equalities_are_used() -> None:
    shapes = Shapes()
    s0, s1, s2 = (shapes.symbol(n) for n in (8, 8, 64))
    assert shapes.decide(eq(s0, s1)) and shapes.simplify(add(s1, s1)) is mul(s0, 2)
    assert shapes.decide(eq(s2, mul(s0, s1))) and shapes.simplify(s2) is mul(s0, s0)
    assert not shapes.decide(lt(s2, s0))
    assert len(shapes.assumptions) == 2


def test_later_assumptions_make_earlier_ones_needless() -> None:
    shapes = Shapes()
    s0 = shapes.symbol(100, Size(Arg(0, "x"), 0))
    assert not shapes.decide(eq(s0, 3)) and shapes.decide(lt(5, s0)) and shapes.decide(lt(10, s0))
    assert conditions(shapes) == ["10 < s0"]


def test_specialised_symbols_are_numbers() -> None:
    shapes = Shapes()
    s0 = shapes.symbol(12)
    assert shapes.specialise(floordiv(s0, 4)) == 3 and shapes.simplify(floordiv(s0, 4)) is const(3)
    assert shapes.specialise_symbols(add(s0, 1)) == 13 and shapes.simplify(s0) is const(12)


def test_the_users_line_is_kept() -> None:
    shapes = Shapes(where=lambda: Loc("model.py", 41, "forward"))
    shapes.decide(lt(shapes.symbol(4), 10), "a branch")
    assert str(shapes.assumptions[0]) == "s0 < 10  # model.py:41  a branch"


NUMBERS = st.integers(2, 9)


def _draw(rng: random.Random, symbols: list[Expr], depth: int) -> Expr:
    if depth == 0 or rng.random() < 0.25:
        return rng.choice([*symbols, const(rng.randint(1, 6))])
    make = rng.choice([add, mul, minimum, maximum, floordiv, mod])
    a, b = _draw(rng, symbols, depth - 1), _draw(rng, symbols, depth - 1)
    if make in (floordiv, mod):
        b = rng.choice([*symbols, const(rng.randint(1, 6))])
    return make(a, b)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10**9), st.lists(NUMBERS, min_size=3, max_size=3), st.lists(NUMBERS, min_size=3, max_size=3))
def test_kept_assumptions_imply_every_decision(seed: int, hints: list[int], others: list[int]) -> None:
    """Any sizes that pass the frozen assumptions would have taken the same decisions."""
    rng = random.Random(seed)
    shapes = Shapes()
    symbols = [shapes.symbol(n) for n in hints]
    taken = []
    for _ in range(6):
        a, b = _draw(rng, symbols, 2), _draw(rng, symbols, 2)
        condition = rng.choice([eq, lt, le])(a, b)
        if rng.random() < 0.3:
            condition = not_(condition)
        taken.append((condition, shapes.decide(condition)))
    env = {s.name: n for s, n in zip(symbols, others)}
    assert all(evaluate(a.condition, {s.name: n for s, n in zip(symbols, hints)}) for a in shapes.freeze())
    if all(evaluate(a.condition, env) for a in shapes.freeze()):
        assert all(bool(evaluate(condition, env)) == holds for condition, holds in taken)


def test_exact_division_is_undone() -> None:
    shapes = Shapes()
    s0, s1 = shapes.symbol(12), shapes.symbol(3)
    assert shapes.decide(eq(mul(floordiv(s0, 4), 4), s0)) and shapes.simplify(mul(floordiv(s0, 4), 4)) is s0
    assert shapes.decide(eq(mul(floordiv(s0, s1), s1), s0)) and shapes.simplify(mul(floordiv(s0, s1), s1)) is s0
