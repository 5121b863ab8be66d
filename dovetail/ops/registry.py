"""The fate of every ATen op.

    prim           one prim of ours, same meaning                 (aten.exp.default)
    decomposition  rewritten into prims by a function of ours     (aten.gelu.default)
    template       a library call that Dovetail knows             (aten.mm.default)
    fallback       runs as itself through PyTorch's dispatcher    (everything else)
"""
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final, TypeAlias, TypeVar

import torch

from dovetail.ir.graph import GET, INPUT, Node
from dovetail.ops.prims import KINDS
from dovetail.util.library import find_op

Decomposition: TypeAlias = "Callable[..., Any]"
Rule = TypeVar("Rule", bound="Callable[..., Any]")

DECOMPOSITIONS: Final[dict[str, Decomposition]] = {}
SINGLE_PRIM: Final[set[str]] = set()
"""Decompositions that amount to one prim (plus promotion and broadcasting)."""

STRIDE_FREE: Final[frozenset[str]] = frozenset((
    "aten.mm.default", "aten.bmm.default", "aten.addmm.default", "aten.baddbmm.default",
))  # fmt: skip
"""Calls whose result does not depend on the strides of their arguments."""

ATTENTIONS: Final = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
TEMPLATES: Final[frozenset[str]] = STRIDE_FREE | frozenset((
    "aten.convolution.default", "mkldnn._convolution_pointwise.default", "mkldnn._linear_pointwise.default",
    "aten.convolution_backward.default", "aten.embedding_dense_backward.default",
    "aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default", "aten.index_add.default",
    "aten.gather.default", "aten.index_select.default", "aten.mv.default",
    *(f"aten._scaled_dot_product_{name}.default" for name in ATTENTIONS),
    *(f"aten._scaled_dot_product_{name}_backward.default" for name in ATTENTIONS),
    "aten._scaled_dot_product_attention_math.default", "aten.scaled_dot_product_attention.default",
    "aten.max_pool2d_with_indices.default", "aten.max_pool3d_with_indices.default",
    "aten.max_pool2d_with_indices_backward.default", "aten.max_pool3d_with_indices_backward.default",
    "aten.sort.default", "aten.sort.stable", "aten.topk.default",
))  # fmt: skip
"""Library calls that are the right choice, so they are not reported as fallbacks."""


class Declined(Exception):
    """A decomposition does not cover these arguments; the op stays a library call."""


def decline_if(condition: object) -> None:
    if condition:
        raise Declined


@cache
def may_act(op: str) -> bool:
    """Draws random numbers or acts on the outside (a check gives nothing), as far as its schema tells."""
    if op in KINDS or op in (GET, INPUT):
        return False
    if not op.startswith("aten."):
        return True
    found = find_op(op)
    return torch.Tag.nondeterministic_seeded in found.tags or not found._schema.returns


def is_impure(node: Node) -> bool:
    """Never duplicated, merged, reordered or dropped. Attention without dropout draws no numbers."""
    if not may_act(node.op):
        return False
    names = [argument.name for argument in find_op(node.op)._schema.arguments]
    chances = [arg for name, arg in (*zip(names, node.args), *node.kwargs) if name == "dropout_p"]
    return "dropout_p" not in names or any(chances)


def is_template(op: str) -> bool:
    """Random numbers are eager's own for the same seed only if eager's kernels draw them."""
    return op in TEMPLATES or (op.startswith("aten.") and may_act(op))


@cache
def is_view_call(op: str) -> bool:
    """Run as a library call, the result shares memory with an argument."""
    if op == "aten._unsafe_view.default":  # its schema does not say so
        return True
    return op.startswith("aten.") and any(r.alias_info is not None for r in find_op(op)._schema.returns)


def decomposes(*names: str, prim: bool = False) -> Callable[[Rule], Rule]:
    """Register a decomposition for ATen ops; a name without overload means `.default`."""

    def register(fn: Rule) -> Rule:
        for name in names:
            full = name if name.count(".") == 2 else f"{name}.default"
            assert full not in DECOMPOSITIONS, f"{full} has two decompositions"
            DECOMPOSITIONS[full] = fn
            if prim:
                SINGLE_PRIM.add(full)
        return fn

    return register


def fate_of(op: str) -> str:
    if op in SINGLE_PRIM or op.startswith("prims."):
        return "prim"
    if is_template(op):
        return "template"
    return "decomposition" if op in DECOMPOSITIONS else "fallback"


def fates() -> dict[str, str]:
    """Every functional ATen op of this PyTorch, and what becomes of it."""
    known = {*torch._C._dispatch_get_all_op_names()}  # those of TorchScript alone are not among them
    names = {name for name in DECOMPOSITIONS if not name.startswith("aten.")}
    for schema in torch._C._jit_get_all_schemas():
        is_known = f"{schema.name}.{schema.overload_name}".rstrip(".") in known and not schema.is_mutable
        if is_known and schema.name.startswith("aten::"):
            names.add(f"{schema.name.replace('::', '.')}.{schema.overload_name or 'default'}")
    return {name: fate_of(name) for name in sorted(names)}
