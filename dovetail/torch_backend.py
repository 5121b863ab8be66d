"""Dovetail behind torch's own front door: `torch.compile(model, backend="dovetail")`.

    (torch.fx.GraphModule, example inputs)  ->  callable

torch captures the program and hands the graph over; everything after capture is Dovetail's. This is the
only file that knows torch.compile's conventions. torch finds it through the entry point group
`torch_dynamo_backends`.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from dovetail.compile import compile_graph
from dovetail.options import make_options


def key_of(inputs: Sequence[Any]) -> tuple[object, ...]:
    """What compiled code may depend on. torch guards static properties itself, but hands out one graph
    for many sizes when shapes are dynamic, and then each set of sizes is compiled for itself."""
    form = lambda x: (x.dtype, x.device, x.size(), x.stride(), x.requires_grad)
    described = (form(item) if isinstance(item, torch.Tensor) else item for item in inputs)
    return (torch.is_grad_enabled(), *described)


def dovetail_backend(
    module: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """The examples torch gives may have no contents, so the graph is compiled at its first call."""
    chosen = make_options(mode, options)
    known: dict[tuple[object, ...], Callable[..., Any]] = {}

    def run(*inputs: Any) -> Any:
        key = key_of(inputs)
        compiled = known.get(key)
        if compiled is None:
            compiled = known[key] = compile_graph(module, list(inputs), chosen)
        return compiled(*inputs)

    return run
