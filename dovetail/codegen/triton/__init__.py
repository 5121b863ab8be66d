"""The GPU: Triton kernels."""
from __future__ import annotations

from dataclasses import dataclass

from dovetail.codegen.triton.kernel import TritonKernel, emit_kernel
from dovetail.ir.loop import Buffer
from dovetail.ir.schedule import Group


@dataclass(frozen=True, slots=True)
class TritonTarget:
    language: str = "triton"

    def emit(self, group: Group, buffers: dict[str, Buffer]) -> TritonKernel:
        return emit_kernel(group, buffers)
