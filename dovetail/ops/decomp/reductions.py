"""Reductions, softmax, and statistics.

    aten.mean.dim(x, [1], True)   ->  prims.sum(x, (1,)), reshape, * 1/64
    aten._softmax(x, -1, False)   ->  max, sub, exp, sum, div

Half types accumulate in fp32, bool and integers in i64, as in eager.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Final, cast

from dovetail.fake.rules import axes_of
from dovetail.ir.expr import ONE, ZERO, Expr, product
from dovetail.ir.graph import Node
from dovetail.ir.types import BOOL, F64, I64, U8, DType
from dovetail.ops.build import Build, Number, Value, compute_dtype, plain
from dovetail.ops.decomp.pointwise import truth
from dovetail.ops.registry import decline_if, decomposes

LONGEST_SCAN: Final = 4096
FEW_ROWS: Final = 128


def dims_of(x: Value, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    """Normalised, sorted; None or empty means all."""
    return tuple(sorted(axes_of(dim, x.ndim))) if x.ndim else ()


def count(x: Value, dims: Sequence[int]) -> Expr:
    return product(x.shape[d] for d in dims)


def check_not_empty(x: Value, dims: Sequence[int]) -> None:
    """Extremes of nothing raise in eager; let eager say so."""
    decline_if(any(x.shape[d] is ZERO for d in dims))


def accumulate(x: Value, out: DType) -> Value:
    """In the type in which eager accumulates."""
    return x.to(compute_dtype(out))


def _total(
    prim: str, b: Build, x: Value, dim: int | Sequence[int] | None = None, keepdim: bool = False, *,
    dtype: DType | None = None,
) -> Value:  # fmt: skip
    """sum and prod, any and all, over some dimensions or over all"""
    v = truth(b, x) if prim in ("any", "all") else accumulate(x, b.out.dtype)
    return b.reduce(prim, v, dims_of(x, dim), keepdim).to(b.out.dtype)


decomposes("aten.sum", "aten.sum.dim_IntList")(partial(_total, "sum"))
decomposes("aten.prod", "aten.prod.dim_int")(partial(_total, "prod"))
for _name in ("any", "all"):
    decomposes(f"aten.{_name}", f"aten.{_name}.dim", f"aten.{_name}.dims")(partial(_total, _name))


def _scan(prim: str, b: Build, x: Value, dim: int, *, dtype: DType | None = None) -> Value:
    """On the CPU in fp64, where lanes may be added up in any order; the library has its own for that. On a
    GPU a row is one program's: few long ones are left to the library, which shares them."""
    v, is_one = x.to(b.out.dtype), not x.ndim or x.shape[dim] is ONE or x.type.numel is ZERO
    if x.type.device.kind == "cpu":
        decline_if(prim != "cumsum" or b.out.dtype is F64)
    elif not is_one:
        rows = product(size for d, size in enumerate(x.shape) if d != dim % x.ndim)
        decline_if(x.shape[dim].hi > LONGEST_SCAN and rows.lo < FEW_ROWS)
    return b.prim("copy", v) if is_one else b.prim(prim, v, dims_of(x, dim))


for _name in ("cumsum", "cumprod"):
    decomposes(f"aten.{_name}")(partial(_scan, _name))


@decomposes("aten.mean", "aten.mean.dim")
def mean(
    b: Build, x: Value, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: DType | None = None
) -> Value:
    v, dims = accumulate(x, b.out.dtype), dims_of(x, dim)
    return (b.reduce("sum", v, dims, keepdim) / as_float(count(x, dims))).to(b.out.dtype)


def as_float(size: Expr) -> Number:
    return float(size.value) if size.is_const else size


