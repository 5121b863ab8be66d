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
