"""Benchmark answers as tables for people: the printed summary, docs/results/bench.md, README's results.

    show_results({"mlp-inference/steady": {"median_ms": {...}}, ...}) -> markdown
"""
from __future__ import annotations

import math
import re
import statistics
from pathlib import Path
from typing import Any, Final

from benchmarks.models import MICRO, SMALL

MARKERS: Final = ("<!-- results -->", "<!-- /results -->")
CLOCKS: Final = {"wall": "wall time", "cpu": "steady states in CPU time, since the machine was busy"}
Answers = dict[str, Any]


def show_results(answers: Answers) -> str:
    machine = answers.get("machine", {})
    lines = [
        f"Measured on {machine.get('cpu', '?')}, {machine.get('cores', '?')} cores, "
        f"Python {machine.get('python', '?')}, torch {machine.get('torch', '?')}, "
        f"{machine.get('date', '?')}; `make bench`. "
        f"{machine.get('threads', '?')} thread(s), {CLOCKS[machine.get('clock', 'wall')]}. "
        "Speed-ups are over eager, medians, peers interleaved in one process.",
        "",
    ]
    for mode in ("inference", "training"):
        lines += show_models(answers, mode)
    lines += show_micro(answers.get("micro", {}), answers.get("bandwidth", {}))
    lines += show_machinery(answers)
    return "\n".join(lines) + "\n"


def names_of(answers: Answers, mode: str) -> list[str]:
    return [key.partition("-" + mode + "/")[0] for key in answers if key.endswith(f"-{mode}/steady")]


def show_models(answers: Answers, mode: str) -> list[str]:
    names = names_of(answers, mode)
    if not names:
        return []
    lines = [
        f"**Models, {mode}**",
        "",
        "| model | eager ms | torch.compile | Dovetail | cold first call s: torch.compile | Dovetail | ratio "
        "| warm s: torch.compile | Dovetail | peak MiB: torch.compile | Dovetail |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    ratios: dict[str, list[float]] = {"torch": [], "dovetail": [], "cold": [], "both": []}
    for name in names:
        steady = answers[f"{name}-{mode}/steady"]
        medians = steady.get("median_ms", {})
        eager = medians.get("eager", math.nan)
        speed = {
            peer: eager / medians[peer] if peer in medians else math.nan for peer in ("torch", "dovetail")
        }
        first = {peer: answers.get(f"{name}-{mode}/cold/{peer}", {}) for peer in ("torch", "dovetail")}
        cold = {peer: record.get("first_s", math.nan) for peer, record in first.items()}
        peak = {peer: record.get("peak_mib", math.nan) for peer, record in first.items()}
        warm = {peer: steady.get("first_s", {}).get(peer, math.nan) for peer in first}
        both = speed["dovetail"] if "torch" in medians else math.nan
        for peer, value in [*speed.items(), ("cold", cold["torch"] / cold["dovetail"]), ("both", both)]:
            if not math.isnan(value):
                ratios[peer].append(value)
        lines.append(
            f"| {name} | {eager:.2f} | {times(speed['torch'])} | {times(speed['dovetail'])} "
            f"| {number(cold['torch'])} | {number(cold['dovetail'])} "
            f"| {times(cold['torch'] / cold['dovetail'])} "
            f"| {number(warm['torch'])} | {number(warm['dovetail'])} "
            f"| {number(peak['torch'], 0)} | {number(peak['dovetail'], 0)} |"
        )
    lines.append(
        f"| geometric mean | | {times(mean(ratios['torch']))} | {times(mean(ratios['dovetail']))} "
        f"| | | {times(mean(ratios['cold']))} | | | | |"
    )
    if 0 < len(ratios["both"]) < len(names):
        shown = f"{times(mean(ratios['torch']))} | {times(mean(ratios['both']))}"
        lines.append(f"| where both were measured | | {shown} | | | | | | | |")
    return [*lines, ""]


def show_micro(answers: Answers, bandwidth: Answers) -> list[str]:
    """Speed where matrices fit into the cache, beside eager; GiB/s where they do not, beside copies."""
    if not answers or "error" in answers:
        return []
    speeds = [record["copy"] for record in bandwidth.values()]
    copy = statistics.median(speeds) if speeds else math.nan
    lines = [
        f"**Micro functions** (copies in memory that no cache holds: {number(copy)} GiB/s; what is not "
        "faster in the cache is bound by its arithmetic)",
        "",
        "| function | eager ms | torch.compile | Dovetail | GiB/s in cache | in memory | of copy speed |",
        "|---|---|---|---|---|---|---|",
    ]
    ratios: dict[str, list[float]] = {"torch": [], "dovetail": []}
    for name, steady in answers.items():
        medians = steady["median_ms"]
        shown = {
            peer: medians["eager"] / medians[peer] if peer in medians else math.nan
            for peer in ("torch", "dovetail")
        }
        for peer, value in shown.items():
            if not math.isnan(value):
                ratios[peer].append(value)
        large = bandwidth.get(name, {"copy": math.nan, "dovetail": math.nan})
        small = MICRO[name](SMALL).bytes_moved / medians.get("dovetail", math.nan) * 1e3 / 2**30
        lines.append(
            f"| {name} | {medians['eager']:.3f} | {times(shown['torch'])} | {times(shown['dovetail'])} "
            f"| {number(small)} | {number(large['dovetail'])} "
            f"| {number(100 * large['dovetail'] / large['copy'], 0)} % |"
        )
    lines.append(
        f"| geometric mean | | {times(mean(ratios['torch']))} | {times(mean(ratios['dovetail']))} | | | |"
    )
    return [*lines, ""]


def show_machinery(answers: Answers) -> list[str]:
    lines = []
    calls = answers.get("overhead", {}).get("call_us", {})
    if calls:
        lines.append(
            "Call of a one-kernel function on 8 elements: "
            + ", ".join(f"{peer} {us:.1f} µs" for peer, us in calls.items())
            + ".  "
        )
    guards = answers.get("guards", {}).get("guards_us", {})
    for peer, by_depth in guards.items():
        lines.append(
            f"Hook and guards of a stack of 1, 8, 32 layers, {peer}: "
            + ", ".join(f"{us:.1f}" for us in by_depth.values())
            + " µs.  "
        )
    for peer in ("torch", "dovetail"):
        seconds = [answers.get(f"depth/{peer}/{layers}", {}).get("first_s", math.nan) for layers in (8, 64)]
        if not any(map(math.isnan, seconds)):
            lines.append(
                f"Cold first call of 8 and 64 identical layers, {peer}: {seconds[0]:.2f} s and "
                f"{seconds[1]:.2f} s ({seconds[1] / seconds[0]:.1f}x).  "
            )
    extra = answers.get("import", {}).get("seconds", math.nan)
    if not math.isnan(extra):
        lines.append(f"`import dovetail` beyond `import torch`: {1e3 * extra:.0f} ms.")
    return lines


def times(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}x"


def number(value: float, digits: int = 2) -> str:
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def write_readme(readme: Path, text: str) -> None:
    """Put the tables between the markers; a README without markers is left alone."""
    if not readme.exists():
        return
    old = readme.read_text()
    pattern = re.escape(MARKERS[0]) + r".*?" + re.escape(MARKERS[1])
    readme.write_text(re.sub(pattern, lambda _: f"{MARKERS[0]}\n{text}{MARKERS[1]}", old, flags=re.DOTALL))
