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


def test_what_an_input_is_to_autograd_and_memory() -> None:
    """None of this is in a tensor's type: each is asked of the tensor that comes."""
    with torch.inference_mode():
        inference = torch.ones(4, 4)
    root = torch.ones(8, 4, requires_grad=True)
    kept, hooked, written = root[:4] * 1, torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)
    kept.retain_grad()
    hooked.register_hook(lambda grad: grad)
    written.add_(0)
    tensors = [torch.ones(4, 4), inference, written, torch.ones(8, 4)[4:], root.split(4)[1], kept, hooked,
               torch.ones(4, 4).share_memory_(), torch.nn.Buffer(torch.ones(4, 4))]  # fmt: skip
    questions: list[Any] = [
        lambda x: x.is_inference(), lambda x: x.is_shared(), lambda x: x.storage_offset(),
        lambda x: x[1:].storage_offset(), lambda x: x._is_view(), lambda x: x._base is None, lambda x: x.is_leaf,
        lambda x: type(x.grad_fn).__name__, lambda x: x._backward_hooks is None, lambda x: x.output_nr,
        lambda x: x.retains_grad, lambda x: isinstance(x, torch.nn.Buffer),
        lambda x: x.is_inference() or x._version,
    ]  # fmt: skip
    for ask in questions:
        dovetail.reset()
        compiled = dovetail.compile(lambda x, y, ask=ask: (ask(x), y + 1), backend="eager")
        for tensor in tensors * 2:
            assert compiled(tensor, torch.ones(2))[0] == ask(tensor)


def test_what_a_written_input_is_to_autograd() -> None:
    def f(x: Any, w: Any) -> Any:
        before = x._version
        x.add_(w)
        return before, x._version, x.is_leaf, x.grad_fn is None

    w = torch.ones(4, requires_grad=True)
    compiled = dovetail.compile(f, backend="eager")
    for weight in (w, w.detach(), w):
        assert compiled(torch.ones(4), weight) == f(torch.ones(4), weight)


def test_state_of_torch_that_a_program_asks_for() -> None:
    def f(x: Any) -> Any:
        return x + 1 if torch.autograd._profiler_enabled() else x * torch.get_num_threads()

    compiled, x = dovetail.compile(f, backend="eager", fullgraph=True), torch.ones(3)
    threads = torch.get_num_threads()
    for count in (threads + 1, threads):
        torch.set_num_threads(count)
        torch.testing.assert_close(compiled(x), x * count)
    with torch.autograd.profiler.profile():
        torch.testing.assert_close(compiled(x), f(x))
