"""Benchmark answers as a picture: bars of speed-up over eager, one row per model, as plain SVG.

    show_plot({"mlp-inference/steady": {"median_ms": {"eager": 2.0, "dovetail": 1.0}}}) -> "<svg ..."
"""
from __future__ import annotations

import math
from typing import Any, Final

from benchmarks.table import names_of

COLOURS: Final = {"torch": "#b8b8b8", "dovetail": "#2f7d6b"}
LABELS: Final = {"torch": "torch.compile", "dovetail": "Dovetail"}
ROW: Final = 34
LEFT: Final = 150
SCALE: Final = 180
"""Pixels for a doubling of speed."""


def show_plot(answers: dict[str, Any]) -> str:
    """Logarithmic, so that twice as fast and half as fast are equally long."""
    body: list[str] = []
    y = 46
    for mode in ("inference", "training"):
        names = names_of(answers, mode)
        if not names:
            continue
        body.append(f'<text x="{LEFT}" y="{y}" font-weight="bold">{mode}</text>')
        y += 12
        for name in names:
            body += _row(name, answers[f"{name}-{mode}/steady"].get("median_ms", {}), y)
            y += ROW
        y += 26
    key = " ".join(
        f'<rect x="{LEFT + 140 * k}" y="10" width="12" height="12" fill="{COLOURS[peer]}"/>'
        f'<text x="{LEFT + 18 + 140 * k}" y="20">{LABELS[peer]}</text>'
        for k, peer in enumerate(COLOURS)
    )
    line = f'<line x1="{LEFT}" y1="34" x2="{LEFT}" y2="{y - 26}" stroke="#444"/>'
    style = 'font-family="sans-serif" font-size="12"'
    size = f'width="760" height="{y}" viewBox="0 0 760 {y}"'
    opened = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>'
    title = "<title>Speed over eager; the line is eager</title>"
    return "\n".join([opened, title, key, *body, line, "</svg>", ""])


def _row(name: str, medians: dict[str, float], y: int) -> list[str]:
    found = [f'<text x="{LEFT - 8}" y="{y + 19}" text-anchor="end">{name}</text>']
    for k, (peer, colour) in enumerate(COLOURS.items()):
        if peer not in medians:
            continue
        speed = medians["eager"] / medians[peer]
        length = SCALE * math.log2(speed)
        start, top = LEFT + min(length, 0.0), y + 3 + 13 * k
        found.append(
            f'<rect x="{start:.1f}" y="{top}" width="{abs(length):.1f}" height="11" fill="{colour}"/>'
            f'<text x="{LEFT + max(length, 0.0) + 5:.1f}" y="{top + 10}" font-size="10">{speed:.2f}x</text>'
        )
    return found
