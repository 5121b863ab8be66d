"""What every target needs to know about a Group before it writes text, and what it must offer then.

Group -> Shape: memory arguments, size symbols, passes over a row, which loop is contiguous
text, Shape -> Launchable: a kernel and how to call it

softmax: args x (read), o (written); passes 0: max | 1: exp, sum | 2: div; contiguous loop r0;
m and s are row values, e is kept for a later pass
"""
from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final, TypeAlias, cast

from dovetail.ir import loop as ir
from dovetail.ir.expr import INF, ONE, Expr, linear_in, product, symbols
from dovetail.ir.loop import FUNCTIONS, SCANS, Buffer, Nest, Range, Scalar, Write, iter_scalars, roots_of
from dovetail.ir.program import Kernel
from dovetail.ir.schedule import Group, read_later
from dovetail.ir.types import BOOL, DType
from dovetail.util.noun import Noun, replace


class Argument(Noun):
    buffer: Buffer
    is_written: bool


class Pass(Noun):
    """First `rows`, once per outer point; then one walk over the inner ranges doing all of `points`."""

    level: int
    rows: tuple[Nest, ...]
    points: tuple[Nest, ...]


class Shape(Noun):
    args: tuple[Argument, ...]
    symbols: tuple[Expr, ...]
    """Of sizes, in order of name."""
    numbers: tuple[str, ...]
    """Of the program's inputs that are numbers."""
    passes: tuple[Pass, ...]
    contiguous: Range | None
    """The loop whose variable moves through memory one element at a time, for vectors or lanes."""
    kept_rows: tuple[str, ...]
    """Internal buffers with a value per inner point that a later pass reads."""


def analyse(group: Group, buffers: dict[str, Buffer]) -> Shape:
    passes = tuple(_passes(group))
    has_inner = len(group.ranges) > group.outer
    rows = [n for n in group.nests if n.reduce or has_inner and len(n.ranges) == group.outer]
    used = {s for expr in group_exprs(group) for s in symbols(expr)} - {r.var for r in group.ranges}
    numbers = dict.fromkeys(str(node.args[0]) for node in scalars_of(group) if node.op == "input")
    args, sizes = tuple(_arguments(group, buffers)), tuple(sorted(used, key=lambda s: s.name))
    lasting = set(group.internal) & read_later(group.nests, group.levels).keys()
    lasting -= {buffer for nest in rows for buffer in nest.written_buffers}
    kept = tuple(buffer for buffer in group.written_buffers if buffer in lasting)
    return Shape(args, sizes, tuple(numbers), passes, choose_contiguous(group), kept)


def from_start(group: Group) -> tuple[Group, dict[object, int]]:
    """The group on buffers that begin with the first element it touches, and where in its own each begins:
    what reads x[t] in round t of a loop is one kernel for all rounds."""
    first = dict.fromkeys(group.internal, 0)
    for n in group.nests:
        own = [(b, None if w.index_scalar or w.buffers[1:] else w.index) for w in n.writes for b in w.buffers]
        for name, index in (*n.loads, *own):
            first[name] = min(first.get(name, INF), 0 if index is None else index.lo)
    starts: dict[object, int] = {name: at for name, at in first.items() if at > 0}
    memo: dict[Scalar, Scalar] = {}
    moved = lambda n: replace(n, writes=tuple([ir.moved_write(w, {}, memo, starts) for w in n.writes]))
    return replace(group, nests=tuple(map(moved, group.nests))) if starts else group, starts


Form: TypeAlias = "tuple[object, ...]"


def form_of(group: Group, buffers: dict[str, Buffer]) -> tuple[Form, list[str]]:
    """What makes two groups one kernel, and the names of this one's buffers in order of appearance: all of
    a group but names and places in the user's program. Layers of a model differ in nothing else."""
    numbers: dict[str, int] = {}
    parts: list[object] = [group.outer, group.ranges, group.levels]
    for nest in group.nests:
        seen: dict[Scalar, int] = {}
        for node in iter_scalars(*roots_in((nest,))):
            seen[node] = len(seen)
            parts.append(node.op)
            parts.append(node.dtype)
            for arg in node.args:
                if type(arg) is Scalar:
                    parts.append(seen[arg])
                elif type(arg) is str:
                    parts.append(numbers.setdefault(arg, len(numbers)) if node.op != "input" else arg)
                else:
                    parts.append(repr(arg) if node.op == "const" else arg)
        parts += [nest.ranges, nest.reduce]
        for w in nest.writes:
            written = tuple(numbers.setdefault(name, len(numbers)) for name in w.buffers)
            parts += [written, w.index, w.reduce, *(seen[root] for root in roots_of(w))]
    for name in numbers:
        buffer = buffers[name]
        parts += [buffer.type, buffer.kind, buffer.is_loose, name in group.internal]
    return tuple(parts), list(numbers)


