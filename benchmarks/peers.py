"""What a user might pick instead: ONNX Runtime and JAX on the same small models, beside eager and Dovetail.

    pip install .[peers]                onnx, onnxruntime, jax
    python -m benchmarks.peers          eager, torch.compile, Dovetail, ONNX Runtime, JAX, all on the CPU
    python -m benchmarks.peers --peers eager,dovetail,jax --only gpt --clock cpu --threads 1 --write

Three models with the same weights: PyTorch's, exported to ONNX, and the same mathematics by hand in JAX,
each compared with eager. A peer that is not installed is left out by name. The first call holds all that a
peer does to get there (export, session, tracing, compiling), its package imported before and its cache
empty. One process a model, peers in turns, medians. Training is the loss and the gradients of all weights;
ONNX Runtime has none. Batch norm uses its running statistics throughout.
"""
from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any, Final

import numpy
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.bench import ROOT, describe_machine
from benchmarks.measure import CLOCKS, Step, compiling, take_turns
from benchmarks.models import WORKLOADS, Workload
from benchmarks.table import CLOCKS as CLOCK_NAMES

NEEDS: Final = {"onnxruntime": ("onnxruntime", "onnx"), "jax": ("jax", "jaxlib"), "dovetail": ("dovetail",)}
PEERS: Final = ("eager", "torch", "dovetail", "onnxruntime", "jax")
MODES: Final = ("inference", "training")


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self, width: int = 256, layers: int = 4, words: int = 1000, length: int = 128) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.norm(self.blocks(x)) @ self.tokens.weight.t()


def conv_norm(inside: int, outside: int, size: int, stride: int) -> nn.Sequential:
    conv = nn.Conv2d(inside, outside, size, stride, size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outside))


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = conv_norm(inside, outside, 3, stride), conv_norm(outside, outside, 3, 1)
        self.short = nn.Identity() if stride == 1 else conv_norm(inside, outside, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.short(x) + self.second(F.relu(self.first(x))))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = conv_norm(3, 32, 3, 2)
        widths = (32, 32, 64, 128, 256)
        self.blocks = nn.Sequential(*(Residual(widths[i], widths[i + 1], 2 if i else 1) for i in range(4)))
        self.leave = nn.Linear(256, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.blocks(F.relu(self.enter(x))).mean((2, 3)))


MODELS: Final[dict[str, Callable[[], Workload]]] = {
    "mlp": WORKLOADS["mlp"],
    "gpt": lambda: Workload(GPT(), (torch.randint(0, 1000, (2, 128)),)),
    "resnet": lambda: Workload(ResNet(), (torch.randn(4, 3, 64, 64),)),
}


