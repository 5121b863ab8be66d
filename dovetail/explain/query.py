"""Ask the event stream what happened.

    list[Event]  ->  Explanation(graphs, breaks, recompiles, skips, fallbacks, kernels, ...)

An Explanation is plain values, so it can be printed, shown as a page (both `text.py`), compared
in tests, or read from a file of events written by another process.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from dovetail.events import EVENTS, Event, EventStream
from dovetail.explain.text import show_explanation, show_page
from dovetail.explain.views import FusionView, GraphView, Place, place_of, view_fusion, view_graphs
from dovetail.util.noun import Noun, field, fields, replace


class GraphSeen(Noun):
    """One captured graph; `lines` are the user's lines that went into it."""

    unit: str
    function: str
    place: Place
    ops: int
    inputs: int
    whole: bool
    lines: tuple[Place, ...]


class BreakSeen(Noun):
    """A graph break, or (kind 'skip') a frame left to Python as a whole."""

    kind: str
    function: str
    place: Place
    code: str
    reason: str
    hint: str
    count: int = 1


class RecompileSeen(Noun):
    function: str
    place: Place
    reason: str
    entries: int
    limit: bool = False
    """The limit was reached: from here on the function runs in eager."""


class KernelSeen(Noun):
    unit: str
    name: str
    language: str
    bytes_moved: int
    origins: tuple[str, ...]
    text: str


class Declined(Noun):
    """An optimisation that was not done, and why."""

    unit: str
    subject: str
    code: str
    text: str


class StageSeen(Noun):
    """One run of a stage; `text` is what it made, as text."""

    unit: str
    stage: str
    seconds: float
    at: float
    text: str = field(repr=False, default="")


class LineSeen(Noun):
    """What became of one line: ops captured, ops after decomposition, kernels and library calls it is
    in, ops that ran as themselves."""

    place: Place
    captured: int
    decomposed: int
    kernels: tuple[str, ...]
    libraries: tuple[str, ...]
    fallbacks: tuple[str, ...]


class SavedSeen(Noun):
    """What forward keeps for backward, and what backward computes again instead."""

    unit: str
    bytes: int
    saved: tuple[str, ...]
    recomputed: tuple[str, ...]


class Failure(Noun):
    """An internal error that became eager, or compiled code that is slower than eager."""

    kind: str
    function: str
    text: str


class Explanation(Noun):
    """All of it. `print(explanation)` tells it in words, `.html(path)` shows it."""

    graphs: tuple[GraphSeen, ...] = ()
    breaks: tuple[BreakSeen, ...] = ()
    recompiles: tuple[RecompileSeen, ...] = ()
    fallbacks: dict[str, int] = field(default_factory=dict)
    kernels: tuple[KernelSeen, ...] = ()
    declined: tuple[Declined, ...] = ()
    guards: tuple[tuple[str, tuple[str, ...]], ...] = ()
    stages: tuple[StageSeen, ...] = ()
    compiles: tuple[tuple[str, float, float], ...] = ()
    """(function, seconds, when it ended) of each frame compiled."""
    partitions: tuple[SavedSeen, ...] = ()
    cudagraphs: tuple[tuple[str, bool, str], ...] = ()
    caches: dict[str, int] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    programs: tuple[GraphView, ...] = ()
    fusions: tuple[FusionView, ...] = ()
    lines: tuple[LineSeen, ...] = ()
    calls: tuple[tuple[str, float, float], ...] = ()
    """(function, seconds, when it ended) of each call, where calls were recorded."""

    @property
    def graph_breaks(self) -> tuple[BreakSeen, ...]:
        return tuple(item for item in self.breaks if item.kind == "graph_break")

    @property
    def seconds(self) -> dict[str, float]:
        """Compile seconds by stage."""
        return by_stage((stage.stage, stage.seconds) for stage in self.stages)

    @property
    def compile_seconds(self) -> float:
        frames = [(seconds, at) for _, seconds, at in self.compiles]
        return seconds_in_all(frames, [(stage.seconds, stage.at) for stage in self.stages])

    @property
    def bytes_moved(self) -> int:
        return sum(kernel.bytes_moved for kernel in self.kernels)

    def __str__(self) -> str:
        return show_explanation(self)

    def html(self, path: str | Path) -> Path:
        """Write the report as one HTML file without outside assets."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(show_page(self), encoding="utf-8")
        return target


Report = Explanation
"""What dovetail.report() returns: the Explanation of everything since the process began."""


SHOWN_GRAPHS = ("joint", "prims", "partition")
"""Stages whose graphs are kept node by node; of the others there is the text."""

# -- events to nouns -------------------------------------------------------------------------------


def _text(event: Event, name: str) -> str:
    value = event.get(name)
    return "" if value is None else str(value)


READERS: Final[dict[str, Callable[[Event, str], object]]] = {
    "str": _text,
    "int": lambda event, name: event.get(name, 0),
    "bool": lambda event, name: event[name],
    "Place": lambda event, name: place_of(event.get("loc"), _text(event, "function")),
    "tuple[str, ...]": lambda event, name: tuple(map(str, event[name])),
    "tuple[Place, ...]": lambda event, name: tuple(dict.fromkeys(map(place_of, event[name]))),
}
"""How a field is read off an event, by the field's type."""

