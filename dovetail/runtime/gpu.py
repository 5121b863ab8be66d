"""Triton kernels to functions of the GPU driver.

    begin(kernels, device, options).finish() -> {key: GpuFunction(address, x, y, warps, shared)}

Texts are compiled side by side in worker processes, and what they give is kept in the store, so that a
later process needs no Triton at all. With options.tune every choice of block sizes is compiled and timed
on buffers of the real sizes, and the fastest is remembered on disk by kernel and GPU.
"""
from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.metadata
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import torch

from dovetail.cache.store import default_folder, store_in
from dovetail.errors import BuildFailed
from dovetail.events import EVENTS
from dovetail.ir.program import FOLLOW, Blocks, Kernel
from dovetail.options import Options
from dovetail.runtime.build import scratch
from dovetail.util.noun import Noun, field

MOST_SHARED: Final = 48 * 1024
"""Bytes of shared memory a function gets without asking."""
LAUNCHES: Final = 10
HEAD_START: Final = 400_000
"""Cycles that the GPU sleeps before a timing, while the launches are queued: else the host is timed."""
MOST_THREADS: Final = 64
"""Requests under way at once; each waits for its worker."""


class GpuFunction(Noun):
    address: int
    blocks: Blocks
    shared: int


_loaded: dict[tuple[str, str], GpuFunction] = {}


class Pending(Noun, frozen=False, eq=False):
    """Kernels being compiled."""

    kernels: Sequence[Kernel]
    device: torch.device
    choices: list[tuple[Kernel, Blocks, Future[dict[str, Any]]]]
    pool: ThreadPoolExecutor | None

    def finish(self) -> dict[str, GpuFunction]:
        """Every kernel's function."""
        made: dict[str, list[tuple[Blocks, dict[str, Any]]]] = {}
        for kernel, blocks, future in self.choices:
            made.setdefault(kernel.key, []).append((blocks, future.result()))
        if self.pool is not None:
            self.pool.shutdown()
            WORKERS.rest()
        device = self.device
        with torch.cuda.device(device):
            driver().cuCtxSetCurrent(ctypes.c_void_p(context_of(device)))  # a new thread has none
            for kernel in {k.key: k for k, _, _ in self.choices}.values():
                functions = _functions(kernel, made[kernel.key])
                _loaded[kernel.key, str(device)] = _fastest(kernel, functions, device)
        return {k.key: _loaded[k.key, str(device)] for k in self.kernels}


def begin(kernels: Sequence[Kernel], device: torch.device, options: Options) -> Pending:
    """Start compiling; kernels loaded before are not compiled again."""
    missing = {k.key: k for k in kernels if (k.key, str(device)) not in _loaded}
    choices = [(k, b) for k in missing.values() for b in _choices(k, device, options)]
    if not choices:
        return Pending(kernels, device, [], None)
    capability = capability_of(device)
    pool = ThreadPoolExecutor(min(len(choices), MOST_THREADS))
    submit = lambda k, b: pool.submit(compile_kernel, k, b, capability, options, len(choices))
    return Pending(kernels, device, [(k, b, submit(k, b)) for k, b in choices], pool)


def overlaps(capability: int) -> bool:
    """A kernel can get ready while the one before it finishes."""
    return capability >= 90


def start_workers(wanted: int, options: Options) -> None:
    """Kernels are coming: have processes ready to compile them."""
    WORKERS.start(min(wanted, options.compile_threads or wanted))


