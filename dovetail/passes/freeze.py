"""Work that depends only on weights moves out of the program, into a prologue that runs when they change.

    Graph, steady inputs -> Frozen(prologue Graph, main Graph)

    y = batch_norm(conv(x, w), gamma, beta, mean, var)      prologue:  s = gamma * rsqrt(var + eps)
                                                                       w_folded = w * s
                                                                       b_folded = beta - mean * s
                                                            main:      y = conv(x, w_folded, b_folded)

The prologue's outputs are the last inputs of main. It is run by PyTorch's own kernels, so it costs
no compile time, and it computes folded weights in double precision.
"""
from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Final, cast

import torch

from dovetail.ir.expr import ONE
from dovetail.ir.graph import GET, INPUT, Graph, Node, exprs_in, nodes_in
from dovetail.ir.types import F32, F64, DType, TensorType, Type, bytes_of, tensor_type
from dovetail.ops.build import Build, Value, replace_nodes
from dovetail.ops.registry import is_impure, is_view_call
from dovetail.passes.clean import drop_dead, rewrite
from dovetail.passes.layout import CONV, PACK, SMALLEST_PACKED, channels_last
from dovetail.util.library import has_mkldnn
from dovetail.util.noun import Noun, replace

RECURRENT: Final = "aten.mkldnn_rnn_layer.default"
PACK_RECURRENT: Final = "mkldnn._reorder_mkldnn_rnn_layer_weight.default"
PACK_LINEAR: Final = "mkldnn._reorder_linear_weight.default"
PACKED_LINEAR: Final = "mkldnn._linear_pointwise.default"
PACKS: Final = (PACK, PACK_RECURRENT, PACK_LINEAR)
FEWEST_ROWS: Final = 32
"""Rows of the other matrix from which oneDNN's own layout of a weight pays."""
MOST_PACKED: Final = 1 << 26
"""Bytes of weights of linear layers that a program keeps a second time."""
NORMS: Final = frozenset((
    "aten.native_batch_norm.default", "aten._native_batch_norm_legit_no_training.default",
    "aten._batch_norm_no_update.default",
))  # fmt: skip
"""Called as (x, weight, bias, running mean, running var, ..., eps)."""
LEAST_BYTES: Final = 1 << 16
"""Less than this is not worth watching weights for, unless a convolution gains."""


class Frozen(Noun, eq=False):
    """`watched` are the positions of the original inputs that the prologue takes, in order."""

    prologue: Graph
    main: Graph
    watched: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.prologue}\n{self.main}"


def freeze(graph: Graph, steady: Collection[int]) -> Frozen | None:
    """None where it would not pay. `steady` are positions of inputs that seldom change."""
    weights = {graph.inputs[i] for i in steady}
    folded = fold_norms(graph, weights)
    packed = pack_linear(pack_recurrent(folded, weights), weights)
    changed = channels_last(packed, movable(packed, weights))
    return hoist(changed, weights, gained=changed is not graph)


# -- batch norm after convolution --------------------------------------------------------------------


def fold_norms(graph: Graph, weights: Collection[Node]) -> Graph:
    """Convolutions take over the scale and shift of a batch norm that is their only reader."""
    folds = _find_folds(graph, movable(graph, weights))
    return drop_dead(replace_nodes(graph, _fold, folds)) if folds else graph


def _find_folds(graph: Graph, fixed: set[Node]) -> set[str]:
    """The names of first results of batch norms."""
    users, returned = graph.users(), set(nodes_in(graph.outputs))
    found: set[str] = set()
    for norm in graph.nodes:
        if norm.op not in NORMS or not _is_foldable(norm, fixed):
            continue
        conv = cast(Node, norm.args[0])
        results = [user for user in users[norm] if user.op == GET]
        if users[conv] != [norm] or conv in returned or len(results) != 1 or results != users[norm]:
            continue
        if results[0].args[1] == 0 and results[0].type == conv.type:
            found.add(results[0].name)
    return found


