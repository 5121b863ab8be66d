"""SPEC C4: `except*` and exception groups, as in plain Python: which clauses run, what is raised on, and the
context, cause, notes and lines of every exception in it."""
from __future__ import annotations

import sys
import traceback
from typing import Any

import pytest
import torch

import dovetail
from dovetail.events import EVENTS


class Marked(ExceptionGroup):
    """Keeps its mark when it is split."""

    def __new__(cls, message: str, parts: Any, mark: int) -> Any:
        made = super().__new__(cls, message, parts)
        made.mark = mark
        return made

    def derive(self, parts: Any) -> Any:
        return Marked(self.message, parts, self.mark + 1)


class Own(ExceptionGroup):
    """Splits in its own way."""

    def split(self, kinds: Any) -> Any:
        return ExceptionGroup("own", [KeyError("split")]), None


def fresh(*parts: Any) -> ExceptionGroup:
    inner = ExceptionGroup("h", [ValueError(3), KeyError(4)])
    return ExceptionGroup("g", parts or [ValueError(1), TypeError(2), inner])


def nothing_raised(x: Any, seen: list[Any]) -> Any:
    try:
        x = x + 1
    except* ValueError:
        x = x * 7
    else:
        x = x + 2
    finally:
        x = x + 3
    return x


def no_match(x: Any, seen: list[Any]) -> Any:
    try:
        x = x + 1
        raise fresh()
    except* OSError:
        x = x * 7


def a_part(x: Any, seen: list[Any]) -> Any:
    try:
        x = x + 1
        raise fresh()
    except* ValueError as e:
        seen += [x * 7, e, sys.exception() is e]


def several(x: Any, seen: list[Any]) -> Any:
    try:
        x = x + 1
        raise fresh()
    except* ValueError as e:
        seen.append(e)
        x = x * 2
    except* OSError:
        x = x * 100
    except* (TypeError, KeyError) as e:
        seen.append(e)
        x = x + 5
    except* Exception:
        x = x * 100
    return x


def all_of_it(x: Any, seen: list[Any]) -> Any:
    try:
        raise fresh()
    except* Exception as e:
        seen.append(e)
        x = x + 1
    return x


def four_kinds(x: Any, seen: list[Any]) -> Any:
    try:
        x = x + 1
        raise fresh()
    except* (OSError, ValueError, TypeError, KeyError) as e:
        seen.append(e)
    try:
        e
    except NameError as gone:
        seen.append(str(gone))
    return x


def raised_in_a_clause(x: Any, seen: list[Any]) -> Any:
    try:
        raise fresh()
    except* ValueError:
        seen.append(x + 1)
        raise OSError("new")
    except* TypeError:
        seen.append(x + 2)


def raised_in_two_clauses(x: Any, seen: list[Any]) -> Any:
    try:
        raise fresh()
    except* ValueError as e:
        raise OSError("new") from e
    except* TypeError:
        seen.append(x + 2)
        raise RuntimeError("newer") from None
    except* KeyError:
        seen.append(x + 3)


def raised_only(x: Any, seen: list[Any]) -> Any:
    try:
        raise fresh()
    except* Exception:
        raise OSError("new")


def raised_again(x: Any, seen: list[Any]) -> Any:
    try:
        raise fresh()
    except* ValueError:
        seen.append(x + 1)
        raise
    except* TypeError:
        seen.append(x + 2)


def all_raised_again(x: Any, seen: list[Any]) -> Any:
    try:
        raise fresh()
    except* ValueError:
        raise
    except* TypeError:
        raise
    except* KeyError:
        raise


def raised_by_name(x: Any, seen: list[Any]) -> Any:
    try:
        raise fresh()
    except* ValueError as e:
        raise e
    except* TypeError:
        raise


def raised_again_by_a_callee(x: Any, seen: list[Any]) -> Any:
    def again() -> None:
        raise

    try:
        raise fresh()
    except* ValueError:
        again()


