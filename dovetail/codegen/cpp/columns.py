"""Reductions over rows of memory: stream the rows, keep accumulators for a tile of columns in cache.

    for (from = 0; from < columns; from += 1024)
        for (rows in blocks of 16)
            for (j = from; j < to; j += 16)  { block = 0; each row: block += load(x...);  acc[j] += block; }

Memory is read in its own order, so the prefetcher keeps up. With few columns the rows are dealt out to
threads, each with accumulators of its own.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dovetail.codegen.cpp.exprs import c_expr
from dovetail.codegen.cpp.ops import C_TYPE, VECTOR_TYPE, combine, functions_of
from dovetail.codegen.cpp.partial import PIECES
from dovetail.codegen.cpp.reduce import Accumulator
from dovetail.codegen.cpp.values import KernelWriter, Scope, Value
from dovetail.ir.expr import ceildiv, mul, product
from dovetail.ir.loop import Range
from dovetail.ir.types import BOOL

if TYPE_CHECKING:
    from dovetail.codegen.cpp.loops import Body

TILE: Final = 1024
"""Columns whose accumulators stay in the first-level cache."""
BLOCK: Final = 16
"""Rows added up in a register before the accumulator in memory is touched."""
BLOCKS: Final = 64
"""Blocks before the accumulators in memory are flushed into others: rounding errors stay small."""


@dataclass(slots=True)
class Columns:
    body: Body

    @property
    def writer(self) -> KernelWriter:
        return self.body.writer

    @property
    def vector(self) -> Range:
        assert self.body.vector is not None
        return self.body.vector

    def emit(self, root: Scope) -> None:
        if self.body.splits:
            self.body.each(root, self._among_threads, parallel=False)
        else:
            self._by_tiles(root)

    # -- many columns: tiles among threads

    def _by_tiles(self, root: Scope) -> None:
        vector, loops = self.vector, self.body.loops
        tiles = ceildiv(vector.size, TILE)
        scope = Scope(1, root)
        number = "p"
        if loops:
            number = f"(p % {c_expr(tiles)})"
            self.body.unpack(f"(p / {c_expr(tiles)})", scope, loops)
        scope(f"const int64_t from = {number} * {TILE}, to = min_i(from + {TILE}, {c_expr(vector.size)});")
        items = self.body.accumulators(self.body.shape.passes[0], 1)
        width = min(TILE, vector.size.value + 64) if vector.size.is_const else TILE
        for item in items:
            item.name = self.writer.fresh("acc")
            scope(f"alignas(64) {self._element(item)} {item.name}[{-(-width // 64) * 64}];")
        self._stream(items, scope, ("0", c_expr(self.body.group.inner[0].size)))
        self.body.vector_loop(vector, "from", "to", scope, None, lambda s: self._results(items, s))
        self.body.over(root, scope, mul(product(r.size for r in loops), tiles), True)

    def _element(self, item: Accumulator) -> str:
        """The C type of one accumulator in memory; a truth value is kept as wide as a lane of a mask."""
        if item.dtype is BOOL:
            return "int32_t" if self.writer.widest == 4 else "int64_t"
        return C_TYPE[item.dtype]

    # -- few columns: rows among threads

    def _among_threads(self, scope: Scope) -> None:
        items = self.body.accumulators(self.body.shape.passes[0], 1)
        size, rows = c_expr(self.vector.size), c_expr(self.body.group.inner[0].size)
        scope(f"const int64_t pieces = max_i(1, min_i(omp_get_max_threads(), {PIECES}));")
        scope(f"const int64_t width = ({size} + 63) / 64 * 64;")
        for item in items:
            item.name = self.writer.fresh("acc")
            kind = self._element(item)
            scope(f"{kind}* {item.name}_all = ({kind}*)aligned_alloc(64, pieces * width * sizeof({kind}));")
        piece = Scope(scope.depth + 1, scope)
        piece(f"const int64_t top = {rows} * q / pieces, bottom = {rows} * (q + 1) / pieces;")
        tile = Scope(piece.depth + 1, piece)
        tile(f"const int64_t to = min_i(from + {TILE}, {size});")
        for item in items:
            tile(f"{self._element(item)}* {item.name} = {item.name}_all + q * width + from;")
        self._stream(items, tile, ("top", "bottom"))
        piece.block(f"for (int64_t from = 0; from < {size}; from += {TILE}) {{", tile)
        scope(f"#pragma omp parallel for schedule(static){self.body.condition}")
        scope.block("for (int64_t q = 0; q < pieces; ++q) {", piece)
        self._join_pieces(items, scope)
        scope("const int64_t from = 0;")
        whole = self.vector.size
        self.body.vector_loop(self.vector, "0", size, scope, whole, lambda s: self._results(items, s))
        for item in items:
            scope(f"free({item.name}_all);")

    def _join_pieces(self, items: list[Accumulator], scope: Scope) -> None:
        for item in items:
            joined = self._combined(item, "a", "b")
            scope("for (int64_t q = 1; q < pieces; ++q)")
            scope(f"    for (int64_t k = 0; k < width; k += {self.writer.lanes}) {{")
            scope(f"        const auto a = load({item.name}_all + k);")
            scope(f"        const auto b = load({item.name}_all + q * width + k);")
            scope(f"        store({item.name}_all + k, {joined});")
            scope("    }")
            scope(f"{self._element(item)}* {item.name} = {item.name}_all;")

    # -- the walk

    def _combined(self, item: Accumulator, a: str, b: str) -> str:
        pattern = combine(item.kind, item.dtype, True)
        self.writer.functions |= functions_of(pattern, (item.dtype,))
        return pattern.format(a, b)

    def _stream(self, items: list[Accumulator], scope: Scope, bounds: tuple[str, str]) -> None:
        """Blocks of rows against the columns from `from` to `to`; accumulators are indexed from `from`."""
        *blocks, last = self.body.group.inner
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
        row = f"{last.var.name}_"
        block = Scope(at.depth + 1, at)
        column = lambda inside: self._column(items, last, row, stop, inside)  # noqa: E731
        self.body.vector_loop(self.vector, "from", "to", block, None, column)
        sums = [item for item in items if item.kind == "sum" and item.dtype.is_float]
        long = sums if not (last.size.is_const and last.size.value <= BLOCK * BLOCKS) else []
        for item in long:
            self._flush(item, row, each, scope, block)
        at.block(f"for (int64_t {row} = {start}; {row} < {stop}; {row} += {BLOCK}) {{", block)
        for head, inside in reversed(opened):
            assert inside.parent is not None
            inside.parent.block(head, inside)
        for item in long:
            scope(f"{each} store({item.name} + k, load({item.name} + k) + load({item.name}_top + k));")

    def _flush(self, item: Accumulator, row: str, each: str, scope: Scope, block: Scope) -> None:
        n = item.name
        scope(f"alignas(64) {C_TYPE[item.dtype]} {n}_top[{TILE + 64}] = {{}};")
        block(f"if (({row} / {BLOCK}) % {BLOCKS} == {BLOCKS - 1})")
        block(f"    {each} {{")
        block(f"        store({n}_top + k, load({n}_top + k) + load({n} + k));")
        block(f"        store({n} + k, {item.start});")
        block("    }")

    def _column(self, items: list[Accumulator], last: Range, row: str, stop: str, inside: Scope) -> None:
        """One vector of columns against one block of rows."""
        for item in items:
            inside(f"{item.type(item.dtype)} {item.name}_block = {item.start};")
        deep = Scope(inside.depth + 1, inside)
        self.writer.depths[last.var] = deep.depth
        self._visit(items, deep)
        name = last.var.name
        limit = f"min_i({row} + {BLOCK}, {stop})"
        inside.block(f"for (int64_t {name} = {row}; {name} < {limit}; ++{name}) {{", deep)
        for item in items:
            at = f"{item.name} + ({self.vector.var.name} - from)"
            inside(f"store({at}, {self._combined(item, f'load({at})', f'{item.name}_block')});")

    def _visit(self, items: list[Accumulator], inside: Scope) -> None:
        """One row: what is stored on the way, and every reduction's next value."""
        for nest in self.body.shape.passes[0].points:
            if not nest.reduce:
                self.writer.point(nest, inside)
            for item in items:
                if item.nest is nest:
                    value = self.writer.value(item.write.value, inside)
                    text = item.named(self.writer.as_vector(value), inside)
                    inside(f"{item.name}_block = {self._combined(item, f'{item.name}_block', text)};")

    def _results(self, items: list[Accumulator], scope: Scope) -> None:
        """The totals of one vector of columns, and the arithmetic on them."""
        for item in items:
            name = self.writer.fresh()
            at = f"{item.name} + ({self.vector.var.name} - from)"
            scope(f"const {VECTOR_TYPE[item.dtype]} {name} = load({at});")
            value = Value(name, item.dtype, True, scope.depth)
            self.writer.keep(item.write.buffers[0], item.write.index, value, scope)
        for step in self.body.shape.passes[1:]:
            for nest in step.rows:
                self.writer.row(nest, scope)
