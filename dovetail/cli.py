"""The command line.

python -m dovetail explain script.py [args]      run a script, then tell what was compiled
python -m dovetail report -o out.html script.py  the same as a page
python -m dovetail bench [file.py:make]          eager against compiled, on this machine
python -m dovetail doctor | ops                  what is missing here; the fate of every op
python -m dovetail cache show|explain|trim|clear|export|import
"""
from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import runpy
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch

import dovetail
from dovetail.cache.store import Store, default_folder, explain_miss
from dovetail.errors import BuildFailed, CompilerMissing
from dovetail.events import EVENTS
from dovetail.explain.query import show_bytes, summary
from dovetail.options import Options
from dovetail.runtime.build import KERNEL_FLAGS, build, find_compiler
from dovetail.util.noun import Noun


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run it as `python path arguments` would. What it exits with is the script's own affair."""
    before, EVENTS.is_detailed = EVENTS.is_detailed, True
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as stopped:
        if stopped.code:
            print(f"[dovetail] the script ended with {stopped.code}", file=sys.stderr)
    finally:
        EVENTS.is_detailed = before


def explain(args: argparse.Namespace) -> None:
    run_script(args.script, args.arguments)
    print(f"\n{dovetail.report()}")


def report(args: argparse.Namespace) -> None:
    record_calls = importlib.import_module("dovetail.front").record_calls
    record_calls(True)
    run_script(args.script, args.arguments)
    record_calls(False)
    found = dovetail.report()
    print(f"{summary(found)}\nwritten to {found.html(args.output)}")


def bench(args: argparse.Namespace) -> None:
    measure = importlib.import_module("dovetail.measure")
    print(measure.bench(args.what, args.mode))


def ops(args: argparse.Namespace) -> None:
    fates = importlib.import_module("dovetail.ops").fates()
    for name, fate in sorted(fates.items()):
        if args.match in name:
            print(f"{fate!s:<10} {name}")


# -- doctor: what on this machine is missing, and what to do about it ------------------------------


class Finding(Noun):
    """level: 'ok', 'note' (works, could be better), 'miss' (something does not work)."""

    level: str
    name: str
    text: str
    fix: str = ""


def check_version(name: str, text: str, major: int, minors: range) -> Finding:
    """Of what says its version at the beginning of the text."""
    version = text.split(".")
    if int(version[0]) == major and int(version[1]) in minors:
        return Finding("ok", name, text)
    return Finding("miss", name, text, f"use {name} {major}.{minors[0]} to {major}.{minors[-1]}")


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
        build(PROBE, KERNEL_FLAGS, Options(cache=False))
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


PYTHON: Final = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
CHECKS: Final[tuple[Callable[[], Finding], ...]] = (
    partial(check_version, "Python", PYTHON, 3, range(11, 14)),
    partial(check_version, "torch", torch.__version__, 2, range(11, 14)),
    check_native, check_compiler, check_cpu, check_gpu, check_triton, check_cache,
)  # fmt: skip


def doctor(_: argparse.Namespace) -> int:
    findings = [check() for check in CHECKS]
    for finding in findings:
        print(f"{finding.level:<5} {finding.name:<8} {finding.text}")
        if finding.fix:
            print(f"{'':<14} -> {finding.fix}")
    missing = sum(finding.level == "miss" for finding in findings)
    print(f"\n{missing} missing" if missing else "\nready")
    return int(missing > 0)


# -- cache -----------------------------------------------------------------------------------------


def cache_show(store: Store, _: argparse.Namespace) -> None:
    entries = sorted(store.entries(), key=lambda entry: -entry.used)
    for entry in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        print(f"{used}  {show_bytes(entry.bytes):>10}  {entry.key}")
    print(f"{len(entries)} entries, {show_bytes(sum(entry.bytes for entry in entries))} in {store.folder}")


def cache_explain(store: Store, args: argparse.Namespace) -> None:
    """What a key is made of, and how it differs from the entry nearest to it: why that one did not do."""
    entries = sorted(store.entries(), key=lambda entry: -entry.used)
    found = [entry for entry in entries if args.target in entry.key]
    for entry in (shown := found[:20]):  # each is compared with all others
        print(f"{entry.key}  {show_bytes(entry.bytes)}")
        for name, value in entry.parts.items():
            print(f"    {name} = {value}")
        for line in explain_miss(entry.parts, [other for other in entries if other.key != entry.key]):
            print(f"    nearest entry: {line}")
    print(f"{len(shown)} of {len(found)} entries, the last used first; part of a key names others")


def cache_clear(store: Store, _: argparse.Namespace) -> None:
    store.clear()
    print(f"{store.folder} removed")


def bundle_of(args: argparse.Namespace) -> Path:
    return Path(args.target or "dovetail-cache.tar.gz")


CACHE: Final[dict[str, Callable[[Store, argparse.Namespace], None]]] = {
    "show": cache_show,
    "explain": cache_explain,
    "trim": lambda store, args: print(f"{store.trim(int(args.mib * 2**20))} entries removed"),
    "export": lambda store, args: print(f"{store.export(bundle_of(args))} entries written"),
    "import": lambda store, args: print(f"{store.import_(bundle_of(args))} entries taken"),
    "clear": cache_clear,
}


def cache(args: argparse.Namespace) -> None:
    try:
        CACHE[args.action](Store(args.folder), args)
    except (OSError, tarfile.TarError) as error:  # no such bundle, or no bundle
        sys.exit(f"dovetail cache {args.action}: {error}")


# -- arguments -------------------------------------------------------------------------------------


def program_file(path: str) -> str:
    if not Path(path.partition(":")[0]).exists():
        raise argparse.ArgumentTypeError(f"there is no {path}")
    return path


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("dovetail", description="A compiler for PyTorch programs.")
    parser.add_argument("--version", action="version", version=f"dovetail {dovetail.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(run: Callable[[argparse.Namespace], int | None], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(run.__name__, help=text, description=text)
        made.set_defaults(run=run)
        return made

    told = command(explain, "run a script and explain what was compiled")
    page = command(report, "the same as an HTML page")
    page.add_argument("-o", "--output", default="dovetail-report.html")
    for made in (told, page):
        made.add_argument("script", type=program_file)
        made.add_argument("arguments", nargs=argparse.REMAINDER)
    made = command(bench, "time eager against compiled")
    text = "file.py:make, where make() returns (model, args)"
    made.add_argument("what", nargs="?", type=program_file, help=text)
    made.add_argument("--mode", default="default")
    command(doctor, "say what on this machine is missing")
    command(ops, "print the fate of every ATen op").add_argument("match", nargs="?", default="")
    made = command(cache, "show, explain, trim, export, import or clear the cache on disk")
    made.add_argument("action", choices=list(CACHE))
    made.add_argument("target", nargs="?", default="", help="a bundle's file, or part of a key")
    made.add_argument("--folder", default=default_folder(), type=Path)
    made.add_argument("--mib", default=4096.0, type=float, help="what trim leaves")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except BrokenPipeError:  # the reader of our output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
