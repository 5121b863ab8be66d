"""Run a random program in eager and compiled; say how they differ; shrink and print the difference.

    why_different(program, peer, settings) -> None, or "call 1: result 0: values ..."

Compared for every call: results (structure, dtype, shape, strides, values), inputs after the call, which of
them share storage, exceptions, printed text, the list LOG of side effects, and gradients.
"""
from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from tests.fuzz.program import Program, load_program, show_program, shrink
from tests.sweeps.closeness import EPS
from tests.sweeps.peers import Peer, find_peer
from tests.sweeps.workers import short_error

KINDS: Final = {"tensors": "tests.fuzz.tensors", "python": "tests.fuzz.python"}


@dataclass(slots=True)
class Seen:
    results: list[Any] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    sharing: list[Any] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)
    printed: str = ""
    log: Any = None


def observe(program: Program, wrap: Callable[[Any], Any], exact: bool = False) -> Seen:
    """Every call of the program, everything a caller can see."""
    scope = load_program(program)
    run, seen, printed = wrap(scope["f"]), Seen(), io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(len(program.sizes)):
            args = scope["make_inputs"](call)
            torch.manual_seed(100 + call)
            try:
                result, error = run(*args), None
            except Exception as caught:
                result, error = None, caught
            seen.errors.append(error and (type(error).__name__, first_line(error)))
            seen.results.append(result)
            seen.inputs.append(args)
            seen.sharing.append(sharing(args, result))
            seen.gradients.append(gradients(args, result))
    seen.printed, seen.log = printed.getvalue(), scope.get("LOG")
    return seen


def first_line(error: BaseException) -> str:
    return str(error).split("\n")[0][:80] if not isinstance(error, RuntimeError) else ""


