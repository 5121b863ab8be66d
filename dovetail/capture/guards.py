"""Torch's global state, as a guard.

    read_state() -> (("grad_enabled", True), ("inference_mode", False), ...)
"""
from __future__ import annotations

import torch

from dovetail.ir.guard import Guard, State
from dovetail.ir.source import Const


def read_state() -> tuple[tuple[str, object], ...]:
    """Everything global that decides what an op does or which kernel runs."""
    return (
        ("grad_enabled", torch.is_grad_enabled()),
        ("inference_mode", torch.is_inference_mode_enabled()),
        ("autocast_cpu", torch.is_autocast_enabled("cpu")),
        ("autocast_cpu_dtype", torch.get_autocast_dtype("cpu")),
        ("autocast_cuda", torch.is_autocast_enabled("cuda")),
        ("autocast_cuda_dtype", torch.get_autocast_dtype("cuda")),
        ("autocast_cache", torch.is_autocast_cache_enabled()),
        ("default_dtype", torch.get_default_dtype()),
        ("deterministic", torch.are_deterministic_algorithms_enabled()),
        ("function_modes", torch._C._len_torch_function_stack()),
        ("num_threads", torch.get_num_threads()),
    )


def state_guard() -> Guard:
    return Guard(Const("torch", None), State(read_state()))
