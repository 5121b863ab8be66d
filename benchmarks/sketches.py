"""Still more programs for the race: updates, recurrences, geometry, routing, filters, sampling.

Each builder returns what is compiled and a function that uses it once, as in `programs.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.programs import DEVICE, Built, inferring, scaled, training
from benchmarks.snippets import BRAIN, HALF, differentiating, numbers


def volume_train() -> Built:
    """Convolutions in three dimensions, instance norms, trilinear upsampling."""

    def block(a: int, b: int) -> nn.Module:
        norm = nn.InstanceNorm3d(b, affine=True)
        return nn.Sequential(nn.Conv3d(a, b, 3, padding=1), norm, nn.LeakyReLU(0.01))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = block(1, 16), block(16, 32), block(48, 16)
            self.last = nn.Conv3d(16, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            fine = self.first(x)
            coarse = self.second(F.max_pool3d(fine, 2))
            up = F.interpolate(coarse, scale_factor=2.0, mode="trilinear", align_corners=False)
            return self.last(self.third(torch.cat([fine, up], 1)))

    s = scaled(96, 8)
    model, x = Net().to(DEVICE), numbers(2, 1, s, s, s)
    truth = torch.randint(0, 3, (2, s, s, s), device=DEVICE)
    return model, training(model, lambda fn: F.cross_entropy(fn(x), truth))


def chain_loss() -> Built:
    """The forward recursion of a conditional random field."""
    n, steps, tags = scaled(512, 4), scaled(64, 6), 32
    emissions, moves = numbers(n, steps, tags, grad=True), numbers(tags, tags, grad=True)

    def loss(emissions: torch.Tensor, moves: torch.Tensor) -> torch.Tensor:
        alpha = emissions[:, 0]
        for t in range(1, emissions.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + moves, 1) + emissions[:, t]
        return torch.logsumexp(alpha, 1).mean()

    return loss, differentiating(emissions, moves)


def spline_train() -> Built:
    """A layer of splines (Kolmogorov and Arnold): a basis by recursion, then a product."""

    class Layer(nn.Module):
        def __init__(self, a: int, b: int, grid: int = 5, order: int = 3) -> None:
            super().__init__()
            self.order = order
            knots = torch.arange(-order, grid + order + 1) * (2.0 / grid) - 1
            self.register_buffer("knots", knots.expand(a, -1).contiguous())
            self.base = nn.Parameter(torch.randn(b, a) / a**0.5)
            self.spline = nn.Parameter(torch.randn(b, a, grid + order) * 0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            g, x3 = self.knots, x.unsqueeze(-1)
            basis = ((x3 >= g[:, :-1]) & (x3 < g[:, 1:])).to(x.dtype)
            for k in range(1, self.order + 1):
                left = (x3 - g[:, : -(k + 1)]) / (g[:, k:-1] - g[:, : -(k + 1)])
                right = (g[:, k + 1 :] - x3) / (g[:, k + 1 :] - g[:, 1:-k])
                basis = left * basis[:, :, :-1] + right * basis[:, :, 1:]
            return F.linear(F.silu(x), self.base) + F.linear(basis.flatten(1), self.spline.flatten(1))

    model = nn.Sequential(Layer(64, 128), Layer(128, 128), Layer(128, 1)).to(DEVICE)
    x = torch.rand(scaled(16384, 64), 64, device=DEVICE) * 2 - 1
    return model, training(model, lambda fn: fn(x).square().mean(), amp=False)


def orthogonal_step() -> Built:
    """Momentum made orthogonal by Newton's and Schulz's iteration, for each matrix of a model."""
    w = scaled(1024, 32)
    weights = [numbers(w, w) for _ in range(6)]
    grads, moments = [torch.randn_like(p) for p in weights], [torch.zeros_like(p) for p in weights]

    def step(weights: list[torch.Tensor], grads: list[torch.Tensor], moments: list[torch.Tensor]) -> None:
        for p, g, m in zip(weights, grads, moments):
            m.lerp_(g, 0.05)
            x = g.lerp(m, 0.95).to(BRAIN)
            x = x / (x.norm() + 1e-7)
            for _ in range(5):
                a = x @ x.mT
                x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
            p.mul_(0.999).add_(x.to(p.dtype), alpha=-0.02)

    def use(fn: Any) -> Any:
        with torch.no_grad():
            fn(weights, grads, moments)
        return weights[0]

    return step, use


def factored_step() -> Built:
    """Adafactor's update: row and column statistics of squared gradients."""
    w = scaled(2048, 32)
    weights = [numbers(w, w) for _ in range(8)]
    grads = [torch.randn_like(p) for p in weights]
    rows, columns = [p.new_zeros(w) for p in weights], [p.new_zeros(w) for p in weights]

    def step(*lists: list[torch.Tensor]) -> None:
        for p, g, r, c in zip(*lists):
            square = g * g + 1e-30
            r.lerp_(square.mean(-1), 0.2)
            c.lerp_(square.mean(-2), 0.2)
            update = g * (r / r.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1) * c.rsqrt().unsqueeze(0)
            update = update / (update.norm() / p.numel() ** 0.5).clamp(min=1.0)
            p.sub_(update * 1e-3)

    def use(fn: Any) -> Any:
        with torch.no_grad():
            fn(weights, grads, rows, columns)
        return weights[0]

    return step, use


