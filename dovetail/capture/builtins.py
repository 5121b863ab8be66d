"""What capture knows about functions written in C: one table.

    SPECIAL   by identity: getattr, isinstance, len, print, torch.is_grad_enabled ...
    CLASSES   list, dict, zip, map ...: made natively from arguments native code can read
    SLOTS     object.__setattr__ and friends
    PURE      modules whose other functions may simply run on the trace's objects

A Python callable handed to native code becomes a Callback, which runs the interpreter, so nothing of
the user's ever runs outside of it.
"""
from __future__ import annotations

import _abc
import abc
import builtins
import collections
import functools
import itertools
import math
import operator
import re
import sys
import types
import typing
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from types import FunctionType
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from dovetail.capture import attributes, operations, text
from dovetail.capture.interpreter import GlobalsView
from dovetail.capture.masks import Masked
from dovetail.capture.operations import as_hashable, is_ours, iterate, truth
from dovetail.capture.origins import in_order, is_value_type, read_list, wrap
from dovetail.capture.text import NUMBERS, Callback, LateText, is_late, late, native
from dovetail.capture.torch_calls import type_of_value
from dovetail.capture.trace import NULL, PLAIN, Outside, Raised, Trace, Unread, is_library_file
from dovetail.errors import Break, DataDependentValue, SkippedFrame, UnknownCall
from dovetail.fake.tensor import Fake
from dovetail.ir.guard import Predicate
from dovetail.ir.source import Applied

Args = list[Any]
Kwargs = dict[str, Any]
Special = Callable[[Trace, Args, Kwargs], Any]

SPECIAL: Final[dict[int, Special]] = {}
_kept: list[Any] = []


def on(*functions: Any) -> Callable[[Special], Special]:
    """Register a rule for functions, by identity."""

    def add(rule: Special) -> Special:
        for function in functions:
            SPECIAL[id(function)] = rule
            _kept.append(function)
        return rule

    return add


def as_callback(trace: Trace, value: Any) -> Any:
    """A value that native code may call."""
    is_native = isinstance(value, Callback) or (isinstance(value, type) and is_native_class(value))
    return value if is_native or not callable(value) else Callback(trace, value)


Trace.callback = as_callback


def as_iterable(trace: Trace, value: Any) -> Any:
    """A value that native code may iterate over."""
    kind = type(value)
    if kind is Fake or any(operations.dunder(trace, kind, name) for name in ("__iter__", "__getitem__")):
        return iterate(trace, value)
    operations.check_native_use(trace, value, "iteration")
    return in_order(trace, value)


# -- attributes and types ----------------------------------------------------------------------------