def _is_foldable(norm: Node, fixed: set[Node]) -> bool:
    conv, *vectors = norm.args[:5]
    is_training = norm.op == "aten.native_batch_norm.default" and norm.args[5] is not False
    if is_training or not isinstance(norm.args[-1], float):
        return False
    if not isinstance(conv, Node) or conv.op != CONV or conv.args[6] is not False:  # not transposed
        return False
    dtype = conv.tensor.dtype
    if dtype not in (F32, F64):  # eager rounds between the two in half precision
        return False
    given = [*vectors, *conv.args[1:3]]
    if not isinstance(vectors[2], Node) or not isinstance(vectors[3], Node):
        return False
    return all(x is None or (x in fixed and cast(Node, x).tensor.dtype is dtype) for x in given)


def _fold(b: Build, result: Node) -> Node:
    """The convolution with its new weight and bias, under the name of the batch norm's result."""
    norm = cast(Node, result.args[0])
    conv = cast(Node, norm.args[0])
    b.begin(norm)

    def call(op: str, x: Value, *others: object) -> Value:
        return b.extern(f"aten.{op}", (x, *others), x.type)

    def cast_to(x: Value, dtype: DType) -> Value:
        return b.extern("aten._to_copy.default", (x,), replace(x.type, dtype=dtype), dtype=dtype)

    args = (*norm.args[1:5], *conv.args[1:3])
    wide = [None if arg is None else cast_to(Value(cast(Node, arg), b), F64) for arg in args]
    gamma, beta, mean, var, weight, bias = wide
    assert weight is not None and mean is not None and var is not None
    scale = call("rsqrt.default", call("add.Scalar", var, norm.args[-1]))
    scale = scale if gamma is None else call("mul.Tensor", scale, gamma)
    shift = call("neg.default", mean) if bias is None else call("sub.Tensor", bias, mean)
    shift = call("mul.Tensor", shift, scale)
    shift = shift if beta is None else call("add.Tensor", shift, beta)
    along = tensor_type((*scale.shape, *[ONE] * (weight.ndim - 1)), F64, scale.type.device)
    folded = call("mul.Tensor", weight, b.extern("aten.view.default", (scale, along.shape), along))
    given = (cast_to(x, conv.tensor.dtype).node for x in (folded, shift))
    made = Node(CONV, (conv.args[0], *given, *conv.args[3:]), result.type, result.name, (), conv.loc)
    b.graph.nodes.append(made)
    return made


# -- weights in the library's own layout --------------------------------------------------------------


def pack_recurrent(graph: Graph, weights: Collection[Node]) -> Graph:
    """Layers of RNNs take weights that are laid out once, not in every call."""
    fixed = movable(graph, weights)
    recurrent = [n for n in graph.nodes if n.op == RECURRENT and _has_known_sizes(n.operands[0].type)]
    layers = [n.name for n in recurrent if fixed.issuperset(n.operands[1:3])]
    if not layers or not has_mkldnn("_reorder_mkldnn_rnn_layer_weight"):
        return graph

    def change(b: Build, node: Node) -> Node:
        reverse, hidden, biases, batch_first = (node.args[i] for i in (7, 10, 12, 14))
        options = (hidden, reverse, biases, batch_first, node.operands[0].tensor.shape)
        types = tuple(weight.type for weight in node.operands[1:3])
        pair = b.graph.call(PACK_RECURRENT, (*node.args[1:3], *options), types, loc=node.loc)
        args = (node.args[0], b.graph.get(pair, 0), b.graph.get(pair, 1), *node.args[3:])
        b.graph.nodes.append(Node(RECURRENT, args, node.type, node.name, node.kwargs, node.loc))
        return b.graph.nodes[-1]

    return replace_nodes(graph, change, layers)


def pack_linear(graph: Graph, weights: Collection[Node]) -> Graph:
    """So do linear layers on many rows."""
    fixed, room, layers = movable(graph, weights), MOST_PACKED, set()
    for node in graph.nodes:
        if node.op in ("aten.mm.default", "aten.addmm.default") and _is_packable(node, fixed):
            room -= cast(Node, node.args[-1]).tensor.bytes.value
            if room >= 0:
                layers.add(node.name)
    if not layers or not torch._C._get_mkldnn_enabled() or not has_mkldnn("_linear_pointwise"):
        return graph

    def change(b: Build, node: Node) -> Node:
        *bias, x, weight = cast("list[Node]", node.args)
        columns, rows = weight.tensor.shape
        straight = tensor_type((rows, columns), F32, weight.tensor.device)
        turned = b.extern("aten.t.default", (weight,), replace(straight, stride=weight.tensor.stride[::-1]))
        packed = b.extern(PACK_LINEAR, (turned, x.tensor.shape[0]), straight)
        return b.extern(PACKED_LINEAR, (x, packed, bias[0] if bias else None, "none", (), ""), node.type).node

    return replace_nodes(graph, change, layers)


