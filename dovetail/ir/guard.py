"""What must still be true for compiled code to be used again: a path and a check.

    Guard(Attr(Arg(0, "self"), "training"), Is(False))      `self.training is False`

Guards are data. csrc evaluates them (`guards.c`), and says from the same code which one failed; this
file also prints them. The order is the order of reading, so a path's owner is checked before it.
"""
from __future__ import annotations

from typing import ClassVar

from dovetail.ir.expr import Expr
from dovetail.ir.source import Source
from dovetail.util.loc import Loc
from dovetail.util.noun import Noun


class Check(Noun):
    """Base of all checks on the object at a path."""

    form: ClassVar[str]
    """What people read, with {0} for the check itself."""

    def __str__(self) -> str:
        return self.form.format(self)


class Is(Check, eq=False):
    """The very same object, which the guard keeps alive."""

    value: object
    form = "is {0.value!r:.60}"


class Equals(Check, eq=False):
    """Same exact type and equal: numbers (0.0 is not -0.0, NaN equals NaN), strings, tuples of those."""

    value: object
    form = "== {0.value!r:.60}"


class TypeIs(Check):
    """type(object) is `type`."""

    type: type
    form = "type is {0.type.__qualname__}"


class Length(Check):
    """len() of a list, tuple, dict or set."""

    length: int
    form = "len == {0.length}"


class DictKeys(Check, eq=False):
    """A dict with exactly these keys in this order."""

    keys: tuple[object, ...]
    form = "keys == {0.keys!r:.80}"


class Lacks(Check, eq=False):
    """A dict without this key."""

    key: object
    form = "lacks {0.key!r}"


class Bare(Check, eq=False):
    """An instance without some attributes, and with nothing in others, which are dicts. Traces add to it."""

    missing: list[str]
    empty: list[str]
    form = "lacks {0.missing!r}, has nothing in {0.empty!r}"


class SameAs(Check):
    """The same object as at another path (two names for one thing), or with same=False another one."""

    other: Source
    same: bool = True

    def __str__(self) -> str:
        return f"{'is' if self.same else 'is not'} {self.other}"


class TensorIs(Check, eq=False):
    """A tensor with these properties. `type` is the Python class; a None in shape or stride is free.

    dispatch: the tensor's dispatch keys as torch._C._dispatch_keys(t).raw_repr() gives them."""

    type: type
    dtype: object
    device_kind: str
    device_index: int
    requires_grad: bool
    shape: tuple[int | None, ...]
    stride: tuple[int | None, ...]
    dispatch: int
    form = "tensor {0.dtype} {0.shape} stride {0.stride} grad={0.requires_grad}"


class ClassIs(Check, eq=False):
    """The class at this path has not been modified since (its type version): methods, class attributes."""

    type: type
    form = "class {0.type.__qualname__} unchanged"


class State(Check):
    """Torch's global state as at capture: grad mode, inference mode, autocast, default dtype and device,
    deterministic flags, torch-function modes, number of threads. The path is ignored."""

    values: tuple[tuple[str, object], ...]

    def __str__(self) -> str:
        return "global state " + ", ".join(f"{k}={v}" for k, v in self.values)


class Holds(Check):
    """A boolean expression over shape symbols; `reads` gives each symbol's name and path."""

    condition: Expr
    reads: tuple[tuple[str, Source], ...]
    form = "{0.condition}"


class Predicate(Check, eq=False):
    """A Python function of the object, for the rare check that has no native form."""

    test: object
    text: str
    form = "{0.text}"


class Guard(Noun):
    source: Source
    check: Check
    loc: Loc | None = None

    def __str__(self) -> str:
        where = f"    # {self.loc}" if self.loc else ""
        return f"{self.source} {self.check}{where}"
