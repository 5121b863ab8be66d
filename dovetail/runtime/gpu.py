"""Triton kernels to functions of the GPU driver.

    load_kernels(kernels, device, options) -> {key: GpuFunction(address, x, y, warps, shared)}

Texts are compiled side by side in threads (most of the work is LLVM's, outside the interpreter lock).
With options.tune every choice of block sizes is compiled and timed on buffers of the real sizes, and
the fastest is remembered on disk by kernel and GPU. This is the only file that imports Triton.
"""
from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

from dovetail.errors import BuildFailed
from dovetail.events import EVENTS
from dovetail.ir.program import Blocks, Kernel
from dovetail.options import Options
from dovetail.runtime.build import cache_folder, scratch

try:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
except ImportError:
    triton = None

HEAD: Final = "import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n\n"
MOST_SHARED: Final = 48 * 1024
"""Bytes of shared memory a function gets without asking."""
ALIGNED: Final = [["tt.divisibility", 16]]


@dataclass(frozen=True, slots=True)
class GpuFunction:
    address: int
    blocks: Blocks
    shared: int


_loaded: dict[tuple[str, str], GpuFunction] = {}


def load_kernels(kernels: Sequence[Kernel], device: torch.device, options: Options) -> dict[str, GpuFunction]:
    """Every kernel's function; those loaded before are not compiled again."""
    if triton is None:
        raise BuildFailed(output="the triton package is not installed: pip install triton")
    missing = [k for k in kernels if (k.key, str(device)) not in _loaded]
    choices = [(k, b) for k in missing for b in _choices(k, device, options)]
    threads = options.compile_threads or min(os.cpu_count() or 1, 16)
    target = gpu_target(device)
    modules = {k.key: _module(k) for k in missing}
    with ThreadPoolExecutor(threads) as pool:
        made = list(pool.map(lambda c: compile_kernel(modules[c[0].key], c[0], c[1], target), choices))
    with torch.cuda.device(device):
        torch.cuda.current_stream(device)  # the driver's context is this thread's from here on
        for kernel in missing:
            found = [(b, m) for (k, b), m in zip(choices, made) if k is kernel and m is not None]
            functions = [_function(compiled, blocks) for blocks, compiled in found]
            _loaded[kernel.key, str(device)] = _fastest(kernel, functions, device)
    return {k.key: _loaded[k.key, str(device)] for k in kernels}


@cache
def gpu_target(device: torch.device) -> Any:
    major, minor = torch.cuda.get_device_capability(device)
    return GPUTarget("cuda", 10 * major + minor, 32)


# -- compiling ---------------------------------------------------------------------------------------


def _module(kernel: Kernel) -> ModuleType:
    """Triton reads a kernel's source from its file, so there is one for each."""
    module = _import_text(kernel.key, HEAD + kernel.text)
    (prelude,) = kernel.prelude
    module.dv = _import_text(_digest(prelude), prelude)  # type: ignore[attr-defined]
    return module


