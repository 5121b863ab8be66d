"""Torch functions whose C++ code knows no symbolic sizes, made to work on symbolic Fakes.

    with SymbolicCalls(lambda: loc):
        F.interpolate(x, scale_factor=2.0)      f32[s0, 3, 2*s1, 2*s2]

A few are replaced by the ATen op they end in. Any other that asks for numbers, or fails with those of this
call, gets them: the symbols of its arguments are fixed (an assumption), and it runs again.
"""
from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import cache
from types import CodeType, FunctionType, MethodWrapperType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dovetail.fake.symbolic import find_shapes, hinted
from dovetail.fake.tensor import Fake, make_static
from dovetail.ir.graph import Loc

NEEDS_DATA: Final = (
    "data is not allocated", "Cannot access data pointer", "doesn't have storage", "got meta", "got 1D meta",
    "leaf Variable that requires grad is being used in an in-place", "Autograd not support dtype",
)  # fmt: skip
"""How torch's C++ code complains about a tensor without memory; and about writing to a leaf, which every Fake
is of an input that requires grad: only the tensor itself knows whether it is one."""


class SymbolicCalls(TorchFunctionMode):
    """To be entered around code that runs torch functions on symbolic Fakes, and says where those are."""

    def __init__(self, where: Callable[[], Loc | None] = lambda: None) -> None:
        super().__init__()
        self.where = where

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        loc = None if type(func) is MethodWrapperType else self.where()  # of x.shape nobody is warned
        return with_numbers(loc, STAND_INS.get(func, func), args, kwargs or {})


def call_at(loc: Loc | None, func: Any, args: Any, kwargs: Any) -> Any:
    """Its result. If it warns, then about the line it is of, and as often as in eager."""
    return _caller_at(loc.file, loc.line)(func, args, kwargs) if loc else func(*args, **kwargs)


@cache
def _caller_at(file: str, line: int) -> Callable[..., Any]:
    code = (lambda func, args, kwargs: func(*args, **kwargs)).__code__
    return FunctionType(code.replace(co_filename=file, co_firstlineno=line), GLOBALS_OF.get(file, {}))


def symbolic_at(loc: Loc | None, func: Any, args: Any, kwargs: Any) -> Any:
    """The same where sizes may be symbolic. Most functions go to the mode first of all, which takes longer
    than to do here what it does."""
    if isinstance(func, _IN_C) or _asks(getattr(func, "__code__", None)):
        return with_numbers(loc, STAND_INS.get(func, func), args, kwargs)
    with SymbolicCalls(lambda: loc):
        return call_at(loc, func, args, kwargs)


_IN_C: Final = (type(len), type(str.join), type(str.__add__))


@cache
def _asks(code: CodeType | None) -> bool:
    """Modes see a call of it before anything that is called inside of it."""
    return code is not None and any(name.startswith("has_torch_function") for name in code.co_names)


GLOBALS_OF: Final[dict[str, dict[str, Any]]] = {}
"""Of files that were captured from: there Python keeps what it has warned of."""


def needs_data(error: Exception) -> bool:
    return any(hint in str(error) for hint in NEEDS_DATA)


