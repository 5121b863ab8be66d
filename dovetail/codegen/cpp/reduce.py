"""Reductions inside a kernel: accumulators, how they are combined, and how lanes become one value.

    sum over r0    f32v acc1[4] = {0};  ... acc1[u] = acc1[u] + t;  ...  t9 = fold(acc1[0] + acc1[1] + ...)

Several accumulators hide the latency of an addition and shorten the chains of rounding errors; sums
of more than a few hundred terms per accumulator flush into a second one, as eager's cascade does.
"""
from __future__ import annotations

from typing import Final

from dovetail.codegen.cpp import ops
from dovetail.codegen.cpp.ops import C_TYPE, VECTOR_TYPE, c_expr, cast, combine, identity
from dovetail.codegen.cpp.prelude import shuffle
from dovetail.codegen.cpp.values import KernelWriter, Scope, Value, innermost
from dovetail.ir.expr import Expr, product, row_major
from dovetail.ir.loop import SCANS, Nest, Write, index_value
from dovetail.ir.types import BOOL, F32, I32, I64, DType
from dovetail.util.noun import Noun

CASCADE: Final = 64
"""Additions into one accumulator before it is flushed into the next."""


class Accumulator(Noun, frozen=False):
    """The running result of one reduction over the inner loops. `copies` is how many run side by side;
    `at` is the text that picks one of them."""

    writer: KernelWriter
    nest: Nest
    write: Write
    copies: int = 1
    at: str = ""
    name: str = ""
    mean: str = ""
    apart: Accumulator | None = None
    """Beside squared deviations: the sum of the deviations, which is not zero where the mean was rounded."""

    @property
    def dtype(self) -> DType:
        return self.write.value.dtype

    @property
    def is_vector(self) -> bool:
        return self.writer.lanes > 1

    @property
    def is_position(self) -> bool:
        return self.write.reduce in ("argmax", "argmin")

    @property
    def finds_in_order(self) -> bool:
        """Positions grow along the walk, so that of equal values the first one met is the first one."""
        order = innermost(self.nest.reduce, self.writer.vector_var)
        return place_expr(self.write) is row_major([r.var for r in order], [r.size for r in order])

    @property
    def needs_second(self) -> bool:
        return self.write.reduce == "welford"

    @property
    def kind(self) -> str:
        return "sum" if self.needs_second else str(self.write.reduce).removeprefix("cum")

    @property
    def is_scan(self) -> bool:
        return self.write.reduce in SCANS

    @property
    def cascades(self) -> bool:
        count = product(r.size for r in self.nest.reduce)
        lanes = 1 if self.writer.column else self.writer.lanes
        chain = lanes * self.copies * CASCADE * 4
        is_short = self.is_scan or (count.is_const and count.value <= chain)
        return self.kind == "sum" and self.dtype.is_float and not is_short

    def type(self, dtype: DType) -> str:
        return VECTOR_TYPE[dtype] if self.is_vector else C_TYPE[dtype]

    def splat(self, text: str, dtype: DType) -> str:
        return self.writer.as_vector(Value(text, dtype, False)) if self.is_vector else text

    @property
    def start(self) -> str:
        return self.splat(identity(self.kind, self.dtype), self.dtype)

    @property
    def better(self) -> str:
        """Template over (accumulator, value)."""
        return combine(self.kind, self.dtype, self.is_vector)

    # -- while walking

    def declare(self, scope: Scope) -> None:
        self.name = self.writer.fresh("acc")
        array = f"[{self.copies}]" if self.copies > 1 else ""
        self._declare(scope, self.dtype, self.name + array, self.start)
        if self.is_position:
            kind = place_dtype(self.write)
            nowhere = self.splat(identity("min", kind), kind)
            self._declare(scope, kind, f"{self.name}_at{array}", nowhere)
        if self.cascades:
            scope(f"{self.type(self.dtype)} {self.name}_mid = {self.start}, {self.name}_sum = {self.start};")
            scope(f"uint32_t {self.name}_count = 0;")

    def _declare(self, scope: Scope, dtype: DType, name: str, start: str) -> None:
        if self.copies > 1:
            start = "{" + ", ".join([start] * self.copies) + "}"
        scope(f"{self.type(dtype)} {name} = {start};")

    def update(self, scope: Scope) -> None:
        node, term = self.write.value, "{}"
        if self.write.reduce == "sum" and node.op == "exp" and node.dtype is F32 and self.is_vector:
            self.writer.functions.add("exp")
            node, term = node.operands[0], "exp_term_({})"
        value = self.writer.value(node, scope)
        if self.is_position:
            self._update_position(value, scope)
        elif self.is_scan:
            self._leave(value, scope)
        else:
            self._add(term.format(self.writer.as_vector(value) if self.is_vector else value.text), scope)

    def _add(self, text: str, scope: Scope) -> None:
        """Lanes beyond the end contribute nothing, where lanes are points of this reduction."""
        if self.writer.tail is not None and not self.writer.column:
            text = f"select(first({self.writer.tail}), {text}, {self.start})"
        text = self.named(text, scope)
        target = self.name + self.at
        self.writer.functions |= ops.functions_of(self.better, (self.dtype,))
        scope(f"{target} = {self.better.format(target, text)};")

    def flush(self, scope: Scope) -> None:
        """At the end of each step of the walk."""
        if self.apart is not None:
            self.apart.flush(scope)
        if not self.cascades:
            return
        n = self.name
        slots = [n + slot for slot in self._slots()]
        both = " + ".join(f"({a} + {b})" for a, b in zip(slots[::2], slots[1::2])) if len(slots) > 1 else n
        clear = " ".join(f"{slot} = {self.start};" for slot in slots)
        scope(f"if (++{n}_count % {CASCADE} == 0) {{")
        scope(f"    {n}_mid += {both}; {clear}")
        on = f"{n}_sum += {n}_mid; {n}_mid = {self.start};"
        scope(f"    if ({n}_count % {CASCADE * CASCADE} == 0) {{ {on} }}\n}}")

    def _slots(self) -> list[str]:
        return [""] if self.copies == 1 else [f"[{k}]" for k in range(self.copies)]

    def named(self, text: str, scope: Scope, dtype: DType | None = None) -> str:
        if text.isidentifier():
            return text
        name = self.writer.fresh()
        scope(f"const {self.type(dtype or self.dtype)} {name} = {text};")
        return name

    def _update_position(self, value: Value, scope: Scope) -> None:
        kind = place_dtype(self.write)
        at = self.writer.value(index_value(place_expr(self.write), kind), scope)
        acc, acc_at = self.name + self.at, f"{self.name}_at{self.at}"
        v = self.named(self.writer.as_vector(value) if self.is_vector else value.text, scope)
        where = self.named(self.writer.as_vector(at) if self.is_vector else at.text, scope, kind)
        turn = "to_mask" if self.is_vector else ""
        sign, other = (">", "<") if self.write.reduce == "argmax" else ("<", ">")
        better, equal = f"{turn}({v} {sign} {acc})", f"{turn}({v} == {acc})"
        if self.dtype.is_float:  # a NaN is better than all but another one
            better = f"(~{turn}({v} {other}= {acc}) & {turn}({acc} == {acc}))"
            equal = f"({equal} | ({turn}({v} != {v}) & {turn}({acc} != {acc})))"
        if not self.finds_in_order:
            better += f" | ({equal} & {turn}({where} < {acc_at}))"
        if self.writer.tail is not None and not self.writer.column:
            better = f"({better}) & first({self.writer.tail})"
        name = self.writer.fresh("better")
        scope(f"const {'mask' if self.is_vector else 'bool'} {name} = {better};")
        pick = "select({0}, {1}, {2})" if self.is_vector else "({0} ? {1} : {2})"
        scope(f"{acc} = {pick.format(name, v, acc)};")
        scope(f"{acc_at} = {pick.format(name, where, acc_at)};")

    def _leave(self, value: Value, scope: Scope) -> None:
        """The next results of a scan. Each lane takes what is 1, 2, 4, ... lanes before it, and then what is
        before the vector."""
        buffer, lanes = self.write.buffers[0], self.writer.lanes
        along = self.is_vector and not self.writer.column
        text = self.named(self.writer.as_vector(value) if self.is_vector else value.text, scope)
        for step in (1, 2, 4, 8) if along else ():
            if step < lanes:
                places = (lanes if k < step else k - step for k in range(lanes))
                text = self.named(f"{shuffle(text, self.start, places)} + {text}", scope)
        found = self.named(f"{self.name} + {text}", scope)
        scope(f"{self.name} = {shuffle(found, found, [lanes - 1] * lanes) if along else found};")
        dtype = self.writer.buffers[buffer].type.dtype
        result = Value(cast(dtype, self.dtype, found, self.is_vector), dtype, self.is_vector)
        self.writer.store(buffer, self.write.index, result, scope)

    # -- results

    def finish(self, scope: Scope) -> None:
        if self.is_position:
            self.keep(0, self._position(scope), scope)
        elif self.needs_second:
            squares = self.finish_squares(scope, c_expr(product(r.size for r in self.nest.reduce)))
            self.keep(0, Value(self.mean, self.dtype, squares.is_vector, scope.depth), scope)
            self.keep(1, squares, scope)
        elif not self.is_scan:
            self.keep(0, self.total(scope), scope)

    def total(self, scope: Scope) -> Value:
        """The accumulators as one value per outer point."""
        first = self._merged(scope)
        if not self.is_vector or self.writer.column:
            return Value(first, self.dtype, self.is_vector, scope.depth)
        pattern, text = self.better, f"{first}[0]" + (" != 0" if self.dtype is BOOL else "")
        if self.kind in ("max", "min") and self.dtype.is_float:  # a NaN is looked for in all lanes at once
            pattern = pattern.replace("maximum", "larger").replace("minimum", "smaller")
            nan = self.writer.fresh("nan")
            scope(f"const bool {nan} = any_lane(to_mask({first} != {first}));")
            text = f'{nan} ? __builtin_nan("") : {text}'
        self._across(first, pattern, self.dtype, scope)
        return Value(self._scalar(text, self.dtype, scope), self.dtype, False, scope.depth)

    def _across(self, name: str, pattern: str, dtype: DType, scope: Scope) -> None:
        """All lanes of a variable in each of them."""
        self.writer.functions |= ops.functions_of(pattern, (dtype,))
        step = self.writer.lanes // 2
        while step:
            other = self.named(f"turned<{step}>({name})", scope, dtype)
            scope(f"{name} = {pattern.format(other, name)};")
            step //= 2

    def _merged(self, scope: Scope) -> str:
        """All side-by-side accumulators in the first; its text."""
        first = f"{self.name}{self._slots()[0]}"
        step = self.copies // 2
        while step:
            for k in range(step):
                left, right = f"{self.name}[{k}]", f"{self.name}[{k + step}]"
                scope(f"{left} = {self.better.format(left, right)};")
            step //= 2
        if self.cascades:
            scope(f"{first} = {first} + {self.name}_mid + {self.name}_sum;")
        if self.copies > 1:
            merged = self.writer.fresh("acc")
            scope(f"{self.type(self.dtype)} {merged} = {first};")
            return merged
        return first

    def _scalar(self, text: str, dtype: DType, scope: Scope) -> str:
        name = self.writer.fresh()
        scope(f"const {C_TYPE[dtype]} {name} = {text};")
        return name

    def _position(self, scope: Scope) -> Value:
        if not self.is_vector or not self.writer.column:
            text = self.found(self.best(scope)[1])
            return Value(self._scalar(text, I64, scope), I64, False, scope.depth)
        name = self.writer.fresh()
        scope(f"const i64v {name} = convert<i64v>({self.found(f'{self.name}_at')});")
        return Value(name, I64, True, scope.depth)

    def best(self, scope: Scope) -> tuple[str, str]:
        """Of the lanes' extremes the best, and of equal ones the first place."""
        if not self.is_vector:
            return self.name, f"{self.name}_at"
        top, at = self.writer.fresh("top"), self.writer.fresh("at")
        kind, place = self.kind.removeprefix("arg"), place_dtype(self.write)
        better, earlier = combine(kind, self.dtype, True), combine("min", place, True)
        nowhere = self.splat(identity("min", place), place)
        scope(f"{self.type(self.dtype)} {top} = {self.start}; {self.type(place)} {at} = {nowhere};")
        for slot in self._slots():
            scope(f"{top} = {better.format(top, self.name + slot)};")
        self._across(top, better, self.dtype, scope)
        for slot in self._slots():
            v, unequal = f"{self.name}{slot}", " | to_mask({0} != {0})" if self.dtype.is_float else ""
            chosen = f"select(to_mask({v} == {top}){unequal.format(v)}, {self.name}_at{slot}, {nowhere})"
            scope(f"{at} = {earlier.format(at, chosen)};")
        self._across(at, earlier, place, scope)
        return f"{top}[0]", f"{at}[0]"

    def found(self, at: str) -> str:
        """Where nothing was better than what a search starts from, all are equal: the first is meant."""
        kind, nowhere = place_dtype(self.write), identity("min", place_dtype(self.write))
        if self.is_vector and self.writer.column:
            return f"({at} == {nowhere} ? {VECTOR_TYPE[kind]}{{}} : {at})"
        return f"({at} == {nowhere} ? 0 : {at})"

    def pick_best(self, scope: Scope, best: str, value: str, at: str, count: str) -> None:
        sign = ">" if self.write.reduce == "argmax" else "<"
        a, b = value.format("l"), value.format(best)
        better, equal = f"{a} {sign} {b}", f"{a} == {b}"
        if self.dtype.is_float:
            better += f" || ({a} != {a} && {b} == {b})"
            equal += f" || ({a} != {a} && {b} != {b})"
        scope(f"int {best} = 0;")
        scope(f"for (int l = 1; l < {count}; ++l)")
        scope(f"    if ({better} || (({equal}) && {at.format('l')} < {at.format(best)})) {best} = l;")

    def keep(self, which: int, value: Value, scope: Scope) -> None:
        self.writer.keep(self.write.buffers[which], self.write.index, value, scope)

    # -- mean and squared deviations

    def finish_mean(self, scope: Scope, count: str = "") -> None:
        total = self.total(scope)
        number = count or c_expr(product(r.size for r in self.nest.reduce))
        self.mean = self.writer.fresh("mean")
        kind = VECTOR_TYPE[self.dtype] if total.is_vector else C_TYPE[self.dtype]
        scope(f"const {kind} {self.mean} = {total.text} / ({C_TYPE[self.dtype]}){number};")
        self.declare(scope)
        self.apart = Accumulator(self.writer, self.nest, self.write, self.copies)
        self.apart.declare(scope)

    def update_square(self, scope: Scope) -> None:
        value = self.writer.value(self.write.value, scope)
        text = self.writer.as_vector(value) if self.is_vector else value.text
        apart = self.writer.fresh("apart")
        scope(f"const {self.type(self.dtype)} {apart} = {text} - {self.mean};")
        self._add(f"{apart} * {apart}", scope)
        assert self.apart is not None
        self.apart.at = self.at
        self.apart._add(apart, scope)

    def finish_squares(self, scope: Scope, count: str) -> Value:
        """Both as if around the exact mean. What is left below rounding errors is nothing: of equal numbers
        the variance is zero."""
        assert self.apart is not None
        squares, apart = self.total(scope), self.apart.total(scope)
        kind = VECTOR_TYPE[self.dtype] if squares.is_vector else C_TYPE[self.dtype]
        moved, mean, left, found = map(self.writer.fresh, ("moved", "mean", "left", "t"))
        least = "0x1p-17f" if self.dtype.bytes == 4 else "0x1p-46"
        scope(f"const {kind} {moved} = {apart.text} / ({C_TYPE[self.dtype]}){count};")
        scope(f"const {kind} {mean} = {self.mean} + {moved};")
        scope(f"const {kind} {left} = {squares.text} - {apart.text} * {moved};")
        scope(f"const {kind} {found} = {left} <= {squares.text} * {least} ? {kind}{{}} : {left};")
        self.mean = mean
        return Value(found, self.dtype, squares.is_vector, scope.depth)