def _passes(group: Group) -> Iterator[Pass]:
    has_inner = len(group.ranges) > group.outer
    for level in range(max(group.levels, default=0) + 1):
        nests = [nest for nest, at in zip(group.nests, group.levels) if at == level]
        rows = tuple(n for n in nests if has_inner and not n.reduce and len(n.ranges) == group.outer)
        yield Pass(level, rows, tuple(n for n in nests if n not in rows))


def _arguments(group: Group, buffers: dict[str, Buffer]) -> Iterator[Argument]:
    written = group.written_buffers
    for name in group.read_buffers:
        if name not in written:
            yield Argument(buffers[name], False)
    for name in written:
        if name not in group.internal:
            yield Argument(buffers[name], True)


def writes_in(nests: Iterable[Nest]) -> list[Write]:
    return [write for nest in nests for write in nest.writes]


def roots_in(nests: Iterable[Nest]) -> list[Scalar]:
    return [root for write in writes_in(nests) for root in roots_of(write)]


def scalars_of(group: Group) -> Iterable[Scalar]:
    return iter_scalars(*roots_in(group.nests))


def certain(roots: Iterable[Scalar], holding: Collection[Scalar] = ()) -> set[Scalar]:
    """What is computed whatever the data; the rest is reached only through the value of a `masked`, and is
    computed under its condition, unless that is among those `holding`."""
    seen: set[Scalar] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "masked":
            stack += node.operands[1:2] if node.operands[0] in holding else node.operands[::2]
        else:
            stack += node.operands
    return seen


def scalar_exprs(node: Scalar) -> Iterator[Expr]:
    return (arg for arg in node.args if isinstance(arg, Expr))


def group_exprs(group: Group) -> Iterator[Expr]:
    for item in group.ranges:
        yield item.size
    for nest in group.nests:
        yield from (write.index for write in nest.writes)
    for node in scalars_of(group):
        yield from scalar_exprs(node)


# -- the contiguous loop ---------------------------------------------------------------------------

UNIT: Final = 1.0
SAME: Final = 0.25
FAR: Final = -1.0
STEP_SCORES: Final[dict[int | None, float]] = {0: SAME, 1: UNIT, 2: SAME}
"""Every second element is two vectors shuffled."""
STORE_WEIGHT: Final = 1.5
SHORT: Final = 8


def choose_contiguous(group: Group) -> Range | None:
    """The loop along which most accesses are one element apart. What is touched once per row hardly
    counts: each access weighs as much as the loops it varies with make it happen."""
    best: Range | None = None
    best_score = 0.0
    sizes = {r.var: max(float(r.size.value), 1.0) if r.size.is_const else 64.0 for r in group.ranges}
    accesses = [(index, weight * _share((index,), sizes)) for index, weight in _accesses(group)]
    gathers = [(node, _share(exprs_below(node), sizes)) for node in _gathers(group.nests, group)]
    for item in reversed(group.ranges):
        score = sum(weight * step_score(index, item.var) for index, weight in accesses)
        score += sum(weight * STEP_SCORES.get(step_of(node, item.var), FAR) for node, weight in gathers)
        if item.size.is_const and item.size.value < SHORT:
            score = score / 4 if score > 0 else score
        score -= 1e3 * _is_dear_along(item, group)
        if best is None or score > best_score + 1e-6:
            best, best_score = item, score
    return best


REDUCED: Final = {"max": 7.0, "min": 7.0, "welford": 11.0, "argmax": 15.0, "argmin": 15.0}
SUMMED, CALLED, CALLED_ONCE, APART, FEW = 2.4, 4.0, 18.0, 0.55, 32
"""Nanoseconds to make one number of a vector; for a function of a vector, and of a number; for what is in
memory not beside the last."""


