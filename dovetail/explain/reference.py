"""Reference tables read off the sources, so that pages and `--help` cannot disagree with the code.

options.py  ->  [OptionEntry("fuse", "bool", "True", "Fuse loop nests; off for debugging.")]
errors.py   ->  [ErrorEntry("B03", "DataDependentBranch", message, hint)]
"""
from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, fields

from dovetail import errors, options
from dovetail.control import STANCES
from dovetail.logs import KNOWN


@dataclass(frozen=True, slots=True)
class OptionEntry:
    name: str
    type: str
    default: str
    text: str


@dataclass(frozen=True, slots=True)
class ErrorEntry:
    code: str
    name: str
    family: str
    message: str
    hint: str
    text: str


def list_options() -> list[OptionEntry]:
    """Every field of Options with the string that stands under it."""
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
        OptionEntry(item.name, str(item.type), repr(item.default), str(texts.get(item.name, "")))
        for item in fields(options.Options)
    ]


def list_errors() -> list[ErrorEntry]:
    """Every class of errors.py that has a code of its own, in the order of their codes."""
    found = [
        kind for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.DovetailError) and "code" in vars(kind)
    ]  # fmt: skip
    entries = [
        ErrorEntry(
            kind.code, kind.__name__, "graph break" if issubclass(kind, errors.Break) else "error",
            kind.message, kind.hint, inspect.cleandoc(vars(kind).get("__doc__") or ""),
        )
        for kind in found
    ]  # fmt: skip
    return sorted(entries, key=lambda entry: (entry.code[0] == "B", entry.code))


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)])


def options_page() -> str:
    modes = [
        (f"`{mode}`", ", ".join(f"`{k}={v}`" for k, v in chosen.items()) or "as below")
        for mode, chosen in options.MODES.items()
    ]
    knobs = [(f"`{o.name}`", o.type, f"`{o.default}`", o.text) for o in list_options()]
    stances = [(f"`{name}`", text) for name, text in STANCES.items()]
    return "\n".join([
        "# Options", "", "Generated from the sources; `python -m dovetail options` prints it.", "",
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
    ("`DOVETAIL_STOP=stage`", "stop after a stage"),
    ("`DOVETAIL_CACHE=dir`", "where compiled code is kept (default `~/.cache/dovetail`)"),
]


def errors_page() -> str:
    lines = [
        "# Errors and graph breaks", "",
        "Generated from `errors.py`. Every error has a code that stays; a graph break (`B..`) is no "
        "error unless `fullgraph=True`.", "",
    ]  # fmt: skip
    for entry in list_errors():
        lines += [f"## {entry.code} {entry.name}", f"{entry.family}: {entry.message}".strip(), ""]
        lines += [entry.text, ""] if entry.text else []
        lines += [f"*{entry.hint}*", ""] if entry.hint else []
    return "\n".join(lines)
