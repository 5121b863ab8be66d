"""What the schema of an ATen op says, looked up once: OpOverload -> Record.

    record(torch.ops.aten.add_.Tensor)   Record(name="aten.add_.Tensor", mutates=True, ...)

`fate` is how `infer` treats the op; most are "meta": ask the meta kernel.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch._library.simple_registry import singleton as registry

from dovetail.fake.known import LISTED
from dovetail.fake.rules import Rule, find_rule
from dovetail.util.noun import Noun

_RANDOM: Final = torch.Tag.nondeterministic_seeded
_DEPENDENT: Final = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

FATES: Final[dict[str, str]] = {
    **{f"aten.{name}.default": "lift" for name in ("lift_fresh", "lift", "lift_fresh_copy")},
    **{f"aten.{name}.default": "item" for name in ("_local_scalar_dense", "item")},
    **{f"aten.{name}.default": name for name in ("size", "stride", "numel")},
    **{f"aten.{name}.Tensor": "index" for name in ("index", "_unsafe_index")},
    **{f"aten.{name}.default": "alias" for name in ("_conj", "_neg_view")},
}
"""Ops that the schema alone does not describe."""

POINTWISE: Final = frozenset(
    "aten." + name
    for name in """
    floor_divide hardswish hardswish_ hardswish_backward hardsigmoid_backward hardtanh_backward mish_backward
    leaky_relu_backward elu_backward softplus_backward _prelu_kernel softshrink_backward hardshrink_backward
    rsub""".split()
)
"""Ops that go over elements as those do that torch tags so."""

PROBED: Final = frozenset({"aten.isin.Tensor_Tensor", "aten.histogram.bin_ct"}) | {
    f"aten.{name}.default" for name in """
    _embedding_bag _embedding_bag_forward_only _fft_c2r _fft_r2c _linalg_svd linalg_eig max_unpool2d
    max_unpool3d geqrf _histogramdd_bin_edges _histogramdd_from_bin_cts fractional_max_pool3d_backward
    multi_margin_loss_backward multilabel_margin_loss_backward _ctc_loss_backward _sample_dirichlet
    _dirichlet_grad multi_margin_loss multilabel_margin_loss_forward max_pool3d_with_indices
    nonzero_static""".split()
}  # fmt: skip
"""Ops whose meta kernel is missing, or says other sizes or strides than the CPU gives: tried out on zeros."""


class Record(Noun):
    """One op. `fate`: meta, decompose, dependent, probe, or a value of FATES."""

    name: str
    fate: str
    mutates: bool
    """Writes to some argument."""
    is_view: bool
    """Some result shares memory with an argument it does not write to."""
    changes_shape: bool
    """Writes the sizes of its first argument, such as t_ and resize_."""
    is_out: bool
    is_random: bool
    is_pointwise: bool
    device_at: int | None
    """Position of the argument `device`, where there is one."""
    names: tuple[str, ...]
    """Of the arguments, in the schema's order."""
    keyword_only: tuple[str, ...]
    defaults: tuple[tuple[str, Any], ...]
    rule: Rule | None
    """The sizes of its results where sizes are symbolic."""
    base: str
    """The name without the overload."""
    is_known: bool
    """known.py may say what it returns."""
    count: int
    """How many results."""
    written_fake: Callable[..., Any] | None
    """What the author of a custom op registered for tensors without data."""
    is_free: bool
    """The arguments' metadata say all about the results, which are new or arguments: may be remembered."""


def _fate(func: Any, name: str) -> str:
    if name in FATES:
        return FATES[name]
    if name in PROBED:
        return "probe"
    if any(tag in func.tags for tag in _DEPENDENT):
        return "dependent"
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    is_composite = has_kernel(func.name(), "CompositeImplicitAutograd") and not has_kernel(func.name(), "CPU")
    return "decompose" if is_composite else "meta"


@cache
def record(func: Any) -> Record:
    schema = func._schema
    name = str(func)
    fate = _fate(func, name)
    aliases = [a.alias_info for a in schema.arguments if a.alias_info is not None]
    mutates, is_out = any(alias.is_write for alias in aliases), any(a.is_out for a in schema.arguments)
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    base = name.rsplit(".", 1)[0]
    is_pointwise = torch.Tag.pointwise in func.tags or base in POINTWISE
    is_random = _RANDOM in func.tags
    returns_tensors = all(str(r.type) == "Tensor" for r in schema.returns) and len(schema.returns) > 0
    is_simple = is_pointwise and not is_random and len(schema.returns) == 1
    changes_shape = torch.Tag.inplace_view in func.tags or name.startswith(("aten.resize", "aten.set_"))
    names = [a.name for a in schema.arguments]
    given = [(a.name, a.default_value) for a in schema.arguments if a.has_default_value()]
    return Record(
        name=name, fate=fate, mutates=mutates, is_view=is_view, changes_shape=changes_shape,
        is_out=is_out, is_random=is_random, is_pointwise=is_pointwise, base=base, names=tuple(names),
        device_at=names.index("device") if "device" in names else None,
        keyword_only=tuple(a.name for a in schema.arguments if a.kwarg_only),
        defaults=tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in given),
        rule=find_rule(base, is_pointwise, "._foreach_" in name, names if len(schema.returns) == 1 else ()),
        is_known=returns_tensors and not is_out and (is_simple or base in LISTED),
        written_fake=None if func.namespace == "aten" else registry.find(schema.name).fake_impl.kernel,
        is_free=fate in ("meta", "probe") and not (changes_shape or is_out or base == "aten.scalar_tensor"),
        count=len(schema.returns),
    )  # fmt: skip