@cache
def _import_text(name: str, text: str) -> ModuleType:
    folder = cache_folder().parent / "triton"
    path = folder / f"{name}_{_digest(text)}.py"
    if not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}.tmp")
            partial.write_text(text)
            os.replace(partial, path)
        except OSError:
            path = scratch() / path.name
            path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"dovetail_triton_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compile_kernel(module: ModuleType, kernel: Kernel, blocks: Blocks, target: Any) -> Any:
    """Triton's compiled kernel, or None if this choice of blocks cannot be built."""
    function = getattr(module, kernel.symbol)
    names = function.arg_names
    signature = dict(zip(names, kernel.signature)) | dict.fromkeys(kernel.constants, "constexpr")
    constants = blocks.constants(kernel.constants)
    pointers = [i for i, kind in enumerate(kernel.signature) if kind.startswith("*")]
    attrs = {(i,): ALIGNED for i in pointers if i not in kernel.unaligned}
    places = {(names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages, "enable_fp_fusion": False}
    try:
        return triton.compile(ASTSource(function, signature, places, attrs), target=target, options=options)
    except Exception as error:
        if len(kernel.blocks) == 1 or blocks is kernel.blocks[0]:
            raise BuildFailed(output=f"{error}\n{kernel.text}") from error
        EVENTS.emit("tuning", kernel=kernel.name, blocks=str(blocks), error=str(error)[:200])
        return None


# -- the driver --------------------------------------------------------------------------------------


@cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def launch_address() -> int:
    return ctypes.cast(driver().cuLaunchKernel, ctypes.c_void_p).value or 0


def _check(code: int, what: str) -> None:
    if code:
        raise BuildFailed(output=f"{what} failed with CUDA error {code}")


def _function(compiled: Any, blocks: Blocks) -> GpuFunction:
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    image = compiled.asm["cubin"]
    _check(driver().cuModuleLoadData(ctypes.byref(module), image), "loading a kernel")
    name = compiled.metadata.name.encode()
    _check(driver().cuModuleGetFunction(ctypes.byref(function), module, name), "finding a kernel")
    shared = compiled.metadata.shared
    if shared > MOST_SHARED:
        _check(driver().cuFuncSetAttribute(function, 8, shared), "asking for shared memory")
    return GpuFunction(function.value or 0, blocks, shared)


# -- tuning ------------------------------------------------------------------------------------------


def _choices(kernel: Kernel, device: torch.device, options: Options) -> Iterable[Blocks]:
    if not options.tune or not all(kernel.sizes) or not all(kernel.points):
        return kernel.blocks[:1]
    known = _remembered(kernel, device)
    return [known] if known is not None else kernel.blocks


def _record(kernel: Kernel, device: torch.device) -> Path:
    gpu = _digest(torch.cuda.get_device_name(device))
    return cache_folder().parent / "tuned" / f"{kernel.key}_{gpu}.json"


def _remembered(kernel: Kernel, device: torch.device) -> Blocks | None:
    try:
        return Blocks(**json.loads(_record(kernel, device).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _fastest(kernel: Kernel, functions: list[GpuFunction], device: torch.device) -> GpuFunction:
    if len(functions) == 1:
        return functions[0]
    buffers = [torch.empty(max(n, 16), dtype=torch.uint8, device=device) for n in kernel.sizes]
    for buffer in buffers:
        buffer.zero_()
    times = [_time(kernel, function, buffers) for function in functions]
    best = functions[times.index(min(times))]
    EVENTS.emit(
        "tuning", kernel=kernel.name, blocks=str(best.blocks), tried=len(times), milliseconds=min(times)
    )
    path = _record(kernel, device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fields = {name: getattr(best.blocks, name) for name in ("x", "y", "r", "warps", "stages")}
        path.write_text(json.dumps(fields))
    except OSError as error:
        EVENTS.emit("cache", what="unwritable", key=kernel.key, language="triton", error=str(error))
    return best


def _time(kernel: Kernel, function: GpuFunction, buffers: list[torch.Tensor]) -> float:
    """Milliseconds of one launch, the least of several."""
    values = [ctypes.c_void_p(b.data_ptr()) for b in buffers] + [ctypes.c_void_p(0)] * 2
    packed = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    per = function.blocks.constants(kernel.constants)
    axes = [name for name in kernel.constants if name != "RBLOCK"]
    grid = [-(-n // per[name]) for n, name in zip(kernel.points, axes)] + [1, 1]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    threads = 32 * function.blocks.warps

    def launch() -> None:
        address = ctypes.c_void_p(function.address)
        code = driver().cuLaunchKernel(
            address, *grid[:2], 1, threads, 1, 1, function.shared, stream, packed, None
        )
        _check(code, f"launching {kernel.name}")

    launch()
    times = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        launch()
        launch()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 2)
    return min(times)
