"""What a target must offer.

    CppTarget(64).emit(group, buffers)  ->  Launchable: the kernel's text and how to call it

C++ is one; Triton is another. What does not depend on the target is in codegen/analysis.py.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dovetail.ir.expr import Expr
from dovetail.ir.loop import Buffer
from dovetail.ir.schedule import Group


@dataclass(frozen=True, slots=True)
class Launchable:
    """`text` has the user's names; `key` is the same for kernels that differ in names only. Parameters are
    the buffers `params`, then the size symbols, then run-time numbers."""

    text: str
    key: str
    symbol: str
    params: tuple[str, ...]
    sizes: tuple[Expr, ...]
    numbers: tuple[str, ...]
    may_fail: bool
    prelude: tuple[str, ...]


class Target(Protocol):
    """One kind of device."""

    @property
    def language(self) -> str: ...

    def emit(self, group: Group, buffers: dict[str, Buffer]) -> Launchable: ...
