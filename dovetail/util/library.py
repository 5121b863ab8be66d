"""Ops by name, and ops of Dovetail's own, defined while it runs.

define_op("add_5c1e(Tensor(w0!) t0, Tensor t1) -> ()", run, fake)  ->  torch.ops.dovetail.add_5c1e.default
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final

import torch
from torch._ops import OpOverload

_library: Final = torch.library.Library("dovetail", "FRAGMENT")  # type: ignore[no-untyped-call]


def find_op(name: str) -> OpOverload:
    """The operator that prints as `name`."""
    namespace, op, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload)  # type: ignore[no-any-return]


@cache
def has_mkldnn(*ops: str) -> bool:
    """Whether oneDNN is there, and these ops of torch's for it."""
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, op) for op in ops)


def restride(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A copy laid out in memory like this."""
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _write_window(x: torch.Tensor, src: torch.Tensor, *window: Any) -> torch.Tensor:
    """The offset counts from the first element, wherever in its memory that is."""
    result = restride(x, x.stride())
    result.as_strided(*window).copy_(src)
    return result


def _call_in_grad_mode(op: Callable[..., Any], *args: Any) -> Any:
    """For kernels that keep what their backward needs only while grad mode is on."""
    with torch.enable_grad():
        return op(*(arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args))


def _solve_plainly(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Kernels read memory, and the result may be lazily conjugated."""
    return torch.ops.aten.linalg_lu_solve.default(*args, **kwargs).resolve_conj()


MEANT: Final[dict[str, Callable[..., Any]]] = {
    "aten.linalg_lu_solve.default": _solve_plainly,
    "aten.as_strided_scatter.default": _write_window,
    "aten.mkldnn_rnn_layer.default": partial(_call_in_grad_mode, torch.ops.aten.mkldnn_rnn_layer.default),
}
"""Ops that do something else, where a graph calls them, than the dispatcher would."""


def define_op(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any] | None = None,
    tags: tuple[torch.Tag, ...] = (),
) -> Any:  # fmt: skip
    """`fake` is for tensors without data; None where `run` itself will do, or nobody asks."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=tags)  # type: ignore[no-untyped-call]
    _library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    if fake is not None:
        torch.library.register_fake(f"dovetail::{name}", fake, lib=_library)
    return getattr(torch.ops.dovetail, name).default
