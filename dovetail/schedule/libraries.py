"""Choose the library function for a product of matrices.

    Loops -> Loops
    o = aten.mm(x, w.t())   becomes   o = mkldnn._linear_pointwise(x, w, None, "none", (), "")

oneDNN is a tenth faster than the BLAS behind aten.mm once the product is large enough to hide its
setup; small products stay where they are.
"""
from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Final

import torch

from dovetail.ir.expr import ONE
from dovetail.ir.loop import BufferRef, Extern, Loops
from dovetail.ir.types import F32, TensorType

FEWEST_ROWS: Final = 32
SMALLEST_PRODUCT: Final = 1 << 22
LINEAR: Final = "mkldnn._linear_pointwise.default"


@cache
def has_linear() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def choose_libraries(loops: Loops) -> Loops:
    if loops.device.kind != "cpu" or not has_linear():
        return loops
    steps = tuple(_linear(step) if isinstance(step, Extern) else step for step in loops.steps)
    return replace(loops, steps=steps)


def _linear(extern: Extern) -> Extern:
    if extern.op != "aten.mm.default" or extern.kwargs or not extern.into:
        return extern
    x, w = extern.args
    if not isinstance(x, BufferRef) or not isinstance(w, BufferRef) or not is_worth_it(x.type, w.type):
        return extern
    turned = replace(w.type, shape=w.type.shape[::-1], stride=w.type.stride[::-1])
    args = (x, replace(w, type=turned), None, "none", (), "")
    return replace(extern, op=LINEAR, args=args, into=False)


def is_worth_it(x: TensorType, w: TensorType) -> bool:
    """Large, single precision, rows of x one after another, w dense in either order."""
    if x.dtype is not F32 or w.dtype is not F32 or not x.is_contiguous:
        return False
    sizes = (*x.shape, w.shape[1])
    if not all(size.is_const for size in sizes):
        return False
    rows, depth, columns = (size.value for size in sizes)
    dense = w.is_contiguous or (w.stride[0] is ONE and w.stride[1] is w.shape[0])
    return dense and rows >= FEWEST_ROWS and rows * depth * columns >= SMALLEST_PRODUCT
