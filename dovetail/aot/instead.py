"""Functions that are performed otherwise when a program is differentiated: on tensors without data torch's
own take a slower way than on others, or look at values."""
from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F

_sdpa: Any = torch._C._nn.scaled_dot_product_attention


def _attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
    """The GPU's fused kernels want a mask in memory along its rows, or plain products would be taken."""
    if attn_mask is not None and query.is_cuda and attn_mask.stride(-1) == 0:
        own = [slice(None if step or not rest else 1) for rest, step in enumerate(attn_mask.stride()[::-1])]
        attn_mask = attn_mask[tuple(reversed(own))].contiguous().expand(attn_mask.shape)
    return _sdpa(query, key, value, attn_mask, *args, **kwargs)


def _one_hot(x: Any, num_classes: int = -1) -> Any:
    """The CPU's function looks at the values, but not at those of a tensor without data."""
    if x.device.type == "cpu":
        torch._assert_async((x >= 0).all(), "Class values must be non-negative.")
        torch._assert_async((x < num_classes).all(), "Class values must be smaller than num_classes.")
    return F.one_hot(x, num_classes)


def _batch_norm(*given: Any, **named: Any) -> Any:
    """Of what torch does before the CPU's op, capture has done the checks; the rest is for other devices."""
    if named or len(given) < 8 or given[0].device.type != "cpu" or not given[0].ref.type.numel.hi:
        return F.batch_norm(*given, **named)
    x, mean, var, weight, bias, *rest = given
    return torch.native_batch_norm(x, weight, bias, mean, var, *rest)[0]


class CumulativeProduct(torch.autograd.Function):
    """Its gradient in a few scans: torch's own, of tensors without data, is a loop over the elements."""

    @staticmethod
    def forward(ctx: Any, x: Any, dim: int) -> Any:
        made = torch.cumprod(x, dim)
        ctx.save_for_backward(x, made)
        ctx.dim = dim
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Up to the first zero by division; at it, by the products without it; behind it nothing."""
        (x, made), dim = ctx.saved_tensors, ctx.dim
        if torch.is_grad_enabled():  # which does not have the right derivatives behind a zero
            return torch.ops.aten.cumprod_backward(gradient, x, dim, made), None
        zeros = (x == 0).cumsum(dim)
        is_first, is_before = (x == 0) & (zeros == 1), zeros == 0
        without = torch.where(is_first, 1, x).cumprod(dim)
        at, before = ((gradient * y.conj()).flip(dim).cumsum(dim).flip(dim) for y in (without, made))
        before = before / torch.where(is_before, x, 1).conj()
        return torch.where(is_before, before, torch.where(is_first, at, 0)), None


def _cumprod(input: Any, dim: int, **named: Any) -> Any:
    if named or not (torch.is_grad_enabled() and input.requires_grad and input.dim()):
        return torch.cumprod(input, dim, **named)
    return CumulativeProduct.apply(input, dim)


_OTHERS: Final = {torch.cumprod: _cumprod, torch.Tensor.cumprod: _cumprod, F.batch_norm: _batch_norm}
INSTEAD: Final[dict[Any, Any]] = {_sdpa: _attention, F.one_hot: _one_hot, **_OTHERS}
