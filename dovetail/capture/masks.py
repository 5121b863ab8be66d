"""x[mask], whose size only values tell: kept as x and the mask while the program goes item by item.

    y[m] = x[m].exp() * 2        y.copy_(where(m, where(m, x, 1).exp() * 2, y))
    F.mse_loss(x[m], y[m])       where(m, mse_loss(x, y, "none"), 0).sum() / m.sum()

What the mask leaves out is 1 on the way in, and gets no gradient: where() gives none. Any other use of the
items breaks the graph at the line that took them.
"""
from __future__ import annotations

import math
import operator
from collections.abc import Callable
from types import MethodType
from typing import Any, Final

import torch
import torch.nn.functional as F

from dovetail.capture.attributes import RULES
from dovetail.capture.text import version_of
from dovetail.capture.trace import Trace
from dovetail.errors import DataDependentSize
from dovetail.fake.tensor import Fake

INDICES: Final = frozenset({int, torch.SymInt, slice})


class Masked:
    """Stands in for `fake[mask]`; `fake` is 1 elsewhere, or what was computed of that."""

    __slots__ = ("trace", "fake", "mask", "version", "loc", "made_at")

    def __init__(self, trace: Trace, fake: Fake, mask: Fake, of: Masked | None = None) -> None:
        self.trace, self.fake, self.mask = trace, fake, mask
        self.version: object = version_of(mask) if of is None else of.version
        self.loc: Any = trace.loc() if of is None else of.loc
        self.made_at: int = trace.step if of is None else of.made_at

    def leave(self, *_: Any) -> Any:
        raise DataDependentSize(self.loc, function="indexing with a mask", step=self.made_at)

    def operand(self, value: Any, name: str) -> Any:
        """Another operand, for all elements: items of the same mask, or what is the same for each item. It
        may get a gradient where that of what is left out, 0, stays 0 on the way to it."""
        rest = self.fake.dim() - self.mask.dim()
        if type(value) is Masked:
            is_like = is_same_mask(self, value.mask) and value.fake.dim() == self.fake.dim()
            return value.fake if is_like else self.leave()
        if type(value) is Fake and value.dim() == rest + 1 and value.shape[0] == 1:
            value = self.trace.call(torch.Tensor.squeeze, [value, 0], {})
        has_grad = type(value) is Fake and value.requires_grad and name not in ("add", "sub", "mul")
        if has_grad or type(value) is Fake and value.dim() > rest:
            self.leave()
        return value

    def reduced(self, how: str, keeps_rest: bool = False) -> Any:
        """The sum or mean of all, or over the items alone."""
        if how not in REDUCTIONS or how == "mean" and not self.fake.is_floating_point():
            self.leave()
        call, dtype = self.trace.call, self.fake.dtype
        wide = {"dtype": torch.float32} if dtype in (torch.float16, torch.bfloat16) else {}
        axes = [list(range(self.mask.dim()))] if keeps_rest else []
        total = call(torch.sum, [chosen(self.trace, self.mask, self.fake, 0), *axes], wide)
        if how == "mean":
            each = math.prod([] if keeps_rest else self.fake.shape[self.mask.dim() :])
            count = call(torch.mul, [call(torch.sum, [self.mask], {}), each], {})
            total = call(torch.div, [total, count], {})
        return call(torch.Tensor.to, [total, dtype], {}) if wide else total


def is_same_mask(items: Masked, mask: Fake) -> bool:
    """The very same, or made by the same comparison or view of tensors that nobody has written."""
    if version_of(items.mask) != items.version or version_of(mask) != items.version:
        return False
    made = [call for call in items.trace.calls if call.result is mask or call.result is items.mask]
    forms = [(call.target, len(call.args), len(call.kwargs)) for call in made]
    if mask is items.mask or len(made) != 2 or forms[0] != forms[1] or made[0].kwargs:
        return mask is items.mask
    pairs = list(zip(made[0].args, made[1].args))
    unwritten = all(not version_of(a) for a, _ in pairs if type(a) is Fake)
    return unwritten and all(a is b or type(a) in (int, float) and a == b for a, b in pairs)


def chosen(trace: Trace, mask: Fake, fake: Fake, other: Any) -> Any:
    """where(mask, fake, other), for a mask of the first dimensions."""
    if mask.dim() < fake.dim():
        mask = trace.call(torch.Tensor.reshape, [mask, [*mask.shape, *[1] * (fake.dim() - mask.dim())]], {})
    return trace.call(torch.where, [mask, fake, other], {})


def window_of(trace: Trace, x: Fake, key: Any) -> tuple[Fake, Fake] | None:
    """What a mask at the front of a key chooses from, and the mask; None where there is no such mask."""
    mask, *rest = key if type(key) is tuple and key else (key,)
    if type(mask) is not Fake or mask.dtype is not torch.bool or mask.constant is not None or not mask.dim():
        return None
    if not INDICES.issuperset(map(type, rest)) or mask.shape != x.shape[: mask.dim()]:
        return None
    every = [slice(None)] * mask.dim()
    return trace.call(operator.getitem, [x, (*every, *rest)], {}) if rest else x, mask


def take_masked(trace: Trace, x: Fake, key: Any) -> Masked | None:
    found = window_of(trace, x, key)
    if found is None:
        return None
    return Masked(trace, chosen(trace, found[1], found[0], True if x.dtype is torch.bool else 1), found[1])


