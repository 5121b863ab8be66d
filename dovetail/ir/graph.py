"""The tensor graph after capture: functional, typed, in order.

    Graph = inputs, nodes, outputs
    Node  = name: type = op(args, kwargs)        # user location

An op is a name: `aten.mm.default` as PyTorch spells it, or `prims.exp` for ours. An argument is a
Node, a number, an Expr (a symbolic size), a string, a DType, a Device, None, or a tuple of those.
An op with several results has a tuple type, and `get(node, i)` takes one of them.

A graph prints as a Python function:

    def forward(x: f32[8, 64], w: f32[64]):
        mean = prims.sum(x, (1,))          # f32[8]         model.py:41
        return (mean,)
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, TypeAlias

from dovetail.ir.expr import Expr
from dovetail.ir.types import Device, DType, ScalarType, TensorType, Type
from dovetail.util.loc import Loc
from dovetail.util.noun import Noun, field

INPUT: Final = "input"
GET: Final = "get"

NUMBERS: Final = frozenset((int, float, bool, complex))

Arg: TypeAlias = "Node | Expr | DType | Device | int | float | bool | complex | str | None | tuple[Arg, ...]"


class Node(Noun, eq=False):
    """One value. Identity is the node itself; names are unique within a graph."""

    op: str
    args: tuple[Arg, ...]
    type: Type
    name: str
    kwargs: tuple[tuple[str, Arg], ...] = ()
    loc: Loc | None = None
    operands: tuple[Node, ...] = field(init=False)
    """Every Node among the arguments, in order, with repeats. (Asked for often: found once.)"""

    def __post_init__(self) -> None:
        self.operands = tuple(nodes_in(self.args + self.kwargs))  # type: ignore[misc]

    @property
    def tensor(self) -> TensorType:
        if type(self.type) is not TensorType:
            raise TypeError(f"{self.name}: {self.type} is not a tensor")
        return self.type

    def __repr__(self) -> str:
        return self.name


def nodes_in(args: Iterable[Arg]) -> list[Node]:
    found: list[Node] = []
    for arg in args:
        if type(arg) is Node:
            found.append(arg)
        elif type(arg) is tuple and not _HOLDERS.isdisjoint(map(type, arg)):
            found += nodes_in(arg)
    return found


_HOLDERS: Final = frozenset({Node, tuple})


def exprs_in(arg: object) -> Iterator[Expr]:
    """Every expression in an argument or a type that is more than a number."""
    if isinstance(arg, Expr):
        if not arg.is_const:
            yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from exprs_in(item)
    elif isinstance(arg, TensorType):
        yield from (e for e in (*arg.shape, *arg.stride) if not e.is_const)
    elif isinstance(arg, ScalarType):
        yield from exprs_in(arg.expr)


def swapped(args: Iterable[Arg], env: Mapping[Node, Arg]) -> tuple[Arg, ...]:
    """The same arguments with the Nodes that env has for theirs."""
    return tuple([
        env.get(arg, arg) if type(arg) is Node else swapped(arg, env) if type(arg) is tuple else arg
        for arg in args
    ]) if args else ()  # fmt: skip


def moved_over(node: Node, env: Mapping[Node, Arg]) -> Node:
    """The node over the operands that env has for its own; itself where none of them changes."""
    if all([env.get(operand, operand) is operand for operand in node.operands]):
        return node
    kwargs = swapped(node.kwargs, env) if node.kwargs else ()
    return Node(node.op, swapped(node.args, env), node.type, node.name, kwargs, node.loc)  # type: ignore[arg-type]


def work_of(node: Node) -> tuple[object, ...]:
    """Equal for two nodes that compute the same."""
    return node.op, key_of(node.args), node.kwargs and key_of(node.kwargs), node.type


def key_of(args: tuple[Arg, ...]) -> tuple[object, ...]:
    """Numbers by type and text, so that 1, 1.0 and True, 0.0 and -0.0 differ."""
    return tuple([
        arg if type(arg) is Node
        else key_of(arg) if type(arg) is tuple
        else (type(arg), repr(arg)) if type(arg) in NUMBERS
        else arg
        for arg in args
    ]) if args else ()  # fmt: skip


class Graph(Noun, eq=False):
    """inputs are Nodes with op INPUT; nodes are in execution order and exclude the inputs."""

    name: str
    inputs: tuple[Node, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Arg, ...]
    updates: tuple[tuple[int, int], ...] = ()
    """(output, input) positions where the output is the input's new value: it may be written in place."""

    def users(self) -> dict[Node, list[Node]]:
        found: dict[Node, list[Node]] = {node: [] for node in (*self.inputs, *self.nodes)}
        for node in self.nodes:
            for operand in dict.fromkeys(node.operands):
                found[operand].append(node)
        return found

    def needed(self, roots: Iterable[Node], stays: Callable[[Node], bool] = lambda node: False) -> set[Node]:
        """These nodes, those that stay anyway, and all that they are computed from."""
        found = set(roots)
        for node in reversed(self.nodes):
            if node in found or stays(node):
                found.update((node, *node.operands))
        return found

    def pruned(self, stays: Callable[[Node], bool]) -> Graph:
        """Without the nodes that no output needs, except those that stay anyway, and what they need."""
        kept = self.needed(nodes_in(self.outputs), stays)
        return Graph(self.name, self.inputs, tuple([n for n in self.nodes if n in kept]), self.outputs)

    def __str__(self) -> str:
        return show_graph(self)


