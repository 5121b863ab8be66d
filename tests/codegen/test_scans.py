"""Running sums are loops of ours: along vectors, across them, with what comes before in the same kernel."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dovetail
from dovetail.events import EVENTS

SHAPES = [((7,), 0), ((3, 40), 1), ((33, 40), 0), ((3, 5, 33), 1), ((2, 3, 1, 17), 2), ((70, 1000), -1), ((4, 0), 1)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool, torch.uint8]


def check(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> int:
    """The number of kernels."""
    dovetail.reset()
    got = dovetail.compile(run, options={"fallback_to_eager": False})(x)
    want = run(x)
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    if not want.is_floating_point():
        assert torch.equal(got, want)
    elif want.numel():
        exact = run(x.double())
        assert (got - exact).abs().max() <= (want - exact).abs().max() * 1.01 + 1e-12
    return len(EVENTS.of("kernel"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_running_sums(dtype: torch.dtype) -> None:
    for shape, dim in SHAPES:
        x = (torch.randn(shape) * 3).to(dtype)
        assert check(lambda x, dim=dim: x.cumsum(dim), x) <= 1


def test_what_is_added_up_is_computed_on_the_way() -> None:
    x = torch.randn(33, 64)
    assert check(lambda x: (x.t() * 2 + 1).cumsum(1), x) == 1
    assert check(lambda x: x.flip(1).cumsum(1).flip(1), x) == 2


def test_sizes_known_when_called() -> None:
    run = dovetail.compile(lambda x: (x * 0.5).cumsum(-1), dynamic=True, options={"fallback_to_eager": False})
    for size in (5, 64, 129):
        x = torch.randn(3, size)
        torch.testing.assert_close(run(x), (x * 0.5).cumsum(-1))


def test_gradients() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return (x.cumsum(1) * x).sum()

    x = torch.randn(4, 50, requires_grad=True)
    (want,) = torch.autograd.grad(run(x), x)
    (got,) = torch.autograd.grad(dovetail.compile(run)(x), x)
    torch.testing.assert_close(got, want)
