"""Attention as Triton kernels: scores are made by the matrix units, changed, and used, a tile at a time.

    attend(scores, allowed, v[b, h, j, e], ...) of lower/attention.py   ->

    yindex = ...                                           a program's queries, and their tile of q
    for at in range(0, tl.load(count + ...)):              the blocks of keys that the mask names
        xstart = tl.load(which + (... + at)) * 128
        t4, t5 = tl.load(k + ...), tl.load(v + ...)
        t6 = tl.dot(t3, tl.trans(t4))
        ...                                                score_mod and mask_mod, as any other body
        top, total, acc1 = dv.attend(t9, top, total, acc1, t5)
    for ...                                                the same without a mask, for blocks in need of none

`mix`, of which gradients consist, walks likewise. `y` are the lines that a program has, `x` those that it
walks over, be they queries or keys.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import field, replace
from typing import Any, Final

from dovetail.codegen.analysis import Pass, analyse, token, varies
from dovetail.codegen.triton.kernel import Emitter, Tile, _text
from dovetail.codegen.triton.ops import LOG2_E, TL_TYPE
from dovetail.codegen.triton.tiling import ACROSS, DOWN, Axis, power
from dovetail.ir.expr import ONE, Expr, ceildiv, floordiv, minimum, mod, mul, substitute, sym, symbols
from dovetail.ir.loop import ATTENTION, Range, Scalar, Write, iter_scalars
from dovetail.ir.program import Blocks
from dovetail.ir.schedule import Group
from dovetail.ir.types import F32, MATRIX_STEP

TILES: Final = {
    "attend": {64: (128, 128, 4, 3), 128: (128, 128, 8, 2), 256: (64, 32, 4, 2)},
    "mix": {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (64, 32, 8, 2)},
    "turned": {64: (64, 128, 4, 2), 128: (64, 64, 4, 2), 256: (32, 32, 8, 1)},
}
"""By the width of a head: lines of a program, lines that it takes at once, warps, stages. The fastest of some
on an H200; the lines of `turned` are keys."""
PRECISE: Final = "input_precision='tf32x3'"
"""For fp32, of which the matrix units have the upper bits only."""


def is_attention(group: Group) -> bool:
    return group.nests[0].writes[0].reduce == ATTENTION


def width(axis: Axis) -> int:
    """Of a tile, along a head."""
    return max(power(axis.size.value), MATRIX_STEP)


class AttentionEmitter(Emitter, frozen=False):
    loops: dict[str, Range] = field(init=False)
    matrix: Axis = field(init=False)
    heads: dict[Expr, Axis] = field(init=False)
    results: dict[Write, str] = field(init=False)
    """Those with a line along a head for each of the program's, and what they are summed in."""

    def choose(self) -> None:
        self.shape, self.is_looped = analyse(self.group, self.buffers), True
        self.loops = {r.var.name: r for r in self.group.ranges}
        writes, (b, own, rows) = self.group.nests[0].writes, self.group.nests[0].ranges
        self.results = {w: self.fresh("acc") for w in (writes if self.is_sum else writes[:1])}
        columns = self.loops["i" if self.is_turned else "j"]
        self.axes = Axis("y", (rows,), DOWN), Axis("x", (columns,), ACROSS)
        self.matrix = Axis("z", (b, own), "")
        self.heads = {r.var: Axis(name, (r,), ACROSS) for name, r in self.loops.items() if name[0] == "e"}
        self.blocks = (self._tile(),)

    @property
    def value(self) -> Scalar:
        return self.group.nests[0].writes[0].value

    @property
    def is_sum(self) -> bool:
        return self.value.op == "mix"

    @property
    def is_turned(self) -> bool:
        """The lines are keys."""
        return "k" in self.loops

    @property
    def is_rounded(self) -> bool:
        """The statistics are for results that are."""
        return self.value.operands[2].dtype.is_low_precision

    def _tile(self) -> Blocks:
        """It lies in one block of the mask."""
        table = TILES["turned" if self.is_turned else self.value.op]
        *lines, warps, stages = table[max(64, *map(width, self.heads.values()))]
        if not self.is_rounded:
            lines, stages = [n // 2 for n in lines], 1
        blocks: Any = [size.args[0] for size in self.value.operands[4:6]]
        y, x = (max(min(n, block & -block, power(axis.size.hi)), MATRIX_STEP)
                for n, block, axis in zip(lines, blocks, self.axes))  # fmt: skip
        return Blocks(x, y=y, warps=warps, stages=stages)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.masked += tuple(axis.name for axis in self.heads.values() if width(axis) != axis.size.value)

    @property
    def parts(self) -> Expr:
        """Tiles of the lines."""
        return ceildiv(self.axes[0].size, self.blocks[0].y)

    @property
    def grid(self) -> tuple[tuple[Expr, int], ...]:
        """With a second axis equal kernels are not made one, which would have to choose its pointers."""
        return (mul(self.matrix.size, mul(self.parts, self.blocks[0].y)), 0), (ONE, 1)

    def _indices(self) -> None:
        """The last lines first: under a causal mask they have most to do."""
        wide, parts = ".to(tl.int64)" if self._is_wide() else "", _text(self.parts)
        self.w(f"zindex = tl.program_id(0){wide} // {parts}")
        self._loops_of(self.matrix)
        self.w(f"ystart = ({parts} - 1 - tl.program_id(0){wide} % {parts}) * YBLOCK")
        self._lines(self.axes[0])
        for axis in self.heads.values():
            self.w(f"{axis.name}index = tl.arange(0, {width(axis)})[None, :]")
            self._loops_of(axis)

    def _lines(self, axis: Axis) -> None:
        self.w(f"{axis.name}index = {axis.name}start + tl.arange(0, {axis.block}){axis.place}")
        self._loops_of(axis)

    def _load_constants(self) -> None:
        """There are none."""

    def _matrix(self, line: Scalar, axis: Axis) -> Tile:
        """Lines of a tile, each along a head."""
        every, self.axes = self.axes, (replace(axis, place=DOWN), self._head(line))
        tile, self.axes = self._value(line), every
        return tile

    def _head(self, line: Scalar) -> Axis:
        return next(self.heads[s] for s in symbols(line.args[1]) if s in self.heads)  # type: ignore[arg-type]

    # -- the walk

    def _pass(self, step: Pass, shifted: dict[Write, Write]) -> None:
        bodies = [write.value.operands[0] for write in self.results]
        dots = [node for node in iter_scalars(*bodies) if node.op == "dot"]
        self._begin(bodies, dots)
        for write, name in self.results.items():
            self.w(f"{name} = tl.zeros((YBLOCK, {width(self._head(write.value.operands[2]))}), tl.float32)")
        self.w("total = tl.zeros((YBLOCK, 1), tl.float32)")
        self.w("top = total - float('inf')")
        before, group = self.tiles, self.loops.get("g")
        self.env |= {group.var: sym("gindex", 0, group.size.hi - 1)} if group else {}
        with self.w.block(f"for gindex in range({_text(group.size)}):") if group else nullcontext():
            for start, is_free in self._visits():
                with self.w.block("for at in range(0, steps):"):
                    self.w(start)
                    self.tiles = dict(before)
                    self._take(dots, is_free)
        self.tiles, self.certain = {}, frozenset()
        self._store_all(step.points[0].writes)

    def _begin(self, bodies: list[Scalar], dots: list[Scalar]) -> None:
        """What does not change on the way: tiles of the program's own lines, and what bodies read of them."""
        for dot in dots:
            self._matrix(dot.operands[self.is_turned], self.axes[0])
        moving = {self.axes[1].loops[0].var, *(r.var for name, r in self.loops.items() if name == "g")}
        changing = varies(bodies, moving, set())
        for node in iter_scalars(*bodies):
            for part in node.operands if node in changing and node.op != "dot" else ():
                if part not in changing and part.op != "const":
                    self._value(part)

    def _visits(self) -> Iterator[tuple[str, bool]]:
        """How each stretch of the walk, whose number of steps is written before, finds its next lines, and
        whether it needs no mask."""
        block: Any = self.value.operands[5].args[0]
        size, visits = self.axes[1].size, self.value.operands[6:]
        per = ceildiv(minimum(block, size), self.blocks[0].x)
        for n, visit in enumerate(visits):
            line, number = self.axes[0].loops[0].var, self.loops[f"n{n}"].var
            env = self.env | {line: sym("ystart"), number: floordiv(sym("at"), per)}
            found: Any = [x.args for x in visit.operands]
            count, which = (f"tl.load({token(name)} + ({_text(substitute(at, env))}))" for name, at in found)
            self.w(f"steps = {count} * {_text(per)}")
            yield f"xstart = {which} * {block} + {_text(mod(sym('at'), per))} * XBLOCK", n == 1
        if not visits:
            self.w(f"steps = {_text(ceildiv(size, self.blocks[0].x))}")
            yield "xstart = at * XBLOCK", False

    def _take(self, dots: list[Scalar], is_free: bool) -> None:
        """A tile of scores, and what becomes of it."""
        columns = self.axes[1]
        self._lines(replace(columns, place=DOWN))
        others = [self._matrix(dot.operands[not self.is_turned], columns) for dot in dots]
        lines = [self._matrix(write.value.operands[2], columns) for write in self.results]
        self._lines(columns)
        for dot, other in zip(dots, others):
            own = self.tiles[dot.operands[self.is_turned]].text
            text = f"tl.dot({own}, tl.trans({other.text}), {PRECISE})"
            self.tiles[dot] = self._define(text, F32, frozenset("yx"))
        for (write, name), line in zip(self.results.items(), lines):
            body, holds, *_ = write.value.operands
            is_open = is_free or holds.op == "const" and holds.args[0]
            self.certain = frozenset((holds,) if is_open else ())
            tile, nothing = self._full(self._value(body)), "0.0" if self.is_sum else "float('-inf')"
            if "x" in self.masked:
                tile = f"tl.where(xmask, {tile}, {nothing})"
            if self.is_sum:
                self.w(f"{name} = tl.dot(({tile}).to({TL_TYPE[line.dtype]}), {line.text}, {name}, {PRECISE})")
            else:
                self.w(f"top, total, {name} = dv.attend({tile}, top, total, {name}, {line.text})")

    def _store_all(self, writes: tuple[Write, ...]) -> None:
        texts = [f"{name} * {write.value.operands[3].args[0]}" for write, name in self.results.items()]
        if not self.is_sum:
            (name,) = self.results.values()
            texts = [f"{name} / tl.where(total == 0, 1.0, total)", f"top * {LOG2_E} + tl.log2(total)",
                     f"top * {LOG2_E}"]  # fmt: skip
        every = self.axes
        for write, text in zip(writes, texts):
            self.axes = (every[0], self._head(write.value.operands[2]))[: 1 + (write in self.results)]
            self._keep(write.buffers[0], write, self._define(text, F32, frozenset(a.name for a in self.axes)))
        self.axes = every
