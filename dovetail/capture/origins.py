"""Objects that existed before the frame, as the trace sees them.

    wrap(trace, value, source) -> what stands in for it

    42                      42, guarded to equal 42
    a tensor                a Fake, a graph input, guarded by its metadata
    [x, 1]                  a shadow list [Fake, 1]; changed in the trace, written back at exit
    a module, an instance   itself; its attributes are wrapped when they are read (attributes.py)

The same object met at a second path is the same stand-in, and a guard says so.
"""
from __future__ import annotations

import enum
import gc
import re
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType
from typing import Any, Final
from uuid import UUID
from weakref import WeakKeyDictionary

import torch

from dovetail.capture.dynamic import MOST_RESUMED
from dovetail.capture.resume import is_resumed
from dovetail.capture.text import GivenText, LateText
from dovetail.capture.trace import OPERATORS, PLAIN, Origin, Outside, Trace, Unread
from dovetail.errors import ShapelessParameter, UnsupportedValue
from dovetail.fake.tensor import Fake, fake_like
from dovetail.ir.capture import GraphInput
from dovetail.ir.guard import DictKeys, Equals, Is, Length, Predicate, SameAs, TensorIs, TypeIs
from dovetail.ir.source import Applied, Arg, Attr, Cell, DictKey, Item, KeyItem, Source, root_of

Wrapper = Callable[[Trace, Any, Source], Any]

IDENTITY: Final = (
    type, types.ModuleType, BuiltinFunctionType, types.BuiltinMethodType, types.MethodDescriptorType,
    types.WrapperDescriptorType, enum.Enum, types.GenericAlias, re.Pattern, torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)  # fmt: skip
"""Types whose instances are told apart by identity."""
BOUND: Final = (BuiltinFunctionType, types.MethodWrapperType)

MOST_FORMS: Final = 4
NOT_ASKED: Final = torch._C._disabled_torch_function_impl
TENSOR_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


def wrap(trace: Trace, value: Any, source: Source, stable: bool = False) -> Any:
    """The stand-in for `value`, read at `source`. `stable`: something else already guards that the same
    object is found there (a class that has not changed), so a constant needs no guard of its own."""
    kind = type(value)
    if kind in PLAIN:
        return value if stable else wrap_constant(trace, value, source)
    if kind is FunctionType:
        return wrap_function(trace, value, source, stable)
    if kind in BOUND and not isinstance(value.__self__, (type, types.ModuleType, types.NoneType)):
        return wrap_bound(trace, value, source)
    if isinstance(value, IDENTITY):
        if not stable:
            is_own = isinstance(value, type) and is_resumed(trace.frame.code)  # made before it broke, perhaps
            if is_own and is_unsteady(trace, source, id(value)):
                raise UnsupportedValue(type="class", detail=f"{source} is another one in each call")
            trace.guard(source, Is(value))
        return value
    if isinstance(value, Fake):
        return value
    seen = trace.known.get(id(value))
    if seen is not None:
        if not stable and seen.source is not source:
            trace.guard(source, SameAs(seen.source))
        if type(seen.stand_in) is Unread and not trace.is_appending:
            return read_list(trace, seen.stand_in)
        return seen.stand_in
    wrapper = WRAPPERS.get(kind) or _found.get(kind) or _find_wrapper(kind)
    return wrapper(trace, value, source)


def register(trace: Trace, original: Any, stand_in: Any, source: Source) -> Any:
    """Give the stand-in, which the original is known by from here on."""
    origin = trace.origins[id(stand_in)] = Origin(original, stand_in, source)
    trace.known[id(original)] = trace.by_source[id(source)] = origin
    return stand_in


def wrap_constant(trace: Trace, value: Any, source: Source) -> Any:
    kind = type(value)
    if kind in (int, float) and trace.dynamic is not None:
        symbolic = trace.dynamic.number(trace, value, source)
        if symbolic is not None:
            return symbolic
    if kind is torch.Size:
        trace.guard(source, TypeIs(kind))
        trace.guard(source, Length(len(value)))
        return torch.Size([wrap(trace, size, Item(source, i)) for i, size in enumerate(value)])
    if kind is str and trace.dynamic is not None and trace.dynamic.seen.count_forms(source, value) > 1:
        trace.guard(source, TypeIs(str))
        return LateText(trace, str, (GivenText(trace, value, source, is_unsteady(trace, source, value)),))
    if kind is range and is_unsteady(trace, source, value):
        return leave_outside(trace, value, source)
    by_identity = kind is bool or value is None or kind in (torch.dtype, types.CodeType, types.EllipsisType)
    trace.guard(source, Is(value) if by_identity else Equals(value))
    return value


