"""Channels-last in training: the same gradients in the same layouts, where it pays."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dovetail
from dovetail import aot, passes
from dovetail.fake.tensor import Fake, _empty_meta
from dovetail.ir.expr import const
from dovetail.passes.layout import CONV, CONV_BACKWARD, is_laid
from dovetail.util.noun import replace


def mobile(width: int = 32) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.Hardswish(),
        nn.Conv2d(width, width, 3, padding=1, groups=width), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 1), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Flatten(),
    )  # fmt: skip


def joint_graph(model: nn.Module, x: torch.Tensor) -> aot.Joint:
    graph = torch.fx.symbolic_trace(model)
    taken = list(dict(model.named_parameters()).values())
    program = torch.fx.GraphModule(graph, graph.graph)

    def run(image: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        named = dict(zip(dict(model.named_parameters()), weights))
        return torch.func.functional_call(program, named, (image,))  # type: ignore[no-any-return]

    outer = torch.fx.Graph()
    inputs = [outer.placeholder(f"p{k}") for k in range(1 + len(taken))]
    outer.output(outer.call_function(run, tuple(inputs)))
    return aot.trace_joint(torch.fx.GraphModule(nn.Module(), outer), [x, *taken])


def test_gradients_equal_eager() -> None:
    torch.manual_seed(0)
    model = mobile()
    other = copy.deepcopy(model)
    x = torch.randn(4, 3, 32, 32, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    compiled = dovetail.compile(other)
    for _ in range(2):
        model(x).square().mean().backward()
        compiled(y).square().mean().backward()
    torch.testing.assert_close(y.grad, x.grad)
    assert x.grad is not None and y.grad is not None and x.grad.stride() == y.grad.stride()
    for want, got in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-5)
        assert got.grad is not None and got.grad.is_contiguous()
    for have, made in zip(model.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(made, have)


def test_grouped_convolutions_move_the_graph() -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU(), nn.Conv2d(16, 32, 1))
    graph = passes.channels_last_where_it_pays(joint_graph(model, torch.randn(4, 16, 32, 32)).graph)
    convs = [node for node in graph.nodes if node.op == CONV]
    assert len(convs) == 2 and all(is_laid(node.type) for node in convs)
    assert any(node.op == CONV_BACKWARD for node in graph.nodes)


def test_gradients_that_the_library_computes_past_its_memory_stay() -> None:
    first = nn.Conv2d(3, 16, 1, stride=2)  # oneDNN 3.12 crashes on it channels-last, at 96 by 96
    model = nn.Sequential(first, nn.Conv2d(16, 16, 3, padding=1, groups=16))
    graph = passes.channels_last_where_it_pays(joint_graph(model, torch.randn(2, 3, 96, 96)).graph)
    assert all(is_laid(node.type) for node in graph.nodes if node.op == CONV)
    images = {node.args[9]: node.args[1].type for node in graph.nodes if node.op == CONV_BACKWARD}
    assert is_laid(images[16]) and not is_laid(images[1])


def test_groups_that_were_symbolic_stay() -> None:
    graph = joint_graph(nn.Conv2d(16, 16, 3, groups=16).requires_grad_(False), torch.randn(2, 16, 8, 8)).graph
    (conv,) = (node for node in graph.nodes if node.op == CONV)
    late = replace(conv, args=(*conv.args[:8], const(16)))  # as where a size turns out to be one number
    changed = replace(graph, nodes=(late,), outputs=(late,))
    assert passes.channels_last_where_it_pays(changed) is changed


def test_large_filters_stay() -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))
    joint = joint_graph(model, torch.randn(2, 64, 8, 8))
    assert passes.channels_last_where_it_pays(joint.graph) is joint.graph


def on_a_gpu(*shape: int) -> torch.Tensor:
    like = torch.empty(shape, device="meta")
    return Fake(_empty_meta(shape, like.stride(), like.dtype), torch.device("cuda", 0))


def test_on_a_gpu_every_convolution_moves() -> None:
    def block(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:
        y = torch.conv2d(x, a, padding=1)
        y, *_ = torch.ops.aten.cudnn_batch_norm(y, stats, stats, stats, stats, False, 0.1, 1e-5)
        return torch.conv2d(torch.cat([x, y.relu()], 1), b).amax((2, 3))

    program = torch.fx.Graph()
    inputs = [program.placeholder(name) for name in ("x", "a", "b", "stats")]
    program.output((program.call_function(block, tuple(inputs)),))
    shapes = ((4, 8, 32, 32), (8, 8, 3, 3), (16, 16, 1, 1), (8,))
    module = torch.fx.GraphModule(nn.Module(), program)
    graph = aot.trace_joint(module, [on_a_gpu(*shape) for shape in shapes]).graph
    moved = passes.channels_last_where_it_pays(graph)
    assert all(is_laid(node.type) for node in moved.nodes if node.op in (CONV, "aten.cat.default"))
    copied = [node.name for node in moved.nodes if node.op == "prims.copy"]
    assert copied == ["x_laid_out", "a_laid_out"], "the images once, and the weights that are no vectors"
    assert [node.op for node in moved.nodes if "batch_norm" in node.op] == ["aten.native_batch_norm.default"]


@pytest.mark.parametrize("channels", [3, 4])
def test_on_a_gpu_images_of_colours_alone_move_nothing(channels: int) -> None:
    """In fp32 the library computes them with fewer digits channels-last."""
    program = torch.fx.Graph()
    x, a = program.placeholder("x"), program.placeholder("a")
    program.output((program.call_function(torch.conv2d, (x, a), {"stride": 4}),))
    module = torch.fx.GraphModule(nn.Module(), program)
    graph = aot.trace_joint(module, [on_a_gpu(8, channels, 32, 32), on_a_gpu(8, channels, 4, 4)]).graph
    assert (passes.channels_last_where_it_pays(graph) is graph) == (channels == 3)


def test_images_made_of_images_stay_laid_out() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1, groups=16)
            self.c = nn.Conv2d(35, 8, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.a(x)
            small = nn.functional.pad(nn.functional.avg_pool2d(self.b(first), 2), (1, 1, 1, 1))
            back = nn.functional.interpolate(small[:, :, 1:-1, 1:-1], scale_factor=2.0)
            left, right = self.c(torch.cat([first, back, x], 1)).chunk(2, 1)
            return left * right.sigmoid()

    torch.manual_seed(0)
    model = Mixed()
    other, x = copy.deepcopy(model), torch.randn(4, 3, 32, 32)
    graph = passes.channels_last_where_it_pays(joint_graph(model, x).graph)
    ops = ("aten.cat.default", "aten.constant_pad_nd.default", "aten.upsample_nearest2d.default")
    made = [node for node in graph.nodes if node.op in ops and "grad" not in node.name]
    assert len(made) == 3 and all(is_laid(node.type) for node in made)
    want, got = model(x), dovetail.compile(other)(x)
    torch.testing.assert_close(got, want)
    want.square().sum().backward()
    got.square().sum().backward()
    for have, given in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(given.grad, have.grad, rtol=1e-4, atol=1e-3)
