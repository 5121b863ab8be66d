"""Turn a Program into something to call.

    load(program, options) -> Executable;  executable(*inputs) -> list of outputs

Kernels that this process has loaded before are not compiled again, whatever program they came from.
The others are dealt out over a few units, so that every core compiles something and no prelude is
read more often than needed.
"""
from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import torch

from dovetail import _native
from dovetail.errors import DovetailError
from dovetail.events import EVENTS
from dovetail.ir.expr import evaluate
from dovetail.ir.program import Kernel, Program, PythonCall
from dovetail.options import Options
from dovetail.runtime import gpu
from dovetail.runtime.arena import keep_freed_memory
from dovetail.runtime.build import HOST_FLAGS, KERNEL_FLAGS, TORCH_CUDA, build_units, open_library
from dovetail.runtime.calls import make_call
from dovetail.runtime.torch_abi import attach
from dovetail.util.noun import Noun

UNIT_LINES: Final = 1200
"""Lines of kernels in one unit before another is opened."""

SHOWN: Final = ("name", "language", "bytes_moved", "origins", "text")
"""What a report wants to know of a kernel."""

_loaded: dict[str, int] = {}
"""Kernel key -> address of its function."""
_begun: dict[str, threading.Thread] = {}
"""Kernel key -> the thread that is building it."""
_keep: list[ctypes.CDLL] = []


class Executable(Noun, frozen=False):
    """A loaded program."""

    program: Program
    launch: Callable[..., list[Any]]
    has_plain_results: bool

    @property
    def direct(self) -> Callable[..., list[Any]]:
        """The same without a step in between, where none is needed."""
        return self.launch if self.has_plain_results else self

    def __call__(self, *inputs: Any) -> list[Any]:
        tensors = self.launch(*inputs)
        return tensors if self.has_plain_results else self._results(tensors, inputs)

    def consume(self, inputs: list[Any]) -> list[Any]:
        """As a call, and empties the list: each tensor is freed after its last use."""
        if self.has_plain_results:
            return self.launch.consume(inputs)  # type: ignore[attr-defined, no-any-return]
        numbers = tuple(None if isinstance(x, torch.Tensor) else x for x in inputs)
        return self._results(self.launch.consume(inputs), numbers)  # type: ignore[attr-defined]

    def _results(self, tensors: list[Any], inputs: tuple[Any, ...]) -> list[Any]:
        numbers = {n: v for n, v, k in zip(self.program.input_names, inputs, self.program.kinds) if k == "i"}
        results: list[Any] = []
        for result in self.program.results:
            if result.kind == "tensor":
                results.append(tensors[result.value])  # type: ignore[call-overload]
            else:
                results.append(evaluate(result.value, numbers) if result.kind == "expr" else result.value)  # type: ignore[arg-type]
        return results


def load(program: Program, options: Options | None = None) -> Executable:
    options = options or Options()
    on_gpu = [kernel for kernel in program.kernels if kernel.language == "triton"]
    pending = None if program.device == "cpu" else gpu.begin(on_gpu, torch.device(program.device), options)
    if options.keep_memory and program.device == "cpu":
        keep_freed_memory()
    begin_kernels(program.kernels, options)
    host_flags: tuple[str, ...] = HOST_FLAGS if program.device == "cpu" else (*HOST_FLAGS, TORCH_CUDA)
    (host_path,) = build_units([(program.host, host_flags)], options)
    _finish_kernels(program.kernels, options)
    for kernel in program.kernels:
        EVENTS.emit("kernel", unit=program.name, **{name: getattr(kernel, name) for name in SHOWN})
    attach()
    host = open_library(host_path)
    _connect(host, program)
    if pending is not None:
        _connect_gpu(host, program, pending)
    calls = tuple(make_call(call) for call in program.python_calls if isinstance(call, PythonCall))
    launch = _native.Launch(_address(host, "run"), program.kinds, program.outputs, calls, host)
    plain = all(result.kind == "tensor" for result in program.results)
    return Executable(program, launch, plain)


# -- kernels of the CPU ----------------------------------------------------------------------------