def _extreme(
    prims: tuple[str, ...], b: Build, x: Value, dim: int | Sequence[int] | None = None, keepdim: bool = False
) -> Value | tuple[Value, ...]:
    dims = dims_of(x, dim)
    check_not_empty(x, dims)
    # max and min select, so half types need no detour; fp32 keeps the loop body uniform.
    v = x.to(U8) if x.dtype is BOOL else accumulate(x, x.dtype)

    def found(prim: str) -> Value:
        if not dims:
            return b.full((), 0, I64, x.type.device) if prim.startswith("arg") else b.prim("copy", x)
        best = b.reduce(prim, v, dims, keepdim)
        return best if prim.startswith("arg") else best.to(x.dtype)

    return found(prims[0]) if len(prims) == 1 else tuple(map(found, prims))


for _name in ("max", "min"):
    decomposes(f"aten.a{_name}", f"aten.{_name}")(partial(_extreme, (_name,)))
    decomposes(f"aten.arg{_name}")(partial(_extreme, (f"arg{_name}",)))
    decomposes(f"aten.{_name}.dim")(partial(_extreme, (_name, f"arg{_name}")))
decomposes("aten.aminmax")(partial(_extreme, ("min", "max")))


# -- variance --------------------------------------------------------------------------------------


def moments(b: Build, v: Value, dims: Sequence[int], keepdim: bool) -> tuple[Value, Value]:
    """(mean, sum of squared deviations)"""
    mean, squares = b.prims("welford", v, tuple(dims))
    if keepdim:
        mean, squares = b.unsqueeze(mean, tuple(dims)), b.unsqueeze(squares, tuple(dims))
    return mean, squares


def variance(
    b: Build, v: Value, dims: Sequence[int], correction: Number, keepdim: bool
) -> tuple[Value, Value]:
    """(variance, mean)"""
    decline_if(not dims)
    mean, squares = moments(b, v, dims, keepdim)
    size, less = count(v, dims), plain(correction)
    if size.is_const:
        divisor: Number | Value = max(float(size.value) - less, 0.0)
    elif size.lo >= less == int(less):
        divisor = size - int(less)
    else:
        divisor = b.call("maximum", b.full((), size, v.dtype, v.type.device) - less, 0.0)
    return squares / divisor, mean


def _spread(
    has_root: bool, has_mean: bool, b: Build, x: Value, dim: Sequence[int] | None = None, *,
    correction: Number | None = 1, keepdim: bool = False,
) -> Value | tuple[Value, Value]:  # fmt: skip
    """var, std, var_mean and std_mean"""
    less = 1 if correction is None else correction
    found, mean = variance(b, accumulate(x, x.dtype), dims_of(x, dim), less, keepdim)
    spread = (b.call("sqrt", found) if has_root else found).to(b.out.dtype)
    return (spread, mean.to(b.out.dtype)) if has_mean else spread


decomposes("aten.var.correction")(partial(_spread, False, False))
decomposes("aten.std.correction")(partial(_spread, True, False))
decomposes("aten.var_mean.correction")(partial(_spread, False, True))
decomposes("aten.std_mean.correction")(partial(_spread, True, True))


# -- norms over elements ---------------------------------------------------------------------------


@decomposes("aten.linalg_vector_norm", "aten.norm.ScalarOpt_dim", "aten.norm.Scalar",
            "aten.norm.ScalarOpt_dim_dtype", "aten.norm.ScalarOpt_dtype")  # fmt: skip
def linalg_vector_norm(
    b: Build, x: Value, ord: Number | None = 2, dim: Sequence[int] | None = None, keepdim: bool = False, *,
    dtype: DType | None = None,
) -> Value:  # fmt: skip
    dims, out, ord = dims_of(x, dim), b.out.dtype, plain(2 if ord is None else ord)
    v = b.call("abs", accumulate(x, out))
    if math.isinf(ord):
        check_not_empty(x, dims)
        return b.reduce("max" if ord > 0 else "min", v, dims, keepdim).to(out)
    if ord == 0:
        return b.reduce("sum", v.ne(0.0).to(v.dtype), dims, keepdim).to(out)
    if ord == 1 or all(x.shape[d] is ONE for d in dims):  # of one number no power has to be taken
        return b.reduce("sum", v, dims, keepdim).to(out)
    if ord == 2:
        return b.call("sqrt", b.reduce("sum", v * v, dims, keepdim)).to(out)
    total = b.reduce("sum", b.call("pow", v, ord), dims, keepdim)
    return b.call("pow", total, 1.0 / ord).to(out)


