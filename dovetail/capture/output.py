"""Output of the program: print breaks the graph, warnings and logs wait until the graph has run.

    print(x)                          a break: whoever prints wants to see it now
    warnings.warn("old")              performed by the entry, once, as if from the user's line
    logger.info("loss %s", loss)      a break: the value of a tensor is needed
"""
from __future__ import annotations

import logging
import sys
import warnings
from functools import partial
from typing import Any

from dovetail.capture.builtins import Args, Kwargs, breaking, on
from dovetail.capture.operations import has_fake
from dovetail.capture.origins import PLAIN
from dovetail.capture.places import called_from
from dovetail.capture.text import is_late
from dovetail.capture.trace import Trace, place_loc
from dovetail.errors import OutputCall


def _deferred(function: Any, trace: Trace, args: Args, kwargs: Kwargs) -> None:
    """Output that nothing in the program reads: performed by the entry, in order, after the graph, and as
    if from the user's line, which warnings and logs name."""
    is_method, name = function is not warnings.warn, function.__name__
    said = [*args[is_method:], *(value for key, value in kwargs.items() if key != "extra")]
    raises = not is_method and "error" in {action for action, *_ in warnings.filters}
    if raises or kwargs.get("exc_info") or name == "exception" or not all(map(stays_as_it_is, said)):
        raise OutputCall(trace.loc(), function=name)
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
    return type(value) in PLAIN or is_late(value) and not has_fake(value) or isinstance(value, type)


on(print)(breaking(OutputCall, function="print"))
on(sys.stdout.write)(breaking(OutputCall, function="sys.stdout.write"))
on(warnings.warn)(partial(_deferred, warnings.warn))
for _level in ("debug", "info", "warning", "error", "critical", "exception", "log", "warn"):
    on(getattr(logging.Logger, _level))(partial(_deferred, getattr(logging.Logger, _level)))
