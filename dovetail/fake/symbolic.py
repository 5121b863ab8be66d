"""Symbolic geometry of results: the op's rule for sizes, the meta kernel's word on everything else.

    aten.mm of f32[s0, 64] and f32[64, 32], whose meta kernel said (8, 32) strides (32, 1) on the hints
        -> Form((s0, 32), (32, 1))

For an op without a rule its meta kernel says sizes too, run on symbolic ones. Where that fails, every symbol
of the inputs becomes a number, as an assumption, so that what the kernel said of the hints is true of all
inputs that reach the compiled code.
"""
from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from dovetail.events import EVENTS
from dovetail.fake.form import Form, Shape, derive_strides, static_form
from dovetail.fake.record import Record
from dovetail.fake.rules import Call, Result, Rule, Unruled
from dovetail.ir.expr import Expr, const, eq, symbols
from dovetail.sym import Shapes, hint_of

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def find_shapes(values: Any) -> Shapes | None:
    """The Shapes of the first symbolic number or tensor among the values."""
    for value in values:
        found = None
        if isinstance(value, torch.Tensor):
            found = getattr(value, "shapes", None)
        elif isinstance(value, _NUMBERS):
            found = getattr(value.node, "shapes", None)
        elif isinstance(value, (list, tuple)):
            found = find_shapes(value)
        if found is not None:
            return found
    return None


def hinted(value: Any) -> Any:
    """The argument with numbers for symbolic numbers."""
    if isinstance(value, (list, tuple)):
        kind = list if type(value) is torch.Size else type(value)
        return kind(map(hinted, value))
    return hint_of(value)


def form_of(tensor: torch.Tensor, shapes: Shapes) -> Form:
    form = getattr(tensor, "form", None)
    return static_form(tensor) if form is None else form.map(shapes)


def _as_argument(value: Any, shapes: Shapes, on_hints: bool = False) -> Any:
    if isinstance(value, torch.Tensor):
        return static_form(value) if on_hints else form_of(value, shapes)
    if isinstance(value, torch.SymInt):
        expr = shapes.simplify(value.node.expr)
        return expr.value if expr.op == "const" else expr
    if isinstance(value, (list, tuple)):
        return tuple(_as_argument(v, shapes, on_hints) for v in value)
    return value


def bind(
    facts: Record, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Shapes, on_hints: bool = False
) -> Call:
    given = dict(facts.defaults) | dict(zip(facts.names, args)) | kwargs
    values = {name: _as_argument(given[name], shapes, on_hints) for name in facts.names if name in given}
    device = next((value.device.type for value in args if isinstance(value, torch.Tensor)), "cpu")
    return Call(shapes, values, device)


def expr_of(value: int | torch.SymInt) -> Expr:
    """The expression of a size: a constant, or what our SymInt stands for, by what is known so far."""
    return const(value) if type(value) is int else value.node.shapes.simplify(value.node.expr)  # type: ignore[union-attr]


def ask_kernel(func: Any, facts: Record, args: Any, kwargs: Any) -> list[Shape | None]:
    """The sizes of its results that a meta kernel works out of symbolic ones."""

    def symbolic(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    if facts.is_view or facts.changes_shape or facts.device_at is not None:
        raise Unruled
    try:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            given, named = tree_map_only(torch.Tensor, symbolic, (args, kwargs))
            with torch._C._EnablePythonDispatcher():  # whose kernels know symbols
                made = func(*given, **named)
    except (RuntimeError, TypeError, ValueError, AssertionError, AttributeError) as error:
        raise Unruled from error
    results = made if isinstance(made, (list, tuple)) else [made]
    return [tuple(map(expr_of, x.shape)) if isinstance(x, torch.Tensor) else None for x in results]


def derive_forms(
    facts: Record, rule: Rule, call: Call, results: list[torch.Tensor | None]
) -> list[Form | None] | None:
    """One Form per result; None where the symbols had to be fixed, and the results are as the hints say."""
    try:
        return _derive(facts, rule(call), call, results)
    except Unruled:
        fix_symbols(facts, call, "no shape rule applies to")
        return None


def _derive(
    facts: Record, said: Result, call: Call, results: list[torch.Tensor | None]
) -> list[Form | None]:
    wanted = [*said, *[None] * len(results)] if isinstance(said, list) else [said] * len(results)

    def form(result: torch.Tensor, wanted: Any) -> Form:
        """None: the rule leaves it to the kernel, a size that no symbol enters."""
        return static_form(result) if wanted is None else _fit(facts, call, wanted, result)

    return [None if r is None else form(r, w) for r, w in zip(results, wanted)]


def _fit(facts: Record, call: Call, said: Any, result: torch.Tensor) -> Form:
    """The rule's sizes with the kernel's order of strides, checked against the kernel on the hints."""
    shapes = call.shapes
    shape = tuple(map(shapes.simplify, said.shape if isinstance(said, Form) else said))
    hints = tuple(map(shapes.hint, shape))
    if hints != tuple(result.size()):
        if 0 in result.size() and len(hints) == result.dim():
            return static_form(result)
        sizes = f"rule {shape}, hints {hints}, kernel {tuple(result.size())}"
        if facts.rule is not None:  # else it is known that some meta kernels are wrong
            EVENTS.emit("warning", text=f"{facts.name}: {sizes}")
        raise Unruled
    stride: Any
    if isinstance(said, Form) and (facts.is_view or facts.changes_shape or "strided" in facts.name):
        stride, offset = tuple(map(shapes.simplify, said.stride)), shapes.simplify(said.offset)
    else:
        if 1 in hints and any(_is_turned(x, shapes) for x in call.tensors):
            for size in (size for size, hint in zip(shape, hints) if hint == 1):
                shapes.assume(eq(size, 1), "a size of 1 leaves the order of strides open")
            shape = tuple(map(shapes.simplify, shape))
        stride, offset = derive_strides(shapes, shape, result.stride()), static_form(result).offset
    if stride is None:
        raise Unruled
    return Form(shape, stride, offset, result.dtype)


def _is_turned(form: Form, shapes: Shapes) -> bool:
    """Its rows are not outermost in memory."""
    steps = list(map(shapes.hint, form.stride))
    return any(inner > outer > 0 for outer, inner in zip(steps, steps[1:]))


def fix_symbols(facts: Record, call: Call, why: str) -> None:
    """Assume the hints of all symbols in the arguments."""
    reason = f"{why} {facts.name}"
    EVENTS.emit("specialise", op=facts.name, text=reason)
    for value in _leaves(call.values.values()):
        for symbol in sorted(symbols(value), key=lambda s: s.name):
            call.shapes.specialise_symbols(symbol, reason)


def _leaves(values: Any) -> Any:
    for value in values:
        if isinstance(value, Form):
            yield from (*value.shape, *value.stride, value.offset)
        elif isinstance(value, tuple):
            yield from _leaves(value)
        elif hasattr(value, "op"):
            yield value
