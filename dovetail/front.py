"""The front door: `dovetail.compile` and what it returns.

    function  ->  CompiledFunction    a callable object, a method when found on a class
    nn.Module ->  the same kind of module, sharing its state with the original, whose calls are compiled

A compiled module is an instance of a subclass of the original's class, made once per class, whose
`__dict__` *is* the original's: parameters, buffers, hooks and plain attributes are one and the same,
`state_dict` has no prefix, and `isinstance` holds. The original goes on running in eager.
"""
from __future__ import annotations

import builtins
import copy
import functools
import inspect
import time
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final
from weakref import WeakSet

from torch import nn

from dovetail import control
from dovetail.compile import Compiler, is_library_code
from dovetail.errors import BadArgument, UnknownBackend
from dovetail.events import EVENTS
from dovetail.logs import start_logging
from dovetail.options import make_options

Settings = dict[str, Any]
"""The keyword arguments of compile(): what pickling keeps of the compiler."""

Run = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

BACKENDS: Final = ("dovetail", "eager", "aot_eager")

_compilers: WeakSet[Compiler] = WeakSet()

start_logging(EVENTS)


def make_compiler(settings: Settings) -> Compiler:
    """Check every argument at once, so that a mistake shows at compile(), not at the first call."""
    backend = settings.get("backend", "dovetail")
    if not callable(backend) and backend not in BACKENDS:
        raise UnknownBackend(backend=backend, known=", ".join(BACKENDS))
    fullgraph, dynamic = settings.get("fullgraph", False), settings.get("dynamic")
    if not isinstance(fullgraph, bool):
        raise BadArgument(detail=f"fullgraph is True or False, got {fullgraph!r}")
    if dynamic not in (None, True, False):
        raise BadArgument(detail=f"dynamic is True, False or None, got {dynamic!r}")
    options = make_options(settings.get("mode"), settings.get("options"))
    compiler = Compiler(backend, options, fullgraph, dynamic)
    _compilers.add(compiler)
    return compiler


_is_recording = False


def record_calls(on: bool = True) -> None:
    """What is compiled from now on emits an event per call, for the report's timeline."""
    global _is_recording
    _is_recording = on


