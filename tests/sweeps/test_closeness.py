"""The error model itself: it must reject what is wrong and accept what is as good as eager."""
from __future__ import annotations

import copy

import torch

from tests.sweeps.closeness import DrawsInSingle, to_exact, why_not_close
from tests.sweeps.models import is_as_far, run_exact, train_once


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


def test_random_numbers_in_double_are_those_of_single() -> None:
    draws = (lambda: torch.rand(5, 7), lambda: torch.randn(5, 7), lambda: torch.empty(5, 7).uniform_(), lambda: torch.rand_like(torch.ones(9)),
             lambda: torch.nn.Linear(5, 7).weight.detach(), lambda: torch.nn.Linear(5, 7).bias.detach())
    for draw in draws:
        torch.manual_seed(0)
        single = draw()
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        try:
            with DrawsInSingle():
                double = draw()
        finally:
            torch.set_default_dtype(torch.float32)
        assert double.dtype is torch.float64 and torch.equal(single.double(), double)


def test_rounding_decides_less_than_a_wrong_gradient() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    inputs, exact_model = {"x": torch.randn(16, 8)}, copy.deepcopy(model)
    eager = train_once(model, model, inputs)
    exact = lambda: run_exact(train_once, exact_model, inputs)
    assert is_as_far([t * (1 + 2**-24) for t in eager], train_once, model, inputs, eager, exact)
    for i in range(1, len(eager)):
        got = [t * 1.01 + 1e-6 if i == j else t for j, t in enumerate(eager)]
        assert not is_as_far(got, train_once, model, inputs, eager, exact), i


def test_a_model_that_casts_to_single_has_a_version_in_double() -> None:
    class Casts(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.float().to(torch.float32))

    model = Casts(3, 4)
    exact = run_exact(train_once, copy.deepcopy(model), {"x": torch.randn(2, 3)})
    assert exact[0].dtype is torch.float64 and exact[1].dtype is torch.float64
