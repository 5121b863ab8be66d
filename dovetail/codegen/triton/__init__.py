"""The GPU: Triton kernels."""
from __future__ import annotations

from dovetail.codegen.target import Launchable
from dovetail.codegen.triton.kernel import Emitter
from dovetail.codegen.triton.product import ProductEmitter, find_products
from dovetail.ir.loop import Buffer
from dovetail.ir.schedule import Group


def emit_kernel(group: Group, buffers: dict[str, Buffer]) -> Launchable:
    make = ProductEmitter if find_products(group) else Emitter
    return make(group, buffers).emit()
