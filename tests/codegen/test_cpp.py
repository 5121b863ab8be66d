"""C++ kernels against eager through the real pipeline, in three sizes of vector and with plain loops."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import symbolic_trace

import dovetail
from dovetail import aot, codegen, lower, ops, passes, runtime, schedule
from dovetail.codegen import vector_bytes
from dovetail.codegen.cpp.ops import CPP, CPP_VEC
from dovetail.events import EVENTS
from dovetail.ir.loop import FUNCTIONS, SCALAR_OPS
from dovetail.options import Options

NAN = float("nan")
INF = float("inf")


def make(fn: Callable[..., Any], inputs: Sequence[torch.Tensor], options: Options) -> runtime.Executable:
    with torch.no_grad():
        joint = aot.trace_joint(symbolic_trace(fn), inputs)
    graph = passes.optimize(ops.decompose(joint.graph))
    planned = schedule.plan(schedule.schedule(lower.lower(graph), options))
    return runtime.load(codegen.emit(planned, options), options)


def check(
    fn: Callable[..., Any], inputs: Sequence[torch.Tensor], options: Options = Options()
) -> runtime.Executable:
    """Equal dtype, shape and strides; no farther from fp64 than eager, give or take a rounding."""
    executable = make(fn, inputs, options)
    got, want = executable(*inputs), fn(*inputs)
    exact = fn(*[x.double() if x.is_floating_point() else x for x in inputs])
    for a, b, c in zip(got, *((w,) if isinstance(w, torch.Tensor) else w for w in (want, exact))):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        if not a.dtype.is_floating_point:
            assert torch.equal(a, b)
            continue
        assert torch.equal(a.isnan(), b.isnan())
        if not a.numel():
            continue
        a, b, c = (x.double().nan_to_num() for x in (a, b, c))
        room = (
            4 * (b - c).abs().max()
            + 2 * torch.finfo(want.dtype if isinstance(want, torch.Tensor) else a.dtype).eps * c.abs().max()
        )
        assert (a - c).abs().max() <= room, ((a - c).abs().max(), (b - c).abs().max())
    return executable


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def whole(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def with_nan(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(x > 1.8, NAN)


def turn_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Neighbours as points that are turned, as positions are told to attention."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).type_as(x)


PROGRAMS: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "softmax": (lambda x: torch.softmax(x, -1), [normal(10, 1000)]),
    "softmax_tail": (lambda x: torch.softmax(x, -1), [normal(7, 13)]),
    "log_softmax_columns": (lambda x: F.log_softmax(x, 0), [normal(37, 96)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (100,), w, b), [normal(64, 100), normal(100), normal(100)]),
    "rms_norm": (lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w, [normal(7, 96), normal(96)]),
    "bias_gelu": (lambda x, b: F.gelu(x + b), [normal(64, 100), normal(100)]),
    "matmul": (lambda x, w, b: torch.softmax(x @ w + b, -1), [normal(64, 32), normal(32, 50), normal(50)]),
    "large_product": (lambda x, w, v: (x @ w.t()).relu() @ v, [normal(256, 128), normal(256, 128), normal(256, 130)]),
    "batch_matmul": (lambda x, y: x @ y.mT, [normal(3, 5, 8), normal(3, 6, 8)]),
    "column_sum": (lambda x, y: (x * y).sum(0), [normal(64, 100), normal(64, 100)]),
    "column_sum_split": (lambda x, y: (x * y).sum(0) / 3, [normal(640, 100), normal(640, 100)]),
    "column_max": (lambda x: x.amax(0), [with_nan(normal(640, 301))]),
    "column_any": (lambda x: (x > 3.2).any(0), [normal(640, 300)]),
    "column_sum_inner": (lambda x: x.sum(1), [normal(40, 30, 100)]),
    "sum_outer_and_inner": (lambda x: x.sum((0, 2)), [normal(64, 10, 100)]),
    "sum_all": (lambda x: x.sum(), [normal(300, 1000).abs()]),
    "long_sum": (lambda x: x.sum(), [normal(1, 2_000_001).abs()]),
    "long_column_sum": (lambda x: x.sum(0), [normal(65536, 20).abs()]),
    "variance_all": (lambda x: x.var(), [normal(64, 1003)]),
    "variance_columns": (lambda x: x.var(0), [normal(64, 37)]),
    "mean_middle": (lambda x: x.mean(1), [normal(8, 33, 17)]),
    "extremes": (lambda x: (x.amax(1), x.amin(1), x.argmax(1), x.argmin(0)), [with_nan(normal(64, 103))]),
    "argmax_all": (lambda x: x.argmax(), [normal(64, 1003)]),
    "first_of_equal": (lambda x: x.argmax(1), [whole(0, 3, 50, 40)]),
    "first_of_equal_turned": (lambda x: (x.t().argmax(), x.argmin(0)), [whole(0, 3, 50, 40)]),
    "nothing_better_than_the_start": (lambda x: (x.argmax(1), x.argmin(), x.argmax(0)), [normal(20, 37).abs() * -INF]),
    "embedding_sum": (lambda w, i: F.embedding(i, w).sum(1), [normal(64, 100), whole(0, 64, 5, 7)]),
    "where": (lambda x, y: torch.where(x > 0, y, x * 2).clamp(-1, 1), [normal(64, 100), normal(64, 100)]),
    "transpose_add": (lambda x, y: x + y.t(), [normal(64, 100), normal(100, 64)]),
    "transpose": (lambda x: x.permute(0, 2, 3, 1).contiguous(), [normal(4, 35, 17, 9)]),
    "cross_entropy": (lambda x, t: F.cross_entropy(x, t), [normal(64, 100), whole(0, 100, 64)]),
    "sums_of_exponentials": (
        lambda x: (x.exp().sum(-1), x.logsumexp(-1), (x * 30).logsumexp(-1), torch.where(x > 0, x, -INF).logsumexp(-1)),
        [torch.cat([normal(9, 999), with_nan(normal(2, 999)), torch.full((1, 999), 300.0), torch.full((1, 999), -300.0)])],
    ),
    "bfloat16": (lambda x, y: (x * y + 1).relu(), [normal(64, 101, dtype=torch.bfloat16), normal(64, 101, dtype=torch.bfloat16)]),
    "float16": (lambda x, y: (x * y + 1).exp(), [normal(64, 101, dtype=torch.float16), normal(64, 101, dtype=torch.float16)]),
    "float64": (lambda x, w: torch.tanh(x) * w.sigmoid(), [normal(7, 96, dtype=torch.float64), normal(96, dtype=torch.float64)]),
    "embedding": (lambda w, i: F.embedding(i, w), [normal(64, 100), whole(0, 64, 5, 7)]),
    "cat": (lambda x, y: torch.cat([x, y], 1) * 2, [normal(64, 10), normal(64, 13)]),
    "turned_pairs": (turn_pairs, [normal(3, 5, 74), normal(5, 37), normal(5, 37)]),
    "turned_pairs_bfloat16": (turn_pairs, [normal(3, 5, 64, dtype=torch.bfloat16), normal(5, 32), normal(5, 32)]),
    "turned_pairs_float64": (turn_pairs, [normal(3, 5, 70, dtype=torch.float64), normal(5, 35), normal(5, 35)]),
    "bytes_in_turns": (lambda x: torch.stack([x, x * 2, x[:, :1] + x], 2).flatten(1), [whole(0, 255, 9, 70, dtype=torch.uint8)]),
    "flags_in_turns": (lambda x: torch.stack([x > 0, x < 1], -1).flatten(1), [normal(9, 70)]),
    "every_second": (lambda x, y: (x[:, ::2] * y, x[:, 1::2].flip(1), F.pad(x[:, ::2, None], (0, 1)).flatten(1)), [normal(9, 70), normal(9, 35)]),
    "pad": (lambda x: F.pad(x, (1, 2, 3, 4), value=2.5), [normal(7, 39)]),
    "lower_triangle": (lambda x: torch.tril(x), [normal(37, 41)]),
    "booleans": (lambda x, y: (x > 0) & (y < 0.5) | (x == y), [normal(64, 37), normal(64, 37)]),
    "integers": (lambda x, y: (x * y - 3) // 2 + (x % 5), [whole(-9, 9, 64, 37), whole(-9, 9, 64, 37)]),
    "bytes": (lambda x: x * 3 + x // 2, [whole(0, 255, 64, 37, dtype=torch.uint8)]),
    "integer_sum": (lambda x: x.sum(0), [whole(-9, 9, 64, 37, dtype=torch.int32)]),
    "index_add": (lambda x, i, y: x.index_add(0, i, y), [normal(8, 33), whole(0, 8, 20), normal(20, 33)]),
    "convolution": (lambda x, w, b: F.conv2d(x, w, b, padding=1).relu(), [normal(2, 3, 8, 8), normal(4, 3, 3, 3), normal(4)]),
    "library_call": (lambda x: x.sort(-1)[0] * 2, [normal(7, 9)]),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [normal(4, 3, 7, 9), normal(3), normal(3)]),
    "functions": (
        lambda x: (x.exp(), x.sin(), x.erf(), x.log1p(), x.tanh(), x.sigmoid(), x.sqrt(), x.expm1(), x.atan()),
        [normal(40, 33).abs()],
    ),
    "rounding": (lambda x: (x.floor(), x.ceil(), x.round(), x.trunc(), x.frac(), x.sign()), [normal(40, 33) * 4]),
    "one_hot": (lambda x: F.one_hot(x.long().abs() % 3, 3).sum(1), [normal(40)]),
    "half_tail": (lambda x: x.float() * 2, [normal(4, 3, dtype=torch.float16)]),
    "scalars": (lambda x, y: x * y + 1, [normal(), normal()]),
    "empty": (lambda x: x * 2 + 1, [normal(0, 4)]),
    "softmax_of_nothing": (lambda x: torch.softmax(x, -1), [normal(40, 0)]),
    "functions_beside_long_integers": (
        lambda x, i: (x.sin() + x.cos() + x.tan() + x.atan() + torch.atan2(x, x + 9) + (x * x + 1).pow(x)) * i,
        [normal(37), torch.arange(37)],
    ),
    "four_loops": (
        lambda x: x[..., :8].view(2, 6, 2, 4).transpose(1, 2) @ x[..., 8:16].view(2, 6, 2, 4).transpose(1, 2).mT,
        [normal(2, 6, 24)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_equals_eager(name: str) -> None:
    check(*PROGRAMS[name])


@pytest.mark.parametrize(
    "name", ["softmax_tail", "extremes", "bfloat16", "cross_entropy", "pad", "variance_columns"]
)
def test_plain_loops_equal_eager(name: str) -> None:
    check(*PROGRAMS[name], Options(simd=False))


@pytest.mark.parametrize(
    "name", ["softmax_tail", "layer_norm", "column_sum", "extremes", "float64", "integers", "turned_pairs",
             "functions_beside_long_integers"]
)
def test_narrow_vectors_equal_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if codegen.vector_bytes() < 32:
        pytest.skip("no vectors on this machine")
    monkeypatch.setattr(codegen, "vector_bytes", lambda: 32)
    check(*PROGRAMS[name])


@pytest.mark.parametrize("name", [*FUNCTIONS, "pow", "atan2"])
def test_functions_of_four_floats_equal_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside integers of 64 bits, vectors of 32 bytes have four floats; the library's have eight."""
    monkeypatch.setattr(codegen, "vector_bytes", lambda: min(32, vector_bytes()))
    function = getattr(torch, name)
    own = (lambda x: function(x, x + 1)) if name in ("pow", "atan2") else function
    check(lambda x, i: (own(x[i]), own(x[i] * 1e5) + i), [normal(96).abs(), whole(0, 96, 37)])


