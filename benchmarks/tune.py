"""Every kernel of a few functions with every choice of blocks, timed on a GPU.

    python -m benchmarks.tune                          all, microseconds and TB/s of each choice
    python -m benchmarks.tune softmax batch_norm_512   some
    python -m benchmarks.tune --text bias_gelu         with the kernels' texts

Shows what the first choice loses to the best. Buffers hold zeros; bytes count each buffer once.
"""
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule

from dovetail import aot, codegen, lower, ops, passes, schedule
from dovetail.ir.program import Blocks, Kernel
from dovetail.options import Options
from dovetail.runtime import gpu

ROWS, COLUMNS = 16384, 4096


def bf16(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_(grad)


def f32(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").requires_grad_(grad)


def targets(rows: int, classes: int) -> torch.Tensor:
    return torch.randint(0, classes, (rows,), device="cuda")


def batch_norm(channels: int, side: int) -> tuple[Any, ...]:
    def run(x: Any, w: Any, b: Any, mean: Any, var: Any) -> Any:
        return F.relu(F.batch_norm(x, mean, var, w, b, True))

    vectors = [f32(channels, grad=True), f32(channels, grad=True), f32(channels), f32(channels)]
    return run, bf16(64, channels, side, side, grad=True), *vectors


def rms_residual(x: Any, r: Any, w: Any) -> Any:
    h = x + r
    return F.rms_norm(h, (COLUMNS,), w), h


WORK: dict[str, Callable[[], tuple[Any, ...]]] = {
    "softmax": lambda: (lambda x: torch.softmax(x, -1), bf16(ROWS, COLUMNS)),
    "layer_norm": lambda: (
        lambda x, w: F.layer_norm(x, (COLUMNS,), w, w), bf16(ROWS, COLUMNS), bf16(COLUMNS)
    ),
    "rmsnorm_residual": lambda: (rms_residual, bf16(ROWS, COLUMNS), bf16(ROWS, COLUMNS), bf16(COLUMNS)),
    "bias_gelu": lambda: (lambda x, b: F.gelu(x + b), bf16(ROWS, COLUMNS), bf16(COLUMNS)),
    "swiglu": lambda: (lambda x, y: F.silu(x) * y, bf16(ROWS, COLUMNS), bf16(ROWS, COLUMNS)),
    "transpose_add": lambda: (lambda x, y: x + y.t(), bf16(ROWS, COLUMNS), bf16(COLUMNS, ROWS)),
    "cross_entropy": lambda: (F.cross_entropy, bf16(ROWS, COLUMNS), targets(ROWS, COLUMNS)),
    "cross_entropy_train": lambda: (
        lambda x, t: F.cross_entropy(x.float(), t), bf16(8192, 50264, grad=True), targets(8192, 50257)
    ),
    "layer_norm_train": lambda: (
        lambda x, w, b: F.layer_norm(x, (768,), w, b), f32(8192, 768, grad=True), f32(768, grad=True),
        f32(768, grad=True),
    ),
    "batch_norm_64": lambda: batch_norm(64, 112),
    "batch_norm_256": lambda: batch_norm(256, 56),
    "batch_norm_512": lambda: batch_norm(512, 7),
    "batch_norm_2048": lambda: batch_norm(2048, 7),
    "matvec_down": lambda: (
        lambda x, w, r: r + F.linear(x, w), bf16(1, 14336), bf16(4096, 14336), bf16(1, 4096)
    ),
    "matvec_up": lambda: (
        lambda x, w, v: F.silu(F.linear(x, w)) * F.linear(x, v), bf16(1, 4096), bf16(14336, 4096),
        bf16(14336, 4096),
    ),
    "matvec_out": lambda: (
        lambda x, w, r: r + F.linear(x, w), bf16(1, 4096), bf16(4096, 4096), bf16(1, 4096)
    ),
    "matvec_heads": lambda: (lambda x, w: F.linear(x, w), bf16(1, 4096), bf16(6144, 4096)),
    "gelu_train": lambda: (
        lambda x, w, b: F.gelu(torch.addmm(b, x, w), approximate="tanh"), bf16(8192, 768, grad=True),
        bf16(768, 3072, grad=True), bf16(3072, grad=True),
    ),
    "mlp_norm": lambda: (lambda x, w: F.gelu(F.layer_norm(x, (256,), w, w)), f32(8, 256), f32(256)),
}  # fmt: skip


def kernels_of(fn: Callable[..., Any], inputs: list[torch.Tensor]) -> Iterator[Kernel]:
    """The kernels of the forward graph, then of the backward graph."""

    def tupled(*args: Any) -> Any:
        made = fn(*args)
        return tuple(made) if isinstance(made, (tuple, list)) else (made,)

    graph = FxGraph()
    graph.output(graph.call_function(tupled, tuple(graph.placeholder(f"x{i}") for i in range(len(inputs)))))
    joint = aot.trace_joint(GraphModule({}, graph), inputs)
    parts = aot.partition(passes.optimize(ops.decompose(joint.graph)), joint.signature)
    for part in (parts.forward, parts.backward):
        if part is not None:
            plan = schedule.plan(schedule.schedule(lower.lower(part), Options()))
            yield from codegen.emit(plan, Options()).kernels


def more_blocks(kernel: Kernel) -> list[Blocks]:
    """The emitter's choices, and their neighbours in warps."""
    found = dict.fromkeys(kernel.blocks)
    for b in kernel.blocks:
        for warps in (b.warps * 2, b.warps // 2):
            if 1 <= warps <= 32:
                found.setdefault(Blocks(b.x, b.y, b.r, warps, b.stages))
    return list(found)


def time_kernel(kernel: Kernel, text: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    buffers = [torch.zeros(max(n, 16), dtype=torch.uint8, device=device) for n in kernel.sizes]
    moved = sum(kernel.sizes)
    if text:
        print(kernel.text)
    print(f"  {kernel.name[-60:]}: {moved / 1e6:.1f} MB, grid points {kernel.points}")
    for blocks in more_blocks(kernel):
        answer = gpu.compile_kernel(kernel, blocks, gpu.capability_of(device), Options(), 16)
        if "error" in answer:
            print(f"    {blocks}: {answer['error'][:100]}")
            continue
        took = gpu._time(kernel, gpu._function(answer, blocks), buffers)
        mark = " <- first choice" if blocks is kernel.blocks[0] else ""
        print(f"    {took * 1e3:9.1f} us {moved / took / 1e9:6.2f} TB/s  {blocks}{mark}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(WORK))
    parser.add_argument("--text", action="store_true")
    args = parser.parse_args()
    gpu.start_workers(16, Options())
    for name in args.names or WORK:
        fn, *inputs = WORK[name]()
        print(name, flush=True)
        for kernel in kernels_of(fn, inputs):
            time_kernel(kernel, args.text)


if __name__ == "__main__":
    main()
