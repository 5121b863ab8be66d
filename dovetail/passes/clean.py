"""Remove what does nothing, and do once what is written twice.

    y = prims.reshape(prims.reshape(x, (8, 64)), (512,))   ->  y = prims.reshape(x, (512,))
    a = prims.exp(x); b = prims.exp(x)                      ->  a = prims.exp(x)
    unused = prims.sin(x)                                   ->  gone (a random op never is)
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, cast

from dovetail.ir.graph import INPUT, Arg, Graph, Known, Node, moved_over, swapped, work_of
from dovetail.ir.types import BF16, BOOL, F16, F32, F64, I8, I16, I32, I64, U8, DType
from dovetail.ops.registry import is_impure
from dovetail.util.noun import replace


def drop_dead(graph: Graph) -> Graph:
    """Keep what the outputs need, and what is impure."""
    return graph.pruned(is_impure)


def rewrite(graph: Graph, change: Callable[[Node], Node], env: dict[Node, Node] | None = None) -> Graph:
    """One pass in order. `change` gets each node over its new operands, and returns it, a node that came
    earlier, or a new one. `env` has what some operands are to be from the beginning."""
    env = {} if env is None else env
    nodes: dict[Node, None] = {}
    inputs = set(graph.inputs)
    for node in graph.nodes:
        final = change(moved_over(node, env))
        if final is not node:
            env[node] = final
        if final not in inputs:
            nodes.setdefault(final)
    return Graph(graph.name, graph.inputs, tuple(nodes), swapped(graph.outputs, env))


# -- common subexpressions -------------------------------------------------------------------------


def merge_equal(graph: Graph) -> Graph:
    """Apply RULES, each once per node, and do equal work once. (Outputs that come out the same get memory of
    their own when lowered.)"""
    seen: dict[object, Node] = {}

    def change(node: Node) -> Node:
        rule = RULES.get(node.op)
        node = (rule and rule(node)) or node
        is_alone = node.op == INPUT or is_impure(node)
        return node if is_alone else seen.setdefault(work_of(node), node)

    return rewrite(graph, change)


def reuse(graph: Graph, known: Known) -> Graph:
    """Take from the inputs what the other graph had computed already."""
    seen: dict[object, Node] = {}
    env = dict(zip(known.graph.inputs[: known.inputs], graph.inputs))
    for node in known.graph.nodes:
        if all(operand in env for operand in node.operands) and not is_impure(node):
            moved = moved_over(node, env)
            kept = graph.inputs[known.at[node]] if node in known.at else moved
            env[node] = seen.setdefault(work_of(moved), kept)
    return drop_dead(rewrite(graph, lambda node: seen.get(work_of(node), node)))


# -- local rules -----------------------------------------------------------------------------------


def _operand(node: Node) -> Node:
    return cast(Node, node.args[0])


def merge_reshapes(node: Node) -> Node | None:
    inner = _operand(node)
    if inner.op == "prims.reshape":
        node = replace(node, args=(inner.args[0], node.args[1]))
        inner = _operand(node)
        return inner if inner.type == node.type else node
    return inner if inner.type == node.type else view_of_full(node)


def merge_dims(node: Node) -> Node | None:
    """A permute of a permute, or a broadcast of a broadcast."""
    inner = _operand(node)
    if inner.op != node.op:
        return view_of_full(node)
    places, dims = (cast("tuple[int, ...]", each.args[-1]) for each in (inner, node))
    places, dims = (dims, places) if node.op == "prims.permute" else (places, dims)
    merged, source = tuple(dims[d] for d in places), _operand(inner)
    if merged == tuple(range(len(merged))) and source.type == node.type:
        return source
    return replace(node, args=(source, *node.args[1:-1], merged))


_EXACT: Final[dict[DType, frozenset[DType]]] = {
    **dict.fromkeys((F16, BF16), frozenset((F32, F64))),
    F32: frozenset((F64,)),
    BOOL: frozenset((U8, I8, I16, I32, I64, F16, BF16, F32, F64)),
    **dict.fromkeys((U8, I8), frozenset((I16, I32, I64, F16, F32, F64))),
    I16: frozenset((I32, I64, F32, F64)),
    I32: frozenset((I64, F64)),
}
"""Conversions that lose nothing."""


def merge_converts(node: Node) -> Node | None:
    """convert(convert(x, wide), y) is convert(x, y) where the first step lost nothing."""
    inner = _operand(node)
    if inner.op != "prims.convert":
        return inner if inner.type == node.type else None
    source = _operand(inner)
    if inner.tensor.dtype not in _EXACT.get(source.tensor.dtype, ()):
        return None
    if source.type == node.type:
        return source
    if source.tensor.dtype is node.tensor.dtype:
        return Node("prims.copy", (source,), node.type, node.name, (), node.loc)
    return replace(node, args=(source, node.args[1]))


# -- values known everywhere: models make masks that let everything pass -----------------------------


def _everywhere(node: Node, value: Arg) -> Node:
    kind = node.tensor
    args = (kind.shape, value, kind.dtype, kind.device)
    return Node("prims.full", args, kind, node.name, (), node.loc)


def view_of_full(node: Node) -> Node | None:
    inner = _operand(node)
    return _everywhere(node, inner.args[1]) if inner.op == "prims.full" else None


def shifted_count(node: Node) -> Node | None:
    """iota + number counts from another start."""
    counted, shift = node.args
    if not isinstance(counted, Node) or counted.op != "prims.iota" or type(shift) is not int:
        return None
    length, start, *rest = counted.args
    if type(start) is not int or counted.type != node.type or not node.tensor.dtype.is_integer:
        return None
    return replace(node, op=counted.op, args=(length, start + shift, *rest))


def counts_from(node: Node) -> Node | None:
    """ge(iota + views, bound) where the first number is not below the bound."""
    counted, bound = node.args
    while isinstance(counted, Node) and counted.op in ("prims.reshape", "prims.broadcast", "prims.permute"):
        counted = counted.args[0]
    if not isinstance(counted, Node) or counted.op != "prims.iota":
        return None
    _, start, step, *_ = counted.args
    known = all(isinstance(number, int) for number in (start, step, bound))
    return _everywhere(node, True) if known and start >= bound and step >= 0 else None  # type: ignore[operator]


def choose_known(node: Node) -> Node | None:
    condition, *choices = node.args
    if not isinstance(condition, Node) or condition.op != "prims.full" or type(condition.args[1]) is not bool:
        return None  # a number given at run time is not known
    chosen = choices[0] if condition.args[1] else choices[1]
    if isinstance(chosen, Node):
        return chosen if chosen.type == node.type else None
    return _everywhere(node, chosen)


def drop_bias(place: int, node: Node) -> Node | None:
    """Attention with a bias of 0 everywhere."""
    bias = node.args[place] if place < len(node.args) else None
    if not isinstance(bias, Node) or bias.op != "prims.full" or bias.args[1] != 0:
        return None
    return replace(node, args=(*node.args[:place], None, *node.args[place + 1 :]))


RULES: Final[dict[str, Callable[[Node], Node | None]]] = {
    "prims.reshape": merge_reshapes,
    **dict.fromkeys(("prims.permute", "prims.broadcast"), merge_dims),
    "prims.convert": merge_converts,
    # a copy in the same layout is the value itself: values have no identity here
    "prims.copy": lambda node: _operand(node) if _operand(node).type == node.type else view_of_full(node),
    "prims.add": shifted_count,
    "prims.ge": counts_from,
    "prims.where": choose_known,
    **{
        f"aten._scaled_dot_product_{kind}_attention{which}.default": partial(drop_bias, place)
        for kind in ("cudnn", "efficient")
        for which, place in (("", 3), ("_backward", 4 if kind == "efficient" else 8))
    },
}
