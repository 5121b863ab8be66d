"""Bring two iteration domains to common loop variables.

    refine([k < 512], [i < 8, j < 64])  ->  [d0 < 8, d1 < 64],  k = 64*d0 + d1,  i = d0,  j = d1

A domain is an ordered list of ranges. Two domains with the same number of points are the same walk
over memory when one is a finer split of the other; the finer one becomes common.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from dovetail.ir.expr import ONE, ZERO, Expr, add, floordiv, linear_in, mul
from dovetail.ir.loop import Range
from dovetail.util.noun import Noun


class Common(Noun):
    """ranges of the common domain; each side's variables in terms of them; for every common range,
    the position of the range it came from on either side."""

    ranges: tuple[Range, ...]
    left: dict[Expr, Expr]
    right: dict[Expr, Expr]
    from_left: tuple[int, ...]
    from_right: tuple[int, ...]


def divide(value: Expr, by: Expr) -> Expr | None:
    """value / by when that is exact, else None. Loops of no steps at all fit each other."""
    if by is ZERO:
        return ONE if value is ZERO else None
    quotient = floordiv(value, by)
    return quotient if mul(quotient, by) is value else None


@lru_cache(4096)
def refine(left: tuple[Range, ...], right: tuple[Range, ...]) -> Common | None:
    """The common refinement, or None if the walks differ. (Layers repeat.)"""
    parts = _split([r.size for r in left], [r.size for r in right])
    if parts is None:
        return None
    parts.reverse()
    ranges = tuple(Range.over(f"d{k}", size) for k, (size, _, _) in enumerate(parts))
    lefts, rights = tuple(a for _, a, _ in parts), tuple(b for _, _, b in parts)
    return Common(ranges, _rebuild(left, ranges, lefts), _rebuild(right, ranges, rights), lefts, rights)


def _split(left: list[Expr], right: list[Expr]) -> list[tuple[Expr, int, int]] | None:
    """Common sizes from the innermost outwards, each with its position on both sides."""
    parts: list[tuple[Expr, int, int]] = []
    i, j = len(left) - 1, len(right) - 1
    a, b = (left[i] if i >= 0 else ONE), (right[j] if j >= 0 else ONE)
    while i >= 0 or j >= 0:
        if a is ONE and i >= 0:
            i -= 1
            a = left[i] if i >= 0 else ONE
        elif b is ONE and j >= 0:
            j -= 1
            b = right[j] if j >= 0 else ONE
        elif i < 0 or j < 0:
            return None
        elif (quotient := divide(b, a)) is not None:
            parts.append((a, i, j))
            a, b = ONE, quotient
        elif (quotient := divide(a, b)) is not None:
            parts.append((b, i, j))
            a, b = quotient, ONE
        else:
            return None
    return parts


def _rebuild(old: Sequence[Range], new: Sequence[Range], owner: Sequence[int]) -> dict[Expr, Expr]:
    """Each old variable as a row-major combination of the new ones that it was split into."""
    env: dict[Expr, Expr] = {r.var: ZERO for r in old}
    scale = [ONE] * len(old)
    for part, position in zip(reversed(new), reversed(owner)):
        var = old[position].var
        env[var] = add(env[var], mul(part.var, scale[position]))
        scale[position] = mul(scale[position], part.size)
    return env


def by_stride(ranges: Sequence[Range], index: Expr) -> tuple[Range, ...] | None:
    """The ranges ordered as `index` walks memory, outermost first; None if it does not visit each
    point of the domain at its own address."""
    found: list[tuple[int, Range]] = []
    for item in ranges:
        if item.size is ONE:
            continue
        parts = linear_in(index, item.var)
        if parts is None or parts[0].lo <= 0:
            return None
        found.append((parts[0].lo, item))
    found.sort(key=lambda pair: -pair[0])
    return tuple([item for _, item in found])
