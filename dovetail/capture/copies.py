"""copy.copy and copy.deepcopy of the trace's values.

copy.copy(config)           a new instance with the same attributes, each read (and guarded) as usual
copy.deepcopy([x, cfg])     new lists, dicts and instances all the way down; tensors are cloned
"""
from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

import torch

from dovetail.capture import operations
from dovetail.capture.attributes import InstanceDict, find_in_mro, load_attr
from dovetail.capture.builtins import Args, Kwargs, on
from dovetail.capture.origins import IDENTITY, PLAIN
from dovetail.capture.text import native
from dovetail.capture.trace import Trace
from dovetail.errors import UnknownCall
from dovetail.fake.tensor import Fake


@on(copy.copy)
def _copy(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    method = operations.dunder(trace, type(value), "__copy__")
    if method is not None:
        return trace.call(method, args, {})
    if type(value) in PLAIN or type(value) in COPYABLE:
        return native(copy.copy, value)
    return copy_instance(trace, value, lambda item: item)


on(copy.deepcopy)(lambda trace, args, kwargs: deep_copy(trace, args[0], {}))


MAPPINGS: Final = (dict, collections.OrderedDict)
COPYABLE: Final = (list, set, tuple, *MAPPINGS, collections.deque, collections.defaultdict)


def deep_copy(trace: Trace, value: Any, memo: dict[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    kind = type(value)
    if kind in PLAIN or isinstance(value, (FunctionType, *IDENTITY)):
        return value
    method = operations.dunder(trace, kind, "__deepcopy__")
    if isinstance(value, Fake) and not value.requires_grad:  # else a new leaf, or an error
        origin = trace.origins.get(id(value))
        is_changed = any(write.owner is value for write in trace.writes.values())
        if is_changed or origin and vars(origin.original) or load_attr(trace, value, "grad") is not None:
            raise UnknownCall(trace.loc(), function="a copy of a tensor with attributes or a gradient")
        made = trace.call(load_attr(trace, value, "clone"), [], {})
    elif method is not None:
        made = trace.call(method, [value, {}], {})
    elif kind in (list, tuple, set):
        made = kind(deep_copy(trace, item, memo) for item in value)
    elif kind is InstanceDict:
        made = {key: deep_copy(trace, item, memo) for key, item in value.items()}
    elif kind in MAPPINGS:
        made = kind([[deep_copy(trace, part, memo) for part in pair] for pair in value.items()])
        if kind is not dict:
            vars(made).update(deep_copy(trace, InstanceDict(trace, value), memo))
    else:
        made = copy_instance(trace, value, lambda item: deep_copy(trace, item, memo))
    memo[id(value)] = made
    trace.keep.append(value)
    return made


def copy_instance(trace: Trace, value: Any, each: Callable[[Any], Any]) -> Any:
    """A new instance with the same attributes, each passed through `each`."""
    kind = type(value)
    is_plain = find_in_mro(kind, "__reduce_ex__")[0] is object.__reduce_ex__
    is_plain = is_plain and not isinstance(value, torch.nn.Module)
    if not is_plain or find_in_mro(kind, "__new__")[0] is not object.__new__ or "__slots__" in vars(kind):
        raise UnknownCall(trace.loc(), function=f"a copy of {kind.__qualname__}")
    made = object.__new__(kind)
    for name, item in InstanceDict(trace, value).items():
        made.__dict__[name] = each(item)
    return made
