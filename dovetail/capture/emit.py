"""The text of the entry: what replaces the frame.

    Trace, returned value -> text of `def entry(...)`, fx graph, namespace

    def entry(self, x):
        _s0 = self.__dict__['_parameters']
        _s1 = _s0['weight']
        out = graph_0(_s1, x)
        object.__setattr__(self, 'calls', 4)
        return out[0]

Order: read everything that is needed, call the graph, rebuild new objects, replay effects, return. What
existed before the frame is reached by its path; what the frame made is built again here, each object
once, so that two names for one thing stay two names for one thing.
"""
from __future__ import annotations

import builtins
import collections
import functools
import gc
import keyword
import math
import re
import threading
import types
from collections.abc import Callable
from types import CellType, FunctionType, MethodType, TracebackType
from typing import Any, Final

import torch

from dovetail.capture.arrays import Array, numpy
from dovetail.capture.attributes import C_METHODS, HEAP_TYPE, InstanceDict, find_in_mro, has_setter
from dovetail.capture.builtins import is_plain_owner
from dovetail.capture.calls import Generator
from dovetail.capture.frame import traceback_at
from dovetail.capture.interpreter import Activation, GlobalsView
from dovetail.capture.masks import Masked
from dovetail.capture.operations import SYMBOLIC
from dovetail.capture.origins import IDENTITY, VIEWS, is_changed, is_value_type, raw_items
from dovetail.capture.text import Callback, GivenText, Identity, LateText
from dovetail.capture.torch_calls import check_leaves
from dovetail.capture.trace import DELETED, NULL, PLAIN, Raised, Trace, Unread, Write
from dovetail.capture.transforms import Pullback
from dovetail.errors import Break, UnsupportedValue
from dovetail.fake.tensor import Fake
from dovetail.ir.source import Arg, Const, Source

LITERALS: Final = frozenset({int, str, bool, type(None), bytes})
NAMED: Final = (AttributeError, NameError, ImportError)
"""Exceptions of C that keep a name outside of `args` and `__dict__`."""
REBUILT_BASES: Final = (collections.OrderedDict, dict, list, set, tuple, int, float, str, object)
"""C classes whose Python subclasses can be made again from their contents and attributes."""
OWN_NAMES: Final = frozenset(("out", "entry", "fetched_inputs", "user_globals"))
"""Names that the entry's text gives to things of its own; the others begin with an underscore."""