Seen = TypeVar("Seen", bound=Noun)


def read(noun: type[Seen], event: Event, **known: object) -> Seen:
    """One of the classes above, from the event's fields of the same names."""
    wanted = [item for item in fields(noun) if item.name not in known]
    return noun(**known, **{item.name: READERS[str(item.type)](event, item.name) for item in wanted})


def _numbered(
    events: list[Event], make: Callable[[Event], Any], before: str, stage: str
) -> tuple[Any, ...]:
    """What is told of before it has the unit that it belongs to: that of the stage whose event comes next."""
    found: list[Any] = []
    for event in events:
        if event.kind != "stage":
            found.append(make(event))
        elif found and found[-1].unit == before and stage in _text(event, "stage"):
            found[-1] = replace(found[-1], unit=_text(event, "unit"))
    return tuple(found)


def _breaks(events: Iterable[Event]) -> tuple[BreakSeen, ...]:
    """One line per place, code and text, with how often it was met."""
    found: Counter[BreakSeen] = Counter()
    for event in events:
        reason = _text(event, "text") or _text(event, "reason")
        found[read(BreakSeen, event, kind=event.kind, reason=reason, count=1)] += 1
    return tuple(replace(seen, count=count) for seen, count in found.items())


def _stage(event: Event) -> StageSeen:
    stage = _text(event, "stage")
    text = "" if "executable" in stage else _text(event, "value")  # it prints as the program does
    return StageSeen(_text(event, "unit"), stage, event["seconds"], event.at, text)


def _failure(event: Event) -> Failure:
    told = (_text(event, name) for name in ("text", "error", "repro"))
    return Failure(event.kind, _text(event, "function"), " ".join(filter(None, told)))


def _line(place: Place) -> Place:
    return Place(place.file, place.line)


def _lines(
    programs: Iterable[GraphView], fusions: Iterable[FusionView], fallbacks: list[Event]
) -> tuple[LineSeen, ...]:
    ops: dict[str, Counter[Place]] = {"joint": Counter(), "prims": Counter()}
    for program in programs:
        for stage in (stage for stage in ops if stage in program.stage):
            ops[stage].update(_line(node.place) for node in program.nodes)
    ran: dict[str, dict[Place, dict[str, None]]] = {"kernel": {}, "library": {}, "fallback": {}}
    for group in (group for fusion in fusions for group in fusion.groups):
        for nest in group.nests:
            ran[group.kind].setdefault(_line(nest.place), {})[group.name] = None
    for event in fallbacks:
        ran["fallback"].setdefault(_line(place_of(event.get("loc"))), {})[_text(event, "op")] = None
    tables: list[Mapping[Place, object]] = [*ops.values(), *ran.values()]
    found = []
    for place in sorted({p for table in tables for p in table if p.file}, key=lambda p: (p.file, p.line)):
        names = (tuple(table.get(place, ())) for table in ran.values())
        found.append(LineSeen(place, ops["joint"][place], ops["prims"][place], *names))
    return tuple(found)


def explain_events(events: Iterable[Event]) -> Explanation:
    by_kind: dict[str, list[Event]] = {}
    for event in events:
        by_kind.setdefault(event.kind, []).append(event)

    def of(*kinds: str) -> list[Event]:
        return sorted((e for kind in kinds for e in by_kind.get(kind, ())), key=lambda e: e.at)

    results = [(_text(e, "unit"), _text(e, "stage"), e.get("value")) for e in of("stage")]
    shown = [result for result in results if result[1].partition(".")[2] in SHOWN_GRAPHS]
    programs = tuple(view for result in shown for view in view_graphs(*result))
    views = [view_fusion(unit, value) for unit, stage, value in results if "schedule" in stage]
    fusions = tuple(view for view in views if view is not None)
    saved = lambda event: read(SavedSeen, event, bytes=event["saved_bytes"])
    return Explanation(
        graphs=_numbered(of("graph", "stage"), partial(read, GraphSeen), "", "joint"),
        breaks=_breaks(of("graph_break", "skip")),
        recompiles=tuple(read(RecompileSeen, e, limit=e.kind == "limit") for e in of("recompile", "limit")),
        fallbacks=dict(Counter(_text(event, "op") for event in of("fallback"))),
        kernels=tuple(read(KernelSeen, e) for e in of("kernel")),
        declined=tuple(read(Declined, e) for e in of("fusion")),
        guards=tuple(
            (_text(e, "function"), tuple(map(str, e.get("value", tuple)() or ()))) for e in of("guards")
        ),
        stages=tuple(map(_stage, of("stage"))),
        compiles=tuple((_text(e, "function"), e["seconds"], e.at) for e in of("compile")),
        partitions=_numbered(of("partition", "stage"), saved, "forward", "partition"),
        cudagraphs=tuple((_text(e, "unit"), bool(e["used"]), _text(e, "reason")) for e in of("cudagraph")),
        caches=dict(Counter(_text(event, "what") for event in of("cache"))),
        failures=tuple(map(_failure, of("fallback_to_eager", "slow"))),
        programs=programs,
        fusions=fusions,
        lines=_lines(programs, fusions, of("fallback")),
        calls=tuple((_text(e, "function"), e["seconds"], e.at) for e in of("call")),
    )


# -- the numbers of this process, from the event stream's exact counts -----------------------------


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
