"""Convolutions run channels-last; over weights that stay, on weights laid out once for the library.

    Graph -> Graph, both of ATen ops
    y = convolution(x, w, b)   ->   w_packed = mkldnn._reorder_convolution_weight(w, ...)       steady
    z = relu(y)                     y = mkldnn._convolution_pointwise(x', w_packed, b, ...)     {C last}
                                    z = relu(y)                                                 {C last}

Whatever computes element by element between two convolutions keeps that layout; a value that another
library call or the caller reads is put back into eager's. oneDNN's own blocked weights pay for large
or grouped filters; for small ones the lookup costs more than they save, and the plain call gets
weights that are channels-last too. Activations stay in our own kernels: oneDNN's relu makes 0 of NaN,
and fusing it saves less than a hundredth.

In training the weights change with every step, and the plain calls, forward and backward, turn them
around each time. That pays where convolutions are grouped, which oneDNN does by copying patches
otherwise, and where there are few weights to turn. On a GPU, where nothing is known to stay, every
convolution gains, and the weights are turned by kernels of ours, as they are cast or by themselves.
"""
from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final, cast

import torch

from dovetail.ir.expr import ONE, Expr, mul
from dovetail.ir.graph import GET, Arg, Graph, GraphBuilder, Node, moved_over, nodes_in, swapped
from dovetail.ir.types import BF16, F16, F32, DType, TensorType, Type
from dovetail.ops.registry import DECOMPOSITIONS
from dovetail.util.library import has_mkldnn

CONV: Final = "aten.convolution.default"
PACK: Final = "mkldnn._reorder_convolution_weight.default"
PACKED_CONV: Final = "mkldnn._convolution_pointwise.default"
CONV_BACKWARD: Final = "aten.convolution_backward.default"
SMALLEST_PACKED: Final = 1 << 16
"""Weights of an ungrouped filter from which oneDNN's own layout pays."""
FOLLOWS: Final = frozenset((
    "aten.max_pool2d_with_indices.default", "aten.avg_pool2d.default", GET,
    "aten.max_pool2d_with_indices_backward.default", "aten.avg_pool2d_backward.default",
))  # fmt: skip
"""Library calls whose results are laid out as their operand is."""
RESIZES: Final = FOLLOWS | frozenset((
    "aten.cat.default", "aten.slice.Tensor", "aten.constant_pad_nd.default",
    "aten.upsample_nearest2d.default", "aten.upsample_bilinear2d.default",
))  # fmt: skip
"""Ops that make images of other images."""
AGAINST: Final = frozenset((
    "aten.native_group_norm.default",
    "aten._fft_r2c.default", "aten._fft_c2r.default", "aten._fft_c2c.default",
))  # fmt: skip
"""Ops that lose more on scattered channels than convolutions gain."""
LAID: Final[dict[str, tuple[DType, ...]]] = {"cpu": (F32,), "cuda": (F32, F16, BF16)}
"""Types of images that libraries convolve faster channels-last."""
EXACT: Final = frozenset(("aten.as_strided.default", "aten.as_strided_scatter.default"))
"""Ops of ours whose meaning depends on memory."""


def channels_last(graph: Graph, fixed: set[Node]) -> Graph:
    """`fixed` are the values that weights determine. The same graph where no convolution qualifies."""
    convs = {node for node in graph.nodes if _is_eligible(node, fixed)}
    is_there = has_mkldnn("_reorder_convolution_weight", "_convolution_pointwise")
    if not convs or not is_there or not _may_move(graph):
        return graph
    return _Layout(graph, convs, fixed).run()


def channels_last_where_it_pays(graph: Graph) -> Graph:
    """The same where weights may change with every call: for a joint graph, and on a GPU."""
    convs = {node for node in graph.nodes if _is_plain(node)}
    forward = [node for node in convs if node.op == CONV]
    gaining = [_tensor(node, 0) for node in forward if _gains(node)]
    turned = [_tensor(node, 1) for node in forward if not is_laid(_tensor(node, 1))]
    gain = sum(type.bytes.value for type in gaining)
    if gain <= sum(type.bytes.value for type in turned) or not _may_move(graph):
        return graph
    return _Layout(graph, convs, set()).run()


