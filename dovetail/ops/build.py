"""Writing decompositions: values with operators, appended to a graph as prims.

    def silu(b, x):                       graph gets
        x = b.operand(x)                      silu_convert = prims.convert(x, f32)
        return x * b.sigmoid(x)               silu_sigmoid = prims.sigmoid(silu_convert)
                                              silu         = prims.mul(silu_convert, silu_sigmoid)

Types come from the prims' own rules, so nothing here calls torch. Operators broadcast and take
Python numbers; they never promote (a decomposition says where it converts).
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from math import frexp
from typing import Any, TypeAlias, cast

import torch

from dovetail.errors import VerifyError
from dovetail.ir import types
from dovetail.ir.expr import ONE, ZERO, Expr, as_expr, mul
from dovetail.ir.graph import GET, Arg, Graph, GraphBuilder, Node, moved_over, swapped
from dovetail.ir.types import BOOL, CPU, Device, DType, ScalarType, TensorType, Type, contiguous_stride
from dovetail.ops.prims import PRIMS, Result
from dovetail.ops.registry import Declined
from dovetail.util.loc import Loc

Number: TypeAlias = "int | float | bool | Expr | Node"
"""A constant, a size, or a Python number that is an input of the graph."""
Operand: TypeAlias = "Value | Number"
Maybe: TypeAlias = "Value | None"
Results: TypeAlias = "tuple[Maybe, ...]"
"""Of an op with several; None for one that eager does not give."""
Dims: TypeAlias = "Sequence[int]"


def _operator(prim: str, is_swapped: bool = False) -> Callable[[Value, Operand], Value]:
    def method(self: Value, other: Operand) -> Value:
        return self.b.call(prim, other, self) if is_swapped else self.b.call(prim, self, other)

    return method


class Value:
    """A tensor node under construction."""

    __slots__ = ("node", "b")

    def __init__(self, node: Node, b: Build) -> None:
        self.node, self.b = node, b

    @property
    def type(self) -> TensorType:
        return self.node.tensor

    @property
    def dtype(self) -> DType:
        return self.node.tensor.dtype

    @property
    def shape(self) -> tuple[Expr, ...]:
        return self.node.tensor.shape

    @property
    def ndim(self) -> int:
        return len(self.node.tensor.shape)

    __add__ = __radd__ = _operator("add")
    __mul__ = __rmul__ = _operator("mul")
    __sub__, __rsub__ = _operator("sub"), _operator("sub", is_swapped=True)
    __truediv__, __rtruediv__ = _operator("div"), _operator("div", is_swapped=True)
    __lt__, __le__, __gt__, __ge__ = _operator("lt"), _operator("le"), _operator("gt"), _operator("ge")
    __and__, __or__ = _operator("logical_and"), _operator("logical_or")
    eq, ne = _operator("eq"), _operator("ne")

    def __neg__(self) -> Value:
        return self.b.call("neg", self)

    def __invert__(self) -> Value:
        return self.b.call("logical_not", self)

    def to(self, dtype: DType) -> Value:
        return self if dtype is self.dtype else self.b.prim("convert", self, dtype)

    def __repr__(self) -> str:
        return f"{self.node.name}: {self.node.type}"


class Build:
    """Appends prims for one ATen node at a time. `out` is the type eager gives its result."""

    def __init__(self, graph: GraphBuilder) -> None:
        self.graph = graph
        self.stem, self.loc, self.out_type = "", cast("Loc | None", None), cast(Type, None)
        self.feeds_pointwise, self.start = False, 0
        self.used: frozenset[int] = frozenset()

    def begin(self, node: Node, feeds_pointwise: bool = False, used: frozenset[int] = frozenset()) -> None:
        """The node being rewritten, whether its result goes on into pointwise arithmetic, and which of
        its results, if it has several, are used at all."""
        self.stem, self.loc, self.out_type = node.name, node.loc, node.type
        self.feeds_pointwise, self.used, self.has_looked = feeds_pointwise, used, False
        self.start = len(self.graph.nodes)

    def maker(self, value: Value) -> Node:
        """What computes an operand. Who has looked at it decides for this operand alone."""
        self.has_looked = True
        return value.node

    @property
    def out(self) -> TensorType:
        """The result's type; of an op with several results, the first one's."""
        type = self.out_type
        while isinstance(type, tuple):
            type = next(item for item in type if item is not None)
        assert isinstance(type, TensorType)
        return type

    @property
    def outs(self) -> tuple[TensorType | None, ...]:
        assert isinstance(self.out_type, tuple)
        return cast("tuple[TensorType | None, ...]", self.out_type)

    def results(self, *values: Value) -> Results:
        """Several results in eager's types."""
        return tuple(None if kind is None else value.to(kind.dtype) for value, kind in zip(values, self.outs))

    # -- prims -------------------------------------------------------------------------------------

    def prim(self, name: str, *args: Operand | Arg | tuple[object, ...]) -> Value:
        """One prim with exactly these arguments."""
        return Value(self._emit(name, args), self)

    def prims(self, name: str, *args: Operand | Arg) -> tuple[Value, ...]:
        """One prim with several results."""
        node = self._emit(name, args)
        assert isinstance(node.type, tuple)
        return tuple(Value(self.graph.get(node, i), self) for i in range(len(node.type)))

    def _emit(self, name: str, args: tuple[object, ...]) -> Node:
        plain = cast("tuple[Arg, ...]", unwrap(args))
        op = f"prims.{name}"
        result = PRIMS[op].rule(plain)
        device = self._device(plain)
        if isinstance(result[0], tuple) and len(result) == 2 and isinstance(result[1], DType):
            type: Type = self._typed(result, plain, device)
        else:
            type = tuple(self._typed(each, plain, device) for each in result)
        return self.graph.call(op, plain, type, name=f"{self.stem}_{name}", loc=self.loc)

    def _device(self, args: tuple[Arg, ...]) -> Device:
        """Where the result lives: an operand's device (one with dimensions first), or a device argument."""
        found: Device | None = None
        for node in [node for arg in args for node in (arg if isinstance(arg, tuple) else (arg,))]:
            if isinstance(node, Node) and isinstance(node.type, TensorType):
                found = node.type.device
                if found.kind != "cpu":
                    break
            elif isinstance(node, Device):
                found = node
        return found or CPU

    def _typed(self, result: Result, args: tuple[Arg, ...], device: Device) -> TensorType:
        """The memory order eager would choose where it is known, else an operand's, else row-major."""
        shape, dtype = result
        types = (self.out_type, *[arg.type for arg in args if isinstance(arg, Node)])
        alike = (type for type in types if isinstance(type, TensorType) and type.shape == shape)
        stride = next((type.stride for type in alike if is_dense(type)), None)
        return TensorType(shape, contiguous_stride(shape) if stride is None else stride, dtype, device)

    def call(self, name: str, *operands: Operand) -> Value:
        """A pointwise prim: operands are broadcast to one shape; their types must already agree."""
        if name == "div" and isinstance(by := operands[1], float):  # by 2**k, as * 2**-k to the last bit
            if abs(frexp(by)[0]) == 0.5 and 1e-9 < abs(by) < 1e9:
                name, operands = "mul", (operands[0], 1.0 / by)
        values = [x for x in operands if isinstance(x, Value)]
        shape = common_shape([x.shape for x in values])
        spread = [self.expand(x, shape) if isinstance(x, Value) else x for x in operands]
        typed = [x for x in values if x.dtype is not BOOL] if name == "where" else values
        if name not in ("convert", "bitcast") and len({x.dtype for x in typed}) > 1:
            raise VerifyError(self.loc, stage="decompose", detail=f"{self.stem}: {name} of {values}")
        return self.prim(name, *spread)

    def where(self, condition: Value, a: Operand, b: Operand, dtype: DType | None = None) -> Value:
        """Numbers take the type of the other arm, or `dtype`."""
        if not isinstance(a, Value) and not isinstance(b, Value):
            assert dtype is not None
            a = self.full(condition.shape, a, dtype, condition.type.device)
        return self.call("where", condition, a, b)

    # -- operands and results ----------------------------------------------------------------------

    def operands(self, *args: Operand, dtype: DType | None = None) -> tuple[Any, ...]:
        """Tensors converted to the type in which eager computes; numbers as they are."""
        dtype = dtype or (promoted(args) if self.out.dtype is BOOL else self.out.dtype)
        compute = compute_dtype(dtype)
        return tuple(x.to(compute) if isinstance(x, Value) else number(x, compute) for x in args)

    def value(self, x: Operand, dtype: DType | None = None) -> Value:
        """One tensor operand in the compute type."""
        got = self.operands(x, dtype=dtype)[0]
        if isinstance(got, Value):
            return got
        kind = compute_dtype(dtype or self.out.dtype)
        return self.full((), got, kind, self.out.device)

    # -- views -------------------------------------------------------------------------------------

    def expand(self, x: Value, shape: Sequence[Expr]) -> Value:
        """Right-aligned broadcasting, as in eager."""
        if tuple(shape) == x.shape:
            return x
        lead = len(shape) - x.ndim
        kept = [d for d in range(x.ndim) if x.shape[d] is not ONE or shape[d + lead] is ONE]
        if len(kept) < x.ndim:
            x = self.reshape(x, [x.shape[d] for d in kept])
        return self.broadcast(x, shape, [d + lead for d in kept])

    def broadcast(self, x: Value, shape: Sequence[Expr | int], dims: Dims) -> Value:
        """Dimension i of x becomes dimension dims[i]; the others are repeated."""
        wanted = tuple(as_expr(s) for s in shape)
        if wanted == x.shape and list(dims) == list(range(x.ndim)):
            return x
        return self.prim("broadcast", x, wanted, tuple(dims))

    def reshape(self, x: Value, shape: Sequence[Expr | int]) -> Value:
        """Of what a reshape shows, if that is of this op: then it holds for all like it."""
        wanted = tuple(as_expr(s) for s in shape)
        if x.node.op == "prims.reshape" and x.node in self.graph.nodes[self.start :]:
            x = Value(cast(Node, x.node.args[0]), self)
        return x if wanted == x.shape else self.prim("reshape", x, wanted)

    def permute(self, x: Value, dims: Dims) -> Value:
        if list(dims) == list(range(x.ndim)):
            return x
        shape, stride = (tuple(each[d] for d in dims) for each in (x.shape, x.type.stride))
        type = TensorType(shape, stride, x.dtype, x.type.device)
        args, name = (x.node, tuple(dims)), f"{self.stem}_permute"
        return Value(self.graph.call("prims.permute", args, type, name=name, loc=self.loc), self)

    def slice(self, x: Value, dim: int, start: Expr | int, stop: Expr | int, step: int = 1) -> Value:
        first, last = as_expr(start), as_expr(stop)
        if first is ZERO and last is x.shape[dim] and step == 1:
            return x
        return self.prim("slice", x, dim, first, last, step)

    def pad(self, x: Value, dim: int, before: Expr | int, after: Expr | int, fill: Number) -> Value:
        """Along one dimension; neither size is negative."""
        sides = ([as_expr(size if d == dim else 0) for d in range(x.ndim)] for size in (before, after))
        return self.prim("pad", x, *map(tuple, sides), fill)

    def unsqueeze(self, x: Value, dims: Dims) -> Value:
        """Size-1 dimensions at these positions of the result."""
        rest = iter(x.shape)
        return self.reshape(x, [ONE if d in dims else next(rest) for d in range(x.ndim + len(dims))])

    # -- reductions and creation -------------------------------------------------------------------

    def reduce(self, name: str, x: Value, dims: Dims, keepdim: bool = False) -> Value:
        """Reduce over dims. Over no dims the value itself is the result."""
        if not dims:
            return x
        result = self.prim(name, x, tuple(dims))
        return self.unsqueeze(result, tuple(sorted(dims))) if keepdim else result

    def full(self, shape: Sequence[Expr | int], value: Number, dtype: DType, device: Device) -> Value:
        return self.prim("full", tuple(as_expr(s) for s in shape), number(value, dtype), dtype, device)

    def iota(
        self, length: Expr | int, dtype: DType, device: Device, start: Number = 0, step: Number = 1
    ) -> Value:
        return self.prim("iota", as_expr(length), start, step, dtype, device)

    def cat(self, parts: Sequence[Value], dim: int) -> Value:
        return parts[0] if len(parts) == 1 else self.prim("cat", tuple(parts), dim)

    def extern(self, op: str, args: Sequence[object], type: Type, **kwargs: object) -> Value:
        """A library call that stays in the graph."""
        plain = cast("tuple[Arg, ...]", unwrap(tuple(args)))
        named = tuple((key, cast(Arg, unwrap(value))) for key, value in kwargs.items())
        stem = f"{self.stem}_{op.split('.')[1]}"
        return Value(self.graph.call(op, plain, type, named, name=stem, loc=self.loc), self)


