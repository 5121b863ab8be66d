"""The loop IR: what a kernel computes, element by element.

    Scalar = const(value) | index(Expr) | load(buffer, Expr) | op(Scalar, ...)     interned trees, typed
    Nest   = for each point of `ranges` (and, for a reduction, of `reduce`):  writes
    Write  = store(buffer, Expr, Scalar) | reduce(buffer, Expr, kind, Scalar)
    Extern = buffers = op(buffers, constants)                                      a library call

    softmax over rows of x[8, 64] is four nests; the scheduler makes them one kernel:
        m[i]    = max over j of x[64*i + j]
        e[i, j] = exp(x[64*i + j] - m[i])
        s[i]    = sum over j of e[64*i + j]
        o[i, j] = e[64*i + j] / s[i]

Buffers are flat: an index counts elements from the buffer's first one. Loop variables are `sym`s
whose range is the loop's. Scalars compute in their own dtype; fp16 and bf16 appear only as `load`
results and as targets of `cast`, so a cast down and up again is where eager would have rounded.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Final, TypeAlias

from dovetail.ir.expr import Expr, substitute, sym
from dovetail.ir.graph import Arg, show_arg
from dovetail.ir.types import BOOL, CPU, I64, Device, DType, TensorType
from dovetail.util.loc import Loc
from dovetail.util.noun import Noun, Single, field, keep_weakly


class Scalar:
    """One interned value of a loop body."""

    __slots__ = ("op", "args", "dtype", "serial", "operands", "below", "__weakref__")
    op: str
    args: tuple[object, ...]
    dtype: DType
    serial: int
    operands: tuple[Scalar, ...]
    below: tuple[Scalar, ...] | None
    """All scalars that this one is made of, once somebody has asked: see iter_scalars."""

    def __repr__(self) -> str:
        return show_scalar(self)

    def __reduce__(self) -> tuple[object, ...]:
        return (scalar, (self.op, self.args, self.dtype))


_references: Final[dict[tuple[object, ...], Callable[[], Scalar | None]]] = {}
_serial = 0


def scalar(op: str, args: tuple[object, ...], dtype: DType) -> Scalar:
    """Intern one node. -0.0 and 0.0, 1 and True and 1.0 are different constants, hence the repr."""
    global _serial
    key = (op, repr(args[0]) if op == "const" else args, dtype)
    reference = _references.get(key)
    found = None if reference is None else reference()
    if found is None:
        found = object.__new__(Scalar)
        found.op, found.args, found.dtype, found.below = op, args, dtype, None
        found.operands = tuple([arg for arg in args if type(arg) is Scalar])
        found.serial = _serial = _serial + 1
        keep_weakly(_references, key, found)
    return found


def constant(value: float | int | bool, dtype: DType) -> Scalar:
    return scalar("const", (value,), dtype)


def index_value(expr: Expr, dtype: DType = I64) -> Scalar:
    """An index or a size used as a number."""
    return scalar("index", (expr,), dtype)


def input_value(name: str, dtype: DType) -> Scalar:
    """A Python number that is a run-time input of the graph, by the input's name."""
    return scalar("input", (name,), dtype)


def load(buffer: str, index: Expr, dtype: DType) -> Scalar:
    return scalar("load", (buffer, index), dtype)


def load_at(buffer: str, index: Scalar, dtype: DType) -> Scalar:
    """A gather: the index (an i64 scalar, already wrapped and checked) is itself computed."""
    return scalar("load_at", (buffer, index), dtype)


def masked(condition: Scalar, value: Scalar, other: Scalar) -> Scalar:
    """`value` where condition, else `other`; loads inside `value` happen only where condition holds."""
    return scalar("masked", (condition, value, other), value.dtype)


def holds(condition: Expr) -> Scalar:
    """A boolean index expression as a value."""
    return scalar("index", (condition,), BOOL)


def _declare(result: str, **arities: int) -> dict[str, str]:
    return dict.fromkeys(arities, result)


