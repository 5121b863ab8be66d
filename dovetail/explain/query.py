"""Ask the event stream what happened.

    list[Event]  ->  Explanation(graphs, breaks, recompiles, skips, fallbacks, kernels, ...)

An Explanation is plain values, so it can be printed, shown as a page, compared in tests, or read from a file
of events written by another process. In words:

    2 graphs, 1 graph break, 0 recompiles, 5 kernels (1.2 MiB moved), 0 fallbacks, 0.31 s compiling
    graph breaks
      model.py:12  B07 call to print, which writes output
                   hint: ...
"""
from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from dovetail.events import EVENTS, Event, EventStream
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
    """A graph break, or (kind 'skip') a frame left to Python as a whole. The callers of a function that
    breaks do so as well, at the same place."""

    kind: str
    function: str = field(compare=False)
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


def _lines(
    programs: Iterable[GraphView], fusions: Iterable[FusionView], fallbacks: list[Event]
) -> tuple[LineSeen, ...]:
    ops: dict[str, Counter[Place]] = {"joint": Counter(), "prims": Counter()}
    for program in programs:
        for stage in (stage for stage in ops if stage in program.stage):
            ops[stage].update(node.place for node in program.nodes)
    ran: dict[str, dict[Place, dict[str, None]]] = {"kernel": {}, "library": {}, "fallback": {}}
    for group in (group for fusion in fusions for group in fusion.groups):
        for nest in group.nests:
            ran[group.kind].setdefault(nest.place, {})[group.name] = None
    for event in fallbacks:
        ran["fallback"].setdefault(place_of(event.get("loc")), {})[_text(event, "op")] = None
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
    return Explanation(
        graphs=tuple(read(GraphSeen, e) for e in of("graph")),
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
        partitions=tuple(read(SavedSeen, e, bytes=e["saved_bytes"]) for e in of("partition")),
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


# -- an Explanation in words -----------------------------------------------------------------------

MOST = 40
"""Lines of one list that are printed; the HTML report has all of them."""


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def show_bytes(number: int) -> str:
    power = max(min((number.bit_length() - 1) // 10, 3), 0)
    return f"{number / 1024**power:.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def shorten(names: tuple[str, ...], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f", … ({len(names)} in all)" if len(names) > most else "")


def summary(found: Explanation) -> str:
    """The one line."""
    parts = [
        count(len(found.graphs), "graph"),
        count(sum(item.count for item in found.graph_breaks), "graph break"),
        count(sum(not item.limit for item in found.recompiles), "recompile"),
        count(len(found.kernels), "kernel")
        + (f" ({show_bytes(found.bytes_moved)} moved)" if found.kernels else ""),
        count(sum(found.fallbacks.values()), "fallback"),
        f"{found.compile_seconds:.2f} s compiling",
    ]
    return ", ".join(parts)


def _section(title: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield from ("", title, *(f"  {line}" for line in lines[:MOST]))
    if len(lines) > MOST:
        yield f"  … and {len(lines) - MOST} more"


def _break_lines(found: Explanation, kind: str) -> list[str]:
    lines = []
    for item in found.breaks:
        if item.kind == kind:
            often = f"  ({item.count} times)" if item.count > 1 else ""
            hint = f"; hint: {item.hint}" if item.hint else ""
            where = f"{item.place} in {item.place.function or item.function or '?'}"
            lines.append(f"{where}: {item.code} {item.reason}{hint}{often}")
    return lines


def _sections(found: Explanation) -> Iterator[tuple[str, list[str]]]:
    yield "graphs", [
        f"{graph.unit or '?'}  {graph.function} ({graph.place}): {count(graph.ops, 'op')}, "
        f"{count(graph.inputs, 'input')}{'' if graph.whole else ', up to a break'}"
        for graph in found.graphs
    ]
    yield "graph breaks", _break_lines(found, "graph_break")
    yield "frames left to Python", _break_lines(found, "skip")
    yield "recompiles (a size that changes becomes a symbol; pass what else changes in a tensor)", [
        f"{item.function} ({item.place}): {item.reason}"
        + (f"; limit of {item.entries} reached, runs in eager from now on" if item.limit else "")
        for item in found.recompiles
    ]
    yield "fallbacks (ops that ran as themselves)", [f"{n:4} {op}" for op, n in found.fallbacks.items()]
    yield "kernels", [
        f"{show_bytes(k.bytes_moved):>10}  {k.name}  {shorten(k.origins)}" for k in found.kernels
    ]
    yield "not fused, and why", [f"{item.subject}: {item.code} {item.text}" for item in found.declined]
    yield "saved for backward", [
        f"{item.unit}: {show_bytes(item.bytes)} in {count(len(item.saved), 'tensor')}, "
        f"{count(len(item.recomputed), 'op')} computed again"
        for item in found.partitions
    ]
    yield "CUDA graphs", [
        f"{unit}: {'used' if used else 'not used, ' + why}" for unit, used, why in found.cudagraphs
    ]
    yield "cache on disk", [f"{n:4} {what}" for what, n in found.caches.items()]
    yield "compile seconds by stage", [f"{s * 1e3:9.1f} ms  {name}" for name, s in found.seconds.items()]
    yield "guards", [f"{len(texts):4} for {function}" for function, texts in found.guards]
    yield "trouble", [f"{item.kind} {item.function}: {item.text}" for item in found.failures]


def show_explanation(found: Explanation) -> str:
    lines = [summary(found)]
    for title, content in _sections(found):
        lines += _section(title, content)
    return "\n".join(lines)


# -- an Explanation as one self-contained page -----------------------------------------------------

TEMPLATE: Final = Path(__file__).with_name("report.html")
LONGEST: Final = 200_000
"""Characters of one text kept in the page."""


def plain(value: object) -> Any:
    """Nouns as JSON: dataclasses become objects."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value[:LONGEST] if isinstance(value, str) else value


def read_sources(files: Iterable[str]) -> dict[str, list[str]]:
    """The lines of the user's files; a file that cannot be read (a notebook cell, stdin) has none."""
    found: dict[str, list[str]] = {}
    for file in files:
        path = Path(file)
        found[file] = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return found


def files_of(found: Explanation) -> list[str]:
    places = [line for graph in found.graphs for line in (graph.place, *graph.lines)]
    places += [item.place for item in found.breaks] + [item.place for item in found.recompiles]
    return sorted({place.file for place in places if place.file})


def show_page(found: Explanation) -> str:
    """The template `report.html` (markup, style and script, no outside assets) with the explanation put in as
    JSON; the script draws the views from it."""
    content = plain(found)
    content |= {"seconds": found.seconds, "compile_seconds": found.compile_seconds}
    content |= {"summary": summary(found), "sources": read_sources(files_of(found))}
    # "</" must not end the script element that holds the JSON
    text = json.dumps(content).replace("</", "<\\/")
    page = TEMPLATE.read_text(encoding="utf-8")
    return page.replace("@TITLE@", summary(found).replace("<", "&lt;")).replace("@CONTENT@", text)
