"""Seven small trainings, eager and compiled from the same seed: loss curves of 50 steps, peak memory of one.

    python -m tests.aot.training [name ...]      a table
    python -m tests.aot.training --write         and docs/results/training.md
"""
from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

import dovetail
from tests import vision_ops  # noqa: F401
from tests.aot.peak import peak_of, visible_temporaries
from tests.sweeps.workers import machine_line

STEPS = 50
BUDGETS = (1.0, 0.5)
Wrap: TypeAlias = "Callable[[nn.Module], Any]"
Start: TypeAlias = "Callable[[Wrap], Training]"


@dataclass(frozen=True, slots=True)
class Training:
    """`step()` gives the losses of one step."""

    step: Callable[[], list[float]]
    models: list[nn.Module]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        drop = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=drop)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(b, t, d)), drop)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), drop)


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(50, 32), nn.Parameter(torch.randn(16, 32) * 0.02)
        self.blocks = nn.ModuleList([Block(32, 4, 0.1) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_1, self.conv_2 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)), inplace=True)
        return F.relu(x + self.norm_2(self.conv_2(y)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList([Residual() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x)), inplace=True)
        for block in self.blocks:
            x = block(x)
        return self.head(F.max_pool2d(x, 2).mean((2, 3)))


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 32, 4, 4), nn.Parameter(torch.zeros(1, 1, 32))
        layer = lambda: nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True, norm_first=True)  # noqa: E731
        self.blocks, self.head = nn.Sequential(layer(), layer()), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        return self.head(self.blocks(x)[:, 0])


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 32, 2, batch_first=True, dropout=0.1), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def make_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32, num_labels=5,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def _classify(make: Callable[[], nn.Module], batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> Start:
    def start(wrap: Wrap) -> Training:
        model = make().train()
        run, optimizer = wrap(model), torch.optim.AdamW(model.parameters(), 1e-3)

        def step() -> list[float]:
            x, y = batch()
            optimizer.zero_grad()
            out = run(x)
            loss = F.cross_entropy(getattr(out, "logits", out), y)
            loss.backward()
            optimizer.step()
            return [loss.item()]

        return Training(step, [model])

    return start


def start_pinn(wrap: Wrap) -> Training:
    """A physics-informed net: the loss holds second derivatives of the output."""
    inner = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.Tanh())]
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), *inner, nn.Linear(32, 1))
    run, optimizer = wrap(model), torch.optim.Adam(model.parameters(), 1e-2)

    def step() -> list[float]:
        x = torch.rand(128, 1, requires_grad=True)
        u = run(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
        loss = (ddu + math.pi**2 * torch.sin(math.pi * x)).square().mean() + u[0].square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return [loss.item()]

    return Training(step, [model])


def start_gan(wrap: Wrap) -> Training:
    maker = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))
    judge = nn.Sequential(nn.Linear(8, 64), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(64, 1))
    make, tell = wrap(maker), wrap(judge)
    optimizers = [torch.optim.Adam(m.parameters(), 1e-3) for m in (judge, maker)]

    def learn(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def step() -> list[float]:
        real, made = torch.randn(256, 8), make(torch.randn(256, 4))
        told = F.softplus(-tell(real)).mean() + F.softplus(tell(made.detach())).mean()
        return [learn(optimizers[0], told), learn(optimizers[1], F.softplus(-tell(made)).mean())]

    return Training(step, [maker, judge])


def _images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3, 16, 16), torch.randint(5, (4,))


TRAININGS: dict[str, Start] = {
    "gpt": _classify(Gpt, lambda: (torch.randint(50, (4, 16)), torch.randint(50, (64,)))),
    "resnet": _classify(ResNet, _images),
    "vit": _classify(Vit, _images),
    "bert": _classify(make_bert, lambda: (torch.randint(60, (4, 12)), torch.randint(5, (4,)))),
    "lstm": _classify(Lstm, lambda: (torch.randn(16, 12, 8), torch.randint(5, (16,)))),
    "pinn": start_pinn,
    "gan": start_gan,
}


def losses_of(name: str, wrap: Wrap) -> list[float]:
    torch.manual_seed(0)
    training, losses = TRAININGS[name](wrap), []
    for step in range(STEPS):
        torch.manual_seed(100 + step)
        losses += training.step()
    return losses


def largest_difference(name: str, **options: Any) -> float:
    """Between the two loss curves, relative to the loss."""
    eager = losses_of(name, lambda model: model)
    ours = losses_of(name, lambda model: dovetail.compile(model, **options))
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours, eager))


def peak_bytes(name: str, budget: float | None) -> int:
    """Of a step that starts without gradients; a budget of None is eager."""
    options = {"activation_memory_budget": budget, "fallback_to_eager": False}
    wrap: Wrap = lambda model: model if budget is None else dovetail.compile(model, options=options)  # noqa: E731
    torch.manual_seed(0)
    with visible_temporaries():
        training = TRAININGS[name](wrap)
        for _ in range(3):
            training.step()
        for model in training.models:
            model.zero_grad(set_to_none=True)
        peak = peak_of(training.step)
    dovetail.reset()
    return peak


def row_of(name: str) -> str:
    static, dynamic = (largest_difference(name, dynamic=dynamic) for dynamic in (False, True))
    dovetail.reset()
    eager = peak_bytes(name, None)
    full, half = (peak_bytes(name, budget) / eager for budget in BUDGETS)
    return f"| {name} | {static:.1e} | {dynamic:.1e} | {eager:,} | {full:.3f} | {half:.3f} |"


HEAD = """# Training

Command: `make training`. Seven small trainings, eager and compiled from the same seed. Losses: the largest difference in 50 steps,
relative to eager's loss. Memory: the most bytes of tensors alive at once in one step that starts without gradients, as the allocator
reports them, temporaries of compiled programs included; compiled as a multiple of eager's.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=", ".join(TRAININGS))
    parser.add_argument("--write", action="store_true", help="write docs/results/training.md")
    chosen = parser.parse_args()
    names = chosen.names or list(TRAININGS)
    if unknown := [name for name in names if name not in TRAININGS]:
        parser.error(f"no training is called {', '.join(unknown)}; there are {', '.join(TRAININGS)}")
    lines = [
        "| training | losses, static | losses, `dynamic=True` | eager's peak bytes | compiled | `activation_memory_budget` 0.5 |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for name in names:
        lines.append(row_of(name))
        print(lines[-1], flush=True)
    print(f"{len(names)} of {len(TRAININGS)} trainings, {STEPS} steps each, eager and compiled; {machine_line()}")
    if chosen.write:
        Path("docs/results/training.md").write_text(HEAD + "\n".join([machine_line(), "", *lines, ""]))


if __name__ == "__main__":
    main()
