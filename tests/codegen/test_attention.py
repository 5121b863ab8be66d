"""flex_attention's kernels, in Triton's interpreter against the composite in float64, and compiled for two GPUs.

The ops go through the real pipeline, forward and backward, as they would on a GPU (why_not_in_tiles is told that
they are on one); each group then runs as a kernel on CPU tensors.
"""
import os
import subprocess
import sys

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import dovetail
from dovetail.ops import flex
from tests.codegen import test_triton

pytest.importorskip("triton")

CASES = '''
import operator
import torch.nn.attention.flex_attention as torch_flex
from dovetail.ir.verify import verify
from dovetail.ops import flex

bias, table = torch.randn(16), torch.randn(700)
document = torch.randint(0, 3, (4, 300)).sort(1)[0]
plain = lambda s, b, h, i, j: s
alibi = lambda s, b, h, i, j: s + torch.exp2(-(h + 1) * 2.0) * (j - i)
capped = lambda s, b, h, i, j: 20 * torch.tanh(s / 20)
relative = lambda s, b, h, i, j: s + table[i - j + 300] + bias[h]
library = lambda s, b, h, i, j: torch.special.bessel_j0(s.detach()) + s
learned = lambda w: lambda s, b, h, i, j: s + w[h] * (i - j) * 0.1
causal = lambda b, h, i, j: i >= j
window = lambda b, h, i, j: (i >= j) & (i - j < 20)
documents = lambda b, h, i, j: (document[b, i] == document[b, j]) & (i >= j)
everything = lambda b, h, i, j: b.new_ones((), dtype=torch.bool)
prefix = lambda b, h, i, j: (j < 20) | (i >= j)
lonely = lambda b, h, i, j: (i >= j) & (i > 40)

# score_mod, mask, batch, heads, heads of keys, queries, keys, widths of keys and of values, kernels, backward
CASES = {
    "causal": (plain, causal, 2, 2, 2, 96, 96, 16, 16, 2, 3),
    "alibi_shared_heads": (alibi, causal, 1, 4, 2, 96, 96, 32, 32, 3, 4),
    "capped_window_odd": (capped, window, 1, 2, 1, 100, 100, 24, 40, 2, 3),
    "documents": (plain, documents, 2, 2, 2, 70, 70, 16, 16, 3, 4),
    "relative_cross": (relative, everything, 2, 2, 1, 50, 77, 16, 16, 3, 4),
    "prefix": (plain, prefix, 1, 2, 2, 96, 96, 16, 16, 2, 3),
    "queries_without_keys": (alibi, lonely, 1, 2, 2, 96, 96, 16, 16, 3, 4),
    "one_query": (alibi, everything, 2, 4, 2, 1, 100, 16, 16, 3, 4),
    "one_key": (relative, everything, 1, 4, 2, 33, 1, 16, 16, 3, 4),
    "without_mask": (alibi, None, 1, 4, 2, 40, 50, 16, 16, 3, 4),
    "scores_of_a_library": (library, causal, 1, 2, 2, 64, 64, 16, 16, 5, None),
    "a_bias_that_learns": (learned, causal, 1, 4, 2, 64, 64, 16, 16, 3, None),
}


def traced(name, dtype):
    """Forward and backward graphs, inputs, and what the composite gives in float64."""
    mod, mask, batch, heads, shared, queries, keys, width, wide, *counts = CASES[name]
    torch.manual_seed(0)
    shapes = (batch, heads, queries, width), (batch, shared, keys, width), (batch, shared, keys, wide), (heads,)
    given = [torch.randn(shape).to(dtype) for shape in shapes]
    blocks = torch_flex._create_empty_block_mask(*given[:2])
    if mask is not None:
        blocks = torch_flex.create_block_mask(mask, batch, None, queries, keys, device="cpu", BLOCK_SIZE=32)
    make = mod if mod is learned else lambda w: mod
    run = lambda q, k, v, w: flex.flex_attention(q, k, v, make(w), blocks.as_tuple(), width**-0.5)
    flex.why_not_in_tiles = lambda *_: ""
    exact = [x.double().requires_grad_() for x in given]
    wanted = run(*exact)
    flex.why_not_in_tiles = lambda *_: None
    graph = torch.fx.Graph()
    made = graph.call_function(run, tuple(graph.placeholder(letter) for letter in "qkvw"))
    graph.output([graph.call_function(operator.getitem, (made, i)) for i in range(3)])
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    joint = aot.trace_joint(module, [x.clone().requires_grad_() for x in given])
    parts = aot.partition(passes.optimize(ops.decompose(joint.graph)), joint.signature)
    return parts, [*given, *joint.constants], exact, wanted, counts
'''

