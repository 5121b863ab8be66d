"""Shared by all tests: `pytest --update` rewrites generated pages and expected texts; one thread for torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
os.environ.setdefault("DOVETAIL_CHECK", "1")  # verify after every stage, and run every stage

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite generated pages and expected texts")


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests share one cache folder of this run, never the user's."""
    folder = tmp_path_factory.getbasetemp() / "dovetail-cache"
    monkeypatch.setenv("DOVETAIL_CACHE", str(folder))
