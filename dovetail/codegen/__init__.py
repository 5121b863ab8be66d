"""Plan -> Program: kernel texts, each once, and the host text that runs them."""
from __future__ import annotations

from functools import cache

from dovetail.codegen.cpp import CppTarget
from dovetail.codegen.host.program import emit_host
from dovetail.codegen.target import Launchable, Target
from dovetail.ir.program import Kernel, Program
from dovetail.ir.schedule import Group, Plan
from dovetail.options import Options

__all__ = ["emit"]


@cache
def vector_bytes() -> int:
    """Width of this machine's vector registers, as eager would use them."""
    with open("/proc/cpuinfo") as file:
        flags = next((line for line in file if line.startswith("flags")), "").split()
    if {"avx512f", "avx512vl", "avx512bw", "avx512dq"} <= set(flags):
        return 64
    return 32 if {"avx2", "fma"} <= set(flags) else 0


def emit(plan: Plan, options: Options) -> Program:
    target: Target = CppTarget(vector_bytes() if options.simd else 0)
    loops = plan.schedule.loops
    buffers = {b.name: b for b in loops.buffers}
    launches: dict[Group, Launchable] = {}
    kernels: dict[str, Kernel] = {}
    for step in plan.schedule.steps:
        if isinstance(step, Group):
            made = target.emit(step, buffers)
            launches[step] = made
            if made.key not in kernels:
                kernels[made.key] = _kernel(step, made, target, plan)
    index = {key: k for k, key in enumerate(kernels)}
    host = emit_host(plan, launches, index)
    return Program(
        loops.name,
        "cpu",
        tuple(kernels.values()),
        host.text,
        len(loops.inputs),
        host.outputs,
        host.python_calls,
        host.kinds,
        loops.inputs,
        host.results,
    )


def _kernel(group: Group, made: Launchable, target: Target, plan: Plan) -> Kernel:
    sizes = {b.name: b.type.bytes for b in plan.schedule.loops.buffers}
    moved = sum(sizes[name].value for name in made.params if sizes[name].is_const)
    origins = tuple(dict.fromkeys(o for nest in group.nests for o in nest.origins))
    return Kernel(made.symbol, target.language, made.text, made.key, moved, origins, made.symbol, made.prelude)
