"""A fourth set of programs for the race: models of libraries not asked before, and the code of papers.

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
    LARGE,
    Built,
    decode,
    hf,
    inferring,
    scaled,
    timm_infer,
    timm_train,
    training,
)
from benchmarks.snippets import BRAIN, differentiating, numbers


def vision(
    model_class: str, config_class: str, batch: int, size: int = 224, **settings: Any
) -> Callable[[], Built]:
    """A vision model of transformers, in half precision."""

    def build() -> Built:
        import transformers

        small = {} if LARGE else {"num_hidden_layers": 2}
        config = getattr(transformers, config_class)(**{**settings, **small})
        dtype = torch.float16 if LARGE else torch.float32
        model = getattr(transformers, model_class)(config).to(DEVICE, dtype).eval()
        return model, inferring(numbers(scaled(batch, 1), 3, size, size, dtype=dtype))

    return build


def speech_infer() -> Built:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    dtype = torch.float16 if LARGE else torch.float32
    config = Wav2Vec2Config() if LARGE else Wav2Vec2Config(num_hidden_layers=2)
    model = Wav2Vec2Model(config).to(DEVICE, dtype).eval()
    return model, inferring(numbers(scaled(8, 1), scaled(80_000, 4000), dtype=dtype))


def bart_train() -> Built:
    from transformers import BartConfig, BartForConditionalGeneration

    small = {} if LARGE else {"encoder_layers": 2, "decoder_layers": 2, "d_model": 64}
    config = BartConfig(**{"encoder_layers": 6, "decoder_layers": 6, "d_model": 768, **small})
    model = BartForConditionalGeneration(config).to(DEVICE).train()
    ids = torch.randint(5, 1000, (scaled(8, 1), scaled(256, 16)), device=DEVICE)
    return model, training(model, lambda fn: fn(input_ids=ids, labels=ids).loss)


def transformer_denoiser_train() -> Built:
    """Blocks whose norms are scaled and shifted by the time step."""
    width, heads = scaled(768, 32), scaled(12, 2)

    class Modulated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
            self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
            )
            self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

        def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c)[:, None].chunk(6, -1)
            b, n, _ = x.shape
            h = self.norm1(x) * (1 + scale1) + shift1
            q, k, v = self.qkv(h).view(b, n, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
            h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, -1)
            x = x + gate1 * self.out(h)
            return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.embed = nn.Conv2d(4, width, 2, 2), nn.Embedding(1000, width)
            self.blocks = nn.ModuleList(Modulated() for _ in range(scaled(8, 2)))
            self.last = nn.Linear(width, 16)

        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            h, c = self.patches(x).flatten(2).transpose(1, 2), self.embed(t)
            for block in self.blocks:
                h = block(h, c)
            side = x.shape[-1] // 2
            h = self.last(h).view(-1, side, side, 2, 2, 4)
            return torch.einsum("nhwpqc->nchpwq", h).reshape_as(x)

    model = Denoiser().to(DEVICE)
    x = numbers(scaled(32, 2), 4, scaled(32, 8), scaled(32, 8))
    t = torch.randint(0, 1000, (len(x),), device=DEVICE)
    return model, training(model, lambda fn: F.mse_loss(fn(x, t).float(), x))


def latent_attention_train() -> Built:
    """Keys and values from one small latent, positions in a part of the heads."""
    width, heads, latent, plain, turned = (
        scaled(1024, 32),
        scaled(16, 2),
        scaled(256, 16),
        scaled(64, 8),
        scaled(32, 4),
    )

    class Latent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(width, heads * (plain + turned), bias=False)
            self.down = nn.Linear(width, latent + turned, bias=False)
            self.norm = nn.RMSNorm(latent)
            self.up = nn.Linear(latent, heads * 2 * plain, bias=False)
            self.out = nn.Linear(heads * plain, width, bias=False)

        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            b, n, _ = x.shape

            def turn(u: torch.Tensor) -> torch.Tensor:
                even, odd = u[..., ::2], u[..., 1::2]
                return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)

            q, q_turned = self.q(x).view(b, n, heads, -1).transpose(1, 2).split((plain, turned), -1)
            packed, k_turned = self.down(x).split((latent, turned), -1)
            k, v = self.up(self.norm(packed)).view(b, n, heads, -1).transpose(1, 2).split(plain, -1)
            k_turned = turn(k_turned[:, None]).expand(-1, heads, -1, -1)
            q, k = torch.cat((q, turn(q_turned)), -1), torch.cat((k, k_turned), -1)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + self.out(y.transpose(1, 2).reshape(b, n, -1))

    layers = nn.ModuleList(Latent() for _ in range(4)).to(DEVICE)
    n = scaled(1024, 16)
    angle = torch.outer(torch.arange(n), 1e4 ** (-torch.arange(turned // 2) / (turned // 2))).to(DEVICE)
    x = numbers(scaled(4, 1), n, width)

    def forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x, cos, sin)
        return x

    return forward, training(layers, lambda fn: fn(x, angle.cos(), angle.sin()).float().square().mean())


def preference_loss() -> Built:
    """Clipped ratios of the probabilities of tokens, with a penalty of divergence."""
    n, steps, words = scaled(8, 2), scaled(512, 8), scaled(32_000, 50)
    logits = numbers(n, steps, words, dtype=BRAIN, grad=True)
    ids = torch.randint(0, words, (n, steps), device=DEVICE)
    old, other = (-numbers(n, steps).abs() - 9 for _ in range(2))
    mask, gain = (torch.rand(n, steps, device=DEVICE) > 0.2).float(), numbers(n)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        logp = torch.log_softmax(logits.float(), -1).gather(-1, ids[..., None]).squeeze(-1)
        entropy = -(logits.float().softmax(-1) * logits.float().log_softmax(-1)).sum(-1)
        ratio = torch.exp(logp - old)
        scaled_gain = ((gain - gain.mean()) / (gain.std() + 1e-4))[:, None]
        kept = torch.min(ratio * scaled_gain, ratio.clamp(0.8, 1.2) * scaled_gain)
        drift = torch.exp(other - logp) - (other - logp) - 1
        per_token = -(kept - 0.04 * drift + 0.001 * entropy)
        return ((per_token * mask).sum(1) / mask.sum(1)).mean()

    return loss, differentiating(logits)


def residual_codes() -> Built:
    """Vectors coded by eight tables, each coding what the one before left."""
    tables = numbers(8, scaled(1024, 16), scaled(128, 8))
    x = numbers(scaled(16_384, 32), scaled(128, 8))

    def forward(x: torch.Tensor) -> torch.Tensor:
        rest, codes = x, []
        for table in tables:
            distance = rest.pow(2).sum(1, keepdim=True) - 2 * rest @ table.t() + table.pow(2).sum(1)
            code = distance.argmin(1)
            rest = rest - table[code]
            codes.append(code)
        return torch.stack(codes, 1), x - rest

    return lambda x: forward(x)[1], inferring(x)


def spectra_loss() -> Built:
    """Magnitudes of spectra of three resolutions, of a wave and its likeness."""
    n, length = scaled(16, 1), scaled(65_536, 4096)
    guess, truth = numbers(n, length, grad=True), numbers(n, length)
    sizes = (512, 1024, 2048)
    windows = [torch.hann_window(size, device=DEVICE) for size in sizes]

    def loss(guess: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device=guess.device)
        for size, window in zip(sizes, windows):
            a, b = (
                torch.stft(w, size, size // 4, window=window, return_complex=True).abs().clamp(min=1e-5)
                for w in (guess, truth)
            )
            total = total + torch.norm(b - a) / torch.norm(b) + F.l1_loss(a.log(), b.log())
        return total

    return loss, differentiating(guess)


def process_train() -> Built:
    """The likelihood of a Gaussian process with a kernel for each dimension."""
    n, d = scaled(1024, 16), 8
    x, y = numbers(n, d), numbers(n)
    lengths, noise = (
        torch.zeros(d, device=DEVICE, requires_grad=True),
        torch.tensor(-2.0, device=DEVICE, requires_grad=True),
    )

    def loss(lengths: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        z = x / lengths.exp()
        square = (z[:, None] - z[None]).square().sum(-1)
        kernel = torch.exp(-0.5 * square) + (noise.exp() + 1e-4) * torch.eye(n, device=x.device)
        root = torch.linalg.cholesky(kernel)
        solved = torch.cholesky_solve(y[:, None], root)[:, 0]
        return 0.5 * y @ solved + root.diagonal().log().sum() + 0.5 * n * math.log(2 * math.pi)

    return loss, differentiating(lengths, noise)


def edge_conv_train() -> Built:
    """Points with features of their nearest neighbours, the largest answer kept."""
    n, points, k = scaled(16, 1), scaled(1024, 32), scaled(20, 4)
    layers = nn.ModuleList(
        nn.Sequential(nn.Conv2d(2 * a, b, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2))
        for a, b in ((3, 64), (64, 64), (64, 128))
    ).to(DEVICE)
    x = numbers(n, 3, points)

    def forward(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            inner = x.transpose(1, 2) @ x
            square = (x * x).sum(1)
            near = (2 * inner - square[:, :, None] - square[:, None]).topk(k, -1)[1]
            rows = x.transpose(1, 2)
            found = torch.gather(
                rows[:, None].expand(-1, points, -1, -1), 2, near[..., None].expand(-1, -1, -1, x.shape[1])
            )
            own = rows[:, :, None].expand_as(found)
            x = layer(torch.cat((found - own, own), -1).permute(0, 3, 1, 2)).amax(-1)
        return x

    return forward, training(layers, lambda fn: fn(x).square().mean(), amp=False)


def ring_decode() -> Built:
    """One token through layers that keep the last positions in a ring."""
    width, heads, kept, n = scaled(2048, 32), scaled(16, 2), scaled(1024, 16), scaled(4, 1)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.gate, self.up = (
                nn.Linear(width, 3 * width, bias=False),
                nn.Linear(width, 3 * width, bias=False),
            )
            self.down = nn.Linear(3 * width, width, bias=False)
            self.register_buffer("keys", torch.zeros(n, heads, kept, width // heads))
            self.register_buffer("values", torch.zeros(n, heads, kept, width // heads))

        def forward(self, x: torch.Tensor, place: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(self.norm1(x)).view(n, 1, 3, heads, -1).permute(2, 0, 3, 1, 4)
            self.keys.index_copy_(2, place, k)
            self.values.index_copy_(2, place, v)
            score = (q @ self.keys.transpose(-1, -2)) * (width // heads) ** -0.5
            y = torch.softmax(score.float() + mask, -1).to(x.dtype) @ self.values
            x = x + self.out(y.transpose(1, 2).reshape(n, 1, width))
            h = self.norm2(x)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    layers = nn.ModuleList(Layer() for _ in range(scaled(8, 2))).to(DEVICE, BRAIN)
    x, step = numbers(n, 1, width, dtype=BRAIN), torch.tensor([kept + 5], device=DEVICE)

    def forward(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        place = step % kept
        mask = torch.where(torch.arange(kept, device=x.device) <= step, 0.0, float("-inf"))
        for layer in layers:
            x = layer(x, place, mask)
        return x

    return forward, inferring(x, step)


def autoencoder_train() -> Built:
    """A convolutional variational autoencoder."""
    w = scaled(64, 8)
    down = nn.Sequential(
        nn.Conv2d(3, w, 4, 2, 1), nn.GroupNorm(8, w), nn.SiLU(),
        nn.Conv2d(w, 2 * w, 4, 2, 1), nn.GroupNorm(8, 2 * w), nn.SiLU(),
        nn.Conv2d(2 * w, 2 * 16, 3, 1, 1),
    )  # fmt: skip
    up = nn.Sequential(
        nn.Conv2d(16, 2 * w, 3, 1, 1), nn.SiLU(), nn.Upsample(scale_factor=2),
        nn.Conv2d(2 * w, w, 3, 1, 1), nn.GroupNorm(8, w), nn.SiLU(),
        nn.ConvTranspose2d(w, 3, 4, 2, 1),
    )  # fmt: skip
    both = nn.ModuleList((down, up)).to(DEVICE)
    x = torch.rand(scaled(32, 2), 3, scaled(128, 16), scaled(128, 16), device=DEVICE)

    def loss(x: torch.Tensor) -> torch.Tensor:
        mean, logvar = down(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)
        divergence = -0.5 * (1 + logvar - mean.pow(2) - logvar.exp()).sum((1, 2, 3)).mean()
        return F.binary_cross_entropy_with_logits(up(z), x, reduction="sum") / len(x) + 0.1 * divergence

    return loss, training(both, lambda fn: fn(x), amp=False)


def sequence_train() -> Built:
    """Recommendations from sequences: attention over items, a pairwise loss."""
    items, width, n, length = scaled(50_000, 100), scaled(128, 16), scaled(256, 4), scaled(100, 8)
    embed, places = nn.Embedding(items, width, padding_idx=0), nn.Embedding(length, width)
    blocks = nn.ModuleList(
        nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True, norm_first=True)
        for _ in range(2)
    )
    model = nn.ModuleList((embed, places, blocks)).to(DEVICE).train()
    seen, good, bad = (torch.randint(0, items, (n, length), device=DEVICE) for _ in range(3))

    def loss(seen: torch.Tensor, good: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
        h = embed(seen) * width**0.5 + places(torch.arange(length, device=seen.device))
        causal = torch.triu(torch.ones(length, length, dtype=torch.bool, device=seen.device), 1)
        for block in blocks:
            h = block(h, src_mask=causal)
        right, wrong = (h * embed(good)).sum(-1), (h * embed(bad)).sum(-1)
        real = (good != 0).float()
        return -(F.logsigmoid(right - wrong) * real).sum() / real.sum()

    return loss, training(model, lambda fn: fn(seen, good, bad), amp=False)


def gram_loss() -> Built:
    """Products of features with themselves, of an image and a style."""
    shapes = [(64, 128), (128, 64), (256, 32), (512, 16)]
    ours = [numbers(scaled(8, 1), c, scaled(s, 4), scaled(s, 4), grad=True) for c, s in shapes]
    style = [numbers(1, c, scaled(s, 4), scaled(s, 4)) for c, s in shapes]

    def gram(f: torch.Tensor) -> torch.Tensor:
        flat = f.flatten(2)
        return flat @ flat.transpose(1, 2) / (f.shape[1] * f.shape[2] * f.shape[3])

    def loss(*features: torch.Tensor) -> torch.Tensor:
        rough = sum(
            (f[..., 1:, :] - f[..., :-1, :]).abs().mean() + (f[..., 1:] - f[..., :-1]).abs().mean()
            for f in features
        )
        return (
            sum(F.mse_loss(gram(f), gram(g).expand(f.shape[0], -1, -1)) for f, g in zip(features, style))
            + 1e-3 * rough
        )

    return loss, differentiating(*ours)


def trust_step() -> Built:
    """An update whose length follows the length of each weight, as a plain loop."""
    sizes = [(1024, 1024), (1024,), (4096, 1024), (4096,), (1024, 4096), (1024,)] * scaled(6, 1)
    sizes = sizes if LARGE else [tuple(d // 32 for d in size) for size in sizes]
    params, grads, first, second = ([numbers(*size) * s for size in sizes] for s in (1.0, 0.1, 0.0, 0.0))

    @torch.no_grad()
    def step(lr: torch.Tensor) -> torch.Tensor:
        for p, g, m, v in zip(params, grads, first, second):
            m.mul_(0.9).add_(g, alpha=0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            update = m / (v.sqrt() + 1e-6) + 0.01 * p
            size, length = p.norm(), update.norm()
            ratio = torch.where((size > 0) & (length > 0), size / length, torch.ones_like(size))
            p.sub_(lr * ratio.clamp(max=10.0) * update)
        return params[0]

    return step, inferring(torch.tensor(1e-4, device=DEVICE))


def paths() -> Built:
    """The value of an average-price option from simulated paths."""
    n, steps = scaled(262_144, 64), 64
    noise = numbers(n, steps)
    rate, spread, spot = (torch.tensor(v, device=DEVICE, requires_grad=True) for v in (0.03, 0.2, 100.0))

    def loss(rate: torch.Tensor, spread: torch.Tensor, spot: torch.Tensor) -> torch.Tensor:
        dt = 1.0 / steps
        growth = (rate - 0.5 * spread**2) * dt + spread * math.sqrt(dt) * noise
        price = spot * torch.exp(torch.cumsum(growth, 1))
        return torch.exp(-rate) * F.relu(price.mean(1) - 100.0).mean()

    return loss, differentiating(rate, spread, spot)


def capped_attention_train() -> Built:
    """Scores bounded by tanh, within a window."""
    n, heads, length, d = scaled(4, 1), scaled(8, 2), scaled(1024, 16), scaled(64, 8)
    q, k, v = (numbers(n, heads, length, d, dtype=BRAIN, grad=True) for _ in range(3))

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        score = (q @ k.transpose(-1, -2)) * d**-0.5
        score = 50.0 * torch.tanh(score / 50.0)
        i = torch.arange(length, device=q.device)
        seen = (i[:, None] >= i) & (i[:, None] - i < length // 4)
        weight = torch.softmax(score.masked_fill(~seen, float("-inf")).float(), -1).to(q.dtype)
        return (weight @ v).float().square().mean()

    return loss, differentiating(q, k, v)


def smooth_loss_train() -> Built:
    """The last layer of a language model: smoothed cross entropy and a penalty of large sums."""
    n, width, words = scaled(4096, 16), scaled(1024, 16), scaled(32_000, 50)
    head = nn.Linear(width, words, bias=False).to(DEVICE)
    x, y = numbers(n, width, grad=True), torch.randint(0, words, (n,), device=DEVICE)

    def loss(x: torch.Tensor) -> torch.Tensor:
        logits = head(x).float()
        whole = torch.logsumexp(logits, -1)
        return F.cross_entropy(logits, y, label_smoothing=0.1) + 1e-4 * whole.square().mean()

    return loss, training(head, lambda fn: fn(x))


def long_conv_train() -> Built:
    """Gated convolutions as long as the sequence, by Fourier transforms."""
    n, width, length = scaled(4, 1), scaled(256, 8), scaled(4096, 32)
    into, out = nn.Linear(width, 3 * width), nn.Linear(width, width)
    model = nn.ModuleList((into, out)).to(DEVICE)
    decay = nn.Parameter(torch.rand(width, 1, device=DEVICE))
    wave = nn.Parameter(numbers(width, length) * 0.02)
    x, t = numbers(n, length, width), torch.linspace(0, 1, length, device=DEVICE)

    def forward(x: torch.Tensor) -> torch.Tensor:
        first, second, v = into(x).transpose(1, 2).chunk(3, 1)
        kernel = wave * torch.exp(-F.softplus(decay) * t)
        product = torch.fft.rfft(first * v, 2 * length) * torch.fft.rfft(kernel, 2 * length)
        mixed = torch.fft.irfft(product, 2 * length)[..., :length] + v
        return out((second * mixed).transpose(1, 2))

    return forward, training(model, lambda fn: fn(x).square().mean(), amp=False)


def quantile_loss() -> Built:
    """A distributional value loss: each quantile against each target."""
    n, q = scaled(4096, 8), scaled(200, 8)
    guess, target = numbers(n, q, grad=True), numbers(n, q)
    levels = (torch.arange(q, device=DEVICE) + 0.5) / q

    def loss(guess: torch.Tensor) -> torch.Tensor:
        error = target[:, None] - guess[:, :, None]
        huber = torch.where(error.abs() <= 1, 0.5 * error.square(), error.abs() - 0.5)
        return ((levels[:, None] - (error.detach() < 0).float()).abs() * huber).mean(2).sum(1).mean()

    return loss, differentiating(guess)


def complex_rotary_train() -> Built:
    """Rotary positions as complex numbers, the way they were first published."""
    n, length, heads, d = scaled(8, 1), scaled(2048, 16), scaled(16, 2), scaled(64, 8)
    q, k = (numbers(n, length, heads, d, dtype=BRAIN, grad=True) for _ in range(2))
    angle = torch.outer(torch.arange(length), 1e4 ** (-torch.arange(d // 2) / (d // 2))).to(DEVICE)
    turns = torch.polar(torch.ones_like(angle), angle)

    def loss(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        def turn(u: torch.Tensor) -> torch.Tensor:
            pairs = torch.view_as_complex(u.float().reshape(*u.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * turns[:, None]).flatten(3).type_as(u)

        return (turn(q).float() * turn(k).float()).mean()

    return loss, differentiating(q, k)


def dispatch_train() -> Built:
    """Experts with room for so many tokens each: sorted, cut, multiplied, put back."""
    n, width, experts, room = scaled(8192, 64), scaled(512, 16), 16, scaled(768, 8)

    class Dispatch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(width, experts, bias=False)
            self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * width**-0.5)
            self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * width**-0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chance, expert = self.gate(x).softmax(-1).max(-1)
            one_hot = F.one_hot(expert, experts)
            place = (one_hot.cumsum(0) * one_hot).sum(1) - 1
            kept = place < room
            slot = torch.where(kept, expert * room + place, experts * room)
            boxes = (
                x.new_zeros(experts * room + 1, width).index_copy(0, slot, x)[:-1].view(experts, room, width)
            )
            hidden = F.gelu(torch.bmm(boxes, self.up.to(x.dtype)))
            answer = torch.bmm(hidden, self.down.to(x.dtype)).view(-1, width)
            picked = answer[slot.clamp(max=experts * room - 1)] * kept[:, None]
            balance = (one_hot.float().mean(0) * self.gate(x).softmax(-1).mean(0)).sum() * experts
            return (x + picked * chance[:, None]).float().square().mean() + 0.01 * balance

    model, x = Dispatch().to(DEVICE), numbers(n, width)
    return model, training(model, lambda fn: fn(x))


def sorted_errors_loss() -> Built:
    """A surrogate of intersection over union: errors sorted, a cumulative loss (Lovász)."""
    pixels, classes = scaled(262_144, 64), scaled(19, 3)
    logits, truth = numbers(pixels, classes, grad=True), torch.randint(0, classes, (pixels,), device=DEVICE)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        chance, total = logits.softmax(1), torch.zeros((), device=logits.device)
        for c in range(classes):
            here = (truth == c).float()
            error, order = (here - chance[:, c]).abs().sort(0, descending=True)
            hit = here[order]
            union = hit.sum() + (1 - hit).cumsum(0)
            jaccard = 1 - (hit.sum() - hit.cumsum(0)) / union
            jaccard = torch.cat((jaccard[:1], jaccard[1:] - jaccard[:-1]))
            total = total + (error * jaccard).sum()
        return total / classes

    return loss, differentiating(logits)


LLAMA = {
    "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4,
    "intermediate_size": 2816, "vocab_size": 32000,
}  # fmt: skip

STUDIES: dict[str, Callable[[], Built]] = {
    "llama_train": hf("LlamaForCausalLM", "LlamaConfig", 4, 1024, train=True, **LLAMA),
    "albert_train": hf(
        "AlbertForMaskedLM",
        "AlbertConfig",
        8,
        256,
        train=True,
        hidden_size=768,
        num_attention_heads=12,
        intermediate_size=3072,
    ),
    "bart_train": bart_train,
    "bloom_infer": hf(
        "BloomForCausalLM", "BloomConfig", 4, 512, hidden_size=1024, n_layer=12, n_head=16, vocab_size=32000
    ),
    "phi3_infer": hf("Phi3ForCausalLM", "Phi3Config", 2, 1024, pad_token_id=0, **LLAMA),
    "gemma2_infer": hf("Gemma2ForCausalLM", "Gemma2Config", 2, 1024, head_dim=64, **LLAMA),
    "mobilebert_infer": hf("MobileBertModel", "MobileBertConfig", 16, 128, dtype=torch.float16),
    "llama_decode16": decode("LlamaForCausalLM", "LlamaConfig", 16, **LLAMA),
    "phi_decode": decode("PhiForCausalLM", "PhiConfig", 1, **LLAMA),
    "dinov2_infer": vision("Dinov2Model", "Dinov2Config", 32),
    "segformer_infer": vision("SegformerForSemanticSegmentation", "SegformerConfig", 8, 512),
    "speech_infer": speech_infer,
    "resnext_train": timm_train("resnext50_32x4d", 32),
    "convnextv2_train": timm_train("convnextv2_nano", 32),
    "mobilevit_train": timm_train("mobilevit_s", 32),
    "pvt_train": timm_train("pvt_v2_b1", 32),
    "coatnet_infer": timm_infer("coatnet_0_rw_224", 32),
    "beit_infer": timm_infer("beit_base_patch16_224", 32),
    "hrnet_infer": timm_infer("hrnet_w18", 16),
    "ghostnet_infer": timm_infer("ghostnet_100", 64),
    "xcit_infer": timm_infer("xcit_tiny_12_p16_224", 32),
    "vgg_infer": timm_infer("vgg16_bn", 32),
    "transformer_denoiser_train": transformer_denoiser_train,
    "latent_attention_train": latent_attention_train,
    "preference_loss": preference_loss,
    "residual_codes": residual_codes,
    "spectra_loss": spectra_loss,
    "process_train": process_train,
    "edge_conv_train": edge_conv_train,
    "ring_decode": ring_decode,
    "autoencoder_train": autoencoder_train,
    "sequence_train": sequence_train,
    "gram_loss": gram_loss,
    "trust_step": trust_step,
    "paths": paths,
    "capped_attention_train": capped_attention_train,
    "smooth_loss_train": smooth_loss_train,
    "long_conv_train": long_conv_train,
    "quantile_loss": quantile_loss,
    "complex_rotary_train": complex_rotary_train,
    "dispatch_train": dispatch_train,
    "sorted_errors_loss": sorted_errors_loss,
}
