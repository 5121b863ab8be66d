"""Parts of a training step that torch keeps from compilers, that need numbers in tensors, or are the user's.

    optimizer.zero_grad()                           p.grad = None for every parameter, after the graph
    torch._foreach_addcdiv_(ps, ms, vs, sizes)      p.add_(m / v * size) for each: sizes stays a tensor
    torch.autograd.grad(y, x)                       ops of the graph, if all that y is made of is known there
    MyFunction.apply(x)                             one node of the graph, whose target runs MyFunction.apply
"""
from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from enum import Enum
from functools import partial
from typing import Any, Final

import torch
from torch.optim.optimizer import _get_value
from torch.utils._pytree import tree_leaves

from dovetail.capture.attributes import MISSING, load_attr, store_attr
from dovetail.capture.builtins import Args, Kwargs, on
from dovetail.capture.operations import get_item, has_fake, iterate, truth
from dovetail.capture.origins import is_changed, wrap
from dovetail.capture.text import NUMBERS, known, native
from dovetail.capture.torch_calls import call_tensor_method, call_torch, perform, to_dtype
from dovetail.capture.trace import PLAIN, Raised, Trace
from dovetail.errors import BackwardCall, DisabledCall, UnknownCall
from dovetail.fake.tensor import Fake
from dovetail.ir.guard import Length, Predicate
from dovetail.ir.source import DictAttr, Item
from dovetail.util.derivative import compiling, gradients_of


