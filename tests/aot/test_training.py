"""Loss curves of compiled trainings lie on eager's."""
from __future__ import annotations

import pytest

from tests.aot.training import TRAININGS, largest_difference


@pytest.mark.parametrize("name", TRAININGS)
def test_loss_curve(name: str) -> None:
    if name == "bert":
        pytest.importorskip("transformers")
    assert largest_difference(name, options={"fallback_to_eager": False}) < 2e-5
