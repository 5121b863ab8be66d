"""Complex numbers are library calls; their results are copied as eager lays them out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail

PROGRAMS: dict[str, Callable[..., Any]] = {
    "diagonals": torch.diag_embed,
    "pieces": lambda x: torch.stack([x, x * 2]),
    "columns": lambda x: torch.cat([x.mT, x.mT * 2], 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.float32])
def test_gradients_with_gaps_between_their_elements(name: str, dtype: torch.dtype) -> None:
    inputs = [torch.randn(4, 5, dtype=dtype, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in "ab"]
    compiled = dovetail.compile(PROGRAMS[name], options={"fallback_to_eager": False})
    for fn, x in zip((compiled, PROGRAMS[name]), inputs):
        fn(x).abs().square().sum().backward()
    got, wanted = (x.grad for x in inputs)
    torch.testing.assert_close(got, wanted)
    assert got is not None and wanted is not None and got.stride() == wanted.stride()
