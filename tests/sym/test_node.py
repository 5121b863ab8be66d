"""torch.SymInt, SymFloat and SymBool over our nodes behave as the numbers they stand for."""
from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch

from dovetail.sym import Shapes, hint_of, make_symfloat, make_symint

BINARY = [
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.truediv, torch.sym_max,
    torch.sym_min, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
]  # fmt: skip


def _plain(op: Any) -> Any:
    return {torch.sym_max: max, torch.sym_min: min}.get(op, op)


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("other", [3, 12, 5.0, 0.5])
def test_binary(op: Any, other: float) -> None:
    shapes = Shapes()
    s0 = make_symint(shapes, shapes.symbol(7))
    for a, b, x, y in ((s0, other, 7, other), (other, s0, other, 7)):
        got, wanted = hint_of(op(a, b)), _plain(op)(x, y)
        assert got == wanted
        if op not in (torch.sym_max, torch.sym_min):  # torch's promote to float
            assert type(got) is type(wanted)


@pytest.mark.parametrize("op", [operator.neg, abs, math.floor, math.ceil, math.trunc, torch.sym_float, torch.sym_not])
def test_unary(op: Any) -> None:
    shapes = Shapes()
    s0 = make_symint(shapes, shapes.symbol(7))
    if op is torch.sym_not:
        assert hint_of(op(s0 == 7)) is False
        return
    plain = float if op is torch.sym_float else op
    assert hint_of(op(s0)) == plain(7)
    assert hint_of(op(s0 / 2)) == plain(3.5)


def test_float_arithmetic_gives_integer_expressions_back() -> None:
    shapes = Shapes()
    s0 = make_symint(shapes, shapes.symbol(7))
    assert str(math.floor(s0 * 2.0)) == "2*s0" and str(math.floor(s0 / 2)) == "s0 // 2"
    assert str(math.ceil(s0 * 0.25)) == "(s0 + 3) // 4" and str(int(1) + math.floor(s0 / 3)) == "(s0 // 3) + 1"
    assert not shapes.assumptions


def test_other_floats_are_trees() -> None:
    shapes = Shapes()
    s0 = make_symint(shapes, shapes.symbol(7))
    scale = 1 / math.sqrt(64) * s0**0.5 + 0.1
    value = scale.node.expr
    assert eval(str(value), {"math": math, "s0": 9}) == 1 / math.sqrt(64) * 9**0.5 + 0.1
    assert not shapes.assumptions


def test_run_time_floats() -> None:
    shapes = Shapes()
    rate = make_symfloat(shapes, shapes.float_symbol(0.1))
    assert hint_of(rate * 2) == 0.2 and not shapes.fixed_floats
    assert bool(rate < 0.5) and list(shapes.conditions) == ["((f_0) < (0.5)) is True"]
    other = make_symfloat(shapes, shapes.float_symbol(0.3))
    assert bool(rate < other) and [f.name for f in shapes.fixed_floats] == ["f_0", "f_1"]


def test_branches_are_assumed_and_constants_are_numbers() -> None:
    shapes = Shapes()
    s0 = make_symint(shapes, shapes.symbol(8))
    assert s0 - s0 == 0 and type(s0 * 0) is int
    assert s0 > 1 and not shapes.assumptions
    assert s0 % 2 == 0 and [str(a.condition) for a in shapes.assumptions] == ["0 == (s0 % 2)"]
    assert [i for i in range(s0)][-1] == 7 and str(shapes.assumptions[-1].condition) in ("s0 == 8", "8 == s0")


def test_sums() -> None:
    shapes = Shapes()
    s0 = make_symint(shapes, shapes.symbol(8))
    assert str(torch.sym_sum([s0, s0, 1])) == "2*s0 + 1"
