"""Autograd's histories: what is behind a tensor, and gradients by it."""
from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch


def behind(heads: Iterable[Any]) -> dict[Any, list[tuple[Any, int]]]:
    """The nodes of these histories and the edges of each, which lead to nodes before it."""
    found: dict[Any, list[tuple[Any, int]]] = {}
    left = [head for head in heads if head is not None]
    while left:
        edges = [edge for edge in left[-1].next_functions if edge[0] is not None]
        if unknown := [node for node, _ in edges if node not in found]:
            left += unknown
        else:
            found.setdefault(left.pop(), edges)
    return found


class _Here(threading.local):
    """True on threads on which the user's own code runs on Fakes."""

    depth = 0

    def __bool__(self) -> bool:
        return self.depth > 0


_here: Final = _Here()
_before: Final[list[Any]] = []
_lock: Final = threading.Lock()


@contextmanager
def compiling() -> Iterator[None]:
    """The user's own code runs on Fakes: is_compiling() tells it what it did where it was interpreted. Its
    flag is one for all threads: the first to enter replaces it, the last to leave restores it."""
    with _lock:
        _before.append(_before[0] if _before else torch.compiler._is_compiling_flag)
        torch.compiler._is_compiling_flag = _here  # type: ignore[assignment]
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1
        with _lock:
            before = _before.pop()
            if not _before:
                torch.compiler._is_compiling_flag = before


def gradients_of(
    outputs: Sequence[Any], inputs: Sequence[Any], given: Sequence[Any], *, retain: bool = False,
    create: bool = False, unused: bool = False, as_zeros: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """torch.autograd.grad, less its checks of given gradients, which import SymPy."""
    if any(grad is None and out.numel() != 1 for out, grad in zip(outputs, given)):
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    tangents = [torch.ones_like(out) if grad is None else grad for out, grad in zip(outputs, given)]
    run = torch.autograd.Variable._execution_engine.run_backward  # type: ignore[attr-defined]
    with compiling():
        found = run(tuple(outputs), tuple(tangents), retain, create, tuple(inputs), unused, False)
    return tuple(torch.zeros_like(x) if g is None and as_zeros else g for x, g in zip(inputs, found))
