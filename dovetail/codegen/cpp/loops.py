"""The loops of one kernel.

Four shapes, by where the contiguous loop is and how many outer points there are:

    rows       outer points among threads; each walks its inner loops in vectors
    one row    few outer points with long inner loops: the walk itself is split among threads
    points     no inner loops, or several passes over columns: each lane is an outer point
    columns    a reduction over rows of memory: stream them, accumulators for a tile of columns in cache
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from dovetail.codegen.analysis import COSTLY, Pass, Shape, crossing_loads, roots_in, token, work, writes_in
from dovetail.codegen.cpp.columns import FEW, PARALLEL_WORK, Columns, Span
from dovetail.codegen.cpp.ops import C_TYPE, VECTOR_TYPE, c_expr
from dovetail.codegen.cpp.reduce import PIECES, Accumulator, Partial
from dovetail.codegen.cpp.values import EACH_LANE, KernelWriter, Scope, innermost
from dovetail.ir.expr import ONE, Expr, add, ceildiv, linear_in, mul, product, symbols
from dovetail.ir.loop import SCANS, Range, iter_scalars
from dovetail.ir.schedule import Group
from dovetail.ir.types import BOOL
from dovetail.util.noun import Noun

Visit: TypeAlias = Callable[[Scope], None]
CHUNK: Final = 4096
"""Elements of one piece when a long contiguous loop is shared among threads."""
FEW_VECTORS: Final = 4
"""Vectors of columns in one piece when columns are shared among threads."""
FEW_ROWS: Final = 64
COPIES: Final = 4
IN_ORDER: Final = frozenset({*SCANS, "argmax", "argmin"})
STACK_BYTES: Final = 1 << 20
"""Most bytes of rows kept on a thread's stack."""


class Walk(Noun):
    """Over inner points: what is accumulated, and what happens at a point."""

    items: list[Accumulator]
    visit: Visit

    def step(self, inside: Scope) -> None:
        self.visit(inside)
        for item in self.items:
            item.flush(inside)


