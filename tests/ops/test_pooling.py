"""Pooling as shifted slices: values, positions, edges and gradients as in eager."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dovetail
from dovetail.ops import decompose
from tests.lower.test_lower import externs, nests
from tests.ops.tracing import check_call, loops_of, traced

SHAPES = [
    dict(kernel_size=3, stride=2, padding=1),
    dict(kernel_size=2),
    dict(kernel_size=2, ceil_mode=True),
    dict(kernel_size=3, stride=1, padding=1),
    dict(kernel_size=3, stride=2, ceil_mode=True),
    dict(kernel_size=(2, 3), stride=(1, 2), padding=(1, 1), ceil_mode=True),
]  # fmt: skip


def image(dtype: torch.dtype = torch.float32, channels_last: bool = False) -> torch.Tensor:
    x = torch.randn(2, 3, 9, 11).to(dtype)
    return x.to(memory_format=torch.channels_last) if channels_last else x


def pool_max(x, *, stride=None, **how):
    return F.max_pool2d(x, stride=stride, return_indices=True, **how)


@pytest.mark.parametrize("how", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_maximum(how, dtype):
    check_call(pool_max, image(dtype), **how)
    check_call(pool_max, image(dtype)[0], **how)
    check_call(lambda x: pool_max(x, **how)[0], image(dtype, channels_last=True))


def test_dilated_maximum():
    check_call(pool_max, image(), kernel_size=2, stride=1, dilation=2)
    check_call(pool_max, image(), kernel_size=3, padding=1, dilation=2)


def test_positions_of_special_values():
    infinite = torch.full((1, 1, 6, 6), -torch.inf)
    check_call(pool_max, infinite, kernel_size=3, stride=2, padding=1)
    infinite[0, 0, 3, 3] = torch.nan
    check_call(lambda x: pool_max(x, kernel_size=3, stride=2, padding=1)[0], infinite)
    check_call(pool_max, torch.ones(1, 1, 6, 6), kernel_size=3, stride=1, padding=1)


@pytest.mark.parametrize("how", SHAPES, ids=str)
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("divisor", [None, 5])
def test_average(how, include, divisor):
    options = dict(count_include_pad=include, divisor_override=divisor)
    for channels_last in (False, True):
        check_call(F.avg_pool2d, image(channels_last=channels_last), **how, **options)


def test_other_ranks_and_adaptive():
    check_call(F.max_pool3d, torch.randn(1, 2, 4, 6, 4), 2, return_indices=True)
    check_call(F.avg_pool3d, torch.randn(1, 2, 4, 6, 4), 2, 2, 1)
    check_call(F.max_pool1d, torch.randn(1, 2, 9), 3, 2, 1)
    check_call(F.avg_pool1d, torch.randn(1, 2, 9), 3, 2, 1)
    for size in ((2, 3), (3, 3), 1):
        check_call(F.adaptive_avg_pool2d, torch.randn(1, 2, 4, 6), size)
    check_call(F.adaptive_max_pool2d, torch.randn(1, 2, 4, 6), (2, 3), return_indices=True)


def test_a_costly_value_is_made_once_before_it_is_read_in_windows():
    loops = loops_of(lambda x: F.max_pool2d(torch.exp(x), 3, 2, 1), torch.randn(1, 2, 64, 64))
    assert not externs(loops) and len(nests(loops)) == 3  # exp; the first column; the others
    loops = loops_of(lambda x: F.avg_pool2d(torch.exp(x), 2), torch.randn(1, 2, 64, 64))
    assert len(nests(loops)) == 1  # windows side by side read each value once


def test_positions_with_channels_innermost_are_the_librarys():
    graph, _, _ = traced(pool_max, image(channels_last=True), kernel_size=3)
    assert "aten.max_pool2d_with_indices.default" in [node.op for node in decompose(graph).nodes]


@pytest.mark.parametrize("pool", [
    lambda x: F.max_pool2d(x, 3, 2, 1),
    lambda x: F.max_pool2d(torch.tanh(x), 5, 1, 2),
    lambda x: F.avg_pool2d(x, 2),
    lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
    lambda x: F.avg_pool2d(x, 3, 2, 1),
    lambda x: F.adaptive_avg_pool2d(x, (4, 20)),
])  # fmt: skip
def test_compiled_with_gradients(pool):
    for memory in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 3, 16, 40).to(memory_format=memory)
        mine, eagers = x.clone().requires_grad_(), x.clone().requires_grad_()
        got, want = dovetail.compile(lambda x: pool(x))(mine), pool(eagers)
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()
        weight = torch.randn_like(want)
        got.backward(weight)
        want.backward(weight)
        torch.testing.assert_close(mine.grad, eagers.grad)


def test_symbolic_sizes():
    def pools(x):
        return F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), F.avg_pool2d(x, 2)

    compiled = dovetail.compile(pools, dynamic=True)
    for height, width in ((16, 40), (17, 35), (9, 9), (50, 20)):
        x = torch.randn(2, 3, height, width)
        for got, want in zip(compiled(x), pools(x), strict=True):
            torch.testing.assert_close(got, want)
