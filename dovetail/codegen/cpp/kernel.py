"""One Group as one C++ function.

    Group -> Kernel

    // softmax: for i < 8 | r0 < 64
    extern "C" void kernel(const float* x, float* o) {
        for (int64_t i = 0; i < 8; ++i) {
            f32v m_acc = splat<f32v>(-inf);
            for (int64_t r0 = 0; r0 < 64; r0 += 16) { const f32v t0 = load(x + (64*i + r0)); m_acc = ...; }
            const float m = fold(m_acc);
            ...

Rows of few and long reductions are split among threads; otherwise threads share the outer loops.
"""
from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from dovetail.codegen.analysis import Pass, Shape, analyse, group_exprs, roots_of, work
from dovetail.codegen.cpp.exprs import c_expr, fits_int32
from dovetail.codegen.cpp.ops import C_TYPE, VECTOR_TYPE, combine, functions_of, identity
from dovetail.codegen.cpp.prelude import emit_prelude
from dovetail.codegen.cpp.values import KernelWriter, Scope, Value, innermost
from dovetail.ir.expr import ONE, Expr, add, ceildiv, const, minimum, mul, product, symbols
from dovetail.ir.loop import Buffer, Nest, Range, Scalar, Write, index_value, iter_scalars
from dovetail.ir.schedule import Group
from dovetail.ir.types import BOOL, I64, DType

PARALLEL_WORK: Final = 32768
"""Weighted elements below which one thread is faster, as in eager."""
CASCADE: Final = 256
"""Additions into one accumulator before it is flushed into the next."""
CHUNK: Final = 4096
"""Elements of one piece when a long contiguous loop is shared among threads."""
FEW: Final = 16


@dataclass(frozen=True, slots=True)
class CppKernel:
    """`text` has the user's names; `key` is the same text with positions for names. `params` are the
    buffers, then the size symbols, then run-time numbers, in the order of the C++ parameters."""

    text: str
    key: str
    symbol: str
    params: tuple[str, ...]
    sizes: tuple[Expr, ...]
    numbers: tuple[str, ...]
    may_fail: bool
    prelude: tuple[str, ...]


