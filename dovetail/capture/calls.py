"""Calling things: which rule a callable falls under.

    call(trace, fn, args, kwargs) -> result

    a function in Python          interpreted (inlined)
    a torch function              performed on Fakes and recorded        torch_calls.py
    a builtin                     by the table                           builtins.py
    a class                       __new__ and __init__, each by its own rule
    an nn.Module                  its forward, or _call_impl when it has hooks

An unknown C function ends the graph: it could do anything.
"""
from __future__ import annotations

import enum
import functools
import inspect
import logging
import random
import re
import sys
import types
from collections.abc import Generator as PythonGenerator
from contextlib import suppress
from functools import partial
from types import FunctionType, GeneratorType, MethodType, WrapperDescriptorType
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules import module as nn_module

from dovetail import errors
from dovetail.capture import builtins as known
from dovetail.capture import contexts
from dovetail.capture.arrays import MODULES, call_numpy, is_numpy
from dovetail.capture.attributes import C_METHODS, FIELDS, find_in_mro, guard_class, load_attr
from dovetail.capture.autograd import changes
from dovetail.capture.builtins import Args, Kwargs
from dovetail.capture.dynamic import LARGEST
from dovetail.capture.frame import bind
from dovetail.capture.interpreter import RETURN, Activation
from dovetail.capture.operations import has_fake, is_ours
from dovetail.capture.origins import original_of, wrap
from dovetail.capture.text import AT_WORK, NUMBERS, native
from dovetail.capture.torch_calls import TENSOR_FUNCTIONS, call_tensor_method, call_torch, is_torch_call
from dovetail.capture.trace import NULL, PLAIN, Outside, Raised, Trace, is_library_file, is_random
from dovetail.capture.transforms import BY_NAME, TRANSFORMS, call_transform, closure_of
from dovetail.errors import Break, DataDependentValue, UnknownCall, UnsupportedGenerator
from dovetail.fake.tensor import Fake
from dovetail.ir.guard import Is, Predicate
from dovetail.ir.source import Applied, Attr, Cell, Item, Source, root_of
from dovetail.ir.source import Arg as RootArg

MAX_DEPTH: Final = 400
DISPATCH: Final = functools.singledispatch(len).dispatch.__code__  # type: ignore[attr-defined]
CO_GENERATOR: Final = 0x20
CO_ASYNC: Final = 0x80 | 0x100 | 0x200


