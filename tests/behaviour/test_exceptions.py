"""SPEC C3, C4: graph breaks where exceptions are handled. The exception that is being handled, its context and
its traceback are as in plain Python, in the broken part and after it."""
from __future__ import annotations

import contextlib
import io
import logging
import sys
import traceback
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dovetail
from dovetail.capture.frame import traceback_at
from dovetail.events import EVENTS
from dovetail.util.loc import Loc
from tests.behaviour.running import ANY, Suite

suite = Suite()
case = suite.case


def twice() -> list[tuple[torch.Tensor]]:
    return [(torch.ones(3),), (torch.ones(3),)]


@case("C4")
def an_exception_that_is_no_exception_leaves_a_generator() -> Any:
    class Jump(BaseException):
        pass

    def steps(x: torch.Tensor) -> Any:
        yield x + 1
        raise Jump(x * 2)

    def f(x: torch.Tensor) -> Any:
        made = []
        try:
            for step in steps(x):
                made.append(step)
        except Jump as jump:
            made += jump.args
        return made

    return f, (torch.ones(3),)


@case("C4")
def what_an_op_refuses_has_the_context_of_the_program() -> Any:
    def f(x: torch.Tensor) -> Any:
        try:
            x = x @ torch.ones(5, 5)
        except RuntimeError as e:
            return x + 1, repr(e.__context__)

    return f, twice()


@case("C4", breaks=2)
def a_text_that_cannot_be_made_of_a_tensor() -> Any:
    def f(x: torch.Tensor) -> Any:
        made = [f"{x}"]
        for text in ("{:.1f}", "{:d}"):
            try:
                made.append(f"{x:.2f}" if text == "{:d}" else text.format(x))
            except TypeError as error:
                made.append(str(error))
        return x + 1, made

    return f, twice()


@case("C3", breaks=1)
def break_in_except_block() -> Any:
    def f(x: torch.Tensor) -> Any:
        try:
            raise ValueError("a")
        except ValueError as e:
            y = x + 1
            print("in except", e, sys.exception() is e)
            y = y * 3
        return y + 1

    return f, twice()


def handled() -> tuple[Any, ...]:
    """What is being handled where this is called, and in what context that came about."""
    found: list[Any] = [sys.exception()]
    while found[-1] is not None:
        found.append(found[-1].__context__)
    return tuple(map(repr, found))


@case("C4", breaks=ANY)
def an_exception_is_raised_on_after_a_break_in_its_handler() -> Any:
    def f(x: torch.Tensor) -> Any:
        seen: list[Any] = []
        try:
            try:
                raise ValueError("a")
            except ValueError:
                seen.append((int(x.sum().item()), handled()))
                raise
            finally:
                seen.append((int((x + 1).sum().item()), handled()))
        except ValueError:
            seen.append(handled())
        seen.append(handled())
        return x + 1, seen

    return f, twice()


@case("C4", breaks=ANY)
def another_exception_is_raised_after_a_break_in_a_handler() -> Any:
    def f(x: torch.Tensor) -> Any:
        seen: list[Any] = []
        for i in range(2):
            try:
                try:
                    raise ValueError(i)
                except ValueError:
                    seen.append((int(x.sum().item()), handled()))
                    raise KeyError("k")  # noqa: B904
            except KeyError:
                seen.append(handled())
                x = x + int(x.sum().item())
        seen.append(handled())
        return x + 1, seen

    return f, twice()


class Refused(Exception):
    def __init__(self, text: str, code: int = 3) -> None:
        super().__init__(text)
        self.code = code


@case("C4", tensors=False)
def own_exception_leaves_the_frame() -> Any:
    def f(x: torch.Tensor) -> Any:
        raise Refused("no", 4)

    return f, twice()