@cache
def capability_of(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


# -- compiling ---------------------------------------------------------------------------------------


@cache
def triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        raise BuildFailed(output="the triton package is not installed: pip install triton") from None


def compile_kernel(
    kernel: Kernel, blocks: Blocks, capability: int, options: Options, wanted: int = 1
) -> dict[str, Any]:
    """What triton_worker.compile_text answers, from the store if it is there."""
    (prelude,) = kernel.prelude
    described = (kernel.key, kernel.fuses, prelude, str(blocks), capability, triton_version())
    key = "cubin-" + hashlib.sha256(repr(described).encode()).hexdigest()[:24]
    store = store_in(default_folder()) if options.cache else None
    kept = store.get(key) if store is not None else None
    if kept is not None:
        head, _, cubin = kept.partition(b"\n")
        return json.loads(head) | {"cubin": cubin}  # type: ignore[no-any-return]
    start_workers(wanted, options)
    answer = WORKERS.compile(_request(kernel, blocks, capability, prelude))
    if store is not None and "error" not in answer:
        head = json.dumps({"name": answer["name"], "shared": answer["shared"]}).encode()
        store.put(key, head + b"\n" + answer["cubin"], {"kind": "triton", "kernel": kernel.name})
    return answer


def _request(kernel: Kernel, blocks: Blocks, capability: int, prelude: str) -> dict[str, Any]:
    folder = default_folder() / "triton"
    if not os.access(default_folder() if default_folder().exists() else default_folder().parent, os.W_OK):
        folder = scratch()
    return {
        "text": kernel.text if overlaps(capability) else kernel.text.replace(f"    {FOLLOW}\n", ""),
        "prelude": prelude,
        "symbol": kernel.name,
        **{name: getattr(kernel, name) for name in ("signature", "unaligned", "fuses")},
        "constants": blocks.constants(kernel.constants),
        **{name: getattr(blocks, name) for name in ("warps", "stages")},
        "capability": capability,
        "folder": str(folder),
    }


# -- processes that compile ------------------------------------------------------------------------


PROGRAM: Final = Path(__file__).with_name("triton_process.py")
MOST: Final = 16
LOST: Final = (OSError, EOFError, pickle.UnpicklingError)
"""What is met where a worker is gone."""


class Worker(Noun, frozen=False, eq=False):
    process: subprocess.Popen[bytes]

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        to, from_ = self.process.stdin, self.process.stdout
        assert to is not None and from_ is not None
        pickle.dump(request, to)
        to.flush()
        return pickle.load(from_)  # type: ignore[no-any-return]

    def close(self) -> None:
        """It ends when its input does; nobody waits for that."""
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):  # what was left to write has no reader any more
                if pipe is not None:
                    pipe.close()


class Workers(Noun, frozen=False, eq=False):
    """Compile Triton texts side by side, for as many threads as one likes. Triton's compiler keeps the
    interpreter lock for most of its work, so threads gain nothing. A worker is a fresh interpreter with
    Triton alone (see triton_process.py); it is up in a fraction of a second, while the rest of the compiler
    is still at work, and goes when all is compiled. Where no process can be started, requests are served in
    this process; where one dies, its request has failed."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    idle: SimpleQueue[Worker | None] = field(default_factory=SimpleQueue)
    """None stands for a worker that could not be replaced."""
    count: int = 0
    """Workers that are idle or busy;"""
    owner: int = 0
    """the process whose they are: a forked child must not talk to its parent's;"""
    waiting: int = 0

    def start(self, wanted: int) -> None:
        """Have so many workers, at most one per core."""
        with self.lock:
            if self.owner != os.getpid():
                self.idle, self.count, self.owner = SimpleQueue(), 0, os.getpid()
            missing = min(wanted, os.cpu_count() or 1, MOST) - self.count
            for _ in range(missing):
                worker = _spawn()
                if worker is None:
                    break
                self.idle.put(worker)
                self.count += 1

    def compile(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer of triton_worker.compile_text."""
        with self.lock:
            is_served = self.count > 0 and self.owner == os.getpid()
            self.waiting += is_served
        if not is_served:
            return compile_here(request)
        worker = self.idle.get()
        try:
            return compile_here(request) if worker is None else worker.ask(request)
        except LOST:
            if worker is None:
                raise
            worker.close()
            worker = _spawn()
            return {"error": "the compiling process died"}
        finally:
            self.idle.put(worker)
            with self.lock:
                self.waiting -= 1

    def rest(self) -> None:
        """Let all workers go, unless somebody waits for one."""
        with self.lock:
            while self.count and not self.waiting and self.owner == os.getpid():
                worker = self.idle.get()
                self.count -= 1
                if worker is not None:
                    worker.close()


def _spawn() -> Worker | None:
    triton = find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_STORE_BINARY_ONLY"] = "1"  # its intermediate texts cost a third of a small kernel's time
    env["TRITON_BACKENDS_IN_TREE"] = "1"  # no search through all installed packages
    env["PYTHONPATH"] = str(Path(triton.origin).parents[1])
    command = [sys.executable, "-S", "-P", str(PROGRAM)]  # `site` can take longer than Python itself
    try:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        return Worker(subprocess.Popen(command, env=env, **pipes))  # type: ignore[call-overload]
    except OSError as error:
        EVENTS.emit("tuning", kernel="", error=f"no process to compile in: {error}")
        return None


def compile_here(request: dict[str, Any]) -> dict[str, Any]:
    """In this process, which takes the time to import Triton."""
    worker = importlib.import_module("dovetail.runtime.triton_worker")
    return worker.compile_text(request)  # type: ignore[no-any-return]


WORKERS: Final = Workers()


# -- the driver --------------------------------------------------------------------------------------


@cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def context_of(device: torch.device) -> int:
    """The driver's context that torch uses."""
    context = ctypes.c_void_p()
    _check(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device.index or 0), "finding the context")
    return context.value or 0