def test_pairs_are_loaded_and_stored_as_vectors() -> None:
    text = check(turn_pairs, [normal(9, 5, 64), normal(5, 32), normal(5, 32)]).program.kernels[0].text
    assert text.count("load_second(") == 2 and text.count("store_both(") == 1 and "[l]" not in text


def test_threads_do_not_change_what_is_computed() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for name in ("sum_all", "column_sum_split", "variance_all", "argmax_all", "softmax"):
            check(*PROGRAMS[name])
    finally:
        torch.set_num_threads(before)


def test_every_scalar_operation_has_text() -> None:
    structural = {"cast", "bitcast"}
    for table in (CPP, CPP_VEC):
        assert not set(SCALAR_OPS) - set(table) - structural


@pytest.mark.parametrize("fn", [F.relu, F.relu6, lambda x: x.clamp(0, 1), lambda x: x.clamp(max=-0.0)])
def test_what_equals_a_bound_keeps_its_sign(fn: Callable[..., Any]) -> None:
    x = torch.tensor([-0.0, 0.0, float("nan"), -1.0, 2.0]).repeat(9)
    eager, ours = fn(x), dovetail.compile(fn)(x)
    assert torch.equal(eager.view(torch.int32), ours.view(torch.int32))


@pytest.mark.parametrize("fn", [F.hardtanh, F.hardswish])
def test_gradients_where_the_input_is_nan(fn: Callable[..., Any]) -> None:
    x = torch.full((32,), float("nan"), requires_grad=True)
    wanted = torch.autograd.grad(fn(x).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(dovetail.compile(fn)(x).sum(), x), wanted, equal_nan=True)