def wrap_function(trace: Trace, value: FunctionType, source: Source, stable: bool) -> Any:
    """A function that arrives as an argument is often made anew for each call; its code is not."""
    seen = trace.known.get(id(value))
    if seen is None:
        register(trace, value, value, source)
    if stable:
        return value
    if isinstance(root_of(source), (Arg, Cell)):
        trace.guard(source, TypeIs(FunctionType))
        trace.guard(Attr(source, "__code__"), Is(value.__code__))
        if seen is not None and value.__closure__:
            trace.guard(source, SameAs(seen.source))
    else:
        trace.guard(source, Is(value))
    return value


def wrap_tensor(trace: Trace, value: torch.Tensor, source: Source, plain: Source | None = None) -> Any:
    """`plain`: where the graph has it from, if its class is not to be asked there."""
    with torch._C.DisableTorchFunction():  # each attribute read would go through capture's own mode
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            kind = f"{value.layout} tensor"
            raise UnsupportedValue(trace.loc(), type=kind, detail="only strided tensors are captured")
        return _wrap_strided(trace, value, source, plain or source)


def _wrap_strided(trace: Trace, value: torch.Tensor, source: Source, plain: Source) -> Any:
    fake, free_shape, free_stride, symbolic = make_fake(trace, value, plain)
    if may_be_written(value) and torch.is_grad_enabled():
        give_history(fake)
    register(trace, value, fake, source)
    trace.owned[id(fake)] = fake
    name, example = f"input_{len(trace.inputs)}", value if plain is source else as_plain(value)
    trace.inputs.append(GraphInput(name, plain, example, symbolic))
    trace.input_fakes.append(fake)
    guard_tensor(trace, value, source, free_shape, free_stride)
    return fake


def guard_tensor(trace: Trace, value: torch.Tensor, source: Source, shape: Any, stride: Any) -> None:
    """`shape` and `stride` are None where they may change."""
    index = value.device.index
    about = type(value), value.dtype, value.device.type, -1 if index is None else index, value.requires_grad
    trace.guard(source, TensorIs(*about, shape, stride, torch._C._dispatch_keys(value).raw_repr()))


def may_be_written(value: torch.Tensor) -> bool:
    """Whether a tensor was computed with gradients, and is the whole of what was computed."""
    return value.grad_fn is not None and not value._is_view()


def give_history(fake: Fake) -> None:
    """No leaf either: autograd refuses writes to those."""
    with torch.autograd._unsafe_preserve_version_counter(fake):  # type: ignore[attr-defined]
        fake.requires_grad_(False).mul_(torch.ones((), device=fake.device, requires_grad=True))


def make_fake(
    trace: Trace, value: torch.Tensor, source: Source
) -> tuple[Fake, tuple[Any, ...], tuple[Any, ...], Any]:
    """The Fake of an input, the sizes and strides that must stay (None where symbolic), and another Fake
    for later stages if some are symbolic."""
    if trace.dynamic is not None:
        made = trace.dynamic.tensor(trace, value, source)
        if made is not None:
            return made  # type: ignore[no-any-return]
    return fake_like(value), tuple(value.shape), tuple(value.stride()), None


def wrap_list(trace: Trace, value: Any, source: Source) -> Any:
    if type(value) is list and trace.is_appending:
        trace.guard(source, TypeIs(list))
        return leave_unread(trace, value, source)
    if is_unsteady(trace, source, (len(value), *arguments_in(trace, value))):
        return leave_outside(trace, value, source)
    shadow = type(value)() if type(value) is not deque else deque(maxlen=value.maxlen)
    origin = _shadow(trace, value, shadow, source)
    trace.guard(source, Length(len(value)))
    base = own_base(type(value))
    items = list.__iter__(value) if base else value
    shadow.extend([wrap(trace, item, Item(source, i, base)) for i, item in enumerate(items)])
    origin.before = list(shadow)
    return shadow


