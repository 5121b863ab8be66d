"""Text that contains values which the graph computes, or numbers that change from call to call.

    print(f"loss {loss:.3f}")     the text is a LateText; the break at print makes it, and nothing is guarded
    names[f"layer_{i}"]           used as text while capturing: made now, if no tensor is in it
    batch["path"]                 another in each call: nothing is guarded until somebody looks at it
    seen[id(x)] = x               an Identity: a key now, and made again of x where the entry needs it

late(trace, function, args) -> the text `function(*args)` will give, when the entry runs
native(function, *args)     -> C code run now, with such texts made where it insists on a str
"""
from __future__ import annotations

import dataclasses
import reprlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FunctionType
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from dovetail._native import SKIP_CALLEES, Context, Guards
from dovetail.capture.frame import CO_VARARGS, slot_count
from dovetail.capture.trace import NOT_THROWN, PLAIN, TORCH_FOLDER, Raised, Trace, is_library_file, leaves
from dovetail.errors import DataDependentValue, FailedFake, UnsupportedValue, is_from_signal
from dovetail.fake.calls import needs_data
from dovetail.fake.tensor import PROBE_LIMIT, Fake, probe
from dovetail.ir.guard import Equals, Is, SameAs
from dovetail.ir.source import Source
from dovetail.sym.node import Node
from dovetail.util.noun import Noun

NUMBERS: Final[dict[type, type[Any]]] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
"""What a number of the user's program is, where the trace has a symbol for it."""
UNKNOWN: Final = "a text that contains a tensor or an exception"


def version_of(fake: Fake) -> object:
    """How often it was written; an inference tensor does not count that, and is never sure to be the same."""
    return object() if fake.is_inference() else fake._version


class LateText:
    """Stands in for a str. `seen` are the tensors in it, each with its version at that time."""

    __slots__ = ("trace", "function", "args", "seen")

    def __init__(self, trace: Trace, function: Callable[..., str], args: tuple[Any, ...]) -> None:
        self.trace, self.function, self.args = trace, function, args
        self.seen = [(fake, version_of(fake)) for fake in unknown_in(args) if isinstance(fake, Fake)]

    def now(self) -> str:
        """The text itself, for whoever has to look at it."""
        if any(True for _ in unknown_in(self.args)):
            raise DataDependentValue(self.trace.loc(), function=UNKNOWN)
        return self.function(*known(self.args))

    @property
    def is_outdated(self) -> bool:
        return any(version_of(fake) != version for fake, version in self.seen)

    __add__ = lambda self, other: late(self.trace, str.join, ["", [self, other]])
    __radd__ = lambda self, other: late(self.trace, str.join, ["", [other, self]])

    __getattr__ = lambda self, name: getattr(self.now(), name)


for _name in "eq str repr format hash len iter contains getitem".split():  # of the text itself
    _method: Any = lambda self, *args, name=f"__{_name}__": getattr(self.now(), name)(*known(args))
    setattr(LateText, f"__{_name}__", _method)


class GivenText(Noun, eq=False):
    """A text of the caller's that changes from call to call."""

    trace: Trace
    value: str
    source: Source
    is_unsteady: bool

    def now(self) -> str:
        if self.is_unsteady:
            raise DataDependentValue(self.trace.loc(), function="a text that changes from call to call")
        self.trace.guard(self.source, Equals(self.value))
        return self.value


class Identity(int):
    """What id() or hash() gives for an object that is told apart by identity. It serves as a key; Python
    does whatever else is done with it, as the object that the entry has in its place is another one."""

    trace: Trace
    function: Callable[[Any], int]
    owner: Any
    source: Source | None

    def __new__(cls, trace: Trace, function: Callable[[Any], int], owner: Any) -> Identity:
        origin = trace.origins.get(id(owner))
        made = int.__new__(cls, function(owner if origin is None else origin.original))
        made.trace, made.function, made.owner = trace, function, owner
        made.source = None if origin is None else origin.source
        return made

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return int

    def __hash__(self) -> int:
        """As a key it differs from those of other objects, which must stay other objects."""
        if self.source is not None and self.source not in self.trace.told_apart:
            for other in self.trace.told_apart:
                self.trace.guard(self.source, SameAs(other, same=False))
            self.trace.told_apart.append(self.source)
        return int.__hash__(self)

    def __eq__(self, other: object) -> bool:
        if type(other) is Identity:
            hash(self), hash(other)
        else:
            self.pin()
        return int.__eq__(self, known(other))

    def pin(self) -> None:
        """The number itself counts: it must stay this very object."""
        if self.source is not None:
            self.trace.guard(self.source, Is(self.trace.origins[id(self.owner)].original))

    def leave(self, *_: Any) -> Any:
        detail = f"{self.function.__name__}() is different for each object"
        raise UnsupportedValue(self.trace.loc(), type="int", detail=detail)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __xor__ = __rxor__ = leave
    __and__ = __rand__ = __or__ = __ror__ = __rshift__ = __lshift__ = __floordiv__ = __int__ = leave
    __index__ = __str__ = __repr__ = __format__ = __neg__ = __float__ = leave
    __lt__ = __le__ = __gt__ = __ge__ = leave


