"""Events become an Explanation, text, numbers and a page, whoever emitted them."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dovetail.events import Event, EventStream
from dovetail.explain.query import Explanation, explain_events, stats
from dovetail.explain.views import view_fusion
from dovetail.ir.expr import ZERO, sym
from dovetail.ir.graph import Graph, GraphBuilder
from dovetail.ir.loop import Buffer, BufferRef, Extern, Loops, Nest, Range, Write, load, scalar
from dovetail.ir.schedule import Group, Schedule
from dovetail.ir.types import F32, tensor_type
from dovetail.logs import KNOWN, Progress, closing_line, start_logging
from dovetail.util.loc import Loc

HERE = __file__
T = tensor_type((8, 64), F32)


def make_graph() -> Graph:
    build = GraphBuilder("forward")
    x = build.input("x", T)
    y = build.call("prims.exp", (x,), T, name="y", loc=Loc(HERE, 12, "f"))
    return build.finish([build.call("aten.mm.default", (y, y), T, name="z", loc=Loc(HERE, 13, "f"))])


def make_schedule() -> Schedule:
    """y = exp(x); w = y + y, as one kernel with y internal; z = mm(w, w)."""
    i = sym("i", 0, 511)
    over = (Range(i, sym("n") * 0 + 512),)
    y = load("y", i, F32)
    nests = (
        Nest(
            "n0",
            over,
            (),
            (Write(("y",), i, scalar("exp", (load("x", i, F32),), F32)),),
            Loc(HERE, 12),
            ("y",),
        ),
        Nest("n1", over, (), (Write(("w",), i, scalar("add", (y, y), F32)),), Loc(HERE, 12), ("w",)),
    )
    ref = BufferRef("w", T, ZERO)
    mm = Extern("z", "aten.mm.default", (ref, ref), (), ("z",), loc=Loc(HERE, 13))
    buffers = (Buffer("x", T, "input"), Buffer("y", T), Buffer("w", T), Buffer("z", T, "output"))
    loops = Loops("forward", buffers, (*nests, mm), (BufferRef("z", T, ZERO),), ("x",), "t")
    return Schedule(loops, (Group("kernel_exp_add", nests, 1, ("y",)), mm))


def make_events() -> list[Event]:
    stream = EventStream()
    emit = stream.emit
    loc = Loc(HERE, 12, "f")
    emit("stage", unit="graph_0", stage="20.joint", seconds=0.01, value=make_graph())
    emit("stage", unit="graph_0", stage="60.schedule", seconds=0.002, value=make_schedule())
    emit("stage", unit="graph_0", stage="80.program", seconds=0.001, value="</script><b>text")
    emit("graph", unit="graph_0", function="f", loc=loc, ops=2, inputs=1, whole=False, lines=(loc, loc))
    for _ in range(2):
        emit(
            "graph_break",
            function="f",
            code="B07",
            text="call to print",
            hint="move it",
            loc=Loc(HERE, 14, "f"),
        )
    emit("skip", function="g", code="B11", text="nothing to gain", loc=Loc("<string>", 1, "g"))
    emit("recompile", function="f", reason="x: expected size 8 at dim 0, got 16", entries=1, loc=loc)
    emit("limit", function="f", reason="x: size", entries=8, loc=loc)
    emit(
        "kernel",
        unit="graph_0",
        name="kernel_exp_add",
        language="cpp",
        bytes_moved=4096,
        origins=("y", "w"),
        text="void k();",
    )
    emit("fallback", unit="graph_0", op="aten.sort.default", loc=Loc(HERE, 13, "f"))
    emit("fusion", unit="graph_0", subject="n0 with n2", code="F01", text="different devices")
    emit("guards", function="f", value=lambda: ("x tensor float32",))
    emit("partition", unit="graph_0", saved_bytes=2048, saved=("y: f32[8, 64]",), recomputed=("a", "b"))
    emit("cache", what="hit", key="k")
    emit("compile", function="f", seconds=0.25)
    emit("slow", function="f", text="compiled 2 ms, eager 1 ms", compiled_seconds=0.002, eager_seconds=0.001)
    emit("call", function="f", seconds=0.25)
    emit("call", function="f", seconds=1e-5)
    emit("cudagraph", unit="graph_0", used=False, reason="on the CPU")
    return stream.events


@pytest.fixture(scope="module")
def found() -> Explanation:
    return explain_events(make_events())


def test_explanation_holds_what_was_emitted(found: Explanation) -> None:
    (graph,) = found.graphs
    assert (graph.function, graph.ops, graph.whole, len(graph.lines)) == ("f", 2, False, 1)
    assert [(b.code, b.count, b.place.line) for b in found.graph_breaks] == [("B07", 2, 14)]
    assert [b.kind for b in found.breaks] == ["graph_break", "skip"]
    assert [r.limit for r in found.recompiles] == [False, True]
    assert found.fallbacks == {"aten.sort.default": 1}
    assert found.compile_seconds == 0.25 and found.bytes_moved == 4096
    assert list(found.seconds) == ["20.joint", "60.schedule", "80.program"]


def test_lines_say_what_became_of_them(found: Explanation) -> None:
    first, second = found.lines
    assert (first.place.line, first.captured, first.kernels) == (12, 1, ("kernel_exp_add",))
    assert (second.place.line, second.libraries, second.fallbacks) == (
        13,
        ("aten.mm.default",),
        ("aten.sort.default",),
    )


def test_fusion_view_counts_traffic() -> None:
    view = view_fusion("u", make_schedule())
    assert view is not None and view_fusion("u", "something else") is None
    kernel, library = view.groups
    size = 8 * 64 * 4
    assert (kernel.bytes_before, kernel.bytes_after) == (4 * size, 2 * size)
    assert (library.kind, library.bytes_after) == ("library", 2 * size)


def test_text_tells_it(found: Explanation) -> None:
    text = str(found)
    assert text.startswith(
        "1 graph, 2 graph breaks, 1 recompile, 1 kernel (4.0 KiB moved), 1 fallback, 0.25 s"
    )
    for part in (
        "test_explain.py:14 in f: B07 call to print; hint: move it  (2 times)",
        "limit of 8 reached",
        "F01",
        "2 ops computed again",
    ):
        assert part in text, part
    assert str(Explanation()).startswith("0 graphs")


def test_stats_are_exact_though_events_are_dropped() -> None:
    stream = EventStream(limit=10)
    for _ in range(50):
        stream.emit("graph_break", code="B01")
        stream.emit("stage", stage="50.loops", seconds=0.5)
    found = stats(stream)
    assert found["graph_breaks"] == 50
    assert {"graphs", "graph_breaks", "recompiles", "kernels", "fallbacks", "compile_seconds"} <= set(found)


def test_page_is_whole_and_self_contained(found: Explanation, tmp_path: Path) -> None:
    page = found.html(tmp_path / "sub" / "report.html").read_text()
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org)", page.split('id="content">')[0])
    content = re.search(r'id="content">(.*?)</script>', page, re.S)
    assert content and json.loads(content[1])["stages"][2]["text"] == "</script><b>text"
    assert page.split("<style>")[0].count("@") == 0


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_every_tab_of_the_page_draws(found: Explanation, tmp_path: Path) -> None:
    for explanation, wanted in (
        (found, ("kernel_exp_add", "B07 call to print", "y = prims.exp(x)")),
        (Explanation(), ()),
    ):
        page = explanation.html(tmp_path / "report.html")
        run = subprocess.run(
            ["node", str(Path(__file__).with_name("page.js")), str(page)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout.count("== ") == 6
        for text in wanted:
            assert text in run.stdout, text


# -- logs ------------------------------------------------------------------------------------------


def logged(names: str) -> str:
    stream, out = EventStream(), io.StringIO()
    start_logging(stream, names, out)
    for event in make_events():
        stream.emit(event.kind, **event.fields)
    return out.getvalue()


@pytest.mark.parametrize(
    ("names", "there", "not_there"),
    [
        ("graph_breaks", "B07 call to print\n    hint: move it", "recompile"),
        ("recompiles", "expected size 8 at dim 0, got 16", "B07"),
        ("joint", "y = prims.exp(x)", "B07"),
        ("schedule", "kernel_exp_add", "prims.exp"),
        ("output_code", "<b>text", "kernel_exp_add"),
        ("stages", "60.schedule of graph_0: 2.0 ms", "B07"),
        ("guards", "x tensor float32", "B07"),
        ("perf, slow", "compiled_seconds=0.002", "B07"),
        ("all", "B07", "never"),
    ],
)
@pytest.mark.filterwarnings("ignore:DOVETAIL_LOGS")
def test_logs_print_what_was_asked_for(names: str, there: str, not_there: str) -> None:
    text = logged(names)
    assert there in text and not_there not in text


def test_unknown_log_name_is_said_and_the_rest_works() -> None:
    with pytest.warns(UserWarning, match="unknown brakes; known names are .*graph_breaks"):
        assert "B07" in logged("brakes,graph_breaks")
    assert logged("") == ""
    assert {
        "graph_breaks",
        "recompiles",
        "guards",
        "output_code",
        "graph",
        "joint",
        "schedule",
        "fusion",
        "cudagraphs",
        "perf",
        "stages",
        "all",
    } <= set(KNOWN)


def test_a_program_that_was_held_up_says_so_at_its_end() -> None:
    stream = EventStream()
    assert closing_line(stream) == ""
    for event in make_events():
        stream.emit(event.kind, **event.fields)
    line = closing_line(stream)
    assert "2 graph breaks, 1 functions at their recompile limit, 1 graphs slower than eager" in line
    assert "test_explain.py:14 B07" in line and "\n" not in line


def test_a_long_compile_shows_a_line_and_takes_it_away() -> None:
    out = io.StringIO()
    progress = Progress(out)
    for at, kind, stage in ((0.1, "stage", "10.joint"), (0.5, "stage", "50.loops"), (0.6, "compile", "")):
        progress(Event(kind, {"unit": "graph_0", "stage": stage}, at))
    assert out.getvalue() == ""
    for at, kind, stage in ((1.0, "stage", "10.joint"), (3.5, "stage", "50.loops"), (3.6, "compile", "")):
        progress(Event(kind, {"unit": "graph_0", "stage": stage}, at))
    assert "compiling graph_0: 50.loops, 2 s" in out.getvalue() and out.getvalue().endswith("\r\033[K")
