"""The prims: what every decomposition ends in, and what lowering knows.

    prims.exp(x)                     pointwise: equal shapes, equal dtypes; numbers are constants
    prims.broadcast(x, shape, dims)  views: dimension i of x becomes dimension dims[i] of the result
    prims.sum(x, dims)               reductions: no keepdim
    prims.take(x, (i, j), (0, 2))    gathers: x[i, :, j] with the index dimensions first

Each prim is one declaration: its name, its kind, and a rule from arguments to (shape, dtype). The
pointwise prims are the scalar operations of the loop IR, so lowering them needs no table.

    rule_of("prims.sum")((x, (1,)))  ->  ((8,), F32)       for x: f32[8, 64]
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias, cast

from dovetail.ir.expr import Expr, add, as_expr, ceildiv, total
from dovetail.ir.graph import Arg, Node
from dovetail.ir.loop import SCALAR_OPS
from dovetail.ir.types import BOOL, I64, DType, TensorType
from dovetail.util.noun import Noun

Shape: TypeAlias = "tuple[Expr, ...]"
Result: TypeAlias = "tuple[Shape, DType]"
Rule: TypeAlias = "Callable[[tuple[Arg, ...]], Result | tuple[Result, ...]]"


class Prim(Noun):
    """kind: pointwise, view, reduction, scan, create, gather, or scatter."""

    name: str
    kind: str
    rule: Rule


def _tensor(arg: Arg) -> TensorType:
    return cast(Node, arg).tensor


def _ints(arg: Arg) -> tuple[int, ...]:
    return cast("tuple[int, ...]", arg)


def _shape(arg: Arg) -> Shape:
    return tuple(as_expr(cast("int | Expr", size)) for size in cast("tuple[Arg, ...]", arg))


# -- pointwise -------------------------------------------------------------------------------------


def _same(args: tuple[Arg, ...]) -> Result:
    first = next(arg.tensor for arg in args if isinstance(arg, Node) and isinstance(arg.type, TensorType))
    return first.shape, first.dtype


def _convert(args: tuple[Arg, ...]) -> Result:
    return _tensor(args[0]).shape, cast(DType, args[1])


# -- views -----------------------------------------------------------------------------------------


def _reshape(args: tuple[Arg, ...]) -> Result:
    return _shape(args[1]), _tensor(args[0]).dtype


def _permute(args: tuple[Arg, ...]) -> Result:
    x = _tensor(args[0])
    return tuple(x.shape[d] for d in _ints(args[1])), x.dtype


def _slice(args: tuple[Arg, ...]) -> Result:
    """slice(x, dim, start, stop, step)"""
    x = _tensor(args[0])
    dim, start, stop, step = cast("tuple[int, Expr, Expr, int]", args[1:])
    shape = list(x.shape)
    shape[dim] = ceildiv(add(stop, as_expr(start) * -1), step)
    return tuple(shape), x.dtype


def _pad(args: tuple[Arg, ...]) -> Result:
    """pad(x, before, after, value): sizes to add on each side of each dimension, none negative"""
    x = _tensor(args[0])
    sides = zip(_shape(args[1]), x.shape, _shape(args[2]))
    return tuple(total(parts) for parts in sides), x.dtype


def _cat(args: tuple[Arg, ...]) -> Result:
    parts = [node.tensor for node in cast("tuple[Node, ...]", args[0])]
    shape = list(parts[0].shape)
    dim = cast(int, args[1])
    shape[dim] = total(part.shape[dim] for part in parts)
    return tuple(shape), parts[0].dtype


# -- reductions ------------------------------------------------------------------------------------


def _reduced(args: tuple[Arg, ...]) -> Shape:
    dims = set(_ints(args[1]))
    return tuple(size for d, size in enumerate(_tensor(args[0]).shape) if d not in dims)


def _reduce(args: tuple[Arg, ...]) -> Result:
    return _reduced(args), _tensor(args[0]).dtype


# -- creation, gathers, scatters -------------------------------------------------------------------


def _take(args: tuple[Arg, ...]) -> Result:
    """take(x, indices, dims): index dimensions first, then the dimensions of x not in dims"""
    x = _tensor(args[0])
    index = _tensor(cast("tuple[Node, ...]", args[1])[0])
    dims = set(_ints(args[2]))
    return (*index.shape, *(size for d, size in enumerate(x.shape) if d not in dims)), x.dtype


_POINTWISE_RULES: Final[dict[str, Rule]] = {
    "where": lambda args: (_same(args)[0], _same(args[1:])[1]), "cast": _convert, "bitcast": _convert
}  # fmt: skip
_BY_RESULT: Final[dict[str, Rule]] = {
    "same": _same, "bool": lambda args: (_same(args)[0], BOOL), "arg": _convert
}  # fmt: skip


def _declare() -> dict[str, Prim]:
    table: dict[str, Prim] = {}

    def declare(kind: str, **rules: Rule) -> None:
        for name, rule in rules.items():
            table[f"prims.{name}"] = Prim(f"prims.{name}", kind, rule)

    for name, result in SCALAR_OPS.items():
        if name != "cast":
            declare("pointwise", **{name: _POINTWISE_RULES.get(name, _BY_RESULT[result])})
    declare("pointwise", convert=_convert)
    declare("view", reshape=_reshape, permute=_permute, slice=_slice, flip=_same)
    declare("view", broadcast=_reshape, as_strided=_reshape)
    declare("pointwise", copy=_same)
    declare("join", pad=_pad, cat=_cat)
    declare("reduction", sum=_reduce, prod=_reduce, max=_reduce, min=_reduce)
    for names, dtype in ((("any", "all"), BOOL), (("argmax", "argmin"), I64)):
        declare("reduction", **dict.fromkeys(names, lambda args, dtype=dtype: (_reduced(args), dtype)))
    # (mean, sum of squared deviations)
    declare("reduction", welford=lambda args: (_reduce(args), _reduce(args)))
    # cumsum(x, (dim,))
    declare("scan", cumsum=_same, cumprod=_same)
    # full(shape, value, dtype, device)
    declare("create", full=lambda args: (_shape(args[0]), cast(DType, args[2])))
    # empty(shape, dtype, device): memory for a kernel to write to; read as anything else, zeros
    declare("create", empty=lambda args: (_shape(args[0]), cast(DType, args[1])))
    # iota(length, start, step, dtype, device): start + step * i
    declare("create", iota=lambda args: (_shape(args[:1]), cast(DType, args[3])))
    # gather(x, dim, index)
    declare("gather", take=_take, gather=lambda args: (_tensor(args[2]).shape, _tensor(args[0]).dtype))
    declare("scatter", put=_same, put_add=_same)
    return table


PRIMS: Final[dict[str, Prim]] = _declare()


KINDS: Final = {
    **{op: prim.kind for op, prim in PRIMS.items()},
    **{f"dovetail.{name}.default": kind  # see flex.py
       for name, kind in (("pairs", "pairs"), ("attend", "attention"), ("mix", "attention"))},
}  # fmt: skip
kind_of: Final = KINDS.get
"""The kind of a prim, or None for any other op."""
ELEMENTWISE: Final = frozenset(("pointwise", "view", "create", "gather", "join", "pairs"))
"""Kinds that are computed wherever an element is read."""
