"""docs/walk.md shows what every stage makes of one function. `pytest tests/test_walk.py --update` rewrites it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.walk import MACHINE, STORY

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "walk.md"


@pytest.fixture(scope="module")
def walk() -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.walk"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_stage_is_on_the_page(walk: str) -> None:
    for name in STORY:
        assert f"\n## {name}" in walk, name
    assert walk.count("## 60.schedule") == 2, "forward and backward"


def test_the_page_is_up_to_date(walk: str, update: bool) -> None:
    if update:
        PAGE.write_text(walk)
    if sys.version_info[:2] != (3, 11) or not torch.__version__.startswith("2.13"):
        pytest.skip("written with Python 3.11 and torch 2.13")
    same = PAGE.read_text().split(MACHINE)[0] == walk.split(MACHINE)[0]
    assert same, "docs/walk.md is stale: run pytest tests/test_walk.py --update"
