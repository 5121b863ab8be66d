"""The native module: frame hook, guards, launches. Plain C, built without torch (see csrc/native.h).

    context = Context(payload, compile_callback)
    context.run(f, (x,))              # f's frame and its callees' run compiled code where entries fit
"""
from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import Any, Literal

SKIP_CALLEES: Literal["skip_callees"]
"""What the callback returns for a code that runs as it is, with no hook on what it calls either."""

class Guards:
    """A program of loads and checks; build it with dovetail.runtime.guards.make_guards."""

    def __new__(
        cls, program: tuple[tuple[Any, ...], ...], paths: tuple[object, ...], fetch: tuple[int, ...]
    ) -> Guards: ...
    def check(
        self, args: tuple[Any, ...], closure: tuple[CellType, ...] | None, globals: dict[str, Any]
    ) -> bool:
        """Whether all guards hold for a frame with these argument slots, closure and globals."""

    def why(
        self, args: tuple[Any, ...], closure: tuple[CellType, ...] | None, globals: dict[str, Any]
    ) -> str | None:
        """What the first guard that does not hold says; None if all hold."""


Entry = tuple[Guards, Callable[..., Any], dict[str, Any]]
"""Compiled code for one code object: when it may be used, the function that replaces the frame, and the globals
that the frame must have. The function is called with the frame's argument slots, the function's closure cells,
and the values that the guards were built to fetch."""

Answer = Entry | bool | None | Literal["skip_callees"] | Callable[[], None]
Callback = Callable[
    [Any, CodeType, FunctionType, dict[str, Any], tuple[Any, ...], tuple[CellType, ...] | None, str | None, int],
    Answer,
]
"""callback(payload, code, function, globals, args, closure, why, n_entries) on a miss, with the hook off.

args: the frame's argument slots in the order of co_varnames (arguments, keyword-only arguments, *args,
**kwargs). why: which guard of the entry used last failed; None if there is no entry. It answers with

    an Entry        added and run at once, without a check
    None            this call runs as it is; the next one asks again
    a function      the same; it is called when the call has ended, unless that raised
    False           never asked again; entries it has are still used, its callees are still intercepted
    SKIP_CALLEES    neither are its callees
    True            look again (another thread has added an entry)

An exception goes to the frame's caller."""

class Context:
    """One per compiled function: a table from code objects to entries. Calls nest, on any thread."""

    def __new__(cls, payload: Any, callback: Callback) -> Context: ...
    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] = ...) -> Any:
        """fn(*args, **kwargs) with this context's hook on this thread; plainly after set_enabled(False)."""

    def entries(self, code: CodeType) -> list[Entry]:
        """The last used first."""

    def clear(self) -> None: ...
    def codes(self) -> dict[CodeType, str]:
        """Every code met so far: fresh, active, full, skip or skip_callees."""

def set_enabled(on: bool) -> bool:
    """Turn compiled calls on this thread on or off; returns what it was."""

def without(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """fn(*args, **kwargs) with no hook on this thread (a compiled call inside it has its own)."""

def hand_over(fn: Callable[..., Any], box: list[tuple[Any, ...]], /) -> Any:
    """fn(*box.pop()) of a function in Python, whose frame alone holds the arguments then."""

def is_installed() -> bool:
    """Whether the interpreter's evaluator is ours at this moment: only inside compiled calls."""

class Launch:
    """A generated host program as a callable: Launch(...)(*inputs) -> list of tensors.

        int32_t run(void **inputs, int64_t *ints, double *floats, void **outputs, void *python)

    kinds: one letter per input, t a tensor, i an int, f a float; each kind fills its own array in order.
    Inputs are borrowed handles, outputs handles given away (NULL becomes None); a result other than 0
    raises. The GIL is free while it runs. `python` begins with three function pointers:

        int32_t (*call_with)(python, int32_t index, void **in, int32_t n_in,
                             const int64_t *ints, int32_t n_ints, void **out, int32_t n_out)
        void (*fail)(python, const char *text)
        void (*drop)(python, void **inputs, int32_t position)

    call_with runs callables[index](*tensors, *ints), which returns a tensor or a sequence of n_out tensors;
    out then holds handles the program owns. A result other than 0 means that a Python exception is pending:
    return it at once. fail says what a failing program raises."""

    def __new__(
        cls, address: int, kinds: str, n_outputs: int, callables: tuple[Callable[..., Any], ...] = (), keep: Any = None
    ) -> Launch: ...
    def __call__(self, *inputs: Any) -> list[Any]: ...
    def consume(self, inputs: list[Any]) -> list[Any]:
        """As a call, and empties the list: the program frees each input after its last use (drop)."""

def attach_torch(base: type, *places: int) -> None:
    """How tensors lie in memory; dovetail.runtime.guards.attach() finds out and calls this."""

def lies_as(tensor: Any, plain: Any, extents: tuple[int, ...]) -> bool:
    """Whether it is a tensor with these sizes, then strides, and the dispatch keys of the plain one."""

def attach_watch(storage: int, offset: int, version: int, count: int, memory: int) -> None:
    """Where a tensor keeps its storage, offset and version; dovetail.runtime.frozen finds out."""

def arena_functions() -> tuple[int, int]:
    """Addresses of void *take(int64_t bytes) and void give(void *): memory a thread keeps between calls."""

def tensor_states(inputs: tuple[Any, ...], spec: bytes) -> bytes:
    """Equal as long as the watched inputs (three int64 each: position, bytes, bytes per item) are."""
