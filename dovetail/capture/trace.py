"""The state of one capture: what was read, recorded, guarded and written so far.

    Trace(frame)  ...interpreter runs...  ->  calls recorded, inputs, guards, writes

Nothing here touches the user's objects: reads add guards, writes wait in `writes` or in shadows until
the entry replays them. Calls are kept as light records; the fx.Graph is built once, at the end.
"""
from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from operator import methodcaller
from types import CodeType, EllipsisType, GeneratorType, NoneType, NotImplementedType, TracebackType
from typing import Any, Final, cast

import torch
from torch.utils._pytree import tree_leaves

from dovetail import errors
from dovetail.capture.decode import Code
from dovetail.capture.frame import Frame
from dovetail.errors import Break, GradientsSwitchedOn, LongLoop, SkippedFrame, UnsupportedValue
from dovetail.fake.tensor import Fake
from dovetail.ir.capture import GraphInput
from dovetail.ir.graph import Loc
from dovetail.ir.guard import Bare, Check, Guard
from dovetail.ir.source import USER_GLOBALS, Applied, Const, Source
from dovetail.options import Options
from dovetail.util.noun import Noun, field


class Raised(BaseException):
    """An exception of the user's program, on its way through the interpreter."""

    def __init__(self, value: BaseException) -> None:
        if errors.is_from_signal(value):
            raise value
        super().__init__(value)
        self.value = value


NO_FRAME: Final = cast(Any, (item for item in "")).gi_frame  # of tracebacks: it holds nothing
NOT_THROWN: Final = (Break, KeyboardInterrupt)
"""What comes through C code that capture runs and is not the program's: ours, and the person's."""


class Handling(Noun, eq=False, frozen=False):
    """The stack entry under an exception that is being handled: what was handled before, and it itself.
    CPython keeps that outside of the frame; with the entry, a resume function can enter the same state.
    A copy of it ends the handling, and it stays on the stack until the exception is raised again."""

    previous: BaseException | None
    error: BaseException
    is_over: bool = False


class LastInstruction(int):
    """The stack entry that says which instruction raised, for tracebacks."""


class Null:
    """The NULL that CPython keeps on its stack next to a callable, and an unbound local."""


PLAIN: Final = frozenset(
    {int, float, str, bool, NoneType, bytes, complex, EllipsisType, NotImplementedType, CodeType, range,
     torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.qscheme}
)  # fmt: skip
"""Types whose values are constants of the trace."""

DRAWS: Final = frozenset({"bernoulli", "normal", "log_normal", "uniform", "multinomial", "poisson", "cauchy",
                          "exponential", "geometric", "rrelu"})  # fmt: skip
LOADS: Final = frozenset({"LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_ATTR"})
MOST_ROUNDS: Final = 50_000
MOST_CALLS: Final = 20_000

NULL: Final = Null()
DELETED: Final = Null()


class Origin(Noun, frozen=False, eq=False):
    """An object that existed before the frame: the original, what stands in for it in the trace
    (a Fake, a shadow copy, or itself) and where it is read."""

    original: Any
    stand_in: Any
    source: Source
    before: Any = None
    """For a shadow, a copy of its contents as first read; compared at exit to find mutations."""


class Unread(Noun, frozen=False, eq=False):
    """Stands in for a list of which nothing was read: what is appended to it waits. So a loop or a model
    that collects results does not depend on how many there are already."""

    original: list[Any]
    source: Source
    added: list[Any] = field(default_factory=list)
    shadow: list[Any] | None = None

    def append(self, item: Any) -> None:
        self.extend([item])

    def extend(self, items: Any) -> None:
        (self.added if self.shadow is None else self.shadow).extend(items)


class Outside:
    """Stands in for an object that existed before the frame and is left to Python: an iterator of C, as what
    it has given cannot be taken back; a list or a dict whose length keeps changing."""

    __slots__ = ("original", "source")

    def __init__(self, original: Any, source: Source) -> None:
        self.original, self.source = original, source

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance() asks for it
        return type(self.original)

    def __iter__(self) -> Any:
        return self if hasattr(self.original, "__next__") else self.leave()

    def leave(self, *_: Any) -> Any:
        raise UnsupportedValue(type=type(self.original).__name__, detail=f"{self.source} is left to Python")

    add = append = extend = leave

    @property
    def is_generator_at_work(self) -> bool:
        """Or an iterator of C over one."""
        parts = [self.original]
        for part in parts:
            if type(part) is tuple or hasattr(type(part), "__next__") and type(part) is not GeneratorType:
                parts += gc.get_referents(part)
        return any(type(part) is GeneratorType and part.gi_frame is not None for part in parts)


