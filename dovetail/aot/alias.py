"""Who shares memory with whom while a program is recorded as a functional graph.

    y = x[0]          Ref(y): step select(0, 0) of Ref(x), in the Storage of x
    y.mul_(2)         mul = y * 2; the new x is select_scatter(x, mul, 0, 0); generation 1
    x.sum()           reads x: the node select_scatter
    y.sin()           reads y: still mul. A view that is older than its storage is made anew.

A Storage is a piece of memory that the program can write to; a Ref is one tensor in it: the root, or
a view step away from another Ref. `read` gives the node that holds a Ref's value now, `write` makes a
node the new value and carries it back to the root through the inverse of each step.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise
from typing import Final, TypeAlias

from dovetail.errors import UnsupportedMutation
from dovetail.ir.expr import Expr
from dovetail.ir.graph import Arg, GraphBuilder, Node
from dovetail.ir.signature import ViewStep
from dovetail.ir.types import TensorType
from dovetail.util.loc import Loc
from dovetail.util.noun import Noun, field


class Storage(Noun, frozen=False, eq=False):
    """`owner` is the tensor the storage was made with; `input` its position if the caller made it."""

    owner: object
    offset: Expr
    input: int | None = None
    generation: int = 0
    log: list[Write] = field(default_factory=list)
    """Every write so far, in order."""


class Write(Noun, frozen=False, eq=False):
    """value was written to ref. If that was one op that a caller can repeat, its name and arguments."""

    ref: Ref
    value: Node
    op: str = ""
    args: tuple[Arg, ...] = ()


class Ref(Noun, frozen=False, eq=False):
    """`node` is the value as of `generation`; a view that nobody has read yet has none."""

    storage: Storage
    type: TensorType
    node: Node | None
    generation: int
    parent: Ref | None = None
    step: ViewStep | None = None
    name: str = ""
    loc: Loc | None = None
    via: Ref | None = None
    """For strides, which count from the root, what they were taken of."""
    taken: ViewStep | None = None
    """And how, where as_strided has another gradient: it divides one among the elements that share memory."""
    part: int | None = None
    """Which of several results of `node` it is, until somebody reads it: most of a norm's nobody does."""

    @property
    def above(self) -> list[Ref]:
        """What it is a view of, and what that is one of, up to the root."""
        return [] if self.parent is None else [self.parent, *self.parent.above]

    @property
    def root(self) -> Ref:
        return [self, *self.above][-1]

    @property
    def steps(self) -> tuple[ViewStep, ...]:
        """The view steps from the root to here; a step of None is the same tensor again."""
        return tuple(ref.step for ref in reversed([self, *self.above]) if ref.step is not None)

    @property
    def way(self) -> tuple[ViewStep, ...]:
        """The same, by what autograd sees on the way."""
        before = self.via or self.parent
        step = self.taken or self.step
        return (before.way if before else ()) + (() if step is None else (step,))


