"""The operators that torchvision, imported next to a CPU build of torch, expects its compiled part to have
made. transformers and timm import torchvision wherever it is installed; import this first."""
from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path

import torch

found = importlib.util.find_spec("torchvision")
for compiled in Path(found.origin).parent.glob("_C*.so") if found and found.origin else ():
    with contextlib.suppress(OSError):  # made for a GPU
        torch.ops.load_library(str(compiled))

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, name):
        LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