class Emitter:
    """Collects lines. `value` gives the text of an expression for any value of the trace."""

    def __init__(self, trace: Trace, root: Activation, graph_name: str) -> None:
        self.trace, self.root, self.graph_name = trace, root, graph_name
        self.loads: list[str] = []
        self.body: list[str] = []
        self.memo: dict[int, str] = {}
        self.loaded: dict[int, str] = {}
        self.outputs: list[Any] = []
        self.busy: set[int] = set()
        self.count = 0
        self.keep: list[Any] = []

    def temp(self, text: str) -> str:
        self.count += 1
        name = f"_v{self.count}"
        self.body.append(f"{name} = {text}")
        return name

    def const(self, value: Any, hint: str = "") -> str:
        return self.trace.const(value, hint or getattr(value, "__name__", "const")).name

    # -- paths

    def load(self, source: Source) -> str:
        """Text for a path, each step read once, before anything is changed."""
        if isinstance(source, (Arg, Const)):
            return source.text
        if id(source) in self.loaded:
            return self.loaded[id(source)]
        text = source.over(source.base and self.load(source.base))
        name = f"_s{len(self.loaded)}"
        self.loaded[id(source)] = name
        self.keep.append(source)
        self.loads.append(f"{name} = {text}")
        return name

    # -- values

    def value(self, value: Any) -> str:
        kind = type(value)
        if kind in LITERALS:
            return repr(value)
        if kind is float:
            return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
        if id(value) in self.memo:
            return self.memo[id(value)]
        origin = self.trace.origins.get(id(value))
        if origin is not None:
            text = self.load(origin.source)
        elif kind in SYMBOLIC:
            text = self.trace.dynamic.text(self, value)
        elif id(value) in self.trace.wrappers:  # what is around others gets them as attributes, later
            _, args, kwargs = self.trace.wrappers[id(value)]
            maker = self.const(torch.Tensor._make_wrapper_subclass)
            text = self.temp(f"{maker}({self.items(args)}, **{self.value(kwargs)})")
        elif kind is Fake:
            if self.trace.leaves:
                check_leaves(self.trace, value)
            self.outputs.append(value)
            text = f"out[{len(self.outputs) - 1}]"
            if (own := self.trace.kinds.get(id(value))) is not None:
                text = self.temp(f"{text}.as_subclass({self.const(own, own.__name__)})")
        else:
            text = self.rebuild(value)
        self.memo[id(value)] = text
        self.keep.append(value)
        return text

    def rebuild(self, value: Any) -> str:
        if id(value) in self.busy:
            self.refuse(value, "it contains itself")
        self.busy.add(id(value))
        rule = REBUILD.get(type(value)) or rebuild_by_base(value)
        text = rule(self, value)
        self.busy.discard(id(value))
        return text if text.isidentifier() or text == "()" else self.temp(text)  # it is made once

    def refuse(self, value: Any, detail: str, step: int = -1) -> Any:
        raise UnsupportedValue(self.trace.frame.loc, type=type(value).__name__, detail=detail, step=step)

    items = lambda self, values: ", ".join([self.value(item) for item in values])

    # -- effects

    def effects(self) -> None:
        """Write back what the frame changed. Texts are made first: a path is read before it is written."""
        tags = [write for write in self.trace.writes.values() if write.how == "tag"]
        lines = [self.write(write) for write in self.trace.writes.values() if write.how != "tag"]
        for unread in self.trace.unread:
            if unread.shadow is None and unread.added:
                lines.append(f"{self.load(unread.source)}.extend([{self.items(unread.added)}])")
        for origin in self.trace.shadows:
            lines.extend(self.changed(origin))
        for function, args, kwargs in self.trace.deferred:
            named = [f"{key}={self.value(item)}" for key, item in kwargs.items()]
            shown = ", ".join([*(self.value(arg) for arg in args), *named])
            lines.append(f"{self.const(function, 'output')}({shown})")
        while ready := [write for write in tags if id(write.owner) in self.memo]:  # tensors that live on
            tags = [write for write in tags if write not in ready]
            lines.extend([self.write(write) for write in ready])
        self.body.extend(lines)

    def write(self, write: Write) -> str:
        if write.how == "source":
            return f"{write.name} = {self.value(write.value)}"
        owner = self.value(write.owner)
        if write.value is DELETED:
            return f"{'type' if write.how == 'class' else 'object'}.__delattr__({owner}, {write.name!r})"
        value = self.value(write.value)
        if write.how == "class":
            return f"type.__setattr__({owner}, {write.name!r}, {value})"
        if isinstance(write.owner, (BaseException, Fake)):
            return f"{owner}.{write.name} = {value}"
        return set_field(owner, type(write.owner), write.name, value)

    def changed(self, origin: Any) -> list[str]:
        """Lines that make the original container equal to its shadow, if the frame changed it."""
        if not is_changed(origin):
            return []
        shadow, before, target = origin.stand_in, origin.before, self.load(origin.source)
        if isinstance(shadow, dict):
            return self.changed_dict(target, before, shadow)
        if isinstance(shadow, set):
            less, more = set.difference(before, shadow), set.difference(shadow, before)
            pairs = ("difference_update", less), ("update", more)
            return [f"set.{name}({target}, [{self.items(items)}])" for name, items in pairs if items]
        if len(shadow) > len(before) and all(a is b for a, b in zip(shadow, before)):
            added = list(shadow)[len(before) :]
            return [f"{target}.extend([{self.items(added)}])"]
        if isinstance(shadow, collections.deque):
            return [f"{target}.clear()", f"{target}.extend([{self.items(shadow)}])"]
        return [f"list.__setitem__({target}, slice(None), [{self.items(shadow)}])"]

    def changed_dict(self, target: str, before: dict[Any, Any], shadow: dict[Any, Any]) -> list[str]:
        now = dict(raw_items(shadow))
        kept = [key for key in before if key in now]
        base = collections.OrderedDict if isinstance(shadow, collections.OrderedDict) else dict
        owner = self.const(base, base.__name__)
        if list(now)[: len(kept)] != kept:
            return [f"{owner}.clear({target})", f"{owner}.update({target}, [{_pairs(self, now)}])"]
        lines = [f"{owner}.__delitem__({target}, {self.value(key)})" for key in before if key not in now]
        for key, value in now.items():
            if key not in before or before[key] is not value:
                lines.append(f"{owner}.__setitem__({target}, {self.value(key)}, {self.value(value)})")
        return lines


# -- rebuilding --------------------------------------------------------------------------------------

Rule = Callable[[Emitter, Any], str]


def _made_of(
    kind: type, arguments: Callable[[Emitter, Any], str] = lambda emit, value: f"[{emit.items(value)}]"
) -> Rule:
    """A container that its class makes of the items, or of these arguments."""
    return lambda emit, value: f"{emit.const(kind, kind.__name__)}({arguments(emit, value)})"


