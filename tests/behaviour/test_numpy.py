"""SPEC C9: NumPy on tensors and arrays, equal to NumPy in values, dtypes and kind, and without a break."""
from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Sized
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
import torch

import dovetail

RNG = np.random.default_rng(0)
ARRAYS: dict[str, Any] = {
    "f8": RNG.standard_normal((3, 4)),
    "f4": RNG.standard_normal((3, 4)).astype(np.float32),
    "i8": RNG.integers(-5, 5, (3, 4)),
    "u1": RNG.integers(0, 250, (3, 4)).astype(np.uint8),
    "b": RNG.integers(0, 2, (3, 4)).astype(bool),
    "row": RNG.standard_normal(4).astype(np.float32),
}
TABLE = np.arange(4, dtype=np.float32)
ABSTRACT = Hashable, Iterable, Sized, float


def clamp_in_place(a: Any) -> Any:
    a[a.shape[0] - 1] = 7
    a[:, 1] += 2
    a *= 3
    return a


def pipeline(a: Any, row: Any) -> Any:
    centred = (a - a.mean(axis=0)) / (a.std(axis=0, ddof=1) + 1e-6)
    scores = centred @ row
    return np.where(scores > 0, scores, 0.0), scores.argmax(), centred.T[::2].copy()


def loop(a: Any) -> Any:
    total = 0.0
    for line in a:
        total = total + line.sum() * 0.5
    return total, len(a), a.shape, a.dtype, a.ndim, a.size


