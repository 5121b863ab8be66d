"""Run named stages one after another, and give each of them everything a stage deserves.

    run_stages("forward_0", [("50.loops", lower), ("60.schedule", schedule)], graph)

For every stage: an event with its seconds; a check of what it made (DOVETAIL_CHECK=1); its text in a
file (DOVETAIL_DUMP=dir); an edited file taken instead (DOVETAIL_OVERRIDE=dir). Nothing of that is the
stage's own business.
"""
from __future__ import annotations

import hashlib
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch.fx import GraphModule

from dovetail.errors import DovetailError
from dovetail.events import EVENTS
from dovetail.ir.graph import Graph
from dovetail.ir.parse import parse_graph
from dovetail.ir.program import Program, parse_program
from dovetail.ir.verify import verify
from dovetail.util.collection import no_collections

Stage: TypeAlias = "tuple[str, Callable[..., object]]"

PARSERS: dict[type, Callable[..., object]] = {Program: parse_program, Graph: parse_graph}
"""How an edited file becomes the stage's result again."""


class CannotOverride(DovetailError):
    code = "E12"
    message = "{path} cannot be fed back: stage {stage} makes a {type}, which has no parser"


def is_watched() -> bool:
    """Somebody wants every stage to run, so a cached result must not stand in for it."""
    names = ("DOVETAIL_CHECK", "DOVETAIL_DUMP", "DOVETAIL_OVERRIDE")
    return EVENTS.is_detailed or any(os.environ.get(name) for name in names)


def run_stages(unit: str, stages: Iterable[Stage], value: object) -> object:
    """Each stage takes what the one before it made."""
    for name, stage in stages:
        value = run_stage(unit, name, stage, value)
    return value


def run_stage(unit: str, name: str, stage: Callable[..., object], *inputs: object) -> object:
    start = time.perf_counter()
    with no_collections():
        value = stage(*inputs)
    seconds = time.perf_counter() - start
    EVENTS.emit("stage", unit=unit, stage=name, seconds=seconds, value=value)
    if os.environ.get("DOVETAIL_CHECK"):
        verify(value, name)
    if folder := os.environ.get("DOVETAIL_DUMP"):
        dump(Path(folder), unit, name, value, seconds)
    if folder := os.environ.get("DOVETAIL_OVERRIDE"):
        value = override(Path(folder), unit, name, value)
    return value


def dump(folder: Path, unit: str, name: str, value: object, seconds: float) -> None:
    path = folder / unit / f"{name}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# {name} of {unit}, {seconds * 1e3:.1f} ms\n{value}\n")


def override(folder: Path, unit: str, name: str, value: object) -> object:
    path = folder / unit / f"{name}.txt"
    if not path.exists():
        return value
    parse = PARSERS.get(type(value))
    if parse is None:
        raise CannotOverride(path=path, stage=name, type=type(value).__name__)
    EVENTS.emit("override", unit=unit, stage=name, path=str(path))
    return parse(path.read_text(), value)


# -- a failing compilation as one file that shows the failure on its own ---------------------------


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
    """The path of the file written, in DOVETAIL_DUMP or the temporary folder; None where the disk is full.
    It builds inputs of the same shapes, defines the captured program as plain PyTorch, compiles it with
    fallback off, and so raises the same error."""
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
