"""The numbers of this process, from the event stream's exact counts.

stats() -> {"graphs": 2, "graph_breaks": 1, "recompiles": 0, "kernels": 5, "fallbacks": 0, ...}
"""
from __future__ import annotations

from dovetail.events import EVENTS, EventStream

COUNTED = {
    "graphs": "graph",
    "graph_breaks": "graph_break",
    "recompiles": "recompile",
    "skips": "skip",
    "kernels": "kernel",
    "fallbacks": "fallback",
    "fallbacks_to_eager": "fallback_to_eager",
    "fusions_declined": "fusion",
    "slow": "slow",
}
"""Name in stats() -> kind of event."""


def stats(stream: EventStream = EVENTS) -> dict[str, int | float | dict[str, float]]:
    found: dict[str, int | float | dict[str, float]] = {
        name: stream.counts[kind] for name, kind in COUNTED.items()
    }
    for what in ("hit", "miss"):
        found[f"cache_{what}{'es' if what == 'miss' else 's'}"] = sum(
            1 for event in stream.of("cache") if event.get("what") == what
        )
    stages = stage_seconds(stream)
    whole = sum(float(str(event["seconds"])) for event in stream.of("compile"))
    found["compile_seconds"] = whole or sum(stages.values())
    found["stage_seconds"] = dict(stages)
    return found


def stage_seconds(stream: EventStream) -> dict[str, float]:
    """Seconds by stage, in the order of the walk."""
    totals: dict[str, float] = {}
    for event in stream.of("stage"):
        name = str(event.get("stage", "?"))
        totals[name] = totals.get(name, 0.0) + float(str(event.get("seconds", 0.0)))
    return dict(sorted(totals.items()))
