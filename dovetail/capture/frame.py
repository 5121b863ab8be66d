"""The call that is being captured, and code that stands at its lines, for what looks at the stack.

    f(x, flag=True)  ->  Frame(code of f, f, globals, (x, True))
    traceback_at([model.py:12 in g, model.py:40 in f])         the traceback that shows these lines
    called_from(warnings.warn, places)("old")                  the warning names the user's line

`args` are the frame's argument slots as bound: positional, keyword-only, *args tuple, **kwargs dict.
A function of one line is given the user's file, line and name, and called; the frames are real ones.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import CodeType, FunctionType, TracebackType
from typing import Any, Final

import torch

from dovetail._native import without
from dovetail.ir.graph import Loc
from dovetail.util.noun import Noun

CO_VARARGS: Final = 4
CO_VARKEYWORDS: Final = 8
NO_COLUMNS: Final = 13


class Frame(Noun, eq=False):
    code: CodeType
    function: FunctionType
    globals: dict[str, Any]
    args: tuple[Any, ...]

    @property
    def key(self) -> tuple[CodeType, int]:
        """The code, and which module runs it: layers of one class have sizes and a history of their own."""
        owner = self.args[0] if self.args else None
        return self.code, id(owner) if isinstance(owner, torch.nn.Module) else 0

    @property
    def loc(self) -> Loc:
        return Loc(self.code.co_filename, self.code.co_firstlineno, self.code.co_qualname)


def slot_count(code: CodeType) -> int:
    """How many slots hold arguments when the frame starts."""
    flags = code.co_flags
    extra = bool(flags & CO_VARARGS) + bool(flags & CO_VARKEYWORDS)
    return code.co_argcount + code.co_kwonlyargcount + extra


def as_parameters(names: Sequence[str]) -> list[str]:
    """Names that may be parameters: a comprehension's argument is called `.0`."""
    return [name if name.isidentifier() else f"slot_{i}" for i, name in enumerate(names)]


@cache
def binder(code: CodeType) -> CodeType:
    """Code with the parameters of another, which gives its arguments as they fill the slots."""
    names = as_parameters(code.co_varnames[: slot_count(code)])
    count, keywords = code.co_argcount, names[code.co_argcount :][: code.co_kwonlyargcount]
    parameters, rest = names[:count], iter(names[count + len(keywords) :])
    if code.co_posonlyargcount:
        parameters.insert(code.co_posonlyargcount, "/")
    if code.co_flags & CO_VARARGS or keywords:
        parameters.append(f"*{next(rest) if code.co_flags & CO_VARARGS else ''}")
    parameters += [*keywords, *(f"**{name}" for name in rest)]
    space: dict[str, Any] = {}
    exec(f"def bound({', '.join(parameters)}): return [{', '.join(names)}]", space)
    return space["bound"].__code__  # type: ignore[no-any-return]


def bind(
    fn: FunctionType, args: Sequence[Any], kwargs: Mapping[str, Any], defaults: Sequence[Any],
    kwdefaults: Mapping[str, Any],
) -> list[Any]:  # fmt: skip
    """Arguments to slots, by Python itself and with its own errors."""
    code = fn.__code__
    is_plain = not code.co_kwonlyargcount and not code.co_flags & (CO_VARARGS | CO_VARKEYWORDS)
    if len(args) == code.co_argcount and is_plain and not kwargs:
        return list(args)
    bound: Any = FunctionType(binder(code), {}, fn.__name__, tuple(defaults))
    bound.__kwdefaults__, bound.__qualname__ = dict(kwdefaults), fn.__qualname__
    return bound(*args, **kwargs)  # type: ignore[no-any-return]


# -- lines of the user's ---------------------------------------------------------------------------

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
        without(act)  # nobody is to compile these frames
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
