"""A folder of entries addressed by their key: safe with many processes, crashes and bad disks.

    store = Store(default_folder())
    store.put(key, content)        -> the file, or None when it could not be written
    store.get(key)                 -> the content, or None
    store.path(key)                -> the file holding just the content (to dlopen it), or None

An entry is two files: `ab/cpp-abcd….bin` with the content as it is and `ab/cpp-abcd….sum` with its checksum,
size and parts of its key. Both are written under another name and renamed, content first, so a reader sees a
whole entry or none. Whatever goes wrong (a full disk, a read-only folder, damage) is a miss, with an
event that says so. The parts of a key are kept (long ones as their hash), so that `dovetail cache explain`
can say which of them differs between what is wanted and what is there.

    store.find(program_key(graph, options, target)) -> Program | None;  store.keep(key, program, parts)
"""
from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import tarfile
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any, Final

from dovetail.events import EVENTS
from dovetail.ir.expr import symbols
from dovetail.ir.graph import Graph, Node, exprs_in, swapped
from dovetail.ir.program import Program
from dovetail.ir.types import Type
from dovetail.options import Options
from dovetail.util.noun import Noun

TRIM_EVERY: Final = 50
"""Entries written by one process between two looks at the size, which is guessed from one of the folders."""
FOLDERS: Final = 256

_KEY: Final = re.compile(r"[0-9a-z][0-9a-z_.-]{7,127}")


