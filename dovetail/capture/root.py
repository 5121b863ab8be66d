"""Capture one frame.

    Frame -> Capture (or SkippedFrame is raised, and the frame runs in eager)

The frame is interpreted from its first instruction. When something cannot be captured, a Break is
raised; the frame is then interpreted again up to the instruction of this frame that led there, and
ends with that instruction done in Python and a call of a resume function for the rest. Interpreting
twice is what makes undoing unnecessary: the trace's objects are its own.
"""
from __future__ import annotations

import linecache
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, product
from traceback import walk_stack
from types import CodeType, FunctionType
from typing import Any, Final

import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from dovetail.capture import autograd, contexts, library
from dovetail.capture.breaks import emit_break
from dovetail.capture.calls import CO_ASYNC, CO_GENERATOR, STEPS, is_installed_file
from dovetail.capture.checks import check_copies, emit_checks, states_before
from dovetail.capture.dynamic import History, Policy
from dovetail.capture.emit import Emitter, entry_parameters, safe_name
from dovetail.capture.frame import Frame, slot_count
from dovetail.capture.graphs import GraphBuilder
from dovetail.capture.interpreter import Activation, Stop
from dovetail.capture.origins import is_changed, leave_unread, may_be_written, wrap
from dovetail.capture.text import AT_WORK, OWN_FOLDER
from dovetail.capture.trace import Raised, Trace, is_library_file, is_random
from dovetail.errors import Break, FrameRaises, ImportUnderWay, NoTensors, Reason, ResumedLoop, SkippedFrame
from dovetail.fake import Fake, FakeMode, SymbolicCalls
from dovetail.fake.kernels import watch_kernels
from dovetail.ir.capture import BreakPoint, Capture, GraphInput
from dovetail.ir.guard import Equals, Guard, Predicate, SameAs, State
from dovetail.ir.source import Arg, Computed, Const, DictAttr, Item, KeyItem, Source
from dovetail.options import Options
from dovetail.util.torch_state import READERS, read_state
from dovetail.util.writer import Writer

MAX_ATTEMPTS = 4
TABLES = (autograd, contexts, library)
"""Files that add rules to the table of builtins when they are imported."""
RECURSION_LIMIT = 12_000
_limits: Final[list[int]] = []
"""What the limit was before, once for each thread that captures."""
_lock: Final = threading.Lock()


@contextmanager
def deep_recursion() -> Iterator[None]:
    """A higher recursion limit while any thread captures: inlined calls nest several Python frames each. It
    belongs to the whole process: the first to enter raises it, the last to leave restores it."""
    with _lock:
        _limits.append(_limits[0] if _limits else sys.getrecursionlimit())
        sys.setrecursionlimit(max(_limits[0], RECURSION_LIMIT))
    try:
        yield
    finally:
        with _lock:
            before = _limits.pop()
            sys.setrecursionlimit(max(before, RECURSION_LIMIT) if _limits else before)


def make_entry(captured: Capture) -> FunctionType:
    """The entry as a function: its text, run with its namespace."""
    file = f"<dovetail entry of {captured.name}>"
    linecache.cache[file] = (len(captured.text), None, captured.text.splitlines(True), file)
    made: dict[str, Any] = captured.namespace
    exec(compile(captured.text, file, "exec"), made)
    entry: FunctionType = made.pop("entry")
    return entry


def capture_frame(
    frame: Frame, options: Options, history: History | None = None, is_whole: bool = False
) -> Capture:
    """See the file's docstring. `history` says which sizes are symbolic; None: all are static. `is_whole`:
    a break would be an error."""
    dynamic = history.policy(frame) if history is not None else None
    if any(place.f_code.co_filename == "<frozen importlib._bootstrap>" for place, _ in walk_stack(None)):
        raise ImportUnderWay(frame.loc)
    watch_kernels()
    with deep_recursion():
        return _attempts(frame, options, dynamic, is_whole)


def _attempts(frame: Frame, options: Options, dynamic: Policy | None, is_whole: bool) -> Capture:
    """The whole frame, or else the part before the first break."""
    attempt = Attempt(frame, options, dynamic, -1, None, is_whole)
    found = attempt.run()
    if isinstance(found, Capture):
        return found
    steps = attempt.steps
    for _ in range(MAX_ATTEMPTS):
        try:
            result = Attempt(frame, options, dynamic, steps, found).run()
        except NoTensors:
            raise
        except SkippedFrame as skip:
            result = bare(skip)
        if isinstance(result, Capture):
            return result
        if not 0 <= result.step < steps:
            break
        steps = result.step  # where a generator is made, for example: then it is a real one
    detail = f"{found.text}; and the frame cannot be resumed there: {result.text}"
    raise SkippedFrame(frame.loc, detail=detail)


