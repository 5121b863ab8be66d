"""How long capturing takes, beside torch._dynamo, both with backend="eager" and in one run.

    python -m benchmarks.capture -o docs/results/capture.md

Processor time of the first call of a freshly built model less that of an eager call; the median of three, in
turns. What both load on their first use ever is loaded before, by capturing another small function.
"""
from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from torch import nn

import dovetail
from benchmarks.models import WORKLOADS
from tests.sweeps.workers import machine_line

PEERS: Final[dict[str, Callable[[Any], Any]]] = {
    "dovetail": lambda f: dovetail.compile(f, backend="eager"),
    "torch._dynamo": lambda f: torch.compile(f, backend="eager"),
}
LAYERS: Final = (4, 8, 16, 32, 64)
ROUNDS: Final = 3


def encoder(layers: int) -> tuple[Any, tuple[Any, ...]]:
    one = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(one, layers, enable_nested_tensor=False), (torch.randn(1, 4, 16),)


def named(name: str) -> tuple[Any, tuple[Any, ...]]:
    work = WORKLOADS[name]()
    return work.run, work.inputs


def seconds(f: Callable[..., Any], inputs: tuple[Any, ...]) -> float:
    start = time.process_time()
    f(*inputs)
    return time.process_time() - start


def measure(make: Callable[[], tuple[Any, tuple[Any, ...]]]) -> dict[str, float]:
    found: dict[str, list[float]] = {peer: [] for peer in PEERS}
    for _ in range(ROUNDS):
        for peer, compile_ in PEERS.items():
            torch._dynamo.reset()
            dovetail.reset()
            model, inputs = make()
            eager = min(seconds(model, inputs) for _ in range(2))
            found[peer].append(seconds(compile_(model), inputs) - eager)
    return {peer: median(times) for peer, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("models", nargs="*", default=["bert", "gpt2", "llama", "t5", "vit_tiny", "resnet18"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    measure(lambda: (lambda x: x + 1, (torch.ones(2),)))
    rows = {f"encoder, {n} layers": measure(lambda n=n: encoder(n)) for n in LAYERS}
    rows |= {name: measure(lambda name=name: named(name)) for name in given.models}
    lines = [f"| model | {' | '.join(f'{peer}, ms' for peer in PEERS)} | times faster |", "|---|---|---|---|"]
    for name, times in rows.items():
        ours, theirs = times.values()
        lines.append(f"| {name} | {1e3 * ours:.1f} | {1e3 * theirs:.1f} | {theirs / ours:.1f} |")
    command = f"python -m benchmarks.capture -o {given.output}"
    how = " ".join((__doc__ or "").split("capture.md")[-1].split())
    head = f"# Capture\n\nCommand: `{command}`. {how}\n\n{machine_line()}\n\n"
    text = head + "\n".join(lines) + "\n"
    print(text)
    if given.output is not None:
        given.output.write_text(text)


if __name__ == "__main__":
    main()
