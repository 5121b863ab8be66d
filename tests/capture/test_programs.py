"""Every program, compiled with backend="eager", does what Python does, with as many breaks as expected."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

import dovetail
from dovetail.events import EVENTS

from . import programs


def describe(value: Any, seen: dict[int, int]) -> Any:
    """A value as plain data: numbers, structure, classes and aliasing."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, tuple(value.shape), value.detach().tolist(), value.requires_grad)
    if isinstance(value, (list, tuple, dict, set)) or hasattr(value, "__dict__") and not callable(value):
        if not isinstance(value, tuple) and id(value) in seen:
            return ("again", seen[id(value)])
        seen[id(value)] = len(seen)
    if isinstance(value, dict):
        return (type(value).__name__, [(describe(k, seen), describe(v, seen)) for k, v in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [describe(item, seen) for item in value])
    if isinstance(value, (set, frozenset)):
        return (type(value).__name__, sorted(map(repr, value)))
    if (
        dataclasses.is_dataclass(value)
        or type(value).__module__ == programs.__name__
        and hasattr(value, "__dict__")
    ):
        return (type(value).__name__, describe(vars(value), seen))
    return value


def outcome(fn: Any, args: Any) -> Any:
    programs.COUNTER = 0
    programs.REGISTRY.clear()
    try:
        result = ("returned", fn(*args))
    except Exception as error:
        result = ("raised", type(error).__name__, str(error))
    return describe([result, args, programs.COUNTER, programs.REGISTRY], {})


@pytest.mark.parametrize(
    "fn, args, breaks", programs.PROGRAMS, ids=[fn.__name__ for fn, _, _ in programs.PROGRAMS]
)
def test_program(fn: Any, args: Any, breaks: int, capsys: Any) -> None:
    compiled = dovetail.compile(fn, backend="eager")
    EVENTS.clear()
    for _ in range(2):
        expected = outcome(fn, copy.deepcopy(args))
        assert outcome(compiled, copy.deepcopy(args)) == expected
    failures = [event["error"] for event in EVENTS.of("fallback_to_eager")]
    assert not failures, failures
    found = [str(event["text"]) for event in EVENTS.of("graph_break")]
    assert len(found) == breaks, found
    raises = fn.__name__ == "leaves_by_exception"
    assert raises or not EVENTS.of("skip"), [event["text"] for event in EVENTS.of("skip")]
