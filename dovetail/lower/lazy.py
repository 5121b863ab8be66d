"""A value not yet in memory: from an index to a Scalar.

    x * 2 + 1   is   Lazy(at=lambda index: add(mul(load(x, ...), 2), 1))

Reading a Lazy inside a nest inlines it. A Lazy that is a strided window onto a buffer has a `ref`, so
that views of memory stay free for library calls too.
"""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate, pairwise
from typing import Final, cast

from dovetail.ir import loop as ir
from dovetail.ir import types
from dovetail.ir.expr import ONE, ZERO, Expr, add, and_, as_expr, ceildiv, ge, lt, mul, sym, symbols, total
from dovetail.ir.graph import Node
from dovetail.ir.types import BOOL, F32, I64, DType, ScalarType, TensorType
from dovetail.lower.index import Index, element_of, reshape_index, reshape_strides
from dovetail.util.noun import Noun


class Lazy(Noun, eq=False):
    """`origins` are the graph nodes that an inlined read computes. `cuts` are positions (dimension, index)
    where what it computes changes: a loop split there needs no conditions."""

    type: TensorType
    at: Callable[[Index], ir.Scalar]
    ref: ir.BufferRef | None = None
    origins: tuple[str, ...] = ()
    cuts: tuple[tuple[int, Expr], ...] = ()


def window(ref: ir.BufferRef) -> Lazy:
    """A strided view of memory."""
    dtype = ref.type.dtype
    return Lazy(ref.type, lambda index: ir.load(ref.buffer, element_of(ref, index), dtype), ref)


def as_reals(ref: ir.BufferRef) -> ir.BufferRef:
    """What it shows of complex numbers, as pairs of reals."""
    type = types.as_reals(ref.type)
    return ref if type is ref.type else ir.BufferRef(ref.buffer, type, mul(ref.offset, 2))


