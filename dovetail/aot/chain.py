"""Outputs that are computed from other outputs.

    h = encode(x); return h, loss_of(h)         inputs ─ CompiledFunction ─┬─ h ──────────► the user's
                                                                           └─ loss ┐
                                                                      h ─ Chained ─┴─ loss ► the user's

Both are differentiated together, by one compiled backward. But somebody may look at the gradient of h: with
h.retain_grad(), a hook, autograd.grad(loss, h). So the user's loss hangs on h too. In a backward pass where
nobody can look, Chained hands on the tangent of loss and no more. Else it computes the gradient of h as well,
as a function of h itself; and the compiled function takes what comes for h, perhaps changed by a hook, and
nothing through h: it is cut.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final
from weakref import ref

import torch
from torch.autograd import Function
from torch.autograd.graph import _engine_run_backward

from dovetail.aot.double import STRANGER, Eager, executes

keeps_graph: Final[Callable[[], bool]] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether backward was called with retain_graph."""


class Watch:
    """Who may look at outputs of one call that others are computed from."""

    def __init__(self) -> None:
        self.is_hooked, self.is_cut = False, False
        self.tensors: dict[int, tuple[ref[torch.Tensor], int]] = {}

    def follow(self, *tensors: tuple[int, torch.Tensor]) -> None:
        self.tensors = {position: (ref(tensor), tensor._version) for position, tensor in tensors}

    def unchanged(self, positions: Iterable[int]) -> dict[int, torch.Tensor]:
        """Those of them that are still there, with the values that they were given."""
        found = [(p, *self.tensors[p]) for p in positions]
        return {p: t for p, weak, version in found if (t := weak()) is not None and t._version == version}

    def look(self) -> bool:
        """In the backward pass that is running, or in one through its gradients."""
        left = [tensor for weak, _ in self.tensors.values() if (tensor := weak()) is not None]
        self.is_cut = self.is_hooked or any(t.retains_grad or t._backward_hooks for t in left)
        self.is_cut |= bool(left) and torch.is_grad_enabled()
        if not self.is_cut and not executes(STRANGER):
            asked = asked_about()
            self.is_cut = asked is None or any(x is tensor for x in asked for tensor in left)
        return self.is_cut


def asked_about() -> Sequence[torch.Tensor] | None:
    """What torch.autograd.grad was given, seen from the backward pass that it runs. None: cannot be told, as
    in another thread than the caller's, where those for a GPU run."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code is not _engine_run_backward.__code__:
        frame = frame.f_back
    given = None if frame is None else frame.f_locals["args"][3]
    return given if given and all(isinstance(x, torch.Tensor) for x in given) else None


class Chained(Function):
    """Gives `value` as a tensor that is computed from `before` too; `made` says which outputs they are. Hooks
    of `views`, whose nodes are torch's own, can only be seen while there are these."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, never_asked: torch.Tensor, watch: Watch,
        made: tuple[Eager, int, tuple[int, ...]], views: tuple[torch.Tensor, ...], *before: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.watch, ctx.made, ctx.views = watch, made, views
        return value.detach()

    @staticmethod
    def backward(ctx: Any, tangent: Any) -> tuple[Any, ...]:
        eager, position, goals = ctx.made
        is_seen = ctx.watch.look() and tangent is not None
        if not keeps_graph():
            ctx.views = ()
        given = [tangent if p == position else None for p in eager.signature.tangents]
        found = eager.gradients(ctx.next_functions[0][0], given, goals) if is_seen else [None] * len(goals)
        return tangent, None, None, None, None, *found


def spare_hooks(tensor: torch.Tensor) -> None:
    """The backward pass that is running brings it no gradient, and in eager would not come to it at all: its
    hooks are not called for None."""
    for is_after, name in enumerate(("_backward_hooks", "_post_accumulate_grad_hooks")):
        hooks: Any = getattr(tensor, name) or {}
        for key, hook in hooks.items():
            if getattr(hook, "func", None) is not _if_given:
                hooks[key] = partial(_if_given, hook, is_after)


def _if_given(hook: Callable[..., Any], is_after: int, given: Any) -> Any:
    return None if (given.grad if is_after else given) is None else hook(given)


def tell_hooks(function: Any) -> Any:
    """A Function whose outputs tell `ctx.watch` when a hook is put on them."""

    def register(node: Any, tensor: torch.Tensor) -> None:
        watch = getattr(node, "watch", None)
        if watch is not None:
            watch.is_hooked = True
        torch._C._FunctionBase._register_hook_dict(node, tensor)  # type: ignore[attr-defined]

    function._backward_cls._register_hook_dict = register
    return function


tell_hooks(Chained)
