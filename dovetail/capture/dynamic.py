"""Which sizes and numbers are symbolic, decided from what changed between calls.

    history = History(dynamic=None)
    capture f(x: [8, 4])      static; history notes x: [8, 4]
    capture f(x: [16, 4])     x's first size differs: it becomes the symbol s0, read by x.size(0)

dynamic=None is automatic as above; True makes everything symbolic from the start; False nothing, ever.
Parameters stay static, unless they are arguments, buffers until they change. A symbol that a branch or an op
needed to know something about leaves an assumption in Shapes; `all_guards` turns what is left of them into
guards, after the backend has run, because the backend may assume more.
"""
from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any, Final

import torch

from dovetail.capture.frame import Frame
from dovetail.capture.resume import is_resumed
from dovetail.capture.trace import Trace
from dovetail.errors import UnsupportedValue
from dovetail.fake import expr_of
from dovetail.fake.tensor import Fake, fake_like
from dovetail.ir.capture import Capture, GraphInput
from dovetail.ir.expr import INF, Expr, eq, fold_expr, sym, symbols
from dovetail.ir.guard import Equals, Guard, Holds, Predicate, TypeIs
from dovetail.ir.source import Arg, Computed, DictAttr, Item, KeyItem, Size, Source, Stride
from dovetail.sym import Real, Shapes, iter_leaves, make_symfloat, make_symint
from dovetail.util.noun import Noun, field

Dims = frozenset[int]

STACK: Final = "stack_"
"""Arguments of resume functions that were on the stack: a float there was read from a tensor, as a rule."""
MOST_NUMBERS: Final = 5
MOST_RESUMED: Final = 2
"""What follows a break is compiled in pieces, each of which would meet all those numbers again."""
LARGEST: Final = 1 << 48
"""Larger Python ints are constants: compiled code computes with 64 bits, Python with as many as it takes."""


class Seen(Noun, frozen=False):
    """What earlier captures of one code object read, by path: extents of tensors (their sizes, then their
    strides), values of numbers."""

    extents: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    numbers: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Path to (identity of the object it was read from, value): another instance with other sizes is no
    change of size."""
    forms: dict[str, set[object]] = field(default_factory=dict)
    """Lengths of lists, keys of dicts, texts."""
    dims: dict[str, Dims] = field(default_factory=dict)
    varying: set[str] = field(default_factory=set)
    draws: bool = True
    """Whether random numbers of Python's can be inputs of the graph."""

    def count_forms(self, source: Source, form: object) -> int:
        """How many there were by now, with this one."""
        forms = self.forms.setdefault(source.text, set())
        forms.add(form)
        return len(forms)


class History:
    """Kept by the compiler across captures."""

    def __init__(self, dynamic: bool | None) -> None:
        self.dynamic = dynamic
        self.seen: dict[tuple[CodeType, int], Seen] = {}

    def policy(self, frame: Frame) -> Policy | None:
        if self.dynamic is False:
            return None
        return Policy(self.dynamic is True, self.seen.setdefault(frame.key, Seen()))

    def learned(self, frame: Frame) -> int:
        """How many sizes are symbolic by now."""
        return sum(map(len, self.seen.get(frame.key, Seen()).dims.values()))