def put_masked(trace: Trace, x: Fake, key: Any, value: Any) -> bool:
    """x[mask] = items, or a value that is the same for each: its gradient would else be of unknown size."""
    is_items = type(value) is Masked
    is_tied = type(value) is Fake and value.requires_grad and torch.is_grad_enabled()
    found = window_of(trace, x, key) if is_items or is_tied else None
    if found is None:
        return is_items and bool(value.leave())
    window, mask = found
    if not is_items and value.dim() > window.dim() - mask.dim():
        raise DataDependentSize(trace.loc(), function="indexing with a mask, in backward,")
    if is_items:
        whole = value.fake
        if window.shape != whole.shape or window.dtype is not whole.dtype or not is_same_mask(value, mask):
            value.leave()
    else:
        same = trace.call(torch.Tensor.to, [value], {"dtype": window.dtype, "device": window.device})
        whole = trace.call(torch.Tensor.expand, [same, window.shape], {})
    trace.call(torch.Tensor.copy_, [window, chosen(trace, mask, whole, window)], {})
    return True


def call_masked(trace: Trace, fn: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A function with such items among its arguments."""
    name = fn.__name__.strip("_")
    items = next(arg for arg in (*args, *kwargs.values()) if type(arg) is Masked)
    if version_of(items.mask) != items.version:
        items.leave()
    if fn is F.cross_entropy and len(args) == 2 and kwargs.get("reduction") != "none":
        return cross_entropy(items, args[0], args[1], kwargs)
    axes = [*args[1:], *(kwargs[key] for key in ("dim", "axis") if key in kwargs)]
    if name in REDUCTIONS and len(args) + len(kwargs) == 1 + len(axes) and axes in ([], [0], [(0,)]):
        return items.reduced(name, bool(axes))
    is_loss = fn in LOSSES and len(args) == 2 and not kwargs.keys() & {"size_average", "reduce"}
    is_exact = name not in DIVISIONS or items.fake.is_floating_point()
    if not is_loss and (name not in POINTWISE or not is_exact):
        items.leave()
    how = {"reduction": "none"} if is_loss else {}
    named = {key: items.operand(value, name) for key, value in kwargs.items()} | how
    made = trace.call(fn, [items.operand(arg, name) for arg in args], named)
    made = Masked(trace, made, items.mask, of=items)
    if made.fake.device != items.mask.device:
        items.leave()
    return made.reduced(kwargs.get("reduction", "mean")) if is_loss else made


def cross_entropy(items: Masked, logits: Any, labels: Any, kwargs: dict[str, Any]) -> Any:
    """Of rows of logits: labels that are left out are those to ignore."""
    is_like = type(logits) is type(labels) is Masked and is_same_mask(logits, labels.mask)
    if not is_like or (logits.fake.dim(), labels.fake.shape) != (items.mask.dim() + 1, items.mask.shape):
        items.leave()
    trace, ignored = items.trace, kwargs.get("ignore_index", -100)
    rows = trace.call(torch.Tensor.reshape, [logits.fake, [-1, logits.fake.shape[-1]]], {})
    wanted = trace.call(torch.Tensor.reshape, [chosen(trace, labels.mask, labels.fake, ignored), [-1]], {})
    return trace.call(F.cross_entropy, [rows, wanted], kwargs)


def _method(fn: Any, swap: bool = False) -> Callable[..., Any]:
    def method(self: Masked, *args: Any, **kwargs: Any) -> Any:
        return call_masked(self.trace, fn, [*args, self] if swap else [self, *args], kwargs)

    return method


def masked_attr(trace: Trace, items: Masked, name: str) -> Any:
    if name in ("dtype", "device", "requires_grad"):
        return getattr(items.fake, name)
    if name not in POINTWISE | REDUCTIONS:
        items.leave()
    return MethodType(_method(getattr(torch.Tensor, name)), items)


REDUCTIONS: Final = frozenset({"sum", "mean"})
LOSSES: Final = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
                 F.binary_cross_entropy_with_logits)  # fmt: skip
DIVISIONS: Final = frozenset("floordiv mod div truediv remainder fmod floor_divide pow".split())
"""Of whole numbers these may raise."""
POINTWISE: Final = DIVISIONS | frozenset(
    "add sub mul neg pos abs invert lt le gt ge eq ne exp log log1p log2 expm1 sqrt rsqrt square reciprocal"
    " sin cos tan tanh sigmoid relu silu gelu softplus clamp clip clamp_min clamp_max maximum minimum floor"
    " ceil round sign erf isnan isfinite logical_not float double half bfloat16 to long int bool detach clone"
    " contiguous".split()
)

for _name in "add sub mul truediv floordiv mod pow neg pos abs invert lt le gt ge eq ne".split():
    setattr(Masked, f"__{_name}__", _method(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Masked, f"__r{_name}__", _method(getattr(operator, _name), swap=True))
LEFT: Final = """bool int float index len iter getitem setitem contains str repr format matmul rmatmul and or
    xor rand ror rxor lshift rlshift rshift rrshift divmod rdivmod""".split()
for _name in LEFT:
    setattr(Masked, f"__{_name}__", Masked.leave)

RULES[Masked] = masked_attr