def sign_step() -> Built:
    """Lion over the parameters of a model, written as a loop."""
    sizes = [(768, 768), (3072, 768), (768,), (768, 3072), (3072,)] * scaled(12, 1)
    weights = [numbers(*s) for s in sizes]
    grads, moments = [torch.randn_like(p) for p in weights], [torch.zeros_like(p) for p in weights]

    def step(*lists: list[torch.Tensor]) -> None:
        for p, g, m in zip(*lists):
            p.mul_(1 - 1e-4 * 0.1)
            p.add_((m * 0.9 + g * 0.1).sign_(), alpha=-1e-4)
            m.mul_(0.99).add_(g, alpha=0.01)

    def use(fn: Any) -> Any:
        with torch.no_grad():
            fn(weights, grads, moments)
        return weights[0]

    return step, use


def sloped_attention_train() -> Built:
    """Attention written out, causal, with slopes by distance, in sixteen bits."""
    b, h, t, d = scaled(4, 1), 12, scaled(1024, 32), 64
    q, k, v = (numbers(b, h, t, d, dtype=BRAIN, grad=True) for _ in range(3))
    slopes = torch.tensor([2 ** (-8 * (i + 1) / h) for i in range(h)], device=DEVICE)
    mask = torch.ones(t, t, dtype=torch.bool, device=DEVICE).tril()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        at = torch.arange(q.shape[2], device=q.device)
        scores = q @ k.mT / math.sqrt(q.shape[-1]) + (slopes[:, None, None] * (at - at[:, None])).to(q.dtype)
        weights = scores.masked_fill(~mask, float("-inf")).float().softmax(-1).to(q.dtype)
        return (weights @ v).float().square().mean()

    return attend, differentiating(q, k, v)


