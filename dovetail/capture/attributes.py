"""Reading and writing attributes the way Python does, on the trace's terms.

    load_attr(trace, self, "weight")    pending write? descriptor? instance dict? class? __getattr__
    store_attr(trace, self, "n", 3)     waits in trace.writes when `self` existed before the frame

A value read from an object that existed before the frame is wrapped under the path
of the object plus one step. Classes are guarded once each, which covers their methods and attributes.
"""
from __future__ import annotations

import enum
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any, Final

import torch
from torch.autograd.function import BackwardCFunction

from dovetail.capture import trace as traces
from dovetail.capture.origins import IDENTITY, instance_dict, is_drop_in, original_of, read_list, wrap
from dovetail.capture.text import NUMBERS, Callback, LateText, native
from dovetail.capture.trace import PLAIN, Origin, Outside, Raised, Trace, Unread
from dovetail.errors import UnsupportedValue
from dovetail.fake.tensor import Fake
from dovetail.ir.guard import ClassIs, Is, Lacks, Length, Predicate
from dovetail.ir.source import Attr, DictAttr, Item, Source
from dovetail.util.noun import Noun

MISSING: Final = object()
HEAP_TYPE: Final = 1 << 9
"""CPython's flag of classes that can be changed: those that a class statement made, and some of C."""
MODULE_TABLES: Final = ("_parameters", "_buffers", "_modules")
TITLES: Final = ("__name__", "__qualname__", "__doc__", "__module__")
UNVERSIONED: Final = ("__name__", "__qualname__", "__annotations__")
"""What may change in a class without its being another version of it."""
FOREIGN: Final = (weakref.ProxyType, weakref.CallableProxyType)


def find_in_mro(kind: type, name: str) -> tuple[Any, type | None]:
    """What the class defines under a name, unbound, and which class of its MRO does."""
    for owner in kind.__mro__:
        found = owner.__dict__.get(name, MISSING)
        if found is not MISSING:
            return found, owner
    return MISSING, None


def find_in_class(trace: Trace, kind: type, name: str) -> tuple[Any, type | None]:
    """find_in_mro, seeing what the program has assigned to the classes meanwhile."""
    if trace.changed_classes:
        for owner in kind.__mro__:
            pending = trace.writes.get((id(owner), name))
            if pending is None and name in owner.__dict__:
                return owner.__dict__[name], owner
            if pending is not None and pending.value is not traces.DELETED:
                return pending.value, owner
        return MISSING, None
    return find_in_mro(kind, name)


def python_method(kind: type, name: str) -> FunctionType | None:
    """The class's method if it is written in Python (then it must be interpreted, not run)."""
    found, _ = find_in_mro(kind, name)
    return found if isinstance(found, FunctionType) else None


def guard_class(trace: Trace, kind: type) -> None:
    """Once per class: its methods and attributes are what they were. Static C types cannot change."""
    if kind in trace.classes:
        return
    trace.classes[kind] = -1
    if kind.__flags__ & HEAP_TYPE:
        trace.guard(trace.const(kind, kind.__name__), ClassIs(kind))


def raise_attribute_error(obj: Any, name: str) -> Any:
    text = f"'{type(obj).__name__}' object has no attribute '{name}'"
    raise Raised(AttributeError(text, name=name, obj=obj))


# -- reading ---------------------------------------------------------------------------------------

def load_attr(trace: Trace, obj: Any, name: str) -> Any:
    kind, pending = type(obj), trace.writes.get((id(obj), name))
    if type(kind.__getattribute__) is FunctionType and not isinstance(obj, ModuleType):
        return instance_attr(trace, obj, name)
    owner = torch.Tensor if kind is Fake else kind
    if pending is not None and pending.value is not traces.DELETED and not has_setter(owner, name, "__get__"):
        return pending.value
    if pending is not None and isinstance(obj, (type, FunctionType, Fake)):
        return raise_attribute_error(obj, name)
    if kind in RULES:
        return RULES[kind](trace, obj, name)
    if isinstance(obj, ModuleType):
        return module_attr(trace, obj, name)
    if isinstance(obj, type):
        return class_attr(trace, obj, name)
    if isinstance(obj, Fake):
        return trace.tensor_attr(obj, name)
    return own_attr(trace, obj, name)


