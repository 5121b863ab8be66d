"""Reductions over rows of memory: stream the rows, keep accumulators for a tile of columns in cache.

    for (from = 0; from < columns; from += 4096)
        for (rows in blocks of 8)
            for (j = from; j < to; j += 16)  { block = 0; each row: block += load(x...);  acc[j] += block; }

Memory is read in its own order, so the prefetcher keeps up. With few columns the rows are dealt out to
threads, each with accumulators of its own. Where several passes follow one another (batch norm on
channels-last images), what one has found for each column waits in an array for the next.

Variances take one pass: sums of distances from a value near the mean, and of their squares. That value is
the first row, then the mean of the first 8, 16, 32, ... 256, and of all rows after every 256 more, so that
nothing cancels that matters.
"""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from dovetail.codegen.analysis import Pass
from dovetail.codegen.cpp.ops import C_TYPE, VECTOR_TYPE, c_expr, combine, functions_of
from dovetail.codegen.cpp.reduce import PIECES, Accumulator
from dovetail.codegen.cpp.values import KernelWriter, Scope, Value
from dovetail.ir.expr import ceildiv, mul, product
from dovetail.ir.loop import Nest, Range
from dovetail.ir.types import BOOL, DType
from dovetail.util.noun import Noun, field

if TYPE_CHECKING:
    from dovetail.codegen.cpp.loops import Body

PARALLEL_WORK: Final = 32768
"""Weighted elements below which one thread is faster, as in eager."""
FEW: Final = 16
"""Outer points below which threads share the work inside of each."""
TILE: Final = 4096
"""Columns whose accumulators stay near; rows of fewer are too short for the prefetcher."""
BLOCK: Final = 8
"""Rows added up in a register before the accumulator in memory is touched; each is a stream of its own
for the prefetcher."""
BLOCKS: Final = 32
"""Blocks before the accumulators in memory are flushed into others: rounding errors stay small."""

_JOIN_VARIANCES: Final = """\
    const {kind} part = {n}_count[q], all = {n}_count[0] += {n}_count[q];
    const {kind} share = all ? part / all : 0, both = (all - part) * share;
    for (int64_t k = 0; k < width; k += {lanes}) {{
        const auto near = load({n}_mean + k), left = load({n} + k);
        const auto d = load({n}_mean + q * width + k) - near + (load({n} + q * width + k) - left);
        const auto on = left + d * share, mean = near + on;
        store({n}_apart + k, load({n}_apart + k) + load({n}_apart + q * width + k) + d * d * both);
        store({n}_mean + k, mean); store({n} + k, on - (mean - near));
    }}"""
_FLUSH_VARIANCE: Final = """\
    {{
        const {kind} rows = {n}_rows;
        const auto near = load({n}_mean + k), sum = load({n} + k), mean = near + sum / rows;
        const auto moved = mean - near, left = sum - rows * moved;
        store({n}_apart + k, load({n}_apart + k) + (load({n}_squares + k) - moved * (sum + left)){rest});
        store({n}_mean + k, mean); store({n}_squares + k, {start}); store({n} + k, left{share});
    }}"""
"""Means are rounded, so that a sum of distances from them is left."""


class Span(Noun):
    """A part of a loop: the texts of where it starts and stops, and how many elements that is, if known."""

    item: Range
    start: str
    stop: str
    count: int | None = None

    @staticmethod
    def over(item: Range) -> Span:
        """All of it."""
        return Span(item, "0", c_expr(item.size), item.size.value if item.size.is_const else None)


