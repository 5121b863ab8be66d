"""Where in the user's program something came from."""
from __future__ import annotations

from dovetail.util.noun import dataclass


@dataclass(frozen=True, slots=True)
class Loc:
    """A file, a line (from 1) and the function around it."""

    file: str
    line: int
    function: str = ""
    checkpoint: int = 0
    """Which of the user's checkpoints it is in, if any: backward is to compute again what is in one."""

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"
