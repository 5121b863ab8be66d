"""Keep torch's Python meta kernels from loading another compiler.

Some meta kernels are Python functions that torch wraps so that its own compiler never looks inside; the
wrapper imports that compiler on its first call, which takes seconds. It is told through the attribute
it asks for first that the function itself is what to call: nothing is to be disabled here.
"""
from __future__ import annotations

import sys
from functools import cache
from types import CodeType, FunctionType
from typing import Final

from torch._compile import _disable_dynamo

WRAPPER: Final = next(
    (c for c in _disable_dynamo.__code__.co_consts if isinstance(c, CodeType) and c.co_name == "inner"), None
)
MARK: Final = "__dynamo_disable"


@cache
def quiet_references() -> int:
    """Mark every wrapped function among torch's reference implementations; how many there are."""
    families = ("torch._refs", "torch._meta_registrations", "torch._decomp", "torch._prims")
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(families)]
    stack = [value for m in modules for value in vars(m).values() if type(value) is FunctionType]
    seen: set[FunctionType] = set()
    while stack:
        value = stack.pop()
        if value.__closure__ and value not in seen:
            seen.add(value)  # a wrapper holds the wrapped function in its closure
            held = [cell.cell_contents for cell in value.__closure__]
            stack += (functions := [each for each in held if type(each) is FunctionType])
            for inner in functions if value.__code__ is WRAPPER else ():
                setattr(inner, MARK, inner)
    return sum(function.__code__ is WRAPPER for function in seen)
