"""The store keeps what it is given, and anything that goes wrong is a miss."""

from __future__ import annotations

import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from dovetail.cache.store import Store, explain_miss, key_of, short_parts

KEY = "kernel-0123456789abcdef"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def test_what_is_put_is_got(store: Store) -> None:
    assert store.get(KEY) is None
    path = store.put(KEY, b"content", {"torch": "2.13"})
    assert path is not None and path.read_bytes() == b"content"
    assert store.get(KEY) == b"content" and store.path(KEY) == path
    (entry,) = store.entries()
    assert (entry.key, entry.bytes, entry.parts) == (KEY, 7, {"torch": "2.13"})


def test_empty_content_is_an_entry(store: Store) -> None:
    store.put(KEY, b"")
    assert store.get(KEY) == b""


@pytest.mark.parametrize("damage", [b"", b"conten", b"c0ntent", b"content and more"])
def test_damaged_content_is_a_miss_and_is_replaced(store: Store, damage: bytes) -> None:
    path = store.put(KEY, b"content")
    assert path is not None
    path.write_bytes(damage)
    assert store.get(KEY) is None
    store.put(KEY, b"content")
    assert store.get(KEY) == b"content"


@pytest.mark.parametrize("record", [b"", b"{", b"[]", b"null", b'{"sha256": 3}', b"\xff\xfe"])
def test_damaged_record_is_a_miss(store: Store, record: bytes) -> None:
    path = store.put(KEY, b"content")
    assert path is not None
    path.with_suffix(".sum").write_bytes(record)
    assert store.get(KEY) is None
    list(store.entries())
    store.trim()
    assert store.put(KEY, b"content") and store.get(KEY) == b"content"


def test_crash_between_the_two_files_is_a_miss(store: Store) -> None:
    path = store.put(KEY, b"content")
    assert path is not None
    path.with_suffix(".sum").unlink()
    assert store.get(KEY) is None


def test_a_file_in_the_folders_place_is_a_miss(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    store = Store(blocked)
    assert store.put(KEY, b"content") is None
    assert store.get(KEY) is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_read_only_folder_still_serves(store: Store) -> None:
    store.put(KEY, b"content")
    for folder in (store.folder / "01", store.folder):
        folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert store.get(KEY) == b"content"
    assert store.put("kernel-fedcba9876543210", b"x") is None


def test_full_disk_is_no_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert store.put(KEY, b"content") is None
    assert store.get(KEY) is None
    assert not list(store.folder.glob("??/.*")), "an interrupted write leaves nothing behind"


def _write_and_read(folder: str, seed: int) -> None:
    store = Store(folder)
    for i in range(60):
        key = f"kernel-{(i * 7 + seed) % 10:016d}"
        content = key.encode() * 1000
        store.put(key, content)
        assert store.get(key) in (None, content)
        if i % 20 == seed % 20:
            store.trim(5 * 23_000)


def test_many_processes_share_one_folder(store: Store) -> None:
    context = multiprocessing.get_context("spawn")  # a fork would take along the locks of this process's threads
    processes = [context.Process(target=_write_and_read, args=(str(store.folder), seed), daemon=True) for seed in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 4


def test_trim_keeps_what_was_used_last(store: Store) -> None:
    for i in range(5):
        path = store.put(f"kernel-{i:016d}", bytes(100))
        assert path is not None
        os.utime(path, (1000 + i, 1000 + i))
    store.get("kernel-" + "0" * 16)
    assert store.trim(250) == 3
    assert {entry.key[-1] for entry in store.entries()} == {"0", "4"}


def test_many_entries_are_trimmed_while_written(tmp_path: Path) -> None:
    store = Store(tmp_path, limit=20_000)
    for i in range(200):
        store.put(f"kernel-{i * 37 % 256:02x}{i:014d}", bytes(400))
    assert 0 < sum(entry.bytes for entry in store.entries()) <= 40_000


def test_export_and_import(store: Store, tmp_path: Path) -> None:
    store.put(KEY, b"content", {"torch": "2.13"})
    store.put("kernel-fedcba9876543210", b"other")
    assert store.export(tmp_path / "bundle.tar.gz") == 2
    other = Store(tmp_path / "other")
    assert other.import_(tmp_path / "bundle.tar.gz") == 2
    assert other.get(KEY) == b"content"
    assert {entry.key: dict(entry.parts) for entry in other.entries()}[KEY] == {"torch": "2.13"}


def test_a_key_cannot_leave_the_folder(store: Store) -> None:
    for key in ("../../etc/passwd", "ab/cd/efgh", "", "UPPERCASE", ".hidden-key"):
        with pytest.raises(ValueError):
            store.put(key, b"")


def test_keys_say_what_differs(store: Store) -> None:
    here = {"text": "x" * 1000, "torch": "2.13"}
    store.put(key_of("kernel", here), b"", short_parts("kernel", here))
    wanted = here | {"torch": "2.11"}
    assert key_of("kernel", wanted) != key_of("kernel", here)
    assert explain_miss(short_parts("kernel", wanted), store.entries()) == ["torch: wanted 2.11, stored 2.13"]
    assert explain_miss(short_parts("kernel", here), store.entries()) == ["differs in nothing that is kept of its key"]
    assert explain_miss(short_parts("graph", here), store.entries()) == ["no entry of kind graph"]
