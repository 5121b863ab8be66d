"""A compiled graph that loses to eager is noticed, once, without side effects."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import dovetail
from dovetail.events import EVENTS
from dovetail.race import Race, is_repeatable

X = torch.ones(4)


def slow(*inputs: torch.Tensor) -> list[torch.Tensor]:
    time.sleep(0.002)
    return [inputs[0] + 1]


def fast(*inputs: torch.Tensor) -> list[torch.Tensor]:
    return [inputs[0] + 1]


def race(compiled: Any, eager: Any, keep_faster: bool = False) -> dict[str, Any]:
    space: dict[str, Any] = {"graph": compiled}
    Race(space, "graph", eager, "f", None, keep_faster)
    EVENTS.clear()
    return space


@pytest.mark.parametrize("keep_faster", [False, True])
def test_a_slow_graph_is_noticed(keep_faster: bool) -> None:
    space = race(slow, fast, keep_faster)
    for _ in range(3):
        assert torch.equal(space["graph"](X)[0], X + 1)
    assert space["graph"] is (fast if keep_faster else slow)
    (event,) = EVENTS.of("slow")
    assert event["compiled_seconds"] > event["eager_seconds"]  # type: ignore[operator]


def test_only_torchs_own_functions_are_run_twice() -> None:
    assert is_repeatable(torch.fx.symbolic_trace(lambda x: torch.relu(x + 1).sin()))
    assert is_repeatable(torch.fx.symbolic_trace(lambda x: torch.ops.aten.relu.default(x)))
    graph = torch.fx.Graph()
    graph.output(graph.call_function(slow, (graph.placeholder("x"),)))
    assert not is_repeatable(torch.fx.GraphModule({}, graph))


def test_a_fast_graph_stays_and_races_once() -> None:
    calls: list[int] = []

    def eager(x: torch.Tensor) -> list[torch.Tensor]:
        calls.append(1)
        time.sleep(0.001)
        return [x]

    space = race(fast, eager)
    for _ in range(10):
        space["graph"](X)
    assert space["graph"] is fast and 0 < len(calls) < 10 and not EVENTS.of("slow")


@pytest.mark.parametrize("kind", ["mutates", "trains", "inference tensor"])
def test_graphs_with_effects_do_not_race(kind: str) -> None:
    eager_calls: list[int] = []

    def compiled(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.add_(1) if kind == "mutates" else x + 1]

    space = race(compiled, lambda x: eager_calls.append(1))
    x = torch.ones(2, requires_grad=kind == "trains")
    if kind == "inference tensor":
        with torch.inference_mode():
            x = torch.ones(2)
    for _ in range(5):
        space["graph"](x)
    assert not eager_calls and space["graph"] is compiled
    assert kind != "mutates" or torch.equal(x, torch.full((2,), 6.0))


def test_random_numbers_are_not_used_up() -> None:
    def draw(x: torch.Tensor) -> list[torch.Tensor]:
        return [x + torch.rand(1)]

    torch.manual_seed(0)
    expected = [torch.rand(1) for _ in range(5)]
    torch.manual_seed(0)
    space = race(draw, draw, keep_faster=True)
    assert all(torch.equal(space["graph"](torch.zeros(1))[0], value) for value in expected)


def test_compiled_functions_race_and_then_call_the_graph_directly() -> None:
    compiled = dovetail.compile(lambda x: x.sin() + 1)
    x = torch.randn(100)
    for _ in range(6):
        torch.testing.assert_close(compiled(x), x.sin() + 1)
    (code,) = [
        code for code, state in compiled._dovetail_compiler.context.codes().items() if state == "active"
    ]
    ((_, function, *_),) = compiled._dovetail_compiler.context.entries(code)
    assert not any(isinstance(value, Race) for value in function.__globals__.values())