def _is_dear_along(item: Range, group: Group) -> bool:
    """Short rows are better reduced side by side than each in a vector, from which single numbers come."""
    reduces = [nest for nest in group.nests if item in nest.reduce]
    kinds = [w.reduce for w in writes_in(reduces) if w.reduce not in SCANS]
    has_rows = any(not r.size.is_const or r.size.value >= FEW for r in group.ranges[: group.outer])
    if not (kinds and has_rows and item.size.is_const):
        return False
    spent, apart = sum(REDUCED.get(str(kind), SUMMED) for kind in kinds), 0
    for nest in group.nests:
        cost = CALLED if item in (*nest.ranges, *nest.reduce) else CALLED_ONCE
        spent += cost * sum(node.op in COSTLY for node in iter_scalars(*roots_in((nest,))))
        touched = [index for name, index in nest.loads if name not in group.internal]
        touched += [w.index for w in nest.writes if not w.reduce and w.buffers[0] not in group.internal]
        touched += [expr for node in _gathers((nest,), group) for expr in exprs_below(node)]
        apart += sum(index is not None and item.var in symbols(index) for index in touched)
    return spent > APART * item.size.value * apart


def _gathers(nests: Iterable[Nest], group: Group) -> list[Scalar]:
    """The computed indices at which memory is read."""
    scalars = iter_scalars(*roots_in(nests))
    return [n.operands[0] for n in scalars if n.op == "load_at" and n.args[0] not in group.internal]


def _share(exprs: Iterable[Expr], sizes: dict[Expr, float]) -> float:
    """How often something over these expressions happens, of all points of the loops."""
    used = {s for expr in exprs for s in symbols(expr)}
    return 1.0 / math.prod(size for var, size in sizes.items() if var not in used)


def exprs_below(node: Scalar) -> list[Expr]:
    return [expr for each in iter_scalars(node) for expr in scalar_exprs(each)]


def slope(index: Expr, var: Expr) -> int | None:
    """How much an index grows when `var` grows by one; None if that is not always the same."""
    parts = linear_in(index, var)
    return parts[0].value if parts is not None and parts[0].is_const else None


def step_score(index: Expr, var: Expr) -> float:
    return STEP_SCORES.get(slope(index, var), FAR)


def step_of(node: Scalar, var: Expr) -> int | None:
    """The same of an integer scalar."""
    if node.op in ("const", "input"):
        return 0
    if node.op in ("index", "load"):
        step = slope(node.args[-1], var)  # type: ignore[arg-type]
        return step if node.op == "index" or step == 0 else None
    steps = [step_of(operand, var) for operand in node.operands]
    if all(step == 0 for step in steps):
        return 0
    if any(step is None for step in steps) or not node.dtype.is_integer:
        return None
    if node.op in ("add", "sub"):
        return steps[0] + steps[1] if node.op == "add" else steps[0] - steps[1]  # type: ignore[operator]
    if node.op == "cast":
        return steps[0] if node.operands[0].dtype.is_integer else None
    if node.op == "mul" and steps[1] == 0 and (factor := _number(node.operands[1])) is not None:
        return steps[0] * factor  # type: ignore[operator]
    return None


def _number(node: Scalar) -> int | None:
    if node.op == "const":
        return int(node.args[0])  # type: ignore[call-overload, no-any-return]
    if node.op == "index" and node.args[0].is_const:  # type: ignore[attr-defined]
        return node.args[0].value  # type: ignore[attr-defined, no-any-return]
    return None


def crossing_loads(group: Group, var: Expr, other: Expr) -> list[tuple[str, Expr]]:
    """Loads that are far apart along `var` and one apart along `other`: what a transpose reads."""
    found: dict[tuple[str, Expr], None] = {}
    sure = certain(roots_in(group.nests))  # a load under a condition may be outside of its buffer
    for node in scalars_of(group):
        if node.op != "load" or node not in sure or node.args[0] in group.internal:
            continue
        buffer, index = cast("tuple[str, Expr]", node.args)
        along, across = linear_in(index, other), linear_in(index, var)
        if along is None or across is None or along[0] is not ONE:
            continue
        if not across[0].is_const or across[0].value > 1:
            found[buffer, index] = None
    return list(found)


def _accesses(group: Group) -> Iterator[tuple[Expr, float]]:
    internal = set(group.internal)
    seen: set[tuple[str, Expr]] = set()
    for nest in group.nests:
        for buffer, index in nest.loads:
            if index is not None and buffer not in internal and (buffer, index) not in seen:
                seen.add((buffer, index))
                yield index, 1.0
        for write in nest.writes:
            is_plain = write.index_scalar is None and write.reduce in (None, *SCANS)
            if is_plain and not internal.issuperset(write.buffers):
                yield write.index, STORE_WEIGHT


# -- reductions ------------------------------------------------------------------------------------


