"""Give every buffer a place.

    Schedule -> Plan
    temporaries share one arena by lifetime; a kernel's output takes over the memory of an input that
    dies there when it reads and writes each element at the same position

Sizes known at compile time are packed with all lifetimes in view, the largest first; symbolic ones
reuse a freed slot of the same size or get one of their own, after the fixed part.
"""
from __future__ import annotations

import math
from bisect import insort
from functools import lru_cache
from typing import Final, TypeAlias

from dovetail.ir.expr import ZERO, Expr, add, ceildiv, const, mul
from dovetail.ir.loop import Buffer, Extern
from dovetail.ir.schedule import LINE, Group, Place, Plan, Schedule
from dovetail.util.noun import Noun

Time: TypeAlias = "tuple[int, int, int]"
"""In a kernel: the level; before, along or again along its rows; the place among the nests."""


LARGE: Final = 1 << 22
"""Bytes from which on a temporary on a GPU is a block of its own: an arena as large as all of them at their
worst would be there when results and saved values need the most, too."""


class Slot(Noun, frozen=False, eq=False):
    """Memory for one temporary, or for several that take it over from each other."""

    size: Expr
    first: int
    last: int
    """The steps in between which it is in use."""
    names: list[str]
    offset: Expr = ZERO
    output: str | None = None
    """The output that takes over from the last of them."""

    def meets(self, other: Slot) -> bool:
        return self.first <= other.last and other.first <= self.last


def pack(slots: list[Slot]) -> Expr:
    """Give every slot its offset; the bytes of the whole arena. Large ones choose first: small ones fit
    into the gaps that are left. Numbers have a line each, so that kernels of numbers can move."""
    placed: list[tuple[int, int, int, int]] = []
    """(start, stop, first, last) of the slots so far, by start"""
    top = 0
    for slot in sorted((s for s in slots if s.size.is_const), key=lambda s: (-s.size.value, s.first)):
        if slot.size.value == LINE:
            slot.offset, top = const(top), top + LINE
            continue
        at, size, first, last = 0, slot.size.value, slot.first, slot.last
        for start, stop, since, until in placed:
            if since > last or until < first:
                continue
            if start - at >= size:
                break
            at = max(at, stop)
        insort(placed, (at, at + size, first, last))
        slot.offset, top = const(at), max(top, at + size)
    end: Expr = const(_aligned(top))
    spare: dict[Expr, list[Slot]] = {}
    for slot in (s for s in slots if not s.size.is_const):  # in order of time
        free = [other for other in spare.get(slot.size, ()) if not slot.meets(other)]
        if free:
            slot.offset = free[0].offset
            spare[slot.size].remove(free[0])
        else:
            slot.offset, end = end, add(end, slot.size)
        spare.setdefault(slot.size, []).append(slot)
    return end


def plan(schedule: Schedule) -> Plan:
    loops = schedule.loops
    buffers = {b.name: b for b in loops.buffers}
    kept = loops.returned
    places: dict[str, Place] = {}
    last = schedule.last_uses()
    for buffer in loops.buffers:
        if buffer.kind == "input":
            places[buffer.name] = Place("input")
        elif buffer.name in kept:
            places[buffer.name] = Place("output")
    places |= _in_place_updates(schedule, buffers, last)
    for step in schedule.steps:
        if isinstance(step, Group):
            places |= {name: Place("internal") for name in step.internal}
        elif not step.into:
            places |= {name: Place("extern") for name in step.results}
            if step.aliases:  # the result may be a view: its arguments live on their own
                shared = [ref.buffer for ref in step.refs() if ref.buffer not in places]
                places |= {name: Place("output") for name in shared}
    home = loops.device
    elsewhere = [b.name for b in loops.buffers if b.type.device != home and b.name not in places]
    places |= {name: Place("output") for name in elsewhere}  # the arena is on one device
    slots = find_slots(schedule, buffers, places, last)
    least = LARGE if home.kind != "cpu" else math.inf
    own = [slot for slot in slots if slot.output is None]
    end = pack([slot for slot in own if not slot.size.is_const or slot.size.value < least])
    for slot in slots:
        place = Place("arena", slot.offset) if slot.output is None else Place("within", of=slot.output)
        if slot.output is None and slot.size.is_const and slot.size.value >= least:
            place = Place("block", of=slot.names[0])
        places |= dict.fromkeys(slot.names, place)
    return Plan(schedule, tuple(places.items()), end)


def _aligned(size: int) -> int:
    return (size + LINE - 1) // LINE * LINE


def storage_bytes(buffer: Buffer) -> Expr:
    """Bytes, rounded up to whole lines."""
    size = buffer.type.storage_bytes
    return const(_aligned(max(size.value, 1))) if size.is_const else mul(ceildiv(size, LINE), LINE)


