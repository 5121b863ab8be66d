"""Branches that only lead to an exception: assumed not to be taken, and looked at when the graph has run.

    if not (scale > 0).all():                  out = graph_0(scale, x)
        raise ValueError(f"{scale}")    ->     if bool(out[0]) is not True: return run_in_eager(f, scale, x)
    return x / scale                           return out[1]

Where the assumption fails, the frame runs from its beginning in eager, which raises. So nothing may have been
changed by then: the entry writes later, random numbers are drawn again, and a graph that changes its inputs
breaks at such a branch as at any other. So does a program that catches the exception: it expects it.
What the graph itself raises goes the same way, where a `with`, `except` or `finally` may see it, or what was
done before; where it changes inputs, and an `except` may see that, it changes them all at its end.
"""
from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

import torch

from dovetail.capture.decode import Code
from dovetail.capture.frame import CO_VARARGS, CO_VARKEYWORDS, slot_count
from dovetail.capture.text import version_of
from dovetail.capture.trace import Trace
from dovetail.errors import AssumedBranch, DataDependentValue, UnknownCall

if TYPE_CHECKING:
    from dovetail.capture.emit import Emitter

BRANCHES: Final = {"POP_JUMP_IF_TRUE": True, "POP_JUMP_IF_FALSE": False}
STRAIGHT_ENDS: Final = ("JUMP", "POP_JUMP", "RETURN", "YIELD", "FOR_ITER", "SEND", "STORE", "RERAISE")


def expected(code: Code, at: int) -> bool | None:
    """The truth that a jump must find lest the program raise at once; None if it may be either."""
    jumps_if = BRANCHES.get(code.ops[at])
    if jumps_if is None:
        return None
    target: Any = code.args[at]
    ways = [raises(code, at + 1), raises(code, target)]
    return jumps_if == ways[0] if ways[0] != ways[1] else None


def raises(code: Code, at: int) -> bool:
    """Whether nothing but a `raise` can follow."""
    for op in code.ops[at:]:
        if op == "RAISE_VARARGS":
            return True
        if op.startswith(STRAIGHT_ENDS):
            break
    return False


def assume(trace: Trace, value: Any, is_true: bool) -> bool:
    """bool(value), taken to be `is_true` where only the graph knows it."""
    try:
        return bool(value)
    except DataDependentValue:
        if trace.is_inner or trace.is_caught():
            raise AssumedBranch(trace.loc(), step=trace.step) from None
    trace.assumptions.append((value, is_true, version_of(value), trace.step))
    return is_true


def states_before() -> tuple[Any, ...]:
    """Torch's state that a graph may change: grad mode and random numbers."""
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ()
    return (torch.is_grad_enabled(), torch.get_rng_state(), *on_gpu)


def as_before(function: Callable[..., Any], states: tuple[Any, ...]) -> Callable[..., Any]:
    """The function, with torch's state as it was."""
    torch._C._set_grad_enabled(states[0])
    for state in states[1:2]:
        torch.set_rng_state(state)
        torch.cuda.set_rng_state_all(states[2:])
    return function


def check_copies(emit: Emitter) -> None:
    """A copy stood for a view (as_copy): neither may have been written since, nor may the caller get it. Nor
    a tensor whose hooks are in the graph, or a view of it: its gradient is the one behind them."""
    shown = {id(part) for out in emit.outputs for part in (out, out._base) if part is not None}
    for tensor, step in emit.trace.hooked:
        if shown & {id(tensor), id(tensor._base)}:
            raise UnknownCall(emit.trace.frame.loc, function="Tensor.register_hook of an output", step=step)
    for made, original, version, step in emit.trace.copies:
        is_written = version_of(made) != 0 or version_of(original) != version
        if is_written or any(out is made or out._base is made for out in emit.outputs):
            what = "an item that is written later or returned"
            raise DataDependentValue(emit.trace.frame.loc, function=what, step=step)


def emit_checks(emit: Emitter, names: list[str]) -> list[str]:
    """Lines that follow the call of the graph; `names` are the entry's parameters. Where the graph itself
    raises, `out` is None: eager raises at its own place, perhaps before. Not so if it has written by then."""
    trace, code = emit.trace, emit.trace.frame.code
    with torch._C.DisableTorchFunction():  # as in wrap_tensor
        is_uncounted = any([fake.is_inference() for fake in trace.input_fakes])
        pairs = () if is_uncounted else zip(trace.inputs, trace.input_fakes)
        written = [each for each, fake in pairs if fake._version]
    for value, _, version, step in trace.assumptions:
        if is_uncounted or written or version_of(value) != version:
            raise AssumedBranch(trace.frame.loc, step=step)
    trace.is_atomic = bool(written) and (trace.is_exposed or bool(trace.writes))
    is_seen = trace.assumptions or trace.catches or trace.writes or trace.deferred
    if is_uncounted or written and not trace.is_atomic or not is_seen:
        return []
    versions = "".join(f"{emit.load(each.source)}._version, " for each in written)
    if written:
        emit.loads.append(f"_versions = {versions}")
    count, flags = slot_count(code), code.co_flags & ~(CO_VARARGS | CO_VARKEYWORDS)
    flat = code.replace(co_argcount=count, co_posonlyargcount=0, co_kwonlyargcount=0, co_flags=flags)
    maker, cells = emit.const(FunctionType, "FunctionType"), "".join(f"{name}, " for name in names[count:])
    function = f"{maker}({emit.const(flat, 'code')}, user_globals, {code.co_name!r}, None, ({cells}))"
    function = f"{emit.const(as_before, 'as_before')}({function}, _states)"
    states = [(drawn, restore) for drawn, restore in trace.draws if restore]
    failed = [f"bool({emit.value(value)}) is not {is_true}" for value, is_true, _, _ in trace.assumptions]
    return [
        "except Exception:",
        *[f"    if _versions != ({versions}): raise"] * bool(written),
        "    out = None",
        f"if {' or '.join(['out is None', *failed])}:",
        *[f"    {emit.load(state.of)}.{restore}({emit.load(state)})" for state, restore in states],
        f"    return run_in_eager({', '.join([function, *names[:count]])})",
    ]
