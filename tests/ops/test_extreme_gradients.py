"""The gradient of max and min along a dimension is a selection, not a library call."""
import pytest
import torch

import dovetail
from dovetail.ir.graph import GraphBuilder
from dovetail.ir.types import F32, I64, tensor_type
from dovetail.ops import decompose
from tests.ops.eager import run_graph


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_scatter_to_where_an_extreme_is(dim):
    rows = [1 if d == dim % 2 else n for d, n in enumerate((5, 7))]
    builder = GraphBuilder()
    x, zeros = (builder.input(name, tensor_type((5, 7), F32)) for name in "xz")
    source = builder.input("s", tensor_type(rows, F32))
    found = builder.call("aten.argmin.default", (x, dim, True), tensor_type(rows, I64))
    graph = builder.finish((builder.call("aten.scatter.src", (zeros, dim, found, source), tensor_type((5, 7), F32)),))
    made = decompose(graph)
    assert not [node for node in made.nodes if node.op.startswith("aten.")]
    x, zeros, source = torch.randn(5, 7), torch.zeros(5, 7), torch.randn(rows)
    (got,) = run_graph(made, [x, zeros, source])
    assert torch.equal(got, zeros.scatter(dim, x.argmin(dim, True), source))


def test_a_place_that_may_be_out_of_range_stays_with_the_library():
    builder = GraphBuilder()
    x, index = builder.input("x", tensor_type((5, 7), F32)), builder.input("i", tensor_type((5, 1), I64))
    graph = builder.finish((builder.call("aten.scatter.value", (x, 1, index, 1.0), tensor_type((5, 7), F32)),))
    assert [node.op for node in decompose(graph).nodes] == ["aten.scatter.value"]


def test_gradients_of_nearest_neighbours():
    def loss(a, b):
        far = (a[:, :, None] - b[:, None]).square().sum(-1)
        return far.min(2).values.mean() + far.max(1, keepdim=True).values.mean() + a.max(-1).values.sum()

    torch.manual_seed(0)
    a, b = torch.randn(2, 30, 3, requires_grad=True), torch.randn(2, 20, 3, requires_grad=True)
    wanted = torch.autograd.grad(loss(a, b), (a, b))
    for mine, eager in zip(torch.autograd.grad(dovetail.compile(loss)(a, b), (a, b)), wanted):
        torch.testing.assert_close(mine, eager)
