"""Compile a small GPT, show that it computes the same, and how fast it is.

make demo        or        python examples/demo.py
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import dovetail
from dovetail.explain.query import summary


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A GPT-2 in forty lines."""

    def __init__(
        self, words: int = 1000, width: int = 256, heads: int = 4, layers: int = 4, length: int = 128
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def median_ms(*calls: Callable[[], object], rounds: int = 15) -> list[float]:
    """Interleaved, so that a slow moment of the machine hits all of them."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, kept in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            kept.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(kept) for kept in times]


def train_step(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return loss.detach()


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    eager = GPT().to(device)
    compiled = dovetail.compile(copy.deepcopy(eager))
    ids = torch.randint(0, 1000, (4, 128), device=device)

    print(
        f"A GPT of {sum(p.numel() for p in eager.parameters()) / 1e6:.1f} M parameters, 4 layers, on the {device}\n"
    )
    with torch.no_grad():
        start = time.perf_counter()
        found = compiled(ids)
        first = time.perf_counter() - start
        expected = eager(ids)
        times = median_ms(lambda: eager(ids), lambda: compiled(ids))
    exact = copy.deepcopy(eager).double()
    with torch.no_grad():
        truth = exact(ids)
    print(f"inference   eager {times[0]:7.2f} ms   compiled {times[1]:7.2f} ms   {times[0] / times[1]:.2f}x")
    print(f"            first call {first:.2f} s, difference from eager {(found - expected).abs().max():.1e}")
    ours, theirs = ((value - truth).abs().max().item() for value in (found, expected))
    print(f"            error against fp64: eager {theirs:.1e}, compiled {ours:.1e}\n")

    losses = [train_step(model, ids).item() for model in (eager, compiled)]
    pairs = zip(eager.parameters(), compiled.parameters(), strict=True)
    worst = max(
        (a.grad - b.grad).abs().max().item() for a, b in pairs if a.grad is not None and b.grad is not None
    )
    times = median_ms(lambda: train_step(eager, ids), lambda: train_step(compiled, ids), rounds=8)
    print(f"training    eager {times[0]:7.2f} ms   compiled {times[1]:7.2f} ms   {times[0] / times[1]:.2f}x")
    print(f"            loss {losses[0]:.6f} and {losses[1]:.6f}, gradients differ by at most {worst:.1e}\n")

    report = dovetail.report()
    print(f"{summary(report)}\nthe whole story: {report.html('dovetail-demo.html')}")


if __name__ == "__main__":
    main()