def run_of(compiler: Compiler, function: str) -> Run:
    """How compiled calls are made: straight into the native context, unless they are recorded."""
    run: Run = compiler.context.run
    if not _is_recording:
        return run

    def timed_run(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        start = time.perf_counter()
        try:
            return run(fn, args, kwargs)
        finally:
            EVENTS.emit("call", function=function, seconds=time.perf_counter() - start)

    return timed_run


# -- functions -------------------------------------------------------------------------------------


class CompiledFunction:
    """A function that runs compiled. Attributes are the function's own (functools.wraps)."""

    _dovetail_compiled = True

    def __init__(self, fn: Callable[..., Any], settings: Settings, compiler: Compiler | None = None) -> None:
        is_function = isinstance(fn, (types.FunctionType, types.MethodType))
        functools.update_wrapper(self, fn, updated=("__dict__",) if is_function else ())
        self._dovetail_original = fn
        self._dovetail_settings = settings
        self._dovetail_compiler = compiler or make_compiler(settings)
        self._dovetail_target = fn if _has_frame(fn) else _give_frame(fn)
        self._dovetail_run = run_of(self._dovetail_compiler, getattr(fn, "__qualname__", repr(fn)))

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if control._stance == "force_eager":
            return self._dovetail_original(*args, **kwargs)
        return self._dovetail_run(self._dovetail_target, args, kwargs)

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        return self if owner is None else types.MethodType(self, owner)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_dovetail_original"), name)

    def __repr__(self) -> str:
        return f"<compiled {self._dovetail_original!r}>"

    def __deepcopy__(self, memo: dict[int, object]) -> CompiledFunction:
        return CompiledFunction(copy.deepcopy(self._dovetail_original, memo), self._dovetail_settings)

    def __copy__(self) -> CompiledFunction:
        return CompiledFunction(self._dovetail_original, self._dovetail_settings)

    def __reduce__(self) -> Any:
        fn = self._dovetail_original
        found: object = inspect.getmodule(fn)
        for name in getattr(fn, "__qualname__", "<nothing>").split("."):
            found = getattr(found, name, None)
        if found is self:  # used as a decorator: the name leads to this object, so the name is enough
            return fn.__qualname__
        return _recompile, (fn, self._dovetail_settings)


def _has_frame(fn: Callable[..., Any]) -> bool:
    """Does calling fn run Python code that the frame hook will see, and that is captured?"""
    while isinstance(fn, (functools.partial, types.MethodType)):
        fn = fn.func if isinstance(fn, functools.partial) else fn.__func__
    if isinstance(fn, types.FunctionType):
        return not is_library_code(fn.__code__)
    return isinstance(type(fn).__call__, types.FunctionType)


FRAME: Final = builtins.compile(
    "def call(*args, **kwargs):\n    return builtin(*args, **kwargs)\n", "<c function>", "exec"
)
"""A frame around a C function. It is no part of this file, whose frames are never compiled."""


def _give_frame(builtin: Callable[..., Any]) -> Callable[..., Any]:
    """A Python function around one written in C, such as torch.softmax, or one of torch's own, such as
    torch.func.vmap returns: those are captured when other code calls them."""
    space: dict[str, Any] = {"builtin": builtin}
    exec(FRAME, space)
    call: Any = space["call"]
    call.__code__ = call.__code__.replace(co_qualname=getattr(builtin, "__qualname__", "call"))
    return call  # type: ignore[no-any-return]


def _recompile(fn: Any, settings: Settings) -> Any:
    return compile(fn, **settings)


# -- modules ---------------------------------------------------------------------------------------


class _Forward:
    """`compiled.forward`: the original's forward, run compiled; assigning replaces the original's."""

    def __get__(self, module: Any, kind: type | None = None) -> Any:
        if module is None:
            assert kind is not None
            return _original_class(kind).forward
        original, _, settings, compiler = _state(module)
        return CompiledFunction(original.forward, settings, compiler)

    def __set__(self, module: Any, value: object) -> None:
        _state(module)[0].forward = value

    def __delete__(self, module: Any) -> None:
        delattr(_state(module)[0], "forward")


def _original_class(kind: type) -> Any:
    """A compiled module's class is (itself, _DropIn, the original's class, ...)."""
    return kind.__mro__[kind.__mro__.index(_DropIn) + 1]


def _state(module: Any) -> Any:
    return object.__getattribute__(module, "_dovetail_state")


class _DropIn:
    """What every compiled module's class puts before the original's class. `_dovetail_state` is a slot
    beside the shared __dict__: the original module, the context's run, the settings."""

    __slots__ = ()
    _dovetail_compiled = True
    forward = _Forward()

    def __init_subclass__(cls) -> None:
        """Ends here: what the original's class does with its subclasses is not meant for this one."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """`type(compiled)(...)` makes a plain module, as `type(original)(...)` does."""
        return _original_class(cls)(*args, **kwargs)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        original, run, *_ = _state(self)
        if control._stance == "force_eager":
            return original(*args, **kwargs)
        return run(type(original).__call__, (original, *args), kwargs)

    @property
    def _dovetail_original(self) -> nn.Module:
        return _state(self)[0]  # type: ignore[no-any-return]

    # parametrize and its like change a module's class: they shall change the original's, and see it
    @property
    def __class__(self) -> type:  # type: ignore[override]
        return type(_state(self)[0])

    @__class__.setter
    def __class__(self, kind: type) -> None:
        _state(self)[0].__class__ = kind

    def __getattr__(self, name: str) -> Any:
        return getattr(_state(self)[0], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(_state(self)[0], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_state(self)[0], name)

    def __deepcopy__(self, memo: dict[int, object]) -> Any:
        return _recompile(copy.deepcopy(_state(self)[0], memo), _state(self)[2])

    def __copy__(self) -> Any:
        return _recompile(copy.copy(_state(self)[0]), _state(self)[2])

    def __reduce_ex__(self, protocol: object) -> Any:
        return _recompile, (_state(self)[0], _state(self)[2])

    def __prepare_scriptable__(self) -> Any:
        """What torch.jit.script looks at instead."""
        return _state(self)[0]

    def _replicate_for_data_parallel(self) -> Any:
        return _state(self)[0]._replicate_for_data_parallel()


def _class_of_compiled(kind: type) -> type:
    """The subclass for compiled modules of this class: same name, one per class, which knows it weakly."""
    subclasses: list[type] = type.__subclasses__(kind)
    for known in subclasses:
        if known.__bases__ == (_DropIn, kind):
            return known
    names = {"__slots__": ("_dovetail_state",), "__module__": kind.__module__, "__doc__": kind.__doc__}
    made = types.new_class(kind.__name__, (_DropIn, kind), {}, lambda space: space.update(names))
    made.__qualname__ = kind.__qualname__
    return made


def compile_module(original: nn.Module, settings: Settings) -> nn.Module:
    compiler = make_compiler(settings)
    compiled: Any = object.__new__(_class_of_compiled(type(original)))
    object.__setattr__(compiled, "__dict__", original.__dict__)
    run = run_of(compiler, type(original).__qualname__)
    object.__setattr__(compiled, "_dovetail_state", (original, run, settings, compiler))
    return compiled  # type: ignore[no-any-return]


# -- the door itself -------------------------------------------------------------------------------


def compile(
    model: Any = None, *, fullgraph: bool = False, dynamic: bool | None = None,
    backend: str | Callable[..., Any] = "dovetail", mode: str | None = None,
    options: Mapping[str, Any] | None = None, disable: bool = False,
) -> Any:  # fmt: skip
    """Compile a function, method or nn.Module; without `model`, a decorator that does.

    fullgraph   raise at the first graph break instead of going on in Python
    dynamic     None: a size that changes becomes symbolic; True: sizes are symbolic at once; False: never
    backend     "dovetail", "eager" (capture only), "aot_eager" (and autograd), or a function
                (torch.fx.GraphModule, example inputs) -> callable
    mode        "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
    options     knobs by name, see docs/options.md
    disable     return the model as it is
    """
    settings: Settings = {"fullgraph": fullgraph, "dynamic": dynamic, "backend": backend, "mode": mode,
                          "options": options}  # fmt: skip
    if model is None:
        make_compiler(settings)  # a wrong argument shows where it is written
        return functools.partial(compile, **settings, disable=disable)
    if isinstance(model, (staticmethod, classmethod)):
        return type(model)(compile(model.__func__, **settings, disable=disable))
    if not callable(model):
        raise BadArgument(detail=f"compile() takes a function or an nn.Module, got {model!r:.80}")
    if isinstance(model, type):
        detail = f"compile() takes an instance or a method, not the class {model.__qualname__}"
        raise BadArgument(detail=detail)
    if disable:
        make_compiler(settings)
        return model
    original = model
    while getattr(type(original), "_dovetail_compiled", False):  # compiled anew, with the new settings
        original = original._dovetail_original
    if isinstance(original, nn.Module):
        return compile_module(original, settings)
    if inspect.isgeneratorfunction(original) or inspect.iscoroutinefunction(original):
        warnings.warn(f"{original!r:.80} is a generator or coroutine: it runs in eager", stacklevel=2)
    return CompiledFunction(original, settings)


def compiler_of(compiled: Any) -> Compiler:
    """The compiler behind what compile() returned."""
    if not getattr(type(compiled), "_dovetail_compiled", False):
        raise BadArgument(detail=f"{compiled!r:.80} was not compiled by Dovetail")
    compiler = _state(compiled)[3] if isinstance(compiled, nn.Module) else compiled._dovetail_compiler
    return compiler  # type: ignore[no-any-return]


def reset() -> None:
    """Forget all compiled code and all events, as in a new process."""
    for compiler in list(_compilers):
        compiler.forget()
    EVENTS.clear()
