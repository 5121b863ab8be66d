"""How a functional graph stands for a program that mutates and aliases.

The graph computes, in this order: updated inputs, then user outputs, then what is saved for backward.
The Signature says what to do with each at run time, so that the caller sees eager's behaviour.
"""
from __future__ import annotations

from dataclasses import dataclass

from dovetail.ir.expr import Expr
from dovetail.ir.types import TensorType


@dataclass(frozen=True, slots=True)
class Mutation:
    """Graph output `output` is the new value of input `input` (written back with copy_)."""

    input: int
    output: int
    under_no_grad: bool = False


@dataclass(frozen=True, slots=True)
class OutputIs:
    """How user output number i is made.

    kind: 'fresh'   graph output `index`
          'input'   the input tensor `index` itself
          'view'    as_strided view of input `index` (type and offset given): shares its storage
          'alias'   a view of another user output `index`
          'const'   a Python constant `value` """

    kind: str
    index: int = -1
    type: TensorType | None = None
    offset: Expr | None = None
    value: object = None
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class Signature:
    inputs: int
    mutations: tuple[Mutation, ...]
    outputs: tuple[OutputIs, ...]
    saved: int = 0
    """How many trailing forward outputs are saved for backward."""
    grad_inputs: tuple[int, ...] = ()
    """Input positions that receive a gradient, in the backward graph's output order."""
    tangents: tuple[int, ...] = ()
    """User output (or mutated input) positions that bring a tangent into backward, in order."""
