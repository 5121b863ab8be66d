"""Frames that are never captured.

    why_not_capture(code) -> Reason | None

torch's and Python's own functions run as they are when they are called from eager code (what they
call is still seen), and so does Dovetail itself. Called from captured code they are inlined.
"""
from __future__ import annotations

from types import CodeType
from typing import Final

from dovetail.capture.calls import CO_ASYNC, CO_GENERATOR
from dovetail.capture.trace import is_library_file
from dovetail.errors import Reason

OWN_FOLDER: Final = __file__.rsplit("/", 2)[0] + "/"
PLUMBING: Final = frozenset(
    {"__getattribute__", "__getattr__", "__setattr__", "__delattr__", "__repr__", "__str__", "__format__",
     "__hash__", "__del__", "__instancecheck__", "__subclasscheck__", "__init_subclass__", "__set_name__",
     "__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__", "__copy__"}
)  # fmt: skip
"""Capturing these alone gains nothing, and an entry's own reads would run them."""
GENERATED: Final = ("<dovetail",)
MODELS: Final = ("/torch/nn/modules/", "/torch/nn/functional.py", "/torch/optim/", "/torch/distributions/")
"""Parts of torch that are models and training code rather than machinery: worth a graph of their own."""
MACHINERY: Final = (
    "/torch/nn/modules/module.py", "/torch/optim/optimizer.py", "/torch/optim/lr_scheduler.py",
    "/torch/optim/radam.py", "/torch/optim/asgd.py", "/torch/optim/_adafactor.py",
)  # fmt: skip


WALLS: Final = frozenset(
    {"DisableContext.__call__.<locals>._fn", "_TorchDynamoContext.__call__.<locals>.compile_wrapper"}
)
"""torch's wrappers around functions that are not to be compiled, or that torch.compile compiles."""


OTHERS: Final = ("/triton/runtime/", "/site-packages/numpy/")
"""Triton's own code, which compiles and launches kernels, and NumPy's."""


def is_wall(code: CodeType) -> bool:
    """What this frame calls is not ours to compile either: torch's wrappers, and imports, whose code runs
    once and computes nothing; launches of kernels, and NumPy."""
    if code.co_name == "<module>" or code.co_filename.startswith("<frozen importlib"):
        return True
    if any(folder in code.co_filename for folder in OTHERS):
        return True
    return code.co_qualname in WALLS and "/torch/" in code.co_filename


def why_not_capture(code: CodeType) -> Reason | None:
    file = code.co_filename
    if code.co_flags & (CO_GENERATOR | CO_ASYNC):
        return Reason("S03", "generators and coroutines run as they are")
    if file.startswith((OWN_FOLDER, *GENERATED)):
        return Reason("S01", "part of Dovetail, or text it generated")
    is_model = any(part in file for part in MODELS) and not file.endswith(MACHINERY)
    if is_library_file(file) and not is_model:
        return Reason("S02", "part of torch or of Python")
    if any(folder in file for folder in OTHERS):
        return Reason("S06", "part of Triton, which launches kernels, or of NumPy")
    if code.co_name in PLUMBING:
        return Reason("S05", "a method that other code's attribute reads, prints or comparisons run")
    if code.co_name in ("<lambda>", "__new__") and code.co_varnames[:1] == ("_cls",):
        return Reason("S05", "the maker of a named tuple")
    if code.co_name == "<module>":
        return Reason("S04", "code of a module, which runs once")
    return None