def instance_attr(trace: Trace, obj: Any, name: str) -> Any:
    override: Any = type(obj).__getattribute__
    if type(override) is not FunctionType:
        return own_attr(trace, obj, name)
    guard_class(trace, type(obj))
    try:
        return trace.call(override, [obj, name], {})
    except Raised as raised:
        if not isinstance(raised.value, AttributeError) or not hasattr(type(obj), "__getattr__"):
            raise
        return _getattr_hook(trace, obj, name)


def own_attr(trace: Trace, obj: Any, name: str, hooked: bool = True) -> Any:
    """object.__getattribute__, then, if `hooked`, __getattr__."""
    if isinstance(obj, type):
        return class_attr(trace, obj, name)
    pending = trace.writes.get((id(obj), name))
    if pending is not None and pending.value is traces.DELETED:
        found, owner = find_in_class(trace, type(obj), name)  # which a deleted attribute no longer hides
        if found is MISSING:
            return _getattr_hook(trace, obj, name, hooked)
        return bind_class_value(trace, found, owner, obj, type(obj), name)
    if pending is not None and not has_setter(type(obj), name, "__get__"):
        return pending.value
    if (id(obj), name) in trace.reads:
        return trace.reads[(id(obj), name)]
    if issubclass(type(obj), FOREIGN):
        raise UnsupportedValue(trace.loc(), type=type(obj).__name__, detail="its attributes are elsewhere")
    if is_drop_in(obj):
        return load_attr(trace, original_of(trace, obj), name)
    if issubclass(type(obj), threading.local):
        origin = trace.origins.get(id(obj))
        if origin is None or name == "__dict__":
            raise UnsupportedValue(trace.loc(), type=type(obj).__name__, detail=f"its {name}")
        fields = Attr(origin.source, "__dict__")  # a guard looks there in the thread that calls
        if name in obj.__dict__:
            return trace.remember((id(obj), name), wrap(trace, obj.__dict__[name], Item(fields, name)))
        trace.guard(fields, Lacks(name))
    try:
        value = plain_attr(trace, obj, name)
    except Raised as raised:  # a property, a descriptor or an empty slot may say that there is none
        if not (hooked and isinstance(raised.value, AttributeError) and hasattr(type(obj), "__getattr__")):
            raise
        value = MISSING
    return _getattr_hook(trace, obj, name, hooked) if value is MISSING else value


def plain_attr(trace: Trace, obj: Any, name: str) -> Any:
    """Where nothing of it was read or written before; MISSING if there is no such attribute."""
    kind = type(obj)
    origin = trace.origins.get(id(obj))
    guard_class(trace, kind)
    found, owner = find_in_class(trace, kind, name)
    found_kind = type(found)
    if found is not MISSING and hasattr(found_kind, "__get__"):
        if is_property(found):
            return call_property(trace, found, "getter", name, obj)
        if found_kind in FIELDS:
            return _native_field(trace, obj, name, origin)
        if hasattr(found_kind, "__set__") and not isinstance(found, (FunctionType, type)):
            return _descriptor_get(trace, found, obj, kind)
    value = _from_instance_dict(trace, obj, name, origin)
    if value is not MISSING:
        return value
    if found is not MISSING:
        if origin is not None and instance_dict(obj) is not None:
            trace.bare(origin.source).missing.append(name)
        return bind_class_value(trace, found, owner, obj, kind, name)
    return MISSING


def is_property(found: Any, method: str = "__get__") -> bool:
    """A property, or one of a class that adds to it, but leaves this method alone."""
    return isinstance(found, property) and getattr(type(found), method) is getattr(property, method)


def call_property(trace: Trace, found: property, part: str, name: str, obj: Any, *args: Any) -> Any:
    function = {"getter": found.fget, "setter": found.fset, "deleter": found.fdel}[part]
    if function is None:
        raise Raised(AttributeError(f"property '{name}' of '{type(obj).__name__}' object has no {part}"))
    return trace.call(function, [obj, *args], {})


def is_own_dict(origin: Origin | None) -> bool:
    """self.__dict__ = self: its attributes are its items."""
    return origin is not None and instance_dict(origin.original) is origin.original


def _original(obj: Any, origin: Origin | None) -> Any:
    return obj if origin is None else origin.original


