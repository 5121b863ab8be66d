"""Code that stands at lines of the user's, for what looks at the stack: tracebacks, warnings, logs.

    raised_at(error, [model.py:12 in g, model.py:40 in f])   its traceback shows these lines
    called_from(warnings.warn, places)("old")                  the warning names the user's line

A function of one line is given the user's file, line and name, and called; the frames are real ones.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType, FunctionType, TracebackType
from typing import Any, Final

from dovetail.util.loc import Loc

NO_COLUMNS: Final = 13


# fmt: off
def _raise(box: list[BaseException]) -> None: raise box.pop()
def _go_deeper(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: return call(*args, **kwargs)
# fmt: on


def _at(function: Any, loc: Loc, where: dict[str, Any]) -> FunctionType:
    """The function as if its only line were the user's."""
    code: CodeType = function.__code__
    name = loc.function.rsplit(".", 1)[-1]
    placed = code.replace(
        co_filename=loc.file, co_firstlineno=loc.line, co_name=name, co_qualname=loc.function,
        co_linetable=line_table(len(code.co_code) // 2, NO_COLUMNS, 0),
    )  # fmt: skip
    return FunctionType(placed, where)


def line_table(units: int, kind: int, *rest: int) -> bytes:
    """For so many instructions on one line, or on none; `kind` says what is known of their places."""
    steps = [8] * (units // 8) + [units % 8] * bool(units % 8)
    return b"".join(bytes((0x80 | kind << 3 | step - 1, *rest)) for step in steps)


def raised_at(error: BaseException, locs: Sequence[Loc]) -> BaseException:
    """The exception with the traceback it would have, had it been raised at these lines, innermost first."""
    context, box = error.__context__, [error]
    act: Callable[[], None] = partial(_at(_raise, locs[0], {}), box)
    for loc in locs[1:]:
        act = partial(_at(_go_deeper, loc, {}), act)
    try:
        act()
    except BaseException as caught:
        here = caught.__traceback__
    error.__context__, error.__traceback__ = context, here.tb_next if here is not None else None
    return error


def caught_at(error: BaseException, loc: Loc) -> BaseException:
    """An exception that left an instruction which the entry performed: its outermost line is the user's."""
    own = error.__traceback__
    inner = own.tb_next if own is not None else None
    place = raised_at(error, [loc]).__traceback__
    if place is not None:
        error.__traceback__ = TracebackType(inner, place.tb_frame, place.tb_lasti, place.tb_lineno)
    return error


def called_from(
    function: Callable[..., Any], places: Sequence[tuple[Loc, dict[str, Any]]]
) -> Callable[..., Any]:
    """The function, called from these lines in code with these globals, innermost first."""
    for loc, where in places:
        function = partial(_at(_go_deeper, loc, where), function)
    return function
