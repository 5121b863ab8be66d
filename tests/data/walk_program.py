"""The function that docs/walk.md follows through every stage."""

import torch


def scores(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    hidden = x @ w + b
    return torch.softmax(hidden, dim=-1)
