"""Every knob, in one typed table.

    dovetail.compile(f, options={"fuse": False})        by name
    make_options("max-autotune", {"fuse": False})       checked at once

A field's comment is its documentation (docs/options.md shows them).
"""
from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Final, get_type_hints

from dovetail.errors import BadOption, UnknownMode, UnknownOption
from dovetail.util.noun import Noun, fields, replace


class Options(Noun):
    # -- capture
    recompile_limit: int = 8
    """Entries per function; past it the function runs in eager, and says so."""
    capture_scalars: bool = True
    """Numbers that change between calls become run-time inputs instead of causing recompiles."""
    # -- autograd
    activation_memory_budget: float = 1.0
    """1 saves what is fastest, 0 recomputes all it can in backward."""
    # -- code generation
    fuse: bool = True
    """Fuse loop nests; off for debugging."""
    freeze: bool = True
    """Under no_grad, fold and prepack parameters, guarded by identity and version."""
    max_fusion_size: int = 64
    """Most loop nests in one kernel."""
    simd: bool = True
    """Write explicit SIMD code on the CPU."""
    compile_threads: int = 0
    """Processes compiling C++ at once; 0 is one per core."""
    tune: bool = False
    """Time several configurations of a kernel and keep the best."""
    cuda_graphs: bool = False
    """Record and replay CUDA graphs."""
    notice_slow: bool = True
    """Time each inference graph against eager once, at its third call, and say when it loses."""
    keep_faster: bool = False
    """Use eager for a graph that lost; results may then differ in the last bits from run to run."""
    background: bool = False
    """Compile on another thread, and let eager serve until the code is ready."""
    keep_memory: bool = True
    """Let the process keep up to 512 MiB of freed memory: glibc would hand it back after every step, and
    touching new pages costs more than most kernels. Settings of your own (MALLOC_*_) win."""
    # -- caches
    cache: bool = True
    """Keep compiled code on disk."""
    # -- robustness
    fallback_to_eager: bool = True
    """An internal failure warns once and runs eager; off raises it."""


MODES: Final[dict[str, dict[str, object]]] = {
    "default": {},
    "reduce-overhead": {"cuda_graphs": True},
    "max-autotune": {"tune": True, "cuda_graphs": True},
    "max-autotune-no-cudagraphs": {"tune": True},
}

_TYPES: Final = get_type_hints(Options)
_NAMES: Final = [field.name for field in fields(Options)]


def make_options(mode: str | None, options: Mapping[str, object] | None) -> Options:
    """Check and merge. An unknown mode or option or a wrong type is an error at once."""
    chosen = "default" if mode is None else mode
    if not isinstance(chosen, str) or chosen not in MODES:
        raise UnknownMode(mode=mode, known=", ".join(MODES))
    if options is not None and not isinstance(options, Mapping):
        raise BadOption(name="options", wanted="a dict of option names to values", value=options)
    merged: dict[str, object] = {**MODES[chosen]}
    for name, value in (options or {}).items():
        if name not in _NAMES:
            close = difflib.get_close_matches(str(name), _NAMES, 1) or _NAMES[:1]
            raise UnknownOption(name=name, close=close[0])
        wanted = _TYPES[name]
        is_number = wanted is float and isinstance(value, int) and not isinstance(value, bool)
        if not is_number and type(value) is not wanted:
            raise BadOption(name=name, wanted=f"a {wanted.__name__}", value=value)
        merged[name] = float(value) if is_number else value  # type: ignore[arg-type]
    return replace(Options(), **merged)  # type: ignore[arg-type]