def raised_again_through_finally(x: Any, seen: list[Any]) -> Any:
    try:
        raise fresh()
    except* ValueError:
        try:
            raise
        finally:
            seen.append(x + 1)


def a_naked_one(x: Any, seen: list[Any]) -> Any:
    try:
        raise ValueError("naked")
    except* ValueError as e:
        seen += [e, e.exceptions[0], x + 1]
    return x


def a_naked_one_without_match(x: Any, seen: list[Any]) -> Any:
    try:
        raise ValueError("naked")
    except* OSError:
        x = x + 1


def a_naked_one_and_another(x: Any, seen: list[Any]) -> Any:
    try:
        raise ValueError("naked")
    except* OSError:
        x = x + 1
    except* ValueError:
        raise KeyError("k")


def a_naked_one_again(x: Any, seen: list[Any]) -> Any:
    try:
        raise ValueError("naked")
    except* ValueError:
        raise


def no_exception(x: Any, seen: list[Any]) -> Any:
    try:
        raise BaseExceptionGroup("b", [KeyboardInterrupt(1), ValueError(2)])
    except* ValueError as e:
        seen.append(e)


def a_group_as_a_kind(x: Any, seen: list[Any]) -> Any:
    try:
        raise fresh()
    except* ExceptionGroup:
        x = x + 1


def no_class_as_a_kind(x: Any, seen: list[Any]) -> Any:
    kinds: Any = (ValueError, 3)
    try:
        raise fresh()
    except* kinds:
        x = x + 1


def notes_and_cause(x: Any, seen: list[Any]) -> Any:
    try:
        try:
            raise LookupError("first")
        except LookupError as first:
            made = fresh()
            made.add_note("a note")
            raise made from first
    except* ValueError as e:
        seen.append(e)
        raise
    except* TypeError:
        raise OSError("new")


def derived(x: Any, seen: list[Any]) -> Any:
    try:
        x = x + 1
        raise Marked("m", [ValueError(1), TypeError(2), KeyError(3)], 10)
    except* ValueError as e:
        seen += [e, e.mark]
        raise
    except* TypeError as e:
        seen += [e, e.mark]


def split_in_its_own_way(x: Any, seen: list[Any]) -> Any:
    try:
        raise Own("m", [ValueError(1)])
    except* KeyError as e:
        seen.append(e)
    return x + 1


def groups_in_groups(x: Any, seen: list[Any]) -> Any:
    try:
        try:
            raise fresh(ValueError(x.shape[0]), fresh(TypeError(5), fresh(ValueError(6))))
        except* TypeError as e:
            seen.append(e)
            x = x * 2
    except* ValueError as e:
        seen.append(e)
        x = x * 3
    return x


def in_a_clause(x: Any, seen: list[Any]) -> Any:
    try:
        raise fresh()
    except* ValueError:
        try:
            raise fresh(OSError(7), KeyError(8))
        except* KeyError as e:
            seen.append(e)
            x = x + 1


def in_a_loop(x: Any, seen: list[Any]) -> Any:
    for i in range(4):
        try:
            if i == 1:
                continue
            raise fresh(ValueError(i)) if i < 3 else fresh(TypeError(i))
        except* ValueError as e:
            seen.append(e)
            x = x + i
        finally:
            x = x * 2
            if i == 3:
                return x
    return x


def raised_by_an_op(x: Any, seen: list[Any]) -> Any:
    try:
        x = x @ torch.ones(5, 5)
    except* RuntimeError as e:
        seen.append(len(e.exceptions))
        x = x + 1
    return x


def raised_by_an_op_in_a_clause(x: Any, seen: list[Any]) -> Any:
    try:
        raise fresh()
    except* ValueError:
        x = x @ torch.ones(5, 5)
    except* TypeError:
        seen.append(x + 1)


