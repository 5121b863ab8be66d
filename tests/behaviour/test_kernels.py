"""Kernel counts of named functions: what fuses into what is part of the product."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.sweeps.peers import find_peer


def count(f: Callable[..., Any], *args: Any, grad: bool = False) -> int:
    """Kernels of the compiled function, whose result is also compared with eager's."""
    peer = find_peer("dovetail")
    peer.reset()
    compiled = peer.compile(f, fullgraph=True)
    with torch.set_grad_enabled(grad):
        seen = peer.observe(lambda: compiled(*args))
        torch.testing.assert_close(seen.result, f(*args), equal_nan=True)
    return seen.kernels


X = torch.randn(32, 64)
CHANCES = X.sigmoid()
W, B = torch.randn(64, 64) / 8, torch.randn(64)


@pytest.mark.parametrize(
    ("most", "f"),
    [
        (1, lambda: torch.softmax(X, -1)),
        (1, lambda: torch.log_softmax(X * 2, 0)),
        (1, lambda: F.layer_norm(X, (64,), B, B)),
        (1, lambda: F.instance_norm(X.view(2, 16, 64), weight=B[:16], bias=B[16:32])),
        (1, lambda: F.gelu(X @ W + B)),
        (1, lambda: X * torch.rsqrt(X.pow(2).mean(-1, keepdim=True) + 1e-6) * B),
        (1, lambda: F.silu(X) * (X + 1)),
        (1, lambda: torch.where(X > 0, X, X * 2).sum(1)),
        (1, lambda: (X.t() + W[:, :32]).relu()),
        (1, lambda: torch.cat([-X[:, 32:], X[:, :32]], -1) * X),
        (2, lambda: F.cross_entropy(X, torch.arange(32))),
        (2, lambda: F.linear(F.gelu(F.linear(F.layer_norm(X, (64,)), W, B)), W, B)),
    ],
    ids=["softmax", "log_softmax_columns", "layer_norm", "instance_norm", "bias_gelu", "rms_norm", "swiglu", "where_sum", "transpose_add", "rotary", "cross_entropy", "mlp_block"],
)
def test_kernel_count(most: int, f: Callable[[], Any]) -> None:
    assert 1 <= count(f) <= most


@pytest.mark.parametrize(
    ("most", "f", "shapes"),
    [
        (2, F.prelu, [(2, 8, 5, 7), (8,)]),
        (3, F.prelu, [(40, 30), (1,)]),
        (2, lambda x: F.binary_cross_entropy(x.sigmoid(), CHANCES), [(32, 64)]),
        (2, lambda x: F.binary_cross_entropy(x.sigmoid(), CHANCES, reduction="none"), [(32, 64)]),
    ],
    ids=["prelu", "prelu_of_one", "binary_cross_entropy", "binary_cross_entropy_of_each"],
)
def test_gradients_are_kernels(most: int, f: Callable[..., Any], shapes: list[tuple[int, ...]]) -> None:
    peer, args = find_peer("dovetail"), [torch.randn(shape).requires_grad_() for shape in shapes]
    peer.reset()
    compiled, want = peer.compile(f, fullgraph=True), f(*args)
    slope = torch.randn_like(want)
    seen = peer.observe(lambda: torch.autograd.grad(compiled(*args), args, slope))
    torch.testing.assert_close(seen.result, torch.autograd.grad(want, args, slope))
    assert seen.kernels <= most and not any("backward" in op for op in seen.fallbacks)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: F.elu(x, 1.3),
        lambda x: F.selu(x, inplace=False),
        F.logsigmoid,
        lambda x: F.huber_loss(x, x.detach().flip(0), reduction="none", delta=0.7),
        lambda x: torch.logaddexp(x, x.detach().flip(0)),
        lambda x: torch.xlogy(x, x.detach().flip(0).abs() + 0.5),
    ],
    ids=["elu", "selu", "logsigmoid", "huber_loss", "logaddexp", "xlogy"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_activations_and_losses_are_kernels(f: Callable[..., Any], dtype: torch.dtype) -> None:
    special = torch.tensor([0.0, -0.0, 30.0, -30.0, 100.0, -100.0, float("inf"), -float("inf"), float("nan")])
    x = torch.cat([torch.randn(91) * 3, special])
    own, other = (x.to(dtype).requires_grad_() for _ in range(2))
    if f is not F.logsigmoid or dtype is not torch.bfloat16:
        assert count(f, own, grad=True) >= 1
    compiled = find_peer("dovetail").compile(f, fullgraph=True)
    slope = torch.randn(100).to(dtype)
    f(own).backward(slope)
    compiled(other).backward(slope)
    torch.testing.assert_close(other.grad, own.grad, equal_nan=True)


@pytest.mark.parametrize(("m", "k", "n"), [(1, 8, 8), (16, 10, 1), (3, 37, 5), (1, 64, 64), (4, 16, 16)])
def test_tiny_products_are_kernels(m: int, k: int, n: int) -> None:
    x, w, bias = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
    turned = torch.randn(k, m).t()
    assert count(lambda: F.linear(x, w, bias).relu()) == 1
    assert count(lambda: (turned @ w.t(), torch.tanh(turned) @ w.t() * 2)) >= 1
    assert count(lambda: x[None] @ w.t().contiguous()[None] + 1) == 1
    layer = torch.nn.Linear(k, n)
    layer(x).square().sum().backward()
    own = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    compiled = find_peer("dovetail").compile(lambda x: layer(x).square().sum(), fullgraph=True)
    compiled(x).backward()
    torch.testing.assert_close([p.grad for p in layer.parameters()], own)


def test_large_products_stay_with_the_library() -> None:
    assert count(lambda: X @ W) == 0
    assert count(lambda: X[:16, :16] @ W[:16, :16].t()) == 0
    assert count(lambda: X[:16, :16] @ W[:16, :16]) == 1


def test_adam_update_of_ten_parameters_is_fused() -> None:
    ps, gs = [torch.randn(64) for _ in range(10)], [torch.randn(64) for _ in range(10)]

    def update(ps: list[torch.Tensor], gs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [p - 0.1 * (g * 0.1) / ((g * g * 0.001).sqrt() + 1e-8) for p, g in zip(ps, gs, strict=True)]

    assert 1 <= count(update, ps, gs) <= 2


def test_attention_makes_no_extra_copies() -> None:
    q = torch.randn(2, 8, 4, 16)

    def attend(q: torch.Tensor) -> torch.Tensor:
        heads = q.transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2)

    assert count(attend, q) == 0
