"""What on this machine is missing, and what to do about it.

    ok    torch       2.13.0+cpu
    miss  C++         none of g++, clang++, c++ found
                      -> install g++ or clang, or `pip install ziglang`

A check is a function that returns a Finding; CHECKS is the list of them.
"""
from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from dovetail.cache.store import Store, default_folder
from dovetail.errors import BuildFailed, CompilerMissing
from dovetail.explain.text import show_bytes
from dovetail.runtime.build import KERNEL_FLAGS, compile_text, find_compiler
from dovetail.util.noun import Noun

PYTHONS: Final = ((3, 11), (3, 14))
TORCHES: Final = ((2, 11), (2, 14))
"""From the first, before the second."""


class Finding(Noun):
    """level: 'ok', 'note' (works, could be better), 'miss' (something does not work)."""

    level: str
    name: str
    text: str
    fix: str = ""


Version = tuple[int, int]


def _within(version: Version, limits: tuple[Version, Version], name: str, text: str) -> Finding:
    (low_major, low), (high_major, high) = limits
    if limits[0] <= version < limits[1]:
        return Finding("ok", name, text)
    return Finding("miss", name, text, f"use {name} {low_major}.{low} to {high_major}.{high - 1}")


def check_python() -> Finding:
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return _within(sys.version_info[:2], PYTHONS, "Python", text)


def check_torch() -> Finding:
    major, minor, *_ = torch.__version__.split(".")
    return _within((int(major), int(minor)), TORCHES, "torch", torch.__version__)


def check_native() -> Finding:
    try:
        module = importlib.import_module("dovetail._native")
    except ImportError as error:
        return Finding("miss", "native", str(error), "run `pip install .`, or `make native` in a checkout")
    return Finding("ok", "native", Path(str(module.__file__)).name)


PROBE: Final = """
extern "C" void add_one(float* x) {
    #pragma omp parallel for
    for (int i = 0; i < 8; ++i) x[i] += 1;
}
"""


def check_compiler() -> Finding:
    """Build a shared library with OpenMP, as kernels are."""
    try:
        command, start = " ".join(find_compiler()), time.perf_counter()
        compile_text(PROBE, KERNEL_FLAGS, "doctor-probe")
    except CompilerMissing as error:
        return Finding("miss", "C++", f"{error.text}; all runs in eager", error.hint)
    except BuildFailed as error:
        return Finding("miss", "C++", error.text[:500], "install a C++17 compiler")
    return Finding("ok", "C++", f"{command}, one kernel in {(time.perf_counter() - start) * 1e3:.0f} ms")


def check_cpu() -> Finding:
    capability = torch.backends.cpu.get_cpu_capability()
    text = f"{capability}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"
    return Finding("ok", "CPU", text)


def check_gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding("note", "GPU", "none that torch can use; the CPU is compiled for")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("ok", "GPU", ", ".join(names))


def check_triton() -> Finding:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        level = "miss" if torch.cuda.is_available() else "note"
        return Finding(level, "triton", "not installed; needed for GPU kernels only", "pip install triton")
    return Finding("ok", "triton", version)


def check_cache() -> Finding:
    store = Store(default_folder())
    written = store.put("doctor-probe", b"probe")
    if written is None or store.get("doctor-probe") != b"probe":
        fix = "set DOVETAIL_CACHE to a folder you can write to"
        return Finding("miss", "cache", f"{store.folder} cannot be written: every process compiles anew", fix)
    store.remove("doctor-probe")
    free = shutil.disk_usage(store.folder).free
    held = sum(entry.bytes for entry in store.entries())
    level = "ok" if free > store.limit else "note"
    text = f"{store.folder}: {show_bytes(held)} held, {show_bytes(free)} free on the disk"
    return Finding(level, "cache", text)


CHECKS: Final[tuple[Callable[[], Finding], ...]] = (
    check_python, check_torch, check_native, check_compiler, check_cpu, check_gpu, check_triton, check_cache,
)  # fmt: skip


def examine() -> list[Finding]:
    return [check() for check in CHECKS]


def show_findings(findings: list[Finding]) -> str:
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<5} {finding.name:<8} {finding.text}")
        if finding.fix:
            lines.append(f"{'':<14} -> {finding.fix}")
    missing = sum(finding.level == "miss" for finding in findings)
    lines.append(f"\n{missing} missing" if missing else "\nready")
    return "\n".join(lines)
