"""Program -> Executable: compile, load, call."""
from __future__ import annotations

from dovetail.runtime.load import Executable, load

__all__ = ["Executable", "load"]