def place_expr(write: Write) -> Expr:
    """The position that an argmax or argmin would return for the element at hand."""
    assert write.index_scalar is not None
    return write.index_scalar.args[0]  # type: ignore[return-value]


def place_dtype(write: Write) -> DType:
    """What positions are counted in; the largest number stands for no position yet. Narrow positions keep
    vectors of narrow values whole."""
    return I32 if ops.fits_int32(place_expr(write)) and write.value.dtype.bytes <= 4 else I64


# -- what the pieces of a walk that is split among threads leave behind ----------------------------


PIECES: Final = 64
"""Most pieces a walk is split into."""


class Partial(Noun, frozen=False):
    """What the pieces of a split walk leave behind for one reduction."""

    writer: KernelWriter
    item: Accumulator
    name: str = ""

    def declare(self, scope: Scope) -> None:
        self.name = self.writer.fresh("part")
        scope(f"{C_TYPE[self.item.dtype]} {self.name}[{PIECES}];")
        if self.item.is_position:
            scope(f"{C_TYPE[place_dtype(self.item.write)]} {self.name}_at[{PIECES}];")
        if self.item.needs_second:
            scope(f"{C_TYPE[self.item.dtype]} {self.name}_mean[{PIECES}];")
            scope(f"int64_t {self.name}_count[{PIECES}];")

    def leave(self, scope: Scope, count: str) -> None:
        item = self.item
        if item.is_position:
            top, at = item.best(scope)
            scope(f"{self.name}[q] = {top}; {self.name}_at[q] = {at};")
            return
        total = item.finish_squares(scope, f"max_i(1, {count})") if item.needs_second else item.total(scope)
        scope(f"{self.name}[q] = {total.text};")
        if item.needs_second:
            scope(f"{self.name}_mean[q] = {item.mean}; {self.name}_count[q] = {count};")

    def combine(self, scope: Scope) -> None:
        item = self.item
        if item.is_position:
            best = self.writer.fresh("best")
            item.pick_best(scope, best, f"{self.name}[{{}}]", f"{self.name}_at[{{}}]", "pieces")
            self._keep(0, item.found(f"{self.name}_at[{best}]"), I64, scope)
        elif item.needs_second:
            self._combine_squares(scope)
        else:
            total = self.writer.fresh()
            pattern = combine(item.kind, item.dtype, False)
            self.writer.functions |= ops.functions_of(pattern, (item.dtype,))
            kind = C_TYPE[item.dtype]
            scope(f"{kind} {total} = {self.name}[0];")
            step = f"const {kind} v = {self.name}[q]; {total} = {pattern.format(total, 'v')};"
            scope(f"for (int64_t q = 1; q < pieces; ++q) {{ {step} }}")
            self._keep(0, total, item.dtype, scope)

    def _combine_squares(self, scope: Scope) -> None:
        """Means and squared deviations of pieces, weighted by their lengths."""
        kind, n = C_TYPE[self.item.dtype], self.name
        scope(f"{kind} {n}_m = {n}_mean[0], {n}_s = {n}[0]; int64_t {n}_n = {n}_count[0];")
        scope("for (int64_t q = 1; q < pieces; ++q) {")
        scope(f"    const int64_t all = {n}_n + {n}_count[q]; if (!{n}_count[q]) continue;")
        scope(f"    const {kind} apart = {n}_mean[q] - {n}_m, share = ({kind}){n}_count[q] / ({kind})all;")
        scope(f"    {n}_s += {n}[q] + apart * apart * share * ({kind}){n}_n;")
        scope(f"    {n}_m += apart * share; {n}_n = all;\n}}")
        self._keep(0, f"{n}_m", self.item.dtype, scope)
        self._keep(1, f"{n}_s", self.item.dtype, scope)

    def _keep(self, which: int, text: str, dtype: DType, scope: Scope) -> None:
        self.item.keep(which, Value(text, dtype, False, scope.depth), scope)
