"""What a target must offer.

    TARGETS["cpu"].emit(group, buffers)  ->  Launchable: the kernel's text and how to call it

C++ is one; Triton is another. What does not depend on the target is in codegen/analysis.py.
"""
from __future__ import annotations

from typing import Protocol

from dovetail.ir.expr import Expr
from dovetail.ir.loop import Buffer
from dovetail.ir.schedule import Group


class Launchable(Protocol):
    """A kernel's text and its parameters: buffers, size symbols, run-time numbers, in that order."""

    @property
    def text(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def symbol(self) -> str: ...
    @property
    def params(self) -> tuple[str, ...]: ...
    @property
    def sizes(self) -> tuple[Expr, ...]: ...
    @property
    def numbers(self) -> tuple[str, ...]: ...
    @property
    def may_fail(self) -> bool: ...
    @property
    def prelude(self) -> tuple[str, ...]: ...


class Target(Protocol):
    """One kind of device."""

    @property
    def language(self) -> str: ...

    def emit(self, group: Group, buffers: dict[str, Buffer]) -> Launchable: ...
