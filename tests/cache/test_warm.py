"""A second compile of the same graph, in this process or the next, skips to the program."""

from __future__ import annotations

import pytest
import torch

import dovetail
from dovetail.cache.store import store_in
from dovetail.events import EVENTS


def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ w, -1) * 2


def g(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    product = a @ b
    return torch.softmax(product, -1) * 2


def stages_run() -> set[str]:
    return {str(event["stage"]) for event in EVENTS.of("stage")}


@pytest.fixture(autouse=True)
def unwatched(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.delenv("DOVETAIL_CHECK", raising=False)
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    store_in.cache_clear()


@pytest.mark.parametrize("is_new_process", [False, True])
def test_known_graphs_skip_to_their_program(is_new_process: bool) -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 16, requires_grad=True)
    dovetail.reset()
    dovetail.compile(f)(x, w).sum().backward()
    assert "60.schedule" in stages_run()
    expected, w.grad = w.grad, None
    if is_new_process:
        store_in.cache_clear()
    for fn in (f, g):  # other names and lines, the same graph
        dovetail.reset()
        result = dovetail.compile(fn)(x, w)
        torch.testing.assert_close(result, f(x, w))
        result.sum().backward()
        torch.testing.assert_close(w.grad, expected)
        w.grad = None
        assert "60.schedule" not in stages_run() and "90.executable" in stages_run()


def test_other_sizes_options_and_reports_run_every_stage() -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 16)
    dovetail.compile(f)(x, w)
    for settings, rows in (({"dynamic": False}, 5), ({"options": {"fuse": False}}, 4), ({"options": {"cache": False}}, 4)):
        dovetail.reset()
        torch.testing.assert_close(dovetail.compile(f, **settings)(torch.ones(rows, 8), w), f(torch.ones(rows, 8), w))
        assert "60.schedule" in stages_run(), settings
    dovetail.reset()
    assert dovetail.explain(f)(x, w).fusions
