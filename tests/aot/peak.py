"""The most bytes of tensors alive at once while something runs, as PyTorch's allocator sees them.

    with visible_temporaries():
        step = start(dovetail.compile(model))
        step()
        peak_of(step)

Temporaries of compiled programs come from an arena of their own; here they are tensors too.
"""
from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_alive: dict[int, torch.Tensor] = {}


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64)
def _take(size: int) -> int:
    made = torch.empty(size, dtype=torch.uint8)
    _alive[made.data_ptr()] = made
    return made.data_ptr()


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _give(address: int) -> None:
    del _alive[address]


@contextmanager
def visible_temporaries() -> Iterator[None]:
    """Programs loaded in here take their temporaries from the allocator."""
    addresses = tuple(ctypes.cast(function, ctypes.c_void_p).value for function in (_take, _give))
    native: Any = importlib.import_module("dovetail._native")
    real, native.arena_functions = native.arena_functions, lambda: addresses
    try:
        yield
    finally:
        native.arena_functions = real


def peak_of(run: Callable[[], Any]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        highest = max(highest, total)
    return highest
