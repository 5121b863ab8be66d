"""The operators that torchvision, imported next to a CPU build of torch, expects its compiled part to have
made. transformers and timm import torchvision wherever it is installed; import this first."""
from __future__ import annotations

import torch

LIBRARY = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, name):
        LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
