"""Fake tensors: shapes, dtypes, devices and aliasing without data. See tensor.py."""
from dovetail.fake.convert import (
    expr_of,
    from_torch_device,
    from_torch_dtype,
    to_torch_device,
    to_torch_dtype,
    type_of,
)
from dovetail.fake.tensor import Fake, FakeMode, fake_like, infer

__all__ = [
    "Fake", "FakeMode", "expr_of", "fake_like", "from_torch_device", "from_torch_dtype", "infer",
    "to_torch_device", "to_torch_dtype", "type_of",
]  # fmt: skip
