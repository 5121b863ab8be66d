"""An error inside any stage gives one warning, eager's result, an event and a file that reproduces it."""

from __future__ import annotations

import copy
import functools
import importlib
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dovetail
from dovetail.errors import InternalWarning
from dovetail.fake.tensor import PROBE_LIMIT

ROOT = Path(__file__).resolve().parents[2]
compiler: Any = importlib.import_module("dovetail.compile")

STAGES = [
    ("capture", "capture_frame"), ("aot", "trace_joint"), ("ops", "decompose"), ("passes", "optimize"),
    ("aot", "partition"), ("lower", "lower"), ("schedule", "schedule"), ("schedule", "plan"),
    ("codegen", "emit"), ("runtime", "load"), ("aot", "bind"),
]  # fmt: skip


class Broken(Exception):
    pass


def fail(*args: object, **kwargs: object) -> object:
    raise Broken("on purpose")


def f(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return torch.softmax(x * scale, -1)


@pytest.mark.parametrize(("folder", "function"), STAGES, ids=[f"{a}.{b}" for a, b in STAGES])
def test_one_warning_and_eagers_result(
    folder: str, function: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOVETAIL_DUMP", str(tmp_path))
    monkeypatch.setattr(getattr(compiler, folder), function, fail)
    dovetail.reset()
    x = torch.randn(3, 5)
    compiled = dovetail.compile(f)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            torch.testing.assert_close(compiled(x), f(x))
    ours = [item for item in caught if issubclass(item.category, InternalWarning)]
    assert (
        len(ours) == 1 and "on purpose" in str(ours[0].message) and "test_failures.py" in str(ours[0].message)
    )
    assert dovetail.stats()["fallbacks_to_eager"] == 1
    (failure,) = dovetail.report().failures
    assert "on purpose" in failure.text
    if folder != "capture":  # without a captured graph there is nothing to write down
        assert list((tmp_path / "dovetail_repro").glob("repro_*.py"))
    with pytest.raises(Broken):
        dovetail.compile(f, options={"fallback_to_eager": False})(x)


def test_the_reproducer_runs_on_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the injected error it compiles and prints the result: the file is whole."""
    monkeypatch.setenv("DOVETAIL_DUMP", str(tmp_path))
    monkeypatch.setattr(compiler.lower, "lower", fail)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.warns(InternalWarning):
        dovetail.compile(model)(torch.randn(2, 4))
    assert dovetail.report().failures
    path, *_ = (tmp_path / "dovetail_repro").glob("repro_*.py")
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "tensor(" in done.stdout and "on purpose" in path.read_text()


def test_errors_are_there_before_anything_is_compiled() -> None:
    program = "import dovetail; print(dovetail.errors.GraphBreakError.__mro__[1] is dovetail.DovetailError)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("mode", [
    "torch.no_grad()", "torch.inference_mode()", "torch.device('meta')", "torch.autocast('cpu')",
])  # fmt: skip
def test_the_first_call_of_a_process_may_be_made_in_any_mode(mode: str) -> None:
    program = f"""
import torch, warnings
warnings.simplefilter("error")
x = torch.ones(4, 4)
import dovetail
with {mode}:
    y = dovetail.compile(lambda x: (x @ x).relu() + 1)(x)
print(float(y.sum()), dovetail.stats()["fallbacks_to_eager"])
w = x.clone().requires_grad_()
h, loss = dovetail.compile(lambda w: (w * 2, (w * 2).sum()))(w)
loss.backward()
print(float(w.grad.sum()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "80.0 0\n32.0\n", done.stderr


def test_a_broken_compiler_on_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No C++ compiler at all: eager, one warning that says what to install."""
    build = importlib.import_module("dovetail.runtime.build")
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    build.find_compiler.cache_clear()
    build.compiler_identity.cache_clear()
    try:
        x = torch.randn(3, 7)
        with pytest.warns(InternalWarning, match="install g\\+\\+ or clang"):
            torch.testing.assert_close(dovetail.compile(lambda x: x.sin() * 31 + 17)(x), x.sin() * 31 + 17)
    finally:
        build.find_compiler.cache_clear()
        build.compiler_identity.cache_clear()


def test_eager_differentiates_where_backward_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the random numbers of the forward pass, and statistics that are updated once."""
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh(), nn.LayerNorm(4)]
    eager, x = nn.Sequential(*layers).double(), torch.randn(8, 4).double()
    model = copy.deepcopy(eager)
    torch.manual_seed(0)
    eager(x).square().sum().backward()
    torch.manual_seed(0)
    loss = dovetail.compile(model)(x).square().sum()
    monkeypatch.setattr(compiler.schedule, "schedule", fail)
    with pytest.warns(InternalWarning, match="eager runs instead"):
        loss.backward()
    for parameter, expected in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
    torch.testing.assert_close([*model.buffers()], [*eager.buffers()])


def test_a_program_that_was_thought_to_raise():
    """What the kernel without data says of this op is wrong; the call is right, and it is told once: as a break
    where eager can be asked, else (for what is large) as a program that raises."""
    library = torch.library.Library("dovetail_mistaken", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CPU")

    def refuse(x):
        raise RuntimeError("no such shape")

    library.impl("double", refuse, "Meta")
    compiled = dovetail.compile(lambda x: torch.ops.dovetail_mistaken.double(x) + 1)
    before = dovetail.stats()["fallbacks_to_eager"]
    assert compiled(torch.ones(2)).tolist() == [3, 3]
    assert any("no such shape" in str(each.reason) for each in dovetail.explain(compiled)(torch.ones(2)).breaks)
    large, many = torch.ones(PROBE_LIMIT + 1), dovetail.compile(lambda x: torch.ops.dovetail_mistaken.double(x) + 1)
    with pytest.warns(InternalWarning, match="no such shape"):
        assert many(large)[0] == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert many(large)[0] == 3 and compiled(torch.ones(2)).tolist() == [3, 3]
    assert dovetail.stats()["fallbacks_to_eager"] == before + 1


def test_under_another_compiler():
    """torch.compile's frame hook is not to compile this compiler."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    compiled = dovetail.compile(model.forward, options={"fallback_to_eager": False})
    around = torch.compile(lambda x: compiled(x) * 2, backend="eager")
    before = dovetail.stats()["graphs"]
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(around(x), model(x) * 2)
    assert dovetail.stats()["graphs"] > before


def test_around_another_compiler():
    """What torch.compile wraps is captured with its caller, once."""
    inner = torch.compile(lambda x: x * 2 + 1, backend="eager")
    compiled = dovetail.compile(lambda x: inner(x.sin()), backend="eager", fullgraph=True)
    before = dovetail.stats()["recompiles"]
    for _ in range(4):
        x = torch.randn(3)
        torch.testing.assert_close(compiled(x), x.sin() * 2 + 1)
    assert dovetail.stats()["recompiles"] == before


@pytest.mark.parametrize("mark", [
    lambda fn: torch.compile(fn, backend="eager"), dovetail.allow_in_graph, dovetail.assume_constant_result,
    dovetail.disable, torch.compiler.disable, dovetail.compile,
])  # fmt: skip
def test_wrappers_of_marked_functions_run(mark):
    """functools.wraps copies the marks of a function to what wraps it."""
    calls = []
    inner = mark(lambda: torch.ones(2))

    @functools.wraps(inner)
    def outer():
        calls.append(1)
        return inner() * len(calls)

    compiled = dovetail.compile(lambda x: x + outer(), backend="eager")
    assert [compiled(torch.zeros(2)).tolist() for _ in range(2)] == [[1, 1], [2, 2]]
