"""Generated pages say what the code says. `pytest tests/test_docs.py --update` rewrites them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.explain.reference import errors_page, list_errors, list_options, options_page

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
    assert [option.name for option in list_options() if not option.text] == []


def test_error_codes_are_unique() -> None:
    codes = [entry.code for entry in list_errors()]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize(
    "page", sorted(str(p.relative_to(ROOT)) for p in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
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
