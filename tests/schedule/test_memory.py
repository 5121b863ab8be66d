"""Buffers that live at the same time have places of their own; dead ones are used again."""

from __future__ import annotations

import torch
from torch.fx import symbolic_trace

import dovetail
from dovetail import aot, codegen, lower, ops, passes
from dovetail.ir.parse import parse_graph
from dovetail.ir.schedule import Plan
from dovetail.options import Options
from dovetail.schedule import plan, schedule
from dovetail.schedule.memory import storage_bytes


def planned(fn: object, *shapes: tuple[int, ...], options: Options = Options()) -> Plan:
    with torch.no_grad():
        joint = aot.trace_joint(symbolic_trace(fn), [torch.randn(shape) for shape in shapes])
    return plan(schedule(lower.lower(passes.optimize(ops.decompose(joint.graph))), options))


def check_no_overlap(made: Plan) -> None:
    buffers = {b.name: b for b in made.schedule.loops.buffers}
    life: dict[str, tuple[int, int]] = {}
    for k, step in enumerate(made.schedule.steps):
        for name in (*step.read_buffers, *step.written_buffers):
            life[name] = (life.get(name, (k, k))[0], k)
    arena = {n: p.offset.value for n, p in made.places if p.kind == "arena" and p.offset is not None}
    for a, at_a in arena.items():
        for b, at_b in arena.items():
            if a < b and life[a][0] < life[b][1] and life[b][0] < life[a][1]:
                end_a, end_b = at_a + storage_bytes(buffers[a]).value, at_b + storage_bytes(buffers[b]).value
                assert end_a <= at_b or end_b <= at_a, (a, b)
        assert at_a % 64 == 0
        assert at_a + storage_bytes(buffers[a]).value <= made.arena_bytes.value


def mlp(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = torch.relu(x @ w) + 1
    return x


def test_layers_share_memory() -> None:
    made = planned(mlp, (32, 32), (32, 32))
    check_no_overlap(made)
    assert made.arena_bytes.value <= 2 * 32 * 32 * 4


def test_siblings_far_apart_do_not_wait_for_each_other_where_memory_matters() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.sin() @ w
        for _ in range(12):
            y = y @ w
        return y @ x.cos()

    at_ease, frugal = (planned(fn, (32, 32), (32, 32), options=Options(activation_memory_budget=b)) for b in (1.0, 0.5))
    assert frugal.arena_bytes.value < at_ease.arena_bytes.value
    check_no_overlap(frugal)


def test_live_buffers_do_not_overlap() -> None:
    def crossed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, b = x @ w, w @ x
        c = torch.relu(a) @ b
        return c @ a + b

    check_no_overlap(planned(crossed, (16, 16), (16, 16)))


def test_without_fusion_chains_reuse_in_place() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.exp(torch.relu(x).cumsum(0)), -1).cumsum(1)

    check_no_overlap(planned(chain, (16, 16), options=Options(fuse=False)))


def test_what_a_walk_along_the_rows_reads_is_not_overwritten_before_it() -> None:
    def f(x: torch.Tensor, a: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = w.exp()
        y = (x * scale) @ a
        return (y - y.sum(0)) * scale, b @ ((y * y).sum(0) * 0.5)  # the sum is made before the walk that reads `scale`

    args = [torch.randn(16, 64), torch.randn(64, 64), torch.randn(64), torch.randn(8, 64)]
    for got, want in zip(dovetail.compile(f)(*args), f(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


def test_a_view_made_by_a_library_call_shares_nothing_outside() -> None:
    """A slice from a symbolic start is left to ATen, whose result lies in its argument's memory."""

    def f(x: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
        y = x * 2
        part, copied, scaled = x.clone()[n - 2 :], y.clone()[n - 2 :], x[n - 2 :] * 3
        x.mul_(2)
        return part, copied, y, scaled

    compiled = dovetail.compile(f, dynamic=True)
    for n in (3, 4):
        x = torch.randn(5, 4)
        other = x.clone()
        got, want = compiled(x, n), f(other, n)
        for kept in (x, got[2]):
            kept.zero_()  # no other result changes with it
        other.zero_()
        want[2].zero_()
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


PAIRS = """
def forward(x: f32[1024, 1024] cuda, w: f32[1024, 1024] cuda):
    a = aten.mm.default(x, w)        # f32[1024, 1024] cuda
    b = aten.mm.default(w, x)        # f32[1024, 1024] cuda
    c = aten.mm.default(x, x)        # f32[1024, 1024] cuda
    d = aten.mm.default(w, w)        # f32[1024, 1024] cuda
    first = prims.add(a, b)          # f32[1024, 1024] cuda
    second = prims.add(c, d)         # f32[1024, 1024] cuda
    return (first, second)
"""


def test_the_memory_of_a_product_stays_while_an_unsafe_view_of_it_is_read() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = (x @ w)[:, ::2]
        return ((rows * 2) @ w).real, rows.conj() + 1

    x, w = torch.randn(3, 4, 6, dtype=torch.cfloat), torch.randn(6, 6, dtype=torch.cfloat)
    torch.testing.assert_close(dovetail.compile(f)(x, w), f(x, w))


def test_what_frees_memory_runs_as_soon_as_it_can() -> None:
    made = schedule(lower.lower(parse_graph(PAIRS)), Options())
    assert [step.name for step in made.steps] == ["a", "b", "first", "c", "d", "second"]
    kept = parse_graph(PAIRS.replace("aten.mm.default(w, w) ", "aten.mm.default(a, b) "))
    assert [step.name for step in schedule(lower.lower(kept), Options()).steps] == [*"abcd", "first", "second"]


def test_large_temporaries_on_a_gpu_are_blocks_of_their_own() -> None:
    made = plan(schedule(lower.lower(parse_graph(PAIRS)), Options()))
    places = dict(made.places)
    assert [places[name].kind for name in "abcd"] == ["within", "block"] * 2 and made.arena_bytes.value == 0
    assert [places[name].of for name in "abcd"] == ["first", "b", "second", "d"]
    host = codegen.emit(made, Options()).host
    taken = [host.index("DeviceTemporaries block", host.index(f"{name} = aten.mm")) for name in "bd"]
    assert taken[0] < host.index(".block.drop();") < taken[1]
    assert host.count(".block.drop();") == 2


def test_an_output_takes_over_the_memory_of_a_temporary() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = torch.relu(x @ w)
        return y * 2, (x @ y).exp(), torch.cat([(w @ x)[:16], (y @ w)[16:] + 1])

    made = planned(fn, (32, 32), (32, 32))
    within = {name: place.of for name, place in made.places if place.kind == "within"}
    assert len(within) == 2 and len({*within.values()}) == 2
    check_no_overlap(made)
    x, w = torch.randn(2, 32, 32)
    torch.testing.assert_close(dovetail.compile(fn)(x, w), fn(x, w))
