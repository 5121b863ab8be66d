"""Complex numbers as pairs of reals.

    z = aten.mul.Tensor(x: c64[8], y: c64[8])  ->  x_re, x_im, y_re, y_im     views of the memory of x and y
                                                   z_re = x_re * y_re - x_im * y_im
                                                   z_im = x_re * y_im + x_im * y_re
                                                   z = prims.view_as_complex(z_re and z_im side by side)

Who reads z takes its parts; only for a library call or the caller it is made. Views of what lies in memory
stay views. The formulas are those of eager's kernels, also for what is infinite or not a number.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, Final, TypeAlias, cast

from dovetail.ir.graph import Arg, Graph, Node
from dovetail.ir.types import DType, TensorType, Type
from dovetail.ops.build import Build, Value, compute_dtype, promoted, replace_nodes, wrap
from dovetail.ops.registry import Declined, decline_if, is_impure, is_view_call
from dovetail.util.library import find_op

Pair: TypeAlias = "tuple[Any, Any]"
"""The real and the imaginary part: Values or numbers."""

PARTWISE: Final = frozenset(
    "alias detach lift lift_fresh view _unsafe_view _reshape_alias squeeze unsqueeze expand permute t "
    "transpose slice select clone _to_copy copy cat stack constant_pad_nd flip roll repeat triu tril "
    "slice_scatter select_scatter slice_backward select_backward zeros zeros_like new_zeros zero ones "
    "_efficientzerotensor ones_like new_ones full full_like new_full scalar_tensor fill empty empty_like "
    "new_empty empty_strided where masked_fill index index_select add sub rsub neg _neg_view sum mean".split()
)
"""Does to complex numbers what it does to each of their parts."""
VALUES: Final = frozenset("self other tensors value values fill_value src s".split())
"""Arguments of those that have an imaginary part of 0 where they are real."""


def is_complex(type: Type) -> bool:
    return isinstance(type, TensorType) and type.dtype.kind == "complex"


def as_pairs(graph: Graph) -> Graph:
    if not any([is_complex(node.type) for node in (*graph.inputs, *graph.nodes)]):
        return graph
    return replace_nodes(graph, _Pairs().change).pruned(is_impure)


class _Pairs:
    """The walk over one graph: the parts of the complex values so far."""

    def __init__(self) -> None:
        self.known: dict[Node, Pair] = {}

    def change(self, b: Build, node: Node) -> Arg:
        if not node.op.startswith("aten.") or not any([is_complex(x.type) for x in (node, *node.operands)]):
            return None
        name = node.op.split(".")[1]
        rule = self.by_parts if name in PARTWISE else FORMS.get(name) or self.by_formula
        try:
            return b.graph.settle(rule(b, node), node, node.type, node.name)
        except Declined:
            return None

    def parts(self, b: Build, node: Node) -> Pair:
        if node not in self.known:
            both = side_by_side(b, node)
            sides = (b.slice(both, both.ndim - 1, k, k + 1) for k in (0, 1))
            re, im = (b.reshape(side, node.tensor.shape) for side in sides)
            self.known[node] = re, im
        return self.known[node]

    def join(self, b: Build, pair: Pair, type: TensorType) -> Node:
        spread = [x if isinstance(x, Value) else b.full((), x, type.dtype.real, type.device) for x in pair]
        re, im = (b.expand(x.to(type.dtype.real), type.shape) for x in spread)
        both = b.cat([b.unsqueeze(x, (type.ndim,)) for x in (re, im)], type.ndim)
        node = b.graph.call("prims.view_as_complex", (both.node,), type, name=b.stem, loc=b.loc)
        self.known[node] = re, im
        return node

    def by_parts(self, b: Build, node: Node) -> Node:
        """The same op on each of the parts."""
        type, types = node.type, [x.type for x in node.operands]
        devices = {x.device for x in types if isinstance(x, TensorType)}
        if not isinstance(type, TensorType) or not is_complex(type) or not devices <= {type.device}:
            raise Declined
        kind = TensorType(type.shape, type.stride, type.dtype.real, type.device)
        names = [argument.name for argument in find_op(node.op)._schema.arguments]
        made = []
        for k, op in enumerate((node.op, node.op.replace("ones", "zeros"))):
            args = [self.part(b, k, arg, name in VALUES) for name, arg in zip(names, node.args)]
            kwargs = [(name, self.part(b, k, arg, name in VALUES)) for name, arg in node.kwargs]
            stem = f"{node.name}_{'im' if k else 're'}"
            made.append(Value(b.graph.call(op, args, kind, kwargs, stem, node.loc), b))
        pair = made[0], made[1]
        if not is_view_call(node.op) or node.operands[0].op == "prims.view_as_complex":
            return self.join(b, pair, type)
        b.graph.nodes.append(node)  # for who reads what lies in memory
        self.known[node] = pair
        return node

    def part(self, b: Build, k: int, arg: Arg, is_value: bool) -> Arg:
        if isinstance(arg, tuple):
            return tuple(self.part(b, k, item, is_value) for item in arg)
        if isinstance(arg, DType):
            return arg.real
        if isinstance(arg, complex):
            decline_if(not is_value)
            return arg.imag if k else arg.real
        if isinstance(arg, Node) and is_complex(arg.type):
            return cast(Node, self.parts(b, arg)[k].node)
        if not is_value or not k:
            return arg
        if isinstance(arg, Node) and isinstance(arg.type, TensorType):
            return b.graph.call("aten.zeros_like.default", (arg,), arg.type, loc=b.loc)
        return 0

    def by_formula(self, b: Build, node: Node) -> Node:
        formula = FORMULAS.get(node.op.split(".")[1])
        if formula is None or node.kwargs:
            raise Declined
        dtype = compute_dtype(promoted([cast(Any, wrap(arg, b)) for arg in node.args]).real)

        def pair(arg: Any) -> Pair:
            if isinstance(arg, (int, float, complex)):
                return float(arg.real), float(arg.imag)
            if isinstance(arg, Node) and is_complex(arg.type):
                re, im = self.parts(b, arg)
                return re.to(dtype), im.to(dtype)
            return b.value(cast(Any, wrap(arg, b)), dtype), 0.0

        result = formula(b, *map(pair, node.args))
        if isinstance(result, tuple):
            return self.join(b, result, node.tensor)
        return b.expand(result.to(node.tensor.dtype), node.tensor.shape).node


def side_by_side(b: Build, node: Node) -> Value:
    is_made = node.op == "prims.view_as_complex"
    return Value(cast(Node, node.args[0]), b) if is_made else b.prim("view_as_real", node)


FORMS: Final[dict[str, Callable[[Build, Node], Node]]] = {
    "view_as_real": lambda b, node: b.prim("copy", side_by_side(b, node.operands[0])).node,
    "view_as_complex": lambda b, node: b.prim("view_as_complex", *node.args).node,
}


# -- formulas --------------------------------------------------------------------------------------


def product(b: Build, x: Pair, y: Pair) -> Pair:
    return x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]


def quotient(b: Build, x: Pair, y: Pair) -> Pair:
    """By the larger part of y, so that nothing overflows on the way. A zero counts as positive."""
    c, d = (v if isinstance(v, Value) else b.value(v, b.out.dtype.real) for v in y)
    if y[1] == 0.0:
        scale = 1.0 / (c + 0.0)
        return (x[0] + x[1] * 0.0) * scale, (x[1] - x[0] * 0.0) * scale
    is_wide = b.call("abs", c) >= b.call("abs", d)
    large, small = b.where(is_wide, c, d), b.where(is_wide, d, c)
    first, second = b.where(is_wide, *x, c.dtype), b.where(is_wide, x[1], x[0], c.dtype)
    ratio = b.where(large.eq(0.0), 0.0, small / large)
    scale, turned = 1.0 / (large + small * ratio + 0.0), second - first * ratio
    return (first + second * ratio) * scale, b.where(is_wide, turned, -turned) * scale


def direction(b: Build, x: Pair) -> Pair:
    size = b.call("hypot", *x)
    re, im = (b.where(size.eq(0.0), 0.0, side / size) for side in x)
    return re, im


def exponential(b: Build, x: Pair) -> Pair:
    re, im = polar(b, b.call("exp", x[0]), x[1])
    return re, b.where(x[1].eq(0.0), x[1], im)  # also of what is infinite


def polar(b: Build, size: Value, angle: Value) -> Pair:
    return size * b.call("cos", angle), size * b.call("sin", angle)


def power(b: Build, x: Pair, exponent: Pair) -> Pair:
    """Small exponents are products."""
    decline_if(exponent not in [(float(n), 0.0) for n in range(1, 9)])
    return reduce(partial(product, b), [x] * int(exponent[0]))


FORMULAS: Final[dict[str, Callable[..., Value | Pair]]] = {
    "mul": product,
    "div": quotient,
    "reciprocal": lambda b, x: quotient(b, (1.0, 0.0), x),
    "pow": power,
    "abs": lambda b, x: b.call("hypot", *x),
    "sgn": direction,
    "angle": lambda b, x: b.call("atan2", x[1], x[0]),
    "exp": exponential,
    "log": lambda b, x: (b.call("log", b.call("hypot", *x)), b.call("atan2", x[1], x[0])),
    **dict.fromkeys(("_conj", "_conj_physical", "conj_physical"), lambda b, x: (x[0], -x[1])),
    "polar": lambda b, size, angle: polar(b, size[0], angle[0]),
    "complex": lambda b, re, im: (re[0], im[0]),
    "eq": lambda b, x, y: b.call("eq", x[0], y[0]) & b.call("eq", x[1], y[1]),
    "ne": lambda b, x, y: b.call("ne", x[0], y[0]) | b.call("ne", x[1], y[1]),
}
"""From the pairs of the arguments to the result or its pair."""
