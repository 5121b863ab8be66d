"""flex_attention on a GPU: eager's composite, torch.compile, Dovetail.

    python -m benchmarks.flex [--only causal,alibi] [--sizes 2048,8192] [--widths 64,128] [--peers torch]

Milliseconds of a forward pass without gradients, of a forward and a backward pass, and seconds of the first
call of either; the error is that of the output (and of the gradients of q, k and v) against float64.
"""
import argparse
import itertools
import os
import subprocess
import sys
import time

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import dovetail

BATCH, HEADS = 4, 16


def documents(length):
    """Lengths from 1/16 to 1/4 of the whole."""
    torch.manual_seed(1)
    ends = torch.randint(0, length, (BATCH, 7), device="cuda")
    return (torch.arange(length, device="cuda")[None, :, None] >= ends[:, None]).sum(-1)


def case(name, length):
    """score_mod, mask_mod, heads of keys."""
    causal = lambda b, h, i, j: i >= j
    slopes = torch.exp2(-8.0 * torch.arange(1, HEADS + 1, device="cuda") / HEADS)
    document = documents(length)
    return {
        "causal": (None, causal, HEADS),
        "full": (None, None, HEADS),
        "window": (None, lambda b, h, i, j: (i >= j) & (i - j < 1024), HEADS),
        "document": (None, lambda b, h, i, j: (document[b, i] == document[b, j]) & (i >= j), HEADS),
        "alibi": (lambda s, b, h, i, j: s + slopes[h] * (j - i), causal, HEADS),
        "softcap": (lambda s, b, h, i, j: 30 * torch.tanh(s / 30), causal, HEADS),
        "gqa": (None, causal, HEADS // 4),
    }[name]


def inputs(length, width, heads, dtype=torch.bfloat16):
    torch.manual_seed(0)
    shapes = ((BATCH, HEADS, length, width), (BATCH, heads, length, width), (BATCH, heads, length, width))
    return [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]


def milliseconds(call):
    for _ in range(3):
        call()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(5):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 5)
    return sorted(times)[2]


def first(call):
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def error(got, wanted):
    return ((got.double() - wanted).norm() / wanted.norm()).item()


def measure(name, length, width, peer):
    score_mod, mask_mod, heads = case(name, length)
    sizes = (BATCH if name == "document" else None, None, length, length)
    mask = mask_mod and create_block_mask(mask_mod, *sizes, device="cuda")
    q, k, v = inputs(length, width, heads)
    attend = lambda q, k, v: flex_attention(q, k, v, score_mod, mask, enable_gqa=heads != HEADS)
    compile = {"torch": torch.compile, "dovetail": dovetail.compile, "eager": lambda f: f}[peer]
    run, train, grad = compile(attend), compile(attend), torch.randn_like(q)

    def infer():
        with torch.no_grad():
            return run(q, k, v)

    def step():
        for x in (q, k, v):
            x.grad = None
        out = train(q, k, v)
        out.backward(grad)
        return out

    torch.cuda.reset_peak_memory_stats()
    cold = first(infer)
    forward, cold_both = milliseconds(infer), first(step)
    both, peak = milliseconds(step), torch.cuda.max_memory_allocated() / 2**30
    shown = ""
    if length <= 2048:
        part = [x[:1].detach().double().requires_grad_() for x in (q, k, v)]
        own = mask_mod and create_block_mask(mask_mod, 1, None, length, length, device="cuda")
        wanted = flex_attention(*part, score_mod, own, enable_gqa=heads != HEADS)
        wanted.backward(grad[:1].double())
        step_out = step()
        shown = " ".join(f"{error(got[:1], want):.1e}" for got, want in
                         zip((step_out, q.grad, k.grad, v.grad), (wanted, *(x.grad for x in part))))
    times = f"{forward:.3f} | {both:.3f} | {cold:.2f} | {cold_both:.2f} | {peak:.2f}"
    print(f"| {name} | {length} | {width} | {peer} | {times} | {shown} |", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="causal,full,window,document,alibi,softcap,gqa")
    parser.add_argument("--sizes", default="2048,8192")
    parser.add_argument("--widths", default="64,128")
    parser.add_argument("--peers", default="torch,dovetail")
    parser.add_argument("--here", action="store_true", help="in this process")
    given = parser.parse_args()
    sizes, widths = (map(int, numbers.split(",")) for numbers in (given.sizes, given.widths))
    rows = [given.only.split(","), sizes, widths, given.peers.split(",")]
    if not given.here:
        times = "forward, ms | with backward, ms | first, s | first backward, s | peak GiB"
        print(f"| mask | length | width | peer | {times} | errors of out, dq, dk, dv |")
        print("|---|--:|--:|---|--:|--:|--:|--:|--:|---|", flush=True)
        for name, length, width, peer in itertools.product(*rows):
            own = ["--here", "--only", name, "--sizes", str(length), "--widths", str(width), "--peers", peer]
            subprocess.run([sys.executable, "-m", "benchmarks.flex", *own], env=os.environ, check=False)
        return
    for row in itertools.product(*rows):
        measure(*row)


if __name__ == "__main__":
    main()
