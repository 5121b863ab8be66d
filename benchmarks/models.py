"""What is measured: twelve models and twenty micro functions, each built from a seed, with inputs.

    WORKLOADS["bert"]() -> Workload(model, (tokens,), trainable=True)

Sizes are what a newcomer would try on a laptop: small configurations of well-known architectures.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, slots=True)
class Workload:
    run: Callable[..., Any]
    inputs: tuple[Any, ...]
    trainable: bool = True
    bytes_moved: int = 0
    """For memory-bound micro functions: bytes that must be read and written."""


WORKLOADS: Final[dict[str, Callable[[], Workload]]] = {}
MICRO: Final[dict[str, Callable[[int], Workload]]] = {}


def workload(make: Callable[[], Workload]) -> Callable[[], Workload]:
    WORKLOADS[make.__name__] = make
    return make


def micro(make: Callable[[int], Workload]) -> Callable[[int], Workload]:
    """A function of matrices with so many rows and columns."""
    MICRO[make.__name__] = make
    return make


def define_vision_ops() -> None:
    """timm imports torchvision, whose compiled part does not load next to a CPU build of torch."""
    library = torch.library.Library("torchvision", "DEF")
    KEPT.append(library)
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


KEPT: Final[list[Any]] = []


def timm_model(name: str, image: int, batch: int = 4, **settings: Any) -> Workload:
    if not KEPT:
        define_vision_ops()
    import timm

    return Workload(
        timm.create_model(name, num_classes=100, **settings), (torch.randn(batch, 3, image, image),)
    )


class Logits(nn.Module):
    """A transformers model reduced to tokens -> tensor, as most training code uses it."""

    def __init__(self, model: nn.Module, decoder: bool = False) -> None:
        super().__init__()
        self.model, self.decoder = model, decoder

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        named = {"decoder_input_ids": tokens} if self.decoder else {}
        return self.model(input_ids=tokens, **named).logits  # type: ignore[no-any-return]


def hf_model(config_name: str, class_name: str, decoder: bool = False, **settings: Any) -> Workload:
    if not KEPT:
        define_vision_ops()
    import transformers

    config = getattr(transformers, config_name)(use_cache=False, **settings)
    return Workload(
        Logits(getattr(transformers, class_name)(config), decoder), (torch.randint(0, 1000, (2, 128)),)
    )


@workload
def resnet18() -> Workload:
    return timm_model("resnet18", 128)


@workload
def mobilenetv3() -> Workload:
    return timm_model("mobilenetv3_small_100", 128)


@workload
def convnext_atto() -> Workload:
    return timm_model("convnext_atto", 128)


@workload
def vit_tiny() -> Workload:
    return timm_model("vit_tiny_patch16_224", 128, img_size=128)


@workload
def efficientnet_b0() -> Workload:
    return timm_model("efficientnet_b0", 128, batch=2)


@workload
def bert() -> Workload:
    return hf_model(
        "BertConfig",
        "BertForMaskedLM",
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        vocab_size=1000,
    )


@workload
def gpt2() -> Workload:
    return hf_model(
        "GPT2Config", "GPT2LMHeadModel", n_embd=256, n_layer=4, n_head=4, vocab_size=1000, n_positions=256
    )


@workload
def llama() -> Workload:
    return hf_model(
        "LlamaConfig",
        "LlamaForCausalLM",
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=688,
        vocab_size=1000,
    )


@workload
def t5() -> Workload:
    return hf_model(
        "T5Config",
        "T5ForConditionalGeneration",
        decoder=True,
        d_model=256,
        d_kv=64,
        d_ff=1024,
        num_layers=3,
        num_heads=4,
        vocab_size=1000,
    )


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(64, 128, num_layers=2, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0])


@workload
def lstm() -> Workload:
    return Workload(Tagger(), (torch.randn(8, 32, 64),))


@workload
def mlp() -> Workload:
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU())]
    return Workload(nn.Sequential(*layers, nn.Linear(256, 10)), (torch.randn(64, 256),))


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(8, channels) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.time = nn.Linear(64, channels)

    def forward(self, x: torch.Tensor, when: torch.Tensor) -> torch.Tensor:
        y = self.convs[0](F.silu(self.norms[0](x))) + self.time(when)[:, :, None, None]
        return x + self.convs[1](F.silu(self.norms[1](y)))


class UNet(nn.Module):
    """A small diffusion-style U-Net: time embedding, residual blocks, skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 32, 3, padding=1)
        self.down = nn.ModuleList([ResidualBlock(32), ResidualBlock(64)])
        self.shrink = nn.ModuleList([nn.Conv2d(32, 64, 3, 2, 1), nn.Conv2d(64, 64, 3, 2, 1)])
        self.middle = ResidualBlock(64)
        self.merge = nn.ModuleList([nn.Conv2d(128, 64, 1), nn.Conv2d(96, 32, 1)])
        self.up = nn.ModuleList([ResidualBlock(64), ResidualBlock(32)])
        self.leave = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        angles = t[:, None] * torch.exp(-torch.arange(32, device=x.device) / 32 * 9.2)
        when = torch.cat([angles.sin(), angles.cos()], -1)
        x, kept = self.enter(x), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x, when)
            kept.append(x)
            x = shrink(x)
        x = self.middle(x, when)
        for merge, block in zip(self.merge, self.up, strict=True):
            x = F.interpolate(x, scale_factor=2.0)
            x = block(merge(torch.cat([x, kept.pop()], 1)), when)
        return self.leave(x)


