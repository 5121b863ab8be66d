"""Traced once with symbolic sizes, run at others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dovetail
from dovetail import aot
from dovetail.fake import fake_like
from dovetail.fake.tensor import Fake, _symbolic
from dovetail.sym import Shapes, make_symfloat, make_symint
from tests.aot.running import as_module, compiled


def _mlp(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
    return F.layer_norm(F.gelu(x @ w), (w.shape[1],)) @ v


def _softmax(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
    return torch.softmax(x @ w, -1), x.shape[0] * 2, x.t()[1:]


def _attention(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
    q = (x @ w).view(x.shape[0], 2, 8).transpose(0, 1)
    return (
        F.scaled_dot_product_attention(q[None], q[None], q[None])[0].transpose(0, 1).reshape(x.shape[0], 16)
    )


def _mutation(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
    y = x + 1
    y[: x.shape[0] // 2].mul_(2)
    return y, y.sum(0), torch.cat([y, x], 0).mean()


@pytest.mark.parametrize("program", [_mlp, _softmax, _attention, _mutation], ids=lambda p: p.__name__)
def test_other_sizes(program: Any) -> None:
    def make(n: int) -> list[torch.Tensor]:
        torch.manual_seed(n)
        return [torch.randn(shape, requires_grad=True) for shape in ((n, 8), (8, 16), (16, 4))]

    shapes = Shapes()
    x, w, v = make(6)
    example = fake_like(x, shapes=shapes, extent={0: shapes.symbol(6)}.get)
    call = compiled(program, [example, w, v])
    for n in (6, 10, 4):
        inputs = make(n)
        ours, theirs = call(*inputs), program(*inputs)
        theirs = list(theirs) if isinstance(theirs, tuple) else [theirs]
        for a, b in zip(ours, theirs):
            assert torch.is_tensor(a) == torch.is_tensor(b)
            torch.testing.assert_close(a, b)
        total = [sum(r.sin().sum() for r in rs if torch.is_tensor(r)) for rs in (ours, theirs)]
        for a, b in zip(*(torch.autograd.grad(t, inputs, allow_unused=True) for t in total)):
            assert (a is None) == (b is None)
            if b is not None:
                torch.testing.assert_close(a, b)


def test_size_input() -> None:
    shapes = Shapes()
    n = make_symint(shapes, shapes.symbol(5))
    call = compiled(
        lambda x, n: (x.sin() * n, torch.arange(n), n + 1), [torch.randn(3, requires_grad=True), n]
    )
    x = torch.randn(3, requires_grad=True)
    y, counted, more = call(x, 7)
    torch.testing.assert_close(y, x.sin() * 7)
    assert counted.tolist() == list(range(7)) and more == 8
    (grad,) = torch.autograd.grad(y.sum(), [x])
    torch.testing.assert_close(grad, x.cos() * 7)


def test_float_input() -> None:
    shapes = Shapes()
    rate = make_symfloat(shapes, shapes.float_symbol(0.5))
    call = compiled(lambda x, rate: x.sin() * rate, [torch.randn(3, requires_grad=True), rate])
    x = torch.randn(3, requires_grad=True)
    (y,) = call(x, 0.25)
    torch.testing.assert_close(y, x.sin() * 0.25)
    (grad,) = torch.autograd.grad(y.sum(), [x])
    torch.testing.assert_close(grad, x.cos() * 0.25)


def test_a_size_of_one_says_nothing_about_the_order_of_strides() -> None:
    call = dovetail.compile(lambda x: x.diff(dim=1))
    for n in (4, 2, 4, 5):
        x = torch.randn(n, 3).t()
        assert call(x).stride() == x.diff(dim=1).stride()


def test_the_gpu_s_forms_of_ops() -> None:
    """Their kernels are not on every machine; what backward gets of forward is said without them."""
    aten = torch.ops.aten

    def program(gates: torch.Tensor, hx: torch.Tensor, x: torch.Tensor, grid: torch.Tensor) -> Any:
        return aten._thnn_fused_gru_cell(gates, gates, hx)[0], aten.cudnn_grid_sampler(x, grid)

    shapes = Shapes()
    sizes = ((4, 24), (4, 8), (4, 3, 5, 6), (4, 7, 8, 2))
    n = shapes.symbol(4)
    examples = [fake_like(torch.randn(s, requires_grad=True), shapes=shapes, extent={0: n}.get) for s in sizes]
    graph = str(aot.trace_joint(as_module(program, 4), examples).graph)
    assert "_thnn_fused_gru_cell_backward.default(tangent_0, program_1_1, False)" in graph
    assert "(f32[s0, 24], f32[s0, 24], f32[s0, 8], None, None)" in graph
    assert "aten.cudnn_grid_sampler_backward.default(x2, x3, tangent_1)" in graph


@pytest.mark.parametrize("rows", [6, 1 << 20])
def test_symbolic_sizes_on_a_gpu_fit_its_indices(rows: int) -> None:
    shapes = Shapes()
    like = torch.empty(rows, 64, device="meta")
    extent = {0: shapes.symbol(rows)}.get
    form = fake_like(like, shapes=shapes, extent=extent).form
    assert form is not None
    example = _symbolic(Fake(like, torch.device("cuda", 0)), form, shapes)
    joint = aot.trace_joint(as_module(lambda x: x.unsqueeze(2) * x.unsqueeze(1), 1), [example])
    product = joint.graph.nodes[-1]
    assert product.tensor.shape[0].is_const == (rows > 6)
    guarded = [str(assumption.condition) for assumption in shapes.freeze()]
    assert guarded[-1:] == (["s0 == 1048576"] if rows > 6 else ["(4096*s0) <= 2147418112"]), guarded


WHOLE: dict[str, Any] = {
    "stack": lambda x: torch.stack([x, x * 2], 1),
    "stack_last": lambda x: torch.stack([x, x * 2], -1),
    "shuffle": lambda x: F.pixel_shuffle(x.view(-1, 4, 1, 3), 2),
    "unshuffle": lambda x: F.pixel_unshuffle(x.view(-1, 1, 2, 6), 2),
    "logits": lambda x: F.binary_cross_entropy_with_logits(x, x.sigmoid(), pos_weight=x[0].exp()),
    "lists": lambda x: torch._foreach_mul(torch._foreach_add([x, x + 1], 1.0), [x, x]),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(-1, 6, 2)) * torch.polar(x[:, :6], x[:, 6:])),
}


@pytest.mark.parametrize("name", WHOLE)
def test_no_op_fixes_the_sizes_that_it_sees(name: str) -> None:
    dovetail.reset()
    run = dovetail.compile(WHOLE[name], dynamic=True, options={"fallback_to_eager": False})
    for rows in (5, 6, 9):
        x = torch.randn(rows, 12)
        torch.testing.assert_close(run(x), WHOLE[name](x))
    assert dovetail.stats()["recompiles"] == 0
