"""Run named stages one after another, and give each of them everything a stage deserves.

    run_stages("forward_0", [("50.loops", lower), ("60.schedule", schedule)], graph)

For every stage: an event with its seconds; a check of what it made (DOVETAIL_CHECK=1); its text in a
file (DOVETAIL_DUMP=dir); an edited file taken instead (DOVETAIL_OVERRIDE=dir). Nothing of that is the
stage's own business.
"""
from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

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
