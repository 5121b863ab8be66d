"""Shapes of the loops: how many nests, how many dimensions, what is inlined."""
from __future__ import annotations

import torch
import torch.nn.functional as F

from dovetail.ir.expr import ZERO, lt
from dovetail.ir.loop import Extern, Loops, Nest, scalar
from dovetail.ir.parse import parse_graph
from dovetail.ir.types import BF16, F32
from dovetail.lower import lazy
from dovetail.lower.decide import find_stored
from tests.ops.tracing import check_call, loops_of


def nests(loops: Loops) -> list[Nest]:
    return [step for step in loops.steps if isinstance(step, Nest)]


def externs(loops: Loops) -> list[str]:
    return [step.op for step in loops.steps if isinstance(step, Extern)]


def test_pointwise_chain_is_one_flat_nest():
    loops = loops_of(lambda x: torch.relu(x * 2 + 1).sigmoid() * x, torch.randn(8, 4, 16))
    (nest,) = nests(loops)
    assert [r.size.value for r in nest.ranges] == [512]


def test_broadcast_keeps_the_dimensions_apart():
    (nest,) = nests(loops_of(torch.add, torch.randn(8, 4, 16), torch.randn(16)))
    assert [r.size.value for r in nest.ranges] == [32, 16]


def test_softmax_is_four_nests():
    loops = loops_of(lambda x: torch.softmax(x, -1), torch.randn(2, 8, 64))
    kinds = [nest.writes[0].reduce for nest in nests(loops)]
    assert kinds == ["max", None, "sum", None]
    assert [r.size.value for r in nests(loops)[0].ranges] == [16]


def test_layer_norm_is_welford_and_pointwise():
    loops = loops_of(lambda x, w: F.layer_norm(x, (64,), w, w), torch.randn(8, 64), torch.randn(64))
    assert [nest.writes[0].reduce for nest in nests(loops)] == ["welford", None, None]


def test_matmul_takes_a_transposed_view():
    loops = loops_of(lambda x, w: x @ w.t(), torch.randn(4, 8), torch.randn(16, 8))
    assert externs(loops) == ["aten.mm.default"] and not nests(loops)


def test_channels_last_keeps_memory_order():
    x = torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last)
    (nest,) = nests(loops_of(lambda x: torch.relu(x) * 2, x))
    assert [r.size.value for r in nest.ranges] == [400]
    check_call(lambda x: torch.relu(x) * 2, x)


