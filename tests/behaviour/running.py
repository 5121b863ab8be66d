"""Run a small program in plain Python and compiled, and compare everything a caller can see.

    @case("C4")                                  fullgraph=True must capture it whole
    def closure():
        def f(x): ...
        return f, (torch.randn(4),)              or (f, [args1, args2, ...]) for several calls

    @case("C3", breaks=1)                        exactly one graph break; breaks=ANY: as many as it likes
    def prints(): ...

A program is built twice from the same seed, so that the two runs share no state. Compared: results,
arguments after the call, exceptions (class and text), printed text, gradients of floating outputs, and
whatever a third element of the returned tuple, a function without arguments, says about side effects.
"""
from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch

from tests.sweeps.peers import Observed, find_peer

ANY: Final = -1
PEER: Final = os.environ.get("DOVETAIL_TEST_PEER", "dovetail")
"""`torch` runs the same programs under torch.compile, to check the suite itself."""
BACKENDS: Final = ("eager", "dovetail") if PEER == "dovetail" else ("eager",)


@dataclass(frozen=True, slots=True)
class Program:
    row: str
    name: str
    make: Callable[[], tuple[Any, ...]]
    breaks: int = 0
    dynamic: bool | None = None
    recompiles: int = ANY
    same_storage: bool = False
    tensors: bool = True
    """False for programs that compute no tensor: there is nothing to compile."""


@dataclass(slots=True)
class Outcome:
    """What one run of a program showed."""

    results: list[Any]
    errors: list[tuple[type, str] | None]
    args: list[Any]
    printed: str
    effects: Any
    gradients: list[Any]
    sharing: list[Any]


