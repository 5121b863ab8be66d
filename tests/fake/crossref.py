"""Every ATen call of real code, run a second time on fakes: their metadata must be equal.

    with Crossref() as seen: torch.nn.functional.gelu(x).sum().backward()
    seen.differences      []

Used on PyTorch's own sample inputs, forward and backward.
"""
from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dovetail.errors import Break, DataDependentValue
from dovetail.fake import fake_like, infer

IGNORED = {"aten.lift_fresh.default", "aten.unsafe_split.Tensor", "aten._to_sparse.default"}


def describe(value: Any) -> Any:
    """Strides only where they mean something."""
    if not isinstance(value, torch.Tensor):
        return None
    strides = tuple(s if n > 1 and value.numel() else None for n, s in zip(value.size(), value.stride()))
    offset = value.storage_offset() if value.numel() else 0
    return tuple(value.size()), strides, value.dtype, str(value.device), offset


class Crossref(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.differences: list[str] = []
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(func) in IGNORED or "out" in kwargs:
            return func(*args, **kwargs)
        try:
            fakes = tree_map_only(torch.Tensor, lambda t: fake_like(t.detach()), (args, kwargs))
        except Break:
            return func(*args, **kwargs)
        real = func(*args, **kwargs)
        try:
            fake = infer(func, *fakes)
        except DataDependentValue:
            return real
        self.count += 1
        wanted, got = [describe(x) for x in tree_leaves(real)], [describe(x) for x in tree_leaves(fake)]
        if wanted != got:
            self.differences.append(f"{func}: eager {wanted}, fake {got}")
        return real
