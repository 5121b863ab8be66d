"""Resume functions and decoding: the rest of a frame as a function of its own."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import pytest
import torch

import dovetail
from dovetail.capture.decode import decode, live_before
from dovetail.capture.resume import VALUE, Layout, make_resume
from dovetail.events import EVENTS


def straight(a: Any, b: Any) -> Any:
    c = a + b
    return c * a


def test_resume_in_the_middle() -> None:
    code = decode(straight.__code__)
    store = code.ops.index("STORE_FAST")
    made = make_resume(code, store, Layout((False, True, True), (VALUE,)))
    resumed = FunctionType(made.code, globals())
    assert resumed(3, None, None, 10) == 30, "c is taken from the stack, a from its slot"
    with pytest.raises(TypeError):
        resumed(3)


def test_resume_keeps_handlers_and_lines() -> None:
    def guarded(x: Any) -> Any:
        try:
            y = 1 / x
        except ZeroDivisionError:
            y = -1
        return y

    code = decode(guarded.__code__)
    divide = code.ops.index("BINARY_OP")
    made = make_resume(code, divide, Layout((False, True), (VALUE, VALUE)))
    resumed = FunctionType(made.code, globals())
    assert resumed(0, None, 1, 4) == 0.25
    assert resumed(0, None, 1, 0) == -1
    assert decode(made.code).line(len(decode(made.code).ops) - 1) == code.line(len(code.ops) - 1)


def test_liveness() -> None:
    code = decode(straight.__code__)
    live = live_before(code)
    assert live[0] == {0, 1}
    assert live[code.ops.index("STORE_FAST") + 1] == {0, 2}


def test_a_loop_that_breaks_comes_back_to_the_same_code() -> None:
    def f(x: Any, n: int) -> Any:
        for _ in range(n):
            x = x + 1
            if x.sum() < 0:
                return x
        return x

    compiled = dovetail.compile(f, backend="eager")
    EVENTS.clear()
    assert torch.equal(compiled(torch.ones(2), 400), torch.ones(2) + 400), (
        "deeper than the recursion limit allows"
    )
    assert len(EVENTS.of("compile")) <= 8


def test_both_arms_are_compiled_when_reached() -> None:
    def f(x: Any) -> Any:
        return x + 1 if x.sum() > 0 else x - 1

    compiled = dovetail.compile(f, backend="eager")
    EVENTS.clear()
    compiled(torch.ones(3))
    first = len(EVENTS.of("graph"))
    compiled(-torch.ones(3))
    assert len(EVENTS.of("graph")) == first + 1
    compiled(torch.ones(3)), compiled(-torch.ones(3))
    assert len(EVENTS.of("graph")) == first + 1
