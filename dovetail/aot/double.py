"""Gradients of gradients: differentiate the captured program itself.

    grad(f, x, create_graph=True)     backward runs with grad mode on: run f again in eager on the same
                                      inputs, with the same random numbers, and differentiate that

The compiled backward is no part of autograd's graph, so when its result must be differentiable the
program is recomputed by PyTorch. That is eager's speed and exactly eager's meaning, custom
autograd.Functions and no_grad regions included.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from dovetail.aot.joint import Joint
from dovetail.errors import UnsupportedMutation
from dovetail.ir.signature import Signature


class Eager:
    """The program as captured, and how its results correspond to the forward graph's values."""

    def __init__(self, joint: Joint, signature: Signature) -> None:
        self.joint, self.signature = joint, signature
        self.mutated = frozenset(m.input for m in signature.mutations)
        self.has_cuda = any(c.is_cuda for c in joint.constants) or torch.cuda.is_available()

    def random_state(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return torch.get_rng_state(), torch.cuda.get_rng_state_all() if self.has_cuda else []

    def run(self, inputs: Sequence[Any], random: Any) -> list[Any]:
        """The forward graph's values, differentiable."""
        assert self.joint.eager is not None
        with ExitStack() as stack:
            if random is not None:
                stack.enter_context(torch.random.fork_rng(range(len(random[1])), enabled=True))
                torch.set_rng_state(random[0])
                if random[1]:
                    torch.cuda.set_rng_state_all(random[1])
            for device, dtype in self.joint.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            results = self.joint.eager(*inputs)
        return self.values(inputs, eager_results(results))

    def values(self, inputs: Sequence[Any], results: list[Any]) -> list[Any]:
        found: list[Any] = [None] * self.signature.values
        for mutation in self.signature.mutations:
            found[mutation.output] = inputs[mutation.input]
        for output, result in zip(self.signature.outputs, results):
            if output.kind == "fresh":
                found[output.index] = result
            elif output.kind == "alias" and found[output.index] is None:
                found[output.index] = result._base if result._base is not None else result
        return found


def eager_results(results: Any) -> list[Any]:
    """What a captured program returned, as a flat list."""
    return list(results) if isinstance(results, (list, tuple)) else [results]


def differentiate(eager: Eager, ctx: Any, tangents: Sequence[Any]) -> tuple[Any, ...]:
    """The gradients of the inputs, themselves differentiable."""
    signature = eager.signature
    _ = ctx.saved_tensors  # raises as eager does when the graph was freed
    for i, (value, version) in enumerate(zip(ctx.inputs, ctx.versions)):
        if isinstance(value, torch.Tensor) and value._version != version and i not in eager.mutated:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: input {i} of a compiled region, whose backward is being differentiated"
            )
    if any(not mutation.under_no_grad for mutation in signature.mutations):
        raise UnsupportedMutation(
            detail="double backward through a region that writes to an input with a gradient"
        )
    inputs = [x.clone() if i in eager.mutated else x for i, x in enumerate(ctx.inputs)]
    values = eager.run(inputs, ctx.random)
    heads = [(values[p], t) for p, t in zip(signature.tangents, tangents) if t is not None]
    grads = torch.autograd.grad(
        [value for value, _ in heads],
        [ctx.inputs[i] for i in signature.grad_inputs],
        [tangent for _, tangent in heads],
        create_graph=True,
        allow_unused=True,
    )
    at = dict(zip(signature.grad_inputs, grads))
    return tuple(at.get(i) for i in range(signature.inputs))