def test_index_out_of_range_raises() -> None:
    executable = make(lambda w, i: F.embedding(i, w), [normal(4, 8), whole(0, 4, 3)], Options())
    with pytest.raises((IndexError, RuntimeError), match="index out of range"):
        executable(normal(4, 8), torch.tensor([0, 9, 1]))


@pytest.mark.parametrize("start", [-8, -3, 0, 5])
def test_counted_positions_wrap_and_are_checked(start: int) -> None:
    def rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[torch.arange(start, start + 8)], (x + 1)[torch.arange(start, start + 8)]

    x = normal(8, 5)
    if start > 0:
        with pytest.raises(IndexError, match="out of (range|bounds)"):
            dovetail.compile(rows)(x)
        return
    for got, want in zip(dovetail.compile(rows)(x), rows(x)):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["asinh", "acosh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_and_tiny_arguments(name: str, dtype: torch.dtype) -> None:
    for value in (0.0, 1e-40, -1e-40, 1e30, -1e30, -2.5, 19.0):
        compiled = dovetail.compile(lambda x: getattr(torch, name)(x))
        x = torch.full((20,), value, dtype=dtype)
        torch.testing.assert_close(compiled(x), getattr(torch, name)(x), equal_nan=True)


@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16, torch.int16])
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.int16])
def test_sixteen_bits_seen_as_another_type(source: torch.dtype, to: torch.dtype) -> None:
    x = normal(37, dtype=source)
    seen = dovetail.compile(lambda x: (x + 1).view(to).clone())(x)
    assert torch.equal(seen.view(torch.int16), (x + 1).view(torch.int16)) and seen.dtype == to


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_shifts_by_more_than_the_width(dtype: torch.dtype) -> None:
    x, amount = whole(-100, 100, 40, dtype=dtype), whole(0, 70, 40, dtype=dtype)
    check(lambda x, y: (x << y, x >> y, x >> 3, x << 7), [x, amount])


