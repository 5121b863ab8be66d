"""Which values get memory, and which are computed where they are read.

A value is stored when it must be (an output, an argument of a library call, a reduction, what a gather
reads), or when two different nests would otherwise both compute it and it is not cheap. Nests that the
scheduler fuses later keep such values in registers, so storing here does not mean traffic.

    e = exp(x - m); s = sum(e); o = e / s       e is stored: the sum and the division both read it
    y = x + b; g = y * sigmoid(y)               y is not: only one nest reads it
"""
from __future__ import annotations

from collections.abc import Set
from typing import Final, cast

from dovetail.ir.expr import Expr, total
from dovetail.ir.graph import GET, INPUT, Graph, Node, nodes_in
from dovetail.ir.types import ScalarType, TensorType
from dovetail.ops.flex import find_virtual
from dovetail.ops.prims import ELEMENTWISE, KINDS, kind_of

CHEAP: Final = frozenset(f"prims.{name}" for name in (
    "add", "sub", "mul", "neg", "abs", "maximum", "minimum", "convert", "copy", "where", "eq", "ne", "lt",
    "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "full", "empty", "iota", "bit_and",
    "bit_or", "bit_xor", "bit_not", "floor", "ceil", "trunc", "round", "sign", "isnan", "pad",
))  # fmt: skip
CHEAP_OPS: Final = 3
"""A value made of at most this many cheap operations is recomputed rather than stored."""
LARGEST_BODY: Final = 192
"""Operations in one nest's body, counting repeats; beyond it a value is stored."""
FEW_OPS: Final = 8
MOST_REPEATS: Final = 4
"""A value of more than a few operations that more nodes read than this is stored."""
DEEPEST_BODY: Final = 96
"""Operations in a row; reading a value recurses through them."""
LARGEST_PICK: Final = 24
"""Operations that a gather repeats for each element it reads rather than have the source stored."""
MUCH_WORK: Final = 2048
"""Elements that one program takes long to compute."""
READY_BYTES: Final = 1 << 18
"""Of an input that one program reads in no time."""
GATHERS: Final = ("prims.take", "prims.gather")
MANY: Final = 8
"""Past this many readers the exact set no longer matters."""

VIEWS: Final = frozenset((
    "prims.reshape", "prims.permute", "prims.slice", "prims.broadcast", "prims.as_strided",
))  # fmt: skip
"""Views that memory can show by strides alone (reshape: often)."""
OVERLAPPED: Final = VIEWS | {"prims.pad"}
"""What slices that overlap read through."""


INLINABLE: Final = frozenset(op for op, kind in KINDS.items() if kind in ELEMENTWISE)


def is_inlinable(node: Node) -> bool:
    """Computed element by element from its operands."""
    return node.op in INLINABLE


def needs_memory(node: Node) -> tuple[Node, ...]:
    """The operands that must be in memory for this node, apart from library calls."""
    if kind_of(node.op) in ("pairs", "attention"):
        return node.operands
    if node.op != "prims.as_strided" and node.op not in GATHERS:
        return ()
    source = cast(Node, node.args[0])  # a gather of few elements of a short computation works them out itself
    is_picked = node.op in GATHERS and node.tensor.numel.hi <= source.tensor.numel.lo and _is_short(source)
    return () if is_picked else (source,)


def _is_short(source: Node, size: Expr | None = None, stored: Set[Node] = frozenset()) -> bool:
    """Or what of it has that many elements."""
    left, stack, seen = LARGEST_PICK, [source], set()  # type: int, list[Node], set[Node]
    while stack and left > 0:
        node = stack.pop()
        if node in stored or node in seen:
            continue
        seen.add(node)
        if node.op == "prims.cat" or kind_of(node.op) in ("gather", "join", "scatter"):
            if not _counts(node):
                return False
        if is_inlinable(node) and (size is None or getattr(node.type, "numel", None) is size):
            left -= 1
            stack.extend(node.operands)
    return left > 0


def _counts(pick: Node) -> bool:
    """It takes elements at places made of counts alone: windows, say."""
    walk = dict.fromkeys(pick.operands[1:] if pick.op == "prims.take" else (pick,))
    for _ in range(LARGEST_PICK):
        if not walk:
            return True
        node, _ = walk.popitem()
        if node.op != "prims.iota":
            if kind_of(node.op) not in ("pointwise", "view"):
                return False
            walk.update(dict.fromkeys(node.operands))
    return False


def base_of(node: Node) -> Node:
    """The value whose memory a chain of strided views shows."""
    while node.op in VIEWS:
        node = cast(Node, node.args[0])
    return node


