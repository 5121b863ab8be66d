"""Symbolic inference: where the assumptions hold, the sizes are those of the real op at other sizes."""
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

import dovetail
from dovetail.errors import Break, FailedFake
from dovetail.events import EVENTS
from dovetail.fake import Fake, FakeMode, SymbolicCalls, fake_like, type_of
from dovetail.ir.expr import evaluate
from dovetail.ir.source import Arg, Size
from dovetail.sym import Shapes
from tests.sweeps.torch_testing import OPS

SLICE = [name for name in sorted(OPS)[3::6] if "jiterator" not in name and torch.float32 in OPS[name].dtypes]
OTHER_SIZES = (lambda n: n + 1, lambda n: 2 * n, lambda n: 2 * n + 3)


def symbolic(tensor: torch.Tensor, shapes: Shapes, *dims: int) -> Fake:
    """A fake with a symbol for each of the dims."""
    with torch._C._DisableTorchDispatch():
        return fake_like(tensor, shapes=shapes, extent={d: shapes.symbol(tensor.shape[d], Size(Arg(0, "x"), d)) for d in dims}.get)


def _real(tensor: torch.Tensor, sizes: dict[int, int]) -> torch.Tensor:
    """A tensor of other sizes with the same order of strides, whose integers are valid indices."""
    shape = [sizes.get(n, n) for n in tensor.shape]
    make = torch.rand if tensor.is_floating_point() or tensor.is_complex() else torch.zeros
    order = sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d))
    dense = make([shape[d] for d in order], dtype=tensor.dtype)
    return dense.permute([order.index(d) for d in range(tensor.dim())]) if order else dense


def _is_usable(tensors: list[torch.Tensor]) -> bool:
    return all(t.layout == torch.strided and not t.is_conj() and t.numel() and 0 not in t.stride() for t in tensors)


def _describe(result: Any) -> list[Any]:
    tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    return [(tuple(t.size()), _meaningful(t.size(), t.stride()), str(t.dtype)) for t in tensors]


def _meaningful(size: Any, stride: Any) -> tuple[Any, ...]:
    return tuple(s if n > 1 and 0 not in size else None for n, s in zip(size, stride))


