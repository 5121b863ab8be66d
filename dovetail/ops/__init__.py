"""The fate of every ATen op, the prims, and the rewriting of ATen graphs into prims."""
from dovetail.ops.decomp import (
    activation,
    attention,
    copies,
    factories,
    foreach,
    index,
    losses,
    matmul,
    norms,
    pointwise,
    pooling,
    reductions,
    resize,
    views,
)
from dovetail.ops.decompose import decompose
from dovetail.ops.fates import fates, show_fates

__all__ = ["decompose", "fates", "show_fates"]
FAMILIES = (
    activation, attention, copies, factories, foreach, index, losses, matmul, norms, pointwise, pooling,
    reductions, resize, views,
)  # fmt: skip