def emit_kernel(group: Group, buffers: dict[str, Buffer], vector_bytes: int) -> CppKernel:
    shape = analyse(group, buffers)
    numbers = tuple(
        dict.fromkeys(str(n.args[0]) for n in _all_scalars(group) if n.op == "input")
    )
    is_serial = any(w.index_scalar is not None or w.mode != "set" for n in group.nests for w in n.writes if not w.reduce)
    widest = _widest(group, shape) if vector_bytes else 8
    lanes = max(vector_bytes // widest, 1)
    writer = KernelWriter(group, shape, buffers, lanes, widest)
    writer.column = shape.contiguous in group.ranges[: group.outer] and lanes > 1
    body = Body(writer, group, shape, is_serial).emit()
    params = [f"{'' if a.is_written else 'const '}{C_TYPE[a.buffer.type.dtype]}* {writer.name(a.buffer.name)}" for a in shape.args]
    params += [f"int64_t {s.name}" for s in shape.symbols]
    params += [f"double {name}" for name in numbers]
    params += ["int32_t* bad"] if writer.may_fail else []
    head = f'extern "C" void \x01\x02({", ".join(params)}) {{'
    lines = [f"namespace v{lanes} {{", head, *("    " + x if not x.startswith("#") else x for x in body), "}", "}"]
    tokens = "\n".join(lines) + "\n"
    key, names = _canonical(tokens)
    symbol = f"{re.sub(r'[^A-Za-z0-9_]', '_', group.name)[:60]}_{key}"
    return CppKernel(
        _comment(group, shape) + _named(tokens, names, symbol, {r.var.name for r in group.ranges} | {s.name for s in shape.symbols}),
        key,
        symbol,
        tuple(a.buffer.name for a in shape.args),
        shape.symbols,
        numbers,
        writer.may_fail,
        emit_prelude(lanes, widest, writer.functions),
    )


def _all_scalars(group: Group) -> Iterable[Scalar]:
    return iter_scalars(*(root for n in group.nests for w in n.writes for root in roots_of(w)))


def _widest(group: Group, shape: Shape) -> int:
    """Bytes of the widest element computed in vectors."""
    widest = 4
    for node in _all_scalars(group):
        widest = max(widest, node.dtype.bytes)
        if node.op == "index" and shape.contiguous and shape.contiguous.var in symbols(node.args[0]):  # type: ignore[arg-type]
            widest = max(widest, 4 if fits_int32(node.args[0]) else 8)  # type: ignore[arg-type]
    if any(w.reduce in ("argmax", "argmin") for n in group.nests for w in n.writes):
        widest = 8
    return widest


# -- names -----------------------------------------------------------------------------------------

_TOKEN: Final = re.compile("\x01([^\x02]*)\x02")


def _canonical(tokens: str) -> tuple[str, list[str]]:
    """The key, and the buffer names in order of appearance."""
    seen: dict[str, int] = {}
    plain = _TOKEN.sub(lambda m: f"b{seen.setdefault(m[1], len(seen))}", tokens)
    return hashlib.sha256(plain.encode()).hexdigest()[:16], list(seen)


def _named(tokens: str, names: list[str], kernel: str, loops: set[str]) -> str:
    chosen: dict[str, str] = {}
    taken = set(_RESERVED) | loops
    for name in names:
        if name == "":
            chosen[name] = kernel
            continue
        stem = re.sub(r"\W", "_", name)
        if stem[0].isdigit() or stem in taken or re.fullmatch(r"(t|g|acc|mean|best|both|better|apart)\d+|p|l|from|to", stem):
            stem = f"{stem}_v" if f"{stem}_v" not in taken else f"{stem}_v{len(taken)}"
        taken.add(stem)
        chosen[name] = stem
    return _TOKEN.sub(lambda m: chosen[m[1]], tokens)


_RESERVED: Final = frozenset(
    "load store select mask first splat convert iota any_lane bad full left auto double float int long short char "
    "bool void for if else do while return const static union struct class new delete this template typename "
    "and or not xor exp log sqrt tan cos floor fabs erf fmod lgamma f16 bf16 default case switch break continue "
    "operator public private enum goto signed unsigned namespace using true false inline register volatile part".split()
)


def _comment(group: Group, shape: Shape) -> str:
    lines = [f"// {line}" for line in str(group).splitlines()]
    lines += [f"//   {a.buffer}" for a in shape.args]
    return "\n".join(lines) + "\n"


# -- loops -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Body:
    writer: KernelWriter
    group: Group
    shape: Shape
    is_serial: bool

    def emit(self) -> list[str]:
        root = Scope(0, None)
        outer = self.group.ranges[: self.group.outer]
        vector = self.shape.contiguous if self.writer.column else None
        loops = tuple(r for r in outer if r is not vector)
        merged = self._parallel_loop(loops, vector, root)
        if merged is None:
            self._inside(vector, (const(0), vector.size) if vector else None, root)
        return root.lines

    def _parallel_loop(self, loops: tuple[Range, ...], vector: Range | None, root: Scope) -> bool | None:
        """One loop over all outer points that threads share; None if there is nothing to share."""
        count = product(r.size for r in loops)
        chunks = None
        if vector is not None and (not count.is_const or count.value < FEW):
            if not vector.size.is_const or vector.size.value > CHUNK:
                chunks = ceildiv(vector.size, CHUNK)
        if not loops and chunks is None:
            return None
        scope = Scope(1, root)
        total = count if chunks is None else mul(count, chunks)
        position = self._unpack(loops, chunks, scope)
        bounds = None
        if vector is not None:
            bounds = (const(0), vector.size)
            if chunks is not None:
                scope(f"const int64_t from = {position} * {CHUNK}, to = min_i(from + {CHUNK}, {c_expr(vector.size)});")
        if chunks is not None and vector is not None:
            self._inside_text(vector, "from", "to", scope, _divides(vector.size, self.writer.lanes))
        else:
            self._inside(vector, bounds, scope)
        pragma = self._pragma(total)
        if pragma:
            root(pragma)
        single = len(loops) == 1 and chunks is None
        name = loops[0].var.name if single else "p"
        root.block(f"for (int64_t {name} = 0; {name} < {c_expr(total)}; ++{name}) {{", scope)
        return True

    def _unpack(self, loops: tuple[Range, ...], chunks: Expr | None, scope: Scope) -> str:
        """Declare the loop variables from the position p; returns the text of the chunk's number."""
        for item in loops:
            self.writer.depths[item.var] = scope.depth
        if len(loops) == 1 and chunks is None:
            return ""
        rest = "p"
        position = ""
        if chunks is not None:
            position = "p" if not loops else f"(p % {c_expr(chunks)})"
            rest = f"(p / {c_expr(chunks)})"
        for k in range(len(loops) - 1, -1, -1):
            size = c_expr(loops[k].size)
            value = rest if k == 0 else f"{rest} % {size}"
            scope(f"const int64_t {loops[k].var.name} = {value};")
            rest = f"({rest} / {size})"
        return position

    def _pragma(self, total: Expr) -> str:
        amount = work(self.group)
        if self.is_serial or (amount.is_const and amount.value < PARALLEL_WORK) or total is ONE:
            return ""
        condition = "" if amount.is_const else f" if ({c_expr(amount)} >= {PARALLEL_WORK})"
        return f"#pragma omp parallel for schedule(static){condition}"

    def _inside(self, vector: Range | None, bounds: tuple[Expr, Expr] | None, scope: Scope) -> None:
        if vector is None or bounds is None:
            self.row(scope)
        else:
            self._inside_text(vector, "0", c_expr(bounds[1]), scope, _divides(vector.size, self.writer.lanes), vector.size)

    def _inside_text(
        self, vector: Range, start: str, stop: str, scope: Scope, exact: bool, size: Expr | None = None
    ) -> None:
        self.vector_loop(vector, start, stop, scope, exact, size, self.row)

    def vector_loop(
        self, item: Range, start: str, stop: str, scope: Scope, exact: bool, size: Expr | None, body: Callable[[Scope], None]
    ) -> None:
        """Full vectors, then what is left over."""
        name, lanes = item.var.name, self.writer.lanes
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
            count = c_expr(mul(inner, writer.lanes) if writer.column else mul(ceildiv(inner, writer.lanes), writer.lanes))
            kind = C_TYPE[writer.buffers[buffer].type.dtype]
            scope(f"alignas(64) {kind} {writer.name(buffer)}[{count}];")
        for step in self.shape.passes:
            for nest in step.rows:
                writer.row(nest, scope)
            if not self.group.inner:
                for nest in step.points:
                    self._outer_only(nest, scope)
            elif step.points:
                self.walk(step, scope)

    def _outer_only(self, nest: Nest, scope: Scope) -> None:
        """No inner loops: a reduction over nothing is its own value."""
        self.writer.point(nest, scope)

    def walk(self, step: Pass, scope: Scope) -> None:
        """One pass over the inner points."""
        accumulators = {
            write: Accumulator(self.writer, nest, write)
            for nest in step.points
            for write in nest.writes
            if write.reduce
        }
        for item in accumulators.values():
            item.declare(scope)

        def body(inside: Scope) -> None:
            for nest in step.points:
                if not nest.reduce:
                    self.writer.point(nest, inside)
                for write in nest.writes:
                    if write.reduce:
                        accumulators[write].update(inside)

        self.inner_loops(scope, body)
        second = [item for item in accumulators.values() if item.needs_second]
        if second:
            self._second_walk(step, second, scope)
        for item in accumulators.values():
            item.finish(scope)

    def _second_walk(self, step: Pass, items: list[Accumulator], scope: Scope) -> None:
        """Squared deviations from the mean, now that it is known."""
        for item in items:
            item.finish_mean(scope)
        self.writer.recompute = {
            w.buffers[0]: w.value
            for n in step.points
            if not n.reduce
            for w in n.writes
            if w.buffers[0] in self.group.internal and w.buffers[0] not in self.shape.kept_rows
        }

        def body(inside: Scope) -> None:
            for item in items:
                item.update_square(inside)

        self.inner_loops(scope, body)
        self.writer.recompute = {}

    def inner_loops(self, scope: Scope, body: Callable[[Scope], None]) -> None:
        vector = self.shape.contiguous
        self._nested(innermost(self.group.inner, vector.var if vector else None), scope, body)

    def _nested(self, loops: tuple[Range, ...], scope: Scope, body: Callable[[Scope], None]) -> None:
        if not loops:
            body(scope)
            return
        item, rest = loops[0], loops[1:]
        if item is self.shape.contiguous and self.writer.lanes > 1:
            exact = _divides(item.size, self.writer.lanes)
            self.vector_loop(item, "0", c_expr(item.size), scope, exact, item.size, body)
            return
        inside = Scope(scope.depth + 1, scope)
        self.writer.depths[item.var] = inside.depth
        self._nested(rest, inside, body)
        name = item.var.name
        scope.block(f"for (int64_t {name} = 0; {name} < {c_expr(item.size)}; ++{name}) {{", inside)


def _divides(size: Expr, lanes: int) -> bool:
    return size.is_const and size.value % lanes == 0


# -- reductions ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Accumulator:
    """The running result of one reduction over the inner loops."""

    writer: KernelWriter
    nest: Nest
    write: Write
    name: str = ""
    mean: str = ""

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
    def needs_second(self) -> bool:
        return self.write.reduce == "welford"

    @property
    def kind(self) -> str:
        return "sum" if self.needs_second else str(self.write.reduce)

    @property
    def cascades(self) -> bool:
        """Long float sums go through a second accumulator, so that rounding errors stay small."""
        count = product(r.size for r in self.nest.reduce)
        return self.kind == "sum" and self.dtype.is_float and not (count.is_const and count.value <= 8192)

    def type(self, dtype: DType) -> str:
        return VECTOR_TYPE[dtype] if self.is_vector else C_TYPE[dtype]

    def splat(self, text: str, dtype: DType) -> str:
        return self.writer.as_vector(Value(text, dtype, False)) if self.is_vector else text

    def declare(self, scope: Scope) -> None:
        self.name = self.writer.fresh("acc")
        start = self.splat(identity(self.kind, self.dtype), self.dtype)
        scope(f"{self.type(self.dtype)} {self.name} = {start};")
        if self.is_position:
            scope(f"{self.type(I64)} {self.name}_at = {self.splat('-1l', I64)};")
        if self.cascades:
            scope(f"{self.type(self.dtype)} {self.name}_sum = {start};")
            scope(f"int32_t {self.name}_count = 0;")

    def update(self, scope: Scope) -> None:
        value = self.writer.value(self.write.value, scope)
        if self.is_position:
            self._update_position(value, scope)
            return
        text = self.writer.as_vector(value) if self.is_vector else value.text
        self._add(self.name, self._kept(text), scope)
        if self.cascades:
            zero = self.splat(identity("sum", self.dtype), self.dtype)
            scope(f"if (++{self.name}_count == {CASCADE}) {{ {self.name}_sum += {self.name}; {self.name} = {zero}; {self.name}_count = 0; }}")

    def _kept(self, text: str) -> str:
        """Lanes beyond the end contribute nothing, where lanes are points of this reduction."""
        if self.writer.tail is None or self.writer.column:
            return text
        nothing = self.splat(identity(self.kind, self.dtype), self.dtype)
        return f"select(first({self.writer.tail}), {text}, {nothing})"

    def _add(self, target: str, text: str, scope: Scope) -> None:
        pattern = combine(self.kind, self.dtype, self.is_vector)
        self.writer.functions |= functions_of(pattern, (self.dtype,))
        if not text.isidentifier():
            name = self.writer.fresh()
            scope(f"const {self.type(self.dtype)} {name} = {text};")
            text = name
        scope(f"{target} = {pattern.format(target, text)};")

    def _update_position(self, value: Value, scope: Scope) -> None:
        assert self.write.index_scalar is not None
        at = self.writer.value(self.write.index_scalar, scope)
        sign = ">" if self.write.reduce == "argmax" else "<"
        v = self.writer.as_vector(value) if self.is_vector else value.text
        where = self.writer.as_vector(at) if self.is_vector else at.text
        nan = f" | (({v} != {v}) & ({self.name} == {self.name}))" if self.dtype.is_float else ""
        better = f"(({v} {sign} {self.name}){nan} | ({self.name}_at < 0))"
        if self.is_vector and self.dtype.bytes != 8:
            better = f"to_mask({v} {sign} {self.name})"
            if self.dtype.is_float:
                better += f" | (to_mask({v} != {v}) & to_mask({self.name} == {self.name}))"
            better = f"(({better}) | to_mask({self.name}_at < 0))"
        name = self.writer.fresh("better")
        kept = better
        if self.writer.tail is not None and not self.writer.column:
            kept = f"{better} & first({self.writer.tail})"
        if self.is_vector:
            scope(f"const mask {name} = {kept};")
            scope(f"{self.name} = select({name}, {v}, {self.name});")
            scope(f"{self.name}_at = select({name}, {where}, {self.name}_at);")
        else:
            scope(f"const bool {name} = {kept};")
            scope(f"{self.name} = {name} ? {v} : {self.name};")
            scope(f"{self.name}_at = {name} ? {where} : {self.name}_at;")

    # -- results

    def _total(self, scope: Scope) -> Value:
        """The accumulators as one value per outer point."""
        if self.cascades:
            scope(f"{self.name} += {self.name}_sum;")
        if not self.is_vector or self.writer.column:
            return Value(self.name, self.dtype, self.is_vector, scope.depth)
        self._fold(scope)
        return Value(self._declared(f"{self.name}[0]" + (" != 0" if self.dtype is BOOL else ""), scope), self.dtype, False, scope.depth)

    def _declared(self, text: str, scope: Scope, dtype: DType | None = None) -> str:
        name = self.writer.fresh()
        scope(f"const {C_TYPE[dtype or self.dtype]} {name} = {text};")
        return name

    def _fold(self, scope: Scope) -> None:
        """Combine the lanes in halves."""
        pattern = combine(self.kind, self.dtype, True)
        step = self.writer.lanes // 2
        while step:
            other = self.writer.fresh()
            scope(f"const {self.type(self.dtype)} {other} = turned<{step}>({self.name});")
            scope(f"{self.name} = {pattern.format(self.name, other)};")
            step //= 2

    def finish(self, scope: Scope) -> None:
        if self.is_position:
            self._keep(0, self._position(scope), scope)
            return
        if self.needs_second:
            self._keep(1, self._total(scope), scope)
            return
        self._keep(0, self._total(scope), scope)

    def _position(self, scope: Scope) -> Value:
        if not self.is_vector:
            return Value(f"{self.name}_at", I64, False, scope.depth)
        if self.writer.column:
            return Value(f"{self.name}_at", I64, True, scope.depth)
        best = self.writer.fresh("best")
        sign = ">" if self.write.reduce == "argmax" else "<"
        scope(f"int {best} = 0;")
        nan = ""
        if self.dtype.is_float:
            nan = f" || ({self.name}[l] != {self.name}[l] && {self.name}[{best}] == {self.name}[{best}])"
        both = f"{self.name}[l] == {self.name}[{best}]"
        if self.dtype.is_float:
            both += f" || ({self.name}[l] != {self.name}[l] && {self.name}[{best}] != {self.name}[{best}])"
        scope(
            f"for (int l = 1; l < {self.writer.lanes}; ++l)\n"
            f"    if ({self.name}_at[l] >= 0 && ({self.name}_at[{best}] < 0 || {self.name}[l] {sign} {self.name}[{best}]{nan}\n"
            f"            || (({both}) && {self.name}_at[l] < {self.name}_at[{best}]))) {best} = l;"
        )
        return Value(self._declared(f"{self.name}_at[{best}]", scope, I64), I64, False, scope.depth)

    def _keep(self, which: int, value: Value, scope: Scope) -> None:
        self.writer.keep(self.write.buffers[which], self.write.index, value, scope)

    def finish_mean(self, scope: Scope) -> None:
        total = self._total(scope)
        count = c_expr(product(r.size for r in self.nest.reduce))
        self.mean = self.writer.fresh("mean")
        kind = VECTOR_TYPE[self.dtype] if total.is_vector else C_TYPE[self.dtype]
        scope(f"const {kind} {self.mean} = {total.text} / ({C_TYPE[self.dtype]}){count};")
        value = Value(self.mean, self.dtype, total.is_vector, scope.depth)
        self._keep(0, value, scope)
        self.declare(scope)

    def update_square(self, scope: Scope) -> None:
        value = self.writer.value(self.write.value, scope)
        text = self.writer.as_vector(value) if self.is_vector else value.text
        apart = self.writer.fresh("apart")
        scope(f"const {self.type(self.dtype)} {apart} = {text} - {self.mean};")
        self._add(self.name, self._kept(f"{apart} * {apart}"), scope)
        if self.cascades:
            zero = self.splat(identity("sum", self.dtype), self.dtype)
            scope(f"if (++{self.name}_count == {CASCADE}) {{ {self.name}_sum += {self.name}; {self.name} = {zero}; {self.name}_count = 0; }}")
