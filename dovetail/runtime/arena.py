"""What malloc does with freed memory.

    keep_freed_memory() -> whether results and saved values may find their pages again
"""
from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Final

TRIM_THRESHOLD: Final = -1
MMAP_THRESHOLD: Final = -3
"""Parameters of glibc's mallopt."""
KEPT: Final = 512 << 20
LARGE: Final = 32 << 20
"""Blocks above this are mapped and unmapped one by one: the most that glibc's own adjusting reaches."""


@cache
def keep_freed_memory() -> bool:
    """Results and saved values come and go with every call. glibc gives the end of its heap back to the
    system once 128 KiB of it are free, and every page is a fault when it is needed again. False where the
    user has decided otherwise, or malloc is not glibc's."""
    decided = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in decided):
        return False
    return bool(mallopt(TRIM_THRESHOLD, KEPT) and mallopt(MMAP_THRESHOLD, LARGE))
