"""PyTorch's own tables of sample inputs, imported without PyTorch's test-only dependencies.

    OPS["add"]       -> [OpInfo]      one list per "name.variant"
    MODULES["Linear"] -> ModuleInfo

`torch.testing._internal` imports `expecttest` and, through transformers and timm, `torchvision`, whose
compiled part does not load next to a CPU build of torch. Neither is needed for the tables.
"""
from __future__ import annotations

import sys
import types
import unittest
from typing import Any, Final

import torch

if "expecttest" not in sys.modules:
    _absent = types.ModuleType("expecttest")
    _absent.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules["expecttest"] = _absent

from torch.testing._internal import common_methods_invocations as invocations  # noqa: E402
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.common_modules import module_db  # noqa: E402


def call_as_is(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Random ops come wrapped in code that saves, sets and restores the generator; the sweep seeds by itself."""
    return op(*args, **kwargs)


invocations.wrapper_set_seed = call_as_is


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


OPS: Final[dict[str, Any]] = {name_of(op): op for op in op_db}
MODULES: Final[dict[str, Any]] = {info.name.replace("nn.", ""): info for info in module_db}

torch.set_default_dtype(torch.float32)
