"""The fate of every ATen op, the prims, and the rewriting of ATen graphs into prims."""

from dovetail.ops import decomp
from dovetail.ops.decompose import decompose
from dovetail.ops.registry import fates
