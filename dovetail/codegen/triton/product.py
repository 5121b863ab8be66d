"""Groups around matrix products as Triton kernels: tiles made by the matrix units.

    o[i, j] = gelu(sum over k of x[i, k] * w[j, k])     ->

    yindex = ... [:, None]; xindex = ... [None, :]
    acc1 = tl.full((YBLOCK, XBLOCK), 0, tl.float32)
    for roffset in range(0, 768, RBLOCK):
        rindex = roffset + tl.arange(0, RBLOCK)[None, :]
        t2 = tl.load(x + (768*yindex + rindex), ymask, other=0)
        rindex = roffset + tl.arange(0, RBLOCK)[:, None]
        t3 = tl.load(w + (rindex + 768*xindex), xmask, other=0)
        acc1 = tl.dot(t2, t3, acc1)
    ...                                                  what follows the sum, on the whole tile

What the factors are computed from is computed on their tiles, so conversions and the like need no kernel
of their own. The side with more lines is `y`: matrix units want 64 of them.
"""
from __future__ import annotations

from dataclasses import field, replace
from typing import Final

from dovetail.codegen.analysis import Pass, analyse, exprs_below, writes_in
from dovetail.codegen.triton.kernel import Emitter, Tile
from dovetail.codegen.triton.tiling import ACROSS, DOWN, Axis
from dovetail.ir.expr import Expr, as_expr, product, symbols
from dovetail.ir.loop import Nest, Range, Scalar, Write
from dovetail.ir.program import Blocks
from dovetail.ir.schedule import Group
from dovetail.ir.types import F32, MATRIX_STEP
from dovetail.util.noun import Noun

TOGETHER: Final = 8
"""Lines of tiles that are made together, so that what they read stays in the cache."""
TALL: Final = 64
"""Lines that the matrix units take at once."""
MULTIPROCESSORS: Final = 132
EDGE: Final = 64
"""Points of a tile that take as long as a line of what it reads."""


class Product(Noun):
    """Either factor may be computed; `batch` are the loops that both vary with."""

    left: Scalar
    right: Scalar
    rows: tuple[Range, ...]
    columns: tuple[Range, ...]
    batch: tuple[Range, ...]

    @property
    def flipped(self) -> Product:
        return Product(self.right, self.left, self.columns, self.rows, self.batch)


def product_of(nest: Nest) -> Product | None:
    """o[i, j] = sum over k of f32(a[i, k]) * f32(b[k, j]) is Product(a, b, rows (i,), columns (j,)), if both
    factors have 16 bits."""
    if not nest.reduce or len(nest.writes) != 1:
        return None
    (write,) = nest.writes
    if write.reduce != "sum" or write.value.op != "mul" or write.value.dtype is not F32:
        return None
    left, right = (x.operands[0] if x.op == "cast" else x for x in write.value.operands)
    if left.dtype is not right.dtype or not left.dtype.is_low_precision:
        return None
    in_left, in_right = ({s for expr in exprs_below(x) for s in symbols(expr)} for x in (left, right))
    inner = {r.var for r in nest.reduce}
    length = product(r.size for r in nest.reduce)
    if not inner <= in_left & in_right or not length.is_const or length.value % MATRIX_STEP:
        return None
    rows = tuple(r for r in nest.ranges if r.var in in_left - in_right)
    columns = tuple(r for r in nest.ranges if r.var in in_right - in_left)
    batch = tuple(r for r in nest.ranges if r.var in in_left & in_right)
    is_all = len(rows) + len(columns) + len(batch) == len(nest.ranges)
    known = all(r.size.is_const for r in nest.ranges)
    return Product(left, right, rows, columns, batch) if known and is_all and rows and columns else None


def find_products(group: Group) -> dict[Write, Product]:
    """The group's sums, if each is a product of the same rows and columns, and all else comes after."""
    found: dict[Write, Product] = {}
    for nest in group.nests:
        made = product_of(nest) if nest.reduce else None
        if made is not None and next(iter(found.values()), made).rows != made.rows:
            made = made.flipped
        if made is not None:
            found[nest.writes[0]] = made
        elif nest.reduce or len(nest.ranges) != group.outer:
            return {}
    return found if len({(p.rows, p.columns, p.batch) for p in found.values()}) == 1 else {}


