"""Tensors without data, on the device they pretend to be on.

    with FakeMode():
        x = fake_like(torch.randn(8, 64))      Fake: cpu, f32, (8, 64)
        x @ x.t()                              Fake: (8, 8); no arithmetic was done

A Fake is a wrapper subclass; every ATen call on one arrives in `infer`, which asks a shape rule of
ours or the op's meta kernel. Autograd runs above, in C++, as for any tensor.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class Fake(torch.Tensor):
    """`meta` is the same tensor on the meta device; `constant` its value where that is known."""

    meta: torch.Tensor
    constant: torch.Tensor | None

    @staticmethod
    def __new__(
        cls, meta: torch.Tensor, device: torch.device, requires_grad: bool = False, constant: torch.Tensor | None = None
    ) -> Fake:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            layout=meta.layout,
            device=device,
            requires_grad=requires_grad,
        )
        self.meta, self.constant = meta, constant
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Fake({self.dtype}, {tuple(self.shape)}, {self.device})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return infer(func, args, kwargs or {})


class FakeMode(TorchDispatchMode):
    """Makes factories (torch.zeros...) return Fakes too."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return infer(func, args, kwargs or {})


def fake_like(tensor: torch.Tensor) -> Fake:
    """A Fake with the tensor's metadata."""
    meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return Fake(meta, tensor.device, tensor.requires_grad)


def infer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an ATen op, as Fakes."""
    raise NotImplementedError
