"""A random program as a tree of statements: printed as runnable source, shrunk by cutting subtrees.

    Program(prelude, parameters, [Stmt("if n > 2:", [Stmt("t1 = t0 * 2")])], returns=["t1"])
    show_program(program)      -> text with SIZES, make_inputs(call) and f(...)
    shrink(program, fails)     -> the smallest program found for which fails(program) still holds
"""
from __future__ import annotations

import linecache
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

DEFINED: Final = re.compile(r"^(?:class |def |import )?(\w+)", re.MULTILINE)
NAMED: Final = re.compile(r"\b[tnvx]\d+\b")
"""Tensors and numbers, as both generators name them."""


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
    lines += [f"SIZES = {program.sizes}", "", "def make_inputs(call):", "    torch.manual_seed(call)", "    n = SIZES[call]",
              f"    return [{', '.join(program.inputs)}]", "", f"def f({', '.join(program.parameters)}):"]
    for stmt in program.body:
        lines += stmt.lines(1)
    lines.append(f"    return ({''.join(name + ', ' for name in program.returns)})")
    return "\n".join(lines) + "\n"


def load_program(source: str) -> dict[str, Any]:
    """Execute the source as a module whose lines can be found by tracebacks and by the compiler."""
    name = f"<fuzz {hash(source) & 0xFFFFFFFF:08x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module = sys.modules["fuzzed"] = types.ModuleType("fuzzed")
    exec(compile(source, name, "exec"), vars(module))
    return vars(module)


def nested(stmts: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """The same statements, those of several lines taken apart by their indentation."""
    return tuple(inner for stmt in stmts for inner in take_apart([*stmt.lines(0)]))


def take_apart(lines: list[str]) -> Iterator[Stmt]:
    heads = [i for i, line in enumerate(lines) if not line.startswith(" ") and not (i and lines[i - 1].startswith("@"))]
    for head, after in zip(heads, [*heads[1:], len(lines)]):
        inside = next((i for i in range(head, after) if lines[i].startswith(" ")), after)
        yield Stmt("\n".join(lines[head:inside]), tuple(take_apart([line.removeprefix("    ") for line in lines[inside:after]])))


def without_unused(program: Program) -> Program:
    """Inputs that the body does not name are gone, and the definitions that nothing left names."""
    body = "\n".join([*(line for stmt in program.body for line in stmt.lines(0)), *program.returns])
    pairs = [(p, i) for p, i in zip(program.parameters, program.inputs) if re.search(rf"\b{p}\b", body)]
    parameters, inputs = zip(*pairs) if pairs else ((), ())
    text, kept = body + "\n" + "\n".join(inputs), []
    for stmt in reversed(program.prelude):
        shown = "\n".join(stmt.lines(0))
        if any(re.search(rf"\b{name}\b", text) for name in DEFINED.findall(shown)):
            kept.append(stmt)
            text += shown
    return replace(program, parameters=parameters, inputs=inputs, prelude=tuple(reversed(kept)))


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
        if equals and not stmt.body:
            for name in dict.fromkeys(NAMED.findall(value)):
                if name != value:
                    yield body[:index] + (Stmt(f"{target} = {name}"),) + body[index + 1 :]


def smaller_programs(program: Program) -> Iterator[Program]:
    if (tidy := without_unused(program)) != program:
        yield tidy
    for count in range(1, len(program.returns)):
        yield replace(program, returns=program.returns[:count])
        yield replace(program, returns=program.returns[count:])
    for body in smaller_bodies(program.body):
        yield replace(program, body=body)
    for prelude in smaller_bodies(program.prelude):
        yield replace(program, prelude=prelude)
    if len(program.sizes) > 1:
        yield replace(program, sizes=program.sizes[:1])
        yield replace(program, sizes=program.sizes[:-1])


def shrink(program: Program, fails: Callable[[Program], bool], budget: int = 400) -> Program:
    """Greedy: a smaller program that still fails is taken at once, and the cuts go on where they are; ends when
    none is left that does, or when the tries run out."""
    program = replace(program, body=nested(program.body), prelude=nested(program.prelude))
    at = misses = 0
    while budget and misses < len(smaller := list(smaller_programs(program))):
        candidate, budget = smaller[at % len(smaller)], budget - 1
        if fails(candidate):
            program, misses = candidate, 0
        else:
            at, misses = at + 1, misses + 1
    return program
