"""The last programs for the race: younger models of libraries, and steps of training and simulation.

Each builder returns what is compiled and a function that uses it once, as in `programs.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.programs import (
    DEVICE,
    Built,
    decode,
    hf,
    images,
    inferring,
    scaled,
    timm_infer,
    timm_train,
    training,
)
from benchmarks.snippets import BRAIN, HALF, differentiating, numbers
from benchmarks.studies import LLAMA, vision


def model_of(model_class: str, config: Callable[[], Any], dtype: torch.dtype = HALF) -> nn.Module:
    import transformers

    return (
        getattr(transformers, model_class)(config())
        .to(DEVICE, dtype if DEVICE == "cuda" else torch.float32)
        .eval()
    )


def wav2vec_infer() -> Built:
    import transformers

    model = model_of("Wav2Vec2Model", transformers.Wav2Vec2Config)
    sound = torch.randn(
        scaled(8, 1), scaled(160000, 4000), device=DEVICE, dtype=next(model.parameters()).dtype
    )
    return model, inferring(sound)


def masked_images_train() -> Built:
    """Masked autoencoder of images: which patches are kept is drawn in every step."""
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    model = ViTMAEForPreTraining(ViTMAEConfig()).to(DEVICE).train()
    x = images(16)
    return model, training(model, lambda fn: fn(pixel_values=x).loss)


def detection_infer() -> Built:
    """A transformer that finds objects: convolutions, encoder, decoder with queries."""

    class Finder(nn.Module):
        def __init__(self, width: int = 256, queries: int = 100) -> None:
            super().__init__()
            self.stem = nn.Sequential(
                *[
                    nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU())
                    for a, b in ((3, 32), (32, 64), (64, 128), (128, 256), (256, width))
                ]
            )
            self.body = nn.Transformer(width, 8, 3, 3, 1024, batch_first=True)
            self.queries = nn.Parameter(torch.randn(queries, width))
            self.rows, self.columns = (
                nn.Parameter(torch.rand(50, width // 2)),
                nn.Parameter(torch.rand(50, width // 2)),
            )
            self.classes, self.boxes = nn.Linear(width, 92), nn.Linear(width, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.stem(x)
            h, w = x.shape[-2:]
            places = torch.cat(
                [self.columns[:w].unsqueeze(0).repeat(h, 1, 1), self.rows[:h].unsqueeze(1).repeat(1, w, 1)],
                -1,
            ).flatten(0, 1)
            found = self.body(places + x.flatten(2).mT, self.queries.expand(x.shape[0], -1, -1))
            return self.classes(found), self.boxes(found).sigmoid()

    dtype = HALF if DEVICE == "cuda" else torch.float32
    return Finder().to(DEVICE, dtype).eval(), inferring(images(8, scaled(512, 96), dtype))


def encoder_infer() -> Built:
    """nn.TransformerEncoder with a padding mask, in training mode of dropout zero."""
    layer = nn.TransformerEncoderLayer(
        512, 8, 2048, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
    )
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).to(DEVICE)
    x = numbers(scaled(16, 2), scaled(512, 16), 512)
    padding = torch.arange(x.shape[1], device=DEVICE) >= torch.randint(
        4, x.shape[1], (x.shape[0], 1), device=DEVICE
    )
    return model, training(model, lambda fn: fn(x, src_key_padding_mask=padding).float().square().mean())


def mixer_scan_train() -> Built:
    """A gated linear recurrence over time, in chunks with a decay per channel, as in RWKV and GLA."""
    b, h, t, d, chunk = scaled(4, 1), 8, scaled(2048, 64), 64, 32
    q, k, v = (numbers(b, h, t, d, grad=True) for _ in range(3))
    decay = numbers(b, h, t, d, grad=True)

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
        q, k, v, g = (u.unflatten(2, (-1, chunk)) for u in (q, k, v, F.logsigmoid(decay) / 16))
        total = g.cumsum(-2)
        within = (q * total.exp()) @ (k * (-total).exp()).mT
        mask = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
        out = within.masked_fill(~mask, 0) @ v
        states = (k * (total[..., -1:, :] - total).exp()).mT @ v
        state, earlier = torch.zeros_like(states[:, :, 0]), []
        for i in range(states.shape[2]):
            earlier.append(state)
            state = state * total[:, :, i, -1, :, None].exp() + states[:, :, i]
        out = out + (q * total.exp()) @ torch.stack(earlier, 2)
        return out.square().mean()

    return loss, differentiating(q, k, v, decay)


def delta_rule() -> Built:
    """DeltaNet's recurrence, step by step."""
    b, h, t, d = scaled(16, 1), 8, scaled(64, 8), 64
    q, k, v = (numbers(b, h, t, d) for _ in range(3))
    beta = torch.rand(b, h, t, device=DEVICE)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        state, outs, k = torch.zeros(b, h, d, d, device=q.device), [], F.normalize(k, dim=-1)
        for i in range(q.shape[2]):
            ki, vi = k[:, :, i], v[:, :, i]
            old = (state * ki[..., None]).sum(-2)
            state = state + ki[..., None] * (beta[:, :, i, None] * (vi - old))[..., None, :]
            outs.append((state * q[:, :, i, :, None]).sum(-2))
        return torch.stack(outs, 2)

    return forward, inferring(q, k, v, beta)