class Policy:
    """The decisions of one capture, and the symbols they made."""

    def __init__(self, everything: bool, seen: Seen) -> None:
        self.everything, self.seen = everything, seen
        self.shapes: Any = None
        self.extents: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.numbers: dict[str, tuple[int, float]] = {}
        self.sources: dict[str, Source] = {}
        self.unsteady: set[str] = set()
        """Floats that are known to change."""

    def shapes_of(self, trace: Trace) -> Shapes:
        if self.shapes is None:
            self.shapes = trace.shapes = Shapes(where=trace.loc)
        return self.shapes  # type: ignore[no-any-return]

    # -- what becomes a symbol

    def tensor(self, trace: Trace, value: torch.Tensor, source: Source) -> Any:
        """(Fake, sizes to guard, strides to guard, second Fake) for a tensor with symbolic extents; else
        None."""
        dims, rank = self.dims_of(trace, value, source), value.dim()
        if not dims:
            return None
        shapes = self.shapes_of(trace)
        found: dict[int, Expr] = {}

        def extent(dim: int) -> Expr | None:
            if dim in dims and dim not in found:
                where = Size(source, dim) if dim < rank else Stride(source, dim - rank)
                hint = value.shape[dim] if dim < rank else value.stride(dim - rank)
                found[dim] = shapes.symbol(hint, where)
                self.sources[found[dim].name] = where
                self.note(trace, found[dim].name, hint, where)
            return found.get(dim)

        fake = fake_like(value, shapes=shapes, extent=extent)
        if not found:
            return None
        sizes = tuple(None if dim in found else size for dim, size in enumerate(value.shape))
        strides = tuple(None if isinstance(n, torch.SymInt) else int(n) for n in fake.stride())
        self.guard_strides(trace, fake, source)
        return fake, sizes, strides, fake_like(value, shapes=shapes, extent=extent)

    def guard_strides(self, trace: Trace, fake: Fake, source: Source) -> None:
        for dim, expr in enumerate(map(expr_of, fake.stride())):
            own, places = Stride(source, dim), [(s.name, self.sources[s.name]) for s in symbols(expr)]
            if places and own not in dict(places).values():  # else it is a symbol of its own
                holds = Holds(eq(sym("stride", 0, INF), expr), (("stride", own), *places))
                trace.late_guards.append(Guard(source, holds, trace.loc()))

    def dims_of(self, trace: Trace, value: torch.Tensor, source: Source) -> Dims:
        is_fixed = isinstance(value, torch.nn.Parameter) and (self.everything or not isinstance(source, Arg))
        if is_fixed or value.dim() == 0:
            return frozenset()
        text, seen = f"{source.text} of {value.dim()}", self.seen
        extents, owner = (*value.shape, *value.stride()), owner_of(trace, source)
        known, before = seen.extents.get(text, (owner, None))
        self.extents[text] = (owner, extents)
        dims, held = set(seen.dims.get(text, ())), source.base
        everything = self.everything and not (isinstance(held, DictAttr) and held.name == "_buffers")
        if everything:
            dims |= set(range(len(extents)))
        elif before is not None and known == owner:
            dims |= {dim for dim, (a, b) in enumerate(zip(before, extents)) if a != b}
        dims |= marks(
            value, "_dovetail_dynamic_dims", "_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices"
        )
        dims -= marks(value, "_dovetail_static_dims", "_dynamo_static_indices")
        if not everything:
            seen.dims[text] = frozenset(dims)
        return frozenset(dim for dim in dims if extents[dim] > 1)

    def number(self, trace: Trace, value: Any, source: Source) -> Any:
        """A symbol for an int or a float that changes from call to call; else None."""
        if not trace.options.capture_scalars:
            return None
        text, seen = source.text, self.seen
        owner = owner_of(trace, source)
        before = seen.numbers.get(text)
        self.numbers[text] = (owner, value)
        if before is not None and before[0] == owner and type(before[1]) is type(value):
            seen.varying.update((text,) if before[1] != value else ())
        if isinstance(value, int) and abs(value) > LARGEST:
            return None
        is_result = isinstance(value, float) and isinstance(source, Arg) and source.name.startswith(STACK)
        if text not in seen.varying and not (self.everything and isinstance(source, Arg)) and not is_result:
            return None
        trace.guard(source, TypeIs(type(value)))
        name, made = self.symbol(trace, value, source, (-LARGEST, LARGEST))
        self.note(trace, name, value, source)
        if isinstance(value, float) and (is_result or text in seen.varying):
            self.unsteady.add(name)
        return made

    def note(self, trace: Trace, name: str, value: Any, source: Source) -> None:
        """What was another number in many captures is so in the next ones, too."""
        most = MOST_RESUMED if is_resumed(trace.frame.code) else MOST_NUMBERS
        if self.seen.count_forms(source, value) > most and not trace.is_whole:
            self.shapes.restless.add(name)

    def symbol(self, trace: Trace, value: Any, source: Source, bounds: tuple[int, int]) -> tuple[str, Any]:
        shapes, is_int = self.shapes_of(trace), isinstance(value, int)
        expr: Any = shapes.symbol(value, source, *bounds) if is_int else None
        name = expr.name if is_int else shapes.float_symbol(value, source)
        self.sources[name] = source
        return name, make_symint(shapes, expr, value) if is_int else make_symfloat(shapes, name)

    # -- symbols in the graph

    def names_in(self, values: Any) -> set[str]:
        """Names of the symbols that the graph's arguments need as inputs of their own."""
        return {name for value in values for name in leaves(self.simplified(value))}

    def simplified(self, value: Any) -> Any:
        expr = value.node.expr
        return self.shapes.simplify(expr) if isinstance(expr, Expr) else expr

    def inputs(self, names: set[str]) -> list[tuple[GraphInput, str]]:
        made, shapes = [], self.shapes
        for name in sorted(names, key=lambda n: (n[0], int(n[1:].strip("_")))):
            known = shapes.symbols.get(name)
            number = make_symint(shapes, known.expr, known.hint) if known else make_symfloat(shapes, name)
            hint = (known or shapes.floats[name]).hint
            made.append((GraphInput(name, self.sources[name], hint, number), name))
        return made

    def is_computed(self, value: Any) -> bool:
        """A float that is more than a symbol: kernels take it as one number, computed before they run."""
        expr = self.simplified(value)
        return isinstance(expr, Real) and expr.op != "sym"

    def computed(self, values: Any) -> list[tuple[GraphInput, str]]:
        """Inputs of the graph for such floats, each once, and what they stand for."""
        found = {str(self.simplified(value)): value for value in values if self.is_computed(value)}
        return [(self.compute(form, value), form) for form, value in found.items()]

    def compute(self, form: str, value: Any) -> GraphInput:
        shapes = self.shapes
        symbols: dict[str, Any] = {**shapes.symbols, **shapes.floats}
        names = sorted(leaves(self.simplified(value)))
        source = Computed(form, value, tuple((self.sources[name], symbols[name].hint) for name in names))
        name = shapes.float_symbol(value.node.hint, source)
        self.sources[name] = source
        shapes.drawn.update([name] * (not shapes.drawn.isdisjoint(names)))
        return GraphInput(name, source, value.node.hint, make_symfloat(shapes, name))

    def node(self, builder: Any, value: Any) -> Any:
        """A symbolic number as nodes of the fx graph."""
        if (found := builder.symbol_nodes.get(str(self.simplified(value)))) is not None:
            return found
        return fold(self.simplified(value), builder.symbol_nodes, builder.graph.call_function, builder.folded)

    def text(self, emit: Any, value: Any) -> str:
        """A symbolic number as Python text."""
        expr = self.simplified(value)
        names = {name: emit.load(self.sources[name]) for name in leaves(expr)}

        def call(function: Any, args: tuple[Any, ...]) -> str:
            shown = ", ".join(arg if isinstance(arg, str) else emit.value(arg) for arg in args)
            return f"{emit.const(function, function.__name__)}({shown})"

        made = fold(expr, names, call, {})
        return made if isinstance(made, str) else emit.value(made)  # type: ignore[no-any-return]

    def finish(self, trace: Trace) -> None:
        """Remember what this capture read."""
        self.seen.extents.update(self.extents)
        self.seen.numbers.update(self.numbers)


