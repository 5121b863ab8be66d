"""The cache of compiled text: hits, damage, folders that cannot be written, several processes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.errors import BuildFailed
from dovetail.events import EVENTS
from dovetail.options import Options
from dovetail.runtime.build import HOST_FLAGS, begin_units, build, open_library

TEXT = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    return tmp_path


def outcomes() -> list[object]:
    return [event["what"] for event in EVENTS.of("cache")]


def test_second_build_is_a_hit(folder: Path) -> None:
    first = build(TEXT, HOST_FLAGS, Options())
    EVENTS.clear()
    assert build(TEXT, HOST_FLAGS, Options()) == first
    assert outcomes() == ["hit"]
    assert open_library(first).answer() == 42


def test_damaged_file_is_a_miss(folder: Path) -> None:
    path = build(TEXT, HOST_FLAGS, Options())
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[: len(content) // 2])
    assert open_library(build(TEXT, HOST_FLAGS, Options())).answer() == 42
    assert path.read_bytes() == content


def test_unwritable_folder_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("DOVETAIL_CACHE", str(blocked))
    assert open_library(build(TEXT, HOST_FLAGS, Options())).answer() == 42


def test_cache_off_leaves_nothing(folder: Path) -> None:
    build(TEXT, HOST_FLAGS, Options(cache=False))
    assert not list(folder.rglob("*.bin"))


def test_compiler_errors_show_the_compiler(folder: Path) -> None:
    with pytest.raises(BuildFailed, match="error"):
        build("this is not C++", HOST_FLAGS, Options())


def test_units_are_built_together(folder: Path) -> None:
    texts = [(f'extern "C" int number() {{ return {k}; }}\n', HOST_FLAGS) for k in range(4)]
    paths = [unit.finish() for unit in begin_units(texts, Options())]
    assert [open_library(path).number() for path in paths] == [0, 1, 2, 3]


def test_files_are_not_left_half_written(folder: Path) -> None:
    build(TEXT, HOST_FLAGS, Options())
    assert not list(folder.rglob("*.part"))
    assert all(os.stat(path).st_mode & stat.S_IROTH for path in folder.rglob("*.bin"))


def test_the_folder_of_a_process_is_its_own(folder: Path) -> None:
    """A child that ends as Python does tidies up after itself only; and a folder that somebody removed is made again."""
    child = "import os, sys; from dovetail.runtime.build import *; from dovetail.options import Options; none = Options(cache=False)\n"
    child += f"text = {TEXT!r}\nmade = build(text, HOST_FLAGS, none)\npid = os.fork()\n"
    child += "if not pid: sys.exit(build(text, HOST_FLAGS, none) == made)\n"
    child += "assert os.waitpid(pid, 0)[1] == 0 and made.exists()\nshutil.rmtree(made.parent)\n"
    child += "assert open_library(build(text, HOST_FLAGS, none)).answer() == 42; print('ended')\n"
    ran = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=False)
    assert ran.stdout == "ended\n", ran.stderr