def default_folder() -> Path:
    """$DOVETAIL_CACHE, or dovetail in the user's cache folder."""
    if chosen := os.environ.get("DOVETAIL_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dovetail"


@functools.cache
def store_in(folder: Path) -> Store:
    """The one store of this process for a folder."""
    return Store(folder)


class Stored(Noun):
    """One entry as the listing shows it. `parts` is what its key was made of."""

    key: str
    bytes: int
    used: float
    parts: Mapping[str, str]


class Store:
    def __init__(self, folder: Path | str, limit: int = 4 << 30) -> None:
        self.folder, self.limit, self.puts, self.is_told = Path(folder), limit, 0, False
        self.known: dict[str, Program] = {}
        """Programs that this process made or read."""

    # -- one entry

    def _file(self, key: str, suffix: str = ".bin") -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"a key is 8 to 128 of 0-9 a-z _ . -, got {key!r}")
        return self.folder / key.rpartition("-")[2][:2] / f"{key}{suffix}"

    def path(self, key: str) -> Path | None:
        """The verified file of an entry. Its time of last use is set, which trim() goes by."""
        return None if self.get(key) is None else self._file(key)

    def get(self, key: str) -> bytes | None:
        file = self._file(key)
        try:
            record = json.loads(self._file(key, ".sum").read_text())
            content = file.read_bytes()
        except FileNotFoundError:
            EVENTS.emit("cache", what="miss", key=key)
            return None
        except (OSError, ValueError) as error:
            EVENTS.emit("cache", what="damaged", key=key, text=str(error))
            return None
        if not isinstance(record, dict) or record.get("sha256") != hashlib.sha256(content).hexdigest():
            EVENTS.emit("cache", what="damaged", key=key, text="checksum differs")
            self.remove(key)
            return None
        EVENTS.emit("cache", what="hit", key=key)
        try:
            os.utime(file)
        except OSError as error:  # a folder we may only read: the entry is still good
            EVENTS.emit("cache", what="read-only", key=key, text=str(error))
        return content

    def put(self, key: str, content: bytes, parts: Mapping[str, str] | None = None) -> Path | None:
        """Write an entry, atomically. None when the disk does not take it; the compile goes on without."""
        file = self._file(key)
        digest = hashlib.sha256(content).hexdigest()
        record = {"sha256": digest, "bytes": len(content), "parts": dict(parts or {})}
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, content)
            write_whole(self._file(key, ".sum"), json.dumps(record).encode())
        except OSError as error:
            EVENTS.emit("cache", what="unwritable", key=key, text=str(error))
            text = f"Dovetail's cache {self.folder} cannot be written, other processes compile again: {error}"
            was_told, self.is_told = self.is_told, True
            with suppress(UserWarning):  # which is no error where warnings are errors
                warnings.warn(text, stacklevel=2) if not was_told else None
            return None
        self.puts += 1
        is_due = self.puts % TRIM_EVERY == 0
        if is_due and FOLDERS * sum(size for _, size, _ in sizes(file.parent)) > self.limit:
            self.trim(self.limit // 10 * 9)
        return file

    def remove(self, key: str) -> None:
        for suffix in (".sum", ".bin"):
            try:
                self._file(key, suffix).unlink(missing_ok=True)
            except OSError as error:
                EVENTS.emit("cache", what="unwritable", key=key, text=str(error))

    # -- programs: one that was seen before skips lowering, scheduling and codegen

    def find(self, key: str) -> Program | None:
        if key in self.known:
            return self.known[key]
        content = self.get(key)
        if content is None:
            return None
        try:
            program = _Nouns(io.BytesIO(content)).load()
            if not isinstance(program, Program):
                raise pickle.UnpicklingError(f"a {type(program).__name__}")
        except (pickle.PickleError, AttributeError, EOFError, IndexError, TypeError, ImportError) as error:
            EVENTS.emit("cache", what="damaged", key=key, text=str(error))
            return None
        self.known[key] = program
        return program

    def keep(self, key: str, program: Program, parts: dict[str, str]) -> None:
        self.known[key] = program
        try:
            content = pickle.dumps(program)
            _Nouns(io.BytesIO(content)).load()  # what cannot be read back is not written
        except (pickle.PickleError, AttributeError, TypeError) as error:
            EVENTS.emit("cache", what="uncachable", key=key, text=str(error))
            return
        self.put(key, content, parts)

    # -- all of them

    def entries(self) -> Iterator[Stored]:
        for summed in sorted(self.folder.glob("??/*.sum")):
            try:
                record = json.loads(summed.read_text())
                used = summed.with_suffix(".bin").stat().st_mtime
                yield Stored(summed.stem, int(record["bytes"]), used, record["parts"])
            except (OSError, ValueError, KeyError, TypeError):
                yield Stored(summed.stem, 0, 0.0, {"damaged": "yes"})

    def trim(self, limit: int | None = None) -> int:
        """Remove what was used longest ago until the rest fits; how many entries went. Left-overs of
        writes that a crash interrupted go as well, once they are an hour old."""
        left = self.limit if limit is None else limit
        removed = 0
        everything = [entry for folder in self.folder.glob("??") for entry in sizes(folder)]
        for _, size, key in sorted(everything, reverse=True):
            left -= size
            if left < 0:
                self.remove(key)
                removed += 1
        for loose in self.folder.glob("??/.*.part"):
            with suppress(FileNotFoundError):  # its writer has just finished
                if time.time() - loose.stat().st_mtime > 3600:
                    loose.unlink(missing_ok=True)
        return removed

    def export(self, target: Path) -> int:
        """All entries in one file that import_ takes on another machine."""
        entries = [entry for entry in self.entries() if "damaged" not in entry.parts]
        with tarfile.open(target, "w:gz") as bundle:
            for entry in entries:
                for suffix in (".bin", ".sum"):
                    file = self._file(entry.key, suffix)
                    bundle.add(file, arcname=str(file.relative_to(self.folder)))
        return len(entries)

    def import_(self, source: Path) -> int:
        """Take the entries of a bundle; every one is checked, a damaged one left out."""
        taken = 0
        with tempfile.TemporaryDirectory() as room:
            with tarfile.open(source) as bundle:
                bundle.extractall(room, filter="data")
            other = Store(room)
            for entry in other.entries():
                content = other.get(entry.key) if "damaged" not in entry.parts else None
                if content is not None and self.put(entry.key, content, entry.parts):
                    taken += 1
        return taken

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def sizes(folder: Path) -> Iterator[tuple[float, int, str]]:
    """When each entry of a folder was used last, its bytes, and its key; no file is read for it."""
    for file in folder.glob("*.bin"):
        with suppress(FileNotFoundError):  # another process has just removed it
            seen = file.stat()
            yield seen.st_mtime, seen.st_size, file.stem


def write_whole(file: Path, content: bytes) -> None:
    """Under another name first: a reader never sees half a file, and of two writers one wins."""
    handle, loose = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content)
        os.chmod(loose, 0o644)  # a folder may be shared
        os.replace(loose, file)
    except BaseException:
        Path(loose).unlink(missing_ok=True)
        raise