@workload
def unet() -> Workload:
    return Workload(UNet(), (torch.randn(2, 3, 32, 32), torch.rand(2)))


# -- micro functions -------------------------------------------------------------------------------

SMALL: Final = 1024
LARGE: Final = 2688
"""Rows and columns: three matrices fit into a usual cache; one nearly fills it, and malloc still keeps it."""


def square(n: int) -> torch.Tensor:
    return torch.randn(n, n)


def moved(n: int, reads: int, writes: int) -> int:
    return 4 * n * n * (reads + writes)


@micro
def softmax(n: int) -> Workload:
    return Workload(lambda x: torch.softmax(x, -1), (square(n),), bytes_moved=moved(n, 1, 1))


@micro
def layer_norm(n: int) -> Workload:
    w, b = torch.randn(n), torch.randn(n)
    return Workload(lambda x: F.layer_norm(x, (n,), w, b), (square(n),), bytes_moved=moved(n, 1, 1))


@micro
def rms_norm_residual(n: int) -> Workload:
    w = torch.randn(n)

    def f(x: torch.Tensor, r: torch.Tensor) -> Any:
        y = x + r
        return y, y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * w

    return Workload(f, (square(n), square(n)), bytes_moved=moved(n, 2, 2))


@micro
def residual_layer_norm(n: int) -> Workload:
    inputs = (square(n), square(n))
    return Workload(lambda x, r: F.layer_norm(x + r, (n,)), inputs, bytes_moved=moved(n, 2, 1))


@micro
def bias_gelu(n: int) -> Workload:
    b = torch.randn(n)
    return Workload(lambda x: F.gelu(x + b), (square(n),), bytes_moved=moved(n, 1, 1))


@micro
def swiglu(n: int) -> Workload:
    return Workload(lambda x, y: F.silu(x) * y, (square(n), square(n)), bytes_moved=moved(n, 2, 1))


@micro
def where_chain(n: int) -> Workload:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.where(x > 0, x * 2, y)
        z = torch.where(z > 1, z - y, z + y)
        return torch.where(z < -1, z * z, z.abs()) + x

    return Workload(f, (square(n), square(n)), bytes_moved=moved(n, 2, 1))


@micro
def transpose_add(n: int) -> Workload:
    return Workload(lambda x, y: x.t() + y, (square(n), square(n)), bytes_moved=moved(n, 2, 1))


@micro
def sum_rows(n: int) -> Workload:
    return Workload(lambda x: (x * x).sum(1), (square(n),), bytes_moved=moved(n, 1, 0))


@micro
def sum_columns(n: int) -> Workload:
    return Workload(lambda x, y: (x * y).sum(0), (square(n), square(n)), bytes_moved=moved(n, 2, 0))


@micro
def sum_all(n: int) -> Workload:
    return Workload(lambda x: (x - 0.5).abs().mean(), (square(n),), bytes_moved=moved(n, 1, 0))


@micro
def variance_columns(n: int) -> Workload:
    return Workload(lambda x: x.var(0), (square(n),), bytes_moved=moved(n, 1, 0))


@micro
def argmax_rows(n: int) -> Workload:
    return Workload(lambda x: (x * 2).argmax(-1), (square(n),), bytes_moved=moved(n, 1, 0))


@micro
def cross_entropy(n: int) -> Workload:
    return Workload(F.cross_entropy, (square(n), torch.randint(0, n, (n,))), bytes_moved=moved(n, 1, 0))


@micro
def mse_loss(n: int) -> Workload:
    return Workload(lambda x, y: F.mse_loss(x, y), (square(n), square(n)), bytes_moved=moved(n, 2, 0))


@micro
def gather_rows(n: int) -> Workload:
    rows = torch.randint(0, n, (n,))
    return Workload(lambda x, i: x[i] * 2 + 1, (square(n), rows), bytes_moved=moved(n, 1, 1))


@micro
def embedding_sum(n: int) -> Workload:
    return Workload(
        lambda t, i: F.embedding(i, t).sum(1),
        (torch.randn(5 * n, 256), torch.randint(0, 5 * n, (n * n // 4096, 16))),
        bytes_moved=4 * (n * n // 4096) * 256 * 17,
    )


@micro
def cumsum_rows(n: int) -> Workload:
    return Workload(lambda x: (x * 0.5).cumsum(-1), (square(n),), bytes_moved=moved(n, 1, 1))


@micro
def cat_slices(n: int) -> Workload:
    def rotate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        half = torch.cat([-x[:, n // 2 :], x[:, : n // 2]], -1)
        return x * y.cos() + half * y.sin()

    return Workload(rotate, (square(n), square(n)), bytes_moved=moved(n, 2, 1))


@micro
def adam_step(n: int) -> Workload:
    def step(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> Any:
        m = m * 0.9 + g * 0.1
        v = v * 0.999 + g * g * 0.001
        return p - 1e-3 * m / (v.sqrt() + 1e-8), m, v

    return Workload(step, (square(n), square(n), square(n), square(n).abs()), bytes_moved=moved(n, 4, 3))


@micro
def pool_normalise(n: int) -> Workload:
    return Workload(
        lambda x: F.avg_pool2d((x - 0.5) / 0.2, 2).relu(),
        (torch.randn(n * n >> 17, 16, 64, 128),),
        bytes_moved=5 * (n * n >> 17) << 17,
    )
