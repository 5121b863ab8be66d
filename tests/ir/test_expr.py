"""Integer expressions: normal forms mean what was written, ranges contain every value, SymPy agrees."""
from __future__ import annotations

import itertools
import operator
import pickle
import random
from typing import Any

import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.ir.expr import (
    FALSE,
    TRUE,
    Expr,
    add,
    and_,
    ceildiv,
    const,
    eq,
    evaluate,
    floordiv,
    le,
    linear_in,
    lt,
    maximum,
    minimum,
    mod,
    mul,
    not_,
    or_,
    range_in,
    substitute,
    sym,
)

I, J, K = sym("i", 0, 7), sym("j", 0, 63), sym("k", 1, 5)
N = sym("n", 2)
INTS: dict[Any, Any] = {
    add: operator.add, mul: operator.mul, minimum: min, maximum: max,
    floordiv: operator.floordiv, mod: operator.mod,
}  # fmt: skip
BOOLS: dict[Any, Any] = {eq: operator.eq, lt: operator.lt, le: operator.le}


def _draw(rng: random.Random, depth: int) -> tuple[Expr, Any]:
    """An expression and the Python function it was written as."""
    if depth == 0 or rng.random() < 0.2:
        leaf = rng.choice([I, J, K, const(rng.randint(-4, 70))])
        return leaf, (lambda env: leaf.value if leaf.op == "const" else env[leaf.name])
    make = rng.choice(list(INTS))
    (a, fa), (b, fb) = _draw(rng, depth - 1), _draw(rng, depth - 1)
    if make in (floordiv, mod):
        divisor = rng.choice([const(rng.choice([1, 2, 3, 4, 8, 64])), K])
        b, fb = divisor, (lambda env: divisor.value if divisor.op == "const" else env[divisor.name])
    plain = INTS[make]
    return make(a, b), (lambda env: plain(fa(env), fb(env)))


ENVS = [{"i": i, "j": j, "k": k} for i, j, k in itertools.product((0, 1, 3, 7), (0, 1, 5, 62, 63), (1, 2, 5))]


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 10**9))
def test_normal_forms_keep_the_value_and_the_range(seed: int) -> None:
    rng = random.Random(seed)
    expr, plain = _draw(rng, 4)
    for env in ENVS:
        value = plain(env)
        assert evaluate(expr, env) == value
        assert expr.lo <= value <= expr.hi
        fixed = substitute(expr, {I: env["i"], J: env["j"], K: env["k"]})
        assert fixed is const(value)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9))
def test_conditions(seed: int) -> None:
    rng = random.Random(seed)
    make = rng.choice(list(BOOLS))
    (a, fa), (b, fb) = _draw(rng, 3), _draw(rng, 3)
    condition, plain = make(a, b), BOOLS[make]
    other = lt(I, K)
    for env in ENVS:
        holds = plain(fa(env), fb(env))
        assert bool(evaluate(condition, env)) == holds
        assert bool(evaluate(not_(condition), env)) != holds
        assert bool(evaluate(and_(condition, other), env)) == (holds and env["i"] < env["k"])
        assert bool(evaluate(or_(condition, other), env)) == (holds or env["i"] < env["k"])


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_narrower_ranges(seed: int) -> None:
    expr, plain = _draw(random.Random(seed), 4)
    lo, hi = range_in(expr, {I: (1, 3), J: (5, 62)})
    for env in ENVS:
        if 1 <= env["i"] <= 3 and 5 <= env["j"] <= 62:
            assert lo <= plain(env) <= hi


def _to_sympy(expr: Expr, names: dict[str, Any]) -> Any:
    if expr.op == "const":
        return sympy.Integer(expr.value)
    if expr.op == "sym":
        return names[expr.name]
    if expr.op == "add":
        return expr.args[0] + sum(n * _to_sympy(t, names) for t, n in expr.args[1])
    return sympy.prod(_to_sympy(x, names) for x in expr.operands)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_polynomials_are_canonical(seed: int) -> None:
    """Two ways to write one polynomial are one object exactly where SymPy expands them to the same."""
    rng = random.Random(seed)
    names = {s.name: sympy.Symbol(s.name, integer=True) for s in (I, J, K)}

    def draw(depth: int) -> Expr:
        if depth == 0:
            return rng.choice([I, J, K, const(rng.randint(-3, 3))])
        return rng.choice([add, mul])(draw(depth - 1), draw(depth - 1))

    a, b = draw(3), draw(2)
    left, right = mul(add(a, b), add(a, mul(b, -1))), add(mul(a, a), mul(mul(b, b), -1))
    assert left is right
    assert sympy.expand(_to_sympy(a, names) - _to_sympy(b, names)) == sympy.expand(_to_sympy(add(a, mul(b, -1)), names))


RULES = [
    ((I * 64 + J) // 64, I), ((I * 64 + J) % 64, J), ((N // 64) * 64 + N % 64, N), ((I * N + J) % 1, const(0)),
    ((N * 12) // 4, N * 3), ((N * 6 + 3) // 3, N * 2 + 1), ((N // 4) // 8, N // 32), ((N % 64) % 8, N % 8),
    ((N * J) // N, J), (minimum(N, N), N), (maximum(I, 0), I), (minimum(I, 7), I), (ceildiv(N * 4, 4), N),
    (eq(N, 0), FALSE), (lt(I, 8), TRUE), (le(N, N * 2), TRUE), (not_(not_(lt(N, J))), lt(N, J)),
    (not_(lt(N, J)), le(J, N)), (eq(N, J), eq(J, N)), ((I * 8 + K) % 8, K), ((N * 2 + 1) % 2, const(1)),
    (N % 10 + 10 * (N // 10 % 128) + 1280 * (N // 1280), N), (10 * (N // 10 % 128) + 1280 * (N // 1280) + N % 10, N),
]  # fmt: skip


def test_rules() -> None:
    for got, wanted in RULES:
        assert got is wanted, f"{got} is not {wanted}"


def test_size_bounded_symbols() -> None:
    row = sym("row", 0, size=N)
    assert (row + N * I) % N is row and (row + N * I) // N is I and lt(row, N) is TRUE


def test_linear_in() -> None:
    assert linear_in(I * N + J * 3 + 1, J) == (const(3), I * N + 1)
    assert linear_in(I * I, I) is None and linear_in(J % 4, J) is None


def test_text_evaluates_and_pickle_interns() -> None:
    for seed in range(60):
        expr, plain = _draw(random.Random(seed), 4)
        for env in ENVS[::7]:
            assert eval(str(expr), {"min": min, "max": max, **env}) == plain(env)
        assert pickle.loads(pickle.dumps(expr)) is expr
