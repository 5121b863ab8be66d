"""A fixed slice of the op sweep: every 17th op and module, first sample, forward and gradient."""
from __future__ import annotations

from typing import Any, Final

import pytest

from tests.sweeps.ops import run_task
from tests.sweeps.torch_testing import MODULES, OPS

SETTINGS: Final[dict[str, Any]] = {
    "peer": "dovetail", "device": "cpu", "dtypes": ["float32"], "samples": 1, "dynamic": [False], "gradient": [False, True], "layouts": ["contiguous"],
    "order": 1,
    "stop_after": 1,
}
NAMED: Final = ("add", "mul", "softmax", "nn.functional.gelu", "nn.functional.layer_norm", "matmul", "sum", "var", "cat", "index_select",
                "nn.functional.conv2d", "nn.functional.cross_entropy", "gather", "where", "cumsum")
SLICE: Final = [*(f"op:{name}" for name in NAMED if name in OPS), *(f"op:{name}" for name in list(OPS)[::17]), *(f"module:{name}" for name in list(MODULES)[::9])]


@pytest.mark.parametrize("name", list(dict.fromkeys(SLICE)))
def test_equal_to_eager(name: str) -> None:
    record = run_task(name, SETTINGS)
    assert record["status"] != "fail", record["reason"]


@pytest.mark.parametrize("name", ["op:norm", "op:fft.hfft", "op:_native_batch_norm_legit", "op:nn.functional.batch_norm"])
def test_later_samples_equal_to_eager(name: str) -> None:
    record = run_task(name, {**SETTINGS, "gradient": [True], "samples": 3})
    assert record["status"] != "fail", record["reason"]


@pytest.mark.parametrize("name", ["op:add", "op:sum", "op:nn.functional.gelu", "op:cat", "op:expand", "op:diff"])
def test_dynamic_equal_to_eager(name: str) -> None:
    record = run_task(name, {**SETTINGS, "dynamic": [True], "samples": 3})
    assert record["status"] != "fail", record["reason"]


@pytest.mark.parametrize("dtype", ["int64", "bool", "bfloat16", "float16", "float64"])
def test_other_types_equal_to_eager(dtype: str) -> None:
    for name in ("op:add", "op:mul", "op:sum", "op:where", "op:clamp"):
        record = run_task(name, {**SETTINGS, "dtypes": [dtype], "gradient": [False], "samples": 2})
        assert record["status"] != "fail", f"{name}: {record['reason']}"
