"""Grad mode, inference mode, autocast and torch's other switches: performed while capturing, and recorded.

    with torch.no_grad(): y = x * 2

    torch._C._set_grad_enabled(False); mul = x * 2; torch._C._set_grad_enabled(True)

no_grad and friends are Python classes around _set_grad_enabled, so only that function needs a rule; and so
for sdpa_kernel and set_default_dtype.
"""
from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast, autocast
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode, inference_mode
from torch.autograd.profiler import record_function

from dovetail.capture.attributes import store_plain
from dovetail.capture.builtins import Args, Kwargs, on
from dovetail.capture.text import native
from dovetail.capture.torch_calls import guard_answer
from dovetail.capture.trace import Trace
from dovetail.errors import UnknownCall

SWITCHES: Final[dict[Any, Callable[[], Any]]] = {
    torch._C._set_grad_enabled: torch.is_grad_enabled,
    torch._C._set_default_dtype: torch.get_default_dtype,
    torch._C._set_sdp_priority_order: torch._C._get_sdp_priority_order,
    **{
        getattr(torch._C, f"_set_sdp_use_{name}"): getattr(torch._C, f"_get_{name}_sdp_enabled")
        for name in ("flash", "mem_efficient", "math", "cudnn", "overrideable")
    },
}
"""What sets a part of torch's state, and what reads it."""


def add_switch(setter: Any, getter: Callable[[], Any]) -> None:
    def set_switch(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
        trace.switched.setdefault(setter, getter())
        native(setter, *args)
        trace.record("call_function", setter, tuple(args), {}, None)

    def read_switch(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
        value = getter()
        if setter not in trace.switched:
            guard_answer(trace, getter, value)
        return value

    on(setter)(set_switch)
    if getter not in (torch.is_grad_enabled, torch.get_default_dtype):  # which are always guarded
        on(getter)(read_switch)


for _setter, _getter in SWITCHES.items():
    add_switch(_setter, _getter)


on(autocast.__init__)(lambda trace, args, kwargs: native(autocast.__init__, *args, **kwargs))


def add_context(kind: Any, enter: Any, settings: Callable[[Any], Any], gives_itself: bool) -> None:
    def enter_context(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
        context, how = args[0], settings(args[0])
        entered = native(enter, *how)
        trace.record("call_function", enter, how, {}, entered)
        trace.entered[id(context)] = (context, entered)
        trace.held[id(entered)] = entered
        return context if gives_itself else None

    on(kind.__enter__)(enter_context)
    on(kind.__exit__)(lambda trace, args, kwargs: leave(trace, args[0]))


add_context(autocast, _enter_autocast, attrgetter("device", "fast_dtype", "_enabled", "_cache_enabled"), True)
add_context(inference_mode, _enter_inference_mode, lambda context: (context.mode,), False)


@on(record_function.__enter__)
def _name_region(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    """A label for the profiler, of a stretch of code that does not run by itself: nothing to leave later."""
    if id(args[0]) in trace.origins:
        raise UnknownCall(trace.loc(), function="record_function.__enter__ of one made elsewhere")
    store_plain(trace, args[0], "run_callbacks_on_exit", False)
    return args[0]


def leave(trace: Trace, context: Any) -> None:
    """Leave a context that was entered in this capture; one entered before it is left in Python."""
    if id(context) not in trace.entered:
        raise UnknownCall(trace.loc(), function=f"{type(context).__name__}.__exit__")
    _, entered = trace.entered.pop(id(context))
    function = _exit_of(entered)
    native(function, entered)
    trace.record("call_function", function, (entered,), {}, None)


def _exit_of(entered: Any) -> Any:
    return _exit_autocast if isinstance(entered, autocast) else _exit_inference_mode


def leave_for_break(trace: Trace) -> list[Any]:
    """The graph ends inside of these contexts: it leaves them, and the entry enters them again."""
    contexts = [context for context, _ in trace.entered.values()]
    for context in reversed(contexts):
        leave(trace, context)
    return contexts


def leave_all(trace: Trace) -> None:
    """Put torch's state back to what it was before the capture."""
    for _, entered in reversed(list(trace.entered.values())):
        _exit_of(entered)(entered)
    trace.entered.clear()
    for setter, value in trace.switched.items():
        setter(value)
