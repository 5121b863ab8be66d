"""Equal kernels on different buffers as one: the step of an optimizer over its parameters.

    batched(plan, {group: Launchable})  ->  {first of several: the Launchable of all, others: left out}

The second axis of the grid says whose buffers a program takes. Kernels move to where the first of them was,
so only those qualify whose buffers the plan of memory does not share, and that nothing in between touches.
"""
from __future__ import annotations

from collections.abc import Iterable

from dovetail.codegen.target import Launchable
from dovetail.ir.expr import as_expr
from dovetail.ir.schedule import Group, Plan
from dovetail.util.noun import Noun, field, replace

MOST_MEMBERS = 8
"""A program chooses among so many before it starts;"""
MOST_POINTERS = 400
"""and a kernel's parameters are 4 KiB."""


class Batch(Noun, frozen=False, eq=False):
    members: list[Group]
    reads: set[str]
    writes: set[str]
    others_read: set[str] = field(default_factory=set)
    """What other steps after the first member read,"""
    others_write: set[str] = field(default_factory=set)
    """and write."""

    def takes(self, reads: set[str], writes: set[str], params: int) -> bool:
        if len(self.members) == MOST_MEMBERS or (len(self.members) + 1) * params > MOST_POINTERS:
            return False
        read, written = self.reads | self.others_read, self.writes | self.others_write
        return writes.isdisjoint(read | written) and reads.isdisjoint(written)


def batched(plan: Plan, launches: dict[Group, Launchable]) -> dict[Group, Launchable]:
    places = dict(plan.places)
    shared = {name for name, place in plan.places if place.kind not in ("input", "output", "reuse")}

    def memory(names: Iterable[str]) -> set[str]:
        return {places[name].of or name if name in places else name for name in names}

    batches: dict[tuple[object, ...], Batch] = {}
    found: list[Batch] = []
    for step in plan.schedule.steps:
        reads, writes = memory(step.read_buffers), memory(step.written_buffers)
        mine = None
        made = launches[step] if isinstance(step, Group) else None
        if isinstance(step, Group) and made and len(made.grid) == 1 and shared.isdisjoint(made.params):
            form = (made.kernel.key, made.sizes, made.numbers, made.grid)
            mine = batches.get(form)
            if mine is None or not mine.takes(reads, writes, len(made.params)):
                mine = batches[form] = Batch([], set(), set())
                found.append(mine)
            mine.members.append(step)
            mine.reads, mine.writes = mine.reads | reads, mine.writes | writes
        for other in found:
            if other is not mine:
                other.others_read |= reads
                other.others_write |= writes
    result = dict(launches)
    for batch in found:
        if len(batch.members) > 1:
            result[batch.members[0]] = _joined([result.pop(member) for member in batch.members])
    return result


def _joined(parts: list[Launchable]) -> Launchable:
    first, count = parts[0], len(parts[0].params)
    kernel, members, name = first.kernel, range(1, len(parts)), f"{first.kernel.name}_x{len(parts)}"
    before, _, after = kernel.text.partition(f"def {kernel.name}(")
    parameters, _, body = after.partition("):\n")
    names = parameters.split(", ")
    taken = [f"{param}__{k}" for k in members for param in names[:count]]
    choose = "    {0} = tl.where(tl.program_id(1) == {1}, {0}__{1}, {0})\n"
    choices = [choose.format(param, k) for k in members for param in names[:count]]
    times, all_names = len(parts), ", ".join([*names[:count], *taken, *names[count:]])
    pointers, rest = kernel.signature[:count], kernel.signature[count:]
    joined = replace(
        kernel, name=name, text=f"{before}def {name}({all_names}):\n{''.join(choices)}{body}",
        key=f"{kernel.key}x{times}", bytes_moved=kernel.bytes_moved * times, sizes=kernel.sizes * times,
        signature=(*pointers * times, *rest),
        unaligned=tuple(count * k + place for k in range(times) for place in kernel.unaligned),
    )  # fmt: skip
    params = tuple(param for part in parts for param in part.params)
    return replace(first, kernel=joined, params=params, grid=(*first.grid, (as_expr(times), 0)))
