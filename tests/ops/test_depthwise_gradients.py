"""Gradients of depthwise filters larger than 3 by 3 are sums of ours, as many to a kernel as the filter is wide."""
from __future__ import annotations

import pytest
import torch

import dovetail
from dovetail.events import EVENTS

CASES = {
    "plain": (32, 12, 5, 1, 2, 1), "strided": (48, 13, 5, 2, 2, 1), "dilated": (16, 14, 5, 1, 3, 2),
    "unpadded": (16, 9, 7, 1, 0, 1), "uneven": (20, 11, 4, 3, 1, 1), "wide": (16, 20, 11, 1, 5, 1),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_gradients(case: str) -> None:
    channels, size, taps, stride, padding, dilation = CASES[case]
    dovetail.reset()
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(channels, channels, taps, stride, padding, dilation, channels)
    x = torch.randn(3, channels, size, size + 1, requires_grad=True)
    leaves = [x, *conv.parameters()]
    want = torch.autograd.grad(conv(x).square().sum(), leaves)
    compiled = dovetail.compile(conv, options={"fallback_to_eager": False})
    got = torch.autograd.grad(compiled(x).square().sum(), leaves)
    for a, b in zip(got, want, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
    sums = [event.fields["text"].count(" = sum(mul(") for event in EVENTS.of("kernel")]
    assert max(sums) == taps, sums


def test_filters_that_the_library_is_fast_with_are_left_to_it() -> None:
    dovetail.reset()
    conv, x = torch.nn.Conv2d(32, 32, 3, padding=1, groups=32), torch.randn(2, 32, 8, 8)
    dovetail.compile(conv)(x).sum().backward()
    assert not any(" = sum(mul(" in event.fields["text"] for event in EVENTS.of("kernel"))
