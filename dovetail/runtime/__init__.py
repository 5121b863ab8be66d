"""Program -> Executable: compile, load, call."""
from __future__ import annotations

from dovetail.runtime.build import machine_identity
from dovetail.runtime.graphs import Recorded
from dovetail.runtime.load import Executable, load

__all__ = ["Executable", "Recorded", "load", "machine_identity"]
