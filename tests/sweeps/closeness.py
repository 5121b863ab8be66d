"""Is a compiled result as good as eager's? Decided by eager's own error against fp64.

    why_not_close(compiled, eager, exact)  ->  None, or "leaf 0: error 3.1e-04 at 17, eager's is 2.0e-07 ..."

Equal to eager within a few units in the last place passes at once. Otherwise each element may be off
the fp64 result by a small factor of eager's own worst error for that tensor plus a few units in the
last place: a compiled kernel may sum in another order, but may not be less careful.

Doubles have no wider type. Their referee is the same program on inputs one unit in the last place away: what that
changes is what rounding may change. It jumps where a program does (floor, a comparison), so they must be near, too.
"""
from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

EPS: Final = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 2**-23, torch.float64: 2**-52}
REAL_OF: Final = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
EAGER_FACTOR: Final = 4.0
"""How many times eager's worst error is allowed."""
UNITS: Final = 4.0
"""Units in the last place (of the element, and of the tensor's typical size) allowed on top."""

NEAR: Final = 64.0
"""Units in the last place of the tensor's typical size, where fp64 is not available."""


DRAWS: Final = ("rand", "randn", "rand_like", "randn_like", "normal", "bernoulli", "normal_", "uniform_")
"""Functions whose random numbers differ with the type of the result."""


class DrawsInSingle(TorchFunctionMode):
    """While the default type is double, random numbers are those that a program in single precision draws."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        draws = name in DRAWS or (getattr(func, "__module__", "") == "torch.nn.init" and name.endswith("_"))
        if not draws or torch.get_default_dtype() is not torch.float64:
            return func(*args, **(kwargs or {}))
        torch.set_default_dtype(torch.float32)
        try:
            single, named = pytree.tree_map(lambda a: a.detach().float() if getattr(a, "dtype", None) is torch.float64 else a,
                                            (args, kwargs or {}))
            drawn = func(*single, **named)
            if not name.endswith("_"):
                return to_exact(drawn)
            target = args[0] if args else kwargs["tensor"]  # functions of torch.nn.init pass it on by name
            with torch.set_grad_enabled(torch.is_grad_enabled() and not target.is_leaf):
                return target.copy_(drawn)
        finally:
            torch.set_default_dtype(torch.float64)


class CastsToDouble(TorchFunctionMode):
    """A program that casts to single precision by name casts to double."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "float":
            return args[0].double()
        args, kwargs = pytree.tree_map(lambda leaf: torch.float64 if leaf is torch.float32 else leaf, (args, kwargs or {}))
        return func(*args, **kwargs)


