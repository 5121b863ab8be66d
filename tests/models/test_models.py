"""A few real architectures, captured whole and equal to eager; `make sweep-models` runs all of them."""
from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import pytest

# Looked for, not imported: timm imports torchvision, which needs what zoo.py defines first.
for package in ("transformers", "timm", "torchvision"):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)

from tests.models.zoo import Specimen, build, names  # noqa: E402
from tests.sweeps.models import check_mode  # noqa: E402
from tests.sweeps.peers import find_peer  # noqa: E402


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("name", ["hf:bert", "hf:gpt2", "hf:llama", "hf:t5", "timm:mobilenetv3"])
def test_whole_and_right(name: str, mode: str) -> None:
    specimen = build(name)
    record: dict[str, Any] = check_mode(Specimen(copy.deepcopy(specimen.model), specimen.inputs), mode, find_peer("dovetail"), rounds=0)
    assert record["right"], record["reason"]
    assert record["whole"], record["reason"]


def test_the_zoo_is_large() -> None:
    assert len(names("hf")) >= 100 and len(names("timm")) >= 60
