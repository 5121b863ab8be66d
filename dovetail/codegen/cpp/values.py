"""Values and memory inside one kernel: Scalar -> C++ statements in the right scope.

    load x[64*i + r0]     const f32v t1 = load(x + (64*i + r0));        in the loop over r0
    sqrt(s[i])            const float t2 = sqrt_(s);                    in the loop over i

The loop that is contiguous in memory becomes vectors. When it is an inner loop, reductions along it
fold their lanes at the end of each row; when it is an outer loop (a reduction over columns, or plain
pointwise work), each lane is an outer point of its own. A value is computed in the outermost loop in
which everything it needs is known.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dovetail.codegen.analysis import Shape, step_of, token
from dovetail.codegen.cpp import ops
from dovetail.codegen.cpp.ops import c_expr, cast, fits_int32, vector_expr
from dovetail.ir.expr import ONE, ZERO, Expr, add, linear_in, row_major, symbols
from dovetail.ir.loop import Buffer, Nest, Range, Scalar
from dovetail.ir.schedule import Group
from dovetail.ir.types import BF16, BOOL, F16, DType
from dovetail.util.noun import Noun, field, replace

EACH_LANE: Final = '_Pragma("GCC unroll 16")'
"""Before a loop over the lanes of a vector: element numbers become constants."""
LONG: Final = 100


class Value(Noun):
    text: str
    dtype: DType
    is_vector: bool
    depth: int = 0


def indented(line: str) -> str:
    """One level deeper; what is for the preprocessor stays at the margin."""
    return line if line.startswith("#") else f"    {line}"


class Scope(Noun, frozen=False):
    """The body of one loop: statements so far and values known."""

    depth: int
    parent: Scope | None
    lines: list[str] = field(default_factory=list)
    known: dict[Scalar, Value] = field(default_factory=dict)
    buffers: dict[str, Value] = field(default_factory=dict)
    """Results computed in this scope, by buffer."""
    halves: dict[str, tuple[Expr, str, str]] = field(default_factory=dict)
    """Stores to every second element, by buffer: where they begin, the vector and the statement."""

    def __call__(self, text: str) -> None:
        self.lines += text.split("\n")

    def chain(self) -> list[Scope]:
        found: list[Scope] = []
        scope: Scope | None = self
        while scope is not None:
            found.append(scope)
            scope = scope.parent
        return found

    def block(self, head: str, body: Scope) -> None:
        self.lines += [head, *map(indented, body.lines), "}"]


class KernelWriter(Noun, frozen=False):
    group: Group
    shape: Shape
    buffers: dict[str, Buffer]
    lanes: int
    widest: int
    functions: set[str] = field(default_factory=set)
    temps: int = 0
    tail: str | None = None
    """Number of lanes in use, when not all are."""
    may_fail: bool = False
    column: bool = False
    """The vector loop is an outer one."""
    mask: Value | None = None
    depths: dict[Expr, int] = field(default_factory=dict)
    """Loop variable -> depth of the scope it is known in."""
    tiles: dict[tuple[str, Expr], str] = field(default_factory=dict)
    """Loads across the vectors: (buffer, index) -> text of the vector in a transposed tile."""
    is_single: bool = False
    """Compute for the first lane only: the address of a whole vector."""
    streamed: frozenset[str] = frozenset()
    """Buffers written past the caches."""
    recompute: dict[str, Scalar] = field(default_factory=dict)
    """Buffers of the pass at hand that a second walk computes again."""

    # -- names

    def fresh(self, stem: str = "t") -> str:
        self.temps += 1
        return f"{stem}{self.temps}"

    @property
    def vector_var(self) -> Expr | None:
        if self.lanes == 1 or self.is_single or self.shape.contiguous is None:
            return None
        return self.shape.contiguous.var

    # -- values

    def value(self, node: Scalar, scope: Scope) -> Value:
        """Text for a scalar, computed as far out as possible."""
        chain = scope.chain()
        for at in chain:
            if node in at.known and not (self.is_single and at.known[node].is_vector):
                return at.known[node]
        if node.op == "load_at" and self._is_whole_vector(node):
            return self._load_vector_at(node, scope)
        args = [self.value(x, scope) for x in node.operands] if node.op != "masked" else []
        home = self._home(node, args, chain)
        made = self._make(node, args, home)
        if node.op not in ("const", "input") and not made.text.isidentifier():
            name = self.fresh()
            kind = ops.VECTOR_TYPE[made.dtype] if made.is_vector else ops.C_TYPE[made.dtype]
            home(f"const {kind} {name} = {made.text};")
            made = replace(made, text=name, depth=home.depth)
        home.known[node] = made
        return made

    def _home(self, node: Scalar, args: list[Value], chain: list[Scope]) -> Scope:
        """The outermost scope where the node's variables and operands exist."""
        if self.mask is not None or self.is_single or node.op == "masked":
            return chain[0]
        if node.op in ("load", "load_at") and self._written(node.args[0]):
            return chain[0]
        needed = max((a.depth for a in args), default=0)
        for expr in node.args:
            if isinstance(expr, Expr):
                needed = max(needed, *(self.depths.get(s, 0) for s in symbols(expr)), 0)
        return next(at for at in reversed(chain) if at.depth >= needed)

    def _written(self, buffer: object) -> bool:
        return any(buffer in w.buffers for nest in self.group.nests for w in nest.writes)

    def _make(self, node: Scalar, args: list[Value], scope: Scope) -> Value:
        if node.op in _SPECIAL:
            return _SPECIAL[node.op](self, node, args, scope)
        is_vector = any(a.is_vector for a in args)
        table = ops.CPP_VEC if is_vector else ops.CPP
        text = ops.template(table, node.op, node.dtype, tuple(a.dtype for a in args))
        self.functions |= ops.functions_of(text, tuple(a.dtype for a in args))
        if "abs_(" in text:
            self.functions.add("abs")
        shown = [self.as_vector(a) if is_vector else a.text for a in args]
        self.may_fail |= node.op == "check_index"
        text = text.format(*shown, lanes=self.tail or self.lanes)
        if not is_vector and node.dtype.is_integer:
            text = f"({ops.C_TYPE[node.dtype]}){text}"
        return Value(text, node.dtype, is_vector)

    def as_vector(self, value: Value) -> str:
        if value.is_vector:
            return value.text
        if value.dtype is BOOL:
            return f"({value.text} ? ~mask{{}} : mask{{}})"
        if value.dtype in (BF16, F16):
            return f"{ops.VECTOR_TYPE[value.dtype]}{{splat<u16v>({value.text}.bits)}}"
        return f"splat<{ops.VECTOR_TYPE[value.dtype]}>(({ops.C_TYPE[value.dtype]}){value.text})"

    # -- memory

    def load(self, node: Scalar, args: list[Value], scope: Scope) -> Value:
        buffer, index = node.args
        for at in scope.chain():
            if buffer in at.buffers:
                return at.buffers[buffer]  # type: ignore[index]
        if buffer in self.recompute:
            return self.value(self.recompute[buffer], scope)  # type: ignore[index]
        if buffer in self.shape.kept_rows:
            return self._load_kept(str(buffer), node.dtype)
        return self._load_memory(str(buffer), index, node.dtype, scope)  # type: ignore[arg-type]

    def _load_kept(self, buffer: str, dtype: DType) -> Value:
        if self.vector_var is None:
            return Value(f"*({self._kept_place(buffer)})", dtype, False)
        return Value(f"load({self._kept_place(buffer)})", dtype, True)

    def _kept_place(self, buffer: str) -> str:
        """Where in the row that a pass leaves in a local array for later ones."""
        order = innermost(self.group.inner, self.vector_var)
        at = c_expr(row_major([item.var for item in order], [item.size for item in order]))
        return f"{token(buffer)} + {f'{self.lanes}*' if self.column else ''}{at}"

    def _load_memory(self, buffer: str, index: Expr, dtype: DType, scope: Scope) -> Value:
        pointer = token(buffer)
        var = self.vector_var
        if (buffer, index) in self.tiles and self.mask is None:
            return Value(self.tiles[buffer, index], dtype, True)
        parts = (ZERO, index) if var is None else linear_in(index, var)
        if parts is not None and parts[0] is ZERO:
            return self._load_one(f"{pointer}[{c_expr(index)}]", dtype)
        call = self._vector_call(parts[0], dtype) if parts is not None else None
        if call is not None and (self.mask is None or not self.mask.is_vector):
            count = f", {self.tail}" if self.tail else ""
            text = f"{call}({pointer} + {c_expr(index)}{count})"
            if self.mask is not None:
                text = f"({self.mask.text} ? {text} : {ops.VECTOR_TYPE[dtype]}{{}})"
            return Value(text, dtype, True)
        assert var is not None
        return self._load_lanes(f"{pointer}[{c_expr(index, {var: f'({var.name} + l)'})}]", dtype, scope)

    def _vector_call(self, step: Expr, dtype: DType) -> str | None:
        """The function that loads lanes so many elements apart at once."""
        if step is ONE:
            return "load"
        if step.is_const and step.value == 2 and dtype is not BOOL and self.tail is None:
            return "load_second"
        return None

    def _load_lanes(self, element: str, dtype: DType, scope: Scope) -> Value:
        """Lane by lane: strided, gathered or masked."""
        name = self.fresh("g")
        scope(f"{ops.VECTOR_TYPE[dtype]} {name} = {{}};")
        guard = ""
        if self.mask is not None:
            guard = f"if ({self.mask.text}[l]) " if self.mask.is_vector else f"if ({self.mask.text}) "
        target, element = _lane_text(name, element, dtype)
        scope(f"{self._each_lane()} {guard}{target} = {element};")
        return Value(name, dtype, True, scope.depth)

    def _load_one(self, text: str, dtype: DType) -> Value:
        """The same element for all lanes."""
        if self.mask is not None:
            condition = f"any_lane({self.mask.text})" if self.mask.is_vector else self.mask.text
            text = f"({condition} ? {text} : {ops.C_TYPE[dtype]}{{}})"
        return Value(text, dtype, False)

    def load_at(self, node: Scalar, args: list[Value], scope: Scope) -> Value:
        buffer, position = token(str(node.args[0])), args[0]
        if not position.is_vector:
            return self._load_one(f"{buffer}[{position.text}]", node.dtype)
        return self._load_lanes(f"{buffer}[{position.text}[l]]", node.dtype, scope)

    def _is_whole_vector(self, node: Scalar) -> bool:
        """The lanes' positions follow one another."""
        var = self.vector_var
        return var is not None and self.mask is None and step_of(node.operands[0], var) == 1

    def _load_vector_at(self, node: Scalar, scope: Scope) -> Value:
        """One load from where the first lane points."""
        inside = Scope(scope.depth, scope)
        self.is_single = True
        first = self.value(node.args[1], inside)  # type: ignore[arg-type]
        self.is_single = False
        scope.lines += inside.lines
        name = self.fresh()
        count = f", {self.tail}" if self.tail else ""
        place = f"{token(str(node.args[0]))} + {first.text}"
        scope(f"const {ops.VECTOR_TYPE[node.dtype]} {name} = load({place}{count});")
        made = Value(name, node.dtype, True, scope.depth)
        scope.known[node] = made
        return made

    def store(self, buffer: str, index: Expr, value: Value, scope: Scope) -> None:
        pointer = token(buffer)
        var = self.vector_var
        is_single = var is None or not value.is_vector and self.depths.get(var, 99) > scope.depth
        parts = (ZERO, index) if is_single else linear_in(index, var)  # type: ignore[arg-type]
        if parts is not None and parts[0] is ZERO:
            lane = "[0]" if value.is_vector else ""
            scope(f"{pointer}[{c_expr(index)}] = {value.text}{lane};")
        elif parts is not None and parts[0] is ONE:
            call = "stream" if self._streams(buffer) else "store"
            count = f", {self.tail}" if self.tail else ""
            scope(f"{call}({pointer} + {c_expr(index)}, {self.as_vector(value)}{count});")
        else:
            assert var is not None
            place = f"{pointer}[{c_expr(index, {var: f'({var.name} + l)'})}]"
            is_half = parts is not None and parts[0].is_const and parts[0].value == 2
            if not (is_half and self.tail is None and value.dtype is not BOOL):
                self._store_lanes(place, value, scope)
                return
            text, (start, other, statement) = self.as_vector(value), scope.halves.pop(buffer, (ZERO, "", ""))
            if statement and add(start, ONE) is index:  # the elements between
                scope.lines.remove(statement)
                scope(f"store_both({pointer} + {c_expr(start)}, {other}, {text});")
                return
            self._store_lanes(place, value, scope)
            scope.halves[buffer] = index, text, scope.lines[-1]

    def _streams(self, buffer: str) -> bool:
        """Whole lines, or halves that follow each other; a tile's halves do not."""
        size = self.lanes * self.buffers[buffer].type.dtype.bytes
        if buffer not in self.streamed or self.tail is not None or size not in (64, 0 if self.tiles else 32):
            return False
        self.functions.add("stream")
        return True

    def _store_lanes(self, place: str, value: Value, scope: Scope) -> None:
        element = value.text
        if value.is_vector:
            element = {BOOL: f"{value.text}[l] != 0"}.get(value.dtype, f"{value.text}[l]")
            if value.dtype in (BF16, F16):
                element = f"{ops.C_TYPE[value.dtype]}{{{value.text}.bits[l]}}"
        scope(f"{self._each_lane()} {place} = {element};")

    def _each_lane(self) -> str:
        """The loop. Where the number of lanes is not known g++ takes seconds to unroll several."""
        unrolled = "" if self.tail == "left" and self.temps > LONG else f"{EACH_LANE} "
        return f"{unrolled}for (int l = 0; l < {self.tail or self.lanes}; ++l)"

    # -- special nodes

    def index(self, node: Scalar, args: list[Value], scope: Scope) -> Value:
        expr: Expr = node.args[0]  # type: ignore[assignment]
        var = self.vector_var
        if var is None or var not in symbols(expr):
            return Value(f"({ops.C_TYPE[node.dtype]}){c_expr(expr)}", node.dtype, False)
        kind = "i32v" if fits_int32(expr) else "i64v"
        text = vector_expr(expr, var, kind)
        if node.dtype is BOOL:
            return Value(text, BOOL, True)
        return Value(f"convert<{ops.VECTOR_TYPE[node.dtype]}>({text})", node.dtype, True)

    def cast(self, node: Scalar, args: list[Value], scope: Scope) -> Value:
        source, convert = args[0], cast if node.op == "cast" else ops.bitcast
        text = convert(node.dtype, source.dtype, source.text, source.is_vector)
        return Value(text, node.dtype, source.is_vector)

    def masked(self, node: Scalar, args: list[Value], scope: Scope) -> Value:
        condition, wanted, other = node.args
        test, fallback = self.value(condition, scope), self.value(other, scope)  # type: ignore[arg-type]
        outer = self.mask
        if outer is not None:
            test = self._both(outer, test, scope)
        self.mask = test
        inside = Scope(scope.depth, scope)
        got = self.value(wanted, inside)  # type: ignore[arg-type]
        self.mask = outer
        scope.lines += inside.lines
        if test.is_vector:
            text = f"select({self.as_vector(test)}, {self.as_vector(got)}, {self.as_vector(fallback)})"
            return Value(text, node.dtype, True)
        if got.is_vector or fallback.is_vector:
            text = f"({test.text} ? {self.as_vector(got)} : {self.as_vector(fallback)})"
            return Value(text, node.dtype, True)
        return Value(f"({test.text} ? {got.text} : {fallback.text})", node.dtype, False)

    def _both(self, a: Value, b: Value, scope: Scope) -> Value:
        name = self.fresh("both")
        if a.is_vector or b.is_vector:
            scope(f"const mask {name} = {self.as_vector(a)} & {self.as_vector(b)};")
            return Value(name, BOOL, True, scope.depth)
        scope(f"const bool {name} = {a.text} && {b.text};")
        return Value(name, BOOL, False, scope.depth)

    # -- nests

    def row(self, nest: Nest, scope: Scope) -> None:
        """A nest that runs once per outer point."""
        for write in nest.writes:
            value = self.value(write.value, scope)
            self.keep(write.buffers[0], write.index, value, scope)

    def keep(self, buffer: str, index: Expr, value: Value, scope: Scope) -> None:
        scope.buffers[buffer] = replace(value, depth=max(value.depth, scope.depth))
        if buffer not in self.group.internal:
            self.store(buffer, index, value, scope)

    def point(self, nest: Nest, scope: Scope) -> None:
        for write in nest.writes:
            value = self.value(write.value, scope)
            if write.index_scalar is not None:
                self.scatter(write.buffers[0], self.value(write.index_scalar, scope), value, scope)
                continue
            buffer = write.buffers[0]
            self.keep(buffer, write.index, value, scope)
            if buffer in self.shape.kept_rows:
                at = self._kept_place(buffer)
                if self.vector_var is None:
                    scope(f"*({at}) = {value.text};")
                else:
                    scope(f"store({at}, {self.as_vector(value)});")

    def scatter(self, buffer: str, position: Value, value: Value, scope: Scope) -> None:
        """Positions computed from data, one at a time and in order. Where one is not in the caller's tensor,
        the call raises, and no element that was not asked for may have changed."""
        guard = "if (!*bad) " if self.may_fail and self.buffers[buffer].kind == "input" else ""
        place = f"{guard}{token(buffer)}[{position.text}{'[l]' if position.is_vector else ''}]"
        if self.vector_var is None:
            scope(f"{place} = {value.text};")
        else:
            self._store_lanes(place, value, scope)


def _lane_text(name: str, element: str, dtype: DType) -> tuple[str, str]:
    if dtype is BOOL:
        return f"{name}[l]", f"-(int){element}"
    if dtype in (BF16, F16):
        return f"{name}.bits[l]", f"{element}.bits"
    return f"{name}[l]", element


def innermost(ranges: tuple[Range, ...], var: Expr | None) -> tuple[Range, ...]:
    """The same loops with the one over `var` innermost."""
    return (*(r for r in ranges if r.var is not var), *(r for r in ranges if r.var is var))


_SPECIAL: Final[dict[str, Callable[[KernelWriter, Scalar, list[Value], Scope], Value]]] = {
    "const": lambda writer, node, *_: Value(ops.literal(node.args[0], node.dtype), node.dtype, False),  # type: ignore[arg-type]
    "input": lambda writer, node, *_: Value(f"({ops.C_TYPE[node.dtype]}){node.args[0]}", node.dtype, False),
    "index": KernelWriter.index,
    "load": KernelWriter.load,
    "load_at": KernelWriter.load_at,
    "masked": KernelWriter.masked,
    **dict.fromkeys(("cast", "bitcast"), KernelWriter.cast),
}
