"""Nouns of the compiler, flattened for looking at.

    Graph     -> GraphView    nodes with their operands' names and the user's line
    Schedule  -> FusionView   kernels, the loop nests inside them, bytes moved before and after fusion

Views are plain values (they become JSON). Sizes that are symbols count as their hint, or as 0.
"""
from __future__ import annotations

from collections.abc import Iterator

from dovetail.ir.graph import Graph, Node, show_arg, show_type
from dovetail.ir.loop import Extern, Nest
from dovetail.ir.schedule import Group, Plan, Schedule
from dovetail.util.loc import Loc
from dovetail.util.noun import Noun, field


class Place(Noun):
    """A line of the user's program."""

    file: str = ""
    line: int = 0
    function: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else self.function or "?"


def place_of(value: object, function: str = "") -> Place:
    if isinstance(value, Loc):
        return Place(value.file, value.line, value.function or function)
    return Place("", 0, function)


class NodeView(Noun):
    name: str
    op: str
    args: str
    type: str
    operands: tuple[str, ...]
    place: Place


class GraphView(Noun):
    """`role` is the name of the graph within its unit: forward, backward, joint..."""

    unit: str
    stage: str
    role: str
    inputs: tuple[tuple[str, str], ...]
    nodes: tuple[NodeView, ...]
    outputs: tuple[str, ...]


class NestView(Noun):
    name: str
    text: str
    bytes_moved: int
    origins: tuple[str, ...]
    place: Place


class GroupView(Noun):
    """One kernel ('kernel') or library call ('library')."""

    kind: str
    name: str
    nests: tuple[NestView, ...]
    internal: tuple[str, ...]
    bytes_before: int
    bytes_after: int


class FusionView(Noun):
    unit: str
    groups: tuple[GroupView, ...]


# -- graphs ----------------------------------------------------------------------------------------


def find_graphs(value: object) -> Iterator[tuple[str, Graph]]:
    """The graphs in what a stage made: itself, or those it holds by name."""
    if isinstance(value, Graph):
        yield value.name, value
        return
    for role in ("graph", "forward", "backward"):
        if isinstance(found := getattr(value, role, None), Graph):
            yield role, found


def view_node(node: Node) -> NodeView:
    shown = [show_arg(arg) for arg in node.args]
    shown += [f"{key}={show_arg(value)}" for key, value in node.kwargs]
    operands = tuple(dict.fromkeys(operand.name for operand in node.operands))
    return NodeView(node.name, node.op, ", ".join(shown), show_type(node.type), operands, place_of(node.loc))


def view_graphs(unit: str, stage: str, value: object) -> list[GraphView]:
    found = []
    for role, graph in find_graphs(value):
        inputs = tuple((node.name, show_type(node.type)) for node in graph.inputs)
        outputs = tuple(out.name if isinstance(out, Node) else show_arg(out) for out in graph.outputs)
        found.append(GraphView(unit, stage, role, inputs, tuple(map(view_node, graph.nodes)), outputs))
    return found


# -- schedules -------------------------------------------------------------------------------------


def view_nest(nest: Nest, sizes: dict[str, int]) -> NestView:
    moved = sum(sizes.get(name, 0) for name in (*nest.read_buffers, *nest.written_buffers))
    return NestView(nest.name, str(nest), moved, nest.origins, place_of(nest.loc))


def view_group(group: Group, sizes: dict[str, int]) -> GroupView:
    """Before fusion every nest reads and writes memory; after it, only what is not internal, once each."""
    nests = tuple(view_nest(nest, sizes) for nest in group.nests)
    before = sum(nest.bytes_moved for nest in nests)
    moved = {*group.read_buffers, *group.written_buffers} - {*group.internal}
    after = sum(sizes.get(name, 0) for name in moved)
    return GroupView("kernel", group.name, nests, group.internal, before, after)


def view_extern(step: Extern, sizes: dict[str, int]) -> GroupView:
    moved = sum(sizes.get(name, 0) for name in {*step.read_buffers, *step.outputs})
    nest = NestView(step.name, str(step), moved, (step.op,), place_of(step.loc))
    return GroupView("library", step.op, (nest,), (), moved, moved)


def view_fusion(unit: str, value: object) -> FusionView | None:
    """Of a Schedule (or the Plan made of it); None for anything else."""
    schedule = value.schedule if isinstance(value, Plan) else value
    if not isinstance(schedule, Schedule):
        return None
    sizes = {b.name: b.type.bytes.value for b in schedule.loops.buffers if b.type.bytes.is_const}
    view = lambda step: view_group(step, sizes) if isinstance(step, Group) else view_extern(step, sizes)
    return FusionView(unit, tuple(map(view, schedule.steps)))
