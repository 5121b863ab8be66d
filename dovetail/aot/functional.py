"""The functional twin of every op that writes: OpOverload -> Twin.

    aten.add_.Tensor(self, other)            aten.add.Tensor, and result 0 is the new self
    aten.mul.out(self, other, *, out)        aten.mul.Tensor, and result 0 is the new out
    aten._native_batch_norm_legit(...)       ..._functional: three results, then the new statistics

The twin is found by schema: the same arguments less `out`, no writes. An op that has none (a user's
custom op, most often) gets one made: it copies what the op writes, calls the op, returns the copies.

    mylib.bump(Tensor(a!) x) -> Tensor       dovetail.mylib_bump_default(Tensor x) -> (Tensor, Tensor)
"""
from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._pytree import tree_map_only

from dovetail.errors import DataDependentValue, UnsupportedMutation
from dovetail.fake.form import is_dense
from dovetail.fake.kernels import IN_PLACE
from dovetail.util.library import define_op, restride
from dovetail.util.noun import Noun


class Twin(Noun):
    """`written` names the arguments that receive the trailing results of `op`."""

    op: Any
    written: tuple[str, ...]
    outs: tuple[str, ...]
    """Of the written arguments, those that op itself does not take."""
    positions: dict[str, int]
    defaults: tuple[Any, ...]
    """By position: what the dispatcher leaves out when it is the default, which op may not have."""


def _types(arguments: Any) -> list[str]:
    return [str(argument.type) for argument in arguments]


@cache
def twin_of(func: Any) -> Twin:
    schema = func._schema
    namespace, base = schema.name.split("::")
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    outs = tuple(a.name for a in written if a.is_out)
    wanted = [a for a in schema.arguments if not a.is_out]
    positions = {a.name: i for i, a in enumerate(schema.arguments) if not a.kwarg_only}
    defaults = tuple(a.default_value for a in schema.arguments if not a.kwarg_only)
    stem = base[:-1] if base.endswith("_") and not outs else base
    for name in (stem, f"{stem}_functional"):
        packet = getattr(getattr(torch.ops, namespace), name, None)
        for overload in packet.overloads() if packet is not None else ():
            candidate = getattr(packet, overload)
            if _is_twin(candidate._schema, wanted, len(written)):
                return Twin(candidate, tuple(a.name for a in written), outs, positions, defaults)
    is_nested = len(written) + len(schema.returns) > 1 and "List[Tensor]" in _types(written)
    if outs or is_nested or not _COPIED.keys() >= {*_types(written)}:
        raise UnsupportedMutation(detail=f"{func} writes to its arguments and has no functional form")
    return Twin(_make(func, written), tuple(a.name for a in written), (), positions, defaults)


def _is_twin(schema: Any, wanted: list[Any], writes: int) -> bool:
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return False
    return _types(schema.arguments) == _types(wanted) and len(schema.returns) >= writes


# -- random numbers in an uncommon layout --------------------------------------------------------------


def _draw(like: torch.Tensor, op: str, stride: list[int], args: list[Any]) -> torch.Tensor:
    """Fill new memory of these strides: kernels draw in memory order, so the layout decides who gets what."""
    made = torch.empty_strided(like.shape, stride, dtype=like.dtype, device=like.device)
    return getattr(made, op)(*args)  # type: ignore[no-any-return]


_SEEDED: Final = (torch.Tag.nondeterministic_seeded,)
define_op("draw(Tensor like, str op, SymInt[] stride, Scalar[] args) -> Tensor", _draw, tags=_SEEDED)


# -- twins of custom ops -----------------------------------------------------------------------------


def _make(func: Any, written: list[Any]) -> Any:
    """Define the op that does on copies what func does in place."""
    schema = func._schema
    name = str(func).replace(".", "_").replace("::", "_")
    while hasattr(torch.ops.dovetail, name):  # an op defined anew, as when a notebook's cell runs again
        name += "_"
    takes, _, gives = str(schema).partition("(")[2].rpartition(" -> ")
    own = [part for part in gives.strip(" ()").split(", ") if part not in ("", "NoneType")]
    copies = [_COPIED[kind] for kind in _types(written)]
    text = _ALIAS.sub("", f"{name}({takes} -> ({', '.join([*own, *copies])})")
    names = [a.name for a in schema.arguments]
    writes = [a.name for a in written]

    def copied(op: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args)), **kwargs}
        copies = {n: tree_map_only(torch.Tensor, torch.clone, given.get(n)) for n in writes}
        made = op(**given | copies)
        made = () if made is None else made if isinstance(made, tuple) else (made,)
        results = (*made, *copies.values())
        return results[0] if len(results) == 1 else results

    fake = func if own else lambda *args, **kwargs: None  # where it only writes, nobody wrote one
    made = define_op(text, partial(copied, func), partial(copied, fake))
    if func.namespace == "dovetail":  # a kernel of the user's: it may write to memory of its own
        IN_PLACE[str(made)] = str(func), tuple(map(names.index, writes))
    return made