class Attempt:
    """One interpretation of the frame, to its end or to the instruction `stop`."""

    def __init__(
        self, frame: Frame, options: Options, dynamic: Any, stop: int, why: Break | None,
        is_whole: bool = False,
    ) -> None:  # fmt: skip
        self.frame, self.stop, self.why, self.steps = frame, stop, why, 0
        policy = Policy(dynamic.everything, dynamic.seen) if dynamic is not None else None
        self.trace = Trace(frame, options, policy, is_whole)

    def run(self) -> Capture | Break:
        trace = self.trace
        trace.guards += state_guards()
        root: Activation | None = None
        before, AT_WORK.trace = getattr(AT_WORK, "trace", None), trace
        try:
            with FakeMode(), SymbolicCalls(trace.loc):
                slots = self.wrap_arguments()
                root = Activation(trace, self.frame.function, slots, self.stop)  # type: ignore[arg-type]
                try:
                    root.run()
                    return self.finish(root, None)
                except Stop:
                    return self.finish(root, self.why)
        except Raised as raised:
            text = show_error(raised.value)
            raise FrameRaises(trace.loc(), detail=f"the program raises {text}") from None
        except SkippedFrame:
            raise
        except Break as stop:
            self.steps = stop.step if stop.step >= 0 else root.steps - 1 if root else -1
            if root is None and stop.step < 0:
                raise SkippedFrame(self.frame.loc, detail=stop.text) from None
            return bare(stop)
        finally:
            AT_WORK.trace, trace.is_over = before, True
            contexts.leave_all(trace)
            self.release()

    def release(self) -> None:
        """The trace is full of cycles and holds the user's objects, as do exceptions by their frames: let go
        of them now, not at the next garbage collection."""
        for _, _, error in self.trace.raised.values():
            error.__traceback__ = None
        if self.trace.shapes is not None:
            loc = self.frame.loc
            self.trace.shapes.where = lambda: loc
            self.trace.shapes.restless.clear()
        vars(self.trace).clear()

    def wrap_arguments(self) -> list[Any]:
        found: list[Any] = []
        for i, (name, value) in enumerate(zip(self.frame.code.co_varnames, self.frame.args)):
            is_new = type(value) is list and id(value) not in self.trace.known  # to be looked at first
            found.append((leave_unread if is_new else wrap)(self.trace, value, Arg(i, safe_name(name, i))))
        return found

    def finish(self, root: Activation, why: Break | None) -> Capture:
        trace, frame = self.trace, self.frame
        hopeless = why is None or is_installed_file(frame.code.co_filename)
        if hopeless and not trace.inputs and not trace.calls:
            raise NoTensors(frame.loc, name=frame.code.co_qualname)
        graph_name = "graph_0"
        emit = Emitter(trace, root, graph_name)
        for drawn, _ in trace.draws:
            emit.load(drawn)
        tail = [f"return {emit.value(root.result)}"] if why is None else emit_break(emit, root)
        names = entry_parameters(root, slot_count(frame.code))
        checks = emit_checks(emit, names)
        emit.effects()
        check_copies(emit)
        for context in contexts.leave_for_break(trace):
            emit.body.append(f"{emit.value(context)}.__enter__()")
        for setter, before in trace.switched.items():
            if (now := contexts.SWITCHES[setter]()) != before:
                emit.body.append(f"{emit.const(setter)}({emit.value(now)})")
        for mode in trace.modes:
            emit.body.append(f"{emit.const(TorchFunctionMode.__enter__, 'enter')}({emit.value(mode)})")
        graph: torch.fx.GraphModule | None = None
        inputs: tuple[GraphInput, ...] = ()
        if emit.outputs or has_effects(trace):
            graph, inputs = GraphBuilder(trace).build(emit.outputs, frame.code.co_name)
        text = self.text(emit, inputs if graph is not None else None, checks, tail, why)
        symbols: tuple[Any, ...] = ()
        if trace.dynamic is not None:
            trace.dynamic.finish(trace)
            symbols = tuple(trace.dynamic.sources.items())
        trace.guards.extend(trace.late_guards)
        trace.guards.extend(alias_guards(trace))
        name = frame.globals.get("__name__")  # which classes made by the entry's calls take for their module
        namespace = {**trace.namespace, "user_globals": frame.globals, "__name__": name}
        breaks: tuple[BreakPoint, ...] = ()
        if why is not None and not isinstance(why, ResumedLoop):
            breaks = (BreakPoint(why.code, why.text, why.hint, why.loc or trace.loc()),)
        sources = [i.source for i in inputs if not isinstance(i.source, Computed)]
        return Capture(
            frame.code.co_qualname, graph, tuple(inputs), tuple(trace.guards), text, namespace, graph_name,
            breaks, symbols, frame.loc, trace.shapes, tuple(sources) if self.fetches(inputs) else (),
        )  # fmt: skip

    def text(
        self, emit: Emitter, inputs: Any, checks: list[str], tail: list[str], why: Break | None
    ) -> str:
        numbers = [i.source.value for i in inputs or () if isinstance(i.source, Computed)]
        computed = [self.trace.dynamic.text(emit, number) for number in numbers]
        fetches = self.fetches(inputs or ())
        read = [i for i in inputs or () if not isinstance(i.source, Computed)]
        given = "*fetched_inputs" if fetches else ", ".join(emit.load(i.source) for i in read)
        parameters = entry_parameters(emit.root, slot_count(self.frame.code))
        w = Writer()
        with w.block(f"def entry({', '.join([*parameters, *['*fetched_inputs'] * fetches])}):"):
            if fetches:
                w(f"# fetched_inputs: {', '.join(i.name for i in read)}")
            w(*emit.loads)
            if inputs is not None:
                call = f"out = {emit.graph_name}({', '.join(filter(None, (given, *computed)))})"
                if checks:
                    is_drawing = any(map(is_random, self.trace.calls))
                    states = emit.const(states_before if is_drawing else torch.is_grad_enabled)
                    w(f"_states = {states}()" if is_drawing else f"_states = ({states}(),)")
                    call = f"try: {call}"
                w(call)
            w(*(checks if inputs is not None else ()), *emit.body)
            if why is not None:
                w(f"# {why.code} {' '.join(why.text.split())}, {why.loc}")
            w(*tail)
        return w.text

    def fetches(self, inputs: Sequence[GraphInput]) -> bool:
        """Many inputs that lie deep in the arguments: the guards have found them already and pass them on."""
        return not self.trace.draws and sum(each.source.base is not None for each in inputs) > 3