@pytest.mark.parametrize("source", [torch.uint8, torch.int8, torch.int16, torch.int64, torch.float32, torch.float64])
def test_conversions(source: torch.dtype) -> None:
    wide, narrow = (torch.int64, torch.float64), (torch.int8, torch.int16, torch.int32, torch.float32, torch.bool)
    x = whole(-128 if source.is_signed else 0, 128, 7, 53).to(source)
    check(lambda x: tuple(x.to(t) for t in narrow if t != source), [x])
    check(lambda x: tuple(x.to(t) for t in (*wide, *narrow) if t != source), [x])
    check(lambda x: (x.abs() * 2).to(torch.uint8) + 1, [x])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("size", [5, 64, 75, 203])
def test_first_of_equal_among_many(dtype: torch.dtype, size: int) -> None:
    x = whole(0, 6, 40, size).to(dtype)
    if dtype.is_floating_point:
        x[0, 2::3], x[1], x[2, -1], x[3], x[4, size // 2 :] = NAN, NAN, NAN, -INF, INF
    check(lambda x: (x.argmax(1), x.argmin(1), x.argmax(), x.argmin(), x.max(1)), [x])
    check(lambda x: (x.view(8, 5, size).argmax(2), x.view(5, 8, size).argmin(0)), [x])


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("f", [torch.log, torch.log2, torch.log10, torch.log1p, torch.exp, torch.expm1, torch.tanh, torch.sin, torch.cos, torch.erfc])
def test_functions_are_within_a_few_units_in_the_last_place(
    f: Callable[[torch.Tensor], torch.Tensor], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codegen, "vector_bytes", lambda: min(width, vector_bytes()))
    every = torch.arange(-(2**31), 2**31 - 1, 40009).to(torch.int32).view(torch.float32)
    x = torch.cat([every, torch.linspace(-1, 3, 40001), torch.linspace(-20, 90, 40001), torch.tensor([0.0, -0.0, -1.0, INF, -INF])])
    got, eager, exact = make(lambda x: f(x), (x,), Options())(x)[0], f(x), f(x.double())
    assert torch.equal(got.isnan(), eager.isnan()) and torch.equal(got.isinf(), eager.isinf())
    assert torch.equal(got[got == 0].signbit(), eager[got == 0].signbit())
    ok = eager.isfinite()
    unit = torch.exp2(exact.abs().log2().floor().clamp(min=-126) - 23)
    assert ((got.double() - exact).abs() / unit)[ok].max() < (5 if f is torch.erfc else 2)


@pytest.mark.parametrize("width", [32, 64])
def test_logarithms_of_powers_are_whole(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And they, like the hyperbolic tangent, need no library, which is slower."""
    monkeypatch.setattr(codegen, "vector_bytes", lambda: min(width, vector_bytes()))
    twos, tens = torch.arange(-149.0, 128.0), torch.arange(11.0)
    given = ((2.0 ** twos.double()).float(), (10.0 ** tens.double()).float())
    made = make(lambda x, y: (torch.log2(x), torch.log10(y), torch.log(x), torch.tanh(y)), given, Options())
    got = made(*given)
    assert torch.equal(got[0], twos) and torch.equal(got[1], tens)
    assert not any("Sleef" in "".join(kernel.prelude) for kernel in made.program.kernels) or not vector_bytes()


def test_floats_beyond_the_range_of_bytes() -> None:
    x = torch.cat([2.0 ** torch.arange(8, 70).float() * s for s in (1, 1.001, -1, -1.3, INF, -INF, 0.0)] * 2)
    one_by_one = torch.stack([e.to(torch.uint8) for e in x])
    assert torch.equal(dovetail.compile(lambda x: x.to(torch.uint8))(x), one_by_one)


def test_equal_kernels_are_written_once() -> None:
    def layers(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.softmax(x, -1), torch.softmax(y, -1)

    executable = check(layers, [normal(8, 64), normal(8, 64).flip(0)], Options(fuse=True))
    assert len(executable.program.kernels) <= 2
    keys = [kernel.key for kernel in executable.program.kernels]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("rounds", [12, 24])
def test_rounds_of_a_loop_share_their_kernels_wherever_they_read(rounds: int) -> None:
    def recur(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h, out = x[0], []
        for t in range(1, rounds):
            h = torch.softmax(h @ w + x[t], -1)
            out.append(h)
        return torch.stack(out)

    executable = check(recur, [normal(rounds, 4, 64), normal(64, 64)], Options(fuse=True))
    assert len(executable.program.kernels) <= 3


def test_what_is_touched_from_its_middle_on_begins_there() -> None:
    """Also what is reversed, and what is written where it is read; not what is read where data say, or only
    in places."""

    def middles(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.clone()
        y[3].add_(y[2].flip(0))
        y[5:7].cumsum_(-1)
        y[4].index_add_(0, i, y[7])
        padded = torch.nn.functional.pad(x[2], (3, 2)) + torch.nn.functional.pad(x[5, 4:], (0, 9))
        return y, padded, x[6][i] * x[5][i], x[1:, ::2].amax(-1)

    check(middles, [normal(9, 8), torch.tensor([0, 3, 7, 3, 1, 1, 0, 5])], Options(fuse=True))


def test_values_saved_with_gaps_reach_backward() -> None:
    """The slices of a buffer filled in two halves have strides with holes, also when they are saved."""

    def halves(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        y = x @ x.T
        k = x.new_empty(4, 8)
        k[:, :4].copy_(y)
        k[:, 4:].copy_(y)
        return q * k

    x, q = normal(4, 4).requires_grad_(), normal(4, 8).requires_grad_()
    compiled = dovetail.compile(halves)
    for fn in (compiled, compiled):
        got = torch.autograd.grad(fn(x, q).pow(2).sum(), (x, q))
        want = torch.autograd.grad(halves(x, q).pow(2).sum(), (x, q))
        torch.testing.assert_close(got, want)


def test_an_address_is_computed_from_doubles() -> None:
    """A row is chosen by a double, and then read in vectors of floats."""
    x, places = torch.randn(5, 32), torch.rand(5, dtype=torch.float64) * 4

    def program(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return x[places.clamp(min=0).long()] * 2

    compiled = dovetail.compile(program, options={"fallback_to_eager": False})
    assert torch.equal(compiled(x, places), program(x, places))


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("columns", [64, 33, 16])
def test_results_larger_than_the_cache_are_stored_past_it(monkeypatch, width, columns):
    monkeypatch.setattr(codegen, "cache_bytes", lambda: 1024)
    monkeypatch.setattr(codegen, "vector_bytes", lambda: min(width, vector_bytes()))
    x, y = torch.randn(48, columns), torch.randn(columns, 48)
    stored = [
        lambda x, y: (x + 1, x.double() * 2),
        lambda x, y: (x.t() + y, x.long() - 3),
        lambda x, y: (F.layer_norm(x, (columns,)), torch.softmax(y, 0)),
        lambda x, y: (torch.cat([x[:, 1:], x], 1), x.half() * 2),
    ]
    for fn in stored:
        source = "".join(kernel.text for kernel in check(fn, (x, y)).program.kernels)
        is_stored_past = {"stream(", "sfence"} <= set(re.findall(r"stream\(|sfence", source))
        assert is_stored_past or vector_bytes() == 0 or columns % 16  # rows that end within a line


@pytest.mark.parametrize("count", [7, 100, 3000, 70000])
def test_equal_numbers_have_no_variance(count: int) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.var(1), x.var(), F.layer_norm(x, (count,)), x.t().var(0)

    for got in make(program, (torch.full((2, count), 12345.678),), Options())(torch.full((2, count), 12345.678)):
        assert torch.equal(got, torch.zeros_like(got))
    x = torch.randn(2, count)
    x[0, 3], x[1, 2] = NAN, INF
    check(program, (x,))


def test_erf_is_within_one_unit_in_the_last_place() -> None:
    x = torch.cat([torch.linspace(-4.3, 4.3, 100_003), 10.0 ** torch.linspace(-44, 0, 2001)])
    exact = torch.erf(x.double())
    size = exact.float().abs()
    unit = (torch.nextafter(size, torch.tensor(INF)) - size).double()
    got = make(lambda x: torch.erf(x) * 1, (x,), Options())(x)[0]
    assert ((got.double() - exact).abs() / unit).max() < 1.05
    assert torch.equal(make(lambda x: torch.erf(x), (x,), Options())(torch.full_like(x, INF))[0], torch.ones_like(x))


@pytest.mark.parametrize("shape", [(50, 37), (37, 50), (9, 3), (4, 700)])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_nan_outlives_every_kind_of_maximum(shape: tuple[int, int], dim: int) -> None:
    """Wherever in a vector, a block of rows or a tail it is; and a number known beforehand is none."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x[1, 1], x[-1, -1], x[2, 0] = torch.nan, torch.nan, -torch.inf

    def run(x: torch.Tensor) -> Any:
        flipped = x.flip(0)
        return (
            x.amax(dim), x.amin(dim), torch.maximum(x, flipped), torch.minimum(flipped, x), x.clamp(-1, 1),
            torch.relu(x), x.clamp(min=flipped), torch.fmax(x, flipped),
        )  # fmt: skip

    for got, want in zip(dovetail.compile(run, options={"fallback_to_eager": False})(x), run(x), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


STREAMED: dict[str, tuple[Callable[..., Any], bool]] = {
    "pointwise": (lambda x: x * 2 + 1, True),
    "rows": (lambda x: torch.softmax(x, -1), True),
    "columns": (lambda x: x - x.mean(0), True),
    "transpose": (lambda x: x.t().contiguous() + 1, True),
    "join": (lambda x: torch.cat([x, -x], -1), True),
    "whole lines only": (lambda x: x[:, 1:].softmax(-1), False),
}


@pytest.mark.parametrize("name", STREAMED)
def test_large_results_are_stored_past_the_caches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, is_streamed = STREAMED[name]
    monkeypatch.setattr(codegen, "cache_bytes", lambda: 1 << 12)
    x = torch.randn(160, 192, generator=torch.Generator().manual_seed(0))
    EVENTS.clear()
    dovetail.reset()
    got = dovetail.compile(run, options={"cache": False, "fallback_to_eager": False})(x)
    torch.testing.assert_close(got, run(x))
    if vector_bytes():
        assert any("stream(" in str(event["text"]) for event in EVENTS.of("kernel")) == is_streamed