def find_slots(
    schedule: Schedule, buffers: dict[str, Buffer], places: dict[str, Place], last: dict[str, int]
) -> list[Slot]:
    """Who needs memory of the arena, and from when to when."""
    slots: dict[str, Slot] = {}
    begun: set[str] = set()
    for k, step in enumerate(schedule.steps):
        taken: set[str] = set()
        for name in step.written_buffers:
            if name in slots or name in begun or (name in places and places[name].kind != "output"):
                continue
            begun.add(name)
            donor = _find_donor(step, name, buffers, slots, last, k, taken)
            if name in places:
                if donor is not None and all(_fits(buffers[n], buffers[name]) for n in slots[donor].names):
                    taken.add(donor)
                    slots[donor].output = name
            elif donor is not None:
                taken.add(donor)
                slots[name] = slots[donor]
                slots[name].names.append(name)
                slots[name].last = last[name]
            else:
                slots[name] = Slot(storage_bytes(buffers[name]), k, last[name], [name])
    return list(dict.fromkeys(slots.values()))


def _fits(buffer: Buffer, output: Buffer) -> bool:
    """In the memory of the output."""
    size, room = buffer.type.storage_bytes, output.type.storage_bytes
    if buffer.type.device != output.type.device:
        return False
    return size is room or (size.is_const and room.is_const and size.value <= room.value)


def _in_place_updates(
    schedule: Schedule, buffers: dict[str, Buffer], last: dict[str, int]
) -> dict[str, Place]:
    """New values of inputs that can be written straight over the old ones."""
    found: dict[str, Place] = {}
    given = {name for _, name in schedule.loops.updates}
    writers: dict[str, list[int]] = {}
    for k, step in enumerate(schedule.steps):
        for name in step.written_buffers:
            writers.setdefault(name, []).append(k)
    shown = schedule.loops.returned
    for name, base in schedule.loops.updates:
        if base not in given or base in shown or name in found or buffers[name].type != buffers[base].type:
            continue
        (first, *more), read = writers.get(name, [-1, -1]), last.get(base, -1)
        step = schedule.steps[first]
        if not more and isinstance(step, Group) and read <= first:
            if read < first or _overwrites(step, name, base, buffers):
                found[name] = Place("reuse", of=base)
                given.discard(base)
    return found


def _find_donor(
    step: Group | Extern, name: str, buffers: dict[str, Buffer], slots: dict[str, Slot],
    last: dict[str, int], k: int, taken: set[str],
) -> str | None:  # fmt: skip
    """A temporary that dies here and whose every read is at the position just being written."""
    if isinstance(step, Extern):
        return None
    for other in _read_positions(step):
        if other not in slots or last.get(other) != k or other in taken or slots[other].size is const(LINE):
            continue
        if storage_bytes(buffers[other]) is not storage_bytes(buffers[name]):
            continue
        if buffers[other].type.dtype.real.bytes != buffers[name].type.dtype.real.bytes:
            continue
        if _overwrites(step, name, other, buffers):
            return other
    return None


def _overwrites(step: Group, name: str, other: str, buffers: dict[str, Buffer]) -> bool:
    """Every element of `other` is read before its place is written, were `name` to lie there."""
    target = _write_positions(step).get(name)
    if target is None:
        return False
    when, index = target
    walks = (_time(step, order)[:2] for order in range(len(step.nests)))
    if buffers[name].type.device.kind != "cpu":
        if when[:2] < max(walks):
            return False  # on a GPU, a later walk along a row may make again what an earlier one made
        if not step.ranges:
            when = (*when[:2], len(step.nests))  # there a kernel of numbers stores after all it loads
    return all(at is index and then <= when for then, at in _read_positions(step)[other])


def _time(group: Group, order: int) -> Time:
    """When a nest runs: what is once for a row comes before the walk along it; a variance walks twice."""
    nest = group.nests[order]
    walks = 2 if any(write.reduce == "welford" for write in nest.writes) else 1
    is_once = not nest.reduce and len(nest.ranges) == group.outer
    return group.levels[order], 0 if is_once else walks, order


@lru_cache(1)  # asked for again and again, one kernel after the other
def _write_positions(group: Group) -> dict[str, tuple[Time, Expr]]:
    found: dict[str, tuple[Time, Expr]] = {}
    for order, nest in enumerate(group.nests):
        if nest.reduce:
            continue
        for write in nest.writes:
            if write.index_scalar is None:
                found |= {buffer: (_time(group, order), write.index) for buffer in write.buffers}
    return found


@lru_cache(1)
def _read_positions(group: Group) -> dict[str, list[tuple[Time, Expr | None]]]:
    """A later pass computes again what is internal, and reads again what that is computed from."""
    found: dict[str, list[tuple[Time, Expr | None]]] = {}
    passes: dict[str, tuple[int, int]] = {}
    for order, nest in reversed([*enumerate(group.nests)]):
        level, walk, _ = _time(group, order)
        if walk and not nest.reduce:
            level, walk = max((level, walk), *(passes.get(name, (0, 0)) for name in nest.written_buffers))
        for buffer, index in nest.loads:
            found.setdefault(buffer, []).append(((level, walk, order), index))
            if buffer in group.internal:
                passes[buffer] = max(passes.get(buffer, (0, 0)), (level, walk))
    return found