@case("C4")
def texts_of_python() -> Any:
    def takes(a: Any, b: Any, *, c: Any) -> None:
        pass

    def f(x: torch.Tensor) -> Any:
        texts = []
        for args, named in (((), {}), ((1,), {}), ((1, 2), {}), ((1, 2, 3), {})):
            try:
                takes(*args, **named)
            except TypeError as error:
                texts.append(str(error))
        for wrong in (lambda: x.nothing, lambda: (lambda: 0)(1)):  # type: ignore[misc]
            try:
                wrong()
            except (AttributeError, TypeError) as error:
                texts.append(str(error))
        return x + 1, texts

    return f, twice()


@case("C4")
def profiler_labels() -> Any:
    def f(x: torch.Tensor) -> Any:
        with torch.profiler.record_function("forward"):
            y = x + 1
        return y * 2

    return f, twice()


@case("C3", breaks=1)
def break_within_a_label() -> Any:
    def f(x: torch.Tensor) -> Any:
        with torch.profiler.record_function("forward"):
            y = x + 1
            print("in between")
            y = y * 2
        return y + 1

    return f, twice()


@case("C4")
def context_taken_away_or_in_a_ring() -> Any:
    def f(x: torch.Tensor) -> Any:
        try:
            try:
                raise ValueError("a")
            except ValueError as first:
                error, first.__context__ = KeyError("b"), first
                try:
                    raise error
                finally:
                    error.__context__ = None
        except KeyError as caught:
            return x + 1, caught.__context__

    return f, twice()


@case("C3", breaks=1)
def bare_raise_after_a_break() -> Any:
    def f(x: torch.Tensor) -> Any:
        try:
            raise ValueError("a")
        except ValueError:
            print((x + 1).shape)
            raise

    return f, twice()


@case("C3", breaks=3)
def nested_excepts_and_finally() -> Any:
    def f(x: torch.Tensor) -> Any:
        try:
            try:
                raise ValueError("a")
            except ValueError as e:
                x = x + 1
                try:
                    raise KeyError("k")
                except KeyError as k:
                    x = x * 2
                    print(repr(sys.exception()), k.__context__ is e)
                    x = x + 4
                print(repr(sys.exception()))
                x = x + 5
        finally:
            x = x + 6
            print("finally")
            x = x * 7
        return x

    return f, twice()


@case("C3", breaks=3)
def raised_by_the_broken_instruction_while_another_is_handled() -> Any:
    def f(x: torch.Tensor) -> Any:
        try:
            raise ValueError("a")
        except ValueError:
            try:
                x = x + 1
                print(end=3)  # type: ignore[call-overload]
            except TypeError as e:
                x = x + 2
                print(repr(e.__context__))
                x = x + 3
        print(sys.exc_info())
        return x

    return f, twice()


@case("C3", breaks=5)
def context_manager_that_prints_and_swallows() -> Any:
    class Context:
        def __enter__(self) -> None:
            """Nothing to do."""

        def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
            print("exit", kind, sys.exception() is error)
            return True

    def f(x: torch.Tensor) -> Any:
        with Context():
            x = x + 1
            print("body")
            x = x * 2
            raise ValueError("w")
        print(sys.exc_info())
        return x + 3

    return f, twice()


@case("C4")
def an_exception_left_with_a_context_manager_has_a_traceback() -> Any:
    class Context:
        seen: Any = ()

        def __enter__(self) -> Any:
            return self

        def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
            traceback.clear_frames(trace)
            self.seen = kind, trace is not None, sys.exc_info()[:2] == (kind, error), sys.exc_info()[2] is not None
            return True

    def f(x: torch.Tensor) -> Any:
        with Context() as context:
            x = x * 2
            raise ValueError("left")
        with contextlib.suppress(KeyError), contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            raise KeyError("left")
        return x + context.seen[1], context.seen

    return f, twice()


