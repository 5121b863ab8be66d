"""Compile on another thread while eager serves.

    start(work, failed)      work() runs on the one background thread, with the caller's grad mode
    wait()                   until everything started so far is done

Work is done in the order it was started. The process waits for it when it ends.
"""
from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, Final

import torch

_started: Final[list[Future[None]]] = []


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "dovetail")


def can_move() -> bool:
    """Tracing depends on torch's modes, which belong to a thread; only grad mode is carried over."""
    is_cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return not is_cast and not torch.is_inference_mode_enabled()


def start(work: Callable[[], Any], failed: Callable[[Exception], None]) -> None:
    has_grad = torch.is_grad_enabled()

    def run() -> None:
        with torch.set_grad_enabled(has_grad):
            try:
                work()
            except Exception as error:  # eager goes on serving; `failed` says so
                failed(error)

    _started.append(_pool().submit(run))


def wait() -> None:
    """Until all background compiles are done; eager has served meanwhile."""
    while _started:
        _started.pop().result()
