"""flex_attention as plain operators, which capture interprets in place of torch's own.

    flex_attention(q, k, v, lambda score, b, h, i, j: score + bias[h] * (i - j), masks, scale, {})
        -> the scores of all queries and keys, changed by that function under vmap; their softmax; times v
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def everywhere(function: Callable[..., Any], scores: int) -> Callable[..., Any]:
    """A function of so many scores, and of a batch, a head, a query and a key, for all of them at once."""
    for axis in (3, 2, 1, 0):
        function = torch.vmap(function, (0,) * scores + tuple(0 if i == axis else None for i in range(4)))
    return function


def flex_attention(
    query: torch.Tensor, key: Any, value: Any, score_mod: Any, block_mask: Any, scale: Any, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As in torch, the statistics are logarithms to the base 2, and a query without keys gets zeros."""
    shared = query.size(1) // key.size(1)
    key, value = (x.repeat_interleave(shared, 1).expand(len(query), -1, -1, -1) for x in (key, value))
    scores = (query @ key.mT).to(torch.promote_types(query.dtype, torch.float32)) * scale
    places = [torch.arange(size, device=query.device) for size in scores.shape]
    scores = everywhere(score_mod, 1)(scores, *places)
    scores = torch.where(everywhere(block_mask[-1], 0)(*places), scores, -math.inf)
    weights = torch._safe_softmax(scores, -1).to(query.dtype)
    return weights @ value, scores.logsumexp(-1) / math.log(2), scores.amax(-1) / math.log(2)