def call(trace: Trace, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    special, wanted = known.SPECIAL.get(id(fn)), known.COUNTS.get(id(fn))
    try:
        if wanted is not None and (len(args) not in wanted or kwargs and fn not in known.BY_KEYWORD):
            return native(fn, *args, **kwargs)  # which says so
        if special is not None:
            return special(trace, args, kwargs)
        if type(fn) in BY_TYPE:
            return BY_TYPE[type(fn)](trace, fn, args, kwargs)
        if isinstance(fn, type):
            return call_class(trace, fn, args, kwargs)
    except Exception as error:  # of a rule that such arguments are no match for: Python knows what they mean
        is_rule = special is not None or type(fn) in C_KINDS or fn in known.CLASSES
        if isinstance(error, Break) or errors.is_from_signal(error) or not is_rule:
            raise
        raise UnknownCall(trace.loc(), function=f"{fn.__qualname__} with such arguments") from None
    if is_compiled(fn):
        return call(trace, original_of(trace, fn), args, kwargs)
    if isinstance(fn, torch.nn.Module):
        return call_module(trace, fn, args, kwargs)
    if is_torch_call(fn):
        return call_torch(trace, fn, args, kwargs)
    return call_instance(trace, fn, args, kwargs)


Trace.call = call


# -- Python functions --------------------------------------------------------------------------------

def call_function(trace: Trace, fn: FunctionType, args: Args, kwargs: Kwargs) -> Any:
    name = TENSOR_FUNCTIONS.get(id(fn))
    if name is not None and args and isinstance(args[0], Fake):
        return call_tensor_method(trace, name, args, kwargs)
    if is_torch_call(fn):
        try:
            return call_torch(trace, fn, args, kwargs)
        except DataDependentValue as why:  # perhaps only to check it: a branch that raises can be captured
            try:
                return inline(trace, fn, args, kwargs)
            except Break:
                raise why from None
    marked = call_marked(trace, fn, args, kwargs)
    if marked is not UNMARKED:
        return marked
    module = fn.__module__ or ""
    if module.startswith("dovetail.capture"):
        return native(fn, *args, **kwargs)
    if module in MODULES:
        return call_numpy(trace, fn, args, kwargs)
    if (module, fn.__qualname__) in BY_NAME:
        return BY_NAME[(module, fn.__qualname__)](trace, args, kwargs)
    if fn.__name__ == "associative_scan" and "torch." in module:  # the other way is an op of its compiler
        args, kwargs = args[:4], {**kwargs, "combine_mode": "generic"}
    if fn.__code__ is DISPATCH:
        closure_of(trace, fn)  # guards the registry
        return native(fn, *args, **kwargs)
    if id(fn.__code__) in TRANSFORMS:
        return call_transform(trace, fn, args, kwargs)
    return inline(trace, fn, args, kwargs)


def function_source(trace: Trace, fn: FunctionType) -> Source | None:
    """Where a function that existed before the frame is found; None for one made in the trace."""
    return None if id(fn) in trace.made else trace.source_of(fn) or trace.const(fn, fn.__name__)


def defaults_of(trace: Trace, fn: FunctionType, name: str) -> dict[Any, Any]:
    """__defaults__ by position or __kwdefaults__ by name, read where they must be."""
    held = getattr(fn, name) or {}
    values = dict(held if isinstance(held, dict) else enumerate(held))
    source = function_source(trace, fn) if values else None
    if source is None or (all(type(v) in PLAIN for v in values.values()) and not is_passed_in(source)):
        return values
    where, stable = Attr(source, name), not is_passed_in(source)
    return {key: wrap(trace, value, Item(where, key), stable) for key, value in values.items()}


def is_passed_in(source: Source) -> bool:
    """A function that an argument brings is often made anew for each call, with defaults of its own."""
    return isinstance(root_of(source), (RootArg, Cell))


def is_installed_file(name: str) -> bool:
    """Code that was installed is not edited while it runs, down to the defaults of its functions."""
    return "/site-packages/" in name or is_library_file(name)


def guard_parts(trace: Trace, fn: FunctionType) -> None:
    """Once per function of the user's: its code (by an editor that reloads it) and its defaults have not been
    replaced."""
    key = (id(fn), "parts")
    source = None if key in trace.reads else function_source(trace, fn)
    if source is None or is_passed_in(source):
        return
    trace.reads[key] = True
    trace.keep.append(fn)
    for name in ("__code__", "__defaults__", "__kwdefaults__"):
        if getattr(fn, name):
            trace.guard(Attr(source, name), Is(getattr(fn, name)))


@known.on(inspect.signature)
def _signature(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    made = native(inspect.signature, *args, **kwargs)
    defaults = [given.default for given in made.parameters.values()]
    if not all(type(value) in PLAIN or isinstance(value, type) for value in defaults):  # may be changed there
        raise UnknownCall(trace.loc(), function="inspect.signature")
    given: Any = getattr(args[0], "__func__", args[0])
    fn = inspect.unwrap(given)
    if isinstance(fn, FunctionType) and (source := function_source(trace, fn)) is not None:
        show = lambda fn: repr((fn.__code__, fn.__defaults__, fn.__kwdefaults__))
        shown = show(fn)
        trace.guard(source, Predicate(lambda fn: show(fn) == shown, "has the same signature"))
    return made


def inline(trace: Trace, fn: FunctionType, args: Args, kwargs: Kwargs) -> Any:
    """Interpret a Python function's body here."""
    code: types.CodeType = fn.__code__
    if len(trace.places) > MAX_DEPTH:
        raise Raised(RecursionError("maximum recursion depth exceeded"))
    if not is_installed_file(code.co_filename):
        guard_parts(trace, fn)
    defaults = tuple(defaults_of(trace, fn, "__defaults__").values())
    slots = native(bind, fn, args, kwargs, defaults, defaults_of(trace, fn, "__kwdefaults__"))
    activation = Activation(trace, fn, slots)
    if code.co_flags & CO_GENERATOR:
        return Generator(activation)
    if code.co_flags & CO_ASYNC:
        raise UnsupportedGenerator(trace.loc(), detail=f"{fn.__qualname__} is asynchronous")
    activation.run()
    return activation.result


def call_method(trace: Trace, fn: MethodType, args: Args, kwargs: Kwargs) -> Any:
    function, owner = fn.__func__, fn.__self__
    if is_ours(type(owner)) or type(owner) in NUMBERS:
        return native(fn, *args, **kwargs)
    if isinstance(owner, random.Random) or type(owner).__module__ == MTRAND:
        return draw(trace, fn, args, kwargs)
    return call(trace, function, [owner, *args], kwargs)


def draw(trace: Trace, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """A number of a generator of Python's or NumPy's is an input of the graph, as long as nothing asks for
    its value: the entry draws it before, in the program's order. Capturing puts the state back."""
    owner, name, policy, bound = fn.__self__, fn.__name__, trace.dynamic, trace.source_of(fn)
    source: Any = Attr(bound, "__self__") if bound is not None else trace.source_of(owner)
    read, restore = STATES.get((type(owner).__module__, type(owner).__qualname__), ("", ""))
    is_plain = getattr(owner, "__dict__", {}).keys() <= {"gauss_next"} and not kwargs and not trace.is_inner
    made: Any = NULL
    is_plain &= all(type(arg) in (int, float) and abs(arg) < LARGEST for arg in args)
    if source and read and policy and policy.seen.draws and is_plain:
        state = getattr(owner, read)()
        try:
            made = native(fn, *args)
        finally:
            getattr(owner, restore)(state)
    if type(made) not in (int, float, type(None)) or type(made) is int and not name.startswith("rand"):
        raise UnknownCall(trace.loc(), function=f"random.{name}")
    if not any(drawn.of == source for drawn, _ in trace.draws):
        trace.ask_before(source, restore, read)  # for a call that has to be repeated
    where = trace.ask_before(source, "", name, *args)
    if made is None:
        return None
    bounds = min(0, *args, 0), max(0, *args, 0) - (name == "randrange" and len(args) < 3)
    symbol, number = policy.symbol(trace, made, where, bounds)
    policy.shapes.drawn.add(symbol)
    return number


MTRAND: Final = "numpy.random.mtrand"
STATES: Final = {("random", "Random"): ("getstate", "setstate"),
                 (MTRAND, "RandomState"): ("get_state", "set_state")}  # fmt: skip


# -- C functions -------------------------------------------------------------------------------------

def call_bound(trace: Trace, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """torch.relu, [].append; [].__len__, super().__setattr__ ..."""
    owner, name = fn.__self__, fn.__name__
    if isinstance(owner, Fake):
        return call_tensor_method(trace, name, [owner, *args], kwargs)
    if is_torch_call(fn):
        return call_torch(trace, fn, args, kwargs)
    if type(owner) is random.Random:
        return draw(trace, fn, args, kwargs)
    if type(owner) in FIELDS and isinstance(args[0], Fake):  # of which classes are told for x.shape
        is_read, where = name == "__get__", (args[0], owner.__name__)
        return trace.tensor_attr(*where, True) if is_read else trace.store_tensor_attr(*where, *args[1:])
    if getattr(fn, "__module__", None) in MODULES or type(owner).__module__ == "numpy":
        return call_numpy(trace, fn, args, kwargs)
    if name == "__init__":
        return known.construct_init(trace, owner, fn.__objclass__.__init__, args, kwargs)
    if name == "__call__" and fn.__objclass__ is type and not known.is_native_class(owner):
        return make_instance(trace, owner, args, kwargs)  # super().__call__ in a metaclass
    if name in known.SLOTS:
        return known.SLOTS[name](trace, owner, args, kwargs)
    return known.call_native(trace, fn, owner, args, kwargs)


def call_descriptor(trace: Trace, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """str.join, dict.get, torch.Tensor.add... taken from the class and called with an instance."""
    if args and isinstance(args[0], Fake) and issubclass(torch.Tensor, fn.__objclass__):
        return call_tensor_method(trace, fn.__name__, args, kwargs)
    if is_torch_call(fn):
        return call_torch(trace, fn, args, kwargs)
    if not args or type(fn) is types.ClassMethodDescriptorType:
        return known.call_native(trace, fn, args[0] if args else None, args, kwargs)
    return call(trace, native(fn.__get__, args[0]), args[1:], kwargs)


# -- classes -----------------------------------------------------------------------------------------

def call_class(trace: Trace, cls: type, args: Args, kwargs: Kwargs) -> Any:
    if cls in known.CLASSES:
        return known.CLASSES[cls](trace, cls, args, kwargs)
    if cls.__module__ == "numpy" and not isinstance(find_in_mro(cls, "__init__")[0], FunctionType):
        return call_numpy(trace, cls, args, kwargs)
    guard_class(trace, type(cls))
    meta_call, _ = find_in_mro(type(cls), "__call__")
    if isinstance(meta_call, (type, FunctionType)) and type(cls).__module__ != "enum":
        is_bound = isinstance(meta_call, FunctionType)  # TypedDict's is dict, and no method
        return call(trace, meta_call, [cls, *args] if is_bound else args, kwargs)
    if isinstance(cls, enum.EnumType) and not cls.__members__:
        raise UnknownCall(trace.loc(), function=f"{cls.__name__}() that makes a class")
    if isinstance(meta_call, FunctionType) or known.is_native_class(cls):
        return native(cls, *args, **kwargs)
    return make_instance(trace, cls, args, kwargs)


def make_instance(trace: Trace, cls: type, args: Args, kwargs: Kwargs) -> Any:
    """type.__call__ for a class of the user's."""
    guard_class(trace, cls)
    if hasattr(cls, "__del__"):
        raise UnknownCall(trace.loc(), function=cls.__qualname__)
    trace.asks = trace.asks or hasattr(cls, "__torch_function__")
    maker, _ = find_in_mro(cls, "__new__")
    if isinstance(maker, staticmethod) or maker is torch.Tensor.__new__:
        made = call(trace, getattr(maker, "__func__", maker), [cls, *args], kwargs)
    elif maker is object.__new__ or maker is None:
        made = native(object.__new__, cls, *args, **kwargs)
    else:
        made = known.construct_new(trace, cls, args, kwargs)
    kind = trace.kinds.get(id(made), type(made))
    if cls not in kind.__mro__:
        return made
    init, _ = find_in_mro(kind, "__init__")
    if isinstance(init, FunctionType):
        call(trace, init, [made, *args], kwargs)
    elif isinstance(init, WrapperDescriptorType):
        known.construct_init(trace, made, init, args, kwargs)
    return made


# -- modules and other callable objects --------------------------------------------------------------

HOOKS: Final = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
GLOBAL_HOOKS: Final = ("_global_backward_pre_hooks", "_global_backward_hooks", "_global_forward_hooks",
                       "_global_forward_pre_hooks")  # fmt: skip
_module_call_impl: Final[Any] = torch.nn.Module._call_impl


def call_module(trace: Trace, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(module, torch.jit.ScriptModule):
        raise errors.UnknownCall(trace.loc(), function=f"{type(module).__name__} of TorchScript")
    return call(trace, find_in_mro(type(module), "__call__")[0], [module, *args], kwargs)


def call_module_impl(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    """nn.Module.__call__(module, ...), as wrappers such as super().__call__ spell it."""
    if has_hooks(trace, args[0]):
        return inline(trace, _module_call_impl, args, kwargs)
    return call(trace, load_attr(trace, args[0], "forward"), args[1:], kwargs)


known.SPECIAL[id(torch.nn.Module._wrapped_call_impl)] = call_module_impl


def has_hooks(trace: Trace, module: torch.nn.Module) -> bool:
    guard_hooks(trace, nn_module, None, GLOBAL_HOOKS)
    origin = trace.origins.get(id(module))
    fields = module.__dict__ if origin is None else origin.original.__dict__
    if origin is not None:
        guard_hooks(trace, origin.original, origin.source, HOOKS)
    tables = [*map(fields.__getitem__, HOOKS), *map(vars(nn_module).__getitem__, GLOBAL_HOOKS)]
    seen = map(trace.known.get, map(id, tables))  # the frame may have added or removed hooks
    return any([table if origin is None else origin.stand_in for table, origin in zip(tables, seen)])


def guard_hooks(trace: Trace, owner: Any, source: Source | None, tables: tuple[str, ...]) -> None:
    """Once: those that are empty now. What reads the others guards them."""
    if (id(owner), "hooks") not in trace.reads:
        trace.reads[(id(owner), "hooks")] = True
        bare = trace.bare(source or trace.const(owner, "module"))
        bare.empty.extend([name for name in tables if not owner.__dict__[name]])


def call_instance(trace: Trace, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """Any other object: its class's __call__."""
    kind = type(fn)
    if kind is Outside:
        native(fn.leave)
    if kind in known.CALLABLE_KINDS:
        return known.CALLABLE_KINDS[kind](trace, fn, args, kwargs)
    guard_class(trace, kind)
    method, _ = find_in_mro(kind, "__call__")
    if isinstance(method, FunctionType):
        return call(trace, method, [fn, *args], kwargs)
    if isinstance(fn, torch.jit.ScriptFunction) and hasattr(fn, "_torchdynamo_inline"):
        return call(trace, fn._torchdynamo_inline, args, kwargs)
    if is_numpy(fn):
        return call_numpy(trace, fn, args, kwargs)
    if not callable(fn):
        raise Raised(TypeError(f"'{trace.call(type, [fn], {}).__name__}' object is not callable"))
    if kind is LRU_CACHE:
        return call_cached(trace, fn, fn.__wrapped__, args, kwargs)
    raise UnknownCall(trace.loc(), function=getattr(fn, "__qualname__", kind.__qualname__))


def call_cached(trace: Trace, fn: Any, wrapped: Any, args: Args, kwargs: Kwargs) -> Any:
    """A function under lru_cache: of constants it is really called, and what it gives stays in its cache. One
    that does more when something is not there yet does so in Python, at its place among others."""
    key, given = (id(fn), repr((args, kwargs))), (*args, *kwargs.values())
    if not all(type(arg) in PLAIN or isinstance(arg, (type, logging.Logger)) for arg in given):
        before = deeds(trace)
        made = call(trace, wrapped, args, kwargs)
        is_kept = trace.is_rerun and has_fake(made)  # on Fakes, one of which the cache would keep for good
        if is_kept or deeds(trace) != before or isinstance(made, (list, dict, set)):  # which is changed there
            raise UnknownCall(trace.loc(), function=fn.__qualname__)
        return made
    if has_deeds(trace, fn, wrapped, args, kwargs):
        raise UnknownCall(trace.loc(), function=fn.__qualname__)
    with torch._C._DisableTorchDispatch():
        result = native(fn, *args, **kwargs)
    if type(result) in PLAIN or isinstance(result, (type, FunctionType)):
        if key not in trace.reads and (fn.__module__ or "").split(".")[0] != "torch":  # it may be cleared
            test = Predicate(lambda fn: fn(*args, **kwargs) == result, f"returns {result!r:.60}")
            trace.guard(trace.const(fn, fn.__name__), test)
        return trace.remember(key, result)
    find: Any = lambda fn: fn(*args, **kwargs)
    where = Applied(trace.const(fn, fn.__name__), trace.const(find, "find").name, find)
    return wrap(trace, result, where)


def deeds(trace: Trace) -> tuple[Any, ...]:
    return sum(map(is_random, trace.calls)), len(trace.draws), *changes(trace)


def has_deeds(trace: Trace, fn: Any, wrapped: Any, args: Args, kwargs: Kwargs) -> bool:
    """Whether a function of the user's does more than give a result, as far as a trace of its own tells."""
    found, key = KNOWN_DEEDS.setdefault(fn, {}), repr((args, kwargs))
    code = getattr(wrapped, "__code__", None)
    if key not in found and code is not None and not is_installed_file(code.co_filename):
        apart = Trace(trace.frame, trace.options, None, is_whole=True)
        apart.places = trace.places[:]
        before, AT_WORK.trace = deeds(apart), apart
        try:
            with suppress(Break, Raised):
                call(apart, wrapped, args, kwargs)
        finally:
            AT_WORK.trace, apart.is_over = trace, True
            contexts.leave_all(apart)
        apart.deferred.clear()  # what is only printed
        found[key] = deeds(apart) != before
    return found.get(key, False)


LRU_CACHE: Final = type(functools.lru_cache(lambda: None))
KNOWN_DEEDS: Final[WeakKeyDictionary[Any, dict[str, bool]]] = WeakKeyDictionary()

_told: Any = type(re.compile("").match)  # a method in C that is told its class
C_KINDS: Final = frozenset({types.BuiltinFunctionType, types.MethodWrapperType, _told, *C_METHODS})
BY_TYPE: Final[dict[type, Any]] = {
    FunctionType: call_function,
    MethodType: call_method,
    **dict.fromkeys(C_KINDS, call_bound),
    **dict.fromkeys(C_METHODS, call_descriptor),
    functools.partial: lambda trace, fn, args, named: call(
        trace, fn.func, [*fn.args, *args], fn.keywords | named),
}


# -- generators of the user's program, stepped by the interpreter ----------------------------------


class Generator:
    __class__ = GeneratorType  # type: ignore[assignment]  # type() and isinstance() of the program ask for it

    def __init__(self, activation: Activation) -> None:
        self.activation, self.steps = activation, steps(activation)
        self.send, self.throw, self.close = self.steps.send, self.steps.throw, self.steps.close
        self.made_at = activation.trace.step

    __iter__, __next__ = lambda self: self, lambda self: next(self.steps)

    def __del__(self) -> None:
        """Python closes a generator that nobody holds any more; its `finally` blocks run then."""
        trace = self.activation.trace
        if self.steps.gi_suspended and not trace.is_over:  # type: ignore[attr-defined]
            try:
                self.close()
            except Exception:  # cannot leave __del__: the capture breaks where the generator was made instead
                trace.postponed = self.unfinished

    @property
    def unfinished(self) -> Break:
        trace, name = self.activation.trace, self.activation.code.code.co_qualname
        return errors.UnfinishedGenerator(trace.loc(), name=name, step=self.made_at)

    def __getattr__(self, name: str) -> Any:
        """gi_frame and the like only a real one has."""
        is_asked = name.startswith("gi_") or name in ("__name__", "__qualname__")
        raise self.unfinished if is_asked else AttributeError(f"'generator' object has no attribute '{name}'")


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


# -- markers in the user's and in libraries' code: Dovetail's own, and torch's ---------------------

UNMARKED: Final = object()
DISABLES: Final = ("_dovetail_disable", "_torchdynamo_disable")
CONSTANTS: Final = ("_dovetail_constant", "_dynamo_marked_constant")
ASKING: Final = "an optimizer that branches on numbers in its tensors"
STEPS: Final = {
    "lr_scheduler.py": "a learning rate scheduler, arithmetic on a few numbers",
    "radam.py": ASKING, "asgd.py": ASKING, "_adafactor.py": ASKING, "lbfgs.py": ASKING,
}  # fmt: skip
"""Files of torch.optim whose `step` eager does better."""
_marks = "tag mark_dynamic maybe_mark_dynamic mark_static mark_unbacked mark_static_address"
IGNORED: Final = frozenset(_marks.split())


def call_marked(trace: Trace, fn: FunctionType, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The result, or UNMARKED. Torch's markers are attributes and names: its compiler is never imported."""
    marks = fn.__dict__
    if marks:
        original = marks.get("_torchdynamo_orig_callable")
        home = getattr(original, "__module__", None) or ""
        is_kept = not home.startswith(("torch.optim.", "torch.random"))  # not only from torch's own compiler
        if any(marks.get(name) for name in DISABLES) and is_kept:
            raise errors.DisabledCall(trace.loc(), function=fn.__qualname__)
        if marks.get("_dovetail_graph_break"):
            raise errors.UserBreak(trace.loc())
        copied = getattr(marks.get("__wrapped__"), "__dict__", {})  # by functools.wraps: not its own
        own = {name: mark for name, mark in marks.items() if copied.get(name) is not mark}
        if any(own.get(name) for name in CONSTANTS):
            return native(fn, *args, **kwargs)
        if own.get("_dovetail_allow_in_graph"):
            return call_torch(trace, fn, args, kwargs)
        if own.get("_torchdynamo_orig_callable"):
            return trace.call(original, args, kwargs)
    if (fn.__module__ or "").startswith("torch._dynamo"):
        if fn.__name__ in ("graph_break", "skip_frame"):
            if trace.places[-1].code.code.co_filename.endswith("/torch/optim/optimizer.py"):
                return None  # around each step, for the sake of torch's compiler
            raise errors.UserBreak(trace.loc())
        if fn.__name__ in IGNORED:
            return None
        if fn.__name__ == "is_compiling":
            return True
        if fn.__name__ == "patched_init":  # torch's compiler counts modules; what it wraps makes one
            return trace.call((fn.__closure__ or ())[0].cell_contents, args, kwargs)
    if fn.__code__.co_name == "step" and (why := STEPS.get(fn.__code__.co_filename.rpartition("/")[2])):
        raise errors.DisabledCall(trace.loc(), function=why)
    return call_torch(trace, fn, args, kwargs) if is_allowed_by_torch(fn) else UNMARKED


def is_allowed_by_torch(fn: FunctionType) -> bool:
    """Whether torch.compiler.allow_in_graph was called on the function."""
    allowed = getattr(sys.modules.get("torch._dynamo.trace_rules"), "_allowed_callable_ids", None)
    return id(fn) in (getattr(allowed, "function_ids", None) or ())


def is_compiled(fn: Any) -> bool:
    return hasattr(type(fn), "_dovetail_compiled") or type(fn).__name__ == "OptimizedModule"
