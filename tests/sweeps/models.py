"""The model zoo: every listed architecture, inference and training, compiled and compared with eager.

    python -m tests.sweeps.models                           all of tests/models/architectures.txt
    python -m tests.sweeps.models --only hf:llama,timm:resnet
    python -m tests.sweeps.models --device cuda             (as part of `make sweep-gpu`)
    python -m tests.sweeps.models --survey                  which candidates build and run in eager; rewrites the list

A model is `whole` when fullgraph=True captures it; else the number of graphs and the first reasons are
given. `right` means every output (and in training every gradient) is within eager's own error against fp64.
"""
from __future__ import annotations

import argparse
import copy
import functools
import json
import re
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy
import torch
import torch.utils._pytree as pytree

from tests.models.zoo import LIST, Specimen, build, candidates, names
from tests.sweeps.closeness import (
    EAGER_FACTOR,
    CastsToDouble,
    DrawsInSingle,
    error_ratio,
    find_exact,
    to_exact,
    why_not_close,
)
from tests.sweeps.peers import Peer, find_peer
from tests.sweeps.workers import ROOT, machine_line, run_tasks, short_error, write_page

MODES: Final = ("inference", "training")
NEIGHBOURS: Final = 4
"""Sets of weights beside the model's own, on which eager is judged by the rule that compiled models are judged by."""


def tensors_of(out: Any) -> list[torch.Tensor]:
    """Every tensor of a model output, in order, through ModelOutput, tuples and dicts; caches are left out."""
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, dict):
        return [t for value in out.values() for t in tensors_of(value)]
    if isinstance(out, list | tuple):
        return [t for value in out for t in tensors_of(value)]
    return []


def call_model(run: Callable[..., Any], inputs: dict[str, Any]) -> Any:
    return run(**inputs) if "x" not in inputs else run(inputs["x"])


def seed_all() -> None:
    torch.manual_seed(0)
    numpy.random.seed(0)  # by which some models leave out layers


def infer_once(run: Callable[..., Any], model: torch.nn.Module, inputs: dict[str, Any]) -> list[torch.Tensor]:
    seed_all()
    with torch.no_grad():
        return tensors_of(call_model(run, inputs))


def train_once(run: Callable[..., Any], model: torch.nn.Module, inputs: dict[str, Any]) -> list[Any]:
    """Outputs and gradients of one step. The loss is the harness's own sum, a single number, whose error says
    little about the model; its gradients and the outputs it is made of say all."""
    seed_all()
    model.zero_grad()
    outs = [out for out in tensors_of(call_model(run, inputs)) if out.requires_grad and out.is_floating_point()]
    loss = sum(out.pow(2).mean() for out in outs)
    loss.backward()  # type: ignore[union-attr]
    return [*(out.detach() for out in outs), *(p.grad for p in model.parameters())]


def check_mode(specimen: Specimen, mode: str, peer: Peer, rounds: int) -> dict[str, Any]:
    """One model in one mode: captured whole? right? what fell back? how fast?"""
    step = infer_once if mode == "inference" else train_once
    model = specimen.model.train(mode == "training")
    reference, exact_model, untouched = (copy.deepcopy(model) for _ in range(3))
    eager = step(reference, reference, specimen.inputs)
    try:
        whole, run, seen = True, peer.compile(model, fullgraph=True), None
        seen = peer.observe(lambda: step(run, model, specimen.inputs))
        reason = ""
    except Exception as error:
        whole, reason = False, short_error(error)
        peer.reset()
        model.load_state_dict(exact_model.state_dict())
        run = peer.compile(model)
        seen = peer.observe(lambda: step(run, model, specimen.inputs))
    exact = functools.cache(lambda: run_exact(step, exact_model, specimen.inputs))
    why = why_not_close(seen.result, eager, exact)
    ratio = error_ratio(seen.result, eager, exact) if why else None
    as_far = why is not None and is_as_far(seen.result, step, untouched, specimen.inputs, eager, exact)
    if why is None and mode == "inference":
        why = why_not_close(step(run, model, specimen.inputs), seen.result, None)
        why = why and f"second call: {why}"
    record = {"whole": whole, "right": why is None, "reason": why or reason, "graphs": seen.graphs, "breaks": seen.breaks,
              "reasons": list(seen.reasons[:4]), "fallbacks": sorted(set(seen.fallbacks)), "kernels": seen.kernels,
              "compile_seconds": round(seen.seconds, 2), "ran_in_eager": bool(seen.eager)}
    if ratio is not None:
        record["error_ratio"] = ratio
    if why is not None:
        record["eager_as_far"] = as_far
    if rounds:
        record["speedup"] = measure_speedup(lambda: step(reference, reference, specimen.inputs),
                                            lambda: step(run, model, specimen.inputs), rounds)
    return record


