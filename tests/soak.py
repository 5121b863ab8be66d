"""Minutes of what wears a compiler down: recompiles, threads, forks, interrupts, processes that share a cache.

    python -m tests.soak                       2,000 recompiles, and 20 rounds of each of the others
    python -m tests.soak --recompiles 1000 --rounds 3
    python -m tests.soak --write               also to docs/results/soak.md

Prints a line a part, and ends with status 1 if a number was wrong, a process hung, or memory grew.
"""
from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

import dovetail
from tests.sweeps.workers import ROOT, machine_line, write_page

FEWEST: Final = 200
"""Recompiles from which on their growth is judged: the first of each function takes memory, and a reset gives it back."""
MOST_GROWTH: Final = 16.0
"""KiB that a compile of a program seen before may leave behind: torch.fx keeps the text of every graph."""
TEMPLATES: Final = (
    "torch.tanh(x * {k}) + {n}", "(x @ x.mT * {k}).softmax(-1).sum(0)", "x.view(-1)[{n}:].cumsum(0) * {k}", "torch.where(x > {k}, x, {n}).mean(-1)",
    "torch.nn.functional.layer_norm(x + {k}, x.shape[-1:]).amax({n} % 2)",
)
CHILD: Final = """
import random, signal, sys, threading, os, torch, dovetail
from tests.soak import is_right, make
signal.signal(signal.SIGINT, signal.default_int_handler)
chosen = random.Random(int(sys.argv[1]))
try:
    threading.Timer(chosen.random() * 2, os.kill, (os.getpid(), signal.SIGINT)).start()
    while True:
        is_right(make(chosen), chosen)
except KeyboardInterrupt:
    pass
assert all(is_right(make(chosen), chosen) for _ in range(3))
print("right")
"""


def make(chosen: random.Random) -> Callable[[torch.Tensor], torch.Tensor]:
    text = chosen.choice(TEMPLATES).format(k=round(chosen.random(), 6), n=chosen.randrange(5))
    made: Callable[[torch.Tensor], torch.Tensor] = eval(f"lambda x: {text}", {"torch": torch})
    return made


def is_right(f: Callable[[torch.Tensor], torch.Tensor], chosen: random.Random) -> bool:
    """Compiled and plain give the same for two sizes, gradients included; in double precision, where rounding shows
    nowhere: a norm of three numbers that are almost equal has few digits."""
    compiled = dovetail.compile(f)
    for size in chosen.sample((3, 4, 6, 9), 2):
        x = torch.randn(size, size, dtype=torch.float64, requires_grad=True)
        got, want = compiled(x), f(x)
        ours, theirs = (torch.autograd.grad(y.sum(), x)[0] for y in (got, want))
        if not (torch.allclose(got, want, atol=1e-5) and torch.allclose(ours, theirs, atol=1e-5)):
            return False
    return True


def resident() -> float:
    """MiB that the process holds now."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def told(count: int, what: str) -> Iterator[int]:
    """The numbers below `count`, with a line at each tenth."""
    started = time.monotonic()
    for n in range(count):
        if n and n % max(count // 10, 1) == 0:
            print(f"    {what} {n}/{count}, {time.monotonic() - started:.0f} s", flush=True)
        yield n


def recompile(count: int) -> str | None:
    """Forty functions, compiled again and again, some in each of a few sizes; the cache is emptied in memory, not on disk."""
    warm, before = count // 4, 0.0
    for n in told(count, "recompile"):
        chosen = random.Random(n % min(40, warm + 1))
        if n == warm:
            before = resident()
        if not is_right(make(chosen), chosen):
            return f"wrong at {n}"
        if n % 50 == 49:
            dovetail.reset()
    grown = (resident() - before) * 1024 / max(count - warm, 1)
    few = f", of fewer than {FEWEST}, which says nothing" if count < FEWEST else ""
    print(f"    {grown:.1f} KiB a recompile, {before:.0f} MiB after {warm}{few}")
    return f"memory grows by {grown:.1f} KiB a recompile" if grown > MOST_GROWTH and not few else None


def call_from_threads(rounds: int) -> str | None:
    """Threads that compile their own functions and call one another's."""
    shared = [dovetail.compile(make(random.Random(seed))) for seed in range(4)]
    plain = [make(random.Random(seed)) for seed in range(4)]
    wrong: list[Any] = []

    def work(seed: int) -> None:
        chosen = random.Random(seed)
        for n in range(rounds):
            which, x = chosen.randrange(4), torch.randn(*[chosen.choice((3, 5, 8))] * 2)
            if not torch.allclose(shared[which](x), plain[which](x), atol=1e-5) or not is_right(make(chosen), chosen):
                wrong.append((seed, n))

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60 + 20 * rounds)
    stuck = sum(thread.is_alive() for thread in threads)
    return f"{stuck} threads hang, wrong: {wrong[:3]}" if stuck or wrong else None


def fork(rounds: int) -> str | None:
    """A child compiles and calls, with what its parent compiled."""
    f, chosen = make(random.Random(1)), random.Random(2)
    for n in told(rounds, "fork"):
        if not is_right(f, chosen):
            return f"wrong in the parent, round {n}"
        child = os.fork()
        if child == 0:
            os._exit(0 if is_right(f, chosen) and is_right(make(chosen), chosen) else 1)
        ends = time.monotonic() + 120
        while (found := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < ends:
            time.sleep(0.02)
        if found[0] == 0 or found[1]:
            return f"round {n}: the child {'hangs' if found[0] == 0 else 'is wrong'}"
    return None


def interrupt(rounds: int) -> str | None:
    """Three processes at a time that share a cache, each interrupted at a random moment."""
    with tempfile.TemporaryDirectory() as folder:
        for n in told(rounds, "interrupt"):
            variables = {**os.environ, "PYTHONPATH": str(ROOT), "DOVETAIL_CACHE": folder, "OMP_NUM_THREADS": "1"}
            children = [subprocess.Popen([sys.executable, "-c", CHILD, str(3 * n + i)], env=variables, stdout=subprocess.PIPE,
                                         stderr=subprocess.PIPE, text=True) for i in range(3)]
            for child in children:
                try:
                    out, err = child.communicate(timeout=300)
                except subprocess.TimeoutExpired:
                    child.send_signal(signal.SIGABRT)
                    return f"round {n}: process {child.pid} hangs"
                if "right" not in out:
                    return f"round {n}: {err[-500:]}"
    return None


PARTS: Final = {"recompile": recompile, "threads": call_from_threads, "fork": fork, "interrupt": interrupt}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recompiles", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--write", action="store_true", help="write docs/results/soak.md")
    chosen = parser.parse_args()
    found: dict[str, str | None] = {}
    rows = ["| part | rounds | what it does | result |", "|---|---|---|---|"]
    for name in chosen.only.split(","):
        started, count = time.monotonic(), chosen.recompiles if name == "recompile" else chosen.rounds
        found[name] = why = PARTS[name](count)
        print(f"{name}: {why or 'good'} ({time.monotonic() - started:.0f} s)", flush=True)
        what = " ".join((PARTS[name].__doc__ or "").split())
        rows.append(f"| {name} | {count} | {what} | {why or 'good'} ({time.monotonic() - started:.0f} s) |")
    if chosen.write:
        write_page("soak", f"# Soak\n\nCommand: `make soak`.  \n{machine_line()}\n\n" + "\n".join(rows))
    raise SystemExit(1 if any(found.values()) else 0)


if __name__ == "__main__":
    main()