@case("C3", breaks=ANY)
def the_traceback_is_read_where_a_context_manager_is_left() -> Any:
    class Context:
        seen: Any = ()

        def __enter__(self) -> Any:
            return self

        def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
            self.seen = trace.tb_frame.f_code.co_name, trace.tb_lineno, sys.exc_info()[2].tb_lineno  # type: ignore[union-attr]
            return True

    def f(x: torch.Tensor) -> Any:
        with Context() as context:
            x = x * 2
            raise ValueError("left")
        return x + 1, context.seen

    return f, twice()


@case("C4")
def what_is_thrown_into_a_generator_has_the_context_of_its_handler() -> Any:
    def steps() -> Any:
        try:
            raise KeyError("a")
        except KeyError:
            yield 1

    def f(x: torch.Tensor) -> Any:
        waiting = steps()
        next(waiting)
        try:
            waiting.throw(ValueError)
        except ValueError as e:
            return x + 1, repr(e.__context__)

    return f, twice()


@case("C4")
def a_clause_that_names_no_exception_is_refused() -> Any:
    def f(x: torch.Tensor) -> Any:
        kinds: Any = int
        try:
            try:
                raise KeyError("a")
            except kinds:
                return x
        except TypeError as e:
            return x + 1, str(e), repr(e.__context__)

    return f, twice()


@case("C4")
def a_block_of_no_context_manager_is_refused() -> Any:
    class Entered:
        def __enter__(self) -> None:
            """And never left."""

    def f(x: torch.Tensor) -> Any:
        said = []
        for manager in (3, Entered()):
            try:
                with manager:  # type: ignore[attr-defined]
                    x = x * 3
            except TypeError as e:
                said.append(str(e))
        return x + 1, said

    return f, twice()


@case("C4")
def nothing_is_handled() -> Any:
    return lambda x: (x + 1, sys.exception(), sys.exc_info()), twice()


@case("C3", breaks=ANY)
def the_exception_is_asked_for_in_a_resumed_handler() -> Any:
    def f(x: torch.Tensor) -> Any:
        try:
            raise ValueError("a")
        except ValueError as e:
            x = x + 1
            print("handled")
            kind, error, lines = sys.exc_info()
            return x * 2, kind, error is e, lines is e.__traceback__

    return f, twice()


@case("C4")
def a_generator_is_sent_what_its_iterator_does_not_take() -> Any:
    def f(x: torch.Tensor) -> Any:
        said: list[Any] = []

        def steps() -> Any:
            try:
                yield from range(3)
            finally:
                said.append("left")

        def last() -> Any:
            given = yield
            return given + 1

        left, other = steps(), last()
        next(left), next(other)
        try:
            left.send(x)
        except AttributeError as error:
            said.append(str(error))
        try:
            other.send(x)
        except StopIteration as end:
            said.append(end.value)
        return x + 1, said

    return f, twice()


@case("C3", breaks=1)
def a_group_of_exceptions_with_a_code() -> Any:
    class Coded(ExceptionGroup):
        code: int

        def __new__(cls, message: str, errors: Any, code: int) -> Any:
            made = super().__new__(cls, message, errors)
            made.code = code
            return made

    def f(x: torch.Tensor) -> Any:
        made = Coded("several", [ValueError(1), KeyError(2)], 7)
        print("here")
        return x + 1, made.message, made.exceptions[0].args, made.args[2], made.code, len(made.exceptions)

    return f, twice()


@case("C4")
def a_stop_that_leaves_a_generator_is_the_cause_of_an_error() -> Any:
    @contextlib.contextmanager
    def steps() -> Any:
        yield

    def stopping() -> Any:
        yield 1
        raise StopIteration(5)

    def f(x: torch.Tensor) -> Any:
        said, stop = [], StopIteration("here")
        try:
            with steps():
                raise stop
        except StopIteration as error:
            said.append(error is stop)
        try:
            list(stopping())
        except RuntimeError as error:
            said += [str(error), repr(error.__cause__), repr(error.__context__)]
        return x + 1, said

    return f, twice()