Change: TypeAlias = "Callable[[Build, Node], Arg]"


def replace_nodes(graph: Graph, change: Change, names: Collection[str] | None = None) -> Graph:
    """One pass in which a node, of these `names`, may become several. `change` gets each over its new
    operands, appends what it becomes and returns its value (a tuple if it has several), or None: it stays."""
    b = Build(GraphBuilder.after(graph))
    env: dict[Node, Arg] = {node: node for node in graph.inputs}
    for node in graph.nodes:
        source = env[cast(Node, node.args[0])] if node.op == GET else None
        if isinstance(source, tuple):
            env[node] = source[cast(int, node.args[1])]
            continue
        moved = moved_over(node, env)
        b.begin(moved)
        value = change(b, moved) if names is None or node.name in names else None
        if value is None:
            b.graph.nodes.append(moved)
            value = moved
        env[node] = value
    return graph if tuple(b.graph.nodes) == graph.nodes else b.graph.finish(swapped(graph.outputs, env))


def unwrap(value: object) -> object:
    """Values become Nodes, lists become tuples."""
    if isinstance(value, Value):
        return value.node
    if isinstance(value, (tuple, list)):
        return tuple(unwrap(item) for item in value)
    return value


def wrap(value: Arg, b: Build) -> object:
    """Tensor nodes become Values, also inside tuples; sizes given as inputs become their expressions."""
    if isinstance(value, Node):
        if isinstance(value.type, ScalarType):
            return value if value.type.expr is None else value.type.expr
        return Value(value, b)
    if isinstance(value, tuple):
        return tuple(wrap(item, b) for item in value)
    return value


