"""Fake tensors: shapes, dtypes, devices and aliasing without data. See tensor.py."""
from dovetail.fake.calls import SymbolicCalls
from dovetail.fake.convert import (
    expr_of,
    from_torch_device,
    from_torch_dtype,
    to_torch_device,
    to_torch_dtype,
    type_of,
)
from dovetail.fake.tensor import Fake, FakeMode, fake_like, infer, make_static

__all__ = [
    "Fake", "FakeMode", "SymbolicCalls", "expr_of", "fake_like", "from_torch_device", "from_torch_dtype",
    "infer", "make_static",
    "to_torch_device", "to_torch_dtype", "type_of",
]  # fmt: skip
