"""What a program says about how it wants to be compiled: markers on functions and tensors, the stance.

    @dovetail.disable                      this function runs as plain Python
    dovetail.graph_break()                 end the graph here
    dovetail.mark_dynamic(x, 0)            x's first dimension changes from call to call
    with dovetail.set_stance("force_eager"): ...

Markers are attributes; capture looks for them, and outside capture they do nothing. So this file
knows no stage, and a program full of markers runs without the compiler.
"""
from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import ContextDecorator
from typing import Any, Final, TypeVar

import torch

from dovetail.errors import BadArgument, UnknownStance

F = TypeVar("F", bound=Callable[..., Any])


# -- the stance ------------------------------------------------------------------------------------

STANCES: Final[dict[str, str]] = {
    "default": "compile, and recompile when a guard fails",
    "force_eager": "run everything as plain Python",
    "eager_on_recompile": "use compiled code where it fits, else run eager; compile nothing anew",
    "fail_on_recompile": "raise RecompileError instead of recompiling",
}

_stance = "default"


def stance() -> str:
    """The stance in force. It is one for the whole process."""
    return _stance


class set_stance(ContextDecorator):
    """Set the stance at once; as a context manager or decorator, only for the block or the call.

    set_stance("force_eager")
    with set_stance("fail_on_recompile"): serve()
    @set_stance("force_eager")
    def debug(): ...
    """

    def __init__(self, name: str) -> None:
        global _stance
        if name not in STANCES:
            raise UnknownStance(stance=name, known=", ".join(STANCES))
        self.name, self.before = name, _stance
        _stance = name

    def __enter__(self) -> set_stance:
        global _stance
        _stance = self.name
        return self

    def __exit__(self, *_: object) -> None:
        global _stance
        _stance = self.before

    def __call__(self, fn: F) -> F:
        """As a decorator: the stance holds during calls of fn, not from here on."""
        self.__exit__()
        return super().__call__(fn)

    def _recreate_cm(self) -> set_stance:
        return set_stance(self.name)


# -- markers on functions --------------------------------------------------------------------------


def _turn(enabled: bool) -> bool:
    """Turns the frame hook on or off on this thread, and says what it was; as long as nothing is compiled
    there is none."""
    native = sys.modules.get("dovetail._native")
    return enabled if native is None else native.set_enabled(enabled)  # type: ignore[no-any-return]


class _Disabled(ContextDecorator):
    """`with dovetail.disable():` no compiled code on this thread in the block."""

    def __enter__(self) -> None:
        self.before = _turn(False)

    def __exit__(self, *_: object) -> None:
        _turn(self.before)

    def _recreate_cm(self) -> _Disabled:
        return _Disabled()

    def __call__(self, fn: F) -> F:
        return _mark(super().__call__(fn), "_dovetail_disable")


def disable(fn: Any = None, *, recursive: bool = True, reason: str | None = None) -> Any:
    """Keep a function, or a block, out of compiled code. With recursive=False only the function's own
    frame runs in Python, and what it calls is still compiled.

        @disable                    @disable()                    with disable(): ...
    """
    if fn is None:
        return _Disabled() if recursive else functools.partial(disable, recursive=False, reason=reason)
    if not callable(fn):
        raise BadArgument(detail=f"disable() takes a function, got {fn!r:.80}")
    if isinstance(fn, torch.nn.Module):  # the module stays itself; its forward is what is marked
        fn.forward = disable(fn.forward, recursive=recursive, reason=reason)
        return fn
    if recursive:
        return _Disabled()(fn)
    marked: Any = functools.wraps(fn)(lambda *args, **kwargs: fn(*args, **kwargs))
    marked._dovetail_disable = "frame"
    return marked


def graph_break(text: str = "") -> None:
    """End the graph here, go on in Python and start another. Does nothing outside compiled code."""


graph_break._dovetail_graph_break = True  # type: ignore[attr-defined]


def allow_in_graph(fn: F) -> F:
    """Record calls of fn in the graph as they are, without looking inside: fn must be a pure function
    of tensors that runs on tensors without data."""
    return _mark(fn, "_dovetail_allow_in_graph")


def assume_constant_result(fn: F) -> F:
    """Call fn once while capturing and take its result for a constant."""
    return _mark(fn, "_dovetail_constant")


def _mark(fn: F, name: str) -> F:
    if not callable(fn):
        raise BadArgument(detail=f"{name.removeprefix('_dovetail_')} marks a function, got {fn!r:.80}")
    try:
        setattr(fn, name, True)
    except AttributeError as error:  # a builtin has no place for a mark
        raise BadArgument(detail=f"{fn!r:.80} cannot be marked; wrap it in a Python function") from error
    return fn


def is_compiling() -> bool:
    """True while capture runs this function on tensors without data, False when Python runs it."""
    return torch.compiler.is_compiling()


# -- markers on tensors ----------------------------------------------------------------------------


def mark_dynamic(tensor: torch.Tensor, dims: int | Iterable[int]) -> torch.Tensor:
    """These dimensions change from call to call: compile them as symbols from the start."""
    return _mark_dims(tensor, dims, "_dovetail_dynamic_dims")


def mark_static(tensor: torch.Tensor, dims: int | Iterable[int] | None = None) -> torch.Tensor:
    """These dimensions (all, without dims) are constants: a new size compiles anew, never a symbol."""
    return _mark_dims(tensor, range(tensor.dim()) if dims is None else dims, "_dovetail_static_dims")


def _mark_dims(tensor: torch.Tensor, dims: int | Iterable[int], name: str) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise BadArgument(detail=f"a tensor has dimensions to mark, got {tensor!r:.80}")
    marked: set[int] = getattr(tensor, name, set())
    for dim in [dims] if isinstance(dims, int) else dims:
        if not -tensor.dim() <= dim < tensor.dim():
            raise BadArgument(detail=f"dimension {dim} of a tensor with {tensor.dim()} dimensions")
        marked.add(dim % tensor.dim())
    setattr(tensor, name, marked)
    return tensor