WHOLE: dict[str, tuple[Callable[..., Any], str]] = {
    "promotion": (lambda a, b: (a + b, a * 2, b / 2, a - np.float32(1), b * True), "f4 i8"),
    "integers": (lambda a, b: (a + b, a * 2, a / 2, a // 3, a % 3, a**2, -a, ~a, abs(a), a & 3), "i8 u1"),
    "small integers": (lambda a: (a + 1, a * a, a + a, a - 1, np.mean(a), np.sin(a), a.max()), "u1"),
    "booleans": (lambda a, b: (a & (b > 0), a | (b < 1), ~a, a ^ a, a.sum(), a.any(axis=0), a.all()), "b f8"),
    "compare": (lambda a, b: (a == b, a != 1, a < b, b >= 0.5, np.isnan(a), np.logical_and(a, b)), "f4 i8"),
    "unary": (lambda a: (np.exp(a), np.sqrt(np.abs(a)), np.tanh(a), np.floor(a), np.rint(a), np.log1p(a * a)), "f4"),
    "unary of integers": (lambda a: (np.exp(a), np.sqrt(np.abs(a)), np.square(a), np.floor(a)), "i8"),
    "binary": (lambda a, b: (np.maximum(a, b), np.fmin(a, 0), np.hypot(a, b), np.arctan2(a, b), a**2.5), "f8 f4"),
    "reductions": (lambda a: (a.sum(), a.mean(0), a.max(axis=1, keepdims=True), np.min(a), a.std(), np.var(a, 1)), "f8"),
    "typed reductions": (lambda a: (np.sum(a, dtype=np.float64), np.prod(a, axis=0), a.argmax(), a.argmin(axis=1)), "f4"),
    "shapes": (lambda a: (a.reshape(4, 3), a.reshape((2, -1)), a.T, a.ravel(), a[None].squeeze()), "f4"),
    "more shapes": (lambda a: (np.transpose(a), np.expand_dims(a, 1), np.swapaxes(a, 0, 1), np.broadcast_to(a, (2, 3, 4))), "f4"),
    "indexing": (lambda a: (a[0], a[1, 2], a[:, 1:3], a[..., -1], a[[0, 2]], a[np.array([1, 0])], a[:, None]), "f4"),
    "joining": (lambda a, b: (np.concatenate([a, b]), np.stack([a, a], axis=1), np.vstack([a, b]), np.hstack((a, b))), "f4 i8"),
    "products": (lambda a, b: (a @ b, a.dot(b), a @ a.T, np.matmul(a, b), np.einsum("ij,j->i", a, b), np.outer(b, b)), "f8 row"),
    "choice": (lambda a: (np.where(a > 0, a, 0), np.clip(a, -1, 1), a.clip(0), np.zeros_like(a), np.ones_like(a)), "f4"),
    "conversion": (lambda a: (a.astype(np.float64), a.astype(int), np.asarray(a, dtype="f8"), np.array(a), a.copy()), "f4"),
    "constants": (lambda a: (a + np.linspace(0, 1, 4), np.eye(4)[:3] * a, np.pi * a, a * np.arange(4)), "f4"),
    "norms": (lambda a: (np.linalg.norm(a), np.linalg.norm(a, axis=1), a / np.linalg.norm(a, axis=1, keepdims=True)), "f4"),
    "pipeline": (pipeline, "f4 row"),
    "loop": (loop, "f4"),
    "to torch": (lambda a: (torch.from_numpy(a) * 2, torch.tensor(a).relu(), torch.as_tensor(a, dtype=torch.float64)), "f4"),
    "from torch": (lambda a: (torch.from_numpy(a).exp().numpy() + 1, np.asarray(torch.tensor(a)) * 2), "f4"),
    "in place": (lambda a, b: (clamp_in_place(a.copy()), clamp_in_place(b * 2), clamp_in_place(a.astype(np.float16)), b), "f4 i8"),
    "shared": (lambda a: (clamp_in_place(torch.tensor(a).numpy()[1:]), clamp_in_place(torch.tensor(a).t().numpy())), "f4"),
    "global": (lambda a: a * TABLE + TABLE.sum(), "f4"),
    "abstract classes": (lambda a: ([isinstance(v, k) for v in (a, a.sum()) for k in ABSTRACT], a + 1), "f4"),
    "classes": (lambda a: (isinstance(a, np.ndarray), type(a) is np.ndarray, type(a.sum()) is np.float32, a.dtype == np.float32, a + 1), "f4"),
}


def compare(function: Callable[..., Any], names: str, backend: str, most_breaks: int) -> None:
    dovetail.reset()
    compiled = dovetail.compile(function, backend=backend)
    for _ in range(3):
        ours, theirs = ([ARRAYS[name].copy() for name in names.split()] for _ in range(2))
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            check(compiled(*ours), function(*theirs))
        check(ours, theirs)
    stats = dovetail.stats()
    assert stats["graphs"] and stats["graph_breaks"] <= most_breaks and not stats["recompiles"], stats


def check(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted), (type(got), type(wanted))
    if isinstance(wanted, list | tuple):
        assert len(got) == len(wanted)
        for ours, theirs in zip(got, wanted):
            check(ours, theirs)
    elif isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(got, wanted)
    elif isinstance(wanted, np.ndarray | np.generic):
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    else:
        assert got == wanted


@pytest.mark.parametrize("name", WHOLE)
def test_without_a_break(name: str) -> None:
    compare(*WHOLE[name], "eager", 0)


@pytest.mark.parametrize("name", ["integers", "pipeline", "from torch", "in place"])
def test_compiled(name: str) -> None:
    compare(*WHOLE[name], "dovetail", 0)


def parts_of_complex_numbers(a: Any) -> Any:
    waves = np.asarray(torch.complex(torch.from_numpy(a), torch.from_numpy(a) * 2))
    return np.abs(waves), waves.real, waves.imag + 1, a.real


def test_parts_of_complex_numbers() -> None:
    compare(parts_of_complex_numbers, "f4", "eager", 4)


@pytest.mark.parametrize("functions", [(np.amin, np.amax), (np.sin, np.cos), (itemgetter(0), itemgetter(1))])
def test_a_callable_that_is_passed_in(functions: Any) -> None:
    compiled = dovetail.compile(lambda function, a: function(a) + 1, backend="eager")
    for function in functions:
        check(compiled(function, ARRAYS["f4"]), function(ARRAYS["f4"]) + 1)


def ignores_errors(a: Any) -> Any:
    with np.errstate(divide="ignore"):
        return np.log(a * 0)


def test_errors_are_ignored() -> None:
    compare(ignores_errors, "f4", "eager", 2)


def prints(a: Any) -> Any:
    b = a * 2
    print(b.sum(), b[0, 0])
    return b + 1


def branches(a: Any) -> Any:
    return a + 1 if a.sum() > 1e6 else a - 1


def sorts(a: Any) -> Any:
    order = np.argsort(a[:, 0])
    return a[order] + np.float32(1)


def reads_out(a: Any) -> Any:
    return a * float(a.max()), a.tolist()


def strings(a: Any) -> Any:
    return f"{a.mean():.3f}", a * 2


BROKEN: dict[str, tuple[Callable[..., Any], int]] = {
    "print": (prints, 1), "branch": (branches, 1), "argsort": (sorts, 1), "float": (reads_out, 2), "text": (strings, 1),
    "reversed": (lambda a: (a * 2)[::-1] + 1, 2), "selected": (lambda a: a[a > 0] * 2, 1), "unsigned": (lambda a: a.astype(np.uint8).sum() + a, 1),
    "in place": (clamp_in_place, 4), "stepped": (lambda a: np.random.RandomState(0).permutation(4) + (a * 2)[0], 3),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_with_a_break(name: str) -> None:
    function, breaks = BROKEN[name]
    compare(function, "f4", "eager", breaks)


def test_sizes_of_arrays_become_symbolic() -> None:
    dovetail.reset()
    compiled = dovetail.compile(lambda a: (a * 2).sum(axis=1) + a.shape[0], backend="eager")
    for n in range(2, 9):
        a = RNG.standard_normal((n, 3))
        np.testing.assert_allclose(compiled(a), (a * 2).sum(axis=1) + n)
    assert dovetail.stats()["recompiles"] == 1


def test_results_share_memory_as_in_numpy() -> None:
    a = np.zeros((2, 3))
    view = dovetail.compile(lambda a: (a + 1, a.T[1:]))(a)[1]
    a[0, 1] = 5
    assert view[0, 0] == 5


def write_to_one(a: Any, b: Any) -> Any:
    a[0] = 7.0
    c = b + 1
    a *= 2
    return c, b - 1


@pytest.mark.parametrize("backend", ["eager", "dovetail"])
@pytest.mark.parametrize("key", [slice(None), slice(3), slice(None, None, 2), None])
def test_arrays_may_overlap(key: Any, backend: str) -> None:
    dovetail.reset()
    compiled = dovetail.compile(write_to_one, backend=backend)
    for _ in range(2):
        a, b = np.arange(6.0), np.arange(6.0)
        check(compiled(a, a[key]), write_to_one(b, b[key]))
        check(a, b)


def test_an_array_may_overlap_a_tensor_that_is_written() -> None:
    def f(a: Any, x: torch.Tensor) -> Any:
        x.add_(1)
        return a * 2

    x, y = torch.arange(6.0), torch.arange(6.0)
    check(dovetail.compile(f)(x.numpy()[1:], x), f(y.numpy()[1:], y))
    check(x, y)


def spell(a: Any) -> Any:
    turned = np.transpose(a, (0, 2, 1)), a.transpose([2, 0, 1]), a.transpose(1, 0, 2), a.transpose(None)
    return [*turned, a.reshape(-1), a.reshape(6, -1), a.reshape((4, 6)), np.reshape(a, -1)]


def test_axes_and_sizes_in_all_spellings() -> None:
    a = np.arange(24.0).reshape(2, 3, 4)
    for got, want in zip(dovetail.compile(spell, fullgraph=True)(a), spell(a), strict=True):
        check(got, want)


def test_an_argument_that_no_rule_knows_is_left_to_numpy() -> None:
    def f(a: Any) -> Any:
        return np.sum(a, where=a > 2) + np.clip(a, None, 5), a.reshape((2, 3), order="F")

    a = np.arange(6.0)
    for got, want in zip(dovetail.compile(f, backend="eager")(a), f(a), strict=True):
        check(got, want)


@dovetail.disable
def write_out(a: Any, out: Any) -> None:
    out[:] = a * 3 + 1


def views_of_new_arrays(a: Any) -> Any:
    """What Python is given at a break shares memory as it did."""
    made, ordered, back = np.zeros((3, 4)), np.zeros((3, 4), order="F"), np.arange(12.0).reshape(3, 4)
    write_out(a.ravel(), made.ravel())
    write_out(a.T, ordered.T)
    write_out(a[:, ::2], back[::-1, ::2])
    halves = np.zeros(2).view(np.int32)
    write_out(np.ones(1), halves[1:2])
    return made, ordered, ordered.flags.f_contiguous, back, a + made, halves, halves.view(np.float64)


def elements_of_new_arrays(a: Any) -> Any:
    made = np.zeros((3, 4))
    made[0] = a[0]
    flat = made.ravel()
    flat[5] = a[1, 1]
    return made, flat


def copies_in_order(a: Any) -> Any:
    copies = [a.T.copy(), np.ascontiguousarray(a.T), a.copy(), np.copy(a.T), np.ascontiguousarray(a)]
    return copies, [copy.strides for copy in copies]


@pytest.mark.parametrize("backend", ["eager", "dovetail"])
@pytest.mark.parametrize("function", [views_of_new_arrays, elements_of_new_arrays, copies_in_order])
def test_what_arrays_have_in_common_with_others(function: Any, backend: str) -> None:
    compiled, given = dovetail.compile(function, backend=backend), np.arange(12.0).reshape(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            check(compiled(given), function(given))


def scaled(x: Any, s: Any) -> Any:
    x = x * s + 1
    x *= s
    return s * x, torch.clamp(x, max=s), x.half() + s


def scheduled(x: Any, s: Any) -> Any:
    rate = 0.1 * (1 - s) + s * 0.5
    x[1:2] = rate
    return (x + 1 if rate > 100 else x * rate), rate, s


def converted(x: Any, s: Any) -> Any:
    return x * float(s) + s.item(), f"{float(s):.3f}", x * math.sqrt(s), isinstance(s, float), s.dtype


def placed(x: Any, s: Any) -> Any:
    n = s + 1
    x[0] = n
    return x[s], x[:s], x[n // 2 : n], torch.zeros(n, 2), x * n


@pytest.mark.parametrize("backend", ["eager", "dovetail"])
@pytest.mark.parametrize(
    "function, kind",
    [(function, kind) for kind in (np.float64, np.float32, np.int64) for function in (scaled, converted)]
    + [(scheduled, np.float64), (placed, np.int64)],
)
def test_scalars_that_change_from_call_to_call(function: Any, kind: Any, backend: str) -> None:
    compiled = dovetail.compile(function, backend=backend, fullgraph=True)
    dovetail.reset()
    for i in range(5):
        x, s = torch.arange(12.0), kind(3 + 1.25 * i)
        check(compiled(x.clone(), s), function(x.clone(), s))
    assert dovetail.stats()["recompiles"] == 1


@pytest.mark.parametrize("backend", ["eager", "dovetail"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("kind", ["float64", "float32", "int64"])
def test_an_element_of_an_array_beside_a_tensor(kind: str, dtype: torch.dtype, backend: str) -> None:
    schedule = np.linspace(1, 9, 5).astype(kind)

    def step(x: Any, i: int) -> Any:
        y = schedule[i] * x + (1 - schedule[i]) * x
        return x / schedule[i] + x * np.sqrt(schedule[i]), x > schedule[2], x[0] + schedule[1], y, schedule[1] / x

    compiled = dovetail.compile(step, backend=backend)
    for i in range(4):
        x = torch.arange(6).to(dtype)
        check(compiled(x, i), step(x, i))
    dovetail.reset()
    compiled = dovetail.compile(lambda x: schedule[2] - x / schedule[1], backend=backend, fullgraph=True)
    check(compiled(torch.ones(3)), schedule[2] - torch.ones(3) / schedule[1])


def looked_at(x: Any, s: Any) -> Any:
    return x * round(s, 1), f"{s}", x * np.cos(s), torch.tensor([s, s]), x[s.astype(np.int32) % 4]


def test_what_else_is_done_with_a_scalar_that_changes_is_left_to_numpy() -> None:
    compiled = dovetail.compile(looked_at, backend="eager")
    for i in range(9):
        s = np.float64(0.7 + i)
        check(compiled(torch.arange(12.0), s), looked_at(torch.arange(12.0), s))
    assert dovetail.stats()["fallbacks_to_eager"] == 0


def test_a_tensor_of_a_list_of_scalars_has_their_dtype() -> None:
    def f(x: Any) -> Any:
        return x + 1, torch.tensor([np.float64(0.1), np.float64(2)]), torch.tensor([[np.int32(3)]])

    for got, want in zip(dovetail.compile(f, fullgraph=True)(torch.ones(2)), f(torch.ones(2)), strict=True):
        check(got, want)


@pytest.mark.parametrize("program", [
    lambda x, a: x[a], lambda x, a: x[a[1:]] * 2, lambda x, a: x[:, a], lambda x, a: x.index_put((torch.as_tensor(a),), x),
    lambda x, a: (x.__setitem__(a[:2], 0.0), x.sin())[1], lambda x, a: x[np.array([2, 0])],
    lambda x, a: torch.LongTensor(a) + x, lambda x, a: torch.Tensor(a) * x, lambda x, a: torch.Tensor(a / 2) * x,
])  # fmt: skip
def test_tensors_are_indexed_by_arrays_and_made_of_them(program: Any) -> None:
    for order in ([2, 0, 1], [1, 2, 0]):
        x, a = torch.randn(3, 3), np.array(order)
        ours = dovetail.compile(program, fullgraph=True)(x.clone(), a)
        torch.testing.assert_close(ours, program(x.clone(), a), rtol=0, atol=1e-7)
    assert not dovetail.stats()["fallbacks_to_eager"]