def owner_of(trace: Trace, source: Source) -> int:
    """Identity of the module an attribute is read from; 0 for all else: settings are made anew."""
    while isinstance(source, (Item, KeyItem)):
        source = source.of
    origin = trace.by_source.get(id(source.of)) if isinstance(source, DictAttr) else None
    return id(origin.original) if origin and isinstance(origin.original, torch.nn.Module) else 0


def marks(value: torch.Tensor, *names: str) -> set[int]:
    return {dim % max(value.dim(), 1) for name in names for dim in getattr(value, name, ())}


# -- expressions as calls of Python functions --------------------------------------------------------

def leaves(value: Any) -> set[str]:
    """Names of the symbols in an Expr or a Real."""
    return {leaf.name if isinstance(leaf, Expr) else leaf for leaf in iter_leaves(value)}


FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    **{name: getattr(operator, f"__{name}__")
       for name in "floordiv mod eq ne lt le and or mul add neg abs sub truediv pow".split()},
    "min": torch.sym_min, "max": torch.sym_max, "not": torch.sym_not,
    **{name.removeprefix("_sym_"): value for name, value in vars(torch).items() if name.startswith("_sym_")},
}  # fmt: skip
"""What the operations of an Expr or a Real are in Python."""


def fold(
    value: Any, names: dict[str, Any], call: Callable[[Any, tuple[Any, ...]], Any], memo: dict[Any, Any]
) -> Any:
    """Build a value bottom up with `call(function, arguments)`; constants stay constants."""
    if isinstance(value, Expr):
        return fold_expr(value, partial(_leaf, names), lambda op, *args: call(FUNCTIONS[op], args), memo)
    if isinstance(value, Real) and value not in memo:
        memo[value] = _fold_real(value, names, call, memo)
    return memo[value] if isinstance(value, Real) else value


def _leaf(names: dict[str, Any], value: Expr) -> Any:
    if value.op == "sym":
        return names[value.name]
    return value.value if value.op == "const" else value.op == "true"


def _fold_real(value: Real, names: dict[str, Any], call: Any, memo: dict[Any, Any]) -> Any:
    if value.op == "sym":
        return names[str(value.args[0])]
    args = tuple(fold(arg, names, call, memo) for arg in value.args)
    if value.op == "ratio":
        return call(operator.truediv, args) if args[1] != 1 else call(torch.sym_float, (args[0],))
    if value.op not in FUNCTIONS:
        raise UnsupportedValue(type="float", detail=f"symbolic {value.op}")
    return call(FUNCTIONS[value.op], args)


# -- guards ------------------------------------------------------------------------------------------

def all_guards(captured: Capture) -> tuple[Guard, ...]:
    """The capture's guards and, from its frozen Shapes, those on sizes and numbers."""
    shapes: Any = captured.shapes
    if shapes is None:
        return captured.guards
    sources = dict(captured.symbols)
    made = list(captured.guards)
    for assumption in shapes.freeze():
        names = sorted({symbol.name for symbol in symbols(assumption.condition)})
        reads = tuple((name, sources[name]) for name in names)
        made.append(Guard(reads[0][1], Holds(assumption.condition, reads), assumption.loc))
    for number in shapes.fixed_floats:
        source = sources[number.name]
        fixed = source.leaves if isinstance(source, Computed) else ((source, number.hint),)
        made.extend(Guard(leaf, Equals(hint)) for leaf, hint in fixed)
    for text, (number, loc) in shapes.conditions.items():
        test = eval(f"lambda {number.name}: {text}", {"math": math})
        made.append(Guard(sources[number.name], Predicate(test, text), loc))
    return tuple(made)
