"""Linear resizing and windows on a GPU are arithmetic on neighbours, which fuses with what is around it."""
import pytest
import torch
from torch.nn import functional as F

from dovetail.ir.graph import GraphBuilder
from dovetail.ir.types import BF16, F32, F64, Device, tensor_type
from dovetail.ops import decompose
from tests.ops.eager import run_graph

CUDA = Device("cuda", 0)
NAMES = {1: ("linear", "aten.upsample_linear1d.default"), 2: ("bilinear", "aten.upsample_bilinear2d.default"),
         3: ("trilinear", "aten.upsample_trilinear3d.default")}
SIZES = [((7,), (12,)), ((9,), (4,)), ((8, 6), (4, 3)), ((5, 7), (11, 13)), ((6, 6), (1, 9)), ((1, 1), (3, 4)),
         ((4, 5, 6), (7, 3, 8))]


def graph_of(kind, small, large, dtype, align, scales):
    builder = GraphBuilder()
    x = builder.input("x", tensor_type((2, 3, *small), dtype, CUDA))
    args = (x, large, align, *scales)
    return builder.finish((builder.call(kind, args, tensor_type((2, 3, *large), dtype, CUDA)),))


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("small,large", SIZES)
@pytest.mark.parametrize("dtype,torch_dtype", [(F32, torch.float32), (F64, torch.float64), (BF16, torch.bfloat16)])
def test_it_equals_eager(small, large, align, dtype, torch_dtype):
    mode, kind = NAMES[len(small)]
    made = decompose(graph_of(kind, small, large, dtype, align, (None,) * len(small)))
    assert not [node for node in made.nodes if node.op.startswith("aten.")]
    x = torch.randn(2, 3, *small).to(torch_dtype)
    wanted = F.interpolate(x.float() if dtype is BF16 else x, large, mode=mode, align_corners=align)
    torch.testing.assert_close(run_graph(made, [x])[0], wanted.to(torch_dtype))


def test_a_given_scale_is_used():
    x = torch.randn(2, 3, 7, 9)
    wanted = F.interpolate(x, scale_factor=(1.3, 0.7), mode="bilinear", recompute_scale_factor=False)
    large = tuple(wanted.shape[2:])
    made = decompose(graph_of(NAMES[2][1], (7, 9), large, F32, False, (1.3, 0.7)))
    torch.testing.assert_close(run_graph(made, [x])[0], wanted)


@pytest.mark.parametrize("lead", [(2, 3), (3,)])
@pytest.mark.parametrize("size,spread,margin,step", [
    ((3, 3), (1, 1), (1, 1), (1, 1)), ((2, 4), (2, 1), (0, 2), (3, 2)), ((5, 1), (1, 1), (0, 0), (2, 2)), ((7, 9), (1, 1), (0, 0), (1, 1)),
])  # fmt: skip
def test_windows_equal_eager(lead, size, spread, margin, step):
    x = torch.randn(*lead, 7, 9)
    wanted = F.unfold(x, size, spread, margin, step)
    builder = GraphBuilder()
    given = builder.input("x", tensor_type(tuple(x.shape), F32, CUDA))
    type = tensor_type(tuple(wanted.shape), F32, CUDA)
    made = decompose(builder.finish((builder.call("aten.im2col.default", (given, size, spread, margin, step), type),)))
    assert not [node for node in made.nodes if node.op.startswith("aten.")]
    torch.testing.assert_close(run_graph(made, [x])[0], wanted, rtol=0, atol=0)


@pytest.mark.parametrize("dtype,torch_dtype", [(F32, torch.float32), (BF16, torch.bfloat16)])
def test_many_small_matrices_are_multiplied_by_elements(dtype, torch_dtype):
    builder = GraphBuilder()
    x, y = (builder.input(name, tensor_type((2000, *sides), dtype, CUDA)) for name, sides in (("x", (3, 5)), ("y", (5, 2))))
    graph = builder.finish((builder.call("aten.bmm.default", (x, y), tensor_type((2000, 3, 2), dtype, CUDA)),))
    made = decompose(graph)
    assert not [node for node in made.nodes if node.op.startswith("aten.")]
    given = [torch.randn(2000, 3, 5).to(torch_dtype), torch.randn(2000, 5, 2).to(torch_dtype)]
    torch.testing.assert_close(run_graph(made, given)[0], torch.bmm(*given))


@pytest.mark.parametrize("lead,other", [((2,), (2,)), ((), (3,)), ((2, 1), (1, 3)), ((2, 1), (3,))])
def test_distances_along_axes(lead, other):
    given = [torch.randn(*lead, 30, 4), torch.randn(*other, 40, 4)]
    wanted = torch.cdist(*given, p=1.0)
    builder = GraphBuilder()
    x, y = (builder.input(name, tensor_type(tuple(v.shape), F32, CUDA)) for name, v in zip("xy", given))
    type = tensor_type(tuple(wanted.shape), F32, CUDA)
    made = decompose(builder.finish((builder.call("aten._cdist_forward.default", (x, y, 1.0, None), type),)))
    assert not [node for node in made.nodes if node.op.startswith("aten.")]
    torch.testing.assert_close(run_graph(made, given)[0], wanted)
