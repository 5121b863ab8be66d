"""Workloads on one GPU: eager, torch.compile and Dovetail, each pair in its own process.

    python -m benchmarks.gpu                       everything, a table, docs/results/gpu.json
    python -m benchmarks.gpu --only decode --peers dovetail:reduce-overhead

A process builds the workload, times the first call (cold: empty caches), then reports the median of
several loops of calls; for the bandwidth rows, of calls on one set of inputs after the other, none of them
in the cache, with all launches made before the first of them starts. These count each input and output
once; `copy` is what a copy reaches, which no peer compiles.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

MODES: dict[str, tuple[str, ...]] = {
    "decode": ("torch:max-autotune", "dovetail:reduce-overhead"),
    "mlp60": ("torch:reduce-overhead", "dovetail:reduce-overhead"),
}
"""Peers measured on top of eager and the default modes where the list is not given."""
ROWS, COLUMNS = 16384, 4096
SETS = 8
LAUNCHED = 4_000_000
"""Cycles of the GPU in which the host makes the launches of one round."""


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


# -- models: each returns the thing to compile, and a function that uses it once ------------------------


def decode() -> tuple[Any, Callable[[Any], Any]]:
    """Llama-3.1-8B's shape, batch 1, static KV cache."""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    config = LlamaConfig(
        hidden_size=4096, num_hidden_layers=int(os.environ.get("LAYERS", "32")), num_attention_heads=32,
        num_key_value_heads=8, intermediate_size=14336, vocab_size=128256, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    cache = StaticCache(config=config, max_cache_len=1024)
    token = torch.randint(0, 1000, (1, 1), device="cuda")
    position = torch.tensor([[64]], device="cuda")
    with torch.no_grad():
        model(torch.randint(0, 1000, (1, 64), device="cuda"), past_key_values=cache)

    def step(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return model(token, position_ids=position, past_key_values=cache).logits

    counters = [layer.cumulative_length for layer in cache.layers if hasattr(layer, "cumulative_length")]
    counters = [counter for counter in counters if isinstance(counter, torch.Tensor)]
    start = [counter.clone() for counter in counters]

    def use(fn: Any) -> Any:
        if counters:  # the same token again
            torch._foreach_copy_(counters, start)
        with torch.no_grad():
            return fn(token, position)

    return step, use


def gpt2_train() -> tuple[Any, Callable[[Any], Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config()).cuda()
    ids = torch.randint(0, 50257, (8, 1024), device="cuda")

    def use(fn: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            loss = fn(input_ids=ids, labels=ids).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss

    return model, use


def bert() -> tuple[Any, Callable[[Any], Any]]:
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig()).cuda().half().eval()
    ids = torch.randint(0, 30000, (16, 256), device="cuda")
    return model, lambda fn: _no_grad(fn, input_ids=ids)


def _resnet50() -> nn.Module:
    from torchvision.models import resnet50

    return resnet50().cuda()


def resnet_infer() -> tuple[Any, Callable[[Any], Any]]:
    model = _resnet50().eval().half().to(memory_format=torch.channels_last)
    x = torch.randn(64, 3, 224, 224, device="cuda", dtype=torch.half).to(memory_format=torch.channels_last)
    return model, lambda fn: _no_grad(fn, x)


def resnet_train() -> tuple[Any, Callable[[Any], Any]]:
    model = _resnet50()
    x, y = torch.randn(64, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (64,), device="cuda")

    def use(fn: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(fn(x), y)
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss

    return model, use


def mlp60() -> tuple[Any, Callable[[Any], Any]]:
    layers = [m for _ in range(60) for m in (nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU())]
    model = nn.Sequential(*layers).cuda().eval()
    x = torch.randn(8, 256, device="cuda")
    return model, lambda fn: _no_grad(fn, x)


def _no_grad(fn: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return fn(*args, **kwargs)


def micro(fn: Callable[..., Any], moved: int, *args: torch.Tensor) -> Callable[[], Any]:
    """`moved`: how many tensors of the full size are read or written. There are several sets of inputs,
    together much larger than the cache."""
    sets = [args, *([arg.clone() for arg in args] for _ in range(SETS - 1))]
    return lambda: (fn, lambda compiled, turn=0: _no_grad(compiled, *sets[turn]), moved * ROWS * COLUMNS * 2)


def rms_residual(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Any:
    h = x + r
    return F.rms_norm(h, (COLUMNS,), w), h


WORKLOADS: dict[str, Callable[[], Any]] = {
    "decode": decode,
    "gpt2_train": gpt2_train,
    "bert": bert,
    "resnet_infer": resnet_infer,
    "resnet_train": resnet_train,
    "mlp60": mlp60,
    "copy": lambda: micro(torch.clone, 2, bf16(ROWS, COLUMNS))(),
    "rmsnorm_residual": lambda: micro(
        rms_residual, 4, bf16(ROWS, COLUMNS), bf16(ROWS, COLUMNS), bf16(COLUMNS)
    )(),
    "swiglu": lambda: micro(lambda x, y: F.silu(x) * y, 3, bf16(ROWS, COLUMNS), bf16(ROWS, COLUMNS))(),
    "transpose_add": lambda: micro(lambda x, y: x + y.t(), 3, bf16(ROWS, COLUMNS), bf16(COLUMNS, ROWS))(),
    "softmax": lambda: micro(lambda x: torch.softmax(x, -1), 2, bf16(ROWS, COLUMNS))(),
    "layer_norm": lambda: micro(
        lambda x, w: F.layer_norm(x, (COLUMNS,), w, w), 2, bf16(ROWS, COLUMNS), bf16(COLUMNS)
    )(),
    "bias_gelu": lambda: micro(lambda x, b: F.gelu(x + b), 2, bf16(ROWS, COLUMNS), bf16(COLUMNS))(),
    "where_chain": lambda: micro(
        lambda x, y: torch.where(x > 0, x * 2 + y, y - x).sigmoid() * y,
        3,
        bf16(ROWS, COLUMNS),
        bf16(ROWS, COLUMNS),
    )(),
    "cross_entropy": lambda: micro(
        F.cross_entropy, 1, bf16(ROWS, COLUMNS), torch.randint(0, COLUMNS, (ROWS,), device="cuda")
    )(),
}


# -- one measurement -----------------------------------------------------------------------------------


def compile_with(peer: str, target: Any) -> Any:
    name, _, mode = peer.partition(":")
    if name == "eager":
        return target
    if name == "torch":
        return torch.compile(target, mode=mode or None)
    import dovetail

    return dovetail.compile(target, mode=mode or None)


def first_tensor(value: Any) -> torch.Tensor:
    while not isinstance(value, torch.Tensor):
        value = next(iter(value.values())) if isinstance(value, dict) else value[0]
    return value


def between_events(work: Callable[[], Any]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def loop_times(use: Callable[[Any], Any], compiled: Any, calls: int = 10) -> list[float]:
    """Milliseconds of a call among others, as in a training or serving loop."""

    def work() -> None:
        for _ in range(calls):
            use(compiled)

    return [between_events(work) / calls for _ in range(5)]


def micro_times(use: Callable[..., Any], compiled: Any) -> list[float]:
    """Milliseconds on the GPU of a call among others, each on data that is not in the cache; a kernel that
    only waits goes before them until all have been launched."""

    def work() -> list[Any]:
        return [use(compiled, turn) for turn in range(SETS)]

    times = []
    for _ in range(10):
        torch.cuda._sleep(LAUNCHED)
        times.append(between_events(work) / SETS)
    return times


def measure(work: str, peer: str) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    target, use, *moved = WORKLOADS[work]()
    wanted = first_tensor(use(target)).detach().float().clone()
    compiled = compile_with(peer, target)
    torch.cuda.synchronize()
    start = time.perf_counter()
    got = first_tensor(use(compiled)).detach().float()
    torch.cuda.synchronize()
    result: dict[str, Any] = {"work": work, "peer": peer, "cold_s": time.perf_counter() - start}
    result["difference"] = float((got - wanted).norm() / wanted.norm())
    for _ in range(5):
        use(compiled)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result["ms"] = statistics.median(micro_times(use, compiled) if moved else loop_times(use, compiled))
    result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if moved:
        result["tb_s"] = moved[0] / result["ms"] / 1e9
    if peer.startswith("dovetail"):
        import dovetail

        stats = dovetail.stats()
        result["stats"] = {k: stats[k] for k in stats if isinstance(stats[k], int)}
        result["stages"] = stats.get("stage_seconds")
    return result


def measure_apart(work: str, peer: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        places = ("TORCHINDUCTOR_CACHE_DIR", "DOVETAIL_CACHE", "TRITON_CACHE_DIR")
        env = {**os.environ, **{name: f"{folder}/{name}" for name in places}}
        command = [sys.executable, "-m", "benchmarks.gpu", "--one", work, peer]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        told = (done.stderr or done.stdout).replace(f"{Path.cwd()}/", "")
        return {"work": work, "peer": peer, "error": told[-1500:]}
    result: dict[str, Any] = json.loads(lines[-1])
    if "Warning" in done.stderr:
        result["warnings"] = done.stderr[-600:]
    return result


def show(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"{result['work']:18} {result['peer']:26} FAILED {result['error'][-300:]}"
    rate = f"{result['tb_s']:.2f} TB/s" if "tb_s" in result else ""
    stats = result.get("stats", {})
    told = " ".join(
        f"{k}={stats[k]}" for k in ("graphs", "graph_breaks", "fallbacks_to_eager", "kernels") if k in stats
    )
    return (
        f"{result['work']:18} {result['peer']:26} {result['ms']:9.3f} ms  cold {result['cold_s']:6.2f} s  "
        f"diff {result['difference']:.1e}  {result['peak_gib']:.1f} GiB {rate} {told}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", nargs=2)
    parser.add_argument("--only", default=",".join(WORKLOADS))
    parser.add_argument("--peers", help="default: eager, torch and dovetail, and the best modes of MODES")
    parser.add_argument("--results", default="docs/results/gpu.json")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one)))
        return
    results = []
    for work in args.only.split(","):
        usual = ("eager", "torch", "dovetail", *MODES.get(work, ()))
        for peer in args.peers.split(",") if args.peers else usual:
            result = measure_apart(work, peer)
            results.append(result)
            print(show(result), flush=True)
            if "warnings" in result:
                print("   ", result["warnings"][-500:], flush=True)
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": str(date.today())}
    Path(args.results).parent.mkdir(parents=True, exist_ok=True)
    Path(args.results).write_text(json.dumps({"machine": machine, "results": results}, indent=1))


if __name__ == "__main__":
    main()