def _method(emit: Emitter, value: MethodType) -> str:
    if type(value.__self__) in (Array, Unread, *SYMBOLIC):
        return f"{emit.value(value.__self__)}.{value.__name__}"
    return f"{emit.const(MethodType, 'MethodType')}({emit.items((value.__func__, value.__self__))})"


def _builtin_method(emit: Emitter, value: Any) -> str:
    """A C function, or a C method bound to a value of the trace."""
    owner = value.__self__
    known = owner is None or isinstance(owner, (types.ModuleType, type))
    if known or not (is_plain_owner(owner) or isinstance(owner, Fake) or id(owner) in emit.trace.origins):
        return emit.const(value, value.__name__)
    is_hidden = value.__name__ in getattr(owner, "__dict__", ())
    if is_hidden or isinstance(find_in_mro(type(owner), value.__name__)[0], FunctionType):  # super().name
        named: list[Any] = [parent.__dict__.get(value.__name__) for parent in type(owner).__mro__]
        method = next(found for found in named if type(found) in C_METHODS and found.__get__(owner) == value)
        return f"{emit.const(method, value.__name__)}.__get__({emit.value(owner)})"
    return f"{emit.value(owner)}.{value.__name__}"


def _function(emit: Emitter, value: FunctionType) -> str:
    """A function the frame made; one that existed before is held on to."""
    if id(value) not in emit.trace.made:
        return emit.const(value, value.__name__)
    cells = "".join([f"{emit.value(cell)}, " for cell in value.__closure__ or ()])
    maker, code = emit.const(FunctionType, "FunctionType"), emit.const(value.__code__, "code")
    where, defaults = emit.const(value.__globals__, "globals"), emit.value(value.__defaults__)
    name = emit.temp(f"{maker}({code}, {where}, {value.__name__!r}, {defaults}, ({cells}))")
    plain = FunctionType(value.__code__, value.__globals__, value.__name__, None, value.__closure__)
    for field in ("__kwdefaults__", "__annotations__", "__qualname__", "__doc__", "__module__"):
        if getattr(value, field) != getattr(plain, field):
            emit.body.append(f"{name}.{field} = {emit.value(getattr(value, field))}")
    for key, item in value.__dict__.items():
        emit.body.append(f"{name}.__dict__[{key!r}] = {emit.value(item)}")
    return name


def _cell(emit: Emitter, value: CellType) -> str:
    if id(value) in emit.trace.made_cells:
        name = emit.temp(f"{emit.const(CellType, 'CellType')}()")
        emit.memo[id(value)] = name
        emit.keep.append(value)
        if value != CellType():  # not empty
            emit.busy.discard(id(value))
            text = emit.value(value.cell_contents)
            emit.body.append(f"{name}.cell_contents = {text}")
        return name
    free = zip(emit.root.code.code.co_freevars, emit.root.function.__closure__ or ())
    found = next((name for name, cell in free if cell is value), None)
    return emit.const(value, "cell") if found is None else f"cell_{found}"


def _late_text(emit: Emitter, value: LateText) -> str:
    if value.is_outdated:
        emit.refuse(value, "a tensor in the text was changed since")
    return f"{emit.const(value.function, value.function.__name__)}({emit.items(value.args)})"


def _constant(emit: Emitter, value: Any) -> str:
    if isinstance(value, type) and id(value) in emit.trace.made:
        where, step = emit.trace.frame.loc, emit.trace.classes[value]
        raise UnsupportedValue(where, type="class", detail="it is made here, and needed later", step=step)
    return emit.const(value, getattr(value, "__name__", type(value).__name__))


def _reduced(emit: Emitter, value: Any) -> str:
    """An iterator or another small C object that knows how to be copied."""
    try:
        function, args, *state = value.__reduce__()
    except TypeError:  # pairwise, tee and others cannot
        emit.refuse(value, "it cannot be built again outside of the graph")
    name = emit.temp(f"{emit.value(function)}({emit.items(args)})")
    if state and state[0] is not None:
        emit.body.append(f"{name}.__setstate__({emit.value(state[0])})")
    return name


