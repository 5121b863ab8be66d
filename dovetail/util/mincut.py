"""The cheapest set of edges that separates a source from a sink (Dinic's algorithm).

    network = Network()
    network.edge("s", "a", 3); network.edge("a", "t", 2)
    network.cut("s", "t")      -> {"s", "a"}: the vertices on the source's side; the cut is a -> t

Capacities are integers; INFINITE is never cut.
"""
from __future__ import annotations

from collections.abc import Hashable
from typing import Final

INFINITE: Final = 1 << 60


class Network:
    def __init__(self) -> None:
        self._number: dict[Hashable, int] = {}
        self._edges: list[list[int]] = []
        """Per vertex, numbers of edges; edge e runs to _to[e] and its reverse is e ^ 1."""
        self._to: list[int] = []
        self._room: list[int] = []

    def edge(self, start: Hashable, end: Hashable, capacity: int) -> None:
        number, edges, count = self._number, self._edges, len(self._to)
        for name in (start, end):
            if name not in number:
                number[name] = len(edges)
                edges.append([])
        a, b = number[start], number[end]
        edges[a].append(count)
        edges[b].append(count + 1)
        self._to += (b, a)
        self._room += (capacity, 0)

    def cut(self, source: Hashable, sink: Hashable) -> set[Hashable]:
        """Vertices reachable from source once no more can flow."""
        self.edge(source, sink, 0)  # both are vertices, whatever else is
        s, t = self._number[source], self._number[sink]
        level = self._levels(s)
        while level[t] >= 0:
            self._saturate(s, t, level)
            level = self._levels(s)
        return {name for name, number in self._number.items() if level[number] >= 0}

    def _levels(self, source: int) -> list[int]:
        edges, ends, room = self._edges, self._to, self._room
        level = [-1] * len(edges)
        level[source] = 0
        queue = [source]
        for at in queue:
            for e in edges[at]:
                to = ends[e]
                if room[e] > 0 and level[to] < 0:
                    level[to] = level[at] + 1
                    queue.append(to)
        return level

    def _saturate(self, source: int, sink: int, level: list[int]) -> None:
        """Push flow along shortest paths until every one of them has a full edge."""
        edges, ends, room = self._edges, self._to, self._room
        following = [0] * len(edges)
        path: list[int] = []
        at = source
        while True:
            if at == sink:
                flow = min(room[e] for e in path)
                for e in path:
                    room[e] -= flow
                    room[e ^ 1] += flow
                first = next(i for i, e in enumerate(path) if room[e] == 0)
                del path[first:]
                at = ends[path[-1]] if path else source
                continue
            while following[at] < len(edges[at]):
                e = edges[at][following[at]]
                if room[e] > 0 and level[ends[e]] == level[at] + 1:
                    break
                following[at] += 1
            else:
                if at == source:
                    return
                at = ends[path.pop() ^ 1]
                following[at] += 1
                continue
            path.append(e)
            at = ends[e]
