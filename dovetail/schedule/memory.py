"""Give every buffer a place.

    Schedule -> Plan
    temporaries share one arena by lifetime; a kernel's output takes over the memory of an input that
    dies there when it reads and writes each element at the same position

Sizes known at compile time are packed by first fit over offsets; symbolic ones reuse a freed slot of
the same size or get one of their own, after the fixed part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from dovetail.ir.expr import ZERO, Expr, add, ceildiv, const, mul
from dovetail.ir.loop import Buffer, Extern
from dovetail.ir.schedule import Group, Place, Plan, Schedule
from dovetail.schedule.cluster import read_indices
from dovetail.schedule.fuse import extern_reads, kept_buffers

ALIGN: Final = 64


@dataclass(slots=True)
class Arena:
    """Free fixed-size gaps, and slots by symbolic size."""

    live: list[tuple[int, int]] = field(default_factory=list)
    """(offset, bytes) in use, sorted."""
    top: int = 0
    symbolic: Expr = ZERO
    spare: dict[Expr, list[Expr]] = field(default_factory=dict)

    def take(self, size: Expr) -> Expr:
        return const(self._fit(size.value)) if size.is_const else self._slot(size)

    def _fit(self, size: int) -> int:
        at = 0
        for offset, taken in self.live:
            if offset - at >= size:
                break
            at = max(at, offset + taken)
        self.live.append((at, size))
        self.live.sort()
        self.top = max(self.top, at + size)
        return at

    def _slot(self, size: Expr) -> Expr:
        if self.spare.get(size):
            return self.spare[size].pop()
        offset = self.symbolic
        self.symbolic = add(self.symbolic, size)
        return offset

    def give(self, offset: Expr, size: Expr) -> None:
        if size.is_const:
            self.live.remove((offset.value, size.value))
        else:
            self.spare.setdefault(size, []).append(offset)


def plan(schedule: Schedule) -> Plan:
    loops = schedule.loops
    buffers = {b.name: b for b in loops.buffers}
    kept = kept_buffers(loops)
    places: dict[str, Place] = {}
    last = _last_uses(schedule)
    for buffer in loops.buffers:
        if buffer.kind == "input":
            places[buffer.name] = Place("input")
        elif buffer.name in kept:
            places[buffer.name] = Place("output")
    for step in schedule.steps:
        if isinstance(step, Group):
            places |= {name: Place("internal") for name in step.internal}
        elif not step.into:
            places |= {name: Place("extern") for name in step.results}
            if step.aliases:  # the result may be a view: its arguments live on their own
                shared = [name for name in extern_reads(step) if name not in places]
                places |= {name: Place("output") for name in shared}
    home = loops.device
    elsewhere = [b.name for b in loops.buffers if b.type.device != home and b.name not in places]
    places |= {name: Place("output") for name in elsewhere}  # the arena is on one device
    arena = Arena()
    _place_temporaries(schedule, buffers, places, last, arena)
    fixed = const(_aligned(arena.top))
    shifted = {
        name: Place("arena", add(fixed, place.offset))
        if place.offset is not None and _is_symbolic(buffers[name])
        else place
        for name, place in places.items()
    }
    return Plan(schedule, tuple(shifted.items()), add(fixed, arena.symbolic))


def _is_symbolic(buffer: Buffer) -> bool:
    return not storage_bytes(buffer).is_const


def _aligned(size: int) -> int:
    return (size + ALIGN - 1) // ALIGN * ALIGN


def storage_elements(buffer: Buffer) -> Expr:
    """Elements from the first to the last that the buffer's shape and strides reach."""
    if any(size is ZERO for size in buffer.type.shape):
        return ZERO
    reach: Expr = const(1)
    for size, stride in zip(buffer.type.shape, buffer.type.stride):
        reach = add(reach, mul(add(size, -1), stride))
    return reach


def storage_bytes(buffer: Buffer) -> Expr:
    """Bytes, rounded up to whole lines."""
    size = mul(storage_elements(buffer), buffer.type.dtype.bytes)
    return const(_aligned(max(size.value, 1))) if size.is_const else mul(ceildiv(size, ALIGN), ALIGN)


def step_reads(step: Group | Extern) -> set[str]:
    if isinstance(step, Extern):
        return set(extern_reads(step))
    return {buffer for nest in step.nests for buffer, _ in read_indices(nest)}


def step_writes(step: Group | Extern) -> list[str]:
    if isinstance(step, Extern):
        return list(step.outputs)
    return [buffer for nest in step.nests for write in nest.writes for buffer in write.buffers]


def _last_uses(schedule: Schedule) -> dict[str, int]:
    last: dict[str, int] = {}
    for k, step in enumerate(schedule.steps):
        for buffer in (*step_reads(step), *step_writes(step)):
            last[buffer] = k
    return last


def _place_temporaries(
    schedule: Schedule,
    buffers: dict[str, Buffer],
    places: dict[str, Place],
    last: dict[str, int],
    arena: Arena,
) -> None:
    dying: dict[int, list[str]] = {}
    for name, k in last.items():
        dying.setdefault(k, []).append(name)
    for k, step in enumerate(schedule.steps):
        taken: set[str] = set()
        for name in dict.fromkeys(step_writes(step)):
            if name in places:
                continue
            donor = _find_donor(step, name, buffers, places, last, k, taken)
            if donor is not None:
                taken.add(donor)
                places[name] = Place("arena", places[donor].offset)
            else:
                places[name] = Place("arena", arena.take(storage_bytes(buffers[name])))
        for name in dying.get(k, ()):
            if places[name].kind == "arena" and name not in taken:
                arena.give(places[name].offset, storage_bytes(buffers[name]))  # type: ignore[arg-type]


def _find_donor(
    step: Group | Extern,
    name: str,
    buffers: dict[str, Buffer],
    places: dict[str, Place],
    last: dict[str, int],
    k: int,
    taken: set[str],
) -> str | None:
    """A temporary that dies here and whose every read is at the position just being written."""
    if isinstance(step, Extern):
        return None
    if buffers[name].type.device.kind != "cpu" and any(step.levels):
        return None  # on a GPU, a later pass over a row may read again what an earlier one read
    target = _write_positions(step).get(name)
    if target is None:
        return None
    level, index, nest = target
    for other, found in _read_positions(step).items():
        place = places.get(other)
        if place is None or place.kind != "arena" or last.get(other) != k or other in taken:
            continue
        if storage_bytes(buffers[other]) is not storage_bytes(buffers[name]):
            continue
        if buffers[other].type.dtype.bytes != buffers[name].type.dtype.bytes:
            continue
        if all(
            at is index and (at_level < level or (at_level == level and order <= nest))
            for at_level, order, at in found
        ):
            return other
    return None


def _write_positions(group: Group) -> dict[str, tuple[int, Expr, int]]:
    found: dict[str, tuple[int, Expr, int]] = {}
    for order, (nest, level) in enumerate(zip(group.nests, group.levels)):
        if nest.reduce:
            continue
        for write in nest.writes:
            if write.mode == "set" and write.index_scalar is None:
                found |= {buffer: (level, write.index, order) for buffer in write.buffers}
    return found


def _read_positions(group: Group) -> dict[str, list[tuple[int, int, Expr | None]]]:
    found: dict[str, list[tuple[int, int, Expr | None]]] = {}
    for order, (nest, level) in enumerate(zip(group.nests, group.levels)):
        for buffer, index in read_indices(nest):
            found.setdefault(buffer, []).append((level, order, index))
    return found