def test_attention_block_has_no_copies():
    def block(x, w):
        b, t, c = x.shape
        q, k, v = (x @ w).view(b, t, 3, 4, c // 4).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c) @ w[:, :c]

    loops = loops_of(block, torch.randn(2, 6, 32), torch.randn(32, 96))
    assert not nests(loops)


def test_a_cat_asks_only_the_parts_that_a_position_may_be_in(monkeypatch):
    """A loop over one part does not compare its positions with where all the others begin."""
    compared = []
    monkeypatch.setattr(lazy, "lt", lambda a, b: compared.append(a) or lt(a, b))

    def count(parts):
        compared.clear()
        loops_of(lambda x: torch.cat([x[i : i + 3] * i for i in range(parts)]), torch.randn(200))
        return len(compared)

    assert count(80) <= 2.2 * count(40)


def test_parts_of_a_cat_are_written_in_place():
    loops = loops_of(lambda x, y: torch.cat([x * 2, y + 1], 1), torch.randn(4, 8), torch.randn(4, 3))
    assert len(nests(loops)) == 2 and len(loops.buffers) == 3


def test_views_and_gathers_compute_what_eager_does():
    x, i = torch.randn(6, 5, 4), torch.tensor([[0, 5, -1], [2, 2, 3]])
    check_call(lambda x, i: x[i, :, 1:3].flip(0).reshape(-1), x, i)
    check_call(
        lambda x, i: torch.zeros(6, 5, 4).index_put(
            (i,), x[:2, :1].unsqueeze(0)[0][:, None], accumulate=True
        ),
        x,
        i,
    )
    check_call(lambda x: x.permute(2, 0, 1)[:, ::2].reshape(4, -1).roll(3, 1), x)


def test_outputs_own_their_memory():
    loops = loops_of(lambda x: (x + 1, x + 1), torch.randn(4, 4))
    assert len({out.buffer for out in loops.outputs}) == 2
    assert all(b.kind == "output" for b in loops.buffers if b.name in loops.returned)


def test_long_chains_stay_bounded():
    def chain(x):
        for _ in range(2000):
            x = torch.sin(x) * 1.5
        return x

    sizes = [len(nest.origins) for nest in nests(loops_of(chain, torch.randn(8)))]
    assert 5 < len(sizes) < 200


def test_a_join_read_in_place_splits_the_loop():
    def rotate(q, c, s):
        return q * c + torch.cat([-q[..., 4:], q[..., :4]], -1) * s

    args = torch.randn(2, 3, 8), torch.randn(3, 8), torch.randn(3, 8)
    loops = loops_of(rotate, *args)
    assert len(nests(loops)) == 2 and "masked" not in str(loops)
    check_call(rotate, *args)


def test_padding_splits_the_loop():
    x = torch.randn(2, 3, 4, 50)
    loops = loops_of(lambda x: F.pad(x, (1, 2)) + 1, x)
    assert len(nests(loops)) == 3 and "masked" not in str(loops)
    loops = loops_of(lambda x: F.pad(x, (1, 2, 0, 1)) + 1, x)  # a condition on rows holds for whole vectors
    assert len(nests(loops)) == 3 and str(loops).count("masked") == 1
    check_call(lambda x: F.pad(x, (1, 2, 0, 1)) + 1, x)


def test_cross_entropy_does_not_store_log_probabilities():
    x, target = torch.randn(16, 32), torch.randint(0, 32, (16,))
    loops = loops_of(F.cross_entropy, x, target)
    assert max(b.type.numel.value for b in loops.buffers if b.kind != "input") == 16
    check_call(F.cross_entropy, x, target)


def test_empty_tensors_read_nothing():
    check_call(lambda x: (x * 2 + 1).sum(-1), torch.randn(0, 4))
    check_call(lambda x: x.sum(-1) * 3, torch.randn(4, 0))


SCALED = """
def forward(a: bf16[4, 8, 512] cuda, b: bf16[4, 8, 512] cuda, mean: f32[4] cuda, scale: f32[4] cuda):
    whole = prims.cat((a, b), 1)                           # bf16[4, 16, 512] cuda
    wide = prims.convert(whole, f32)                       # f32[4, 16, 512] cuda
    copied = prims.copy(mean)                              # f32[4] cuda
    means = prims.broadcast(copied, (4, 16, 512), (0,))    # f32[4, 16, 512] cuda
    scales = prims.broadcast(scale, (4, 16, 512), (0,))    # f32[4, 16, 512] cuda
    off = prims.sub(wide, means)                           # f32[4, 16, 512] cuda
    scaled = prims.mul(off, scales)                        # f32[4, 16, 512] cuda
    grown = prims.exp(scaled)                              # f32[4, 16, 512] cuda
    s = prims.sum(grown, (1, 2))                           # f32[4] cuda
    t = prims.sum(scaled, (0, 2))                          # f32[16] cuda
    return (whole, s, t)
"""


def test_a_short_computation_from_half_the_bytes_is_not_stored_on_a_gpu():
    for text, is_stored in ((SCALED, False), (SCALED.replace(" cuda", ""), True)):
        graph = parse_graph(text)
        assert any(node.name == "scaled" for node in find_stored(graph, graph.users())) is is_stored


def test_the_text_of_a_value_has_an_end():
    value = scalar("load", ("x", ZERO), F32)
    assert str(scalar("cast", (scalar("neg", (value,), F32),), BF16)) == "bf16(neg(x[0]))"
    rounded = shared = value
    for _ in range(64):
        rounded = scalar("cast", (scalar("cast", (rounded,), BF16),), F32)
        shared = scalar("mul", (shared, shared), F32)
    assert str(rounded).count("bf16(") == 64
    assert len(str(shared)) < 10_000 and "..." in str(shared)


GATED = """
def forward(a: bf16[64, 512] cuda, b: bf16[64, 512] cuda):
    left = prims.convert(a, f32)           # f32[64, 512] cuda
    right = prims.convert(b, f32)          # f32[64, 512] cuda
    grown = prims.exp(right)               # f32[64, 512] cuda
    gated = prims.mul(left, grown)         # f32[64, 512] cuda
    s = prims.sum(gated, (0,))             # f32[512] cuda
    t = prims.sum(gated, (1,))             # f32[64] cuda
    return (s, t)
"""


def test_what_two_values_of_16_bits_give_is_read_from_them_again_on_a_gpu():
    for text, is_stored in ((GATED, False), (GATED.replace("bf16", "f32"), True)):
        graph = parse_graph(text)
        assert any(node.name == "gated" for node in find_stored(graph, graph.users())) is is_stored
