"""Parts of a training step that torch keeps from compilers, or that need numbers in tensors.

    optimizer.zero_grad()                           p.grad = None for every parameter, after the graph
    torch._foreach_addcdiv_(ps, ms, vs, sizes)      p.add_(m / v * size) for each: sizes stays a tensor
    torch.autograd.grad(y, x)                       ops of the graph, if all that y is made of is known there
"""
from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch.optim.optimizer import _get_value
from torch.utils._pytree import tree_leaves

from dovetail.capture.attributes import load_attr, store_attr
from dovetail.capture.builtins import Args, Kwargs, on
from dovetail.capture.operations import get_item, has_fake, iterate, truth
from dovetail.capture.origins import wrap
from dovetail.capture.text import native
from dovetail.capture.torch_calls import call_tensor_method, call_torch
from dovetail.capture.trace import Trace
from dovetail.errors import BackwardCall, DisabledCall
from dovetail.fake.tensor import Fake
from dovetail.ir.guard import Length, Predicate
from dovetail.ir.source import DictAttr, Item
from dovetail.util.derivative import gradients_of


@on(torch.optim.Optimizer.zero_grad)
def _zero_grad(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    optimizer, to_none = [*args, kwargs.get("set_to_none", True)][:2]
    if not truth(trace, to_none):
        raise DisabledCall(trace.loc(), function="Optimizer.zero_grad(set_to_none=False)")
    for parameter in parameters_of(trace, optimizer):
        store_attr(trace, parameter, "grad", None)


@on(_get_value)
def _count(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    """A number of steps: eager goes on with it in double precision, where `1 - beta ** step` needs it."""
    return call_tensor_method(trace, "double", args, {}) if isinstance(args[0], Fake) else args[0]


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


def _listed(trace: Trace, value: Any) -> list[Any]:
    return [value] if isinstance(value, Fake) else list(iterate(trace, value))


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