class Suite:
    """The programs of one file, and the test made of them."""

    def __init__(self) -> None:
        self.programs: list[Program] = []

    def case(self, row: str, **expected: Any) -> Callable[[Callable[[], tuple[Any, ...]]], Callable[[], tuple[Any, ...]]]:
        def register(make: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
            assert all(program.name != make.__name__ for program in self.programs), make.__name__
            self.programs.append(Program(row, make.__name__, make, **expected))
            return make

        return register

    def test(self) -> Callable[..., None]:
        @pytest.mark.parametrize("backend", BACKENDS)
        @pytest.mark.parametrize("program", self.programs, ids=[f"{p.row}-{p.name}" for p in self.programs])
        def test_program(program: Program, backend: str) -> None:
            check_program(program, backend)

        return test_program


def check_program(program: Program, backend: str) -> None:
    peer = find_peer(PEER)
    peer.reset()
    plain = run_program(program, lambda f: f)
    seen: list[Observed] = []

    def compiling(f: Callable[..., Any]) -> Callable[..., Any]:
        return peer.compile(f, backend=backend, fullgraph=program.breaks == 0, dynamic=program.dynamic)

    seen.append(peer.observe(lambda: run_program(program, compiling)))
    compiled = seen[0].result
    check_same(compiled.errors, plain.errors, "exception")
    check_same(compiled.results, plain.results, "result")
    check_same(compiled.args, plain.args, "argument after the call")
    check_same(compiled.printed, plain.printed, "printed")
    check_same(compiled.effects, plain.effects, "side effect")
    check_same(compiled.gradients, plain.gradients, "gradient")
    assert sys.exception() is None, "an exception is still being handled"
    if program.same_storage:
        check_same(compiled.sharing, plain.sharing, "storage sharing")
    if program.tensors and not any(plain.errors):
        assert seen[0].graphs >= 1, f"nothing was compiled: {seen[0].reasons}"
    if PEER != "dovetail":
        return
    if program.breaks > 0:
        assert seen[0].breaks == program.breaks, f"breaks: {seen[0].reasons}"
    if program.recompiles != ANY:
        assert seen[0].recompiles == program.recompiles, f"recompiled {seen[0].recompiles} times"


def run_program(program: Program, wrap: Callable[[Any], Any]) -> Outcome:
    """Build the program from a fixed seed and make its calls."""
    torch.manual_seed(0)
    function, calls, *rest = program.make()
    calls = calls if isinstance(calls, list) else [calls]
    run = wrap(function)
    outcome = Outcome([], [], calls, "", None, [], [])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for args in calls:
            torch.manual_seed(7)
            try:
                result, error = run(*args), None
            except Exception as caught:
                result, error = None, (type(caught), str(caught))
            outcome.errors.append(error)
            outcome.results.append(result)
            outcome.sharing.append(find_sharing(args, result))
            outcome.gradients.append(differentiate(result, args, function))
    outcome.printed = printed.getvalue()
    outcome.effects = rest[0]() if rest else None
    return outcome


def leaves_of(thing: Any, seen: set[int] | None = None) -> list[torch.Tensor]:
    """Tensors reachable through containers and plain objects, in order, each once."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        return [thing]
    if isinstance(thing, torch.nn.Module):
        return [leaf for p in thing.parameters() for leaf in leaves_of(p, seen)]
    if isinstance(thing, dict):
        return [leaf for value in thing.values() for leaf in leaves_of(value, seen)]
    if isinstance(thing, list | tuple | set):
        return [leaf for value in thing for leaf in leaves_of(value, seen)]
    plain = hasattr(thing, "__dict__") and not isinstance(thing, type) and not callable(thing)
    return [leaf for value in vars(thing).values() for leaf in leaves_of(value, seen)] if plain else []


def differentiate(result: Any, args: Any, function: Any) -> list[torch.Tensor | None]:
    outs = [out for out in leaves_of(result) if out.grad_fn is not None and out.is_floating_point()]
    leaves = [leaf for leaf in leaves_of([args, function]) if leaf.requires_grad and leaf.is_leaf]
    if not outs or not leaves:
        return []
    loss = sum((out * torch.linspace(1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)).sum() for out in outs)
    return list(torch.autograd.grad(loss, leaves, allow_unused=True))  # type: ignore[arg-type]


def find_sharing(args: Any, result: Any) -> list[tuple[int, int]]:
    """Pairs of positions among arguments and results that share memory."""
    leaves = leaves_of([args, result])
    where = [leaf.untyped_storage().data_ptr() if leaf.layout is torch.strided and leaf.numel() else 0 for leaf in leaves]
    return [(i, j) for i in range(len(where)) for j in range(i) if where[i] and where[i] == where[j]]


def check_same(got: Any, want: Any, what: str) -> None:
    """Deep comparison that knows tensors, containers and plain objects; fails naming the path."""
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor), f"{what}: {type(got).__name__} instead of a tensor"
        assert got.requires_grad == want.requires_grad, f"{what}: requires_grad {got.requires_grad}"
        assert type(got) is type(want), f"{what}: {type(got)} instead of {type(want)}"
        torch.testing.assert_close(got, want, equal_nan=True, msg=lambda text: f"{what}: {text}")
    elif isinstance(want, list | tuple):
        assert type(got) is type(want) or type(got).__qualname__ == type(want).__qualname__, f"{what}: {type(got)} instead of {type(want)}"
        assert len(got) == len(want), f"{what}: {len(got)} items instead of {len(want)}"
        for index, (ours, theirs) in enumerate(zip(got, want, strict=True)):
            check_same(ours, theirs, f"{what}[{index}]")
    elif isinstance(want, dict):
        assert list(map(str, got)) == list(map(str, want)), f"{what}: keys {list(got)} instead of {list(want)}"
        for ours, theirs in zip(got.values(), want.values(), strict=True):
            check_same(ours, theirs, f"{what}.values")
    elif isinstance(want, type):
        assert got is want or got.__qualname__ == want.__qualname__, f"{what}: {got} instead of {want}"
    elif isinstance(want, torch.nn.Module):
        check_same(dict(got.state_dict()), dict(want.state_dict()), f"{what}.state_dict()")
    elif isinstance(want, float) and isinstance(got, float):
        assert got == pytest.approx(want, rel=1e-6, nan_ok=True), what
    elif hasattr(want, "__dict__") and not callable(want):
        check_same(vars(got), vars(want), f"{what}.__dict__")
    elif not callable(want):
        assert type(got) is type(want) and got == want, f"{what}: {got!r} instead of {want!r}"
