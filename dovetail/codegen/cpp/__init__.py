"""The CPU: C++ with vectors and OpenMP."""
from __future__ import annotations

from dataclasses import dataclass

from dovetail.codegen.cpp.kernel import emit_kernel
from dovetail.codegen.target import Launchable
from dovetail.ir.loop import Buffer
from dovetail.ir.schedule import Group


@dataclass(frozen=True, slots=True)
class CppTarget:
    """`vector_bytes` is the width of a vector register; 0 writes plain loops. `cache_bytes` is the size of
    the largest cache."""

    vector_bytes: int
    cache_bytes: int
    language: str = "c++"

    def emit(self, group: Group, buffers: dict[str, Buffer]) -> Launchable:
        return emit_kernel(group, buffers, self.vector_bytes, self.cache_bytes)
