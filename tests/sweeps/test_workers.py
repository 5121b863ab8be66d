"""Sweeps go on where they were, with the same settings only, and end when told to."""
from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.sweeps import workers
from tests.sweeps.workers import run_tasks


def run_task(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What the worker calls; this file is the sweep."""
    return {"status": settings["word"] + name}


def sweep(results: Path, names: str, word: str, **how: Any) -> dict[str, str]:
    records = run_tasks(__name__, names.split(), settings={"word": word}, results=results, **how)
    return {name: record["status"] for name, record in records.items()}


def test_results_are_kept_for_the_same_settings_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.jsonl"
    assert sweep(results, "a b", "one ") == {"a": "one a", "b": "one b"}
    assert sweep(results, "a c", "two ") == {"a": "two a", "c": "two c"}
    assert "kept" not in capsys.readouterr().out
    assert sweep(results, "a b c", "one ") == {"a": "one a", "b": "one b", "c": "one c"}
    assert "2 of 3 are kept from before" in capsys.readouterr().out
    assert len(results.read_text().splitlines()) == 5


def test_an_interrupt_ends_with_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noticed = threading.Event()

    def handle(*_: Any) -> None:
        noticed.set()
        raise KeyboardInterrupt

    def interrupt(record: dict[str, Any]) -> str:
        if record["name"] == "t2":  # whoever works waits here until the main thread, which is told, knows
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert noticed.wait(60)
        return str(record["status"])

    before = signal.signal(signal.SIGINT, handle)
    try:
        found = sweep(tmp_path / "results.jsonl", " ".join(f"t{number}" for number in range(500)), "ok ", show=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert 3 <= len(found) < 500 and "the same command goes on" in capsys.readouterr().out


def test_notes_of_a_page_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "ROOT", tmp_path)
    page = tmp_path / "docs/results/some.md"
    workers.write_page("some", "# Some\n\nfirst\n\n")
    assert page.read_text() == "# Some\n\nfirst\n"
    page.write_text(page.read_text() + "\n## Notes\nby hand\n")
    workers.write_page("some", "# Some\n\nsecond")
    assert page.read_text() == "# Some\n\nsecond\n\n## Notes\nby hand\n"