def plain(value: object) -> float:
    """A number known now; a run-time one is left to the library."""
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, Expr) and value.is_const:
        return float(value.value)
    raise Declined


def number(value: Number, dtype: DType) -> Number:
    """A Python number as a constant of that type."""
    if isinstance(value, Node) or (isinstance(value, Expr) and not value.is_const):
        return value
    plain = value.value if isinstance(value, Expr) else value
    if dtype.is_float:
        return float(plain)
    if dtype is BOOL:
        return bool(plain)
    return int(plain) if dtype.is_integer else plain


def common_shape(shapes: Sequence[tuple[Expr, ...]]) -> tuple[Expr, ...]:
    """The broadcast of right-aligned shapes; sizes are equal or 1, as the graph was checked by eager's
    rules."""
    rank = max(map(len, shapes))
    result = [ONE] * rank
    for shape in shapes:
        for place, size in enumerate(shape, rank - len(shape)):
            if size is not ONE:
                result[place] = size
    return tuple(result)


def is_dense(type: TensorType) -> bool:
    """Non-overlapping and without gaps: the strides are those of some order of the dimensions."""
    if type.is_contiguous:
        return True
    dims = [(stride, size) for size, stride in zip(type.shape, type.stride) if size is not ONE]
    left, expected = dict(dims), ONE
    while expected in left:
        expected = mul(expected, left.pop(expected))
        dims.pop()
    return not dims  # nor two of the same stride


# -- type promotion --------------------------------------------------------------------------------


def promoted(operands: Sequence[Operand]) -> DType:
    """The type that eager computes one or two of them in: f32[8] and i64[] give F32."""
    samples = [_sample(x.dtype, x.ndim > 0) if isinstance(x, Value) else _plain_sample(x) for x in operands]
    return types.BY_TORCH_NAME[str(torch.result_type(samples[0], samples[-1])).removeprefix("torch.")]


@cache
def _sample(dtype: DType, has_dims: bool) -> torch.Tensor:
    return torch.ones((1,) * has_dims, dtype=getattr(torch, dtype.torch_name), device="cpu")


def _plain_sample(number: Number) -> Any:
    """A run-time number of the kind that it is."""
    return 1 if isinstance(number, Expr) else 1.0 if isinstance(number, Node) else number


@cache
def rounded(value: float, dtype: DType) -> float:
    """The nearest number of that type."""
    return float(torch.tensor(value, dtype=getattr(torch, dtype.torch_name)).item())


def compute_dtype(dtype: DType) -> DType:
    """Where eager does the arithmetic: fp16 and bf16 compute in fp32."""
    return types.F32 if dtype.is_low_precision else dtype
