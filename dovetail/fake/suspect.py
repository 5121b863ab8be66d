"""Calls that eager may refuse: the tables of known.py do not answer them, eager's own kernel does.

    aten.copy_ of f32[4] into f32[2, 3]       ->  True: the kernel is run on zeros, and says what is wrong
    aten.mm of f32[2, 3] and i64[3, 2]        ->  True, because torch's meta kernel would not mind

A call suspected for nothing costs time only, so a check may be stricter than eager.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch

from dovetail.fake.form import Form, Shape, Unruled
from dovetail.fake.rules import Call, index, pool, select, slice_
from dovetail.ir.expr import ONE

Check: TypeAlias = Callable[[Call], bool]


class Suspected(Exception):
    """Eager may refuse the call."""


def is_suspect(base: str, c: Call) -> bool:
    checks = CHECKS.get(base.removesuffix("_"), ())
    try:
        return not _has_plain_axes(base, c) or not all(check(c) for check in checks)
    except (IndexError, Unruled):  # a rank too low, or a mask, whose number of elements is not known
        return base not in _MASKED


def _has_plain_axes(base: str, c: Call) -> bool:
    """Every axis is one of the first tensor's, and named once."""
    dims: Any = c.get("dim", c.get("dims"))
    if dims is None:
        return True
    sizes = c.values.get("input_sizes")
    rank = len(sizes) if sizes is not None else c.first.ndim + (base == "aten.stack")
    axes = dims if isinstance(dims, tuple) else (dims,)
    rank = max(rank, 1)
    return all(-rank <= d < rank for d in axes) and len({d % rank for d in axes}) == len(axes)


def _fits(inner: Shape, outer: Shape) -> bool:
    """Whether inner can be broadcast to outer."""
    return len(inner) <= len(outer) and all(a is b or a is ONE for a, b in zip(inner[::-1], outer[::-1]))


def _is_within(inner: Shape, outer: Shape, free: int | None = None) -> bool:
    pairs = enumerate(zip(inner, outer))
    return len(inner) == len(outer) and all(a.value <= b.value or d == free for d, (a, b) in pairs)


def _source_agrees(c: Call) -> bool:
    source = c.get("src", c.get("source", c.get("values")))
    return not isinstance(source, Form) or source.dtype == c["self"].dtype


def _index_fits(c: Call) -> bool:
    """gather and scatter: within the tensor but for the axis, and within what is written."""
    x, at, source = c["self"], c["index"].shape, c.values.get("src")
    fits = not isinstance(source, Form) or _is_within(at, source.shape)
    return fits and _is_within(at, x.shape, c["dim"] % max(x.ndim, 1))


def _rows_fit(c: Call) -> bool:
    """index_add and its like: one slice of the source for each index."""
    x, at, source = c["self"], c["index"], c.values.get("source")
    d = c["dim"] % max(x.ndim, 1)
    wanted = (*x.shape[:d], at.numel, *x.shape[d + 1 :])
    return at.ndim == 1 and (not isinstance(source, Form) or source.shape == wanted)


def _margins_fit(c: Call) -> bool:
    margins, sizes = (x if isinstance(x, tuple) else (x,) for x in (c.get("padding", 0), c["kernel_size"]))
    return bool(2 * max(margins, default=0) <= min(sizes))


def _is_inexact(c: Call) -> bool:
    dtype: Any = c.get("dtype") or c.first.dtype
    return bool(dtype.is_floating_point or dtype.is_complex)


_MASKED: Final = frozenset({"aten.index_put", "aten.index_put_", "aten._index_put_impl_"})

_ROWS: Final[tuple[tuple[Check, str], ...]] = (
    (lambda c: len({t.dtype for t in c.tensors}) == 1,
     "mm bmm addmm baddbmm mv dot convolution huber_loss soft_margin_loss"),
    (lambda c: c.get("index", c.get("indices")).dtype in (torch.int32, torch.int64),
     "index_select embedding gather scatter scatter_add index_add index_copy index_fill"),
    (lambda c: c.first.dtype != torch.bool, "mm bmm addmm baddbmm mv addmv dot vdot"),
    (_source_agrees, "scatter scatter_add index_add index_copy index_put _index_put_impl"),
    (lambda c: len({t.shape for t in c.tensors}) == 1, "dot"),
    (_index_fits, "gather scatter scatter_add"),
    (_rows_fit, "index_add index_copy index_fill"),
    (lambda c: _fits(c["values"].shape, index(c)), "index_put _index_put_impl"),  # type: ignore[arg-type]
    (lambda c: _fits(c["src"].shape, c["self"].shape), "copy"),
    (lambda c: _fits(c["mask"].shape, c["self"].shape) and c["mask"].dtype == torch.bool, "masked_fill"),
    (lambda c: c["src"].shape == select(c).shape, "select_scatter"),  # type: ignore[union-attr]
    (lambda c: c["src"].shape == slice_(c).shape, "slice_scatter"),  # type: ignore[union-attr]
    (lambda c: all(size.value > 0 for size in pool(2, c)), "max_pool2d_with_indices avg_pool2d"),  # type: ignore[union-attr]
    (_margins_fit, "max_pool2d_with_indices avg_pool2d"),
    (lambda c: len(c["repeats"]) >= c.first.ndim, "repeat"),
    (lambda c: c.first.ndim > 1, "tril triu"),
    (_is_inexact, "var std var_mean std_mean"),
    (lambda c: c.first.numel.value > 0, "amax amin argmax argmin max min median"),
    (lambda c: c["delta"] > 0, "huber_loss"),
    (lambda c: c["beta"] >= 0, "smooth_l1_loss"),
)
CHECKS: Final[dict[str, list[Check]]] = {}
"""Op -> what must hold."""
for _check, _names in _ROWS:
    for _name in _names.split():
        CHECKS.setdefault(f"aten.{_name}", []).append(_check)
