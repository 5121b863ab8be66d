"""The numbers of this process, from the event stream's exact counts.

stats() -> {"graphs": 2, "graph_breaks": 1, "recompiles": 0, "kernels": 5, "fallbacks": 0, ...}
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from dovetail.events import EVENTS, EventStream

COUNTED = {
    **{f"{kind}s": kind for kind in ("graph", "graph_break", "recompile", "skip", "kernel", "fallback")},
    "fallbacks_to_eager": "fallback_to_eager",
    "fusions_declined": "fusion",
    "slow": "slow",
}
"""Name in stats() -> kind of event."""


def stats(stream: EventStream = EVENTS) -> dict[str, int | float | dict[str, float]]:
    frames, stages = stream.of("compile"), stream.of("stage")
    times = ([(event["seconds"], event.at) for event in events] for events in (frames, stages))
    found = Counter(event["what"] for event in stream.of("cache"))
    return {
        **{name: stream.counts[kind] for name, kind in COUNTED.items()},
        "cache_hits": found["hit"],
        "cache_misses": found["miss"],
        "compile_seconds": seconds_in_all(*times),
        "stage_seconds": by_stage((event["stage"], event["seconds"]) for event in stages),
    }


def seconds_in_all(frames: list[tuple[float, float]], stages: list[tuple[float, float]]) -> float:
    """Of frames, and of stages that ran outside of them: backwards are built at the first backward().
    Both as (seconds, when it ended)."""
    spans = [(end - seconds, end) for seconds, end in frames]
    later = [seconds for seconds, at in stages if not any(start <= at <= end for start, end in spans)]
    return sum(seconds for seconds, _ in frames) + sum(later)


def by_stage(stages: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Seconds by stage, in the order of the walk."""
    totals: dict[str, float] = {}
    for name, seconds in stages:
        totals[name] = totals.get(name, 0.0) + seconds
    return dict(sorted(totals.items()))
