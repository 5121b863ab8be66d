"""Folding, layout and hoisting: the prologue and the main graph together mean what the graph meant."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dovetail
from dovetail import aot, passes
from dovetail.ir.graph import Graph
from dovetail.ir.verify import check_graph
from tests.ops.eager import run_graph


def trace(module: nn.Module, *inputs: torch.Tensor) -> tuple[Graph, list[torch.Tensor], list[int]]:
    """The module's ATen graph, all its inputs, and which of them are weights."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    graph = torch.fx.Graph()
    taken = [graph.placeholder(f"x{i}") for i in range(len(inputs))]
    weights = {name: graph.placeholder("p_" + name.replace(".", "_")) for name in named}
    call = lambda given, *values: torch.func.functional_call(module, dict(given), values)  # noqa: E731
    graph.output(graph.call_function(call, (weights, *taken)))
    program = torch.fx.GraphModule(nn.Module(), graph)
    every = [*inputs, *named.values()]
    with torch.no_grad():
        joint = aot.trace_joint(program, every)
    return joint.graph, every, list(range(len(inputs), len(every)))


def norm(norm: nn.Module) -> nn.Module:
    """With statistics that are not the identity's."""
    for tensor in (*norm.parameters(), *norm.buffers()):
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 2.0)
    return norm


def run_frozen(frozen: passes.Frozen, every: list[torch.Tensor]) -> list[Any]:
    for graph in (frozen.prologue, frozen.main):
        check_graph(graph, "test")
    with torch.no_grad():
        values = aot.run_graph(frozen.prologue, [every[i] for i in frozen.watched])
        return run_graph(frozen.main, [*every, *values])


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


def check(module: nn.Module, *inputs: torch.Tensor) -> passes.Frozen:
    """As close to the exact result as eager is, give or take a rounding."""
    module.eval()
    graph, every, steady = trace(module, *inputs)
    frozen = passes.freeze(graph, steady)
    assert frozen is not None
    (out,) = run_frozen(frozen, every)
    with torch.no_grad():
        eager = module(*inputs)
        exact = module.double()(*(x.double() for x in inputs))
    assert out.stride() == eager.stride() and out.dtype == eager.dtype
    error, eagers = (out - exact).abs().max(), (eager - exact).abs().max()
    assert error <= 3 * eagers + 1e-7 * exact.abs().max()
    return frozen


CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Conv2d(8, 12, 3, bias=False),
    "bias": lambda: nn.Conv2d(8, 12, 3, padding=1),
    "stride": lambda: nn.Conv2d(8, 12, 3, stride=2, dilation=2),
    "groups": lambda: nn.Conv2d(8, 12, 3, groups=4),
    "depthwise": lambda: nn.Conv2d(8, 16, 3, groups=8, bias=False),
    "large": lambda: nn.Conv2d(8, 1024, 3),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_batch_norm_is_folded(kind: str) -> None:
    torch.manual_seed(0)
    conv = CONVOLUTIONS[kind]()
    module = nn.Sequential(conv, norm(nn.BatchNorm2d(conv.out_channels)), nn.ReLU())
    frozen = check(module, torch.randn(2, 8, 9, 9))
    assert not any("batch_norm" in op for op in ops(frozen.main))
    assert sum("conv" in op for op in ops(frozen.main)) == 1


@pytest.mark.parametrize("dims", [1, 3])
def test_other_ranks_are_folded(dims: int) -> None:
    conv, kind = (nn.Conv1d, nn.BatchNorm1d) if dims == 1 else (nn.Conv3d, nn.BatchNorm3d)
    frozen = check(nn.Sequential(conv(4, 6, 3), norm(kind(6, affine=False))), torch.randn(2, 4, *[6] * dims))
    assert not any("batch_norm" in op for op in ops(frozen.main))


def test_a_double_stays_double() -> None:
    module = nn.Sequential(nn.Conv2d(4, 6, 3), norm(nn.BatchNorm2d(6))).double()
    check(module, torch.randn(2, 4, 6, 6, dtype=torch.float64))


