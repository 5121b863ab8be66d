"""Torch's global state, as far as captured code depends on it.

    read_state()  ->  (("grad_mode", True), ("inference_mode", False), ("default_dtype", torch.float32), ...)

Capture reads it before it enters modes of its own; guards compare it at every call. Values that only
matter sometimes (autocast's type when autocast is off) are only read when they matter.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch

TRACER, AUTOGRAD, PYTHON = map(torch._C._dispatch_key_parse, ("Tracer", "AutogradOther", "Python"))
READERS: Final[dict[str, Callable[[], object]]] = {
    "grad_mode": torch.is_grad_enabled,
    "inference_mode": torch.is_inference_mode_enabled,
    "default_dtype": torch.get_default_dtype,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "torch_function": torch._C._is_torch_function_enabled,
    "function_modes": torch._C._len_torch_function_stack,
    "dispatch_modes": torch._C._len_torch_dispatch_stack,
    "jit_trace": partial(torch._C._dispatch_tls_is_dispatch_key_included, TRACER),
    "below_autograd": partial(torch._C._dispatch_tls_is_dispatch_key_excluded, AUTOGRAD),
    "below_classes": partial(torch._C._dispatch_tls_is_dispatch_key_excluded, PYTHON),
    "anomaly": torch.is_anomaly_enabled,
    "autocast_cpu": partial(torch.is_autocast_enabled, "cpu"),
    "autocast_cuda": partial(torch.is_autocast_enabled, "cuda"),
    "autocast_cpu_dtype": partial(torch.get_autocast_dtype, "cpu"),
    "autocast_cuda_dtype": partial(torch.get_autocast_dtype, "cuda"),
    "autocast_cache": torch.is_autocast_cache_enabled,
    "default_device": torch.get_default_device,
}

_ONLY_WITH: Final = {
    "autocast_cpu_dtype": ("autocast_cpu",),
    "autocast_cuda_dtype": ("autocast_cuda",),
    "autocast_cache": ("autocast_cpu", "autocast_cuda"),
    "default_device": ("function_modes",),  # a default device is a mode
}


def read_state() -> tuple[tuple[str, object], ...]:
    """The state now, in the order of READERS."""
    state: dict[str, object] = {}
    for name, read in READERS.items():
        if name not in _ONLY_WITH or any(state[needed] for needed in _ONLY_WITH[name]):
            state[name] = read()
    return tuple(state.items())
