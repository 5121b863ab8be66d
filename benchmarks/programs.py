"""Programs for the race: models of transformers and timm in their usual sizes, and code such as people write.

Each builder returns what is compiled and a function that uses it once; `race.py` times it for every peer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Use = Callable[[Any], Any]
Built = tuple[Any, Use]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LARGE = DEVICE == "cuda"


def scaled(gpu: int, cpu: int) -> int:
    return gpu if LARGE else cpu


def images(batch: int, size: int = 224, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(scaled(batch, 2), 3, size, size, device=DEVICE, dtype=dtype)


def inferring(*args: Any, **kwargs: Any) -> Use:
    def use(fn: Any) -> Any:
        with torch.no_grad():
            return fn(*args, **kwargs)

    return use


def training(model: nn.Module, loss_of: Callable[[Any], torch.Tensor], amp: bool = True) -> Use:
    def use(fn: Any) -> Any:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=amp):
            loss = loss_of(fn)
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss

    return use


# -- models of libraries -------------------------------------------------------------------------------


def timm_infer(name: str, batch: int, dtype: torch.dtype = torch.float16) -> Callable[[], Built]:
    def build() -> Built:
        import timm

        here = dtype if LARGE else torch.float32
        model = timm.create_model(name).to(DEVICE, here).eval()
        return model, inferring(images(batch, dtype=here))

    return build


def timm_train(name: str, batch: int) -> Callable[[], Built]:
    def build() -> Built:
        import timm

        model = timm.create_model(name).to(DEVICE).train()
        x = images(batch)
        y = torch.randint(0, 1000, (x.shape[0],), device=DEVICE)
        return model, training(model, lambda fn: F.cross_entropy(fn(x), y))

    return build


def hf(
    model_class: str,
    config_class: str,
    batch: int,
    length: int,
    *,
    train: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    **settings: Any,
) -> Callable[[], Built]:
    def build() -> Built:
        import transformers

        small = {} if LARGE else {"num_hidden_layers": 2}
        config = getattr(transformers, config_class)(**{**settings, **small})
        model = getattr(transformers, model_class)(config).to(DEVICE)
        ids = torch.randint(0, 1000, (scaled(batch, 2), scaled(length, 64)), device=DEVICE)
        if train:
            return model.train(), training(model, lambda fn: fn(input_ids=ids, labels=ids).loss)
        model = model.to(dtype if LARGE else torch.float32).eval()
        return model, inferring(input_ids=ids, use_cache=False) if "CausalLM" in model_class else inferring(
            ids
        )

    return build


def t5_train() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0)).to(DEVICE).train()
    ids = torch.randint(1, 1000, (scaled(16, 1), scaled(512, 32)), device=DEVICE)
    return model, training(model, lambda fn: fn(input_ids=ids, labels=ids).loss)


def whisper_train() -> Built:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    settings = {"max_source_positions": scaled(1500, 50), "decoder_start_token_id": 1, "pad_token_id": 0}
    model = WhisperForConditionalGeneration(WhisperConfig(**settings)).to(DEVICE).train()
    sound = torch.randn(scaled(8, 1), 80, scaled(3000, 100), device=DEVICE)
    ids = torch.randint(1, 1000, (scaled(8, 1), scaled(256, 16)), device=DEVICE)
    return model, training(model, lambda fn: fn(input_features=sound, labels=ids).loss)


def clip_train() -> Built:
    from transformers import CLIPConfig, CLIPModel

    model = CLIPModel(CLIPConfig()).to(DEVICE).train()
    x = torch.randn(scaled(32, 2), 3, 224, 224, device=DEVICE)
    ids = torch.randint(1, 1000, (x.shape[0], 77), device=DEVICE)
    return model, training(model, lambda fn: fn(input_ids=ids, pixel_values=x, return_loss=True).loss)


def decode(model_class: str, config_class: str, batch: int, **settings: Any) -> Callable[[], Built]:
    """One token with a static cache."""

    def build() -> Built:
        import transformers

        small = {} if LARGE else {"num_hidden_layers": 2}
        config = getattr(transformers, config_class)(**{**settings, **small})
        dtype = torch.bfloat16 if LARGE else torch.float32
        model = getattr(transformers, model_class)(config).to(DEVICE, dtype).eval()
        cache = transformers.StaticCache(config=config, max_cache_len=512)
        ids = torch.randint(0, 1000, (batch, 64), device=DEVICE)
        with torch.no_grad():
            model(ids, past_key_values=cache)
        counters = [
            c
            for c in (getattr(layer, "cumulative_length", None) for layer in cache.layers)
            if isinstance(c, torch.Tensor)
        ]
        start = [counter.clone() for counter in counters]
        token, position = ids[:, :1].contiguous(), torch.full((batch, 1), 64, device=DEVICE)

        def step(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            return model(token, position_ids=position, past_key_values=cache).logits

        def use(fn: Any) -> Any:
            for counter, value in zip(counters, start):  # the same token again
                counter.copy_(value)
            with torch.no_grad():
                return fn(token, position)

        return step, use

    return build


# -- code such as people write -------------------------------------------------------------------------


class Block(nn.Module):
    """A pre-norm transformer block with rotary positions, written by hand."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 8 * width // 3 * 2), nn.Linear(8 * width // 3, width)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)

        def rotate(u: torch.Tensor) -> torch.Tensor:
            first, second = u.chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Nano(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        half = width // heads // 2
        angle = torch.outer(torch.arange(length), 1e4 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos.to(x.dtype), self.sin.to(x.dtype))
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


def nano_train() -> Built:
    length = scaled(1024, 64)
    model = Nano(scaled(50257, 500), scaled(768, 64), scaled(12, 2), scaled(12, 4), length).to(DEVICE)
    ids = torch.randint(0, 500, (scaled(8, 2), length + 1), device=DEVICE)
    return model, training(model, lambda fn: fn(ids[:, :-1], ids[:, 1:]))


class Experts(nn.Module):
    """A mixture of experts with a loop over them, each on the tokens routed to it (dense mask)."""

    def __init__(self, width: int, experts: int):
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, width, 2 * width) / math.sqrt(width))
        self.w2 = nn.Parameter(torch.randn(experts, 2 * width, width) / math.sqrt(2 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.gate(x).softmax(-1).topk(2, -1)
        routed = torch.zeros(x.shape[0], self.w1.shape[0], device=x.device, dtype=weight.dtype)
        routed = routed.scatter(1, chosen, weight / weight.sum(-1, keepdim=True))
        hidden = F.gelu(torch.einsum("nd,edh->enh", x, self.w1.to(x.dtype)))
        return torch.einsum("enh,ehd,ne->nd", hidden, self.w2.to(x.dtype), routed.to(x.dtype))


def experts_train() -> Built:
    width = scaled(1024, 64)
    model = Experts(width, 8).to(DEVICE)
    x = torch.randn(scaled(4096, 64), width, device=DEVICE)
    return model, training(model, lambda fn: fn(x).float().square().mean())


class Residual(nn.Module):
    def __init__(self, cin: int, cout: int):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, cin), nn.GroupNorm(8, cout)
        self.conv1, self.conv2 = nn.Conv2d(cin, cout, 3, padding=1), nn.Conv2d(cout, cout, 3, padding=1)
        self.time = nn.Linear(128, cout)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(t)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class Diffusion(nn.Module):
    """The usual U-Net of a small diffusion model."""

    def __init__(self, width: int):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 128))
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down1, self.down2 = Residual(width, 2 * width), Residual(2 * width, 4 * width)
        self.mid = Residual(4 * width, 4 * width)
        self.up2, self.up1 = Residual(8 * width, 2 * width), Residual(4 * width, width)

    def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        frequency = torch.exp(-math.log(1e4) * torch.arange(32, device=x.device) / 32)
        angle = step[:, None].float() * frequency
        t = self.time(torch.cat((angle.sin(), angle.cos()), -1))
        h1 = self.down1(self.first(x), t)
        h2 = self.down2(F.avg_pool2d(h1, 2), t)
        h = self.mid(F.avg_pool2d(h2, 2), t)
        h = self.up2(torch.cat((F.interpolate(h, scale_factor=2.0), h2), 1), t)
        h = self.up1(torch.cat((F.interpolate(h, scale_factor=2.0), h1), 1), t)
        return self.last(F.silu(h))


