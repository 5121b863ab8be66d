"""Ops of Dovetail's own, defined while it runs.

define_op("add_5c1e(Tensor(w0!) t0, Tensor t1) -> ()", run, fake)  ->  torch.ops.dovetail.add_5c1e.default
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

_library: Final = torch.library.Library("dovetail", "FRAGMENT")  # type: ignore[no-untyped-call]


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
