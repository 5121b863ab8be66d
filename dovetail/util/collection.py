"""Python's garbage collector, put off while something makes many small objects and almost no garbage.

    with no_collections(): ...          a collection would walk the whole heap, torch's own objects included
"""
from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Also a decorator."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
