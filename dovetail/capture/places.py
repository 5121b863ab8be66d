"""Code that stands at lines of the user's, for what looks at the stack: tracebacks, warnings, logs.

    traceback_at([model.py:12 in g, model.py:40 in f])         the traceback that shows these lines
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
def _raise() -> None: raise StopIteration
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


def traceback_at(locs: Sequence[Loc]) -> TracebackType:
    """The traceback of an exception that is raised at these lines, innermost first."""
    act: Callable[[], None] = _at(_raise, locs[0], {})
    for loc in locs[1:]:
        act = partial(_at(_go_deeper, loc, {}), act)
    try:
        act()
    except StopIteration as caught:
        here: Any = caught.__traceback__
    return here.tb_next  # type: ignore[no-any-return]


def caught_at(error: BaseException, loc: Loc) -> BaseException:
    """An exception that left an instruction which the entry performed: its outermost line is the user's."""
    own: Any = error.__traceback__
    place = traceback_at([loc])
    place.tb_next = own.tb_next
    return error.with_traceback(place)


def called_from(
    function: Callable[..., Any], places: Sequence[tuple[Loc, dict[str, Any]]]
) -> Callable[..., Any]:
    """The function, called from these lines in code with these globals, innermost first."""
    for loc, where in places:
        function = partial(_at(_go_deeper, loc, where), function)
    return function
