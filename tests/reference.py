"""Reference tables read off the sources, so that pages cannot disagree with the code.

options.py  ->  [("fuse", "bool", "True", "Fuse loop nests; off for debugging.")]
"""
from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from dataclasses import fields

from dovetail import options
from dovetail.control import STANCES
from dovetail.logs import KNOWN


def list_options() -> list[tuple[str, str, str, str]]:
    """Every field of Options: name, type, default, and the string that stands under it."""
    (body,) = [
        node.body for node in ast.parse(inspect.getsource(options)).body
        if isinstance(node, ast.ClassDef) and node.name == "Options"
    ]  # fmt: skip
    texts = {
        before.target.id: after.value.value
        for before, after in zip(body, body[1:], strict=False)
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)
        and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }  # fmt: skip
    return [
        (item.name, str(item.type), repr(item.default), str(texts.get(item.name, "")))
        for item in fields(options.Options)
    ]


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"

    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)])


def options_page() -> str:
    modes = [
        (f"`{mode}`", ", ".join(f"`{k}={v}`" for k, v in chosen.items()) or "as below")
        for mode, chosen in options.MODES.items()
    ]
    knobs = [(f"`{name}`", kind, f"`{default}`", text) for name, kind, default, text in list_options()]
    stances = [(f"`{name}`", text) for name, text in STANCES.items()]
    return "\n".join([
        "# Options", "", "Generated from the sources.", "",
        "## Modes", "`dovetail.compile(model, mode=...)`", "",
        _table(("mode", "sets"), modes), "",
        "## Knobs", "`dovetail.compile(model, options={...})`", "",
        _table(("name", "type", "default", "meaning"), knobs), "",
        "## Stances", "`dovetail.set_stance(...)`", "", _table(("stance", "meaning"), stances), "",
        "## Logs", "`DOVETAIL_LOGS=` takes any of these, separated by commas:", "",
        ", ".join(f"`{name}`" for name in KNOWN), "",
        "## Variables", "", _table(("variable", "meaning"), VARIABLES), "",
    ])  # fmt: skip


VARIABLES = [
    ("`DOVETAIL_LOGS=names`", "print these events while they happen"),
    ("`DOVETAIL_DUMP=dir`", "write what every stage makes to a file"),
    ("`DOVETAIL_OVERRIDE=dir`", "use edited files of such a folder instead"),
    ("`DOVETAIL_CHECK=1`", "verify after every stage"),
    ("`DOVETAIL_CACHE=dir`", "where compiled code is kept (default `~/.cache/dovetail`)"),
]
