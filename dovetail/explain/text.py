"""An Explanation in words.

2 graphs, 1 graph break, 0 recompiles, 5 kernels (1.2 MiB moved), 0 fallbacks, 0.31 s compiling
graph breaks
  model.py:12  B07 call to print, which writes output
               hint: ...
"""
from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dovetail.explain.query import Explanation

MOST = 40
"""Lines of one list that are printed; the HTML report has all of them."""


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def show_bytes(number: int) -> str:
    power = max(min((number.bit_length() - 1) // 10, 3), 0)
    return f"{number / 1024**power:.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def shorten(names: tuple[str, ...], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f", … ({len(names)} in all)" if len(names) > most else "")


def summary(found: Explanation) -> str:
    """The one line."""
    parts = [
        count(len(found.graphs), "graph"),
        count(sum(item.count for item in found.graph_breaks), "graph break"),
        count(sum(not item.limit for item in found.recompiles), "recompile"),
        count(len(found.kernels), "kernel")
        + (f" ({show_bytes(found.bytes_moved)} moved)" if found.kernels else ""),
        count(sum(found.fallbacks.values()), "fallback"),
        f"{found.compile_seconds:.2f} s compiling",
    ]
    return ", ".join(parts)


def _section(title: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield from ("", title, *(f"  {line}" for line in lines[:MOST]))
    if len(lines) > MOST:
        yield f"  … and {len(lines) - MOST} more"


def _break_lines(found: Explanation, kind: str) -> list[str]:
    lines = []
    for item in found.breaks:
        if item.kind == kind:
            often = f"  ({item.count} times)" if item.count > 1 else ""
            hint = f"; hint: {item.hint}" if item.hint else ""
            lines.append(f"{item.place} in {item.function or '?'}: {item.code} {item.reason}{hint}{often}")
    return lines


def _sections(found: Explanation) -> Iterator[tuple[str, list[str]]]:
    yield "graphs", [
        f"{graph.unit or '?'}  {graph.function} ({graph.place}): {count(graph.ops, 'op')}, "
        f"{count(graph.inputs, 'input')}{'' if graph.whole else ', up to a break'}"
        for graph in found.graphs
    ]
    yield "graph breaks", _break_lines(found, "graph_break")
    yield "frames left to Python", _break_lines(found, "skip")
    yield "recompiles (a size that changes becomes a symbol; pass what else changes in a tensor)", [
        f"{item.function} ({item.place}): {item.reason}"
        + (f"; limit of {item.entries} reached, runs in eager from now on" if item.limit else "")
        for item in found.recompiles
    ]
    yield "fallbacks (ops that ran as themselves)", [f"{n:4} {op}" for op, n in found.fallbacks.items()]
    yield "kernels", [
        f"{show_bytes(k.bytes_moved):>10}  {k.name}  {shorten(k.origins)}" for k in found.kernels
    ]
    yield "not fused, and why", [f"{item.subject}: {item.code} {item.text}" for item in found.declined]
    yield "saved for backward", [
        f"{item.unit}: {show_bytes(item.bytes)} in {count(len(item.saved), 'tensor')}, "
        f"{count(len(item.recomputed), 'op')} computed again"
        for item in found.partitions
    ]
    yield "CUDA graphs", [
        f"{unit}: {'used' if used else 'not used, ' + why}" for unit, used, why in found.cudagraphs
    ]
    yield "cache on disk", [f"{n:4} {what}" for what, n in found.caches.items()]
    yield "compile seconds by stage", [f"{s * 1e3:9.1f} ms  {name}" for name, s in found.seconds.items()]
    yield "guards", [f"{len(texts):4} for {function}" for function, texts in found.guards]
    yield "trouble", [f"{item.kind} {item.function}: {item.text}" for item in found.failures]


def show_explanation(found: Explanation) -> str:
    lines = [summary(found)]
    for title, content in _sections(found):
        lines += _section(title, content)
    return "\n".join(lines)


# -- an Explanation as one self-contained page -----------------------------------------------------

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
    """The template `report.html` (markup, style and script, no outside assets) with the explanation put in as
    JSON; the script draws the views from it."""
    content = plain(found)
    content |= {"seconds": found.seconds, "compile_seconds": found.compile_seconds}
    content |= {"summary": summary(found), "sources": read_sources(files_of(found))}
    # "</" must not end the script element that holds the JSON
    text = json.dumps(content).replace("</", "<\\/")
    page = TEMPLATE.read_text(encoding="utf-8")
    return page.replace("@TITLE@", summary(found).replace("<", "&lt;")).replace("@CONTENT@", text)
