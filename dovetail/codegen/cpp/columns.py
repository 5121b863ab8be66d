"""Reductions over rows of memory: stream the rows, keep accumulators for a tile of columns in cache.

    for (from = 0; from < columns; from += 1024)
        for (rows in blocks of 16)
            for (j = from; j < to; j += 16)  { block = 0; each row: block += load(x...);  acc[j] += block; }

Memory is read in its own order, so the prefetcher keeps up. With few columns the rows are dealt out to
threads, each with accumulators of its own. Where several passes follow one another (batch norm on
channels-last images), what one has found for each column waits in an array for the next.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from dovetail.codegen.analysis import Pass
from dovetail.codegen.cpp.exprs import c_expr
from dovetail.codegen.cpp.ops import C_TYPE, VECTOR_TYPE, combine, functions_of
from dovetail.codegen.cpp.partial import PIECES
from dovetail.codegen.cpp.reduce import Accumulator
from dovetail.codegen.cpp.values import KernelWriter, Scope, Value
from dovetail.ir.expr import Expr, ceildiv, mul, product
from dovetail.ir.loop import Nest, Range, loads_of
from dovetail.ir.types import BOOL, DType

if TYPE_CHECKING:
    from dovetail.codegen.cpp.loops import Body

PARALLEL_WORK: Final = 32768
"""Weighted elements below which one thread is faster, as in eager."""
FEW: Final = 16
"""Outer points below which threads share the work inside of each."""
TILE: Final = 1024
"""Columns whose accumulators stay in the first-level cache."""
BLOCK: Final = 4
"""Rows added up in a register before the accumulator in memory is touched; each is a stream of its own
for the prefetcher."""
BLOCKS: Final = 64
"""Blocks before the accumulators in memory are flushed into others: rounding errors stay small."""


@dataclass(frozen=True, slots=True)
class Walk:
    """Over all rows: what is accumulated, which buffers are read, and what happens at a point."""

    items: list[Accumulator]
    reads: set[str]
    visit: Callable[[Scope], None]


@dataclass(slots=True)
class Columns:
    body: Body
    deals: bool = False
    """Rows are dealt out to threads; else tiles of columns are."""
    rows: dict[str, tuple[str, DType]] = field(default_factory=dict)
    """Buffer with a value per column -> the array that holds it between passes."""
    heap: list[str] = field(default_factory=list)

    @property
    def writer(self) -> KernelWriter:
        return self.body.writer

    @property
    def vector(self) -> Range:
        assert self.body.vector is not None
        return self.body.vector

    def emit(self, root: Scope) -> None:
        tiles = mul(product(r.size for r in self.body.loops), ceildiv(self.vector.size, TILE))
        length = product(r.size for r in (self.vector, *self.body.group.inner))
        is_short = length.is_const and length.value < PARALLEL_WORK
        self.deals = self.body.has_threads and tiles.is_const and tiles.value < FEW and not is_short
        if self.deals:
            self.body.each(root, self._among_threads, parallel=False)
        else:
            self._by_tiles(root, tiles)

    def _by_tiles(self, root: Scope, tiles: Expr) -> None:
        vector, loops = self.vector, self.body.loops
        scope = Scope(1, root)
        number = "p"
        if loops:
            count = c_expr(ceildiv(vector.size, TILE))
            number = f"(p % {count})"
            self.body.unpack(f"(p / {count})", scope, loops)
        scope(f"const int64_t from = {number} * {TILE}, to = min_i(from + {TILE}, {c_expr(vector.size)});")
        self._passes(scope)
        self.body.over(root, scope, tiles, True)

    def _among_threads(self, scope: Scope) -> None:
        size = c_expr(self.vector.size)
        scope(f"const int64_t pieces = max_i(1, min_i(omp_get_max_threads(), {PIECES}));")
        scope(f"const int64_t width = ({size} + 63) / 64 * 64, from = 0, to = {size};")
        self._passes(scope)
        for name in self.heap:
            scope(f"free({name});")

    # -- passes

    def _passes(self, scope: Scope) -> None:
        found: list[Accumulator] = []
        steps = self.body.shape.passes
        for k, step in enumerate(steps):
            self._between(found, step.rows, steps[k:], scope)
            found = self.body.accumulators(step, 1)
            if step.points:
                visit = functools.partial(self._visit, step, found)
                self._walk(Walk(found, _reads(step.points), visit), scope)
            if second := [item for item in found if item.needs_second]:
                means = {item.write.buffers[0] for item in second}
                self._between(second, (), steps[k:], scope, means)
                self.writer.recompute = self.body.recomputed(step)
                reads = _reads(step.points) | means
                self._walk(Walk(second, reads, functools.partial(_squares, second)), scope)
                self.writer.recompute = {}
        self._between(found, (), (), scope)

    def _between(
        self, found: list[Accumulator], nests: tuple[Nest, ...], later: tuple[Pass, ...], scope: Scope,
        means: Collection[str] = (),
    ) -> None:  # fmt: skip
        """The totals of one vector of columns (or the means made of them), and the arithmetic on them."""
        if not found and not nests:
            return
        wanted = {*means} | {name for step in later for name in _reads((*step.rows, *step.points))}

        def body(inside: Scope) -> None:
            self._recall(_reads(nests), inside)
            for item in found:
                self._total(item, inside, bool(means))
            for nest in nests:
                self.writer.row(nest, inside)
            for name in [name for name in inside.buffers if name in wanted and name not in self.rows]:
                self.rows[name] = self.writer.fresh("row"), inside.buffers[name].dtype
                self._room(*self.rows[name], scope)
            for name, value in inside.buffers.items():
                if name in wanted:
                    inside(f"store({self._place(name)}, {self.writer.as_vector(value)});")

        self.body.vector_loop(self.vector, "from", "to", scope, None, body)

    def _total(self, item: Accumulator, scope: Scope, is_mean: bool) -> None:
        name = self.writer.fresh()
        text = f"load({item.name} + ({self.vector.var.name} - from))"
        if is_mean:
            text += f" / ({C_TYPE[item.dtype]}){c_expr(product(r.size for r in item.nest.reduce))}"
        scope(f"const {VECTOR_TYPE[item.dtype]} {name} = {text};")
        value = Value(name, item.dtype, True, scope.depth)
        which = 1 if item.needs_second and not is_mean else 0
        self.writer.keep(item.write.buffers[which], item.write.index, value, scope)

    def _place(self, buffer: str) -> str:
        """Arrays on the heap hold all columns, the others those of a tile."""
        return f"{self.rows[buffer][0]} + {self.vector.var.name}{'' if self.deals else ' - from'}"

    def _room(self, name: str, dtype: DType, scope: Scope, pieces: str = "") -> None:
        """An array with a value per column."""
        kind = self._element(dtype)
        if self.deals:
            scope(f"{kind}* {name} = ({kind}*)aligned_alloc(64, {pieces}width * sizeof({kind}));")
            self.heap.append(name)
            return
        size = self.vector.size
        width = min(TILE, size.value + 64) if size.is_const else TILE
        scope(f"alignas(64) {kind} {name}[{-(-width // 64) * 64}];")

    def _element(self, dtype: DType) -> str:
        """The C type of one number in an array; a truth value is kept as wide as a lane of a mask."""
        if dtype is BOOL:
            return "int32_t" if self.writer.widest == 4 else "int64_t"
        return C_TYPE[dtype]

    def _recall(self, names: set[str], scope: Scope) -> None:
        """What earlier passes have found for this vector of columns."""
        for buffer, (_, dtype) in self.rows.items():
            if buffer in names:
                name = self.writer.fresh()
                scope(f"const {VECTOR_TYPE[dtype]} {name} = load({self._place(buffer)});")
                scope.buffers[buffer] = Value(name, dtype, True, scope.depth)

    # -- one walk over all rows

    def _walk(self, walk: Walk, scope: Scope) -> None:
        bounds = ("0", c_expr(self.body.group.inner[0].size))
        for item in walk.items:
            item.name = self.writer.fresh("acc")
        if not self.deals:
            for item in walk.items:
                self._room(item.name, item.dtype, scope)
            self._stream(walk, scope, bounds)
            return
        for item in walk.items:
            self._room(f"{item.name}_all", item.dtype, scope, "pieces * ")
        piece = Scope(scope.depth + 1, scope)
        rows, whole = bounds[1], f"/ {BLOCK} * {BLOCK}"
        piece(f"const int64_t top = {rows} * q / pieces {whole};")
        piece(f"const int64_t bottom = q + 1 == pieces ? {rows} : {rows} * (q + 1) / pieces {whole};")
        tile = Scope(piece.depth + 1, piece)
        tile(f"const int64_t to = min_i(from + {TILE}, {c_expr(self.vector.size)});")
        for item in walk.items:
            tile(f"{self._element(item.dtype)}* {item.name} = {item.name}_all + q * width + from;")
        self._stream(walk, tile, ("top", "bottom"))
        piece.block(f"for (int64_t from = 0; from < {c_expr(self.vector.size)}; from += {TILE}) {{", tile)
        scope(f"#pragma omp parallel for schedule(static){self.body.condition}")
        scope.block("for (int64_t q = 0; q < pieces; ++q) {", piece)
        self._join_pieces(walk.items, scope)

    def _join_pieces(self, items: list[Accumulator], scope: Scope) -> None:
        for item in items:
            joined = self._combined(item, "a", "b")
            scope("for (int64_t q = 1; q < pieces; ++q)")
            scope(f"    for (int64_t k = 0; k < width; k += {self.writer.lanes}) {{")
            scope(f"        const auto a = load({item.name}_all + k);")
            scope(f"        const auto b = load({item.name}_all + q * width + k);")
            scope(f"        store({item.name}_all + k, {joined});")
            scope("    }")
            scope(f"{self._element(item.dtype)}* {item.name} = {item.name}_all;")

    def _combined(self, item: Accumulator, a: str, b: str) -> str:
        pattern = combine(item.kind, item.dtype, True)
        self.writer.functions |= functions_of(pattern, (item.dtype,))
        return pattern.format(a, b)

    def _stream(self, walk: Walk, scope: Scope, bounds: tuple[str, str]) -> None:
        """Blocks of rows against the columns from `from` to `to`; arrays are indexed from `from`."""
        items, (*blocks, last) = walk.items, self.body.group.inner
        each = f"for (int64_t k = 0; k < to - from; k += {self.writer.lanes})"
        for item in items:
            scope(f"{each} store({item.name} + k, {item.start});")
        at, opened = scope, []
        for position, loop in enumerate(blocks):
            inside = Scope(at.depth + 1, at)
            self.writer.depths[loop.var] = inside.depth
            start, stop = bounds if position == 0 else ("0", c_expr(loop.size))
            name = loop.var.name
            opened.append((f"for (int64_t {name} = {start}; {name} < {stop}; ++{name}) {{", inside))
            at = inside
        start, stop = ("0", c_expr(last.size)) if blocks else bounds
        row, count = f"{last.var.name}_", BLOCK if items else 1
        block = Scope(at.depth + 1, at)
        column = functools.partial(self._column, walk, row, stop)
        self.body.vector_loop(self.vector, "from", "to", block, None, column)
        sums = [item for item in items if item.kind == "sum" and item.dtype.is_float]
        total = product(r.size for r in self.body.group.inner)
        long = [] if total.is_const and total.value <= BLOCK * BLOCKS else sums
        for item in long:
            scope(f"alignas(64) {C_TYPE[item.dtype]} {item.name}_top[{TILE + 64}] = {{}};")
            block(f"if (({row} / {BLOCK}) % {BLOCKS} == {BLOCKS - 1})")
            _flush(item, each, block)
        at.block(f"for (int64_t {row} = {start}; {row} < {stop}; {row} += {count}) {{", block)
        for item in long if blocks else ():
            _flush(item, each, at)
        for head, inside in reversed(opened):
            assert inside.parent is not None
            inside.parent.block(head, inside)
        for item in long:
            scope(f"{each} store({item.name} + k, load({item.name} + k) + load({item.name}_top + k));")

    def _column(self, walk: Walk, row: str, stop: str, inside: Scope) -> None:
        """One vector of columns against one block of rows."""
        items, last = walk.items, self.body.group.inner[-1]
        self._recall(walk.reads, inside)
        for item in items:
            inside(f"{item.type(item.dtype)} {item.name}_block = {item.start};")
        deep = Scope(inside.depth + 1, inside)
        self.writer.depths[last.var] = deep.depth
        walk.visit(deep)
        name, is_whole = last.var.name, last.size.is_const and last.size.value % BLOCK == 0
        limit = f"{row} + {BLOCK}" if is_whole else f"min_i({row} + {BLOCK}, {stop})"
        if items:
            inside(f"#pragma GCC unroll {BLOCK}")
            inside.block(f"for (int64_t {name} = {row}; {name} < {limit}; ++{name}) {{", deep)
        else:
            inside.block(f"{{ const int64_t {name} = {row};", deep)
        for item in items:
            at = f"{item.name} + ({self.vector.var.name} - from)"
            inside(f"store({at}, {self._combined(item, f'load({at})', f'{item.name}_block')});")

    def _visit(self, step: Pass, items: list[Accumulator], inside: Scope) -> None:
        """One row: what is stored on the way, and every reduction's next value."""
        for nest in step.points:
            if not nest.reduce:
                self.writer.point(nest, inside)
            for item in items:
                if item.nest is nest:
                    value = self.writer.value(item.write.value, inside)
                    text = item.named(self.writer.as_vector(value), inside)
                    inside(f"{item.name}_block = {self._combined(item, f'{item.name}_block', text)};")


def _flush(item: Accumulator, each: str, scope: Scope) -> None:
    n = item.name
    scope(f"    {each} {{")
    scope(f"        store({n}_top + k, load({n}_top + k) + load({n} + k));")
    scope(f"        store({n} + k, {item.start});")
    scope("    }")


def _squares(items: list[Accumulator], inside: Scope) -> None:
    """One row: its squared distances from the means."""
    for item in items:
        mean = item.write.buffers[0]
        found = next(at.buffers[mean] for at in inside.chain() if mean in at.buffers)
        value = item.writer.value(item.write.value, inside)
        apart = item.named(f"{item.writer.as_vector(value)} - {found.text}", inside)
        inside(f"{item.name}_block = {item.name}_block + {apart} * {apart};")


def _reads(nests: tuple[Nest, ...]) -> set[str]:
    return {name for nest in nests for name, _ in loads_of(nest)}
