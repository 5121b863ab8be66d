"""Cut the joint graph in two: what forward computes and saves, what backward recomputes.

    joint: values, gradients = f(primals, tangents)
      -> forward:  values, saved = f(primals)
         backward: gradients = f(saved, tangents)

A value that backward needs is either saved (its bytes are written and read again) or recomputed from
others. The cheapest choice is a minimum cut: an edge through each value with its bytes as capacity,
infinite edges along data flow, the source at what must not be recomputed, the sink at what backward
uses. Views are never saved (their base is), random ops never repeated. `budget` < 1 lets heavier
ops be recomputed, those first that free most bytes for the least work, until the saved bytes are
that fraction of what they were.
"""
from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Final

from dovetail.errors import VerifyError
from dovetail.events import EVENTS
from dovetail.fake.record import record as facts_of
from dovetail.ir.expr import Expr, symbols
from dovetail.ir.graph import GET, INPUT, Arg, Graph, Node, exprs_in, moved_over, nodes_in, swapped
from dovetail.ir.signature import Signature
from dovetail.ir.types import I64, ScalarType, bytes_of
from dovetail.ops.build import is_dense
from dovetail.ops.prims import PRIMS
from dovetail.ops.registry import is_impure, may_act
from dovetail.util.library import find_op
from dovetail.util.mincut import INFINITE, Network
from dovetail.util.noun import Noun, replace

_SOURCE: Final = "source"
_SINK: Final = "sink"
MOST_SOURCES: Final = 3
"""Saved values that one is recomputed from, if they are together much larger than it."""
MANY_SOURCES: Final = 32
"""Past this many they are not followed."""


class Saved(Noun):
    """One input of backward. source: 'input' (of forward), 'output' (of forward), or 'symbol'."""

    source: str
    index: int
    name: str
    bytes: int = 0
    expr: Expr | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.source}, {self.bytes} bytes)"


class Partition(Noun, eq=False):
    """backward's inputs are `saved` in order, then the tangents of the forward outputs at `tangents` (those
    that some gradient needs); it is None without gradients."""

    forward: Graph
    backward: Graph | None
    signature: Signature
    saved: tuple[Saved, ...] = ()
    tangents: tuple[int, ...] = ()

    def kept(self, kind: type) -> list[tuple[int, Saved]]:
        """What is saved, with its place: of kind TensorType, which autograd keeps, or ScalarType."""
        given = () if self.backward is None else self.backward.inputs
        found = [(i, s) for i, s in enumerate(self.saved) if s.source != "symbol"]
        return [(i, s) for i, s in found if isinstance(given[i].type, kind)]

    def __str__(self) -> str:
        parts = [str(self.forward), str(self.backward or "no backward"), str(self.signature)]
        return "\n".join([*parts, "saved: " + ", ".join(map(str, self.saved))])


def partition(graph: Graph, signature: Signature, budget: float = 1.0) -> Partition:
    """The joint graph may have been rewritten; its inputs and outputs count by position."""
    primals = graph.inputs[: signature.inputs + signature.constants]
    tangents = graph.inputs[len(primals) :]
    values, grads = graph.outputs[: signature.values], graph.outputs[signature.values :]
    if not grads:
        forward = Graph("forward", primals, graph.nodes, values)
        return Partition(forward, None, signature)
    problem = _Problem(graph, signature, set(primals), dependents(graph, tangents), set(nodes_in(grads)))
    cut = problem.solve(budget)
    forward, saved = _make_forward(graph, primals, values, cut, problem)
    wanted = graph.needed(nodes_in(grads))
    used = [(node, position) for node, position in zip(tangents, signature.tangents) if node in wanted]
    late = [node for node in graph.nodes if node in wanted and node in problem.tied]
    backward = _make_backward(late, saved, tuple(node for node, _ in used), grads)
    backward, kept = with_symbols(backward, tuple(entry for _, entry in saved))
    outputs = sum(entry.source == "output" and entry.index >= signature.values for entry in kept)
    result = Partition(forward, backward, replace(signature, saved=outputs), kept, tuple(p for _, p in used))
    _report(graph.name, result, problem)
    return result


def _report(unit: str, result: Partition, problem: _Problem) -> None:
    recomputed = [n.name for n in result.backward.nodes if n.name in problem.names] if result.backward else []
    total = sum(entry.bytes for entry in result.saved if entry.source == "output")
    told = {"saved": tuple(map(str, result.saved)), "recomputed": tuple(recomputed)}
    EVENTS.emit("partition", unit=unit, saved_bytes=total, **told)


def dependents(graph: Graph, roots: Iterable[Node]) -> set[Node]:
    """Every node that needs one of roots."""
    found = set(roots)
    for node in graph.nodes:
        if any(operand in found for operand in node.operands):
            found.add(node)
    return found


