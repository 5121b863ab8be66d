"""What runs in which order, in how many kernels, and where each buffer lives.

    Group    one kernel: nests over common outer ranges; buffers used only inside are `internal`
    Schedule ordered groups and externs
    Plan     buffer -> place: caller's input, fresh output, a slot of the arena, or another buffer's memory
"""
from __future__ import annotations

from dataclasses import dataclass

from dovetail.ir.expr import Expr
from dovetail.ir.loop import Extern, Loops, Nest


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A kernel. `outer` is how many leading ranges all nests share (the parallel loops)."""

    name: str
    nests: tuple[Nest, ...]
    outer: int
    internal: tuple[str, ...] = ()
    """Buffers that never reach memory outside the kernel."""


@dataclass(frozen=True, slots=True)
class WhyNot:
    """A decision against something, kept for the report: what, the reason's code and its text."""

    subject: str
    code: str
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    loops: Loops
    steps: tuple[Group | Extern, ...]
    declined: tuple[WhyNot, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """kind: 'input', 'output' (allocated for the caller), 'arena' (at byte `offset`), 'reuse' (of `of`)."""

    kind: str
    offset: Expr | None = None
    of: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    schedule: Schedule
    places: tuple[tuple[str, Place], ...]
    arena_bytes: Expr