@pytest.mark.parametrize("name", SLICE)
def test_sizes_at_other_sizes(name: str) -> None:
    op = OPS[name]
    samples = list(op.sample_inputs("cpu", torch.float32))
    for sample in samples[:: max(1, len(samples) // 3)]:
        inputs = (sample.input, *sample.args)
        tensors = [t for t in tree_leaves((inputs, sample.kwargs)) if isinstance(t, torch.Tensor)]
        sizes = sorted({n for t in tensors for n in t.shape if n >= 2})
        if sizes and _is_usable(tensors):
            _check(op, inputs, sample.kwargs, sizes)


def _check(op: Any, inputs: Any, kwargs: Any, sizes: list[int]) -> None:
    shapes = Shapes()
    symbols = {n: shapes.symbol(n) for n in sizes}

    def fake(tensor: torch.Tensor) -> Fake:
        dims = {d: symbols[n] for d, n in enumerate(tensor.shape) if n >= 2}
        return fake_like(tensor, shapes=shapes, extent=dims.get)

    EVENTS.clear()
    try:
        op.op(*inputs, **kwargs)
        with FakeMode(), SymbolicCalls(lambda: None):
            args, named = tree_map_only(torch.Tensor, fake, (inputs, kwargs))
            result = op.op(*args, **named)
    except Break:
        return
    assert not EVENTS.of("warning"), "a shape rule disagrees with the kernel"
    got = [type_of(t) for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    for other in OTHER_SIZES:
        chosen = {n: other(n) for n in sizes}
        env = {symbols[n].name: chosen[n] for n in sizes}
        if not all(evaluate(a.condition, env) for a in shapes.freeze()):
            continue
        args, named = tree_map_only(torch.Tensor, lambda t: _real(t, chosen), (inputs, kwargs))  # noqa: B023
        try:
            wanted = _describe(op.op(*args, **named))
        except (RuntimeError, IndexError, ValueError):
            continue  # the op does not take these sizes, and eager will say so
        ours = []
        for kind in got:
            size = tuple(evaluate(e, env) for e in kind.shape)
            stride = tuple(evaluate(e, env) for e in kind.stride)
            ours.append((size, _meaningful(size, stride), f"torch.{kind.dtype.torch_name}"))
        assert ours == wanted


def test_linear_has_no_assumptions() -> None:
    shapes = Shapes()
    x = symbolic(torch.randn(8, 64, requires_grad=True), shapes, 0)
    weight = fake_like(torch.randn(32, 64, requires_grad=True))
    y = F.linear(x, weight).relu()
    assert str(type_of(y)) == "f32[s0, 32]"
    grads = torch.autograd.grad(y.sum(), [x, weight])
    assert [str(type_of(g)) for g in grads] == ["f32[s0, 64]", "f32[32, 64]"]
    assert [str(a.condition) for a in shapes.freeze()] == ["2 <= s0"]


def test_transformer_block() -> None:
    shapes = Shapes()
    tokens = symbolic(torch.randint(0, 30, (4, 16)), shapes, 0, 1)
    table = fake_like(torch.randn(100, 32, requires_grad=True))
    with FakeMode():
        h = F.embedding(tokens, table)
        q = h.view(h.shape[0], h.shape[1], 4, 8).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2)
        h = F.layer_norm(h + a.reshape(h.shape[0], h.shape[1], 32), (32,))
        loss = F.cross_entropy(h[:, :-1].reshape(-1, 32), tokens[:, 1:].reshape(-1))
        (grad,) = torch.autograd.grad(loss, [table])
    assert str(type_of(h)) == "f32[s0, s1, 32]" and str(type_of(grad)) == "f32[100, 32]"
    assert [str(a.condition) for a in shapes.freeze()] == ["2 <= s0", "1 < (s1 - 1)"]


def test_convolution_and_interpolation() -> None:
    shapes = Shapes()
    x = symbolic(torch.randn(2, 3, 16, 16), shapes, 0, 2, 3)
    weight = fake_like(torch.randn(8, 3, 3, 3))
    with FakeMode(), SymbolicCalls(lambda: None):
        y = F.conv2d(x, weight, stride=2, padding=1)
        assert str(type_of(y)) == "f32[s0, 8, (s1 + 1) // 2, (s2 + 1) // 2]"
        assert str(type_of(F.interpolate(x, scale_factor=2.0))) == "f32[s0, 3, 2*s1, 2*s2]"
        assert str(type_of(F.interpolate(x, scale_factor=0.5, mode="bilinear"))) == "f32[s0, 3, s1 // 2, s2 // 2]"


def test_stand_ins_take_the_names_of_what_they_stand_for() -> None:
    x, w = torch.randn(2, 3, 4), torch.randn(5, 4)

    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (F.linear(input=x, weight=w), F.linear(x, bias=None, weight=w), torch.matmul(input=x, other=w.t()),
                x.matmul(other=x.mT), F.max_pool1d(input=x, kernel_size=2), F.interpolate(input=x, scale_factor=2.0))

    compiled = dovetail.compile(f, fullgraph=True, dynamic=True, options={"fallback_to_eager": False})
    torch.testing.assert_close(compiled(x, w), f(x, w))


def test_equal_sizes_are_assumed_once() -> None:
    shapes = Shapes()
    x, y = symbolic(torch.randn(8), shapes, 0), symbolic(torch.randn(8), shapes, 0)
    z = x + y
    assert str(type_of(z)) == str(type_of(x * y + z)) == "f32[s0]"
    assert [str(a.condition) for a in shapes.freeze()] == ["2 <= s0", "s0 == s1"]


def test_an_op_without_a_rule_asks_its_kernel_with_symbols() -> None:
    shapes = Shapes()
    x = symbolic(torch.randn(6, 6), shapes, 0)
    assert str(type_of(torch.linalg.qr(x, "complete")[1])) == "f32[s0, 6]{1, s0}"
    assert str(type_of(torch.rot90(x))) == "f32[6, s0]{1, 6}"
    fixed = [a for a in shapes.assumptions if "==" in str(a.condition)]
    assert not fixed  # torch 2.11's kernel of qr compares sizes, which is no more than a bound


def test_where_the_kernel_knows_no_symbols_they_are_fixed() -> None:
    shapes = Shapes()
    x = symbolic(torch.randn(6, 6), shapes, 0)
    assert str(type_of(torch.histogram(x, 3)[0])) == "f32[3]" and str(type_of(x)) == "f32[6, 6]"
    assert any("histogram" in a.reason for a in shapes.assumptions)


def test_in_place_keeps_the_symbolic_form() -> None:
    shapes = Shapes()
    x = symbolic(torch.randn(4, 6), shapes, 0, 1)
    x.t_()
    assert str(type_of(x)) == "f32[s1, s0]{1, s1}"
    x.add_(1).unsqueeze_(0)
    assert str(type_of(x)).startswith("f32[1, s1, s0]")
    with FakeMode():
        y = torch.zeros(x.shape[1], 3)
        y[1:] = 2
    assert str(type_of(y)) == "f32[s1, 3]"


@torch.library.custom_op("dovetail_test_fake::repeat_rows", mutates_args=())
def repeat_rows(x: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat([x] * count)


@repeat_rows.register_fake
def _(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.new_empty(x.shape[0] * count, *x.shape[1:])


@torch.library.custom_op("dovetail_test_fake::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def test_custom_ops() -> None:
    shapes = Shapes()
    x = symbolic(torch.randn(4, 6), shapes, 0)
    assert str(type_of(repeat_rows(x, 3))) == "f32[3*s0, 6]" and not shapes.assumptions
    assert repeat_rows(fake_like(torch.randn(4, 6)), 2).shape == (8, 6)
    with pytest.raises(FailedFake):
        without_fake(fake_like(torch.randn(4)))
