"""Exceptions of the user's program: what is being handled, where it was raised, how it is made again.

    try: raise ValueError("a")           captured: no exception is ever raised in the entry
    except ValueError as e: print(e)     a break: `e` is made again, with the traceback it would have,
                                         and is what sys.exception() gives while print runs

CPython keeps the exception that is being handled outside of the frame and the one before it on the frame's
stack. Here a `Handling` is that stack entry, so that a resume function can enter the same state.
"""
from __future__ import annotations

import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from dovetail.capture.attributes import find_in_mro
from dovetail.capture.builtins import Args, Kwargs, on
from dovetail.capture.places import raised_at
from dovetail.capture.trace import Raised, Trace, is_library_file, topmost_handled
from dovetail.errors import Break, UnknownCall

if TYPE_CHECKING:
    from dovetail.capture.emit import Emitter


@on(sys.exception)
def _exception(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    """What the callers handle, outside of the capture, is not ours to know; contextlib asks only in case."""
    found = topmost_handled(trace)
    if found is None and not is_library_file(trace.places[-1].code.code.co_filename):
        raise UnknownCall(trace.loc(), function="sys.exception")
    return found


@on(sys.exc_info)
def _current_exception(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    if _exception(trace, args, kwargs) is not None:
        raise UnknownCall(trace.loc(), function="sys.exc_info")
    return None, None, None


# -- making one again --------------------------------------------------------------------------------

NAMED: Final = (AttributeError, NameError, ImportError)
"""Exceptions of C that keep a name outside of `args` and `__dict__`."""


def rebuild_exception(emit: Emitter, error: BaseException) -> str:
    """Text of an exception that the program made. __init__ of the user's class is not run a second time."""
    kind: Any = type(error)
    owner, args = emit.const(kind, kind.__name__), emit.items(error.args)
    own = [find_in_mro(kind, name)[0] for name in ("__new__", "__init__")]
    if any(isinstance(method, (FunctionType, staticmethod)) for method in own):
        base: Any = next(base for base in kind.__mro__ if not base.__flags__ & 512)
        maker = emit.const(base, base.__name__)
        text = emit.temp(f"{maker}.__new__({', '.join(filter(None, (owner, args)))})")
        emit.body.append(f"{maker}.__init__({', '.join(filter(None, (text, args)))})")
    else:
        text = emit.temp(f"{owner}({args})")
    emit.memo[id(error)] = text
    emit.busy.discard(id(error))
    for name, value in fields_of(error).items():
        emit.body.append(f"{text}.{name} = {emit.value(value)}")
    raised = emit.trace.raised.get(id(error))
    if raised is not None:
        locs = tuple(loc for _, loc in raised[1])
        emit.body.append(f"{emit.const(raised_at)}({text}, {emit.const(locs, 'lines')})")
    return text


def fields_of(error: BaseException) -> dict[str, Any]:
    fields = dict(error.__dict__)
    if isinstance(error, NAMED) and error.name is not None:
        fields["name"] = error.name
    if isinstance(error.__cause__, BaseException):
        fields["__cause__"] = error.__cause__
    if isinstance(error.__context__, BaseException) and not isinstance(error.__context__, (Break, Raised)):
        fields["__context__"] = error.__context__
    if error.__suppress_context__:
        fields["__suppress_context__"] = True
    return fields
