"""Python's operators on values of the trace.

    binary(trace, operator.add, x, 1)      a Fake: performed, and recorded as operator.add
    binary(trace, operator.add, a, b)      a user class with __add__ in Python: that method is interpreted
    binary(trace, operator.add, 2, 3)      5

Whatever runs here natively runs on the trace's own objects, so it can change nothing of the user's.
"""
from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final

import torch

from dovetail.capture import text
from dovetail.capture.attributes import MISSING, find_in_mro, guard_class, load_attr, python_method
from dovetail.capture.masks import Masked, put_masked, take_masked
from dovetail.capture.origins import in_order, raw_items
from dovetail.capture.text import NUMBERS, as_numbers, is_late, late, native
from dovetail.capture.trace import PLAIN, Raised, Trace, leaves
from dovetail.errors import DataDependentBranch, DataDependentNumber, DataDependentValue, UnsupportedValue
from dovetail.fake.tensor import Fake
from dovetail.ir.guard import SameAs
from dovetail.sym.real import iter_leaves

_aten: Final = torch.ops.aten
SYMBOLIC: Final = tuple(NUMBERS)

DUNDERS: Final[dict[Any, tuple[str, str]]] = {
    getattr(operator, f"__{name}__"): (f"__{name}__", f"__r{name}__")
    for name in "add and floordiv lshift matmul mul mod or pow rshift sub truediv xor".split()
}
INPLACE: Final[dict[Any, Any]] = {getattr(operator, "i" + op.__name__.rstrip("_")): op for op in DUNDERS}
COMPARISONS: Final[dict[Any, tuple[str, str]]] = {
    getattr(operator, name): (f"__{name}__", f"__{turned}__")
    for name, turned in zip("lt le gt ge eq ne".split(), "gt ge lt le eq ne".split())
}
IN_KEYS: Final[dict[str, Callable[[Trace, Any], Any]]] = {}
"""How arrays in a key become tensors, by the name of their type."""
LINEAR: Final = (operator.add, operator.sub, operator.mul)  # eager divides by way of the reciprocal
UNARY: Final = {operator.neg: "__neg__", operator.pos: "__pos__", operator.invert: "__invert__"}


def has_fake(value: Any) -> bool:
    return type(value) is Fake or any(isinstance(leaf, Fake) for leaf in leaves(value))


def on_fakes(trace: Trace, op: Callable[..., Any], *args: Any) -> Any:
    """An operator with a tensor among its operands."""
    for arg in args:
        if type(arg) is Masked:  # no tensor that torch could compute with
            arg.leave()
    if trace.asks and (said := trace.overridden(op, args)) is not MISSING:
        return said
    result = native(op, *args)
    if has_fake(result):
        trace.record("call_function", op, args, {}, result)
    return result


def dunder(trace: Trace, kind: type, name: str) -> FunctionType | None:
    """A dunder written in Python, or None. Built-in types are answered at once."""
    if kind in PLAIN or kind in NATIVE_KINDS:
        return None
    if not is_ours(kind):
        guard_class(trace, kind)
    return python_method(kind, name)


NATIVE_KINDS: Final = frozenset({list, tuple, dict, set, frozenset, slice, Fake, *SYMBOLIC})