def tensors_in(thing: Any) -> list[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        return [thing]
    if isinstance(thing, dict):
        return [t for value in thing.values() for t in tensors_in(value)]
    return [t for value in thing for t in tensors_in(value)] if isinstance(thing, list | tuple) else []


def sharing(args: Any, result: Any) -> list[tuple[int, int]]:
    places = [t.untyped_storage().data_ptr() if t.numel() else 0 for t in tensors_in([args, result])]
    return [(i, j) for i in range(len(places)) for j in range(i) if places[i] and places[i] == places[j]]


def gradients(args: Any, result: Any) -> list[Any]:
    leaves = [t for t in tensors_in(args) if t.requires_grad and t.is_leaf]
    outs = [t for t in tensors_in(result) if t.grad_fn is not None and t.is_floating_point()]
    if not leaves or not outs:
        return []
    loss = sum((t.double() * torch.linspace(0.5, 1.5, t.numel(), dtype=torch.float64).reshape(t.shape)).sum() for t in outs)
    try:
        return list(torch.autograd.grad(loss, leaves, allow_unused=True))  # type: ignore[arg-type]
    except Exception as error:  # eager may refuse (a saved tensor was changed in place); compiled must refuse or be right
        return [f"refused {type(error).__name__}"]


def difference(got: Any, want: Any, path: str) -> str | None:
    """First difference of two values seen by a caller."""
    if isinstance(want, torch.Tensor):
        return tensor_difference(got, want, path)
    if isinstance(want, list | tuple):
        if type(got) is not type(want) or len(got) != len(want):
            return f"{path}: {show(got)} instead of {show(want)}"
        return next((d for i, pair in enumerate(zip(got, want, strict=True)) if (d := difference(*pair, f"{path}[{i}]"))), None)
    if isinstance(want, dict):
        if not isinstance(got, dict) or list(got) != list(want):
            return f"{path}: {show(got)} instead of {show(want)}"
        return next((d for key in want if (d := difference(got[key], want[key], f"{path}[{key!r}]"))), None)
    if hasattr(want, "__dict__") and not callable(want):
        return difference(vars(got), vars(want), f"{path}.__dict__") if hasattr(got, "__dict__") else f"{path}: {show(got)}"
    if callable(want):
        return None if callable(got) else f"{path}: {show(got)} is not callable"
    if isinstance(want, float) and isinstance(got, float):
        close = got == want or abs(got - want) <= 1e-5 * max(abs(got), abs(want)) or (got != got and want != want)
        return None if close else f"{path}: {got} instead of {want}"
    return None if type(got) is type(want) and got == want else f"{path}: {show(got)} instead of {show(want)}"


def tensor_difference(got: Any, want: torch.Tensor, path: str) -> str | None:
    if not isinstance(got, torch.Tensor):
        return f"{path}: {show(got)} instead of a tensor"
    for name in ("dtype", "shape", "requires_grad"):
        if getattr(got, name) != getattr(want, name):
            return f"{path}: {name} {getattr(got, name)} instead of {getattr(want, name)}"
    if want.numel() > 1 and "gradients" not in path and meaningful_strides(got) != meaningful_strides(want):
        return f"{path}: stride {got.stride()} instead of {want.stride()} for shape {tuple(want.shape)}"
    a, b = got.detach(), want.detach()
    if torch.equal(a, b):
        return None
    if not b.is_floating_point():
        return f"{path}: values {show(a)} instead of {show(b)}"
    bound = 64 * max(EPS[b.dtype], EPS[torch.float32])  # a double may come from float32 arithmetic
    a, b = a.double(), b.double()
    scale = float(b[torch.isfinite(b)].abs().max()) if bool(torch.isfinite(b).any()) else 1.0
    close = torch.isclose(a, b, rtol=bound, atol=bound * max(scale, 1.0), equal_nan=True)
    return None if bool(close.all()) else f"{path}: values {show(a[~close][:4])} instead of {show(b[~close][:4])}"


def meaningful_strides(t: torch.Tensor) -> tuple[int, ...]:
    return tuple(step for step, size in zip(t.stride(), t.shape, strict=True) if size > 1)


def show(value: Any) -> str:
    return str(value).replace("\n", " ")[:100]


def why_different(program: Program, peer: Peer, settings: dict[str, Any]) -> str | None:
    plain = observe(program, lambda f: f)
    try:
        compiled = observe(program, lambda f: peer.compile(f, **settings))
    finally:
        peer.reset()
    for call in range(len(program.sizes)):
        if compiled.errors[call] != plain.errors[call]:
            return f"call {call}: raises {compiled.errors[call]} instead of {plain.errors[call]}"
        for what in ("results", "inputs", "gradients"):
            ours, theirs = getattr(compiled, what)[call], getattr(plain, what)[call]
            if what == "gradients" and theirs and isinstance(theirs[0], str):
                continue
            if (d := difference(ours, theirs, f"call {call}: {what}")) is not None:
                return d
        if compiled.sharing[call] != plain.sharing[call]:
            return f"call {call}: storage shared by {compiled.sharing[call]} instead of {plain.sharing[call]}"
    if compiled.printed != plain.printed:
        return f"printed {compiled.printed!r} instead of {plain.printed!r}"
    return difference(compiled.log, plain.log, "LOG")


def runs_plain(program: Program) -> bool:
    """A shrunk candidate must still be a program: no error where the original had none."""
    try:
        return not any(error and error[0] in ("NameError", "UnboundLocalError") for error in observe(program, lambda f: f).errors)
    except Exception:  # a candidate whose source does not even load
        return False


def run_task(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One seed: `tensors:17` or `python:17`."""
    kind, _, seed = name.partition(":")
    peer = find_peer(settings["peer"])
    program = importlib.import_module(KINDS[kind]).make_program(int(seed))
    chosen = {"dynamic": [None, True][int(seed) % 4 == 3], "backend": settings["backend"]} if settings["peer"].startswith("dovetail") else {}
    chosen = {key: value for key, value in chosen.items() if value is not None}
    seen = peer.observe(lambda: why_different(program, peer, chosen))
    why, work = seen.result, {"graphs": seen.graphs, "breaks": seen.breaks}
    if why is None:
        return {"status": "pass", **work}
    if settings.get("shrink", True):
        program, why = shrunk(program, why, lambda p: why_different(p, peer, chosen))
    return {"status": "fail", "reason": why, "program": show_program(program), "settings": chosen, **work}


def shrunk(program: Program, why: str, differ: Callable[[Program], str | None]) -> tuple[Program, str]:
    """Smaller program with the same sort of difference (its words without the numbers)."""

    def sort_of(text: str) -> str:
        return "".join(c for c in text.split("instead")[0] if c.isalpha() or c == " ")[:24]

    last = [why]

    def fails(candidate: Program) -> bool:
        if not runs_plain(candidate):
            return False
        try:
            found = differ(candidate)
        except Exception as error:  # an internal error counts as a difference of its own
            found = short_error(error)
        if found is None or sort_of(found) != sort_of(why):
            return False
        last[0] = found
        return True

    return shrink(program, fails), last[0]
