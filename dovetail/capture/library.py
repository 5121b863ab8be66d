"""Functions of Python's own library that are not taken apart: copies, output, what is being handled.

copy.copy(config)                 a new instance with the same attributes, each read (and guarded) as usual
copy.deepcopy([x, cfg])           new lists, dicts and instances all the way down; tensors are cloned
print(x)                          a break: whoever prints wants to see it now
warnings.warn("old")              performed by the entry, once, as if from the user's line
logger.info("loss %s", loss)      a break: the value of a tensor is needed
"""
from __future__ import annotations

import builtins
import collections
import copy
import dataclasses
import logging
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, Final

import torch
from torch.utils.hooks import RemovableHandle

from dovetail.capture import attributes, operations
from dovetail.capture.attributes import MISSING, InstanceDict, find_in_mro, guard_class, load_attr
from dovetail.capture.builtins import LIBRARIES, Args, Kwargs, breaking, on
from dovetail.capture.calls import inline
from dovetail.capture.emit import REBUILD
from dovetail.capture.frame import called_from
from dovetail.capture.interpreter import Activation
from dovetail.capture.origins import IDENTITY
from dovetail.capture.text import Identity, is_late, native
from dovetail.capture.torch_calls import guard_answer
from dovetail.capture.trace import PLAIN, Trace, is_library_file, place_loc, topmost_handled
from dovetail.errors import OutputCall, UnknownCall
from dovetail.fake.tensor import Fake
from dovetail.ir.guard import Predicate

# -- copies ------------------------------------------------------------------------------------------