def break_in_try(x: Any, seen: list[Any]) -> Any:
    try:
        x = x + 1
        print("here")
        raise fresh()
    except* ValueError as e:
        seen.append(e)
        x = x + 2


def break_in_a_clause(x: Any, seen: list[Any]) -> Any:
    try:
        raise fresh()
    except* ValueError as e:
        x = x + 1
        print(repr(e), sys.exception() is e)
        seen.append(x * 2)
    except* (TypeError, KeyError) as e:
        seen += [e, x * 3]
    return x + 4


def break_and_raised_again(x: Any, seen: list[Any]) -> Any:
    try:
        raise fresh()
    except* ValueError as e:
        x = x + 1
        print(repr(e))
        seen.append(x * 2)
        raise
    except* TypeError as e:
        seen += [e, x * 3]
        raise OSError("new")


def break_and_raised_by_name(x: Any, seen: list[Any]) -> Any:
    try:
        raise fresh()
    except* ValueError as e:
        x = x + 1
        print(repr(e))
        raise e
    except* TypeError as e:
        print(repr(e))


def break_in_finally(x: Any, seen: list[Any]) -> Any:
    try:
        raise fresh()
    except* ValueError:
        x = x + 1
    finally:
        print("finally", repr(sys.exception()))
        seen.append(x * 2)


def raised_by_what_breaks(x: Any, seen: list[Any]) -> Any:
    def outside() -> None:
        print("outside")
        raise fresh()

    try:
        outside()
    except* ValueError as e:
        seen += [e, x * 2]
    except* TypeError:
        raise
    except* KeyError as e:
        raise e


WHOLE = [
    nothing_raised, no_match, a_part, several, all_of_it, four_kinds, raised_in_a_clause, raised_in_two_clauses,
    raised_only, raised_again, all_raised_again, raised_by_name, raised_again_by_a_callee,
    raised_again_through_finally, a_naked_one, a_naked_one_without_match, a_naked_one_and_another,
    a_naked_one_again, no_exception, a_group_as_a_kind, no_class_as_a_kind, notes_and_cause,
    groups_in_groups, in_a_clause, in_a_loop, raised_by_an_op, raised_by_an_op_in_a_clause,
]  # fmt: skip
BROKEN = [break_in_try, break_in_a_clause, break_and_raised_again, break_and_raised_by_name, break_in_finally,
          raised_by_what_breaks, split_in_its_own_way, derived]  # fmt: skip


def shown(value: Any, depth: int = 0) -> Any:
    """A result as text; of an exception everything that hangs on it, and the lines in this file."""
    if isinstance(value, (list, tuple)):
        return [shown(item, depth) for item in value]
    if not isinstance(value, BaseException) or depth > 4:
        return repr(value)
    lines = [place.lineno for place in traceback.extract_tb(value.__traceback__) if place.filename == __file__]
    linked = [shown(link, depth + 1) for link in (value.__context__, value.__cause__)]
    parts = shown(getattr(value, "exceptions", ()), depth + 1)
    return repr(value), vars(value), value.__suppress_context__, linked, parts, lines


@pytest.mark.parametrize("program", WHOLE + BROKEN, ids=lambda program: program.__name__)
def test_exception_group(program: Any, capsys: Any) -> None:
    def f(x: torch.Tensor) -> Any:
        seen: list[Any] = []
        try:
            return program(x, seen), seen, None
        except BaseException as error:
            return x * 2, seen, error

    def g(x: torch.Tensor) -> Any:
        return program(x, [])

    def outcome(call: Any) -> Any:
        try:
            found = call(torch.ones(3))
        except BaseException as error:
            found = error
        return shown(found), capsys.readouterr().out

    for function in (f, g):
        compiled = dovetail.compile(function, backend="eager", fullgraph=function is f and program in WHOLE)
        EVENTS.clear()
        for _ in range(2):
            assert outcome(compiled) == outcome(function)
        assert not EVENTS.of("fallback_to_eager")
