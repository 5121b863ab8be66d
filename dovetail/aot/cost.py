"""What recomputing a node in backward would cost, from its op's name.

class_of("prims.exp")           'cheap'      one more term in a fused loop
class_of("aten.view.default")   'view'       nothing
class_of("prims.sum")           'reduction'  reads its input again
class_of("aten.mm.default")     'heavy'      matmul, convolution, attention, library calls of any kind
class_of("aten.rand.default")   'random'     must run once
"""
from __future__ import annotations

from functools import cache
from typing import Final

import torch

from dovetail.fake.record import record as facts_of
from dovetail.ir.graph import GET, Node
from dovetail.ops.prims import PRIMS
from dovetail.ops.registry import is_impure
from dovetail.util.library import find_op

_BY_KIND: Final = {
    "pointwise": "cheap", "view": "view", "create": "cheap", "reduction": "reduction", "gather": "cheap",
    "scatter": "reduction", "scan": "reduction", "join": "cheap",
}  # fmt: skip


@cache
def class_of(op: str) -> str:
    if op == GET:
        return "view"
    if op in PRIMS:
        return _BY_KIND[PRIMS[op].kind]
    func = find_op(op)
    if is_impure(op) or torch.Tag.nondeterministic_seeded in func.tags:
        return "random"
    return "view" if facts_of(func).is_view else "heavy"


def kind_of(node: Node) -> str:
    """The class of its op, if it reads tensors, and draws numbers: attention without dropout does not."""
    kind = class_of(node.op)
    if kind != "random":
        return "cheap" if kind == "heavy" and not node.operands else kind
    names = [argument.name for argument in find_op(node.op)._schema.arguments]
    chances = [arg for name, arg in (*zip(names, node.args), *node.kwargs) if name == "dropout_p"]
    return "heavy" if "dropout_p" in names and not any(chances) else kind