# -- the cut -----------------------------------------------------------------------------------------


class _Problem:
    """What is needed in backward, what each saving costs, what may be recomputed."""

    def __init__(
        self, graph: Graph, signature: Signature, primals: set[Node], tied: set[Node], grads: set[Node]
    ) -> None:
        self.graph, self.primals, self.tied = graph, primals, tied
        unread = {graph.inputs[i] for i in signature.unread if i >= 0}
        self.unsaved = {node for node in unread if not is_dense(node.tensor)}
        """Inputs whose value may be gone when backward runs, and that a copy would be laid out unlike."""
        self.written = {graph.inputs[m.input] for m in signature.mutations} | unread - self.unsaved
        self.written |= set(nodes_in(tuple(graph.outputs[~i] for i in signature.unread if i < 0))) - primals
        """Inputs and outputs whose value may be gone when backward runs: a copy is saved."""
        self.outputs = set(nodes_in(graph.outputs[: signature.values]))
        needed = graph.needed(grads)
        self.needed = needed - tied
        """Nodes that backward needs directly or not, and that do not depend on tangents."""
        self.order = [node for node in (*graph.inputs, *graph.nodes) if node in self.needed]
        used = {o for node in graph.nodes if node in tied and node in needed for o in node.operands}
        self.used = (used | grads) - tied
        self.names = {node.name for node in graph.nodes if node not in tied}
        self.distance = self._distances()
        heavy = [node for node in graph.nodes if node in tied and kind_of(node) == "heavy"]
        self.anchors = {operand for node in heavy for operand in node.operands}
        """What library calls of backward read: recomputed, it takes memory until then."""
        self.kept: set[Node] = set()
        self.region = {n: n.loc.region for n in graph.nodes if n.loc and n.loc.region and n not in tied}
        """The checkpoint of each node in one."""
        self.checkpointed = {node for node in self.region if kind_of(node) != "random"}
        self.inside, self.borders = self._inside_and_borders()

    def _inside_and_borders(self) -> tuple[set[Node], set[Node]]:
        """Values that only their own checkpoint reads, which are not saved; and those that enter one, which
        are not recomputed."""
        made = {node: node.operands[0] if node.op == GET else node for node in self.region}
        inside = {node for node, maker in made.items() if kind_of(maker) != "random"}
        borders: set[Node] = set()
        for node in self.graph.nodes if self.region else ():
            for operand in node.operands if node not in self.tied else ():
                if self.region.get(operand, 0) == self.region.get(node, 0):
                    continue
                inside.discard(operand)
                while operand.op != GET and operand not in self.primals and kind_of(operand) == "view":
                    operand = operand.operands[0]
                    inside.discard(operand)
                if node in self.region:
                    borders.add(operand)
        return inside, borders - self.primals

    def _distances(self) -> dict[Node, int]:
        """Steps from a node to the nearest use in backward proper."""
        far: dict[Node, int] = dict.fromkeys(self.used, 0)
        for node in reversed(self.order):
            here = far.get(node, 100)
            for operand in node.operands:
                far[operand] = min(far.get(operand, 100), here + 1)
        return far

    def price(self, node: Node) -> int:
        """What saving costs. Inputs are there anyway; a value close to its use is worth more than one
        from which a long chain would have to be computed again."""
        if node in self.primals and node not in self.written:
            return INFINITE // 2**20 if node in self.unsaved else 2  # rather all that is computed from it
        if node not in self.primals:
            if isinstance(node.type, tuple) or (node.op != GET and kind_of(node) == "view"):
                return INFINITE
            if node in self.outputs and node in self.used and node not in self.written:
                return 1  # the caller has it anyway, and eager saves it too
            if node in self.inside:
                return INFINITE
        factor = 110 + 10 * min(self.distance.get(node, 0), 40)
        if node in self.outputs:
            factor *= 2  # the user may write to it, which eager would not mind
        return max(1, bytes_of(node.type)) * factor

    def may_recompute(self, node: Node, freed: set[Node]) -> bool:
        if node in freed or node in self.checkpointed:
            return node not in self.borders
        return node not in self.kept and node not in self.borders and kind_of(node) in ("cheap", "view")

    def chained(self, saved: set[Node]) -> set[Node]:
        """Recomputed values for library calls that other such values are recomputed from. The last of a
        chain is needed first, so all of it would be in memory at once, which is what saving avoids; every
        second one is saved."""
        found: set[Node] = set()
        behind: set[Node] = set()
        """recomputed nodes that a recomputed anchor was needed for"""
        for node in self.order:
            if node in saved or node in self.primals:
                continue
            is_behind = any(operand in behind and operand not in found for operand in node.operands)
            if is_behind and self._is_anchor(node):
                found.add(node)
            elif is_behind or self._is_anchor(node):
                behind.add(node)
        return found

    def gathered(self, saved: set[Node]) -> set[Node]:
        """Values recomputed from several saved ones that are together much larger, as the last sums of a
        residual stream would be from all that was added to it. Saved in between, they cut such chains."""
        found: set[Node] = set()
        sources: dict[Node, frozenset[Node]] = {}
        for node in self.order:
            if node in saved or node in self.primals:
                sources[node] = frozenset((node,))
                continue
            read = frozenset().union(*(sources.get(operand, ()) for operand in node.operands))
            large = [source for source in read if 2 * bytes_of(source.type) >= bytes_of(node.type)]
            is_costly = sum(bytes_of(source.type) for source in large) >= 2 * bytes_of(node.type)
            if len(large) > MOST_SOURCES and is_costly and kind_of(node) == "cheap":
                found.add(node)
                read = frozenset((node,))
            sources[node] = read if len(read) < MANY_SOURCES else frozenset()
        return found - self.checkpointed

    def _is_anchor(self, node: Node) -> bool:
        return node in self.anchors and kind_of(node) == "cheap" and node not in self.checkpointed

    def cut(self, freed: set[Node]) -> set[Node]:
        """The nodes to save. What a value that is not recomputed is made of does not matter; a view is where
        its base is."""
        firm = {n for n in self.order if n in self.primals or not self.may_recompute(n, freed)}
        asked = set(self.used)
        for node in reversed(self.order):
            if node in asked and node not in firm:
                asked.update(node.operands)
        network, base = Network(), {}  # type: Network, dict[Node, Node]
        for node in filter(asked.__contains__, self.order):
            price, operands = self.price(node), () if node in firm else node.operands
            base[node] = base[operands[0]] if price == INFINITE and len(operands) == 1 else node
            if base[node] is node:
                network.edge(_SOURCE if node in firm else (node, "made"), node, price)
                for operand in operands:
                    network.edge(base[operand], (node, "made"), INFINITE)
            if node in self.used:
                network.edge(base[node], _SINK, INFINITE)
        side = network.cut(_SOURCE, _SINK)
        return {n for n, b in base.items() if b is n and n not in side and (n in firm or (n, "made") in side)}

    def cost(self, saved: set[Node]) -> int:
        return sum(bytes_of(n.type) for n in saved if n not in self.primals or n in self.written)

    def solve(self, budget: float) -> set[Node]:
        best = self.cut(set())
        for find in (self.gathered, self.chained):
            if found := find(best):
                self.kept |= found
                best = self.cut(set())
        if budget >= 1.0:
            return best
        candidates = self._candidates()
        limit = budget * self.cost(best)
        low, high = 0, len(candidates)
        while low < high:  # the fewest recomputed ops whose cut fits the budget
            middle = (low + high) // 2
            fits = self.cost(self.cut(set(candidates[:middle]))) <= limit
            low, high = (low, middle) if fits else (middle + 1, high)
        freed = set(candidates[:low])
        self.kept |= self.boundaries(self.cut(freed), freed)
        return self.cut(freed)

    def boundaries(self, saved: set[Node], freed: set[Node]) -> set[Node]:
        """Small operands of recomputed ops that lead back to the large results of other ones: saved, the
        earlier op need not run and stay in memory until backward gets to it, a layer of an LSTM, say."""
        found: set[Node] = set()
        behind: dict[Node, int] = {}
        """Recomputed nodes: the bytes of the largest op that was run again for them."""
        for node in self.order:
            if node in saved or node in self.primals:
                continue
            larger = {o: behind[o] for o in node.operands if o in behind and o not in found}
            if node in freed:
                small = {o for o, size in larger.items() if bytes_of(o.type) * 4 <= size}
                found |= {o for o in small if self.price(o) < INFINITE}
            behind[node] = bytes_of(node.type) if node in freed else max(larger.values(), default=0)
        return found

    def _candidates(self) -> list[Node]:
        """Ops that may be recomputed when memory matters more, cheapest work per byte first. Bytes read
        stand for the work of an op."""
        weight = {"reduction": 1, "heavy": 30}
        found = [n for n in self.order if n not in self.primals and kind_of(n) in weight]
        work = {n: weight[kind_of(n)] * (sum(bytes_of(x.type) for x in n.operands) + 1) for n in found}
        return sorted(found, key=lambda n: work[n] / max(1, bytes_of(n.type)))