_COPIED: Final = {"Tensor": "Tensor", "Optional[Tensor]": "Tensor?", "List[Tensor]": "Tensor[]"}
_ALIAS: Final = re.compile(r"\([$\w]+!?( -> [a-z*|]*)?\)(?=[ \[?])")
"""The alias annotation of a type: Tensor(a!) x"""


# -- backwards of custom ops that cannot be traced, as one call each -------------------------------


class Opaque(Noun, eq=False):
    """A call to record: op(tensors), whose results have the shapes of `like`, at `positions`. They have its
    strides, too, as far as these are numbers and without gaps; else they are row-major."""

    op: str
    tensors: list[torch.Tensor]
    like: list[torch.Tensor]
    strides: list[tuple[int, ...] | None]
    positions: list[int]
    count: int


def definition_of(func: Any) -> Any | None:
    """The custom op that func belongs to, if it has a backward of its own."""
    found = OPDEFS.get(func._schema.name)
    return found if found is not None and found._backward_fn is not None else None


def watch(definition: Any, record: Callable[[Opaque], list[Any]]) -> Callable[[], None]:
    """From here on, a backward of the op that needs a tensor's value, which a Fake does not have, is handed
    to `record`: as an op of its own that takes what the context saved and the gradients, and runs the user's
    function on them. Each gradient has the shape of the input it belongs to. Returns what ends that."""
    backward, set_up = definition._backward_fn, definition._setup_context_fn

    def watched_set_up(ctx: Any, **given: Any) -> None:
        ctx.dovetail_inputs = given["inputs"]
        if set_up is not None:
            set_up(ctx, **given)

    def watched_backward(ctx: Any, *grads: Any) -> Any:
        try:
            return backward(ctx, *grads)
        except DataDependentValue:
            call = _describe(backward, ctx, grads)
            made = dict(zip(call.positions, record(call)))
            return tuple(made.get(i) for i in range(call.count))

    definition._backward_fn, definition._setup_context_fn = watched_backward, watched_set_up
    return lambda: vars(definition).update(_backward_fn=backward, _setup_context_fn=set_up)


def _describe(backward: Callable[..., Any], ctx: Any, grads: Sequence[Any]) -> Opaque:
    """Define the op that runs this backward on real tensors."""
    inputs = ctx.dovetail_inputs
    kept = {k: v for k, v in vars(ctx).items() if k not in ("dovetail_inputs", "needs_input_grad")}
    named = [name for name, value in kept.items() if isinstance(value, torch.Tensor)]
    saved = list(ctx.saved_tensors)
    present = [grad is not None for grad in grads]
    needed = tuple(ctx.needs_input_grad[: len(inputs)])
    positions = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and needed[i]]
    like = [inputs[i] for i in positions]
    is_static = all(isinstance(size, int) for x in like for size in x.shape)
    strides = [x.stride() if is_static and is_dense(x.shape, x.stride()) else None for x in like]
    forms = [(tuple(x.shape) if is_static else None, x.dtype, x.device) for x in like]

    def run(given: list[torch.Tensor]) -> list[torch.Tensor]:
        rest = iter(given)
        tensors = tuple(next(rest) for _ in saved)
        own = kept | {name: next(rest) for name in named}
        context = SimpleNamespace(**own, saved_tensors=tensors, needs_input_grad=needed)
        made = backward(context, *(next(rest) if is_here else None for is_here in present))
        made = made if isinstance(made, (list, tuple)) else (made,)
        seen = list(given)
        for i, stride, form in zip(positions, strides, forms):
            seen.append(_laid_out(made[i], stride, seen, *form))
        return seen[len(given) :]

    op = define_op(f"backward_{uuid.uuid4().hex}(Tensor[] given) -> Tensor[]", run)
    tensors = [*saved, *(kept[n] for n in named), *(grad for grad in grads if grad is not None)]
    return Opaque(str(op), tensors, like, strides, positions, len(inputs))


def _laid_out(
    grad: Any, stride: tuple[int, ...] | None, seen: list[torch.Tensor], shape: Any, dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """As the graph was told, and in memory of its own; zeros where there is none."""
    if grad is not None:
        if stride is None:
            return grad.clone(memory_format=torch.contiguous_format)  # type: ignore[no-any-return]
        places = [other.untyped_storage()._cdata for other in seen]
        is_own = grad.stride() == stride and grad.untyped_storage()._cdata not in places
        return grad if is_own else restride(grad, stride)
    if shape is None:
        detail = "a custom op's backward gave no gradient for an input of symbolic size"
        raise UnsupportedMutation(detail=detail)
    zeros = torch.zeros(shape, dtype=dtype, device=device)
    return zeros if stride is None else restride(zeros, stride)
