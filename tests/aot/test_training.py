"""Loss curves of compiled trainings lie on eager's."""
from __future__ import annotations

import pytest
import torch

from tests.aot.training import TRAININGS, largest_difference


@pytest.mark.parametrize("name", TRAININGS)
def test_loss_curve(name: str, request: pytest.FixtureRequest) -> None:
    """The ResNet in fp64: its pooling picks winners by their last bits, and eager's own curve moves by 6e-4 where
    weights of fp32 are moved by 1e-7; which of its sums are added how depends on the processor."""
    if name == "bert":
        pytest.importorskip("transformers")
    if name == "resnet":
        request.addfinalizer(lambda before=torch.get_default_dtype(): torch.set_default_dtype(before))
        torch.set_default_dtype(torch.float64)
    assert largest_difference(name, options={"fallback_to_eager": False}) < 2e-5
