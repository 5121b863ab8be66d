"""Torch constructs that take functions: custom autograd functions, checkpointing.

    MyFunction.apply(x)            one node of the graph, whose target runs MyFunction.apply
    checkpoint(block, x)           block(x), interpreted; what it records is marked for recomputation

A custom autograd.Function runs as it is, on Fakes, so that autograd sees its own backward.
"""
from __future__ import annotations

from typing import Any, Final

import torch
import torch.utils.checkpoint

from dovetail.capture.builtins import Args, Kwargs, on
from dovetail.capture.operations import has_fake
from dovetail.capture.torch_calls import perform
from dovetail.capture.trace import Trace


class Apply:
    """The target of a custom autograd function's node."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.__name__ = self.__qualname__ = f"{cls.__name__}_apply"
        self.__module__ = "dovetail"

    def __call__(self, *args: Any) -> Any:
        return self.cls.apply(*args)  # type: ignore[attr-defined]


_applies: dict[type, Apply] = {}


@on(torch.autograd.Function.apply.__func__)  # type: ignore[attr-defined]
def _apply(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    cls, *rest = args
    target = _applies.setdefault(cls, Apply(cls))
    result = perform(trace, target, rest, kwargs)
    if has_fake(result):
        trace.record("call_function", target, tuple(rest), kwargs, result)
    return result


CHECKPOINT_OPTIONS: Final = ("use_reentrant", "context_fn", "determinism_check", "debug", "preserve_rng_state", "early_stop")


@on(torch.utils.checkpoint.checkpoint)
def _checkpoint(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    """Saving or recomputing does not change results; the partitioner decides, and is told of the wish."""
    rest = {key: value for key, value in kwargs.items() if key not in CHECKPOINT_OPTIONS}
    start = len(trace.calls)
    result = trace.call(args[0], args[1:], rest)
    for call in trace.calls[start:]:
        call.is_checkpointed = True
    return result