def onnx_step(work: Workload, threads: int) -> Step:
    """The model exported by torch.onnx's first exporter (which needs only onnx), run by ONNX Runtime."""
    ort, written, given = importlib.import_module("onnxruntime"), io.BytesIO(), work.inputs[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(work.run, (given,), written, dynamo=False, input_names=["x"], opset_version=17)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(written.getvalue(), options, providers=["CPUExecutionProvider"])
    feed = {"x": given.numpy()}
    return lambda: session.run(None, feed)[0]


def jax_step(name: str, work: Workload, mode: str) -> Step:
    models = importlib.import_module("benchmarks.jax_models")
    weights = {key: value.numpy() for key, value in work.run.state_dict().items()}  # type: ignore[attr-defined]
    if mode == "inference":
        return models.inference_step(name, weights, work.inputs[0].numpy())  # type: ignore[no-any-return]
    trained = {key for key, _ in work.run.named_parameters()}  # type: ignore[attr-defined]
    return models.training_step(name, weights, trained, work.inputs[0].numpy())  # type: ignore[no-any-return]


def torch_step(work: Workload, peer: str, mode: str) -> Step:
    model = copy.deepcopy(work.run)
    assert isinstance(model, nn.Module)
    run, given, leaves = compiling(peer)(model), work.inputs[0], dict(model.named_parameters())

    def infer() -> Any:
        with torch.no_grad():
            return run(given)

    def train() -> Any:
        for leaf in leaves.values():
            leaf.grad = None
        loss = run(given).square().mean()
        loss.backward()
        return loss.detach(), {name: leaf.grad for name, leaf in leaves.items()}

    return infer if mode == "inference" else train


def make_step(peer: str, name: str, work: Workload, mode: str, threads: int) -> Step:
    if peer == "jax":
        return jax_step(name, work, mode)
    return onnx_step(work, threads) if peer == "onnxruntime" else torch_step(work, peer, mode)


def flat(result: Any) -> dict[str, torch.Tensor]:
    """A step's result as tensors by name, whoever made it."""
    value, gradients = result if isinstance(result, tuple) else (result, {})
    named = {"": value, **gradients}
    return {name: torch.as_tensor(numpy.asarray(part)).double() for name, part in named.items()}


def largest_error(got: Any, want: Any) -> float:
    """Over all tensors of a result, the largest difference in units of that tensor's largest value."""
    mine, theirs = flat(got), flat(want)
    worst = {name: (mine[name] - part).abs().max() for name, part in theirs.items()}
    return max(float(worst[name] / part.abs().max().clamp_min(1e-30)) for name, part in theirs.items())


def measure_model(name: str, mode: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """First call, error against eager and median time of each peer, in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(chosen.threads)
    work = MODELS[name]()
    work.run.eval()  # type: ignore[attr-defined]
    steps: dict[str, Step] = {}
    record: dict[str, Any] = {"first_s": {}, "error": {}, "errors": {}}
    reference: Any = None
    for peer in chosen.peers.split(","):
        if (missing := why_not_installed(peer)) or (peer == "onnxruntime" and mode == "training"):
            record["errors"][peer] = missing or "no training"
            continue
        for package in NEEDS.get(peer, ()):
            importlib.import_module(package)
        started = time.perf_counter()
        step = make_step(peer, name, work, mode, chosen.threads)
        out = step()
        record["first_s"][peer] = time.perf_counter() - started
        reference = out if reference is None else reference
        record["error"][peer] = largest_error(step(), reference)
        steps[peer] = step
    times = take_turns(steps, chosen.seconds, CLOCKS[chosen.clock])
    record["median_ms"] = {peer: 1e3 * statistics.median(kept) for peer, kept in times.items()}
    return record


def why_not_installed(peer: str) -> str | None:
    missing = [package for package in NEEDS.get(peer, ()) if importlib.util.find_spec(package) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


def run_all(chosen: argparse.Namespace) -> dict[str, Any]:
    """Every model and mode in a process of its own, with the same number of threads and empty caches."""
    eigen = "true" if chosen.threads > 1 else "false"
    fixed = {
        "OMP_NUM_THREADS": str(chosen.threads),
        "XLA_FLAGS": f"--xla_cpu_multi_thread_eigen={eigen} intra_op_parallelism_threads={chosen.threads}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    answers: dict[str, Any] = {}
    for key in [f"{name}-{mode}" for name in chosen.only.split(",") for mode in chosen.modes.split(",")]:
        command = [sys.executable, "-m", "benchmarks.peers", *sys.argv[1:], "--one", key]
        with tempfile.TemporaryDirectory() as cache:
            caches = {"DOVETAIL_CACHE": f"{cache}/dovetail", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/torch"}
            environment = {**os.environ, **fixed, **caches}
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        answers[key] = json.loads(lines[-1][7:]) if lines else {"error": done.stderr.strip()[-400:]}
        print(f"  {key}: {json.dumps(answers[key])}", flush=True)
    return answers


def show_peers(answers: dict[str, Any]) -> str:
    machine = answers["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"Measured on {machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, {versions}, "
        f"{machine['date']}; `python -m benchmarks.peers`. "
        f"{machine['threads']} thread(s), {CLOCK_NAMES[machine['clock']]}. Medians, peers interleaved.",
        "",
        "Speed is over eager. Error: the largest difference from eager's result, or in training from any",
        "gradient of its, in units of that tensor's largest value.",
        "",
        "| model | peer | ms | speed | first call s | error |",
        "|---|---|---|---|---|---|",
    ]
    for key, record in answers.items():
        medians = record.get("median_ms", {})
        for peer, ms in medians.items():
            first, error = record["first_s"][peer], record["error"][peer]
            speed = medians["eager"] / ms
            lines.append(f"| {key} | {peer} | {ms:.3f} | {speed:.2f}x | {first:.2f} | {error:.1e} |")
        lines += [f"| {key} | {peer} | {why} | | | |" for peer, why in record.get("errors", {}).items()]
    return "\n".join(lines) + "\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", default="wall", choices=tuple(CLOCKS))
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="write docs/results/peers.*")
    return parser.parse_args()


def main() -> None:
    chosen = parse_arguments()
    if chosen.one:
        print("RESULT " + json.dumps(measure_model(*chosen.one.split("-"), chosen)))
        return
    for peer in chosen.peers.split(","):
        if why := why_not_installed(peer):
            print(f"{peer} is left out ({why})")
    answers = run_all(chosen)
    present = [name for name in ("onnxruntime", "jax") if why_not_installed(name) is None]
    versions = {name: metadata.version(name) for name in ("torch", *present)}
    answers["machine"] = describe_machine(chosen) | {"versions": versions}
    text = show_peers(answers)
    print(text)
    if chosen.write:
        (ROOT / "docs/results/peers.md").write_text("# Peers\n\n" + text)
        (ROOT / "docs/results/peers.json").write_text(json.dumps(answers, indent=0))


if __name__ == "__main__":
    main()
