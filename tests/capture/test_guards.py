"""What a capture assumed is checked at the next call, and nothing of the user's is held on to."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

import dovetail
from dovetail.capture import Frame, capture_frame
from dovetail.options import Options


def check(fn: Any, *calls: tuple[Any, ...]) -> None:
    """Each call in turn, compiled and plain, on equal arguments."""
    compiled = dovetail.compile(fn, backend="eager")
    for args in calls:
        copies = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
        if len(args) == 2 and args[0] is args[1]:
            copies[1] = copies[0]
        torch.testing.assert_close(compiled(*args), fn(*copies))


def test_arguments_that_become_one_tensor() -> None:
    def f(a: Any, b: Any) -> Any:
        a.add_(1)
        return b * 2

    same = torch.ones(3)
    check(f, (torch.ones(3), torch.ones(3)), (same, same))


def test_identity_of_arguments() -> None:
    def f(a: Any, b: Any) -> Any:
        return a + 1 if a is b else b + 2

    same = torch.ones(3)
    check(f, (torch.ones(3), torch.ones(3)), (same, same), (torch.ones(3), torch.ones(3)))


def test_lists_that_become_one_list() -> None:
    def f(xs: list[Any], ys: list[Any]) -> Any:
        xs.append(torch.ones(2))
        return torch.tensor(float(len(ys)))

    compiled = dovetail.compile(f, backend="eager")
    assert compiled([], []) == 0
    same: list[Any] = []
    assert compiled(same, same) == 1


def test_capture_holds_nothing() -> None:
    class Holder:
        scale = 2.0

    def f(x: Any, holder: Any) -> Any:
        return x * holder.scale

    holder, x = Holder(), torch.ones(3)
    seen = weakref.ref(holder)
    gc.disable()
    try:
        frame = Frame(f.__code__, f, f.__globals__, (x, holder))
        captured = capture_frame(frame, Options())
        del frame, holder
        assert seen() is None, gc.get_referrers(seen())
        assert captured.graph is not None
    finally:
        gc.enable()


def test_dynamic_guard_on_sizes() -> None:
    def f(x: Any) -> Any:
        return x.reshape(2, -1) + x.shape[0] if x.shape[0] > 5 else x.sum()

    check(f, *[(torch.randn(n, 2),) for n in (4, 6, 8, 10, 3, 2, 1)])


def test_cond_is_one_graph() -> None:
    def f(x: Any) -> Any:
        return torch.cond(x.sum() > 3, lambda t: t + 1, lambda t: t - 1, (x,))

    compiled = dovetail.compile(f, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(4)), torch.ones(4) + 1)
    assert torch.equal(compiled(-torch.ones(4)), -torch.ones(4) - 1)