# -- keys ------------------------------------------------------------------------------------------

SHORT = 200
"""Longest part that is kept as it is."""


def key_of(kind: str, parts: Mapping[str, str]) -> str:
    joined = "\0".join(f"{name}\0{value}" for name, value in sorted(parts.items()))
    return f"{kind}-{hashlib.sha256(joined.encode()).hexdigest()[:40]}"


def short_parts(kind: str, parts: Mapping[str, str]) -> dict[str, str]:
    """The parts as an entry keeps them."""
    return {"kind": kind} | {
        name: value if len(value) <= SHORT else "sha256:" + hashlib.sha256(value.encode()).hexdigest()[:16]
        for name, value in parts.items()
    }


def explain_miss(wanted: Mapping[str, str], entries: Iterable[Stored]) -> list[str]:
    """How `wanted` (short parts) differs from the entry nearest to it, part by part."""
    of_kind = [entry for entry in entries if entry.parts.get("kind") == wanted.get("kind")]
    if not of_kind:
        return [f"no entry of kind {wanted.get('kind')}"]

    def differing(entry: Stored) -> list[str]:
        names = sorted({*wanted, *entry.parts})
        return [name for name in names if wanted.get(name) != entry.parts.get(name)]

    nearest = min(of_kind, key=lambda entry: len(differing(entry)))
    return [
        f"{name}: wanted {wanted.get(name)}, stored {nearest.parts.get(name)}" for name in differing(nearest)
    ] or ["the entry is there"]


# -- programs by the graphs they were made of


KIND: Final = "program"
PLAIN: Final = {"complex", "frozenset", "set", "slice", "range"}
"""Builtin types that a stored program may hold besides those pickle knows by itself."""


class _Place(str):
    """A node by its number; written without quotes, unlike a text."""

    __repr__ = str.__str__


def content_of(graph: Graph) -> str:
    """Equal for graphs that compute the same in the same way, whatever their values are called."""
    places: dict[Node, _Place] = {}
    types: dict[Type, str] = {}
    lines: list[str] = []
    for node in (*graph.inputs, *graph.nodes):
        text = types.get(node.type) or types.setdefault(node.type, repr(node.type))
        kwargs = node.kwargs and swapped(node.kwargs, places)
        lines.append(f"{node.op}{swapped(node.args, places)}{kwargs}{text}")
        places[node] = _Place(f"%{len(places)}")
    lines += [repr(swapped(graph.outputs, places)), repr(graph.updates)]
    found = {symbol: None for type in types for expr in exprs_in(type) for symbol in symbols(expr)}
    ranges = sorted(f"{symbol.name}:{symbol.lo}..{symbol.hi}" for symbol in found)
    return "\n".join([*lines, *ranges])


@functools.cache
def compiler_text() -> str:
    """A hash of Dovetail's own sources: what another version made is not taken."""
    digest = hashlib.sha256()
    for folder, inner, names in os.walk(os.path.dirname(os.path.dirname(__file__))):
        inner.sort()
        for name in sorted(name for name in names if name.endswith((".py", ".h"))):
            with open(os.path.join(folder, name), "rb", buffering=0) as file:
                digest.update(file.read())
    return digest.hexdigest()


def program_key(graph: Graph, options: Options, target: Iterable[str]) -> tuple[str, dict[str, str]]:
    """The key and what it was made of: the graph (ops, arguments, types, symbols with their ranges; no names,
    not the user's lines), the options, the `target` that is compiled for (the CPU's vectors, a GPU's name,
    torch's version), and the text of Dovetail itself, so any change of the compiler is a miss."""
    parts = {
        "graph": content_of(graph),
        "options": repr(astuple(options)),
        "target": " ".join(target),
        "compiler": compiler_text(),
    }
    return key_of(KIND, parts), short_parts(KIND, parts)


class _Nouns(pickle.Unpickler):
    """Loads nothing but Dovetail's own nouns: a damaged or foreign file cannot do harm."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("dovetail.ir.") or (module == "builtins" and name in PLAIN):
            found = super().find_class(module, name)
            if getattr(found, "__module__", None) == module:  # not what it imports: `re.enum.sys.exit`
                return found
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a program")
