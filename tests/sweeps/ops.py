"""Every operator of PyTorch's op_db and every module of module_db, compiled and compared with eager.

    python -m tests.sweeps.ops                             float32, static, forward and gradient, 3 samples an op
    python -m tests.sweeps.ops --only add,softmax --samples 10 --dtypes float32,int64 --dynamic both --layouts sliced,expanded
    python -m tests.sweeps.ops --peer torch                the same against torch.compile, to check the harness

Each op ends as `pass` (compiled, no fallback), `fallback` (right, an ATen kernel did the work),
`break` (right, but the graph broke or the call ran in eager) or `fail` with the first reason.
"""
from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from tests.sweeps.closeness import to_exact, why_not_close
from tests.sweeps.peers import Observed, Peer, find_peer
from tests.sweeps.torch_testing import MODULES, OPS
from tests.sweeps.workers import ROOT, machine_line, run_tasks, short_error, write_page

UNINITIALISED: Final = ("empty", "new_empty", "empty_strided", "new_empty_strided", "empty_like", "empty_permuted")
DYNAMIC: Final = {(False,): "static", (True,): "dynamic", (False, True): "both"}
GRADIENT: Final = {(False,): "forward", (True,): "grad", (False, True): "both"}
UNORDERED: Final = ("resize_", "resize_as_")


@dataclass(frozen=True, slots=True)
class Case:
    """One call: what to run, on what, and the words that name it in a report."""

    label: str
    make: Callable[[bool], Callable[..., Any]]
    """A fresh callable each time (a module has state); True asks for it in double precision."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradient: bool
    dynamic: bool | None
    compare_values: bool = True
    order: int = 1
    """2: the gradients of the gradients too"""


def copy_leaves(tree: Any, requires_grad: bool) -> Any:
    """Fresh tensors with the same strides, so that a mutated input is never shared between two runs."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        wants = requires_grad and (leaf.is_floating_point() or leaf.is_complex())
        if leaf.layout is torch.strided and not leaf.is_quantized and not leaf.is_conj():
            once = leaf.detach()  # what is expanded is copied once, and expanded again
            for dim, (step, size) in enumerate(zip(leaf.stride(), leaf.shape, strict=True)):
                once = once.narrow(dim, 0, 1) if step == 0 and size > 1 else once
            fresh = torch.empty_strided(once.shape, once.stride(), dtype=leaf.dtype, device=leaf.device)
            fresh.untyped_storage().fill_(0)  # the gaps, which as_strided may read
            fresh.copy_(once)
            fresh = fresh.as_strided(leaf.shape, leaf.stride())
        else:
            fresh = leaf.detach().clone()
        return fresh.requires_grad_(wants and leaf.requires_grad)

    return pytree.tree_map(copy, tree)