def muon_like_step() -> Built:
    """AdamW with weight decay by groups, gradient clipping by the norm of all, a warm-up: as code."""
    shapes = [
        (scaled(1024, 32), scaled(1024, 32)),
        (scaled(4096, 64), scaled(1024, 32)),
        (scaled(1024, 32),),
    ] * 8
    weights = [numbers(*s) for s in shapes]
    grads = [torch.randn_like(p) for p in weights]
    first, second = [torch.zeros_like(p) for p in weights], [torch.zeros_like(p) for p in weights]
    count = torch.zeros((), device=DEVICE)

    def step(weights: list[torch.Tensor], grads: list[torch.Tensor]) -> torch.Tensor:
        count.add_(1)
        rate = 1e-3 * torch.clamp(count / 100, max=1.0)
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        scale = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
        for p, g, m, s in zip(weights, grads, first, second):
            g = g * scale
            m.mul_(0.9).add_(g, alpha=0.1)
            s.mul_(0.99).addcmul_(g, g, value=0.01)
            update = m / (1 - 0.9**count) / ((s / (1 - 0.99**count)).sqrt() + 1e-8)
            p.sub_(rate * (update + (0.1 * p if p.dim() > 1 else 0.0)))
        return norm

    return step, inferring(weights, grads)


def focal_pyramid_loss() -> Built:
    """Focal loss and generalised IoU over the levels of a pyramid."""
    n = scaled(16, 2)
    sizes = [(s, s) for s in (scaled(64, 8), scaled(32, 4), scaled(16, 4))]
    scores = [numbers(n, 80, *s, grad=True) for s in sizes]
    boxes = [torch.rand(n, 4, *s, device=DEVICE).requires_grad_() for s in sizes]
    truth = [torch.randint(0, 81, (n, *s), device=DEVICE) for s in sizes]
    goal = [torch.rand(n, 4, *s, device=DEVICE) for s in sizes]

    def loss(*leaves: torch.Tensor) -> torch.Tensor:
        total = leaves[0].new_zeros(())
        for score, box, label, want in zip(leaves[:3], leaves[3:], truth, goal):
            hot = F.one_hot(label, 81)[..., :80].permute(0, 3, 1, 2).to(score.dtype)
            p = score.sigmoid()
            ce = F.binary_cross_entropy_with_logits(score, hot, reduction="none")
            pt = p * hot + (1 - p) * (1 - hot)
            focal = (0.25 * hot + 0.75 * (1 - hot)) * (1 - pt) ** 2 * ce
            x, y = torch.minimum(box, want), torch.maximum(box, want)
            inter, hull = x.sum(1).clamp(min=0), y.sum(1)
            iou = inter / (hull + 1e-6)
            positive = (label < 80).to(score.dtype)
            total = total + focal.sum() / positive.sum().clamp(min=1) + ((1 - iou) * positive).mean()
        return total

    return loss, differentiating(*scores, *boxes)


