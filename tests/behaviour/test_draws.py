"""SPEC C3, C9: random numbers of Python's and NumPy's, seeds, filters of warnings, and calls with odd arguments."""
from __future__ import annotations

import collections
import itertools
import random
import warnings
from typing import Any, TypedDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import dovetail
from dovetail.events import EVENTS
from tests.behaviour.running import BACKENDS, check_same


def seeded(x: torch.Tensor) -> Any:
    random.seed(5)
    return x * random.random() + random.randint(1, 9)


def seeded_torch(x: torch.Tensor) -> Any:
    torch.manual_seed(3)
    return x + torch.rand(3, 8)


def computed(x: torch.Tensor) -> Any:
    scale = random.uniform(0.5, 1.5) * 2 + np.random.rand()
    return x.sin() * scale, scale


def in_order(x: torch.Tensor) -> Any:
    for _ in range(3):
        x = torch.sin(x) * random.gauss(0, 1) + np.random.normal(0.0, 2.0)
    return x


def branching(x: torch.Tensor) -> Any:
    y = x * random.random()
    return y * 2 if random.random() < 0.5 else y + 1


def repeated(x: torch.Tensor) -> Any:
    try:
        return torch.linalg.inv(torch.zeros(2, 2) * x[0, 0]) + random.random()
    except RuntimeError:
        return x + random.random()


class Random(torch.nn.Module):
    """Of the user's own, in spite of its name."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> Any:
        return self.scaled(x) + 1

    def scaled(self, x: torch.Tensor) -> Any:
        return x * self.scale


class Owner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rng, self.calls = random.Random(1), 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return x * self.rng.uniform(0, 1), self.rng.random()


def filtered(x: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = x * 2
    return y + 1


def warning(x: torch.Tensor) -> Any:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.warn("old", stacklevel=1)
        y = x * 2
    return y + 1, [str(each.message) for each in seen]


PROGRAMS: dict[str, tuple[Any, int]] = {
    "a factor": (lambda x: x * random.uniform(0.8, 1.2) + random.random(), 0),
    "a factor of NumPy's": (lambda x: x * np.random.uniform(0.5, 1.5), 0),
    "arithmetic with it": (computed, 0),
    "in the program's order": (in_order, 0),
    "after a seed": (seeded, 0),
    "after torch's seed": (seeded_torch, 0),
    "a place": (lambda x: x[random.randrange(3)] + x[:, random.randint(0, 7)].sum(), 0),
    "a window": (lambda x: x[:, (i := random.randint(0, 4)) : i + 4] * 2, 0),
    "a margin": (lambda x: F.pad(x, (random.randint(0, 2), 1)), 0),
    "a generator of one's own": (Owner(), 0),
    "a class of that name": (Random(), 0),
    "a place from the end": (lambda x: x[:, random.randrange(7, 0, -2)] * 2, 1),
    "more than 64 bits": (lambda x: x * (random.randrange(2**70) % 5), 1),
    "a system's generator": (lambda x: x * (random.SystemRandom().random() * 0), 2),
    "a branch": (branching, 1),
    "a size": (lambda x: torch.zeros(random.randint(1, 5), 3) + x.sum(), 1),
    "a text": (lambda x: (x + 1, f"{random.random():.3f}"), 0),
    "a choice": (lambda x: x * random.choice([1, 2, 3]), 1),
    "where eager has to repeat the call": (repeated, 0),
    "filters of warnings": (filtered, 0),
    "a warning under filters": (warning, 1),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_draws(name: str, backend: str) -> None:
    function, breaks = PROGRAMS[name]
    found = []
    for run in (function, dovetail.compile(function, backend=backend)):
        dovetail.reset()
        EVENTS.clear()
        if isinstance(function, Owner):
            function.__init__()  # type: ignore[misc]
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        results = [run(torch.linspace(-1, 1, 24).reshape(3, 8)) for _ in range(5)]
        found.append([results, random.random(), np.random.rand(), torch.rand(1)])
    check_same(*reversed(found), what=name)
    assert len(EVENTS.of("graph_break")) == breaks, EVENTS.of("graph_break")
    assert not EVENTS.of("fallback_to_eager", "limit")


def test_a_backend_that_takes_numbers_for_constants() -> None:
    def backend(module: Any, examples: Any) -> Any:
        known = [example if isinstance(example, float) else None for example in examples]
        return lambda *args: module(*[arg if fixed is None else fixed for arg, fixed in zip(args, known, strict=True)])

    program = lambda x: x * random.random()
    x = torch.ones(3)
    for run in (compiled := dovetail.compile(program, backend=backend), program, compiled):
        random.seed(4)
        torch.testing.assert_close(run(x), x * random.Random(4).random())


def views(x: torch.Tensor) -> Any:
    d = {"a": x, "b": x * 2}
    return [list(view) for view in (d.keys(), d.values())], d.keys(), d.items(), collections.OrderedDict(d).values()


class Record(TypedDict, total=False):
    a: torch.Tensor
    n: int


def typed(x: torch.Tensor) -> Any:
    made = Record(a=x, n=2)
    made["n"] += 1
    return made["a"] * made["n"], made


@pytest.mark.parametrize("program", [views, typed])
def test_mappings_that_are_returned(program: Any) -> None:
    x = torch.ones(3)
    check_same(*[repr(run(x)) for run in (dovetail.compile(program, backend="eager", fullgraph=True), program)], what="result")


class Plain:
    pass


class Index:
    def __index__(self) -> int:
        return 2


class NoIterator:
    def __iter__(self) -> int:
        return 3


ODD: dict[str, Any] = {
    text: eval(f"lambda x: (x + 1, {text})")
    for text in (
        "map()", "filter()", "filter(None, [1], 2)", "min()", "max(1)", "zip(1)", "zip(NoIterator())", "iter(NoIterator())",
        "reversed()", "reversed([1], 2)", "range(2, foo=1)", "bool(1, 2)", "round(x)", "float(Index())", "int(Index())",
        "float(Plain())", "vars(1)", "enumerate()", "list(1, 2)", "dict(1)", "getattr(x, 3)", "isinstance(1, 2)", "super(1)",
        "itertools.accumulate()", "itertools.groupby()", "itertools.islice([1])", "itertools.pairwise(1)", "sum(x, y=1)",
        "list(itertools.pairwise([1, 2, 3]))", "list.sort(x)", "[3, 1].index(int, 2)", "''.join(1)", "'{}'.format()",
        "{}.update(1)", "dict.fromkeys()", "str.join()", "torch.Size(1, 2)", "slice()", "int('a', 2, 3)", "hash([])", "ord()",
    )
}  # fmt: skip


@pytest.mark.parametrize("text", ODD)
def test_odd_calls_say_what_python_says(text: str) -> None:
    dovetail.reset()
    EVENTS.clear()
    found: list[Any] = []
    for run in (ODD[text], dovetail.compile(ODD[text], backend="eager")):
        try:
            found.append(run(torch.ones(3)))
        except Exception as error:
            found.append([type(error), str(error)])
    check_same(*reversed(found), what=text)
    assert not EVENTS.of("fallback_to_eager")
    assert itertools