def diffusion_train() -> Built:
    model = Diffusion(scaled(64, 8)).to(DEVICE)
    x = torch.randn(scaled(32, 2), 3, scaled(64, 16), scaled(64, 16), device=DEVICE)
    t = torch.randint(0, 1000, (x.shape[0],), device=DEVICE)
    return model, training(model, lambda fn: F.mse_loss(fn(x, t), x))


def gan_train() -> Built:
    """Discriminator and generator in turns, as in the DCGAN example."""
    up = lambda i, o: (nn.ConvTranspose2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())  # noqa: E731
    down = lambda i, o: (nn.Conv2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.2))  # noqa: E731
    w = scaled(64, 8)
    make = nn.Sequential(
        nn.ConvTranspose2d(100, 8 * w, 4),
        *up(8 * w, 4 * w),
        *up(4 * w, 2 * w),
        *up(2 * w, w),
        nn.ConvTranspose2d(w, 3, 4, 2, 1),
        nn.Tanh(),
    ).to(DEVICE)
    judge = nn.Sequential(
        nn.Conv2d(3, w, 4, 2, 1),
        *down(w, 2 * w),
        *down(2 * w, 4 * w),
        *down(4 * w, 8 * w),
        nn.Conv2d(8 * w, 1, 4),
        nn.Flatten(),
    ).to(DEVICE)
    real = torch.randn(scaled(64, 4), 3, 64, 64, device=DEVICE)
    noise = torch.randn(real.shape[0], 100, 1, 1, device=DEVICE)
    both = nn.ModuleList((make, judge))

    def losses(real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        fake = make(noise)
        ones, zeros = torch.ones_like(judge(real)), torch.zeros(real.shape[0], 1, device=real.device)
        wrong = F.binary_cross_entropy_with_logits(judge(fake.detach()), zeros)
        right = F.binary_cross_entropy_with_logits(judge(real), ones)
        return wrong + right + F.binary_cross_entropy_with_logits(judge(fake), ones)

    return losses, training(both, lambda fn: fn(real, noise), amp=False)


def physics_train() -> Built:
    """A physics-informed network: the residual of a heat equation needs second derivatives."""
    model = nn.Sequential(
        *(m for i in range(5) for m in (nn.Linear(2 if i == 0 else 128, 128), nn.Tanh())), nn.Linear(128, 1)
    ).to(DEVICE)
    x = torch.rand(scaled(65536, 256), 2, device=DEVICE, requires_grad=True)

    def loss(x: torch.Tensor) -> torch.Tensor:
        u = model(x)
        first = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        second = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)[0]
        return (first[:, 1] - second[:, 0]).square().mean() + u.square().mean()

    return loss, training(model, lambda fn: fn(x), amp=False)


