"""Torch's global state, as a guard.

state_guard() -> Guard(State(grad mode, inference mode, autocast, default dtype, ...))
"""

from __future__ import annotations

from dovetail.ir.guard import Guard, State
from dovetail.ir.source import Const
from dovetail.util.torch_state import read_state


def state_guard() -> Guard:
    """Call before entering modes of our own: they are part of the state."""
    return Guard(Const("torch", None), State(read_state()))
