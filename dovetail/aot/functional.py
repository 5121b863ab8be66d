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
from functools import cache
from typing import Any, Final

import torch

from dovetail.errors import UnsupportedMutation
from dovetail.fake.kernels import IN_PLACE
from dovetail.util.library import define_op
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
    if outs or any(str(a.type) not in ("Tensor", "Optional[Tensor]") for a in written):
        raise UnsupportedMutation(detail=f"{func} writes to its arguments and has no functional form")
    return Twin(_make(func), tuple(a.name for a in written), (), positions, defaults)


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


def _make(func: Any) -> Any:
    """Define the op that does on copies what func does in place."""
    schema = func._schema
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    name = str(func).replace(".", "_").replace("::", "_")
    while hasattr(torch.ops.dovetail, name):  # an op defined anew, as when a notebook's cell runs again
        name += "_"
    takes, _, gives = str(schema).partition("(")[2].rpartition(" -> ")
    gives = gives.strip()
    results = [part.strip() for part in gives.strip("()").split(",") if part.strip()]
    results += ["Tensor?" if "Optional" in str(a.type) else "Tensor" for a in written]
    text = _ALIAS.sub("", f"{name}({takes} -> ({', '.join(results)})")
    names = [a.name for a in schema.arguments]
    indices = [names.index(a.name) for a in written]

    def copied(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        copies: list[Any] = []
        for i in indices:
            value = kwargs.get(names[i]) if i >= len(given) else given[i]
            copies.append(None if value is None else value.clone())
            if i < len(given):
                given[i] = copies[-1]
            else:
                kwargs[names[i]] = copies[-1]
        made = func(*given, **kwargs)
        made = () if made is None else made if isinstance(made, tuple) else (made,)
        results = (*made, *copies)
        return results[0] if len(results) == 1 else results

    made = define_op(text, copied, copied)
    if func.namespace == "dovetail":  # a kernel of the user's: it may write to memory of its own
        IN_PLACE[str(made)] = str(func), tuple(indices)
    return made


_ALIAS: Final = re.compile(r"\(\w+!?( -> [a-z*|]+)?\)(?=[ \[?])")
"""The alias annotation of a type: Tensor(a!) x"""