@on(copy.copy)
def _copy(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    if (said := operations.ask(trace, value, "__copy__")) is not MISSING:
        return said
    if type(value) in PLAIN or type(value) in COPYABLE:
        return native(copy.copy, value)
    return copy_instance(trace, value, lambda item: item)


on(copy.deepcopy)(lambda trace, args, kwargs: deep_copy(trace, *args, **kwargs))
MAPPINGS: Final = (dict, collections.OrderedDict)
_ways = "new reduce_ex reduce getstate setstate getnewargs getnewargs_ex".split()
COPYING: Final = [f"__{name}__" for name in _ways]
"""Methods by which a class says how its instances are copied."""
COPYABLE: Final = (list, set, tuple, *MAPPINGS, collections.deque, collections.defaultdict)


def deep_copy(trace: Trace, x: Any, memo: Any = None) -> Any:
    value, memo = x, {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    kind = type(value)
    if kind in PLAIN or isinstance(value, (FunctionType, *IDENTITY)):
        return value
    method = operations.dunder(trace, kind, "__deepcopy__")
    if isinstance(value, Fake) and not value.requires_grad:  # else a new leaf, or an error
        origin = trace.origins.get(id(value))
        is_changed = id(value) in trace.kinds or any(w.owner is value for w in trace.writes.values())
        if is_changed or origin and vars(origin.original) or load_attr(trace, value, "grad") is not None:
            raise UnknownCall(trace.loc(), function="a copy of a tensor with attributes or a gradient")
        made = trace.call(load_attr(trace, value, "clone"), [], {})
    elif method is not None:
        made = trace.call(method, [value, memo], {})
    elif kind in (list, tuple, set):
        made = kind(deep_copy(trace, item, memo) for item in value)
    elif kind in (*MAPPINGS, InstanceDict):
        items = [[deep_copy(trace, part, memo) for part in pair] for pair in value.items()]
        made = dict(items) if kind is InstanceDict else kind(items)
        if kind is collections.OrderedDict:
            vars(made).update(deep_copy(trace, InstanceDict(trace, value), memo))
    else:
        made = copy_instance(trace, value, lambda item: deep_copy(trace, item, memo))
    memo[id(value)] = made
    trace.keep.append(value)
    return made


def copy_instance(trace: Trace, value: Any, each: Callable[[Any], Any]) -> Any:
    """A new instance with the same attributes, each passed through `each`."""
    kind = type(value)
    is_plain = all(getattr(kind, name, None) is getattr(object, name, None) for name in COPYING)
    if not is_plain or "__slots__" in vars(kind):
        raise UnknownCall(trace.loc(), function=f"a copy of {kind.__qualname__}")
    made = object.__new__(kind)
    for name, item in InstanceDict(trace, value).items():
        made.__dict__[name] = each(item)
    return made


# -- classes: one that is still needed when the graph ends breaks where it was made ----------------------

@on(builtins.__build_class__)
def _build_class(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    """The body is interpreted, so that its functions have the frame's variables in their closures."""
    function, name, *given = args
    bases = native(types.resolve_bases, tuple(given))
    meta, space, named = native(types.prepare_class, name, bases, kwargs)
    is_known = meta is type or meta.__module__.split(".")[0] in LIBRARIES
    if not is_known or any(runs_python(base, "__init_subclass__") for base in bases):
        raise UnknownCall(trace.loc(), function="__build_class__")
    for base in bases:
        guard_class(trace, base)
    if list(bases) != given:
        space["__orig_bases__"] = tuple(given)
    body = Activation(trace, function, [])
    body.names = space
    body.run()
    if any(runs_python(type(value), "__set_name__") for value in space.values()):
        raise UnknownCall(trace.loc(), function="__set_name__")
    return note_class(trace, native(meta, name, bases, space, **named))


def runs_python(kind: type, name: str) -> bool:
    """Whether the method is a function of the user's."""
    found = find_in_mro(kind, name)[0]
    code = getattr(getattr(found, "__func__", found), "__code__", None)
    return code is not None and not is_library_file(code.co_filename)


def note_class(trace: Trace, made: Any) -> Any:
    trace.classes[made] = trace.places[0].steps - 1
    trace.made[id(made)] = made
    return made


def _make_class(maker: Any, trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    """A record, or a dataclass of a class that the program has just made."""
    if isinstance(args[0], type) and id(args[0]) not in trace.made:
        raise UnknownCall(trace.loc(), function="dataclass")
    named = {"module": trace.places[-1].globals.get("__name__")} if maker is collections.namedtuple else {}
    return note_class(trace, native(maker, *args, **named | kwargs))


for _maker in (dataclasses._process_class, collections.namedtuple):  # type: ignore[attr-defined]
    on(_maker)(partial(_make_class, _maker))


@on(threading.get_ident)
def _thread(trace: Trace, args: Args, kwargs: Kwargs) -> int:
    """Which thread this is, that of a capture: repr() of a dataclass asks, lest it show itself for ever."""
    if attributes.is_users_read(trace):
        raise UnknownCall(trace.loc(), function="threading.get_ident")
    return 0


# -- output ------------------------------------------------------------------------------------------

def _deferred(function: Any, trace: Trace, args: Args, kwargs: Kwargs) -> None:
    """Output that nothing in the program reads: performed by the entry, in order, after the graph, and as
    if from the user's line, which warnings and logs name."""
    is_method, name = function is not warnings.warn, function.__name__
    said = [*args[is_method:], *(value for key, value in kwargs.items() if key != "extra")]
    is_filtered = "error" in {action for action, *_ in warnings.filters}
    is_filtered |= any(known is _note_filters for known, *_ in trace.deferred)
    is_now = kwargs.get("exc_info") or name == "exception" or is_filtered and not is_method
    if is_now or not all(map(stays_as_it_is, said)):
        level = getattr(logging, name.upper(), None)
        if not is_method or type(level) is not int or args[0].isEnabledFor(level):
            raise OutputCall(trace.loc(), function=name)
        is_silent = Predicate(lambda logger: not logger.isEnabledFor(level), f"is silent at {name}")
        trace.guard(trace.source_of(args[0]) or trace.const(args[0], "logger"), is_silent)
        return
    places = [(place_loc(place), place.globals) for place in reversed(trace.places)]
    depth = args[2] if len(args) > 2 else kwargs.get("stacklevel", 1)
    if not is_method and type(depth) is int and depth > len(places):  # past this frame lies the entry
        args, kwargs = args[:2], {**kwargs, "stacklevel": depth + 1}
    trace.deferred.append((called_from(function, places), args, kwargs))


def stays_as_it_is(value: Any) -> bool:
    """Whether a value says the same later in the call."""
    if type(value) is tuple:
        return all(stays_as_it_is(item) for item in value)
    if isinstance(value, Warning):
        return stays_as_it_is(value.args)
    is_text = is_late(value) and not operations.has_fake(value)
    return type(value) in PLAIN or is_text or isinstance(value, type)


on(print)(breaking(OutputCall, function="print"))
on(sys.stdout.write)(breaking(OutputCall, function="sys.stdout.write"))
on(warnings.warn)(partial(_deferred, warnings.warn))
_note_filters: Any = warnings._filters_mutated  # type: ignore[attr-defined]
on(_note_filters)(lambda trace, args, kwargs: trace.deferred.append((_note_filters, [], {})))
for _level in ("debug", "info", "warning", "error", "critical", "exception", "log", "warn"):
    on(getattr(logging.Logger, _level))(partial(_deferred, getattr(logging.Logger, _level)))


# -- hooks -------------------------------------------------------------------------------------------

class Ticket(Identity):
    """The number of a hook that the frame registers: a key that is another in each call, and no other's."""

    number: Any


_new_handle: Any = RemovableHandle.__init__


@on(_new_handle)
def _take_ticket(trace: Trace, args: Args, kwargs: Kwargs) -> None:
    inline(trace, _new_handle, args, kwargs)
    if type(args[0].id) is torch.SymInt:
        ticket = Ticket(trace, id, args[0])
        ticket.number, args[0].id = args[0].id, ticket


REBUILD[Ticket] = lambda emit, value: emit.value(value.number)


# -- the exception that is being handled -------------------------------------------------------------

@on(sys.exception)
def _exception(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    """What the callers handle, outside of the capture, is nothing here; contextlib asks only in case."""
    found = topmost_handled(trace)
    if found is None and attributes.is_users_read(trace):
        if sys.exception() is not None:
            raise UnknownCall(trace.loc(), function="sys.exception")
        guard_answer(trace, sys.exception, None)
    return found


@on(sys.exc_info)
def _current_exception(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    if (found := _exception(trace, args, kwargs)) is None:
        return None, None, None
    return type(found), found, load_attr(trace, found, "__traceback__")


_clear: Any = traceback.clear_frames


@on(_clear)
def _clear_frames(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    """The tracebacks of exceptions that were raised in the graph hold none."""
    return None if id(args[0]) in trace.raised else inline(trace, _clear, args, kwargs)