FUNCTIONS: Final = (
    "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf "
    "erfc lgamma"
).split()
"""Of one float: what a library computes."""
FLOAT_UNARY: Final = (*FUNCTIONS, "sqrt", "rsqrt", "frac", "sigmoid", "reciprocal")

SCALAR_OPS: Final[dict[str, str]] = {
    **dict.fromkeys(FLOAT_UNARY, "same"),
    **_declare(
        "same",
        # float
        floor=1, ceil=1, round=1, trunc=1, pow=2, atan2=2, hypot=2, copysign=2, div=2,
        # any number
        neg=1, abs=1, sign=1, add=2, sub=2, mul=2, maximum=2, minimum=2, fmax=2, fmin=2,
        remainder=2,      # Python's modulo
        floordiv=2,       # integers and floats
        truncdiv=2,       # integers
        check_index=2,    # check_index(i, size): i wrapped if negative; fails the call if out of range
        # bits
        bit_and=2, bit_or=2, bit_xor=2, bit_not=1,
        where=3,          # where(bool, a, b): dtype of a
    ),
    **_declare("bool", eq=2, ne=2, lt=2, le=2, gt=2, ge=2, isnan=1, isinf=1,
               logical_not=1, logical_and=2, logical_or=2),
    **_declare("arg", cast=1, bitcast=1),
}  # fmt: skip
"""Name -> dtype of the result: 'same' as the first operand, 'bool', or the one given as an 'arg'. The
numbers count operands. Besides these, there are the structural ops: const, index, input, load, load_at,
masked."""

SCANS: Final = {"cumsum": "sum", "cumprod": "prod"}
"""Reductions along one loop that leave what they have so far at each of its points."""


class Buffer(Noun):
    """Flat storage. `type` gives shape, strides, dtype, device. kind: input, temp, output, or for kernels
    constant: an input that the program does not write."""

    name: str
    type: TensorType
    kind: str = "temp"
    is_loose: bool = False
    """What is computed from it is rounded to 16 bits: the last bits of fp32 do not show."""

    def __str__(self) -> str:
        return f"{self.name}: {self.type}"


class Write(Noun):
    """buffer[index] = value, or with `reduce` the combination of value over the reduction ranges.

    `index_scalar` replaces `index` for a computed position, at which `adds` adds to what is there."""

    buffers: tuple[str, ...]
    index: Expr
    value: Scalar
    reduce: str | None = None
    index_scalar: Scalar | None = None
    adds: bool = False


class Range(Single, eq=False):
    """A loop: variable `var` runs over [0, size)."""

    var: Expr
    size: Expr

    @staticmethod
    @lru_cache(4096)
    def over(name: str | int, size: Expr) -> Range:
        """A new loop; its variable knows that it is below its size. A number stands for i, j, k, m, n, i5"""
        if isinstance(name, int):
            name = "ijkmn"[name] if name < 5 else f"i{name}"
        return Range(sym(name, 0, max(size.hi - 1, 0), size), size)

    def __str__(self) -> str:
        return f"{self.var} < {self.size}"


class Nest(Noun, eq=False):
    name: str
    ranges: tuple[Range, ...]
    reduce: tuple[Range, ...]
    writes: tuple[Write, ...]
    loc: Loc | None = None
    origins: tuple[str, ...] = ()
    """Names of the graph nodes computed here."""
    loads: tuple[tuple[str, Expr | None], ...] = field(init=False)
    """Every (buffer, index); None for an index computed from data."""
    read_buffers: dict[str, None] = field(init=False)
    written_buffers: dict[str, None] = field(init=False)

    def __post_init__(self) -> None:
        nodes = iter_scalars(*(root for write in self.writes for root in roots_of(write)))
        loads = [node for node in nodes if node.op in ("load", "load_at")]
        found = [(node.args[0], node.args[1] if node.op == "load" else None) for node in loads]
        self.loads, self.read_buffers = tuple(found), dict.fromkeys([buffer for buffer, _ in found])  # type: ignore
        names = [buffer for write in self.writes for buffer in write.buffers]
        self.written_buffers = dict.fromkeys(names)  # type: ignore[misc]

    def __str__(self) -> str:
        return show_nest(self)