LATE: Final = (LateText, GivenText)


def late(trace: Trace, function: Callable[..., str], args: Any) -> Any:
    """The text function(*args), made later; a break if something in it could change until then, or if what it
    may raise is caught here."""
    is_safe = function in (str, repr, str.join) or type(args[-1]) is str and not args[-1]  # no format
    if not is_safe and trace.is_caught() and any(True for _ in unknown_in(args)):
        raise DataDependentValue(trace.loc(), function=UNKNOWN)
    return LateText(trace, function, snapshot(trace, tuple(args)))


def snapshot(trace: Trace, value: Any) -> Any:
    """A copy that later changes of containers do not reach."""
    known_kinds = (*PLAIN, *NUMBERS, *LATE, Fake)
    if not all(type(leaf) in known_kinds or isinstance(leaf, BaseException) for leaf in leaves(value)):
        raise DataDependentValue(trace.loc(), function=UNKNOWN)
    return rebuilt(value, lambda leaf: leaf)


def unknown_in(value: Any) -> Iterator[Any]:
    """Tensors, and exceptions of the caller's, whose text is not known while capturing."""
    for leaf in leaves(value):
        if isinstance(leaf, (Fake, BaseException)):
            yield leaf
        elif isinstance(leaf, LateText):
            yield from unknown_in(leaf.args)


def rebuilt(value: Any, each: Callable[[Any], Any]) -> Any:
    """With `each` applied to what lies in lists, tuples, sets, dicts and slices, which are made anew."""
    kind = type(value)
    if kind in (list, tuple, set, torch.Size):
        return kind([rebuilt(item, each) for item in value])
    if kind is slice:
        return slice(*[rebuilt(end, each) for end in (value.start, value.stop, value.step)])
    return {key: rebuilt(item, each) for key, item in value.items()} if kind is dict else each(value)


def known(value: Any) -> Any:
    """With the numbers that symbols have now; asking for them assumes them."""
    number: Any = lambda leaf: NUMBERS[type(leaf)](leaf) if type(leaf) in NUMBERS else leaf
    return rebuilt(value, lambda leaf: leaf.now() if type(leaf) in LATE else number(leaf))


def as_numbers(value: Any, beside: Any = None) -> Any:
    """What torch computes with, perhaps beside a tensor: for a scalar of NumPy's its number."""
    is_array: Any = lambda leaf: type(leaf).__module__ == "dovetail.capture.arrays"
    return rebuilt(value, lambda leaf: leaf.as_number(beside) if is_array(leaf) else leaf)


AT_WORK: Final = threading.local()
"""Its `trace` is the one under way on the thread."""
OPERATORS: Final = frozenset(
    f"__{name}__" for name in "eq ne lt le gt ge hash len index bool int float complex str repr format bytes"
    " round trunc floor ceil contains length_hint".split()
)
ITEMS: Final = frozenset({"__next__", "__getitem__", "__missing__"})
"""Methods of the user's that C code calls by itself: sorted(), a dict, "%s" ..."""


def watch(payload: Any, code: CodeType, function: Any, where: dict[str, Any], *_: Any) -> Any:
    """What becomes of a Python function that C code calls while capturing: such a method is interpreted."""
    file, names = code.co_filename, {code.co_name, function.__name__}  # it may be decorated, as by dataclass
    if is_library_file(file) and not file.startswith((TORCH_FOLDER, dataclasses.__file__, reprlib.__file__)):
        return False
    is_users = names & (OPERATORS | ITEMS) and not file.startswith((TORCH_FOLDER, OWN_FOLDER))
    return (NO_GUARDS, partial(interpret, code, where), where) if is_users else SKIP_CALLEES


class Callback:
    """A callable of the user's, for native code to call."""

    def __init__(self, trace: Trace, fn: Any) -> None:
        self.trace, self.fn = trace, fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.trace.call(self.fn, list(args), kwargs)
        except Raised as raised:
            error = raised.value
        raise error  # outside of the handler, which would become its context


