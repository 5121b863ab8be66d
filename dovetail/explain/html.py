"""An Explanation as one self-contained page.

    Explanation -> HTML text

The page is the template `report.html` (markup, style and script, no outside assets) with the
explanation put in as JSON; the script draws the views from it.
"""
from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dovetail.explain.text import summary

if TYPE_CHECKING:
    from dovetail.explain.query import Explanation

TEMPLATE: Final = Path(__file__).with_name("report.html")
LONGEST: Final = 200_000
"""Characters of one text kept in the page."""


def plain(value: object) -> Any:
    """Nouns as JSON: dataclasses become objects."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value[:LONGEST] if isinstance(value, str) else value


def read_sources(files: Iterable[str]) -> dict[str, list[str]]:
    """The lines of the user's files; a file that cannot be read (a notebook cell, stdin) has none."""
    found: dict[str, list[str]] = {}
    for file in files:
        path = Path(file)
        found[file] = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return found


def files_of(found: Explanation) -> list[str]:
    places = [line for graph in found.graphs for line in (graph.place, *graph.lines)]
    places += [item.place for item in found.breaks] + [item.place for item in found.recompiles]
    return sorted({place.file for place in places if place.file})


def show_page(found: Explanation) -> str:
    content = plain(found)
    content |= {"seconds": found.seconds, "compile_seconds": found.compile_seconds}
    content |= {"summary": summary(found), "sources": read_sources(files_of(found))}
    # "</" must not end the script element that holds the JSON
    text = json.dumps(content).replace("</", "<\\/")
    page = TEMPLATE.read_text(encoding="utf-8")
    return page.replace("@TITLE@", summary(found).replace("<", "&lt;")).replace("@CONTENT@", text)
