"""One measurement in one process, printed as a line of JSON. `bench.py` starts these.

    python -m benchmarks.measure first --peer torch --workload bert --mode training   first call, peak memory
    python -m benchmarks.measure steady --workload bert --mode inference              medians, interleaved
    python -m benchmarks.measure micro --workload softmax,argmax_rows                 several, one by one
    python -m benchmarks.measure bandwidth --workload softmax,argmax_rows             beside copies in memory
    python -m benchmarks.measure overhead | guards
    python -m benchmarks.measure depth --peer dovetail --layers 64
"""
from __future__ import annotations

import argparse
import copy
import importlib
import json
import resource
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from benchmarks.models import LARGE, MICRO, SMALL, WORKLOADS, Workload

PEERS: Final = ("eager", "torch", "dovetail")
Step = Callable[[], Any]
CLOCKS: Final[dict[str, Callable[[], float]]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""Time of the process itself says more where one thread shares its core with other programs."""


def compiling(peer: str, **settings: Any) -> Callable[[Any], Any]:
    if peer == "eager":
        return lambda run: run
    package = torch if peer == "torch" else importlib.import_module("dovetail")
    return lambda run: package.compile(run, **settings)


def build(name: str, mode: str) -> Workload:
    torch.manual_seed(0)
    made = MICRO[name](SMALL) if name in MICRO else WORKLOADS[name]()
    if isinstance(made.run, nn.Module):
        made.run.train(mode == "training")
    return made


def step_of(work: Workload, peer: str, mode: str) -> Step:
    """A call without arguments: one forward, or one forward and backward with fresh gradients."""
    model = copy.deepcopy(work.run) if isinstance(work.run, nn.Module) else work.run
    run = compiling(peer)(model)
    if mode == "inference":

        def infer() -> Any:
            with torch.no_grad():
                return run(*work.inputs)

        return infer
    leaves = list(model.parameters()) if isinstance(model, nn.Module) else []
    inputs = work.inputs if leaves else tuple(grad_leaf(x) for x in work.inputs)

    def train() -> Any:
        for leaf in leaves or inputs:
            leaf.grad = None
        out = run(*inputs)
        loss = sum(o.float().square().mean() for o in (out if isinstance(out, tuple) else (out,)))
        loss.backward()
        return loss

    return train


def grad_leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_() if x.is_floating_point() else x


def measure_first(chosen: argparse.Namespace) -> dict[str, Any]:
    work = build(chosen.workload, chosen.mode)
    started = time.perf_counter()
    step = step_of(work, chosen.peer, chosen.mode)
    step()
    first = time.perf_counter() - started
    started = time.perf_counter()
    step()
    return {"first_s": first, "second_s": time.perf_counter() - started, "peak_mib": peak_mib()}


def peak_mib() -> float:
    """Peak resident memory of this process and of the largest compiler process it started."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(kind).ru_maxrss for kind in kinds) / 1024


def measure_steady(chosen: argparse.Namespace) -> dict[str, Any]:
    """Medians with the peers taking turns, so that a noisy moment hits all of them; first calls before."""
    work = build(chosen.workload, chosen.mode)
    steps: dict[str, Step] = {}
    record: dict[str, Any] = {"errors": {}, "difference": {}, "first_s": {}}
    wanted = chosen.peers.split(",")
    reference: Any = None
    for peer in wanted:
        started = time.perf_counter()
        step = step_of(work, peer, chosen.mode)
        try:
            torch.manual_seed(1)
            out = step()
            record["first_s"][peer] = time.perf_counter() - started
            torch.manual_seed(1)
            out = step()
        except Exception as error:  # a peer that cannot run this model is a result
            record["errors"][peer] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        reference = out if reference is None else reference
        record["difference"][peer] = largest_difference(out, reference)
        steps[peer] = step
    times = take_turns(steps, chosen.seconds, CLOCKS[chosen.clock])
    record["median_ms"] = {peer: 1e3 * statistics.median(kept) for peer, kept in times.items()}
    record["rounds"] = min(len(kept) for kept in times.values())
    if importlib.util.find_spec("dovetail") and "dovetail" in steps:
        record["dovetail_stats"] = {
            key: value
            for key, value in importlib.import_module("dovetail").stats().items()
            if isinstance(value, int | float)
        }
    return record


def largest_difference(out: Any, reference: Any) -> float:
    pairs = zip(out, reference, strict=True) if isinstance(out, tuple) else [(out, reference)]
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def take_turns(
    steps: dict[str, Step], seconds: float, clock: Callable[[], float], least: int = 7
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {peer: [] for peer in steps}
    for step in steps.values():
        for _ in range(5):
            step()
    ends = time.perf_counter() + seconds * len(steps)
    while time.perf_counter() < ends or min(map(len, times.values())) < least:
        for peer, step in steps.items():
            started = clock()
            step()
            times[peer].append(clock() - started)
    return times


def time_call(call: Callable[[], Any], least_seconds: float = 0.3) -> float:
    """Microseconds a call, best of five batches."""
    call()
    count = 1
    while True:
        started = time.perf_counter()
        for _ in range(count):
            call()
        if time.perf_counter() - started > least_seconds / 5:
            break
        count *= 2
    batches = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(count):
            call()
        batches.append((time.perf_counter() - started) / count)
    return 1e6 * min(batches)


def measure_overhead(chosen: argparse.Namespace) -> dict[str, Any]:
    """A one-kernel function on eight elements: nearly all of the time is the way in and out."""
    x = torch.randn(8)
    record = {}
    with torch.no_grad():
        for peer in chosen.peers.split(","):
            run = compiling(peer)(lambda t: torch.sin(t) * 2 + 1)
            record[peer] = time_call(lambda run=run: run(x))  # type: ignore[misc]
    return {"call_us": record}


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def stack(layers: int, width: int = 32) -> nn.Module:
    return nn.Sequential(*(Layer(width) for _ in range(layers)))


def measure_guards(chosen: argparse.Namespace) -> dict[str, Any]:
    """Time to get through the hook and the guards of a deep module: the backend does nothing."""
    record: dict[str, dict[str, float]] = {}
    for peer in (p for p in chosen.peers.split(",") if p != "eager"):
        record[peer] = {}
        for layers in (1, 8, 32):
            outputs: list[torch.Tensor] = []

            def backend(graph: Any, inputs: Any, outputs: list[torch.Tensor] = outputs) -> Any:
                outputs.append(torch.zeros(2, 32))
                return lambda *args: (outputs[-1],)

            model = stack(layers)
            x = torch.randn(2, 32)
            with torch.no_grad():
                run = compiling(peer, backend=backend)(model)
                record[peer][str(layers)] = time_call(lambda run=run: run(x))  # type: ignore[misc]
    return {"guards_us": record}


def measure_depth(chosen: argparse.Namespace) -> dict[str, Any]:
    model, x = stack(chosen.layers, 64), torch.randn(8, 64)
    run = compiling(chosen.peer)(model)
    started = time.perf_counter()
    if chosen.mode == "training":
        run(x).sum().backward()
    else:
        with torch.no_grad():
            run(x)
    return {"first_s": time.perf_counter() - started, "peak_mib": peak_mib()}


def measure_micro(chosen: argparse.Namespace) -> dict[str, Any]:
    """Steady states of several functions: a process for each would mostly wait for imports."""
    given = {**vars(chosen), "seconds": chosen.seconds / 2}
    names = chosen.workload.split(",")
    return {name: measure_steady(argparse.Namespace(**{**given, "workload": name})) for name in names}


def measure_bandwidth(chosen: argparse.Namespace) -> dict[str, Any]:
    """GiB/s of functions on matrices that do not fit into the cache, taking turns with a copy of one."""
    x, y = torch.randn(LARGE, LARGE), torch.empty(LARGE, LARGE)
    record: dict[str, Any] = {}
    for name in chosen.workload.split(","):
        work = MICRO[name](LARGE)
        steps = {"copy": lambda: y.copy_(x), "dovetail": step_of(work, "dovetail", "inference")}
        times = take_turns(steps, chosen.seconds / 4, CLOCKS[chosen.clock])
        sizes = {"copy": 2 * x.numel() * 4, "dovetail": work.bytes_moved}
        record[name] = {peer: sizes[peer] / statistics.median(times[peer]) / 2**30 for peer in steps}
    return record


KINDS: Final = {
    "first": measure_first,
    "steady": measure_steady,
    "micro": measure_micro,
    "overhead": measure_overhead,
    "guards": measure_guards,
    "depth": measure_depth,
    "bandwidth": measure_bandwidth,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--peer", default="dovetail", choices=PEERS)
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--workload", default="mlp")
    parser.add_argument("--mode", default="inference", choices=("inference", "training"))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.0, help="steady-state time a peer")
    parser.add_argument("--clock", default="wall", choices=CLOCKS)
    parser.add_argument("--threads", type=int, default=0)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    print("RESULT " + json.dumps(KINDS[chosen.kind](chosen)))


if __name__ == "__main__":
    main()