def show_error(error: BaseException) -> str:
    """The class of an exception, and its text if that can be known without running the program."""
    try:
        return f"{type(error).__name__}: {error}"
    except Break:
        return type(error).__name__


def bare(stop: Break) -> Break:
    """Without its traceback, whose frames hold the user's objects in a cycle with whoever keeps `stop`."""
    stop.__traceback__ = stop.__context__ = stop.__cause__ = None
    return stop


def has_effects(trace: Trace) -> bool:
    """Whether a graph without outputs is still worth running: it changes a tensor or draws random numbers."""
    if any(not fake.is_inference() and fake._version for fake in trace.input_fakes):
        return True
    for recorded in trace.calls:
        target = recorded.target
        name = (target if isinstance(target, str) else getattr(target, "__name__", "")).split(".")[0]
        is_write = name == "setitem" or name.endswith("_") or name.startswith("i") or "out" in recorded.kwargs
        is_act = recorded.result is None and any(isinstance(arg, Fake) for arg in recorded.args)
        if is_write or is_act or is_random(recorded):
            return True
    return False


# -- frames that are never captured ----------------------------------------------------------------

PLUMBING: Final = frozenset(f"__{name}__" for name in """getattribute getattr setattr delattr repr str format
    hash del instancecheck subclasscheck init_subclass set_name reduce_ex getstate setstate deepcopy copy
    torch_function""".split())
"""Capturing these alone gains nothing, and an entry's own reads would run them."""
GENERATED: Final = ("<dovetail",)
MODELS: Final = ("/torch/nn/modules/", "/torch/nn/functional.py", "/torch/optim/", "/torch/distributions/")
"""Parts of torch that are models and training code rather than machinery: worth a graph of their own."""
MACHINERY: Final = ("/torch/nn/modules/module.py", *map("/torch/optim/{}".format, ["optimizer.py", *STEPS]))
WALLS: Final = frozenset(
    {"DisableContext.__call__.<locals>._fn", "_TorchDynamoContext.__call__.<locals>.compile_wrapper"}
)
"""torch's wrappers around functions that are not to be compiled, or that torch.compile compiles."""
OTHERS: Final = ("/triton/runtime/", "/site-packages/numpy/")
"""Triton's own code, which compiles and launches kernels, and NumPy's."""