# -- the two graphs ----------------------------------------------------------------------------------


def _make_forward(
    graph: Graph, primals: tuple[Node, ...], values: tuple[Arg, ...], cut: set[Node], problem: _Problem
) -> tuple[Graph, list[tuple[Node, Saved]]]:
    """The forward graph, and what backward gets from it."""
    outputs, saved = list(values), []  # type: list[Arg], list[tuple[Node, Saved]]
    copied = [node for node in (*primals, *graph.nodes) if node in cut and node in problem.written]
    copies = {n: Node("aten.clone.default", (n,), n.type, f"{n.name}_before") for n in copied}
    places = {value: i for i, value in reversed([*enumerate(values)]) if isinstance(value, Node)}
    for i, node in enumerate((*primals, *graph.nodes)):
        value, source, position = copies.get(node, node), "input", i
        if node in cut and (value is not node or i >= len(primals)):
            source, position = "output", places.setdefault(value, len(outputs))
            outputs += [value] * (position == len(outputs))
        if node in cut:
            saved.append((node, Saved(source, position, node.name, bytes_of(node.type))))
    early = [copy for node, copy in copies.items() if node in problem.primals]
    late = [copy for node, copy in copies.items() if node not in problem.primals]
    whole = Graph("forward", primals, (*early, *graph.nodes, *late), tuple(outputs))
    return whole.pruned(lambda node: node not in problem.tied and kind_of(node) == "random"), saved