@on(getattr)
def _getattr(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    try:
        return attributes.load_attr(trace, args[0], as_name(args[1]))
    except Raised as raised:
        if len(args) == 3 and isinstance(raised.value, AttributeError):
            return args[2]
        raise


def as_name(value: Any) -> str:
    """The name of an attribute, or Python's complaint about what is none."""
    native(hasattr, None, name := as_hashable(value))
    return name


on(hasattr)(lambda trace, args, kwargs: _getattr(trace, [*args, NULL], kwargs) is not NULL)
on(setattr)(lambda trace, args, kwargs: attributes.store_attr(trace, args[0], as_name(args[1]), args[2]))
on(delattr)(lambda trace, args, kwargs: attributes.delete_attr(trace, args[0], as_name(args[1])))
on(callable)(lambda trace, args, kwargs: guard_kinship(
    trace, args[0], type(args[0]), (), callable(args[0].original if type(args[0]) is Outside else args[0])
))
on(vars)(lambda trace, args, _: _locals(trace, args, _) if not args else native(vars, *args) if (
    found := _getattr(trace, [*args, "__dict__", NULL], _)) is NULL else found)


@on(isinstance)
def _isinstance(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    value, kinds = args
    known = {LateText: str, Masked: torch.Tensor, **NUMBERS}.get(type(value)) or trace.kinds.get(id(value))
    if known is not None:
        return native(issubclass, known, kinds) or native(isinstance, value, kinds)
    if isinstance(value, attributes.InstanceDict) or type(value).__module__ == "dovetail.capture.arrays":
        kind = dict if isinstance(value, attributes.InstanceDict) else value.__class__  # of fewer methods
        return native(issubclass, kind, kinds)
    if isinstance(value, Fake) and kinds in (Fake, torch.nn.Buffer):  # of which a Buffer is one by attribute
        return kinds is not Fake and truth(trace, trace.call(getattr, [value, "_is_buffer", False], {}))
    check = operations.dunder(trace, type(kinds), "__instancecheck__")
    if check is not None and not isinstance(value, Fake) and check.__module__.split(".")[0] not in LIBRARIES:
        return truth(trace, trace.call(check, [kinds, value], {}))
    return guard_kinship(trace, value, type(value), kinds, native(isinstance, value, kinds))


def guard_kinship(trace: Trace, value: Any, kind: type, kinds: Any, answer: bool) -> bool:
    """What a class is, its bases and attributes say; it becomes another by being registered there."""
    if not kind.__flags__ & attributes.HEAP_TYPE or kind.__module__.split(".")[0] in ("torch", "dovetail"):
        return answer
    attributes.guard_class(trace, kind)
    for other in tree_leaves(getattr(kinds, "__args__", kinds)):
        if getattr(other, "_is_protocol", False):
            for name in typing._get_protocol_attrs(other):  # type: ignore[attr-defined]
                _getattr(trace, [value, name, None], {})
        elif isinstance(other, abc.ABCMeta) and not answer and (id(kind), f"{id(other)}") not in trace.reads:
            attributes.guard_class(trace, other)
            test = Predicate(lambda kind, other=other: not issubclass(kind, other), f"is no {other.__name__}")
            trace.guard(trace.const(kind, kind.__name__), test)
            trace.reads[(id(kind), f"{id(other)}")] = answer
    return answer


on(issubclass)(lambda trace, args, kwargs: (
    guard_kinship(trace, args[0], args[0], args[1], native(issubclass, *args))
))  # fmt: skip
LIBRARIES: Final = frozenset({"abc", "typing", "enum", "torch", "collections"})


on(type)(lambda trace, args, kwargs: type_of_value(trace, args[0]) if len(args) == 1 else (
    breaking(UnknownCall, function="type() that makes a class")(trace, args, kwargs)))
on(id)(lambda trace, args, kwargs: text.Identity(trace, id, *args))


@on(hash)
def _hash(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    value = operations.as_hashable(args[0])
    by_identity = type(value).__hash__ in (object.__hash__, Fake.__hash__)
    return text.Identity(trace, hash, value) if by_identity else native(hash, value)


@on(super)
def _super(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    if args:
        return attributes.make_super(trace, *args)
    place = trace.places[-1]
    if not place.code.code.co_argcount:
        raise Raised(RuntimeError("super(): no arguments"))
    names = place.code.slot_names
    klass = place.read_cell(place.slots[names.index("__class__")], names.index("__class__"))
    owner = place.slots[0]
    if isinstance(owner, types.CellType):
        owner = owner.cell_contents
    return attributes.make_super(trace, klass, owner)


_counts: dict[tuple[int, int], tuple[Any, ...]] = {
    (0, 0): (globals, locals), (0, 1): (vars, bool, torch.Size), (1, 2): (iter, next, format, sum, round),
    (1, 1): (callable, id, hash, len, any, all, abs, repr, ascii, sorted, reversed), (3, 3): (setattr,),
    (2, 2): (hasattr, delattr, isinstance, issubclass, divmod, filter), (2, 3): (getattr, functools.reduce),
    (1, 3): (range,), (1, sys.maxsize - 1): (min, max, map),
}  # fmt: skip
COUNTS: Final = {id(fn): range(least, most + 1) for (least, most), known in _counts.items() for fn in known}
"""How many arguments they take, none by keyword but for a few."""
BY_KEYWORD: Final = frozenset({sum, round, sorted, min, max})

# -- sizes, truth, iteration -------------------------------------------------------------------------

on(len)(lambda trace, args, kwargs: operations.length(trace, args[0]))
on(iter)(lambda trace, args, kwargs: (
    iter(Callback(trace, args[0]), args[1]) if len(args) == 2 else iterate(trace, args[0])
))  # fmt: skip


@on(next)
def _next(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    if operations.dunder(trace, type(args[0]), "__next__") is None:
        operations.check_native_use(trace, args[0], "next()")
    return native(next, *args)


def _folded(fold: Any, op: Callable[[Any, Any], Any], trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    if fold is sum and type(args[0]) is range:
        return native(sum, *args, **kwargs)
    total = native(fold, (), *args[1:], **kwargs)  # which refuses to begin with text
    for item in drain(trace, args[0]):
        total = operations.binary(trace, op, total, item)
    return total


on(sum)(partial(_folded, sum, operator.add))
on(math.prod)(partial(_folded, math.prod, operator.mul))


def drain(trace: Trace, value: Any) -> Args:
    return native(list, iterate(trace, value))  # type: ignore[no-any-return]


for _asking in (any, all):  # which stop where Python does
    on(_asking)(partial(lambda fn, trace, args, kwargs: fn(
        truth(trace, item) for item in operations.steps(trace, args[0])), _asking))
on(functools.cmp_to_key)(lambda trace, args, _: native(functools.cmp_to_key, as_callback(trace, args[0])))


@on(sorted)
def _sorted(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    key = as_callback(trace, kwargs.get("key"))
    return native(sorted, drain(trace, args[0]), key=key, reverse=kwargs.get("reverse", False))


def _extreme(function: Any, sign: str, trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    items = drain(trace, args[0]) if len(args) == 1 else args
    if all(type(item) is Fake for item in items) and items and not kwargs:
        alike = {(x.dtype, x.device, x.dim(), x.requires_grad) for x in items}  # where has gradients for all
        if len(alike) == 1 and next(iter(alike))[2:] == (0, False):
            better = operator.gt if function is max else operator.lt
            choose = lambda a, b: trace.call(torch.where, [trace.call(better, [b, a], {}), b, a], {})
            return operations.as_copy(trace, functools.reduce(choose, items), *items)
    if "key" in kwargs or not all(isinstance(x, (int, float, torch.SymInt, torch.SymFloat)) for x in items):
        named = {**kwargs, "key": as_callback(trace, kwargs.get("key"))}
        return native(function, items, **named)
    if any(type(item) in NUMBERS for item in items):
        return functools.reduce(lambda a, b: native(getattr(torch, sign), a, b), items)
    return native(function, items, **kwargs)


on(min)(partial(_extreme, min, "sym_min"))
on(max)(partial(_extreme, max, "sym_max"))
on(functools.reduce)(lambda trace, args, kwargs: native(
    functools.reduce, Callback(trace, args[0]), drain(trace, args[1]), *args[2:]
))  # fmt: skip


def _unary_number(function: Any, trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(args[0], Fake) and hasattr(torch.Tensor, f"__{function.__name__}__"):
        return trace.call(attributes.load_attr(trace, args[0], function.__name__), args[1:], kwargs)
    own = operations.dunder(trace, type(args[0]), f"__{function.__name__}__")
    return trace.call(own, args, kwargs) if own else native(function, *args, **kwargs)


on(abs)(partial(_unary_number, abs))


@on(divmod)
def _divmod(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    said = operations.by_dunder(trace, args[0], args[1], "__divmod__", "__rdivmod__")
    parts = (operations.binary(trace, op, *args) for op in (operator.floordiv, operator.mod))
    return tuple(parts) if said is attributes.MISSING else said


@on(round)
def _round(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(args[0], torch.SymInt):  # whose own __round__ forgets the digits
        args = [int(args[0]), *args[1:]] if args[1:] or kwargs else args
    return _unary_number(round, trace, args, kwargs)


on(pow)(lambda trace, args, kwargs: (
    operations.binary(trace, operator.pow, *args) if len(args) == 2 else native(pow, *args)
))  # fmt: skip


# -- text --------------------------------------------------------------------------------------------

def _text(function: Any, dunder: str, trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    if is_late(args) and not kwargs:
        return late(trace, function, args)
    if args:
        args = [operations.as_known(args[0]), *args[1:]]
        if dunder == "__str__" and attributes.find_in_mro(type(args[0]), dunder)[0] is object.__str__:
            dunder = "__repr__"
    own = operations.dunder(trace, type(args[0]), dunder) if args else None
    if own is not None and own.__module__ not in ("enum",):
        return trace.call(own, args if function is not format or len(args) > 1 else [*args, ""], kwargs)
    if args and isinstance(args[0], BaseException) and id(args[0]) in trace.origins:
        return late(trace, function, args)
    operations.check_operands(trace, f"{function.__name__}()", *args[:1])
    return native(function, *args, **kwargs)


for _function in (repr, str, format):
    on(_function)(partial(_text, _function, f"__{_function.__name__}__"))
on(ascii)(partial(_text, ascii, "__repr__"))


@on(text.format_value)
def _format_value(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    value, convert, spec = args
    if is_late([value, spec]):
        return late(trace, text.format_value, args)
    if convert or (not spec and attributes.find_in_mro(type(value), "__format__")[0] is object.__format__):
        value = trace.call((str, str, repr, ascii)[convert], [value], {})
    return trace.call(format, [value, spec], {})


def breaking(kind: type[Break], **fields: str) -> Special:
    """A function whose calls break the graph."""

    def rule(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
        raise kind(trace.loc(), **fields)

    return rule


on(_abc._abc_register)(breaking(UnknownCall, function="register"))  # type: ignore[attr-defined]
for _name in ("open", "input", "compile", "breakpoint", "__import__"):
    on(getattr(builtins, _name))(breaking(UnknownCall, function=_name))
for _name in ("exec", "eval", "dir"):  # they cannot be called from anywhere else
    _detail = f"call to {_name}(), which looks at its caller's variables"
    on(getattr(builtins, _name))(breaking(SkippedFrame, detail=_detail))
_dir, _break = SPECIAL[id(dir)], breaking(UnknownCall, function="dir of an object")
on(dir)(lambda trace, args, kwargs: (_break if args else _dir)(trace, args, kwargs))
on(globals)(lambda trace, args, kwargs: GlobalsView(trace.places[-1]))


@on(torch.random.manual_seed)
def _seed(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    """Done before the graph, as long as nothing in there comes before it."""
    if trace.calls or trace.is_inner or type(*args, *kwargs.values()) is not int:
        raise UnknownCall(trace.loc(), function="torch.manual_seed")
    trace.ask_before(trace.const(torch, "torch"), "", "manual_seed", *args, *kwargs.values())
    return torch.default_generator


@on(locals)
def _locals(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    place = trace.places[-1]
    found = {}
    for i, (name, value) in enumerate(zip(place.code.slot_names, place.slots)):
        if isinstance(value, Unread):
            value = place.slots[i] = read_list(trace, value)
        if value is not NULL:
            found[name] = place.read_cell(value, i) if isinstance(value, types.CellType) else value
    return found


# -- classes -----------------------------------------------------------------------------------------

def _reversed(trace: Trace, cls: Any, args: Args, kwargs: Kwargs) -> Any:
    if (said := operations.ask(trace, args[0], "__reversed__")) is not attributes.MISSING:
        return iterate(trace, said)
    if operations.dunder(trace, type(args[0]), "__getitem__") is not None:
        size = operations.length(trace, args[0])
        return iter([operations.get_item(trace, args[0], i) for i in range(size - 1, -1, -1)])
    if isinstance(args[0], Fake):
        return iter(trace.call(torch.flip, [args[0], [0]], {}))
    return native(reversed, args[0])


def _number(trace: Trace, cls: Any, args: Args, kwargs: Kwargs) -> Any:
    """int(x) and float(x)"""
    args = text.as_numbers(args)
    kind = type(args[0]) if args else cls
    if NUMBERS.get(kind) is cls:
        return args[0]
    if cls is float and kind is torch.SymInt:
        return native(torch.sym_float, args[0])
    for name in (f"__{cls.__name__}__", "__index__"):
        own = operations.dunder(trace, kind, name)
        if own is not None and own.__module__ != "enum":
            return _number(trace, cls, [trace.call(own, args, {})], {})
    operations.check_operands(trace, f"{cls.__name__}()", *args)
    operations.check_unknown_float(trace, "int()", *args if cls is int else ())
    return native(cls, *args, **kwargs)


def _accumulate(trace: Trace, cls: Any, args: Args, kwargs: Kwargs) -> Any:
    function = args[1] if len(args) > 1 else kwargs.get("func") or operator.add
    rest = {key: value for key, value in kwargs.items() if key != "func"}
    return native(cls, iterate(trace, args[0]), as_callback(trace, function), **rest)


def _reference(trace: Trace, cls: Any, args: Args, kwargs: Kwargs) -> Any:
    told = getattr(args[-1], "__func__", args[-1]) if len(args) > 1 else None
    if told is not None and not is_library_file(getattr(told, "__code__", as_name.__code__).co_filename):
        raise UnknownCall(trace.loc(), function="weakref.ref with a function to be called at the end")
    return native(cls, *args)


CLASSES: Final[dict[Any, Callable[[Trace, Any, Args, Kwargs], Any]]] = {
    **dict.fromkeys((
        list, tuple, set, frozenset, enumerate, zip, collections.deque, collections.Counter, itertools.chain,
        itertools.product, itertools.islice, itertools.cycle, itertools.combinations, itertools.permutations,
        itertools.zip_longest, itertools.pairwise, itertools.compress,
        itertools.combinations_with_replacement,
    ), lambda trace, cls, args, kwargs: native(cls, *[as_iterable(trace, arg) for arg in args], **kwargs)),
    **dict.fromkeys((
        map, filter, itertools.starmap, itertools.takewhile, itertools.dropwhile, itertools.filterfalse,
    ), lambda trace, cls, args, kwargs: native(
        cls, as_callback(trace, args[0]), *[iterate(trace, arg) for arg in args[1:]], **kwargs)),
    **dict.fromkeys((dict, collections.OrderedDict), lambda trace, cls, args, kwargs: native(
        cls, *[as_iterable(trace, operations.as_mapping(trace, arg)) for arg in args], **kwargs)),
    collections.defaultdict: lambda trace, cls, args, kwargs: native(
        cls, as_callback(trace, args[0]) if args else None, *args[1:], **kwargs),
    reversed: _reversed,
    **dict.fromkeys((int, float), _number),
    bool: lambda trace, cls, args, kwargs: truth(trace, args[0]) if args else False,
    range: lambda trace, cls, args, kwargs: native(
        range, *[int(arg) if isinstance(arg, torch.SymInt) else arg for arg in args]),
    **dict.fromkeys((slice, functools.partial), lambda trace, cls, args, named: native(cls, *args, **named)),
    torch.Size: lambda trace, cls, args, kwargs: native(cls, drain(trace, args[0])) if args else cls(),
    torch.autograd.Variable: lambda trace, cls, args, kwargs: trace.call(torch.Tensor.requires_grad_, [
        trace.call(torch.Tensor.detach, args[:1], {}), [*args, kwargs.get("requires_grad", False)][1]], {}),
    itertools.accumulate: _accumulate,
    itertools.groupby: lambda trace, cls, args, kwargs: native(
        cls, iterate(trace, args[0]), as_callback(trace, [*args, kwargs.get("key")][1])),
    weakref.ref: _reference,
}  # fmt: skip

NATIVE_CLASSES: Final = frozenset(
    {object, complex, bytes, bytearray, memoryview, property, classmethod, staticmethod, itertools.count,
     itertools.repeat, types.SimpleNamespace, types.MethodType, types.MappingProxyType, operator.itemgetter,
     operator.attrgetter, operator.methodcaller, torch.device, torch.finfo, torch.iinfo}
)  # fmt: skip


def is_native_class(cls: type) -> bool:
    """Made without running Python code of anyone's: builtins, enums, plain exceptions."""
    if cls in NATIVE_CLASSES or cls in CLASSES or is_value_type(cls):
        return True
    if issubclass(cls, BaseException):
        makers = (attributes.find_in_mro(cls, name)[0] for name in ("__new__", "__init__"))
        return not any(isinstance(maker, (FunctionType, staticmethod)) for maker in makers)
    return hasattr(cls, "n_sequence_fields")  # a named tuple made in C, such as torch.return_types.max


def construct_new(trace: Trace, cls: type, args: Args, kwargs: Kwargs) -> Any:
    """cls.__new__ where that is C code: subclasses of list, dict, tuple, int, str, Exception..."""
    base = next(owner for owner in cls.__mro__ if "__new__" in owner.__dict__)
    if base in (dict, list, set, collections.OrderedDict, collections.defaultdict, collections.deque):
        return native(base.__new__, cls)
    if issubclass(base, (BaseException, property)):
        return native(base.__new__, cls, *args, **kwargs)
    if base in (tuple, int, float, str, frozenset, bytes, complex):
        return native(base.__new__, cls, *[as_iterable(trace, arg) for arg in args], **kwargs)
    raise UnknownCall(trace.loc(), function=cls.__qualname__)


def construct_init(trace: Trace, made: Any, init: Any, args: Args, kwargs: Kwargs) -> None:
    """__init__ of a C base class (dict.__init__ on a subclass...)."""
    if init is not object.__init__:  # which only counts the arguments
        operations.check_native_use(trace, made, "__init__")
        if not isinstance(made, (BaseException, property)):  # which keep what they are given
            args = [as_iterable(trace, arg) for arg in args]
    native(init, made, *args, **kwargs)


# -- slots of object ---------------------------------------------------------------------------------

SLOTS: Final[dict[str, Callable[[Trace, Any, Args, Kwargs], Any]]] = {
    "__setattr__": lambda trace, owner, args, kwargs: attributes.store_plain(trace, owner, *args),
    "__getattribute__": lambda trace, owner, args, kwargs: attributes.own_attr(trace, owner, args[0], False),
    "__delattr__": lambda trace, owner, args, kwargs: attributes.delete_instance(trace, owner, *args),
}

# -- everything else in C ----------------------------------------------------------------------------

PURE: Final = frozenset("""math cmath operator _operator itertools _functools _collections collections _bisect
    _heapq _string _sre re _struct unicodedata _abc typing string _stat _codecs _typing _contextvars
    _weakref zlib binascii""".split())

PURE_BUILTINS: Final = frozenset({"bin", "chr", "hex", "oct", "ord", "ascii"})

CONSUMERS: Final = frozenset("""extend update join union intersection difference symmetric_difference fromkeys
    extendleft intersection_update difference_update from_iterable issubset issuperset""".split())
ELSEWHERE: Final = frozenset({"__enter__", "__exit__", "register_hook", "register_prehook"})
"""Methods of torch.device and of autograd's nodes that change more than their object."""
READING: Final = frozenset("get keys values items copy index count __len__ __contains__ __getitem__".split())
"""Methods of containers that surely do not change them."""


def call_native(trace: Trace, fn: Any, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    """A C function: a method of a builtin value, or a function of a module known to be pure."""
    name = fn.__name__
    if owner is None or isinstance(owner, types.ModuleType):
        module = fn.__module__ or getattr(owner, "__name__", "")
        if module in ("_operator", "operator"):
            return call_operator(trace, fn, args, kwargs)
        if module in PURE or (module == "builtins" and name in PURE_BUILTINS):
            if operations.has_fake(args) and module in ("math", "cmath"):
                raise DataDependentValue(trace.loc(), function=f"{module}.{name}")
            if module in ("_heapq", "_bisect"):
                trace.touch(args[0])
            return call_math(trace, fn, args, kwargs) if module == "math" else native(fn, *args, **kwargs)
        raise UnknownCall(trace.loc(), function=f"{module}.{name}")
    if isinstance(owner, type):
        if name == "__new__":
            return native(fn, args[0], *[as_iterable(trace, arg) for arg in args[1:]], **kwargs)
        if name == "__subclasses__":
            found, about = native(fn), "has the same subclasses"
            trace.guard(trace.const(owner, name), Predicate(lambda _: fn() == found, about))
            return found[:]
        if owner not in CLASSES and owner not in PLAIN and owner not in NATIVE_CLASSES and owner is not type:
            base = owner.__module__
            if base not in PURE and base != "builtins":
                raise UnknownCall(trace.loc(), function=f"{owner.__qualname__}.{name}")
    elif type(owner) is ContextVar and name == "get":
        return context_value(trace, owner, args)
    else:
        operations.check_native_use(trace, owner, f".{name}()")
        if not is_plain_owner(owner) or name in ELSEWHERE:
            raise UnknownCall(trace.loc(), function=f"{type(owner).__qualname__}.{name}")
        if name not in READING:
            trace.touch(owner)
    if args:
        args = [operations.as_key(trace, owner, args[0]), *args[1:]]
    if name in ("format", "format_map"):
        if re.search(r"{[^{}]*\.", owner) and not is_late([args, kwargs]):
            raise UnknownCall(trace.loc(), function="str.format of an object's attribute")
        args = [operations.as_known(arg) for arg in args]
        kwargs = {key: operations.as_known(value) for key, value in kwargs.items()}
    if type(owner) is str and name in ("format", "join"):
        if (made := late_text(trace, fn, args, kwargs)) is not None:
            return made
    if name in CONSUMERS:
        known = [operations.as_mapping(trace, arg) for arg in args] if name == "update" else args
        count = 1 if name == "fromkeys" else len(known)  # what follows the keys is their value
        args = [*(as_iterable(trace, arg) for arg in known[:count]), *known[count:]]
    if isinstance(owner, re.Pattern) and args and isinstance(args[0], types.FunctionType):
        args = [as_callback(trace, args[0]), *args[1:]]
    if name == "sort" and "key" in kwargs:
        kwargs = {**kwargs, "key": as_callback(trace, kwargs["key"])}
    if name in ("index", "count", "remove") and isinstance(owner, list):
        if any(operations.is_compared(trace, item) for item in (args[0], *owner)):
            return search_list(trace, name, owner, *args)
    return native(fn, *args, **kwargs)


def context_value(trace: Trace, variable: ContextVar[Any], default: Args) -> Any:
    """What a context variable is set to, or the default: whether it is set is guarded, too."""
    source = trace.source_of(variable) or trace.const(variable, "variable")
    is_set = variable.get(NULL) is not NULL
    trace.guard(source, Predicate(lambda now: (now.get(NULL) is not NULL) is is_set, f"is set: {is_set}"))
    if default and not is_set:
        return default[0]
    read = ContextVar.get
    return wrap(trace, native(read, variable), Applied(source, trace.const(read, "get").name, read))


def late_text(trace: Trace, method: Any, args: Args, kwargs: Kwargs) -> Any:
    """text.format(...) and text.join(...) of values that only the graph knows; else None."""
    if method.__name__ == "format":
        late_one = is_late([args, kwargs])
        return late(trace, text.fill, [method.__self__, tuple(args), kwargs]) if late_one else None
    args[0] = drain(trace, args[0])
    for i, kind in enumerate(type_of_value(trace, item) for item in args[0]):
        if not issubclass(kind, str):
            raise Raised(TypeError(f"sequence item {i}: expected str instance, {kind.__name__} found"))
    return late(trace, str.join, [method.__self__, args[0]]) if is_late(args[0]) else None


def search_list(trace: Trace, name: str, items: list[Any], wanted: Any) -> Any:
    equal = functools.partial(operations.compare, trace, operator.eq)
    places = (i for i, item in enumerate(items) if item is wanted or truth(trace, equal(item, wanted)))
    if name == "count":
        return sum(1 for _ in places)
    first = next(places, None)
    if first is None:
        return native(getattr(list, name), [], wanted)  # which says so
    return first if name == "index" else items.__delitem__(first)  # type: ignore[func-returns-value]


def is_plain_owner(owner: Any) -> bool:
    """A value whose C methods only touch itself: containers, text, numbers, iterators, exceptions."""
    is_known = isinstance(owner, PLAIN_OWNERS) or is_value_type(type(owner))
    return is_known or type(owner).__module__ in PLAIN_MODULES or is_ours(type(owner))


PLAIN_OWNERS: Final = (
    list, dict, set, frozenset, tuple, str, bytes, int, float, complex, BaseException, collections.deque,
    bytearray, slice, range, torch.SymInt, torch.SymFloat, re.Pattern, re.Match,
)  # fmt: skip
PLAIN_MODULES: Final = ("builtins", "itertools", "collections", "re", "_collections", "torch", "types")


def call_operator(trace: Trace, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """operator.add(a, b) is a + b."""
    if fn in operations.DUNDERS or fn in operations.INPLACE:
        return operations.binary(trace, fn, *args)
    if fn in operations.COMPARISONS:
        return operations.compare(trace, fn, *args)
    if fn in operations.UNARY:
        return operations.unary(trace, fn, *args)
    rule = OPERATORS.get(fn)
    return rule(trace, *args) if rule is not None else native(fn, *args, **kwargs)


OPERATORS: Final[dict[Any, Callable[..., Any]]] = {
    operator.getitem: operations.get_item,
    operator.setitem: operations.set_item,
    operator.delitem: operations.delete_item,
    operator.contains: operations.contains,
    operator.truth: operations.truth,
    operator.not_: lambda trace, value: not operations.truth(trace, value),
    operator.index: lambda trace, value: (
        value if type(value) is torch.SymInt else native(operator.index, value)
    ),
}

SYM_MATH: Final = {
    getattr(math, name.removeprefix("_sym_")): function
    for name, function in vars(torch).items()
    if name.startswith("_sym_") and hasattr(math, name.removeprefix("_sym_"))
}
"""Functions of a number that torch can keep symbolic."""


def call_math(trace: Trace, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    args = text.as_numbers(args)
    symbolic = any(type(arg) in NUMBERS for arg in args)
    if symbolic and fn in SYM_MATH:
        return native(SYM_MATH[fn], *args)
    operations.check_unknown_float(trace, f"math.{fn.__name__}()", *args)
    return native(fn, *args, **kwargs)


def _call_getter(trace: Trace, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """operator.itemgetter and attrgetter objects."""
    step = functools.partial(attributes.load_attr, trace)
    if isinstance(fn, operator.attrgetter):
        found = [functools.reduce(step, path.split("."), args[0]) for path in fn.__reduce__()[1]]
    else:
        found = [operations.get_item(trace, args[0], key) for key in fn.__reduce__()[1]]
    return found[0] if len(found) == 1 else tuple(found)


def _call_methodcaller(trace: Trace, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    maker, rest = fn.__reduce__()
    if isinstance(maker, functools.partial):
        (name, *_), named = maker.args, maker.keywords
    else:
        (name, *rest), named = rest, {}
    return trace.call(attributes.load_attr(trace, args[0], name), list(rest), named)


def _call_reference(trace: Trace, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """A weak reference: what it refers to is read through it, so that the entry does not keep it alive."""
    source, target = trace.source_of(fn), fn()
    if source is None or isinstance(target, Fake):
        return target
    return wrap(trace, target, Applied(source, trace.const(operator.call, "call").name, operator.call))


CALLABLE_KINDS: Final[dict[type, Callable[[Trace, Any, Args, Kwargs], Any]]] = {
    **dict.fromkeys((operator.itemgetter, operator.attrgetter), _call_getter),
    operator.methodcaller: _call_methodcaller,
    weakref.ref: _call_reference,
    types.GenericAlias: lambda trace, fn, args, kwargs: trace.call(fn.__origin__, args, kwargs),
    **dict.fromkeys((Callback, type(functools.cmp_to_key(max))), lambda _, fn, args, named: native(
        fn, *args, **named)),
}


# -- markers and state -------------------------------------------------------------------------------

def _constant(value: Any) -> Special:
    return lambda trace, args, kwargs: value


on(torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling)(_constant(True))
on(torch.compiler.is_exporting, torch.jit.is_scripting, torch.jit.is_tracing)(_constant(False))
on(torch.backends.mha.get_fastpath_enabled)(_constant(False))  # attention or a whole layer in one call
on(torch._C._get_tracing_state)(_constant(None))
_cuda = (torch.cuda.is_available, torch.cuda.device_count, torch.cuda.get_device_capability)
for _fn in (*_cuda, str.maketrans, re._compile):  # type: ignore[attr-defined]  # which has a cache
    on(_fn)(functools.partial(lambda fn, trace, args, kwargs: native(fn, *args, **kwargs), _fn))
on(sys.getrecursionlimit)(_constant(1000))
on(torch._C._log_api_usage_once)(_constant(None))
on(typing.cast, torch.jit.annotate)(lambda trace, args, kwargs: args[1])