def mel_train() -> Built:
    """Log-mel features, SpecAugment-like masks and a small convolutional classifier."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("window", torch.hann_window(400))
            self.register_buffer("mel", torch.rand(201, 80))
            self.body = nn.Sequential(
                nn.Conv1d(80, 256, 5, 2, 2),
                nn.BatchNorm1d(256),
                nn.SiLU(),
                nn.Conv1d(256, 256, 5, 2, 2, groups=256),
                nn.Conv1d(256, 256, 1),
                nn.GLU(1),
                nn.Conv1d(128, 256, 3, 1, 1),
                nn.BatchNorm1d(256),
                nn.SiLU(),
            )
            self.head = nn.Linear(512, 35)

        def forward(self, sound: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
            power = torch.stft(sound, 400, 160, window=self.window, return_complex=True).abs().square()
            mel = (power.mT @ self.mel).clamp(min=1e-10).log10().mT
            mel = (torch.maximum(mel, mel.amax((1, 2), keepdim=True) - 8.0) + 4.0) / 4.0
            at = torch.arange(mel.shape[-1], device=mel.device)
            mel = mel.masked_fill(((at >= start) & (at < start + 10))[:, None], 0.0)
            x = self.body(mel)
            return self.head(torch.cat([x.mean(-1), x.std(-1)], -1))

    n = scaled(64, 2)
    model, sound = Net().to(DEVICE), numbers(n, scaled(16000, 4000))
    start, truth = torch.randint(0, 20, (n, 1), device=DEVICE), torch.randint(0, 35, (n,), device=DEVICE)
    return model, training(model, lambda fn: F.cross_entropy(fn(sound, start), truth), amp=False)


def heads_grouped_train() -> Built:
    """Grouped-query attention with a softcap, a window and sinks, written out in plain operations."""
    b, t, h, g, d = scaled(2, 1), scaled(1024, 32), 16, 4, 64
    q, k, v = (
        numbers(b, t, h, d, dtype=BRAIN, grad=True),
        *(numbers(b, t, g, d, dtype=BRAIN, grad=True) for _ in "kv"),
    )
    sinks = numbers(h, dtype=BRAIN, grad=True)

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        k, v = (u.repeat_interleave(h // g, 2) for u in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / d**0.5
        scores = 30 * torch.tanh(scores / 30)
        at = torch.arange(t, device=q.device)
        allowed = (at[:, None] >= at) & (at[:, None] - at < 256)
        scores = scores.masked_fill(~allowed, float("-inf"))
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(b, -1, t, 1)], -1)
        weights = scores.float().softmax(-1).to(q.dtype)[..., :-1]
        return torch.einsum("bhqk,bkhd->bqhd", weights, v).float().square().mean()

    return loss, differentiating(q, k, v, sinks)


def message_train() -> Built:
    """A network over a graph: messages on edges, sums, means and maxima at nodes."""

    class Net(nn.Module):
        def __init__(self, width: int = 64) -> None:
            super().__init__()
            self.edge, self.node = nn.Linear(2 * width + 8, width), nn.Linear(3 * width + width, width)
            self.norm = nn.BatchNorm1d(width)

        def forward(self, x: torch.Tensor, e: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                m = F.relu(self.edge(torch.cat([x[a], x[b], e], -1)))
                where = b[:, None].expand_as(m)
                total = torch.zeros_like(x).index_add(0, b, m)
                count = torch.zeros_like(x[:, :1]).index_add(0, b, torch.ones_like(m[:, :1])).clamp(min=1)
                most = torch.zeros_like(x).scatter_reduce(0, where, m, "amax", include_self=True)
                x = x + F.relu(self.norm(self.node(torch.cat([x, total, total / count, most], -1))))
            return x.mean()

    nodes, edges = scaled(50000, 100), scaled(400000, 500)
    model = Net().to(DEVICE)
    x, e = numbers(nodes, 64), numbers(edges, 8)
    a, b = (torch.randint(0, nodes, (edges,), device=DEVICE) for _ in "ab")
    return model, training(model, lambda fn: fn(x, e, a, b), amp=False)


def super_resolution_train() -> Built:
    """Residual dense blocks, pixel shuffle, a total-variation term."""

    class Dense(nn.Module):
        def __init__(self, width: int = 32, grow: int = 16) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv2d(width + i * grow, grow, 3, padding=1) for i in range(4))
            self.join = nn.Conv2d(width + 4 * grow, width, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = [x]
            for layer in self.layers:
                parts.append(F.leaky_relu(layer(torch.cat(parts, 1)), 0.2))
            return x + 0.2 * self.join(torch.cat(parts, 1))

    first, last = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 12, 3, padding=1)
    model = nn.Sequential(first, *[Dense() for _ in range(4)], last, nn.PixelShuffle(2)).to(DEVICE)
    x, y = images(16, scaled(96, 24)), images(16, scaled(192, 48))

    def loss(fn: Any) -> torch.Tensor:
        out = fn(x).float()
        smooth = (out[..., 1:] - out[..., :-1]).abs().mean() + (
            out[..., 1:, :] - out[..., :-1, :]
        ).abs().mean()
        return F.l1_loss(out, y) + 0.1 * smooth

    return model, training(model, loss)


def actor_critic_train() -> Built:
    """A step of soft actor-critic: a squashed Gaussian, two critics, a temperature, averaged targets."""

    def net(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Linear(a, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, b))

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.one, self.two = net(24, 12), net(30, 1), net(30, 1)
            self.old_one, self.old_two = net(30, 1), net(30, 1)
            self.temperature = nn.Parameter(torch.zeros(()))

        def act(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            mean, log_std = self.actor(state).chunk(2, -1)
            normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp(), validate_args=False)
            raw = normal.rsample()
            action = raw.tanh()
            return action, (normal.log_prob(raw) - 2 * (math.log(2) - raw - F.softplus(-2 * raw))).sum(-1)

        def forward(self, s: torch.Tensor, a: torch.Tensor, r: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                then, likely = self.act(n)
                sa = torch.cat([n, then], -1)
                value = torch.minimum(self.old_one(sa), self.old_two(sa)).squeeze(-1)
                goal = r + 0.99 * (value - self.temperature.exp() * likely)
                for old, new in ((self.old_one, self.one), (self.old_two, self.two)):
                    for p, q in zip(old.parameters(), new.parameters()):
                        p.lerp_(q, 0.005)
            here = torch.cat([s, a], -1)
            critic = F.mse_loss(self.one(here).squeeze(-1), goal) + F.mse_loss(
                self.two(here).squeeze(-1), goal
            )
            action, likely = self.act(s)
            sa = torch.cat([s, action], -1)
            best = torch.minimum(self.one(sa), self.two(sa)).squeeze(-1)
            actor = (self.temperature.exp().detach() * likely - best).mean()
            return critic + actor - (self.temperature * (likely.detach() - 6)).mean()

    n = scaled(4096, 32)
    model = Agent().to(DEVICE)
    s, a, r, then = numbers(n, 24), numbers(n, 6), numbers(n), numbers(n, 24)
    return model, training(model, lambda fn: fn(s, a, r, then), amp=False)


def euler_fluid() -> Built:
    """Stable fluids: advection by gathering, diffusion and pressure by Jacobi's iteration."""
    s = scaled(1024, 32)
    u, v, ink = numbers(s, s), numbers(s, s), torch.rand(s, s, device=DEVICE)

    def advect(field: torch.Tensor, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y, x = torch.meshgrid(*(torch.arange(s, device=u.device, dtype=u.dtype) for _ in "yx"), indexing="ij")
        x, y = (x - u).clamp(0, s - 1.001), (y - v).clamp(0, s - 1.001)
        x0, y0 = x.long(), y.long()
        fx, fy = x - x0, y - y0
        top = field[y0, x0] * (1 - fx) + field[y0, x0 + 1] * fx
        return top * (1 - fy) + (field[y0 + 1, x0] * (1 - fx) + field[y0 + 1, x0 + 1] * fx) * fy

    def step(u: torch.Tensor, v: torch.Tensor, ink: torch.Tensor) -> tuple[torch.Tensor, ...]:
        u, v = advect(u, u, v), advect(v, u, v)
        div = (torch.roll(u, -1, 1) - torch.roll(u, 1, 1) + torch.roll(v, -1, 0) - torch.roll(v, 1, 0)) / 2
        p = torch.zeros_like(div)
        for _ in range(20):
            p = (
                torch.roll(p, 1, 0) + torch.roll(p, -1, 0) + torch.roll(p, 1, 1) + torch.roll(p, -1, 1) - div
            ) / 4
        u = u - (torch.roll(p, -1, 1) - torch.roll(p, 1, 1)) / 2
        v = v - (torch.roll(p, -1, 0) - torch.roll(p, 1, 0)) / 2
        return u, v, advect(ink, u, v)

    return step, inferring(u, v, ink)


def layered_embedding_train() -> Built:
    """Tables of several sizes, bags, crosses and a deep part: click prediction with DCN's crosses."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(n, 16) for n in (1000, 50000, 200, 10000, 30, 7000))
            self.bag = nn.EmbeddingBag(20000, 16, mode="mean")
            width = 16 * 7 + 13
            self.w = nn.ParameterList(nn.Parameter(torch.randn(width, width) / width) for _ in range(3))
            self.b = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(3))
            self.deep = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 1))

        def forward(self, ids: torch.Tensor, bags: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
            parts = [table(ids[:, i]) for i, table in enumerate(self.tables)]
            x0 = x = torch.cat([*parts, self.bag(bags), dense.clamp(min=0).log1p()], -1)
            for w, b in zip(self.w, self.b):
                x = x0 * (x @ w + b) + x
            return self.deep(x).squeeze(-1)

    n = scaled(16384, 32)
    model = Net().to(DEVICE)
    ids, bags = torch.randint(0, 30, (n, 6), device=DEVICE), torch.randint(0, 20000, (n, 20), device=DEVICE)
    dense, truth = numbers(n, 13), torch.randint(0, 2, (n,), device=DEVICE).float()
    return model, training(
        model, lambda fn: F.binary_cross_entropy_with_logits(fn(ids, bags, dense), truth), amp=False
    )


def vector_math() -> Built:
    """Special functions, cross products, norms, quaternions."""
    n = scaled(4_000_000, 1000)
    p, q = F.normalize(numbers(n, 4), dim=-1), F.normalize(numbers(n, 4), dim=-1)
    points = numbers(n, 3)

    def forward(p: torch.Tensor, q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        w1, v1, w2, v2 = p[:, :1], p[:, 1:], q[:, :1], q[:, 1:]
        w, v = w1 * w2 - (v1 * v2).sum(-1, keepdim=True), w1 * v2 + w2 * v1 + torch.linalg.cross(v1, v2)
        t = 2 * torch.linalg.cross(v, x)
        turned = x + w * t + torch.linalg.cross(v, t)
        angle = torch.atan2(turned[:, 1], turned[:, 0])
        return torch.stack([angle, torch.erf(turned.norm(dim=-1)), torch.lgamma(turned[:, 2].abs() + 1)], -1)

    return forward, inferring(p, q, points)


def speculative_accept() -> Built:
    """Which drafted tokens are kept: two distributions, ratios, a cumulative product, a new draw."""
    b, k, vocabulary = scaled(64, 4), 8, scaled(32000, 100)
    draft, goal = numbers(b, k, vocabulary), numbers(b, k + 1, vocabulary)
    tokens, u = torch.randint(0, vocabulary, (b, k), device=DEVICE), torch.rand(b, k, device=DEVICE)

    def forward(draft: torch.Tensor, goal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p, q = goal.softmax(-1), draft.softmax(-1)
        at = tokens.unsqueeze(-1)
        ratio = (p[:, :k].gather(-1, at) / q.gather(-1, at).clamp(min=1e-9)).squeeze(-1)
        kept = (u < ratio).cumprod(-1).sum(-1)
        rest = (p[:, :k] - q).clamp(min=0)
        rest = torch.cat([rest / rest.sum(-1, keepdim=True).clamp(min=1e-9), p[:, k:]], 1)
        chosen = rest.gather(1, kept.view(-1, 1, 1).expand(-1, 1, vocabulary)).squeeze(1)
        return kept, chosen.argmax(-1)

    return forward, inferring(draft, goal)


def adapters_train() -> Built:
    """Low-rank adapters around a frozen model in bf16."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear, rank: int = 16) -> None:
            super().__init__()
            self.base = base.requires_grad_(False).to(BRAIN)
            self.a = nn.Parameter(torch.randn(rank, base.in_features) / rank)
            self.b = nn.Parameter(torch.zeros(base.out_features, rank))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + F.linear(F.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype)) * 2.0

    width = scaled(2048, 64)
    layers = [nn.Sequential(nn.RMSNorm(width), Adapted(nn.Linear(width, width)), nn.SiLU()) for _ in range(8)]
    model = nn.Sequential(*layers).to(DEVICE)
    x = numbers(scaled(4096, 16), width, dtype=BRAIN)
    return model, training(model, lambda fn: fn(x).float().square().mean(), amp=False)


