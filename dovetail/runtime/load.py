"""Turn a Program into something to call.

    load(program, options) -> Executable;  executable(*inputs) -> list of outputs

Kernels that this process has loaded before are not compiled again, whatever program they came from.
The others are dealt out over a few units, so that every core compiles something and no prelude is
read more often than needed.
"""
from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch._ops import OpOverload

from dovetail import _native
from dovetail.events import EVENTS
from dovetail.ir.expr import evaluate
from dovetail.ir.program import Kernel, Program, PythonCall, Slot
from dovetail.ir.types import Device, DType
from dovetail.options import Options
from dovetail.runtime import gpu
from dovetail.runtime.build import HOST_FLAGS, KERNEL_FLAGS, TORCH_CUDA, Unit, begin_units, open_library
from dovetail.runtime.guards import attach
from dovetail.runtime.torch_abi import address_in
from dovetail.util.library import MEANT, find_op
from dovetail.util.noun import Noun

FEW_LINES: Final = 120
"""Of kernels that one compiler is done with before two had read their preludes."""

SHOWN: Final = ("name", "language", "bytes_moved", "origins", "text")
"""What a report wants to know of a kernel."""

_loaded: dict[str, int] = {}
"""Kernel key -> address of its function."""
_begun: dict[str, tuple[Unit, list[Kernel]]] = {}
"""Kernel key -> the unit that it is built in, and all kernels of that."""
_hosts: dict[str, Unit] = {}
"""Those that are being built, by their text."""
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
        found: Any = [(result.kind, result.value) for result in self.program.results]
        return [
            tensors[x] if kind == "tensor" else evaluate(x, numbers) if kind == "expr" else x
            for kind, x in found
        ]


def load(
    program: Program, options: Options | None = None, meanwhile: Callable[[], object] = bool
) -> Executable:
    """`meanwhile` is done while compilers are at work."""
    options = options or Options()
    on_gpu = [kernel for kernel in program.kernels if kernel.language == "triton"]
    pending = None if program.device == "cpu" else gpu.begin(on_gpu, torch.device(program.device), options)
    if options.keep_memory and program.device == "cpu":
        keep_freed_memory()
    unit = begin(program, options)
    meanwhile()
    host_path = unit.finish()
    _hosts.pop(program.host, None)
    _finish_kernels(program.kernels, options)
    for kernel in program.kernels:
        EVENTS.emit("kernel", unit=program.name, **{name: getattr(kernel, name) for name in SHOWN})
    attach()
    host = open_library(host_path)
    _connect(host, program, pending)
    calls = tuple(make_call(call) for call in program.python_calls if isinstance(call, PythonCall))
    launch = _native.Launch(address_in(host, "run"), program.kinds, program.outputs, calls, host)
    plain = all(result.kind == "tensor" for result in program.results)
    return Executable(program, launch, plain)


def begin(program: Program, options: Options) -> Unit:
    """Have all of it built that is not yet, and give the host's unit."""
    begin_kernels(program.kernels, options)
    if program.host not in _hosts:
        flags: tuple[str, ...] = HOST_FLAGS if program.device == "cpu" else (*HOST_FLAGS, TORCH_CUDA)
        (_hosts[program.host],) = begin_units([(program.host, flags)], options)
    return _hosts[program.host]


# -- kernels of the CPU ----------------------------------------------------------------------------


def begin_kernels(kernels: Sequence[Kernel], options: Options) -> None:
    """Have those built that no program asked for before, while the caller writes the host program."""
    missing = [k for k in kernels if k.language == "c++" and k.key not in _loaded and k.key not in _begun]
    dealt = _deal(missing, options) if missing else []
    preludes = [dict.fromkeys(piece for kernel in unit for piece in kernel.prelude) for unit in dealt]
    texts = ["".join([*first, "\n".join(k.text for k in unit)]) for first, unit in zip(preludes, dealt)]
    for unit, members in zip(begin_units([(text, KERNEL_FLAGS) for text in texts], options), dealt):
        _begun.update(dict.fromkeys([kernel.key for kernel in members], (unit, members)))


def _finish_kernels(kernels: Sequence[Kernel], options: Options) -> None:
    for kernel in kernels:
        begin_kernels((kernel,), options)
        if (begun := _begun.get(kernel.key)) is not None:  # else another thread has loaded it
            unit, members = begun
            try:
                library = open_library(unit.finish())
                _keep.append(library)
                _loaded.update({member.key: address_in(library, member.name) for member in members})
            finally:  # what failed is tried again
                for member in members:
                    _begun.pop(member.key, None)


def _deal(kernels: list[Kernel], options: Options) -> list[list[Kernel]]:
    """Units of about equal length, one per compiling thread when there is enough to do."""
    threads = options.compile_threads or os.cpu_count() or 1
    length = cache(lambda kernel: kernel.text.count("\n"))
    count = min(len(kernels), threads if sum(map(length, kernels)) > FEW_LINES else 1)
    units: list[list[Kernel]] = [[] for _ in range(count)]
    for kernel in sorted(kernels, key=length, reverse=True):
        min(units, key=lambda unit: sum(map(length, unit))).append(kernel)
    return units