@decomposes("aten.logsumexp")
def logsumexp(b: Build, x: Value, dim: Sequence[int], keepdim: bool = False) -> Value:
    dims = dims_of(x, dim)
    v = accumulate(x, b.out.dtype)
    if not dims:
        return b.prim("copy", x) if x.dtype is b.out.dtype else x.to(b.out.dtype)
    check_not_empty(x, dims)
    top = b.reduce("max", v, dims, keepdim=True)
    top = b.where(b.call("isinf", top), 0.0, top)
    total = b.call("log", b.reduce("sum", b.call("exp", v - top), dims, keepdim=True)) + top
    return b.reshape(total, b.out.shape).to(b.out.dtype)


# -- softmax ---------------------------------------------------------------------------------------


def _softmax(kind: str, b: Build, x: Value, dim: int, dtype: object = None) -> Value:
    """`kind`: plain, log, or safe, which gives zeros where all is -inf"""
    dims = dims_of(x, dim)
    decline_if(kind == "safe" and not dims)
    if not dims:
        return b.full((), 0 if kind == "log" else 1, b.out.dtype, x.type.device)
    check_not_empty(x, dims)
    v = accumulate(x, b.out.dtype)
    decline_if(not v.dtype.is_float)
    top = b.reduce("max", v, dims, keepdim=True)
    shifted = v - top
    e = b.call("exp", shifted)
    total = b.reduce("sum", e, dims, keepdim=True)
    out = shifted - b.call("log", total) if kind == "log" else e / total
    if kind == "safe":
        out = b.where(b.expand(top.eq(-math.inf), out.shape), 0.0, out)
    return out.to(b.out.dtype)


decomposes("aten._softmax")(partial(_softmax, "plain"))
decomposes("aten._log_softmax")(partial(_softmax, "log"))
decomposes("aten._safe_softmax")(partial(_softmax, "safe"))


def _softmax_backward(is_log: bool, b: Build, grad: Value, y: Value, dim: int, _: DType) -> Value:
    g, v = accumulate(grad, grad.dtype), accumulate(y, y.dtype)
    g, v = (g, b.call("exp", v)) if is_log else (g * v, v)
    total = _one_hot_sum(b, grad, dim % max(y.ndim, 1)) if is_log else None
    total = b.reduce("sum", g, dims_of(y, dim), keepdim=True) if total is None else total.to(g.dtype)
    return (g - v * total).to(b.out.dtype)


decomposes("aten._softmax_backward_data")(partial(_softmax_backward, False))
decomposes("aten._log_softmax_backward_data")(partial(_softmax_backward, True))


def _one_hot_sum(b: Build, grad: Value, dim: int) -> Value | None:
    """The sum of where(position == target, value, 0), which a loss over classes gives: the value itself."""
    node = b.maker(grad)
    if node.op != "prims.where":
        return None
    hit, value, rest = node.args
    if rest != 0 or not isinstance(hit, Node) or hit.op != "prims.eq" or not isinstance(value, Node):
        return None
    classes, target = (cast(Node, arg) for arg in hit.args)
    spread = (classes, target, value)
    if any(each.op != "prims.broadcast" or each.tensor.shape != grad.shape for each in spread):
        return None
    others = tuple(d for d in range(grad.ndim) if d != dim)
    counted = cast(Node, classes.args[0])
    is_every = counted.op == "prims.iota" and counted.args[1:3] == (0, 1) and classes.args[2] == (dim,)
    if not is_every or target.args[2] != others or value.args[2] != others:
        return None
    return b.unsqueeze(Value(cast(Node, value.args[0]), b), (dim,))