def run_exact(step: Callable[..., Any], model: torch.nn.Module, inputs: dict[str, Any]) -> Any:
    """The step in double precision, what the model makes for itself in `forward` included; only a mask is of single
    precision's least number still: two of double's overflow."""
    finfo = torch.finfo
    torch.set_default_dtype(torch.float64)
    torch.finfo = lambda dtype=torch.float64: finfo(torch.float32 if dtype == torch.float64 else dtype)  # type: ignore
    try:
        with DrawsInSingle():
            try:
                return step(in_double(model), model, to_exact(inputs))
            except RuntimeError:  # a cast to single precision met a weight
                with CastsToDouble():
                    return step(in_double(model), model, to_exact(inputs))
    finally:
        torch.finfo = finfo  # type: ignore[misc]
        torch.set_default_dtype(torch.float32)


def is_as_far(
    got: list[Any], step: Callable[..., Any], model: torch.nn.Module, inputs: dict[str, Any], eager: list[Any], exact: Callable[[], Any]
) -> bool:
    """Whether rounding decides: each tensor would be right beside the worst that eager makes of it on weights one unit in the
    last place away, or is off, taken as a whole, by no more than the rule allows beside the worst that eager makes of any
    tensor: a value before a ReLU that is zero but for rounding changes other tensors in each run."""
    runs = [eager]
    for seed in range(NEIGHBOURS):
        near = copy.deepcopy(model)
        torch.manual_seed(seed)
        with torch.no_grad():
            for weight in near.parameters():
                weight.copy_(torch.nextafter(weight, weight + torch.randn_like(weight)))
        runs.append(step(near, near, inputs))
    true = find_exact(exact)
    if true is None or len({len(run) for run in (true, *runs)}) != 1:
        return False
    errors = [relative_errors(run, true) for run in runs]
    most = [EAGER_FACTOR * max((error[kind] for run in errors for error in run if error), default=0.0) for kind in (0, 1)]
    for ours, right, off, *tensors in zip(got, true, relative_errors(got, true), *runs, strict=True):
        worst = max(tensors, key=lambda t: error_of(t, right))
        if why_not_close(ours, worst, lambda: right) and not (off and off[0] <= most[0] and off[1] <= most[1]):
            return False
    return True


def relative_errors(run: list[Any], true: list[Any]) -> list[tuple[float, float] | None]:
    """Per tensor of numbers: its error beside its size, and zero; or, where the error is larger than that, zero and the
    error: the gradients that a later norm cancels are nothing but rounding."""
    found: list[tuple[float, float] | None] = []
    for tensor, right in zip(run, true, strict=True):
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.shape != right.shape or not tensor.numel():
            found.append(None)
            continue
        error, size = (float(t.norm()) / tensor.numel() ** 0.5 for t in (tensor.double() - right, right))
        found.append((error / size, 0.0) if error < size else (0.0, error))
    return found


def error_of(tensor: Any, true: Any) -> float:
    is_number = isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel() > 0 and tensor.shape == true.shape
    return float((tensor.double() - true).abs().nan_to_num(0.0).max()) if is_number else 0.0


