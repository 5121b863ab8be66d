"""Index maps of views: where an element of the result is in the operand.

    reshape (8, 64) -> (512,):   [i]     ->  [i // 64, i % 64]
    reshape (8, 64) -> (8, 4, 16): [i, j, k] -> [i, 16*j + k]       dimensions that do not mix pass through

`Index` is a tuple of Exprs, one per dimension.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import Final, TypeAlias

from dovetail.ir.expr import ONE, ZERO, Expr, add, floordiv, mod, mul, product, row_major
from dovetail.ir.loop import BufferRef
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
