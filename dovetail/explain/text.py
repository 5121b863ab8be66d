"""An Explanation in words.

2 graphs, 1 graph break, 0 recompiles, 5 kernels (1.2 MiB moved), 0 fallbacks, 0.31 s compiling
graph breaks
  model.py:12  B07 call to print, which writes output
               hint: ...
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.explain.query import Explanation

MOST = 40
"""Lines of one list that are printed; the HTML report has all of them."""


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def show_bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError


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


def _cut(lines: list[str]) -> Iterator[str]:
    yield from (f"  {line}" for line in lines[:MOST])
    if len(lines) > MOST:
        yield f"  … and {len(lines) - MOST} more"


def _section(title: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield ""
        yield title
        yield from _cut(lines)


def _graph_lines(found: Explanation) -> list[str]:
    return [
        f"{graph.unit or '?'}  {graph.function} ({graph.place}): {count(graph.ops, 'op')}, "
        f"{count(graph.inputs, 'input')}{'' if graph.whole else ', up to a break'}"
        f"{', with backward' if graph.training else ''}"
        for graph in found.graphs
    ]


def _break_lines(found: Explanation, kind: str) -> list[str]:
    lines = []
    for item in found.breaks:
        if item.kind == kind:
            often = f"  ({item.count} times)" if item.count > 1 else ""
            hint = f"; hint: {item.hint}" if item.hint else ""
            lines.append(f"{item.place} in {item.function or '?'}: {item.code} {item.reason}{hint}{often}")
    return lines


def _recompile_lines(found: Explanation) -> list[str]:
    return [
        f"{item.function} ({item.place}): {item.reason}"
        + (f"; limit of {item.entries} reached, runs in eager from now on" if item.limit else "")
        for item in found.recompiles
    ]


def show_explanation(found: Explanation) -> str:
    lines = [summary(found)]
    lines += _section("graphs", _graph_lines(found))
    lines += _section("graph breaks", _break_lines(found, "graph_break"))
    lines += _section("frames left to Python", _break_lines(found, "skip"))
    lines += _section("recompiles", _recompile_lines(found))
    lines += _section(
        "fallbacks (ops that ran as themselves)", [f"{n:4} {op}" for op, n in found.fallbacks.items()]
    )
    lines += _section(
        "kernels",
        [f"{show_bytes(k.bytes_moved):>10}  {k.name}  {', '.join(k.origins)}" for k in found.kernels],
    )
    lines += _section("not fused, and why", [f"{d.subject}: {d.code} {d.text}" for d in found.declined])
    lines += _section(
        "CUDA graphs",
        [f"{unit}: {'used' if used else 'not used, ' + why}" for unit, used, why in found.cudagraphs],
    )
    lines += _section(
        "cache", [", ".join(f"{count(n, what)}" for what, n in found.caches.items())] if found.caches else []
    )
    lines += _section(
        "compile seconds by stage", [f"{s * 1e3:9.1f} ms  {name}" for name, s in found.seconds.items()]
    )
    guards = sum(len(texts) for _, texts in found.guards)
    lines += _section(
        "guards",
        [f"{count(guards, 'guard')} in {count(len(found.guards), 'entry').replace('entrys', 'entries')}"]
        if guards
        else [],
    )
    lines += _section("trouble", [f"{f.kind} {f.function}: {f.text}" for f in found.failures])
    return "\n".join(lines)