def normalised_rows() -> Built:
    """Weights of fp8-like range: scales by block, rounding, products, undone again."""
    n, d = scaled(8192, 32), scaled(4096, 128)
    x = numbers(n, d, dtype=BRAIN)

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = x.view(n, -1, 32).float()
        scale = torch.exp2(torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12))) - 2)
        codes = (blocks / scale).clamp(-6, 6)
        step = torch.exp2(torch.floor(torch.log2(codes.abs().clamp(min=1.0))) - 1)
        codes = torch.round(codes / step) * step
        return (codes * scale).view_as(x).to(x.dtype), scale.squeeze(-1)

    return forward, inferring(x)


def segment_pool() -> Built:
    """Ragged rows kept flat: sums, means and softmax per segment, by offsets."""
    n, rows = scaled(2_000_000, 500), scaled(20000, 10)
    x = numbers(n, 8)
    where = torch.randint(0, rows, (n,), device=DEVICE).sort().values

    def forward(x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        spread = where[:, None].expand_as(x)
        most = torch.full((rows, 8), -torch.inf, device=x.device).scatter_reduce(0, spread, x, "amax")
        e = (x - most[where]).exp()
        total = torch.zeros(rows, 8, device=x.device).index_add(0, where, e)
        return torch.zeros(rows, 8, device=x.device).index_add(0, where, e / total[where] * x)

    return forward, inferring(x, where)


def kernel_ridge() -> Built:
    """A Gaussian kernel, Cholesky, a solve, a log-determinant: a Gaussian process by hand."""
    n = scaled(2048, 32)
    x, y = numbers(n, 8), numbers(n)
    raw = [torch.zeros((), device=DEVICE, requires_grad=True) for _ in range(3)]

    def loss(length: torch.Tensor, scale: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        z = x / F.softplus(length)
        k = F.softplus(scale) * torch.exp(-0.5 * torch.cdist(z, z).square())
        k = k + (F.softplus(noise) + 1e-4) * torch.eye(n, device=x.device)
        root = torch.linalg.cholesky(k)
        alpha = torch.cholesky_solve(y[:, None], root)[:, 0]
        return 0.5 * y @ alpha + root.diagonal().log().sum()

    return loss, differentiating(*raw)


TRIALS: dict[str, Callable[[], Built]] = {
    "modernbert_train": hf(
        "ModernBertForMaskedLM", "ModernBertConfig", 16, 512, train=True, num_hidden_layers=12
    ),
    "electra_train": hf("ElectraForMaskedLM", "ElectraConfig", 16, 256, train=True),
    "xlnet_infer": hf("XLNetModel", "XLNetConfig", 8, 256, dtype=HALF, n_layer=6),
    "olmo2_train": hf("Olmo2ForCausalLM", "Olmo2Config", 4, 1024, train=True, **LLAMA),
    "qwen3_moe_train": hf(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        4,
        512,
        train=True,
        moe_intermediate_size=512,
        num_experts=16,
        num_experts_per_tok=4,
        **LLAMA,
    ),
    "deepseek_infer": hf(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        2,
        512,
        hidden_size=1024,
        intermediate_size=2048,
        moe_intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=16,
        n_routed_experts=16,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=4,
        q_lora_rank=256,
        kv_lora_rank=128,
        vocab_size=32000,
    ),
    "mamba2_train": hf(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        2,
        512,
        train=True,
        hidden_size=512,
        num_heads=16,
        head_dim=64,
        num_hidden_layers=6,
        vocab_size=32000,
        n_groups=1,
        state_size=64,
    ),
    "gemma3_decode": decode("Gemma3ForCausalLM", "Gemma3TextConfig", 4, head_dim=64, **LLAMA),
    "granite_decode": decode("GraniteForCausalLM", "GraniteConfig", 1, **LLAMA),
    "siglip_infer": vision("SiglipVisionModel", "SiglipVisionConfig", 32),
    "wav2vec_infer": wav2vec_infer,
    "masked_images_train": masked_images_train,
    "eva_infer": timm_infer("eva02_small_patch14_224", 32),
    "nfnet_train": timm_train("nfnet_f0", 16),
    "edgenext_train": timm_train("edgenext_small", 32),
    "davit_train": timm_train("davit_tiny", 16),
    "efficientvit_infer": timm_infer("efficientvit_b1", 64),
    "fastvit_infer": timm_infer("fastvit_t8", 64),
    "repvit_infer": timm_infer("repvit_m1_1", 64),
    "poolformer_infer": timm_infer("poolformer_s12", 64),
    "inception_train": timm_train("inception_v3", 32),
    "dla_infer": timm_infer("dla34", 32),
    "cait_infer": timm_infer("cait_xxs24_224", 32),
    "levit_infer": timm_infer("levit_192", 64),
    "volo_train": timm_train("volo_d1_224", 16),
    "detection_infer": detection_infer,
    "encoder_infer": encoder_infer,
    "mixer_scan_train": mixer_scan_train,
    "delta_rule": delta_rule,
    "muon_like_step": muon_like_step,
    "focal_pyramid_loss": focal_pyramid_loss,
    "mel_train": mel_train,
    "heads_grouped_train": heads_grouped_train,
    "message_train": message_train,
    "super_resolution_train": super_resolution_train,
    "actor_critic_train": actor_critic_train,
    "euler_fluid": euler_fluid,
    "layered_embedding_train": layered_embedding_train,
    "vector_math": vector_math,
    "speculative_accept": speculative_accept,
    "adapters_train": adapters_train,
    "normalised_rows": normalised_rows,
    "segment_pool": segment_pool,
    "kernel_ridge": kernel_ridge,
}