def _gains(node: Node) -> bool:
    """Its library call is faster on channels-last images that it does not have yet. (On images of colours in
    fp32, cuDNN may be exact only if they are not.)"""
    images, groups = _tensor(node, 0), cast(int, node.args[8])
    if images.device.kind != "cuda":
        return groups > 1
    return groups == 1 and not is_laid(images) and (images.shape[1].value > 3 or images.dtype is not F32)


def _may_move(graph: Graph) -> bool:
    return torch._C._get_mkldnn_enabled() and not any(node.op in AGAINST for node in graph.nodes)


def _is_eligible(node: Node, fixed: set[Node]) -> bool:
    if node.op != CONV:
        return False
    x, weight, bias = node.args[:3]
    is_given = weight in fixed and x not in fixed and (bias is None or bias in fixed)
    return is_given and _is_plain(node)


def _is_plain(node: Node) -> bool:
    """A convolution of images, or its gradient, of known sizes and not transposed. For gradients of a 1 by 1
    filter with a stride over fewer channels than a vector has, oneDNN writes past its memory."""
    if node.op not in (CONV, CONV_BACKWARD):
        return False
    operands, transposed = (node.args[:2], 6) if node.op == CONV else (node.args[:3], 7)
    types = [cast(Node, arg).tensor for arg in operands]
    _, channels, *window = types[-1].shape
    if node.op == CONV_BACKWARD and window == [ONE, ONE] and node.args[4] != (1, 1) and 1 < channels.lo < 16:
        return False
    is_known = all(size.is_const and size.value > 0 for each in types for size in each.shape)
    are_images = all(each.ndim == 4 and each.dtype in LAID[each.device.kind] for each in types)
    is_known = is_known and isinstance(node.args[transposed + 2], int)  # so many groups
    return node.args[transposed] is False and is_known and are_images


def _tensor(node: Node, position: int) -> TensorType:
    return cast(Node, node.args[position]).tensor


def laid(type: TensorType) -> TensorType:
    """The same with channels innermost; as it is where only strides of single elements would change."""
    return type if is_laid(type) else _innermost_channels(type)


def _innermost_channels(type: TensorType) -> TensorType:
    n, c, h, w = type.shape
    row = mul(c, w)
    return TensorType(type.shape, (mul(row, h), ONE, row, c), type.dtype, type.device)


def is_laid(type: Type) -> bool:
    return isinstance(type, TensorType) and type.ndim == 4 and type.is_laid_as(_innermost_channels(type))


