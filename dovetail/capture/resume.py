"""Graph breaks (first version: none)."""
from __future__ import annotations
from typing import Any
from dovetail.errors import SkippedFrame


def emit_break(emit: Any, root: Any) -> list[str]:
    raise SkippedFrame(root.trace.loc(), detail=str(emit.trace.why))
