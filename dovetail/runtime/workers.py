"""Processes that compile Triton texts side by side.

    WORKERS.start(8); WORKERS.compile(request) -> answer        from as many threads as one likes

Triton's compiler keeps the interpreter lock for most of its work, so threads gain nothing. A worker is a
fresh interpreter with Triton alone (see triton_worker.py); it is up in a fraction of a second, while the
rest of the compiler is still at work, and goes when all is compiled. Where no process can be
started, requests are served in this process; where one dies, its request has failed.
"""
from __future__ import annotations

import importlib
import os
import pickle
import struct
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from dovetail.errors import BuildFailed
from dovetail.events import EVENTS
from dovetail.util.noun import Noun, field

PROGRAM: Final = Path(__file__).with_name("triton_worker.py")
MOST: Final = 16
LENGTH: Final = struct.Struct("<Q")


class Lost(Exception):
    """The worker is gone."""


class Worker(Noun, frozen=False, eq=False):
    process: subprocess.Popen[bytes]

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        to, from_ = self.process.stdin, self.process.stdout
        assert to is not None and from_ is not None
        content = pickle.dumps(request)
        try:
            to.write(LENGTH.pack(len(content)) + content)
            to.flush()
        except OSError as error:
            raise Lost from error
        head = from_.read(LENGTH.size)
        if len(head) < LENGTH.size:
            raise Lost
        return pickle.loads(from_.read(LENGTH.unpack(head)[0]))  # type: ignore[no-any-return]

    def close(self) -> None:
        """It ends when its input does; nobody waits for that."""
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except BrokenPipeError:  # what was left to write has no reader any more
                continue


class Workers(Noun, frozen=False, eq=False):
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
        except Lost:
            assert worker is not None
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
    if find_spec("triton") is None:
        raise BuildFailed(output="the triton package is not installed: pip install triton")
    worker = importlib.import_module("dovetail.runtime.triton_worker")
    return worker.compile_text(request)  # type: ignore[no-any-return]


WORKERS: Final = Workers()
