"""The GPU: Triton kernels."""
from __future__ import annotations

from dovetail.codegen.analysis import Launchable
from dovetail.codegen.triton.attention import AttentionEmitter, is_attention
from dovetail.codegen.triton.kernel import Emitter
from dovetail.codegen.triton.product import ProductEmitter, find_products
from dovetail.ir.loop import Buffer
from dovetail.ir.schedule import Group
from dovetail.util.noun import replace


def emit_kernel(group: Group, buffers: dict[str, Buffer], is_first: bool = False) -> Launchable:
    make = AttentionEmitter if is_attention(group) else ProductEmitter if find_products(group) else Emitter
    return replace(make(group, buffers, is_first=is_first).emit(), is_first=is_first)
