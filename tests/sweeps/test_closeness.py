"""The error model itself: it must reject what is wrong and accept what is as good as eager."""
from __future__ import annotations

import torch

from tests.sweeps.closeness import to_exact, why_not_close


def test_accepts_another_order_of_summation() -> None:
    x = torch.randn(64, 1000)
    assert why_not_close(x.flip(-1).sum(-1), x.sum(-1), lambda: x.double().sum(-1)) is None


def test_rejects_lost_precision() -> None:
    x = torch.randn(64, 1000)
    rough = x.half().float().sum(-1)
    assert "error" in str(why_not_close(rough, x.sum(-1), lambda: x.double().sum(-1)))


def test_doubles_are_judged_by_their_neighbours() -> None:
    x = torch.randn(64, 1000, dtype=torch.float64)
    exact = lambda: to_exact(x).sum(-1)
    assert why_not_close(x.flip(-1).sum(-1), x.sum(-1), exact) is None
    assert "error" in str(why_not_close(x.sum(-1) * (1 + 40 * 2**-52), x.sum(-1), lambda: to_exact(x.sum(-1))))


def test_rejects_metadata() -> None:
    x = torch.randn(4, 4)
    assert "dtype" in str(why_not_close(x.double(), x, None))
    assert "shape" in str(why_not_close(x[:2], x, None))
    assert "structure" in str(why_not_close([x], (x,), None))
    assert "stride" in str(why_not_close(x.t().contiguous().t(), x, None, check_strides=True))
    assert "instead of" in str(why_not_close(3, 4, None))


def test_nan_and_infinity_must_match() -> None:
    x = torch.tensor([1.0, float("nan"), float("inf")])
    assert why_not_close(x.clone(), x, None) is None
    assert why_not_close(torch.tensor([1.0, 0.0, float("inf")]), x, lambda: x.double()) is not None
    assert why_not_close(torch.tensor([1.0, float("nan"), -float("inf")]), x, lambda: x.double()) is not None


def test_exact_inputs_are_double() -> None:
    wide = to_exact({"x": torch.ones(2, requires_grad=True), "n": 3, "d": torch.float32})
    assert wide["x"].dtype is torch.float64 and wide["x"].requires_grad and wide["n"] == 3 and wide["d"] is torch.float64
