"""Long reductions with few results become two; the numbers stay."""
import pytest
import torch

from dovetail.ir.graph import GraphBuilder
from dovetail.ir.types import F32, Device, tensor_type
from dovetail.ir.verify import check_graph
from dovetail.passes.split import split_reductions
from tests.ops.eager import run_graph

CUDA = Device("cuda", 0)


@pytest.mark.parametrize("op", ["sum", "max", "welford"])
@pytest.mark.parametrize("shape,dims", [((8192, 24), (0,)), ((8, 6, 64, 64), (0, 2, 3)), ((3, 65536), (1,)), ((131072,), (0,))])
def test_split_equals_whole(op, shape, dims):
    builder = GraphBuilder()
    x = builder.input("x", tensor_type(shape, F32, CUDA))
    kept = tuple(s for d, s in enumerate(shape) if d not in dims)
    type = tensor_type(kept, F32, CUDA)
    if op == "welford":
        pair = builder.call("prims.welford", (x, dims), (type, type))
        graph = builder.finish((builder.get(pair, 0), builder.get(pair, 1)))
    else:
        graph = builder.finish((builder.call(f"prims.{op}", (x, dims), type),))
    split = split_reductions(graph)
    check_graph(split, "split")
    assert len([n for n in split.nodes if n.op == f"prims.{op}"]) + (op == "welford") >= 2
    value = torch.randn(shape, dtype=torch.float64)
    for a, b in zip(run_graph(split, [value]), run_graph(graph, [value])):
        torch.testing.assert_close(a, b)


def test_rows_are_parts_as_they_are():
    """A softmax before the sum has the same ones, and fuses with it."""
    builder = GraphBuilder()
    x = builder.input("x", tensor_type((4000, 3200), F32, CUDA))
    graph = split_reductions(builder.finish((builder.call("prims.sum", (x, (0, 1)), tensor_type((), F32, CUDA)),)))
    assert [n.tensor.shape[0].value for n in graph.nodes if n.op == "prims.sum" and n.tensor.ndim] == [4000]


def test_the_cpu_keeps_its_reductions():
    builder = GraphBuilder()
    x = builder.input("x", tensor_type((8192, 24), F32))
    graph = builder.finish((builder.call("prims.sum", (x, (0,)), tensor_type((24,), F32)),))
    assert split_reductions(graph) is graph
