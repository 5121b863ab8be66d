"""ATen to prims, one node at a time, in one pass.

    gelu = aten.gelu.default(x)     ->   gelu_mul = prims.mul(x, 0.7071...)
                                         gelu_erf = prims.erf(gelu_mul)
                                         ...
                                         gelu     = prims.mul(...)      keeps the name and eager's strides

An op without a rule, or whose rule declines these arguments, stays as it is: a fallback, reported
once per node.
"""
from __future__ import annotations

from typing import Any, Final, TypeAlias, cast

from dovetail.events import EVENTS
from dovetail.ir.graph import GET, Arg, Graph, Node, key_of, nodes_in, swapped
from dovetail.ir.types import BF16, BOOL, F16, F32, F64, I8, I16, I32, I64, U8, DType, TensorType, Type
from dovetail.ops.build import Build, Value, replace_nodes, wrap
from dovetail.ops.prims import KINDS
from dovetail.ops.registry import DECOMPOSITIONS, TEMPLATES, Declined, is_template, is_view_call

SUPPORTED: Final[frozenset[DType]] = frozenset((BOOL, U8, I8, I16, I32, I64, F16, BF16, F32, F64))
"""Element types that loops compute on; others (complex, fp8, wide unsigned) run as library calls."""


COMPUTED: Final = {
    "aten._conj.default": "aten._conj_physical.default",
    "aten._neg_view.default": "aten.neg.default",
}
"""Lazy views, and what computes them: library calls want plain memory."""


Made: TypeAlias = "tuple[Node, tuple[Node, ...], Arg]"
"""A node, those that it became, and its value."""


def decompose(graph: Graph) -> Graph:
    """Models repeat their layers: what a node becomes is worked out once for all that differ only in their
    operands' values."""
    fused, used = _feeding_pointwise(graph), _used_results(graph)
    known: dict[object, Made] = {}

    def change(b: Build, node: Node) -> Arg:
        feeds, read = node.name in fused, used.get(node.name, frozenset())
        places: Any = {x: (k, x.type) for k, x in enumerate(dict.fromkeys(node.operands))}
        named = node.kwargs and key_of(swapped(node.kwargs, places))
        key = node.op, key_of(swapped(node.args, places)), named, node.type, feeds, read
        if key in known:
            return _repeat(node, known[key], b)
        start = len(b.graph.nodes)
        value = _rewrite(node, b, feeds, read)
        if value is not node and node.op not in COMPUTED and not b.has_looked:
            known[key] = node, tuple(b.graph.nodes[start:]), value
        return value

    return replace_nodes(graph, change)


def _repeat(node: Node, made: Made, b: Build) -> Arg:
    """Append what another node became, over this one's operands and under its name."""
    model, nodes, value = made
    env: dict[Node, Arg] = dict(zip(model.operands, node.operands))
    for old in nodes:
        suffix = old.name.removeprefix(model.name)
        name = b.graph.unique(node.name + suffix) if suffix else node.name
        kwargs: Any = swapped(old.kwargs, env) if old.kwargs else ()
        env[old] = new = Node(old.op, swapped(old.args, env), old.type, name, kwargs, node.loc)
        b.graph.nodes.append(new)
    return swapped((value,), env)[0]


def _feeding_pointwise(graph: Graph) -> set[str]:
    """Names of nodes whose result (perhaps through views) an op of ours computes on."""
    found: set[str] = set()
    for node in reversed(graph.nodes):
        if node.op not in DECOMPOSITIONS or node.op in TEMPLATES:
            continue
        if is_view_call(node.op) and node.name not in found:
            continue
        found.update(operand.name for operand in node.operands)
    return found


def _used_results(graph: Graph) -> dict[str, frozenset[int]]:
    """Which results of an op with several, by its name, somebody reads."""
    read = set(nodes_in(graph.outputs)).union(*(node.operands for node in graph.nodes))
    found: dict[str, frozenset[int]] = {}
    for node in graph.nodes:
        if node.op == GET and node in read:
            source = cast(Node, node.args[0]).name
            found[source] = found.get(source, frozenset()) | {cast(int, node.args[1])}
    return found


def _rewrite(node: Node, b: Build, feeds_pointwise: bool, used: frozenset[int]) -> Arg:
    """Append what the node becomes; return its value, a tuple for several results."""
    rule = DECOMPOSITIONS.get(node.op)
    start = len(b.graph.nodes)
    if rule is not None and _is_supported(node, used):
        b.begin(node, feeds_pointwise, used)
        try:
            args = [wrap(arg, b) for arg in node.args]
            result = rule(b, *args, **{key: wrap(value, b) for key, value in node.kwargs})
        except Declined:
            del b.graph.nodes[start:]
        else:
            return _settle(node, result, b, start)
    if not is_template(node.op) and node.op != GET and node.op not in KINDS:
        if node.op in COMPUTED:
            node = Node(COMPUTED[node.op], node.args, node.type, node.name, node.kwargs, node.loc)
        EVENTS.emit("fallback", op=node.op, name=node.name, loc=node.loc)
    b.graph.nodes.append(node)
    return node


def _is_supported(node: Node, used: frozenset[int]) -> bool:
    """Of several results, those that are used; an op whose results nobody takes apart counts whole."""
    results = node.type
    if isinstance(results, tuple) and used:
        results = tuple(results[place] for place in sorted(used))
    return _all_supported(results) and all(_all_supported(x.type) for x in node.operands)


def _all_supported(type: Type) -> bool:
    if isinstance(type, TensorType):
        return type.dtype in SUPPORTED
    return all(map(_all_supported, type)) if isinstance(type, tuple) else True


def _settle(node: Node, result: object, b: Build, start: int) -> Arg:
    """Give the results the names and the types (eager's strides) of what they replace."""
    several = isinstance(result, (tuple, list))
    values = list(cast("list[Value | None]", result)) if several else [cast("Value | None", result)]
    types: tuple[Type, ...] = node.type if isinstance(node.type, tuple) else (node.type,)
    names = [f"{node.name}_{i}" for i in range(len(types))] if several else [node.name]
    settled: list[Node | None] = []
    made = {n for n in b.graph.nodes[start:] if n.op != GET}
    for value, type, name in zip(values, types, names):
        if value is None or type is None:
            settled.append(None)
            continue
        found = value.node
        if found in made:
            made.remove(found)  # another result may be the same, in a type of its own
            b.graph.settle(found, node, type, b.graph.unique(name) if several else name)
        elif found.type != type:
            found = b.graph.call("prims.copy", (found,), type, name=f"{name}_copy", loc=node.loc)
        settled.append(found)
    return tuple(settled) if several else settled[0]
