"""Fake tensors: shapes, dtypes, devices and aliasing without data; and between torch's nouns and ours.

    type_of(fake_like(torch.zeros(8, 64)))      f32[8, 64]
    to_torch_dtype(F32)                         torch.float32
"""
from __future__ import annotations

from functools import cache
from typing import Final

import torch

from dovetail.errors import FailedFake
from dovetail.fake.calls import SymbolicCalls
from dovetail.fake.symbolic import expr_of
from dovetail.fake.tensor import Fake, FakeMode, fake_like, infer, make_static
from dovetail.ir.types import BY_TORCH_NAME, Device, DType, TensorType

_FROM_TORCH: Final[dict[torch.dtype, DType]] = {
    getattr(torch, name): dtype for name, dtype in BY_TORCH_NAME.items() if hasattr(torch, name)
}
_TO_TORCH: Final[dict[DType, torch.dtype]] = {ours: torchs for torchs, ours in _FROM_TORCH.items()}


def from_torch_dtype(dtype: torch.dtype) -> DType:
    found = _FROM_TORCH.get(dtype)
    if found is None:
        raise FailedFake(function=f"a tensor of {dtype}", detail="this element type is not compiled")
    return found


def to_torch_dtype(dtype: DType) -> torch.dtype:
    return _TO_TORCH[dtype]


@cache
def from_torch_device(device: torch.device) -> Device:
    return Device(device.type, device.index)


def to_torch_device(device: Device) -> torch.device:
    return torch.device(device.kind) if device.index is None else torch.device(device.kind, device.index)


def type_of(tensor: torch.Tensor) -> TensorType:
    form, shapes = getattr(tensor, "form", None), getattr(tensor, "shapes", None)
    if form is not None and shapes is not None:
        form = form.map(shapes)
        shape, stride = form.shape, form.stride
    else:
        shape, stride = tuple(map(expr_of, tensor.shape)), tuple(map(expr_of, tensor.stride()))
    return TensorType(shape, stride, from_torch_dtype(tensor.dtype), from_torch_device(tensor.device))
