"""Remainders and shrinking, whose kernels are ours: bit for bit eager's."""

import operator

import pytest
import torch
import torch.nn.functional as F

import dovetail
from dovetail.events import EVENTS

ODD = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, -1.0, 3.0, 0.5, 0.1, -0.7, 6.0, 1e30, 4194304.0, 16777217.0, -2e-3])  # fmt: skip
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def check_same(fn, *inputs):
    before = len(EVENTS.of("fallback"))
    with torch.no_grad():
        wanted, got = fn(*inputs), dovetail.compile(fn, fullgraph=True)(*inputs)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
    is_number = ~wanted.isnan()
    assert torch.equal(got.signbit()[is_number], wanted.signbit()[is_number])
    assert len(EVENTS.of("fallback")) == before


@pytest.mark.parametrize("dtype", FLOATS[:2])
@pytest.mark.parametrize("fn", [torch.remainder, torch.fmod, operator.floordiv])
def test_of_all_pairs_of_odd_numbers(fn, dtype):
    x, y = torch.cartesian_prod(ODD, ODD).to(dtype).unbind(1)
    check_same(fn, x.contiguous(), y.contiguous())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("by", [0.7, -0.7, 0.1, 2.0, 1e-6])
def test_by_a_number(by, dtype):
    x = torch.cat([torch.randn(500) * 30, torch.arange(-50, 50) * 0.1, torch.arange(-50, 50).float()]).to(dtype)
    for fn in (torch.remainder, torch.fmod, operator.floordiv):
        check_same(lambda x, fn=fn: fn(x, by), x)


def test_of_quotients_next_to_whole_numbers():
    y = torch.rand(20_000) + 0.5
    x = y * torch.randint(1, 4_000_000, (20_000,))
    for near in (x, x.nextafter(torch.tensor(0.0)), x.nextafter(torch.tensor(torch.inf))):
        check_same(torch.remainder, near, y)
        check_same(torch.fmod, -near, y)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("fn", [F.softshrink, F.hardshrink])
@pytest.mark.parametrize("by", [0.5, 0.3, 0.0])
def test_shrinking(fn, by, dtype):
    x = torch.cat([torch.randn(32 * 31), ODD[:5], torch.tensor([by, -by] * 6), torch.randn(15)]).to(dtype)
    check_same(lambda x: fn(x, by), x)
    grads = []
    for run in (fn, dovetail.compile(fn)):
        leaf = x.clone().requires_grad_()
        run(leaf, by).backward(torch.ones_like(x))
        grads.append(leaf.grad)
    assert torch.equal(*grads)