class Extern(Noun, eq=False):
    """A library call on whole buffers: `op` is an aten name (mm, convolution, or any fallback).

    args mix buffer names (as BufferRef) with constants. outputs are buffer names, already allocated
    when `into` is true (out= variant), else produced by the call."""

    name: str
    op: str
    args: tuple[ExternArg, ...]
    kwargs: tuple[tuple[str, ExternArg], ...]
    outputs: tuple[str, ...]
    into: bool = False
    loc: Loc | None = None
    aliases: bool = False
    """The results may share memory with the arguments (a view op run as a library call)."""

    positions: tuple[int, ...] = ()
    """Which results of a call with several the outputs are; the others are no tensors, or are not used."""

    is_in_place: bool = False
    """The outputs are arguments that the call writes to (a user's kernel); it returns nothing."""

    read_buffers: dict[str, None] = field(init=False)
    written_buffers: dict[str, None] = field(init=False)

    @property
    def results(self) -> tuple[str, ...]:
        """The buffers that the call returns."""
        return () if self.is_in_place else self.outputs

    def __post_init__(self) -> None:
        self.read_buffers = dict.fromkeys([ref.buffer for ref in self.refs()])  # type: ignore[misc]
        self.written_buffers = dict.fromkeys(self.outputs)  # type: ignore[misc]

    def refs(self) -> Iterator[BufferRef]:
        """Every window onto a buffer among the arguments."""
        stack: list[ExternArg] = [value for _, value in reversed(self.kwargs)] + list(reversed(self.args))
        while stack:
            arg = stack.pop()
            if isinstance(arg, BufferRef):
                yield arg
            elif isinstance(arg, tuple):
                stack.extend(reversed(arg))

    def __str__(self) -> str:
        shown = [show_extern_arg(a) for a in self.args]
        shown += [f"{k}={show_extern_arg(v)}" for k, v in self.kwargs]
        return f"{', '.join(self.outputs)} = {self.op}({', '.join(shown)})"


class BufferRef(Noun):
    """A buffer seen with a shape and strides of its own, `offset` elements in (a free view)."""

    buffer: str
    type: TensorType
    offset: Expr


ExternArg: TypeAlias = "BufferRef | Scalar | Arg | tuple[ExternArg, ...]"


class Loops(Noun, eq=False):
    """A lowered graph. Each output is a view of a buffer (BufferRef), a number, or None."""

    name: str
    buffers: tuple[Buffer, ...]
    steps: tuple[Nest | Extern, ...]
    outputs: tuple[BufferRef | Expr | int | float | bool | None, ...]
    inputs: tuple[str, ...]
    """Buffer names of the tensor inputs, and names of the scalar symbols, in the graph's order."""
    kinds: str
    """One letter per input: t a tensor, i an int, f a float."""
    updates: tuple[tuple[str, str], ...] = ()
    """(buffer, input) where the buffer is returned as the new value of the input and nothing else."""
    device: Device = field(init=False)
    """Where the program runs: the accelerator that any of its buffers is on, else the CPU."""

    def __post_init__(self) -> None:
        found = next((b.type.device for b in self.buffers if b.type.device.kind != "cpu"), CPU)
        self.device = found  # type: ignore[misc]

    @property
    def returned(self) -> set[str]:
        """Buffers that outputs are in."""
        return {out.buffer for out in self.outputs if isinstance(out, BufferRef)}

    def __str__(self) -> str:
        lines = [f"loops {self.name}({', '.join(self.inputs)}):"]
        lines += [f"  {b.kind} {b}" for b in self.buffers]
        for step in self.steps:
            lines += ["  " + line for line in str(step).splitlines()]
        outputs = [str(o.buffer) if isinstance(o, BufferRef) else str(o) for o in self.outputs]
        return "\n".join([*lines, f"  return {', '.join(outputs)}"])


