"""Compile C++ text to shared objects, in parallel, each text once.

    [unit.finish() for unit in begin_units([(text, flags), ...], options)] -> [path, ...]

The content of a text and the compiler's identity name the result in the store on disk. What is not
there, is damaged or cannot be written is a miss and nothing worse: the result then lives in a folder
that goes away with the process.
"""
from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final, TypeAlias

from dovetail.cache.store import default_folder, store_in, write_whole
from dovetail.errors import BuildFailed, CompilerMissing, DovetailError
from dovetail.options import Options

FLAGS: Final = (
    "-std=c++17", "-march=native", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-w",
    "-ffp-contract=off", "-fwrapv", "-fno-stack-protector", "-fno-asynchronous-unwind-tables", "-fno-ident",
)  # fmt: skip
"""IEEE results: no -ffast-math; contraction off, because eager rounds after every multiplication; and no
-fno-trapping-math, with which g++ takes (float)(int)x for trunc(x), which may be -0."""
KERNEL_FLAGS: Final = ("-O2", "-fopenmp")
HOST_FLAGS: Final = ("-O0",)
Started: TypeAlias = "tuple[subprocess.Popen[str], Path]"
LINK_FLAGS: Final = ("-shared", "-nostdlib", "-Wl,--no-as-needed", "-Wl,-z,norelro", "-Wl,--build-id=none")


@cache
def find_compiler() -> tuple[str, ...]:
    """The command line of a C++ compiler: the system's, or PyPI's ziglang."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (path := shutil.which(name)):
            return (path,)
    if find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "c++")
    raise CompilerMissing(tried="$CXX, g++, clang++, c++, ziglang")


@cache
def compiler_identity() -> str:
    command = [*find_compiler(), "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.partition("\n")[0]


@cache
def machine_identity() -> str:
    """What -march=native depends on."""
    with open("/proc/cpuinfo") as file:
        return next((line for line in file if line.startswith("flags")), "")


@cache
def scratch_of(process: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="dovetail-"))
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == process else None)
    return folder


def scratch() -> Path:
    """A folder of this process (a forked child has its own), for what cannot be kept."""
    folder = scratch_of(os.getpid())
    folder.mkdir(0o700, exist_ok=True)  # whoever tidies up temporary files may have taken it
    return folder


@cache
def begin_building() -> threading.Thread:
    """Find out what no program decides while the first one is still captured. Joining waits for it; the
    build that needs what could not be found out says so."""

    def find_out() -> None:
        with suppress(DovetailError):
            compiler_identity()
            torch_stub()

    thread = threading.Thread(target=find_out, name="dovetail-compiler")
    thread.start()
    return thread


class Unit:
    """A text on its way to a shared object. Its compiler, a process, is at work from begin() on. A thread to
    wait for it would have to take turns with the one that makes the texts, and start it late."""

    def __init__(self, text: str, flags: tuple[str, ...], options: Options) -> None:
        content = "\0".join((text, *FLAGS, *flags, *LINK_FLAGS, compiler_identity(), machine_identity()))
        self.text, self.flags = text, flags
        self.key = "cpp-" + hashlib.sha256(content.encode()).hexdigest()[:24]
        self.store = store_in(default_folder()) if options.cache else None
        self.path: Path | None = None
        self.started: Started | None = None
        self.lock = threading.RLock()

    def begin(self) -> None:
        with self.lock:
            if self.path is None and self.started is None:
                self.path = None if self.store is None else self.store.path(self.key)
            if self.path is None and self.started is None:
                libraries = [torch_stub(), *(torch_stub(name) for name in self.flags if name == TORCH_CUDA)]
                flags = [*FLAGS, *(flag for flag in self.flags if flag != TORCH_CUDA), *LINK_FLAGS]
                self.started = start_compiler(self.text, self.key, flags, libraries)

    def finish(self) -> Path:
        with self.lock:
            self.begin()
            started, self.started = self.started, None
            if started is not None:
                self.path = made = wait_for(started)
                if self.store is not None:
                    parts = {"kind": "cpp", "compiler": compiler_identity(), "flags": " ".join(self.flags)}
                    self.path = self.store.put(self.key, made.read_bytes(), parts) or made
            assert self.path is not None
            return self.path


def begin_units(units: Iterable[tuple[str, tuple[str, ...]]], options: Options) -> list[Unit]:
    """Each is a text and its flags. Their compilers are all at work at once."""
    begin_building().join()
    made = [Unit(text, flags, options) for text, flags in units]
    for unit in made:
        unit.begin()
    return made


def build(text: str, flags: tuple[str, ...], options: Options) -> Path:
    return Unit(text, flags, options).finish()


def start_compiler(text: str, stem: str, flags: Iterable[str], libraries: Iterable[Path] = ()) -> Started:
    """The process, and the shared object that it makes. Two threads may compile the same text at once."""
    source, target = (scratch() / f"{stem}-{threading.get_ident()}.{kind}" for kind in ("cpp", "so"))
    source.write_text(text)
    command = [*find_compiler(), *flags, str(source), "-o", str(target), *map(str, libraries)]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **pipes), target  # type: ignore[call-overload]


def wait_for(started: Started) -> Path:
    process, target = started
    _, said = process.communicate()
    if process.returncode:
        raise BuildFailed(output=f"{' '.join(process.args)}\n{said[:4000]}")  # type: ignore[arg-type]
    return target


# -- torch's own libraries -------------------------------------------------------------------------

TORCH: Final = "libtorch_cpu.so"
TORCH_CUDA: Final = "libtorch_cuda.so"
"""As a flag of a unit: it calls this library too."""


def torch_stub(name: str = TORCH) -> Path:
    """An empty shared object that is called like one of torch's libraries.

    Linking against it records the name only, and the dynamic linker finds the library already loaded
    under that name, with all it depends on: its C shim, SLEEF, and the one OpenMP runtime of this
    process. No 500 MB file is read, and no second runtime is started."""
    store, key, made = store_in(default_folder()), f"stub-{name}", scratch() / name
    if made.exists():
        return made
    if (content := store.get(key)) is None:
        flags = ("-shared", "-nostdlib", f"-Wl,-soname,{name}")
        content = wait_for(start_compiler("", "empty", flags)).read_bytes()
        store.put(key, content, {"kind": "cpp", "compiler": compiler_identity()})
    write_whole(made, content)
    return made


def open_library(path: Path) -> ctypes.CDLL:
    """Load with every symbol bound at once, so that a missing one shows here and not in a call."""
    return ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
