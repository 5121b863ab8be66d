"""Plan -> Program: kernel texts, each once, and the host text that runs them."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from glob import glob
from pathlib import Path

from dovetail.codegen import cpp, triton
from dovetail.codegen.analysis import Form, form_of
from dovetail.codegen.batches import batched
from dovetail.codegen.host.program import emit_host
from dovetail.codegen.target import Launchable, Target
from dovetail.ir.program import Kernel, Program
from dovetail.ir.schedule import Group, Plan
from dovetail.options import Options
from dovetail.util.noun import replace


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
    """Size of the largest cache of a core, which it may share with others."""
    found = glob("/sys/devices/system/cpu/cpu0/cache/index*/size")
    sizes = [Path(path).read_text().strip() for path in found]
    return max([int(size.removesuffix("K")) << 10 for size in sizes if size.endswith("K")], default=32 << 20)


def emit(
    plan: Plan, options: Options, begin: Callable[[Sequence[Kernel], Options], None] | None = None
) -> Program:
    """`begin` gets the kernels as soon as they are there: the host program takes its time, too."""
    loops = plan.schedule.loops
    targets: dict[str, Target] = {
        "cpu": partial(
            cpp.emit_kernel, vector_bytes=vector_bytes() if options.simd else 0, cache_bytes=cache_bytes()
        ),
        "cuda": triton.emit_kernel,
    }
    buffers = {b.name: b for b in loops.buffers}
    for name, kind in _kinds(plan).items():
        if buffers[name].kind != kind:
            buffers[name] = replace(buffers[name], kind=kind)
    launches: dict[Group, Launchable] = {}
    known: dict[Form, tuple[Launchable, list[str]]] = {}
    for step in plan.schedule.steps:
        if isinstance(step, Group):
            target = targets[buffers[step.nests[0].writes[0].buffers[0]].type.device.kind]
            form, names = form_of(step, buffers)
            if form in known:
                launches[step] = _for_others(*known[form], names)
                continue
            made = launches[step] = target(step, buffers)
            known[form] = made, names
    if loops.device.kind == "cuda":
        launches = batched(plan, launches)
    kernels: dict[str, Kernel] = {}
    for made in launches.values():
        kernels.setdefault(made.kernel.key, made.kernel)
    if begin is not None:
        begin(tuple(kernels.values()), options)
    index = {key: k for k, key in enumerate(kernels)}
    host = emit_host(plan, launches, index)
    return Program(
        loops.name, str(loops.device), tuple(kernels.values()), host.text, len(loops.inputs), host.outputs,
        host.python_calls, loops.kinds, loops.inputs, host.results, len(plan.schedule.steps),
    )  # fmt: skip


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


def _for_others(made: Launchable, names: list[str], others: list[str]) -> Launchable:
    """The kernel of an equal group, called with other buffers."""
    renamed = dict(zip(names, others, strict=True))
    return replace(made, params=tuple(renamed[name] for name in made.params))
