"""The call that is being captured.

    f(x, flag=True)  ->  Frame(code of f, f, globals, (x, True), closure)

`args` are the frame's argument slots as bound: positional, keyword-only, *args tuple, **kwargs dict.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def bind(
    fn: FunctionType,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    defaults: Sequence[Any],
    kwdefaults: Mapping[str, Any],
) -> list[Any]:
    """Arguments to slots, with Python's own errors."""
    code = fn.__code__
    count, flags = code.co_argcount, code.co_flags
    if len(args) == count and not kwargs and not code.co_kwonlyargcount and not flags & 12:
        return list(args)
    names = code.co_varnames
    slots: list[Any] = list(args[:count])
    rest = dict(kwargs)
    missing = object()
    first_default = count - len(defaults)
    if len(args) > count and not flags & CO_VARARGS:
        takes = f"from {first_default} to {count}" if defaults else str(count)
        given = f"argument{'s' * (takes != '1')} but {len(args)} {'was' if len(args) == 1 else 'were'} given"
        raise TypeError(f"{fn.__qualname__}() takes {takes} positional {given}")
    for i, name in enumerate(names[:count]):
        value = rest.pop(name, missing) if i >= code.co_posonlyargcount else missing
        if i < len(slots):
            if value is not missing:
                raise TypeError(f"{fn.__qualname__}() got multiple values for argument '{name}'")
        elif value is not missing:
            slots.append(value)
        elif i >= first_default:
            slots.append(defaults[i - first_default])
        else:
            raise_missing(fn, "positional", [other for other in names[i:first_default] if other not in rest])
    keywords = names[count : count + code.co_kwonlyargcount]
    if lacking := [name for name in keywords if name not in rest and name not in kwdefaults]:
        raise_missing(fn, "keyword-only", lacking)
    slots.extend(rest.pop(name) if name in rest else kwdefaults[name] for name in keywords)
    if flags & CO_VARARGS:
        slots.append(tuple(args[count:]))
    if flags & CO_VARKEYWORDS:
        slots.append(rest)
    elif rest:
        raise TypeError(f"{fn.__qualname__}() got an unexpected keyword argument '{next(iter(rest))}'")
    return slots


def raise_missing(fn: FunctionType, kind: str, names: Sequence[str]) -> None:
    *first, last = map(repr, names)
    shown = f"{', '.join(first)}{',' * (len(first) > 1)} and {last}" if first else last
    what = f"{len(names)} required {kind} argument{'s' * bool(first)}: {shown}"
    raise TypeError(f"{fn.__qualname__}() missing {what}")
