"""The whole compiler, as one walk of the data.

    frame ─ capture ─► Capture ─ backend ─► callable ─► Entry            Compiler.on_frame
    fx graph ─ joint ─ prims ─ passes ─ partition ─► forward, backward   compile_graph
    graph ─ loops ─ schedule ─ plan ─ program ─► Executable              build

This is the only file that sees all stages. Whatever fails inside them ends here: one warning, a
reproducer file, and eager goes on.
"""
from __future__ import annotations

import functools
import gc
import itertools
import threading
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, Final, Literal, TypeAlias

import torch
from torch.amp.autocast_mode import _enter_autocast
from torch.fx import GraphModule

from dovetail import _native, aot, capture, codegen, errors, lower, ops, passes, runtime, schedule
from dovetail.cache.store import default_folder, program_key, store_in
from dovetail.choose import chooser
from dovetail.control import stance
from dovetail.events import EVENTS
from dovetail.ir.capture import Capture, GraphInput
from dovetail.ir.graph import Graph, Known
from dovetail.ir.guard import Guard
from dovetail.ir.source import DictAttr
from dovetail.ir.types import TensorType
from dovetail.options import Options
from dovetail.race import Race, is_repeatable
from dovetail.runtime.guards import make_guards
from dovetail.stages import Stage, is_watched, run_stage, run_stages, write_reproducer
from dovetail.util.collection import no_collections
from dovetail.util.loc import Loc
from dovetail.util.torch_state import read_state

Backend: TypeAlias = "Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]"
Verdict: TypeAlias = "_native.Entry | bool | None | Literal['skip_callees'] | Callable[[], None]"
"""For the hook: an entry to run, None to run this call in eager, False never to ask again."""

FEW_STEPS: Final = 4
"""Launches of a program that a CUDA graph would not make cheaper: its results have to be copied out."""

NODES_A_WORKER: Final = 16
"""Nodes of a graph for each process started to compile its kernels, before their number is known."""

MODULES_OF_A_CLASS: Final = 16
"""How many times its limit a code may be compiled when each time it is for another module."""

_units: Final = map("graph_{}".format, itertools.count())
"""What graphs, and all that is made of each, are called in events."""


# -- from a graph of torch calls to one callable -----------------------------------------------------


def build(graph: Graph, options: Options, meanwhile: Callable[[], object] = bool) -> runtime.Executable:
    """One functional graph of prims, compiled. `meanwhile` is done while compilers are at work."""
    program, keep = find_program(graph, options)
    work = lambda: (keep(), meanwhile())
    loaded: Any = run_stage(graph.name, "90.executable", lambda: runtime.load(program, options, work))
    return loaded  # type: ignore[no-any-return]


