"""Check an IR between two stages: names, order, types. Code after a check does not defend itself.

    check_graph(graph)     every operand is defined before its use, names are unique, types are present
    check_loops(loops)     every load and write names a known buffer, loop variables are bound
    check_plan(plan)       every buffer that a step touches has a place

`DOVETAIL_CHECK=1` runs them after every stage; the tests always do.
"""
from __future__ import annotations

from collections.abc import Callable

from dovetail.errors import VerifyError
from dovetail.ir.expr import Expr, symbols
from dovetail.ir.graph import GET, Graph, Node, nodes_in, show_graph
from dovetail.ir.loop import BufferRef, Extern, Loops, Nest, iter_scalars
from dovetail.ir.schedule import Group, Plan, Schedule


def _fail(stage: str, detail: str, node: Node | None = None, graph: Graph | None = None) -> VerifyError:
    if graph is not None and node is not None:
        lines = show_graph(graph).splitlines()
        at = next((i for i, line in enumerate(lines) if line.strip().startswith(f"{node.name} =")), 0)
        detail += "\n" + "\n".join(lines[max(0, at - 5) : at + 5])
    return VerifyError(node.loc if node else None, stage=stage, detail=detail)


def check_graph(graph: Graph, stage: str) -> None:
    defined: set[Node] = set(graph.inputs)
    names = {node.name for node in graph.inputs}
    for node in graph.nodes:
        for operand in node.operands:
            if operand not in defined:
                raise _fail(stage, f"{node.name} uses {operand.name} before it is defined", node, graph)
        if node.name in names:
            raise _fail(stage, f"the name {node.name} is used twice", node, graph)
        if node.op == GET and not isinstance(node.args[0].type, tuple):  # type: ignore[union-attr]
            raise _fail(stage, f"{node.name} takes a part of a value that has none", node, graph)
        defined.add(node)
        names.add(node.name)
    for operand in nodes_in(graph.outputs):
        if operand not in defined:
            raise _fail(stage, f"output {operand.name} is not defined")


def step_reads(step: Nest | Extern) -> set[str]:
    """Buffers whose values a step reads; a call in place also takes what it only writes."""
    is_in_place = isinstance(step, Extern) and step.is_in_place
    return set(step.read_buffers) - (set(step.written_buffers) if is_in_place else set())


def check_loops(loops: Loops, stage: str) -> None:
    known = {buffer.name for buffer in loops.buffers}
    ready = {b.name for b in loops.buffers if b.kind == "input"}
    for step in loops.steps:
        for name in step_reads(step):
            if name not in known or name not in ready:
                raise _fail(stage, f"{step.name} reads {name}, which is not written before it\n{step}")
        for name in step.written_buffers:
            if name not in known:
                raise _fail(stage, f"{step.name} writes unknown buffer {name}\n{step}")
            ready.add(name)
        if isinstance(step, Nest):
            _check_variables(step, stage)
    for output in loops.outputs:
        if isinstance(output, BufferRef) and output.buffer not in ready:
            raise _fail(stage, f"output {output.buffer} is never written")


def _check_variables(nest: Nest, stage: str) -> None:
    """An index uses only the nest's own loop variables and shape symbols (which no loop binds)."""
    bound = {r.var for r in (*nest.ranges, *nest.reduce)}
    looped = {v.name for v in bound}
    indices: list[Expr] = [w.index for w in nest.writes]
    for s in iter_scalars(*(w.value for w in nest.writes)):
        indices += [a for a in s.args if isinstance(a, Expr)]
    for index in indices:
        for variable in symbols(index):
            if variable.name in looped and variable not in bound:
                raise _fail(stage, f"{nest.name}: {variable} in {index} is another loop's variable\n{nest}")


def check_schedule(schedule: Schedule, stage: str) -> None:
    """No step of the loops is lost, and what a step reads is written before it."""
    scheduled = [n for s in schedule.steps for n in (s.nests if isinstance(s, Group) else (s,))]
    writes: set[str] = {b.name for b in schedule.loops.buffers if b.kind == "input"}
    for step in scheduled:
        missing = step_reads(step) - writes
        if missing:
            raise _fail(stage, f"{step.name} runs before {sorted(missing)} are written")
        writes |= set(step.written_buffers)
    if len(scheduled) < len(schedule.loops.steps):
        raise _fail(stage, f"{len(schedule.loops.steps) - len(scheduled)} steps were lost in scheduling")


def check_plan(plan: Plan, stage: str) -> None:
    placed = {name for name, _ in plan.places}
    for step in plan.schedule.steps:
        for nest in step.nests if isinstance(step, Group) else (step,):
            for name in {**nest.read_buffers, **nest.written_buffers}:
                if name not in placed:
                    raise _fail(stage, f"{name}, used by {nest.name}, has no place in memory")


CHECKS: dict[type, Callable[..., None]] = {
    Graph: check_graph, Loops: check_loops, Schedule: check_schedule, Plan: check_plan,
}  # fmt: skip


def verify(value: object, stage: str) -> None:
    """Check whatever the stage produced, if it is one of the IRs."""
    check = CHECKS.get(type(value))
    if check is not None:
        check(value, stage)
