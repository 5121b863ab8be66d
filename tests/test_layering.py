"""The architecture as a test: who may import whom, independence, and what a file may look like."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dovetail"

BASE = {"errors", "events", "options", "control", "logs", "util"}
STAGE_SEES = BASE | {"ir", "sym", "fake", "ops"}
SEES: dict[str, set[str]] = {
    "errors": BASE,
    "events": BASE,
    "options": BASE,
    "control": BASE,
    "logs": BASE,
    "util": BASE,
    "ir": BASE,
    "sym": BASE | {"ir"},
    "fake": BASE | {"ir", "sym"},
    "ops": BASE | {"ir", "sym", "fake"},
    "capture": STAGE_SEES | {"_native"},
    "aot": STAGE_SEES | {"_native"},
    "passes": STAGE_SEES,
    "lower": STAGE_SEES,
    "schedule": STAGE_SEES,
    "codegen": STAGE_SEES,
    "runtime": BASE | {"ir", "cache", "_native"},
    "cache": BASE | {"ir"},
    "explain": BASE | {"ir"},
    "race": BASE,
    "stages": BASE | {"ir"},
}
"""Folder or file of the package -> what it may import from the package, besides itself."""

SEES_ALL = {
    "__init__",
    "__main__",
    "compile",
    "choose",
    "front",
    "cli",
    "torch_backend",
    "differences",
    "reporting",
    "measure",
}
"""The top: the compiler as a whole, and the doors to it."""

FORBIDDEN = (
    "torch._dynamo", "torch._inductor", "torch._functorch", "torch._decomp", "torch._refs", "torch._prims",
    "torch._subclasses", "torch.fx.experimental", "torch.export", "torch._export", "torch._higher_order_ops",
)  # fmt: skip
KNOWS_TORCH_COMPILE = {"torch_backend.py"}
"""The one file that registers Dovetail as a torch.compile backend."""

BANNED_WORDS = {"util", "utils", "helper", "helpers", "manager", "handler", "info", "misc"}
"""Words not used in file, class and function names (outside util/)."""
BANNED_NAMES = {"data", "common", *BANNED_WORDS}
"""A file is not called one of these ('common' and 'data' are fine in common_shape, DataDependentValue)."""

GIVEN_NAMES: set[str] = set()
"""Names that others chose (opcodes, in capitals, are anyway)."""

KERNEL_TEXTS = {"codegen/triton/prelude.py"}
"""Text that is copied in front of generated kernels, never imported here."""

OPTIONAL = ("triton", "rich", "jinja2", "sympy", "transformers", "timm")
"""Packages that may be missing: each is imported in one file."""

FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def unit_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports_of(path: Path) -> set[str]:
    """Full names of modules (and of what is taken from them) that run-time code of this file imports."""
    found: set[str] = set()
    pending: list[ast.AST] = [tree_of(path)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        pending += [
            child
            for child in ast.iter_child_nodes(node)
            if not (isinstance(child, ast.stmt) and is_for_types(child))
        ]
    return found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_one_way(path: Path) -> None:
    unit = unit_of(path)
    if unit in SEES_ALL:
        return
    assert unit in SEES, f"{unit} has no line in SEES"
    seen = {name.split(".")[1] for name in imports_of(path) if name.startswith("dovetail.")}
    allowed = SEES[unit] | {unit}
    assert seen <= allowed, f"{name_of(path)} imports {sorted(seen - allowed)}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_is_independent_of_torchs_compiler(path: Path) -> None:
    if path.name in KNOWS_TORCH_COMPILE:
        return
    imported = imports_of(path)
    assert not [name for name in imported for bad in FORBIDDEN if name == bad or name.startswith(bad + ".")]
    used = {ast.unparse(node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}
    assert not [name for name in used for bad in FORBIDDEN if name == bad or name.startswith(bad + ".")]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_imports_inside_functions(path: Path) -> None:
    functions = [n for n in ast.walk(tree_of(path)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    local = [n.lineno for f in functions for n in ast.walk(f) if isinstance(n, (ast.Import, ast.ImportFrom))]
    assert not local, f"{name_of(path)}: imports inside functions on lines {local}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_names_say_something(path: Path) -> None:
    defined = [
        node.name for node in ast.walk(tree_of(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    ]  # fmt: skip
    assert path.stem not in BANNED_NAMES
    for name in [*defined, path.stem]:
        words = set(re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))
        assert name.isupper() or name in GIVEN_NAMES or not words & BANNED_WORDS, f"{name_of(path)}: {name}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_begin_with_what_they_do(path: Path) -> None:
    if path.read_text().strip():
        assert ast.get_docstring(tree_of(path)), f"{name_of(path)} has no docstring"


@pytest.mark.parametrize("package", OPTIONAL)
def test_optional_packages_are_imported_in_one_file_each(package: str) -> None:
    users = [
        name_of(path) for path in FILES
        if name_of(path) not in KERNEL_TEXTS and any(name == package or name.startswith(package + ".") for name in imports_of(path))
    ]  # fmt: skip
    assert len(users) <= 1, f"{package} is imported in {users}"


def test_the_package_stays_small() -> None:
    sources = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".c", ".h")]
    lines = {name_of(path): len(path.read_text().splitlines()) for path in sources}
    assert sum(lines.values()) < 40_000
    assert not {name: n for name, n in lines.items() if n > 900}, "files over 900 lines"
