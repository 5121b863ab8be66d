"""Run a random program in eager and compiled; say how they differ; shrink and print the difference.

    why_different(source, peer, settings) -> None, or "call 1: result 0: values ..."

Where numbers differ, the program in double precision is the judge: what eager itself gets wrong, the compiled
program may get wrong as much. What eager gets wrong is seen in more than one run, on inputs one unit in the last place
away as well: a sum that cancels may be right by chance.

Compared for every call: results (structure, dtype, shape, strides, values), inputs after the call, which of
them share storage, exceptions, and gradients; at the end: printed text, the list LOG of side effects, the dict
STATE, and the parameters and buffers of the module NET.
"""
from __future__ import annotations

import contextlib
import importlib
import io
import random
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode

from tests.fuzz.program import Program, load_program, show_program, shrink
from tests.sweeps.closeness import EPS, UNITS, DrawsInSingle, to_exact, why_not_accurate
from tests.sweeps.peers import Peer, find_peer
from tests.sweeps.workers import short_error

NARROW: Final = re.compile(r"\.(?:float|half|bfloat16)\(\)|torch\.(?:float32|float16|bfloat16|half)\b")
OUTSIDE: Final = re.compile(r"index -?\d+ is out of bounds|index out of range in ")
NEIGHBOURS: Final = 16
Judges: TypeAlias = tuple[Any, ...]
"""The exact value, and eager's on neighbouring inputs, where they are known."""
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
    state: Any = None


def observe(source: str, wrap: Callable[[Any], Any], exact: bool = False, change: Callable[[Any], Any] = lambda args: args) -> Seen:
    """Every call of the program, everything a caller can see; `exact` runs all of it in double precision."""
    scope = load_program(in_double(source) if exact else source)
    if exact and "NET" in scope:
        scope["NET"].double()
    run, seen, printed, net = wrap(scope["f"]), Seen(), io.StringIO(), scope.get("NET")
    change(list(net.parameters()) if net else [])  # neighbours are written in place
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(len(scope["SIZES"])):
            args = change(scope["make_inputs"](call))
            torch.manual_seed(100 + call)
            torch.set_default_dtype(torch.float64 if exact else torch.float32)
            try:
                result, error = run(*args), None
            except Exception as caught:
                result, error = None, caught
            torch.set_default_dtype(torch.float32)
            left = f", leaves {sys.exception()!r}" if sys.exception() is not None else ""
            seen.errors.append(error and (type(error).__name__, first_line(error), type(error.__cause__).__name__) or left)
            seen.results.append(result)
            seen.inputs.append(args)
            seen.sharing.append(sharing(args, result))
            seen.gradients.append(gradients([args, list(net.parameters()) if net else []], result))
    seen.printed, seen.log, seen.state = printed.getvalue(), scope.get("LOG"), [scope.get("STATE"), net and [net.count, {**net.state_dict()}]]
    return seen


def first_line(error: BaseException) -> str:
    """Of a tensor's index out of range only that it is: a fused kernel does not know which."""
    if OUTSIDE.match(str(error)):
        return "index out of range"
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


def in_double(source: str) -> str:
    """The program's text with every floating point type it names widened; make_inputs stays as it is."""
    head, inputs, rest = source.partition("def make_inputs")
    inputs_text, f, body = rest.partition("\ndef f(")
    widened = (NARROW.sub(lambda found: ".double()" if "(" in found[0] else "torch.float64", text) for text in (head, body))
    return next(widened) + inputs + inputs_text + f + next(widened)


class CastsCopy(TorchFunctionMode):
    """A cast is a copy, as it was where its result was narrower: of a double, one to double is the same tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.clone() if func in (torch.Tensor.to, torch.Tensor.double) and made is args[0] else made


def exact_of(source: str, plain: Seen) -> Seen | None:
    """The program in double precision, if it raises what it raised: one that writes to the result of a cast may not,
    unless casts copy."""
    for casts in (contextlib.nullcontext, CastsCopy):
        try:
            with DrawsInSingle(), casts():
                seen = observe(source, lambda f: f, True, to_exact)
        except Exception:  # widened, the program may not even load its module
            return None
        if [error and error[0] for error in seen.errors] == [error and error[0] for error in plain.errors]:
            return seen
    return None


def neighbour(seed: int) -> Callable[[Any], Any]:
    """The same arguments, each number one unit in the last place up or down."""
    chosen = random.Random(seed)

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or leaf.is_inference():
            return leaf
        there = torch.tensor(chosen.choices((-torch.inf, torch.inf), k=leaf.numel()), dtype=leaf.dtype).reshape(leaf.shape)
        with torch.no_grad():
            return leaf.copy_(torch.nextafter(leaf, there)) if not is_overlapping(leaf) else leaf

    return lambda args: pytree.tree_map(move, args)


class RoundsOtherwise(TorchFunctionMode):
    """What a function computes is moved by a few units in the last place, some numbers up and some down; not zeros."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.move = neighbour(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tensors_in([*args, *(kwargs or {}).values()])}
        if not isinstance(made, torch.Tensor) or made.untyped_storage().data_ptr() in given:
            return made
        if made.is_floating_point() and not made.is_inference() and not is_overlapping(made):
            moved = made.data.clone()
            for _ in range(int(UNITS)):
                moved = self.move(moved)
            made.data.copy_(torch.where(made.data == 0, made.data, moved))
        return made