def _from_instance_dict(trace: Trace, obj: Any, name: str, origin: Origin | None) -> Any:
    attributes = instance_dict(_original(obj, origin))
    if attributes is None:
        return MISSING
    if origin is not None and attributes is origin.original:  # see is_own_dict
        return dict.get(obj, name, MISSING)
    value = attributes.get(name, MISSING)
    if value is MISSING or origin is None and not isinstance(obj, enum.Enum):
        return value
    source = trace.const(obj, type(obj).__name__) if origin is None else origin.source
    if name in MODULE_TABLES and not isinstance(value, dict):
        raise UnsupportedValue(trace.loc(), type=type(value).__name__, detail=f"it is the {name} of {source}")
    if name in MODULE_TABLES:  # what the program puts into the table counts from now on
        for entry in value:
            trace.reads.pop((id(obj), entry), None)
    value = wrap(trace, value, DictAttr(source, name))
    return value if has_setter(type(obj), name, "__get__") else trace.remember((id(obj), name), value)


def _native_field(trace: Trace, obj: Any, name: str, origin: Origin | None) -> Any:
    """A slot, or an attribute computed in C."""
    if name == "__dict__":
        return InstanceDict(trace, obj)
    if name == "__class__":
        return type(obj)
    if isinstance(obj, TracebackType) and origin is None:
        raise UnsupportedValue(trace.loc(), type="traceback", detail="its exception was raised in the graph")
    if isinstance(obj, BackwardCFunction) and name == "saved_tensors":  # a checkpoint's are there once
        raise UnsupportedValue(trace.loc(), type=type(obj).__name__, detail="hooks see its tensors taken")
    if origin is None:
        is_traceback = name == "__traceback__" and isinstance(obj, BaseException)
        found = is_traceback and trace.traceback_of(obj) or native(getattr, obj, name)
        return found.fn if type(found) is Callback else found  # a defaultdict's factory
    try:
        value = native(getattr, origin.original, name)
    except Raised:
        is_empty = partial(_is_empty, find_in_mro(type(obj), name)[0])
        trace.guard(origin.source, Predicate(is_empty, f"has no {name}"))
        raise
    return trace.remember((id(obj), name), wrap(trace, value, Attr(origin.source, name)))


def _is_empty(slot: Any, owner: Any) -> bool:
    try:
        slot.__get__(owner)
    except AttributeError:
        return True
    return False


def _descriptor_get(trace: Trace, found: Any, obj: Any, kind: type) -> Any:
    made = _call_descriptor(trace, found, "__get__", obj, kind)
    return native(found.__get__, obj, kind) if made is MISSING else made


def _call_descriptor(trace: Trace, found: Any, name: str, *args: Any) -> Any:
    """What its method gives; MISSING where that is not written in Python."""
    guard_class(trace, type(found))
    wrap(trace, found, trace.const(found, type(found).__name__), stable=True)  # it may have a state
    method = python_method(type(found), name)
    return MISSING if method is None else trace.call(method, [found, *args], {})


def bind_class_value(trace: Trace, found: Any, owner: Any, obj: Any, kind: type, name: str) -> Any:
    """What reading a class's value through an instance (or, with obj None, through the class) gives."""
    found_kind = type(found)
    if found_kind is FunctionType:
        return MethodType(found, obj) if obj is not None else found
    if found_kind is classmethod:
        return MethodType(found.__func__, kind)
    if found_kind is staticmethod:
        return found.__func__
    if found_kind is functools.cached_property and obj is not None:
        value = trace.call(found.func, [obj], {})
        store_instance(trace, obj, name, value)
        return value
    if obj is not None and found_kind in C_METHODS:
        return native(getattr, obj, name)
    if hasattr(found_kind, "__get__") and not isinstance(found, (type, BuiltinFunctionType)):
        if is_property(found):
            return found if obj is None else call_property(trace, found, "getter", name, obj)
        return _descriptor_get(trace, found, obj, kind)
    return class_value(trace, owner, name, found)


def class_value(trace: Trace, owner: type, name: str, found: Any) -> Any:
    """What lies in a class, which is guarded; a number there has a guard of its own."""
    is_number, key = type(found) in (int, float), (id(owner), name)
    if key in trace.writes or type(found) in PLAIN and not is_number or id(owner) in trace.made:
        return found
    if key in trace.reads:
        return trace.reads[key]
    source = Attr(trace.const(owner, owner.__name__), name)
    return trace.remember(key, wrap(trace, found, source, stable=not is_number))


