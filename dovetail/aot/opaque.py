"""Backwards of custom ops that cannot be traced, as one call each.

    @op.register_autograd                    def joint(..., tangent_0):
    def backward(ctx, grad):                     op_grad = dovetail.backward_1f3a.default((saved, tangent_0))
        sizes = ctx.offsets.tolist()     ->      op_grad_0 = get(op_grad, 0)
        ...

Such a backward reads the value of a tensor, which a Fake does not have. It is recorded as an op of its
own that takes what the context saved and the gradients, and runs the user's function on them. Each
gradient has the shape of the input it belongs to.
"""
from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS

from dovetail.errors import DataDependentValue, UnsupportedMutation
from dovetail.util.library import define_op
from dovetail.util.noun import Noun


class Opaque(Noun, eq=False):
    """A call to record: op(tensors), whose results have the shapes of `like`, at `positions`."""

    op: str
    tensors: list[torch.Tensor]
    like: list[torch.Tensor]
    positions: list[int]
    count: int


def definition_of(func: Any) -> Any | None:
    """The custom op that func belongs to, if it has a backward of its own."""
    found = OPDEFS.get(func._schema.name)
    return found if found is not None and found._backward_fn is not None else None


def watch(definition: Any, record: Callable[[Opaque], list[Any]]) -> Callable[[], None]:
    """From here on, a backward of the op that needs a tensor's value is handed to `record`. Returns what
    ends that."""
    backward, set_up = definition._backward_fn, definition._setup_context_fn

    def watched_set_up(ctx: Any, **given: Any) -> None:
        ctx.dovetail_inputs = given["inputs"]
        if set_up is not None:
            set_up(ctx, **given)

    def watched_backward(ctx: Any, *grads: Any) -> Any:
        try:
            return backward(ctx, *grads)
        except DataDependentValue:
            call = _describe(backward, ctx, grads)
            results: list[Any] = [None] * call.count
            for position, made in zip(call.positions, record(call)):
                results[position] = made
            return tuple(results)

    definition._backward_fn, definition._setup_context_fn = watched_backward, watched_set_up

    def end() -> None:
        definition._backward_fn, definition._setup_context_fn = backward, set_up

    return end


def _describe(backward: Callable[..., Any], ctx: Any, grads: Sequence[Any]) -> Opaque:
    """Define the op that runs this backward on real tensors."""
    inputs = ctx.dovetail_inputs
    kept = {k: v for k, v in vars(ctx).items() if k not in ("dovetail_inputs", "needs_input_grad")}
    named = [name for name, value in kept.items() if isinstance(value, torch.Tensor)]
    saved = list(ctx.saved_tensors)
    present = [i for i, grad in enumerate(grads) if grad is not None]
    needed = tuple(ctx.needs_input_grad[: len(inputs)])
    positions = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and needed[i]]
    like = [inputs[i] for i in positions]
    is_static = all(isinstance(size, int) for x in like for size in x.shape)
    forms = [(tuple(x.shape) if is_static else None, x.dtype, x.device) for x in like]

    def run(given: list[torch.Tensor]) -> list[torch.Tensor]:
        rest = iter(given)
        tensors = tuple(next(rest) for _ in saved)
        context = SimpleNamespace(**kept, saved_tensors=tensors, needs_input_grad=needed)
        for name in named:
            setattr(context, name, next(rest))
        real: list[Any] = [None] * len(grads)
        for i in present:
            real[i] = next(rest)
        made = backward(context, *real)
        made = made if isinstance(made, (list, tuple)) else (made,)
        return [_laid_out(made[i], *form) for i, form in zip(positions, forms)]

    op = define_op(f"backward_{uuid.uuid4().hex}(Tensor[] given) -> Tensor[]", run)
    tensors = [*saved, *(kept[n] for n in named), *(grads[i] for i in present)]
    return Opaque(str(op), tensors, like, positions, len(inputs))


def _laid_out(grad: Any, shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Row-major, as the graph was told, and in memory of its own; zeros where there is none."""
    if grad is not None:
        return grad.clone(memory_format=torch.contiguous_format)  # type: ignore[no-any-return]
    if shape is None:
        detail = "a custom op's backward gave no gradient for an input of symbolic size"
        raise UnsupportedMutation(detail=detail)
    return torch.zeros(shape, dtype=dtype, device=device)