def is_overlapping(leaf: torch.Tensor) -> bool:
    return any(step == 0 and size > 1 for step, size in zip(leaf.stride(), leaf.shape, strict=True))


def part(judges: Judges, key: Any) -> Judges:
    found = []
    for judge in judges:
        try:
            found.append(judge[key])
        except (TypeError, KeyError, IndexError):
            found.append(None)
    return tuple(found)


def difference(got: Any, want: Any, path: str, judges: Judges = ()) -> str | None:
    """First difference of two values seen by a caller."""
    if isinstance(want, torch.Tensor):
        return tensor_difference(got, want, path, judges)
    if isinstance(want, list | tuple):
        if type(got).__name__ != type(want).__name__ or len(got) != len(want):
            return f"{path}: {show(got)} instead of {show(want)}"
        return next((d for i, pair in enumerate(zip(got, want, strict=True)) if (d := difference(*pair, f"{path}[{i}]", part(judges, i)))), None)
    if isinstance(want, dict):
        if not isinstance(got, dict) or list(got) != list(want):
            return f"{path}: {show(got)} instead of {show(want)}"
        return next((d for key in want if (d := difference(got[key], want[key], f"{path}[{key!r}]", part(judges, key)))), None)
    if isinstance(want, set | frozenset):
        return None if got == want else f"{path}: {show(got)} instead of {show(want)}"
    if hasattr(want, "__dict__") and not callable(want):
        inner = tuple(getattr(judge, "__dict__", None) for judge in judges)
        return difference(vars(got), vars(want), f"{path}.__dict__", inner) if hasattr(got, "__dict__") else f"{path}: {show(got)}"
    if callable(want):
        return None if callable(got) else f"{path}: {show(got)} is not callable"
    if isinstance(want, float) and isinstance(got, float):
        close = got == want or abs(got - want) <= 1e-5 * max(abs(got), abs(want)) or (got != got and want != want)
        return None if close else f"{path}: {got} instead of {want}"
    return None if type(got) is type(want) and got == want else f"{path}: {show(got)} instead of {show(want)}"


def tensor_difference(got: Any, want: torch.Tensor, path: str, judges: Judges = ()) -> str | None:
    if not isinstance(got, torch.Tensor):
        return f"{path}: {show(got)} instead of a tensor"
    by_rounding = any(isinstance(judge, torch.Tensor) and judge.shape != want.shape for judge in judges)
    for name in ("dtype", "shape", "requires_grad"):
        if getattr(got, name) != getattr(want, name):
            if name == "shape" and by_rounding:
                return None
            return f"{path}: {name} {getattr(got, name)} instead of {getattr(want, name)}"
    if want.numel() > 1 and "gradients" not in path and meaningful_strides(got) != meaningful_strides(want):
        return f"{path}: stride {got.stride()} instead of {want.stride()} for shape {tuple(want.shape)}"
    a, b = got.detach(), want.detach()
    if torch.equal(a, b):
        return None
    exact, *others = (judge.detach() if isinstance(judge, torch.Tensor) and judge.shape == b.shape else None for judge in judges or (None,))
    if not b.is_floating_point():
        runs = [judge.to(b.dtype) != b for judge in (exact, *others) if judge is not None]
        by_rounding = bool(runs) and bool(torch.stack(runs).any(0)[a != b].all())
        return None if by_rounding else f"{path}: values {show(a)} instead of {show(b)}"
    bound = 64 * max(EPS[b.dtype], EPS[torch.float32])  # a double may come from float32 arithmetic
    wide_a, wide_b = a.double(), b.double()
    scale = float(wide_b[torch.isfinite(wide_b)].abs().max()) if bool(torch.isfinite(wide_b).any()) else 1.0
    close = torch.isclose(wide_a, wide_b, rtol=bound, atol=bound * max(scale, 1.0), equal_nan=True)
    if bool(close.all()):
        return None
    if exact is not None:
        runs = [b, *(other for other in others[:NEIGHBOURS] if other is not None and other.dtype == b.dtype)]
        worst = max(runs, key=lambda run: float((run.double() - exact).abs().nan_to_num(0.0).max()))
        if any(why_not_accurate(a, run, exact) is None for run in (b, worst)):
            return None
    return f"{path}: values {show(wide_a[~close][:4])} instead of {show(wide_b[~close][:4])}"


