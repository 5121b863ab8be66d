"""The three models of `peers.py` written by hand in JAX, reading PyTorch's weights by their names.

    FORWARD["mlp"]({"0.weight": ..., ...}, x) -> logits

Written as a JAX user would: plain functions on arrays, nothing tuned for one machine.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

Weights = dict[str, Any]


def linear(weights: Weights, name: str, x: Any) -> Any:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def layer_norm(weights: Weights, name: str, x: Any) -> Any:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def mlp(weights: Weights, x: Any) -> Any:
    for layer in range(0, 12, 3):
        inner = layer_norm(weights, f"{layer + 1}", linear(weights, f"{layer}", x))
        x = jax.nn.gelu(inner, approximate=False)
    return linear(weights, "12", x)


def attention(weights: Weights, name: str, x: Any, heads: int) -> Any:
    batch, length, width = x.shape
    parts = linear(weights, f"{name}.qkv", x).reshape(batch, length, 3, heads, width // heads)
    query, key, value = (parts[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    scores = query @ key.transpose(0, 1, 3, 2) / (width // heads) ** 0.5
    seen = jnp.tril(jnp.ones((length, length), bool))
    mixed = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1) @ value
    return linear(weights, f"{name}.out", mixed.transpose(0, 2, 1, 3).reshape(batch, length, width))


def gpt(weights: Weights, tokens: Any) -> Any:
    x = weights["tokens.weight"][tokens] + weights["places.weight"][: tokens.shape[1]]
    for layer in range(4):
        name = f"blocks.{layer}"
        x = x + attention(weights, name, layer_norm(weights, f"{name}.norms.0", x), heads=4)
        inner = linear(weights, f"{name}.wide", layer_norm(weights, f"{name}.norms.1", x))
        x = x + linear(weights, f"{name}.narrow", jax.nn.gelu(inner, approximate=False))
    return layer_norm(weights, "norm", x) @ weights["tokens.weight"].T


def conv_norm(weights: Weights, name: str, x: Any, stride: int) -> Any:
    """Convolution and batch norm with its running statistics."""
    kernel = weights[f"{name}.0.weight"]
    pads, axes = [(kernel.shape[-1] // 2,) * 2] * 2, ("NCHW", "OIHW", "NCHW")
    y = jax.lax.conv_general_dilated(x, kernel, (stride, stride), pads, dimension_numbers=axes)
    scale = weights[f"{name}.1.weight"] * jax.lax.rsqrt(weights[f"{name}.1.running_var"] + 1e-5)
    shift = weights[f"{name}.1.bias"] - weights[f"{name}.1.running_mean"] * scale
    return y * scale[:, None, None] + shift[:, None, None]


def resnet(weights: Weights, x: Any) -> Any:
    x = jax.nn.relu(conv_norm(weights, "enter", x, 2))
    for block in range(4):
        stride = 1 if block == 0 else 2
        inner = jax.nn.relu(conv_norm(weights, f"blocks.{block}.first", x, stride))
        kept = x if block == 0 else conv_norm(weights, f"blocks.{block}.short", x, stride)
        x = jax.nn.relu(kept + conv_norm(weights, f"blocks.{block}.second", inner, 1))
    return linear(weights, "leave", x.mean((2, 3)))


FORWARD: Final[dict[str, Callable[[Weights, Any], Any]]] = {"mlp": mlp, "gpt": gpt, "resnet": resnet}


def inference_step(name: str, weights: Weights, x: Any) -> Callable[[], Any]:
    run = jax.jit(FORWARD[name])
    held, given = jax.device_put(weights), jax.device_put(x)
    return lambda: run(held, given).block_until_ready()


def training_step(name: str, weights: Weights, trained: set[str], x: Any) -> Callable[[], Any]:
    """Loss and the gradients of the weights named in `trained`, as `measure.step_of` has them."""
    fixed = {key: value for key, value in weights.items() if key not in trained}

    def loss(free: Weights, fixed: Weights, x: Any) -> Any:
        return jnp.square(FORWARD[name]({**fixed, **free}, x)).mean()

    run = jax.jit(jax.value_and_grad(loss))
    held = jax.device_put(({key: weights[key] for key in trained}, fixed, x))

    def train() -> Any:
        value, gradients = jax.block_until_ready(run(*held))
        return value, gradients

    return train
