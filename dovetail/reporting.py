"""Compile and tell: `dovetail.explain` and `dovetail.report`.

print(dovetail.explain(f)(x))             one call of f, compiled afresh
dovetail.report().html("report.html")     everything compiled so far in this process
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dovetail.events import EVENTS, Event
from dovetail.explain.query import Explanation, Report, explain_events
from dovetail.front import compile, compiler_of


def explain(model: Any, **settings: Any) -> Callable[..., Explanation]:
    """`explain(f)(*args)` compiles f afresh, runs it once and tells what happened."""
    compiled = compile(model, **settings)

    def run(*args: Any, **kwargs: Any) -> Explanation:
        seen: list[Event] = []
        before, EVENTS.is_detailed = EVENTS.is_detailed, True
        EVENTS.listeners.append(seen.append)
        try:
            compiled(*args, **kwargs)
        finally:
            EVENTS.listeners.remove(seen.append)
            EVENTS.is_detailed = before
        return explain_events(seen)

    return run


def report(compiled: Any = None) -> Report:
    """Everything compiled so far in this process; with `compiled`, what was compiled for it."""
    events = list(EVENTS.events)
    return explain_events(events if compiled is None else events_of(compiled, events))


def events_of(compiled: Any, events: Iterable[Event]) -> list[Event]:
    """Compiling a frame ends with a `compile` event that names its function; what precedes it, back to
    the one before, is about that frame. Later events of the same units (a backward built at its first
    call) are about it too."""
    names = {code.co_qualname for code in compiler_of(compiled).context.codes()}
    found: list[Event] = []
    units: set[object] = set()
    pending: list[Event] = []
    for event in events:
        pending.append(event)
        if event.kind == "compile":
            if event.get("function") in names:
                found += pending
                units |= {item.get("unit") for item in pending} - {None}
            pending = []
    return found + [event for event in pending if event.get("unit") in units]