def radiance_train() -> Built:
    """Positional encoding, an MLP, and volume rendering along rays."""
    w = scaled(256, 32)
    net = nn.Sequential(
        nn.Linear(63, w),
        nn.ReLU(),
        *(m for _ in range(5) for m in (nn.Linear(w, w), nn.ReLU())),
        nn.Linear(w, 4),
    ).to(DEVICE)
    rays, samples = scaled(4096, 16), 64
    points = torch.rand(rays, samples, 3, device=DEVICE)
    depth = torch.linspace(2, 6, samples, device=DEVICE).expand(rays, samples)

    def render(points: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
        bands = 2.0 ** torch.arange(10, device=points.device) * math.pi
        angle = (points[..., None] * bands).flatten(-2)
        raw = net(torch.cat((points, angle.sin(), angle.cos()), -1))
        step = torch.cat((depth[:, 1:] - depth[:, :-1], torch.full_like(depth[:, :1], 1e10)), -1)
        alpha = 1 - torch.exp(-F.relu(raw[..., 3]) * step)
        passing = torch.cumprod(torch.cat((torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10), -1), -1)[
            :, :-1
        ]
        return ((alpha * passing)[..., None] * raw[..., :3].sigmoid()).sum(1)

    return render, training(net, lambda fn: fn(points, depth).square().mean(), amp=False)


def graph_train() -> Built:
    """Message passing with index_add and gathers."""
    nodes, edges, w = scaled(50_000, 200), scaled(500_000, 800), scaled(128, 16)
    layers = nn.ModuleList(nn.Linear(2 * w, w) for _ in range(3)).to(DEVICE)
    source, target = (torch.randint(0, nodes, (edges,), device=DEVICE) for _ in range(2))
    x = torch.randn(nodes, w, device=DEVICE)

    def forward(x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        degree = torch.zeros(x.shape[0], device=x.device).index_add(
            0, target, torch.ones_like(target, dtype=x.dtype)
        )
        for layer in layers:
            arrived = torch.zeros_like(x).index_add(0, target, x[source])
            x = F.relu(layer(torch.cat((x, arrived / degree.clamp(min=1)[:, None]), -1)))
        return x

    return forward, training(layers, lambda fn: fn(x, source, target).square().mean(), amp=False)


def recommend_train() -> Built:
    """Embedding bags, pairwise products and an MLP (DLRM)."""
    rows, w = scaled(200_000, 100), 64
    tables = nn.ModuleList(nn.EmbeddingBag(rows, w, mode="sum") for _ in range(16)).to(DEVICE)
    bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, w)).to(DEVICE)
    top = nn.Sequential(nn.Linear(w + 17 * 16 // 2, 512), nn.ReLU(), nn.Linear(512, 1)).to(DEVICE)
    batch = scaled(4096, 32)
    dense, sparse = (
        torch.randn(batch, 13, device=DEVICE),
        torch.randint(0, rows, (16, batch, 4), device=DEVICE),
    )
    labels = torch.rand(batch, device=DEVICE)
    upper = torch.triu_indices(17, 17, 1, device=DEVICE)

    def forward(dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x = bottom(dense)
        stack = torch.stack([x, *(table(ids) for table, ids in zip(tables, sparse))], 1)
        pairs = torch.bmm(stack, stack.transpose(1, 2))[:, upper[0], upper[1]]
        return top(torch.cat((x, pairs), 1)).squeeze(1)

    loss = lambda fn: F.binary_cross_entropy_with_logits(fn(dense, sparse), labels)  # noqa: E731
    return forward, training(nn.ModuleList((tables, bottom, top)), loss, amp=False)


def recurrent_train() -> Built:
    model = nn.LSTM(scaled(256, 32), scaled(512, 32), 2, batch_first=True).to(DEVICE)
    x = torch.randn(scaled(64, 2), scaled(128, 16), scaled(256, 32), device=DEVICE)
    return model, training(model, lambda fn: fn(x)[0].square().mean(), amp=False)


def cells_train() -> Built:
    """A recurrent net as a Python loop over a cell."""
    w = scaled(512, 32)
    cell = nn.GRUCell(w, w).to(DEVICE)
    x = torch.randn(24, scaled(64, 2), w, device=DEVICE)

    def forward(x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x[0])
        for part in x:
            h = cell(part, h)
        return h

    return forward, training(cell, lambda fn: fn(x).square().mean(), amp=False)


def selective_scan() -> Built:
    """A state-space recurrence by a loop in Python over time, elementwise."""
    b, t, d, n = scaled(8, 1), 48, scaled(2048, 32), 16
    x, delta = (torch.rand(b, t, d, device=DEVICE) for _ in range(2))
    decay, into, out = (
        -torch.rand(d, n, device=DEVICE),
        *(torch.randn(b, t, n, device=DEVICE) for _ in range(2)),
    )

    def forward(x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        state, results = torch.zeros(b, d, n, device=x.device), []
        for i in range(t):
            state = (
                torch.exp(delta[:, i, :, None] * decay) * state
                + (delta[:, i] * x[:, i])[..., None] * into[:, i, None]
            )
            results.append((state * out[:, i, None]).sum(-1))
        return torch.stack(results, 1)

    return forward, inferring(x, delta)


def plain_attention() -> Built:
    """Attention as in textbooks, with an additive mask and a bias by distance."""
    b, h, t, d = scaled(8, 1), scaled(16, 2), scaled(1024, 32), 64
    dtype = torch.bfloat16 if LARGE else torch.float32
    q, k, v = (torch.randn(b, h, t, d, device=DEVICE, dtype=dtype) for _ in range(3))
    slopes = 2.0 ** -torch.arange(1, h + 1, device=DEVICE, dtype=dtype)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        place = torch.arange(q.shape[-2], device=q.device)
        distance = (place[None] - place[:, None]).to(q.dtype)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + slopes[:, None, None] * distance
        scores = scores.masked_fill(place[None] > place[:, None], float("-inf"))
        return F.dropout(scores.softmax(-1), 0.1, False) @ v

    return attend, inferring(q, k, v)


def optimizer_step(name: str, **settings: Any) -> Callable[[], Built]:
    def build() -> Built:
        w = scaled(1024, 32)
        sizes = [(w, w), (4 * w, w), (w,), (w, 4 * w), (4 * w,)] * scaled(8, 2)
        params = [nn.Parameter(torch.randn(size, device=DEVICE)) for size in sizes]
        for p in params:
            p.grad = torch.randn_like(p)
        chosen = getattr(torch.optim, name)(params, lr=1e-6, **settings)

        def step() -> torch.Tensor:
            chosen.step()
            return params[0]

        return step, lambda fn: fn()

    return build


def contrastive() -> Built:
    n, d = scaled(4096, 64), 256
    a, b = (torch.randn(n, d, device=DEVICE, requires_grad=True) for _ in range(2))
    scale = torch.tensor(2.0, device=DEVICE, requires_grad=True)

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        scores = scale.exp() * F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).t()
        labels = torch.arange(len(a), device=a.device)
        return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.t(), labels)) / 2

    def use(fn: Any) -> Any:
        out = fn(a, b)
        out.backward()
        a.grad = b.grad = scale.grad = None
        return out

    return loss, use


def detection_loss() -> Built:
    """Boxes: pairwise overlaps, focal loss, smooth L1."""
    anchors, boxes = scaled(20000, 200), 64
    logits = torch.randn(anchors, 80, device=DEVICE, requires_grad=True)
    offsets = torch.randn(anchors, 4, device=DEVICE, requires_grad=True)
    low = torch.rand(anchors, 2, device=DEVICE)
    prior = torch.cat((low, low + torch.rand(anchors, 2, device=DEVICE)), -1)
    truth = prior[:boxes] + 0.01
    kinds = torch.randint(0, 80, (boxes,), device=DEVICE)

    def loss(logits: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        lt = torch.maximum(prior[:, None, :2], truth[None, :, :2])
        rb = torch.minimum(prior[:, None, 2:], truth[None, :, 2:])
        inner = (rb - lt).clamp(min=0).prod(-1)
        area = lambda b: (b[:, 2:] - b[:, :2]).prod(-1)  # noqa: E731
        overlap, best = (inner / (area(prior)[:, None] + area(truth) - inner)).max(1)
        positive = overlap > 0.5
        target = F.one_hot(kinds[best], 80) * positive[:, None]
        p = logits.sigmoid()
        cross = F.binary_cross_entropy_with_logits(logits, target.float(), reduction="none")
        focal = cross * (1 - torch.where(target > 0, p, 1 - p)) ** 2
        close = F.smooth_l1_loss(offsets, truth[best] - prior, reduction="none").sum(-1)
        return focal.sum() / positive.sum().clamp(min=1) + torch.where(positive, close, 0).sum() / len(
            prior
        )

    def use(fn: Any) -> Any:
        out = fn(logits, offsets)
        out.backward()
        logits.grad = offsets.grad = None
        return out

    return loss, use


def augment() -> Built:
    """Normalising, flipping, cropping and colour changes of bytes."""
    n, s = scaled(256, 4), scaled(256, 64)
    pictures = torch.randint(0, 256, (n, s, s, 3), device=DEVICE, dtype=torch.uint8)
    mean, deviation = (torch.tensor(v, device=DEVICE) for v in ((0.48, 0.45, 0.4), (0.22, 0.22, 0.22)))

    def prepare(pictures: torch.Tensor) -> torch.Tensor:
        x = (pictures.float() / 255 - mean) / deviation
        x = x.permute(0, 3, 1, 2)[:, :, 16:-16, 16:-16].flip(-1)
        grey = (x * x.new_tensor((0.3, 0.59, 0.11))[:, None, None]).sum(1, keepdim=True)
        x = (x - grey) * 1.2 + grey
        return F.interpolate(x, scale_factor=0.5, mode="bilinear", align_corners=False).half()

    return prepare, inferring(pictures)


def stencil() -> Built:
    """Ten steps of a wave on a grid, by shifted slices."""
    n = scaled(4096, 128)
    now, before = (torch.randn(n, n, device=DEVICE) for _ in range(2))

    def march(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            around = now.roll(1, 0) + now.roll(-1, 0) + now.roll(1, 1) + now.roll(-1, 1)
            now, before = 2 * now - before + 0.1 * (around - 4 * now), now
        return now

    return march, inferring(now, before)


def sampling() -> Built:
    """From logits to the next tokens: penalties, top-k, top-p."""
    b, v = scaled(64, 2), scaled(128_256, 500)
    logits, seen = torch.randn(b, v, device=DEVICE), torch.randint(0, v, (b, 256), device=DEVICE)

    def pick(logits: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        held = logits.gather(1, seen)
        logits = logits.scatter(1, seen, torch.where(held < 0, held * 1.1, held / 1.1)) / 0.8
        least = logits.topk(50).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
        ordered, places = logits.sort(descending=True)
        cut = ordered.softmax(-1).cumsum(-1) > 0.9
        cut = cut.roll(1, -1)
        cut[:, 0] = False
        return logits.masked_fill(cut.scatter(1, places, cut), float("-inf")).argmax(-1)

    return pick, inferring(logits, seen)


def quantised() -> Built:
    """Weights of eight bits, unpacked before the product, activations scaled by row."""
    n, d = scaled(64, 4), scaled(4096, 64)
    x = torch.randn(n, d, device=DEVICE, dtype=torch.bfloat16 if LARGE else torch.float32)
    weights = [torch.randint(-128, 127, (d, d), device=DEVICE, dtype=torch.int8) for _ in range(4)]
    scales = [torch.rand(d, 1, device=DEVICE, dtype=x.dtype) / 128 for _ in weights]

    def forward(x: torch.Tensor) -> torch.Tensor:
        for weight, scale in zip(weights, scales):
            x = F.relu(F.linear(x, weight.to(x.dtype) * scale)) + x
            x = x / x.abs().amax(-1, keepdim=True)
        return x

    return forward, inferring(x)


def spectral() -> Built:
    """A Fourier neural operator's layer, inference."""
    b, w, s = scaled(16, 1), scaled(64, 8), scaled(128, 32)
    modes = 12
    x = torch.randn(b, w, s, s, device=DEVICE)
    weight = torch.randn(w, w, modes, modes, device=DEVICE, dtype=torch.cfloat) / w
    local = nn.Conv2d(w, w, 1).to(DEVICE)

    def forward(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            spectrum = torch.fft.rfft2(x)
            mixed = torch.zeros_like(spectrum)
            mixed[:, :, :modes, :modes] = torch.einsum(
                "bixy,ioxy->boxy", spectrum[:, :, :modes, :modes], weight
            )
            x = F.gelu(torch.fft.irfft2(mixed, s=x.shape[-2:]) + local(x))
        return x

    return forward, inferring(x)


PROGRAMS: dict[str, Callable[[], Built]] = {
    "nano_train": nano_train,
    "opt_train": hf("OPTForCausalLM", "OPTConfig", 8, 512, train=True),
    "qwen3_train": hf(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        4,
        1024,
        train=True,
        hidden_size=1024,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=3072,
        vocab_size=50304,
    ),
    "gemma_train": hf(
        "GemmaForCausalLM",
        "GemmaConfig",
        4,
        512,
        train=True,
        hidden_size=1024,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=128,
        intermediate_size=4096,
        vocab_size=50000,
    ),
    "roberta_train": hf("RobertaForMaskedLM", "RobertaConfig", 16, 256, train=True, pad_token_id=1),
    "deberta_infer": hf("DebertaV2Model", "DebertaV2Config", 8, 256, dtype=torch.float16),
    "distilbert_infer": hf("DistilBertModel", "DistilBertConfig", 32, 128, dtype=torch.float16),
    "gptneox_infer": hf(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        4,
        512,
        hidden_size=1024,
        num_hidden_layers=12,
        num_attention_heads=16,
        intermediate_size=4096,
    ),
    "mixtral_infer": hf(
        "MixtralForCausalLM",
        "MixtralConfig",
        2,
        256,
        hidden_size=1024,
        num_hidden_layers=6,
        intermediate_size=2048,
        num_attention_heads=16,
        num_key_value_heads=4,
    ),
    "mamba_infer": hf("MambaForCausalLM", "MambaConfig", 1, 64, hidden_size=768, num_hidden_layers=4),
    "gpt2_decode": decode("GPT2LMHeadModel", "GPT2Config", 1),
    "qwen2_decode8": decode(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        8,
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=2,
        intermediate_size=8192,
        vocab_size=50000,
    ),
    "t5_train": t5_train,
    "whisper_train": whisper_train,
    "clip_train": clip_train,
    "vit_train": timm_train("vit_base_patch16_224", 32),
    "deit3_infer": timm_infer("deit3_small_patch16_224", 64),
    "swin_train": timm_train("swin_tiny_patch4_window7_224", 32),
    "maxvit_infer": timm_infer("maxvit_tiny_tf_224", 32),
    "convnext_infer": timm_infer("convnext_tiny", 64),
    "regnet_train": timm_train("regnety_016", 64),
    "effnet_train": timm_train("efficientnet_b0", 64),
    "effnetv2_infer": timm_infer("tf_efficientnetv2_s", 64),
    "mobilenet_one": timm_infer("mobilenetv3_large_100", 1, torch.float32),
    "densenet_train": timm_train("densenet121", 32),
    "mixer_train": timm_train("mixer_b16_224", 32),
    "diffusion_train": diffusion_train,
    "gan_train": gan_train,
    "physics_train": physics_train,
    "radiance_train": radiance_train,
    "graph_train": graph_train,
    "recommend_train": recommend_train,
    "recurrent_train": recurrent_train,
    "cells_train": cells_train,
    "experts_train": experts_train,
    "selective_scan": selective_scan,
    "plain_attention": plain_attention,
    "adamw_step": optimizer_step("AdamW"),
    "adam_step_foreach": optimizer_step("Adam", foreach=True),
    "sgd_step": optimizer_step("SGD", momentum=0.9),
    "contrastive": contrastive,
    "detection_loss": detection_loss,
    "augment": augment,
    "stencil": stencil,
    "sampling": sampling,
    "quantised": quantised,
    "spectral": spectral,
}
