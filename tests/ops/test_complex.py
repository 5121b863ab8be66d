"""Complex numbers are computed as pairs of reals; library calls get them, and give them, as eager lays them out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail

GAPS: dict[str, Callable[..., Any]] = {
    "diagonals": torch.diag_embed,
    "pieces": lambda x: torch.stack([x, x * 2]),
    "columns": lambda x: torch.cat([x.mT, x.mT * 2], 1),
}


@pytest.mark.parametrize("name", GAPS)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.float32])
def test_gradients_with_gaps_between_their_elements(name: str, dtype: torch.dtype) -> None:
    inputs = [torch.randn(4, 5, dtype=dtype, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in "ab"]
    compiled = dovetail.compile(GAPS[name], options={"fallback_to_eager": False})
    for fn, x in zip((compiled, GAPS[name]), inputs):
        fn(x).abs().square().sum().backward()
    got, wanted = (x.grad for x in inputs)
    torch.testing.assert_close(got, wanted)
    assert got is not None and wanted is not None and got.stride() == wanted.stride()


def rotary(z: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """As Meta's Llama does it."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    turns = torch.polar(torch.ones_like(x[:, :2]), x[:, :2])
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


def escape(z: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    steps = torch.zeros_like(x)
    for _ in range(4):
        z = z * z + w
        steps = steps + (z.abs() < 2)
    return steps + z.real


def written(z: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = z * 2
    y[:1] = w[:1]
    y[:, 2] *= x[0]
    return y.detach() if x.dtype is torch.float64 else y


COMPUTED: dict[str, Callable[..., Any]] = {
    "rotary": rotary,
    "escape": escape,
    "arithmetic": lambda z, w, x: (z + w * 2 - x) * w / z - 3 / (w + 2j) + (x - z) * 1j,
    "of_a_scalar": lambda z, w, x: (z * 2 + 1) / 4 - (1 - z) * (1 + 2j) + w.mean() * x[0, 0],
    "promoted": lambda z, w, x: (z.to(torch.complex128) * w, z + x.double(), x.long() * w, x.to(torch.complex64)),
    "polar": lambda z, w, x: torch.polar(z.abs(), w.angle()) + torch.complex(x, z.imag) + torch.exp(w) + torch.log(z),
    "conjugates": lambda z, w, x: (z.conj() * w, z.conj().imag * x, -z.conj(), z.mH + w, w.conj().real * x),
    "powers": lambda z, w, x: z**2 + w**3 + z.square() + w.reciprocal() + z.sgn(),
    "compared": lambda z, w, x: (z == w, z != z.real, torch.where(z == w, w, z), z.eq(2j)),
    "views": lambda z, w, x: torch.cat([z.t()[1:], w.view(4, 4).permute(1, 0).flip(0)]).reshape(-1, 2).unsqueeze(1) * 2,
    "pieces": lambda z, w, x: torch.stack([z[0], w[:, 1], x[2]]).expand(2, 3, 4).sum(1) + z.chunk(2)[1],
    "sums": lambda z, w, x: (z.sum(), w.mean(1), (z * x).sum(0, keepdim=True)),
    "made": lambda z, w, x: torch.ones_like(z) + torch.full_like(x, 2j, dtype=z.dtype) + torch.zeros(4, 4, dtype=z.dtype) * z,
    "filled": lambda z, w, x: z.masked_fill(x > 0, 1 - 1j) + torch.tril(w) + torch.nn.functional.pad(z[1:], (0, 0, 1, 0)),
    "written": written,
    "the_other_form": lambda z, w, x: torch.view_as_real(z * w)[..., 1] + torch.view_as_complex(torch.stack([x, x + 1], -1)),
}
AROUND_CALLS: dict[str, Callable[..., Any]] = {
    "running_sum": lambda z, w, x: (z * x).cumsum(0) * w,
    "picked": lambda z, w, x: z[torch.tensor([2, 0])] + w.index_select(0, torch.tensor([1, 3])) * x[0],
    "filter": lambda z, w, x: torch.fft.irfft(torch.fft.rfft(x) * w[:, :3].conj(), n=4),
    "product": lambda z, w, x: (z @ w.mH * 2).t() @ (x + z),
    "shown_as_reals": lambda z, w, x: torch.view_as_real(torch.fft.fft(z))[..., 0].sort().values @ x,
    "shown_as_complex": lambda z, w, x: torch.fft.fft(torch.view_as_complex(x.reshape(4, 2, 2))) * 2,
    "seen_twice": lambda z, w, x: (lambda y: (torch.fft.fft(y), y.t(), y * 2))(z * w),
}


def outcome(fn: Callable[..., Any], dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    torch.manual_seed(0)
    inputs = [torch.randn(4, 4, dtype=kind, requires_grad=True) for kind in (dtype, dtype, dtype.to_real())]
    made = fn(*inputs)
    results = list(made) if isinstance(made, tuple) else [made]
    heads = [(y * y.conj()).real.sum() for y in results if y.requires_grad]
    if heads:
        torch.stack(heads).sum().backward()
    return [y.detach() for y in results], [x.grad for x in inputs]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("name", [*COMPUTED, *AROUND_CALLS])
def test_programs_give_eagers_numbers(name: str, dtype: torch.dtype, dynamic: bool) -> None:
    fn = {**COMPUTED, **AROUND_CALLS}[name]
    dovetail.reset()
    compiled = dovetail.compile(fn, dynamic=dynamic, fullgraph=True, options={"fallback_to_eager": False})
    (got, grads), (wanted, wanted_grads) = outcome(compiled, dtype), outcome(fn, dtype)
    for a, b in zip([*got, *grads], [*wanted, *wanted_grads]):
        torch.testing.assert_close(a, b)
        assert a is None or b is None or a.stride() == b.stride()
    if name in COMPUTED:
        assert dovetail.stats()["fallbacks"] == 0


def test_numbers_that_change_from_call_to_call() -> None:
    def f(z: torch.Tensor, n: float, k: int) -> torch.Tensor:
        return (z[k:] * n + k) / n - z.masked_fill(z == n, k)[: z.shape[0] - k]

    compiled = dovetail.compile(f, dynamic=True, options={"fallback_to_eager": False})
    for n, k in ((0.5, 2), (1.5, 3), (2.5, 4)):
        z = torch.randn(8, 3, dtype=torch.complex64)
        torch.testing.assert_close(compiled(z, n, k), f(z, n, k))


PARTS = [0.0, 1.0, -2.0, math.inf, -math.inf, math.nan, 1e30, 1e-30, 3e38]
SPECIAL: dict[str, Callable[..., torch.Tensor]] = {
    "product": lambda z, w: z * w,
    "product_with_reals": lambda z, w: z * w.real,
    "product_with_a_number": lambda z, w: z * 2 + 1,
    "abs": lambda z, w: z.abs(),
    "angle": lambda z, w: z.angle(),
    "reciprocal": lambda z, w: z.reciprocal(),
    "cube": lambda z, w: z**3,
    "polar": lambda z, w: torch.polar(z.real, w.real),
    "quotient": lambda z, w: torch.where(w == 0, w, z / w),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_what_is_infinite_or_no_number_is_as_in_eager(name: str) -> None:
    z = torch.tensor([complex(re, im) for re in PARTS for im in PARTS])
    inputs = z.repeat_interleave(len(z)), z.repeat(len(z))
    got, wanted = dovetail.compile(SPECIAL[name])(*inputs), SPECIAL[name](*inputs)
    torch.testing.assert_close(got, wanted, equal_nan=True, atol=0.0, rtol=1e-5)


def test_views_of_memory_are_not_copied() -> None:
    def f(z: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        turned = torch.fft.fft(z.t())
        return turned, torch.fft.fft(torch.view_as_complex(x)), torch.view_as_real(turned)[..., 1].sort().values

    dovetail.reset()
    inputs = torch.randn(8, 4, dtype=torch.complex64), torch.randn(8, 2)
    for got, wanted in zip(dovetail.compile(f)(*inputs), f(*inputs)):
        torch.testing.assert_close(got, wanted)
    assert dovetail.stats()["kernels"] == 0


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("adjoint", [True, False])
def test_a_result_that_torch_conjugates_lazily(left: bool, adjoint: bool) -> None:
    """Kernels read memory, where it has other numbers."""
    factors, pivots = torch.linalg.lu_factor(torch.randn(3, 3, dtype=torch.complex64))

    def solve(factors: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.linalg.lu_solve(factors, pivots, b, left=left, adjoint=adjoint) * 2 + b

    b = torch.randn(3, 3, dtype=torch.complex64)
    torch.testing.assert_close(dovetail.compile(solve)(factors, b), solve(factors, b))


@pytest.mark.parametrize("groups", [1, 3])
def test_convolution_of_complex_images(groups: int) -> None:
    """Their parts run channels-last, what is made of those does not."""
    weight = torch.randn(3, 3 // groups, 3, 3, dtype=torch.complex64)

    def run(images: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(images, weight, padding=1, groups=groups).exp() * 2

    images = torch.randn(2, 3, 6, 6, dtype=torch.complex64)
    options = {"fallback_to_eager": False}
    torch.testing.assert_close(dovetail.compile(run, options=options)(images, weight), run(images, weight))