class Memory(Noun, frozen=False):
    """Reads and writes of Refs, as nodes of the graph being built."""

    builder: GraphBuilder
    origin: dict[Node, Node] = field(default_factory=dict)
    """view node -> the node it is a view of"""

    def read(self, ref: Ref) -> Node:
        if ref.node is not None and ref.generation == ref.storage.generation:
            if ref.part is not None:
                ref.node, ref.part = self.builder.get(ref.node, ref.part), None
            return ref.node
        assert ref.parent is not None
        node = base = self.read(ref.parent)
        if ref.step is not None:
            args = (base, *ref.step.args)
            node = self.builder.call(ref.step.op, args, ref.type, name=ref.name, loc=ref.loc)
            self.origin[node] = base
        ref.node, ref.generation = node, ref.storage.generation
        return node

    def write(self, ref: Ref, value: Node, loc: Loc | None = None) -> None:
        """Make value what ref holds, and every tensor of the storage see it."""
        if overlaps(ref.type):
            raise UnsupportedMutation(loc, detail="writing to a tensor whose elements share memory")
        chain = [(ref, value)]
        for at, parent in pairwise([ref, *ref.above]):
            if at.step is not None:
                value = self.undo(at, self.read(parent), value, loc)
            chain.append((parent, value))
        storage = ref.storage
        storage.generation += 1
        storage.log.append(Write(*chain[0]))
        for changed, node in chain:
            changed.node, changed.generation, changed.part = node, storage.generation, None

    def undo(self, view: Ref, base: Node, value: Node, loc: Loc | None) -> Node:
        """The base with the part that `view` shows replaced by value."""
        assert view.step is not None and view.parent is not None
        inverse = INVERSES.get(view.step.op)
        if inverse is None:
            raise UnsupportedMutation(loc, detail=f"writing through the view {view.step.op}")
        whole, name = view.parent.type, f"{view.parent.name or base.name}_new"
        return self.builder.call(*inverse(whole, view.step, base, value), whole, name=name, loc=loc)

    def source_of(self, node: Node) -> Node:
        """The node whose memory a chain of view nodes shows."""
        while node in self.origin:
            node = self.origin[node]
        return node


@lru_cache(4096)
def overlaps(kind: TensorType) -> bool:
    """Elements may share memory: an expanded dimension, or steps shorter than what they step over."""
    reach = 0
    dims = [(step, size) for step, size in zip(kind.stride, kind.shape) if size.hi > 1]
    if len({step for step, _ in dims}) < len(dims):
        return True
    dims = [(step, size) for step, size in dims if step.is_const]
    for step, size in sorted((step.value, size.value if size.is_const else 2) for step, size in dims):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


# -- inverses of views -------------------------------------------------------------------------------

Call: TypeAlias = "tuple[str, tuple[Arg, ...]]"
Inverse: TypeAlias = "Callable[[TensorType, ViewStep, Node, Node], Call]"
"""What the view is of, the view, the node that is viewed, the view's new value -> op and arguments."""


def _scatter(op: str, whole: TensorType, step: ViewStep, base: Node, value: Node) -> Call:
    """The base keeps what the view does not show: op(base, value, ...the view's arguments)."""
    return op, (base, value, *step.args)


def _reshape(whole: TensorType, step: ViewStep, base: Node, value: Node) -> Call:
    """The view shows all of the base in the same order."""
    return "aten.view.default", (value, whole.shape)


def _unpermute(whole: TensorType, step: ViewStep, base: Node, value: Node) -> Call:
    order = [int(dim) % whole.ndim for dim in step.args[0]]  # type: ignore[arg-type, union-attr]
    return "aten.permute.default", (value, tuple(order.index(i) for i in range(whole.ndim)))


INVERSES: Final[dict[str, Inverse]] = {
    "aten.slice.Tensor": partial(_scatter, "aten.slice_scatter.default"),
    "aten.select.int": partial(_scatter, "aten.select_scatter.default"),
    "aten.diagonal.default": partial(_scatter, "aten.diagonal_scatter.default"),
    "aten.as_strided.default": partial(_scatter, "aten.as_strided_scatter.default"),
    **dict.fromkeys(("aten.view.default", "aten.unsqueeze.default", "aten.expand.default"), _reshape),
    **dict.fromkeys(("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims"), _reshape),
    "aten.permute.default": _unpermute,
    **dict.fromkeys(  # their own inverses
        ("aten.transpose.int", "aten.t.default", "aten._conj.default", "aten._neg_view.default"),
        lambda whole, step, base, value: (step.op, (value, *step.args)),
    ),
    "aten.view.dtype": lambda whole, step, base, value: ("aten.view.dtype", (value, whole.dtype)),
    "aten.view_as_real.default": lambda whole, step, base, value: ("aten.view_as_complex.default", (value,)),
    "aten.view_as_complex.default": lambda whole, step, base, value: ("aten.view_as_real.default", (value,)),
}
"""view op -> the op that puts a new value of the view back into its base."""