def with_numbers(loc: Loc | None, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Its result; if it fails, that of the same call with the symbols of its arguments fixed."""
    try:
        return call_at(loc, func, args, kwargs)
    except (RuntimeError, IndexError) as error:
        is_ours = isinstance(error, NotImplementedError) or needs_data(error)
        if is_ours or find_shapes(tree_leaves((args, kwargs))) is None:
            raise
    reason = f"{getattr(func, '__name__', func)} fails with symbolic sizes"
    for value in tree_leaves((args, kwargs)):
        if type(value) is Fake:
            make_static(value, reason)
        elif isinstance(value, torch.SymInt):
            value.node.shapes.specialise_symbols(value.node.expr, reason)
    return func(*hinted(args), **{k: hinted(v) for k, v in kwargs.items()})


_aten: Final = torch.ops.aten
_LINEAR: Final = {1: "linear", 2: "bilinear", 3: "trilinear"}


def interpolate(
    input: torch.Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    align_corners: bool | None = None, recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> torch.Tensor:  # fmt: skip
    """F.interpolate as the ATen op it ends in, whose sizes may be symbolic."""
    rank = input.dim() - 2
    if mode == "area":
        return getattr(F, f"adaptive_avg_pool{rank}d")(input, _target(input, rank, size, scale_factor))  # type: ignore[no-any-return]
    scales: list[float | None] = [None] * rank
    if scale_factor is not None and not recompute_scale_factor:
        scales = [float(f) for f in _per_axis(scale_factor, rank)]
    target = _target(input, rank, size, scale_factor)
    if mode in ("nearest", "nearest-exact"):
        name = f"upsample_nearest{rank}d" if mode == "nearest" else f"_upsample_nearest_exact{rank}d"
        return getattr(_aten, name).default(input, target, *scales)  # type: ignore[no-any-return]
    base = mode if mode == "bicubic" else _LINEAR[rank]
    name = f"_upsample_{base}{rank}d_aa" if antialias else f"upsample_{base}{rank}d"
    corners = bool(align_corners)
    return getattr(_aten, name).default(input, target, corners, *scales)  # type: ignore[no-any-return]


def _per_axis(value: Any, rank: int) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value] * rank


def _target(x: torch.Tensor, rank: int, size: Any, factor: Any) -> list[Any]:
    if size is not None:
        return _per_axis(size, rank)
    return [math.floor(x.shape[i + 2] * float(f)) for i, f in enumerate(_per_axis(factor, rank))]


def selected(x: Any, key: Any) -> Any:
    """The view of x that a key with symbolic numbers in it means; None where it is another kind of key."""
    keys = key if isinstance(key, tuple) else (key,)
    if type(x) is not Fake or not {torch.SymInt} <= {*map(type, keys)} <= {torch.SymInt, int, slice}:
        return None
    dim = 0
    for each in keys:
        if type(each) is slice:
            x, dim = x[(slice(None),) * dim + (each,)], dim + 1
        elif dim < x.dim() and -x.shape[dim] <= each and each < x.shape[dim]:
            x = x.select(dim, each)
        else:
            return None
    return x


def get_item(x: Any, key: Any) -> Any:
    found = selected(x, key)
    return x[key] if found is None else found


def set_item(x: Any, key: Any, value: Any) -> None:
    found = selected(x, key)
    if found is None:
        x[key] = value
    else:
        found[...] = value


def matmul(input: Any, other: Any, **kwargs: Any) -> Any:
    """Batches of products as the one bmm they become: torch's C++ before 2.13 asks for their numbers."""
    x, y = input, other
    if kwargs or min(x.dim(), y.dim()) < 3 or (x.dim() == y.dim() == 3 and x.shape[0] != y.shape[0]):
        return torch.matmul(x, y, **kwargs)
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    left, right = (t.expand(*batch, *t.shape[-2:]).reshape(math.prod(batch), *t.shape[-2:]) for t in (x, y))
    return left.bmm(right).view(*batch, x.shape[-2], y.shape[-1])


def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """All rows in one product: torch's C++ before 2.13 asks for their number where they lie apart."""
    if input.dim() < 3 or weight.dim() != 2:
        return F.linear(input, weight, bias)
    made = F.linear(input.reshape(math.prod(input.shape[:-1]), input.shape[-1]), weight, bias)
    return made.view(*input.shape[:-1], weight.shape[0])


def lstm(x: Any, state: Any, *given: Any) -> Any:
    """Layer by layer in the library's kernels, as torch does where sizes are numbers: with symbolic ones it
    goes step by step, and so asks how many. Training does, too: what it saves has a size nobody knows."""
    is_plain = isinstance(state, (list, tuple)) and x.device.type == "cpu" and x.dtype == torch.float32
    if not is_plain or torch.is_grad_enabled() or state[0].shape[2] != state[1].shape[2] or all(given[3:5]):
        return torch.lstm(x, state, *given)  # with projections or dropout, say
    weights, has_biases, layers, _, is_training, is_bidirectional, batch_first = given
    x, width, step = x.transpose(0, 1) if batch_first else x, state[1].shape[2], 4 if has_biases else 2
    fixed: Any = ([], 2, width, layers, has_biases, is_bidirectional, batch_first, is_training)
    last: list[list[Any]] = []
    for _ in range(layers):
        made = []
        for way in range(1 + is_bidirectional):
            own = weights[step * len(last) : step * len(last) + step]
            own = own if has_biases else (*own, *map(torch.zeros_like, own))
            h, c = (s.contiguous()[len(last)] for s in state)
            y, *ends, _ = _aten.mkldnn_rnn_layer.default(x.contiguous(), *own, h, c, way > 0, *fixed)
            made.append(y)
            last.append(ends)
        x = torch.cat(made, -1) if is_bidirectional else made[0]
    return (x.transpose(0, 1) if batch_first else x, *map(torch.stack, zip(*last)))


def max_pool1d(
    input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, *rest: Any,
    **named: Any,
) -> Any:
    """As the pooling of an image of one row."""
    given = zip((1, 1, 0, 1), (kernel_size, stride or kernel_size, padding, dilation))
    pool: Any = F.max_pool2d
    made = pool(input.unsqueeze(-2), *((row, *_per_axis(n, 1)) for row, n in given), *rest, **named)
    return made.squeeze(-2) if isinstance(made, torch.Tensor) else tuple(t.squeeze(-2) for t in made)


STAND_INS: Final[dict[Any, Callable[..., Any]]] = {
    F.interpolate: interpolate, **dict.fromkeys((torch.Tensor.__getitem__, operator.getitem), get_item),
    **dict.fromkeys((torch.Tensor.__setitem__, operator.setitem), set_item),
    **dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, operator.matmul), matmul),
    F.linear: linear, torch.lstm: lstm, F.max_pool1d: max_pool1d,
}  # fmt: skip