_asked = "next len bool contains getitem setitem delitem reversed eq ne lt le gt ge int float".split()
_names = "add mul sub and or xor truediv floordiv mod pow".split()
_computed = [prefix + name for name in _names for prefix in ("", "r", "i")]
OPERATORS: Final = {f"__{name}__" for name in _asked + _computed}
for _name in (*OPERATORS, "__hash__", "__str__", "__repr__", "__format__"):
    setattr(Outside, _name, Outside.leave)


class Call(Noun, frozen=False, eq=False):
    """One recorded torch call. Arguments hold Fakes; `result` is what the call gave."""

    kind: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    loc: Loc | None
    stack: tuple[Loc, ...] = ()
    step: int = -1
    """The frame's instruction, counted from its start."""


class Write(Noun, frozen=False, eq=False):
    """A pending write of an attribute, global or cell: `how` says which, as a format of target and value."""

    owner: Any
    name: str
    value: Any
    how: str


class Trace:
    """See the file's docstring. Functions of files that this one does not know are set there."""

    call: Callable[..., Any]
    callback: Callable[..., Any]
    """A callable of the user's as one that native code may call."""
    overridden: Callable[..., Any]
    tensor_attr: Callable[..., Any]
    store_tensor_attr: Callable[..., None]
    is_over = True
    """As those find it who go with the trace's own fields."""

    def __init__(self, frame: Frame, options: Options, dynamic: Any, is_whole: bool = False) -> None:
        self.frame, self.options, self.dynamic = frame, options, dynamic
        self.is_whole = is_whole
        """A break would be an error: capture what could also be left to Python."""
        self.began_with_grad = torch.is_grad_enabled()
        self.calls: list[Call] = []
        self.inputs: list[GraphInput] = []
        self.input_fakes: list[Any] = []
        self.guards: list[Guard] = []
        self.late_guards: list[Guard] = []
        self.lacking: dict[int, Bare] = {}
        self.origins: dict[int, Origin] = {}
        self.known: dict[int, Origin] = {}
        self.proxied: dict[int, Any] = {}
        self.by_source: dict[int, Origin] = {}
        self.reads: dict[tuple[int, str], Any] = {}
        self.writes: dict[tuple[int, str], Write] = {}
        self.owned: dict[int, Fake] = {}
        self.kinds: dict[int, type] = {}
        """Tensors that are of a subclass."""
        self.wrappers: dict[int, tuple[Fake, list[Any], dict[str, Any]]] = {}
        """Tensors around others that the program made, and what with."""
        self.modes: list[Any] = []
        """Those for torch functions that the program has entered."""
        self.asks = self.is_plain = False
        """Classes or modes may say what functions do; and not classes at the moment."""
        self.namespace: dict[str, Any] = {}
        self.const_names = {id(frame.globals): USER_GLOBALS}
        self.classes: dict[type, int] = {}
        """Those that are guarded, or made here: then at which of the frame's instructions."""
        self.places: list[Any] = []
        self.shadows: list[Origin] = []
        self.unread: list[Unread] = []
        self.shapes: Any = None
        self.keep: list[Any] = []
        self.made_cells: dict[int, Any] = {}
        self.made: dict[int, Any] = {}
        self.deferred: list[tuple[Any, list[Any], dict[str, Any]]] = []
        self.entered: dict[int, Any] = {}
        self.switched: dict[Any, Any] = {}
        """Switches of torch's that the program set, and what they were before."""
        self.held: dict[int, Any] = {}
        self.draws: list[tuple[Applied, str]] = []
        """What the entry asks for before the graph: random numbers, and states that a method can set."""
        self.rounds = 0
        self.is_over = self.catches = self.is_exposed = self.is_atomic = False
        self.changed_classes: set[int] = set()
        self.touched: list[int] = []
        """Containers that were changed, if only for a while."""
        self.assumptions: list[tuple[Any, bool, object, int]] = []
        """Tensors whose truth was assumed: which, their versions then, and the frame's instructions."""
        self.leaves: list[tuple[Fake, Loc | None, int]] = []
        """Tensors that the graph makes to differentiate by them: where, and the frame's instructions."""
        self.copies: list[tuple[Fake, Fake, object, int]] = []
        """See operations.as_copy."""
        self.hooked: list[tuple[Fake, int]] = []
        """Tensors with hooks that are a part of the graph, and the frame's instructions."""
        self.is_inner = self.is_rerun = False
        """What runs now becomes a graph of its own, which cannot be left; torch runs it again as it is."""
        self.told_apart: list[Source] = []
        """Objects whose identity was used as a key."""
        self.postponed: Exception | None = None
        self.raised: dict[int, tuple[TracebackType, tuple[Loc, ...], BaseException]] = {}
        """The lines that each traceback of the program stands for, innermost first, and whose it is."""
        self.resumes: dict[CodeType, Any] = {}

    # -- locations

    def loc(self) -> Loc:
        """The innermost line that is the user's own, not a library's."""
        for place in reversed(self.places):
            if not is_library_file(place.code.code.co_filename):
                return place_loc(place)
        return place_loc(self.places[0]) if self.places else self.frame.loc

    @property
    def step(self) -> int:
        """The captured frame's instruction that is at work, counted from its start."""
        return self.places[0].steps - 1 if self.places else -1

    def locs(self) -> tuple[Loc, ...]:
        return tuple(place_loc(place) for place in self.places)

    @property
    def is_appending(self) -> bool:
        """Whether what is read now is read for the sake of its method `append`."""
        if not self.places or self.places[-1].code.ops[self.places[-1].at] not in LOADS:
            return False
        code, following = self.places[-1].code, self.places[-1].at + 1
        return code.ops[following] in ("LOAD_METHOD", "LOAD_ATTR") and code.args[following] == "append"

    def is_caught(self) -> bool:
        """Whether the program has an `except` clause for what is raised here."""
        return any(place.code.is_caught(place.at) for place in self.places)

    # -- constants and guards

    def guard(self, source: Source, check: Check) -> None:
        self.guards.append(Guard(source, check, self.loc()))

    def bare(self, source: Source) -> Bare:
        """The one guard on what the object at a source has not."""
        if id(source) not in self.lacking:
            self.lacking[id(source)] = Bare([], [])
            self.guard(source, self.lacking[id(source)])
        return self.lacking[id(source)]

    def const(self, value: Any, hint: str = "const") -> Const:
        """A source for an object that the entry holds on to."""
        name = self.const_names.get(id(value))
        if name is None:
            stem = "".join(c if c.isalnum() or c == "_" else "_" for c in hint) or "const"
            name = f"_{stem}_{len(self.namespace)}"
            self.const_names[id(value)] = name
            self.namespace[name] = value
        return Const(name, value)

    def ask_before(self, owner: Source, restore: str, *call: Any) -> Applied:
        """A method that the entry calls before the graph."""
        asked = methodcaller(*call)
        self.draws.append((Applied(owner, self.const(asked, call[0]).name, asked), restore))
        return self.draws[-1][0]

    def go_round(self) -> None:
        """A jump back: a loop goes on. Python is better at long ones, with tensors in them and without."""
        self.rounds += 1
        if self.rounds > MOST_ROUNDS or len(self.calls) > MOST_CALLS:
            long = LongLoop(self.loc(), rounds=MOST_ROUNDS, calls=MOST_CALLS)
            raise long if len(self.places) > 1 else SkippedFrame(long.loc, detail=long.text)

    # -- recording

    def record(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        """Keep a call that was just performed on Fakes; returns its result."""
        frozen = tuple([freeze(self, arg) for arg in args])
        named = {key: freeze(self, value) for key, value in kwargs.items()} if kwargs else {}
        if (self.writes or not self.began_with_grad) and torch.is_grad_enabled():
            given = [x for x in tree_leaves((frozen, named)) if type(x) is Fake and x.requires_grad]
            if given and not self.began_with_grad:
                raise GradientsSwitchedOn(self.loc())
            if any((id(x), "data") in self.writes for x in given) and getattr(result, "requires_grad", True):
                raise UnsupportedValue(self.loc(), type="Tensor", detail="the gradient of an assigned .data")
        self.calls.append(Call(kind, target, frozen, named, result, self.loc(), self.locs(), self.step))
        self.rounds = 0
        self.is_exposed = self.is_exposed or self.catches and self.is_caught()
        own(self, result)
        return result

    def note_raised(self, error: BaseException, place: Any) -> None:
        """An exception of the program reaches a frame: its traceback stands for one line more."""
        if self.source_of(error) is None:
            before = self.traceback_of(error)
            lines = () if before is None else self.raised[id(before)][1]
            error.__traceback__ = made = TracebackType(None, NO_FRAME, 0, 1)
            self.raised[id(made)] = made, (*lines, place_loc(place)), error
        elif isinstance(error, BaseExceptionGroup):
            raise errors.FrameRaises(self.loc(), detail="the program raises a group once more")

    def traceback_of(self, error: BaseException) -> TracebackType | None:
        """That of the program, less the frames of capture that the exception passed since."""
        found = error.__traceback__
        while found is not None and id(found) not in self.raised:
            found = found.tb_next
        return found

    def remember(self, key: tuple[int, str], value: Any) -> Any:
        """What was read there; a list whose contents were not looked at is asked for again."""
        if type(value) is not Unread:
            self.reads[key] = value
        return value

    def touch(self, container: Any) -> None:
        if id(container) in self.origins:
            self.touched.append(id(container))

    def source_of(self, value: Any) -> Source | None:
        origin = self.origins.get(id(value))
        return origin.source if origin is not None else None


def freeze(trace: Trace, arg: Any) -> Any:
    """A copy of an argument that later mutation of lists cannot change; checks that the graph can hold it."""
    kind = type(arg)
    if kind is Fake:
        if id(arg) not in trace.owned:
            raise UnsupportedValue(trace.loc(), type="Tensor", detail="a tensor made outside of the graph")
        return arg
    if kind in HELD:
        return arg
    if kind is range:
        return list(arg)
    if kind is type and arg in BY_TYPE:
        return BY_TYPE[arg]
    if isinstance(arg, (list, tuple)):
        items = [freeze(trace, item) for item in arg]
        return items if isinstance(arg, list) else tuple(items)
    if isinstance(arg, dict):
        return {key: freeze(trace, item) for key, item in arg.items()}
    if kind is slice:
        return slice(freeze(trace, arg.start), freeze(trace, arg.stop), freeze(trace, arg.step))
    if kind.__module__ == "numpy" and hasattr(arg, "item") and not hasattr(arg, "__len__"):
        return arg.item()
    if isinstance(arg, (int, float, str)):
        plain: Any = next(plain for plain in (int, float, str) if isinstance(arg, plain))
        return plain.__getnewargs__(arg)[0]
    if id(arg) in trace.held:
        return arg
    raise UnsupportedValue(trace.loc(), type=kind.__name__, detail="a graph cannot hold it as an argument")


BY_TYPE: Final = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
HELD: Final = frozenset(
    {int, float, bool, str, type(None), complex, type(...), torch.dtype, torch.device, torch.layout,
     torch.memory_format, torch.SymInt, torch.SymFloat, torch.SymBool}
)  # fmt: skip


def own(trace: Trace, value: Any) -> None:
    """Note that the graph computes these Fakes."""
    found = (value,) if type(value) is Fake else leaves(value)
    trace.owned.update([(id(leaf), leaf) for leaf in found if isinstance(leaf, Fake)])


def leaves(value: Any) -> Iterator[Any]:
    """What lies in a value, or in containers within containers there; subclasses count, unlike in pytrees."""
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        yield from leaves(tuple(value.values()))
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def is_random(call: Call) -> bool:
    name = call.target if isinstance(call.target, str) else getattr(call.target, "__name__", "")
    return "rand" in name or "dropout" in name or name.split(".")[0].strip("_") in DRAWS


def topmost_handled(trace: Trace) -> BaseException | None:
    """The exception that is being handled, by the running frame or by whoever called it."""
    return next((place.handled for place in reversed(trace.places) if place.handled is not None), None)


@cache
def _loc(code: Code, at: int) -> Loc:
    return Loc(code.code.co_filename, code.line(at), code.code.co_qualname)


def place_loc(place: Any) -> Loc:
    return _loc(place.code, place.at)


TORCH_FOLDER: Final = torch.__file__.rsplit("/", 1)[0] + "/"
STDLIB_FOLDER: Final = field.__code__.co_filename.rsplit("/", 1)[0] + "/"


@cache
def is_library_file(name: str) -> bool:
    """Whether a file belongs to torch or to Python itself."""
    in_stdlib = name.startswith(STDLIB_FOLDER) and "/site-packages/" not in name
    return in_stdlib or name.startswith((TORCH_FOLDER, "<frozen"))
