"""Generated pages say what the code says. `pytest tests/test_docs.py --update` rewrites them."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail import errors
from tests.reference import list_options, options_page


def list_errors() -> list[type[errors.DovetailError]]:
    """Every class of errors.py that has a code of its own, in the order of their codes."""
    found = [
        kind for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.DovetailError) and "code" in vars(kind)
    ]  # fmt: skip
    return sorted(found, key=lambda kind: (kind.code[0] == "B", kind.code))


def errors_page() -> str:
    lines = [
        "# Errors and graph breaks", "",
        "Generated from `errors.py`. Every error has a code that stays; a graph break (`B..`) is no "
        "error unless `fullgraph=True`.", "",
    ]  # fmt: skip
    for kind in list_errors():
        family, text = "graph break" if issubclass(kind, errors.Break) else "error", inspect.cleandoc(vars(kind).get("__doc__") or "")
        lines += [f"## {kind.code} {kind.__name__}", f"{family}: {kind.message}".strip(), ""]
        lines += [text, ""] if text else []
        lines += [f"*{kind.hint}*", ""] if kind.hint else []
    return "\n".join(lines)


ROOT = Path(__file__).resolve().parents[1]
PAGES: dict[str, Callable[[], str]] = {"options.md": options_page, "errors.md": errors_page}


@pytest.mark.parametrize("name", PAGES)
def test_page_is_up_to_date(name: str, update: bool) -> None:
    path, text = ROOT / "docs" / name, PAGES[name]()
    if update:
        path.write_text(text)
    assert path.exists() and path.read_text() == text, (
        f"docs/{name} is stale: run pytest tests/test_docs.py --update"
    )


def test_every_option_is_explained() -> None:
    assert [name for name, *_, text in list_options() if not text] == []


def test_error_codes_are_unique() -> None:
    codes = [kind.code for kind in list_errors()]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize(
    "page", sorted(str(p.relative_to(ROOT)) for p in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
)
def test_links_and_files_exist(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), f"{page} links to {target}"


def test_the_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Each block in order, with line numbers of the page, so that a failure points into it."""
    page = ROOT / "docs" / "guide.md"
    text = page.read_text()
    space: dict[str, object] = {"__name__": "guide"}
    for block in re.finditer(r"```python\n(.*?)```", text, re.S):
        before = text[: block.start(1)].count("\n")
        exec(compile("\n" * before + block[1], str(page), "exec"), space)
    assert "half way" in capsys.readouterr().out


def test_what_examples_and_benchmarks_import_is_there() -> None:
    root = Path(__file__).parent.parent
    for path in [*root.glob("examples/*.py"), *root.glob("benchmarks/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dovetail":
                module = importlib.import_module(str(node.module))
                for name in node.names:
                    assert hasattr(module, name.name) or importlib.import_module(f"{node.module}.{name.name}"), path
