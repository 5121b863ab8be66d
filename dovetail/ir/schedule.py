"""What runs in which order, in how many kernels, and where each buffer lives.

    Group    one kernel: nests over common outer ranges; buffers used only inside are `internal`
    Schedule ordered groups and externs
    Plan     buffer -> place: caller's input, fresh output, a slot of the arena, or another buffer's memory

A group's nests are rewritten to the group's own loop variables, so that equal positions have equal
index expressions. Each nest is one of three kinds, told by its ranges:

    point    for outer, for inner          writes one element per point
    reduce   for outer, reduce inner       writes one element per outer point
    row      for outer                     arithmetic on results of reductions

and has a level: level 0 runs first; what needs the result of a reduction at level k has level k + 1.
Softmax: max(0), exp(1), sum(1), div(2): three passes over a row that is in cache after the first.
"""
from __future__ import annotations

from typing import Final

from dovetail.errors import Reason
from dovetail.ir.expr import Expr
from dovetail.ir.loop import Extern, Loops, Nest, Range
from dovetail.util.noun import Noun, field


class Group(Noun, eq=False):
    """A kernel. `outer` is how many leading ranges all nests share (the parallel loops)."""

    name: str
    nests: tuple[Nest, ...]
    outer: int
    internal: tuple[str, ...] = ()
    """Buffers that never reach memory outside the kernel."""
    ranges: tuple[Range, ...] = ()
    """The outer ranges, then the inner ones."""
    levels: tuple[int, ...] = ()
    """For each nest, how many reductions of this group come before it."""
    read_buffers: dict[str, None] = field(init=False)
    written_buffers: dict[str, None] = field(init=False)

    def __post_init__(self) -> None:
        self.read_buffers, self.written_buffers = {}, {}  # type: ignore[misc]
        for nest in self.nests:
            self.read_buffers |= nest.read_buffers  # type: ignore[misc]
            self.written_buffers |= nest.written_buffers  # type: ignore[misc]

    @staticmethod
    def alone(nest: Nest) -> Group:
        """A nest that has a template, over its own loops."""
        return Group(nest.name, (nest,), len(nest.ranges), (), (*nest.ranges, *nest.reduce), (0,))

    @property
    def inner(self) -> tuple[Range, ...]:
        return self.ranges[self.outer :]

    def __str__(self) -> str:
        loops = ", ".join(map(str, self.ranges[: self.outer])) or "once"
        inner = " | " + ", ".join(map(str, self.inner)) if self.inner else ""
        hidden = f"   internal: {', '.join(self.internal)}" if self.internal else ""
        lines = [f"group {self.name}: {loops}{inner}{hidden}"]
        for level, nest in zip(self.levels, self.nests):
            first, *rest = str(nest).splitlines()
            lines += [f"  {level}: {first}", *(f"     {line}" for line in rest)]
        return "\n".join(lines)


class Schedule(Noun, eq=False):
    loops: Loops
    steps: tuple[Group | Extern, ...]
    declined: tuple[tuple[str, Reason], ...] = ()
    """What was not fused, and why."""

    def last_uses(self) -> dict[str, int]:
        """Buffer -> the last step that reads or writes it, or what lies in its memory."""
        used = ((k, (*step.read_buffers, *step.written_buffers)) for k, step in enumerate(self.steps))
        last = {name: k for k, names in used for name in names}
        for step in reversed(self.steps):
            if isinstance(step, Extern) and step.aliases:
                until = max(last[name] for name in step.results)
                last |= {ref.buffer: max(last[ref.buffer], until) for ref in step.refs()}
        return last

    def __str__(self) -> str:
        lines = [str(step) for step in self.steps]
        lines += [f"not fused: {subject}: {reason}" for subject, reason in self.declined]
        return "\n".join(lines)


LINE: Final = 64
"""Memory of the arena is given in lines of so many bytes. What fits in one has it to itself."""


class Place(Noun):
    """kind: 'input', 'output' (allocated for the caller), 'arena' (at byte `offset`), 'block' (of memory that
    was allocated for the temporary `of`), 'within' (the output `of`, before that is made), 'reuse' (of the
    input `of`, whose new value it is), 'extern' (the library call makes it), 'internal' (no memory outside
    its kernel)."""

    kind: str
    offset: Expr | None = None
    of: str | None = None


class Plan(Noun, eq=False):
    schedule: Schedule
    places: tuple[tuple[str, Place], ...]
    arena_bytes: Expr

    def __str__(self) -> str:
        lines = [f"plan of {self.schedule.loops.name}: an arena of {self.arena_bytes} bytes"]
        for name, place in self.places:
            reused = f" of {place.of}" if place.of else ""
            where = f" at {place.offset}" if place.offset is not None else reused
            lines.append(f"  {name}: {place.kind}{where}")
        return "\n".join(lines)