RUN = '''
def run(graph, inputs, folder):
    loops = lower.lower(graph)
    plan = schedule.schedule(loops, Options())
    verify(loops, "loops"), verify(plan, "schedule")
    buffers = {b.name: b for b in loops.buffers}
    scores = [b.name for b in loops.buffers if "[i64" not in str(b.type) and len(b.type.shape) == 4 and b.type.shape[-2:] == SCORES]
    memory = dict(zip(loops.inputs, inputs))
    def strided(type):
        return [s.value for s in type.shape], [s.value for s in type.stride]
    for b in loops.buffers:
        if b.kind != "input":
            memory[b.name] = torch.full((b.type.storage_bytes.value // b.type.dtype.bytes,), 77).to(to_torch_dtype(b.type.dtype))
    view = lambda ref: torch.as_strided(memory[ref.buffer], *strided(ref.type), ref.offset.value)
    arg = lambda a: view(a) if isinstance(a, BufferRef) else [*map(arg, a)] if isinstance(a, tuple) else a
    for step in plan.steps:
        if isinstance(step, Group):
            run_group(step, buffers, memory, folder)
            continue
        out = find_op(step.op)(*map(arg, step.args), **{k: arg(v) for k, v in step.kwargs})
        torch.as_strided(memory[step.outputs[0]], *strided(buffers[step.outputs[0]].type)).copy_(out)
    return [view(out).clone() for out in loops.outputs], len(plan.steps), scores

from dovetail.util.library import find_op
failed = 0
for name in CASES:
    for dtype in (torch.float16, torch.float32)[: 1 + (name in ("causal", "queries_without_keys"))]:
        parts, given, exact, wanted, counts = traced(name, dtype)
        SCORES = parts.forward.inputs[0].tensor.shape[2], parts.forward.inputs[1].tensor.shape[2]
        bound = 1e-5 if dtype is torch.float32 else 2e-3
        try:
            got, steps, scores = run(parts.forward, given, sys.argv[1])
            finite = torch.isfinite(wanted[1])
            for a, b in zip(got, wanted):
                torch.testing.assert_close(a.double(), b.detach(), rtol=2 * bound, atol=2 * bound)
            grads = torch.randn_like(wanted[0]), torch.where(finite, torch.randn_like(wanted[1]), 0), torch.zeros_like(wanted[1])
            heads = wanted[0], torch.where(finite, wanted[1], 0)
            right = torch.autograd.grad(heads, exact, grads[:2], allow_unused=True)
            saved = [given[s.index] if s.source == "input" else got[s.index] for s in parts.saved]
            tangents = [g.to(dtype if g.dim() == 4 else torch.float32) for g in (grads[p] for p in parts.tangents)]
            back, more, _ = run(parts.backward, [*saved, *tangents], sys.argv[1])
            for a, b in zip(back, [b for b in right if b is not None]):
                assert (a.double() - b).norm() <= bound * b.norm(), "a gradient"
            assert steps == counts[0] and (counts[1] in (None, more)), (steps, more)
            assert not scores or counts[1] is None, scores
            print("ok", name, dtype)
        except Exception as error:
            failed += 1
            import traceback; traceback.print_exc(limit=-4)
            print("FAILED", name, dtype, str(error)[:500])
sys.exit(failed)
'''

COMPILE = '''
from concurrent.futures import ThreadPoolExecutor
from dovetail.runtime import gpu
pool, waiting = ThreadPoolExecutor(4), []
for name in ("alibi_shared_heads", "capped_window_odd"):
    parts, *_ = traced(name, torch.float16)
    for part in (parts.forward, parts.backward):
        loops = lower.lower(part)
        for step in schedule.schedule(loops, Options()).steps:
            kernel = emit_kernel(step, {b.name: b for b in loops.buffers}).kernel
            for capability in (80, 90):
                waiting.append(pool.submit(gpu.compile_kernel, kernel, kernel.blocks[0], capability, Options(), 2))
for made in waiting:
    answer = made.result()
    assert "error" not in answer, answer["error"]
'''


def run_text(text, tmp_path, interpret):
    head = test_triton.RUN.partition("def execute")[0]
    path = tmp_path / "run.py"
    path.write_text(head + CASES + text)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "DOVETAIL_CACHE": str(tmp_path / "cache")}
    env.pop("TRITON_INTERPRET", None)
    env |= {"TRITON_INTERPRET": "1"} if interpret else {}
    done = subprocess.run([sys.executable, str(path), str(tmp_path)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_kernels_give_what_the_composite_gives(tmp_path):
    run_text(RUN, tmp_path, interpret=True)


def test_kernels_compile_for_two_generations(tmp_path):
    run_text(COMPILE, tmp_path, interpret=False)


def two_heads(score, b, h, i, j):
    return score + h * (i - j)


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_ops_are_captured_and_run_as_what_they_say(backend, monkeypatch):
    """As on a GPU, where the graph is run in eager."""
    masks = create_block_mask(lambda b, h, i, j: i >= j, None, None, 48, 48, device="cpu", BLOCK_SIZE=16)
    f = lambda q, k, v: flex_attention(q, k, v, two_heads, masks, enable_gqa=True, return_lse=True)
    q, k, v = torch.randn(2, 2, 48, 8), torch.randn(2, 1, 48, 8), torch.randn(2, 1, 48, 8)
    expected = f(q, k, v)
    monkeypatch.setattr(flex.why_not_in_tiles, "__code__", (lambda *_: None).__code__)
    torch.testing.assert_close(dovetail.compile(f, fullgraph=True, backend=backend)(q, k, v), expected)


def test_the_ops_can_be_differentiated_twice():
    allowed = torch.ones(1, 2, 5, 5, dtype=torch.bool).tril()
    tables = [torch.zeros(1, 1, 1, dtype=torch.int32)] * 8

    def attend(q, k, v):
        scores = flex.PAIRS(q, k, 0.5, allowed, tables, [16, 16])
        return flex.ATTEND(scores, allowed, v, tables, [16, 16])[:2]

    given = [torch.randn(1, heads, 5, 3, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1)]
    assert torch.autograd.gradcheck(attend, given) and torch.autograd.gradgradcheck(attend, given)
