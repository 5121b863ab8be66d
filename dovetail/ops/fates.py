"""The table of fates, for people.

    aten.add.Tensor      prim
    aten.gelu.default    decomposition
    aten.mm.default      template
    aten.sort.default    fallback
"""
from __future__ import annotations

import torch

from dovetail.ops.registry import DECOMPOSITIONS, TEMPLATES, fate_of


def fates() -> dict[str, str]:
    """Every functional ATen op of this PyTorch, and what becomes of it."""
    names = set(DECOMPOSITIONS) | set(TEMPLATES)
    for packet in dir(torch.ops.aten):
        found = getattr(torch.ops.aten, packet)
        overloads = getattr(found, "overloads", None)
        if overloads is None:
            continue
        for overload in overloads():
            op = getattr(found, overload)
            if not op._schema.is_mutable:
                names.add(str(op))
    return {name: fate_of(name) for name in sorted(names)}