def _is_packable(node: Node, fixed: set[Node]) -> bool:
    *bias, x, weight = cast("list[Node]", node.args)
    if weight not in fixed or x in fixed or node.kwargs or not _has_known_sizes(x.type):
        return False
    if bias and bias[0].tensor.shape != weight.tensor.shape[1:]:
        return False
    is_float = x.tensor.dtype is F32 and x.tensor.is_contiguous and node.tensor.is_contiguous
    is_large = x.tensor.shape[0].value >= FEWEST_ROWS and weight.tensor.numel.value >= SMALLEST_PACKED
    return is_float and is_large


# -- what moves --------------------------------------------------------------------------------------


def movable(graph: Graph, weights: Collection[Node]) -> set[Node]:
    """Everything that depends on weights and on nothing else, weights included."""
    found = set(weights)
    for node in graph.nodes:
        if node.operands and found.issuperset(node.operands) and _is_static(node):
            if node.op in PACKS or not is_impure(node):
                found.add(node)
    return found


def _is_static(node: Node) -> bool:
    """Tensors of known sizes, from arguments that mention no symbol."""
    given = (*node.args, *(value for _, value in node.kwargs))
    return _has_known_sizes(node.type) and not any(exprs_in(given))


@lru_cache(4096)  # types are few, and asked for often
def _has_known_sizes(type: Type) -> bool:
    if isinstance(type, tuple):
        return all(map(_has_known_sizes, type))
    return isinstance(type, TensorType) and not any(exprs_in(type))


def hoist(graph: Graph, weights: Collection[Node], gained: bool) -> Frozen | None:
    fixed = movable(graph, weights)
    staying = _staying(graph, fixed, _grown(graph, weights, fixed))
    read = {operand for node in staying for operand in node.operands} | set(nodes_in(graph.outputs))
    frontier = [n for n in graph.nodes if n in fixed and n not in staying and n in read]
    made = sum(bytes_of(node.type) for node in fixed.difference(graph.inputs) if node not in staying)
    if not frontier or (made < LEAST_BYTES and not gained):
        return None
    early = tuple(node for node in graph.nodes if node in fixed)  # what main makes anew may be read here too
    before = drop_dead(Graph(f"{graph.name}_prologue", graph.inputs, early, tuple(frontier)))
    used = {operand for node in before.nodes for operand in node.operands}
    watched = tuple(i for i, node in enumerate(graph.inputs) if node in used)
    prologue = Graph(before.name, tuple(graph.inputs[i] for i in watched), before.nodes, before.outputs)
    given = {node: Node(INPUT, (), node.type, node.name, loc=node.loc) for node in frontier}
    late = replace(graph, nodes=tuple(node for node in graph.nodes if node in staying))
    main = rewrite(late, lambda node: node, dict(given))
    inputs = (*graph.inputs, *given.values())
    return Frozen(prologue, replace(main, inputs=inputs, updates=graph.updates), watched)


def _staying(graph: Graph, fixed: set[Node], grown: set[Node]) -> set[Node]:
    """Nodes of main: what depends on more than weights; and of weights, views and what is larger than
    they are, where such nodes read it: cheaper to make anew than to keep. What a library lays out never."""
    staying: set[Node] = set()
    needed = set(nodes_in(graph.outputs))
    for node in reversed(graph.nodes):
        is_cheap = node in grown or is_view_call(node.op)
        if node not in fixed or (node in needed and is_cheap and node.op not in PACKS):
            staying.add(node)
            needed.update(node.operands)
    return staying


def _grown(graph: Graph, weights: Collection[Node], fixed: set[Node]) -> set[Node]:
    """Values that take more memory than all weights they are made of: repeated, or of a wider type."""
    origins: dict[Node, frozenset[Node]] = {node: frozenset((node,)) for node in weights}
    grown: set[Node] = set()
    for node in graph.nodes:
        if node in fixed:
            origins[node] = frozenset().union(*(origins[operand] for operand in node.operands))
            if bytes_of(node.type) > sum(bytes_of(each.type) for each in origins[node]):
                grown.add(node)
    return grown
