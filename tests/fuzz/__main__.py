"""Thousands of random programs against eager.

    python -m tests.fuzz                                 1,000 of each kind
    python -m tests.fuzz --kind tensors --count 5000 --start 100000
    python -m tests.fuzz --show python:17                print one program
    python -m tests.fuzz --peer torch                    the same for torch.compile

Ends with a summary; failing programs, shrunk, are printed and kept in build/fuzz/found. Copied to tests/fuzz/found, one
is a test from then on.
"""
from __future__ import annotations

import argparse
import importlib
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fuzz.program import show_program
from tests.fuzz.running import KINDS
from tests.sweeps.workers import ROOT, machine_line, run_tasks, write_page


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=[*KINDS, "both"], default="both")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--peer", default="dovetail")
    parser.add_argument("--backend", default="dovetail")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--show", default="")
    parser.add_argument("--quiet", action="store_true", help="print failures only")
    parser.add_argument("--results", type=Path, default=ROOT / "build/fuzz/results.jsonl")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--write", action="store_true", help="write docs/results/fuzz.md")
    return parser.parse_args()


def summarise(kind: str, records: dict[str, dict[str, Any]]) -> str:
    mine = [record for name, record in records.items() if name.startswith(kind)]
    counts = Counter(record["status"] for record in mine)
    compiled = sum(record.get("graphs", 0) > 0 for record in mine)
    return (f"{kind}: {counts['pass']} equal to eager, {counts['fail']} different, of {len(mine)} programs; "
            f"{compiled} had at least one graph, {sum(record.get('graphs', 0) for record in mine)} graphs in all")


def keep_program(name: str, record: dict[str, Any]) -> None:
    folder = ROOT / "build/fuzz/found"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name.replace(':', '_')}.txt").write_text(f"# {record['reason']}\n{record.get('program', '')}")


def write_results(kinds: list[str], records: dict[str, dict[str, Any]], chosen: argparse.Namespace) -> None:
    """The last run for docs/: counts, seeds, machine, and the shrunk programs that differ."""
    last = chosen.start + chosen.count - 1
    text = ["# Fuzzing", "", "Command: `make fuzz` (1,000 programs of each kind); other seeds: "
            f"`python -m tests.fuzz --kind {chosen.kind} --start {chosen.start} --count {chosen.count}`.  ", machine_line(), "",
            "| kind | seeds | programs | equal to eager | different | graphs |", "|---|---|---|---|---|---|"]
    for kind in kinds:
        mine = [record for name, record in records.items() if name.startswith(kind)]
        equal, graphs = sum(record["status"] == "pass" for record in mine), sum(record.get("graphs", 0) for record in mine)
        text.append(f"| {kind} | {chosen.start} to {last} | {len(mine)} | {equal} | {len(mine) - equal} | {graphs} |")
    for name, record in records.items():
        if record["status"] == "fail":
            text += ["", f"### {name}: {record['reason']}", "", "```python", record.get("program", "").rstrip(), "```"]
    write_page("fuzz", "\n".join(text))


def main() -> None:
    chosen = parse_arguments()
    if chosen.show:
        kind, _, seed = chosen.show.partition(":")
        print(show_program(importlib.import_module(KINDS[kind]).make_program(int(seed))))
        return
    if chosen.fresh:
        chosen.results.unlink(missing_ok=True)
    kinds = list(KINDS) if chosen.kind == "both" else [chosen.kind]
    names = [f"{kind}:{seed}" for kind in kinds for seed in range(chosen.start, chosen.start + chosen.count)]
    settings = {"peer": chosen.peer, "backend": chosen.backend, "shrink": not chosen.no_shrink}
    records = run_tasks("tests.fuzz.running", names, settings=settings, results=chosen.results, timeout=chosen.timeout,
                        show=lambda record: f"{record['status']} {record.get('reason', '')}")
    failures = {name: record for name, record in records.items() if record["status"] == "fail"}
    for name, record in failures.items():
        print(f"\n# --- {name}: {record['reason']}\n{record.get('program', '')}")
        keep_program(name, record)
    print("\n".join(summarise(kind, records) for kind in kinds))
    if chosen.write:
        write_results(kinds, records, chosen)
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
