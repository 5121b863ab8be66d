"""The tile of points that one program of a kernel takes: its axes, and block sizes worth trying.

    make_axes(group)       x | x, r (rows of a reduction) | y, x (a transpose)
    choose_blocks(...)     a few sizes, the likeliest first; which that is was measured on an H200
                           (`python -m benchmarks.tune` shows all of them)
"""
from __future__ import annotations

from typing import Final

from dovetail.codegen import analysis
from dovetail.codegen.analysis import Shape, step_score
from dovetail.ir.expr import ONE, ZERO, Expr, floordiv, mod, product, sym, symbols
from dovetail.ir.loop import Range
from dovetail.ir.program import Blocks
from dovetail.ir.schedule import Group
from dovetail.util.noun import Noun, replace

PERSISTENT: Final = 8192
"""Longest row that is held in registers;"""
LONG_COLUMN: Final = 256
"""the same where neighbouring rows, not elements of one row, are contiguous: a tile holds many."""
MANY_ROWS: Final = 1024
"""Rows that give every multiprocessor several programs."""
MANY_POINTS: Final = 1 << 22
"""Points that give every multiprocessor several programs of the largest size."""
FEW_PROGRAMS: Final = 264
"""Two for each multiprocessor."""
SHORTEST_ROW: Final = 64

DOWN: Final = "[:, None]"
ACROSS: Final = "[None, :]"


class Axis(Noun):
    """One axis of the tile: the loops flattened into it and its place in the tile's shape."""

    name: str
    loops: tuple[Range, ...]
    place: str

    @property
    def size(self) -> Expr:
        return product(r.size for r in self.loops)

    @property
    def block(self) -> str:
        return f"{self.name.upper()}BLOCK"

    @property
    def index(self) -> Expr:
        return sym(f"{self.name}index", 0, max(self.size.hi - 1, 0), self.size)


def positions(axis: Axis, rest: Expr) -> dict[Expr, Expr]:
    """Loop variables at a position along the axis."""
    found: dict[Expr, Expr] = {}
    for k, loop in reversed([*enumerate(axis.loops)]):
        size = ONE if axis.size is ZERO else loop.size  # of a kernel that never runs
        found[loop.var] = rest if k == 0 else mod(rest, size)
        rest = floordiv(rest, size)
    return found


def make_axes(group: Group, shape: Shape) -> tuple[Axis, ...]:
    outer, inner = group.ranges[: group.outer], group.inner
    if inner:
        return (Axis("x", outer, DOWN), Axis("r", inner, ACROSS))
    if (pair := _crossing(group, shape)) is not None:
        fast, slow = pair
        rest = tuple(r for r in outer if r is not fast and r is not slow)
        return (Axis("y", (*rest, slow), DOWN), Axis("x", (fast,), ACROSS))
    return (Axis("x", outer, ""),)


def as_rows(group: Group) -> Group:
    """Points of which some loads are the same for a whole row: a program takes rows, and loads those once."""
    if group.inner or len(group.ranges) < 2 or group.outer != len(group.ranges):
        return group
    *outer, last = group.ranges
    rows = product(r.size for r in outer)
    if not last.size.is_const or last.size.value < SHORTEST_ROW or rows.hi < MANY_ROWS // 2:
        return group
    writes = analysis.writes_in(group.nests)
    if any(write.index_scalar is not None for write in writes):
        return group
    accesses = [index for nest in group.nests for _, index in nest.loads if index is not None]
    moving = [index for index in (*accesses, *(w.index for w in writes)) if last.var in symbols(index)]
    is_same = len(moving) < len(accesses) + len(writes)
    if not is_same or any(step_score(index, last.var) != 1.0 for index in moving):
        return group
    return replace(group, outer=group.outer - 1)


def _crossing(group: Group, shape: Shape) -> tuple[Range, Range] | None:
    """The two loops of a transpose: most accesses are contiguous in the first, some only in the second."""
    fast = shape.contiguous
    if fast is None or len(group.ranges) < 2:
        return None
    for other in reversed(group.ranges):
        if other is fast or (other.size.is_const and other.size.value < 16):
            continue
        if fast.size.is_const and fast.size.value < 16:
            return None
        loads = [index for nest in group.nests for _, index in nest.loads if index is not None]
        for index in (*loads, *(write.index for write in analysis.writes_in(group.nests))):
            if step_score(index, other.var) == 1.0 and step_score(index, fast.var) < 0:
                return fast, other
    return None