def interpret(code: CodeType, where: dict[str, Any], *given: Any) -> Any:
    """The frame's arguments, then its cells."""
    trace, count = AT_WORK.trace, slot_count(code)
    function = FunctionType(code, where, code.co_name, None, given[count:])
    rest = given[code.co_argcount] if code.co_flags & CO_VARARGS and not code.co_kwonlyargcount else ()
    args = [*given[: code.co_argcount], *rest]
    Callback(trace, getattr)(args[0], "__class__")  # guards the class that has the method
    made = Callback(trace, function)(*args)
    is_needed = type(made) in (LateText, *NUMBERS) and code.co_name not in ITEMS
    return known(made) if is_needed else made  # C code insists on it


OWN_FOLDER: Final = __file__.rsplit("/", 2)[0] + "/"
NO_GUARDS: Final = Guards((), (), ())
WATCHED: Final = Context(None, watch)


def native(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run on the trace's objects; an exception is the user program's."""
    told = Node.told
    try:
        result = WATCHED.run(fn, args, kwargs)
        if type(result) is str and Node.told != told:  # such as that of itertools.count(n)
            raise UnsupportedValue(type="int", detail="C code makes a text that shows a symbolic number")
        if type(result) is str and "Fake(torch." in result:  # C code made a text that shows a tensor
            raise DataDependentValue(function=getattr(fn, "__name__", str(fn)))
        return result
    except NOT_THROWN:
        raise
    except BaseException as error:
        if is_from_signal(error):
            raise
        if isinstance(error.__cause__, NOT_THROWN):  # NumPy makes another of it
            raise error.__cause__ from None
        if isinstance(error, TypeError) and "unhashable type: non-nested Sym" in str(error):
            raise UnsupportedValue(type="int", detail="a symbolic number as a member or a key") from None
        if isinstance(error, TypeError) and "'Outside' object" in str(error):  # a descriptor refuses it
            raise UnsupportedValue(type="object", detail="it is left to Python") from None
        if isinstance(error, (TypeError, AttributeError, NotImplementedError)):
            owner = getattr(fn, "__self__", None)
            if type(owner) in NUMBERS:  # which cannot do all that a number can
                return native(getattr(native(known, owner), fn.__name__), *args, **kwargs)
            if any(type(arg) is LateText or type(arg) in NUMBERS for arg in (*args, *kwargs.values())):
                return native(fn, *native(known, list(args)), **native(known, kwargs))  # C code insists on it
        if isinstance(error, RuntimeError) and needs_data(error):
            name = getattr(fn, "__name__", str(fn))
            raise FailedFake(function=name, detail=str(error).split("\n")[0][:200]) from None
        raise Raised(ask_eager(fn, args, kwargs, error)) from None


def ask_eager(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: BaseException) -> BaseException:
    """What eager raises, for zeros, where a function of torch's refuses Fakes: torch's meta kernels say it in
    other words, and refuse more. What is large or symbolic is taken at their word, and so is autograd."""
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, Fake):
        fn, args = getattr(torch.Tensor, fn.__name__), (owner, *args)
    given = tree_leaves((args, kwargs))
    fakes = [value for value in given if isinstance(value, Fake)]
    home = getattr(getattr(fn, "__objclass__", fn), "__module__", None) or ""  # and none of a bound method
    is_known = home.startswith("torch") or home in ("_operator", "builtins")
    is_known &= not any(hasattr(value, "__next__") or type(value) is Callback for value in given)
    is_here = torch.cuda.is_initialized() or all(fake.device.type == "cpu" for fake in fakes)
    is_plain = is_here and all(fake.form is None for fake in fakes)
    is_plain &= not any(s in str(error) for s in ("in-place", "inplace", "requires grad"))
    is_plain &= not isinstance(error, KeyError)  # whose argument is the key
    if not fakes or not is_known or not is_plain or sum(fake.numel() for fake in fakes) > PROBE_LIMIT:
        return error
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        try:
            probe(fn, args, kwargs)
        except Exception as said:
            said.__context__ = None if said.__context__ is error else said.__context__
            return said.with_traceback(None)
    raise FailedFake(function=fn.__name__, detail=f"eager does not raise {type(error).__name__}: {error}")


def is_late(value: Any) -> bool:
    """Whether a text of this value has to be made later."""
    return any(type(leaf) in (Fake, LateText, *NUMBERS) for leaf in leaves(value))


def fill(text: str, args: tuple[Any, ...], named: dict[str, Any]) -> str:
    """str.format"""
    return text.format(*args, **named)


def format_value(value: Any, convert: int, spec: str) -> str:
    """What an f-string does with one field."""
    made = (lambda v: v, str, repr, ascii)[convert](value)
    return format(made, spec)
