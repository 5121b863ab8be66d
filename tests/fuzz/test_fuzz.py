"""A fixed slice of both fuzzers, and the shrinker on a planted difference."""
from __future__ import annotations

import pytest

from tests.fuzz.program import Program, Stmt, show_program, shrink
from tests.fuzz.running import neighbour, observe, run_task

SETTINGS = {"peer": "dovetail", "backend": "dovetail", "shrink": True}


@pytest.mark.parametrize("seed", [*range(1000, 1030), 600114, 600332, 810311])  # strides of single elements; rounding decides
def test_tensor_program(seed: int) -> None:
    record = run_task(f"tensors:{seed}", SETTINGS)
    assert record["status"] == "pass", f"{record['reason']}\n{record['program']}"


@pytest.mark.parametrize("seed", range(1000, 1040))
def test_python_program(seed: int) -> None:
    record = run_task(f"python:{seed}", {**SETTINGS, "backend": "eager" if seed % 2 else "dovetail"})
    assert record["status"] == "pass", f"{record['reason']}\n{record['program']}"


def test_shrinking_keeps_only_what_matters() -> None:
    body = (Stmt("t1 = torch.relu(t0)"), Stmt("if True:", (Stmt("t2 = t1 + 1"), Stmt("t3 = t2 * 2"))), Stmt("t4 = torch.sin(t0)"))
    program = Program(0, (), (4, 4), ("t0",), ("torch.randn(n)",), body, ("t4", "t1"))
    small = shrink(program, lambda p: "t2 = " in show_program(p))
    text = show_program(small)
    assert "t2 = " in text and "sin" not in text and "t3" not in text and len(small.sizes) == 1


def test_neighbours_of_a_program_have_other_weights() -> None:
    source = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.count = 0
        self.weight = torch.nn.Parameter(torch.full((3,), 0.1))

NET = Net()
SIZES = (3,)

def make_inputs(call):
    return [torch.ones(3, dtype=torch.bool)]

def f(x):
    return (NET.weight * x,)
"""
    plain, near = (observe(source, lambda f: f, change=change) for change in (lambda args: args, neighbour(0)))
    assert 0 < float((plain.results[0][0] - near.results[0][0]).abs().max()) < 1e-7
