"""Attention of one query, as a decoder does for each token: reductions that run at memory speed.

    attention(q[1 row], k, v)   ->   s = sum(q * k) * scale + bias        one row of scores
                                     e = exp(s - max(s));  o = sum(e * v) / sum(e)

The libraries' kernels share their work out by blocks of queries, and of one query there are no blocks;
they also want a head of keys for every head of queries, where reductions read a repeated one in place.
Everything else about attention stays a library call.
"""
from __future__ import annotations

import math

from dovetail.ir.expr import ONE, Expr, floordiv
from dovetail.ops.build import Build, Number, Value
from dovetail.ops.promote import compute_dtype
from dovetail.ops.registry import decline_if, decomposes


@decomposes("aten._scaled_dot_product_cudnn_attention", "aten._scaled_dot_product_efficient_attention")
def biased_attention(
    b: Build, q: Value, k: Value, v: Value, bias: Value | None, statistics: bool, dropout: Number = 0.0,
    is_causal: bool = False, debug: bool = False, *, scale: Number | None = None,
) -> tuple[Value | None, ...]:  # fmt: skip
    return _one_query(b, q, k, v, bias, dropout, is_causal or debug, scale)


@decomposes("aten._scaled_dot_product_flash_attention")
def flash_attention(
    b: Build, q: Value, k: Value, v: Value, dropout: Number = 0.0, is_causal: bool = False,
    debug: bool = False, *, scale: Number | None = None,
) -> tuple[Value | None, ...]:  # fmt: skip
    return _one_query(b, q, k, v, None, dropout, is_causal or debug, scale)


def _one_query(
    b: Build, q: Value, k: Value, v: Value, bias: Value | None, dropout: Number, is_special: bool,
    scale: Number | None,
) -> tuple[Value | None, ...]:  # fmt: skip
    depth = q.shape[-1]
    known = depth.is_const and isinstance(scale, (int, float, type(None)))
    is_gpu, is_plain = b.out.device.kind == "cuda", dropout == 0.0 and not is_special
    decline_if(not is_gpu or not is_plain or q.shape[2] is not ONE or not known or b.used - {0})
    wide = compute_dtype(b.out.dtype)
    batch, heads, _, _ = q.shape
    length = k.shape[2]
    keys, values = (_heads(b, x, heads).to(wide) for x in (k, v))
    factor = 1.0 / math.sqrt(depth.value) if scale is None else float(scale)  # type: ignore[arg-type]
    scores = b.reduce("sum", b.expand(q.to(wide), keys.shape) * keys, (3,)) * factor
    if bias is not None:
        scores = scores + b.reshape(b.expand(bias.to(wide), (batch, heads, ONE, length)), scores.shape)
    top = b.reduce("max", scores, (2,), keepdim=True)
    weights = b.where(scores.eq(float("-inf")), 0.0, b.call("exp", scores - top))
    total = b.reduce("sum", weights, (2,), keepdim=True)
    mixed = b.reduce("sum", b.expand(b.unsqueeze(weights, (3,)), values.shape) * values, (2,))
    mean = b.where(b.expand(total, mixed.shape).eq(0.0), 0.0, mixed / b.expand(total, mixed.shape))
    found = b.reshape(mean.to(b.out.dtype), b.out.shape)
    return (found, *(None for _ in b.outs[1:]))


def _heads(b: Build, x: Value, heads: Expr) -> Value:
    """One for each head of the queries: groups of them may share."""
    batch, own, length, depth = x.shape
    if own is heads:
        return x
    repeated = b.expand(b.unsqueeze(x, (2,)), (batch, own, floordiv(heads, own), length, depth))
    return b.reshape(repeated, (batch, heads, length, depth))
