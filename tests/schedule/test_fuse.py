"""How many kernels named functions become, and the reasons given where nests stay apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import symbolic_trace

from dovetail import aot, lower, ops, passes
from dovetail.ir.expr import ZERO, const, sym
from dovetail.ir.loop import Buffer, BufferRef, Loops, Nest, Range, Write, constant, load, scalar
from dovetail.ir.parse import parse_graph
from dovetail.ir.schedule import Group, Schedule
from dovetail.ir.types import F32, tensor_type
from dovetail.options import Options
from dovetail.schedule import plan, schedule


def scheduled(fn: Callable[..., Any], *shapes: tuple[int, ...], options: Options = Options()) -> Schedule:
    inputs = [torch.randn(shape) for shape in shapes]
    with torch.no_grad():
        joint = aot.trace_joint(symbolic_trace(fn), inputs)
    return schedule(lower.lower(passes.optimize(ops.decompose(joint.graph))), options)


def kernels(made: Schedule) -> int:
    return sum(isinstance(step, Group) for step in made.steps)


ONE_KERNEL = {
    "softmax": (lambda x: torch.softmax(x, -1), [(8, 64)]),
    "log_softmax": (lambda x: F.log_softmax(x, -1), [(8, 64)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (64,), w, b), [(8, 64), (64,), (64,)]),
    "residual_layer_norm": (lambda x, y, w, b: F.layer_norm(x + y, (64,), w, b), [(8, 64), (8, 64), (64,), (64,)]),
    "rms_norm": (lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w, [(8, 64), (64,)]),
    "bias_gelu": (lambda x, b: F.gelu(x + b), [(8, 64), (64,)]),
    "product_column_sum": (lambda x, y: (x * y).sum(0), [(8, 64), (8, 64)]),
    "statistics": (lambda x: (x.sum(-1), x.amax(-1), x.relu()), [(8, 64)]),
    "adam": (
        lambda p, g, m, v: (p - 0.1 * (m * 0.9 + g * 0.1) / ((v * 0.99 + g * g * 0.01).sqrt() + 1e-8), m * 0.9 + g * 0.1),
        [(8, 64)] * 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_is_one_kernel(name: str) -> None:
    fn, shapes = ONE_KERNEL[name]
    assert kernels(scheduled(fn, *shapes)) == 1


def test_cross_entropy_is_at_most_two_kernels() -> None:
    made = scheduled(lambda x, t: F.cross_entropy(x, t.long()), (8, 64), (8,))
    assert kernels(made) <= 3


def test_gelu_block_is_two_kernels_and_two_matmuls() -> None:
    def block(
        x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, v: torch.Tensor, c: torch.Tensor
    ) -> torch.Tensor:
        return x + F.linear(F.gelu(F.linear(x, w, b)), v, c)

    made = scheduled(block, (8, 64), (128, 64), (128,), (64, 128), (64,))
    assert (kernels(made), len(made.steps)) == (2, 4)


def test_without_fusion_every_nest_is_a_kernel() -> None:
    made = scheduled(lambda x: torch.softmax(x, -1), (8, 64), options=Options(fuse=False))
    assert kernels(made) == len(made.loops.steps) > 1


def test_reasons_are_recorded() -> None:
    made = scheduled(lambda x: torch.cumsum(x * 2, 0).sum(0) + (x * 2).flip(0).sum(1)[:1], (64, 64))
    assert all(why.code.startswith("S") and why.text for _, why in made.declined)


def chain(length: int) -> Loops:
    """b1[i] = b0[i] + 1; ... with every tenth value read again much later."""
    size = const(256)
    item = Range(sym("i", 0, 255, size), size)
    type = tensor_type((256,), F32)
    buffers = [Buffer("b0", type, "input")]
    steps = []
    for k in range(1, length):
        other = load(f"b{max(0, k - 37)}", item.var, F32) if k % 10 == 0 else constant(1.0, F32)
        value = scalar("add", (load(f"b{k - 1}", item.var, F32), other), F32)
        steps.append(Nest(f"n{k}", (item,), (), (Write((f"b{k}",), item.var, value),)))
        buffers.append(Buffer(f"b{k}", type, "temp" if k < length - 1 else "output"))
    return Loops("chain", tuple(buffers), tuple(steps), (BufferRef(f"b{length - 1}", type, ZERO),), ("b0",), "t")


def test_ten_thousand_nests_take_seconds() -> None:
    loops = chain(10_000)
    start = time.process_time()
    made = schedule(loops, Options())
    planned = plan(made)
    assert time.process_time() - start < 8
    assert kernels(made) < 10_000 / Options().max_fusion_size * 1.5
    assert planned.arena_bytes.value <= 256 * 4 * 64


def test_order_respects_dependencies() -> None:
    made = scheduled(lambda x, w: (x * 2) @ w + (x * 2) @ w.relu() + x.sum(), (16, 16), (16, 16))
    written = {b.name for b in made.loops.buffers if b.kind == "input"}
    for step in made.steps:
        if isinstance(step, Group):
            inside = {b for nest in step.nests for w in nest.writes for b in w.buffers}
            reads = {str(b) for nest in step.nests for w in nest.writes for b in _reads(w)}
            assert reads <= written | inside
            written |= inside - set(step.internal)
        else:
            written |= set(step.outputs)


def _reads(write: Write) -> set[str]:
    from_value = [write.value]
    found: set[str] = set()
    while from_value:
        node = from_value.pop()
        if node.op in ("load", "load_at"):
            found.add(str(node.args[0]))
        from_value += node.operands
    return found


def test_large_products_go_to_onednn() -> None:
    made = scheduled(lambda x, w: x @ w.t(), (256, 256), (512, 256))
    assert [step.op for step in made.steps] == ["mkldnn._linear_pointwise.default"]
    small = scheduled(lambda x, w: x @ w.t(), (8, 64), (64, 64))
    assert [step.op for step in small.steps] == ["aten.mm.default"]


CACHES = """
def forward(keys: f32[8, 64, 32] cuda, values: f32[8, 64, 32] cuda, k: f32[8, 1, 32] cuda, at: i64[1] cuda):
    low = prims.slice(k, 2, 0, 16, 1)                     # f32[8, 1, 16]{32, 32, 1} cuda
    high = prims.slice(k, 2, 16, 32, 1)                   # f32[8, 1, 16]{32, 32, 1} cuda
    turned = prims.cat((high, low), 2)                    # f32[8, 1, 32] cuda
    row = prims.permute(turned, (1, 0, 2))                # f32[1, 8, 32] cuda
    other = prims.permute(k, (1, 0, 2))                   # f32[1, 8, 32] cuda
    new_keys = prims.put(keys, (at,), (1,), row)          # f32[8, 64, 32] cuda
    new_values = prims.put(values, (at,), (1,), other)    # f32[8, 64, 32] cuda
    return (new_keys, new_values)
