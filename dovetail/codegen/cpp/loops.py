"""The loops of one kernel.

Four shapes, by where the contiguous loop is and how many outer points there are:

    rows       outer points among threads; each walks its inner loops in vectors
    one row    few outer points with long inner loops: the walk itself is split among threads
    points     no inner loops, or several passes over columns: each lane is an outer point
    columns    a reduction over rows of memory: stream them, accumulators for a tile of columns in cache
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dovetail.codegen.analysis import Pass, Shape, crossing_loads, work
from dovetail.codegen.cpp.exprs import c_expr
from dovetail.codegen.cpp.ops import C_TYPE, VECTOR_TYPE, combine, functions_of
from dovetail.codegen.cpp.reduce import Accumulator
from dovetail.codegen.cpp.values import KernelWriter, Scope, Value, innermost
from dovetail.ir.expr import ONE, Expr, ceildiv, mul, product
from dovetail.ir.loop import Range
from dovetail.ir.schedule import Group
from dovetail.ir.types import BOOL, I64

PARALLEL_WORK: Final = 32768
"""Weighted elements below which one thread is faster, as in eager."""
CHUNK: Final = 4096
"""Elements of one piece when a long contiguous loop is shared among threads."""
FEW: Final = 16
COPIES: Final = 4
TILE: Final = 1024
"""Columns whose accumulators stay in the first-level cache."""
BLOCK: Final = 16
"""Rows added up in a register before the accumulator in memory is touched."""
BLOCKS: Final = 64
"""Blocks before the accumulators in memory are flushed into others: rounding errors stay small."""
PIECES: Final = 64
"""Most pieces a walk is split into."""


@dataclass(slots=True)
class Body:
    writer: KernelWriter
    group: Group
    shape: Shape
    is_serial: bool

    # -- what they ask

    @property
    def vector(self) -> Range | None:
        return self.shape.contiguous if self.writer.lanes > 1 else None

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
        """One walk over rows of memory, then only arithmetic per column."""
        first, *later = self.shape.passes
        kinds = [w.reduce for n in first.points for w in n.writes if w.reduce]
        plain = not first.rows and all(kind not in ("welford", "argmax", "argmin") for kind in kinds)
        return bool(
            self.writer.column and self.group.inner and kinds and plain and not any(p.points for p in later)
        )

    @property
    def splits(self) -> bool:
        """Too few outer points to keep the threads busy, and a walk long enough to share."""
        count = product(r.size for r in self.loops)
        first, *later = self.shape.passes
        if not self.has_threads or not count.is_const or count.value >= FEW or any(p.points for p in later):
            return False
        length = product(r.size for r in self.group.inner)
        return any(n.reduce for n in first.points) and not (length.is_const and length.value < PARALLEL_WORK)

    def emit(self) -> list[str]:
        root = Scope(0, None)
        if self.streams:
            self._columns(root)
        elif self.writer.column and (crossed := self._crossed()):
            self._tiles(root, *crossed)
        elif self.writer.column:
            self._points(root)
        elif self.group.inner and self.splits:
            self._each(root, self._split_row, parallel=False)
        else:
            self._each(root, self.row, parallel=True)
        return root.lines

    # -- outer loops

    def _pragma(self, total: Expr) -> str:
        if not self.has_threads or total is ONE:
            return ""
        amount = work(self.group)
        condition = "" if amount.is_const else f" if ({c_expr(amount)} >= {PARALLEL_WORK})"
        return f"#pragma omp parallel for schedule(static){condition}"

    def _each(self, root: Scope, body: Callable[[Scope], None], parallel: bool) -> None:
        """One loop over all outer points that are not lanes."""
        if not self.loops:
            body(root)
            return
        scope = Scope(1, root)
        self._unpack("p", scope)
        body(scope)
        self._over(root, scope, product(r.size for r in self.loops), parallel)

    def _over(self, root: Scope, scope: Scope, total: Expr, parallel: bool) -> None:
        pragma = self._pragma(total) if parallel else ""
        if pragma:
            root(pragma)
        root.block(f"for (int64_t p = 0; p < {c_expr(total)}; ++p) {{", scope)

    def _unpack(self, rest: str, scope: Scope, loops: tuple[Range, ...] | None = None) -> None:
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
        vector = self.vector
        assert vector is not None
        count = product(r.size for r in self.loops)
        is_long = not vector.size.is_const or vector.size.value > CHUNK
        if not (is_long and (not count.is_const or count.value < FEW)):
            self._each(
                root,
                lambda scope: self.vector_loop(
                    vector, "0", c_expr(vector.size), scope, vector.size, self.row
                ),
                True,
            )
            return
        chunks = ceildiv(vector.size, CHUNK)
        scope = Scope(1, root)
        number = "p"
        if self.loops:
            number = f"(p % {c_expr(chunks)})"
            self._unpack(f"(p / {c_expr(chunks)})", scope)
        scope(f"const int64_t from = {number} * {CHUNK}, to = min_i(from + {CHUNK}, {c_expr(vector.size)});")
        exact = _divides(vector.size, self.writer.lanes)
        self.vector_loop(vector, "from", "to", scope, None, self.row, exact)
        self._over(root, scope, mul(count, chunks), True)

    # -- transposes

    def _crossed(self) -> tuple[Range, list[tuple[str, Expr]]] | None:
        """The outer loop along which loads are contiguous that are far apart in a vector, and those loads."""
        vector = self.vector
        if vector is None or self.group.inner or not self.group.outer or self.is_serial:
            return None
        best: tuple[Range, list[tuple[str, Expr]]] | None = None
        for item in self.loops:
            loads = [
                (buffer, index)
                for buffer, index in crossing_loads(self.group, vector.var, item.var)
                if self.writer.buffers[buffer].type.dtype.bytes == self.writer.widest
                and self.writer.buffers[buffer].type.dtype is not BOOL
            ]
            if _at_most(item.size, self.writer.lanes // 2) or _at_most(vector.size, self.writer.lanes // 2):
                continue
            if len(loads) > (len(best[1]) if best else 0):
                best = item, loads
        return best

    def _tiles(self, root: Scope, other: Range, loads: list[tuple[str, Expr]]) -> None:
        """Squares of L by L elements; those loads come in along `other` and are turned in registers."""
        vector, lanes = self.vector, self.writer.lanes
        assert vector is not None
        rest = tuple(r for r in self.loops if r is not other)
        blocks = ceildiv(other.size, lanes)
        scope = Scope(1, root)
        start = f"{other.var.name}_"
        self._unpack(f"(p / {c_expr(blocks)})", scope, rest)
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
            square(
                f"const int64_t left = min_i({lanes}, {size} - {vector.var.name}), rows = min_i({lanes}, {count} - {start});"
            )
            square.block(f"if (left == {lanes} && rows == {lanes}) {{", full)
            part = Scope(3, square)
            self.writer.tail = "left"
            self._tile(part, other, loads, "rows")
            self.writer.tail = None
            square.block("else {", part)
        name = vector.var.name
        scope.block(f"for (int64_t {name} = 0; {name} < {c_expr(vector.size)}; {name} += {lanes}) {{", square)
        self._over(root, scope, mul(product(r.size for r in rest), blocks), True)

    def _tile(self, scope: Scope, other: Range, loads: list[tuple[str, Expr]], rows: str | None) -> None:
        vector, lanes, start = self.vector, self.writer.lanes, f"{other.var.name}_"
        assert vector is not None
        self.writer.tiles = {}
        for buffer, index in loads:
            tile = self.writer.fresh("tile")
            kind = VECTOR_TYPE[self.writer.buffers[buffer].type.dtype]
            names = {vector.var: f"({vector.var.name} + line)", other.var: start}
            scope(f"{kind} {tile}[{lanes}]{' = {}' if rows else ''};")
            count = f", {rows}" if rows else ""
            source = f"load({self.writer.name(buffer)} + {c_expr(index, names)}{count})"
            scope(f"for (int line = 0; line < {self.writer.tail or lanes}; ++line) {tile}[line] = {source};")
            scope(f"transpose({tile});")
            self.writer.tiles[buffer, index] = f"{tile}[{other.var.name} - {start}]"
        inside = Scope(scope.depth + 1, scope)
        self.writer.depths[other.var] = inside.depth
        self.row(inside)
        self.writer.tiles = {}
        name = other.var.name
        scope.block(
            f"for (int64_t {name} = {start}; {name} < {start} + {rows or lanes}; ++{name}) {{", inside
        )

    def vector_loop(
        self,
        item: Range,
        start: str,
        stop: str,
        scope: Scope,
        size: Expr | None,
        body: Callable[[Scope], None],
        exact: bool | None = None,
    ) -> None:
        """Full vectors, then what is left over. `size` is given when the whole range is walked."""
        name, lanes = item.var.name, self.writer.lanes
        if exact is None:
            exact = _divides(item.size, lanes)
        self.writer.depths[item.var] = scope.depth + 1
        known = size.value if size is not None and size.is_const else None
        full = f"{stop} - {lanes - 1}" if known is None else str(known // lanes * lanes)
        if known is None or known >= lanes:
            inside = Scope(scope.depth + 1, scope)
            body(inside)
            limit = stop if exact else full
            scope.block(f"for (int64_t {name} = {start}; {name} < {limit}; {name} += {lanes}) {{", inside)
        if exact:
            return
        inside = Scope(scope.depth + 1, scope)
        if known is not None:
            self.writer.tail = str(known % lanes)
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
        inner = product(r.size for r in self.group.inner)
        for buffer in self.shape.kept_rows:
            count = c_expr(
                mul(inner, writer.lanes) if writer.column else mul(ceildiv(inner, writer.lanes), writer.lanes)
            )
            kind = C_TYPE[writer.buffers[buffer].type.dtype]
            scope(f"alignas(64) {kind} {writer.name(buffer)}[{count}];")
        for step in self.shape.passes:
            for nest in step.rows:
                writer.row(nest, scope)
            if not self.group.inner:
                for nest in step.points:
                    writer.point(nest, scope)
            elif step.points:
                self.walk(step, scope)

    def accumulators(self, step: Pass, copies: int) -> list[Accumulator]:
        return [
            Accumulator(self.writer, nest, write, copies)
            for nest in step.points
            for write in nest.writes
            if write.reduce
        ]

    def walk(self, step: Pass, scope: Scope) -> None:
        """One pass over the inner points."""
        items = self.accumulators(step, self._copies(step))
        for item in items:
            item.declare(scope)
        self.inner_loops(scope, items, lambda inside: self._visit(step, items, inside))
        second = [item for item in items if item.needs_second]
        if second:
            for item in second:
                item.finish_mean(scope)
            self._second_walk(step, second, scope)
        for item in items:
            item.finish(scope)

    def _visit(self, step: Pass, items: list[Accumulator], inside: Scope) -> None:
        """One inner point, or one vector of them."""
        for nest in step.points:
            if not nest.reduce:
                self.writer.point(nest, inside)
            for item in items:
                if item.nest is nest:
                    item.update(inside)

    def _second_walk(self, step: Pass, items: list[Accumulator], scope: Scope) -> None:
        """Squared deviations from the mean, now that it is known."""
        self.writer.recompute = {
            w.buffers[0]: w.value
            for n in step.points
            if not n.reduce
            for w in n.writes
            if w.buffers[0] in self.group.internal and w.buffers[0] not in self.shape.kept_rows
        }

        def visit(inside: Scope) -> None:
            for item in items:
                item.update_square(inside)

        self.inner_loops(scope, items, visit)
        self.writer.recompute = {}

    def _copies(self, step: Pass) -> int:
        """Accumulators side by side: as many as a row fills, and none for reductions that find positions."""
        kinds = [w.reduce for n in step.points for w in n.writes if w.reduce]
        if (
            self.vector is None
            or self.writer.column
            or not kinds
            or any(k in ("argmax", "argmin") for k in kinds)
        ):
            return 1
        size = self.vector.size
        copies = COPIES
        while size.is_const and copies > 1 and size.value < copies * self.writer.lanes:
            copies //= 2
        return copies

    # -- inner loops

    def inner_loops(
        self,
        scope: Scope,
        items: list[Accumulator],
        visit: Callable[[Scope], None],
        bounds: tuple[str, str] | None = None,
    ) -> None:
        order = innermost(self.group.inner, self.vector.var if self.vector else None)
        self._nested(order, scope, items, visit, bounds)

    def _nested(
        self,
        loops: tuple[Range, ...],
        scope: Scope,
        items: list[Accumulator],
        visit: Callable[[Scope], None],
        bounds: tuple[str, str] | None,
    ) -> None:
        item, rest = loops[0], loops[1:]
        start, stop = bounds or ("0", c_expr(item.size))
        if item is self.vector:
            self._unrolled(item, start, stop, scope, items, visit, bounds is None)
            return
        inside = Scope(scope.depth + 1, scope)
        self.writer.depths[item.var] = inside.depth
        if rest:
            self._nested(rest, inside, items, visit, None)
        else:
            visit(inside)
            for each in items:
                each.flush(inside)
        name = item.var.name
        scope.block(f"for (int64_t {name} = {start}; {name} < {stop}; ++{name}) {{", inside)

    def _unrolled(
        self,
        item: Range,
        start: str,
        stop: str,
        scope: Scope,
        items: list[Accumulator],
        visit: Callable[[Scope], None],
        whole: bool,
    ) -> None:
        """The vector loop of a walk, with as many vectors a step as there are accumulators."""
        copies = items[0].copies if items else 1

        def body(inside: Scope) -> None:
            for each in items:
                each.at = "[0]" if copies > 1 else ""
            visit(inside)
            for each in items:
                each.flush(inside)

        size = item.size if whole else None
        if copies == 1:
            self.vector_loop(item, start, stop, scope, size, body)
            return
        lanes, name = self.writer.lanes, item.var.name
        stride, step = lanes * copies, self.writer.fresh(f"{name}_")
        self.writer.depths[item.var] = scope.depth + 2
        many, one = Scope(scope.depth + 1, scope), Scope(scope.depth + 2, None)
        one.parent = many
        one(f"const int64_t {name} = {step} + {lanes}*u;")
        for each in items:
            each.at = "[u]"
        visit(one)
        many("#pragma GCC unroll 8")
        many.block(f"for (int u = 0; u < {copies}; ++u) {{", one)
        for each in items:
            each.flush(many)
        known = whole and item.size.is_const
        limit = str(item.size.value // stride * stride) if known else f"{stop} - {stride - 1}"
        scope(f"int64_t {step} = {start};")
        scope.block(f"for (; {step} < {limit}; {step} += {stride}) {{", many)
        left = item.size.value % stride if known else None
        if left:
            self._left_over(item, step, str(item.size.value), left, scope, body)
        elif left is None:
            self.vector_loop(item, step, stop, scope, None, body)

    def _left_over(
        self, item: Range, start: str, stop: str, left: int, scope: Scope, body: Callable[[Scope], None]
    ) -> None:
        """Fewer than a full step: some whole vectors, then part of one."""
        lanes, name = self.writer.lanes, item.var.name
        self.writer.depths[item.var] = scope.depth + 1
        if left >= lanes:
            inside = Scope(scope.depth + 1, scope)
            body(inside)
            scope.block(
                f"for (int64_t {name} = {start}; {name} < {stop} - {lanes - 1}; {name} += {lanes}) {{", inside
            )
        if left % lanes:
            inside = Scope(scope.depth + 1, scope)
            inside(f"const int64_t {name} = {stop} - {left % lanes};")
            self.writer.tail = str(left % lanes)
            body(inside)
            self.writer.tail = None
            scope.block("{", inside)

    # -- a long row among threads

    def _split_row(self, scope: Scope) -> None:
        """Each piece of the walk leaves its partial results; they are combined in order."""
        first, *later = self.shape.passes
        for nest in first.rows:
            self.writer.row(nest, scope)
        items = self.accumulators(first, self._copies(first))
        order = innermost(self.group.inner, self.vector.var if self.vector else None)
        size, grain = c_expr(order[0].size), self.writer.lanes if order[0] is self.vector else 1
        scope(f"const int64_t pieces = max_i(1, min_i(omp_get_max_threads(), {PIECES}));")
        partials = [Partial(self.writer, item) for item in items]
        for partial in partials:
            partial.declare(scope)
        inside = Scope(scope.depth + 1, scope)
        inside(f"const int64_t from = {size} * q / pieces / {grain} * {grain};")
        inside(
            f"const int64_t to = q + 1 == pieces ? {size} : {size} * (q + 1) / pieces / {grain} * {grain};"
        )
        for item in items:
            item.declare(inside)
        self.inner_loops(inside, items, lambda s: self._visit(first, items, s), ("from", "to"))
        second = [item for item in items if item.needs_second]
        rest = product(r.size for r in order[1:])
        count = f"(int64_t)((to - from) * {c_expr(rest)})"
        for item in second:
            item.finish_mean(inside, f"max_i(1, {count})")
        if second:
            self._second_walk_split(first, second, inside)
        for partial in partials:
            partial.leave(inside, count)
        condition = (
            "" if work(self.group).is_const else f" if ({c_expr(work(self.group))} >= {PARALLEL_WORK})"
        )
        scope(f"#pragma omp parallel for schedule(static){condition}")
        scope.block("for (int64_t q = 0; q < pieces; ++q) {", inside)
        for partial in partials:
            partial.combine(scope)
        for step in later:
            for nest in step.rows:
                self.writer.row(nest, scope)

    def _second_walk_split(self, step: Pass, items: list[Accumulator], scope: Scope) -> None:
        self.writer.recompute = {
            w.buffers[0]: w.value
            for n in step.points
            if not n.reduce
            for w in n.writes
            if w.buffers[0] in self.group.internal
        }

        def visit(inside: Scope) -> None:
            for item in items:
                item.update_square(inside)

        self.inner_loops(scope, items, visit, ("from", "to"))
        self.writer.recompute = {}

    # -- columns

    def _columns(self, root: Scope) -> None:
        vector = self.vector
        assert vector is not None
        if self.splits:
            self._each(root, self._split_columns, parallel=False)
            return
        tiles = ceildiv(vector.size, TILE)
        scope = Scope(1, root)
        number = "p"
        if self.loops:
            number = f"(p % {c_expr(tiles)})"
            self._unpack(f"(p / {c_expr(tiles)})", scope)
        scope(f"const int64_t from = {number} * {TILE}, to = min_i(from + {TILE}, {c_expr(vector.size)});")
        items = self.accumulators(self.shape.passes[0], 1)
        for item in items:
            item.name = self.writer.fresh("acc")
            width = min(TILE, vector.size.value + 64) if vector.size.is_const else TILE
            scope(f"alignas(64) {self._element(item)} {item.name}[{-(-width // 64) * 64}];")
        order = innermost(self.group.inner, None)
        self._stream(items, scope, ("0", c_expr(order[0].size)))
        self.vector_loop(vector, "from", "to", scope, None, lambda s: self._column_results(items, s))
        self._over(root, scope, mul(product(r.size for r in self.loops), tiles), True)

    def _element(self, item: Accumulator) -> str:
        return (
            "int32_t"
            if item.dtype is BOOL and self.writer.widest == 4
            else "int64_t"
            if item.dtype is BOOL
            else C_TYPE[item.dtype]
        )

    def _stream(self, items: list[Accumulator], scope: Scope, bounds: tuple[str, str]) -> None:
        """Blocks of rows against the columns from `from` to `to`; accumulators are indexed from `from`."""
        vector = self.vector
        assert vector is not None
        order = self.group.inner
        pad = f"for (int64_t k = 0; k < to - from; k += {self.writer.lanes})"
        for item in items:
            scope(f"{pad} {self._slot(item, 'k', item.start)}")
        blocks, last = order[:-1], order[-1]
        at = scope
        opened: list[tuple[str, Scope]] = []
        for position, item in enumerate(blocks):
            inside = Scope(at.depth + 1, at)
            self.writer.depths[item.var] = inside.depth
            start, stop = bounds if position == 0 else ("0", c_expr(item.size))
            opened.append(
                (
                    f"for (int64_t {item.var.name} = {start}; {item.var.name} < {stop}; ++{item.var.name}) {{",
                    inside,
                )
            )
            at = inside
        start, stop = ("0", c_expr(last.size)) if blocks else bounds
        row = f"{last.var.name}_"
        block = Scope(at.depth + 1, at)

        def column(inside: Scope) -> None:
            for item in items:
                partial = f"{item.name}_block"
                inside(f"{item.type(item.dtype)} {partial} = {item.start};")
            deep = Scope(inside.depth + 1, inside)
            self.writer.depths[last.var] = deep.depth
            named = [(item, item.name) for item in items]
            for item, name in named:
                item.name = f"{name}_block"
            self._visit_plain(items, deep)
            for item, name in named:
                item.name = name
            inside.block(
                f"for (int64_t {last.var.name} = {row}; {last.var.name} < min_i({row} + {BLOCK}, {stop}); ++{last.var.name}) {{",
                deep,
            )
            for item in items:
                pattern = combine(item.kind, item.dtype, True)
                self.writer.functions |= functions_of(pattern, (item.dtype,))
                whole = pattern.format(self._slot(item, f"({vector.var.name} - from)"), f"{item.name}_block")
                inside(self._slot(item, f"({vector.var.name} - from)", whole))

        self.vector_loop(vector, "from", "to", block, None, column)
        long = [
            item
            for item in items
            if item.kind == "sum" and item.dtype.is_float and not _at_most(last.size, BLOCK * BLOCKS)
        ]
        each = f"for (int64_t k = 0; k < to - from; k += {self.writer.lanes})"
        for item in long:
            n = item.name
            scope(f"alignas(64) {C_TYPE[item.dtype]} {n}_top[{TILE + 64}] = {{}};")
            block(f"if (({row} / {BLOCK}) % {BLOCKS} == {BLOCKS - 1})")
            block(
                f"    {each} {{ store({n}_top + k, load({n}_top + k) + load({n} + k)); store({n} + k, {item.start}); }}"
            )
        at.block(f"for (int64_t {row} = {start}; {row} < {stop}; {row} += {BLOCK}) {{", block)
        after = [
            f"{each} store({item.name} + k, load({item.name} + k) + load({item.name}_top + k));"
            for item in long
        ]
        for head, inside in reversed(opened):
            assert inside.parent is not None
            inside.parent.block(head, inside)
        for line in after:
            scope(line)

    def _visit_plain(self, items: list[Accumulator], inside: Scope) -> None:
        """As _visit, with NaN-preferring comparisons: one accumulator only."""
        step = self.shape.passes[0]
        for nest in step.points:
            if not nest.reduce:
                self.writer.point(nest, inside)
            for item in items:
                if item.nest is nest:
                    value = self.writer.value(item.write.value, inside)
                    pattern = combine(item.kind, item.dtype, True)
                    text = self.writer.as_vector(value)
                    self.writer.functions |= functions_of(pattern, (item.dtype,))
                    if not text.isidentifier():
                        name = self.writer.fresh()
                        inside(f"const {VECTOR_TYPE[item.dtype]} {name} = {text};")
                        text = name
                    inside(f"{item.name} = {pattern.format(item.name, text)};")

    def _slot(self, item: Accumulator, index: str, value: str | None = None) -> str:
        """A vector of accumulators in memory, read or written."""
        if value is None:
            return f"load({item.name} + {index})"
        return f"store({item.name} + {index}, {value});"

    def _column_results(self, items: list[Accumulator], scope: Scope) -> None:
        vector = self.vector
        assert vector is not None
        for item in items:
            name = self.writer.fresh()
            scope(
                f"const {VECTOR_TYPE[item.dtype]} {name} = {self._slot(item, f'({vector.var.name} - from)')};"
            )
            self.writer.keep(
                item.write.buffers[0], item.write.index, Value(name, item.dtype, True, scope.depth), scope
            )
        for step in self.shape.passes[1:]:
            for nest in step.rows:
                self.writer.row(nest, scope)

    def _split_columns(self, scope: Scope) -> None:
        """Rows among threads: each has accumulators for all columns, combined at the end."""
        vector = self.vector
        assert vector is not None
        items = self.accumulators(self.shape.passes[0], 1)
        lanes, size = self.writer.lanes, c_expr(vector.size)
        first = self.group.inner[0]
        scope(f"const int64_t pieces = max_i(1, min_i(omp_get_max_threads(), {PIECES}));")
        scope(f"const int64_t width = ({size} + 63) / 64 * 64;")
        for item in items:
            item.name = self.writer.fresh("acc")
            kind = self._element(item)
            scope(f"{kind}* {item.name}_all = ({kind}*)aligned_alloc(64, pieces * width * sizeof({kind}));")
        piece = Scope(scope.depth + 1, scope)
        rows = c_expr(first.size)
        piece(f"const int64_t top = {rows} * q / pieces, bottom = {rows} * (q + 1) / pieces;")
        tile = Scope(piece.depth + 1, piece)
        tile(f"const int64_t to = min_i(from + {TILE}, {size});")
        for item in items:
            tile(f"{self._element(item)}* {item.name} = {item.name}_all + q * width + from;")
        self._stream(items, tile, ("top", "bottom"))
        piece.block(f"for (int64_t from = 0; from < {size}; from += {TILE}) {{", tile)
        condition = (
            "" if work(self.group).is_const else f" if ({c_expr(work(self.group))} >= {PARALLEL_WORK})"
        )
        scope(f"#pragma omp parallel for schedule(static){condition}")
        scope.block("for (int64_t q = 0; q < pieces; ++q) {", piece)
        for item in items:
            pattern = combine(item.kind, item.dtype, True)
            here, there = f"load({item.name}_all + k)", f"load({item.name}_all + q * width + k)"
            scope(f"for (int64_t q = 1; q < pieces; ++q) for (int64_t k = 0; k < width; k += {lanes})")
            scope(
                f"    {{ const auto a = {here}, b = {there}; store({item.name}_all + k, {pattern.format('a', 'b')}); }}"
            )
            scope(f"{self._element(item)}* {item.name} = {item.name}_all;")
        scope("const int64_t from = 0;")
        self.vector_loop(vector, "0", size, scope, vector.size, lambda s: self._column_results(items, s))
        for item in items:
            scope(f"free({item.name}_all);")


def _at_most(size: Expr, limit: int) -> bool:
    return size.is_const and size.value <= limit


def _divides(size: Expr, lanes: int) -> bool:
    return size.is_const and size.value % lanes == 0


@dataclass(slots=True)
class Partial:
    """What the pieces of a split walk leave behind for one reduction."""

    writer: KernelWriter
    item: Accumulator
    name: str = ""

    def declare(self, scope: Scope) -> None:
        self.name = self.writer.fresh("part")
        scope(f"{C_TYPE[self.item.dtype]} {self.name}[{PIECES}];")
        if self.item.is_position:
            scope(f"int64_t {self.name}_at[{PIECES}];")
        if self.item.needs_second:
            scope(f"{C_TYPE[self.item.dtype]} {self.name}_mean[{PIECES}];")
            scope(f"int64_t {self.name}_count[{PIECES}];")

    def leave(self, scope: Scope, count: str) -> None:
        item = self.item
        if item.is_position:
            best = self.writer.fresh("best")
            if item.is_vector:
                item.pick_best(
                    scope, best, f"{item.name}[{{}}]", f"{item.name}_at[{{}}]", str(self.writer.lanes)
                )
                scope(f"{self.name}[q] = {item.name}[{best}]; {self.name}_at[q] = {item.name}_at[{best}];")
            else:
                scope(f"{self.name}[q] = {item.name}; {self.name}_at[q] = {item.name}_at;")
            return
        scope(f"{self.name}[q] = {item.total(scope).text};")
        if item.needs_second:
            scope(f"{self.name}_mean[q] = {item.mean}; {self.name}_count[q] = {count};")

    def combine(self, scope: Scope) -> None:
        item = self.item
        if item.is_position:
            best = self.writer.fresh("best")
            item.pick_best(scope, best, f"{self.name}[{{}}]", f"{self.name}_at[{{}}]", "pieces")
            self._keep(0, f"{self.name}_at[{best}]", I64, scope)
        elif item.needs_second:
            self._combine_squares(scope)
        else:
            total = self.writer.fresh()
            pattern = combine(item.kind, item.dtype, False)
            self.writer.functions |= functions_of(pattern, (item.dtype,))
            kind = C_TYPE[item.dtype]
            scope(f"{kind} {total} = {self.name}[0];")
            scope(
                f"for (int64_t q = 1; q < pieces; ++q) {{ const {kind} v = {self.name}[q]; {total} = {pattern.format(total, 'v')}; }}"
            )
            self._keep(0, total, item.dtype, scope)

    def _combine_squares(self, scope: Scope) -> None:
        """Means and squared deviations of pieces, weighted by their lengths."""
        kind, n = C_TYPE[self.item.dtype], self.name
        scope(f"{kind} {n}_m = {n}_mean[0], {n}_s = {n}[0]; int64_t {n}_n = {n}_count[0];")
        scope("for (int64_t q = 1; q < pieces; ++q) {")
        scope(f"    const int64_t all = {n}_n + {n}_count[q]; if (!{n}_count[q]) continue;")
        scope(f"    const {kind} apart = {n}_mean[q] - {n}_m, share = ({kind}){n}_count[q] / ({kind})all;")
        scope(
            f"    {n}_s += {n}[q] + apart * apart * share * ({kind}){n}_n; {n}_m += apart * share; {n}_n = all;"
        )
        scope("}")
        self._keep(0, f"{n}_m", self.item.dtype, scope)
        self._keep(1, f"{n}_s", self.item.dtype, scope)

    def _keep(self, which: int, text: str, dtype: object, scope: Scope) -> None:
        value = Value(text, dtype, False, scope.depth)  # type: ignore[arg-type]
        self.writer.keep(self.item.write.buffers[which], self.item.write.index, value, scope)