def meaningful_strides(t: torch.Tensor) -> tuple[int, ...]:
    return tuple(step for step, size in zip(t.stride(), t.shape, strict=True) if size > 1)


def show(value: Any) -> str:
    return str(value).replace("\n", " ")[:100]


def why_different(source: str, peer: Peer, settings: dict[str, Any]) -> str | None:
    plain = observe(source, lambda f: f)
    try:
        compiled = observe(source, lambda f: peer.compile(f, **settings))
    finally:
        peer.reset()
    why, exact, near = first_difference(compiled, plain), None, list[Seen]()
    if why is not None and "values" in why and (exact := exact_of(source, plain)) is not None:
        why = first_difference(compiled, plain, exact)
    if why is not None and "values" in why and exact is not None:
        near = [observe(source, lambda f: f, change=neighbour(seed)) for seed in range(NEIGHBOURS)]
        why = first_difference(compiled, plain, exact, *near)
    if why is not None and ("values" in why and exact is not None or ": shape " in why):
        near = near or [plain] * NEIGHBOURS
        for seed in range(NEIGHBOURS):
            with RoundsOtherwise(seed):
                near.append(observe(source, lambda f: f))
        why = first_difference(compiled, plain, exact or plain, *near)
    return why


def first_difference(compiled: Seen, plain: Seen, *judges: Seen) -> str | None:
    """`judges`: what the exact program gave, plain ones on neighbouring inputs, and for whole numbers and sizes those
    that round otherwise."""
    for call, error in enumerate(plain.errors):
        if compiled.errors[call] != error:
            return f"call {call}: raises {compiled.errors[call]} instead of {error}"
        for what in ("results", "inputs", "gradients"):
            ours, theirs = getattr(compiled, what)[call], getattr(plain, what)[call]
            if what == "gradients" and theirs and isinstance(theirs[0], str):
                continue
            if (d := difference(ours, theirs, f"call {call}: {what}", tuple(getattr(judge, what)[call] for judge in judges))) is not None:
                return d
        if compiled.sharing[call] != plain.sharing[call]:
            return f"call {call}: storage shared by {compiled.sharing[call]} instead of {plain.sharing[call]}"
    if compiled.printed != plain.printed:
        return f"printed {compiled.printed!r} instead of {plain.printed!r}"
    log = difference(compiled.log, plain.log, "LOG", tuple(judge.log for judge in judges))
    return log or difference(compiled.state, plain.state, "state", tuple(judge.state for judge in judges))


def runs_plain(source: str) -> bool:
    """A shrunk candidate must still be a program: no error where the original had none."""
    try:
        return not any(error and error[0] in ("NameError", "UnboundLocalError") for error in observe(source, lambda f: f).errors)
    except Exception:  # a candidate whose source does not even load
        return False


def run_task(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One seed: `tensors:17` or `python:17`."""
    kind, _, seed = name.partition(":")
    peer = find_peer(settings["peer"])
    program = importlib.import_module(KINDS[kind]).make_program(int(seed))
    chosen = {"dynamic": [None, True][int(seed) % 4 == 3], "backend": settings["backend"]} if settings["peer"].startswith("dovetail") else {}
    chosen = {key: value for key, value in chosen.items() if value is not None}
    seen = peer.observe(lambda: why_different(show_program(program), peer, chosen))
    why, work = seen.result, {"graphs": seen.graphs, "breaks": seen.breaks}
    if why is None:
        return {"status": "pass", **work}
    if settings.get("shrink", True):
        program, why = shrunk(program, why, lambda source: why_different(source, peer, chosen))
    return {"status": "fail", "reason": why, "program": show_program(program), "settings": chosen, **work}


def shrunk(program: Program, why: str, differ: Callable[[str], str | None]) -> tuple[Program, str]:
    """Smaller program with the same sort of difference (its words without the numbers)."""

    def sort_of(text: str) -> str:
        return "".join(c for c in text.split("instead")[0] if c.isalpha() or c == " ")[:24]

    last = [why]

    def fails(candidate: Program) -> bool:
        source = show_program(candidate)
        if not runs_plain(source):
            return False
        try:
            found = differ(source)
        except Exception as error:  # an internal error counts as a difference of its own
            found = short_error(error)
        if found is None or sort_of(found) != sort_of(why):
            return False
        last[0] = found
        return True

    return shrink(program, fails), last[0]
