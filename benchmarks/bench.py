"""Eager, torch.compile and Dovetail side by side, every pair in its own process.

    python -m benchmarks.bench                         everything (about half an hour on two cores)
    python -m benchmarks.bench --only mlp,softmax --modes inference
    python -m benchmarks.bench --quick                 no cold torch.compile calls
    python -m benchmarks.bench --write                 also docs/results/bench.* and README's results section

Cold: new process, empty caches for both compilers. Another process, with the caches filled: warm first calls,
then the steady state, the peers taking turns, medians. Results are kept after each step, so an interrupted
run goes on where it stopped.
"""
from __future__ import annotations

import argparse
import compileall
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.plot import show_plot
from benchmarks.table import show_results, write_readme

ROOT: Final = Path(__file__).resolve().parents[1]
COMPILERS: Final = ("torch", "dovetail")
MODEL_NAMES: Final = (
    "resnet18",
    "mobilenetv3",
    "convnext_atto",
    "vit_tiny",
    "efficientnet_b0",
    "bert",
    "gpt2",
    "llama",
    "t5",
    "lstm",
    "mlp",
    "unet",
)
MICRO_NAMES: Final = (
    "softmax",
    "layer_norm",
    "rms_norm_residual",
    "residual_layer_norm",
    "bias_gelu",
    "swiglu",
    "where_chain",
    "transpose_add",
    "sum_rows",
    "sum_columns",
    "sum_all",
    "variance_columns",
    "argmax_rows",
    "cross_entropy",
    "mse_loss",
    "gather_rows",
    "embedding_sum",
    "cumsum_rows",
    "cat_slices",
    "adam_step",
    "pool_normalise",
)


class Runner:
    """Starts measuring processes and keeps their answers by key."""

    def __init__(self, results: Path, timeout: float, threads: int, caches: Path | None) -> None:
        self.path, self.timeout, self.threads = results, timeout, threads
        self.keeps_caches = caches is not None
        self.caches = caches or Path(tempfile.mkdtemp(prefix="bench-caches-"))
        self.answers: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}

    def measure(self, key: str, cache: str, *arguments: str) -> dict[str, Any]:
        """Run one measurement unless its answer is there; `cache` names the folder both compilers use."""
        if key in self.answers and "error" not in self.answers[key]:
            return self.answers[key]  # type: ignore[no-any-return]
        folder = self.caches / cache
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "DOVETAIL_CACHE": str(folder / "dovetail"),
            "PYTHONPATH": str(ROOT),
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode on disk
        if self.threads:
            environment["OMP_NUM_THREADS"] = str(self.threads)
        started = time.monotonic()
        command = [sys.executable, "-m", "benchmarks.measure", *arguments]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=self.timeout
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            answer = (
                json.loads(lines[-1][7:])
                if lines
                else {"error": done.stderr.strip()[-400:] or f"exit code {done.returncode}"}
            )
        except subprocess.TimeoutExpired:
            answer = {"error": f"timeout after {self.timeout:.0f} s"}
        print(f"  {key:<46} {time.monotonic() - started:6.1f} s  {json.dumps(answer)[:150]}", flush=True)
        self.answers[key] = answer
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.answers, indent=0))
        return answer

    def close(self) -> None:
        if not self.keeps_caches:
            shutil.rmtree(self.caches, ignore_errors=True)


def measure_workload(runner: Runner, name: str, mode: str, chosen: argparse.Namespace) -> None:
    """Cold first calls of both compilers, then all three in steady state on the filled caches."""
    where = f"{name}-{mode}"
    common = ("--workload", name, "--mode", mode)
    peers = [peer for peer in COMPILERS if peer in chosen.peers]
    if not chosen.quick:
        for peer in peers:
            runner.measure(f"{where}/cold/{peer}", where, "first", "--peer", peer, *common)
    runner.measure(f"{where}/steady", where, "steady", *common, *settings(chosen))


def settings(chosen: argparse.Namespace) -> list[str]:
    """Arguments of measurements in which peers take turns."""
    peers = ",".join(["eager", *(peer for peer in COMPILERS if peer in chosen.peers)])
    return ["--peers", peers, "--seconds", str(chosen.seconds), "--clock", chosen.clock]