class Columns(Noun, frozen=False):
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
        return self.body.lane

    def emit(self, root: Scope) -> None:
        tiles = mul(product(r.size for r in self.body.loops), ceildiv(self.vector.size, TILE))
        length = product(r.size for r in (self.vector, *self.body.group.inner))
        is_short = length.is_const and length.value < PARALLEL_WORK
        self.deals = self.body.has_threads and tiles.is_const and tiles.value < FEW and not is_short
        if self.deals:
            self.body.each(root, self._among_threads, parallel=False)
        else:
            self.body.chunks(root, TILE, self._passes)

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
                self._walk(step, found, scope)
        self._between(found, (), (), scope)

    def _between(
        self, found: list[Accumulator], nests: tuple[Nest, ...], later: tuple[Pass, ...], scope: Scope
    ) -> None:
        """The totals of one vector of columns, and the arithmetic on them."""
        if not found and not nests:
            return
        wanted = {name for step in later for name in _reads((*step.rows, *step.points))}

        def body(inside: Scope) -> None:
            self._recall(_reads(nests), inside)
            for item in found:
                self._total(item, inside)
            for nest in nests:
                self.writer.row(nest, inside)
            for name in [name for name in inside.buffers if name in wanted and name not in self.rows]:
                self.rows[name] = self.writer.fresh("row"), inside.buffers[name].dtype
                self._room(*self.rows[name], scope)
            for name, value in inside.buffers.items():
                if name in wanted:
                    inside(f"store({self._place(name)}, {self.writer.as_vector(value)});")

        self.body.vector_loop(Span(self.vector, "from", "to"), scope, body)

    def _total(self, item: Accumulator, scope: Scope) -> None:
        found = (f"{item.name}_mean", f"{item.name}_apart") if item.needs_second else (item.name,)
        for buffer, array in zip(item.write.buffers, found):
            name = self.writer.fresh()
            scope(f"const {VECTOR_TYPE[item.dtype]} {name} = load({self._in(array)});")
            self.writer.keep(buffer, item.write.index, Value(name, item.dtype, True, scope.depth), scope)

    def _in(self, array: str) -> str:
        """The place of this vector of columns in an array of a tile."""
        return f"{array} + ({self.vector.var.name} - from)"

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
        scope(f"alignas(64) {kind} {name}[{self._tile_width}];")

    @property
    def _tile_width(self) -> int:
        """Columns of a tile, in whole vectors."""
        size = self.vector.size
        return -(-min(TILE, size.value if size.is_const else TILE) // 64) * 64

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

    def _walk(self, step: Pass, items: list[Accumulator], scope: Scope) -> None:
        bounds = ("0", c_expr(self.body.group.inner[0].size))
        for item in items:
            item.name = self.writer.fresh("acc")
        arrays = {name: item.dtype for item in items for name in _arrays(item)}
        if not self.deals:
            for name, dtype in arrays.items():
                self._room(name, dtype, scope)
            self._stream(step, items, scope, bounds)
            return
        for name, dtype in arrays.items():
            self._room(f"{name}_all", dtype, scope, "pieces * ")
        piece = Scope(scope.depth + 1, scope)
        rows, whole = bounds[1], "" if self.body.group.inner[1:] else f"/ {BLOCK} * {BLOCK}"
        piece(f"const int64_t top = {rows} * q / pieces {whole};")
        piece(f"const int64_t bottom = q + 1 == pieces ? {rows} : {rows} * (q + 1) / pieces {whole};")
        tile = Scope(piece.depth + 1, piece)
        tile(f"const int64_t to = min_i(from + {TILE}, {c_expr(self.vector.size)});")
        for name, dtype in arrays.items():
            tile(f"{self._element(dtype)}* {name} = {name}_all + q * width + from;")
        self._stream(step, items, tile, ("top", "bottom"))
        for item in items:
            if item.needs_second:
                scope(f"int64_t {item.name}_count[{PIECES}];")
                tile(f"{item.name}_count[q] = {item.name}_rows;")
        piece.block(f"for (int64_t from = 0; from < {c_expr(self.vector.size)}; from += {TILE}) {{", tile)
        scope(f"#pragma omp parallel for schedule(static){self.body.condition}")
        scope.block("for (int64_t q = 0; q < pieces; ++q) {", piece)
        self._join_pieces(items, scope)

    def _join_pieces(self, items: list[Accumulator], scope: Scope) -> None:
        for item in items:
            for name in _arrays(item):
                scope(f"{self._element(item.dtype)}* {name} = {name}_all;")
            scope("for (int64_t q = 1; q < pieces; ++q) {")
            if item.needs_second:
                scope(_JOIN_VARIANCES.format(n=item.name, kind=C_TYPE[item.dtype], lanes=self.writer.lanes))
            else:
                joined = self._combined(item, f"load({item.name} + k)", f"load({item.name} + q * width + k)")
                scope(f"    for (int64_t k = 0; k < width; k += {self.writer.lanes})")
                scope(f"        store({item.name} + k, {joined});")
            scope("}")

    def _combined(self, item: Accumulator, a: str, b: str) -> str:
        pattern = combine(item.kind, item.dtype, True)
        self.writer.functions |= functions_of(pattern, (item.dtype,))
        return pattern.format(a, b)

    def _stream(self, step: Pass, items: list[Accumulator], scope: Scope, bounds: tuple[str, str]) -> None:
        """Blocks of rows against the columns from `from` to `to`; arrays are indexed from `from`."""
        *blocks, last = self.body.group.inner
        each = f"for (int64_t k = 0; k < to - from; k += {self.writer.lanes})"
        for item in items:
            for name in _arrays(item):
                scope(f"{each} store({name} + k, {item.start});")
        if second := [item for item in items if item.needs_second]:
            self._first_row(step, second, scope, bounds)
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
        column = functools.partial(self._column, step, items, row, stop)
        self.body.vector_loop(Span(self.vector, "from", "to"), block, column)
        sums = [item for item in items if item.kind == "sum" and item.dtype.is_float]
        total = product(r.size for r in self.body.group.inner)
        long = [] if total.is_const and total.value <= BLOCK * BLOCKS else sums
        for item in long or second:
            when = f"({row} / {BLOCK}) % {BLOCKS} == {BLOCKS - 1}"
            if item.needs_second:
                seen = f"{item.name}_rows"
                scope(f"int64_t {seen} = 0;")
                block(f"{seen} += min_i({BLOCK}, {stop} - {row});")
                when += f" || ({seen} / {BLOCK} & ({seen} / {BLOCK} - 1)) == 0"
            else:
                scope(f"alignas(64) {C_TYPE[item.dtype]} {item.name}_top[{self._tile_width}] = {{}};")
            block(f"if ({when})")
            _flush(item, each, block)
        at.block(f"for (int64_t {row} = {start}; {row} < {stop}; {row} += {count}) {{", block)
        for item in long if blocks else ():
            _flush(item, each, at)
        for head, inside in reversed(opened):
            assert inside.parent is not None
            inside.parent.block(head, inside)
        for item in long or second:
            if item.needs_second:
                scope(f"if ({item.name}_rows)")
                _flush(item, each, scope, is_last=True)
            else:
                scope(f"{each} store({item.name} + k, load({item.name} + k) + load({item.name}_top + k));")

    def _first_row(self, step: Pass, items: list[Accumulator], scope: Scope, bounds: tuple[str, str]) -> None:
        """What distances are measured from before there is a mean."""
        known = Scope(scope.depth + 1, scope)

        def body(inside: Scope) -> None:
            self._recall(_reads(step.points), inside)
            for k, loop in enumerate(self.body.group.inner):
                inside(f"const int64_t {loop.var.name} = {'0' if k else bounds[0]};")
                self.writer.depths[loop.var] = inside.depth
            for item in items:
                value = self.writer.as_vector(self.writer.value(item.write.value, inside))
                inside(f"store({self._in(f'{item.name}_mean')}, {value});")

        made = [nest for nest in step.points if not nest.reduce]  # which nothing has written so far
        self.writer.recompute = {write.buffers[0]: write.value for nest in made for write in nest.writes}
        self.body.vector_loop(Span(self.vector, "from", "to"), known, body)
        self.writer.recompute = {}
        scope.block(f"if ({bounds[0]} < {bounds[1]}) {{", known)

    def _column(self, step: Pass, items: list[Accumulator], row: str, stop: str, inside: Scope) -> None:
        """One vector of columns against one block of rows."""
        last = self.body.group.inner[-1]
        self._recall(_reads(step.points), inside)
        for item in items:
            kind = item.type(item.dtype)
            inside(f"{kind} {item.name}_block = {item.start};")
            if item.needs_second:
                inside(f"{kind} {item.name}_squares_block = {item.start};")
                inside(f"const {kind} {item.name}_near = load({self._in(f'{item.name}_mean')});")
        deep = Scope(inside.depth + 1, inside)
        self.writer.depths[last.var] = deep.depth
        self.body.visit(step, items, deep, self._add)
        name, is_whole = last.var.name, last.size.is_const and last.size.value % BLOCK == 0
        limit = f"{row} + {BLOCK}" if is_whole else f"min_i({row} + {BLOCK}, {stop})"
        if items:
            inside(f"#pragma GCC unroll {BLOCK}")
            inside.block(f"for (int64_t {name} = {row}; {name} < {limit}; ++{name}) {{", deep)
        else:
            inside.block(f"{{ const int64_t {name} = {row};", deep)
        for item in items:
            for array in _arrays(item)[:2]:
                at = self._in(array)
                inside(f"store({at}, {self._combined(item, f'load({at})', f'{array}_block')});")

    def _add(self, item: Accumulator, inside: Scope) -> None:
        """A row's value of one reduction."""
        text = self.writer.as_vector(self.writer.value(item.write.value, inside))
        if item.needs_second:
            text = item.named(f"{text} - {item.name}_near", inside)
            inside(f"{item.name}_squares_block += {text} * {text};")
        text = item.named(text, inside)
        inside(f"{item.name}_block = {self._combined(item, f'{item.name}_block', text)};")


def _arrays(item: Accumulator) -> list[str]:
    """Names of what is kept for each column; blocks of rows are added to the first two."""
    return [item.name + end for end in (("", "_squares", "_mean", "_apart") if item.needs_second else ("",))]


def _flush(item: Accumulator, each: str, scope: Scope, is_last: bool = False) -> None:
    """Accumulators are emptied into the arrays of totals."""
    n = item.name
    if item.needs_second:
        rest, share = (" - left * left / rows", " / rows") if is_last else ("", "")
        text = _FLUSH_VARIANCE.format(n=n, kind=C_TYPE[item.dtype], start=item.start, rest=rest, share=share)
        scope(f"    {each}\n{text}")
    else:
        top = f"store({n}_top + k, load({n}_top + k) + load({n} + k));"
        scope(f"    {each} {{ {top} store({n} + k, {item.start}); }}")


def _reads(nests: tuple[Nest, ...]) -> set[str]:
    return {name for nest in nests for name, _ in nest.loads}