FIELDS: Final = frozenset({types.GetSetDescriptorType, types.MemberDescriptorType})
"""Descriptors of C fields and of slots."""
C_METHODS: Final = frozenset(
    {types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType}
)
_module_getattr: Final = torch.nn.Module.__getattr__


def _getattr_hook(trace: Trace, obj: Any, name: str, hooked: bool = True) -> Any:
    """The class's __getattr__, or AttributeError."""
    hook = find_in_mro(type(obj), "__getattr__")[0] if hooked else MISSING
    origin = trace.origins.get(id(obj))
    if origin is not None and (id(obj), name) not in trace.writes:
        trace.bare(origin.source).missing.append(name)
    if hook is _module_getattr:
        value = module_entry(trace, obj, name, origin)
        return value if value is not MISSING else raise_attribute_error(obj, name)
    if hook is MISSING and (type(obj).__flags__ & HEAP_TYPE or (id(obj), name) in trace.writes):
        return raise_attribute_error(obj, name)
    if hook is MISSING:  # a C type may have its own way to find attributes
        return native(getattr, obj, name) if origin is None else _native_field(trace, obj, name, origin)
    return trace.call(hook, [obj, name], {})


def module_entry(trace: Trace, obj: Any, name: str, origin: Origin | None) -> Any:
    """A parameter, buffer or submodule of an nn.Module. A name is in one table only (nn.Module sees to that),
    so that the tables before need no guard."""
    attributes = instance_dict(_original(obj, origin)) or {}
    for table in MODULE_TABLES:
        key = (id(obj), table)
        seen = trace.writes[key].value if key in trace.writes else trace.reads.get(key)
        entries = attributes.get(table) if seen is None else seen
        if entries is not None and name in entries:
            value = entries[name]
            if origin is not None and seen is None:
                value = wrap(trace, value, Item(DictAttr(origin.source, table), name))
                trace.reads[(id(obj), name)] = value
            return value
    return MISSING


class TensorSuper(Noun, eq=False):
    """super() of a tensor of a subclass."""

    __thisclass__: type
    __self_class__: type
    __self__: Fake


def make_super(trace: Trace, start: type, owner: Any) -> Any:
    kind = trace.kinds.get(id(owner))
    return native(super, start, owner) if kind is None else TensorSuper(start, kind, owner)


def super_attr(trace: Trace, obj: super, name: str) -> Any:
    """super(cls, self).name: the search goes on after cls in the MRO of self's class."""
    facts: Any = obj
    start, kind, owner_obj = facts.__thisclass__, facts.__self_class__, facts.__self__
    if name == "__class__":
        return super
    guard_class(trace, kind)
    mro = kind.__mro__
    for owner in mro[mro.index(start) + 1 :]:
        found = owner.__dict__.get(name, MISSING)
        if found is not MISSING:
            if type(obj) is TensorSuper and owner in torch.Tensor.__mro__:
                return trace.tensor_attr(owner_obj, name, True)
            if type(found) in C_METHODS or isinstance(found, BuiltinFunctionType):
                return native(getattr, obj, name)
            bound_to = None if owner_obj is kind else owner_obj
            return bind_class_value(trace, found, owner, bound_to, kind, name)
    return raise_attribute_error(obj, name)


@functools.cache
def is_stable_module(module: ModuleType) -> bool:
    """torch's and Python's own modules: their functions and constants are taken as fixed."""
    file = getattr(module, "__file__", None) or ""
    in_stdlib = (file.startswith(traces.STDLIB_FOLDER) and "site-packages" not in file) or not file
    is_found = module.__name__ != "__main__" and module.__spec__ is not None
    return in_stdlib and is_found or module.__name__.split(".")[0] in ("torch", "numpy", "builtins")


def is_users_read(trace: Trace) -> bool:
    """Whether the code that reads is the user's: what it names in torch may have been patched by the user."""
    return bool(trace.places) and not traces.is_library_file(trace.places[-1].code.code.co_filename)


def module_attr(trace: Trace, obj: ModuleType, name: str) -> Any:
    pending = trace.writes.get((id(obj.__dict__), name))
    if pending is not None:
        return pending.value
    if (id(obj), name) in trace.reads:
        return trace.reads[(id(obj), name)]
    value, source = native(getattr, obj, name), Attr(trace.const(obj, obj.__name__), name)
    if is_stable_module(obj) and (name in obj.__dict__ or not is_users_read(trace)):  # else a property
        is_fixed = type(value) in PLAIN or isinstance(value, (FunctionType, *IDENTITY))
        if is_fixed and is_users_read(trace) and not isinstance(value, ModuleType):
            trace.guard(DictAttr(source.of, name), Is(value))
        value = wrap(trace, value, source, stable=True)
    else:
        value = wrap(trace, value, DictAttr(source.of, name) if name in obj.__dict__ else source)
    return trace.remember((id(obj), name), value)


