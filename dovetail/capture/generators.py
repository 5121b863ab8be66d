"""Generators of the user's program, stepped by the interpreter.

    def pairs(xs): for x in xs: yield x, x * 2
    list(pairs(tensors))      native `list` steps a Generator, whose body is interpreted

Calling a generator function makes one of these; to native code it is an ordinary iterator.
"""
from __future__ import annotations

from typing import Any

from dovetail.capture.interpreter import RETURN, Activation
from dovetail.capture.trace import Raised
from dovetail.errors import UnfinishedGenerator


class Generator:
    def __init__(self, activation: Activation) -> None:
        self.activation = activation
        places = activation.trace.places
        self.made_at = places[0].steps - 1 if places else -1
        self.started = self.finished = self.running = False

    def __iter__(self) -> Generator:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        if self.finished:
            raise StopIteration
        if self.started:
            self.activation.stack.append(value)
        return self._step(self.activation.run)

    def throw(self, kind: Any, value: Any = None, traceback: Any = None) -> Any:
        error = value if value is not None else (kind() if isinstance(kind, type) else kind)
        if self.finished:
            raise error
        if not self.started:
            self.finished = True
            raise error
        return self._step(lambda: self.activation.throw(error))

    def close(self) -> None:
        if not self.started or self.finished:
            self.finished = True
            return
        try:
            self.throw(GeneratorExit())
        except (GeneratorExit, StopIteration) as end:
            end.__traceback__ = None  # whose frames hold it, and the user's objects
            return
        raise RuntimeError("generator ignored GeneratorExit")

    def __del__(self) -> None:
        """Python closes a generator that nobody holds any more; its `finally` blocks run then."""
        trace = self.activation.trace
        if self.started and not self.finished and not self.running and not trace.is_over:
            try:
                self.close()
            except Exception:  # cannot leave __del__: the capture breaks where the generator was made instead
                name = self.activation.code.code.co_qualname
                trace.postponed = UnfinishedGenerator(trace.loc(), name=name, step=self.made_at)

    def _step(self, run: Any) -> Any:
        if self.running:
            raise ValueError("generator already executing")
        self.started = self.running = True
        error: BaseException | None = None
        try:
            how = run()
        except Raised as raised:
            self.finished, error = True, raised.value
        finally:
            self.running = False
        if isinstance(error, StopIteration):
            raise RuntimeError("generator raised StopIteration") from error
        if error is not None:
            raise error  # outside of the handler, which would become its context
        if how == RETURN:
            self.finished = True
            raise StopIteration(self.activation.result)
        return self.activation.result