def is_unsteady(trace: Trace, source: Source, form: Any) -> bool:
    """A history, a buffer, a cache that is longer in each call: it was read here in many forms before."""
    if trace.dynamic is None or trace.is_whole:
        return False
    most = MOST_RESUMED if is_resumed(trace.frame.code) else MOST_FORMS
    return trace.dynamic.seen.count_forms(source, form) > most  # type: ignore[no-any-return]


def arguments_in(trace: Trace, items: Iterable[Any]) -> list[int]:
    """Where a collection holds tensors that a resumed frame also has in a variable: in a loop over the
    collection that breaks in its body, each time somewhere else."""
    if not is_resumed(trace.frame.code):
        return []
    own = set(_tensors_in(trace.frame.args))
    return [i for i, item in enumerate(items) if id(item) in own]


def _tensors_in(values: Iterable[Any]) -> Iterator[int]:
    """Also those in tuples, such as what zip and enumerate give."""
    for value in values:
        if isinstance(value, tuple):
            yield from _tensors_in(value)
        elif isinstance(value, torch.Tensor):
            yield id(value)


def is_fixed(value: Any) -> bool:
    """Always the same, down to what lies in it."""
    if type(value) in (tuple, frozenset):
        return all(map(is_fixed, value))
    return type(value) in PLAIN or isinstance(value, (*IDENTITY, FunctionType))


def wrap_set(trace: Trace, value: Any, source: Source) -> Any:
    """Sets are read whole; their members must be constants, as there is no path to one."""
    if not all(map(is_fixed, value)) or type(value).__eq__ not in (set.__eq__, frozenset.__eq__):
        return leave_outside(trace, value, source)
    if isinstance(value, frozenset):
        trace.guard(source, Equals(value))
        return register(trace, value, value, source)
    if is_unsteady(trace, source, frozenset(value)):
        return leave_outside(trace, value, source)
    origin = _shadow(trace, value, set.__new__(type(value)), source)
    origin.before = set.__new__(type(value))
    for made in (origin.stand_in, origin.before):
        set.update(made, members(value))
    trace.guard(source, Equals(origin.before))
    return origin.stand_in


def members(value: Any) -> tuple[Any, ...]:
    """Of a set, in its own order, which depends on its history."""
    return tuple((set if isinstance(value, set) else frozenset).__iter__(value))


def in_order(trace: Trace, value: Any) -> Any:
    """The members of a set as they come in the one it stands for; a new one has them in another order."""
    origin = trace.origins.get(id(value)) if type(value) in (set, frozenset) else None
    if origin is None:
        return value
    items = members(origin.original)
    trace.guard(Applied(origin.source, trace.const(members, "members").name, members), Equals(items))
    return value if is_changed(origin) or members(value) == items else items


def leave_unread(trace: Trace, value: list[Any], source: Source) -> Unread:
    """A list of which nothing is read yet. Its type is guarded when something is done with it."""
    trace.unread.append(Unread(value, source))
    return register(trace, value, trace.unread[-1], source)  # type: ignore[no-any-return]


def read_list(trace: Trace, unread: Unread) -> list[Any]:
    """Its contents after all, and what was appended."""
    if unread.shadow is None:
        del trace.known[id(unread.original)]
        unread.shadow = wrap_list(trace, unread.original, unread.source)
        if unread.added:
            unread.shadow.extend(unread.added)
            trace.touch(unread.shadow)
    return unread.shadow


def wrap_bound(trace: Trace, value: Any, source: Source) -> Any:
    """A method in C of a container or a tensor, bound: its owner is what counts."""
    real, name = value.__self__, value.__name__
    own = [vars(kind)[name] for kind in type(real).__mro__ if name in vars(kind)]  # perhaps hidden by others
    found = next((e for e in own if hasattr(e, "__objclass__") and e.__get__(real) == value), None)
    trace.guard(source, TypeIs(type(value)))
    trace.guard(Attr(source, "__name__"), Equals(name))
    where, seen = Attr(source, "__self__"), trace.known.get(id(real))
    is_list = name == "append" and type(real) is list
    if is_list and seen is not None:
        owner = seen.stand_in
        trace.guard(where, SameAs(seen.source))
    else:
        trace.guard(where, TypeIs(type(real)))
        owner = (leave_unread if is_list else wrap)(trace, real, where)
    if type(owner) is Outside or found is None:
        return wrap_instance(trace, value, source)
    method = found.__get__(owner) if isinstance(owner, found.__objclass__) else getattr(owner, name)
    trace.keep.append(method)
    return method