def class_attr(trace: Trace, obj: type, name: str) -> Any:
    if isinstance(obj, enum.EnumType):
        guard_class(trace, obj)  # it grows while its members are made
        return native(getattr, obj, name)
    if name == "__class__":
        return type(obj)
    guard_class(trace, obj)
    if type(type.__dict__.get(name)) in FIELDS:
        value = native(getattr, obj, name)
        if name == "__dict__":
            bound = (FunctionType, property, classmethod, staticmethod, *FIELDS)
            own = {key: item for key, item in value.items() if type(item) not in bound}
            now = {**value, **{k: class_value(trace, obj, k, own[k]) for k in own}}
            now |= {key: write.value for (owner, key), write in trace.writes.items() if owner == id(obj)}
            return types.MappingProxyType({k: now[k] for k in now if now[k] is not traces.DELETED})
        is_own = name in UNVERSIONED and obj.__flags__ & HEAP_TYPE and id(obj) not in trace.made
        return wrap(trace, value, Attr(trace.const(obj, obj.__name__), name)) if is_own else value
    guard_class(trace, type(obj))
    found, owner = find_in_class(trace, obj, name)
    meta_found, meta = find_in_mro(type(obj), name)
    if is_property(meta_found) or found is MISSING and meta is not None:  # a property comes first
        return bind_class_value(trace, meta_found, meta, obj, type(obj), name)
    if found is MISSING or type(found) in C_METHODS:
        return native(getattr, obj, name)
    return bind_class_value(trace, found, owner, None, obj, name)


def function_attr(trace: Trace, obj: Any, name: str) -> Any:
    source = trace.source_of(obj) or trace.const(obj, obj.__name__)
    is_own = (not name.startswith("__") or name in TITLES) and existed(trace, obj, name)
    if is_own and name not in TITLES and name not in obj.__dict__:
        trace.bare(source).missing.append(name)
    value = native(getattr, obj, name)
    is_known = isinstance(value, (*IDENTITY, types.MethodWrapperType)) or type(value) in PLAIN
    if not is_own and (is_known or id(obj) in trace.made):
        return value
    if name == "__dict__":
        return InstanceDict(trace, wrap(trace, obj, source, stable=True))
    if name == "__globals__":
        raise UnsupportedValue(trace.loc(), type="dict", detail=f"the globals of {obj.__qualname__}")
    return wrap(trace, value, Attr(source, name))


def _native_rule(trace: Trace, obj: Any, name: str) -> Any:
    """What symbolic numbers lack is asked of the number, which a guard then keeps."""
    number = NUMBERS.get(type(obj))
    if name == "__class__":
        return number or type(obj)
    if number and not hasattr(obj, name):
        obj = native(number, obj)
    return native(getattr, obj, name)


class InstanceDict(MutableMapping[str, Any]):
    """self.__dict__ of an object of the trace: reads and writes go through the attribute rules."""

    def __init__(self, trace: Trace, owner: Any) -> None:
        self.trace, self.owner, self.origin = trace, owner, trace.origins.get(id(owner))
        self.real = instance_dict(_original(owner, self.origin)) or {}

    def __getitem__(self, name: str) -> Any:
        key = (id(self.owner), name)
        if (pending := self.trace.writes.get(key)) is not None:
            if pending.value is traces.DELETED:
                raise KeyError(name)
            return pending.value
        if name in self.real and key in self.trace.reads:
            return self.trace.reads[key]
        value = _from_instance_dict(self.trace, self.owner, name, self.origin)
        if value is MISSING:
            if self.origin is not None:
                self.trace.bare(self.origin.source).missing.append(name)
            raise KeyError(name)
        return value

    __setitem__: Any = lambda self, name, value: store_instance(self.trace, self.owner, name, value)

    def __delitem__(self, name: str) -> None:
        self[name]
        delete_instance(self.trace, self.owner, name)

    def _names(self) -> list[str]:
        writes = self.trace.writes.items()
        own = {name: write.value for (owner, name), write in writes if owner == id(self.owner)}
        return [name for name in {**self.real, **own} if own.get(name) is not traces.DELETED]

    def __iter__(self) -> Iterator[str]:
        if self.origin is not None:
            self.trace.guard(Attr(self.origin.source, "__dict__"), Length(len(self.real)))
        return iter(self._names())

    __len__: Any = lambda self: len(self._names())
    __reversed__: Any = lambda self: reversed(list(self))
    copy = __copy__ = lambda self: dict(self)
    __or__, __ror__ = (lambda self, other: dict(self) | other), (lambda self, other: other | dict(self))
    keys: Any = lambda self: dict.fromkeys(self).keys()


