"""Generated text, before anything is compiled.

    Kernel   one function in C++ or Triton
    Program  the kernels and the host text that allocates, launches and calls libraries
"""
from __future__ import annotations

import re
from typing import Final

from dovetail.util.noun import Noun, replace


class Blocks(Noun):
    """A choice of block sizes for a GPU kernel: x is the fast axis of points, or the rows of a
    reduction; y the other axis of points; r the part of a row taken at once."""

    x: int
    y: int = 1
    r: int = 1
    warps: int = 4
    stages: int = 1

    def constants(self, names: tuple[str, ...]) -> dict[str, int]:
        """The values of XBLOCK and so on."""
        return {name: getattr(self, name[0].lower()) for name in names}


FOLLOW: Final = "dv.follow()"
"""The line of a Triton kernel from which on it needs what kernels before it wrote."""


class Kernel(Noun):
    """`name` is that of its function; `key` identifies the text apart from it, so that equal kernels are
    compiled once."""

    name: str
    language: str
    text: str
    key: str
    bytes_moved: int = 0
    origins: tuple[str, ...] = ()
    prelude: tuple[str, ...] = ()
    """Pieces of text that must come before, in order; kernels compiled together share equal ones."""
    signature: tuple[str, ...] = ()
    """Triton only: the type of each parameter,"""
    unaligned: tuple[int, ...] = ()
    """the positions of pointers that may have any address,"""
    fuses: bool = False
    """whether a product and a sum may be rounded once,"""
    constants: tuple[str, ...] = ()
    """the names of its block sizes,"""
    blocks: tuple[Blocks, ...] = ()
    """and the choices worth trying, the likeliest first."""
    sizes: tuple[int, ...] = ()
    """Bytes of each buffer parameter, for tuning."""
    points: tuple[int, ...] = ()
    """Points along each grid axis, for tuning."""


class Slot(Noun):
    """A run-time value in the arguments of a PythonCall: tensor, int or float number `index`."""

    kind: str
    index: int


class PythonCall(Noun):
    """A library call made through Python: `op` with these arguments; floats arrive as the bits of ints."""

    op: str
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...]
    tensors: int
    outputs: int
    positions: tuple[int, ...] = ()
    """Which of several results are wanted."""


class Result(Noun):
    """One value the caller gets: tensor number `index` of the host program, or a constant, or an
    expression over the integer inputs."""

    kind: str
    value: object


class Program(Noun):
    """`host` is the text of the function that runs everything; `python_calls` are the library calls
    that the C shim cannot make and that go through Python, by position."""

    name: str
    device: str
    kernels: tuple[Kernel, ...]
    host: str
    inputs: int
    outputs: int
    python_calls: tuple[object, ...] = ()
    kinds: str = ""
    """One letter per input: t a tensor, i an int, f a float."""
    input_names: tuple[str, ...] = ()
    results: tuple[Result, ...] = ()
    steps: int = 0
    """Kernel launches and library calls in one run."""

    def __str__(self) -> str:
        parts = [f"//// kernel {kernel.name}\n{kernel.text}" for kernel in self.kernels]
        return "\n".join([*parts, f"//// host\n{self.host}"])


def parse_program(text: str, original: Program) -> Program:
    """The program with the texts of an edited dump; everything else is the original's."""
    sections = dict(re.findall(r"^//// (.+)\n((?:(?!^//// ).*\n?)*)", text, re.MULTILINE))
    kernels = []
    for kernel in original.kernels:
        edited = sections.get(f"kernel {kernel.name}", kernel.text)
        # The key names the compiled text; an edited kernel must not find the original's binary.
        key = kernel.key if edited.strip() == kernel.text.strip() else f"{kernel.key}-edited-{hash(edited):x}"
        kernels.append(replace(kernel, text=edited, key=key))
    return replace(original, kernels=tuple(kernels), host=sections.get("host", original.host))
