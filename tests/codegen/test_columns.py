"""Reductions over rows of memory in several passes, by tiles and among threads, no farther from fp64 than eager."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dovetail
from dovetail.events import EVENTS


def normalise(x: torch.Tensor) -> Any:
    mean, variance = x.mean(0), x.var(0, unbiased=False)
    return (x - mean) * torch.rsqrt(variance + 1e-5), mean, variance


def in_turn(x: torch.Tensor) -> Any:
    total = x.sum(0)
    squares = (x * x).sum(0)
    return x * total + squares, total


def by_truth(x: torch.Tensor) -> Any:
    return torch.where((x > 2).any(0), x, -x), x - x.amax(0)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def check(run: Callable[..., Any], x: torch.Tensor) -> None:
    dovetail.reset()
    compiled = dovetail.compile(run, options={"fallback_to_eager": False})
    got, want, exact = (torch.utils._pytree.tree_leaves(y) for y in (compiled(x), run(x), run(x.double())))
    for a, b, c in zip(got, want, exact, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        error, eager = ((y.double() - c.double()).abs().max() for y in (a, b))
        assert error <= max(4 * eager, 2e-6 * c.double().abs().max())


@pytest.mark.parametrize("shape", [(300, 7), (70, 2100), (513, 1030), (9000, 40)])
@pytest.mark.parametrize("run", [normalise, in_turn, by_truth])
def test_passes_over_columns(threads: None, run: Callable[..., Any], shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    check(run, torch.randn(shape))


@pytest.mark.parametrize("shape", [(8, 64, 14, 14), (3, 33, 9, 11), (2, 1100, 8, 8)])
def test_batch_norm_on_channels_last_images(threads: None, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).to(memory_format=torch.channels_last)
    check(lambda x: F.batch_norm(x, None, None, training=True), x)
    check(lambda x: x[:, :, ::2] - x[:, :, ::2].mean((0, 2, 3), keepdim=True), x)


def test_rows_are_read_in_their_own_order() -> None:
    EVENTS.clear()
    check(normalise, torch.randn(4096, 64))
    text = "\n".join(str(event["text"]) for event in EVENTS.of("kernel"))
    assert "_block" in text and "row" in text


HARD = {
    "far from zero": lambda x: x * 1e-2 + 1e3,
    "first row far away": lambda x: x.index_fill(0, torch.tensor([0]), 1e3),
    "first rows far away": lambda x: torch.cat([x[:256] + 1e4, x[256:]]),
    "constant": lambda x: x * 0 + 1234.567,
}


@pytest.mark.parametrize("kind", HARD)
def test_variances_in_one_pass(threads: None, kind: str) -> None:
    x = HARD[kind](torch.randn(3000, 100, generator=torch.Generator().manual_seed(0)))
    var, mean = dovetail.compile(lambda x: torch.var_mean(x, 0))(x)
    exact_var, exact_mean = torch.var_mean(x.double(), 0)
    torch.testing.assert_close(var.double(), exact_var, rtol=3e-6, atol=0)
    torch.testing.assert_close(mean.double(), exact_mean, rtol=3e-6, atol=0)


def test_variances_of_what_the_same_pass_writes(threads: None) -> None:
    """Where distances are measured from comes from the first row, which is in no memory yet."""
    def run(x: torch.Tensor) -> Any:
        y = x + 1
        return y, y.var(0)

    x, compiled = torch.randn(256, 64), dovetail.compile(run)
    for _ in range(3):
        torch.full((256, 64), torch.nan)  # what freed memory holds
        torch.testing.assert_close(compiled(x)[1], run(x)[1])


def angles(x: torch.Tensor) -> Any:
    return x - x.mean(-1, keepdim=True), torch.acos((x * x.flip(-1)).sum(-1).tanh())


SHORT_ROWS: dict[str, Callable[..., Any]] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "entropy": lambda x: -(torch.softmax(x, -1) * torch.log_softmax(x, -1)).sum(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "deviation": lambda x: (x.std(-1), x.var(-1, unbiased=False)),
    "extremes": lambda x: (x.amax(-1), x.amin(-1), x.sum(-1), x.prod(-1)),
    "distances": lambda x: (x[None, :50] - x[:, None]).square().sum(-1).add(0.1) ** -1.5,
    "angles": angles,
}


@pytest.mark.parametrize("width", [2, 3, 5, 10])
@pytest.mark.parametrize("name", SHORT_ROWS)
def test_short_rows_side_by_side(name: str, width: int) -> None:
    torch.manual_seed(0)
    check(SHORT_ROWS[name], torch.randn(77, width))
    check(SHORT_ROWS[name], torch.randn(width, 77).t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.uint8])
@pytest.mark.parametrize("width", [2, 3, 7])
def test_positions_and_values_in_short_rows(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(200, width) * 3).to(dtype)
    if dtype.is_floating_point:
        x[::9, -1] = torch.nan
        x[4::9, 0] = -torch.inf

    def run(x: torch.Tensor) -> Any:
        return x.argmax(-1), x.argmin(-1), x.amax(-1), x.amin(-1), (x > 1).any(-1), (x > -1).all(-1), x.cumsum(-1)

    for got, want in zip(dovetail.compile(run, options={"fallback_to_eager": False})(x), run(x), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_short_rows_need_no_reduction_within_a_vector() -> None:
    EVENTS.clear()
    dovetail.reset()
    dovetail.compile(lambda x: torch.logsumexp(x, -1), options={"cache": False})(torch.randn(100, 3))
    (kernel,) = EVENTS.of("kernel")
    assert "turned<" not in kernel["text"].partition('extern "C" void logsumexp')[2]


def test_a_recurrence_and_its_gradient_compile_quickly() -> None:
    def run(x: torch.Tensor, decay: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        state, states = torch.zeros(8, 32), []
        for t in range(32):
            state = torch.sigmoid(decay) * state + gain * x[:, t]
            states.append(state)
        return torch.stack(states, 1)

    EVENTS.clear()
    dovetail.reset()
    inputs = [torch.randn(8, 64, 32), torch.randn(32), torch.randn(32)]
    inputs = [value.requires_grad_() for value in inputs]
    got = torch.autograd.grad(dovetail.compile(run, options={"cache": False})(*inputs).sum(), inputs)
    torch.testing.assert_close(got, torch.autograd.grad(run(*inputs).sum(), inputs), rtol=1e-4, atol=1e-4)
    for kernel in EVENTS.of("kernel"):  # several of these together take g++ seconds
        assert kernel["text"].count('_Pragma("GCC unroll 16") for (int l = 0; l < left') <= 4
