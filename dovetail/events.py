"""The one stream of what happened. Logs, reports and stats() read it; stages only write to it.

    EVENTS.emit("graph_break", code="B02", text=..., loc=...)

An event is a kind and a dict of plain values. Kinds in use: compile and stage (seconds), entry, graph,
guards, graph_break, recompile, limit, skip, partition, fallback, fusion, kernel, tuning, cache,
cudagraph, frozen, override, call, slow, warning, fallback_to_eager.
"""
from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from threading import Lock
from typing import Any, Final

from dovetail.util.noun import Noun, field


class Event(Noun):
    kind: str
    fields: dict[str, Any]
    at: float

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)


class EventStream(Noun, frozen=False):
    """Keeps the last `limit` events and exact counts of all of them; of the values that events carry
    (graphs, programs), which may be large, only those of the last `heavy` events."""

    limit: int = 100_000
    heavy: int = 1_000
    _values: deque[Event] = field(default_factory=deque)
    events: list[Event] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    listeners: list[Callable[[Event], None]] = field(default_factory=list)
    is_detailed: bool = False
    """A report wants what every stage made: no stage may be skipped for a cached result."""
    _lock: Lock = field(default_factory=Lock)

    def emit(self, kind: str, **fields: object) -> Event:
        event = Event(kind, fields, time.time())
        with self._lock:
            self.counts[kind] += 1
            self.events.append(event)
            if "value" in fields:
                self._values.append(event)
                if len(self._values) > self.heavy:
                    self._values.popleft().fields.pop("value")
            if len(self.events) > self.limit:
                del self.events[: self.limit // 2]
        for listener in self.listeners:
            listener(event)
        return event

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in list(self.events) if event.kind in kinds]

    def clear(self) -> None:
        with self._lock:
            self.events.clear()
            self._values.clear()
            self.counts.clear()


EVENTS: Final = EventStream()