class Known(Noun, eq=False):
    """What another graph computed from the same first inputs: values of nodes, `at` inputs of this one."""

    graph: Graph
    inputs: int
    at: dict[Node, int]


class GraphBuilder(Noun, frozen=False):
    """Appends nodes and hands out unique names. The only mutable thing here, and it ends in a Graph."""

    name: str = "forward"
    inputs: list[Node] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    _taken: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def after(graph: Graph) -> GraphBuilder:
        """For a graph that is to replace this one: the same inputs, and none of its names is handed out."""
        taken = dict.fromkeys([node.name for node in (*graph.inputs, *graph.nodes)], 1)
        return GraphBuilder(graph.name, list(graph.inputs), _taken=taken)

    def unique(self, name: str) -> str:
        stem = name if name.isidentifier() else "v_" + "".join(c if c.isalnum() else "_" for c in name)
        count = self._taken.get(stem, 0)
        self._taken[stem] = count + 1
        return self.unique(f"{stem}_{count}") if count else stem

    def input(self, name: str, type: Type, loc: Loc | None = None) -> Node:
        node = Node(INPUT, (), type, self.unique(name), loc=loc)
        self.inputs.append(node)
        return node

    def call(
        self, op: str, args: Iterable[Arg], type: Type, kwargs: Iterable[tuple[str, Arg]] = (),
        name: str | None = None, loc: Loc | None = None,
    ) -> Node:  # fmt: skip
        if name is None:
            name = op.split(".")[1] if "." in op else op
        node = Node(op, tuple(args), type, self.unique(name), tuple(kwargs), loc)
        self.nodes.append(node)
        return node

    def get(self, node: Node, index: int) -> Node:
        assert isinstance(node.type, tuple)
        return self.call(GET, (node, index), node.type[index], name=f"{node.name}_{index}", loc=node.loc)

    def settle(self, node: Node, like: Node, type: Type, name: str) -> Node:
        """A node that was just made takes the place of `like`: its line, and this type and name."""
        node.type, node.name, node.loc = type, name, like.loc  # type: ignore[misc]
        return node

    def finish(self, outputs: Iterable[Arg]) -> Graph:
        return Graph(self.name, tuple(self.inputs), tuple(self.nodes), tuple(outputs))


# -- text ------------------------------------------------------------------------------------------


def show_arg(arg: Arg) -> str:
    if isinstance(arg, tuple):
        inner = ", ".join(map(show_arg, arg))
        return f"({inner},)" if len(arg) == 1 else f"({inner})"
    if isinstance(arg, Device):
        return f"device({str(arg)!r})"
    if isinstance(arg, (Node, Expr, DType)):
        return arg.name if isinstance(arg, Node) else str(arg)
    return repr(arg)


def show_type(type: Type) -> str:
    if isinstance(type, tuple):
        return "(" + ", ".join(map(show_type, type)) + ")"
    return str(type)


def show_graph(graph: Graph) -> str:
    params = ", ".join(f"{node.name}: {show_type(node.type)}" for node in graph.inputs)
    lines = [f"def {graph.name}({params}):"]
    lines += [f"    # output {out} replaces {graph.inputs[given].name}" for out, given in graph.updates]
    for node in graph.nodes:
        shown = [show_arg(arg) for arg in node.args]
        shown += [f"{key}={show_arg(value)}" for key, value in node.kwargs]
        text = f"    {node.name} = {node.op}({', '.join(shown)})"
        where = f"  {node.loc}" if node.loc else ""
        lines.append(f"{text:<64}  # {show_type(node.type)}{where}")
    lines.append(f"    return {show_arg(graph.outputs)}")
    return "\n".join(lines)