def is_wall(code: CodeType) -> bool:
    """What this frame calls is not ours to compile either: torch's wrappers, and imports, whose code runs
    once and computes nothing; launches of kernels, and NumPy."""
    file, is_import = code.co_filename, code.co_name == "<module>"
    is_import |= file.startswith("<frozen importlib") or any(folder in file for folder in OTHERS)
    return is_import or code.co_qualname in WALLS and "/torch/" in file


def why_not_capture(code: CodeType) -> Reason | None:
    """torch's and Python's own functions run as they are when they are called from eager code (what they
    call is still seen), and so does Dovetail itself. Called from captured code they are inlined."""
    file = code.co_filename
    if code.co_flags & (CO_GENERATOR | CO_ASYNC):
        return Reason("S03", "generators and coroutines run as they are")
    if file.startswith((OWN_FOLDER, *GENERATED)):
        return Reason("S01", "part of Dovetail, or text it generated")
    is_model = any(part in file for part in MODELS) and not file.endswith(MACHINERY)
    if is_library_file(file) and not is_model:
        return Reason("S02", "part of torch or of Python")
    if any(folder in file for folder in OTHERS):
        return Reason("S06", "part of Triton, which launches kernels, or of NumPy")
    if code.co_name in PLUMBING:
        return Reason("S05", "a method that other code's attribute reads, prints or comparisons run")
    if code.co_name in ("<lambda>", "__new__") and code.co_varnames[:1] == ("_cls",):
        return Reason("S05", "the maker of a named tuple")
    if code.co_name == "<module>" or code.co_name.startswith("<generic parameters of"):
        return Reason("S04", "code of a module or of type parameters, which runs once")
    return None


# -- guards that are decided at the beginning or at the end of a capture ---------------------------

def state_guards() -> list[Guard]:
    """Call before entering modes of our own: they are part of the state. Under forward-mode differentiation
    tensors carry tangents, which a compiled graph would lose."""
    level = DictAttr(Const("forward_ad", forward_ad), "_current_level")
    return [Guard(Const("torch", None), State(read_state())), Guard(level, Equals(-1))]


def why_not_now() -> tuple[str, bool] | None:
    """Something is at work that sees each operation; what it is applied to runs in eager meanwhile. And
    whether that is an error with fullgraph=True: a transform could be applied inside instead."""
    if torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack():
        return "torch.jit.trace and dispatch modes see what runs in eager", False
    if READERS["below_classes"]():
        return "no class of tensors is asked for what ops do, not even that of tensors without data", False
    for i in range(torch._C._len_torch_function_stack()):
        if type(torch._C._get_function_stack_at(i)) is not DeviceContext:
            return "a torch function mode sees what runs in eager", False
    if torch.is_anomaly_enabled():
        return "anomaly detection names the op of eager that it finds", False
    torch._C._vmapmode_increment_nesting()
    if torch._C._vmapmode_decrement_nesting():  # what is left
        return "gradients in a batch (is_grads_batched=True) have no memory of their own", False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a function under torch.func runs in eager", True
    if forward_ad._current_level >= 0:
        return "a function under forward-mode differentiation runs in eager", True
    return None


def alias_guards(trace: Trace) -> Iterator[Guard]:
    """Two arguments, two collections, or two objects with an attribute that was read, were different, and one
    was changed: they must stay different. And what autograd let the program write must stay so."""
    with torch._C.DisableTorchFunction():
        fakes = [origin for origin in trace.known.values() if isinstance(origin.stand_in, Fake)]
        computed = [origin for origin in fakes if may_be_written(origin.original)]
    for origin in filter(is_changed, computed):
        yield Guard(origin.source, Predicate(may_be_written, "is no leaf and no view"))
    known = trace.known.values()
    mutable = [one for one in known if is_passed(one.source) or isinstance(one.original, COLLECTIONS)]
    touched = set(trace.touched)
    changed = (one for one in mutable if is_changed(one) or id(one.stand_in) in touched)
    names, origins = {name for _, name in trace.writes}, trace.origins
    readers = [(origins[owner], name) for owner, name in trace.reads if name in names and owner in origins]
    written = ((origins[owner], other) for owner, name in trace.writes if owner in origins
               for other, read in readers if read == name)  # fmt: skip
    told: set[frozenset[int]] = set()
    for one, other in chain(product(changed, mutable), written):
        if type(one.original) is type(other.original) and one.original is not other.original:
            if (pair := frozenset((id(one), id(other)))) not in told:
                told.add(pair)
                yield Guard(one.source, SameAs(other.source, same=False))


COLLECTIONS: Final = (list, dict, set, deque)


def is_passed(source: Source) -> bool:
    """An argument, or an item of one."""
    while isinstance(source, (Item, KeyItem)):
        source = source.of
    return isinstance(source, Arg)