# -- writing ---------------------------------------------------------------------------------------

def store_attr(trace: Trace, obj: Any, name: str, value: Any) -> None:
    obj = original_of(trace, obj) if is_drop_in(obj) else obj
    override, _ = find_in_mro(type(obj), "__setattr__")
    if isinstance(obj, Fake):
        trace.store_tensor_attr(obj, name, value)
    elif isinstance(obj, ModuleType) and not has_setter(type(obj), name):
        store_global(trace, obj.__dict__, name, value, DictAttr(trace.const(obj, obj.__name__), name))
    elif override is torch.nn.Module.__setattr__ and _store_module_attr(trace, obj, name, value):
        return
    elif isinstance(override, FunctionType) or getattr(override, "__name__", name) == "__setitem__":
        trace.call(override, [obj, name, value], {})  # in a dict with attributes it is that of dict
    else:
        store_plain(trace, obj, name, value)


def store_in_class(trace: Trace, kind: type | ModuleType, name: str, value: Any) -> None:
    if id(kind) in trace.made:
        native(*(delattr, kind, name) if value is traces.DELETED else (setattr, kind, name, value))
        return
    if name.startswith("__") or isinstance(kind, ModuleType):  # what C code asks the class for
        raise UnsupportedValue(trace.loc(), type="class", detail=f"changing {kind.__name__}.{name}")
    trace.writes[(id(kind), name)] = traces.Write(kind, name, value, "class")
    trace.changed_classes.add(id(kind))


def store_plain(trace: Trace, obj: Any, name: str, value: Any) -> None:
    """object.__setattr__: data descriptors of the class, else the instance."""
    found, _ = find_in_mro(type(obj), name)
    found_kind = type(found)
    if found is not MISSING and hasattr(found_kind, "__set__"):
        if is_property(found, "__set__"):
            return call_property(trace, found, "setter", name, obj, value)  # type: ignore[no-any-return]
        if _call_descriptor(trace, found, "__set__", obj, value) is not MISSING:
            return
    store_instance(trace, obj, name, value)


def existed(trace: Trace, obj: Any, name: str) -> bool:
    """Whether an object is older than the frame, so that what is done to its attribute waits."""
    is_function = isinstance(obj, FunctionType) and id(obj) not in trace.made
    if id(obj) not in trace.origins and not is_function and not isinstance(obj, enum.Enum):
        return False
    if name in ("__class__", "__dict__") or issubclass(type(obj), FOREIGN):
        raise UnsupportedValue(trace.loc(), type=type(obj).__name__, detail=f"changing its {name}")
    return True


def has_setter(kind: type, name: str, also: str = "__set__") -> bool:
    """Whether a descriptor of the class takes what is assigned under this name (and gives what is read)."""
    found = type(find_in_mro(kind, name)[0])
    return hasattr(found, "__set__") and hasattr(found, also) and found not in FIELDS


def store_instance(trace: Trace, obj: Any, name: str, value: Any) -> None:
    """Write where no descriptor is in the way."""
    if isinstance(obj, type):
        return store_in_class(trace, obj, name, value)
    if is_own_dict(trace.origins.get(id(obj))):
        return dict.__setitem__(obj, name, value)
    if isinstance(value, InstanceDict) and name == "__dict__":
        raise UnsupportedValue(trace.loc(), type=name, detail=f"that of {type(obj).__name__} has two owners")
    if existed(trace, obj, name):
        real = _original(obj, trace.origins.get(id(obj)))
        is_plain = instance_dict(real) is None and type(real).__setattr__ is object.__setattr__
        if is_plain and not hasattr(type(find_in_mro(type(real), name)[0]), "__set__"):
            native(object.__setattr__, real, name, value)  # for which there is no place, as this says
        trace.writes[(id(obj), name)] = traces.Write(obj, name, value, "attr")
        return
    attributes = instance_dict(obj)
    if attributes is not None and has_setter(type(obj), name):
        attributes[name] = value
        return
    own: Any = type(obj).__setattr__
    is_in_c = type(own) is types.WrapperDescriptorType and own.__name__ == "__setattr__"  # it may be another
    native(own if is_in_c else object.__setattr__, obj, name, value)