def _make_backward(
    late: list[Node], saved: list[tuple[Node, Saved]], tangents: tuple[Node, ...], grads: tuple[Arg, ...]
) -> Graph:
    """`late` are the nodes that depend on tangents; what is recomputed comes in order of first use, so that
    it lives briefly."""
    replaced = {node: Node(INPUT, (), node.type, node.name, loc=node.loc) for node, _ in saved}
    replaced |= {node: node for node in tangents}
    nodes: list[Node] = []
    left = [*late, *nodes_in(grads)][::-1]
    while left:
        if left[-1] in replaced:
            left.pop()
        elif missing := [operand for operand in left[-1].operands if operand not in replaced]:
            left += reversed(missing)
        elif left[-1].op == INPUT:
            raise VerifyError(stage="partition", detail=f"backward needs {left[-1].name}, which is not saved")
        else:
            nodes.append(moved_over(left[-1], replaced))
            replaced[left[-1]] = nodes[-1]
    inputs = (*(replaced[node] for node, _ in saved), *tangents)
    return Graph("backward", inputs, tuple(nodes), swapped(grads, replaced))


# -- symbols -----------------------------------------------------------------------------------------


def _missing_symbols(graph: Graph, saved: int) -> list[Expr]:
    """Symbols that backward names and that no saved value is the size of; tangents need not come."""
    known = {expr for node in graph.inputs[:saved] for expr in exprs_in(node.type) if expr.op == "sym"}
    wanted: dict[Expr, None] = {}
    for node in (*graph.inputs, *graph.nodes):
        for expr in exprs_in((node.args, node.kwargs, node.type)):
            wanted.update(dict.fromkeys(sorted(symbols(expr) - known, key=lambda e: e.serial)))
    return list(wanted)


def with_symbols(graph: Graph, saved: tuple[Saved, ...]) -> tuple[Graph, tuple[Saved, ...]]:
    """Backward, given the numbers too that it cannot read from what is saved."""
    missing, at = _missing_symbols(graph, len(saved)), len(saved)
    nodes = tuple(Node(INPUT, (), ScalarType(I64, expr), expr.name) for expr in missing)
    entries = tuple(Saved("symbol", -1, expr.name, 8, expr) for expr in missing)
    return replace(graph, inputs=(*graph.inputs[:at], *nodes, *graph.inputs[at:])), (*saved, *entries)


# -- what recomputing a node in backward would cost, from its op's name -----------------------------

_BY_KIND: Final = {
    "pointwise": "cheap", "view": "view", "create": "cheap", "reduction": "reduction", "gather": "cheap",
    "scatter": "reduction", "scan": "reduction", "join": "cheap", "pair": "view",
}  # fmt: skip


@cache
def class_of(op: str) -> str:
    """cheap: one more term in a fused loop. view: nothing. reduction: reads its input again. heavy: products,
    convolutions, attention, unknown library calls. random: must run once."""
    if op == GET:
        return "view"
    if op in PRIMS:
        return _BY_KIND[PRIMS[op].kind]
    if may_act(op):
        return "random"
    return "view" if facts_of(find_op(op)).is_view else "heavy"


def kind_of(node: Node) -> str:
    """The class of its op, if it reads tensors, and draws numbers."""
    kind = class_of(node.op)
    if kind == "random":
        return kind if is_impure(node) else "heavy"
    return "cheap" if kind == "heavy" and not node.operands else kind