def _connect(host: ctypes.CDLL, program: Program, pending: gpu.Pending | None) -> None:
    """Fill in the host's tables of functions, and for kernels of the GPU how each is launched."""
    functions = {} if pending is None else pending.finish()
    count = max(len(program.kernels), 1)
    table = (ctypes.c_void_p * count).in_dll(host, "dv_kernels")
    for k, kernel in enumerate(program.kernels):
        table[k] = _loaded[kernel.key] if kernel.language == "c++" else functions[kernel.key].address
    arena = (ctypes.c_void_p * 2).in_dll(host, "dv_arena")
    arena[0], arena[1] = _native.arena_functions()
    if pending is None:
        return
    launches = (ctypes.c_int32 * (4 * count)).in_dll(host, "dv_launches")
    for k, kernel in enumerate(program.kernels):
        if kernel.language == "triton":
            blocks, shared = functions[kernel.key].blocks, functions[kernel.key].shared
            first, second = (blocks.y, blocks.x) if "YBLOCK" in kernel.constants else (blocks.x, 1)
            launches[4 * k : 4 * k + 4] = [first, second, blocks.warps, shared]
    for hole, name in (("dv_launch_kernel", "cuLaunchKernelEx"), ("dv_use_context", "cuCtxSetCurrent")):
        ctypes.c_void_p.in_dll(host, hole).value = address_in(gpu.driver(), name)
    ctypes.c_void_p.in_dll(host, "dv_context").value = gpu.context_of(pending.device)
    ctypes.c_int32.in_dll(host, "dv_overlaps").value = gpu.overlaps(gpu.capability_of(pending.device))


# -- library calls through Python ------------------------------------------------------------------


def make_call(call: PythonCall) -> Callable[..., list[Any]]:
    """Takes the tensors, then the numbers; returns the wanted results, in order. One that the call left
    undefined is an empty tensor."""
    op = find_op(call.op)
    text_arguments = {arg.name for arg in op._schema.arguments if "str" in str(arg.type)}
    names = [arg.name for arg in op._schema.arguments]
    args = [_constant(arg, name in text_arguments) for arg, name in zip(call.args, names)]
    kwargs = {name: _constant(arg, name in text_arguments) for name, arg in call.kwargs}
    count = call.tensors
    function = MEANT.get(call.op) or _bound(op)

    def run(*given: Any) -> list[Any]:
        filled = [_fill(arg, given, count) for arg in args]
        named = {key: _fill(arg, given, count) for key, arg in kwargs.items()}
        result = function(*filled, **named)
        if not call.positions:
            return [result] if call.outputs else []
        return [torch.empty(0) if result[k] is None else result[k] for k in call.positions]

    return run


def _bound(op: OpOverload) -> Callable[..., Any]:
    """The op as torch binds it to Python, microseconds quicker to call, where its name means no other."""
    packet = op._overloadpacket
    is_only = op.namespace == "aten" and {"default", "out"}.issuperset(packet.overloads())
    is_only &= "Tensor?[]" not in str(op._schema)  # where the binding of some refuses None
    return getattr(torch._C._VariableFunctions, packet.__name__, op) if is_only else op


def _constant(arg: object, is_text: bool) -> object:
    """Dovetail's nouns as torch's; slots stay."""
    if isinstance(arg, DType):
        return getattr(torch, arg.torch_name)
    if isinstance(arg, Device):
        return torch.device(str(arg))
    if isinstance(arg, str) and not is_text and arg.startswith("torch."):
        return getattr(torch, arg.removeprefix("torch."))
    if isinstance(arg, tuple):
        return [_constant(item, is_text) for item in arg]
    return arg


def _fill(arg: object, given: tuple[Any, ...], tensors: int) -> object:
    if isinstance(arg, Slot):
        if arg.kind == "tensor":
            return given[arg.index]
        number = given[tensors + arg.index]
        return number if arg.kind == "int" else struct.unpack("d", struct.pack("q", number))[0]
    if isinstance(arg, list):
        return [_fill(item, given, tensors) for item in arg]
    return arg


# -- what malloc does with freed memory ------------------------------------------------------------


TRIM_THRESHOLD: Final = -1
MMAP_THRESHOLD: Final = -3
"""Parameters of glibc's mallopt."""
KEPT: Final = 512 << 20
LARGE: Final = 32 << 20
"""Blocks above this are mapped and unmapped one by one: the most that glibc's own adjusting reaches."""


@cache
def keep_freed_memory() -> bool:
    """Results and saved values come and go with every call. glibc gives the end of its heap back to the
    system once 128 KiB of it are free, and every page is a fault when it is needed again. False where the
    user has decided otherwise, or malloc is not glibc's."""
    decided = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in decided):
        return False
    return bool(mallopt(TRIM_THRESHOLD, KEPT) and mallopt(MMAP_THRESHOLD, LARGE))