def find_stored(graph: Graph, users: dict[Node, list[Node]]) -> set[Node]:
    """Every node that gets a buffer of its own."""
    stored: set[Node] = set()
    wanted: set[Node] = {base_of(node) for node in nodes_in(graph.outputs)}
    shared: set[Node] = set()
    aligned: dict[Node, bool] = {}
    has_joins = any([node.op == "prims.cat" for node in graph.nodes])
    readers: dict[Node, frozenset[Node]] = {}
    for node in reversed(graph.nodes):
        if node.op == GET:
            continue
        if node.op not in INLINABLE:
            stored.add(node)
            if kind_of(node.op) is None:
                wanted.update(map(base_of, node.operands))
        wanted.update(map(base_of, needs_memory(node)))
        readers[node] = _readers(users[node], stored, readers)
        aligned[node] = has_joins and _is_aligned(node, users[node], stored, aligned)
        if node in wanted and node.op not in VIEWS:
            stored.add(node)
        elif node.op == "prims.cat":
            is_read_once = len(readers[node]) == 1 and (aligned[node] or _joins_rows(node, users))
            stored.update(() if is_read_once else (node,))
        elif len(readers[node]) > 1 and is_inlinable(node) and kind_of(node.op) != "view":
            found = () if _is_widening(node) or _is_cheap(node) or _is_unpacked(node) else (node,)
            stored.update(found)
            shared.update(found)
    _recompute_cheap(graph, stored, shared)
    _store_joins(graph, readers, stored)
    _store_repeated(graph, users, stored)
    _store_summed(graph, stored)
    _store_large(graph, users, stored)
    stored.update(node for node in graph.nodes if kind_of(node.op) == "pairs")
    return stored.difference(find_virtual(graph))


def find_loose(graph: Graph, users: dict[Node, list[Node]]) -> set[Node]:
    """Values of fp32 that reach the caller only after rounding to fp16 or bf16, and what is computed without
    any."""
    seen = set(nodes_in(graph.outputs))
    loose: set[Node] = set()
    if not any(isinstance(t, TensorType) and t.dtype.is_low_precision for t in {n.type for n in graph.nodes}):
        return loose
    for node in (*graph.inputs, *graph.nodes):
        is_whole = isinstance(node.type, TensorType) and node.type.dtype.kind in ("int", "uint", "bool")
        if is_whole and loose.issuperset(node.operands):
            loose.add(node)
    for node in reversed(graph.nodes):
        if node in seen or node.type is None or isinstance(node.type, ScalarType):
            continue
        if all(_rounds(user, loose) for user in users[node]):
            loose.add(node)
    return loose


def _rounds(user: Node, loose: set[Node]) -> bool:
    """The user gives fp16 or bf16, or a value that only its own users round. Comparisons, integers and
    library calls see the last bits."""
    if user.op == GET:
        return user in loose
    if kind_of(user.op) is None or not isinstance(user.type, TensorType):
        return user.op == "prims.welford" and user in loose
    dtype = user.tensor.dtype
    return dtype.is_low_precision or (dtype.is_float and user in loose)


def _is_widening(node: Node) -> bool:
    """fp32 out of 16 bits: half the memory holds the same, and whoever reads it widens it again."""
    if node.op != "prims.convert":
        return False
    return cast(Node, node.args[0]).tensor.dtype.is_low_precision and node.tensor.dtype.is_float


def _is_unpacked(node: Node, stored: Set[Node] = frozenset()) -> bool:
    """On a GPU, a short computation from narrower or smaller values: to read those again is less."""
    is_wide = node.type is not None and node.tensor.device.kind != "cpu" and node.tensor.dtype.bytes >= 4
    if not is_wide or not _is_short(node, node.tensor.numel, stored):
        return False
    wide = node.tensor.dtype.bytes
    sources = [source.tensor.dtype.bytes for source in _large_sources(node, stored)]
    return sum(sources) <= wide and all(narrow < wide for narrow in sources)


def _is_aligned(node: Node, users: list[Node], stored: set[Node], aligned: dict[Node, bool]) -> bool:
    """Only read element by element, so that a loop over it can be split at will; on a GPU in any order."""
    for user in users:
        is_put = kind_of(user.op) == "scatter" and user.args[-1] is node
        is_turned = user.op == "prims.permute" and aligned[user]
        if (is_put or is_turned) and user.tensor.device.kind != "cpu":
            continue
        if kind_of(user.op) != "pointwise" or not (user in stored or aligned[user]):
            return False
    return True


def _joins_rows(join: Node, users: dict[Node, list[Node]]) -> bool:
    """On a GPU: every row of a reduction picks its part, and the rest of the program with it."""
    if join.tensor.device.kind == "cpu":
        return False
    seen, stack = {join}, [join]
    while stack:
        for user in users[stack.pop()]:
            kind = kind_of(user.op)
            if kind == "pointwise":
                stack += {user} - seen
                seen.add(user)
            elif kind != "reduction" or join.args[1] in cast("tuple[int, ...]", user.args[1]):
                return False
    return True


def _readers(users: list[Node], stored: set[Node], readers: dict[Node, frozenset[Node]]) -> frozenset[Node]:
    """The stored nodes whose nests would compute this value."""
    found: frozenset[Node] = frozenset()
    for user in users:
        new = frozenset((user,)) if user in stored or user.op == GET else readers[user]
        found = found | new if found else new
        if len(found) > MANY:
            break
    return found


def _recompute_cheap(graph: Graph, stored: set[Node], shared: set[Node]) -> None:
    """What is a few cheap operations away from stored values need not be stored as well."""
    for node in graph.nodes:
        if node in shared:
            stored.discard(node)
            if not _is_cheap(node, CHEAP_OPS, stored) and not _is_unpacked(node, stored):
                stored.add(node)