def _shadow(trace: Trace, value: Any, shadow: Any, source: Source) -> Origin:
    trace.guard(source, TypeIs(type(value)))
    register(trace, value, shadow, source)
    trace.shadows.append(trace.known[id(value)])
    return trace.shadows[-1]


def wrap_dict(trace: Trace, value: Any, source: Source) -> Any:
    kind: Any = type(value)
    if id(value) in trace.proxied or "__spec__" in value and "__loader__" in value:
        raise UnsupportedValue(trace.loc(), type=kind.__name__, detail=f"{source} has another owner")
    form = [key if is_constant(key) else id(key) for key in value] + arguments_in(trace, value)
    if is_unsteady(trace, source, tuple(form)):
        return leave_outside(trace, value, source)
    if kind is defaultdict:
        shadow: Any = defaultdict(
            trace.callback(wrap(trace, value.default_factory, Attr(source, "default_factory")))
        )
    else:
        shadow = kind.__new__(kind)
    origin = _shadow(trace, value, shadow, source)
    items = raw_items(value)
    has_tensors = any(isinstance(key, torch.Tensor) for key, _ in items)
    trace.guard(source, Length(len(items)) if has_tensors else DictKeys(tuple(key for key, _ in items)))
    for i, (key, item) in enumerate(items):
        inner = key
        if isinstance(key, torch.Tensor):
            trace.guard(DictKey(source, i), Is(key))
            inner = wrap(trace, key, DictKey(source, i))
        elif not is_held(key):
            detail = f"{source} has keys of type {type(key).__name__}"
            raise UnsupportedValue(trace.loc(), type="dict", detail=detail)
        elif not is_fixed(key):
            inner = wrap(trace, key, DictKey(source, i), stable=True)  # an object, which has attributes
        step: Source = Item(source, key, own_base(kind))
        if not is_constant(key):
            step = KeyItem(source, trace.const(key, "key").name, key)
        base = OrderedDict if issubclass(kind, OrderedDict) else dict
        base.__setitem__(shadow, inner, wrap(trace, item, step))
    origin.before = dict(raw_items(shadow))
    return shadow


def raw_items(value: Any) -> list[tuple[Any, Any]]:
    """The items of a dict without running methods of its subclass."""
    return list(OrderedDict.items(value) if isinstance(value, OrderedDict) else dict.items(value))


def is_held(key: Any) -> bool:
    """May a guard hold on to this key: it is compared by identity, or is a constant."""
    if type(key) is tuple:
        return all(map(is_held, key))
    return is_fixed(key) or type(key).__eq__ is object.__eq__ or type(key).__module__ == "typing"


def is_changed(origin: Origin) -> bool:
    now = origin.stand_in
    if isinstance(now, Fake):
        return now.is_inference() or now._version > 0  # an inference tensor does not count its changes
    if isinstance(now, Unread):
        return bool(now.added)
    if origin.before is None:
        return False
    if isinstance(now, set):
        return bool(now != origin.before)
    if isinstance(now, dict):
        items, before = (list(chain.from_iterable(raw_items(d))) for d in (now, origin.before))
    else:
        items, before = list(now), list(origin.before)
    return len(items) != len(before) or any(a is not b for a, b in zip(items, before))


def own_base(kind: type) -> str:
    """The builtin whose [] reads the contents, where the class has replaced it; else nothing."""
    for base in (dict, list, tuple):
        if issubclass(kind, base):
            return "" if kind.__getitem__ is base.__getitem__ else base.__name__
    return ""


def is_constant(key: Any) -> bool:
    """May be the key in a path: its repr is its text."""
    kind = type(key)
    if kind is tuple:
        return all(is_constant(item) for item in key)
    return kind in (int, float, str, bool, types.NoneType, bytes)


def wrap_tuple(trace: Trace, value: Any, source: Source) -> Any:
    if is_unsteady(trace, source, len(value)):
        return leave_outside(trace, value, source)
    trace.guard(source, TypeIs(type(value)))
    trace.guard(source, Length(len(value)))
    base = own_base(type(value))
    items = [wrap(trace, item, Item(source, i, base)) for i, item in enumerate(tuple.__iter__(value))]
    if all(new is old for new, old in zip(items, value)):
        return register(trace, value, value, source)
    is_record = hasattr(type(value), "n_sequence_fields")  # torch.return_types have a maker of their own
    stand_in = type(value)(items) if is_record else tuple.__new__(type(value), items)
    return register(trace, value, stand_in, source)