def call_and_differentiate(case: Case, run: Callable[..., Any], model: Callable[..., Any], inputs: Any) -> Any:
    """Outputs, buffers, and the gradients of the outputs' weighted sum for every leaf that wants one."""
    args, kwargs = inputs
    torch.manual_seed(1234)
    out = run(*args, **kwargs)
    state = [*model.buffers()] if isinstance(model, torch.nn.Module) else []
    if not case.gradient:
        return out, state
    leaves = [x for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    leaves += [*model.parameters()] if isinstance(model, torch.nn.Module) else []
    found: list[Any] = []
    scores = [score(y) for y in pytree.tree_leaves(out) if isinstance(y, torch.Tensor) and y.grad_fn is not None]
    for order in range(1, case.order + 1):
        is_last = order == case.order
        if not scores or not leaves:
            break
        grads = torch.autograd.grad(sum(scores), leaves, allow_unused=True, create_graph=not is_last)  # type: ignore[arg-type]
        found += [g if g is None else g.detach() for g in grads]
        scores = [score(g) for g in grads if g is not None and g.grad_fn is not None]
    return pytree.tree_map(lambda y: y.detach() if isinstance(y, torch.Tensor) else y, out), state, found


def score(out: torch.Tensor) -> torch.Tensor:
    flat = out.to_dense() if out.layout is not torch.strided else out
    flat = torch.view_as_real(flat.resolve_conj()).flatten() if flat.is_complex() else flat.flatten()
    weights = torch.linspace(0.5, 1.5, max(flat.numel(), 1), dtype=torch.float64)[: flat.numel()]
    weights = weights.to(flat.device, flat.dtype)
    return (flat * weights).sum()


def check_case(case: Case, peer: Peer) -> tuple[str | None, Observed | None]:
    """Why the compiled call differs from eager (None: it does not) and what the compiler reported."""
    theirs, ours = (copy_leaves((case.args, case.kwargs), case.gradient) for _ in range(2))
    model = case.make(False)
    try:
        eager, eager_error = call_and_differentiate(case, model, model, theirs), None
    except Exception as error:  # a sample eager rejects: the compiled call must reject it too
        eager, eager_error = None, error
    model = case.make(False)
    compiled = peer.compile(model, dynamic=case.dynamic)
    try:
        seen = peer.observe(lambda: call_and_differentiate(case, compiled, model, ours))
    except Exception as error:
        return (None if eager_error is not None else short_error(error)), None
    if eager_error is not None:
        return f"no error where eager raises {short_error(eager_error)}", seen

    def exact() -> Any:
        inputs = to_exact(copy_leaves((case.args, case.kwargs), case.gradient))
        wide = case.make(True)
        torch.set_default_dtype(torch.float64)  # of floats that are made of integers
        try:
            return call_and_differentiate(case, wide, wide, inputs), inputs
        finally:
            torch.set_default_dtype(torch.float32)

    if not case.compare_values:
        eager, got = (pytree.tree_map(shape_of, tree) for tree in (eager, seen.result))
        return why_not_close(got, eager, None), seen
    return why_not_close((seen.result, ours), (eager, theirs), exact), seen


def shape_of(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


def cases_of_op(name: str, settings: dict[str, Any]) -> Iterator[Case]:
    op = OPS[name]
    for dtype_name, dynamic, gradient, layout in itertools.product(
        settings["dtypes"], settings["dynamic"], settings["gradient"], settings["layouts"]
    ):
        dtype = getattr(torch, dtype_name)
        device = settings["device"]
        if dtype not in op.supported_dtypes(device):
            continue
        if gradient and not (op.supports_autograd and dtype in op.supported_backward_dtypes(device)):
            continue
        if settings["order"] == 2 and not op.supports_gradgrad:
            continue
        samples = op.sample_inputs(device, dtype, requires_grad=gradient)
        for index, sample in enumerate(itertools.islice(samples, settings["samples"])):
            args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
            if layout != "contiguous":
                args, kwargs = lay_out((args, kwargs), layout)
            words = [dtype_name, f"sample {index}", "dynamic" if dynamic else "static", "grad" if gradient else "forward"]
            yield Case(" ".join([*words, layout]), lambda exact: calling(op.op), args, kwargs, gradient, dynamic or None,
                       not name.startswith(UNINITIALISED + UNORDERED), settings["order"])


def calling(op: Callable[..., Any]) -> Callable[..., Any]:
    """A Python function around the op: there is no frame to capture in a builtin."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    return call


def transposed(leaf: torch.Tensor) -> torch.Tensor:
    """The last two dimensions swapped in memory."""
    return leaf.mT.contiguous().mT if leaf.dim() >= 2 else leaf


def sliced(leaf: torch.Tensor) -> torch.Tensor:
    """Every second element of wider rows, from the second on."""
    if not leaf.dim():
        return leaf
    return leaf.new_zeros((*leaf.shape[:-1], 2 * leaf.shape[-1] + 1))[..., 1::2].copy_(leaf)


def channels_last(leaf: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return leaf.contiguous(memory_format=formats[leaf.dim()]) if leaf.dim() in formats else leaf


def expanded(leaf: torch.Tensor) -> torch.Tensor:
    """Other values: the first row in place of all. Indices and masks stay, they may have to differ."""
    is_number = leaf.is_floating_point() or leaf.is_complex()
    return leaf[:1].expand_as(leaf) if leaf.dim() and leaf.shape[0] > 1 and is_number else leaf


LAYOUTS: Final = {"transposed": transposed, "sliced": sliced, "channels_last": channels_last, "expanded": expanded}


def lay_out(tree: Any, layout: str) -> Any:
    """The dense tensors of a sample in another layout."""

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_quantized:
            return leaf
        return LAYOUTS[layout](leaf.detach()).requires_grad_(leaf.requires_grad)

    return pytree.tree_map(change, tree)


def cases_of_module(name: str, settings: dict[str, Any]) -> Iterator[Case]:
    info = MODULES[name]
    for dtype_name, dynamic, gradient in itertools.product(settings["dtypes"], settings["dynamic"], settings["gradient"]):
        dtype = getattr(torch, dtype_name)
        if not dtype.is_floating_point or (settings["order"] == 2 and not info.supports_gradgrad):
            continue
        torch.manual_seed(0)
        device = settings["device"]
        inputs = info.module_inputs_func(info, device=device, dtype=dtype, requires_grad=gradient, training=gradient)
        for index, sample in enumerate(itertools.islice(inputs, settings["samples"])):
            words = [dtype_name, f"sample {index}", "dynamic" if dynamic else "static", "train" if gradient else "eval"]
            if sample.forward_input is None:
                continue
            yield Case(" ".join(words), building(info, sample, device, dtype, gradient), sample.forward_input.args,
                       dict(sample.forward_input.kwargs), gradient, dynamic or None, order=settings["order"])


def building(
    info: Any, sample: Any, device: str, dtype: torch.dtype, training: bool
) -> Callable[[bool], torch.nn.Module]:
    """Build the same module each time: same seed, same parameters, fresh buffers."""

    def make(exact: bool) -> torch.nn.Module:
        torch.manual_seed(7)
        module: torch.nn.Module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
        module = module.to(device, dtype).train(training)
        return module.double() if exact else module

    return make


def run_task(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """All cases of one op; stops at the first failures so that a broken op costs little."""
    peer = find_peer(settings["peer"])
    family, _, key = name.partition(":")
    cases = (cases_of_module if family == "module" else cases_of_op)(key, settings)
    counts: Counter[str] = Counter()
    fallbacks: set[str] = set()
    broken: set[str] = set()
    reasons: list[str] = []
    started = time.perf_counter()
    for case in cases:
        why, seen = check_case(case, peer)
        counts["cases"] += 1
        if why is not None:
            counts["failed"] += 1
            counts["grad failed" if case.gradient else "forward failed"] += 1
            reasons.append(f"{case.label}: {why}")
        elif seen is not None:
            fallbacks.update(seen.fallbacks)
            broken.update(seen.reasons)
            counts["ran in eager"] += seen.graphs == 0
        if counts["failed"] >= settings["stop_after"]:
            break
        if counts["cases"] % 8 == 0:
            peer.reset()
    peer.reset()
    status = "fail" if reasons else "break" if broken else "fallback" if fallbacks else "pass"
    if not counts["cases"]:
        status = "skip"
    return {"status": status, "counts": dict(counts), "reason": reasons[0] if reasons else "; ".join(sorted(broken))[:300],
            "reasons": reasons[:5], "fallbacks": sorted(fallbacks), "seconds": round(time.perf_counter() - started, 3)}


def show_record(record: dict[str, Any]) -> str:
    return f"{record['status']:<9}{record['wall']:6.1f} s  {record.get('reason', '')}"


def summarise(records: dict[str, dict[str, Any]], settings: dict[str, Any]) -> str:
    counts = Counter(record["status"] for record in records.values())
    tried = sum(counts.values()) - counts["skip"]
    good = counts["pass"] + counts["fallback"]
    lines = [
        f"# Op sweep: {', '.join(settings['dtypes'])}",
        "",
        f"Command: `{command_of(settings)}`.  ",
        machine_line(),
        "",
        "| pass | fallback (right, through an ATen kernel) | break (right, partly eager) | fail | no sample of these types |",
        "|---|---|---|---|---|",
        f"| {counts['pass']} | {counts['fallback']} | {counts['break']} | {counts['fail']} | {counts['skip']} |",
        "",
        f"{good} of {tried} ({100 * good / max(tried, 1):.1f} %) equal eager as one graph; "
        f"{good + counts['break']} ({100 * (good + counts['break']) / max(tried, 1):.1f} %) equal eager at all.",
        "",
    ]
    for status in ("fail", "break"):
        named = [(name, record) for name, record in sorted(records.items()) if record["status"] == status]
        if named:
            lines += [f"## {status}", "", "| op | reason |", "|---|---|"]
            lines += [f"| {name} | {' '.join(str(record.get('reason', '')).split())[:160].replace('|', '/')} |" for name, record in named]
            lines.append("")
    return "\n".join(lines)


def command_of(settings: dict[str, Any]) -> str:
    """What to type for the same sweep."""
    chosen = {"samples": str(settings["samples"]), "dtypes": ",".join(settings["dtypes"]), "layouts": ",".join(settings["layouts"]),
              "dynamic": DYNAMIC[tuple(settings["dynamic"])], "gradient": GRADIENT[tuple(settings["gradient"])],
              "order": str(settings.get("order", 1)), "device": settings["device"], "peer": settings["peer"]}
    defaults = vars(parse_arguments([]))
    words = [f"--{name} {value}" for name, value in chosen.items() if value != str(defaults[name])]
    return " ".join(["python -m tests.sweeps.ops", *words]) if words else "make sweep-ops"


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default="dovetail")
    parser.add_argument("--only", default="", help="comma-separated op names; a trailing * matches a prefix")
    parser.add_argument("--kind", default="both", choices=("ops", "modules", "both"))
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--dynamic", default="static", choices=tuple(DYNAMIC.values()))
    parser.add_argument("--gradient", default="both", choices=tuple(GRADIENT.values()))
    parser.add_argument("--order", type=int, default=1, choices=(1, 2), help="2: gradients of gradients too")
    parser.add_argument("--layouts", default="contiguous", help=f"comma-separated: contiguous, {', '.join(LAYOUTS)}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--every", type=int, default=1, help="take one op in this many (a quick look)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--results", type=Path, default=ROOT / "build/sweeps/ops.jsonl")
    parser.add_argument("--write", nargs="?", const="ops", help="write docs/results/<name>.md; without a name ops.md, and ops.json")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    return parser.parse_args(given)


def settings_of(chosen: argparse.Namespace) -> dict[str, Any]:
    return {
        "peer": chosen.peer,
        "dtypes": chosen.dtypes.split(","),
        "device": chosen.device,
        "samples": chosen.samples,
        "dynamic": [flag for flags, word in DYNAMIC.items() if word == chosen.dynamic for flag in flags],
        "gradient": [flag for flags, word in GRADIENT.items() if word == chosen.gradient for flag in flags],
        "layouts": chosen.layouts.split(","),
        "order": chosen.order,
        "stop_after": 2,
    }


def main() -> None:
    chosen = parse_arguments()
    names = [f"op:{name}" for name in OPS] if chosen.kind != "modules" else []
    names += [f"module:{name}" for name in MODULES] if chosen.kind != "ops" else []
    if chosen.only:
        wanted = chosen.only.split(",")
        names = [n for n in names if any(n.partition(":")[2] == w or (w.endswith("*") and n.partition(":")[2].startswith(w[:-1]))
                                         for w in wanted)]
    names = names[:: chosen.every]
    if chosen.fresh:
        chosen.results.unlink(missing_ok=True)
    settings = settings_of(chosen)
    records = run_tasks("tests.sweeps.ops", names, settings=settings, results=chosen.results, timeout=chosen.timeout, jobs=chosen.jobs,
                        show=show_record)
    text = summarise(records, settings)
    print(text)
    if chosen.write:
        write_page(chosen.write, text)
        if chosen.write == "ops":
            (ROOT / "docs/results/ops.json").write_text(json.dumps(records, indent=0))


if __name__ == "__main__":
    main()
