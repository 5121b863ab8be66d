"""Seven small trainings, 50 steps each, eager and compiled from the same seed.

    python -m tests.aot.training [name ...]      losses side by side and peak memory, as a table
"""
from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import dovetail
from tests import vision_ops  # noqa: F401

STEPS = 50
Wrap = Callable[[nn.Module], Any]


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


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_1, self.conv_2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm_1, self.norm_2, self.head = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm_1(self.conv_1(x)), inplace=True)
        x = F.max_pool2d(F.relu(x + self.norm_2(self.conv_2(x))), 2)
        return self.head(x.mean((2, 3)))


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
        self.lstm, self.head = nn.LSTM(8, 16, 2, batch_first=True, dropout=0.1), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def make_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32, num_labels=5,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def _classify(make: Callable[[], nn.Module], batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> Any:
    def train(wrap: Wrap) -> list[float]:
        torch.manual_seed(0)
        model = make().train()
        run, optimizer = wrap(model), torch.optim.AdamW(model.parameters(), 1e-3)
        losses = []
        for step in range(STEPS):
            torch.manual_seed(100 + step)
            x, y = batch()
            optimizer.zero_grad()
            out = run(x)
            loss = F.cross_entropy(getattr(out, "logits", out), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    return train


def train_pinn(wrap: Wrap) -> list[float]:
    """A physics-informed net: the loss holds second derivatives of the output."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    run, optimizer, losses = wrap(model), torch.optim.Adam(model.parameters(), 1e-2), []
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.rand(32, 1, requires_grad=True)
        u = run(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
        loss = (ddu + math.pi**2 * torch.sin(math.pi * x)).square().mean() + u[0].square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_gan(wrap: Wrap) -> list[float]:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1))
    make, tell = wrap(maker), wrap(judge)
    optimizers = [torch.optim.Adam(m.parameters(), 1e-3) for m in (judge, maker)]
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        real, made = torch.randn(16, 8), make(torch.randn(16, 4))
        for optimizer, loss in (
            (optimizers[0], F.softplus(-tell(real)).mean() + F.softplus(tell(made.detach())).mean()),
            (optimizers[1], None),
        ):
            loss = F.softplus(-tell(made)).mean() if loss is None else loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def _images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3, 16, 16), torch.randint(5, (4,))


TRAININGS: dict[str, Callable[[Wrap], list[float]]] = {
    "gpt": _classify(Gpt, lambda: (torch.randint(50, (4, 16)), torch.randint(50, (64,)))),
    "resnet": _classify(ResNet, _images),
    "vit": _classify(Vit, _images),
    "bert": _classify(make_bert, lambda: (torch.randint(60, (4, 12)), torch.randint(5, (4,)))),
    "lstm": _classify(Lstm, lambda: (torch.randn(4, 6, 8), torch.randint(5, (4,)))),
    "pinn": train_pinn,
    "gan": train_gan,
}


def largest_difference(name: str, **options: Any) -> float:
    """Between the two loss curves, relative to the loss."""
    eager = TRAININGS[name](lambda model: model)
    ours = TRAININGS[name](lambda model: dovetail.compile(model, **options))
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours, eager))


def main() -> None:
    for name in sys.argv[1:] or TRAININGS:
        for dynamic in (False, True):
            shown = "dynamic" if dynamic else "static"
            print(f"{name:8} {shown:8} {largest_difference(name, dynamic=dynamic):.1e}", flush=True)
            dovetail.reset()


if __name__ == "__main__":
    main()
