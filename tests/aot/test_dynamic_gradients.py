"""Gradients of compiled programs whose sizes are symbols, at the size traced and at others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import dovetail

PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "two paddings meet": lambda x: torch.diff(x),
    "two paddings of two dimensions": lambda x: torch.diff(torch.diff(x, dim=0), dim=1),
    "a padding within a slice": lambda x: F.pad(x, (2, 1))[:, 1:] * F.pad(x, (0, 2)),
    "a negative padding": lambda x: F.pad(x, (-1, 2)) + F.pad(x, (1, 0)),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_sizes_are_symbols(program: Callable[[torch.Tensor], torch.Tensor]) -> None:
    call = dovetail.compile(program, dynamic=True, fullgraph=True, options={"fallback_to_eager": False})
    for rows, columns in ((5, 7), (9, 4)):
        x = torch.randn(rows, columns, requires_grad=True)
        got, expected = call(x), program(x)
        torch.testing.assert_close(got, expected)
        tangent = torch.randn_like(expected)
        torch.testing.assert_close(torch.autograd.grad(got, x, tangent), torch.autograd.grad(expected, x, tangent))


def test_the_offset_of_an_input_is_kept() -> None:
    """as_strided counts from where the tensor starts in its memory."""
    program = lambda x: torch.as_strided(x, (2, 2), (1, 2)) + 1  # noqa: E731
    x = torch.arange(15.0)[5:]
    torch.testing.assert_close(dovetail.compile(program, dynamic=True)(x), program(x))
