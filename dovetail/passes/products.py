"""Matrix products as sums of our own, which fuse with what is around them.

    y = aten.mm(a, b)     ->  s = prims.sum(a[:, None, :] * b.t()[None, :, :], (2,));  y = convert(s, bf16)

Only where it pays. On a CPU, that is where a product is computed before a library has been called; on a GPU,
`choose(node)` says into how many parts the sum is to be split, whose sums a second kernel adds up; 0 leaves
the library's call.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Final, cast

from dovetail.ir.expr import ONE, ZERO, Expr, add, as_expr, const, mul
from dovetail.ir.graph import INPUT, Arg, Graph, GraphBuilder, Node, nodes_in
from dovetail.ir.types import F32, MATRIX_STEP, TensorType, contiguous_stride
from dovetail.ops.build import Build, Value, compute_dtype, replace_nodes
from dovetail.ops.prims import kind_of

SMALL: Final = 1 << 20
"""Terms that are added up in less time than a library's kernel takes to get going."""

TINY: Final = 1 << 12
"""The same of a CPU."""
MANY: Final = 16
"""Columns that fill vectors, in which what follows is computed too."""
FEW: Final = 64
"""Results for which that may be done one by one."""


def open_products(graph: Graph, choose: Callable[[Node], int]) -> Graph:
    def change(b: Build, node: Node) -> Arg:
        parts = 0 if not can_open(node) else 1 if node.tensor.device.kind == "cpu" else choose(node)
        return opened(b, node, parts) if parts else None

    if not any(map(can_open, graph.nodes)):
        return graph
    return replace(replace_nodes(graph, change), updates=graph.updates)


def can_open(node: Node) -> bool:
    """Of known sizes: tiny and of fp32; on a GPU of 16 bits (or small and of fp32) and not of vectors."""
    if node.op not in PRODUCTS or node.kwargs:
        return False
    if node.op == "aten.addmm.default" and cast(Node, node.args[0]).tensor.ndim != 1:
        return False
    kinds = [matrix.tensor for matrix in matrices(node)]
    sizes = [size.value if size.is_const else 0 for kind in kinds for size in kind.shape]
    dtype = node.tensor.dtype
    if any(kind.dtype is not dtype for kind in kinds) or min(sizes) < 1:
        return False
    terms = node.tensor.numel.value * sizes[-2]
    if node.tensor.device.kind == "cpu":
        down, across = kinds[1].stride[-2:]
        in_vectors = across is ONE and sizes[-1] >= MANY
        is_fast = in_vectors or down is ONE or terms <= TINY // 4
        return dtype is F32 and terms <= TINY and is_fast and (in_vectors or node.tensor.numel.value <= FEW)
    if min(sizes) < 2 or sizes[-2] % MATRIX_STEP:
        return False
    is_small = dtype is F32 and terms <= SMALL
    return dtype.is_low_precision or is_small


