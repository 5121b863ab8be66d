"""Exceptions that a signal handler raises while the compiler happens to run: the user's, and no failure.

    signal.signal(signal.SIGALRM, stop); signal.alarm(5)        stop() raises: the call is left with that
"""
from __future__ import annotations

import signal
from traceback import walk_tb


def is_from_signal(error: BaseException) -> bool:
    """Whether one of the functions it came through is a signal handler."""
    if (trail := error.__traceback__) is None or trail.tb_next is None:
        return False
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    calls = [vars(type(handler)).get("__call__") for handler in handlers]
    codes = {getattr(function, "__code__", None) for function in (*handlers, *calls)}
    return any(frame.f_code in codes for frame, _ in walk_tb(trail))
