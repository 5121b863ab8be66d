"""The symbolic geometry of a tensor: sizes, strides and offset as expressions.

    Form((s0, 64), (64, 1), 0)

and the arithmetic that shape rules share: broadcasting, dense strides, strides of a view. Strides of an
elementwise result are as eager's iterator chooses them:

    operands (2, 2) strides (0, 0) and (2, 2) strides (1, 2)   ->   strides (1, 2)

The first operand with an opinion on two dimensions decides which of them is the inner one; a
broadcast dimension (stride 0) has none. Some meta kernels know only part of this.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from typing import Any, TypeAlias

import torch

from dovetail.ir.expr import ONE, ZERO, Expr, add, as_expr, const, eq, floordiv, le, mul, product
from dovetail.sym import Shapes
from dovetail.util.noun import Noun

Shape: TypeAlias = "tuple[Expr, ...]"
Geometry: TypeAlias = "tuple[Sequence[int], Sequence[int]]"
Extent: TypeAlias = "Callable[[int], Expr | None]"
"""The symbol for a size, or behind the sizes for a stride; None for one that stays."""


class Unruled(Exception):
    """No rule applies: symbols must be fixed, or sizes do not fit and the kernel says how."""


class Form(Noun):
    shape: Shape
    stride: Shape
    offset: Expr = ZERO
    dtype: torch.dtype | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> Expr:
        return product(self.shape)

    def map(self, shapes: Shapes) -> Form:
        """With every equality known by now applied."""
        if not shapes.equalities:
            return self
        simplify = shapes.simplify
        shape, stride = tuple(map(simplify, self.shape)), tuple(map(simplify, self.stride))
        return Form(shape, stride, simplify(self.offset), self.dtype)

    @property
    def is_static(self) -> bool:
        return all(x.op == "const" for x in (*self.shape, *self.stride, self.offset))


def hint_geometry(tensor: torch.Tensor) -> tuple[Any, Any, Any]:
    """Size, stride, offset, in numbers: where they are symbolic, the hints."""
    form, shapes = getattr(tensor, "form", None), getattr(tensor, "shapes", None)
    if form is None or shapes is None:
        return tuple(tensor.size()), tensor.stride(), tensor.storage_offset()
    return tuple(map(shapes.hint, form.shape)), tuple(map(shapes.hint, form.stride)), shapes.hint(form.offset)


def static_form(tensor: torch.Tensor) -> Form:
    size, stride, offset = hint_geometry(tensor)
    return Form(tuple(map(const, size)), tuple(map(const, stride)), const(offset), tensor.dtype)


def broadcast(shapes: Shapes, *operands: Shape) -> Shape:
    """Eager's broadcasting; sizes that must agree are assumed to."""
    dims = range(-max(map(len, operands), default=0), 0)
    sizes = ((shape[d] for shape in operands if len(shape) >= -d) for d in dims)
    return tuple(reduce(partial(_join_sizes, shapes), each, ONE) for each in sizes)


def _join_sizes(shapes: Shapes, a: Expr, b: Expr) -> Expr:
    if a is b or b is ONE:
        return a
    if a is ONE:
        return b
    is_one_a, is_one_b = shapes.hint(a) == 1, shapes.hint(b) == 1
    if is_one_a is not is_one_b:
        small, large = (a, b) if is_one_a else (b, a)
        shapes.assume(eq(small, 1), "it is broadcast")
        return large
    return same_size(shapes, a, b)


def same_size(shapes: Shapes, a: Expr, b: Expr) -> Expr:
    if a is not b:
        if shapes.hint(a) != shapes.hint(b):
            raise Unruled
        shapes.assume(eq(a, b), "an operator needs equal sizes")
    return shapes.simplify(a)


def derive_strides(
    shapes: Shapes, shape: Shape, hint_stride: Sequence[int], extent: Extent | None = None
) -> tuple[Expr, ...] | None:
    """Strides in the order that the hints have: products of sizes wherever the hints are products.

    A stride that is no such product makes the result None. With `extent`, a tensor from outside, it is
    the symbol that it gives, else a number. The order of strides stays: layouts of results follow it."""
    if extent is None and all(size.op == "const" for size in shape):
        return tuple(map(const, hint_stride))
    hints = [shapes.hint(size) for size in shape]
    order = sorted(range(len(shape)), key=lambda d: (hint_stride[d], hints[d] != 1, -d))
    strides = [ZERO] * len(shape)
    expected = ONE
    for d in order:
        at, symbol, strides[d] = hint_stride[d], None, expected
        if at != shapes.hint(expected):
            if extent is None and at and hints[d] != 1:
                return None
            if extent and at > shapes.hint(expected) and (symbol := extent(len(shape) + d)):
                shapes.assume(le(expected, symbol), "the order of strides")
            strides[d] = symbol or const(at)
            if not symbol and (at == 0 or hints[d] == 1):
                continue
        expected = mul(shape[d], strides[d])
    return tuple(strides)


def complete_shape(shapes: Shapes, shape: Sequence[Expr | int], numel: Expr) -> Shape:
    """Replace a -1 by what is left of numel."""
    known = [None if isinstance(s, int) and s == -1 else as_expr(s) for s in shape]
    rest = product(s for s in known if s is not None)
    missing = shapes.simplify(floordiv(numel, rest)) if None in known else ONE
    shapes.assume(eq(mul(missing, rest), numel), "a view keeps the number of elements")
    return tuple(missing if s is None else s for s in known)


def view_strides(shapes: Shapes, old: Form, shape: Shape) -> tuple[Expr, ...] | None:
    """Strides of old seen with another shape; None where that takes a copy.

    Walks from the innermost dimension, over runs of dimensions that are contiguous in memory."""
    if not old.shape:
        return (ONE,) * len(shape)
    strides = [ZERO] * len(shape)
    at = len(shape) - 1
    base, taken, made = old.stride[-1], ONE, ONE
    for d in range(old.ndim - 1, -1, -1):
        taken = mul(taken, old.shape[d])
        if d and (old.shape[d - 1] is ONE or _is_same(shapes, old.stride[d - 1], mul(taken, base))):
            continue
        while at >= 0 and (shapes.hint(made) < shapes.hint(taken) or shapes.hint(shape[at]) == 1):
            strides[at] = mul(made, base)
            made = mul(made, shape[at])
            at -= 1
        if not _is_same(shapes, made, taken):
            return None
        if d:
            base, taken, made = old.stride[d - 1], ONE, ONE
    return tuple(strides) if at < 0 else None


def _is_same(shapes: Shapes, a: Expr, b: Expr) -> bool:
    return a is b or shapes.decide(eq(a, b), "it decides whether a view needs a copy")


def shifted(offset: Expr, stride: Expr, steps: Expr) -> Expr:
    return add(offset, mul(stride, steps))


# -- numbers: the strides that eager chooses -------------------------------------------------------


def is_ambiguous(operands: Iterable[torch.Tensor]) -> bool:
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
