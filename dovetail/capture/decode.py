"""Bytecode of a code object, normalised once and kept.

    CodeType -> Code(instructions, exception table, slot names, lines)

    x + 1    [LOAD_FAST 0, LOAD_CONST 1, BINARY_OP operator.add, ...]

An argument is already what the op works on: a slot number, a name, a constant, an operator function,
or for a jump the index of the target instruction.
"""
from __future__ import annotations

import dis
import opcode
from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import Any, Final

from dovetail.capture.versions import ARGUMENTS, FOR_ITER_SKIPS, TABLE
from dovetail.util.noun import Noun, field

_entries: Any = opcode._inline_cache_entries  # type: ignore[attr-defined]  # by name since 3.13
CACHES: Final = {
    name: _entries.get(name, 0) if isinstance(_entries, dict) else _entries[number]
    for name, number in opcode.opmap.items()
    if number < 256
}
JUMPS: Final = frozenset(opcode.opname[op] for op in (*opcode.hasjrel, *opcode.hasjabs) if op < 256)
NO_FALL_THROUGH: Final = frozenset({"RETURN_VALUE", "JUMP", "RAISE_VARARGS", "RERAISE"})


class Region(Noun):
    """One row of the exception table, in instruction indices: [start, end) unwinds to target."""

    start: int
    end: int
    target: int
    depth: int
    keeps_last: bool


class Code(Noun, frozen=False, eq=False):
    """`ops[i]`, `args[i]`, and the bytecode offset each came from."""

    code: CodeType
    ops: list[str]
    args: list[object]
    offsets: list[int]
    regions: tuple[Region, ...]
    slot_names: tuple[str, ...]
    cell_slots: frozenset[int]
    _lines: list[int] = field(default_factory=list)
    bound: list[object] = field(default_factory=list)
    """The interpreter's method for each op, filled by the interpreter on first use."""

    def line(self, index: int) -> int:
        """The line of an instruction."""
        if not self._lines:
            self._lines = [line or 0 for line, *_ in self.code.co_positions()]
        before = self._lines[self.offsets[index] // 2 :: -1]
        return next(filter(None, before), self.code.co_firstlineno)

    def region(self, index: int) -> Region | None:
        """The innermost region that covers an instruction (CPython writes them innermost first)."""
        for region in self.regions:
            if region.start <= index < region.end:
                return region
        return None

    def is_caught(self, index: int) -> bool:
        """Whether an `except` clause sees what an instruction raises, if only around a `with`."""
        if (region := self.region(index)) is None:
            return False
        first = self.ops[region.target + 1 : region.target + 6]
        is_star = {"COPY", "BUILD_LIST"} == {*first[:2]} or "LIST_APPEND" in first  # or in such a clause
        is_caught = is_star or "CHECK_EXC_MATCH" in first or first[0] == "POP_TOP"
        return is_caught or self.is_caught(region.target)


def slot_names(code: CodeType) -> tuple[str, ...]:
    """Names of the frame's slots: locals, then cells that are no locals, then free variables."""
    only_cells = tuple(name for name in code.co_cellvars if name not in code.co_varnames)
    return code.co_varnames + only_cells + code.co_freevars


@cache
def decode(code: CodeType) -> Code:
    raw = code.co_code
    ops: list[str] = []
    args: list[object] = []
    offsets: list[int] = []
    jumps: list[tuple[int, int, int]] = []
    index_at: dict[int, int] = {}
    offset, extended, begin = 0, 0, 0
    while offset < len(raw):
        name, arg = opcode.opname[raw[offset]], raw[offset + 1] | extended << 8
        index_at[offset] = len(ops)
        if name == "EXTENDED_ARG":
            extended = arg
            offset += 2
            continue
        after = offset + 2 + 2 * CACHES.get(name, 0)
        split = TABLE.get(name)
        for op, value in split(arg) if split else ((name, arg),):
            if name in JUMPS:
                target = after + (-2 * value if "BACKWARD" in name else 2 * value)
                jumps.append((len(ops), target, FOR_ITER_SKIPS if op == "FOR_ITER" else 0))
                args.append(0)
            else:
                convert = ARGUMENTS.get(op)
                args.append(convert(code, value) if convert else value)
            ops.append(op)
            offsets.append(begin)
        extended, offset = 0, after
        begin = offset
    index_at[len(raw)] = len(ops)
    for at, target, skip in jumps:
        args[at] = index_at[target] + skip
    names = slot_names(code)
    in_cells = {*code.co_cellvars, *code.co_freevars}
    cells = frozenset(i for i, name in enumerate(names) if name in in_cells)
    return Code(code, ops, args, offsets, tuple(_regions(code, index_at)), names, cells)


def _regions(code: CodeType, index_at: dict[int, int]) -> Iterator[Region]:
    for row in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        first, last, to = (index_at[offset] for offset in (row.start, row.end, row.target))
        yield Region(first, last, to, row.depth, row.lasti)


# -- liveness: which slots an instruction's future still reads ----------------------------------------

READS: Final = frozenset({"LOAD_FAST", "DELETE_FAST", "LOAD_FAST_AND_CLEAR"})
ASKS_FOR_ALL: Final = frozenset({"locals", "vars", "dir", "eval", "exec"})


@cache
def live_before(code: Code) -> list[frozenset[int]]:
    """For each instruction the plain local slots that may be read at or after it."""
    count = len(code.ops)
    always = range(len(code.slot_names)) if not ASKS_FOR_ALL.isdisjoint(code.code.co_names) else ()
    live: list[frozenset[int]] = [frozenset(always)] * (count + 1)
    jumps = {"JUMP", "FOR_ITER", "SEND"}
    changed = True
    while changed:
        changed = False
        for i in range(count - 1, -1, -1):
            op = code.ops[i]
            arg: Any = code.args[i]
            after: frozenset[int] = frozenset(always) if op in NO_FALL_THROUGH else live[i + 1]
            if op in jumps or "JUMP_IF" in op:
                after |= live[arg]
            region = code.region(i)
            if region is not None:
                after |= live[region.target]
            if op == "STORE_FAST" and not always:
                after -= {arg}
            elif "LOAD_SUPER" in op or op.startswith("LOAD_GLOBAL") and arg == "super":
                after |= {0}  # it takes the first argument by itself
            elif op in READS:
                after |= {arg}
            if after != live[i]:
                live[i], changed = after, True
    return live