def measure_micro(runner: Runner, names: list[str], chosen: argparse.Namespace) -> None:
    """Two processes for all of them: in the cache beside the peers, in memory beside copies."""
    for kind in ("micro", "bandwidth"):
        runner.measure(kind, "micro", kind, "--workload", ",".join(names), *settings(chosen))


def measure_machinery(runner: Runner, chosen: argparse.Namespace) -> None:
    """What is not about one model: call overhead, guards, compile time by depth, copy speed, import time."""
    peers = ",".join(["eager", *(peer for peer in COMPILERS if peer in chosen.peers)])
    runner.measure("overhead", "machinery", "overhead", "--peers", peers)
    runner.measure("guards", "machinery", "guards", "--peers", peers)
    for peer in (p for p in COMPILERS if p in chosen.peers):
        for layers in (8, 64):
            if not (chosen.quick and peer == "torch"):
                runner.measure(
                    f"depth/{peer}/{layers}",
                    f"depth-{peer}-{layers}",
                    "depth",
                    "--peer",
                    peer,
                    "--layers",
                    str(layers),
                )
    runner.answers["import"] = {"seconds": measure_import()}


def measure_import() -> float:
    """Seconds `import dovetail; dovetail.compile` costs beyond `import torch`: the least of five."""
    timed = "import dovetail; dovetail.compile"
    text = f"import torch, time; t = time.perf_counter(); {timed}; print(time.perf_counter() - t)"
    runs = [
        subprocess.run(
            [sys.executable, "-c", text],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        for _ in range(5)
    ]
    seconds = [float(done.stdout) for done in runs if done.returncode == 0 and done.stdout]
    return min(seconds, default=math.nan)


def describe_machine(chosen: argparse.Namespace) -> dict[str, Any]:
    import torch

    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "",
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "threads": chosen.threads or torch.get_num_threads(),
        "clock": chosen.clock,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="comma-separated workloads, `models`, `micro` or `machinery`"
    )
    parser.add_argument("--modes", default="inference,training")
    parser.add_argument("--peers", default=",".join(COMPILERS))
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument(
        "--clock", default="wall", choices=("wall", "cpu"), help="cpu: for one thread on a busy machine"
    )
    parser.add_argument("--caches", type=Path, help="a folder to keep: a later run finds what was compiled")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--results", type=Path, default=ROOT / "build/bench/results.json")
    return parser.parse_args()


def main() -> None:
    chosen = parse_arguments()
    if chosen.fresh:
        chosen.results.unlink(missing_ok=True)
    groups = {"models": MODEL_NAMES, "micro": MICRO_NAMES}
    wanted = chosen.only.split(",") if chosen.only else ["machinery", "micro", "models"]
    runner = Runner(chosen.results, chosen.timeout, chosen.threads, chosen.caches)
    compileall.compile_dir(ROOT / "dovetail", quiet=1)
    try:
        if "machinery" in wanted:
            measure_machinery(runner, chosen)
        names = [name for word in wanted for name in groups.get(word, (word,)) if name != "machinery"]
        if small := [name for name in names if name in MICRO_NAMES]:
            measure_micro(runner, small, chosen)
        for name in (name for name in names if name not in MICRO_NAMES):
            for mode in chosen.modes.split(","):
                measure_workload(runner, name, mode, chosen)
    finally:
        runner.close()
    runner.answers["machine"] = describe_machine(chosen)
    chosen.results.write_text(json.dumps(runner.answers, indent=0))
    text = show_results(runner.answers)
    print(text)
    if chosen.write:
        folder = ROOT / "docs/results"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench.md").write_text("# Benchmarks\n\n![speed over eager](bench.svg)\n\n" + text)
        (folder / "bench.svg").write_text(show_plot(runner.answers))
        shutil.copy(chosen.results, folder / "bench.json")
        write_readme(ROOT / "README.md", text)


if __name__ == "__main__":
    main()