def neutral(kind: str, dtype: DType) -> int | float:
    """What a reduction starts from: combined with anything, it changes nothing."""
    if kind in ("sum", "any"):
        return 0
    if kind in ("prod", "all"):
        return 1
    is_max = kind in ("max", "argmax")
    if dtype.is_float:
        return -math.inf if is_max else math.inf
    bits, is_signed = dtype.bits, dtype.kind == "int"
    if is_max:
        return -(2 ** (bits - 1)) if is_signed else 0
    return 2 ** (bits - 1) - 1 if is_signed else 1 if dtype is BOOL else 2**bits - 1


# -- cost ------------------------------------------------------------------------------------------

COSTLY: Final = frozenset((*FUNCTIONS, "pow", "atan2", "hypot", "sigmoid", "remainder", "floordiv"))


def work(group: Group) -> Expr:
    """Elements, weighted by how dear each is, for the choice between one thread and many."""
    dear = 1 + sum(node.op in COSTLY for w in writes_in(group.nests) for node in iter_scalars(w.value))
    return product(r.size for r in (*group.ranges, Range(ONE, product([min(dear, 8)]))))


def varies(roots: Iterable[Scalar], variables: set[Expr], inner_buffers: set[str]) -> set[Scalar]:
    """The scalars below roots whose value changes with one of the variables, directly or through a
    buffer that holds a value per point."""
    found: set[Scalar] = set()
    for node in iter_scalars(*roots):
        if any(operand in found for operand in node.operands):
            found.add(node)
        elif node.op in ("load", "load_at") and node.args[0] in inner_buffers:
            found.add(node)
        elif any(not variables.isdisjoint(symbols(expr)) for expr in scalar_exprs(node)):
            found.add(node)
    return found


# -- kernels: a target is a function from a Group to one and how to call it ------------------------


class Launchable(Noun):
    """Parameters are the buffers `params`, then the size symbols, then run-time numbers."""

    kernel: Kernel
    params: tuple[str, ...]
    sizes: tuple[Expr, ...]
    numbers: tuple[str, ...]
    may_fail: bool = False
    grid: tuple[tuple[Expr, int], ...] = ()
    """On a GPU, for each grid axis: how many points it has, and which of the block sizes a program takes."""
    is_first: bool = False
    """The program's first kernel, which waits for what came before it before it reads anything."""
    starts: tuple[int, ...] = ()
    """On a CPU, where in each buffer what the kernel is given begins."""


Target: TypeAlias = "Callable[[Group, dict[str, Buffer]], Launchable]"
"""One kind of device."""


def launchable(
    group: Group, shape: Shape, language: str, text: str, comment: str, reserved: Iterable[str],
    prelude: tuple[str, ...], *, salt: str = "", may_fail: bool = False,
    grid: tuple[tuple[Expr, int], ...] = (), **more: Any,
) -> Launchable:  # fmt: skip
    """`text` has tokens for names (see below); with the `salt` it says what the kernel is. `more` are fields
    of a Kernel that only this language has."""
    key = key_of(text + salt)
    name = f"{identifier(group.name)[:60]}_{key}"
    moved = sum(a.buffer.type.bytes.value for a in shape.args if a.buffer.type.bytes.is_const)
    origins = tuple(dict.fromkeys(origin for nest in group.nests for origin in nest.origins))
    spelled = comment + with_names(text, name, reserved)
    kernel = Kernel(name, language, spelled, key, moved, origins, prelude, **more)
    params = tuple(a.buffer.name for a in shape.args)
    return Launchable(kernel, params, shape.symbols, shape.numbers, may_fail, grid)


# -- names in the text of a kernel: tokens while it is being written -------------------------------


_TOKEN: Final = re.compile("\x01([^\x02]*)\x02")


def token(name: str) -> str:
    """A name in the text, until it is known how it is to be spelled: kernels that differ in names only
    have one key. The kernel's own name is the token of ""."""
    return f"\x01{name}\x02"


def key_of(text: str) -> str:
    seen: dict[str, int] = {}
    plain = _TOKEN.sub(lambda m: f"b{seen.setdefault(m[1], len(seen))}", text)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def with_names(text: str, kernel: str, reserved: Iterable[str]) -> str:
    """The user's names, changed where they are words of the language or of the kernel's own text."""
    taken = {*reserved, *re.findall(r"[A-Za-z_]\w*", _TOKEN.sub(" ", text))}
    chosen = {"": kernel}
    for name in dict.fromkeys(_TOKEN.findall(text)):
        spelled = identifier(name)
        while spelled in taken:
            spelled += "_"
        taken.add(spelled)
        chosen.setdefault(name, spelled)
    return _TOKEN.sub(lambda m: chosen[m[1]], text)


def identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)
