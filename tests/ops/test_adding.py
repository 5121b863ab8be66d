"""Sums at positions that repeat: atomics of ours on a GPU, the library where order or rounding matter."""
import pytest
import torch

from dovetail.ir.graph import GraphBuilder
from dovetail.ir.types import BF16, F32, I64, Device, tensor_type
from dovetail.ops import decompose
from tests.ops.eager import run_graph

X = torch.arange(15.0).reshape(5, 3)
AT = torch.tensor([4, 0, 4, 1])
SOURCE = torch.arange(12.0).reshape(4, 3)
CASES = {
    "aten.index_add.default": ((X, 0, AT, SOURCE), {"alpha": 3}),
    "aten.index_put.default": ((X, (AT,), SOURCE, True), {}),
    "aten.scatter_add.default": ((X, 0, AT[:, None].expand(4, 2), SOURCE), {}),
    "aten.embedding_dense_backward.default": ((SOURCE, AT, 5, 1, False), {}),
}


def graph_of(op, device="cuda", dtype=F32):
    args, kwargs = CASES[op]
    builder, given = GraphBuilder(), []

    def argument(value):
        if isinstance(value, tuple):
            return tuple(map(argument, value))
        if not isinstance(value, torch.Tensor):
            return value
        given.append(value)
        kind = dtype if value.is_floating_point() else I64
        return builder.input(f"x{len(given)}", tensor_type(tuple(value.shape), kind, Device(device, 0)))

    call = builder.call(op, argument(args), tensor_type((5, 3), dtype, Device(device, 0)), tuple(kwargs.items()))
    return builder.finish((call,)), given


def ops_of(graph) -> list[str]:
    return [node.op for node in graph.nodes]


@pytest.mark.parametrize("op", CASES)
def test_a_gpu_adds_by_itself(op):
    graph, given = graph_of(op)
    made = decompose(graph)
    assert "prims.put_add" in ops_of(made) and not [op for op in ops_of(made) if op.startswith("aten.")]
    for node in made.nodes:  # run here, whatever it was made for
        here = tuple(Device("cpu", None) if isinstance(arg, Device) else arg for arg in node.args)
        object.__setattr__(node, "args", here)
    (got,) = run_graph(made, given)
    args, kwargs = CASES[op]
    space, name, overload = op.split(".")
    torch.testing.assert_close(got, getattr(getattr(torch.ops.aten, name), overload)(*args, **kwargs))


@pytest.mark.parametrize("op", CASES)
def test_the_library_adds_elsewhere(op):
    assert op in ops_of(decompose(graph_of(op, "cpu")[0]))
    assert op in ops_of(decompose(graph_of(op, dtype=BF16)[0]))
    torch.use_deterministic_algorithms(True)
    try:
        assert op in ops_of(decompose(graph_of(op)[0]))
    finally:
        torch.use_deterministic_algorithms(False)
