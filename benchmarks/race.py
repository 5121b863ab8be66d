"""Eager, torch.compile and Dovetail on 207 programs, on the GPU if there is one, else on the CPU.

    python -m benchmarks.race                               all of them, a table, build/bench/race.json
    python -m benchmarks.race --only swin_train,stencil --peers eager,dovetail --jobs 2
    python -m benchmarks.race --write                       the table into docs/results/race.md, too

A process builds one program and compiles it for every peer. Several do so at a time; then each is alone on
the machine while it times its peers in turns, and reports medians.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import compile_with, first_tensor
from benchmarks.programs import DEVICE, LARGE
from benchmarks.programs import PROGRAMS as MODELS
from benchmarks.sketches import SKETCHES
from benchmarks.snippets import SNIPPETS
from benchmarks.studies import STUDIES
from benchmarks.trials import TRIALS

PROGRAMS = MODELS | SNIPPETS | SKETCHES | STUDIES | TRIALS
RESULTS = Path("build/bench/race.json")
PAGE = Path("docs/results/race.md")
ROUNDS = 7
LEAST = 0.03
"""Seconds of one round of one peer, at least."""


def synchronize() -> None:
    if LARGE:
        torch.cuda.synchronize()


def peak() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if LARGE else 0.0


@contextmanager
def alone(path: str) -> Iterator[None]:
    """One process at a time; those that are compiling go on, but only while nobody times."""
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def compiling(path: str) -> Iterator[None]:
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield


def prepare(name: str, peers: list[str]) -> tuple[dict[str, Callable[[], Any]], dict[str, dict[str, Any]]]:
    """The program for every peer, called often enough to be warm."""
    steps: dict[str, Callable[[], Any]] = {}
    told: dict[str, dict[str, Any]] = {}
    wanted = None
    for peer in peers:
        torch.manual_seed(0)
        target, use = PROGRAMS[name]()
        run = compile_with(peer, target)
        steps[peer] = lambda run=run, use=use: use(run)
        torch.manual_seed(1)
        synchronize()
        started = time.perf_counter()
        got = first_tensor(steps[peer]()).detach().float().clone()
        synchronize()
        told[peer] = {"first_s": time.perf_counter() - started}
        if wanted is None:
            wanted = got
        told[peer]["difference"] = float((got - wanted).norm() / wanted.norm().clamp(min=1e-12))
        for _ in range(4):
            steps[peer]()
        synchronize()
    return steps, told


def measure(name: str, peers: list[str], lock: str, limit: int) -> dict[str, Any]:
    torch.set_float32_matmul_precision("high")
    with compiling(lock):
        signal.alarm(limit)  # ends the process: waiting for others is not part of it
        steps, told = prepare(name, peers)
        signal.alarm(0)
    with alone(lock):
        times: dict[str, list[float]] = {peer: [] for peer in steps}
        calls = {}
        for peer, step in steps.items():
            if LARGE:
                torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated() / 2**30 if LARGE else 0.0
            started = time.perf_counter()
            for _ in range(3):
                step()
            synchronize()
            calls[peer] = max(1, min(100, round(LEAST * 3 / (time.perf_counter() - started))))
            told[peer]["working_gib"] = peak() - held
        for _ in range(ROUNDS):
            for peer, step in steps.items():
                started = time.perf_counter()
                for _ in range(calls[peer]):
                    step()
                synchronize()
                times[peer].append((time.perf_counter() - started) / calls[peer] * 1e3)
    for peer in steps:
        told[peer]["ms"] = statistics.median(times[peer])
    result: dict[str, Any] = {"program": name, "peers": told}
    if any(peer.startswith("dovetail") for peer in steps):
        import dovetail

        stats = dovetail.stats()
        result["graphs"], result["breaks"] = stats.get("graphs"), stats.get("graph_breaks")
        result["eager"] = stats.get("fallbacks_to_eager")
    return result


def measure_apart(name: str, peers: str, lock: str, limit: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        places = ("TORCHINDUCTOR_CACHE_DIR", "DOVETAIL_CACHE", "TRITON_CACHE_DIR")
        env = {**os.environ, **{place: f"{folder}/{place}" for place in places}}
        command = [sys.executable, "-m", "benchmarks.race", "--one", name, "--peers", peers]
        command += ["--lock", lock, "--limit", str(limit)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode == -signal.SIGALRM:
        return {"program": name, "error": f"took longer than {limit} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        lines = (done.stderr or done.stdout).strip().splitlines() or [""]
        errors = [line for line in lines if "Error" in line and not line.startswith(" ")]
        return {"program": name, "error": [*lines[-1:], *errors][-1]}
    result: dict[str, Any] = json.loads(lines[-1])
    if "InternalWarning" in done.stderr:
        result["warnings"] = done.stderr[-400:]
    return result


def show(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"{result['program']:18} FAILED {result['error']}"
    parts = [f"{result['program']:18}"]
    for peer, told in result["peers"].items():
        parts.append(
            f"{peer} {told['ms']:.3f} ms {told['working_gib']:.2f} GiB {told['first_s']:.1f} s "
            f"{told['difference']:.0e}"
        )
    return " | ".join([*parts, f"graphs {result.get('graphs')} breaks {result.get('breaks')}"]) + (
        f"\n    {result['warnings']}" if "warnings" in result else ""
    )


def page(machine: dict[str, str], results: list[dict[str, Any]]) -> str:
    """The table, as Markdown."""
    head = [
        "# Programs side by side",
        "",
        f"{machine['device']}, Python {machine['python']}, torch {machine['torch']}, {machine['date']}; "
        "`python -m benchmarks.race`. Milliseconds of",
        "one use (a training program: forward and backward), medians, default modes, peers in turns",
        "in one process with the machine to itself. GiB: what the use needs beyond weights and inputs.",
        "First calls are made while other processes compile. The programs are in `benchmarks/programs.py`,",
        "`benchmarks/studies.py`, `snippets.py`, `sketches.py` and `trials.py`.",
        "",
        "| program | eager | torch.compile | Dovetail | over eager | over torch.compile | GiB: eager "
        "| torch.compile | Dovetail | first call s: torch.compile | Dovetail | breaks |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    rows = []
    for result in sorted(results, key=lambda r: r["program"]):
        if "error" in result:
            rows.append(f"| {result['program']} | {result['error']} |" + " |" * 10)
            continue
        told = [result["peers"].get(peer, {}) for peer in ("eager", "torch", "dovetail")]
        cells = [f"{t['ms']:.2f}" if t else "–" for t in told]
        cells += [f"{t['ms'] / told[2]['ms']:.2f}x" if t and told[2] else "–" for t in told[:2]]
        cells += [f"{t['working_gib']:.2f}" if t else "–" for t in told]
        cells += [f"{t['first_s']:.1f}" if t else "–" for t in told[1:]]
        rows.append("| " + " | ".join([result["program"], *cells, str(result.get("breaks"))]) + " |")
    return "\n".join([*head, *rows, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PROGRAMS))
    parser.add_argument("--peers", default="eager,torch,dovetail")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 3))
    parser.add_argument("--limit", type=int, default=500, help="seconds to compile one program")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--write", action="store_true", help=f"also write {PAGE}")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--lock", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        warnings.filterwarnings("ignore", module="torch")
        print(json.dumps(measure(args.one, args.peers.split(","), args.lock, args.limit)))
        return
    args.results.parent.mkdir(parents=True, exist_ok=True)
    machine = {
        "device": torch.cuda.get_device_name() if LARGE else f"{DEVICE}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": str(date.today()),
    }
    results: list[dict[str, Any]] = []
    with tempfile.NamedTemporaryFile() as lock, ThreadPoolExecutor(args.jobs) as pool:
        todo = [
            pool.submit(measure_apart, name, args.peers, lock.name, args.limit)
            for name in args.only.split(",")
        ]
        for one in todo:
            one.add_done_callback(lambda done: print(show(done.result()), flush=True))
        for one in todo:
            results.append(one.result())
            args.results.write_text(json.dumps({"machine": machine, "results": results}, indent=1))
    if args.write:
        PAGE.write_text(page(machine, results))


if __name__ == "__main__":
    main()