def wrap_parts(make: Any, names: Sequence[str], trace: Trace, value: Any, source: Source) -> Any:
    """An object of C that is made of these attributes: another one, of what stands in for them."""
    trace.guard(source, TypeIs(type(value)))
    parts = [wrap(trace, getattr(value, name), Attr(source, name)) for name in names]
    return register(trace, value, make(*parts), source)


def wrap_value(trace: Trace, value: Any, source: Source) -> Any:
    """An immutable value of C: a constant of the trace."""
    if is_unsteady(trace, source, value):
        return leave_outside(trace, value, source)
    trace.guard(source, TypeIs(type(value)))
    trace.guard(source, Equals(value))
    return value


def is_value_type(kind: type) -> bool:
    """NumPy's scalars and dtypes, and the number and time types of Python's library: immutable, compared by
    value."""
    if any(base.__module__ == "numpy" and base.__name__ in ("generic", "dtype") for base in kind.__mro__):
        return kind.__module__ in ("numpy", "numpy.dtypes")
    return kind in (Decimal, Fraction, date, datetime, time, timedelta, UUID)


def wrap_instance(trace: Trace, value: Any, source: Source) -> Any:
    """What a callable of C code does, such as np.sin or itemgetter(1), only its identity tells; a grad_fn
    is not called."""
    is_opaque = callable(value) and type(type(value).__call__) is types.WrapperDescriptorType
    is_opaque &= not isinstance(value, torch.autograd.graph.Node)
    trace.guard(source, Is(value) if is_opaque else TypeIs(type(value)))
    if (fields := instance_dict(value)) is not None and not is_drop_in(value):
        if id(fields) in trace.known or id(fields) in trace.proxied:
            raise UnsupportedValue(trace.loc(), type="__dict__", detail=f"that of {source} has two owners")
        trace.proxied[id(fields)] = fields
    trace.asks = trace.asks or hasattr(type(value), "__torch_function__")
    return register(trace, value, value, source)


def is_drop_in(value: Any) -> bool:
    """Is it a compiled module? Its attributes are its original's, whose __dict__ it shares."""
    return issubclass(type(value), torch.nn.Module) and hasattr(type(value), "_dovetail_compiled")


def original_of(trace: Trace, compiled: Any) -> Any:
    """Compiled code used in captured code is captured with it."""
    name = "_orig_mod" if type(compiled).__name__ == "OptimizedModule" else "_dovetail_original"
    source = trace.source_of(compiled) or trace.const(compiled, "compiled")
    return wrap(trace, getattr(compiled, name), Attr(source, name))


def instance_dict(obj: Any) -> dict[str, Any] | None:
    """The real __dict__ of an instance (a subclass may define a property of that name)."""
    try:
        found = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def leave_outside(trace: Trace, value: Any, source: Source) -> Any:
    trace.guard(source, TypeIs(type(value)))
    stand_in = register(trace, value, Outside(value, source), source)
    trace.origins[id(value)] = trace.known[id(value)]
    return stand_in


def wrap_proxy(trace: Trace, value: Any, source: Source) -> Any:
    """A mapping that only reads another, which must not change meanwhile."""
    keys, inner = list(value), gc.get_referents(value)[0]
    if id(inner) in trace.known or not all(is_constant(key) for key in keys):
        return wrap_instance(trace, value, source)
    if is_unsteady(trace, source, tuple(keys)):
        return leave_outside(trace, value, source)
    trace.proxied[id(inner)] = inner
    trace.guard(source, TypeIs(MappingProxyType))
    trace.guard(source, Predicate(lambda now: list(now) == keys, f"keys == {keys}"))
    stand_in = MappingProxyType({key: wrap(trace, value[key], Item(source, key)) for key in keys})
    return register(trace, value, stand_in, source)


def wrap_view(trace: Trace, value: Any, source: Source) -> Any:
    """The keys, the values or the items of a dict."""
    trace.guard(source, TypeIs(type(value)))
    proxy = value.mapping
    mapping = wrap_proxy(trace, proxy, Attr(source, "mapping"))
    if mapping is proxy or type(mapping) is Outside:
        return leave_outside(trace, value, source)
    stand_in = getattr(mapping, type(value).__name__.split("_")[1])()
    return register(trace, value, stand_in, source)