def to_exact(tree: Any) -> Any:
    """The same arguments in double precision, doubles one unit further; leaves that are not floating point stay."""
    wide = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
            torch.complex32: torch.complex128, torch.complex64: torch.complex128}

    def widen(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if leaf.dtype in wide:
                return leaf.detach().to(wide[leaf.dtype]).requires_grad_(leaf.requires_grad)
            return nudged(leaf.detach()).requires_grad_(leaf.requires_grad)
        return wide.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf

    return pytree.tree_map(widen, tree)


def nudged(x: torch.Tensor) -> torch.Tensor:
    """Doubles moved by one unit in the last place, every other one up; anything else as it is."""
    if x.dtype not in (torch.float64, torch.complex128) or x.layout is not torch.strided:
        return x.clone()
    signs = torch.ones(x.numel(), dtype=torch.float64, device=x.device)
    signs[::2] = -1
    return x * (1 + EPS[torch.float64] * signs).reshape(x.shape)


def why_not_close(got: Any, eager: Any, exact: Callable[[], Any] | None, check_strides: bool = False) -> str | None:
    """Compare two results leaf by leaf. `exact` computes the fp64 result and is called only when needed."""
    got_leaves, got_spec = pytree.tree_flatten(got)
    want_leaves, want_spec = pytree.tree_flatten(eager)
    if got_spec != want_spec:
        return f"structure {got_spec} instead of {want_spec}"
    exact_leaves: list[Any] | None = None
    for index, (ours, theirs) in enumerate(zip(got_leaves, want_leaves, strict=True)):
        why = why_not_same_leaf(ours, theirs, check_strides)
        if why == "values" and exact is not None:
            exact_leaves = exact_leaves or find_exact(exact)
            if exact_leaves is None or len(exact_leaves) != len(got_leaves):
                why = why_not_near(ours, theirs)
            elif getattr(exact_leaves[index], "dtype", None) == theirs.dtype:
                why = why_not_near(ours, theirs) or why_not_accurate(ours, theirs, exact_leaves[index])
            else:
                why = why_not_accurate(ours, theirs, exact_leaves[index])
        elif why == "values":
            why = describe_difference(ours, theirs)
        if why is not None:
            return f"leaf {index}: {why}"
    return None


def find_exact(exact: Callable[[], Any]) -> list[Any] | None:
    """The fp64 leaves; None where the program has no fp64 version (an op without a double kernel)."""
    try:
        return pytree.tree_leaves(exact())
    except (RuntimeError, TypeError, NotImplementedError, ValueError, IndexError):
        return None


def why_not_same_leaf(ours: Any, theirs: Any, check_strides: bool) -> str | None:
    """None when equal; the word "values" when only element values differ; else what differs."""
    if not isinstance(theirs, torch.Tensor):
        same = type(ours) is type(theirs) and (ours == theirs or (ours != ours and theirs != theirs))
        close = isinstance(theirs, float) and isinstance(ours, float) and abs(ours - theirs) <= 1e-6 * abs(theirs)
        return None if same or close else f"{ours!r} instead of {theirs!r}"
    if not isinstance(ours, torch.Tensor):
        return f"{type(ours).__name__} instead of a tensor"
    for name in ("dtype", "device", "shape", "layout", "requires_grad"):
        if getattr(ours, name) != getattr(theirs, name):
            return f"{name} {getattr(ours, name)} instead of {getattr(theirs, name)}"
    if check_strides and theirs.layout is torch.strided and ours.stride() != theirs.stride():
        return f"stride {ours.stride()} instead of {theirs.stride()}"
    ours, theirs = ours.detach(), theirs.detach()
    if theirs.layout is not torch.strided:
        ours, theirs = ours.to_dense(), theirs.to_dense()
    if ours.is_quantized:
        ours, theirs = ours.dequantize(), theirs.dequantize()
    if theirs.dtype is torch.complex32:  # has no comparison kernels
        ours, theirs = ours.to(torch.complex64), theirs.to(torch.complex64)
    if torch.equal(ours, theirs):
        return None
    if not (theirs.is_floating_point() or theirs.is_complex()):
        return describe_difference(ours, theirs)
    if theirs.dtype not in EPS and theirs.dtype not in REAL_OF:
        ours, theirs = ours.float(), theirs.float()
    eps = EPS[REAL_OF.get(theirs.dtype, theirs.dtype)]
    wide = torch.complex128 if theirs.is_complex() else torch.float64
    near = torch.isclose(ours.to(wide), theirs.to(wide), rtol=UNITS * eps, atol=0.0, equal_nan=True)
    return None if bool(near.all()) else "values"


def why_not_near(ours: torch.Tensor, theirs: torch.Tensor) -> str | None:
    """Where there is no fp64 result to judge by: near to eager, measured by the tensor's typical size."""
    eps = EPS[REAL_OF.get(theirs.dtype, theirs.dtype)]
    wide = torch.complex128 if theirs.is_complex() else torch.float64
    x, y = dense(ours).to(wide), dense(theirs).to(wide)
    typical = float(y.abs().nan_to_num(0.0, 0.0, 0.0).pow(2).mean().sqrt())
    near = torch.isclose(x, y, rtol=NEAR * eps, atol=NEAR * eps * typical, equal_nan=True)
    return None if bool(near.all()) else describe_difference(ours, theirs)


def why_not_accurate(ours: torch.Tensor, theirs: torch.Tensor, exact: Any) -> str | None:
    if not isinstance(exact, torch.Tensor) or exact.shape != theirs.shape:
        return describe_difference(ours, theirs)
    if bool((torch.isfinite(theirs) & ~torch.isfinite(exact)).any()):  # a mask of float32's least number overflows
        return why_not_near(ours, theirs)
    eps = EPS[REAL_OF.get(theirs.dtype, theirs.dtype)]
    wide = torch.complex128 if theirs.is_complex() else torch.float64
    x, y, z = (dense(t).to(wide).resolve_conj() for t in (ours, theirs, exact))
    if bool((torch.isnan(x) != torch.isnan(y)).any()):
        return f"NaN where eager has none, or the reverse ({int((torch.isnan(x) != torch.isnan(y)).sum())} elements)"
    finite = torch.isfinite(torch.view_as_real(z).sum(-1) if z.is_complex() else z)
    finite &= torch.isfinite(torch.view_as_real(y).sum(-1) if y.is_complex() else y)
    if not torch.equal(x[~finite].nan_to_num(1e300), y[~finite].nan_to_num(1e300)):
        return "infinities differ from eager's"
    x, y, z = x[finite], y[finite], z[finite]
    if not x.numel():
        return None
    ours_error, eager_error = (x - z).abs(), (y - z).abs()
    typical = z.abs().pow(2).mean().sqrt()
    allowed = EAGER_FACTOR * eager_error.max() + UNITS * eps * (z.abs() + typical)
    if bool((ours_error <= allowed).all()):
        return None
    worst = int((ours_error - allowed).argmax())
    return (f"error {float(ours_error[worst]):.1e} against fp64 at {worst} (value {z[worst].item():.4g}), "
            f"eager's worst is {float(eager_error.max()):.1e}")


def error_ratio(got: list[Any], eager: list[Any], exact: Callable[[], Any]) -> float | None:
    """How large our errors are beside eager's: the median over all tensors of the two errors' norms' ratio. About 1
    for arithmetic as careful as eager's, whatever single elements do."""
    exact_leaves = find_exact(exact)
    if exact_leaves is None or len(exact_leaves) != len(got):
        return None
    ratios = []
    for ours, theirs, true in zip(got, eager, exact_leaves, strict=True):
        if isinstance(theirs, torch.Tensor) and isinstance(true, torch.Tensor) and theirs.numel() > 1 and theirs.is_floating_point() and theirs.shape == true.shape:
            theirs_error = float((theirs.double() - true).norm())
            if theirs_error:
                ratios.append(float((ours.double() - true).norm()) / theirs_error)
    return round(statistics.median(ratios), 2) if ratios else None


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()


def describe_difference(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    differs = (ours != theirs) & ~((ours != ours) & (theirs != theirs))
    where = int(differs.flatten().to(torch.int8).argmax()) if differs.numel() else 0
    return (f"{int(differs.sum())} of {differs.numel()} elements differ, first at {where}: "
            f"{ours.flatten()[where].item()} instead of {theirs.flatten()[where].item()}")