def opened(b: Build, node: Node, parts: int) -> Node:
    a, y = (Value(matrix, b) for matrix in matrices(node))
    wide, depth, last = compute_dtype(node.tensor.dtype), a.shape[-1], a.ndim - 1
    *batch, rows = a.shape[:-1]
    columns, ranks = y.shape[-1], tuple(range(last - 1))
    shape: tuple[Expr, ...] = (*batch, rows, columns, depth)
    left = b.broadcast(a.to(wide), shape, (*ranks, last - 1, last + 1))
    turned = b.permute(y, (*ranks, last, last - 1)).to(wide)
    product = left * b.broadcast(turned, shape, (*ranks, last, last + 1))
    if parts > 1:
        split = (*shape[:-1], as_expr(parts), as_expr(depth.value // parts))
        sums = b.reduce("sum", b.reshape(product, split), (last + 2,))
        total = b.reduce("sum", sums, (last + 1,))
    else:
        total = b.reduce("sum", product, (last + 1,))
    if node.op == "aten.addmm.default":
        total = total + Value(cast(Node, node.args[0]), b).to(wide)
    made = total.to(node.tensor.dtype)
    if made.type == node.tensor:
        return made.node
    return b.graph.call("prims.copy", (made.node,), node.tensor, name=f"{node.name}_laid", loc=node.loc)


def alone(op: str, kinds: list[TensorType], out: TensorType, parts: int) -> Graph:
    """A graph of nothing but an opened product of such matrices, to be timed."""
    b = Build(GraphBuilder())
    given = [b.graph.input(f"x{i}", kind) for i, kind in enumerate(kinds)]
    node = Node(op, tuple(given), out, "y")
    b.begin(node)
    return b.graph.finish((opened(b, node, parts),))


# -- rows times several weights in one kernel ------------------------------------------------------


def join_rows(graph: Graph) -> Graph:
    """q = sum(wq * x, (1,)); k = sum(wk * x, (1,))  ->  s = sum(cat(wq, wk) * x, (1,)); q, k = parts of s

    Each product alone is over before the GPU has filled up; together they are one long read. The weights are
    not joined in memory: each row of the reduction reads its own."""
    if not any(node.op == "prims.sum" and node.tensor.device.kind == "cuda" for node in graph.nodes):
        return graph
    sets: dict[tuple[object, ...], list[Node]] = {}
    for node in graph.nodes:
        if (key := _row_of(node)) is not None:
            sets.setdefault(key, []).append(node)
    several = [group for group in sets.values() if len({node.tensor.shape for node in group}) > 1]
    joined = {group[0].name: group for group in several}
    parts: dict[str, Node] = {}

    def change(b: Build, node: Node) -> Node | None:
        if node.name in joined:
            parts.update(_join(b, node, joined[node.name]))
        return parts.get(node.name)

    return replace_nodes(graph, change) if joined else graph


def _weight_and_row(node: Node) -> tuple[Node, Node] | None:
    """Of sum(weight * row, (1,)): the weight as an input of the graph, and the row before its broadcast."""
    if node.op != "prims.sum" or node.args[1] != (1,):
        return None
    product = cast(Node, node.args[0])
    if product.op != "prims.mul" or not all(isinstance(arg, Node) for arg in product.args):
        return None
    weight, row = cast("tuple[Node, Node]", product.args)
    if weight.op == "prims.convert":
        weight = cast(Node, weight.args[0])
    spread = row.op == "prims.broadcast" and row.args[2] == (1,)
    return (weight, cast(Node, row.args[0])) if weight.op == INPUT and spread else None


def _row_of(node: Node) -> tuple[object, ...] | None:
    """What products that can be joined have in common."""
    found = _weight_and_row(node)
    if found is None or node.tensor.device.kind != "cuda":
        return None
    weight, row = found
    known = all(size.is_const for size in weight.tensor.shape) and weight.tensor.is_contiguous
    return (row, weight.tensor.dtype, node.tensor.dtype) if known else None


def _join(b: Build, first: Node, group: list[Node]) -> dict[str, Node]:
    """The joint product, at the place of the first; the value of each by its name."""
    pairs = [_weight_and_row(node) for node in group]
    weights = [Value(weight, b) for weight, _ in cast("list[tuple[Node, Node]]", pairs)]
    row = Value(cast(Node, cast(Node, cast(Node, first.args[0]).args[1]).args[0]), b)
    matrix = b.cat(weights, 0).to(first.tensor.dtype)
    total = b.reduce("sum", matrix * b.broadcast(row, matrix.shape, (1,)), (1,))
    found: dict[str, Node] = {}
    start = ZERO
    for node in group:
        stop = add(start, node.tensor.shape[0])
        found[node.name] = b.slice(total, 0, start, stop).node
        start = stop
    return found


# -- sums of products ------------------------------------------------------------------------------


MM: Final = "aten.mm.default"
LEAST_TERMS: Final = 4


def join_sums(graph: Graph) -> Graph:
    """dw = mm(g0.t(), x0) + mm(g1.t(), x1) + ...  ->  dw = mm(cat(g0, g1, ...).t(), cat(x0, x1, ...))

    That is the gradient of a weight which is used in every step of a loop. Each product is as large as the
    weight, and all of them would be kept for the sum; the rows they are made of are few."""
    if not any([node.op == MM and _are_few_rows([node]) for node in graph.nodes]):
        return graph
    shown = {node.name for node in nodes_in(graph.outputs)}
    once = {node.name for node, users in graph.users().items() if len(users) == 1} - shown
    adds = [n for n in graph.nodes if n.op in ("prims.add", "prims.convert") and _addends(n, once)]
    added = {term.name for node in adds for term in _addends(node, once)} & once
    sums = {n.name for n in adds if n.name not in added and len(_terms(n, once)) >= LEAST_TERMS}

    def change(b: Build, node: Node) -> Arg:
        terms = _terms(node, once) if node.name in sums else []
        products = [term for term in terms if term.op == MM and term.name in once]
        if len(products) < LEAST_TERMS or not _are_few_rows(products):
            return None
        lefts, rights = zip(*map(matrices, products))
        total = b.extern(MM, (_stacked(b, lefts, 1), _stacked(b, rights, 0)), node.type)
        wide = compute_dtype(node.tensor.dtype)
        for term in terms:
            if term not in products:
                total = (total.to(wide) + Value(term, b).to(wide)).to(node.tensor.dtype)
        return total.node

    return replace_nodes(graph, change) if sums else graph


def _addends(node: Node, once: Set[str]) -> tuple[Node, ...]:
    """The two that it adds, be it in 16 bits; () if it is something else."""
    total, is_rounded = node, False
    if node.op == "prims.convert" and cast(Node, node.args[0]).name in once:
        total, is_rounded = cast(Node, node.args[0]), True
    found = [arg for arg in total.args if isinstance(arg, Node)] if total.op == "prims.add" else []
    if is_rounded:
        found = [cast(Node, arg.args[0]) for arg in found if arg.op == "prims.convert"]
    return tuple(found) if len(found) == 2 and all(arg.type == node.type for arg in found) else ()


def _terms(node: Node, once: Set[str]) -> list[Node]:
    found, stack = [], [node]
    while stack:
        term = stack.pop()
        addends = _addends(term, once) if term is node or term.name in once else ()
        stack += reversed(addends)
        found += [] if addends else [term]
    return found


def _are_few_rows(products: list[Node]) -> bool:
    """Both operands of all together take less memory than half of the results."""
    operands = [matrix.tensor.numel for product in products for matrix in matrices(product)]
    results = [product.tensor.numel for product in products]
    known = all(size.is_const for size in (*operands, *results))
    return known and 2 * sum(size.value for size in operands) <= sum(size.value for size in results)


def _stacked(b: Build, parts: Sequence[Node], dim: int) -> Value:
    if all(part.op == "prims.permute" for part in parts):
        return b.permute(b.cat([Value(cast(Node, part.args[0]), b) for part in parts], 1 - dim), (1, 0))
    return b.cat([Value(part, b) for part in parts], dim)


# -- products of whole vectors, for the GPU's matrix units -----------------------------------------


PRODUCTS: Final = {"aten.mm.default": 0, "aten.bmm.default": 0, "aten.addmm.default": 1}
"""Where the first matrix is among the arguments."""
VECTOR: Final = 16
"""Bytes."""
LEAST_WORK: Final = 1 << 30
"""Multiplications below which a product takes too little time to bother."""
WORK_PER_BYTE: Final = 40
"""Multiplications that an unaligned product loses in the time a byte is copied."""


def pad_products(graph: Graph) -> Graph:
    """y = aten.mm(h, w) of bf16[8192, 768] and [768, 50257]  ->
    p = prims.pad(w, ... 50264 columns);  q = aten.mm(h, p);  y = prims.slice(q, ... 50257)

    The units move 16 bytes at a time: a product in whose operands or result rows start elsewhere gets kernels
    several times slower. An operand that a kernel of ours writes is written padded to begin with; any other
    costs a copy, and so does a result that the caller wants as it is. Both are weighed against the time the
    product saves."""
    if not any(node.op in PRODUCTS and _extras(node) for node in graph.nodes):
        return graph
    names = {node.name for node in nodes_in(graph.outputs)}

    def change(b: Build, node: Node) -> Arg:
        extras = _extras(node) if node.op in PRODUCTS else ()
        return _padded(b, node, extras) if extras and _pays(node, extras, node.name in names) else None

    return replace_nodes(graph, change)


def matrices(node: Node) -> tuple[Node, Node]:
    first = PRODUCTS[node.op]
    return cast(Node, node.args[first]), cast(Node, node.args[first + 1])


def _extras(node: Node) -> tuple[int, ...]:
    """What to add to (rows, depth, columns) of the product; () for a product that is fine as it is."""
    a, b = (matrix.tensor for matrix in matrices(node))
    sizes = (*a.shape, *b.shape)
    if a.device.kind != "cuda" or not a.dtype.is_low_precision or not all(size.is_const for size in sizes):
        return ()
    if node.op == "aten.addmm.default" and (node.kwargs or cast(Node, node.args[0]).tensor.ndim != 1):
        return ()
    rows, depth, columns = a.shape[-2].value, a.shape[-1].value, b.shape[-1].value
    if rows * depth * columns < LEAST_WORK or min(rows, depth, columns) < VECTOR:
        return ()
    vector = VECTOR // a.dtype.bytes
    by_rows = a.stride[-2] is ONE  # the first matrix is transposed: its lines run along the rows
    extras = (-rows % vector if by_rows else 0, -depth % vector, -columns % vector)
    return extras if any(extras) else ()


def _pays(node: Node, extras: tuple[int, ...], is_returned: bool) -> bool:
    a, b = matrices(node)
    rows, depth, columns = extras
    work = a.tensor.numel.value * b.tensor.shape[-1].value
    copied = [m for m, grown in ((a, rows or depth), (b, depth or columns)) if grown and not _is_ours(m)]
    moved = sum(m.tensor.bytes.value for m in copied)
    moved += node.tensor.bytes.value if is_returned and columns else 0
    return work > WORK_PER_BYTE * moved


def _is_ours(node: Node) -> bool:
    """A kernel of ours writes it, wherever it is told to."""
    while kind_of(node.op) == "view" and node.op != "prims.as_strided":
        node = cast(Node, node.args[0])
    return kind_of(node.op) in ("pointwise", "join")


def _padded(b: Build, node: Node, extras: tuple[int, ...]) -> Arg:
    rows, depth, columns = extras
    first, second = matrices(node)
    left, right = _grown(b, first, (rows, depth)), _grown(b, second, (depth, columns))
    bias = [_grown(b, cast(Node, arg), (columns,)) for arg in node.args[: PRODUCTS[node.op]]]
    shape = (*left.tensor.shape[:-1], right.tensor.shape[-1])
    type = TensorType(shape, contiguous_stride(shape), node.tensor.dtype, node.tensor.device)
    value = b.extern(node.op, (*bias, left, right), type)
    for dim in (-2, -1):
        value = b.slice(value, value.ndim + dim, 0, node.tensor.shape[dim])
    # Typed as eager's result, whose strides whoever minds them gets by a copy.
    return b.graph.settle(value.node, node, node.type, node.name)


def _grown(b: Build, node: Node, extras: Sequence[int]) -> Node:
    """With zeros after the last dimensions, in the same order in memory. A matrix and its transpose are views
    of one copy."""
    if not any(extras):
        return node
    type, extras = node.tensor, [*([0] * (node.tensor.ndim - len(extras))), *extras]
    if node.op == "prims.permute":
        dims = cast("tuple[int, ...]", node.args[1])
        grown = _grown(b, cast(Node, node.args[0]), [extras[dims.index(d)] for d in range(type.ndim)])
        return b.permute(Value(grown, b), dims).node
    shape = tuple(const(n.value + more) for n, more in zip(type.shape, extras))
    order = sorted(range(type.ndim), key=lambda d: -type.stride[d].lo)
    strides, step = [ONE] * type.ndim, ONE
    for dim in reversed(order):
        strides[dim], step = step, mul(step, shape[dim])
    made = TensorType(shape, tuple(strides), type.dtype, type.device)
    args = (node, tuple(ZERO for _ in extras), tuple(map(as_expr, extras)), 0.0)
    return b.graph.call("prims.pad", args, made, name=f"{node.name}_padded", loc=node.loc)
