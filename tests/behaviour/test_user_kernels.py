"""Triton kernels of the user's in compiled code: captured, fused around, written memory found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from dovetail.errors import UnknownStores  # noqa: E402
from dovetail.fake.stores import find_written  # noqa: E402


def test_programs_in_the_interpreter():
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.behaviour.user_kernels"]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


CAPTURE = """
import torch
from tests.behaviour import user_kernels
import dovetail

graphs = []
def look(graph, examples):
    graphs.append(graph)
    return lambda *inputs: [torch.zeros(1)]

compiled = dovetail.compile(lambda x, y: user_kernels.add_op(x, y).sin(), backend=look, fullgraph=True,
                            options={"fallback_to_eager": False})
for size in (100, 130):
    compiled(torch.randn(size), torch.randn(size))
assert len(graphs) == 2
"""


def test_an_op_of_kernels_has_symbolic_sizes_without_the_interpreter():
    root = Path(__file__).resolve().parents[2]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", CAPTURE], env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@triton.jit
def put(p, i, value):
    tl.store(p + i, value)


@triton.jit
def shifted(p, q, i):
    return p + i, tl.load(q + i)


@triton.jit
def stores(x, y, o, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o + i, tl.load(x + i) + tl.load(y + i), mask=i < n)


@triton.jit
def through_a_call(x, o, p, n):
    i = tl.program_id(0)
    put(value=tl.load(x + i), p=o, i=i)
    where, value = shifted(p, x, i)
    tl.atomic_add(where, value)


@triton.jit
def in_a_loop(x, indices, o, n, BLOCK: tl.constexpr):
    at = o
    for k in range(0, n):
        j = tl.load(indices + k)
        tl.store(at, tl.load(x + j))
        at += BLOCK


@triton.jit
def by_blocks(x, o, n, BLOCK: tl.constexpr):
    source = tl.make_block_ptr(x, (n,), (1,), (0,), (BLOCK,), (0,))
    target = tl.make_block_ptr(o, (n,), (1,), (0,), (BLOCK,), (0,))
    while n > 0:
        tl.store(target, tl.load(source) if n > 1 else tl.load(source) * 2)
        target = tl.advance(target, (BLOCK,))
        n -= BLOCK


@triton.jit
def by_descriptors(x, o, n, BLOCK: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [n], [1], [BLOCK])
    target = tl.make_tensor_descriptor(o, [n], [1], [BLOCK])
    target.store([0], source.load([0]))


@triton.jit
def either(x, o, n):
    target = x if n > 4 else o
    tl.store(target, 1.0)


@triton.jit
def reduced(x, o, n, BLOCK: tl.constexpr):
    row = tl.load(x + tl.arange(0, BLOCK))
    tl.store(o, tl.sum(row * tl.exp(row - tl.max(row, 0)), axis=0).to(o.dtype.element_ty))


@triton.jit
def recursive(x, o, n):
    if n > 0:
        recursive(x, o, n - 1)


@triton.jit
def indirect(addresses, n):
    tl.store(tl.load(addresses).to(tl.pointer_type(tl.float32)), n)


WRITES = {
    stores: {"o"}, through_a_call: {"o", "p"}, in_a_loop: {"o"}, by_blocks: {"o"}, by_descriptors: {"o"},
    either: {"x", "o"}, reduced: {"o"}, recursive: {"x", "o"},
}  # fmt: skip


@pytest.mark.parametrize("kernel", WRITES, ids=lambda kernel: kernel.fn.__name__)
def test_what_a_kernel_writes_to(kernel):
    pointers = {"x", "y", "o", "p", "indices"}
    assert find_written(kernel.fn) & pointers == WRITES[kernel]


def test_pointers_made_of_numbers_are_refused():
    with pytest.raises(UnknownStores):
        find_written(indirect.fn)