def rebuild_exception(emit: Emitter, error: Any) -> str:
    """Text of an exception that the program made. __init__ of the user's class is not run a second time."""
    kind: Any = type(error)
    owner, args = emit.value(kind), emit.items(error.args)
    own = [find_in_mro(kind, name)[0] for name in ("__new__", "__init__")]
    is_group = isinstance(error, BaseExceptionGroup)  # whose arguments may have changed, or be more
    if is_group or any(isinstance(method, (types.FunctionType, staticmethod)) for method in own):
        base: Any = next(base for base in kind.__mro__ if not base.__flags__ & HEAP_TYPE)
        maker = emit.const(base, base.__name__)
        given = emit.items((error.message, error.exceptions)) if is_group else args
        text = emit.temp(f"{maker}.__new__({', '.join(filter(None, (owner, given)))})")
        emit.body.append(f"{maker}.__init__({', '.join(filter(None, (text, args)))})")
    else:
        text = emit.temp(f"{owner}({args})")
    emit.memo[id(error)] = text
    emit.busy.discard(id(error))
    for name, value in fields_of(error).items():
        emit.body.append(f"{text}.{name} = {emit.value(value)}")
    if (lines := emit.trace.traceback_of(error)) is not None:
        emit.body.append(f"{text}.__traceback__ = {emit.value(lines)}")
    return text


def fields_of(error: BaseException) -> dict[str, Any]:
    fields = dict(error.__dict__)
    if isinstance(error, NAMED) and error.name is not None:
        fields["name"] = error.name
    for name in ("__cause__", "__context__"):
        link = getattr(error, name)
        if isinstance(link, BaseException) and not isinstance(link, (Break, Raised)):
            fields[name] = link
    if error.__suppress_context__:
        fields["__suppress_context__"] = True
    return fields


def _instance(emit: Emitter, value: Any) -> str:
    """An instance of the user's class that the frame made."""
    cls = type(value)
    owner = emit.value(cls)
    base: Any = next(kind for kind in REBUILT_BASES if isinstance(value, kind))
    maker = emit.const(base, base.__name__)
    contents = base.__getnewargs__(value) if hasattr(base, "__getnewargs__") else ()
    name = emit.temp(f"{maker}.__new__({', '.join([owner, *map(emit.value, contents)])})")
    emit.memo[id(value)] = name
    emit.busy.discard(id(value))
    if isinstance(value, dict):
        for key, item in base.items(value):
            emit.body.append(f"{maker}.__setitem__({name}, {emit.value(key)}, {emit.value(item)})")
    elif isinstance(value, (set, list)):
        items = emit.items(base.__iter__(value))
        emit.body.append(f"{maker}.{'update' if base is set else 'extend'}({name}, [{items}])")
    for key, item in instance_fields(value).items():
        emit.body.append(set_field(name, cls, key, emit.value(item)))
    return name


def set_field(owner: str, kind: type, name: str, value: str) -> str:
    """An attribute of the instance itself, past any descriptor of the class that would answer instead."""
    if has_setter(kind, name) or issubclass(kind, threading.local):
        return f"{owner}.__dict__[{name!r}] = {value}"
    if kind.__setattr__ is object.__setattr__ and name.isidentifier() and not keyword.iskeyword(name):
        return f"{owner}.{name} = {value}"
    return f"object.__setattr__({owner}, {name!r}, {value})"


def instance_fields(value: Any) -> dict[str, Any]:
    """Attributes in __dict__ and in slots."""
    state = object.__getstate__(value)  # type: ignore[attr-defined]
    fields, slots = state if isinstance(state, tuple) else (state, None)
    return {**(fields or {}), **(slots or {})}


def _pairs(emit: Emitter, value: Any) -> str:
    return ", ".join(f"({emit.value(key)}, {emit.value(item)})" for key, item in value.items())


_ordered: Final = _made_of(collections.OrderedDict, lambda emit, value: f"[{_pairs(emit, value)}]")
ITERATED: Final[tuple[Any, ...]] = (
    [], (), {}, {}.keys(), {}.values(), {}.items(), set(), "", range(1), range(1 << 99), b"", reversed([]),
    collections.OrderedDict(), collections.deque(), reversed({}), reversed({}.values()), reversed({}.items()),
)  # fmt: skip

