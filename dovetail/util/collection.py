"""Python's garbage collector, put off while something makes many small objects and almost no garbage.

    with no_collections(): ...          a collection would walk the whole heap, torch's own objects included
"""
from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

MOST_MOVED: Final = 300_000
"""Objects, dead or alive, that may join the oldest before all are walked: Python does not count these."""
_moved = 0


@contextmanager
def no_collections() -> Iterator[None]:
    """Also a decorator. What was made meanwhile belongs to the oldest objects at once: the next collection of
    the young ones would walk all of it, and find nothing."""
    global _moved
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            if not gc.get_freeze_count():  # else the program froze objects of its own
                _moved += gc.get_count()[0]
                if _moved > MOST_MOVED:
                    _moved = 0
                    gc.collect()
                gc.freeze()
                gc.unfreeze()
            gc.enable()