def begin_kernels(kernels: Sequence[Kernel], options: Options) -> None:
    """Have those built that no program asked for before, while the caller writes the host program."""
    missing = [k for k in kernels if k.language == "c++" and k.key not in _loaded and k.key not in _begun]
    if missing:

        def build_ahead() -> None:
            with suppress(DovetailError, OSError):  # _finish_kernels tries again, and says why not
                _build_kernels(missing, options)

        thread = threading.Thread(target=build_ahead, name="dovetail-kernels")
        thread.start()  # before another thread finds it and waits for it
        _begun.update(dict.fromkeys([kernel.key for kernel in missing], thread))


def _finish_kernels(kernels: Sequence[Kernel], options: Options) -> None:
    for kernel in kernels:
        if (thread := _begun.pop(kernel.key, None)) is not None:
            thread.join()
    _build_kernels([k for k in kernels if k.language == "c++" and k.key not in _loaded], options)


def _build_kernels(kernels: list[Kernel], options: Options) -> None:
    units = _deal(kernels, options)
    paths = build_units([(_unit_text(unit), KERNEL_FLAGS) for unit in units], options)
    for unit, path in zip(units, paths):
        library = open_library(path)
        _keep.append(library)
        for kernel in unit:
            _loaded[kernel.key] = _address(library, kernel.name)


def _deal(kernels: list[Kernel], options: Options) -> list[list[Kernel]]:
    """Units of about equal length, at least one per compiling thread when there is enough to do."""
    lines = sum(kernel.text.count("\n") for kernel in kernels)
    threads = options.compile_threads or os.cpu_count() or 1
    count = min(len(kernels), max(threads if lines > 120 else 1, lines // UNIT_LINES + 1))
    units: list[list[Kernel]] = [[] for _ in range(count)]
    sizes = [0] * count
    for kernel in sorted(kernels, key=lambda k: -k.text.count("\n")):
        smallest = sizes.index(min(sizes))
        units[smallest].append(kernel)
        sizes[smallest] += kernel.text.count("\n")
    return units


def _unit_text(kernels: list[Kernel]) -> str:
    pieces = dict.fromkeys(piece for kernel in kernels for piece in kernel.prelude)
    return "".join(pieces) + "\n".join(kernel.text for kernel in kernels)


def _address(library: ctypes.CDLL, symbol: str) -> int:
    return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value or 0


def _connect(host: ctypes.CDLL, program: Program) -> None:
    """Fill in the host's tables of functions."""
    if program.kernels:
        table = (ctypes.c_void_p * len(program.kernels)).in_dll(host, "dv_kernels")
        for k, kernel in enumerate(program.kernels):
            if kernel.language == "c++":
                table[k] = _loaded[kernel.key]
    arena = (ctypes.c_void_p * 2).in_dll(host, "dv_arena")
    arena[0], arena[1] = _native.arena_functions()


def _connect_gpu(host: ctypes.CDLL, program: Program, pending: gpu.Pending) -> None:
    """Kernels of the GPU: their functions, and how each is launched."""
    functions = pending.finish()
    count = max(len(program.kernels), 1)
    table = (ctypes.c_void_p * count).in_dll(host, "dv_kernels")
    launches = (ctypes.c_int32 * (4 * count)).in_dll(host, "dv_launches")
    for k, kernel in enumerate(program.kernels):
        if kernel.language == "triton":
            function = functions[kernel.key]
            table[k] = function.address
            blocks = function.blocks
            first, second = (blocks.y, blocks.x) if "YBLOCK" in kernel.constants else (blocks.x, 1)
            launches[4 * k : 4 * k + 4] = [first, second, blocks.warps, function.shared]
    ctypes.c_void_p.in_dll(host, "dv_launch_kernel").value = gpu.address_of("cuLaunchKernelEx")
    ctypes.c_void_p.in_dll(host, "dv_use_context").value = gpu.address_of("cuCtxSetCurrent")
    ctypes.c_void_p.in_dll(host, "dv_context").value = gpu.context_of(pending.device)
    ctypes.c_int32.in_dll(host, "dv_overlaps").value = gpu.overlaps(gpu.capability_of(pending.device))
