"""A higher recursion limit while any thread captures: inlined calls nest several Python frames each.

    with DEPTH: sys.getrecursionlimit()    ->  12000; the old limit again when the last thread leaves
"""
from __future__ import annotations

import sys
import threading
from typing import Final

RECURSION_LIMIT: Final = 12_000


class Depth:
    """The limit belongs to the whole process: the first to enter raises it, the last to leave restores it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.before = 0

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                self.before = sys.getrecursionlimit()
                sys.setrecursionlimit(max(self.before, RECURSION_LIMIT))
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                sys.setrecursionlimit(self.before)


DEPTH: Final = Depth()
