"""Type promotion as eager does it.

    promoted([f32[8], 2, i64[]])  ->  F32        tensors beat 0-d tensors beat Python numbers,
                                                 each only within their own category
"""
from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Final

import torch

from dovetail.ir.expr import Expr
from dovetail.ir.types import BOOL, BY_TORCH_NAME, C64, F32, F64, I64, DType, TensorType

_CATEGORY: Final = {"bool": 0, "int": 1, "uint": 1, "float": 2, "complex": 3}


@cache
def promote(a: DType, b: DType) -> DType:
    """The common type of two tensor types."""
    if a is b:
        return a
    common = torch.promote_types(getattr(torch, a.torch_name), getattr(torch, b.torch_name))
    return BY_TORCH_NAME[str(common).removeprefix("torch.")]


def number_dtype(value: object) -> DType:
    """What a Python number counts as."""
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, (int, Expr)):
        return I64
    return C64 if isinstance(value, complex) else F32


def promoted(operands: Iterable[object]) -> DType:
    """The common type of tensors (given as TensorType) and Python numbers."""
    ranks: list[DType | None] = [None, None, None]  # tensors, 0-d tensors, numbers
    for operand in operands:
        if isinstance(operand, TensorType):
            place, dtype = (0 if operand.shape else 1), operand.dtype
        else:
            place, dtype = 2, number_dtype(operand)
        found = ranks[place]
        ranks[place] = dtype if found is None else promote(found, dtype)
    result: DType | None = None
    for rank, found in enumerate(ranks):
        if found is None:
            continue
        if result is None or _CATEGORY[found.kind] > _CATEGORY[result.kind]:
            is_wide = rank == 2 and (found, result) == (C64, F64)  # a number takes its category's default
            result = BY_TORCH_NAME["complex128"] if is_wide else found
    assert result is not None
    return result


@cache
def rounded(value: float, dtype: DType) -> float:
    """The nearest number of that type."""
    return float(torch.tensor(value, dtype=getattr(torch, dtype.torch_name)).item())


def compute_dtype(dtype: DType) -> DType:
    """Where eager does the arithmetic: fp16 and bf16 compute in fp32."""
    return F32 if dtype.is_low_precision else dtype
