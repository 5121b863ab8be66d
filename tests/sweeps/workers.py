"""Run many small tasks in worker processes that may crash, hang or grow, and keep every result.

    records = run_tasks("tests.sweeps.ops", ["add", "mul"], settings={...}, results=Path("ops.jsonl"))

A worker imports the module and calls its `run_task(name, settings) -> dict` for each name it is sent.
Results are appended to a JSON-lines file as they arrive; a second run with the same settings skips what is there, and an
interrupted one (Ctrl-C) ends with the summary of what it has. A crash or a timeout ends the worker, marks the task, and a
new worker goes on with the next. With `each_fresh` the worker
forks for every task: nothing of one task is left for the next, and the libraries are imported once.
"""
from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import platform
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
NOTES: Final = "\n## Notes\n"
START: Final = 900.0
"""Seconds that a worker may take to import what it needs."""


@dataclass(slots=True)
class Worker:
    """One subprocess with a line-based pipe in each direction."""

    process: subprocess.Popen[bytes]
    waiting: bytes = b""

    @staticmethod
    def start(module: str, settings: dict[str, Any], log: Path) -> Worker:
        command = [sys.executable, "-m", "tests.sweeps.workers", module, json.dumps(settings)]
        with log.open("ab") as errors:
            process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                                       process_group=0,
                                       env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"})
        worker = Worker(process)
        worker.read(START)  # on a busy machine imports take a minute, which is not the first task's
        return worker

    def ask(self, name: str, timeout: float) -> dict[str, Any] | None:
        """The task's record; None when the worker ended; TimeoutError when it takes too long."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(name.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        return self.read(timeout)

    def read(self, timeout: float) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        ends = time.monotonic() + timeout
        while b"\n" not in self.waiting:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, ends - time.monotonic()))
            if not ready:
                raise TimeoutError
            piece = os.read(self.process.stdout.fileno(), 1 << 16)
            if not piece:
                return None
            self.waiting += piece
        line, _, self.waiting = self.waiting.partition(b"\n")
        record: dict[str, Any] = json.loads(line)
        return record

    def stop(self) -> int:
        if self.process.stdin is not None:
            self.process.stdin.close()
        with contextlib.suppress(ProcessLookupError):  # nothing may be left of a worker that crashed
            os.killpg(self.process.pid, signal.SIGKILL)  # with the task it forked, if one is running
        return self.process.wait()


def run_tasks(
    module: str,
    names: Sequence[str],
    *,
    settings: dict[str, Any],
    results: Path,
    timeout: float = 60.0,
    each_fresh: bool = False,
    jobs: int = 1,
    show: Callable[[dict[str, Any]], str] = lambda record: str(record.get("status")),
) -> dict[str, dict[str, Any]]:
    """Run what is not in `results` yet, `jobs` at a time; print one progress line a task, return all records by name."""
    results.parent.mkdir(parents=True, exist_ok=True)
    asked = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    done = load_records(results, asked)
    todo = [name for name in names if name not in done]
    left, lock, stopped = iter(enumerate(todo)), threading.Lock(), threading.Event()
    if len(todo) < len(names):
        print(f"{len(names) - len(todo)} of {len(names)} are kept from before in {results}; --fresh forgets them", flush=True)

    def work() -> None:
        worker: Worker | None = None
        while not stopped.is_set():
            with lock:
                position, name = next(left, (-1, ""))
            if not name:
                break
            worker = worker or Worker.start(module, {**settings, "each_fresh": each_fresh}, results.with_suffix(".log"))
            started = time.monotonic()
            record, alive = ask_once(worker, name, timeout)
            record |= {"name": name, "wall": round(time.monotonic() - started, 2), "when": time.strftime("%Y-%m-%d")}
            if not alive or "CUDA error" in str(record.get("reason")):  # then every later call fails as well
                worker.stop()
                worker = None
            with lock:
                sink.write(json.dumps(record | {"asked": asked}) + "\n")
                sink.flush()
                done[name] = record
                print(f"[{position + 1}/{len(todo)}] {name:<44} {show(record)[:150]}", flush=True)
        if worker is not None:
            worker.stop()

    with results.open("a") as sink, ThreadPoolExecutor(jobs) as pool:
        working = [pool.submit(work) for _ in range(jobs)]
        try:
            for finished in working:
                finished.result()
        except KeyboardInterrupt:
            stopped.set()
            print("stopping when what runs has ended; the same command goes on from there", flush=True)
    return {name: done[name] for name in names if name in done}


def ask_once(worker: Worker, name: str, timeout: float) -> tuple[dict[str, Any], bool]:
    try:
        record = worker.ask(name, timeout)
    except TimeoutError:
        return {"status": "fail", "reason": f"timeout after {timeout:.0f} s"}, False
    if record is None:
        code = worker.process.wait()
        return {"status": "fail", "reason": f"worker died with code {code}"}, False
    return record, True


def load_records(results: Path, asked: str) -> dict[str, dict[str, Any]]:
    """The last whole record of each task with these settings; a line cut short by a kill is ignored."""
    records: dict[str, dict[str, Any]] = {}
    if results.exists():
        for line in results.read_text().splitlines():
            if line.endswith("}"):
                record = json.loads(line)
                if record.pop("asked", "") == asked:
                    records[record["name"]] = record
    return records


def serve(module_name: str, settings: dict[str, Any]) -> None:
    """The worker's side: names on stdin, records on the original stdout; prints of user code go to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if settings.get("memory_gib"):
        limit = int(settings["memory_gib"] * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    module = importlib.import_module(module_name)
    answers.write("{}\n")
    answers.flush()
    for line in sys.stdin:
        name = line.strip()
        if settings.get("each_fresh"):
            serve_in_fork(module, name, settings, answers)
        else:
            answer(module, name, settings, answers)


def answer(module: ModuleType, name: str, settings: dict[str, Any], answers: IO[str]) -> None:
    try:
        record = module.run_task(name, settings)
    except Exception as error:  # a task that raises is a result, not the end of the sweep
        record = {"status": "fail", "reason": short_error(error)}
    answers.write(json.dumps(record) + "\n")
    answers.flush()


def serve_in_fork(module: ModuleType, name: str, settings: dict[str, Any], answers: IO[str]) -> None:
    """The task in a child, so that what it leaves behind (memory, threads, patched classes) ends with it."""
    child = os.fork()
    if child == 0:
        answer(module, name, settings, answers)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        answers.write(json.dumps({"status": "fail", "reason": f"worker died with code {code}"}) + "\n")
        answers.flush()


def machine_line() -> str:
    """What every table of results says of where and when it was made."""
    return (f"Machine: {platform.machine()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, "
            f"torch {metadata.version('torch')}; {time.strftime('%Y-%m-%d')}.")


def write_page(name: str, text: str) -> None:
    """docs/results/<name>.md, less what a person wrote below `## Notes` there, which stays."""
    page = ROOT / f"docs/results/{name}.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    _, mark, notes = page.read_text().partition(NOTES) if page.exists() else ("", "", "")
    page.write_text(text.rstrip() + "\n" + mark + notes)


def short_error(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))
