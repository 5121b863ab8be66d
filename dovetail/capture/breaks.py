"""The end of an entry at a graph break: do the one instruction in Python, then call the rest.

    Emitter, frame stopped before an instruction -> lines of text

    _r = print(out[0])                          the instruction
    return resume_12(self, out[0], _r)          everything after it

A branch on tensor data becomes an `if` with a resume function in each arm; both are compiled when they
are reached. Inside a `try` or `with` block an exception of the instruction goes on to its handler,
resumed as well.
"""
from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final

import torch

from dovetail._native import hand_over
from dovetail.capture.decode import Region, live_before
from dovetail.capture.emit import Emitter
from dovetail.capture.frame import caught_at
from dovetail.capture.interpreter import Activation
from dovetail.capture.resume import GROWING, HANDLED, NONE_THERE, VALUE, Layout, make_resume, origin_of
from dovetail.capture.text import format_value
from dovetail.capture.trace import NULL, Handling, LastInstruction, Outside, Unread, place_loc
from dovetail.capture.transforms import AS_PYTHON
from dovetail.capture.versions import NULL_FIRST
from dovetail.errors import SkippedFrame
from dovetail.fake.tensor import Fake
from dovetail.util.writer import Writer

NULL_TEXT: Final = ""
HELD: Final = re.compile(r"\b(?:stack_|_v)\d+\b")


class Rest:
    """What the entry of a resumed frame returns when it breaks again: the call that goes on. The entry
    of the frame itself makes these calls in a loop, so that a thousand breaks are not a thousand deep."""

    __slots__ = ("function", "args", "held")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], held: Any = ()) -> None:
        self.function, self.args, self.held = function, args, held


def run_on(result: Any) -> Any:
    """Make the calls that are left, and give the frame's result."""
    held: dict[int, Any] = {}
    while type(result) is Rest:
        held.update(result.held)
        box, result.args = [result.args], ()  # no reference is left here or in who called
        result = hand_over(result.function, box)
    return result


