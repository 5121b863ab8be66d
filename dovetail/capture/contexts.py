"""Grad mode, inference mode and autocast: performed while capturing, and recorded in the graph.

    with torch.no_grad(): y = x * 2

    torch._C._set_grad_enabled(False); mul = x * 2; torch._C._set_grad_enabled(True)

no_grad and friends are Python classes around _set_grad_enabled, so only that function needs a rule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast, autocast
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode, inference_mode

from dovetail.capture.builtins import Args, Kwargs, on
from dovetail.capture.operations import native
from dovetail.capture.trace import Trace


@on(torch._C._set_grad_enabled)
def _set_grad_enabled(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    native(torch._C._set_grad_enabled, *args)
    trace.record("call_function", torch._C._set_grad_enabled, tuple(args), {}, None)


@on(autocast.__init__)
def _autocast_init(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    native(autocast.__init__, *args, **kwargs)


@on(autocast.__enter__)
def _autocast_enter(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    context = args[0]
    how = (context.device, context.fast_dtype, context._enabled, context._cache_enabled)
    entered = native(_enter_autocast, *how)
    trace.record("call_function", _enter_autocast, how, {}, entered)
    trace.entered[id(context)] = trace.held[id(entered)] = entered
    return context


@on(autocast.__exit__)
def _autocast_exit(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    entered = trace.entered.pop(id(args[0]))
    native(_exit_autocast, entered)
    trace.record("call_function", _exit_autocast, (entered,), {}, None)
    return False


@on(inference_mode.__enter__)
def _inference_enter(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    entered = native(_enter_inference_mode, args[0].mode)
    trace.record("call_function", _enter_inference_mode, (args[0].mode,), {}, entered)
    trace.entered[id(args[0])] = trace.held[id(entered)] = entered


@on(inference_mode.__exit__)
def _inference_exit(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    entered = trace.entered.pop(id(args[0]))
    native(_exit_inference_mode, entered)
    trace.record("call_function", _exit_inference_mode, (entered,), {}, None)


def leave_all(trace: Trace, grad_enabled: bool) -> None:
    """Put torch's state back to what it was before the capture."""
    for entered in reversed(list(trace.entered.values())):
        leave = _exit_autocast if isinstance(entered, autocast) else _exit_inference_mode
        leave(entered)
    trace.entered.clear()
    torch._C._set_grad_enabled(grad_enabled)