@case("C4")
def a_context_that_was_taken_away_stays_away() -> Any:
    @contextlib.contextmanager
    def steps() -> Any:
        try:
            yield
        except IndexError:
            error = KeyError("other")
            try:
                raise error
            finally:
                error.__context__ = None

    def f(x: torch.Tensor) -> Any:
        try:
            with steps():
                raise IndexError(3)
        except KeyError as error:
            return x + 1, repr(error.__context__)

    return f, twice()


@case("C3", breaks=1)
def exception_with_an_init_of_its_own() -> Any:
    class Stopped(Exception):
        def __init__(self, value: torch.Tensor) -> None:
            super().__init__("stopped")
            self.value = value

    def f(x: torch.Tensor) -> Any:
        try:
            raise Stopped(x * 2)
        except Stopped as e:
            print(e, e.args)
            return e.value + 1

    return f, twice()


@case("C3", breaks=1)
def context_across_an_inlined_call() -> Any:
    def inner() -> None:
        raise KeyError("inner")

    def f(x: torch.Tensor) -> Any:
        try:
            raise ValueError("outer")
        except ValueError:
            try:
                inner()
            except KeyError as e:
                print(repr(e.__context__), e.__cause__, e.__suppress_context__)
        return x + 1

    return f, twice()


@case("C3", breaks=1)
def error_through_native_code_keeps_its_chain() -> Any:
    def key(item: Any) -> Any:
        raise KeyError(item) from ValueError("cause")

    def f(x: torch.Tensor) -> Any:
        try:
            sorted([1, 2], key=key)
        except KeyError as e:
            print(repr(e.__cause__), e.__suppress_context__, repr(e.__context__))
        return x + 1

    return f, twice()


@case("C4")
def errors_about_tensors_that_are_no_text_and_no_key() -> Any:
    def f(x: torch.Tensor, n: int) -> Any:
        said: list[Any] = []
        for make in (lambda: ",".join([f"{n}", x]), lambda: ",".join([f"{n}", n]), lambda: {x: 1}[x + 1]):  # type: ignore[list-item]
            try:
                make()
            except (TypeError, KeyError) as error:
                said.append(error.args[0])
        return x * n, said

    return f, [(torch.ones(2), 3), (torch.ones(2) + 1, 4)]


test_program = suite.test()


def test_traceback_of_a_captured_exception() -> None:
    def inner(x: torch.Tensor) -> None:
        raise ValueError("inner")

    def f(x: torch.Tensor) -> Any:
        try:
            inner(x)
        except ValueError:
            seen.append(traceback.format_exc())
        return x + 1

    seen: list[str] = []
    f(torch.ones(2))
    dovetail.compile(f, backend="eager")(torch.ones(2))
    lines = [[line for line in text.splitlines() if line.strip("~^ ")] for text in seen]
    assert lines[0] == lines[1]


def test_traceback_at() -> None:
    found = traceback_at([Loc("a.py", 3, "C.g"), Loc("b.py", 70, "f")])
    frames = traceback.extract_tb(found)
    assert [(frame.filename, frame.lineno, frame.name) for frame in frames] == [("b.py", 70, "f"), ("a.py", 3, "g")]


def test_nothing_is_handled_after_a_resumed_handler() -> None:
    def f(x: torch.Tensor) -> Any:
        try:
            x = x + 1
            int(print("a"))  # type: ignore[arg-type]
        except TypeError:
            x = x * 2
        raise KeyError("later")

    with pytest.raises(KeyError) as caught:
        dovetail.compile(f, backend="eager")(torch.ones(2))
    assert caught.value.__context__ is None


def test_whether_an_exception_is_handled_is_guarded() -> None:
    compiled = dovetail.compile(lambda x: (x + 1, repr(sys.exception())), backend="eager")
    assert compiled(torch.ones(2))[1] == "None"
    try:
        raise ValueError("a")
    except ValueError:
        assert compiled(torch.ones(2))[1] == "ValueError('a')"


