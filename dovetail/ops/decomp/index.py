"""Gathers and scatters.

    aten.embedding(weight, ids)         ->  prims.take(weight, (ids,), (0,))
    aten.index.Tensor(x, [None, i])     ->  prims.take(x, (i,), (1,)), index dimensions moved back
    aten.index_copy(x, 0, i, src)       ->  prims.put(x, (i,), (0,), src)
    aten.index_add(x, 0, i, src)        ->  prims.put_add(x, (i,), (0,), src) on a GPU

Positions out of range fail the call, as in eager.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch

from dovetail.ir.expr import ONE, ZERO, Expr, as_expr
from dovetail.ir.graph import Node
from dovetail.ir.types import BOOL, F32, F64, I32, I64
from dovetail.ops.build import Build, Number, Value, common_shape
from dovetail.ops.decomp.views import Size
from dovetail.ops.registry import decline_if, decomposes


def as_index(x: Value) -> Value:
    decline_if(x.dtype not in (I32, I64))
    return x.to(I64)


def as_position(b: Build, x: Value, size: Expr) -> Value:
    """An index of an op that does not count from the end: a negative one is out of range."""
    index = as_index(x)
    return b.where(index < 0, size, index)


def check_runs(b: Build, x: Value, dim: int, index: Value) -> None:
    """Single elements picked along the innermost dimension: the CPU's library does that faster."""
    many = not (index.ndim == x.ndim and index.shape[dim] is ONE)
    decline_if(b.out.device.kind == "cpu" and dim == x.ndim - 1 and many)


def check_room(x: Value) -> None:
    """Reading from an empty tensor is an error that eager words better."""
    decline_if(any(size is ZERO for size in x.shape))


@decomposes("aten.embedding")
def embedding(b: Build, weight: Value, indices: Value, *backward_only: object) -> Value:
    check_room(weight)
    return b.prim("take", weight, (as_position(b, indices, weight.shape[0]),), (0,))


@decomposes("aten.index_select")
def index_select(b: Build, x: Value, dim: int, index: Value) -> Value:
    decline_if(not x.ndim)
    check_room(x)
    dim %= x.ndim
    check_runs(b, x, dim, index)
    flat = b.reshape(as_position(b, index, x.shape[dim]), (b.out.shape[dim],))
    return move_first(b, b.prim("take", x, (flat,), (dim,)), 1, dim)


def move_first(b: Build, x: Value, rank: int, place: int) -> Value:
    """Put the first `rank` dimensions behind the `place` ones after them."""
    order = [*range(rank, rank + place), *range(rank), *range(rank + place, x.ndim)]
    return b.permute(x, order)


