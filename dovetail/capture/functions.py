"""Custom autograd functions.

    MyFunction.apply(x)            one node of the graph, whose target runs MyFunction.apply

The node runs forward as it is, on Fakes, so that autograd sees its own backward. What forward and backward
read must be guarded, and what they do besides computing must not be lost: so both are interpreted once
before, on copies, and what that records is dropped.
"""
from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from dovetail.capture.attributes import load_attr
from dovetail.capture.builtins import Args, Kwargs, on
from dovetail.capture.guards import is_changed
from dovetail.capture.operations import has_fake
from dovetail.capture.torch_calls import perform
from dovetail.capture.trace import Raised, Trace
from dovetail.errors import UnknownCall
from dovetail.fake.tensor import Fake


class Apply:
    """The target of a custom autograd function's node. Members of enums are its own: a graph would hold an
    IntEnum's as a number."""

    def __init__(self, cls: type, members: tuple[Enum | None, ...]) -> None:
        self.cls, self.members = cls, members
        self.__name__ = self.__qualname__ = f"{cls.__name__}_apply"
        self.__module__ = "dovetail"

    def __call__(self, *args: Any) -> Any:
        given = [arg if member is None else member for arg, member in zip(args, self.members, strict=True)]
        return self.cls.apply(*given)  # type: ignore[attr-defined]


_applies: dict[tuple[Any, ...], Apply] = {}


@on(torch.autograd.Function.apply.__func__)  # type: ignore[attr-defined]
def _apply(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    cls, *rest = args
    look_inside(trace, cls, rest)
    members = tuple([arg if isinstance(arg, Enum) else None for arg in rest])
    rest = [arg if member is None else None for arg, member in zip(rest, members)]
    target = _applies.setdefault((cls, *map(id, members)), Apply(cls, members))
    result = perform(trace, target, rest, kwargs)
    if has_fake(result):
        trace.record("call_function", target, tuple(rest), kwargs, result)
    return result


class Context:
    """What forward leaves for backward."""

    def __init__(self, args: Args) -> None:
        self.needs_input_grad = tuple(isinstance(arg, Fake) and arg.requires_grad for arg in args)
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def _nothing_to_do(self, *_: Any) -> None:
        """Says something about results, which only autograd wants to know."""

    mark_dirty = mark_non_differentiable = set_materialize_grads = save_for_forward = _nothing_to_do


def look_inside(trace: Trace, cls: Any, args: Args) -> None:
    """Interpret forward and backward for the guards on what they read. A break in them ends the graph before
    the call, and so does anything that they change."""
    start, before, around = len(trace.calls), changes(trace), trace.is_inner
    trace.is_inner = True
    context, given = Context(args), [copy_of(trace, arg) for arg in args]
    trace.switched.setdefault(torch._C._set_grad_enabled, torch.is_grad_enabled())  # which a break restores
    with torch.no_grad():
        result = _run_forward(trace, cls, context, given)
        if torch.autograd.Function.backward is not cls.backward and any(context.needs_input_grad):
            backward = load_attr(trace, cls, "backward")
            if backward.__code__.co_filename.endswith("/torch/autograd/function.py"):
                backward = backward.__wrapped__  # once_differentiable
            outputs = result if isinstance(result, tuple) else (result,)
            gradients = [copy_of(trace, out) if isinstance(out, Fake) else None for out in outputs]
            try:
                trace.call(backward, [context, *gradients], {})
            except Raised as raised:
                name, error = f"{cls.__qualname__}.backward", type(raised.value).__name__
                raise UnknownCall(trace.loc(), function=f"{name}, which raises {error}") from None
    del trace.calls[start:]
    trace.is_inner = around
    if changes(trace) != before:
        raise UnknownCall(trace.loc(), function=f"{cls.__qualname__}.apply, which has side effects")


def _run_forward(trace: Trace, cls: Any, context: Context, args: Args) -> Any:
    forward = load_attr(trace, cls, "forward")
    if cls.setup_context is torch.autograd.Function.setup_context:
        return trace.call(forward, [context, *args], {})
    result = trace.call(forward, list(args), {})
    trace.call(load_attr(trace, cls, "setup_context"), [context, tuple(args), result], {})
    return result


def copy_of(trace: Trace, value: Any) -> Any:
    """Another Fake like this one."""
    if not isinstance(value, Fake):
        return value
    made: Any = value.detach().clone()
    if value.requires_grad:
        made.requires_grad_()
    trace.owned[id(made)] = made
    return made


def changes(trace: Trace) -> tuple[int, int, int, int]:
    """How much the program has done so far that can be seen from outside."""
    lists = sum(len(unread.added) for unread in trace.unread)
    shadows = sum(is_changed(origin) for origin in trace.shadows)
    return len(trace.writes), len(trace.deferred), lists, shadows
