"""What each prim means, as a torch call: the oracle for lowering, and the interpreter of graphs of prims.

    call_prim("prims.sum", (x, (1,)))  ->  x.sum((1,))
    run_graph(graph, [x, w])           ->  [y]                  as aot's, which knows no prims
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final
from unittest import mock

import torch

from dovetail.aot import interpret
from dovetail.ir.graph import Graph
from dovetail.ops.prims import PRIMS


def _here(device: torch.device) -> torch.device:
    """A graph for a GPU is interpreted on the CPU where there is none."""
    return device if device.type == "cpu" or torch.cuda.is_available() else torch.device("cpu")


def _broadcast(x: torch.Tensor, shape: tuple[int, ...], dims: tuple[int, ...]) -> torch.Tensor:
    sizes = [1] * len(shape)
    for dim, size in zip(dims, x.shape):
        sizes[dim] = size
    return x.reshape(sizes).expand(shape)


def _pad(x: torch.Tensor, before: tuple[int, ...], after: tuple[int, ...], value: float) -> torch.Tensor:
    pairs = [side for pair in reversed(list(zip(before, after))) for side in pair]
    return torch.nn.functional.pad(x, pairs, value=value)


def _over(name: str) -> Callable[..., torch.Tensor]:
    """A reduction that torch does one dimension at a time."""

    def run(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
        for dim in sorted(dims, reverse=True):
            x = getattr(torch, name)(x, dim)
        return x

    return run


def _arg(name: str) -> Callable[..., torch.Tensor]:
    def run(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
        kept = [d for d in range(x.dim()) if d not in dims]
        moved = x.permute(*kept, *dims).reshape(*(x.shape[d] for d in kept), -1)
        found: torch.Tensor = getattr(torch, name)(moved, -1)
        return found

    return run


def _welford(x: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    mean = x.mean(dims)
    return mean, (x - x.mean(dims, keepdim=True)).square().sum(dims)


def _take(x: torch.Tensor, indices: tuple[torch.Tensor, ...], dims: tuple[int, ...]) -> torch.Tensor:
    rest = [d for d in range(x.dim()) if d not in dims]
    return x.permute(*dims, *rest)[tuple(indices)]


def _put(
    x: torch.Tensor, indices: tuple[torch.Tensor, ...], dims: tuple[int, ...], values: torch.Tensor,
    accumulate: bool = False,
) -> torch.Tensor:  # fmt: skip
    rest = [d for d in range(x.dim()) if d not in dims]
    order = [*dims, *rest]
    moved = x.permute(order).clone().index_put_(tuple(indices), values, accumulate)
    return moved.permute([order.index(d) for d in range(x.dim())])


_UNARY: Final = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "asin",
    "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "lgamma",
    "floor", "ceil", "round", "trunc", "frac", "sigmoid", "reciprocal", "neg", "abs", "sign",
    "isnan", "isinf", "logical_not",
)  # fmt: skip
_BINARY: Final = (
    "pow", "atan2", "hypot", "copysign", "div", "add", "sub", "mul", "maximum",
    "minimum", "fmax", "fmin", "remainder", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or",
)  # fmt: skip

EAGER: Final[dict[str, Callable[..., Any]]] = {
    **{f"prims.{name}": getattr(torch, name) for name in (*_UNARY, *_BINARY)},
    "prims.floordiv": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "prims.truncdiv": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "prims.check_index": lambda i, size: torch.where(i < 0, i + size, i),
    "prims.bit_and": torch.bitwise_and,
    "prims.bit_or": torch.bitwise_or,
    "prims.bit_xor": torch.bitwise_xor,
    "prims.bit_not": torch.bitwise_not,
    "prims.where": torch.where,
    "prims.convert": lambda x, dtype: x.to(dtype),
    "prims.bitcast": lambda x, dtype: x.view(dtype),
    "prims.copy": lambda x: x.clone(),
    "prims.reshape": lambda x, shape: x.reshape(shape),
    "prims.permute": lambda x, dims: x.permute(dims),
    "prims.broadcast": _broadcast,
    "prims.slice": torch.ops.aten.slice.Tensor,
    "prims.flip": lambda x, dims: x.flip(dims),
    "prims.as_strided": lambda x, shape, stride, offset: x.as_strided(
        shape, stride, x.storage_offset() + offset
    ),
    "prims.view_as_real": torch.view_as_real,
    "prims.view_as_complex": torch.view_as_complex,
    "prims.pad": _pad,
    "prims.cat": lambda parts, dim: torch.cat(parts, dim),
    "prims.sum": lambda x, dims: torch.sum(x, dims, dtype=x.dtype),
    "prims.prod": _over("prod"),
    "prims.max": torch.amax,
    "prims.min": torch.amin,
    "prims.any": _over("any"),
    "prims.all": _over("all"),
    "prims.argmax": _arg("argmax"),
    "prims.argmin": _arg("argmin"),
    "prims.welford": _welford,
    "prims.cumsum": lambda x, dims: torch.cumsum(x, *dims),
    "prims.cumprod": lambda x, dims: torch.cumprod(x, *dims),
    "prims.full": lambda shape, value, dtype, device: torch.full(shape, value, dtype=dtype, device=device),
    "prims.empty": lambda shape, dtype, device: torch.zeros(shape, dtype=dtype, device=device),
    "prims.iota": lambda n, start, step, dtype, device: (torch.arange(n, device=_here(device)) * step + start).to(
        dtype
    ),
    "prims.take": _take,
    "prims.gather": lambda x, dim, index: torch.gather(
        x, dim, torch.where(index < 0, index + x.shape[dim], index)
    ),
    "prims.put": _put,
    "prims.put_add": partial(_put, accumulate=True),
}
assert set(EAGER) == set(PRIMS), set(EAGER) ^ set(PRIMS)


def call_prim(op: str, args: Sequence[Any]) -> Any:
    """Run one prim on tensors; sizes, dtypes and devices are torch's by now. Numbers take the type of the
    tensor operands (of the arms, for where)."""
    if PRIMS[op].kind == "pointwise" and op not in ("prims.convert", "prims.bitcast"):
        typed = args[1:] if op == "prims.where" else args
        like = next(a for a in typed if isinstance(a, torch.Tensor))
        args = [
            a if isinstance(a, torch.Tensor) else torch.tensor(a, dtype=like.dtype, device=like.device)
            for a in args
        ]
    return EAGER[op](*args)


def run_graph(graph: Graph, inputs: Sequence[Any]) -> list[Any]:
    calls = {op: partial(lambda op, *args: call_prim(op, args), op) for op in PRIMS}
    with mock.patch.dict(interpret.CALLS, calls):
        results = interpret.run_graph(graph, inputs)
    return results