@decomposes("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(b: Build, x: Value, indices: Sequence[Value | None]) -> Value:
    check_room(x)
    found, dims = _spread_indices(b, indices)
    result = b.prim("take", x, tuple(found), dims)
    return move_first(b, result, found[0].ndim, _place(dims))


def _spread_indices(b: Build, indices: Sequence[Value | None]) -> tuple[list[Value], tuple[int, ...]]:
    """The given index tensors at one shape, and the dimensions they index."""
    dims = tuple(d for d, i in enumerate(indices) if i is not None)
    given = [as_index(i) for i in indices if i is not None]
    decline_if(not given)
    shape = common_shape([i.shape for i in given])
    return [b.expand(i, shape) for i in given], dims


def _place(dims: Sequence[int]) -> int:
    """Where eager puts the index dimensions: at the first one if they are adjacent, else in front."""
    return dims[0] if list(dims) == list(range(dims[0], dims[0] + len(dims))) else 0


@decomposes("aten.index_put", "aten._unsafe_index_put")
def index_put(
    b: Build, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> Value:
    given = [i for i in indices if i is not None]
    if len(given) == 1 and given[0].dtype is BOOL and indices[0] is not None:
        return _masked_put(b, x, given[0], values, accumulate)
    check_room(x)
    found, dims = _spread_indices(b, indices)
    rank, place = found[0].ndim, _place(dims)
    rest = [size for d, size in enumerate(x.shape) if d not in dims]
    shape = [*rest[:place], *found[0].shape, *rest[place:]]
    spread = b.expand(values.to(x.dtype), shape)
    front = b.permute(spread, [*range(place, place + rank), *range(place), *range(place + rank, len(shape))])
    return _put_add(b, x, found, dims, front) if accumulate else b.prim("put", x, tuple(found), dims, front)


def _put_add(b: Build, x: Value, found: Sequence[Value], dims: Sequence[int], values: Value) -> Value:
    """Positions may repeat. A GPU adds atomically, in any order, as most kernels of eager do unless asked not
    to; on a CPU the library knows how to share that work."""
    decline_if(b.out.device.kind != "cuda" or x.dtype not in (F32, F64, I32, I64))
    decline_if(torch.are_deterministic_algorithms_enabled())
    return b.prim("put_add", x, tuple(found), tuple(dims), values)


def _masked_put(b: Build, x: Value, mask: Value, values: Value, accumulate: bool) -> Value:
    """One value for all True positions; several would depend on how many there are."""
    decline_if(not all(size.is_const and size.value == 1 for size in values.shape))
    fill = b.reshape(values.to(x.dtype), ())
    spread = b.broadcast(mask, x.shape, range(mask.ndim))
    return b.where(spread, x + fill if accumulate else b.expand(fill, x.shape), x)


@decomposes("aten.gather")
def gather(b: Build, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    decline_if(not x.ndim or not index.ndim)
    check_room(x)
    dim %= x.ndim
    check_runs(b, x, dim, index)
    return b.prim("gather", x, dim, as_position(b, index, x.shape[dim]))


@decomposes("aten.index_add")
def index_add(b: Build, x: Value, dim: int, index: Value, source: Value, *, alpha: Number = 1) -> Value:
    found, dims, values = _slices(b, x, dim, index, source)
    return _put_add(b, x, found, dims, values if alpha == 1 else values * alpha)


def _slices(
    b: Build, x: Value, dim: int, index: Value, source: Value
) -> tuple[tuple[Value], tuple[int], Value]:
    """Positions, the dimension they are along, and what goes there, that dimension first."""
    decline_if(not x.ndim or not source.ndim)
    check_room(x)
    dim %= x.ndim
    flat = as_position(b, b.reshape(index, (index.type.numel,)), x.shape[dim])
    front = b.permute(source.to(x.dtype), [dim, *(d for d in range(x.ndim) if d != dim)])
    return (flat,), (dim,), front


decomposes("aten.index_copy")(lambda b, x, *given: b.prim("put", x, *_slices(b, x, *given)))

@decomposes("aten.scatter.src", "aten.scatter.value")
def scatter(b: Build, x: Value, dim: int, index: Value, source: Value | Number) -> Value:
    """One element of each row, where an extreme was found: the gradient of max and min."""
    rows = [ONE if d == dim % x.ndim else size for d, size in enumerate(x.shape)]
    decline_if(not x.ndim or list(index.shape) != rows or not _is_found(b.maker(index)))
    decline_if(isinstance(source, Value) and list(source.shape) != rows)
    value = b.expand(source, x.shape) if isinstance(source, Value) else source
    line = b.broadcast(b.iota(x.shape[dim], I64, x.type.device), x.shape, (dim % x.ndim,))
    return b.where(b.call("eq", line, b.expand(index, x.shape)), value, x)


def _is_found(node: Node) -> bool:
    """The place of an extreme, which is in range."""
    while node.op in ("prims.reshape", "prims.copy"):
        node = node.operands[0]
    return node.op in ("prims.argmax", "prims.argmin")


@decomposes("aten.scatter_add")
def scatter_add(b: Build, x: Value, dim: int, index: Value, source: Value) -> Value:
    decline_if(not x.ndim or not index.ndim or not source.ndim)
    check_room(x)
    found = []
    for d, size in enumerate(index.shape):
        source = b.slice(source, d, 0, size)
        found.append(b.broadcast(b.iota(size, I64, b.out.device), index.shape, (d,)))
    found[dim] = as_position(b, index, x.shape[dim])
    return _put_add(b, x, found, range(x.ndim), source)


@decomposes("aten.embedding_dense_backward")
def embedding_backward(
    b: Build, grad: Value, indices: Value, rows: Size, padding: int, by_frequency: bool
) -> Value:
    decline_if(by_frequency or not indices.ndim)
    flat = as_position(b, indices, as_expr(rows))
    if padding >= 0:
        padded = b.broadcast(indices.eq(padding), grad.shape, range(indices.ndim))
        grad = b.where(padded, b.full((), 0, grad.dtype, b.out.device), grad)
    return _put_add(b, b.full(b.out.shape, 0, grad.dtype, b.out.device), (flat,), (0,), grad)
