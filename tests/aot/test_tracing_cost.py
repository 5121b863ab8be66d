"""What tracing costs, in Python calls per node of the joint graph, which do not depend on the machine."""
from __future__ import annotations

import cProfile
import pstats
from typing import Any

import pytest
import torch

import dovetail
from dovetail import aot
from dovetail.fake import tensor
from tests.aot.training import Gpt, ResNet


@pytest.mark.parametrize("build, dynamic, most", [(Gpt, False, 95), (Gpt, True, 130), (ResNet, False, 180), (ResNet, True, 200)])
def test_calls_per_op(build: Any, dynamic: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPT's joint graph; 73 without symbols, about 21 microseconds with what PyTorch does in between, 106 with symbols,
    about 35. The ResNet's forward alone, where of each norm's results one is read: 159 and 170; were all recorded, 214 and 226."""
    counted: list[float] = []
    trace = aot.trace_joint

    def counting(module: Any, examples: Any) -> Any:
        trace(module, examples)
        with cProfile.Profile() as profile:
            joint = trace(module, examples)
        counted.append(pstats.Stats(profile).total_calls / len(joint.graph.nodes))  # type: ignore[attr-defined]
        return joint

    monkeypatch.setattr(aot, "trace_joint", counting)
    given = torch.randint(50, (4, 16)) if build is Gpt else torch.randn(4, 3, 16, 16)
    with torch.set_grad_enabled(build is Gpt):
        dovetail.compile(build().train(build is Gpt), dynamic=dynamic, options={"cache": False})(given)
    assert len(counted) == 1 and counted[0] < most, counted


def test_what_capture_derived_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """With symbols, too: sizes that a later op asks about do not make those of earlier ones forgotten."""
    derived: list[str] = []
    asked: list[str] = []
    run, trace = tensor._run, aot.trace_joint
    monkeypatch.setattr(tensor, "_run", lambda func, *rest: derived.append(str(func)) or run(func, *rest))

    def counting(module: Any, examples: Any) -> Any:
        before = len(derived)
        joint = trace(module, examples)
        asked.extend(derived[before:])
        return joint

    monkeypatch.setattr(aot, "trace_joint", counting)
    with torch.no_grad():
        images = torch.randn(4, 3, 16, 16)
        dovetail.compile(ResNet().eval(), dynamic=True, options={"cache": False})(images)
    assert derived and not [op for op in asked if "batch_norm" in op] and len(asked) <= 4, asked
