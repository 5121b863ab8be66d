"""More programs for the race: parts of models, losses, simulations and updates as people write them.

Each builder returns what is compiled and a function that uses it once, as in `programs.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.programs import DEVICE, LARGE, Built, Use, inferring, scaled, training

HALF = torch.float16 if LARGE else torch.float32
BRAIN = torch.bfloat16 if LARGE else torch.float32


def numbers(*size: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(size, device=DEVICE, dtype=dtype, requires_grad=grad)


def differentiating(*inputs: torch.Tensor) -> Use:
    """Loss and gradients by the inputs."""

    def use(fn: Any) -> Any:
        loss = fn(*inputs)
        loss.backward()
        for x in inputs:
            x.grad = None
        return loss

    return use


def segment_train() -> Built:
    """Features of four sizes, resized and joined; cross entropy by pixel."""

    class Head(nn.Module):
        def __init__(self, widths: tuple[int, ...], classes: int) -> None:
            super().__init__()
            self.lines = nn.ModuleList(nn.Conv2d(w, 128, 1) for w in widths)
            self.mix = nn.Sequential(nn.Conv2d(512, 128, 1, bias=False), nn.BatchNorm2d(128), nn.ReLU())
            self.last = nn.Conv2d(128, classes, 1)

        def forward(self, features: list[torch.Tensor], truth: torch.Tensor) -> torch.Tensor:
            size = features[0].shape[2:]
            parts = [F.interpolate(line(f), size, mode="bilinear") for line, f in zip(self.lines, features)]
            logits = F.interpolate(self.last(self.mix(torch.cat(parts, 1))), scale_factor=4, mode="bilinear")
            return F.cross_entropy(logits, truth, ignore_index=255)

    widths, n, s = (32, 64, 160, 256), scaled(8, 1), scaled(128, 16)
    model = Head(widths, 21).to(DEVICE)
    features = [numbers(n, w, s >> k, s >> k) for k, w in enumerate(widths)]
    truth = torch.randint(0, 21, (n, 4 * s, 4 * s), device=DEVICE)
    return model, training(model, lambda fn: fn(features, truth))


def dice_loss() -> Built:
    n, s = scaled(16, 1), scaled(512, 32)
    logits = numbers(n, 4, s, s, grad=True)
    truth = torch.randint(0, 4, (n, s, s), device=DEVICE)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        p = logits.softmax(1)
        t = F.one_hot(truth, 4).permute(0, 3, 1, 2).to(p.dtype)
        both, sums = (p * t).sum((2, 3)), (p + t).sum((2, 3))
        return 1 - ((2 * both + 1) / (sums + 1)).mean()

    return loss, differentiating(logits)


def similarity() -> Built:
    """The structural similarity of two stacks of pictures."""
    a, b = (torch.rand(scaled(16, 1), 3, scaled(512, 32), scaled(512, 32), device=DEVICE) for _ in range(2))
    line = torch.exp(-((torch.arange(11, device=DEVICE) - 5.0) ** 2) / 4.5)
    window = (line[:, None] * line / line.sum() ** 2).expand(3, 1, 11, 11).contiguous()

    def score(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        mean = lambda x: F.conv2d(x, window, padding=5, groups=3)  # noqa: E731
        ma, mb = mean(a), mean(b)
        va, vb, both = mean(a * a) - ma * ma, mean(b * b) - mb * mb, mean(a * b) - ma * mb
        top = (2 * ma * mb + 1e-4) * (2 * both + 9e-4)
        return (top / ((ma * ma + mb * mb + 1e-4) * (va + vb + 9e-4))).mean((1, 2, 3))

    return score, inferring(a, b)


def clustering() -> Built:
    """One step of k-means."""
    points, centres = numbers(scaled(200_000, 500), 64), numbers(256, 64)

    def step(points: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
        near = torch.cdist(points, centres).argmin(1)
        sums = torch.zeros_like(centres).index_add_(0, near, points)
        counts = torch.zeros(len(centres), device=points.device).index_add_(
            0, near, torch.ones_like(points[:, 0])
        )
        return sums / counts.clamp(min=1)[:, None]

    return step, inferring(points, centres)


def codebook_train() -> Built:
    """Vector quantisation with a straight-through gradient."""

    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Embedding(1024, 64)

        def forward(self, z: torch.Tensor) -> torch.Tensor:
            flat = z.permute(0, 2, 3, 1).reshape(-1, 64)
            far = (
                flat.square().sum(1, keepdim=True)
                - 2 * flat @ self.codes.weight.t()
                + self.codes.weight.square().sum(1)
            )
            q = self.codes(far.argmin(1)).view(z.shape[0], *z.shape[2:], 64).permute(0, 3, 1, 2)
            loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
            return loss + (z + (q - z).detach()).square().mean()

    model = Codebook().to(DEVICE)
    z = numbers(scaled(32, 2), 64, scaled(64, 8), scaled(64, 8), grad=True)
    return model, training(model, lambda fn: fn(z), amp=False)


def tabular_train() -> Built:
    w = scaled(512, 32)
    layers = [nn.Sequential(nn.Linear(w, w), nn.BatchNorm1d(w), nn.ReLU(), nn.Dropout(0.1)) for _ in range(8)]
    model = nn.Sequential(*layers, nn.Linear(w, 1)).to(DEVICE)
    x, y = numbers(scaled(65536, 64), w), numbers(scaled(65536, 64), 1)
    return model, training(model, lambda fn: F.huber_loss(fn(x), y))


def point_net_train() -> Built:
    def layer(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift = nn.Sequential(layer(3, 64), layer(64, 128), layer(128, 1024))
            self.head = nn.Sequential(nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 40))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lift(x).max(2).values)

    model = Net().to(DEVICE)
    x, y = numbers(scaled(32, 2), 3, scaled(2048, 64)), torch.randint(0, 40, (scaled(32, 2),), device=DEVICE)
    return model, training(model, lambda fn: F.cross_entropy(fn(x), y))


def residual_block_infer() -> Built:
    """Group norm, SiLU, convolution twice, with a time embedding: a block of a diffusion model."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.GroupNorm(32, width) for _ in range(2))
            self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
            self.time = nn.Linear(width, width)

        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            h = self.convs[0](F.silu(self.norms[0](x))) + self.time(F.silu(t))[:, :, None, None]
            return x + self.convs[1](F.silu(self.norms[1](h)))

    w, s = scaled(320, 32), scaled(64, 8)
    model = nn.ModuleList(Block(w) for _ in range(4)).to(DEVICE, HALF).eval()

    def forward(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        for block in model:
            x = block(x, t)
        return x

    return forward, inferring(
        numbers(scaled(8, 1), w, s, s, dtype=HALF), numbers(scaled(8, 1), w, dtype=HALF)
    )


def compositing() -> Built:
    """Colours along rays, by what light is left: cumprod and sums."""
    rays, samples = scaled(65536, 64), 128
    density, colour = (
        torch.rand(rays, samples, device=DEVICE, requires_grad=True),
        numbers(rays, samples, 3, grad=True),
    )
    steps = torch.rand(rays, samples, device=DEVICE) / samples

    def render(density: torch.Tensor, colour: torch.Tensor) -> torch.Tensor:
        alpha = 1 - torch.exp(-F.relu(density) * steps)
        left = torch.cumprod(torch.cat((torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10), 1), 1)[:, :-1]
        weight = alpha * left
        return ((weight[..., None] * colour.sigmoid()).sum(1) - 0.5).square().mean() + weight.sum(1).var()

    return render, differentiating(density, colour)


def transport() -> Built:
    """Sinkhorn's iterations in log space."""
    n = scaled(2048, 64)
    cost = torch.rand(n, n, device=DEVICE)

    def plan(cost: torch.Tensor) -> torch.Tensor:
        k = -cost / 0.05
        u = v = torch.zeros(len(cost), device=cost.device)
        for _ in range(20):
            u = -math.log(len(cost)) - torch.logsumexp(k + v[None], 1)
            v = -math.log(len(cost)) - torch.logsumexp(k + u[:, None], 0)
        return torch.exp(k + u[:, None] + v[None])

    return plan, inferring(cost)


def policy_loss() -> Built:
    """Advantages by a loop over time, then the clipped loss."""
    t, n = scaled(128, 16), scaled(4096, 16)
    reward, value, done = numbers(t, n), numbers(t + 1, n), (torch.rand(t, n, device=DEVICE) < 0.01).float()
    logits, actions = numbers(t, n, 6, grad=True), torch.randint(0, 6, (t, n), device=DEVICE)
    before = torch.log_softmax(numbers(t, n, 6), -1).gather(-1, actions[..., None])[..., 0]

    def loss(logits: torch.Tensor) -> torch.Tensor:
        last, found = torch.zeros_like(reward[0]), []
        for i in range(len(reward) - 1, -1, -1):
            delta = reward[i] + 0.99 * value[i + 1] * (1 - done[i]) - value[i]
            last = delta + 0.99 * 0.95 * (1 - done[i]) * last
            found.append(last)
        gain = torch.stack(found[::-1])
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        log = torch.log_softmax(logits, -1)
        ratio = (log.gather(-1, actions[..., None])[..., 0] - before).exp()
        chosen = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        return -chosen.mean() + 0.01 * (log.exp() * log).sum(-1).mean()

    return loss, differentiating(logits)


def gumbel() -> Built:
    logits = numbers(scaled(65536, 64), 64, grad=True)

    def draw(logits: torch.Tensor) -> torch.Tensor:
        soft = F.gumbel_softmax(logits, tau=0.5)
        hard = F.one_hot(soft.argmax(-1), 64).to(soft.dtype)
        return ((hard - soft.detach() + soft) * logits).sum()

    return draw, differentiating(logits)


def averaging() -> Built:
    """The moving average of a model's weights."""
    w = scaled(1024, 32)
    sizes = [(w, w), (4 * w, w), (w,), (w, 4 * w), (4 * w,)] * scaled(8, 2)
    kept, new = ([numbers(*size) for size in sizes] for _ in range(2))

    def update() -> torch.Tensor:
        for a, b in zip(kept, new):
            a.mul_(0.999).add_(b, alpha=0.001)
        return kept[0]

    return update, inferring()


def clipping() -> Built:
    w = scaled(1024, 32)
    sizes = [(w, w), (4 * w, w), (w,), (w, 4 * w), (4 * w,)] * scaled(8, 2)
    params = [nn.Parameter(numbers(*size)) for size in sizes]
    for p in params:
        p.grad = torch.randn_like(p)

    def clip() -> torch.Tensor:
        return nn.utils.clip_grad_norm_(params, 1.0)

    return clip, inferring()


def byte_linear() -> Built:
    """A linear layer with weights of eight bits, for one token."""
    w = scaled(4096, 64)
    weight = torch.randint(-128, 128, (4 * w, w), device=DEVICE, dtype=torch.int8)
    scale, x = torch.rand(4 * w, device=DEVICE, dtype=BRAIN), numbers(1, w, dtype=BRAIN)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return F.silu(x @ (weight.to(x.dtype) * scale[:, None]).t())

    return forward, inferring(x)


def low_rank_train() -> Built:
    """Transformer blocks with frozen weights and small trained additions."""

    class Lora(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.base = nn.Linear(a, b, bias=False).requires_grad_(False)
            self.down, self.up = nn.Linear(a, 8, bias=False), nn.Linear(8, b, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + 2.0 * self.up(F.dropout(self.down(x), 0.05))

    class Block(nn.Module):
        def __init__(self, w: int) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(w), nn.RMSNorm(w)
            self.qkv, self.out = Lora(w, 3 * w), Lora(w, w)
            self.gate, self.down = Lora(w, 8 * w), Lora(4 * w, w)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, t, w = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, -1, 64).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
            a, g = self.gate(self.norm2(x)).chunk(2, -1)
            return x + self.down(F.silu(a) * g)

    w = scaled(2048, 64)
    model = nn.Sequential(*(Block(w) for _ in range(4))).to(DEVICE)
    x = numbers(scaled(4, 1), scaled(512, 16), w)
    return model, training(model, lambda fn: fn(x).square().mean())


def sound_infer() -> Built:
    """Depthwise convolutions over time with norms between, as separators of speech have them."""

    def block(w: int, far: int) -> nn.Module:
        return nn.Sequential(nn.Conv1d(w, 2 * w, 1), nn.PReLU(), nn.GroupNorm(1, 2 * w),
                             nn.Conv1d(2 * w, 2 * w, 3, padding=far, dilation=far, groups=2 * w),
                             nn.PReLU(), nn.GroupNorm(1, 2 * w), nn.Conv1d(2 * w, w, 1))  # fmt: skip

    blocks = nn.ModuleList(block(128, 2**k) for k in range(8)).to(DEVICE).eval()

    def forward(x: torch.Tensor) -> torch.Tensor:
        for b in blocks:
            x = x + b(x)
        return x

    return forward, inferring(numbers(scaled(8, 1), 128, scaled(8000, 200)))


def flow_integration() -> Built:
    """A small field followed by Runge and Kutta's method."""
    net = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)).to(
        DEVICE
    )

    def follow(x: torch.Tensor) -> torch.Tensor:
        def f(t: float, x: torch.Tensor) -> torch.Tensor:
            return net(torch.cat((x, torch.full_like(x[:, :1], t)), 1))

        h = 0.05
        for i in range(20):
            t = i * h
            a = f(t, x)
            b = f(t + h / 2, x + h / 2 * a)
            c = f(t + h / 2, x + h / 2 * b)
            d = f(t + h, x + h * c)
            x = x + h / 6 * (a + 2 * b + 2 * c + d)
        return x

    return follow, inferring(numbers(scaled(16384, 64), 2))


