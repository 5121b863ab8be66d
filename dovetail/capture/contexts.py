"""Grad mode, autocast and torch's other switches, and what is told of each function: modes and classes.

    with torch.no_grad(): y = x * 2

    torch._C._set_grad_enabled(False); mul = x * 2; torch._C._set_grad_enabled(True)

no_grad and friends are Python classes around _set_grad_enabled, so only that function needs a rule; and so
for sdpa_kernel and set_default_dtype. Switches are performed while capturing, and recorded.

    x + 1, where x is a Logged    ->    Logged.__torch_function__(torch.Tensor.add, (Logged,), (x, 1))
    w.t(), where w is a Scaled    ->    Scaled.__torch_dispatch__(aten.t.default, (Scaled,), (w,), {})

Such a method is interpreted; what it is told, torch itself tells a mode of ours before anything is done.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from types import FunctionType
from typing import Any, Final

import torch
from torch import overrides
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast, autocast
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode, inference_mode
from torch.autograd.profiler import record_function
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_in_torch_dispatch_mode,
    return_and_correct_aliasing,
)

from dovetail.capture.attributes import MISSING, load_attr, store_plain
from dovetail.capture.builtins import CLASSES, Args, Kwargs, on
from dovetail.capture.origins import check_class, is_dispatching
from dovetail.capture.text import native
from dovetail.capture.torch_calls import MARKS, METHOD_RULES, guard_answer, is_overriding, perform
from dovetail.capture.trace import Trace, leaves
from dovetail.errors import UnknownCall, UnsupportedValue
from dovetail.fake.tensor import Fake

SWITCHES: Final[dict[Any, Callable[[], Any]]] = {
    torch._C._set_grad_enabled: torch.is_grad_enabled,
    torch._C._set_default_dtype: torch.get_default_dtype,
    torch._C._set_sdp_priority_order: torch._C._get_sdp_priority_order,
    **{getattr(torch._C, f"_set_sdp_use_{name}"): getattr(torch._C, f"_get_{name}_sdp_enabled")
       for name in ("flash", "mem_efficient", "math", "cudnn", "overrideable")},
}  # fmt: skip
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


_exit_of: Any = lambda entered: _exit_autocast if isinstance(entered, autocast) else _exit_inference_mode
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


# -- modes and classes that say what functions do --------------------------------------------------

class Asked(BaseException):
    """A function, and what it was called with."""


class Asking(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, *given: Any) -> Any:
        raise Asked(func, *given)


def overridden(trace: Trace, fn: Any, args: Args, kwargs: Kwargs | None = None) -> Any:
    """What a mode or the classes of the arguments say that a function gives, or ops that it comes down to;
    MISSING where none is asked."""
    said = overridden_whole(trace, fn, args, kwargs)
    if said is not MISSING or not find_dispatching(trace, [args, kwargs]):
        return said
    fakes = [leaf for leaf in leaves([args, kwargs]) if isinstance(leaf, Fake)]
    if torch.is_grad_enabled() and any(fake.requires_grad for fake in fakes):
        raise UnsupportedValue(trace.loc(), type="__torch_dispatch__", detail="its gradients")
    with Below(trace):
        return native(fn, *args, **kwargs or {})


class Below(TorchDispatchMode):
    """Sees the ops that a function comes down to; what a class says that they do is the program's code."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        trace, kinds = self.trace, find_dispatching(self.trace, [args, kwargs])
        if not kinds:
            return trace.call(func, [*args], kwargs or {})
        method = load_attr(trace, kinds[0], "__torch_dispatch__")
        made = trace.call(method, [func, tuple(kinds), args, kwargs or {}], {})
        if made is NotImplemented:
            raise UnknownCall(trace.loc(), function=f"{func}, for which no class has an answer")
        return made


def find_dispatching(trace: Trace, given: Any) -> list[Any]:
    """The classes of arguments that say what each op does to them."""
    kinds = dict.fromkeys([kind_of(trace, leaf) for leaf in leaves(given) if id(leaf) in trace.kinds])
    return [kind for kind in kinds if is_dispatching(kind)]


def overridden_whole(trace: Trace, fn: Any, args: Args, kwargs: Kwargs | None) -> Any:
    is_silent = isinstance(fn, FunctionType) and MARKS.isdisjoint(fn.__code__.co_names)
    if is_silent or not trace.modes and not find_overriding(trace, [args, kwargs]):
        return MISSING
    try:
        with Asking(), torch._C._DisableTorchDispatch():  # what does not ask fails, for lack of data
            fn(*args, **kwargs) if kwargs else fn(*args)
    except Asked as asked:
        return dispatch(trace, *asked.args)
    except Exception:  # the call itself will raise it
        return MISSING
    return MISSING


kind_of: Any = lambda trace, value: trace.kinds.get(id(value), type(value))


def find_overriding(trace: Trace, given: Any) -> Args:
    """An argument of each class that is asked, in the order in which they are."""
    found = [leaf for leaf in leaves(given) if not trace.is_plain and is_overriding(kind_of(trace, leaf))]
    return overrides._get_overloaded_args(found, partial(kind_of, trace))