def _store_joins(graph: Graph, readers: dict[Node, frozenset[Node]], stored: set[Node]) -> None:
    """A value that several nests compute from larger ones: storing it moves as many bytes as reading those
    again, and those need not live on. A GPU reads small inputs while it waits for what must be waited for."""
    for node in graph.nodes:
        if node not in stored and len(readers.get(node, ())) > 1 and kind_of(node.op) == "pointwise":
            sources = _large_sources(node, stored)
            is_ready = all(s.op == INPUT and s.tensor.bytes.hi <= READY_BYTES for s in sources)
            is_ready &= node.tensor.device.kind != "cpu"
            if sum(s.tensor.dtype.bytes for s in sources) > node.tensor.dtype.bytes and not is_ready:
                stored.add(node)


def _large_sources(node: Node, stored: Set[Node]) -> set[Node]:
    """The values in memory, as large as this one, that computing it reads."""
    found: set[Node] = set()
    seen: set[Node] = set()
    stack = list(node.operands)
    while stack and len(found) < MANY:
        source = stack.pop()
        is_large = isinstance(source.type, TensorType) and source.type.numel is node.tensor.numel
        if source in seen or not is_large:
            continue
        seen.add(source)
        if source in stored or not is_inlinable(source):
            found.add(source)
        else:
            stack.extend(source.operands)
    return found


def _is_cheap(node: Node, budget: int = CHEAP_OPS, stored: Set[Node] = frozenset()) -> bool:
    """Views, constants, and a few cheap operations on loads."""
    return _cost(node, budget, stored) <= budget


def _cost(node: Node, budget: int, stored: Set[Node]) -> int:
    """Operations to recompute a node, up to `budget`; anything not cheap counts as too many."""
    kind = kind_of(node.op)
    if node in stored or kind in (None, "create", "reduction", "scatter") or node.op == "prims.as_strided":
        return 0
    if kind == "view":
        return _cost(cast(Node, node.args[0]), budget, stored)
    if kind == "gather" or node.op not in CHEAP:
        return budget + 1
    spent = 1
    for operand in node.operands:
        if spent > budget:
            break
        spent += _cost(operand, budget - spent, stored)
    return spent


def _store_repeated(graph: Graph, users: dict[Node, list[Node]], stored: set[Node]) -> None:
    """A costly value that would be computed many times over gets memory of its own."""
    for node in graph.nodes:
        source: Node | None = None
        if node.op == "prims.broadcast":
            source = _computed_below(cast(Node, node.args[0]), VIEWS, stored)
            if source.tensor.numel is node.tensor.numel:
                continue
        elif len(users[node]) > 1 and node.op in INLINABLE and _is_read_in_overlaps(node, users[node]):
            source = _computed_below(node, OVERLAPPED, stored)
        if source is not None and is_inlinable(source) and not _is_cheap(source, 1, stored):
            stored.add(source)


def _store_summed(graph: Graph, stored: set[Node]) -> None:
    """On a GPU a single result is one program's work: what is summed, unless cheap, many programs compute
    before, if they can in the kernel that makes what it is computed from."""
    for node in graph.nodes:
        if kind_of(node.op) == "reduction" and (source := cast(Node, node.args[0])) not in stored:
            type, dims = source.tensor, cast("tuple[int, ...]", node.args[1])
            if type.device.kind != "cpu" and len(dims) == type.ndim and type.numel.lo >= MUCH_WORK:
                if kind_of(source.op) == "pointwise" and not _is_cheap(source, CHEAP_OPS, stored):
                    stored.add(source)


def _computed_below(node: Node, views: Set[str], stored: Set[Node]) -> Node:
    """What the views (and conversions to a wider type) show."""
    while (node.op in views or _is_widening(node)) and node not in stored:
        node = cast(Node, node.args[0])
    return node


def _is_read_in_overlaps(node: Node, users: list[Node]) -> bool:
    """Several slices, which together have more elements than there are (pooling)."""
    slices = [user for user in users if user.op == "prims.slice"]
    if len(slices) < 2:
        return False
    read = total(user.tensor.numel for user in slices)
    return (read - node.tensor.numel).lo > 0


def _store_large(graph: Graph, users: dict[Node, list[Node]], stored: set[Node]) -> None:
    """Keep bodies bounded: what would grow too large is stored, and what would be repeated often."""
    size: dict[Node, int] = {}
    depth: dict[Node, int] = {}
    for node in graph.nodes:
        if node.op not in INLINABLE:
            continue
        total = levels = 1
        for operand in node.operands:
            if operand not in stored:
                total, levels = total + size.get(operand, 1), max(levels, 1 + depth.get(operand, 0))
        is_popular = total > FEW_OPS and len(users[node]) > MOST_REPEATS
        if (total > LARGEST_BODY or levels > DEEPEST_BODY or is_popular) and kind_of(node.op) != "view":
            stored.add(node)
        size[node], depth[node] = (1, 0) if node in stored else (total, levels)