def _store_module_attr(trace: Trace, obj: Any, name: str, value: Any) -> bool:
    """The common cases of nn.Module.__setattr__; False leaves it to the real one."""
    origin = trace.origins.get(id(obj))
    if origin is None or (isinstance(value, Fake) and trace.call(isinstance, [value, torch.nn.Buffer], {})):
        return False
    attributes = origin.original.__dict__
    for table in MODULE_TABLES:
        if name in attributes.get(table, ()):  # none yet while its __init__ runs
            if table != "_buffers" or not (value is None or isinstance(value, torch.Tensor)):
                return False
            load_attr(trace, obj, table)[name] = value
            return True
    if isinstance(value, (torch.nn.Parameter, torch.nn.Module)):
        return False
    store_plain(trace, obj, name, value)
    return True


def store_global(trace: Trace, where: dict[str, Any], name: str, value: Any, source: Source) -> None:
    trace.writes[(id(where), name)] = traces.Write(where, source.text, value, "source")
    trace.keep.append(where)


def delete_attr(trace: Trace, obj: Any, name: str) -> None:
    obj = original_of(trace, obj) if is_drop_in(obj) else obj
    override, found = (find_in_mro(type(obj), each)[0] for each in ("__delattr__", name))
    is_python = python_method(type(found), "__delete__") is not None
    if isinstance(override, FunctionType) or getattr(override, "__name__", name) == "__delitem__":
        trace.call(override, [obj, name], {})
    elif isinstance(found, property):
        call_property(trace, found, "deleter", name, obj)
    elif found is torch.Tensor.grad:
        store_attr(trace, obj, name, None)
    elif not is_python or _call_descriptor(trace, found, "__delete__", obj) is MISSING:
        delete_instance(trace, obj, name)


def delete_instance(trace: Trace, obj: Any, name: str) -> None:
    if isinstance(obj, (type, ModuleType)):
        load_attr(trace, obj, name)
        if trace.writes.pop((id(obj), name), None) is None or name in vars(obj):
            store_in_class(trace, obj, name, traces.DELETED)
        return
    if is_own_dict(trace.origins.get(id(obj))):
        return native(dict.__delitem__, obj, name)  # type: ignore[no-any-return]
    if not existed(trace, obj, name):
        if trace.writes.pop((id(obj), name), None) is None:
            native(object.__delattr__, obj, name)
        return
    if issubclass(type(obj), threading.local):
        raise UnsupportedValue(trace.loc(), type=type(obj).__name__, detail=f"deleting its {name}")
    origin = trace.origins.get(id(obj))
    attributes = instance_dict(_original(obj, origin))
    if attributes is None:
        load_attr(trace, obj, name)
    elif name not in InstanceDict(trace, obj):
        raise_attribute_error(obj, name)
    if origin is None or attributes is None or name in attributes:
        trace.writes[(id(obj), name)] = traces.Write(obj, name, traces.DELETED, "attr")
    else:  # made by this very program
        trace.bare(origin.source).missing.append(name)
        del trace.writes[(id(obj), name)]


Rule = Callable[[Trace, Any, str], Any]

RULES: Final[dict[type, Rule]] = {
    **dict.fromkeys((
        int, float, str, bool, bytes, complex, type(None), list, tuple, set, frozenset, dict, range, slice,
        torch.dtype, torch.device, torch.Size, InstanceDict, *NUMBERS, LateText,
        BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
    ), _native_rule),
    **dict.fromkeys((super, TensorSuper), super_attr),
    Unread: lambda trace, obj, name: (
        obj.append if name == "append" else load_attr(trace, read_list(trace, obj), name)),
    Outside: lambda trace, obj, name: instance_attr(trace, obj.original, name),
    FunctionType: function_attr,
    MethodType: lambda trace, obj, name: (
        getattr(obj, name) if name in ("__self__", "__func__") else load_attr(trace, obj.__func__, name)),
}  # fmt: skip
