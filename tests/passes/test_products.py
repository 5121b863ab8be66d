"""Products of odd sizes are padded, and rows times several weights are joined, on a GPU only."""
import torch

from dovetail.ir.parse import parse_graph
from dovetail.lower import lower
from dovetail.passes.clean import drop_dead, merge_equal
from dovetail.passes.products import join_rows, join_sums, pad_products
from tests.lower.interpret import run_loops
from tests.ops.eager import run_graph

ODD = """
def forward(h: bf16[4096, 512] cuda, w: f32[1001, 512] cuda):
    narrow = prims.convert(w, bf16)           # bf16[1001, 512] cuda
    turned = prims.permute(narrow, (1, 0))    # bf16[512, 1001]{1, 512} cuda
    logits = aten.mm.default(h, turned)       # bf16[4096, 1001] cuda
    grown = prims.abs(logits)                 # bf16[4096, 1001] cuda
    back = aten.mm.default(grown, narrow)     # bf16[4096, 512] cuda
    columns = prims.permute(grown, (1, 0))    # bf16[1001, 4096]{1, 1001} cuda
    weights = aten.mm.default(columns, h)     # bf16[1001, 512] cuda
    return (logits, back, weights)
"""


def products(graph):
    return [(node.op, [s.value for s in node.tensor.shape]) for node in graph.nodes if node.op.startswith("aten")]


def test_odd_products_are_padded():
    graph = pad_products(parse_graph(ODD))
    assert [shape for _, shape in products(graph)] == [[4096, 1008], [4096, 512], [1008, 512]]
    copies = [node.name for node in merge_equal(graph).nodes if node.op == "prims.pad"]
    assert copies == ["narrow_padded", "grown_padded"], "one for a matrix and its transpose"
    h, w = torch.randn(4096, 512).bfloat16() / 32, torch.randn(1001, 512) / 32
    wanted = run_graph(parse_graph(ODD), [h, w])
    got = run_loops(lower(graph), [h, w])
    for a, b in zip(got, wanted):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b)


def test_fitting_and_small_products_and_other_devices_are_left_alone():
    for text in (ODD.replace("1001", "1008"), ODD.replace("4096", "64"), ODD.replace(" cuda", "")):
        graph = parse_graph(text)
        assert pad_products(graph) is graph


ROWS = """
def forward(x: f32[96] cuda, q: bf16[64, 96] cuda, k: bf16[16, 96] cuda, v: bf16[16, 96] cuda):
    q32 = prims.convert(q, f32)                          # f32[64, 96] cuda
    xq = prims.broadcast(x, (64, 96), (1,))              # f32[64, 96] cuda
    mq = prims.mul(q32, xq)                              # f32[64, 96] cuda
    sq = prims.sum(mq, (1,))                             # f32[64] cuda
    k32 = prims.convert(k, f32)                          # f32[16, 96] cuda
    xk = prims.broadcast(x, (16, 96), (1,))              # f32[16, 96] cuda
    mk = prims.mul(k32, xk)                              # f32[16, 96] cuda
    sk = prims.sum(mk, (1,))                             # f32[16] cuda
    v32 = prims.convert(v, f32)                          # f32[16, 96] cuda
    mv = prims.mul(v32, xk)                              # f32[16, 96] cuda
    sv = prims.sum(mv, (1,))                             # f32[16] cuda
    return (sq, sk, sv)
"""


def test_rows_times_several_weights_are_one_reduction():
    graph = join_rows(parse_graph(ROWS))
    x, q, k, v = torch.randn(96), torch.randn(64, 96), torch.randn(16, 96), torch.randn(16, 96)
    given = [x, q.bfloat16(), k.bfloat16(), v.bfloat16()]
    loops = lower(graph)
    reductions = [step for step in loops.steps if step.writes[0].reduce]
    assert len(reductions) == 1 and reductions[0].ranges[0].size.value == 96
    assert max(b.type.numel.value for b in loops.buffers if b.kind != "input") == 96  # no weight is copied
    for got, wanted in zip(run_loops(loops, given), run_graph(parse_graph(ROWS), given)):
        torch.testing.assert_close(got, wanted)


def unrolled(dtype: str, rows: int = 8, steps: int = 5) -> str:
    """The gradient of a weight that every step of a loop uses; the sum has one more term."""
    inputs = [f"g{t}: {dtype}[{rows}, 64], x{t}: {dtype}[{rows}, 48]" for t in range(steps)]
    lines = [f"def forward({', '.join(inputs)}, more: {dtype}[64, 48]):"]
    for t in range(steps):
        lines.append(f"    t{t} = prims.permute(g{t}, (1, 0))    # {dtype}[64, {rows}]{{1, 64}}")
        lines.append(f"    p{t} = aten.mm.default(t{t}, x{t})    # {dtype}[64, 48]")
    before = "more"
    for t in range(steps):
        if dtype == "f32":
            lines.append(f"    s{t} = prims.add({before}, p{t})    # f32[64, 48]")
        else:
            lines += [f"    a{t} = prims.convert({before}, f32)    # f32[64, 48]"]
            lines += [f"    b{t} = prims.convert(p{t}, f32)    # f32[64, 48]"]
            lines += [f"    c{t} = prims.add(a{t}, b{t})    # f32[64, 48]"]
            lines += [f"    s{t} = prims.convert(c{t}, {dtype})    # {dtype}[64, 48]"]
        before = f"s{t}"
    return "\n".join([*lines, f"    return ({before},)", ""])


def test_a_sum_of_products_of_few_rows_is_one_product():
    torch.manual_seed(0)
    for dtype, torch_dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        graph = parse_graph(unrolled(dtype))
        joined = drop_dead(join_sums(graph))
        assert products(joined) == [("aten.mm.default", [64, 48])]
        given = [torch.randn([s.value for s in node.tensor.shape]).to(torch_dtype) for node in graph.inputs]
        (exact,) = run_graph(parse_graph(unrolled("f32")), [x.float() for x in given])
        (before,), (after,) = run_graph(graph, given), run_graph(joined, given)
        assert after.dtype is torch_dtype
        assert (after.float() - exact).abs().max() <= max(1e-5, (before.float() - exact).abs().max())


def test_sums_of_products_stay_where_their_rows_are_many_or_a_product_is_shown():
    many = parse_graph(unrolled("f32", rows=64))
    assert products(join_sums(many)) == products(many)
    shown = parse_graph(unrolled("f32", steps=4).replace("return (s3,)", "return (s3, p0)"))
    assert products(join_sums(shown)) == products(shown)