# -- walks and text --------------------------------------------------------------------------------


def roots_of(write: Write) -> tuple[Scalar, ...]:
    return (write.value,) if write.index_scalar is None else (write.value, write.index_scalar)


def iter_scalars(*roots: Scalar) -> Iterable[Scalar]:
    """Every scalar below and including the roots, operands first, each once."""
    found = [node for root in roots for node in (*_below(root), root)]
    return found if len(roots) == 1 else dict.fromkeys(found)


def _below(root: Scalar) -> tuple[Scalar, ...]:
    if root.below is None:
        done: dict[Scalar, None] = {}
        stack = list(reversed(root.operands))
        while stack:
            node = stack[-1]
            if waiting := [x for x in node.operands if x not in done]:
                stack += reversed(waiting)
                continue
            done[stack.pop()] = None
        root.below = tuple(done)
    return root.below


def moved_write(
    write: Write, env: Mapping[Expr, Expr], memo: dict[Scalar, Scalar], starts: Mapping[object, int]
) -> Write:
    """The same write with loop variables replaced, and buffers that begin at these elements of theirs."""
    if all(old is new for old, new in env.items()) and not starts:
        return write
    at = None if write.index_scalar is None else moved_scalar(write.index_scalar, env, memo, starts)
    index, value = substitute(write.index, env), moved_scalar(write.value, env, memo, starts)
    index = index - starts.get(write.buffers[0], 0)
    return Write(write.buffers, index, value, write.reduce, at, write.adds)


def moved_scalar(
    root: Scalar, env: Mapping[Expr, Expr], memo: dict[Scalar, Scalar], starts: Mapping[object, int]
) -> Scalar:
    for node in iter_scalars(root):
        if node not in memo:
            if node.op in ("load", "index"):
                at = substitute(node.args[-1], env)  # type: ignore[arg-type]
                args = (*node.args[:-1], at - starts.get(node.args[0], 0))
            else:
                args = tuple([memo.get(x, x) for x in node.args])  # type: ignore[call-overload]
            memo[node] = node if args == node.args else scalar(node.op, args, node.dtype)
    return memo[root]


FORMS: Final = {"const": "{0!r}", "index": "({0})", "input": "{0}", "load": "{0}[{1}]", "load_at": "{0}[{1}]",
                **dict.fromkeys(("cast", "bitcast"), "{dtype}({0})")}  # fmt: skip


LONGEST_TEXT: Final = 1000


def show_scalar(node: Scalar, room: Iterator[int] | None = None) -> str:
    """`room`: for so many more values. What is computed once may be read everywhere, and the text of all
    that would have no end."""
    room = iter(range(LONGEST_TEXT)) if room is None else room
    if next(room, None) is None:
        return "..."
    parts = [show_scalar(arg, room) if isinstance(arg, Scalar) else arg for arg in node.args]
    args = ", ".join(map(str, parts))
    return FORMS.get(node.op, "{op}({args})").format(*parts, op=node.op, args=args, dtype=node.dtype)


def show_nest(nest: Nest) -> str:
    head = "for " + ", ".join(map(str, nest.ranges)) if nest.ranges else "once"
    if nest.reduce:
        head += " reduce " + ", ".join(map(str, nest.reduce))
    lines = [f"{nest.name}: {head}" + (f"    # {nest.loc}" if nest.loc else "")]
    for write in nest.writes:
        where = write.index_scalar if write.index_scalar is not None else write.index
        target = ", ".join(f"{b}[{where}]" for b in write.buffers)
        value = f"{write.reduce}({write.value})" if write.reduce else str(write.value)
        lines.append(f"    {target} {'+=' if write.adds else '='} {value}")
    return "\n".join(lines)


def show_extern_arg(arg: ExternArg) -> str:
    if isinstance(arg, BufferRef):
        return arg.buffer
    if isinstance(arg, tuple):
        return "(" + ", ".join(map(show_extern_arg, arg)) + ")"
    return show_scalar(arg) if isinstance(arg, Scalar) else show_arg(arg)