REBUILD: Final[dict[type, Rule]] = {
    list: lambda emit, value: f"[{emit.items(value)}]",
    tuple: lambda emit, value: f"({emit.items(value)},)" if value else "()",
    dict: lambda emit, v: f"{{{', '.join([f'{emit.value(key)}: {emit.value(v[key])}' for key in v])}}}",
    **{kind: _made_of(kind) for kind in (set, frozenset, torch.Size)},
    slice: lambda emit, value: f"slice({emit.items((value.start, value.stop, value.step))})",
    super: lambda emit, value: f"super({emit.value(value.__thisclass__)}, {emit.value(value.__self__)})",
    MethodType: _method,
    FunctionType: _function,
    CellType: _cell,
    InstanceDict: lambda emit, value: f"{emit.value(value.owner)}.__dict__",
    GlobalsView: lambda emit, value: emit.const(value.real, "globals"),
    Callback: lambda emit, value: emit.value(value.fn),
    # a view: the base of an array is None or another, never a tensor
    Array: lambda emit, value: f"{emit.value(value.fake)}.numpy()[{'()' if value.is_scalar else '...'}]",
    LateText: _late_text,
    GivenText: lambda emit, value: emit.load(value.source),
    Identity: lambda emit, value: f"{value.function.__name__}({emit.value(value.owner)})",
    types.BuiltinFunctionType: _builtin_method,
    type(NULL): lambda emit, value: "None",
    Generator: lambda emit, value: str(value.gi_frame),  # which it does not have
    TracebackType: lambda emit, value: emit.temp(
        f"{emit.const(traceback_at)}({emit.const(emit.trace.raised[id(value)][1], 'lines')})"),
    Pullback: lambda emit, value: str(
        emit.refuse(value, "what torch.func.vjp returns is needed outside of the graph", value.made_at)),
    Masked: lambda emit, value: str(value.leave()),
    collections.OrderedDict: lambda emit, value: (_instance if vars(value) else _ordered)(emit, value),
    collections.defaultdict: _made_of(
        collections.defaultdict, lambda emit, v: f"{emit.value(v.default_factory)}, [{_pairs(emit, v)}]"),
    types.SimpleNamespace: _made_of(types.SimpleNamespace, lambda emit, v: f"**{emit.value(vars(v))}"),
    collections.deque: _made_of(collections.deque, lambda emit, v: f"[{emit.items(v)}], {v.maxlen!r}"),
    **{type(iter(made)): _reduced for made in ITERATED},
    **dict.fromkeys((zip, enumerate, map, filter, reversed, functools.partial), _reduced),
    **dict.fromkeys(VIEWS, lambda emit, view: (
        f"{emit.value(gc.get_referents(view)[0])}.{type(view).__name__.split('_')[1]}()")),
}


def rebuild_by_base(value: Any) -> Rule:
    kind = type(value)
    fixed = types.CodeType, property, classmethod, staticmethod, re.Match
    is_constant = isinstance(value, (*IDENTITY, *fixed))
    if is_constant or kind in PLAIN or is_value_type(kind) or kind.__name__ == "cython_function_or_method":
        return _constant
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return _array
    if kind.__module__ == "itertools" and hasattr(value, "__reduce__"):
        return _reduced
    if hasattr(kind, "n_sequence_fields"):  # a named tuple made in C, such as torch.max(x, dim) returns
        return _made_of(kind)
    if isinstance(value, BaseException):
        return rebuild_exception
    solid = next(base for base in kind.__mro__ if not base.__flags__ & HEAP_TYPE)
    has_fields = hasattr(value, "__dict__") or hasattr(kind, "__slots__") or isinstance(value, (tuple, int))
    is_class = bool(kind.__flags__ & HEAP_TYPE) and not has_maker_in_c(kind, solid)
    if solid in REBUILT_BASES and is_class and has_fields:
        return _instance
    return lambda emit, item: str(emit.refuse(item, "it cannot be built again outside of the graph"))


def _array(emit: Emitter, value: Any) -> str:
    """Of constants: each call gets its own. What is a view stays one, of the same base."""
    if type(value.base) is not type(value):
        return f"{emit.const(value, 'array')}.copy('K')"
    start = (value.ctypes.data - value.base.ctypes.data) // value.itemsize
    view = emit.const(numpy().lib.stride_tricks.as_strided, "as_strided")
    flat = f"{emit.value(value.base)}.ravel('K').view({emit.const(value.dtype, 'dtype')})"
    return f"{view}({flat}[{start}:], {value.shape}, {value.strides})"


def has_maker_in_c(kind: type, solid: type) -> bool:
    """Whether a class made by C code has a __new__ of its own, without which its instances are not safe."""
    makers = [vars(base).get("__new__") for base in kind.__mro__ if base not in solid.__mro__]
    return any(isinstance(maker, types.BuiltinFunctionType) for maker in makers)


def entry_parameters(root: Activation, count: int) -> list[str]:
    names = [safe_name(name, i) for i, name in enumerate(root.code.slot_names[:count])]
    return [*names, *(f"cell_{name}" for name in root.code.code.co_freevars)]


def safe_name(name: str, index: int) -> str:
    """The user's name for an argument, unless the text means something else by it."""
    is_taken = name in OWN_NAMES or name.startswith(("_", "cell_", "graph_")) or hasattr(builtins, name)
    return name if name.isidentifier() and not is_taken else f"arg_{index}"