def power(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def find_streams(group: Group) -> dict[str, bool]:
    """Buffers of which whole rows are read, and whether all results read the same row (of a vector)."""
    outer = {r.var for r in group.ranges[: group.outer]}
    inner = {r.var for r in group.inner}
    found: dict[str, bool] = {}
    for nest in group.nests:
        for buffer, index in nest.loads:
            used = inner if index is None else symbols(index)
            if buffer not in group.internal and not inner.isdisjoint(used):
                found[buffer] = outer.isdisjoint(used)
    return found


def choose_blocks(
    axes: tuple[Axis, ...], shape: Shape, is_looped: bool, streams: dict[str, bool], most: int
) -> list[Blocks]:
    """A few block sizes worth trying, the likeliest first; `most` elements a thread."""
    if axes[-1].name == "r":
        if shape.contiguous in axes[0].loops:
            return _column_blocks(axes, is_looped, most)
        return _row_blocks(axes, is_looped, streams, most)
    if len(axes) == 2:
        if most < 16:
            return [Blocks(32, y=32, warps=8), Blocks(32, y=32, warps=16)]
        return [Blocks(64, y=64, warps=8), Blocks(128, y=128, warps=16), Blocks(128, y=32, warps=16)]
    size = axes[0].size.value if axes[0].size.is_const else 1 << 24
    small = max(64, min(1024, power(size)))
    if most < 16:
        return [Blocks(small, warps=max(1, min(16, small // (32 * most)))), Blocks(256, warps=8)]
    large = 2048 if size > 4096 else small
    first = Blocks(small, warps=2 if small == 1024 else 4)  # 16 elements a thread: two loads of 16 bytes
    second = Blocks(large, warps=4)
    likely = [second, first] if size >= MANY_POINTS else [first, second]
    return [*likely, Blocks(small, warps=4), Blocks(large, warps=8)]


def _row_blocks(
    axes: tuple[Axis, ...], is_looped: bool, streams: dict[str, bool], most_each: int
) -> list[Blocks]:
    """Rows are contiguous: few rows, much of each."""
    if is_looped:
        size, is_product = axes[-1].size, any(streams.values())
        if is_product and size.is_const and size.value % 1024 == 0:  # without a rest at the end
            return [Blocks(1, r=1024, warps=4), Blocks(2, r=1024, warps=4), Blocks(2, r=512, warps=2)]
        likely = [Blocks(1, r=4096, warps=16), Blocks(1, r=4096, warps=8)]
        return [*(reversed(likely) if is_product else likely), Blocks(2, r=1024, warps=4)]
    rows = axes[0].size.value if axes[0].size.is_const else 1 << 20
    row = power(axes[-1].size.value)
    per = max(1, min(2048 // row, power(max(rows // 264, 1))))
    each = min(_elements_a_thread(row, len(streams)) if rows >= MANY_ROWS else 4, most_each)  # few: all work
    most = 16 if row <= PERSISTENT else 32
    warps = max(1, min(most, row * per // (32 * each)))
    other = Blocks(per * 2, r=row, warps=warps) if row <= 1024 else Blocks(per, r=row, warps=warps * 4)
    found = [Blocks(per, r=row, warps=warps), Blocks(per, r=row, warps=warps * 2)]
    return [b for b in (*found, Blocks(per, r=row, warps=max(warps // 2, 1)), other) if b.warps <= most]


def _elements_a_thread(row: int, streams: int) -> int:
    """A single stream is fastest with few warps, which have little to tell each other; several streams need
    registers for each."""
    if streams > 4:
        return 8
    if row <= 1024:
        return 32
    return 16 if streams > 1 else 64


def _column_blocks(axes: tuple[Axis, ...], is_looped: bool, most: int) -> list[Blocks]:
    """Neighbouring results are neighbours in memory: tiles of many results."""
    row = power(axes[-1].size.value) if axes[-1].size.is_const else 64
    if not is_looped:
        x = max(1, min(max(32, 1024 // row), 4096 // row))
        each = 32 * most if most == 1 else 1024
        return [Blocks(n, r=row, warps=max(1, min(8, n * row // each))) for n in (x, x * 2)]
    if most == 1:
        return [Blocks(32, r=16, warps=8), Blocks(32, r=32, warps=8)]
    likely = [Blocks(32, r=128, warps=4), Blocks(64, r=64, warps=4), Blocks(64, r=64, warps=8)]
    if axes[0].size.hi <= 32 * FEW_PROGRAMS and row <= 1024:  # all loads under way at once
        return [Blocks(16, r=row, warps=8), Blocks(32, r=row, warps=16), *likely]
    return likely
