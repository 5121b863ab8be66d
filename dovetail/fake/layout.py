"""Strides of an elementwise result as eager's iterator chooses them.

    operands (2, 2) strides (0, 0) and (2, 2) strides (1, 2)   ->   strides (1, 2)

The first operand with an opinion on two dimensions decides which of them is the inner one; a
broadcast dimension (stride 0) has none. Some meta kernels know only part of this.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

Geometry: TypeAlias = "tuple[Sequence[int], Sequence[int]]"


def is_ambiguous(operands: Sequence[torch.Tensor]) -> bool:
    """Some operand is expanded: the case that meta kernels get wrong."""
    return any(stride == 0 and size > 1 for x in operands for size, stride in zip(x.size(), x.stride()))


def iterator_strides(shape: Sequence[int], operands: Sequence[Geometry]) -> list[int]:
    """Dense strides of the result of an elementwise op on operands of these sizes and strides."""
    if 1 in shape and (agreed := _agreed_strides(shape, operands)) is not None:
        return agreed
    rank = len(shape)
    aligned = [_align(*x, shape) for x in operands]
    order = list(range(rank - 1, -1, -1))
    for i in range(1, rank):
        at = i
        for j in range(i - 1, -1, -1):
            verdict = _compare(order[j], order[at], shape, aligned)
            if verdict > 0:
                order[j], order[at] = order[at], order[j]
                at = j
            elif verdict < 0:
                break
    return dense_strides(shape, order)


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """Strides without gaps, where the dimensions follow each other in this order, the innermost first."""
    strides, step = [0] * len(shape), 1
    for d in order:
        strides[d] = step
        step *= max(shape[d], 1)
    return strides


def channels_last(shape: Sequence[int]) -> list[int] | None:
    if len(shape) not in (4, 5):
        return None
    return dense_strides(shape, (1, *range(len(shape) - 1, 1, -1), 0))


def seems_channels_last(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Eager's guess from the strides alone, which only suggests a layout for results: the channel is
    innermost, then width, height, batch."""
    if len(size) not in (4, 5) or stride[1] == 0:
        return False
    least = 0
    for d in (1, *range(len(size) - 1, 1, -1), 0):
        if size[d] == 0 or stride[d] < least or (d == 0 and least == stride[1]):
            return False
        least = stride[d] * max(size[d], 1)
    return True


def is_laid_out(size: Sequence[int], stride: Sequence[int], wanted: Sequence[int] | None) -> bool:
    return wanted is not None and all(a == b or n == 1 for n, a, b in zip(size, stride, wanted))


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    order = sorted(range(len(size)), key=lambda d: (stride[d], size[d]))
    return is_laid_out(size, stride, dense_strides(size, order))


def _agreed_strides(shape: Sequence[int], operands: Sequence[Geometry]) -> list[int] | None:
    """The one layout of operands of the result's shape, with the strides of single elements."""
    if any(tuple(size) != tuple(shape) for size, _ in operands):
        return None
    plain = dense_strides(shape, range(len(shape))[::-1])
    for wanted in (plain, channels_last(shape) if len(shape) == 4 else None):
        if all(is_laid_out(shape, stride, wanted) for _, stride in operands):
            return wanted
    first = operands[0][1]
    is_shared = is_dense(shape, first) and all(tuple(stride) == tuple(first) for _, stride in operands)
    return list(first) if is_shared else None


def _align(sizes: Sequence[int], strides: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Strides over the result's dimensions; 0 where the operand is broadcast."""
    missing = len(shape) - len(sizes)
    own = zip(sizes, strides, shape[missing:])
    return [0] * missing + [0 if size == 1 != whole else stride for size, stride, whole in own]


def _compare(a: int, b: int, shape: Sequence[int], operands: Sequence[Sequence[int]]) -> int:
    """1 where dimension b should be further in than a, -1 where a should, 0 where nobody says."""
    for strides in operands:
        x, y = strides[a], strides[b]
        if x == 0 or y == 0:
            continue
        if x != y:
            return 1 if x > y else -1
        if shape[a] > shape[b]:
            return 1
    return 0
