"""Processes that compile Triton texts: side by side, replaced when they die, gone when idle."""

import ast
import inspect
import os
import signal
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("triton")

from triton.language import standard  # noqa: E402
from triton.runtime import JITFunction  # noqa: E402

from dovetail.runtime.gpu import Workers  # noqa: E402
from dovetail.runtime.triton_process import source_lines  # noqa: E402

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


def test_functions_of_the_library_are_linked_where_they_are_called(workers, tmp_path):
    text = TEXT.replace("tl.load(x + i) * 2", "libdevice.erfinv(tl.load(x + i))")
    assert "error" not in workers.compile(request(tmp_path, text=text))


def test_the_text_of_a_function_is_found_as_inspect_finds_it():
    functions = [member.fn for member in vars(standard).values() if isinstance(member, JITFunction)]
    assert len(functions) > 20
    for function in (*functions, source_lines, request):
        lines, start = source_lines(function)
        wanted, first = inspect.getsourcelines(function)
        assert start == first
        parsed = [ast.dump(ast.parse(textwrap.dedent("".join(found)))) for found in (lines, wanted)]
        assert parsed[0] == parsed[1]
