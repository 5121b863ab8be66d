"""Generators of the user's program, stepped by the interpreter.

    def pairs(xs): for x in xs: yield x, x * 2
    list(pairs(tensors))      native `list` steps a Generator, whose body is interpreted

Calling a generator function makes one of these; to native code it is an ordinary iterator. A generator of
Python's own around the interpreter knows the rules of send, throw and close.
"""
from __future__ import annotations

from collections.abc import Generator as PythonGenerator
from functools import partial
from typing import Any

from dovetail.capture.interpreter import RETURN, Activation
from dovetail.capture.trace import Raised
from dovetail.errors import UnfinishedGenerator


class Generator:
    def __init__(self, activation: Activation) -> None:
        self.activation, self.steps = activation, steps(activation)
        places = activation.trace.places
        self.made_at = places[0].steps - 1 if places else -1

    def __iter__(self) -> Generator:
        return self

    def __next__(self) -> Any:
        return next(self.steps)

    def send(self, value: Any) -> Any:
        return self.steps.send(value)

    def throw(self, *error: Any) -> Any:
        return self.steps.throw(*error)

    def close(self) -> None:
        self.steps.close()

    def __del__(self) -> None:
        """Python closes a generator that nobody holds any more; its `finally` blocks run then."""
        trace = self.activation.trace
        if self.steps.gi_suspended and not trace.is_over:  # type: ignore[attr-defined]
            try:
                self.close()
            except Exception:  # cannot leave __del__: the capture breaks where the generator was made instead
                name = self.activation.code.code.co_qualname
                trace.postponed = UnfinishedGenerator(trace.loc(), name=name, step=self.made_at)


def steps(activation: Activation) -> PythonGenerator[Any, Any, Any]:
    go_on = activation.run
    while True:
        error: BaseException | None = None
        try:
            how = go_on()
        except Raised as raised:
            error = raised.value
        if error is not None:
            raise error  # outside of the handler, which would become its context
        if how == RETURN:
            return activation.result
        try:
            sent = yield activation.result
        except BaseException as thrown:
            if activation.trace.is_over:  # it is given up, and nobody interprets what is left of it
                return None
            go_on = partial(activation.throw, thrown)
        else:
            activation.stack.append(sent)
            go_on = activation.run
