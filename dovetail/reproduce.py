"""Write a failing compilation to one file that shows the failure on its own.

    fx.GraphModule + example inputs + the exception  ->  repro_<name>.py

The file builds inputs of the same shapes, defines the captured program as plain PyTorch, compiles it
with fallback off, and so raises the same error.
"""
from __future__ import annotations

import hashlib
import os
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.fx import GraphModule

TEXT = '''"""Reproduces a failure inside Dovetail. Run it; it raises the error below.

{error}
"""
import torch
from torch import device  # names used by the captured code
import dovetail


class Captured(torch.nn.Module):
{code}

inputs = [
{inputs}
]
if __name__ == "__main__":
    compiled = dovetail.compile(Captured(), options={{"fallback_to_eager": False}})
    print(compiled(*inputs))
'''


def show_input(value: object) -> str:
    """Text that makes an input like this one (random contents, same type)."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    make = "torch.randn" if value.dtype.is_floating_point or value.dtype.is_complex else "torch.zeros"
    size, stride = list(value.size()), list(value.stride())
    length = 1 + sum((n - 1) * s for n, s in zip(size, stride)) if value.numel() else 0
    text = f"{make}({length}, dtype=torch.float32).to({value.dtype}, copy=True).to({str(value.device)!r})"
    text += f".as_strided({size}, {stride})"
    return text + (".requires_grad_()" if value.requires_grad else "")


def write_reproducer(module: GraphModule, inputs: Sequence[object], error: BaseException) -> Path | None:
    """The path of the file written, in DOVETAIL_DUMP or the temporary folder; None where the disk is full."""
    shown = "".join(traceback.format_exception(error))[-3000:].replace('"""', "'''").replace("\\", "\\\\")
    lines = [f"    {show_input(value)}," for value in inputs]
    code = "\n".join("    " + line for line in module.code.strip().splitlines())
    text = TEXT.format(error=shown, code=code, inputs="\n".join(lines))
    try:
        folder = Path(os.environ.get("DOVETAIL_DUMP") or tempfile.gettempdir()) / "dovetail_repro"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"repro_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
        path.write_text(text)
    except OSError:
        return None
    return path
