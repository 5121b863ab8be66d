"""All of PyTorch's sample inputs through Crossref, forward and backward; prints what differs.

    python -m tests.fake.sweep [--device cuda] [--dtype bfloat16] [--layout channels_last] [op name ...]
"""
from __future__ import annotations

import argparse
import warnings
from collections import Counter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from dovetail.errors import FailedFake
from tests.fake.crossref import Crossref
from tests.sweeps.torch_testing import OPS


def _relaid(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    if tensor.layout != torch.strided or layout == "given" or tensor.dim() < 2:
        return tensor
    plain = tensor.detach()
    if layout == "transposed":
        plain = plain.mT.contiguous().mT
    elif tensor.dim() == 4:
        plain = plain.contiguous(memory_format=torch.channels_last)
    return plain.requires_grad_(tensor.requires_grad)


def _run(op: Any, inputs: Any) -> None:
    result = op.op(inputs[0], *inputs[1], **inputs[2])
    outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    leaves = [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    if outputs:
        torch.autograd.grad(outputs, leaves, [torch.ones_like(t) for t in outputs], allow_unused=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--layout", default="given", choices=["given", "transposed", "channels_last"])
    parser.add_argument("--samples", type=int, default=4)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    dtype = getattr(torch, given.dtype)
    counts: Counter[str] = Counter()
    for name in given.names or sorted(OPS):
        op = OPS[name]
        if dtype not in op.supported_dtypes(torch.device(given.device).type):
            continue
        seen = Crossref()
        for sample in _samples(op, given.device, dtype, given.samples):
            inputs = (sample.input, sample.args, sample.kwargs)
            inputs = tree_map_only(torch.Tensor, lambda t: _relaid(t, given.layout), inputs)
            try:
                with seen:
                    _run(op, inputs)
            except FailedFake as error:
                print("no inference", name, error.text[:150])
                counts["failed"] += 1
            except Exception as error:  # eager itself refuses some samples in other layouts
                counts[f"eager: {type(error).__name__}"] += 1
        counts["equal"] += seen.count - len(seen.differences)
        counts["different"] += len(seen.differences)
        for line in seen.differences[:1]:
            print("differs", name, line[:600])
    print(dict(counts))


def _samples(op: Any, device: str, dtype: torch.dtype, limit: int) -> list[Any]:
    needs_grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    samples = list(op.sample_inputs(device, dtype, requires_grad=needs_grad))
    return samples[:: max(1, len(samples) // limit)]


if __name__ == "__main__":
    main()
