"""The call that is being captured.

    f(x, flag=True)  ->  Frame(code of f, f, globals, (x, True), closure)

`args` are the frame's argument slots as bound: positional, keyword-only, *args tuple, **kwargs dict.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from types import CellType, CodeType, FunctionType
from typing import Any, Final

import torch

from dovetail.ir.graph import Loc
from dovetail.util.noun import Noun

CO_VARARGS: Final = 4
CO_VARKEYWORDS: Final = 8


class Frame(Noun, eq=False):
    code: CodeType
    function: FunctionType
    globals: dict[str, Any]
    args: tuple[Any, ...]
    closure: tuple[CellType, ...] = ()

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
