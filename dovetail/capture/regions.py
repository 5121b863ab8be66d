"""Torch constructs that take functions: checkpointing, Triton kernels.

    checkpoint(block, x)           block(x), interpreted; what it records is marked for recomputation
    kernel[grid](x, n, BLOCK=64)   a Triton kernel of the user's: one node, the op that launches it
"""
from __future__ import annotations

from typing import Any, Final

import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode

from dovetail.capture.builtins import Args, Kwargs, Special, on
from dovetail.capture.origins import PLAIN
from dovetail.capture.torch_calls import call_torch
from dovetail.capture.trace import Trace
from dovetail.errors import UnknownCall
from dovetail.fake.kernels import describe_launch, run_kernel, unwrapped
from dovetail.fake.tensor import Fake
from dovetail.ir.guard import Is
from dovetail.ops.flex import flex_attention
from dovetail.util.noun import replace


@on(run_kernel)
def _run_kernel(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    """kernel.run(*args, grid=grid, warmup=False, **kwargs), which kernel[grid](...) ends in."""
    kernel, *rest = args
    rest_named = {key: value for key, value in kwargs.items() if key not in ("grid", "warmup")}
    grid = kwargs.get("grid", getattr(kernel, "grid", None))
    for value in (unwrapped(kernel), *rest, *rest_named.values()):
        source = None if type(value) in PLAIN or isinstance(value, Fake) else trace.source_of(value)
        if source is not None:
            trace.guard(source, Is(value))

    def evaluate(meta: dict[str, Any]) -> Any:
        return trace.call(grid, [meta], {})

    op, operands = describe_launch(kernel, rest, rest_named, grid, evaluate)
    return call_torch(trace, op, operands, {})


on(torch.library.wrap_triton)(lambda trace, args, kwargs: args[0])  # only torch's own tracing needs a wrapper


@on(TorchFunctionMode.__enter__, TorchFunctionMode.__exit__)
def _use_mode(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    """The mode of create_block_mask makes x[i] of a tensor i a gather, as capture does in any case."""
    if type(args[0]).__name__ != "TransformGetItemToIndex":
        raise UnknownCall(trace.loc(), function=f"{type(args[0]).__name__}, a mode for torch functions")
    return args[0] if len(args) == 1 else None


BY_NAME: Final[dict[tuple[str, str], Special]] = {
    ("torch._higher_order_ops.flex_attention", "__call__"): (
        lambda trace, args, kwargs: trace.call(flex_attention, args[1:], kwargs)),
}  # fmt: skip
"""Functions of modules that must not be imported here; known by name when somebody else has."""

CHECKPOINT_OPTIONS: Final = (
    "use_reentrant", "context_fn", "determinism_check", "debug", "preserve_rng_state", "early_stop",
)  # fmt: skip


@on(torch.utils.checkpoint.checkpoint)
def _checkpoint(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    """Recomputing does not change results, save where it writes to buffers a second time. The partitioner
    is told of the wish; one that says which ops to save leaves it to the partitioner."""
    rest = {key: value for key, value in kwargs.items() if key not in CHECKPOINT_OPTIONS}
    start, before = len(trace.calls), writes_to_inputs(trace)
    result = trace.call(args[0], args[1:], rest)
    if torch.is_grad_enabled() and writes_to_inputs(trace) > before:
        raise UnknownCall(trace.loc(), function="torch.utils.checkpoint of what writes to buffers")
    for call in trace.calls[start:] if "context_fn" not in kwargs else ():
        call.loc = call.loc and replace(call.loc, region=start + 1)
    return result


def writes_to_inputs(trace: Trace) -> int:
    return sum(fake._version for fake in trace.input_fakes if not fake.is_inference())
