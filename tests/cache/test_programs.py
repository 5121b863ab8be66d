"""A graph seen before gives the program made of it; anything else is a miss."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from dovetail.cache.store import Store, content_of, program_key
from dovetail.ir.expr import Expr, sym
from dovetail.ir.graph import Graph, GraphBuilder, Node
from dovetail.ir.program import Kernel, Program, PythonCall, Result
from dovetail.ir.types import F32, tensor_type
from dovetail.options import Options
from dovetail.util.loc import Loc

PROGRAM = Program(
    "p", "cpu", (Kernel("k", "cpp", "void k();", "key", 8, ("a",)),), "int run();", 1, 1,
    (PythonCall("aten.sort.default", (slice(0, 1), 1.5), (), 1, 1),), "t", ("x",), (Result("int", sym("s0", 2) + 1),),
)  # fmt: skip


def make_graph(names: str = "xy", size: Expr | int = 8, factor: float = 2.0, line: int = 1) -> Graph:
    build = GraphBuilder()
    type = tensor_type((size, 4), F32)
    x = build.input(names[0], type)
    y = build.call("prims.mul", (x, factor), type, name=names[1], loc=Loc("f.py", line))
    return build.finish([y])


@pytest.fixture
def programs(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def test_names_and_lines_do_not_matter_but_contents_do() -> None:
    same = content_of(make_graph())
    assert content_of(make_graph("ab", line=9)) == same
    others = [
        make_graph(size=9),
        make_graph(factor=3.0),
        make_graph(factor=-0.0),
        make_graph(factor=0.0),
        make_graph(factor=2),
    ]  # type: ignore[arg-type]
    texts = {same, *map(content_of, others)}
    assert len(texts) == 6


def test_all_fields_of_a_graph_are_thought_of() -> None:
    """A key has all of a graph's content: whoever adds a field adds it there too."""
    assert Node.__match_args__ == ("op", "args", "type", "name", "kwargs", "loc")
    assert Graph.__match_args__ == ("name", "inputs", "nodes", "outputs", "updates")
    graph = make_graph()
    assert content_of(replace(graph, updates=((0, 0),))) != content_of(graph)
    assert content_of(replace(graph, name="other")) == content_of(graph)


def test_ranges_of_symbols_matter() -> None:
    assert content_of(make_graph(size=sym("s", 2, 64))) != content_of(make_graph(size=sym("t", 2, 64)))
    assert "s:2..64" in content_of(make_graph(size=sym("s", 2, 64)))


def test_options_and_target_matter() -> None:
    graph = make_graph()
    keys = {
        program_key(graph, Options(), ("avx512",))[0],
        program_key(graph, Options(), ("avx2",))[0],
        program_key(graph, replace(Options(), fuse=False), ("avx512",))[0],
    }
    assert len(keys) == 3


def test_kept_programs_are_found_by_another_process(programs: Store) -> None:
    key, parts = program_key(make_graph(), Options(), ("avx512",))
    assert programs.find(key) is None
    programs.keep(key, PROGRAM, parts)
    assert programs.find(key) is PROGRAM
    again = Store(programs.folder).find(key)
    assert again == PROGRAM and again is not PROGRAM
    (entry,) = programs.entries()
    assert entry.parts["target"] == "avx512"


def test_only_programs_come_out(programs: Store) -> None:
    key, _ = program_key(make_graph(), Options(), ())

    class Evil:
        def __reduce__(self) -> object:
            return os.system, ("touch evil",)

    # what a module of ours imports is not ours: exec, found through dovetail.ir.parse
    borrowed = b"\x80\x04\x8c\x11dovetail.ir.parse\x8c\x12re.enum.bltns.exec\x93\x8c\x11open('evil', 'w')\x85R."
    damaged = (b"", b"garbage", pickle.dumps(PROGRAM)[:-20])
    for content in (pickle.dumps(Evil()), borrowed, pickle.dumps(3), *damaged):
        programs.put(key, content)
        assert programs.find(key) is None
    assert not Path("evil").exists()


def test_what_cannot_be_stored_is_still_known_here(programs: Store) -> None:
    key, parts = program_key(make_graph(), Options(), ())
    odd = replace(PROGRAM, python_calls=(lambda: None,))
    programs.keep(key, odd, parts)
    assert programs.find(key) is odd and not list(programs.entries())
