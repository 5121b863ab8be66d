"""Markers in the user's and in libraries' code: Dovetail's own, and torch's.

    @torch.compiler.disable             a break with its reason
    torch._dynamo.graph_break()         a break
    torch.compiler.is_compiling()       True (builtins.py)
    a compiled function or module       what it was made from

call_marked(trace, fn, args, kwargs) -> the result, or UNMARKED. Torch's markers are attributes and names:
its compiler is never imported for them.
"""
from __future__ import annotations

import sys
from types import FunctionType
from typing import Any, Final

from dovetail.capture.attributes import load_attr
from dovetail.capture.origins import wrap
from dovetail.capture.text import native
from dovetail.capture.torch_calls import call_torch
from dovetail.capture.trace import Trace
from dovetail.errors import DisabledCall, UserBreak
from dovetail.ir.source import Attr

UNMARKED: Final = object()
DISABLES: Final = ("_dovetail_disable", "_torchdynamo_disable")
CONSTANTS: Final = ("_dovetail_constant", "_dynamo_marked_constant")
ASKING: Final = "an optimizer that branches on numbers in its tensors"
STEPS: Final = {
    "lr_scheduler.py": "a learning rate scheduler, arithmetic on a few numbers",
    "radam.py": ASKING, "asgd.py": ASKING, "_adafactor.py": ASKING,
}  # fmt: skip
"""Files of torch.optim whose `step` eager does better."""
IGNORED: Final = frozenset(
    {"tag", "mark_dynamic", "maybe_mark_dynamic", "mark_static", "mark_unbacked", "mark_static_address"}
)


def call_marked(trace: Trace, fn: FunctionType, args: list[Any], kwargs: dict[str, Any]) -> Any:
    marks = fn.__dict__
    if marks:
        original = marks.get("_torchdynamo_orig_callable")
        if original is not None and (original.__module__ or "").startswith("torch.optim."):
            return trace.call(original, args, kwargs)  # torch keeps them from its own compiler only
        if any(marks.get(name) for name in DISABLES):
            raise DisabledCall(trace.loc(), function=fn.__qualname__)
        if marks.get("_dovetail_graph_break"):
            raise UserBreak(trace.loc())
        if any(marks.get(name) for name in CONSTANTS):
            return native(fn, *args, **kwargs)
        if marks.get("_dovetail_allow_in_graph"):
            return call_torch(trace, fn, args, kwargs)
        if "_torchdynamo_orig_callable" in marks:
            return trace.call(
                wrap(trace, marks["_torchdynamo_orig_callable"], trace.const(fn, "original")), args, kwargs
            )
    module = fn.__module__ or ""
    if module.startswith("torch._dynamo"):
        if fn.__name__ in ("graph_break", "skip_frame"):
            raise UserBreak(trace.loc())
        if fn.__name__ in IGNORED:
            return None
        if fn.__name__ == "is_compiling":
            return True
        if fn.__name__ == "patched_init":  # torch's compiler counts modules; what it wraps makes one
            return trace.call((fn.__closure__ or ())[0].cell_contents, args, kwargs)
    if fn.__code__.co_name == "step" and (why := STEPS.get(fn.__code__.co_filename.rpartition("/")[2])):
        raise DisabledCall(trace.loc(), function=why)
    return call_torch(trace, fn, args, kwargs) if is_allowed_by_torch(fn) else UNMARKED


def is_allowed_by_torch(fn: FunctionType) -> bool:
    """Whether torch.compiler.allow_in_graph was called on the function."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    allowed = getattr(rules, "_allowed_callable_ids", None)
    return allowed is not None and id(fn) in (getattr(allowed, "function_ids", None) or ())


def is_compiled(fn: Any) -> bool:
    kind = type(fn)
    return getattr(kind, "_dovetail_compiled", False) or kind.__name__ == "OptimizedModule"


def call_compiled(trace: Trace, fn: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Compiled code called from captured code is captured with it."""
    if type(fn).__name__ == "OptimizedModule":
        return trace.call(load_attr(trace, fn, "_orig_mod"), args, kwargs)
    source = trace.source_of(fn)
    where = Attr(source if source is not None else trace.const(fn, "compiled"), "_dovetail_original")
    return trace.call(wrap(trace, fn._dovetail_original, where), args, kwargs)