def dispatch(trace: Trace, func: Any, *given: Any) -> Any:
    owners, modes = find_overriding(trace, given), trace.modes
    types = tuple([kind_of(trace, owner) for owner in owners])
    for owner in modes[-1:] or owners:
        method = load_attr(trace, trace.kinds.get(id(owner), owner), "__torch_function__")
        try:
            trace.modes = modes[:-1]
            made = trace.call(method, [func, types, *given], {})
        finally:
            trace.modes = modes
        if made is not NotImplemented:
            return made
    raise UnknownCall(trace.loc(), function=f"{func.__name__}, for which no class has an answer")


Trace.overridden = overridden
on(overrides.handle_torch_function)(lambda trace, args, kw: dispatch(trace, args[0], tuple(args[2:]), kw))
on(overrides.get_default_nowrap_functions)(lambda *_: overrides.get_default_nowrap_functions())
for _name in ("", "_unary", "_variadic"):
    on(getattr(torch._C, f"_has_torch_function{_name}"))(
        lambda trace, args, kwargs: bool(trace.modes or trace.asks and find_overriding(trace, args)))


def as_subclass(trace: Trace, fake: Fake, cls: Any) -> Any:
    check_class(trace, cls)
    made = perform(trace, torch.ops.aten.alias, [fake], {})
    trace.kinds[id(made)], trace.asks = cls, True
    return trace.record("call_function", torch.ops.aten.alias, (fake,), {}, made)


def make_subclass(trace: Trace, cls: Any, data: Any, require_grad: bool = False) -> Any:
    made = as_subclass(trace, trace.call(torch.Tensor.detach, [data], {}), cls)
    return trace.call(torch.Tensor.requires_grad_, [made], {}) if require_grad else made


METHOD_RULES["as_subclass"] = as_subclass
on(torch.Tensor._make_subclass)(lambda trace, args, kwargs: make_subclass(trace, *args, **kwargs))
on(return_and_correct_aliasing)(lambda trace, args, kwargs: [*args, *kwargs.values()][3])


@on(torch.Tensor._make_wrapper_subclass)
def _make_wrapper(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    """A tensor around others, which become its attributes. The graph has only those."""
    own = {"dispatch_sizes_strides_policy", "dispatch_device", "dispatch_layout", "requires_grad", "layout"}
    like = {name: value for name, value in kwargs.items() if name in ("dtype", "device", "memory_format")}
    is_plain = all(kwargs.get(name) in (None, False, torch.strided) for name in own)
    if len(args) != 2 or not is_plain or not is_dispatching(args[0]):
        raise UnknownCall(trace.loc(), function="Tensor._make_wrapper_subclass with such arguments")
    strides = kwargs.get("strides")
    sizes = args[1:] if strides is None else [args[1], strides]
    made = perform(trace, torch.empty if strides is None else torch.empty_strided, sizes, like)
    trace.wrappers[id(made)] = made, args, kwargs
    trace.kinds[id(made)], trace.asks = args[0], True
    return made


@on(torch.Tensor.__new__)
def _new(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    is_tensor = len(args) == 2 and isinstance(args[1], Fake)
    return as_subclass(trace, args[1] if is_tensor else trace.call(torch.Tensor, args[1:], kwargs), args[0])


@on(TorchFunctionMode.__enter__, TorchFunctionMode.__exit__)
def _use_mode(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    """The mode of create_block_mask makes x[i] of a tensor i a gather, as capture does in any case."""
    mode, is_left = args[0], len(args) > 1
    if type(mode).__name__ != "TransformGetItemToIndex":
        if is_left and not trace.modes:
            raise UnknownCall(trace.loc(), function=f"{type(mode).__name__}.__exit__")
        trace.modes, trace.asks = trace.modes[:-1] if is_left else [*trace.modes, mode], True
    return None if is_left else mode


def count_modes(trace: Trace, *_: Any) -> int:
    """Capture enters one around the program's own."""
    return torch._C._len_torch_function_stack() - 1 + len(trace.modes)


on(torch._C._len_torch_function_stack)(count_modes)
on(torch._C._is_torch_function_mode_enabled)(lambda trace, *_: count_modes(trace) > 0)
on(torch._C._len_torch_dispatch_stack)(lambda *_: 0)
on(is_in_torch_dispatch_mode)(lambda *_: False)


@contextmanager
def plainly(trace: Trace, modes: Args) -> Iterator[None]:
    """Classes are not asked meanwhile, and perhaps no modes either."""
    before = trace.is_plain, trace.modes
    trace.is_plain, trace.modes = True, modes
    try:
        yield
    finally:
        trace.is_plain, trace.modes = before


def _refuse(trace: Trace, cls: Any, args: Args, kwargs: Kwargs) -> Any:
    raise UnknownCall(trace.loc(), function=cls.__name__)


CLASSES[torch._C.DisableTorchFunction] = lambda trace, cls, args, kwargs: plainly(trace, [])
CLASSES[torch._C.DisableTorchFunctionSubclass] = lambda trace, *_: plainly(trace, trace.modes)
CLASSES[torch._C._DisableTorchDispatch] = _refuse  # Fakes would not be asked, either
CLASSES[torch._C._ExcludeDispatchKeyGuard] = _refuse
