"""Program -> Executable: compile, load, call."""
from __future__ import annotations

from dovetail.runtime.build import begin_building, machine_identity
from dovetail.runtime.frozen import Frozen, can_watch
from dovetail.runtime.gpu import milliseconds, start_workers, time_kernels
from dovetail.runtime.graphs import Recorded
from dovetail.runtime.load import Executable, begin, begin_kernels, load
