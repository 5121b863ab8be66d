"""Every kernel of the Triton test programs compiles for sm_80 and sm_90, on a machine without a GPU."""
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

RUN = '''
import sys
import torch, torch.nn.functional as F
from torch.fx import symbolic_trace
from triton.backends.compiler import GPUTarget
from dovetail import aot, codegen, lower, ops, passes, schedule
from dovetail.ir.loop import Loops
from dovetail.ir.program import Program
from dovetail.ir.schedule import Group
from dovetail.codegen.triton import TritonTarget
from dovetail.options import Options
from dovetail.runtime import gpu
from dataclasses import replace

x, y = torch.randn(40, 96), torch.randn(40, 96)
count = 0
for name, text in PROGRAMS.items():
    fn = eval(text)
    traced = (lambda f: lambda x, y: (lambda r: tuple(r) if isinstance(r, (tuple, list)) else (r,))(f(x, y)))(fn)
    joint = aot.trace_joint(symbolic_trace(traced), [x, y])
    loops = lower.lower(aot.partition(passes.optimize(ops.decompose(joint.graph)), joint.signature).forward)
    made = schedule.schedule(loops, Options())
    buffers = {b.name: b for b in loops.buffers}
    for step in made.steps:
        if isinstance(step, Group):
            kernel = TritonTarget().emit(step, buffers)
            from dovetail.codegen import _kernel
            program_kernel = _kernel(step, kernel, TritonTarget(), schedule.plan(made))
            module = gpu._module(program_kernel)
            for capability in (80, 90):
                gpu.compile_kernel(module, program_kernel, program_kernel.blocks[0], GPUTarget("cuda", capability, 32))
            count += 1
print(count, "kernels")
'''


def test_kernels_compile_for_two_generations(tmp_path):
    from tests.codegen.test_triton import PROGRAMS

    path = tmp_path / "run.py"
    path.write_text(f"PROGRAMS = {PROGRAMS!r}\n" + RUN)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
