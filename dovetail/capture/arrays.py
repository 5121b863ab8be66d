"""NumPy in captured code: work on constants is done while capturing, and arrays become tensors of the graph.

    np.linspace(0, 1, 5)              an array that the trace made: computed now
    x * torch.from_numpy(that)        torch.tensor([0.0, 0.25, ...], dtype=torch.float64), recorded
    np.sin(x.numpy())                 a break: the values of a tensor are needed

An array that existed before the frame may change without a guard seeing it, so that using one breaks the
graph. NumPy is known by name; it is not imported here.
"""
from __future__ import annotations

from types import ModuleType
from typing import Any, Final

import torch

from dovetail.capture.builtins import Args, Kwargs, Special, on
from dovetail.capture.operations import as_hashable
from dovetail.capture.origins import PLAIN
from dovetail.capture.text import native
from dovetail.capture.torch_calls import call_torch
from dovetail.capture.trace import Trace
from dovetail.errors import UnknownCall, UnsupportedValue

MODULES: Final = frozenset({"numpy", "numpy.linalg", "numpy.fft"})
IMPURE: Final = frozenset(
    {"load", "save", "savez", "savez_compressed", "savetxt", "loadtxt", "genfromtxt", "fromfile", "tofile",
     "memmap", "fromregex", "dump", "dumps", "seterr", "seterrcall", "setbufsize", "set_printoptions",
     "empty", "empty_like", "frompyfunc", "vectorize", "apply_along_axis", "apply_over_axes",
     "fromfunction", "piecewise", "fromiter"}
)  # fmt: skip
"""What reads or writes files or settings, runs the user's Python, or gives memory as it happens to be."""
LARGEST: Final = 4096
"""More elements than this are not written into a graph."""


def is_numpy(value: Any) -> bool:
    """A value, a function or a class of NumPy's own."""
    kind = value if isinstance(value, type) else type(value)
    return kind.__module__ == "numpy" or getattr(value, "__module__", None) in MODULES


def is_known(trace: Trace, value: Any) -> bool:
    """Whether NumPy may read the value now: it is a constant of the trace."""
    if isinstance(value, (list, tuple)):
        return all(is_known(trace, item) for item in value)
    if isinstance(value, slice):
        return is_known(trace, [value.start, value.stop, value.step])
    if type(value) in PLAIN or isinstance(value, type):
        return True
    return type(value).__module__.startswith("numpy") and id(value) not in trace.origins


def call_numpy(trace: Trace, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """A function, a class, or a bound method."""
    name = getattr(fn, "__name__", type(fn).__name__)
    args = [as_hashable(arg) for arg in args]
    owner = getattr(fn, "__self__", None)
    given = [*args, *kwargs.values(), *([] if owner is None or isinstance(owner, ModuleType) else [owner])]
    if name in IMPURE or not all(is_known(trace, value) for value in given):
        raise UnknownCall(trace.loc(), function=f"numpy.{name}")
    return native(fn, *args, **kwargs)


def _from_array(function: Any) -> Special:
    def rule(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
        array: Any = args[0] if args else None
        if not type(array).__module__.startswith("numpy"):
            return call_torch(trace, function, args, kwargs)
        dtype = getattr(torch, str(getattr(array, "dtype", "")), None)
        if not is_known(trace, array) or array.size > LARGEST or dtype is None:
            raise UnsupportedValue(trace.loc(), type="ndarray", detail="its contents are not known")
        if array.ndim:
            array.flags.writeable = False  # a tensor may share its memory: a later write is left to eager
        named = {"dtype": dtype, **kwargs}
        return call_torch(trace, torch.tensor, [array.tolist(), *args[1:]], named)

    return rule


for _function in (torch.from_numpy, torch.tensor, torch.as_tensor, torch.asarray):
    on(_function)(_from_array(_function))