class Site:
    """The stopped frame as texts: `stack` has one text per entry, NULL_TEXT for NULL."""

    def __init__(self, emit: Emitter, root: Activation) -> None:
        self.emit, self.root, self.const = emit, root, emit.const
        self.code = root.code
        self.at, self.op = root.at, root.code.ops[root.at]
        self.arg: Any = root.code.args[root.at]
        self.origin, self.prologue = origin_of(root.code)
        self.count = len(self.origin.slot_names) - len(self.origin.code.co_freevars)
        self.stack = [self.entry_text(*pair) for pair in zip(root.stack, [*root.stack[1:], None])]
        self.slots = self.slot_texts()
        self.lines = Writer()
        self.values = list(root.stack)

    def entry_text(self, value: Any, above: Any = None) -> str:
        if isinstance(value, Handling):
            return "None" if value.is_over else HandledText(self.emit.value(value.error))
        if isinstance(value, LastInstruction):
            return str(self.origin.offsets[value - self.prologue] // 2)
        if value is NULL:
            return NULL_TEXT
        is_list = type(value) in (list, Unread) and hasattr(type(above), "__next__")  # over which a loop goes
        is_growing = is_list and ("LIST_APPEND", "JUMP") in zip(self.code.ops, self.code.ops[1:])
        return (GrowingText if is_growing else str)(self.emit.value(value))

    def slot_texts(self) -> dict[int, str]:
        """Texts of all slots that may be read by anything after this instruction."""
        live = live_before(self.code)[self.at]
        region = self.code.region(self.at)
        if region is not None:
            live |= live_before(self.code)[region.target]
        return {i: self.emit.value(value) for i, value in enumerate(self.root.slots[: self.count])
                if value is not NULL and (i in live or i in self.origin.cell_slots)}  # fmt: skip

    def resume(self, target: int, stack: list[str]) -> str:
        """`return resume_12(...)`, going on at an instruction with this stack."""
        target -= self.prologue
        if target < 0:
            detail = "a break in the first instructions of a resumed frame"
            raise SkippedFrame(self.root.trace.loc(), detail=detail)
        slots, offsets, op = dict(self.slots), self.origin.offsets, self.origin.ops[target]
        if target and offsets[target] == offsets[target - 1] and op in ("LOAD_FAST", "STORE_FAST"):
            # Python 3.13 loads or stores twice in one instruction: between the two, the second is done here.
            slot: Any = self.origin.args[target]
            stack, target = list(stack), target + 1
            if op == "LOAD_FAST":
                stack.append(slots[slot])
            else:
                slots[slot] = stack.pop()
        live = live_before(self.origin)[target]
        kept = [i in slots and (i in live or i in self.origin.cell_slots) for i in range(self.count)]
        layout = Layout(tuple(not keep for keep in kept), tuple(kind_of(text) for text in stack))
        made = make_resume(self.origin, target, layout)
        passed = [slots[i] if keep else "None" for i, keep in enumerate(kept)]
        args = "".join([f"{text}, " for text in (*passed, *stack) if text != NULL_TEXT])
        call = self.resume_function(made.code)
        if self.prologue:
            dead = [(i, self.root.slots[i]) for i, keep in enumerate(kept) if not keep]
            held = [f"{i}: {self.emit.value(value)}" for i, value in dead if self.notices(value)]
            more = f", {{{', '.join(held)}}}" if held else ""
            return f"return {self.const(Rest)}({call}, ({args}){more})"
        names = "".join([f"_v{i + 1} = " for i in range(self.emit.count)])
        run = f"{self.const(run_on)}({self.const(hand_over)}({call}, _r))"
        return f"_r = [({args})]\nout = {names}None\nreturn {run}"  # the rest may let go of what it is given

    def notices(self, value: Any) -> bool:
        """Whether something happens when the object dies: its variable puts that off to the frame's end."""
        origin = self.emit.trace.origins.get(id(value))
        if origin is None or isinstance(value, (Fake, Outside)):
            return False
        return hasattr(type(origin.original), "__del__") or weakref.getweakrefcount(origin.original) > 0

    def resume_function(self, code: Any) -> str:
        trace = self.emit.trace
        line = code.co_name.rsplit("_", 1)[-1]
        if not code.co_freevars:
            known = trace.resumes.setdefault(code, FunctionType(code, trace.frame.globals, code.co_name))
            return self.emit.const(known, f"resume_{line}")
        cells = "".join(f"cell_{name}, " for name in self.origin.code.co_freevars)
        maker, body = self.const(FunctionType), self.emit.const(code, f"resume_{line}")
        return f"{maker}({body}, user_globals, {code.co_name!r}, None, ({cells}))"

    def go_on(self, *pushed: str, drop: int = 0) -> None:
        """Fall through to the next instruction with `drop` entries popped and these pushed."""
        rest = self.stack[: len(self.stack) - drop] if drop else list(self.stack)
        self.lines(self.resume(self.at + 1, [*rest, *pushed]))

    def do(self, line: str) -> None:
        """A line that may raise: in a try block of the user's, its handler goes on."""
        region = self.code.region(self.at)
        caught = f"{self.const(caught_at)}(_caught, {self.emit.const(place_loc(self.root), 'line')})"
        if region is not None:
            self.lines("_error = None")
        with self.lines.block("try:"):
            self.do_handling(line)
        with self.lines.block("except BaseException as _caught:"):
            self.lines(f"raise {caught}" if region is None else f"_error = {caught}")
        if region is None:
            return
        with self.lines.block("if _error is not None:"):  # here it is not being handled: the rest does that
            self.handle(region, "_error")

    def handle(self, region: Region, error: str, last: str = "") -> None:
        """Go on at the handler, and let go of what lies above it on the stack."""
        needed = {*self.slots.values(), *self.stack[: region.depth]}
        for text, value in zip(self.stack[region.depth :], self.values[region.depth :]):
            if type(value) is Outside and text.isidentifier() and text not in needed:
                self.lines(f"{text} = None")  # or the error's traceback would hold it
        kept = [last or self.entry_text(LastInstruction(self.at))] * region.keeps_last
        self.lines(self.resume(region.target, [*self.stack[: region.depth], *kept, error]))

    def do_handling(self, line: str) -> None:
        """The line, while the exceptions that the frame is handling are being handled here too."""
        errors = [text for text in self.stack if isinstance(text, HandledText)]
        with ExitStack() as blocks:
            for error in errors:
                self.lines(f"_kept = {error}.__traceback__, {error}.__context__")
                with self.lines.block("try:"):
                    self.lines(f"raise {error}")
                blocks.enter_context(self.lines.block("except BaseException:"))
                self.lines(f"{error}.__traceback__, {error}.__context__ = _kept")
            self.lines(line)


class HandledText(str):
    """The text of an exception that is being handled."""


class GrowingText(str):
    """The text of a list to which a comprehension goes on to append."""


def kind_of(text: str) -> str:
    if isinstance(text, HandledText):
        return HANDLED
    if isinstance(text, GrowingText):
        return GROWING
    return NONE_THERE if text == NULL_TEXT else VALUE


def emit_break(emit: Emitter, root: Activation) -> list[str]:
    """Lines that end the entry. Texts of all values are made here, before effects are written."""
    site = Site(emit, root)
    held = sorted({name for text in site.stack for name in HELD.findall(text)})
    with ExitStack() as blocks:
        if held:  # a traceback keeps this frame, but not its stack: an abandoned generator ends in time
            blocks.callback(site.lines, f"finally:\n    {' = '.join(held)} = _kept = _error = None")
            blocks.enter_context(site.lines.block("try:"))
        RULES.get(site.op, _in_the_rest)(site)
    return site.lines.lines


def _in_the_rest(site: Site) -> None:
    """An instruction that only the frame itself can do: the rest begins with it, and runs in eager."""
    if site.prologue and site.root.steps <= site.prologue:
        raise SkippedFrame(site.root.trace.loc(), detail=f"a break at {site.op}")
    site.lines(site.resume(site.at, site.stack))


def callable_text(site: Site, first: int) -> str:
    """A callable on the stack, before or after its NULL or what a method belongs to."""
    position = first + (site.values[first] is NULL)
    value = site.values[position]
    if value is torch.cond or (getattr(value, "__module__", "") or "").startswith("torch._higher_order_ops"):
        return site.const(AS_PYTHON.get(value.__name__, value))
    if isinstance(value, MethodType) and isinstance(value.__self__, Fake):  # a tensor's, not the Fake's
        return f"{site.emit.value(value.__self__)}.{value.__name__}"
    return site.stack[position]


def _call(site: Site, count: int, names: tuple[str, ...], extra: int = 0) -> None:
    top = len(site.stack) - extra
    first, args = top - count - 2, site.stack[top - count : top]
    if not any(value is NULL for value in site.values[first : first + 2]):
        args = [site.stack[first + 1], *args]
    split = len(args) - len(names)
    shown = [*args[:split], *(f"{name}={text}" for name, text in zip(names, args[split:]))]
    site.do(f"_r = {callable_text(site, first)}({', '.join(shown)})")
    site.go_on("_r", drop=count + 2 + extra)


def _call_unpacked(site: Site) -> None:
    has_kwargs = site.arg & 1
    drop = 3 + has_kwargs
    args = site.stack[-1 - has_kwargs]
    kwargs = f", **{site.stack[-1]}" if has_kwargs else ""
    site.do(f"_r = {callable_text(site, len(site.stack) - drop)}(*{args}{kwargs})")
    site.go_on("_r", drop=drop)


def _line(form: str, count: int, site: Site, pushed: Sequence[str] = ()) -> None:
    """An instruction that is a line with its operands and its argument; what it assigns to _r it pushes, if
    nothing else is said."""
    operation = site.const(site.arg) if callable(site.arg) else ""
    operands = site.stack[len(site.stack) - count :]
    site.do(form.format(*operands, name=site.arg, operation=operation))
    site.go_on(*(pushed or ["_r"] * form.startswith("_r = ")), drop=count)


def _branch(jumps_if: bool, keeps: bool, site: Site) -> None:
    """A jump that depends on a truth value: one resume function for each way."""
    site.do(f"_r = bool({site.stack[-1]})")
    _two_ways(site, site.at, jumps_if, site.stack[:-1], site.stack[-1:] if keeps else [])


def _two_ways(site: Site, jump: int, jumps_if: bool, rest: list[str], kept: Sequence[str] = ()) -> None:
    target: Any = site.code.args[jump]
    with site.lines.block("if _r:" if jumps_if else "if not _r:"):
        site.lines(site.resume(target, [*rest, *kept]))
    site.lines(site.resume(jump + 1, rest))


def _truth(form: str, count: int, site: Site) -> None:
    """An instruction that leaves a bool. If a jump asks for it at once, its two ways are resumed instead."""
    operation = site.const(site.arg) if callable(site.arg) else ""
    rest, following = site.stack[: len(site.stack) - count], site.code.ops[site.at + 1]
    site.do(f"_r = {form.format(*site.stack[-count:], operation=operation)}")
    if following not in ("POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE"):
        return site.go_on("_r", drop=count)
    _two_ways(site, site.at + 1, following == "POP_JUMP_IF_TRUE", rest)


def _for_iter(site: Site) -> None:
    done = site.resume(site.arg, site.stack[:-1])
    end = site.const(NULL)
    site.do(f"_r = next({site.stack[-1]}, {end})")
    with site.lines.block(f"if _r is {end}:"):
        site.lines(done)
    site.go_on("_r")


def _unpack(site: Site) -> None:
    """UNPACK_EX has one name with a star, so many after the first and before the last."""
    before, after = (site.arg & 255, site.arg >> 8) if site.op == "UNPACK_EX" else (site.arg, -1)
    names = [f"_u{i}" for i in range(before + 1 + after)]
    shown = ["*" * (i == before) + name for i, name in enumerate(names)]
    site.do(f"[{', '.join(shown)}] = {site.stack[-1]}")
    site.go_on(*reversed(names), drop=1)


def _format(site: Site) -> None:
    """Flags say which of !r and the like there is, and whether there is a specification."""
    value, spec = site.stack[-2:] if site.arg & 4 else (site.stack[-1], "''")
    site.do(f"_r = {site.const(format_value)}({value}, {site.arg & 3}, {spec})")
    site.go_on("_r", drop=2 if site.arg & 4 else 1)


def _into(method: str, count: int, site: Site) -> None:
    """LIST_EXTEND and the like: change a container deeper in the stack."""
    site.do(f"{site.stack[-count - site.arg]}.{method}({', '.join(site.stack[-count:])})")
    site.go_on(drop=count)


def _raise(site: Site) -> None:
    cause = f" from {site.stack[-1]}" if site.arg == 2 else ""
    error = f" {site.stack[-site.arg]}" if site.arg else ""
    site.do(f"raise{error}{cause}")


def _raise_again(site: Site) -> None:
    """The end of a `with` or `finally`: an abandoned generator ends before the next handler begins."""
    region = site.code.region(site.at)
    if region is None:
        return _in_the_rest(site)
    site.handle(region, site.stack[-1], site.stack[-1 - site.arg] if site.arg else "")


def _leave_with(site: Site) -> None:
    leave, error = site.stack[-4], site.stack[-1]
    site.do(f"_r = {leave}(type({error}), {error}, {error}.__traceback__)")
    site.go_on("_r")


METHOD_TEXTS: Final = (NULL_TEXT, "_r") if NULL_FIRST else ("_r", NULL_TEXT)
SIGNS: Final = {"NEGATIVE": "-", "INVERT": "~", "POSITIVE": "+", "NOT": "not "}
LINES: Final = {
    **dict.fromkeys(("BINARY_OP", "COMPARE_OP"), ("_r = {operation}({0}, {1})", 2)),
    "BINARY_SUBSCR": ("_r = {0}[{1}]", 2),
    **{f"UNARY_{name}": (f"_r = {sign}({{0}})", 1) for name, sign in SIGNS.items()},
    **{op: (f"_r = {name}({{0}})", 1) for op, name in (("GET_ITER", "iter"), ("LIST_TO_TUPLE", "tuple"))},
    "LOAD_ATTR": ("_r = {0}.{name}", 1),
    "LOAD_GLOBAL": ("_r = user_globals[{name!r}]", 0),
    "STORE_ATTR": ("{1}.{name} = {0}", 2),
    "DELETE_ATTR": ("del {0}.{name}", 1),
    "STORE_SUBSCR": ("{1}[{2}] = {0}", 3),
    "DELETE_SUBSCR": ("del {0}[{1}]", 2),
    "STORE_SLICE": ("{1}[{2}:{3}] = {0}", 4),
    "BINARY_SLICE": ("_r = {0}[{1}:{2}]", 3),
    "IMPORT_NAME": ("_r = __import__({name!r}, user_globals, None, {1}, {0})", 2),
}
"""Instructions that are a line with that many operands."""
RULES: Final[dict[str, Callable[[Site], None]]] = {
    **{op: partial(_line, *row) for op, row in LINES.items()},
    **dict.fromkeys(("SET_UPDATE", "DICT_UPDATE", "DICT_MERGE"), partial(_into, "update", 1)),
    "LIST_EXTEND": partial(_into, "extend", 1),
    "SET_ADD": partial(_into, "add", 1),
    "MAP_ADD": partial(_into, "__setitem__", 2),
    "CALL": lambda site: _call(site, site.arg, site.root.kw_names),
    "CALL_KW": lambda site: _call(site, site.arg, site.values[-1], extra=1),
    "CALL_FUNCTION_EX": _call_unpacked,
    "TO_BOOL": partial(_truth, "bool({0})", 1),
    "COMPARE_OP_BOOL": partial(_truth, "bool({operation}({0}, {1}))", 2),
    "CONTAINS_OP": lambda site: _line("_r = {0} not in {1}" if site.arg else "_r = {0} in {1}", 2, site),
    "LOAD_METHOD": partial(_line, "_r = {0}.{name}", 1, pushed=METHOD_TEXTS),
    **{f"POP_JUMP_IF_{way}": partial(_branch, way == "TRUE", False) for way in ("TRUE", "FALSE")},
    **{f"JUMP_IF_{way}_OR_POP": partial(_branch, way == "TRUE", True) for way in ("TRUE", "FALSE")},
    "FOR_ITER": _for_iter,
    "POP_TOP": lambda site: site.go_on(drop=1),
    **dict.fromkeys(("UNPACK_SEQUENCE", "UNPACK_EX"), _unpack),
    "BEFORE_WITH": partial(
        _line, "_exit, _r = {0}.__exit__, {0}.__enter__()", 1, pushed=("_exit", "_r")),
    "FORMAT_VALUE": _format,
    "RAISE_VARARGS": _raise,
    "RERAISE": _raise_again,
    "WITH_EXCEPT_START": _leave_with,
}
