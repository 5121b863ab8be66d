"""Issue: soak and faults. Threads, processes, forks, interrupts, full or read-only cache folders, many recompiles."""
from __future__ import annotations

import gc
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

import dovetail
from dovetail.capture import builtins as known
from dovetail.util.derivative import compiling

ROOT: Final = Path(__file__).resolve().parents[2]

SCRIPT: Final = """
import torch, dovetail
f = dovetail.compile(lambda x, w: torch.softmax(x @ w, -1) * 2 + 1)
x, w = torch.ones(5, 4, requires_grad=True), torch.eye(4)
y = f(x, w)
y.sum().backward()
assert torch.allclose(y, torch.softmax(x @ w, -1) * 2 + 1) and x.grad is not None
print("right", dovetail.stats()["graphs"])
"""


def start(script: str, cache: Path, **environment: str) -> subprocess.Popen[str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "DOVETAIL_CACHE": str(cache), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    try:
        out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()  # a program that never ends would take a core from all later tests
        raise
    assert process.returncode == 0, err[-2000:]
    return out


def test_processes_share_one_cache_folder(tmp_path: Path) -> None:
    for process in [start(SCRIPT, tmp_path) for _ in range(3)]:
        assert "right 1" in finish(process)


def test_read_only_cache_folder(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert "right 1" in finish(start(SCRIPT, tmp_path))
        for told in ("default", "error"):
            process = start(SCRIPT, Path("/proc/no/such/place"), PYTHONWARNINGS=f"{told}:Dovetail")
            out, err = process.communicate(timeout=120)
            assert "right 1" in out, err
            assert err.count("/proc/no/such/place cannot be written") == (told == "default"), err
    finally:
        tmp_path.chmod(0o700)


def test_damaged_cache_entries_are_misses(tmp_path: Path) -> None:
    finish(start(SCRIPT, tmp_path))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    for path in files:
        path.chmod(0o600)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert "right 1" in finish(start(SCRIPT, tmp_path))


def test_killed_while_compiling_then_again(tmp_path: Path) -> None:
    process = start("import time\n" + SCRIPT, tmp_path)
    try:
        process.wait(timeout=2.5)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert "right 1" in finish(start(SCRIPT, tmp_path))


def test_fork_after_compile(tmp_path: Path) -> None:
    script = SCRIPT + """
import os
child = os.fork()
if child == 0:
    g = dovetail.compile(lambda t: t.sin() + 3)
    ok = torch.allclose(f(x.detach() * 2, w), torch.softmax(x.detach() * 2 @ w, -1) * 2 + 1) and torch.allclose(g(x.detach()), x.detach().sin() + 3)
    os._exit(0 if ok else 1)
print("child", os.waitpid(child, 0)[1])
"""
    assert "child 0" in finish(start(script, tmp_path))


def test_interrupt_during_compile_leaves_things_usable(tmp_path: Path) -> None:
    script = """
import signal, torch, dovetail
def backend(graph, inputs):
    if not hasattr(backend, "done"):
        backend.done = True
        raise KeyboardInterrupt
    return graph.forward
f = dovetail.compile(lambda x: x * 2 + 1, backend=backend)
try:
    f(torch.ones(2)); print("no interrupt")
except KeyboardInterrupt:
    print("interrupted")
print(f(torch.ones(2)).tolist(), (torch.ones(2) * 3).tolist())
"""
    out = finish(start(script, tmp_path))
    assert "interrupted" in out and "[3.0, 3.0] [3.0, 3.0]" in out


class Stop(Exception):
    def __init__(self, *args: Any) -> None:
        super().__init__("alarm")

    def __call__(self, *args: Any) -> None:
        raise Stop

    def ring(self, *args: Any) -> None:
        raise Stop


@pytest.mark.parametrize("handler", [Stop(), Stop().ring], ids=["object", "method"])
def test_what_a_signal_handler_raises_during_a_compile_is_the_users(handler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever in the compile the signal comes: while a call of the program is captured, or in a backend."""
    places = ["capture", "backend", "nowhere"]

    def ring(place: str) -> None:
        if places[0] == place:
            signal.raise_signal(signal.SIGUSR1)

    def capture(trace: Any, args: Any, kwargs: Any) -> bool:
        ring("capture")
        return True

    def backend(graph: Any, inputs: Any) -> Any:
        ring("backend")
        return graph.forward

    was = signal.signal(signal.SIGUSR1, handler)
    monkeypatch.setitem(known.SPECIAL, id(callable), capture)
    f = dovetail.compile(lambda x: x * 2 + callable(len), backend=backend)
    try:
        while places[0] != "nowhere":
            with pytest.raises(Stop):
                f(torch.ones(2))
            places.pop(0)
        assert f(torch.ones(2)).tolist() == [3.0, 3.0]
    finally:
        signal.signal(signal.SIGUSR1, was)


def test_nothing_can_be_written_anywhere(tmp_path: Path) -> None:
    """A full disk: no cache, no temporary folder, no compiler output. Eager's result and one warning."""
    script = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
""" + SCRIPT
    process = start(script, tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "right" in out and err.count("InternalWarning") == 1, err[-2000:]


def test_no_memory_for_a_call_is_an_error_and_the_next_call_works(tmp_path: Path) -> None:
    script = """
import resource, torch, dovetail
f = dovetail.compile(lambda x: (x[:, None] * x[None]).cumsum(0).sum())
g = dovetail.compile(lambda x: x[:, None] * x[None] + 1)
small, large = torch.ones(50), torch.ones(40000)
f(small), g(small)
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
for run in (f, g):
    try:
        print(run(large).shape)
    except RuntimeError as error:
        print("memory" in str(error) and ("6400000000 bytes" in str(error) or torch.__version__ < "2.13"))
print(float(f(small)), float(g(small).sum()))
"""
    assert finish(start(script, tmp_path)).split() == ["True", "True", "63750.0", "5000.0"]


@pytest.mark.parametrize("after", [0.05, 0.4])
def test_ctrl_c_at_any_time(tmp_path: Path, after: float) -> None:
    script = f"""
import os, signal, threading, torch, dovetail
f = dovetail.compile(lambda x: torch.softmax(x @ x, -1) * 2 + 1)
x = torch.ones(4, 4)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts its background jobs with it ignored
try:
    threading.Timer({after}, os.kill, (os.getpid(), signal.SIGINT)).start()  # which may come before start returns
    while True:
        f(x)
except KeyboardInterrupt:
    print("interrupted", torch.allclose(f(x), torch.softmax(x @ x, -1) * 2 + 1))
"""
    assert "interrupted True" in finish(start(script, tmp_path))


def test_threads_in_one_function() -> None:
    """Calls of one model from several threads, with sizes, numbers and grad modes that make each other recompile."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    compiled = dovetail.compile(lambda x, k: model(x) * k)
    wrong: list[object] = []

    def work(seed: int) -> None:
        chosen = random.Random(seed)
        for _ in range(30):
            x, k = torch.randn(chosen.choice((1, 2, 5, 8)), 8, requires_grad=True), chosen.choice((1, 2, 0.5))
            with torch.set_grad_enabled(chosen.random() < 0.7):
                got, want = compiled(x, k), model(x) * k
            if not torch.allclose(got, want, atol=1e-5):
                wrong.append((seed, x.shape, k))
            if want.requires_grad:
                ours, theirs = (torch.autograd.grad(y.sum(), x)[0] for y in (got, want))
                wrong.extend([] if torch.allclose(ours, theirs, atol=1e-5) else [(seed, "gradient")])
            if chosen.random() < 0.03:
                dovetail.reset()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_threads_with_different_functions() -> None:
    wrong: list[object] = []
    limit = sys.getrecursionlimit()

    def work(n: int) -> None:
        f = dovetail.compile(lambda x: (x * n).cos() - 2 * n)  # whose last bits do not become the first
        for size in (3, 4, 5, 3):
            x = torch.randn(size, requires_grad=True)
            y = f(x)
            if not torch.allclose(y, (x * n).cos() - 2 * n):
                wrong.append((n, size))
            y.sum().backward()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    assert sys.getrecursionlimit() == limit, "captures at the same time raise it and restore it together"
    assert torch.compiler.is_compiling() is False and not is_in_torch_dispatch_mode()


def test_whether_a_thread_compiles_is_no_other_s_business() -> None:
    seen: list[bool] = []
    first, second = compiling(), compiling()

    def work() -> None:
        with first:
            seen.append(bool(torch.compiler.is_compiling()))
            entered.set()
            left.wait(60)

    entered, left = threading.Event(), threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(60)
    assert not torch.compiler.is_compiling()
    with second:
        left.set()
        thread.join(60)
        assert torch.compiler.is_compiling()
    assert seen == [True] and torch.compiler.is_compiling() is False


def test_memory_does_not_grow_with_calls_or_recompiles() -> None:
    f = dovetail.compile(lambda x, k: x * len(k) + 1, backend="eager")
    x = torch.ones(64)

    def churn(count: int) -> None:
        for n in range(count):
            f(x, "a" * (n % 6))
            if n % 40 == 39:
                dovetail.reset()

    churn(200)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    churn(600)
    gc.collect()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 30, f"{grown:.0f} MiB more after 600 calls with 90 recompiles"


def test_tensors_are_released() -> None:
    f = dovetail.compile(lambda x: x * 2 + 1)
    x = torch.ones(1000, requires_grad=True)
    for _ in range(3):
        f(x).sum().backward()
    gc.collect()
    before = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
    for _ in range(50):
        f(x).sum().backward()
    gc.collect()
    assert sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()) <= before + 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_leave_no_tensors_behind(dynamic: bool) -> None:
    """What autograd saves while the backward is derived could keep its own graph alive."""

    def compile_once() -> int:
        f = dovetail.compile(lambda x: (x @ x.mT * 0.5).softmax(-1).sum(0), dynamic=dynamic)
        x = torch.ones(4, 4, requires_grad=True)
        f(x).sum().backward()
        dovetail.reset()
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    compile_once()
    assert compile_once() == compile_once()


@pytest.mark.parametrize("kind", ["settrace", "setprofile"])
def test_debuggers_and_profilers_keep_working(kind: str) -> None:
    seen: list[str] = []
    f = dovetail.compile(lambda x: x.sin() + 1)
    f(torch.ones(2))
    install = getattr(sys, kind)
    previous = getattr(sys, "gettrace" if kind == "settrace" else "getprofile")()
    install(lambda frame, event, arg: seen.append(event))
    try:
        y = f(torch.ones(2))
    finally:
        install(previous)
    assert seen and torch.allclose(y, torch.ones(2).sin() + 1)