@on(torch.optim.Optimizer.zero_grad)
def _zero_grad(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    optimizer, to_none = [*args, kwargs.get("set_to_none", True)][:2]
    if not truth(trace, to_none):
        raise DisabledCall(trace.loc(), function="Optimizer.zero_grad(set_to_none=False)")
    for parameter in parameters_of(trace, optimizer):
        store_attr(trace, parameter, "grad", None)


# A number of steps: eager goes on with it in double precision, where `1 - beta ** step` needs it.
on(_get_value)(lambda trace, args, kwargs: to_dtype(trace, args[0], torch.float64))


def parameters_of(trace: Trace, optimizer: Any) -> Iterator[Any]:
    """All parameters, without reading what else is in their groups: a learning rate changes often."""
    origin = trace.origins.get(id(optimizer))
    groups: Any = None if origin is None else origin.original.__dict__["param_groups"]
    if origin is None or id(groups) in trace.known:
        for group in iterate(trace, load_attr(trace, optimizer, "param_groups")):
            yield from iterate(trace, get_item(trace, group, "params"))
        return
    where = DictAttr(origin.source, "param_groups")
    trace.guard(where, Length(len(groups)))
    for i, group in enumerate(groups):
        inside = Item(Item(where, i), "params")
        trace.guard(inside, Length(len(group["params"])))
        for j, parameter in enumerate(group["params"]):
            yield wrap(trace, parameter, Item(inside, j))


GRAD: Final = inspect.signature(torch.autograd.grad)
_listed: Any = lambda trace, x: [x] if isinstance(x, Fake) else native(list, iterate(trace, x))


@on(torch.autograd.grad)
def _grad(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    given = GRAD.bind(*args, **kwargs)
    given.apply_defaults()
    asked = given.arguments
    outputs, inputs = (_listed(trace, asked[name]) for name in ("outputs", "inputs"))
    grads = [None] * len(outputs)
    if asked["grad_outputs"] is not None:
        grads = _listed(trace, asked["grad_outputs"])
    if asked["is_grads_batched"] or not torch.is_grad_enabled() or not _is_whole_history(trace):
        wanted = set(map(id, inputs))  # a tensor that the graph makes must be made after the break
        made = [call.step for call in trace.calls if not wanted.isdisjoint(map(id, tree_leaves(call.result)))]
        raise BackwardCall(trace.loc(), function="torch.autograd.grad", **{"step": made[-1]} if made else {})
    create, retain, as_zeros = (asked[name] for name in ("create_graph", "retain_graph", "materialize_grads"))
    named = {"retain": create if retain is None else retain, "create": create, "as_zeros": as_zeros}
    named["unused"] = bool(asked["allow_unused"] or as_zeros)
    return call_torch(trace, gradients_of, [outputs, inputs, grads], named)


def _is_whole_history(trace: Trace) -> bool:
    """No input was computed before, perhaps of another one, and nobody is to be told of gradients."""
    for origin in [*trace.origins.values()]:
        tensor = origin.original
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            if tensor.grad_fn is not None or tensor._backward_hooks:
                return False
            is_plain = Predicate(lambda x: x.is_leaf and not x._backward_hooks, ".is_leaf, without hooks")
            trace.guard(origin.source, is_plain)
    return True


def _scaled(function: Any, name: str, trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    """A function of lists of tensors with a factor for each, which eager reads from tensors."""
    factors = args[3] if len(args) > 3 else kwargs.get("scalars")
    if not has_fake(factors):
        return call_torch(trace, function, args, kwargs)
    lists = [native(list, iterate(trace, arg)) for arg in args[:3]]
    rows = zip(*lists, _unstacked(trace, factors))
    made = [call_tensor_method(trace, name, list(xs), {"value": factor}) for *xs, factor in rows]
    return None if name.endswith("_") else tuple(made)


def _unstacked(trace: Trace, factors: Any) -> Any:
    """Numbers that an optimizer has just stacked, as they were: each kernel reads its own."""
    for k, call in enumerate(trace.calls):
        if call.result is factors and call.target is torch.stack and len(call.args) == 1 and not call.kwargs:
            parts, later = call.args[0], tree_leaves([later.args for later in trace.calls[k + 1 :]])
            return iterate(trace, factors) if {id(x) for x in parts} & {id(x) for x in later} else parts
    return iterate(trace, factors)


for _name in ("addcdiv_", "addcdiv", "addcmul_", "addcmul"):
    _function = getattr(torch, f"_foreach_{_name}")
    on(_function)(partial(_scaled, _function, _name))


# -- custom autograd functions ---------------------------------------------------------------------


class Apply:
    """The target of a custom autograd function's node, which runs forward as it is, on Fakes, so that
    autograd sees its own backward. What both read must be guarded, and what they do besides computing must
    not be lost: so both are interpreted once before, on copies, and what that records is dropped.

    Members of enums are its own (a graph would hold an IntEnum's as a number), and so are settings, as they
    are now, which is guarded."""

    def __init__(self, cls: type, members: tuple[Any, ...]) -> None:
        self.cls, self.members = cls, members
        self.__name__ = self.__qualname__ = f"{cls.__name__}_apply"
        self.__module__ = "dovetail"

    def __call__(self, *args: Any) -> Any:
        given = [arg if member is None else member for arg, member in zip(args, self.members, strict=True)]
        with compiling():
            return self.cls.apply(*given)  # type: ignore[attr-defined]


_applies: dict[tuple[Any, ...], Apply] = {}


@on(torch.autograd.Function.apply.__func__)  # type: ignore[attr-defined]
def _apply(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    cls, *rest = args
    if trace.is_rerun and not torch.is_grad_enabled():  # inside of another, which will call it as it is
        return _run_forward(trace, cls, Context(rest), rest)
    if cls.setup_context is not torch.autograd.Function.setup_context:  # which is given the defaults as well
        (bound := native(inspect.signature(cls.forward).bind, *rest)).apply_defaults()
        rest = [*bound.args]
    look_inside(trace, cls, rest)
    kept = [MISSING if type(arg) in PLAIN or type(arg) in NUMBERS else setting(trace, arg) for arg in rest]
    members = tuple([None if member is MISSING else member for member in kept])
    rest = [arg if member is None else None for arg, member in zip(rest, members)]
    target = _applies.setdefault((cls, *map(id, members)), Apply(cls, members))
    result = perform(trace, target, rest, kwargs)
    if has_fake(result):
        trace.record("call_function", target, tuple(rest), kwargs, result)
    return result


def setting(trace: Trace, value: Any) -> Any:
    """Another one like it, of numbers and texts, members of enums, and objects and named tuples with nothing
    but others such; MISSING if it is none. A number is as it is now."""
    if type(value) in PLAIN or type(value) in NUMBERS or isinstance(value, Enum):
        return known(value)
    if hasattr(type(value), "_make"):
        parts = [setting(trace, part) for part in value]
        return MISSING if MISSING in parts else type(value)._make(parts)
    fields = getattr(value, "__dict__", None)
    if isinstance(value, Fake) or not fields or callable(value) or hasattr(type(value), "__copy__"):
        return MISSING
    is_changed = any(owner == id(value) for owner, _ in trace.writes)
    if is_changed or MISSING in [setting(trace, load_attr(trace, value, name)) for name in fields]:
        return MISSING
    return copy.copy(value)


class Context:
    """What forward leaves for backward."""

    def __init__(self, args: Args) -> None:
        self.needs_input_grad = tuple(isinstance(arg, Fake) and arg.requires_grad for arg in args)
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    mark_dirty = mark_non_differentiable = set_materialize_grads = save_for_forward = lambda self, *_: None
    """They say something about results, which only autograd wants to know."""


def look_inside(trace: Trace, cls: Any, args: Args) -> None:
    """Interpret forward and backward for the guards on what they read. A break in them ends the graph before
    the call, and so does anything that they change."""
    start, before, around = len(trace.calls), changes(trace), (trace.is_inner, trace.is_rerun)
    trace.is_inner = trace.is_rerun = True
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
    trace.is_inner, trace.is_rerun = around
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
    made: Any = value.detach().new_empty_strided(value.shape, value.stride())
    if value.requires_grad:
        made.requires_grad_()
    trace.owned[id(made)] = made
    return made


def changes(trace: Trace) -> tuple[Any, ...]:
    """What the program has done so far that can be seen from outside."""
    lists = sum(len(unread.added) for unread in trace.unread)
    shadows = sum(is_changed(origin) for origin in trace.shadows)
    writes = [write for write in trace.writes.values() if id(write.owner) not in trace.wrappers]
    return (*writes, len(trace.deferred), lists, shadows, len(trace.touched))