class _Layout:
    """The walk over one graph. `env` has the new node for each old one, `eager` those with other strides
    than eager's, with eager's type."""

    def __init__(self, graph: Graph, convs: set[Node], fixed: set[Node]) -> None:
        self.graph, self.convs, self.fixed = graph, convs, fixed
        self.builder = GraphBuilder.after(graph)
        self.env: dict[Node, Node] = {}
        self.eager: dict[Node, TensorType] = {}
        self.copies: dict[tuple[Node, TensorType], Node] = {}

    def run(self) -> Graph:
        for node in self.graph.nodes:
            if node in self.convs and node.op == CONV_BACKWARD:
                self.convolve_back(node)
            elif node in self.convs:
                self.convolve(node)
            elif node.op in EXACT or not (node.op in DECOMPOSITIONS or node.op in FOLLOWS):
                self.keep(node, self.moved(node, self.restored), node.type)
            else:
                self.follow(node)
        found = {node: self.restored(node) for node in nodes_in(self.graph.outputs)}
        return self.builder.finish(swapped(self.graph.outputs, found))

    def keep(self, node: Node, moved: Node, type: Type) -> None:
        """Append the node's successor, and note where its layout differs from eager's."""
        self.builder.nodes.append(moved)
        self.env[node] = moved
        if isinstance(type, TensorType) and isinstance(node.type, TensorType) and type != node.type:
            self.eager[moved] = node.type

    def moved(self, node: Node, find: Callable[[Node], Node], type: Type | None = None) -> Node:
        moved = moved_over(node, {operand: find(operand) for operand in node.operands})
        return moved if type is None else replace(moved, type=type)

    def current(self, node: Node) -> Node:
        return self.env.get(node, node)

    def restored(self, node: Node) -> Node:
        """The value in eager's layout."""
        now = self.current(node)
        return self.copied(now, self.eager[now]) if now in self.eager else now

    def copied(self, node: Node, type: TensorType) -> Node:
        if (node, type) not in self.copies:
            name = f"{node.name}_laid_out"
            self.copies[node, type] = self.builder.call("prims.copy", (node,), type, name=name, loc=node.loc)
        return self.copies[node, type]

    # -- kinds of nodes

    def follow(self, node: Node) -> None:
        """The result is laid out as an operand of its shape is, or that it was made of."""
        shapes = {now.tensor.shape for now in map(self.current, node.operands) if now in self.eager}
        resizes = node.op in RESIZES and bool(shapes)
        if node.op == GET:
            source = self.current(cast(Node, node.args[0]))
            type = cast("tuple[Type, ...]", source.type)[cast(int, node.args[1])]
        else:
            type = _relaid(node.type, shapes, resizes)
        self.keep(node, self.moved(node, self.current, type), type)

    def convolve(self, node: Node) -> None:
        x, weight = self.laid_out(node.args[0]), self.current(cast(Node, node.args[1]))
        stride, padding, dilation, groups = node.args[3], node.args[4], node.args[5], cast(int, node.args[8])
        (bias,) = swapped(node.args[2:3], self.env)
        type = laid(node.tensor)
        is_fixed, is_small = node.args[1] in self.fixed, weight.tensor.numel.value < SMALLEST_PACKED
        filters = self.copied_weight(weight) if is_fixed else self.turned(node.args[1])
        if not is_fixed or groups == 1 and is_small:
            made = Node(CONV, (x, filters, bias, *node.args[3:]), type, node.name, (), node.loc)
        else:
            geometry = (padding, stride, dilation, groups)
            packing: tuple[Arg, ...] = (weight if groups == 1 else filters, *geometry, x.tensor.shape)
            packed = self.builder.call(PACK, packing, weight.type, name=f"{node.name}_packed", loc=node.loc)
            args = (x, packed, bias, *geometry, "none", (), "")
            made = Node(PACKED_CONV, args, type, node.name, (), node.loc)
        self.keep(node, made, type)

    def convolve_back(self, node: Node) -> None:
        """The gradients of images and weights come out as the images are laid out."""
        gradient, x = self.laid_out(node.args[0]), self.laid_out(node.args[1])
        weight, rest = self.turned(node.args[2]), swapped(node.args[3:], self.env)
        kinds = cast("tuple[Type, ...]", node.type)
        types = tuple(laid(t) if isinstance(t, TensorType) and t.ndim == 4 else t for t in kinds)
        made = Node(CONV_BACKWARD, (gradient, x, weight, *rest), types, node.name, node.kwargs, node.loc)
        self.keep(node, made, types)

    def laid_out(self, arg: Arg) -> Node:
        now = self.current(cast(Node, arg))
        return now if is_laid(now.type) else self.copied(now, laid(now.tensor))

    def turned(self, weight: Arg) -> Node:
        """Weights that may change with every call."""
        now = self.current(cast(Node, weight))
        return self.laid_out(now) if now.tensor.device.kind == "cuda" else now

    def copied_weight(self, weight: Node) -> Node:
        """Channels-last, by an op that the prologue can run."""
        kwargs: tuple[tuple[str, Arg], ...] = (("memory_format", "torch.channels_last"),)
        name, type = f"{weight.name}_laid_out", laid(weight.tensor)
        return self.builder.call("aten.clone.default", (weight,), type, kwargs, name, weight.loc)


def _relaid(type: Type, shapes: Collection[tuple[Expr, ...]], resizes: bool) -> Type:
    if isinstance(type, tuple):
        return tuple(_relaid(each, shapes, resizes) for each in type)
    if not isinstance(type, TensorType) or type.ndim != 4 or not (resizes or type.shape in shapes):
        return type
    return type if type.dtype.kind == "complex" else laid(type)  # pairs, of which no kernel makes a copy