def find_program(graph: Graph, options: Options) -> tuple[Any, Callable[[], object]]:
    """The program of a graph, known from before or made, with its compilers at work; and how to keep it."""
    stages: list[Stage] = [
        ("45.products", lambda graph: passes.open_products(graph, chooser(graph, options))),
        ("50.loops", lower.lower),
        ("60.schedule", lambda loops: schedule.schedule(loops, options)),
        ("70.plan", schedule.plan),
        ("80.program", lambda plan: codegen.emit(plan, options, runtime.begin_kernels, runtime.begin)),
    ]
    if not keeps_programs(options):
        return run_stages(graph.name, stages, graph), bool
    store = store_in(default_folder())
    key, parts = program_key(graph, options, target_of(graph))
    if (known := store.find(key)) is not None:
        return known, bool
    if any(type.device.kind == "cuda" for type in tensor_types(graph)):
        runtime.start_workers(1 + len(graph.nodes) // NODES_A_WORKER, options)
    program: Any = run_stages(graph.name, stages, graph)
    return program, functools.partial(store.keep, key, program, parts)


def keeps_programs(options: Options) -> bool:
    return options.cache and not is_watched()


def tensor_types(graph: Graph) -> list[TensorType]:
    return [node.type for node in graph.inputs if isinstance(node.type, TensorType)]


def target_of(graph: Graph) -> list[str]:
    """What the generated text depends on besides the graph: versions and the machine."""
    devices = {type.device for type in tensor_types(graph)}
    names = sorted(torch.cuda.get_device_name(d.index or 0) for d in devices if d.kind == "cuda")
    return [torch.__version__, runtime.machine_identity(), *names]


def trace_joint(module: GraphModule, examples: Sequence[Any]) -> aot.Joint:
    """The program itself is kept for double backward; what it runs then is not compiled again."""
    joint = keeping_modes(module, aot.trace_joint)(module, examples)
    return replace(joint, in_eager=lambda program: functools.partial(_native.without, run_in_eager(program)))


def compile_graph(
    module: GraphModule, examples: Sequence[Any], options: Options, known: tuple[Known, ...] = ()
) -> Callable[..., Any]:
    """Dovetail's own backend. Backward is built when it is first needed; where that will be soon, its program
    is made while compilers are at work on forward's."""
    unit, meanwhile = module.meta.get("unit") or next(_units), module.meta.pop("meanwhile", bool)
    joint: Any = run_stage(unit, "10.joint", lambda: trace_joint(module, examples))
    types = [node.type for node in (*joint.graph.inputs, *joint.graph.nodes)]
    if not {type.device.kind for type in types if isinstance(type, TensorType)} <= {"cpu", "cuda"}:
        return run_in_eager(module)  # on the meta device there is nothing to compute
    joint = replace(joint, again=functools.partial(compile_again, options=options), known=known)
    if known:  # this is double backward, and its inputs were saved for it: nobody writes to them
        joint = replace(joint, signature=replace(joint.signature, unread=()))
    frozen = freeze(unit, joint, module.meta.get("steady", ()), options)
    stages: list[Stage] = [("20.prims", ops.decompose), ("30.passes", passes.optimize)]
    if frozen is None:
        stages.insert(0, ("15.layout", passes.channels_last_where_it_pays))
    stages += [("35.reuse", functools.partial(passes.reuse, known=other)) for other in known]
    graph: Any = run_stages(unit, stages, joint.graph if frozen is None else frozen.main)
    graph = replace(graph, name=unit)
    if frozen is not None:
        return aot.bind(*assemble(unit, graph, frozen, joint, options, meanwhile), joint)
    budget = options.activation_memory_budget
    parts: Any = run_stage(unit, "40.partition", lambda: aot.partition(graph, joint.signature, budget))
    saved = [entry.index for entry in parts.saved if entry.source == "output"]
    updates = tuple(update for update in joint.updates if update[0] not in saved)
    first = replace(parts.forward, name=f"{unit}_forward", updates=updates)
    second = functools.partial(replace, name=f"{unit}_backward")
    is_soon = module.meta.get("trains", False) and keeps_programs(options)

    def work() -> None:
        meanwhile()
        for graph in aot.expected_backwards(parts) if is_soon else ():
            with suppress(Exception):  # which comes again where backward is needed, and is told there
                find_program(second(graph), options)[1]()

    forward = record(first, options, parts.signature.saved, work)
    return aot.bind(forward, lambda graph: build_later(second(graph), options), parts, joint)


@contextmanager
def saved_as_they_are() -> Iterator[None]:
    """Also a decorator. Hooks on saved tensors are for the tensors that are saved when the program runs,
    not for those without data that tracing saves."""
    autograd: Any = torch._C._autograd
    hidden = []
    while (hooks := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hidden.append(hooks)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hooks in reversed(hidden):
            autograd._push_saved_tensors_default_hooks(*hooks)


@saved_as_they_are()
def compile_again(
    module: GraphModule, examples: Sequence[Any], known: tuple[Known, ...], options: Options
) -> Callable[..., Any] | None:
    """A program that a compiled one asks for at run time: its gradient, to be differentiated."""
    work = functools.partial(compile_graph, module, examples, options, known)
    return made_later("the gradient of a gradient", options, work)


def freeze(unit: str, joint: aot.Joint, steady: Collection[int], options: Options) -> passes.Frozen | None:
    """Move what depends only on weights out of an inference graph on the CPU."""
    signature = joint.signature
    kinds = {type.device.kind for type in tensor_types(joint.graph)}
    if not options.freeze or signature.tangents or kinds != {"cpu"}:
        return None
    chosen = set(steady) - {mutation.input for mutation in signature.mutations}
    if not chosen or not runtime.can_watch():
        return None
    made: Any = run_stage(unit, "15.frozen", lambda: passes.freeze(joint.graph, chosen))
    return made  # type: ignore[no-any-return]


def assemble(
    unit: str, graph: Graph, frozen: passes.Frozen, joint: aot.Joint, options: Options,
    meanwhile: Callable[[], object],
) -> tuple[runtime.Frozen, None, aot.Partition]:
    """An inference program whose last inputs come from a prologue."""
    prologue, updates = frozen.prologue, joint.updates
    main = build(replace(graph, name=f"{unit}_forward", updates=updates), options, meanwhile)
    types = [node.tensor for node in prologue.inputs]
    run = functools.partial(aot.run_graph, prologue)

    def otherwise() -> Callable[..., Any]:
        plain = passes.optimize(ops.decompose(joint.graph))
        made = build_later(replace(plain, name=f"{unit}_plain", updates=updates), options)
        return made or interpret(joint.graph)

    forward = runtime.Frozen(main, run, otherwise, unit, frozen.watched, types)
    taken = graph.inputs[: joint.signature.inputs + joint.signature.constants]
    return forward, None, aot.Partition(replace(graph, inputs=taken), None, joint.signature)


def record(
    graph: Graph, options: Options, kept: int = 0, meanwhile: Callable[[], object] = bool
) -> Callable[..., Any]:
    """Build, with CUDA graphs if asked for. The last `kept` results go to backward, not to the user."""
    executable = build(graph, options, meanwhile)
    if not options.cuda_graphs or executable.program.device == "cpu":
        return executable
    if (reason := why_not_record(graph, executable)) is not None:
        EVENTS.emit("cudagraph", unit=graph.name, used=False, reason=reason.text)
        return executable
    return runtime.Recorded(executable, graph.name, torch.device(executable.program.device), kept)


def why_not_record(graph: Graph, executable: runtime.Executable) -> errors.Reason | None:
    if not all(size.is_const for type in tensor_types(graph) for size in type.shape):
        return errors.Reason("C01", "sizes change from call to call, and a recording has one size")
    if executable.program.steps < FEW_STEPS:
        return errors.Reason("C02", "too few kernels for a recording to pay")
    kinds = (kind for kernel in executable.program.kernels for kind, _ in zip(kernel.signature, kernel.sizes))
    if not all(kind.startswith("*") for kind in kinds):
        return errors.Reason("C03", "kernels are given numbers of the CPU, and a recording has one value")
    return None


def build_later(graph: Graph, options: Options) -> Callable[..., Any] | None:
    return made_later(graph.name, options, functools.partial(record, graph, options))


def made_later(name: str, options: Options, make: Callable[[], Any]) -> Callable[..., Any] | None:
    """What a running program needs for the first time. None where that fails, which is said: the caller
    knows how to go on without."""
    try:
        return _native.without(make)  # type: ignore[no-any-return]
    except Exception as error:
        if errors.is_from_signal(error) or not (options.fallback_to_eager or isinstance(error, errors.Break)):
            raise
        shown = f"{type(error).__name__}: {error}"
        EVENTS.emit("fallback_to_eager", function=name, error=shown)
        text = f"Dovetail failed to compile {name}, and eager runs instead:\n{shown}"
        warnings.warn(text, errors.InternalWarning, stacklevel=2)
        return None


def interpret(graph: Graph) -> Callable[..., Any]:
    return lambda *inputs: aot.run_graph(graph, inputs)


def keeping_modes(module: GraphModule, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that may run the graph as it stands; also where that raises, torch's switches and autocast
    are as they were afterwards."""
    if module.meta.get("is_atomic"):
        run = functools.partial(run_or_undo, run)
    targets = {node.target for node in module.graph.nodes}
    switches = [(setter, getter) for setter, getter in capture.SWITCHES.items() if setter in targets]
    for device in {node.args[0] for node in module.graph.nodes if node.target is _enter_autocast}:
        for setter, getter in AUTOCAST_SWITCHES:
            switches.append((functools.partial(setter, device), functools.partial(getter, device)))
    if not switches:
        return run

    def run_inside(*inputs: Any) -> Any:
        depth, before = torch.autocast_increment_nesting(), [getter() for _, getter in switches]
        try:
            return run(*inputs)
        finally:
            for (setter, _), value in zip(switches, before):
                setter(value)
            while (now := torch.autocast_decrement_nesting()) >= depth:
                continue  # what was entered and not left
            if not now:
                torch.clear_autocast_cache()

    return run_inside


def run_or_undo(run: Callable[..., Any], *inputs: Any) -> Any:
    """Where the graph raises, the program may go on: what was written by then is as it was."""
    before = [(x, x._version, x.detach().clone()) for x in inputs if isinstance(x, torch.Tensor)]
    try:
        return run(*inputs)
    except Exception:
        for x, version, values in before:
            if x._version != version and x.is_leaf:
                x.data.copy_(values)
                torch._C._autograd._unsafe_set_version_counter((x,), (version,))  # type: ignore[attr-defined]
        raise


def run_in_eager(module: GraphModule) -> Callable[..., Any]:
    """The graph as it stands; it becomes Python when it is first called. Not as a module: the program's hooks
    on all modules are not for it."""

    def run(*inputs: Any) -> Any:
        getattr(module, "real_recompile", bool)()  # a plain GraphModule has its Python already
        return module.forward(*inputs)

    return keeping_modes(module, run)


AUTOCAST_SWITCHES: Final[tuple[tuple[Any, Any], ...]] = (
    (torch.set_autocast_enabled, torch.is_autocast_enabled),
    (torch.set_autocast_dtype, torch.get_autocast_dtype),
    (lambda _, value: torch.set_autocast_cache_enabled(value), lambda _: torch.is_autocast_cache_enabled()),
)


def run_joint_in_eager(module: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """backend="aot_eager": capture and autograd are at work, and each op runs as itself."""
    joint = trace_joint(module, examples)
    parts = aot.partition(joint.graph, joint.signature)
    return aot.bind(interpret(parts.forward), interpret, parts, joint)


def runs_graph(made: Any, module: GraphModule, depth: int = 8) -> bool:
    """Whether what a backend returned is the graph, or a function or an object around it."""
    if made is module or not depth:
        return made is module
    parts = gc.get_referents(made) if isinstance(made, AROUND) else getattr(made, "__dict__", {}).values()
    return any(runs_graph(part, module, depth - 1) for part in parts)


AROUND: Final = (FunctionType, MethodType, CellType, tuple, functools.partial)


def choose_backend(backend: str | Backend, options: Options) -> Backend:
    if callable(backend):
        return lambda module, examples: keeping_modes(module, backend(module, examples))
    named: dict[str, Backend] = {
        "dovetail": lambda module, examples: compile_graph(module, examples, options),
        "eager": lambda module, examples: run_in_eager(module),
        "aot_eager": run_joint_in_eager,
    }
    return named[backend]


# -- compiling on another thread, while eager serves ---------------------------------------------------

_started: Final[list[Future[None]]] = []


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """One thread: work is done in the order it was started. The process waits for it when it ends."""
    return ThreadPoolExecutor(1, "dovetail")


def run_later(work: Callable[[], Any], failed: Callable[[Exception], None]) -> None:
    has_grad = torch.is_grad_enabled()

    def run() -> None:
        with torch.set_grad_enabled(has_grad):
            try:
                work()
            except Exception as error:  # eager goes on serving; `failed` says so
                failed(error)

    _started.append(_pool().submit(run))


def wait() -> None:
    """Until all background compiles are done; eager has served meanwhile."""
    while _started:
        _started.pop().result()


# -- from a frame to an entry ------------------------------------------------------------------------


def is_library_code(code: CodeType) -> bool:
    """Code that is captured only where captured code calls it: torch's and Python's own."""
    why = capture.why_not_capture(code)
    return why is not None and why.code == "S02"


class Compiler:
    """What one dovetail.compile() call set up: how to compile the frames that run under it."""

    def __init__(
        self, backend: str | Backend, options: Options, fullgraph: bool, dynamic: bool | None
    ) -> None:
        self.backend, self.options = choose_backend(backend, options), options
        self.is_own, self.builds = not callable(backend), backend == "dovetail"
        self.fullgraph, self.is_dynamic = fullgraph, dynamic
        self.context = _native.Context(self, Compiler.on_frame)
        self.lock = threading.RLock()
        self.forget()

    def forget(self) -> None:
        """As if nothing had been called yet."""
        self.context.clear()
        self.history = capture.History(self.is_dynamic)
        self.has_failed = False
        self.raised: Counter[CodeType] = Counter()
        self.mistaken: set[CodeType] = set()
        self.passed_by: set[CodeType] = set()
        """Code that ran under a transform, which is reported once."""
        self.compiled: Counter[Any] = Counter()
        """How often each code was compiled on the same terms."""

    def on_frame(
        self, code: CodeType, function: FunctionType, globals: dict[str, Any], args: tuple[Any, ...],
        closure: tuple[Any, ...] | None, why: str | None, entries: int,
    ) -> Verdict:  # fmt: skip
        """The hook has no entry for this call."""
        if capture.why_not_capture(code) is not None:
            return "skip_callees" if capture.is_wall(code) else False
        if (why_eager := capture.why_not_now()) is not None:
            return self._pass_by(code, *why_eager)
        with self.lock:
            if len(self.context.entries(code)) != entries:
                return True  # another thread compiled it meanwhile: look again
            return self._on_miss(capture.Frame(code, function, globals, args), why, entries)

    def _pass_by(self, code: CodeType, why: str, is_refused: bool) -> Verdict:
        """This call runs in eager; the next may not."""
        loc = Loc(code.co_filename, code.co_firstlineno)
        if self.fullgraph and is_refused:
            fix = "apply the transform inside of the compiled function"
            raise errors.GraphBreakError(loc, reason=why, fix=fix)
        if code not in self.passed_by:
            self.passed_by.add(code)
            EVENTS.emit("skip", function=code.co_qualname, code=errors.SkippedFrame.code, text=why, loc=loc)
        return None

    @no_collections()
    @saved_as_they_are()
    def _on_miss(self, frame: capture.Frame, why: str | None, entries: int) -> Verdict:
        code = frame.code
        if entries and stance() == "eager_on_recompile":
            return None
        if entries and (verdict := self._recompile(frame, why or "", entries)) is not None:
            return verdict
        start = time.perf_counter()
        random_state = torch.get_rng_state()
        try:
            return self._compile(frame)
        except errors.FrameRaises as reason:
            return self._on_raise(frame, reason, entries)
        except errors.NoTensors:
            return False
        except errors.Break as reason:
            if self.fullgraph:
                why = f"[{reason.code}] {reason.text}"
                raise errors.GraphBreakError(reason.loc or frame.loc, reason=why, fix=reason.hint) from None
            told = {"code": reason.code, "text": reason.text, "loc": reason.loc or frame.loc}
            EVENTS.emit("skip", function=code.co_qualname, **told)
            return False
        finally:
            torch.set_rng_state(random_state)  # compiling draws no numbers that the program would draw
            EVENTS.emit("compile", function=code.co_qualname, seconds=time.perf_counter() - start)

    def _recompile(self, frame: capture.Frame, why: str, entries: int) -> Verdict:
        """None to go on and compile once more; else the verdict."""
        name = frame.code.co_qualname
        if stance() == "fail_on_recompile":
            raise errors.RecompileError(frame.loc, function=name, reason=why)
        limit = self.options.recompile_limit
        if self.compiled[self.terms(frame)] >= limit or entries >= limit * MODULES_OF_A_CLASS:
            advice = "pass what changes in a tensor, or raise the option recompile_limit"
            last = f"what changed last: {why} ({advice})"
            self._leave(frame, f"was compiled {entries} times", last, entries)
            return False
        EVENTS.emit("recompile", function=name, reason=why, entries=entries, loc=frame.loc)
        return None

    def terms(self, frame: capture.Frame) -> tuple[Any, ...]:
        """What a code is compiled for: a module, as one class may have many different instances, torch's
        state, and how many sizes may change: with more of them, it is compiled less often from then on."""
        return frame.key, read_state(), self.history.learned(frame)

    def _on_raise(self, frame: capture.Frame, reason: errors.FrameRaises, entries: int) -> Verdict:
        """Nothing is kept of a call that raises. A function that never does anything else is left alone."""
        if frame.code in self.mistaken:
            return False
        times = self.raised[frame.code] = self.raised[frame.code] + 1
        if entries or times < self.options.recompile_limit:
            is_certain = type(reason) is not errors.FrameRaises
            return None if is_certain else functools.partial(self._tell_mistake, frame.code, reason.text)
        self._leave(frame, f"raised in {times} calls", reason.text, entries)
        return "skip_callees"

    def _tell_mistake(self, code: CodeType, why: str) -> None:
        """A call was left to eager because the program was seen to raise, and it did not."""
        self.mistaken.add(code)
        EVENTS.emit("fallback_to_eager", function=code.co_qualname, error=why)
        text = f"Dovetail cannot compile {code.co_qualname}, which runs in eager: {why}, in eager it does not"
        warnings.warn(text, errors.InternalWarning, stacklevel=2)

    def _leave(self, frame: capture.Frame, what: str, why: str, entries: int) -> None:
        name = frame.code.co_qualname
        EVENTS.emit("limit", function=name, reason=why, entries=entries, loc=frame.loc)
        text = f"{name} ({frame.loc}) {what} and runs in eager from now on; {why}"
        warnings.warn(text, errors.InternalWarning, stacklevel=2)

    def _compile(self, frame: capture.Frame) -> Verdict:
        name = frame.code.co_qualname
        captured = None
        if self.builds:
            runtime.begin_building()
        try:
            captured = capture.capture_frame(frame, self.options, self.history, self.fullgraph)
            if self.fullgraph and captured.breaks:
                point = captured.breaks[0]
                raise errors.GraphBreakError(point.loc, reason=f"[{point.code}] {point.text}", fix=point.hint)
            _report(captured)
            return self._install(frame, captured)
        except errors.DataDependentNumber:  # a backend took a drawn number for a constant: Python draws it
            self.history.seen[frame.key].draws = False
            return self._compile(frame)
        except (errors.Break, errors.GraphBreakError, KeyboardInterrupt):
            raise
        except Exception as error:
            if not self.options.fallback_to_eager or errors.is_from_signal(error):
                raise
            _report_failure(name, frame, captured, error, is_first=not self.has_failed)
            self.has_failed = True
            return "skip_callees" if isinstance(error, errors.CompilerMissing) else False

    def _install(self, frame: capture.Frame, captured: Capture) -> Verdict:
        guards = functools.cache(lambda: make_guards(told_guards(captured), captured.fetched))
        if captured.graph is not None:
            if self._can_wait(captured):
                self._bind_later(frame, captured)
            else:
                modules = [arg for arg in frame.args if isinstance(arg, torch.nn.Module)]
                trains = not modules or any(vars(module).get("training") for module in modules)
                told = {"meanwhile": guards, "trains": trains} if self.builds else {}
                captured.graph.meta |= told  # type: ignore[attr-defined]
                self._bind(captured)
        captured.namespace["run_in_eager"] = _native.without
        self.compiled[self.terms(frame)] += 1
        function = capture.make_entry(captured)
        return guards(), function, frame.globals

    def _bind(self, captured: Capture) -> None:
        """Compile the graph and put it under its name."""
        examples = [item.traced if self.is_own else item.example for item in captured.inputs]
        module, shapes = captured.graph, captured.shapes  # type: Any, Any
        module.meta["steady"] = tuple(i for i, item in enumerate(captured.inputs) if is_steady(item))
        if not self.is_own:
            module.real_recompile()  # who knows what a backend does with its forward
        graph = self.backend(module, examples)
        if shapes and not (self.is_own or runs_graph(graph, module)):
            shapes.fix("the backend")  # what others made of the graph is for what they were shown
        if shapes:
            shapes.remembered.clear()  # tensors, whose sizes refer to it where no collector looks
        called = graph.call if isinstance(graph, aot.Bound) else graph  # the step in between takes its time
        captured.namespace[captured.graph_name] = functools.partial(_native.without, called)
        if self.options.notice_slow and getattr(graph, "is_pure", False):
            self._race(captured)

    def _can_wait(self, captured: Capture) -> bool:
        """With symbolic sizes compiling adds guards, so it must be done before the entry is. And tracing
        depends on torch's modes, which belong to a thread; only grad mode is carried over."""
        is_static = all(item.symbolic is None for item in captured.inputs)
        is_cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        has_modes = is_cast or torch.is_inference_mode_enabled()
        return self.options.background and self.is_own and is_static and not has_modes

    def _bind_later(self, frame: capture.Frame, captured: Capture) -> None:
        """Eager serves until the graph is compiled."""
        module: Any = captured.graph
        captured.namespace[captured.graph_name] = functools.partial(_native.without, run_in_eager(module))
        failed = lambda error: _report_failure(captured.name, frame, captured, error, is_first=True)
        run_later(lambda: self._bind(captured), failed)

    def _race(self, captured: Capture) -> None:
        """Let the graph be timed against eager once."""
        module: Any = captured.graph
        if is_repeatable(module):
            eager = functools.partial(_native.without, run_in_eager(module))
            keep_faster = self.options.keep_faster
            Race(captured.namespace, captured.graph_name, eager, captured.name, captured.loc, keep_faster)


def is_steady(item: GraphInput) -> bool:
    """A parameter or buffer of a module, and a plain tensor."""
    held = item.source.base
    if not isinstance(held, DictAttr) or held.name not in ("_parameters", "_buffers"):
        return False
    tensor: Any = item.example
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return item.symbolic is None and is_plain and tensor.layout is torch.strided and not tensor.is_inference()


def told_guards(captured: Capture) -> deque[Guard]:
    held = captured.namespace["_guards"] = deque(capture.all_guards(captured))  # which hold users' classes
    EVENTS.emit("guards", function=captured.name, value=weakref.ref(held))
    return held


def _report(captured: Capture) -> None:
    module: Any = captured.graph
    for point in captured.breaks:
        told = {"code": point.code, "text": point.text, "hint": point.hint, "loc": point.loc}
        EVENTS.emit("graph_break", function=captured.name, **told)
    EVENTS.emit("entry", function=captured.name, loc=captured.loc, value=captured.text)
    if module is None:
        return
    calls = [n for n in module.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
    unit = module.meta["unit"] = next(_units)
    EVENTS.emit(
        "graph", unit=unit, function=captured.name, loc=captured.loc, ops=len(calls),
        inputs=len(captured.inputs), whole=not captured.breaks,
        lines=tuple(n.meta.get("loc") for n in calls), value=module,
    )  # fmt: skip


def _report_failure(
    name: str, frame: capture.Frame, captured: Capture | None, error: Exception, is_first: bool
) -> None:
    """Every failure is an event; only the first is a warning, because what the frame calls may fail too."""
    path = None
    if captured is not None and captured.graph is not None:
        path = write_reproducer(captured.graph, [item.example for item in captured.inputs], error)  # type: ignore[arg-type]
    shown = str(error) if isinstance(error, errors.DovetailError) else f"{type(error).__name__}: {error}"
    EVENTS.emit("fallback_to_eager", function=name, error=shown, repro=path and str(path), loc=frame.loc)
    if is_first:
        where = f"; {path} reproduces it" if path else ""
        text = f"Dovetail failed to compile {name} ({frame.loc}) and runs it in eager{where}:\n{shown}"
        warnings.warn(text, errors.InternalWarning, stacklevel=2)
