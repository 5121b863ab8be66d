"""The functional twin of every op that writes: OpOverload -> Twin.

    aten.add_.Tensor(self, other)            aten.add.Tensor, and result 0 is the new self
    aten.mul.out(self, other, *, out)        aten.mul.Tensor, and result 0 is the new out
    aten._native_batch_norm_legit(...)       ..._functional: three results, then the new statistics

The twin is found by schema: the same arguments less `out`, no writes.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from dovetail.errors import UnsupportedMutation


@dataclass(frozen=True, slots=True)
class Twin:
    """`written` names the arguments that receive the trailing results of `op`."""

    op: Any
    written: tuple[str, ...]
    outs: tuple[str, ...]
    """Of the written arguments, those that op itself does not take."""
    positions: dict[str, int]
    defaults: tuple[Any, ...]
    """By position: what the dispatcher leaves out when it is the default, which op may not have."""


_twins: Final[dict[Any, Twin]] = {}


def twin_of(func: Any) -> Twin:
    found = _twins.get(func)
    if found is None:
        found = _twins[func] = _find(func)
    return found


def _types(arguments: Any) -> list[str]:
    return [str(argument.type) for argument in arguments]


def _find(func: Any) -> Twin:
    schema = func._schema
    namespace, base = schema.name.split("::")
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    outs = tuple(a.name for a in written if a.is_out)
    wanted = [a for a in schema.arguments if not a.is_out]
    positions = {a.name: i for i, a in enumerate(schema.arguments) if not a.kwarg_only}
    defaults = tuple(a.default_value for a in schema.arguments if not a.kwarg_only)
    stem = base[:-1] if base.endswith("_") and not outs else base
    for name in (stem, f"{stem}_functional"):
        packet = getattr(getattr(torch.ops, namespace), name, None)
        for overload in packet.overloads() if packet is not None else ():
            candidate = getattr(packet, overload)
            if _is_twin(candidate._schema, wanted, len(written)):
                return Twin(candidate, tuple(a.name for a in written), outs, positions, defaults)
    raise UnsupportedMutation(detail=f"{func} writes to its arguments and has no functional form")


def _is_twin(schema: Any, wanted: list[Any], writes: int) -> bool:
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return False
    return _types(schema.arguments) == _types(wanted) and len(schema.returns) >= writes
