"""torch.autograd.grad inside of a graph, less its checks of given gradients, which import SymPy."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def gradients_of(
    outputs: Sequence[Any], inputs: Sequence[Any], given: Sequence[Any], *, retain: bool, create: bool,
    unused: bool, as_zeros: bool,
) -> tuple[Any, ...]:  # fmt: skip
    if any(grad is None and out.numel() != 1 for out, grad in zip(outputs, given)):
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    tangents = [torch.ones_like(out) if grad is None else grad for out, grad in zip(outputs, given)]
    run = torch.autograd.Variable._execution_engine.run_backward  # type: ignore[attr-defined]
    found = run(tuple(outputs), tuple(tangents), retain, create, tuple(inputs), unused, False)
    return tuple(torch.zeros_like(x) if g is None and as_zeros else g for x, g in zip(inputs, found))
