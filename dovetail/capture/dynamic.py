"""Which sizes and numbers are symbolic: decided from what changed between calls.

    History(dynamic).policy(frame) -> Policy | None

dynamic=None: the first capture of a function is static; a size or number that differs at the next one
becomes a symbol. True: symbolic from the start. False: never.
"""
from __future__ import annotations

from typing import Any


class History:
    """What earlier captures of each code object saw, kept by the compiler across captures."""

    def __init__(self, dynamic: bool | None) -> None:
        self.dynamic = dynamic

    def policy(self, frame: Any) -> None:
        return None