def _check(code: int, what: str) -> None:
    if code:
        raise BuildFailed(output=f"{what} failed with CUDA error {code}")


def _functions(kernel: Kernel, made: list[tuple[Blocks, dict[str, Any]]]) -> list[GpuFunction]:
    """One for each choice of blocks that compiles and that this GPU has room for."""
    found: list[GpuFunction] = []
    failed = ""
    for blocks, answer in made:
        try:
            found.append(_function(answer, blocks))
        except BuildFailed as error:
            failed = str(error)
            EVENTS.emit("tuning", kernel=kernel.name, blocks=str(blocks), error=failed[:200])
    if not found:
        raise BuildFailed(output=f"{failed}\n{kernel.text}")
    return found


def _function(compiled: dict[str, Any], blocks: Blocks) -> GpuFunction:
    if "error" in compiled:
        raise BuildFailed(output=compiled["error"])
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver().cuModuleLoadData(ctypes.byref(module), compiled["cubin"]), "loading a kernel")
    name = compiled["name"].encode()
    _check(driver().cuModuleGetFunction(ctypes.byref(function), module, name), "finding a kernel")
    shared = compiled["shared"]
    if shared > MOST_SHARED:
        _check(driver().cuFuncSetAttribute(function, 8, shared), "asking for shared memory")
    return GpuFunction(function.value or 0, blocks, shared)


# -- tuning ------------------------------------------------------------------------------------------


def _choices(kernel: Kernel, device: torch.device, options: Options) -> Iterable[Blocks]:
    if not options.tune or not all(kernel.sizes) or not all(kernel.points):
        return kernel.blocks[:1]
    kept = store_in(default_folder()).get(_tuned_key(kernel, device))
    return kernel.blocks if kept is None else [Blocks(**json.loads(kept))]


def _tuned_key(kernel: Kernel, device: torch.device) -> str:
    described = f"{kernel.key} {torch.cuda.get_device_name(device)}"
    return "tuned-" + hashlib.sha256(described.encode()).hexdigest()[:24]


def _fastest(kernel: Kernel, functions: list[GpuFunction], device: torch.device) -> GpuFunction:
    if len(functions) == 1:
        return functions[0]
    buffers = _buffers(kernel, device)
    times = [_time(kernel, function, buffers) for function in functions]
    best = functions[times.index(min(times))]
    found = {"blocks": str(best.blocks), "tried": len(times), "milliseconds": min(times)}
    EVENTS.emit("tuning", kernel=kernel.name, **found)
    parts, fields = {"kind": "tuned", "kernel": kernel.name}, json.dumps(asdict(best.blocks)).encode()
    store_in(default_folder()).put(_tuned_key(kernel, device), fields, parts)
    return best


def _buffers(kernel: Kernel, device: torch.device) -> list[torch.Tensor]:
    return [torch.zeros(max(n, 16), dtype=torch.uint8, device=device) for n in kernel.sizes]


def _time(kernel: Kernel, function: GpuFunction, buffers: list[torch.Tensor]) -> float:
    pointers = (b.data_ptr() if kind.startswith("*") else 0 for b, kind in zip(buffers, kernel.signature))
    values = [*map(ctypes.c_void_p, pointers), ctypes.c_void_p(0), ctypes.c_void_p(0)]
    packed = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    per = function.blocks.constants(kernel.constants)
    axes = [name for name in kernel.constants if name != "RBLOCK"]
    grid = [-(-n // per[name]) for n, name in zip(kernel.points, axes)] + [1, 1]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    shape = (*grid[:2], 1, 32 * function.blocks.warps, 1, 1)

    def launch() -> None:
        address = ctypes.c_void_p(function.address)
        code = driver().cuLaunchKernel(address, *shape, function.shared, stream, packed, None)
        _check(code, f"launching {kernel.name}")

    return milliseconds(launch)


def milliseconds(launch: Callable[[], object]) -> float:
    """Of one launch on the current device, the least of several loops."""
    launch()
    times = []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(HEAD_START)
        start.record()
        for _ in range(LAUNCHES):
            launch()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / LAUNCHES)
    return min(times)


def time_kernels(kernels: Sequence[Kernel], device: torch.device, options: Options) -> float:
    """Milliseconds of all of them, each with the blocks that suit it best."""
    functions = begin(kernels, device, options).finish()
    return sum(_time(kernel, functions[kernel.key], _buffers(kernel, device)) for kernel in kernels)
