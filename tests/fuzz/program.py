"""A random program as a tree of statements: printed as runnable source, shrunk by cutting subtrees.

    Program(prelude, parameters, [Stmt("if n > 2:", [Stmt("t1 = t0 * 2")])], returns=["t1"])
    show_program(program)      -> text with make_inputs(call) and f(...)
    shrink(program, fails)     -> the smallest program found for which fails(program) still holds
"""
from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Stmt:
    text: str
    body: tuple[Stmt, ...] = ()

    def lines(self, depth: int) -> Iterator[str]:
        for line in self.text.splitlines():
            yield "    " * depth + line
        for child in self.body:
            yield from child.lines(depth + 1)


@dataclass(frozen=True, slots=True)
class Program:
    """`prelude` is module text, `inputs` the expressions make_inputs returns (they may use n and call)."""

    seed: int
    prelude: tuple[Stmt, ...]
    sizes: tuple[int, ...]
    parameters: tuple[str, ...]
    inputs: tuple[str, ...]
    body: tuple[Stmt, ...]
    returns: tuple[str, ...]


def show_program(program: Program) -> str:
    lines = ["import torch", "import torch.nn.functional as F", ""]
    for stmt in program.prelude:
        lines += [*stmt.lines(0), ""]
    lines += ["def make_inputs(call):", "    torch.manual_seed(call)", f"    n = {program.sizes}[call]",
              f"    return [{', '.join(program.inputs)}]", "", f"def f({', '.join(program.parameters)}):"]
    for stmt in program.body:
        lines += stmt.lines(1)
    lines.append(f"    return ({''.join(name + ', ' for name in program.returns)})")
    return "\n".join(lines) + "\n"


def load_program(program: Program, edit: Callable[[str], str] = str) -> dict[str, Any]:
    """Execute the source as a module whose lines can be found by tracebacks and by the compiler."""
    source = edit(show_program(program))
    name = f"<fuzz {program.seed} {hash(source) & 0xFFFFFFFF:08x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module = sys.modules["fuzzed"] = types.ModuleType("fuzzed")
    exec(compile(source, name, "exec"), vars(module))
    return vars(module)


def smaller_bodies(body: tuple[Stmt, ...]) -> Iterator[tuple[Stmt, ...]]:
    """Every body with one cut: a run of statements gone, a block replaced by its content, a cut inside a block."""
    span = len(body)
    while span:
        for start in range(0, len(body), span):
            yield body[:start] + body[start + span :]
        span //= 2
    for index, stmt in enumerate(body):
        if stmt.body:
            yield body[:index] + stmt.body + body[index + 1 :]
            for inner in smaller_bodies(stmt.body):
                if inner:
                    yield body[:index] + (replace(stmt, body=inner),) + body[index + 1 :]
        target, equals, value = stmt.text.partition(" = ")
        if equals and "(" in value and not stmt.body and "\n" not in stmt.text:
            for word in dict.fromkeys(value.replace("(", " ").replace(",", " ").replace(")", " ").replace(".", " ").split()):
                if word.isidentifier() and word[0] in "tnv" and word[1:].isdigit():
                    yield body[:index] + (Stmt(f"{target} = {word}"),) + body[index + 1 :]


def smaller_programs(program: Program) -> Iterator[Program]:
    for count in range(1, len(program.returns)):
        yield replace(program, returns=program.returns[:count])
        yield replace(program, returns=program.returns[count:])
    for body in smaller_bodies(program.body):
        yield replace(program, body=body)
    for index in range(len(program.prelude)):
        yield replace(program, prelude=program.prelude[:index] + program.prelude[index + 1 :])
    if len(program.sizes) > 1:
        yield replace(program, sizes=program.sizes[:1])
    for index in range(len(program.inputs)):
        yield replace(program, inputs=program.inputs[:index] + program.inputs[index + 1 :],
                      parameters=program.parameters[:index] + program.parameters[index + 1 :])


def shrink(program: Program, fails: Callable[[Program], bool], budget: int = 300) -> Program:
    """Greedy: take the first smaller program that still fails, start over; stop when none does or tries run out."""
    progress = True
    while progress and budget > 0:
        progress = False
        for candidate in smaller_programs(program):
            budget -= 1
            if fails(candidate):
                program, progress = candidate, True
                break
            if budget <= 0:
                break
    return program
