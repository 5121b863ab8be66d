"""Time a program in eager and compiled, side by side.

    bench("model.py:make", "default")     make() returns (model, args)
    bench(None, "default")                a few small programs that come with Dovetail

Calls are interleaved and medians compared, so that a slow moment of the machine hits both.
"""
from __future__ import annotations

import runpy
import statistics
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from dovetail import front
from dovetail.race import seconds_of

Case: TypeAlias = "tuple[str, Callable[..., Any], tuple[Any, ...]]"


SMALL = """
import torch
from torch import nn
from torch.nn import functional as F

x, w = torch.randn(2048, 1024), torch.randn(1024)
mlp = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.GELU(), nn.Linear(256, 10))
cases = [
    ("softmax 2048x1024", lambda x: torch.softmax(x, -1), (x,)),
    ("residual + layer norm", lambda x, r, w: F.layer_norm(x + r, (1024,), w), (x, x.clone(), w)),
    ("bias + gelu", lambda x, w: F.gelu(x + w), (x, w)),
    ("three-layer MLP", mlp, (torch.randn(64, 256),)),
    ("x * 2 + 1 on 8 elements", lambda x: x * 2 + 1, (torch.ones(8),)),
]
"""
"""Programs that come along, as text: functions in Dovetail's own files are never compiled."""


def cases_of(what: str | None) -> Iterator[Case]:
    if what is None:
        space: dict[str, Any] = {"__name__": "small_cases"}
        exec(compile(SMALL, "<small cases>", "exec"), space)
        yield from space["cases"]
    else:
        path, _, name = what.partition(":")
        model, args = runpy.run_path(path)[name or "make"]()
        yield what, model, tuple(args)


def compare_times(
    model: Callable[..., Any], args: tuple[Any, ...], mode: str, budget: float = 2.0
) -> tuple[float, float, float]:
    """Seconds of the first compiled call, medians of eager and compiled."""
    compiled = front.compile(model, mode=mode)
    with torch.no_grad():
        first = seconds_of(compiled, args)
        rounds = max(5, min(2000, int(budget / 2 / max(seconds_of(model, args), 1e-7))))
        pairs = [(seconds_of(model, args), seconds_of(compiled, args)) for _ in range(rounds)]
    return first, statistics.median(e for e, _ in pairs), statistics.median(c for _, c in pairs)


def bench(what: str | None, mode: str = "default") -> str:
    """A table of eager and compiled."""
    lines = [f"{'program':<28}{'eager':>12}{'compiled':>12}{'speed-up':>10}{'first call':>12}"]
    for name, model, args in cases_of(what):
        front.reset()
        first, eager, compiled = compare_times(model, args, mode)
        times = f"{eager * 1e6:>9.1f} µs{compiled * 1e6:>9.1f} µs"
        lines.append(f"{name:<28}{times}{eager / compiled:>9.2f}x{first * 1e3:>9.0f} ms")
    return "\n".join(lines)