class ProductEmitter(Emitter, frozen=False):
    """Of several matrices a program takes a tile of one, which is number `zindex`."""

    products: dict[Write, Product] = field(init=False)
    matrix: Axis = field(init=False)

    def choose(self) -> None:
        self.products = find_products(self.group)
        first = next(iter(self.products.values()))
        rows, columns = (product(r.size for r in side).value for side in (first.rows, first.columns))
        if rows < min(TALL, columns):
            self.products = {write: found.flipped for write, found in self.products.items()}
            first = first.flipped
        self.shape = analyse(self.group, self.buffers)
        self.matrix = Axis("z", first.batch, "")
        inner = Axis("r", self.group.inner, ACROSS)
        self.axes = (Axis("y", first.rows, DOWN), Axis("x", first.columns, ACROSS), inner)
        self.is_looped = True
        self.blocks = tuple(choose_tiles(self.matrix.size.value, *(axis.size.value for axis in self.axes)))

    @property
    def grid(self) -> tuple[tuple[Expr, int], ...]:
        return (as_expr(self.matrix.size.value * self._height()), 0), (self.axes[1].size, 1)

    def _height(self) -> int:
        """Rows of a matrix with those that fill up the last tile, whatever its size."""
        most = max(blocks.y for blocks in self.blocks)
        return -(-self.axes[0].size.value // most) * most

    def _indices(self) -> None:
        """Tiles are numbered so that neighbours in time are neighbours in both directions."""
        wide = ".to(tl.int64)" if self._is_wide() else ""
        counts = "tl.num_programs(0), tl.num_programs(1)"
        self.w(f"ytile, xtile = tl.swizzle2d(tl.program_id(0), tl.program_id(1), {counts}, {TOGETHER})")
        if self.matrix.loops:
            self.w(f"zindex = ytile{wide} // ({self._height()} // YBLOCK)")
            self.w(f"ytile = ytile % ({self._height()} // YBLOCK)")
            self._loops_of(self.matrix)
        for axis in self.axes[:2]:
            reach = f"tl.arange(0, {axis.block}){axis.place}"
            self.w(f"{axis.name}index = {axis.name}tile{wide} * {axis.block} + {reach}")
            self._loops_of(axis)

    def _pass(self, step: Pass, shifted: dict[Write, Write]) -> None:
        super()._pass(replace(step, points=()), shifted)
        writes = writes_in(step.points)
        if not writes:
            return
        every = y, x, r = self.axes
        sums = {write: self.fresh("acc") for write in writes}
        for name in sums.values():
            self.w(f"{name} = tl.full((YBLOCK, XBLOCK), 0, tl.float32)")
        with self.w.block(f"for roffset in range(0, {r.size.value}, {r.block}):"):
            before: dict[int, dict[Scalar, Tile]] = {}
            for write in writes:
                factors = self.products[write]
                operands = []
                for side, value in enumerate((factors.left, factors.right)):
                    inner = replace(r, place=DOWN if side else ACROSS)
                    self.axes = (inner, x) if side else (y, inner)
                    self.tiles = before.setdefault(side, {})
                    self._begin_block(inner)
                    operands.append(self._full(self._value(value)))
                self.w(f"{sums[write]} = tl.dot({', '.join(operands)}, {sums[write]})")
        self.tiles, self.axes = {}, every
        for write in writes:
            self._keep(write.buffers[0], write, Tile(sums[write], F32, frozenset("yx")))


def choose_tiles(matrices: int, height: int, width: int, depth: int) -> list[Blocks]:
    """The likeliest first."""
    narrow = 16 if width <= 16 else 32
    found = [
        Blocks(x, y=y, r=r, warps=warps, stages=stages)
        for y, x, r, warps, stages in (
            ((64, narrow, 128, 4, 6), (16, narrow, 512, 2, 3), (16, narrow, 256, 1, 4),
             (32, narrow, 256, 2, 4))
            if width <= 32 else
            ((128, 256, 64, 8, 3), (128, 128, 64, 4, 3), (128, 128, 64, 8, 4), (64, 256, 64, 4, 4),
             (128, 64, 64, 4, 4), (64, 128, 64, 4, 4), (64, 64, 64, 4, 5), (64, 32, 128, 4, 4))
        )
    ]  # fmt: skip
    depths = [r for r in (512, 256, 128, 64, 32, 16) if depth % r == 0]
    low = [b for b in found if b.y < 2 * max(height, MATRIX_STEP)]
    fits = [replace(b, r=next(r for r in depths if r <= b.r)) for b in low]

    def waste(b: Blocks) -> int:
        """The time of all tiles, in points, with multiprocessors idle while others make the last ones. What
        only reads a matrix takes the same time with any that keep all of them at it."""
        tiles = matrices * -(-height // b.y) * -(-width // b.x)
        if width <= 32:
            return int(tiles < MULTIPROCESSORS)
        return -(-tiles // MULTIPROCESSORS) * (b.x * b.y + EDGE * (b.x + b.y))

    return sorted(dict.fromkeys(fits), key=waste) or [Blocks(16, y=16, r=16, warps=1)]