def retrieval() -> Built:
    queries, keys = numbers(scaled(256, 4), 768), numbers(scaled(100_000, 200), 768)

    def search(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        scores = F.normalize(queries, dim=-1) @ F.normalize(keys, dim=-1).T
        best = scores.topk(10, dim=-1)
        return (best.values * 20).softmax(-1) @ best.indices.float().unsqueeze(-1)

    return search, inferring(queries, keys)


def bilateral() -> Built:
    """A filter that keeps edges: neighbours weighted by distance and by likeness."""
    x = torch.rand(scaled(8, 1), 3, scaled(512, 24), scaled(512, 24), device=DEVICE)
    at = torch.arange(5, device=DEVICE) - 2.0
    near = torch.exp(-(at[:, None] ** 2 + at**2) / 8).view(1, 1, 25, 1)

    def smooth(x: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.shape
        around = F.unfold(F.pad(x, (2, 2, 2, 2), mode="reflect"), 5).view(b, c, 25, h * w)
        apart = (around - x.view(b, c, 1, h * w)).square().sum(1, keepdim=True)
        weight = near * torch.exp(-apart / 0.02)
        return ((around * weight).sum(2) / weight.sum(2)).view(b, c, h, w)

    return smooth, inferring(x)


def lookups_train() -> Built:
    """Correlations of two pictures' features at four scales, sampled around where points flow."""
    n, c, s = scaled(2, 1), 64, scaled(48, 8)
    first, second = numbers(n, c, s, s, grad=True), numbers(n, c, s, s, grad=True)
    flow = numbers(n, 2, s, s)
    reach = torch.arange(-3, 4, device=DEVICE, dtype=torch.float32)
    window = torch.stack(torch.meshgrid(reach, reach, indexing="ij"), -1).view(1, 7, 7, 2)

    def sample(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        volume = torch.einsum("bchw,bcxy->bhwxy", first, second).reshape(n * s * s, 1, s, s) / c**0.5
        y, x = torch.meshgrid(*(torch.arange(s, device=first.device) for _ in "yx"), indexing="ij")
        at = (torch.stack([x, y]) + flow).permute(0, 2, 3, 1).reshape(n * s * s, 1, 1, 2)
        found = []
        for level in range(4):
            size = volume.shape[-1]
            grid = 2 * (at / 2**level + window) / max(size - 1, 1) - 1
            found.append(F.grid_sample(volume, grid, align_corners=True).view(n, s, s, -1))
            volume = F.avg_pool2d(volume, 2, stride=2) if size > 1 else volume
        return torch.cat(found, -1).square().mean()

    return sample, differentiating(first, second)


def bodies() -> Built:
    """Attraction of many bodies by pairs, and a step in time."""
    n = scaled(4096, 32)
    places, speeds, weights = numbers(n, 3), numbers(n, 3), torch.rand(n, device=DEVICE)

    def step(places: torch.Tensor, speeds: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        apart = places[None] - places[:, None]
        near = (apart.square().sum(-1) + 1e-2) ** -1.5
        force = (apart * (near * weights)[..., None]).sum(1)
        speeds = speeds + 0.01 * force
        return places + 0.01 * speeds, speeds

    return step, inferring(places, speeds, weights)


def energy_train() -> Built:
    """An energy of pairs within a distance, and its gradient by places: molecular dynamics."""
    n, m = scaled(64, 2), scaled(96, 8)
    places = numbers(n, m, 3, grad=True)
    charge = numbers(n, m)

    def energy(places: torch.Tensor) -> torch.Tensor:
        apart = places[:, :, None] - places[:, None]
        far = (apart.square().sum(-1) + torch.eye(m, device=places.device)).sqrt()
        cut = torch.where(far < 3.0, 0.5 * (torch.cos(math.pi * far / 3.0) + 1), 0.0)
        six = (0.8 / far) ** 6
        pairs = 4 * (six * six - six) * cut + charge[:, :, None] * charge[:, None] / far * torch.erfc(far)
        return (pairs * (1 - torch.eye(m, device=places.device))).sum((1, 2)).mean() / 2

    return energy, differentiating(places)


def fractal() -> Built:
    s = scaled(1024, 32)
    line = torch.linspace(-1.5, 1.5, s, device=DEVICE)
    plane = torch.complex(*torch.meshgrid(line, line, indexing="xy"))

    def count(plane: torch.Tensor) -> torch.Tensor:
        z, steps = torch.zeros_like(plane), torch.zeros(plane.shape, device=plane.device)
        for _ in range(20):
            z = z * z + plane
            steps = steps + (z.abs() < 2.0)
            z = torch.where(z.abs() < 10.0, z, torch.full_like(z, 10.0))
        return steps

    return count, inferring(plane)


def distil_loss() -> Built:
    """A small model taught by a large one: softened targets and smoothed labels over a vocabulary."""
    n, v = scaled(4096, 16), scaled(32000, 100)
    student, teacher = numbers(n, v, dtype=BRAIN, grad=True), numbers(n, v, dtype=BRAIN)
    truth = torch.randint(0, v, (n,), device=DEVICE)

    def loss(student: torch.Tensor) -> torch.Tensor:
        soft = F.kl_div(
            F.log_softmax(student.float() / 2, -1), F.softmax(teacher.float() / 2, -1), reduction="batchmean"
        )
        return 4 * soft + F.cross_entropy(student.float(), truth, label_smoothing=0.1)

    return loss, differentiating(student)


def queue_train() -> Built:
    """Contrast against a queue of older keys, which takes the new ones in."""

    class Contrast(nn.Module):
        def __init__(self, dim: int, size: int) -> None:
            super().__init__()
            self.head = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 128))
            self.register_buffer("queue", F.normalize(torch.randn(128, size), dim=0))
            self.register_buffer("place", torch.zeros(1, dtype=torch.long))

        def forward(self, x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            q = F.normalize(self.head(x), dim=1)
            right = torch.einsum("nc,nc->n", q, keys).unsqueeze(-1)
            logits = torch.cat([right, q @ self.queue.clone().detach()], 1) / 0.07
            with torch.no_grad():
                at = (self.place + torch.arange(len(keys), device=keys.device)) % self.queue.shape[1]
                self.queue[:, at] = keys.T
                self.place.copy_((self.place + len(keys)) % self.queue.shape[1])
            return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long, device=x.device))

    n = scaled(1024, 8)
    model = Contrast(scaled(1024, 32), scaled(65536, 64)).to(DEVICE)
    x, keys = numbers(n, scaled(1024, 32)), F.normalize(numbers(n, 128), dim=1)
    return model, training(model, lambda fn: fn(x, keys), amp=False)


def graph_attention_train() -> Built:
    """Attention over the edges of a graph: a softmax by segments."""
    nodes, edges, heads, d = scaled(50_000, 40), scaled(500_000, 160), 4, 32

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(d, heads * d, bias=False)
            self.a, self.b = (nn.Parameter(torch.randn(heads, d) * 0.1) for _ in range(2))

        def forward(self, x: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
            h = self.lin(x).view(-1, heads, d)
            score = F.leaky_relu((h * self.a).sum(-1)[src] + (h * self.b).sum(-1)[dst], 0.2)
            index = dst[:, None].expand(-1, heads)
            top = torch.full((len(x), heads), -1e9, device=x.device).scatter_reduce(0, index, score, "amax")
            e = (score - top.detach()[dst]).exp()
            total = torch.zeros(len(x), heads, device=x.device).scatter_add(0, index, e)
            weight = e / (total[dst] + 1e-16)
            return torch.zeros_like(h).index_add(0, dst, h[src] * weight[..., None]).flatten(1)

    model = Layer().to(DEVICE)
    x = numbers(nodes, d)
    src, dst = (torch.randint(0, nodes, (edges,), device=DEVICE) for _ in range(2))
    return model, training(model, lambda fn: fn(x, src, dst).square().mean(), amp=False)


def sparse_softmax_train() -> Built:
    """Sparsemax: sorted scores, cumulated sums, a threshold."""
    x = numbers(scaled(16384, 16), scaled(512, 32), grad=True)

    def loss(x: torch.Tensor) -> torch.Tensor:
        z = x - x.max(-1, keepdim=True).values
        ordered, _ = z.sort(-1, descending=True)
        steps = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
        sums = ordered.cumsum(-1) - 1
        many = (steps * ordered > sums).sum(-1, keepdim=True)
        threshold = sums.gather(-1, many - 1) / many.to(x.dtype)
        return (z - threshold).clamp(min=0).square().mean()

    return loss, differentiating(x)


def histogram_loss() -> Built:
    """Soft histograms of two pictures' colours, compared by cumulated sums."""
    a = torch.rand(scaled(8, 1), 3, scaled(128, 16) ** 2, device=DEVICE, requires_grad=True)
    b = torch.rand_like(a).detach()
    centres = torch.linspace(0, 1, 64, device=DEVICE)

    def soft(x: torch.Tensor) -> torch.Tensor:
        near = torch.exp(-0.5 * ((x[..., None] - centres) / 0.02) ** 2).sum(-2)
        return near / near.sum(-1, keepdim=True)

    def loss(a: torch.Tensor) -> torch.Tensor:
        return (soft(a).cumsum(-1) - soft(b).cumsum(-1)).abs().mean()

    return loss, differentiating(a)


def rounded_train() -> Built:
    """Training with weights and activations rounded to eight bits and gradients passed on."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        scale = x.detach().abs().amax() / 127
        return x + ((x / scale).round().clamp(-127, 127) * scale - x).detach()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = ((3, 32), (32, 64), (64, 64))
            self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in widths)
            self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in (32, 64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for conv, norm in zip(self.convs, self.norms):
                x = F.relu(norm(F.conv2d(rounded(x), rounded(conv.weight), conv.bias, padding=1)))
            return x.mean((2, 3))

    model, x = Net().to(DEVICE), numbers(scaled(32, 2), 3, scaled(64, 8), scaled(64, 8))
    return model, training(model, lambda fn: fn(x).square().mean())


def waves_train() -> Built:
    """Dilated convolutions with gates, weights normalised, residuals and skips."""

    class Net(nn.Module):
        def __init__(self, w: int) -> None:
            super().__init__()
            norm = nn.utils.parametrizations.weight_norm
            reach = [{"dilation": 2**i, "padding": 2**i} for i in range(8)]
            self.inner = nn.ModuleList(norm(nn.Conv1d(w, 2 * w, 3, **r)) for r in reach)
            self.outer = nn.ModuleList(norm(nn.Conv1d(w, 2 * w, 1)) for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total: Any = 0
            for inner, outer in zip(self.inner, self.outer):
                a, b = inner(x).chunk(2, 1)
                rest, skip = outer(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
                x, total = (x + rest) * math.sqrt(0.5), total + skip
            return total

    model, x = Net(scaled(64, 8)).to(DEVICE), numbers(scaled(8, 1), scaled(64, 8), scaled(16000, 64))
    return model, training(model, lambda fn: fn(x).square().mean())


def conformer_train() -> Built:
    """The convolution module of a conformer, with the feed-forward halves around it."""
    w = scaled(256, 16)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(w) for _ in range(4))
            self.up, self.down = nn.Linear(w, 4 * w), nn.Linear(4 * w, w)
            self.point, self.back = nn.Conv1d(w, 2 * w, 1), nn.Conv1d(w, w, 1)
            self.depth, self.batch = nn.Conv1d(w, w, 31, padding=15, groups=w), nn.BatchNorm1d(w)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 0.5 * F.dropout(self.down(F.dropout(F.silu(self.up(self.norms[0](x))), 0.1)), 0.1)
            y = F.glu(self.point(self.norms[1](x).transpose(1, 2)), 1)
            y = self.back(F.silu(self.batch(self.depth(y)))).transpose(1, 2)
            return self.norms[3](x + F.dropout(y, 0.1))

    model = nn.Sequential(*(Block() for _ in range(4))).to(DEVICE)
    x = numbers(scaled(16, 1), scaled(500, 40), w)
    return model, training(model, lambda fn: fn(x).float().square().mean())


def matching() -> Built:
    """Costs of assigning predictions to boxes: classes, L1 distances, generalised overlaps."""
    n, q, m = scaled(16, 1), scaled(900, 20), scaled(300, 10)
    logits, boxes = numbers(n, q, 91), torch.rand(n, q, 4, device=DEVICE)
    truth = torch.rand(n, m, 4, device=DEVICE)
    labels = torch.randint(0, 91, (n, m), device=DEVICE)

    def corners(b: torch.Tensor) -> torch.Tensor:
        x, y, w, h = b.unbind(-1)
        return torch.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], -1)

    def costs(logits: torch.Tensor, boxes: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        p = logits.sigmoid()
        focal = 0.25 * (1 - p) ** 2 * -(p + 1e-8).log() - 0.75 * p**2 * -(1 - p + 1e-8).log()
        classes = torch.stack([f[:, i] for f, i in zip(focal, labels)])
        line = torch.cdist(boxes, truth, p=1)
        a, b = corners(boxes)[:, :, None], corners(truth)[:, None]
        low, high = torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])
        inner = (high - low).clamp(min=0).prod(-1)
        low, high = torch.minimum(a[..., :2], b[..., :2]), torch.maximum(a[..., 2:], b[..., 2:])
        outer = (high - low).clamp(min=0).prod(-1)
        union = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - inner
        return 5 * line + 2 * classes - 2 * (inner / union - (outer - union) / outer)

    return costs, inferring(logits, boxes, truth)


def merging() -> Built:
    """Alike tokens of a vision transformer joined by pairs."""
    n, t = scaled(64, 2), scaled(576, 16)
    x, keys = numbers(n, t, 768, dtype=HALF), numbers(n, t, 64, dtype=HALF)
    r = scaled(96, 4)

    def merge(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        keys = keys / keys.norm(dim=-1, keepdim=True)
        best, to = (keys[:, ::2] @ keys[:, 1::2].mT).max(-1)
        order = best.argsort(-1, descending=True)
        gone, kept = order[:, :r, None], order[:, r:, None].sort(1).values
        to = to[..., None].gather(1, gone)
        a, b = x[:, ::2], x[:, 1::2]
        c = x.shape[-1]
        stay = a.gather(1, kept.expand(-1, -1, c))
        moved = a.gather(1, gone.expand(-1, -1, c))
        return torch.cat([stay, b.scatter_reduce(1, to.expand(-1, -1, c), moved, "mean")], 1)

    return merge, inferring(x, keys)


def nucleus() -> Built:
    """Tokens drawn from the smallest set with most of the probability."""
    logits = numbers(scaled(256, 4), scaled(50257, 100))

    def keep(logits: torch.Tensor) -> torch.Tensor:
        ordered, places = torch.sort(logits / 0.8, descending=True)
        removed = ordered.softmax(-1).cumsum(-1) > 0.9
        removed = F.pad(removed[:, :-1], (1, 0), value=False)
        mask = torch.zeros_like(removed).scatter(1, places, removed)
        return logits.masked_fill(mask, float("-inf")).softmax(-1)

    return keep, inferring(logits)


def splats_train() -> Built:
    """Gaussians in space: covariances from quaternions, projected to the picture."""
    n = scaled(500_000, 64)
    turn, size, place = numbers(n, 4, grad=True), numbers(n, 3, grad=True), numbers(n, 3, grad=True)
    view = torch.eye(3, device=DEVICE) + 0.1 * numbers(3, 3)

    def project(turn: torch.Tensor, size: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        w, x, y, z = F.normalize(turn, dim=-1).unbind(-1)
        rot = torch.stack([
            1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y),
            2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x),
            2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y),
        ], -1).view(-1, 3, 3)  # fmt: skip
        m = rot * size.exp()[:, None]
        cov = m @ m.mT
        at = place @ view.T
        depth = at[:, 2].abs() + 1.0
        zero = torch.zeros_like(depth)
        jac = torch.stack([1 / depth, zero, -at[:, 0] / depth**2, zero, 1 / depth, -at[:, 1] / depth**2], -1)
        part = jac.view(-1, 2, 3) @ view
        flat = part @ cov @ part.mT
        area = flat[:, 0, 0] * flat[:, 1, 1] - flat[:, 0, 1] ** 2
        return (area + 0.3).log().mean() + (at[:, :2] / depth[:, None]).square().mean()

    return project, differentiating(turn, size, place)


def skinning() -> Built:
    """A body's surface moved by its joints."""
    n, v, j = scaled(64, 2), scaled(6890, 50), 24
    rest, weights = numbers(v, 3), torch.rand(v, j, device=DEVICE).softmax(-1)
    turns, shifts, shapes, basis = numbers(n, j, 3), numbers(n, j, 3), numbers(n, 10), numbers(v, 3, 10)

    def pose(turns: torch.Tensor, shifts: torch.Tensor, shapes: torch.Tensor) -> torch.Tensor:
        angle = (turns.square().sum(-1, keepdim=True) + 1e-8).sqrt()
        x, y, z = (turns / angle).unbind(-1)
        o = torch.zeros_like(x)
        k = torch.stack([o, -z, y, z, o, -x, -y, x, o], -1).view(n, j, 3, 3)
        s, c = angle.sin()[..., None], angle.cos()[..., None]
        rot = torch.eye(3, device=turns.device) + s * k + (1 - c) * (k @ k)
        move = torch.cat([rot, shifts[..., None]], -1)
        each = torch.einsum("vj,njab->nvab", weights, move)
        body = rest + torch.einsum("nl,vcl->nvc", shapes, basis)
        return (each[..., :3] @ body[..., None]).squeeze(-1) + each[..., 3]

    return pose, inferring(turns, shifts, shapes)


def nibbles() -> Built:
    """A linear layer whose weights are packed by two in a byte, with scales by groups."""
    m, k, n = scaled(16, 2), scaled(4096, 64), scaled(4096, 64)
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=DEVICE)
    scales, x = numbers(n, k // 32, dtype=HALF), numbers(m, k, dtype=HALF)

    def apply(x: torch.Tensor) -> torch.Tensor:
        whole = torch.stack([packed & 0xF, packed >> 4], -1).view(n, -1, 32)
        weight = ((whole.to(x.dtype) - 8) * scales[..., None]).view(n, k)
        return F.linear(x, weight)

    return apply, inferring(x)


def recurrence_train() -> Built:
    """Decays of keys and values, token by token (RWKV)."""
    b, t, c = scaled(8, 1), scaled(48, 8), scaled(1024, 16)
    k, v = numbers(b, t, c, grad=True), numbers(b, t, c, grad=True)
    w, u = numbers(c, grad=True), numbers(c, grad=True)

    def mix(k: torch.Tensor, v: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        top, a, n = k.new_full((b, c), -1e30), k.new_zeros(b, c), k.new_zeros(b, c)
        decay, outs = -w.exp(), []
        for i in range(t):
            m = torch.maximum(top, u + k[:, i])
            p, q = torch.exp(top - m), torch.exp(u + k[:, i] - m)
            outs.append((p * a + q * v[:, i]) / (p * n + q))
            m = torch.maximum(top + decay, k[:, i])
            p, q = torch.exp(top + decay - m), torch.exp(k[:, i] - m)
            a, n, top = p * a + q * v[:, i], p * n + q, m
        return torch.stack(outs, 1).square().mean()

    return mix, differentiating(k, v, w, u)


def chunked_scan_train() -> Built:
    """A state space by chunks: sums of decays by segments, products within and between."""
    b, t, h, p, n, size = scaled(4, 1), scaled(2048, 32), 8, 64, 64, scaled(128, 8)
    x, a = numbers(b, t, h, p, grad=True), (-torch.rand(b, t, h, device=DEVICE)).requires_grad_()
    left, right = numbers(b, t, h, n, grad=True), numbers(b, t, h, n, grad=True)

    def segments(x: torch.Tensor) -> torch.Tensor:
        s = x.shape[-1]
        spread = x[..., None].expand(*x.shape, s)
        below = torch.tril(torch.ones(s, s, dtype=torch.bool, device=x.device), -1)
        sums = spread.masked_fill(~below, 0).cumsum(-2)
        return sums.masked_fill(~torch.tril(torch.ones_like(below)), float("-inf"))

    def scan(x: torch.Tensor, a: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        x, left, right = (i.reshape(b, -1, size, *i.shape[2:]) for i in (x, left, right))
        a = a.reshape(b, -1, size, h).permute(0, 3, 1, 2)
        sums = a.cumsum(-1)
        within = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", right, left, segments(a).exp(), x)
        states = torch.einsum("bclhn,bhcl,bclhp->bchpn", left, (sums[..., -1:] - sums).exp(), x)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
        decay = segments(F.pad(sums[..., -1], (1, 0))).exp()
        states = torch.einsum("bhzc,bchpn->bzhpn", decay, states)[:, :-1]
        between = torch.einsum("bclhn,bchpn,bhcl->bclhp", right, states, sums.exp())
        return (within + between).square().mean()

    return scan, differentiating(x, a, left, right)


def blocks_loss() -> Built:
    """Pictures through the blocks of JPEG: cosines, rounding with a smooth gradient, and back."""
    n, s = scaled(16, 1), scaled(512, 16)
    x = torch.rand(n, 3, s, s, device=DEVICE, requires_grad=True)
    k = torch.arange(8, device=DEVICE).float()
    basis = torch.cos((2 * k + 1) * k[:, None] * math.pi / 16) * 0.5
    table = torch.rand(8, 8, device=DEVICE) * 40 + 10

    def loss(x: torch.Tensor) -> torch.Tensor:
        blocks = (x * 255 - 128).view(n, 3, s // 8, 8, s // 8, 8).permute(0, 1, 2, 4, 3, 5)
        found = basis @ blocks @ basis.T / table
        near = found.round()
        found = (near + (found - near) ** 3) * table
        back = (basis.T @ found @ basis).permute(0, 1, 2, 4, 3, 5).reshape(x.shape)
        return F.l1_loss((back + 128) / 255, x.detach())

    return loss, differentiating(x)


def masking_train() -> Built:
    """Patches hidden at random and put back in order: a masked autoencoder without its middle."""
    n, t, w = scaled(64, 2), scaled(196, 16), scaled(768, 16)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.norm = nn.Linear(w, w), nn.Linear(w, w), nn.LayerNorm(w)
            self.token = nn.Parameter(torch.zeros(1, 1, w))
            self.place = nn.Parameter(torch.randn(1, t, w) * 0.02)

        def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
            order = noise.argsort(1)
            back = order.argsort(1)
            kept = order[:, : t // 4, None].expand(-1, -1, w)
            seen = self.norm(self.first((x + self.place).gather(1, kept)))
            full = torch.cat([seen, self.token.expand(n, t - seen.shape[1], -1)], 1)
            full = full.gather(1, back[..., None].expand(-1, -1, w)) + self.place
            mask = (back >= t // 4).float()
            mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True)
            off = (self.last(full) - (x - mean) / (var + 1e-6).sqrt()).square().mean(-1)
            return (off * mask).sum() / mask.sum()

    model, x, noise = Masked().to(DEVICE), numbers(n, t, w), torch.rand(n, t, device=DEVICE)
    return model, training(model, lambda fn: fn(x, noise))


def twins_train() -> Built:
    """Batch-normalised embeddings of two views, their correlations made the identity."""
    n, d = scaled(2048, 16), scaled(4096, 32)
    a, b = numbers(n, d, grad=True), numbers(n, d, grad=True)

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = (a - a.mean(0)) / a.std(0), (b - b.mean(0)) / b.std(0)
        c = a.T @ b / n
        on = (torch.diagonal(c) - 1).square().sum()
        off = c.flatten()[:-1].view(d - 1, d + 1)[:, 1:].square().sum()
        return on + 5e-3 * off

    return loss, differentiating(a, b)


def shifting_infer() -> Built:
    """Frames that exchange a part of their channels, then convolutions."""
    convs = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1, bias=False) for _ in range(4))
    norms = nn.ModuleList(nn.BatchNorm2d(64) for _ in range(4))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs, self.norms = convs, norms

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for conv, norm in zip(self.convs, self.norms):
                frames = x.view(-1, 8, *x.shape[1:])
                out = torch.zeros_like(frames)
                out[:, :-1, :8] = frames[:, 1:, :8]
                out[:, 1:, 8:16] = frames[:, :-1, 8:16]
                out[:, :, 16:] = frames[:, :, 16:]
                x = x + F.relu(norm(conv(out.view(x.shape))))
            return x

    s = scaled(56, 8)
    return Net().to(DEVICE, HALF).eval(), inferring(numbers(scaled(64, 8), 64, s, s, dtype=HALF))


def pyramid_loss() -> Built:
    """Differences of two pictures at five scales, and their variation."""
    a = torch.rand(scaled(8, 1), 3, scaled(512, 32), scaled(512, 32), device=DEVICE, requires_grad=True)
    b = torch.rand_like(a).detach()
    line = torch.tensor([1.0, 4.0, 6.0, 4.0, 1.0], device=DEVICE) / 16
    kernel = (line[:, None] * line).expand(3, 1, 5, 5).contiguous()

    def loss(a: torch.Tensor) -> torch.Tensor:
        x, total = a - b, (a[..., 1:] - a[..., :-1]).abs().mean()
        total = total + (a[..., 1:, :] - a[..., :-1, :]).abs().mean()
        for level in range(4):
            small = F.avg_pool2d(F.conv2d(F.pad(x, (2,) * 4, mode="reflect"), kernel, groups=3), 2)
            back = F.interpolate(small, scale_factor=2, mode="nearest")
            total = total + 2**level * (x - back).abs().mean()
            x = small
        return total + x.abs().mean()

    return loss, differentiating(a)


def routing() -> Built:
    """Capsules that agree on the next layer's, in three rounds."""
    votes = numbers(scaled(128, 2), scaled(1152, 16), 10, 16)

    def agree(votes: torch.Tensor) -> torch.Tensor:
        logits, out = votes.new_zeros(votes.shape[:3]), votes[:, 0]
        for _ in range(3):
            s = (logits.softmax(2)[..., None] * votes).sum(1)
            square = s.square().sum(-1, keepdim=True)
            out = square / (1 + square) * s / (square + 1e-8).sqrt()
            logits = logits + (votes * out[:, None]).sum(-1)
        return out

    return agree, inferring(votes)


SKETCHES: dict[str, Callable[[], Built]] = {
    made.__name__: made
    for made in (
        volume_train, chain_loss, spline_train, orthogonal_step, factored_step, sign_step,
        sloped_attention_train, retrieval, bilateral, lookups_train, bodies, energy_train, fractal,
        distil_loss, queue_train, graph_attention_train, sparse_softmax_train, histogram_loss,
        rounded_train, waves_train, conformer_train, matching, merging, nucleus, splats_train,
        skinning, nibbles, recurrence_train, chunked_scan_train, blocks_loss, masking_train,
        twins_train, shifting_infer, pyramid_loss, routing,
    )
}  # fmt: skip