class Body(Noun, frozen=False):
    writer: KernelWriter
    group: Group
    shape: Shape
    is_serial: bool

    # -- what they ask

    @property
    def vector(self) -> Range | None:
        return self.shape.contiguous if self.writer.lanes > 1 else None

    @property
    def lane(self) -> Range:
        """The vectors' loop, where there is one."""
        assert self.vector is not None
        return self.vector

    @property
    def has_threads(self) -> bool:
        amount = work(self.group)
        return not self.is_serial and not (amount.is_const and amount.value < PARALLEL_WORK)

    @property
    def loops(self) -> tuple[Range, ...]:
        """The outer loops that are not vectors."""
        outer = self.group.ranges[: self.group.outer]
        return tuple(r for r in outer if r is not self.vector) if self.writer.column else outer

    @property
    def streams(self) -> bool:
        """Walks over rows of memory, with only arithmetic per column between them; many rows, where one
        walk does not do: a few columns of a few rows stay in cache."""
        first, *later = self.shape.passes
        kinds = {w.reduce for step in self.shape.passes for w in writes_in(step.points) if w.reduce}
        if not (self.writer.column and self.group.inner and kinds) or kinds & IN_ORDER:
            return False
        is_one = not first.rows and "welford" not in kinds and not any(p.points for p in later)
        rows = product(r.size for r in self.group.inner)
        return is_one or (not self.shape.kept_rows and not _at_most(rows, FEW_ROWS))

    @property
    def splits(self) -> bool:
        """Too few outer points to keep the threads busy, and a walk long enough to share."""
        count = product(r.size for r in self.loops)
        first, *later = self.shape.passes
        if not self.has_threads or not count.is_const or count.value >= FEW or any(p.points for p in later):
            return False
        length = product(r.size for r in self.group.inner)
        is_long = not (length.is_const and length.value < PARALLEL_WORK)
        return is_long and any(w.reduce not in (None, *SCANS) for w in writes_in(first.points))

    def emit(self) -> list[str]:
        root = Scope(0, None)
        if self.streams:
            Columns(self).emit(root)
        elif self.writer.column and (crossed := self._crossed()):
            self._tiles(root, *crossed)
        elif self.writer.column:
            self._points(root)
        elif self.group.inner and self.splits:
            self.each(root, self._split_row, parallel=False)
        else:
            self.each(root, self.row, parallel=True)
        return root.lines

    # -- outer loops

    @property
    def condition(self) -> str:
        """The clause that keeps small work on one thread, where sizes are known at run time only."""
        amount = work(self.group)
        return "" if amount.is_const else f" if ({c_expr(amount)} >= {PARALLEL_WORK})"

    def each(self, root: Scope, body: Visit, parallel: bool) -> None:
        """One loop over all outer points that are not lanes."""
        if not self.loops:
            body(root)
            self._settle_streams(root)
            return
        scope = Scope(1, root)
        self.unpack("p", scope)
        body(scope)
        self.over(root, scope, product(r.size for r in self.loops), parallel)

    def over(self, root: Scope, scope: Scope, total: Expr, parallel: bool) -> None:
        if parallel and self.has_threads and total is not ONE:
            root(f"#pragma omp parallel for schedule(static){self.condition}")
        root.block(f"for (int64_t p = 0; p < {c_expr(total)}; ++p) {{", scope)
        self._settle_streams(root)

    def _settle_streams(self, scope: Scope) -> None:
        """What was stored past the caches is there before the kernel is over; what other threads stored there
        is, once they have met."""
        if "stream" in self.writer.functions:
            scope("__builtin_ia32_sfence();")

    def unpack(self, rest: str, scope: Scope, loops: tuple[Range, ...] | None = None) -> None:
        """Declare the outer variables from a position."""
        loops = self.loops if loops is None else loops
        for item in loops:
            self.writer.depths[item.var] = scope.depth
        for k in range(len(loops) - 1, -1, -1):
            item, size = loops[k], c_expr(loops[k].size)
            scope(f"const int64_t {item.var.name} = {rest if k == 0 else f'{rest} % {size}'};")
            rest = f"({rest} / {size})"

    # -- lanes are outer points

    def _points(self, root: Scope) -> None:
        vector, count = self.lane, product(r.size for r in self.loops)
        chunk = FEW_VECTORS * self.writer.lanes if self.group.inner else CHUNK
        is_long = self.has_threads and not _at_most(vector.size, chunk)
        if not (is_long and (not count.is_const or count.value < FEW)):
            self.each(root, lambda scope: self.vector_loop(Span.over(vector), scope, self.row), True)
            return
        part = Span(vector, "from", "to")
        self.chunks(root, chunk, lambda scope: self.vector_loop(part, scope, self.row))

    def chunks(self, root: Scope, chunk: int, body: Visit) -> None:
        """One loop over outer points and parts of the vectors' loop, from `from` to `to`."""
        size, number = self.lane.size, "p"
        count = ceildiv(size, chunk)
        scope = Scope(1, root)
        if self.loops:
            number = f"(p % {c_expr(count)})"
            self.unpack(f"(p / {c_expr(count)})", scope)
        scope(f"const int64_t from = {number} * {chunk}, to = min_i(from + {chunk}, {c_expr(size)});")
        body(scope)
        self.over(root, scope, mul(product(r.size for r in self.loops), count), True)

    # -- transposes

    def _crossed(self) -> tuple[Range, list[tuple[str, Expr]]] | None:
        """The outer loop along which loads are contiguous that are far apart in a vector, and those loads."""
        vector = self.vector
        if vector is None or self.group.inner or not self.group.outer or self.is_serial:
            return None
        best: tuple[Range, list[tuple[str, Expr]]] | None = None
        for item in self.loops:
            found = crossing_loads(self.group, vector.var, item.var)
            kinds = {name: self.writer.buffers[name].type.dtype for name, _ in found}
            whole = {name for name, kind in kinds.items() if kind.bytes == self.writer.widest}
            loads = [load for load in found if load[0] in whole and kinds[load[0]] is not BOOL]
            if _at_most(item.size, self.writer.lanes // 2) or _at_most(vector.size, self.writer.lanes // 2):
                continue
            if len(loads) > (len(best[1]) if best else 0):
                best = item, loads
        return best

    def _tiles(self, root: Scope, other: Range, loads: list[tuple[str, Expr]]) -> None:
        """Squares of L by L elements; those loads come in along `other` and are turned in registers."""
        vector, lanes = self.lane, self.writer.lanes
        rest = tuple(r for r in self.loops if r is not other)
        blocks = ceildiv(other.size, lanes)
        scope = Scope(1, root)
        start = f"{other.var.name}_"
        self.unpack(f"(p / {c_expr(blocks)})", scope, rest)
        scope(f"const int64_t {start} = p % {c_expr(blocks)} * {lanes};")
        square = Scope(2, scope)
        self.writer.depths[vector.var] = 2
        exact = _divides(other.size, lanes) and _divides(vector.size, lanes)
        full = Scope(3, square)
        self._tile(full, other, loads, None)
        if exact:
            square.lines += full.lines
        else:
            size, count = c_expr(vector.size), c_expr(other.size)
            square(f"const int64_t left = min_i({lanes}, {size} - {vector.var.name});")
            square(f"const int64_t rows = min_i({lanes}, {count} - {start});")
            square.block(f"if (left == {lanes} && rows == {lanes}) {{", full)
            part = Scope(3, square)
            self.writer.tail = "left"
            self._tile(part, other, loads, "rows")
            self.writer.tail = None
            square.block("else {", part)
        name = vector.var.name
        scope.block(f"for (int64_t {name} = 0; {name} < {c_expr(vector.size)}; {name} += {lanes}) {{", square)
        self.over(root, scope, mul(product(r.size for r in rest), blocks), True)

    def _tile(self, scope: Scope, other: Range, loads: list[tuple[str, Expr]], rows: str | None) -> None:
        vector, lanes, start = self.lane, self.writer.lanes, f"{other.var.name}_"
        self.writer.tiles = {}
        for buffer, index in loads:
            tile = self.writer.fresh("tile")
            kind = VECTOR_TYPE[self.writer.buffers[buffer].type.dtype]
            names = {vector.var: f"({vector.var.name} + line)", other.var: start}
            scope(f"{kind} {tile}[{lanes}]{' = {}' if rows else ''};")
            width = f", {rows}" if rows else ""
            source = f"load({token(buffer)} + {c_expr(index, names)}{width})"
            count = self.writer.tail or lanes
            scope(f"{EACH_LANE} for (int line = 0; line < {count}; ++line) {tile}[line] = {source};")
            if not rows:
                names[vector.var] = f"({vector.var.name} + {lanes} + line)"
                ahead = f"{token(buffer)} + {c_expr(index, names)}"
                scope(f"{EACH_LANE} for (int line = 0; line < {lanes}; ++line) __builtin_prefetch({ahead});")
            scope(f"transpose({tile});")
            self.writer.tiles[buffer, index] = f"{tile}[{other.var.name} - {start}]"
        inside = Scope(scope.depth + 1, scope)
        self.writer.depths[other.var] = inside.depth
        self.row(inside)
        self.writer.tiles = {}
        name = other.var.name
        unrolled = "" if rows else f"{EACH_LANE} "
        limit = f"{start} + {rows or lanes}"
        scope.block(f"{unrolled}for (int64_t {name} = {start}; {name} < {limit}; ++{name}) {{", inside)

    def vector_loop(self, span: Span, scope: Scope, body: Visit) -> None:
        """Full vectors, then what is left over."""
        item, start, stop, count = span.item, span.start, span.stop, span.count
        name, lanes = item.var.name, self.writer.lanes
        exact = _divides(item.size, lanes)
        self.writer.depths[item.var] = scope.depth + 1
        full = f"{stop} - {lanes - 1}" if count is None else str(item.size.value - count % lanes)
        if count is None or count >= lanes:
            inside = Scope(scope.depth + 1, scope)
            body(inside)
            limit = stop if exact else full
            scope.block(f"for (int64_t {name} = {start}; {name} < {limit}; {name} += {lanes}) {{", inside)
        if exact:
            return
        inside = Scope(scope.depth + 1, scope)
        if count is not None:
            self.writer.tail = str(count % lanes)
            inside(f"const int64_t {name} = {full};")
            head = "{"
        else:
            self.writer.tail = "left"
            head = f"if (const int64_t left = ({stop} - {start}) % {lanes}) {{"
            inside(f"const int64_t {name} = {stop} - left;")
        body(inside)
        self.writer.tail = None
        scope.block(head, inside)

    # -- one outer point, or one vector of them

    def row(self, scope: Scope) -> None:
        writer = self.writer
        freed = self._declare_rows(scope)
        for step in self.shape.passes:
            for nest in step.rows:
                writer.row(nest, scope)
            if not self.group.inner:
                for nest in step.points:
                    writer.point(nest, scope)
            elif step.points:
                self.walk(step, scope)
        for buffer in freed:
            scope(f"free({token(buffer)});")

    def _declare_rows(self, scope: Scope) -> tuple[str, ...]:
        """Local arrays for what a later pass reads; on the heap when they are large. Returns those."""
        writer, kept = self.writer, self.shape.kept_rows
        inner = product(r.size for r in self.group.inner)
        if len(self.group.inner) > 1:  # each of the rows ends in a whole vector
            inner = add(inner, writer.lanes)
        count = mul(inner if writer.column else ceildiv(inner, writer.lanes), writer.lanes)
        is_large = not _at_most(count, STACK_BYTES // 8 // max(len(kept), 1))
        for buffer in kept:
            kind, name = C_TYPE[writer.buffers[buffer].type.dtype], token(buffer)
            if is_large:
                size = f"({c_expr(count)} * sizeof({kind}) + 63) / 64 * 64"
                scope(f"{kind}* {name} = ({kind}*)aligned_alloc(64, {size});")
            else:
                scope(f"alignas(64) {kind} {name}[{c_expr(count)}];")
        return kept if is_large else ()

    def accumulators(self, step: Pass, copies: int) -> list[Accumulator]:
        writes = [(nest, write) for nest in step.points for write in nest.writes if write.reduce]
        return [Accumulator(self.writer, nest, write, copies) for nest, write in writes]

    def walk(self, step: Pass, scope: Scope) -> None:
        """One pass over the inner points."""
        items = self.accumulators(step, self._copies(step))
        self._accumulate(step, items, scope, self._next_row(step))
        for item in items:
            item.finish(scope)

    def _accumulate(
        self, step: Pass, items: list[Accumulator], scope: Scope, ahead: Sequence[str] = (),
        bounds: tuple[str, str] | None = None, count: str = "",
    ) -> None:  # fmt: skip
        """A walk, and a second one where deviations from a mean are wanted that is known only then. What is
        in no memory is computed again there. `ahead` is prefetched on the way."""
        for item in items:
            item.declare(scope)

        def visit(inside: Scope) -> None:
            self.visit(step, items, inside)
            for text in ahead:
                inside(f"__builtin_prefetch({text});")

        self.inner_loops(scope, Walk(items, visit), bounds)
        second = [item for item in items if item.needs_second]
        if not second:
            return
        for item in second:
            item.finish_mean(scope, count)
        made = {w.buffers[0]: w.value for w in writes_in(n for n in step.points if not n.reduce)}
        gone = set(self.group.internal) - set(self.shape.kept_rows)
        self.writer.recompute = {name: value for name, value in made.items() if name in gone}

        def visit_again(inside: Scope) -> None:
            for item in second:
                item.update_square(inside)

        self.inner_loops(scope, Walk(second, visit_again), bounds)
        self.writer.recompute = {}

    def _next_row(self, step: Pass) -> list[str]:
        """What the first walk over the next row will read from memory, while the second over this row
        computes functions of what is in cache. (Where it only copies, that would be in its way.)"""
        walks = [each for each in self.shape.passes if each.points]
        outer, vector = self.loops[-1:], self.vector
        is_dear = any(node.op in COSTLY for node in iter_scalars(*roots_in(step.points)))
        if step not in walks[1:2] or not is_dear or not outer or vector is None or self.writer.column:
            return []
        names = {outer[0].var: f"({outer[0].var.name} + 1)"}
        loads = dict.fromkeys(load for nest in walks[0].points for load in nest.loads)
        return [
            f"{token(buffer)} + {c_expr(index, names)}"
            for buffer, index in loads
            if index is not None and buffer not in self.group.internal and outer[0].var in symbols(index)
            and (along := linear_in(index, vector.var)) is not None and along[0] is ONE
        ]  # fmt: skip

    def visit(
        self, step: Pass, items: list[Accumulator], inside: Scope,
        update: Callable[[Accumulator, Scope], None] = Accumulator.update,
    ) -> None:  # fmt: skip
        """One inner point, or one vector of them: what is stored on the way, and reductions' next values."""
        for nest in step.points:
            if not nest.reduce:
                self.writer.point(nest, inside)
            for item in items:
                if item.nest is nest:
                    update(item, inside)

    def _copies(self, step: Pass) -> int:
        """Accumulators side by side: as many as a row fills, and one where the order counts."""
        kinds = [w.reduce for w in writes_in(step.points) if w.reduce]
        if self.vector is None or self.writer.column or not kinds or not SCANS.keys().isdisjoint(kinds):
            return 1
        size = self.vector.size
        copies = COPIES
        while size.is_const and copies > 1 and size.value < copies * self.writer.lanes:
            copies //= 2
        return copies

    # -- inner loops

    @property
    def inner(self) -> tuple[Range, ...]:
        """The inner loops, that of the vectors last."""
        return innermost(self.group.inner, self.vector.var if self.vector else None)

    def inner_loops(
        self, scope: Scope, walk: Walk, bounds: tuple[str, str] | None = None, outside: int = 0
    ) -> None:
        """Those inside of so many of them."""
        item, *rest = self.inner[outside:]
        span = Span(item, *bounds) if bounds else Span.over(item)
        if item is self.vector:
            self._unrolled(span, scope, walk)
            return
        inside = Scope(scope.depth + 1, scope)
        self.writer.depths[item.var] = inside.depth
        if rest:
            self.inner_loops(inside, walk, None, outside + 1)
        else:
            walk.step(inside)
        name = item.var.name
        scope.block(f"for (int64_t {name} = {span.start}; {name} < {span.stop}; ++{name}) {{", inside)

    def _unrolled(self, span: Span, scope: Scope, walk: Walk) -> None:
        """The vector loop of a walk, with as many vectors a step as there are accumulators."""
        items = walk.items
        copies = items[0].copies if items else 1

        def body(inside: Scope) -> None:
            for each in items:
                each.at = "[0]" if copies > 1 else ""
            walk.step(inside)

        if copies == 1:
            self.vector_loop(span, scope, body)
            return
        item, lanes, name = span.item, self.writer.lanes, span.item.var.name
        stride, step = lanes * copies, self.writer.fresh(f"{name}_")
        self.writer.depths[item.var] = scope.depth + 2
        many, one = Scope(scope.depth + 1, scope), Scope(scope.depth + 2, None)
        one.parent = many
        one(f"const int64_t {name} = {step} + {lanes}*u;")
        for each in items:
            each.at = "[u]"
        walk.visit(one)
        many("#pragma GCC unroll 8")
        many.block(f"for (int u = 0; u < {copies}; ++u) {{", one)
        for each in items:
            each.flush(many)
        left = None if span.count is None else span.count % stride
        limit = f"{span.stop} - {stride - 1}" if left is None else str(item.size.value - left)
        scope(f"int64_t {step} = {span.start};")
        scope.block(f"for (; {step} < {limit}; {step} += {stride}) {{", many)
        if left != 0:
            self.vector_loop(Span(item, step, span.stop, left), scope, body)

    # -- a long row among threads

    def _split_row(self, scope: Scope) -> None:
        """Each piece of the walk leaves its partial results; they are combined in order."""
        first, *later = self.shape.passes
        for nest in first.rows:
            self.writer.row(nest, scope)
        items = self.accumulators(first, self._copies(first))
        long, *others = self.inner
        size, grain = c_expr(long.size), self.writer.lanes if long is self.vector else 1
        scope(f"const int64_t pieces = max_i(1, min_i(omp_get_max_threads(), {PIECES}));")
        partials = [Partial(self.writer, item) for item in items]
        for partial in partials:
            partial.declare(scope)
        inside = Scope(scope.depth + 1, scope)
        whole = f"/ pieces / {grain} * {grain}"
        inside(f"const int64_t from = {size} * q {whole};")
        inside(f"const int64_t to = q + 1 == pieces ? {size} : {size} * (q + 1) {whole};")
        count = f"(int64_t)((to - from) * {c_expr(product(r.size for r in others))})"
        self._accumulate(first, items, inside, (), ("from", "to"), f"max_i(1, {count})")
        for partial in partials:
            partial.leave(inside, count)
        scope(f"#pragma omp parallel for schedule(static){self.condition}")
        scope.block("for (int64_t q = 0; q < pieces; ++q) {", inside)
        for partial in partials:
            partial.combine(scope)
        for step in later:
            for nest in step.rows:
                self.writer.row(nest, scope)


def _at_most(size: Expr, limit: int) -> bool:
    return size.is_const and size.value <= limit


def _divides(size: Expr, lanes: int) -> bool:
    return size.is_const and size.value % lanes == 0