"""


def test_a_gpu_writes_keys_and_values_in_one_kernel() -> None:
    def groups(text: str) -> list[Group]:
        graph = replace(parse_graph(text), updates=((0, 0), (1, 1)))
        steps = schedule(lower.lower(graph), Options()).steps
        return [step for step in steps if isinstance(step, Group)]

    copies_and_both = groups(CACHES)
    assert [len(g.nests) for g in copies_and_both if "put" in g.name] == [2]
    assert not any(w.buffers == ("turned",) for g in copies_and_both for n in g.nests for w in n.writes)
    assert [len(g.nests) for g in groups(CACHES.replace(" cuda", "")) if "put" in g.name] == [1, 1]


COUNTERS = """
def forward(x: f32[4096], a: i64[], b: i64[], c: i64[]):
    s = prims.mul(x, a)   # f32[4096]
    t = prims.mul(s, b)   # f32[4096]
    d = prims.add(a, 1)   # i64[]
    e = prims.add(b, 1)   # i64[]
    f = prims.add(c, 1)   # i64[]
    return d, e, f, t
"""


def test_counters_of_layers_are_one_kernel_after_their_last_reader() -> None:
    graph = replace(parse_graph(COUNTERS), updates=((0, 1), (1, 2), (2, 3)))
    steps = schedule(lower.lower(graph), Options()).steps
    assert [sorted(step.written_buffers) for step in steps] == [["t"], ["d", "e", "f"]]