def leave_to_take_shape(trace: Trace, value: Any, source: Source) -> Any:
    raise ShapelessParameter(trace.loc(), name=source)


def wrap_subclass(trace: Trace, value: Any, source: Source) -> Any:
    """A tensor like others, whose class may say what operators and functions do to it: the graph has a plain
    one."""
    kind: Any = type(value)
    if is_dispatching(kind):
        return wrap_dispatching(trace, value, source)
    check_class(trace, kind)
    is_asked = kind.__torch_function__ is not NOT_ASKED
    plain = Applied(source, trace.const(as_plain, "as_plain").name, as_plain) if is_asked else source
    fake, trace.asks = wrap_tensor(trace, value, source, plain), True
    trace.kinds[id(fake)] = kind
    return fake


def wrap_dispatching(trace: Trace, value: torch.Tensor, source: Source) -> Any:
    """Its class says what each op does to it, mostly to tensors that are its attributes: those are in the
    graph, and the Fake that stands in for it is not."""
    with torch._C.DisableTorchFunction():
        if value.requires_grad:
            raise UnsupportedValue(trace.loc(), type=type(value).__name__, detail="it requires a gradient")
        fake, free_shape, free_stride, _ = make_fake(trace, value, source)
        register(trace, value, fake, source)
        guard_tensor(trace, value, source, free_shape, free_stride)
    trace.kinds[id(fake)], trace.asks = type(value), True
    return fake


def is_dispatching(kind: Any) -> bool:
    """Whether a class says what each op does. Those of torch.distributed are far too much code to capture."""
    is_own = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and kind is not Fake
    return is_own and not kind.__module__.startswith(("torch.distributed.", "torch.nested."))


def check_class(trace: Trace, kind: Any) -> None:
    """What a class of tensors has in Python in place of operators, or for each op, is left to Python."""
    own = {name for owner in {*kind.__mro__} - {*torch.nn.Parameter.__mro__} for name in vars(owner)}
    if found := sorted(own & {*OPERATORS, "__torch_dispatch__"}):
        raise UnsupportedValue(trace.loc(), type=kind.__name__, detail=f"its class has a {found[0]}")


def as_plain(value: torch.Tensor) -> torch.Tensor:
    return value.as_subclass(torch.Tensor)


_empty: Final[tuple[dict[str, Any], ...]] = ({}, OrderedDict())
VIEWS: Final = [type(view) for made in _empty for view in (made.keys(), made.values(), made.items())]

WRAPPERS: Final[dict[type, Wrapper]] = {
    types.CellType: wrap_instance,
    **dict.fromkeys(TENSOR_TYPES, wrap_tensor),
    **dict.fromkeys((list, deque), wrap_list),
    **dict.fromkeys((set, frozenset), wrap_set),
    **dict.fromkeys((dict, OrderedDict, defaultdict, Counter), wrap_dict),
    tuple: wrap_tuple,
    MethodType: partial(wrap_parts, MethodType, ("__func__", "__self__")),
    partial: partial(
        wrap_parts, lambda fn, args, named: partial(fn, *args, **named), ("func", "args", "keywords")),
    slice: partial(wrap_parts, slice, ("start", "stop", "step")),
    MappingProxyType: wrap_proxy,
    **dict.fromkeys(VIEWS, wrap_view),
}

BY_BASE: Final[tuple[tuple[type, Wrapper], ...]] = (
    (torch.nn.parameter.UninitializedTensorMixin, leave_to_take_shape),  # type: ignore[attr-defined]
    (torch.Tensor, wrap_subclass),
    (tuple, wrap_tuple),
    (dict, wrap_dict),
    (list, wrap_list),
    (set, wrap_set),
)
BY_NAME: Final[dict[str, Wrapper]] = {}
"""For types of packages that are not imported here."""
_found: WeakKeyDictionary[type, Wrapper] = WeakKeyDictionary()


def _find_wrapper(kind: type) -> Wrapper:
    is_iterator = not isinstance(getattr(kind, "__next__", wrap), FunctionType)
    found: Wrapper = wrap_value if is_value_type(kind) else leave_outside if is_iterator else wrap_instance
    for base, wrapper in BY_BASE:
        if issubclass(kind, base):
            found = wrapper
            break
    found = _found[kind] = BY_NAME.get(f"{kind.__module__}.{kind.__qualname__}", found)
    return found