class Shared(nn.Module):
    """A convolution that others read too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), norm(nn.BatchNorm2d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return y + self.norm(y)


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.ConvTranspose2d(4, 4, 3), norm(nn.BatchNorm2d(4))
        self.scale = nn.Parameter(torch.rand(200, 200))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)) * self.scale.exp().sum()


@pytest.mark.parametrize("module", [Shared, Turned])
def test_what_cannot_be_folded_stays(module: type[nn.Module]) -> None:
    frozen = check(module(), torch.randn(2, 4, 6, 6))
    assert any("batch_norm" in op for op in ops(frozen.main))


class Between(nn.Module):
    """Pooling, a join, a product and a library call between and after convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(32, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(self.a(x), 2)
        y = torch.cat([self.b(x).sigmoid() * x, x.flip(3)], 1)
        return self.c(y).flatten(1).cumsum(1)


def test_layouts_in_between() -> None:
    check(Between(), torch.randn(2, 3, 12, 12))


class Gated(nn.Module):
    """Weights that are computed from weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(256, 128)), nn.Parameter(torch.randn(256, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.gain * self.weight / self.weight.norm(dim=1, keepdim=True)
        return x @ weight.t() + torch.rand(1) * 0


def test_weights_made_of_weights() -> None:
    frozen = check(Gated(), torch.randn(3, 128))
    assert len(frozen.prologue.outputs) == 1
    assert any("rand" in op for op in ops(frozen.main)) and not any("div" in op for op in ops(frozen.main))


class Quantized(nn.Module):
    """Small weights that are widened where they are used, and a vector that is repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-99, 99, (256, 128), dtype=torch.int8))
        self.scale, self.shift = nn.Parameter(torch.rand(256, 1)), nn.Parameter(torch.rand(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = self.shift.sin().repeat(500, 1).exp()
        return x @ (self.weight.float() * self.scale).t() + shift[: x.shape[0]]


def test_what_would_grow_stays() -> None:
    module = Quantized()
    graph, every, steady = trace(module, torch.randn(3, 128))
    frozen = passes.freeze(graph, steady)
    held = [] if frozen is None else frozen.prologue.outputs
    assert all(node.tensor.bytes.value <= 1024 for node in held)


class Blurred(nn.Module):
    """One small filter for all channels, as blurring is written."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.filter = nn.Conv2d(3, 8, 1), nn.Buffer(torch.rand(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(self.mix(x).sigmoid(), self.filter.expand(8, 1, 3, 3), groups=8)


def test_what_a_library_lays_out_is_kept_even_if_it_grew() -> None:
    frozen = check(Blurred(), torch.randn(2, 3, 8, 8))
    assert any("reorder" in op for op in ops(frozen.prologue)) and not any("reorder" in op for op in ops(frozen.main))


class Shared(nn.Module):
    """A repeated vector that a weight is made of, and that the rest of the program reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.weight = nn.Parameter(torch.rand(128)), nn.Parameter(torch.rand(128, 128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.row.expand(128, 128)
        return x @ (self.weight * rows) + rows[: x.shape[0]] * x


def test_what_stays_may_be_read_by_what_moves() -> None:
    check(Shared(), torch.randn(3, 128))


@pytest.mark.parametrize("module", [nn.Linear(300, 300), nn.LayerNorm(8), nn.Embedding(9, 3)])
def test_nothing_to_prepare(module: nn.Module) -> None:
    x = torch.zeros(2, dtype=torch.int64) if isinstance(module, nn.Embedding) else torch.randn(2, module.weight.shape[-1])
    graph, _, steady = trace(module, x)
    assert passes.freeze(graph, steady) is None


def test_half_precision_is_not_folded() -> None:
    module = nn.Sequential(nn.Conv2d(4, 6, 3), norm(nn.BatchNorm2d(6))).to(torch.bfloat16).eval()
    graph, _, steady = trace(module, torch.randn(2, 4, 6, 6, dtype=torch.bfloat16))
    assert passes.freeze(graph, steady) is None


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


def test_layers_of_an_lstm_get_packed_weights() -> None:
    frozen = check(Tagger(), torch.randn(3, 5, 8))
    assert sum("mkldnn_rnn_layer_weight" in op for op in ops(frozen.prologue)) == 4


def test_linear_layers_on_many_rows_get_packed_weights() -> None:
    """One with a bias and one without, in either order of memory; not one that few rows go through."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.few = nn.Linear(256, 300), nn.Linear(300, 256, bias=False), nn.Linear(256, 256)
            self.plain = nn.Parameter(torch.randn(256, 256) / 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.down(torch.relu(self.up(x))) @ self.plain
            return self.few(x.mean(1))

    frozen = check(Layers(), torch.randn(2, 20, 256))
    assert ops(frozen.prologue).count("mkldnn._reorder_linear_weight.default") == 3
    assert ops(frozen.main).count("mkldnn._linear_pointwise.default") == 3
    assert "aten.addmm.default" in ops(frozen.main)


def test_packed_weights_follow_the_weights() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)), torch.randn(40, 256)
    run = dovetail.compile(module)
    with torch.no_grad():
        for change in (lambda w: None, lambda w: w.mul_(2), lambda w: w.copy_(torch.randn(256, 256))):
            change(module[2].weight)
            torch.testing.assert_close(run(x), module(x))
        module[0].weight = nn.Parameter(torch.randn(256, 256))
        torch.testing.assert_close(run(x), module(x), rtol=1e-5, atol=1e-4)