def binary(trace: Trace, op: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    kind, other = type(left), type(right)
    if kind is Fake and (other is Fake or other in PLAIN or other in SYMBOLIC):
        return on_fakes(trace, op, left, right)
    if kind in PLAIN and other in PLAIN:
        return native(op, left, right)
    if kind is Fake or other is Fake:
        left, right = as_numbers([left, right], left if kind is Fake or op not in LINEAR else right)
        kind, other = type(left), type(right)
    if kind is str and op is operator.mod:
        if is_late(right):
            return late(trace, operator.mod, [left, right])
        right = as_known(right)
    plain = INPLACE.get(op)
    if kind is str and other is text.LateText and operator.add in (op, plain):
        return right.__radd__(left)
    if plain is not None:
        result = ask(trace, left, "__i" + DUNDERS[plain][0][2:], right)
        if result is not NotImplemented and result is not MISSING:
            return result
    forward, backward = DUNDERS[op if plain is None else plain]
    if (said := by_dunder(trace, left, right, forward, backward)) is not MISSING:
        return said
    if kind is Fake or other is Fake:
        return on_fakes(trace, op if plain is None or kind is Fake else plain, left, right)
    check_operands(trace, op.__name__, left, right)
    if plain is not None:
        trace.touch(left)
    return native(op, left, right)


def by_dunder(trace: Trace, left: Any, right: Any, forward: str, backward: str) -> Any:
    """Try the operands' Python methods in Python's order; MISSING when the built-in ones decide."""
    first, second = dunder(trace, type(left), forward), dunder(trace, type(right), backward)
    if first is None and second is None:
        return MISSING
    pairs = [(first, left, right), (second, right, left)]
    if type(left) is type(right) and (forward, backward) not in COMPARISONS.values():
        pairs.pop()  # Python does not ask the same class again
    is_sequence = forward in ("__add__", "__mul__") and isinstance(left, (list, tuple, str, bytes))
    is_own = (forward, backward) in COMPARISONS.values() or second is not python_method(type(left), backward)
    is_asked_last = first is None and is_sequence or issubclass(type(right), type(left)) and is_own
    if type(left) is not type(right) and is_asked_last and second is not None:
        pairs.reverse()
    for method, owner, operand in pairs:
        name = forward if owner is left else backward
        result = trace.call(method, [owner, operand], {}) if method else _builtin_dunder(owner, operand, name)
        if result is not NotImplemented:
            return result
    is_asked = forward in ("__eq__", "__ne__")
    return is_same(trace, left, right) == (forward == "__eq__") if is_asked else MISSING


def is_same(trace: Trace, left: Any, right: Any) -> bool:
    """`left is right`. Where that is False of objects that existed before the frame, it must stay so."""
    one, other = (trace.origins.get(id(value)) for value in (left, right))
    if one and other and left is not right and type(one.original) is type(other.original):
        trace.guard(one.source, SameAs(other.source, same=False))
    return left is right


def _builtin_dunder(owner: Any, operand: Any, name: str) -> Any:
    method = getattr(type(owner), name, None)
    if method is None or isinstance(method, FunctionType) or isinstance(owner, Fake):
        return NotImplemented
    return native(method, owner, operand)


def compare(trace: Trace, op: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    kind, other = type(left), type(right)
    if kind in PLAIN and other in PLAIN:
        return native(op, left, right)
    if kind is Fake or other is Fake:
        left, right = as_numbers([left, right], left)
    if (said := by_dunder(trace, left, right, *COMPARISONS[op])) is not MISSING:
        return said
    if kind is Fake or other is Fake:
        return on_fakes(trace, op, left, right)
    check_unknown_float(trace, "a comparison of two", left, right)
    if op is operator.ne and dunder(trace, kind, "__eq__"):
        return not truth(trace, compare(trace, operator.eq, left, right))
    if kind.__eq__ is not object.__eq__ and other.__eq__ is not object.__eq__:
        check_operands(trace, op.__name__, left, right)
    if op in (operator.eq, operator.ne) and kind is other:
        if kind in (list, tuple, dict):
            return items_equal(trace, left, right) == (op is operator.eq)
        if kind is MethodType:
            is_same(trace, left.__self__, right.__self__)
        elif kind.__eq__ is object.__eq__:
            is_same(trace, left, right)
    return native(op, left, right)


def items_equal(trace: Trace, left: Any, right: Any) -> bool:
    """Containers of one kind; their items may have an __eq__ in Python."""
    if len(left) != len(right) or isinstance(left, dict) and native(operator.ne, left.keys(), right.keys()):
        return False
    pairs = [(left[key], right[key]) for key in (left if isinstance(left, dict) else range(len(left)))]
    return all(a is b or truth(trace, compare(trace, operator.eq, a, b)) for a, b in pairs)


def unary(trace: Trace, op: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, Fake):
        return on_fakes(trace, op, value)
    if op is operator.invert and type(value) in SYMBOLIC:
        return -(value if type(value) is torch.SymInt else as_hashable(value)) - 1
    if (said := ask(trace, value, UNARY[op])) is not MISSING:
        return said
    check_operands(trace, op.__name__, value)
    return native(op, value)


def truth(trace: Trace, value: Any) -> bool:
    """bool(value)."""
    kind = type(value)
    if kind is bool:
        return value  # type: ignore[no-any-return]
    if kind in PLAIN or kind in (list, tuple, dict, set):
        return bool(value)
    if kind in SYMBOLIC:
        check_unknown_float(trace, "bool()", value)
        return native(bool, value)  # type: ignore[no-any-return]
    if isinstance(value, Fake):
        try:
            return native(bool, value)  # type: ignore[no-any-return]
        except DataDependentValue:
            if is_never_true(trace, value):
                return False
            raise DataDependentBranch(trace.loc()) from None
    guard_class(trace, kind)
    for name in ("__bool__", "__len__"):
        found, _ = find_in_mro(kind, name)
        if isinstance(found, FunctionType):
            answer = trace.call(found, [value], {})
            if name == "__bool__" and type(answer) is not bool and type(answer) not in SYMBOLIC:
                kind = torch.Tensor if isinstance(answer, Fake) else type(answer)
                raise Raised(TypeError(f"__bool__ should return bool, returned {kind.__name__}"))
            return bool(answer)
        if callable(found):
            check_native_use(trace, value, "bool")
            break
    return native(bool, value)


def is_never_true(trace: Trace, value: Any) -> bool:
    """`torch.rand([]) < 0.0`, which models write for "skip this layer with probability 0"."""
    made = next((call for call in reversed(trace.calls) if call.result is value), None)
    if made is None or made.target is not operator.lt or type(made.args[1]) not in (int, float):
        return False
    drawn = next((call for call in reversed(trace.calls) if call.result is made.args[0]), None)
    return drawn is not None and drawn.target is torch.rand and made.args[1] <= 0  # type: ignore[no-any-return]


def check_native_use(trace: Trace, value: Any, what: str) -> None:
    """An object of the user's that only C code understands must not be run on while capturing."""
    origin = trace.origins.get(id(value))
    is_passive = isinstance(value, (tuple, frozenset, FunctionType, type)) or type(value) in PLAIN
    if origin is not None and value is origin.original and not is_passive:
        raise UnsupportedValue(trace.loc(), type=type(value).__name__, detail=f"{what} of {origin.source}")


def check_unknown_float(trace: Trace, what: str, *values: Any) -> None:
    """A float that changes from call to call, such as a loss or a learning rate: rather than assume its
    value, which hardly comes again, leave the question to Python. Where a break is an error, assume it. How
    one compares with a constant is assumed: that comes again."""
    floats = [value for value in values if type(value) is torch.SymFloat]
    leaves = {leaf for value in floats for leaf in iter_leaves(value.node.expr)}
    if leaves and not trace.is_whole and len(leaves) >= len(values) and leaves & trace.dynamic.unsteady:
        raise DataDependentNumber(trace.loc(), function=what)


def check_operands(trace: Trace, what: str, *values: Any) -> None:
    """As check_native_use, for operators and conversions."""
    for value in values:
        if type(value) not in PLAIN and type(value) not in NATIVE_KINDS:
            check_native_use(trace, value, what)


def as_hashable(value: Any) -> Any:
    """A symbolic number cannot be hashed: as a key it must be known."""
    kind = type(value)
    return native(text.known, value) if kind in SYMBOLIC or kind in (text.LateText, tuple) else value


def as_known(value: Any) -> Any:
    """The same value to be shown as text: numbers in it must be known, also within containers."""
    if isinstance(value, BaseException):
        value.args = as_known(value.args)
    return native(text.known, value) if is_late(value) else value


def as_key(trace: Trace, container: Any, key: Any) -> Any:
    if not isinstance(container, (dict, set, frozenset)):
        return key
    key = as_hashable(key)
    is_told_apart = id(key) in trace.origins and type(key).__hash__ is object.__hash__
    mark = text.Identity(trace, id, key) if is_told_apart else key
    if type(mark) is text.Identity:
        mark.pin() if id(container) in trace.origins else hash(mark)
    return key


def ask(trace: Trace, value: Any, name: str, *args: Any) -> Any:
    """What the user's class says to an operator, or MISSING where it says nothing."""
    method = dunder(trace, type(value), name)
    return MISSING if method is None else trace.call(method, [value, *args], {})


def get_item(trace: Trace, container: Any, key: Any) -> Any:
    kind = type(container)
    if kind in (list, tuple, dict):
        return native(operator.getitem, container, as_key(trace, container, key))
    if kind is Fake:
        if trace.asks and (said := trace.overridden(operator.getitem, [container, key])) is not MISSING:
            return said
        key = as_tensors(trace, as_numbers(key))
        if (picked := pick(trace, container, key)) is None:
            masked = take_masked(trace, container, key)
            return on_fakes(trace, operator.getitem, container, key) if masked is None else masked
        return as_copy(trace, trace.call(_aten.index.Tensor, list(picked), {}), container)
    if kind.__module__ in ("typing", "typing_extensions"):
        return native(operator.getitem, container, key)
    if (said := ask(trace, container, "__getitem__", key)) is not MISSING:
        return said
    if isinstance(container, type):
        return _class_item(trace, container, key)
    check_native_use(trace, container, "indexing")
    missing, key = dunder(trace, kind, "__missing__"), as_key(trace, container, key)
    if missing is not None and isinstance(container, dict) and not dict.__contains__(container, key):
        return trace.call(missing, [container, key], {})
    return native(operator.getitem, container, key)


def as_tensors(trace: Trace, key: Any) -> Any:
    if type(key) is tuple:
        return tuple([as_tensors(trace, part) for part in key])
    return IN_KEYS[kind](trace, key) if (kind := type(key).__name__) in IN_KEYS else key


PLACES: Final = frozenset({torch.int64, torch.int32, torch.int16, torch.int8})
INTEGERS: Final = frozenset({int, torch.SymInt})
BASIC: Final = INTEGERS | {slice, type(None), type(...)}


def is_place(key: Any) -> bool:
    """A tensor of one integer that only the graph knows."""
    return type(key) is Fake and not key.dim() and key.dtype in PLACES and key.constant is None


def pick(trace: Trace, container: Fake, key: Any) -> tuple[Any, list[Any]] | None:
    """x[0, :, i] with such tensors in it: x[0], and for each of its dimensions the place there, if one is."""
    keys = key if type(key) is tuple else (key,)
    if not any(map(is_place, keys)) or not all(is_place(part) or type(part) in BASIC for part in keys):
        return None
    rest = container.dim() - sum(part is not None and part is not ... for part in keys)
    full = [part for given in keys for part in ([slice(None)] * rest if given is ... else [given])]
    others = tuple(slice(None) if is_place(part) else part for part in full)
    window = on_fakes(trace, operator.getitem, container, others)
    return window, [part if is_place(part) else None for part in full if type(part) not in INTEGERS]


def as_copy(trace: Trace, made: Any, *originals: Fake) -> Any:
    """What eager would show as a view of an original, or as one of them: the same until one is written."""
    trace.copies += [(made, original, text.version_of(original), trace.step) for original in originals]
    return made


def written_back(trace: Trace, op: Any, item: Any) -> Any:
    """The operator of `x[i] += 1`, where the item is a copy: it makes another, which is then assigned."""
    others = [copy for copy in trace.copies if copy[0] is not item]
    is_copy, trace.copies = len(others) < len(trace.copies), others
    return INPLACE.get(op, op) if is_copy else op


def _class_item(trace: Trace, container: type, key: Any) -> Any:
    """Color["RED"], list[int], and classes with __class_getitem__."""
    getter = dunder(trace, type(container), "__getitem__")
    if getter is None or "enum" in getter.__module__:
        return native(operator.getitem, container, key)
    return trace.call(getter, [container, key], {})


def set_item(trace: Trace, container: Any, key: Any, value: Any) -> None:
    if isinstance(container, Fake):
        if trace.asks and trace.overridden(operator.setitem, [container, key, value]) is not MISSING:
            return
        key, number = as_numbers([key, value])
        if type(number) is torch.SymInt or isinstance(value, float):  # np.float32 torch does not take here
            value = number
        key = as_tensors(trace, key)
        if (picked := pick(trace, container, key)) is not None:
            wanted = {"dtype": container.dtype, "device": container.device}
            if not isinstance(value, Fake):
                value = trace.call(torch.full, [(), value], wanted)
            if value.dim() <= picked[0].dim() - sum(map(is_place, picked[1])):
                value = trace.call(torch.Tensor.to, [value], {**wanted, "copy": True})
                trace.call(_aten.index_put_.default, [*picked, value], {})
                return
        if put_masked(trace, container, key, value):
            return
        native(operator.setitem, container, key, value)
        trace.record("call_function", operator.setitem, (container, key, value), {}, None)
        return
    _change_item(operator.setitem, trace, container, key, value)


def _change_item(op: Any, trace: Trace, container: Any, key: Any, *value: Any) -> None:
    if ask(trace, container, f"__{op.__name__}__", key, *value) is MISSING:
        check_native_use(trace, container, op.__name__)
        trace.touch(container)
        native(op, container, as_key(trace, container, key), *value)


delete_item = partial(_change_item, operator.delitem)


def contains(trace: Trace, container: Any, item: Any) -> bool:
    kind = type(container)
    if (said := ask(trace, container, "__contains__", item)) is not MISSING:
        return truth(trace, said)
    if kind is Fake:
        return truth(trace, trace.call(torch.Tensor.__contains__, [container, item], {}))
    is_stepped = find_in_mro(kind, "__contains__")[0] is MISSING and dunder(trace, kind, "__iter__")
    if is_stepped or (kind in (list, tuple) and (is_compared(trace, item) or has_fake(container))):
        return any(item is each or truth(trace, compare(trace, operator.eq, each, item))
                   for each in steps(trace, container))  # fmt: skip
    check_native_use(trace, container, "`in`")
    return native(operator.contains, container, as_key(trace, container, item))  # type: ignore[no-any-return]


def is_compared(trace: Trace, value: Any) -> bool:
    """Whether `==` of the value is more than C code can say: of a tensor, by identity, or in Python."""
    kind = type(value)
    return has_fake(value) or kind.__eq__ is object.__eq__ or dunder(trace, kind, "__eq__") is not None


def is_ours(kind: type) -> bool:
    """A class of capture's own, whose methods simply run."""
    return kind.__module__.startswith("dovetail.capture")


def as_mapping(trace: Trace, value: Any) -> Any:
    """A mapping of the user's, as a dict that native code can read; anything else as it is."""
    kind = type(value)
    if isinstance(value, dict) and dunder(trace, kind, "__iter__") is None:
        return value if kind is dict else dict(raw_items(value))  # what [] or keys() say does not count
    if find_in_mro(kind, "keys")[0] is MISSING:
        return value
    names = trace.call(load_attr(trace, value, "keys"), [], {})
    return {name: get_item(trace, value, name) for name in steps(trace, names)}


def iterate(trace: Trace, value: Any) -> Iterator[Any]:
    """iter(value), as something native code can step through."""
    kind = type(value)
    if kind in (list, tuple, dict, range, str, set, frozenset):
        return iter(in_order(trace, value))
    if isinstance(value, Fake):
        if trace.call(torch.Tensor.dim, [value], {}) == 0:
            raise Raised(TypeError("iteration over a 0-d tensor"))
        return iter(trace.call(load_attr(trace, value, "unbind"), [0], {}))
    method = dunder(trace, kind, "__iter__")
    if method is not None and not is_ours(kind):
        made: Iterator[Any] = trace.call(method, [value], {})
        if not hasattr(type(made), "__next__"):
            raise Raised(TypeError(f"iter() returned non-iterator of type '{type(made).__name__}'"))
        return made
    if dunder(trace, kind, "__getitem__") is None or hasattr(kind, "__iter__"):
        check_native_use(trace, value, "iteration")
    return native(iter, value)  # type: ignore[no-any-return]


def steps(trace: Trace, value: Any) -> Iterator[Any]:
    """Its items, for code of capture's own to go through."""
    source = iterate(trace, value)
    while (item := native(next, source, MISSING)) is not MISSING:
        yield item


def length(trace: Trace, value: Any) -> Any:
    method = dunder(trace, type(value), "__len__")
    if method is not None and not is_ours(type(value)):
        return trace.call(method, [value], {})
    if isinstance(value, Fake):
        if trace.asks and (said := trace.overridden(len, [value])) is not MISSING:
            return said
        return native(value.size, 0) if value.dim() else native(len, value)
    check_native_use(trace, value, "len")
    return native(len, value)
