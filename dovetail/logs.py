"""DOVETAIL_LOGS: events as text on stderr while they happen.

    DOVETAIL_LOGS=graph_breaks,recompiles python train.py
    [dovetail] graph break  model.py:12 in forward: B07 call to print, which writes output

A name stands for a kind of event, or for what one stage makes. `all` is everything. A listener on the
one event stream does it; nothing in the compiler knows about logs.
"""
from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Final, TextIO

from dovetail.events import Event, EventStream

STAGE_LOGS: Final[dict[str, tuple[str, ...]]] = {
    "joint": ("joint",),
    "prims": ("prims", "passes"),
    "partition": ("partition", "forward", "backward"),
    **{name: (name,) for name in ("loops", "schedule", "plan")},
    "output_code": ("program",),
}
"""Log name -> words in the names of the stages whose result it prints."""

KIND_LOGS: Final[dict[str, tuple[str, ...]]] = {
    "graph_breaks": ("graph_break", "skip"),
    "recompiles": ("recompile", "limit"),
    **{name: (name,) for name in ("guards", "fusion", "cache")},
    **{f"{kind}s": (kind,) for kind in ("fallback", "kernel", "cudagraph", "stage")},
    "perf": ("compile", "slow", "tuning"),
    "failures": ("fallback_to_eager", "warning"),
}
"""Log name -> the kinds of events it prints."""

RESULT_LOGS: Final[dict[str, tuple[str, ...]]] = {"graph": ("graph",), "bytecode": ("entry",), **STAGE_LOGS}
"""And words in the kinds of events whose value it prints: captured graphs, the text that replaces a frame."""

KNOWN: Final = (*KIND_LOGS, *RESULT_LOGS, "all", "none")


def parse_names(text: str) -> set[str]:
    """The known names in a comma-separated list; a warning for each unknown one."""
    names = {name.strip().lower() for name in text.split(",") if name.strip()}
    if unknown := sorted(names - set(KNOWN)):
        known = ", ".join(KNOWN)
        warnings.warn(f"DOVETAIL_LOGS: unknown {', '.join(unknown)}; known names are {known}", stacklevel=2)
    return set(KNOWN) if "all" in names else names & set(KNOWN)


# -- one line per kind -----------------------------------------------------------------------------


def _where(event: Event) -> str:
    loc, function = event.get("loc"), event.get("function")
    return " in ".join(str(part) for part in (loc, function) if part) or "?"


def _show_break(event: Event) -> str:
    hint = event.get("hint")
    text = f"{_where(event)}: {event.get('code', '')} {event.get('text', '')}"
    return text + (f"\n    hint: {hint}" if hint else "")


def _show_guards(event: Event) -> str:
    guards = event.get("value", tuple)() or ()
    return "\n    ".join([f"{_where(event)}: {len(guards)}", *map(str, guards)])


def _show_fields(event: Event) -> str:
    """Any event: its short fields."""
    fields = {name: value for name, value in event.fields.items() if name not in ("value", "text")}
    return " ".join(f"{name}={value!s:.120}" for name, value in fields.items())


SHOW: Final[dict[str, Callable[[Event], str]]] = {
    **dict.fromkeys(("graph_break", "skip"), _show_break),
    "recompile": lambda e: f"{_where(e)}: {e.get('reason')}",
    "limit": lambda e: f"{_where(e)}: {e.get('reason')}; runs in eager from now on",
    "guards": _show_guards,
    "fusion": lambda e: f"{e.get('subject')}: {e.get('code')} {e.get('text')}",
    "stage": lambda e: f"{e.get('stage')} of {e.get('unit')}: {e['seconds'] * 1e3:.1f} ms",
}


def show_result(event: Event) -> str:
    """What a stage made, as text."""
    title = f"{event.get('stage')} of {event.get('unit')}" if event.kind == "stage" else event.get("function")
    value = event.get("value")
    return f"[dovetail] {title}\n{getattr(value, 'code', value)}"


def is_result_wanted(event: Event, names: Iterable[str]) -> bool:
    label = event.get("stage", event.kind)
    words = (word for name in names for word in RESULT_LOGS.get(name, ()))
    return event.get("value") is not None and any(word in label for word in words)


def start_logging(stream: EventStream, text: str | None = None, out: TextIO | None = None) -> None:
    """Listen to the stream, when there is anything to print. `text` is DOVETAIL_LOGS.

    Whatever was asked for, a program that ran slower than it could says so when it ends (`none`: not)."""
    names = parse_names(os.environ.get("DOVETAIL_LOGS", "") if text is None else text)
    if text is None and "none" not in names:
        atexit.register(say_at_exit, stream)
        if sys.stderr.isatty():
            stream.listeners.append(Progress(sys.stderr))
    if not names:
        return
    kinds = {kind for name in names for kind in KIND_LOGS.get(name, ())}
    stream.is_detailed |= not names.isdisjoint(STAGE_LOGS)  # a cached result would have nothing to print

    def listen(event: Event) -> None:
        target = sys.stderr if out is None else out
        if event.kind in kinds:
            kind, shown = event.kind.replace("_", " "), SHOW.get(event.kind, _show_fields)(event)
            print(f"[dovetail] {kind}  {shown}", file=target)
        if is_result_wanted(event, names):
            print(show_result(event), file=target)

    stream.listeners.append(listen)


# -- a sign of life --------------------------------------------------------------------------------

PATIENCE: Final = 1.0
"""Seconds of compiling after which a terminal is told what is being done."""


class Progress:
    """One line on a terminal while a compile takes long, gone when it ends."""

    def __init__(self, out: TextIO) -> None:
        self.out, self.since, self.is_shown = out, 0.0, False

    def __call__(self, event: Event) -> None:
        if event.kind == "compile":
            self.since = 0.0
            if self.is_shown:
                self.show("")
        elif event.kind == "stage":
            self.since = self.since or event.at
            if (spent := event.at - self.since) > PATIENCE:
                what = f"{event.get('unit')}: {event.get('stage')}"
                self.show(f"[dovetail] compiling {what}, {spent:.0f} s")

    def show(self, line: str) -> None:
        print(f"\r\033[K{line}", end="", file=self.out, flush=True)
        self.is_shown = bool(line)


# -- never silently slow ---------------------------------------------------------------------------

TROUBLE: Final[dict[str, str]] = {
    "graph_break": "graph breaks",
    "limit": "functions at their recompile limit",
    "fallback_to_eager": "internal failures",
    "slow": "graphs slower than eager",
}
"""What makes compiled code slower than it could be, and how it is counted."""


def closing_line(stream: EventStream) -> str:
    """One line on what stood in the way, or nothing."""
    counted = [f"{stream.counts[kind]} {noun}" for kind, noun in TROUBLE.items() if stream.counts[kind]]
    if not counted:
        return ""
    events = [(e.get("loc") or e.get("function"), e.get("code", "")) for e in stream.of(*TROUBLE)]
    places = dict.fromkeys(f"{place} {code}".strip() for place, code in events)
    shown = ", ".join(list(places)[:5]) + (", …" if len(places) > 5 else "")
    return f"[dovetail] {', '.join(counted)}: {shown} (print(dovetail.report()) tells more)"


def say_at_exit(stream: EventStream) -> None:
    if line := closing_line(stream):
        print(line, file=sys.stderr)
