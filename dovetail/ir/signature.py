"""How a functional graph stands for a program that mutates and aliases.

    def f(x, cache):                 forward outputs     new cache, y
        cache[0] = x                 mutations           cache <- output 0
        y = x.sin()                  outputs             y: fresh 1, y.t(): alias of 1, x[0]: view of x
        return y, y.t(), x[0]

The forward graph computes, in this order: updated inputs, then values for the user, then what only
backward needs. The Signature says what becomes of each at run time, so that the caller sees eager's
behaviour. The joint graph has the same inputs plus tangents, and gradients after the values.
"""
from __future__ import annotations

from dovetail.ir.graph import Arg, show_arg
from dovetail.ir.types import TensorType
from dovetail.util.noun import Noun


class ViewStep(Noun):
    """One view op to apply to a tensor: its first argument is that tensor."""

    op: str
    args: tuple[Arg, ...] = ()

    def __str__(self) -> str:
        return f".{self.op.split('.')[1]}({', '.join(map(show_arg, self.args))})"


class ValueRef(Noun):
    """An input of the graph, or an output of forward."""

    source: str
    index: int

    def __str__(self) -> str:
        return f"{self.source} {self.index}"


class Mutation(Noun):
    """What is written back to input `input`: forward output `output`, with copy_. Where the program wrote
    to a part only, `steps` are the views to that part. An `op` other than copy_ is replayed as it was,
    with ValueRefs for the tensors among its arguments; its output is -1."""

    input: int
    output: int
    under_no_grad: bool = False
    """The write is no part of autograd's graph: it was under no_grad, or into a detached tensor."""
    steps: tuple[ViewStep, ...] = ()
    op: str = "aten.copy_.default"
    args: tuple[object, ...] = ()
    is_uncounted: bool = False
    """The program wrote to `input.data`, which leaves the version as it was."""

    def __str__(self) -> str:
        target = f"input {self.input}" + "".join(map(str, self.steps))
        value = f" <- {self.output}" if self.output >= 0 else f".{self.op}({', '.join(map(str, self.args))})"
        seen = (" (no grad)" if self.under_no_grad else "") + (" (.data)" if self.is_uncounted else "")
        return target + value + seen


class OutputIs(Noun):
    """How user output number i is made.

    kind: 'fresh'   forward output `index`
          'input'   the input tensor `index` itself
          'view'    `steps` applied to input `index`, whose storage it shares; strides count from the input
          'alias'   `steps` applied to forward output `index`
          'through' `steps` applied to input `input` by an autograd.Function of the program; a gradient
                    enters backward as that of forward output `index`
          'size'    the number `value`, an Expr over the graph's symbols
          'const'   the Python constant `value`"""

    kind: str
    index: int = -1
    type: TensorType | None = None
    steps: tuple[ViewStep, ...] = ()
    value: object = None
    requires_grad: bool = False
    under_no_grad: bool = False
    """The view was made where autograd does not look, of a tensor that it knows."""
    input: int = -1

    def steps_from(self, other: OutputIs) -> tuple[ViewStep, ...]:
        """The steps that are left to a view from another one; none where they do not lead there."""
        way = tuple(step for step in other.steps if step.op != "aten.alias.default")
        is_further = (self.kind, self.index) == (other.kind, other.index) and self.steps[: len(way)] == way
        return (self.steps[len(way) :] or (ViewStep("aten.alias.default"),)) if is_further else ()

    def __str__(self) -> str:
        if self.kind in ("const", "size"):
            return f"{self.kind} {self.value}"
        grad = " grad" if self.requires_grad else ""
        hidden = " (made under no_grad)" if self.under_no_grad else ""
        return f"{self.kind} {self.index}{''.join(map(str, self.steps))}{grad}{hidden}"


class Signature(Noun):
    inputs: int
    """How many inputs the caller passes; the graph takes `constants` more after them."""
    mutations: tuple[Mutation, ...]
    outputs: tuple[OutputIs, ...]
    constants: int = 0
    values: int = 0
    """How many forward outputs are updated inputs or user values; saved tensors follow."""
    saved: int = 0
    """How many trailing forward outputs are saved for backward."""
    grad_inputs: tuple[int, ...] = ()
    """Input positions that receive a gradient, in the backward graph's output order."""
    tangents: tuple[int, ...] = ()
    """Forward output positions that bring a tangent into backward, in order."""
    groups: tuple[tuple[int, ...], ...] = ()
    """The same, those together that autograd ties: the others can be differentiated one after the other."""
    reached: tuple[frozenset[int], ...] = ()
    """For each tangent, the inputs that autograd reaches from there, if only with zeros."""
    chains: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Forward outputs with those that autograd sees them computed from; ~i is output i, a view, which comes
    with the view that it is a view of."""
    unread: tuple[int, ...] = ()
    """Inputs, and forward outputs as ~i, that may be written to before backward runs, since eager's backward
    does not read them."""
    keeping: tuple[int, ...] = ()
    """Tangents from which eager's backward runs only once, unless the graph is retained."""

    @property
    def updates(self) -> tuple[tuple[int, int], ...]:
        """(forward output, input) where the output is the whole new value of the input and nothing else,
        so that writing it in place shows nowhere."""
        seen = {out.index for out in self.outputs if out.kind in ("fresh", "alias", "through")}
        seen |= {arg.index for m in self.mutations for arg in m.args if isinstance(arg, ValueRef)}
        whole = [m for m in self.mutations if m.under_no_grad and not m.steps and m.output >= 0]
        return tuple((m.output, m.input) for m in whole if m.output not in seen)

    def __str__(self) -> str:
        return "\n".join([
            f"signature: {self.inputs} inputs, {self.constants} constants, {self.values} values, "
                f"{self.saved} saved",
            *(f"  {mutation}" for mutation in self.mutations),
            *(f"  output {i} is {output}" for i, output in enumerate(self.outputs)),
            f"  tangents for {self.tangents}, gradients of inputs {self.grad_inputs}",
            *(f"  tied: {' '.join(map(str, group))}" for group in self.groups if len(self.groups) > 1),
            *(f"  {i} from {' '.join(map(str, before))}" for i, before in self.chains),
        ])  # fmt: skip
