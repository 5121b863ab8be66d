"""Processes that compile Triton texts: side by side, replaced when they die, gone when idle."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("triton")

from dovetail.runtime.gpu import Workers  # noqa: E402

TEXT = """
@triton.jit
def double(x, o, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(o + i, tl.load(x + i) * 2)
"""


def request(folder, block=128, text=TEXT):
    return {
        "text": text, "prelude": "import triton\n", "symbol": "double", "signature": ("*fp32", "*fp32"),
        "unaligned": (), "constants": {"XBLOCK": block}, "warps": 4, "stages": 1, "fuses": False,
        "capability": 90, "folder": str(folder),
    }  # fmt: skip


@pytest.fixture
def workers(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    made = Workers()
    made.start(2)
    yield made
    made.rest()
    assert made.count == 0


def test_requests_from_several_threads(workers, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda n: workers.compile(request(tmp_path, 64 << n)), range(4)))
    assert all(answer["name"] == "double" and answer["cubin"][1:4] == b"ELF" for answer in answers)
    assert len({answer["cubin"] for answer in answers}) > 1


def test_a_text_that_does_not_compile_is_told(workers, tmp_path):
    wrong = workers.compile(request(tmp_path, text=TEXT.replace("* 2", "* nothing")))
    assert "nothing" in wrong["error"]
    assert "cubin" in workers.compile(request(tmp_path))


def test_a_worker_that_died_is_replaced(workers, tmp_path):
    for _ in range(2):
        worker = workers.idle.get()
        os.kill(worker.process.pid, signal.SIGKILL)
        workers.idle.put(worker)
    answers = [workers.compile(request(tmp_path)) for _ in range(3)]
    assert [("error" in answer) for answer in answers] == [True, True, False]
