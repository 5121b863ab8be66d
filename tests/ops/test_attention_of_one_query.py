"""One query on a GPU attends by reductions of ours; other attention stays with the library."""
import pytest
import torch
import torch.nn.functional as F

from dovetail.ir.graph import GraphBuilder
from dovetail.ir.types import BF16, F32, I64, U64, Device, tensor_type
from dovetail.ops import decompose
from tests.ops.eager import run_graph

CUDA = Device("cuda", 0)
FLASH, CUDNN = "aten._scaled_dot_product_flash_attention.default", "aten._scaled_dot_product_cudnn_attention.default"


def graph_of(op, queries, shared=1, dtype=F32, with_bias=False, used=(0,)):
    builder = GraphBuilder()
    q = builder.input("q", tensor_type((2, 4, queries, 16), dtype, CUDA))
    k, v = (builder.input(name, tensor_type((2, 4 // shared, 24, 16), dtype, CUDA)) for name in "kv")
    rest = []
    if op == CUDNN:
        rest = [builder.input("bias", tensor_type((2, 1, queries, 24), dtype, CUDA)) if with_bias else None, False]
    seeds = U64 if op == FLASH else I64
    types = (
        tensor_type((2, 4, queries, 16), dtype, CUDA), tensor_type((2, 4, queries), F32, CUDA), None, None, None, None,
        tensor_type((2,), seeds, CUDA), tensor_type((), seeds, CUDA), None,
    )  # fmt: skip
    call = builder.call(op, (q, k, v, *rest), types)
    return builder.finish(tuple(builder.get(call, place) for place in used))


@pytest.mark.parametrize("op", [FLASH, CUDNN])
@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("dtype,kind", [(F32, torch.float32), (BF16, torch.bfloat16)])
def test_it_equals_attention(op, shared, dtype, kind):
    with_bias = op == CUDNN
    made = decompose(graph_of(op, 1, shared, dtype, with_bias))
    assert not [node for node in made.nodes if node.op.startswith("aten.")]
    q, k, v = torch.randn(2, 4, 1, 16), torch.randn(2, 4 // shared, 24, 16), torch.randn(2, 4 // shared, 24, 16)
    bias = torch.zeros(2, 1, 1, 24)
    bias[0, :, :, 20:] = float("-inf")
    bias[1] = float("-inf")  # nothing to attend to
    given = [x.to(kind) for x in (q, k, v, *([bias] if with_bias else []))]
    (got,) = run_graph(made, given)
    wide = [x.double() for x in given]
    mask = wide[3] if with_bias else None
    wanted = F.scaled_dot_product_attention(*wide[:3], attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(got.double(), wanted.to(kind).double(), rtol=1.6e-2 if dtype is BF16 else 1e-5, atol=1e-5)


def test_what_stays_with_the_library():
    for graph in (graph_of(FLASH, 2), graph_of(FLASH, 1, used=(0, 1)), graph_of(CUDNN, 8)):
        assert [node.op for node in decompose(graph).nodes if node.op.startswith("aten.")]
