"""Every kernel of the Triton test programs compiles for sm_80 and sm_90, on a machine without a GPU."""
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

RUN = '''
import sys
from concurrent.futures import ThreadPoolExecutor
import torch, torch.nn.functional as F
from torch.fx import symbolic_trace
from dovetail import aot, codegen, lower, ops, passes, schedule
from dovetail.ir.loop import Loops
from dovetail.ir.program import Program
from dovetail.ir.schedule import Group
from dovetail.codegen.triton import emit_kernel
from dovetail.options import Options
from dovetail.runtime import gpu
from dovetail.ir.types import as_reals
from dovetail.util.noun import replace

x, y = torch.randn(40, 96), torch.randn(40, 96)
pool, waiting = ThreadPoolExecutor(4), []
checked = stops = 0
for name, text in PROGRAMS.items():
    fn = eval(text)
    traced = (lambda f: lambda x, y: (lambda r: tuple(r) if isinstance(r, (tuple, list)) else (r,))(f(x, y)))(fn)
    joint = aot.trace_joint(symbolic_trace(traced), [x, y])
    loops = lower.lower(aot.partition(passes.optimize(ops.decompose(joint.graph)), joint.signature).forward)
    made = schedule.schedule(loops, Options())
    buffers = {b.name: replace(b, type=as_reals(b.type)) for b in loops.buffers}
    for step in made.steps:
        if isinstance(step, Group):
            program_kernel = emit_kernel(step, buffers).kernel
            for capability in (80, 90):
                work = program_kernel, program_kernel.blocks[0], capability, Options()
                checked += "dv.wrap(" in program_kernel.text
                waiting.append(pool.submit(gpu.compile_kernel, *work, 2))
for made in waiting:
    answer = made.result()
    assert "error" not in answer, answer["error"]
    assert answer["cubin"][1:4] == b"ELF"
    stops += b"index out of range" in answer["cubin"]
assert stops == checked > 0, "a kernel that reads or writes at computed positions stops at one out of range"
again = gpu.compile_kernel(*work)
assert again["cubin"] == answer["cubin"] and "triton" not in sys.modules, "taken from the store"
print(len(waiting), "kernels")
'''


def test_kernels_compile_for_two_generations(tmp_path):
    from tests.codegen.test_triton import PROGRAMS

    path = tmp_path / "run.py"
    path.write_text(f"PROGRAMS = {PROGRAMS!r}\n" + RUN)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path / "triton"),
           "DOVETAIL_CACHE": str(tmp_path / "cache")}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