def beam_step() -> Built:
    """Scores of the next tokens, penalties, the best few and the cache in their order."""
    b, beams, vocab = scaled(16, 2), 5, scaled(32000, 200)
    logits, scores = numbers(b * beams, vocab, dtype=HALF), numbers(b, beams)
    ids = torch.randint(0, vocab, (b * beams, 64), device=DEVICE)
    cache = numbers(b * beams, 8, scaled(512, 8), 64, dtype=HALF)

    def step(logits: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor, cache: torch.Tensor) -> Any:
        seen = logits.gather(1, ids)
        logits = logits.scatter(1, ids, torch.where(seen < 0, seen * 1.2, seen / 1.2))
        total = torch.log_softmax(logits.float(), -1).view(b, beams, -1) + scores[:, :, None]
        best, at = total.view(b, -1).topk(beams)
        rows = (at // vocab + torch.arange(b, device=at.device)[:, None] * beams).view(-1)
        return best, torch.cat((ids[rows], (at % vocab).view(-1, 1)), 1), cache[rows]

    return step, inferring(logits, scores, ids, cache)


def relative_attention_train() -> Built:
    """Scores by position with a shift of rows, as in Transformer-XL."""
    b, h, t, d = scaled(8, 1), scaled(8, 2), scaled(512, 16), 64
    q, k, v = (numbers(b, h, t, d, grad=True) for _ in range(3))
    places = numbers(h, t, d, grad=True)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        near = torch.einsum("bhid,hjd->bhij", q, places)
        shifted = F.pad(near, (1, 0)).view(b, h, t + 1, t)[:, :, 1:].reshape(b, h, t, t)
        scores = (q @ k.transpose(-1, -2) + shifted) / d**0.5
        mask = torch.ones(t, t, device=q.device, dtype=torch.bool).triu(1)
        return (scores.masked_fill(mask, -1e9).softmax(-1) @ v).square().mean()

    return attend, differentiating(q, k, v, places)


def bags() -> Built:
    """Sums of embeddings for categories, crossed by products."""
    tables = [numbers(scaled(100_000, 100), 32, grad=True) for _ in range(8)]
    ids = torch.randint(0, scaled(100_000, 100), (scaled(4096, 16), 8, 10), device=DEVICE)

    def score(*tables: torch.Tensor) -> torch.Tensor:
        bags = torch.stack([F.embedding(ids[:, i], w).mean(1) for i, w in enumerate(tables)], 1)
        crossed = bags @ bags.transpose(1, 2)
        one, other = torch.triu_indices(8, 8, 1, device=bags.device)
        return crossed[:, one, other].sigmoid().mean() + bags.sum(1).square().mean()

    return score, differentiating(*tables)


def norm_rows_train() -> Built:
    """Norm, dropout and residual around nothing else, in sixteen bits."""
    w = scaled(4096, 64)
    x, y = (numbers(scaled(8192, 16), w, dtype=BRAIN, grad=True) for _ in range(2))
    weight, bias = (torch.ones(w, device=DEVICE, dtype=BRAIN, requires_grad=True) for _ in range(2))

    def forward(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x + F.dropout(F.gelu(y), 0.1), (w,), weight, bias).float().square().mean()

    return forward, differentiating(x, y, weight, bias)


def chamfer() -> Built:
    """Distances of two clouds of points, both ways."""
    a, b = (
        numbers(scaled(8, 2), scaled(4096, 64), 3, grad=True),
        numbers(scaled(8, 2), scaled(4096, 64), 3, grad=True),
    )

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        far = (a[:, :, None] - b[:, None]).square().sum(-1)
        return far.min(2).values.mean() + far.min(1).values.mean()

    return loss, differentiating(a, b)


def warping() -> Built:
    """Pictures sampled where an affine map says."""
    x, theta = (
        numbers(scaled(16, 2), 32, scaled(128, 16), scaled(128, 16), grad=True),
        numbers(scaled(16, 2), 2, 3, grad=True),
    )

    def loss(x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, padding_mode="border", align_corners=False).square().mean()

    return loss, differentiating(x, theta)


def linear_attention() -> Built:
    b, h, t, d = scaled(8, 1), scaled(8, 2), scaled(1024, 32), 32
    q, k, v = (numbers(b, h, t, d, grad=True) for _ in range(3))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.cumsum(torch.einsum("bhtd,bhte->bhtde", k, v), 2)
        norm = torch.einsum("bhtd,bhtd->bht", q, k.cumsum(2))
        return (torch.einsum("bhtd,bhtde->bhte", q, state) / (norm[..., None] + 1e-6)).square().mean()

    return attend, differentiating(q, k, v)


def window_attention() -> Built:
    """Blocks of queries see their own block and the one before."""
    b, h, n, w, d = scaled(4, 1), scaled(8, 2), scaled(64, 4), 64, 64
    q, k, v = (numbers(b, h, n * w, d, dtype=BRAIN, grad=True) for _ in range(3))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        blocks = lambda x: x.view(b, h, n, w, d)  # noqa: E731
        both = lambda x: torch.cat((F.pad(blocks(x), (0, 0, 0, 0, 1, 0))[:, :, :-1], blocks(x)), 3)  # noqa: E731
        scores = blocks(q) @ both(k).transpose(-1, -2) / d**0.5
        i, j = torch.arange(w, device=q.device)[:, None], torch.arange(2 * w, device=q.device)[None] - w
        mask = (j > i) | (j <= i - w)
        return (scores.masked_fill(mask, float("-inf")).softmax(-1) @ both(v)).float().square().mean()

    return attend, differentiating(q, k, v)


def flow_train() -> Built:
    """Affine couplings with their log determinants."""

    class Coupling(nn.Module):
        def __init__(self, w: int) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(w, 256), nn.ReLU(), nn.Linear(256, 2 * w))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = x.chunk(2, -1)
            shift, scale = self.net(a).chunk(2, -1)
            scale = torch.tanh(scale)
            return torch.cat((b * scale.exp() + shift, a), -1), scale.sum(-1)

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.ModuleList(Coupling(32) for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = torch.zeros_like(x[:, 0])
            for step in self.steps:
                x, log = step(x)
                total = total + log
            return (0.5 * x.square().sum(-1) - total).mean()

    model, x = Flow().to(DEVICE), numbers(scaled(16384, 64), 64)
    return model, training(model, lambda fn: fn(x), amp=False)


def mixture_loss() -> Built:
    n, k = scaled(65536, 64), 16
    weights, means, logs = (numbers(n, k, grad=True) for _ in range(3))
    y = numbers(n, 1)

    def loss(weights: torch.Tensor, means: torch.Tensor, logs: torch.Tensor) -> torch.Tensor:
        log = -0.5 * ((y - means) / logs.exp()).square() - logs - 0.5 * math.log(2 * math.pi)
        return -torch.logsumexp(F.log_softmax(weights, -1) + log, -1).mean()

    return loss, differentiating(weights, means, logs)


def video_train() -> Built:
    model = nn.Sequential(nn.Conv3d(3, 32, 3, padding=1), nn.BatchNorm3d(32), nn.ReLU(), nn.MaxPool3d(2),
                          nn.Conv3d(32, 64, 3, padding=1), nn.InstanceNorm3d(64), nn.GELU(),
                          nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(64, 10)).to(DEVICE)  # fmt: skip
    x = numbers(scaled(8, 1), 3, scaled(16, 4), scaled(64, 8), scaled(64, 8))
    y = torch.randint(0, 10, (scaled(8, 1),), device=DEVICE)
    return model, training(model, lambda fn: F.cross_entropy(fn(x), y, label_smoothing=0.1))


def upscale_train() -> Built:
    """Sub-pixel convolution, transposed convolution and an L1 loss on edges."""
    model = nn.Sequential(nn.Conv2d(3, 64, 5, padding=2), nn.PReLU(), nn.Conv2d(64, 48, 3, padding=1),
                          nn.PixelShuffle(4), nn.ConvTranspose2d(3, 3, 4, 2, 1)).to(DEVICE)  # fmt: skip
    x, y = (
        numbers(scaled(8, 1), 3, scaled(64, 8), scaled(64, 8)),
        numbers(scaled(8, 1), 3, scaled(512, 64), scaled(512, 64)),
    )
    edges = lambda t: (t[..., 1:, :] - t[..., :-1, :], t[..., 1:] - t[..., :-1])  # noqa: E731

    def loss(fn: Any) -> torch.Tensor:
        out = fn(x)
        return F.l1_loss(out, y) + sum(F.l1_loss(a, b) for a, b in zip(edges(out), edges(y)))

    return model, training(model, loss)


def penalty_train() -> Built:
    """A critic with a penalty on its gradient."""
    critic = nn.Sequential(nn.Linear(128, 512), nn.LeakyReLU(0.2), nn.Linear(512, 512), nn.LeakyReLU(0.2),
                           nn.Linear(512, 1)).to(DEVICE)  # fmt: skip
    real, made = numbers(scaled(4096, 32), 128), numbers(scaled(4096, 32), 128)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.critic = critic

        def forward(self, real: torch.Tensor, made: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
            x = (mix * real + (1 - mix) * made).requires_grad_()
            (g,) = torch.autograd.grad(self.critic(x).sum(), x, create_graph=True)
            return (
                self.critic(made).mean() - self.critic(real).mean() + 10 * (g.norm(dim=1) - 1).square().mean()
            )

    model, mix = Loss(), torch.rand(scaled(4096, 32), 1, device=DEVICE)
    return model, training(model, lambda fn: fn(real, made, mix), amp=False)


def gated_cells() -> Built:
    """A GRU by hand over a sequence."""
    w, t, b = scaled(512, 16), scaled(64, 8), scaled(256, 4)
    x, h = numbers(b, t, w), numbers(b, w)
    wx, wh, bias = numbers(w, 3 * w) / w**0.5, numbers(w, 3 * w) / w**0.5, numbers(3 * w)

    def forward(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        found, given = [], x @ wx + bias
        for i in range(x.shape[1]):
            r, z, n = given[:, i].chunk(3, -1)
            hr, hz, hn = (h @ wh).chunk(3, -1)
            z = torch.sigmoid(z + hz)
            h = (1 - z) * torch.tanh(n + torch.sigmoid(r + hr) * hn) + z * h
            found.append(h)
        return torch.stack(found, 1)

    return forward, inferring(x, h)


def filtering() -> Built:
    """Kalman filters, many at a time: small matrices."""
    n, d, t = scaled(8192, 16), 4, scaled(32, 4)
    step, seen = numbers(d, d) / 4 + torch.eye(d, device=DEVICE), numbers(2, d)
    ys = numbers(t, n, 2)

    def run(ys: torch.Tensor) -> torch.Tensor:
        mean, cov = torch.zeros(n, d, device=ys.device), torch.eye(d, device=ys.device).expand(n, d, d)
        for y in ys:
            mean, cov = mean @ step.T, step @ cov @ step.T + 0.01 * torch.eye(d, device=ys.device)
            s = seen @ cov @ seen.T + 0.1 * torch.eye(2, device=ys.device)
            det = s[:, 0, 0] * s[:, 1, 1] - s[:, 0, 1] * s[:, 1, 0]
            inverse = (
                torch.stack((s[:, 1, 1], -s[:, 0, 1], -s[:, 1, 0], s[:, 0, 0]), -1).view(n, 2, 2)
                / det[:, None, None]
            )
            gain = cov @ seen.T @ inverse
            mean = mean + (gain @ (y - mean @ seen.T)[..., None])[..., 0]
            cov = cov - gain @ seen @ cov
        return mean

    return run, inferring(ys)


def spectrogram() -> Built:
    sound, bank = numbers(scaled(32, 2), scaled(160_000, 4000)), torch.rand(80, 257, device=DEVICE)
    window = torch.hann_window(512, device=DEVICE)

    def features(sound: torch.Tensor) -> torch.Tensor:
        power = torch.stft(sound, 512, 160, window=window, return_complex=True).abs().square()
        mel = torch.log((bank @ power).clamp(min=1e-10))
        return (mel - mel.mean(-1, keepdim=True)) / (mel.std(-1, keepdim=True) + 1e-5)

    return features, inferring(sound)


def ranking() -> Built:
    """Metrics of ranked lists: sort, gather, cumulated gains."""
    scores, truth = (
        numbers(scaled(4096, 32), 500),
        torch.randint(0, 5, (scaled(4096, 32), 500), device=DEVICE),
    )

    def metric(scores: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        order = scores.argsort(-1, descending=True)
        gain = 2.0 ** truth.gather(-1, order) - 1
        best = 2.0 ** truth.sort(-1, descending=True).values - 1
        weight = 1 / torch.log2(torch.arange(500, device=scores.device) + 2)
        hits = (truth.gather(-1, order) > 2).float()
        precision = hits.cumsum(-1) / torch.arange(1, 501, device=scores.device)
        return ((gain * weight).sum(-1) / (best * weight).sum(-1)).mean() + (precision * hits).sum(-1).mean()

    return metric, inferring(scores, truth)


def patches_train() -> Built:
    """Overlapping patches taken, changed and put back."""
    x, w = (
        numbers(scaled(8, 1), 16, scaled(128, 16), scaled(128, 16), grad=True),
        numbers(144, 144, grad=True),
    )

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        columns = F.unfold(x, 3, padding=1)
        made = F.gelu(w @ columns)
        return F.fold(made, x.shape[2:], 3, padding=1).square().mean()

    return loss, differentiating(x, w)


def triplets() -> Built:
    """The hardest pairs of a batch."""
    x, labels = (
        numbers(scaled(2048, 32), 128, grad=True),
        torch.randint(0, 64, (scaled(2048, 32),), device=DEVICE),
    )

    def loss(x: torch.Tensor) -> torch.Tensor:
        x = F.normalize(x)
        far = (2 - 2 * x @ x.t()).clamp(min=1e-12).sqrt()
        same = labels[:, None] == labels[None]
        near = torch.where(same, far, float("-inf")).amax(1)
        other = torch.where(same, float("inf"), far).amin(1)
        return F.relu(near - other + 0.3).mean() + F.kl_div(
            F.log_softmax(-far, 1), same / same.sum(1, True), reduction="batchmean"
        )

    return loss, differentiating(x)


def lattice() -> Built:
    """Cells of a game of life on bytes, ten steps."""
    board = (torch.rand(scaled(2048, 64), scaled(2048, 64), device=DEVICE) < 0.3).to(torch.uint8)

    def play(board: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            around = sum(board.roll((i, j), (0, 1)) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j)
            board = ((around == 3) | ((around == 2) & (board == 1))).to(torch.uint8)
        return board

    return play, inferring(board)


def hashing() -> Built:
    """Features of points from hashed grids of several sizes."""
    points = torch.rand(scaled(100_000, 64), 3, device=DEVICE)
    table = numbers(8, scaled(1 << 17, 1 << 8), 2, grad=True)

    def encode(table: torch.Tensor) -> torch.Tensor:
        found = []
        for level in range(8):
            at = points * (16 * 1.5**level)
            low = at.floor()
            apart = at - low
            total: Any = 0
            for corner in range(8):
                bits = torch.tensor([corner >> i & 1 for i in range(3)], device=points.device)
                place = low.long() + bits
                key = (place[:, 0] ^ (place[:, 1] * 2654435761) ^ (place[:, 2] * 805459861)) % table.shape[1]
                weight = torch.where(bits.bool(), apart, 1 - apart).prod(-1, keepdim=True)
                total = total + weight * table[level, key]
            found.append(total)
        return torch.cat(found, -1).square().mean()

    return encode, differentiating(table)


SNIPPETS: dict[str, Callable[[], Built]] = {
    made.__name__: made
    for made in (
        segment_train, dice_loss, similarity, clustering, codebook_train, tabular_train, point_net_train,
        residual_block_infer, compositing, transport, policy_loss, gumbel, averaging, clipping, byte_linear,
        low_rank_train, sound_infer, flow_integration, beam_step, relative_attention_train, bags,
        norm_rows_train, chamfer, warping, linear_attention, window_attention, flow_train, mixture_loss,
        video_train, upscale_train, penalty_train, gated_cells, filtering, spectrogram, ranking,
        patches_train, triplets, lattice, hashing,
    )
}  # fmt: skip
