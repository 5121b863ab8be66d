"""Where in the user's program something came from."""
from __future__ import annotations

from dovetail.util.noun import Noun, field


class Loc(Noun):
    """A file, a line (from 1) and the function around it."""

    file: str
    line: int
    function: str = ""
    region: int = field(default=0, compare=False)
    """The checkpoint (torch.utils.checkpoint) that the call is in, the outermost one; 0 for none."""

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"
