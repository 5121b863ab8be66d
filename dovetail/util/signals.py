"""Exceptions that a signal handler raises while the compiler happens to run: the user's, and no failure.

    signal.signal(signal.SIGALRM, stop); signal.alarm(5)        stop() raises: the call is left with that
"""
from __future__ import annotations

import signal
from itertools import chain
from traceback import walk_tb
from typing import Any


def is_from_signal(error: BaseException) -> bool:
    """Whether one of the functions it came through is a signal handler."""
    trail = error.__traceback__
    if trail is None or trail.tb_next is None:
        return False
    installed: list[Any] = [signal.getsignal(number) for number in signal.valid_signals()]
    found = chain(installed, (vars(type(handler)).get("__call__") for handler in installed))
    codes = {getattr(handler, "__code__", None) for handler in found} - {None}  # a method has its function's
    return any(frame.f_code in codes for frame, _ in walk_tb(trail))
