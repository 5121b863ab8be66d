"""Attention of one query, as a decoder does for each token: reductions that run at memory speed.

    attention(q[1 row], k, v)   ->   s = sum(q * k) * scale + bias        one row of scores
                                     e = exp(s - max(s));  o = sum(e * v) / sum(e)

The libraries' kernels share their work out by blocks of queries, and of one query there are no blocks;
they also want a head of keys for every head of queries, where reductions read a repeated one in place.
A whole encoder layer, which eager has as one call for inference, is opened up around its products. Everything
else about attention stays a library call.
"""
from __future__ import annotations

import math

from dovetail.ir.expr import ONE, Expr, as_expr, floordiv, mul
from dovetail.ir.types import F32, TensorType, contiguous_stride, tensor_type
from dovetail.ops.build import Build, Number, Value
from dovetail.ops.decomp.norms import normalised
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


@decomposes("aten._transformer_encoder_layer_fwd")
def encoder_layer(
    b: Build, x: Value, width: int, heads: int, enter: Value, enter_bias: Value, leave: Value,
    leave_bias: Value, use_gelu: bool, norm_first: bool, eps: float, *rest: Value, mask: Value | None = None,
    mask_type: int | None = None,
) -> Value:  # fmt: skip
    """`rest` are weights and biases of the two norms, then of the two linear layers; a mask may follow."""
    norms, (up, up_bias, down, down_bias), masks = (rest[:2], rest[2:4]), rest[4:8], (*rest[8:9], mask)
    decline_if(b.out.device.kind != "cpu" or b.out.dtype is not F32 or x.ndim != 3 or any(masks))
    split = (*x.shape[:2], as_expr(heads), as_expr(width // heads))

    def norm(y: Value, which: int) -> Value:
        weight, bias = norms[which]
        return normalised(b, y, 1, weight, bias, eps)[0]

    def attend(y: Value) -> Value:
        all = _linear(b, y, enter, enter_bias)
        parts = (b.reshape(b.slice(all, 2, width * i, width * (i + 1)), split) for i in range(3))
        q, k, v = (b.permute(part, (0, 2, 1, 3)) for part in parts)
        rows = b.permute(_attended(b, q, k, v), (0, 2, 1, 3))
        return _linear(b, b.reshape(rows, x.shape), leave, leave_bias)

    def feed(y: Value) -> Value:
        z = _linear(b, y, up, up_bias)
        gated = z * 0.5 * (1.0 + b.call("erf", z * math.sqrt(0.5))) if use_gelu else b.call("maximum", z, 0.0)
        return _linear(b, gated, down, down_bias)

    if norm_first:
        x = x + attend(norm(x, 0))
        return x + feed(norm(x, 1))
    x = norm(x + attend(x), 0)
    return norm(x + feed(x), 1)


def _linear(b: Build, x: Value, weight: Value, bias: Value) -> Value:
    rows, (size, depth) = mul(*x.shape[:2]), weight.shape
    kind = tensor_type((rows, size), x.dtype, x.type.device)
    product = b.extern("aten.mm.default", (b.reshape(x, (rows, depth)), b.permute(weight, (1, 0))), kind)
    return b.reshape(product, (*x.shape[:2], size)) + bias


def _attended(b: Build, q: Value, k: Value, v: Value) -> Value:
    """The library's fused attention on the CPU; its result lies in memory as the queries do."""
    batch, heads, length, depth = q.shape
    row = mul(heads, depth)
    out = TensorType(q.shape, (mul(length, row), depth, row, ONE), q.dtype, q.type.device)
    sums = TensorType(q.shape[:3], contiguous_stride(q.shape[:3]), F32, q.type.device)
    op = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    both = b.graph.call(op, (q.node, k.node, v.node), (out, sums), name=f"{b.stem}_attention", loc=b.loc)
    return Value(b.graph.get(both, 0), b)
