"""Never silently slow: time a compiled graph against the same graph in eager, once, and say who won.

    call 1, 2    run compiled
    call 3       compiled and eager take turns on the same inputs; if eager wins, a `slow` event
    from then on the winner (or, unless asked to keep the faster one, compiled) is called directly

The race stands in the entry's namespace under the graph's name and replaces itself there, so later calls
pay nothing. Graphs that train or change their inputs do not race: eager would do it twice.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from dovetail.events import EVENTS
from dovetail.util.loc import Loc

ROUNDS = 5
LONGEST = 0.2
"""Seconds of one call above which a single round must do."""
MARGIN = 1.03
LEAST = 5e-6
"""Slow is slower than eager by this factor, and by this many seconds."""
PLAIN = ("torch", "_operator", "builtins", "math")


def is_repeatable(module: GraphModule) -> bool:
    """Only torch's own functions: a custom op may do more than compute, and must not run twice."""
    called = [node.target for node in module.graph.nodes if node.op == "call_function"]
    homes = {str(getattr(fn, "__module__", None) or "torch").partition(".")[0] for fn in called}
    return homes <= set(PLAIN) and {getattr(fn, "namespace", "aten") for fn in called} <= {"aten", "prims"}


def versions_of(inputs: tuple[Any, ...]) -> list[int] | None:
    """The tensors' change counters; None where they have none or where gradients are wanted."""
    found = []
    for value in inputs:
        if isinstance(value, torch.Tensor):
            if value.is_inference() or (value.requires_grad and torch.is_grad_enabled()):
                return None
            found.append(value._version)
    return found


def seconds_of(run: Callable[..., Any], inputs: tuple[Any, ...]) -> float:
    on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs)
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    run(*inputs)
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


class Race:
    """Called in place of the compiled graph until it is decided."""

    def __init__(
        self, namespace: dict[str, Any], name: str, eager: Callable[..., Any], function: str,
        loc: Loc | None, keep_faster: bool,
    ) -> None:  # fmt: skip
        self.namespace, self.name, self.eager = namespace, name, eager
        self.compiled: Callable[..., Any] = namespace[name]
        self.function, self.loc, self.keep_faster, self.calls = function, loc, keep_faster, 0
        namespace[name] = self

    def __call__(self, *inputs: Any) -> Any:
        self.calls += 1
        before = versions_of(inputs)
        result = self.compiled(*inputs)
        if before is None or before != versions_of(inputs):
            self.end(self.compiled)
        elif self.calls == 3:
            self.run(inputs)
        return result

    def run(self, inputs: tuple[Any, ...]) -> None:
        """Take turns; the best of each counts. Random numbers drawn meanwhile are given back."""
        tensors = [value for value in inputs if isinstance(value, torch.Tensor) and value.is_cuda]
        devices = sorted({tensor.device for tensor in tensors}, key=str)
        with torch.random.fork_rng(devices=devices):
            eager, ours = seconds_of(self.eager, inputs), seconds_of(self.compiled, inputs)
            for _ in range(1 if eager > LONGEST else ROUNDS):
                eager = min(eager, seconds_of(self.eager, inputs))
                ours = min(ours, seconds_of(self.compiled, inputs))
        is_slow = ours > eager * MARGIN and ours - eager > LEAST
        if is_slow:
            self.say(ours, eager)
        self.end(self.eager if is_slow and self.keep_faster else self.compiled)

    def say(self, ours: float, eager: float) -> None:
        kept = "eager is used for it from now on" if self.keep_faster else "it is used all the same"
        text = f"compiled {ours * 1e6:.1f} µs, eager {eager * 1e6:.1f} µs; {kept}"
        times = {"compiled_seconds": ours, "eager_seconds": eager}
        EVENTS.emit("slow", function=self.function, loc=self.loc, text=text, **times)

    def end(self, winner: Callable[..., Any]) -> None:
        self.namespace[self.name] = winner
        self.compiled = winner