def in_double(model: torch.nn.Module) -> torch.nn.Module:
    """Mixture-of-experts models use a grouped matrix product that has no double version; their plain one has."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None):
            config._experts_implementation = "eager"
    return model.double()


def measure_speedup(eager: Callable[[], Any], compiled: Callable[[], Any], rounds: int) -> float:
    """Ratio of medians, the two interleaved; of time that the processor spent, where it does the work: others
    may be using it, too."""
    clock = time.perf_counter if torch.cuda.is_initialized() or torch.get_num_threads() > 1 else time.process_time
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(5):
        eager()
        compiled()
    for _ in range(rounds):
        for call, kept in zip((eager, compiled), times, strict=True):
            started = clock()
            call()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            kept.append(clock() - started)
    return round(statistics.median(times[0]) / statistics.median(times[1]), 3)


def on_device(specimen: Specimen, device: str) -> Specimen:
    torch.backends.cudnn.allow_tf32 = False  # allowed, it would depend on sizes and layouts who uses it
    inputs = pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, specimen.inputs)
    return Specimen(specimen.model.to(device), inputs)


def run_task(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(settings["threads"])
    specimen = on_device(build(name), settings["device"])
    if settings["survey"]:
        return survey(specimen)
    peer = find_peer(settings["peer"])
    record: dict[str, Any] = {}
    for mode in settings["modes"]:
        started = time.perf_counter()
        try:
            record[mode] = check_mode(Specimen(copy.deepcopy(specimen.model), specimen.inputs), mode, peer, settings["rounds"])
        except Exception as error:
            record[mode] = {"whole": False, "right": False, "reason": short_error(error), "crashed": True}
        record[mode]["wall"] = round(time.perf_counter() - started, 2)
        peer.reset()
    good = all(record[mode]["whole"] and record[mode]["right"] for mode in settings["modes"])
    right = all(record[mode]["right"] for mode in settings["modes"])
    return {"status": "pass" if good else "break" if right else "fail", **record}


def survey(specimen: Specimen) -> dict[str, Any]:
    """Does it run in eager, both ways, and give finite numbers?"""
    outs = infer_once(specimen.model.eval(), specimen.model, specimen.inputs)
    train = copy.deepcopy(specimen.model).train()
    trained = train_once(train, train, specimen.inputs)
    finite = all(bool(torch.isfinite(out).all()) for out in (*outs, trained[0]) if out.is_floating_point())
    return {"status": "pass" if outs and finite else "fail",
            "reason": "" if finite else "not finite", "outputs": len(outs),
            "parameters": sum(p.numel() for p in specimen.model.parameters())}


def show_record(record: dict[str, Any]) -> str:
    parts = [f"{record['status']:<6}{record['wall']:6.1f} s"]
    for mode in MODES:
        if mode in record:
            seen = record[mode]
            flags = ("whole" if seen["whole"] else f"{seen.get('graphs', 0)} graphs", "right" if seen["right"] else "WRONG")
            parts.append(f"{mode[:5]}: {' '.join(flags)} {seen.get('speedup', '')} {seen.get('reason', '')[:60]}")
    return " | ".join([*parts, str(record.get("reason", ""))])


def summarise(records: dict[str, dict[str, Any]], settings: dict[str, Any]) -> str:
    lines = ["# Model zoo", "", f"Command: `make sweep-models`. Peer: {settings['peer']}, {settings['threads']} thread(s).  ",
             machine_line(), "",
             "`right`: each output and gradient is off the fp64 result by at most four times eager's own worst error in that tensor. "
             "Where a tensor is not, the row is `wrong` and also says how large our errors are beside eager's over all tensors (median), "
             f"and whether rounding decides it (`eager as far`): each tensor is within the rule beside the worst that eager makes of it on {NEIGHBOURS} other "
             "sets of weights, each one unit in the last place away, or is off as a whole, relative to its size, by at most four times the most that eager "
             "is off in any tensor there.", "",
             "| library | models | mode | captured whole | right | whole and right | wrong | of these eager as far |", "|---|---|---|---|---|---|---|---|"]
    for library in ("hf", "timm"):
        mine = [record for name, record in records.items() if name.startswith(library + ":")]
        for mode in MODES:
            seen = [record.get(mode, {}) for record in mine]
            counts = Counter(key for one in seen for key in ("whole", "right") if one.get(key))
            both = sum(bool(one.get("whole") and one.get("right")) for one in seen)
            strays = sum(bool(one.get("eager_as_far")) for one in seen)
            lines.append(f"| {library} | {len(mine)} | {mode} | {counts['whole']} | {counts['right']} | {both} | {len(mine) - counts['right']} | {strays} |")
    lines += ["", "| model | inference | training | fallbacks | reason | run |", "|---|---|---|---|---|---|"]
    for name, record in sorted(records.items()):
        cells = [describe(record.get(mode)) for mode in MODES]
        fallbacks = sorted({without_places(op) for mode in MODES for op in record.get(mode, {}).get("fallbacks", ())})
        reasons = [record.get(mode, {}).get("reason", "") for mode in MODES] + [record.get("reason", "")]
        reason = without_places(next((text for text in reasons if text), ""))[:140].replace("|", "/")
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {' '.join(fallbacks)[:80]} | {reason} | {record.get('when', '')} |")
    return "\n".join(lines) + "\n"


def without_places(text: str) -> str:
    """Names as a reader elsewhere knows them: files from site-packages on, ops without the number of this process."""
    return re.sub(r"/\S*/site-packages/|_[0-9a-f]{32}\b", "", text)


def describe(seen: dict[str, Any] | None) -> str:
    if not seen:
        return "–"
    words = ["whole" if seen["whole"] else f"{seen.get('graphs', 0)} graphs", "right" if seen["right"] else "**wrong**"]
    words += ["eager as far"] if seen.get("eager_as_far") else []
    words += [f"error {seen['error_ratio']} of eager's"] if "error_ratio" in seen else []
    return ", ".join(words) + (f", {seen['speedup']}x" if "speedup" in seen else "")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default="dovetail")
    parser.add_argument("--only", default="", help="comma-separated names; a trailing * matches a prefix")
    parser.add_argument("--modes", default="inference,training")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds a model; 0 measures nothing")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="with cuda, models share a process")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--memory", type=float, default=12.0, help="GiB a model may use")
    parser.add_argument("--share", action="store_true", help="many models in one process: quicker, less isolated")
    parser.add_argument("--survey", action="store_true")
    parser.add_argument("--results", type=Path, default=None)
    parser.add_argument("--write", action="store_true", help="write docs/results/models.md and models.json")
    parser.add_argument("--fresh", action="store_true")
    return parser.parse_args()


def main() -> None:
    chosen = parse_arguments()
    everything = candidates() if chosen.survey else names()
    wanted = chosen.only.split(",") if chosen.only else ["*"]
    picked = [n for n in everything if any(n == w or (w.endswith("*") and n.startswith(w[:-1])) for w in wanted)][:: chosen.every]
    kind = "survey" if chosen.survey else "models" if chosen.device == "cpu" else f"models-{chosen.device}"
    results = chosen.results or ROOT / f"build/sweeps/{kind}.jsonl"
    if chosen.fresh:
        results.unlink(missing_ok=True)
    on_gpu = chosen.device != "cpu"  # whose driver survives no fork and wants no limit on addresses
    settings = {"peer": chosen.peer, "device": chosen.device, "modes": chosen.modes.split(","), "rounds": chosen.rounds, "threads": chosen.threads,
                "survey": chosen.survey, "memory_gib": 0.0 if on_gpu else chosen.memory}
    records = run_tasks("tests.sweeps.models", picked, settings=settings, results=results, timeout=chosen.timeout, jobs=chosen.jobs,
                        each_fresh=not (chosen.survey or chosen.share or on_gpu), show=show_record)
    if chosen.survey:
        good = [name for name, record in records.items() if record["status"] == "pass"]
        LIST.write_text("# architectures that build and run in eager; written by `python -m tests.sweeps.models --survey`\n"
                        + "\n".join(good) + "\n")
        print(f"{len(good)} of {len(records)} run in eager")
        return
    text = summarise(records, settings)
    print(text)
    if chosen.write:
        write_page("models", text)
        (ROOT / "docs/results/models.json").write_text(json.dumps(records, indent=0))


if __name__ == "__main__":
    main()
