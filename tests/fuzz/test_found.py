"""Programs in which the fuzzers found a difference, shrunk, each kept so that it stays found and fixed.

    FOUND[function] = inputs of its calls, one after the other
    found/tensors_17.txt          a program as the fuzzers print it

Compared with eager as the fuzzers do: results, inputs after the call, gradients, the list LOG.
"""
from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F

import dovetail
from tests.fuzz.running import difference, gradients, why_different
from tests.sweeps.peers import find_peer

LOG: list[Any] = []
FOUND: Final[dict[Callable[..., Any], tuple[Callable[[], list[Any]], ...]]] = {}


def found(*calls: Callable[[], list[Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def keep(program: Callable[..., Any]) -> Callable[..., Any]:
        FOUND[program] = calls
        return program

    return keep


@found(lambda: [torch.ones(3)], lambda: [torch.ones(3)])
def a_bound_method_waits_during_a_break(x: torch.Tensor) -> torch.Tensor:
    LOG.append(int(x.sum().item()) % 2)
    LOG.append(int(x.sum().item()) % 3)
    return x + 1


def kind_of(thing: int) -> int:
    match thing:
        case 0 | 1:
            return 5
        case int(k) if k > 4:
            return k - 4
        case _:
            return 1


@found(*(lambda n=n: [torch.zeros(2), n] for n in (3, 0, 6, 2)))
def a_class_pattern_meets_a_symbolic_int(x: torch.Tensor, n: int) -> torch.Tensor:
    return x + kind_of(n)


@found(lambda: [torch.randn(5, 5)])
def windows_of_a_complex_tensors_part(x: torch.Tensor) -> torch.Tensor:
    return (x + 1).to(torch.complex64).real.unfold(-1, 2, 1).sum(-1)


@found(lambda: [torch.randn(0, 3)])
def the_mean_of_nothing(x: torch.Tensor) -> torch.Tensor:
    return x.mean(0)


@found(lambda: [torch.randn(4, 3), torch.zeros(3, 1).short()])
def a_buffer_named_like_a_function_of_the_generated_code(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.neg_().abs_()
    return y.long() >> 1


@found(lambda: [torch.randn(3, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)])
def an_input_of_a_result_nobody_uses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first, second = x.sin(), y.cos()
    if second.sum() > 100:
        return second
    return first


@found(lambda: [torch.randn(4, 4)])
def out_of_another_shape(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(0)
    torch.add(x, 1, out=out)
    return out * 2


@found(lambda: [torch.randn(8, 3)])
def resized_to_its_own_shape(x: torch.Tensor) -> torch.Tensor:
    part = x.split(2, 0)[-1]
    return part.resize_as_(part)


def walk(x: torch.Tensor) -> Iterator[torch.Tensor]:
    try:
        for i in range(3):
            yield x * i
    finally:
        LOG.append("walked")


def walk_and_more(x: torch.Tensor) -> Iterator[torch.Tensor]:
    LOG.append((yield from walk(x)))
    yield x


@found(lambda: [torch.ones(3)])
def a_generator_inside_another_is_abandoned(x: torch.Tensor) -> torch.Tensor | None:
    for v in walk_and_more(x):
        LOG.append("in")
        return v + 1
    return None


def answering() -> Generator[int, None, int]:
    try:
        yield 1
    except ValueError as error:
        LOG.append(str(error))
        yield 7
    return 5


def asking() -> Generator[int, None, None]:
    yield (yield from answering())


@found(lambda: [torch.ones(3)])
def an_exception_is_thrown_through_yield_from(x: torch.Tensor) -> torch.Tensor:
    steps = asking()
    return x * next(steps) + steps.throw(ValueError("seven")) + next(steps)


@found(lambda: [torch.ones(3, requires_grad=True)])
def a_result_of_an_earlier_graph_is_written_to_in_a_try_block(x: torch.Tensor) -> torch.Tensor:
    for v in [x * 1, x * 2]:
        try:
            v *= 0.5
        except RuntimeError:
            LOG.append("wrong")
        finally:
            print("written")
    return v + 1


@found(lambda: [torch.ones(3), 2], lambda: [torch.ones(3), 3])
def an_exception_is_made_with_a_symbolic_int(x: torch.Tensor, n: int) -> torch.Tensor:
    try:
        raise IndexError(n + 1)
    except IndexError as error:
        LOG.append(str(error))
    return x + n


@found(*[lambda: [torch.ones(3, requires_grad=True)]] * 2)
def gradients_around_a_break_without_gradients(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    before = x * 2
    with torch.no_grad():
        print("inside")
        inside = x + 1
    return before, inside, x * 3


@found(*[lambda: [torch.ones(3, requires_grad=True)]] * 2)
def gradients_are_switched_on(x: torch.Tensor) -> list[Any]:
    with torch.no_grad():
        print("off")
        with torch.enable_grad():
            y = x * 2
            print("on")
            y = y + 1
        return [y, y.requires_grad, (y * 2).requires_grad]


@found(*[lambda: [torch.ones(1, 1, 3), 2]] * 2, lambda: [torch.ones(1, 1, 3), 3])
def a_break_whose_reason_has_several_lines(x: torch.Tensor, scale: int) -> torch.Tensor:
    return torch.nn.functional.interpolate(x, scale_factor=scale)


@found(lambda: [torch.ones(3, requires_grad=True)])
def a_gradient_that_depends_on_nothing(x: torch.Tensor) -> torch.Tensor:
    return x.round()


@found(lambda: [torch.randn(3, 4, 2).transpose(0, 2)])
def which_elements_are_in_a_permuted_tensor(x: torch.Tensor) -> torch.Tensor:
    return torch.isin(x.int(), x.int())


class Loose:
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@found(lambda: [torch.ones(3), Loose()])
def an_attribute_comes_and_goes(x: torch.Tensor, thing: Any) -> torch.Tensor:
    LOG.append(getattr(thing, "tag", None))
    thing.tag = 1
    if hasattr(thing, "tag"):
        del thing.tag
    LOG.append(hasattr(thing, "tag"))
    return x + 1


@found(lambda: [torch.randn(4, 3).requires_grad_()])
def rows_shorter_than_a_vector_are_kept_between_passes(x: torch.Tensor) -> torch.Tensor:
    return x.exp() * x.flatten()[:3].sum().exp()


@found(lambda: [torch.randn(0, 3).requires_grad_()])
def rows_of_nothing_are_joined_and_summed(x: torch.Tensor) -> torch.Tensor:
    return F.normalize(torch.vstack([x, x.abs()]), dim=0)


@found(lambda: [torch.randn(64), torch.randn(64, 40)])
def tensors_are_named_like_loops(line: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
    u, rows = q.sum(1), q.sum(0)
    k, explicit = u.cumsum(0), (q * line[:, None]).amax(0)
    return u.tile(3).sum(), k * u, rows + explicit, q.softmax(0), (q.mT + rows[:, None]).var()


@found(lambda: [torch.ones(3), 2], lambda: [torch.ones(3), 3], lambda: [torch.ones(3), 4], lambda: [torch.ones(3), 6])
def a_list_of_changing_length_is_extended(x: torch.Tensor, n: int) -> torch.Tensor:
    for v in (x * k for k in range(2)):
        LOG.extend(i for i in range(n % 3))
        if v.sum().item() > 0:
            n += 1
    return x + n


@found(*(lambda k=k: [torch.randn(4), k] for k in (0.25, 0.5, 0.75)))
def a_number_that_changes_fills(x: torch.Tensor, k: float) -> tuple[torch.Tensor, ...]:
    return x.masked_fill(x > 0, k), F.threshold(x, 0.1, k)


@found(*(lambda n=n: [torch.arange(2 * n).reshape(2, n)] for n in (4, 5, 2)))
def a_product_fails_for_some_sizes(x: torch.Tensor) -> torch.Tensor:
    try:
        return x @ (x + 1)
    except RuntimeError:
        return x - 1


@found(lambda: [torch.randn(4, 3), torch.randn(4, 3)])
def complex_numbers_returned_as_they_are_made(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(torch.stack([x, y], -1))


@found(lambda: [torch.randn(4, 3)])
def new_of_a_size_and_of_its_contents(x: torch.Tensor) -> Any:
    return x.new(x.size()).fill_(7), x.new(tuple(x.size())), x.new(x[0, 0].size()).fill_(1)


@found(lambda: [torch.randn(8, 5)])
def values_put_at_places_known_while_compiling(x: torch.Tensor) -> Any:
    backwards, same = torch.zeros(8, 5), torch.zeros(8, 5)
    backwards[torch.arange(7, -1, -1)] = x
    same[torch.full((3,), 2)] = x[0]
    return backwards, same, same.sum(0)


@pytest.mark.parametrize("backend", ["eager", "dovetail"])
@pytest.mark.parametrize("program", FOUND, ids=lambda program: program.__name__)
def test_equal_to_eager(program: Callable[..., Any], backend: str) -> None:
    seen: list[list[Any]] = []
    for run in (program, dovetail.compile(program, backend=backend, options={"fallback_to_eager": False})):
        LOG.clear()
        rounds = []
        for make_inputs in FOUND[program]:
            torch.manual_seed(0)
            inputs = make_inputs()
            result = run(*inputs)
            rounds.append([result, inputs, gradients(inputs, result)])
        seen.append([rounds, list(LOG)])
    dovetail.reset()
    assert difference(seen[1], seen[0], "program") is None


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("text", sorted(Path(__file__).parent.glob("found/*.txt")), ids=lambda path: path.stem)
def test_a_shrunk_program_is_equal_to_eager(text: Path, dynamic: bool | None) -> None:
    why = why_different(text.read_text(), find_peer("dovetail"), {"dynamic": dynamic})
    assert why is None, why


def leaves_a_loop_by_an_instruction(x: torch.Tensor) -> torch.Tensor:
    for v in noting(x):
        x[0] = v.sum()  # a leaf that requires a gradient
    return x


def leaves_a_loop_by_a_handler(x: torch.Tensor) -> torch.Tensor:
    for v in noting(x):
        try:
            raise RuntimeError("first")
        except RuntimeError as error:
            print(v.shape, end="")
            raise RuntimeError("second") from error
    return x


def noting(x: torch.Tensor) -> Iterator[torch.Tensor]:
    try:
        yield x * 2
        yield x * 3
    finally:
        LOG.append("ended")


@pytest.mark.parametrize("program", [leaves_a_loop_by_an_instruction, leaves_a_loop_by_a_handler])
def test_a_loop_left_by_an_exception_ends_its_generator_at_once(program: Callable[..., Any]) -> None:
    seen = []
    for run in (program, dovetail.compile(program, backend="eager", options={"fallback_to_eager": False})):
        LOG.clear()
        for _ in range(2):
            try:
                run(torch.ones(3, requires_grad=True))
            except RuntimeError:
                LOG.append("caught")
        seen.append(list(LOG))
    dovetail.reset()
    assert seen[1] == seen[0] == ["ended", "caught"] * 2


@pytest.mark.parametrize("program", [
    lambda x: x.floor_().add_(x[:1]), lambda x: x[-1].lerp_(x[-1, 0], 0.5), lambda x: x[1:].copy_(x[:-1]),
])  # fmt: skip
@pytest.mark.parametrize("dynamic", [False, True])
def test_writing_where_one_reads_is_refused(program: Callable[..., Any], dynamic: bool) -> None:
    for run in (program, dovetail.compile(program, dynamic=dynamic)):
        with pytest.raises(RuntimeError, match="single memory location"):
            run(torch.randn(3, 4, 5))
    dovetail.reset()


def test_a_set_left_to_python_is_compared_there() -> None:
    def f(x: torch.Tensor, held: set[int]) -> Any:
        return x * 2, held <= {1, 2, 3}, held == {1}, held - {1}

    compiled = dovetail.compile(f, backend="eager")
    for held in ({1}, {1, 2}, {1, 2, 5}, {1, 2, 5, 6}, {7}):  # its length keeps changing
        assert compiled(torch.ones(2), held)[1:] == f(torch.ones(2), held)[1:]
    dovetail.reset()


def test_many_numbers_beside_half_precision() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.half() + 1
        return torch.tensor(x.tolist()) * y

    compiled = dovetail.compile(f, options={"fallback_to_eager": False})
    for step in range(3):
        x = torch.arange(20.0) / (step + 4)
        assert torch.equal(compiled(x), f(x))
    dovetail.reset()


@pytest.mark.parametrize("training", [False, True])
def test_noise_for_a_tensor_that_is_not_row_major(training: bool) -> None:
    def f(x: torch.Tensor, p: torch.Tensor) -> Any:
        return torch.nn.functional.rrelu(x.t(), training=training), p.t().clone().t().bernoulli_(p)

    seen = []
    for run in (f, dovetail.compile(f)):
        torch.manual_seed(0)
        seen.append(run(torch.linspace(-2, 2, 12).reshape(4, 3), torch.linspace(0, 1, 12).reshape(3, 4)))
    dovetail.reset()
    for got, want in zip(seen[1], seen[0], strict=True):
        torch.testing.assert_close(got, want, check_stride=True)


def closes_one(v: torch.Tensor) -> None:
    other = stroll(v, [])
    next(other)
    other.close()


def lets_one_raise(v: torch.Tensor) -> None:
    with contextlib.suppress(ZeroDivisionError):
        list(v * (1 // n) for n in (1, 0))


def keeps_an_error(v: torch.Tensor) -> None:
    try:
        {}[3]
    except KeyError:
        try:
            raise ValueError(v)
        except ValueError as error:
            kept = error  # noqa: F841


def stroll(v: torch.Tensor, log: list[str]) -> Any:
    try:
        yield v * 2
        yield v
    finally:
        log.append("walked")


@pytest.mark.parametrize("before", [closes_one, lets_one_raise, keeps_an_error])
def test_what_an_exception_passed_is_let_go_when_capture_ends(before: Any) -> None:
    def f(x: torch.Tensor, log: list[str]) -> Any:
        for v in stroll(x, log):
            x.sum().item()
            before(v)
            return v + 1  # which drops the generator

    gc.collect()
    gc.disable()
    try:
        compiled = dovetail.compile(f)
        for _ in range(2):
            log: list[str] = []
            assert torch.equal(compiled(torch.ones(3), log), torch.full((3,), 3.0)) and log == ["walked"]
    finally:
        gc.enable()
        dovetail.reset()
