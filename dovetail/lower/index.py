"""Index maps of views: where an element of the result is in the operand; and the loops over them.

    reshape (8, 64) -> (512,):   [i]     ->  [i // 64, i % 64]
    reshape (8, 64) -> (8, 4, 16): [i, j, k] -> [i, 16*j + k]       dimensions that do not mix pass through

`Index` is a tuple of Exprs, one per dimension. Loops are in memory order, merged where they can be:

    out[i, j] = x[64*i + j] * 2  over (8, 64)     ->  for i < 512:  out[i] = x[i] * 2
    out[i, j] = x[64*i + j] + m[i]                ->  for i < 8, j < 64   (m depends on i alone)
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Final, TypeAlias, cast

from dovetail.ir import expr as ir
from dovetail.ir.expr import ONE, ZERO, Expr, add, floordiv, linear_in, mod, mul, product, row_major, symbols
from dovetail.ir.loop import BufferRef, Range, Scalar, iter_scalars
from dovetail.ir.types import TensorType

Index: TypeAlias = "tuple[Expr, ...]"
Shape: TypeAlias = "Sequence[Expr]"


def matching_groups(source: Shape, target: Shape) -> list[tuple[list[int], list[int]]]:
    """Smallest runs of dimensions with equal products, in order; size-1 dimensions are left out."""
    left = [d for d, size in enumerate(source) if size is not ONE]
    right = [d for d, size in enumerate(target) if size is not ONE]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(left) and j < len(right):
        a, b = [left[i]], [right[j]]
        i, j = i + 1, j + 1
        while True:
            pa, pb = product(source[d] for d in a), product(target[d] for d in b)
            if pa is pb:
                break
            if j < len(right) and (i >= len(left) or _is_smaller(pb, pa)):
                b.append(right[j])
                j += 1
            elif i < len(left):
                a.append(left[i])
                i += 1
            else:
                break
        groups.append((a, b))
    if i < len(left) or j < len(right):  # sizes that are equal for reasons the expressions do not show
        return [(left, right)]
    return groups


def _is_smaller(a: Expr, b: Expr) -> bool:
    if a.is_const and b.is_const:
        return a.value < b.value
    return len(a.operands) <= len(b.operands) and a.hi <= b.hi


def unflatten_index(flat: Expr, shape: Shape) -> list[Expr]:
    index: list[Expr] = []
    for size in reversed(shape[1:]):
        index.append(mod(flat, size))
        flat = floordiv(flat, size)
    return [flat, *reversed(index)]


def reshape_index(source: Shape, target: Shape, index: Index) -> Index:
    """The position in `source` of position `index` of `target`."""
    if any(size is ZERO for size in source):
        return (ZERO,) * len(source)
    result = [ZERO] * len(source)
    for a, b in matching_groups(source, target):
        flat = row_major([index[d] for d in b], [target[d] for d in b])
        for dim, position in zip(a, unflatten_index(flat, [source[d] for d in a])):
            result[dim] = position
    return tuple(result)


# -- strided windows -------------------------------------------------------------------------------


def element_of(ref: BufferRef, index: Index) -> Expr:
    """The flat element of the buffer."""
    return _element(index, ref.type.stride, ref.offset)


_element: Final = lru_cache(4096)(lambda index, stride, offset: reduce(add, map(mul, index, stride), offset))


def reshape_strides(type: TensorType, target: Shape) -> tuple[Expr, ...] | None:
    """Strides that view the same memory in another shape, or None if it must be copied."""
    if any(size is ZERO for size in target):
        return None
    strides = [ONE] * len(target)
    for a, b in matching_groups(type.shape, target):
        for outer, inner in zip(a, a[1:]):
            if type.stride[outer] is not mul(type.stride[inner], type.shape[inner]):
                return None
        step = type.stride[a[-1]] if a else ONE
        for dim in reversed(b):
            strides[dim] = step
            step = mul(step, target[dim])
    _fill_ones(strides, target)
    return tuple(strides)


def _fill_ones(strides: list[Expr], shape: Shape) -> None:
    """A size-1 dimension gets the stride eager would show: that of the rest of the block it leads."""
    step = ONE
    for dim in reversed(range(len(shape))):
        if shape[dim] is ONE:
            strides[dim] = step
        else:
            step = mul(strides[dim], shape[dim])


# -- loops -----------------------------------------------------------------------------------------

FEW_CUTS: Final = 8
MANY_LOADS: Final = 16
NARROW: Final = 4
"""Elements that are not worth a loop of their own beside others as few."""


@lru_cache(4096)
def memory_order(shape: tuple[Expr, ...], stride: tuple[Expr, ...]) -> Sequence[int]:
    """Dimensions from the outermost in memory to the innermost; ties keep their order. (Layers repeat.)"""
    return sorted([d for d, size in enumerate(shape) if size is not ONE], key=lambda d: -_rank(stride[d]))


def _rank(stride: Expr) -> float:
    """Larger for the longer stride: products have more factors."""
    if stride.is_const:
        return stride.value / ir.INF
    factors = stride.args if stride.op == "mul" else (stride,)
    return len(factors) + stride.lo / ir.INF


def index_exprs(values: Iterable[Scalar]) -> tuple[Expr, ...]:
    """Every index expression that the scalars read or use."""
    place = {"load": 1, "index": 0}
    found = (node.args[place[node.op]] for node in iter_scalars(*values) if node.op in place)
    return tuple(dict.fromkeys(cast("Iterable[Expr]", found)))


Slopes: TypeAlias = "dict[Expr, Expr | None]"


def slopes_of(expr: Expr) -> Slopes:
    """How fast an index moves with each symbol in it; None where it is not a constant rate."""
    if expr.op == "sym":
        return {expr: ONE}
    if expr.op == "add" and all(term.op == "sym" for term in expr.operands):
        return {term: ir.const(n) for term, n in cast("tuple[tuple[Expr, int], ...]", expr.args[1])}
    splits = {variable: linear_in(expr, variable) for variable in symbols(expr)}
    return {variable: None if split is None else split[0] for variable, split in splits.items()}


def _can_merge(outer: Range, inner: Range, slopes: Sequence[Slopes]) -> bool:
    """Every index moves through (outer, inner) as through one longer loop."""
    for slope in slopes:
        first, second = slope.get(outer.var, ZERO), slope.get(inner.var, ZERO)
        if first is None or second is None or first is not mul(second, inner.size):
            return False
    return True


@lru_cache(4096)
def merge_ranges(
    ranges: tuple[Range, ...], exprs: tuple[Expr, ...], name: str
) -> tuple[tuple[Range, ...], Mapping[Expr, Expr]]:
    """Collapse neighbouring loops. Returns the new ranges and what replaces the old variables."""
    slopes = [slopes_of(expr) for expr in exprs] if len(ranges) > 1 else []
    runs: list[list[Range]] = []
    for each in ranges:
        if runs and _can_merge(runs[-1][-1], each, slopes):
            runs[-1].append(each)
        else:
            runs.append([each])
    sizes = [product(each.size for each in run) for run in runs]
    merged = [Range.over(f"{name}{n}" if name else n, size) for n, size in enumerate(sizes)]
    env = {each.var: ZERO for each in ranges}
    env |= {run[-1].var: fresh.var for run, fresh in zip(runs, merged)}
    return tuple(merged), env


Block: TypeAlias = "tuple[Index, tuple[Expr, ...]]"
"""First position and shape."""


def regions(type: TensorType, cuts: Sequence[tuple[int, Expr]], loads: int = 0) -> list[Block]:
    """Each block between the cuts; the whole if splitting does not pay.

    A GPU launches a kernel per nest and masks for free, so there only many cuts are worth it, or those
    between values that take many loads. A condition on an outer dimension holds for all lanes of a vector
    or for none, so of cuts along several dimensions (padding) only those along the lanes are made."""
    whole = [((ZERO,) * type.ndim, type.shape)]
    dims = list(dict.fromkeys(dim for dim, _ in cuts))
    several = len(dims) > 1
    if type.device.kind != "cpu" and (several or (len(cuts) < FEW_CUTS and loads < MANY_LOADS)):
        return whole
    if several:
        dims = [dim for dim in dims if type.stride[dim] is ONE]
    found = whole
    for dim in dims:
        end = type.shape[dim]
        edges = _in_order([ZERO, end, *(place for d, place in cuts if d == dim)])
        if edges is None:
            return whole
        edges = edges[edges.index(ZERO) : edges.index(end) + 1]
        edges = _without_slivers(edges) if several else edges
        found = [part for block in found for part in _split_block(block, dim, edges)]
    return found or whole  # nothing is left of a tensor without elements


def _without_slivers(edges: list[Expr]) -> list[Expr]:
    """No edge between two blocks that are both a few elements wide."""
    kept = edges[:1]
    for edge, after in zip(edges[1:], edges[2:]):
        if (edge - kept[-1]).hi >= NARROW or (after - edge).hi >= NARROW:
            kept.append(edge)
    return [*kept, edges[-1]]


def _in_order(places: Sequence[Expr]) -> list[Expr] | None:
    """From the lowest to the highest, whatever the symbols' values; None where that depends on them."""
    found: list[Expr] = []
    for place in dict.fromkeys(places):
        at = 0
        while at < len(found) and ir.is_at_most(found[at], place):
            at += 1
        if at < len(found) and not ir.is_at_most(place, found[at]):
            return None
        found.insert(at, place)
    return found


def _split_block(block: Block, dim: int, edges: Sequence[Expr]) -> list[Block]:
    start, shape = block
    parts = [(low, high - low) for low, high in zip(edges, edges[1:]) if low is not high]
    swap = lambda whole, part: (*whole[:dim], part, *whole[dim + 1 :])
    return [(swap(start, low), swap(shape, size)) for low, size in parts]
