"""A slice of the gradient sweep; `python -m tests.aot.sweep` runs all of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.aot.sweep import check_module, check_op
from tests.sweeps.torch_testing import module_db, op_db

OPS = (
    "add", "atan2", "nn.functional.gelu", "softmax", "matmul", "addmm", "baddbmm", "cumsum", "index_add", "gather",
    "scatter_add", "nn.functional.conv2d", "nn.functional.max_pool2d", "nn.functional.layer_norm", "var_mean", "split",
    "nn.functional.group_norm", "nn.functional.scaled_dot_product_attention", "nn.functional.cross_entropy", "as_strided",
    "nn.functional.embedding", "nn.functional.dropout", "masked_fill", "linalg.norm", "sort", "fft.rfft", "unfold",
)  # fmt: skip
MODULES = (
    "nn.BatchNorm2d", "nn.Conv1d", "nn.LSTM", "nn.GRU", "nn.MultiheadAttention", "nn.TransformerEncoderLayer",
    "nn.CrossEntropyLoss", "nn.Embedding", "nn.InstanceNorm2d", "nn.PReLU",
)  # fmt: skip
REFUSED = {("nn.BatchNorm2d", True): "refused: item needs the value of a tensor"}
"""momentum=None divides by a counter's value on the host."""
REFUSED_OPS = {"as_strided.partial_views": "refused: as_strided of an input beyond the input's own elements"}
"""The rest of a storage is not an input of the graph: such calls run in eager."""


@pytest.mark.parametrize("op", [op for op in op_db if op.name in OPS], ids=lambda op: op.full_name)
def test_op_gradients(op: Any) -> None:
    assert check_op(op) == REFUSED_OPS.get(op.full_name)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("entry", [e for e in module_db if e.name in MODULES], ids=lambda e: e.name)
def test_module_gradients(entry: Any, training: bool) -> None:
    assert check_module(entry, training) == REFUSED.get((entry.name, training))