def test_nothing_is_handled_after_a_generator_is_given_up() -> None:
    def f(x: torch.Tensor, rows: list[torch.Tensor]) -> Any:
        made = []
        try:
            for row in (row * 2 for row in rows):
                try:
                    made.append(row + int(x.sum().item()))
                    raise ValueError("given up")
                finally:
                    made.append(x)
        except ValueError as error:
            made.append(x + len(str(error)))
        return made

    inputs = torch.ones(3), [torch.ones(3), torch.zeros(3)]
    torch.testing.assert_close(dovetail.compile(f)(*inputs), f(*inputs))
    assert sys.exception() is None


def test_logs_and_warnings_name_the_users_line() -> None:
    stream = io.StringIO()
    log = logging.Logger("test")
    log.addHandler(logging.StreamHandler(stream))
    log.handlers[0].setFormatter(logging.Formatter("%(filename)s:%(funcName)s:%(message)s"))

    def f(x: torch.Tensor, n: int) -> Any:
        log.warning("n is %d", n)
        warnings.warn("old", stacklevel=1)
        return x + 1

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dovetail.compile(f, backend="eager", fullgraph=True)(torch.ones(2), 3)
    assert stream.getvalue() == "test_exceptions.py:f:n is 3\n"
    assert [(w.filename, str(w.message)) for w in caught] == [(__file__, "old")]


def test_a_function_that_always_raises_is_left_alone() -> None:
    class Found(Exception):
        pass

    def stop(module: Any, args: Any, output: torch.Tensor) -> None:
        raise Found(output)

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 3))
    model[1].register_forward_hook(stop)
    compiled, captures = dovetail.compile(model, backend="eager"), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            before = EVENTS.counts["compile"]
            with pytest.raises(Found) as found:
                compiled(torch.ones(3))
            assert torch.equal(found.value.args[0], model[1].forward(model[0](torch.ones(3))))
            captures.append(EVENTS.counts["compile"] - before)
    assert captures[-4:] == [0] * 4
    assert any("raised in 8 calls" in str(w.message) for w in caught)


