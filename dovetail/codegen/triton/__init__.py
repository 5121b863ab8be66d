"""The GPU: Triton kernels."""
from __future__ import annotations

from dataclasses import dataclass

from dovetail.codegen.triton.kernel import Emitter, TritonKernel
from dovetail.codegen.triton.product import ProductEmitter, find_products
from dovetail.ir.loop import Buffer
from dovetail.ir.schedule import Group


@dataclass(frozen=True, slots=True)
class TritonTarget:
    language: str = "triton"

    def emit(self, group: Group, buffers: dict[str, Buffer]) -> TritonKernel:
        make = ProductEmitter if find_products(group) else Emitter
        return make(group, buffers).emit()
