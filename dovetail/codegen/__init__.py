"""Plan -> Program: kernel texts, each once, and the host text that runs them."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from glob import glob
from pathlib import Path

from dovetail.codegen import cpp, triton
from dovetail.codegen.analysis import Form, Launchable, Target, form_of, from_start
from dovetail.codegen.host.program import emit_host
from dovetail.ir.expr import as_expr
from dovetail.ir.program import Kernel, Program
from dovetail.ir.schedule import LINE, Group, Plan
from dovetail.ir.types import as_reals
from dovetail.options import Options
from dovetail.util.noun import Noun, field, replace


@cache
def vector_bytes() -> int:
    """Width of this machine's vector registers, as eager would use them."""
    with open("/proc/cpuinfo") as file:
        flags = next((line for line in file if line.startswith("flags")), "").split()
    if {"avx512f", "avx512vl", "avx512bw", "avx512dq"} <= set(flags):
        return 64
    return 32 if {"avx2", "fma"} <= set(flags) else 0


@cache
def cache_bytes() -> int:
    """What a core has of its largest cache: half of it, where others use it, too."""
    found = glob("/sys/devices/system/cpu/cpu0/cache/index*/size")
    sizes = [Path(path).read_text().strip() for path in found]
    return max([int(size[:-1]) << 10 for size in sizes if size.endswith("K")], default=32 << 20) // 2


def emit(
    plan: Plan, options: Options,
    begin_kernels: Callable[[Sequence[Kernel], Options], object] = lambda *_: None,
    begin: Callable[[Program, Options], object] = lambda *_: None,
) -> Program:  # fmt: skip
    """`begin_kernels` gets those as soon as they are there, as the host program takes its time, too, and
    `begin` the whole."""
    loops = plan.schedule.loops
    targets: dict[str, Target] = {
        "cpu": partial(
            cpp.emit_kernel, vector_bytes=vector_bytes() if options.simd else 0, cache_bytes=cache_bytes()
        ),
        "cuda": triton.emit_kernel,
    }
    buffers = {b.name: replace(b, type=as_reals(b.type)) for b in loops.buffers}
    for name, kind in _kinds(plan).items():
        if buffers[name].kind != kind:
            buffers[name] = replace(buffers[name], kind=kind)
    launches: dict[Group, Launchable] = {}
    known: dict[Form, tuple[Launchable, list[str]]] = {}
    begin_at = from_start if loops.device.kind == "cpu" else lambda group: (group, {})
    moved = {step: begin_at(step) for step in plan.schedule.steps if isinstance(step, Group)}
    forms = {step: form_of(group, buffers) for step, (group, _) in moved.items()}
    for step, (form, names) in forms.items():
        group, starts = moved[step]
        if form not in known:
            device = buffers[step.nests[0].writes[0].buffers[0]].type.device.kind
            is_first = step is plan.schedule.steps[0] and device == "cuda"
            is_first = is_first and [other for other, _ in forms.values()].count(form) == 1
            target = partial(triton.emit_kernel, is_first=True) if is_first else targets[device]
            known[form] = target(group, buffers), names
        model, others = known[form]
        renamed = dict(zip(others, names, strict=True))
        params = tuple(renamed[name] for name in model.params)
        launches[step] = replace(model, params=params, starts=tuple(starts.get(name, 0) for name in params))
    if loops.device.kind == "cuda":
        launches = batched(plan, launches)
    kernels: dict[str, Kernel] = {}
    for made in launches.values():
        kernels.setdefault(made.kernel.key, made.kernel)
    begin_kernels(tuple(kernels.values()), options)
    index = {key: k for k, key in enumerate(kernels)}
    host = emit_host(plan, launches, index)
    program = Program(
        loops.name, str(loops.device), tuple(kernels.values()), host.text, len(loops.inputs), host.outputs,
        host.python_calls, loops.kinds, loops.inputs, host.results, len(plan.schedule.steps),
    )  # fmt: skip
    begin(program, options)
    return program


def _kinds(plan: Plan) -> dict[str, str]:
    """As kernels see them: a buffer in an input's memory is an input, an input nobody writes a constant."""
    found = {b.name: b.kind for b in plan.schedule.loops.buffers}
    written = {name for step in plan.schedule.steps for name in step.written_buffers}
    for name, place in plan.places:
        if place.kind == "reuse":
            found[name] = "input"
            written.add(str(place.of))
    constant = [name for name, kind in found.items() if kind == "input" and name not in written]
    return found | dict.fromkeys(constant, "constant")


# -- equal kernels on different buffers as one: the step of an optimizer over its parameters -------


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
    """The first of several equal ones has the Launchable of all, the others are left out. The second axis of
    the grid says whose buffers a program takes. Kernels move to where the first of them was, so only those
    qualify whose buffers the plan of memory does not share, and that nothing in between touches."""
    places = dict(plan.places)
    shared = {name for name, place in plan.places if place.kind not in ("input", "output", "reuse")}
    sizes = ((b.name, b.type.storage_bytes) for b in plan.schedule.loops.buffers)
    small = {name for name, size in sizes if size.is_const and size.value <= LINE}
    shared -= {name for name in small if name in places and places[name].kind == "arena"}

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
    mark = "__"
    while mark in kernel.text:  # a buffer may be called sub__2
        mark += "_"
    taken = [f"{param}{mark}{k}" for k in members for param in names[:count]]
    choose = "    {0} = tl.where(tl.program_id(1) == {1}, {0}{2}{1}, {0})\n"
    choices = [choose.format(param, k, mark) for k in members for param in names[:count]]
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
