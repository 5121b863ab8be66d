"""Parts of a training step that torch keeps from compilers, or that need numbers in tensors.

    optimizer.zero_grad()                           p.grad = None for every parameter, after the graph
    torch._foreach_addcdiv_(ps, ms, vs, sizes)      p.add_(m / v * size) for each: sizes stays a tensor
    torch.autograd.grad(y, x)                       a break, before x is made if the graph makes it
"""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

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
from dovetail.ir.guard import Length
from dovetail.ir.source import DictAttr, Item


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


@on(torch.autograd.grad)
def _grad(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    """By a tensor that the same graph makes there is nothing to derive: its results are not made of it."""
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    wanted = {id(inputs)} if isinstance(inputs, Fake) else {id(item) for item in iterate(trace, inputs)}
    made = [call.step for call in trace.calls if not wanted.isdisjoint(map(id, tree_leaves(call.result)))]
    raise BackwardCall(trace.loc(), function="torch.autograd.grad", **{"step": made[-1]} if made else {})


def _scaled(function: Any, name: str, trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    """A function of lists of tensors with a factor for each, which eager reads from tensors."""
    factors = args[3] if len(args) > 3 else kwargs.get("scalars")
    if not has_fake(factors):
        return call_torch(trace, function, args, kwargs)
    lists = [native(list, iterate(trace, arg)) for arg in args[:3]]
    rows = zip(*lists, iterate(trace, factors))
    made = [call_tensor_method(trace, name, list(xs), {"value": factor}) for *xs, factor in rows]
    return None if name.endswith("_") else tuple(made)


for _name in ("addcdiv_", "addcdiv", "addcmul_", "addcmul"):
    _function = getattr(torch, f"_foreach_{_name}")
    on(_function)(partial(_scaled, _function, _name))