def as_complex(ref: ir.BufferRef) -> ir.BufferRef | None:
    """What it shows of pairs of reals, as complex numbers, if each pair lies where one of those may."""
    *steps, last = ref.type.stride
    if last is not ONE or any(step % 2 is not ZERO for step in (*steps, ref.offset)):
        return None
    halves, dtype = tuple(step // 2 for step in steps), types.PAIRS[ref.type.dtype]
    type = TensorType(ref.type.shape[:-1], halves, dtype, ref.type.device)
    return ir.BufferRef(ref.buffer, type, ref.offset // 2)


# -- scalars ---------------------------------------------------------------------------------------


def cast_to(value: ir.Scalar, dtype: DType) -> ir.Scalar:
    """Convert as eager does; a widening that is undone at once was exact."""
    if value.dtype is dtype:
        return value
    if value.op == "const":
        return _cast_constant(value, dtype)
    if dtype is BOOL:
        wide = cast_to(value, F32) if value.dtype.is_low_precision else value
        return ir.scalar("ne", (wide, ir.constant(0.0 if wide.dtype.is_float else 0, wide.dtype)), BOOL)
    if value.op == "cast" and value.dtype is F32:
        inner = cast(ir.Scalar, value.args[0])
        if inner.dtype is dtype and dtype.is_low_precision:
            return inner
    return ir.scalar("cast", (value,), dtype)


def _cast_constant(value: ir.Scalar, dtype: DType) -> ir.Scalar:
    number = cast("int | float | bool", value.args[0])
    if dtype is BOOL:
        return ir.constant(bool(number), BOOL)
    if dtype.is_float and dtype.bits >= 32 and (dtype.bits == 64 or not value.dtype.is_float):
        return ir.constant(float(number), dtype)
    if dtype.is_integer and not value.dtype.is_float and 0 <= int(number) < 128:
        return ir.constant(int(number), dtype)
    return ir.scalar("cast", (value,), dtype)


def apply(op: str, operands: tuple[ir.Scalar, ...], dtype: DType) -> ir.Scalar:
    """One scalar operation. Half types only select or compare here (decompositions compute in fp32),
    which is exact in fp32."""
    if any([x.dtype.is_low_precision for x in operands]):
        wide = tuple(cast_to(x, F32) if x.dtype.is_low_precision else x for x in operands)
        return cast_to(ir.scalar(op, wide, F32 if dtype.is_low_precision else dtype), dtype)
    if op == "add" and all([x.op == "index" and x.dtype is I64 for x in operands]):
        return ir.index_value(add(*(cast(Expr, x.args[0]) for x in operands)))
    return ir.scalar(op, operands, dtype)


def choose(condition: Expr, value: ir.Scalar, other: ir.Scalar) -> ir.Scalar:
    """masked() on an index condition; half types pass through fp32, exactly."""
    if value.dtype.is_low_precision:
        return cast_to(ir.masked(ir.holds(condition), cast_to(value, F32), cast_to(other, F32)), value.dtype)
    return ir.masked(ir.holds(condition), value, other)


def as_constant(value: object, dtype: DType) -> ir.Scalar:
    """A number argument of a prim: a constant, a size, or a run-time scalar input."""
    if isinstance(value, Node):
        kind = cast(ScalarType, value.type)
        if kind.expr is not None:
            return cast_to(ir.index_value(kind.expr), dtype)
        return cast_to(ir.input_value(value.name, kind.dtype), dtype)
    if isinstance(value, Expr):
        return as_constant(value.value, dtype) if value.is_const else cast_to(ir.index_value(value), dtype)
    plain = cast("int | float | bool", value)
    if dtype.is_low_precision:
        return ir.scalar("cast", (ir.constant(float(plain), F32),), dtype)
    if dtype.is_float:
        return ir.constant(float(plain), dtype)
    return ir.constant(bool(plain) if dtype is BOOL else int(plain), dtype)


def shifted(x: Lazy, start: Index) -> Lazy:
    """The same value counted from another first element."""
    if all(place is ZERO for place in start):
        return x
    return moved(x, x.type, lambda index: tuple(map(add, index, start)))


# -- views -----------------------------------------------------------------------------------------


def moved(
    x: Lazy, type: TensorType, place: Callable[[Index], Index], strides: Sequence[Expr] | None = None,
    start: Expr = ZERO, cuts: tuple[tuple[int, Expr], ...] = (),
) -> Lazy:  # fmt: skip
    """x at another place. Of a window onto memory it is one too, where there are strides for it."""
    if x.ref is not None and strides is not None:
        kind = TensorType(type.shape, tuple(strides), type.dtype, type.device)
        return window(ir.BufferRef(x.ref.buffer, kind, add(x.ref.offset, start)))
    return Lazy(type, lambda index: x.at(place(index)), None, x.origins, cuts)


def permute(x: Lazy, type: TensorType, dims: tuple[int, ...]) -> Lazy:
    order = [dims.index(d) for d in range(len(dims))]
    strides = [x.type.stride[d] for d in dims]
    return moved(x, type, lambda index: tuple(index[p] for p in order), strides)


def broadcast(x: Lazy, type: TensorType, dims: tuple[int, ...]) -> Lazy:
    grown = [size is ONE for size in x.type.shape]
    strides = [ZERO] * type.ndim
    for dim, stride, more in zip(dims, x.type.stride, grown):
        strides[dim] = ZERO if more else stride
    place = lambda index: tuple(ZERO if more else index[d] for d, more in zip(dims, grown))
    return moved(x, type, place, strides)


def reshape(x: Lazy, type: TensorType) -> Lazy:
    source, target = x.type.shape, type.shape
    strides = None if x.ref is None else reshape_strides(x.type, target)
    return moved(x, type, lambda index: reshape_index(source, target, index), strides)


def slice_(x: Lazy, type: TensorType, dim: int, start: Expr, step: int) -> Lazy:
    stride = x.type.stride
    strides = [mul(s, step) if d == dim else s for d, s in enumerate(stride)]
    cuts = tuple((d, ceildiv(place - start, step) if d == dim else place) for d, place in x.cuts)
    place = lambda index: (*index[:dim], add(mul(index[dim], step), start), *index[dim + 1 :])
    return moved(x, type, place, strides, mul(start, stride[dim]), cuts)


def flip(x: Lazy, type: TensorType, dims: tuple[int, ...]) -> Lazy:
    place = lambda index: tuple(type.shape[d] - 1 - at if d in dims else at for d, at in enumerate(index))
    return moved(x, type, place)


# -- joins -----------------------------------------------------------------------------------------


def pad(x: Lazy, type: TensorType, before: tuple[Expr, ...], value: object) -> Lazy:
    shape, fill = x.type.shape, as_constant(value, type.dtype)
    before = tuple(map(as_expr, before))

    def at(index: Index) -> ir.Scalar:
        inner = tuple(add(i, mul(low, -1)) for i, low in zip(index, before))
        inside = holds_within(inner, shape)
        if inside.op == "false":
            return fill
        got = x.at(inner)
        return got if inside.op == "true" else choose(inside, got, fill)

    padded = [d for d, size in enumerate(shape) if size is not type.shape[d]]
    cuts = tuple((d, edge) for d in padded for edge in (before[d], add(before[d], shape[d])))
    return Lazy(type, at, None, x.origins, cuts)


def holds_within(index: Index, shape: tuple[Expr, ...]) -> Expr:
    """0 <= index < shape in every dimension."""
    tests = (and_(ge(position, 0), lt(position, size)) for position, size in zip(index, shape))
    return reduce(and_, tests, lt(ZERO, ONE))


def cat(parts: tuple[Lazy, ...], type: TensorType, dim: int) -> Lazy:
    """Each element picks its part, of those that its position may lie in."""
    places = list(pairwise(accumulate((part.type.shape[dim] for part in parts), add, initial=ZERO)))
    starts, stops = [start.lo for start, _ in places], [stop.hi for _, stop in places]

    def at(index: Index) -> ir.Scalar:
        result = as_constant(0, type.dtype)
        near = slice(bisect_right(stops, index[dim].lo), bisect_right(starts, index[dim].hi))
        for part, (start, stop) in zip(parts[near], places[near]):
            moved = (*index[:dim], add(index[dim], mul(start, -1)), *index[dim + 1 :])
            inside = and_(ge(index[dim], start), lt(index[dim], stop))
            if inside.op == "true":
                return part.at(moved)
            if inside.op != "false":
                result = choose(inside, part.at(moved), result)
        return result

    origins = tuple(dict.fromkeys(name for part in parts for name in part.origins))
    return Lazy(type, at, None, origins, tuple((dim, start) for start, _ in places[1:]))


# -- creation and gathers --------------------------------------------------------------------------


def iota(type: TensorType, start: object, step: object) -> Lazy:
    dtype = type.dtype

    def at(index: Index) -> ir.Scalar:
        if dtype.is_integer:
            position = add(mul(index[0], as_expr(cast(int, step))), as_expr(cast(int, start)))
            return cast_to(ir.index_value(position), dtype)
        wide = F32 if dtype.is_low_precision else dtype
        steps = ir.scalar("mul", (cast_to(ir.index_value(index[0]), wide), as_constant(step, wide)), wide)
        return cast_to(ir.scalar("add", (steps, as_constant(start, wide)), wide), dtype)

    return Lazy(type, at)


def _place(part: ir.Scalar | Expr, size: Expr) -> ir.Scalar | Expr:
    """Where a part points: plain where its range shows that it is inside, else checked and wrapped."""
    if isinstance(part, Expr):
        return part
    if part.op == "index" and part.dtype is I64:
        position = cast(Expr, part.args[0])
        for place in (position, add(position, size)):
            if holds_within((place,), (size,)).op == "true":
                return place
    return ir.scalar("check_index", (cast_to(part, I64), ir.index_value(size)), I64)


def gathered(base: ir.BufferRef, parts: list[ir.Scalar | Expr]) -> ir.Scalar:
    """The element of `base` at computed positions (checked and wrapped) and plain ones."""
    plain = base.offset
    flat: ir.Scalar | None = None
    for part, size, stride in zip(parts, base.type.shape, base.type.stride):
        place = _place(part, size)
        if isinstance(place, Expr):
            plain = add(plain, mul(place, stride))
            continue
        step = place if stride is ONE else ir.scalar("mul", (place, ir.index_value(stride)), I64)
        flat = step if flat is None else ir.scalar("add", (flat, step), I64)
    if flat is None:
        return ir.load(base.buffer, plain, base.type.dtype)
    if plain is not ZERO:
        flat = ir.scalar("add", (flat, ir.index_value(plain)), I64)
    return ir.load_at(base.buffer, flat, base.type.dtype)


def computed(x: Lazy, parts: list[ir.Scalar | Expr]) -> ir.Scalar:
    """The element of `x` at computed positions. A value in memory is loaded; any other is worked out
    there: symbols stand for the computed positions until the loads below are known."""
    if x.ref is not None:
        return gathered(x.ref, parts)
    index: list[Expr] = []
    env: dict[Expr, ir.Scalar] = {}
    for part, size in zip(parts, x.type.shape):
        place = _place(part, size)
        if isinstance(place, ir.Scalar):
            symbol = sym(f"at{place.serial}", 0, max(size.hi - 1, 0), None if size.is_const else size)
            env[symbol] = place
            place = symbol
        index.append(place)
    return _resolve(x.at(tuple(index)), env)


def _resolve(value: ir.Scalar, env: dict[Expr, ir.Scalar]) -> ir.Scalar:
    """Replace the symbols in index expressions by the scalars they stand for."""
    memo: dict[ir.Scalar, ir.Scalar] = {}
    for node in ir.iter_scalars(value):
        args = tuple(memo[arg] if isinstance(arg, ir.Scalar) else arg for arg in node.args)
        where = next((arg for arg in args if isinstance(arg, Expr)), None)
        if where is None or symbols(where).isdisjoint(env):
            memo[node] = node if args == node.args else ir.scalar(node.op, args, node.dtype)
        elif node.op == "load":
            memo[node] = ir.load_at(cast(str, node.args[0]), scalar_of(where, env), node.dtype)
        else:
            memo[node] = cast_to(scalar_of(where, env), node.dtype)
    return memo[value]


_AS_SCALAR: Final = {
    "add": "add", "mul": "mul", "floordiv": "floordiv", "mod": "remainder", "min": "minimum",
    "max": "maximum", "eq": "eq", "lt": "lt", "le": "le", "and": "logical_and", "not": "logical_not",
}  # fmt: skip


def scalar_of(expr: Expr, env: dict[Expr, ir.Scalar]) -> ir.Scalar:
    """An index expression as a computation, with some of its symbols computed."""
    if expr in env:
        return env[expr]
    if symbols(expr).isdisjoint(env):
        return ir.index_value(expr) if expr.op not in ("true", "false") else ir.holds(expr)
    parts: list[Expr] = list(expr.operands)
    if expr.op == "add":  # what is known of it stays one expression
        start, terms = cast("tuple[int, tuple[tuple[Expr, int], ...]]", expr.args)
        parts = [mul(term, n) for term, n in terms if not symbols(term).isdisjoint(env)]
        rest = total((start, *(mul(term, n) for term, n in terms if symbols(term).isdisjoint(env))))
        parts += [rest] if rest is not ZERO else []
    dtype = BOOL if expr.op in ("eq", "lt", "le", "and", "not") else I64
    apply = lambda *operands: ir.scalar(_AS_SCALAR[expr.op], operands, dtype)
    operands = [scalar_of(part, env) for part in parts]
    return apply(*operands) if expr.op == "not" else reduce(apply, operands)


def take(base: Lazy, type: TensorType, indices: tuple[Lazy, ...], dims: tuple[int, ...]) -> Lazy:
    rank = indices[0].type.ndim

    def at(index: Index) -> ir.Scalar:
        head, rest = index[:rank], iter(index[rank:])
        found = {d: i.at(head) for d, i in zip(dims, indices)}
        return computed(base, [found[d] if d in found else next(rest) for d in range(base.type.ndim)])

    return Lazy(type, at, None, base.origins)


def gather(base: Lazy, type: TensorType, dim: int, where: Lazy) -> Lazy:
    def at(index: Index) -> ir.Scalar:
        return computed(base, [where.at(index) if d == dim else i for d, i in enumerate(index)])

    return Lazy(type, at, None, base.origins)