R = torch.randn
WRONG: dict[str, Any] = {
    "sum over a dimension that is not there": lambda: (lambda x: x.sum(3), R(4, 5)),
    "softmax over one": lambda: (lambda x: x.log_softmax(4), R(4, 5)),
    "flip of one": lambda: (lambda x: x.flip(5) + 1, R(2, 2)),
    "copy of another size": lambda: (lambda x, y: x.clone().copy_(y), R(3), R(2)),
    "write of another type": lambda: (lambda x: x.int().mul_(x), R(2)),
    "difference of bools": lambda: (lambda x: x.bool().sub_(True), R(2)),
    "slice_scatter": lambda: (lambda x, y: x.slice_scatter(y, 1, 4, 10), R(16, 16), R(16, 2)),
    "select_scatter": lambda: (lambda x, y: x.select_scatter(y, 1, 0), R(4, 5), R(3)),
    "index_put": lambda: (lambda x, y: torch.index_put(x, [torch.tensor([0, 1])], y), R(4, 5), R(3, 5)),
    "negative label": lambda: (torch.nn.functional.cross_entropy, R(4, 5), torch.tensor([0, 1, -1, 2])),
    "division by zero": lambda: (lambda x, y: x // y + 1, torch.arange(3), torch.arange(3)),
    "remainder of zero": lambda: (lambda x: (x + 1) % x, torch.arange(3)),
    "no probability": lambda: (torch.nn.functional.binary_cross_entropy, R(9), torch.rand(9)),
    "no probability wanted": lambda: (torch.nn.functional.binary_cross_entropy, torch.rand(9), R(9)),
    "odd glu": lambda: (lambda x: torch.nn.functional.glu(x), R(2, 5)),
    "pixel_shuffle": lambda: (lambda x: torch.nn.functional.pixel_shuffle(x, 2), R(1, 3, 2, 2)),
    "repeat": lambda: (lambda x: x.repeat(2), R(2, 2)),
    "Output size": lambda: (lambda x, w: torch.conv_transpose2d(x, w, padding=1).exp(), R(1, 1, 1, 1), R(1, 1, 2, 2)),
    "pooling of padding alone": lambda: (lambda x: torch.nn.functional.avg_pool2d(x, 2, padding=3), R(1, 3, 8, 8)),
    "variance of integers": lambda: (lambda x: x.long().var(), R(3)),
    "singular matrix": lambda: (lambda x: torch.linalg.inv(x), torch.zeros(2, 2)),
    "not positive": lambda: (lambda x: torch.linalg.cholesky(x) + 1, -torch.eye(2)),
    "assertion": lambda: (lambda x: (torch._assert_async((x > 0).all(), "not positive"), x + 1), torch.zeros(2)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_eager_refuses(name: str) -> None:
    """The same class of exception, and no result made of whatever was in memory."""
    fn, *args = WRONG[name]()
    with pytest.raises(Exception) as eager:
        fn(*args)
    with pytest.raises(eager.type, match=name if name in str(eager.value) else None):
        dovetail.compile(lambda *given: fn(*given))(*args)


@torch.library.custom_op("dovetail_tests::tell", mutates_args=())
def tell(x: torch.Tensor) -> None:
    print("told", x.sum().item())


@tell.register_fake
def _(x: torch.Tensor) -> None:
    return None


def test_an_op_that_only_acts_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    def alone(x: torch.Tensor) -> None:
        tell(x)

    def among(x: torch.Tensor) -> torch.Tensor:
        tell(x)
        return x + 1

    for program in (alone, among):
        dovetail.compile(program)(torch.ones(2))
        assert capsys.readouterr().out == "told 2.0\n"


class Noting:
    def __enter__(self) -> None:
        NOTED.append("in")

    def __exit__(self, *_: object) -> None:
        NOTED.append("out")


NOTED: list[str] = []


def _caught(x: torch.Tensor, i: torch.Tensor, rest: Any) -> Any:
    try:
        rest()
        return x.gather(0, i)
    except RuntimeError as error:
        return str(error)


def _ended(x: torch.Tensor, i: torch.Tensor, rest: Any) -> Any:
    try:
        rest()
        return _caught_otherwise(x, i)
    finally:
        NOTED.append("finally")


def _caught_otherwise(x: torch.Tensor, i: torch.Tensor) -> Any:
    try:
        return torch.rand(3).gather(0, i) + x
    except KeyError:
        return None


def _within(x: torch.Tensor, i: torch.Tensor, rest: Any) -> Any:
    with Noting():
        rest()
        return x.gather(0, i)


def _unseen(x: torch.Tensor, i: torch.Tensor, rest: Any) -> Any:
    with torch.no_grad():
        rest()
        return x.gather(0, i)


def _without_saved_hooks(x: torch.Tensor, i: torch.Tensor, rest: Any) -> Any:
    with torch.autograd.graph.disable_saved_tensors_hooks("none"):
        rest()
        return x.gather(0, i)


@pytest.mark.parametrize("rest", [lambda: None, lambda: print(end="")], ids=["whole", "broken"])
@pytest.mark.parametrize("program", [_caught, _ended, _within, _unseen, _without_saved_hooks])
def test_what_a_graph_raises_is_seen_by_the_program(program: Any, rest: Any) -> None:
    """By `except`, `finally` and `with`, in the frame that the graph is of and around it."""

    def outcome(call: Any, at: int) -> list[Any]:
        NOTED.clear()
        torch.manual_seed(0)
        try:
            found = call(torch.ones(3), torch.tensor([at]), rest)
        except RuntimeError as error:
            found = type(error), str(error)
        is_on = torch._C._autograd._saved_tensors_hooks_is_enabled()
        return [found, list(NOTED), torch.is_grad_enabled(), is_on, torch.rand(1)]

    compiled = dovetail.compile(program)
    for at in (1, 7, 7, 2):
        assert repr(outcome(compiled, at)) == repr(outcome(program, at))


def _written_and_caught(x: torch.Tensor, i: torch.Tensor) -> Any:
    try:
        with torch.no_grad():
            x.add_(1)
            y = x[i]
            return y + x.mul_(2).sum()
    except IndexError:
        return x + 100


def _written_and_caught_around(x: torch.Tensor, i: torch.Tensor) -> Any:
    try:
        return _written(x, i)
    except:  # noqa: E722
        return x - 1


def _written(x: torch.Tensor, i: torch.Tensor) -> Any:
    x.add_(1)
    x.view(-1)[i] = 5.0
    return x.mul_(3).sum()


def _taken(x: torch.Tensor, i: torch.Tensor) -> Any:
    try:
        taken = x.add_(1).take(i) + torch.rand(1)
        x.mul_(2)
        return taken
    except (RuntimeError, IndexError) as error:
        return str(error)


@pytest.mark.parametrize("backend", ["dovetail", "eager"])
@pytest.mark.parametrize("program", [_written_and_caught, _written_and_caught_around, _written, _taken])
def test_what_a_graph_raises_that_writes_to_its_inputs(program: Any, backend: str) -> None:
    def outcome(call: Any, at: int) -> list[Any]:
        torch.manual_seed(0)
        x = torch.ones(3, 2)
        try:
            found = call(x, torch.tensor([at]))
        except IndexError as error:
            found = type(error), str(error)
        return [found, x, torch.rand(1)]

    compiled = dovetail.compile(program, backend=backend)
    for at in (1, 7, 7, 2)[: 1 if backend == "eager" else None]:
        assert repr(outcome(compiled, at)) == repr(outcome(program, at))


@pytest.mark.parametrize("shape", [(2, 4), (2, 4, 3), (4,)])
def test_a_target_that_does_not_exist_is_refused_where_nobody_reads_the_loss(shape: tuple[int, ...]) -> None:
    def f(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        F.cross_entropy(x, target, ignore_index=7)
        return x + 1

    def outcome(call: Any, at: int) -> Any:
        try:
            return call(torch.ones(shape), torch.full([2, *shape[2:]] if shape[1:] else [], at))
        except IndexError as error:
            return str(error)

    compiled = dovetail.compile(f)
    for at in (3, 4, 7, -1):
        assert repr(outcome(compiled, at)) == repr(outcome(f, at))


def test_lines_of_what_passes_generators() -> None:
    def inner(x: torch.Tensor) -> Any:
        yield x
        raise ValueError(1)

    def outer(x: torch.Tensor) -> Any:
        try:
            yield from inner(x)
        except KeyError:
            raise

    def f(x: torch.Tensor) -> Any:
        found: list[Any] = []
        try:
            list(outer(x * 2))
        except ValueError as error:
            found.append(error)
        for given in (KeyError(2), KeyError(3)):
            made = outer(x)
            next(made)
            try:
                made.throw(given)
            except KeyError as error:
                found.append(error)
        return found

    def lines(found: list[Any]) -> Any:
        return [[(place.lineno, place.name) for place in traceback.extract_tb(error.__traceback__)] for error in found]

    plain, ours = f(torch.ones(2)), dovetail.compile(f, backend="eager", fullgraph=True)(torch.ones(2))
    assert lines(ours) == lines(plain)


@pytest.mark.filterwarnings("error")
def test_an_exception_in_each_call_of_what_broke_the_graph_is_nobodys_frame() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        try:
            open("/nowhere/at/all")
        except OSError:
            y = y + 1
        return y.cos()

    dovetail.reset()
    compiled = dovetail.compile(f, backend="eager")
    for _ in range(12):
        assert torch.equal(compiled(torch.ones(3)), f(torch.ones(3)))
    assert "StopIteration" not in str(dovetail.report())
