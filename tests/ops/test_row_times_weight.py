"""One row times a large transposed weight on a GPU is a reduction of ours, not a library call."""
import pytest
import torch

from dovetail.ir.expr import as_expr
from dovetail.ir.graph import GraphBuilder
from dovetail.ir.types import BF16, F32, Device, TensorType, tensor_type
from dovetail.ops import decompose
from tests.ops.eager import run_graph

CUDA = Device("cuda", 0)


@pytest.mark.parametrize("dtype,torch_dtype", [(F32, torch.float32), (BF16, torch.bfloat16)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_it_equals_the_product(dtype, torch_dtype, with_bias):
    k, n = 512, 640
    builder = GraphBuilder()
    bias = builder.input("bias", tensor_type((n,), dtype, CUDA))
    x = builder.input("x", tensor_type((1, k), dtype, CUDA))
    w = builder.input("w", TensorType((as_expr(k), as_expr(n)), (as_expr(1), as_expr(k)), dtype, CUDA))
    type = tensor_type((1, n), dtype, CUDA)
    args = (bias, x, w) if with_bias else (x, w)
    graph = builder.finish((builder.call(f"aten.{'add' if with_bias else ''}mm.default", args, type),))
    made = decompose(graph)
    assert not [node for node in made.nodes if node.op.startswith("aten.")]
    values = [torch.randn(n), torch.randn(1, k), torch.randn(n, k).t()]
    values = [value.to(torch_dtype) for value in values]
    (got,) = run_graph(made, values)
    wanted = values[1].double() @ values[2].double() + (values[0].double() if with_bias else 0)
    torch.testing.assert_close(got.double(), wanted.to(torch_dtype).double(), rtol=1e-2 if dtype is BF16 else 1e-5, atol=1e-4)


def test_a_small_one_or_two_rows_stay_with_the_library():
    for rows, columns in ((1, 8), (2, 4096)):
        builder = GraphBuilder()
        x = builder.input("x", tensor_type((rows, 512), F32, CUDA))
        w = builder.input("w", TensorType((as_expr(512), as_expr(columns)), (as_expr(1), as_expr(512)), F32, CUDA))
        graph = builder.finish((builder.call("aten.mm.default", (x, w), tensor_type((rows, columns), F32, CUDA)),))
        assert [node.op for node in decompose(graph).nodes] == ["aten.mm.default"]
