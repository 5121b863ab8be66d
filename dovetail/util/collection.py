"""Python's garbage collector, put off while something makes many small objects and almost no garbage.

    with no_collections(): ...          a collection would walk the whole heap, torch's own objects included
"""
from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Also a decorator. What was made meanwhile belongs to the oldest objects at once: the next collection of
    the young ones would walk all of it, and find nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            if not gc.get_freeze_count():  # else the program froze objects of its own
                gc.freeze()
                gc.unfreeze()
            gc.enable()
