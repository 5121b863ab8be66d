"""Resume functions: the rest of a frame, from one of its instructions on, as a function of its own.

    code, instruction 14, live slots, stack layout  ->  code of `resume_14(x, y, stack_0)`

The new code is the old one with a few instructions in front that push the stack and jump. All jumps in
CPython's bytecode are relative, so nothing else moves: the exception table and the line table are
shifted, and free variables get higher slot numbers. Every slot of the frame is an argument, cells
included; slots that are dead are deleted at once. The function is an ordinary one, which the
frame hook sees and captures in turn. Resume codes are kept, so a loop that breaks in its body
comes back to the same code each time round.
"""
from __future__ import annotations

import dis
import opcode
from functools import cache
from types import CodeType
from typing import Final

from dovetail.capture.decode import CACHES, Code, decode
from dovetail.capture.frame import as_parameters, line_table
from dovetail.errors import SkippedFrame
from dovetail.util.noun import Noun

OP: Final = opcode.opmap
SLOT_NAMES: Final = ("LOAD_CLOSURE", "LOAD_DEREF", "STORE_DEREF", "DELETE_DEREF", "LOAD_CLASSDEREF",
                     "LOAD_FROM_DICT_OR_DEREF", "LOAD_FAST", "LOAD_FAST_CHECK")  # fmt: skip
PAIR_NAMES: Final = ("LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST")
SLOT_OPS, PAIR_OPS = ({OP[x] for x in names if OP.get(x, 256) < 256} for names in (SLOT_NAMES, PAIR_NAMES))
VALUE, NONE_THERE, HANDLED, GROWING = "value", "null", "handled", "growing"
NO_LOCATION: Final = 15
ARGS_FLAGS: Final = 4 | 8


class Layout(Noun):
    """What a resume function is given: which slots are dead, and what each stack entry is."""

    dead: tuple[bool, ...]
    stack: tuple[str, ...]
    """VALUE: an argument. NONE_THERE: NULL. HANDLED: an argument that is the exception being handled; the
    entry itself is what was handled before. GROWING: a list to which a comprehension goes on to append."""


class Resume(Noun, eq=False):
    """`prologue` is how many normalised instructions come before the old code's first."""

    code: CodeType
    origin: CodeType
    prologue: int
    growing: frozenset[int]


_by_code: dict[CodeType, Resume] = {}


def origin_of(code: Code) -> tuple[Code, int]:
    """The user's code that a (resume) code came from, and how much later its instructions are here."""
    made = _by_code.get(code.code)
    return (code, 0) if made is None else (decode(made.origin), made.prologue)


def is_resumed(code: CodeType) -> bool:
    return code in _by_code


def growing_slots(code: CodeType) -> frozenset[int]:
    """Slots of a resume function that put a list on the stack to which a comprehension appends."""
    made = _by_code.get(code)
    return frozenset() if made is None else made.growing


@cache
def make_resume(origin: Code, target: int, layout: Layout) -> Resume:
    """Code that continues `origin` at the instruction `target`."""
    made = _make(origin, target, layout)
    return _by_code.setdefault(made.code, made)


def _unit(op: str, arg: int = 0) -> bytes:
    head = b"".join(bytes((OP["EXTENDED_ARG"], arg >> shift & 255)) for shift in (24, 16, 8) if arg >> shift)
    return head + bytes((OP[op], arg & 255)) + bytes(2 * CACHES.get(op, 0))


def _make(origin: Code, target: int, layout: Layout) -> Resume:
    code = origin.code
    free = len(code.co_freevars)
    slots = origin.slot_names[: len(origin.slot_names) - free]
    stack = tuple(f"stack_{i}" for i, kind in enumerate(layout.stack) if kind != NONE_THERE)
    start = [_unit("COPY_FREE_VARS", free)] * bool(free) + [_unit("RESUME")]  # which Code leaves out
    units = [_unit("DELETE_FAST", i) for i, is_dead in enumerate(layout.dead) if is_dead]
    at = len(slots)
    for kind in layout.stack:
        if kind == NONE_THERE:
            units.append(_unit("PUSH_NULL"))
            continue
        units += [_unit("LOAD_FAST", at), _unit("DELETE_FAST", at)]
        at += 1
        if kind == HANDLED:
            units += [_unit("PUSH_EXC_INFO"), _unit("POP_TOP")]
    units.append(_unit("JUMP_FORWARD", origin.offsets[target] // 2))
    head = b"".join(start + units)
    names = slots + stack
    made = code.replace(
        co_code=head + _shift_slots(code.co_code, len(slots), len(stack)),
        co_argcount=len(names),
        co_posonlyargcount=0,
        co_kwonlyargcount=0,
        co_nlocals=len(names),
        co_varnames=tuple(as_parameters(names)),
        co_cellvars=tuple(name for name in slots if name in code.co_cellvars),  # super() wants to know
        co_flags=code.co_flags & ~ARGS_FLAGS,
        co_stacksize=max(code.co_stacksize, len(layout.stack) + 2),
        co_exceptiontable=_shift_regions(code, len(head) // 2),
        co_linetable=line_table(len(head) // 2, NO_LOCATION) + code.co_linetable,
        co_name=f"{code.co_name}_resumed_at_{origin.line(target)}",
        co_qualname=f"{code.co_qualname} resumed at line {origin.line(target)}",
    )
    given = [kind for kind in layout.stack if kind != NONE_THERE]
    growing = frozenset(len(slots) + i for i, kind in enumerate(given) if kind == GROWING)
    return Resume(made, code, len(units), growing)


def _shift_slots(raw: bytes, first: int, by: int) -> bytes:
    """Free variables live in the last slots; `by` more slots now lie before them."""
    if not by:
        return raw
    made = bytearray(raw)
    offset = 0
    while offset < len(made):
        op, arg = made[offset], made[offset + 1]
        is_far = op == OP["EXTENDED_ARG"] and made[offset + 2] in SLOT_OPS
        if op in SLOT_OPS and arg >= first:
            is_far, made[offset + 1] = arg + by > 255, arg + by & 255
        if is_far:
            raise SkippedFrame(detail="more than 255 local variables")
        if op in PAIR_OPS and (arg >> 4 >= first or arg & 15 >= first):
            raise SkippedFrame(detail="a closure variable is read together with another one")
        offset += 2 + 2 * CACHES.get(opcode.opname[op], 0)
    return bytes(made)


def _number(value: int, is_first: bool = False) -> bytes:
    """In parts of six bits, each of which says whether another follows."""
    made = [value >> shift & 63 | 64 for shift in (24, 18, 12, 6) if value >> shift] + [value & 63]
    made[0] |= 128 * is_first
    return bytes(made)


def _shift_regions(code: CodeType, by: int) -> bytes:
    """The exception table with all positions `by` code units later."""
    made = b""
    for row in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        made += _number(row.start // 2 + by, True) + _number((row.end - row.start) // 2)
        made += _number(row.target // 2 + by) + _number(row.depth << 1 | row.lasti)
    return made
