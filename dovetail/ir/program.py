"""Generated text, before anything is compiled.

    Kernel   one function in C++ or Triton
    Program  the kernels and the host text that allocates, launches and calls libraries
"""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kernel:
    """`key` identifies the text apart from its name, so that equal kernels are compiled once."""

    name: str
    language: str
    text: str
    key: str
    bytes_moved: int = 0
    origins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """`host` is the text of the function that runs everything; `python_calls` are the library calls
    that the C shim cannot make and that go through Python, by position."""

    name: str
    device: str
    kernels: tuple[Kernel, ...]
    host: str
    inputs: int
    outputs: int
    python_calls: tuple[object, ...] = ()
