"""Run a captured graph on fakes, with autograd, and record forward and backward as one graph.

    fx.GraphModule, example inputs -> Joint(Graph, Signature)
    y = torch.sin(x)          def joint(x, tangent_0):
                                  sin = aten.sin.default(x)
                                  sin_grad = aten.cos.default(x)
                                  sin_grad_1 = aten.mul.Tensor(tangent_0, sin_grad)
                                  return (sin, sin_grad_1)

Saved tensors are plain values here; the partitioner decides what crosses from forward to backward.
"""
from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.node import Node as FxNode
from torch.fx.node import map_arg as map_fx

from dovetail.aot.alias import Ref, Write
from dovetail.aot.instead import INSTEAD
from dovetail.aot.partition import class_of
from dovetail.aot.record import Recorder, fake_type
from dovetail.errors import UnsupportedMutation
from dovetail.fake import Fake, expr_of, fake_like, infer, type_of
from dovetail.fake.calls import call_at, symbolic_at, with_numbers
from dovetail.fake.kernels import watch_kernels
from dovetail.fake.symbolic import find_shapes
from dovetail.ir.expr import Expr, le
from dovetail.ir.graph import GET, INPUT, Arg, Graph, GraphBuilder, Known, Node, nodes_in
from dovetail.ir.signature import Mutation, OutputIs, Signature, ValueRef, ViewStep
from dovetail.ir.types import F64, I64, NARROW, ScalarType, TensorType, bytes_of
from dovetail.ops.build import is_dense
from dovetail.sym import Shapes
from dovetail.util.derivative import behind, gradients_of
from dovetail.util.noun import Noun, field, replace

_DETACH = ViewStep("aten.detach.default")
_COUNTED = partial(Mutation, output=-1, under_no_grad=True, op="aten.squeeze_.dims", args=((),))
"""Nothing is written but the version, as by squeeze_() of a view."""

_RAISING = ("aten._linalg_check_errors", "aten._linalg_eigh", "aten._linalg_svd", "aten.linalg_eig.")
"""Ops that refuse some values."""
_FLAT = ("aten.take.", "aten.put.")
_EMBEDDING = ("aten.embedding.", "aten._embedding_bag")
_INDEXING = ("aten.index.", "aten.index_", "aten.gather", "aten.scatter", *_EMBEDDING, *_FLAT)
_LOSS = "aten.nll_loss"
_OVERWRITING = ("aten.index_copy", "aten.index_put", "aten.slice_scatter", "aten.select_scatter")
_LOOKING = (*_INDEXING, "aten.multinomial", "aten._assert_async")
_DIVIDING = ("aten.div.", "aten.floor_divide", "aten.remainder", "aten.fmod")
_REFUSING = (*_LOOKING, *map("aten.{}".format, (
    "nll_loss", "multi", "_ctc_loss", "bernoulli", "poisson", "normal", "bincount", "hist", "masked_scatter",
    "repeat_interleave", "segment_reduce", "max_unpool")))  # fmt: skip
SMALL_UPDATES = 4096
"""These refuse some, too, and stand in every step of decoding: to copy more bytes of its caches is worse."""

MOST_GROUPS = 16
"""Separate autograd.Functions of one graph: each takes microseconds a call, and its backward is compiled."""


class Joint(Noun, eq=False):
    """inputs: the caller's, then constants, then tangents; outputs: values, then gradients."""

    graph: Graph
    signature: Signature
    constants: tuple[torch.Tensor, ...]
    program: GraphModule
    """As captured; double backward differentiates it."""
    in_eager: Callable[[GraphModule], Callable[..., Any]] = lambda program: program
    """What runs it, or another graph like it, as it is."""
    anchors: dict[int, FxNode] = {}
    """By position, where the program makes outputs that others are computed from, if it then leaves them as
    they are: these tensors can take part in it as if they were given."""
    again: Callable[[GraphModule, Sequence[Any], tuple[Known, ...]], Callable[..., Any] | None] | None = None
    known: tuple[Known, ...] = ()
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    """Device types under autocast while tracing, with their dtype."""
    has_grad: tuple[bool, ...] = ()
    """Per input: it requires a gradient, and grad mode was on."""
    same: tuple[tuple[int, int], ...] = ()
    """Pairs of inputs that were one tensor while tracing."""
    loose: tuple[int, ...] = ()
    """Tensor inputs that are no parameters: a caller may pass overlapping ones."""
    is_inference: bool = False
    """What the program makes are inference tensors, though it is called outside of inference mode."""
    counted: tuple[bool, ...] = ()
    """Per input: it is a tensor with a version, which those of inference mode have not."""
    is_atomic: bool = False
    """Where it raises, no input may have been written to."""
    inference: tuple[int, ...] = ()
    """Values that are inference tensors, where others are none."""

    @property
    def updates(self) -> tuple[tuple[int, int], ...]:
        """The signature's, less those of inputs that take part in gradients, and none where a later op may
        raise: by then the input has to have the value that it had at that point."""
        if not self.signature.updates or any(node.op.startswith(_RAISING) for node in self.graph.nodes):
            return ()
        is_free = not self.signature.tangents
        found = tuple(u for u in self.signature.updates if is_free or not self.has_grad[u[1]])
        if self.is_atomic:
            found = tuple(u for u in found if self.is_repeatable(*u))
        is_small = sum(bytes_of(self.graph.inputs[i].type) for _, i in found) <= SMALL_UPDATES
        is_looking = self.is_atomic or any(node.op.startswith(_LOOKING) for node in self.graph.nodes)
        return () if is_small and is_looking else found

    def is_repeatable(self, output: int, given: int) -> bool:
        """Items of an input not read before are written, as in a cache: done twice is as done once."""
        base, result = self.graph.inputs[given], self.graph.outputs[output]
        reads = [node for node in self.graph.nodes if base in node.operands]
        return reads == [result] and reads[0].op.startswith(_OVERWRITING) and reads[0].args[3:] != (True,)

    def __str__(self) -> str:
        return f"{self.graph}\n{self.signature}"


def _may_refuse(node: Node) -> bool:
    """Whether it raises depends on values, which torch looks at on the CPU. Others' ops may do anything."""
    if not node.op.startswith(("aten.", "prims.", GET)):
        return True
    given = [arg.type for arg in node.operands]
    is_here = all(type.device.kind == "cpu" for type in given if isinstance(type, TensorType))
    if node.op.startswith(_DIVIDING):
        return is_here and not node.tensor.dtype.is_float
    return node.op.startswith(_RAISING) or is_here and node.op.startswith(_REFUSING)


class _Trace(Noun, frozen=False):
    """What is known while one program is traced."""

    recorder: Recorder
    examples: Sequence[Any]
    leaves: list[Any] = field(default_factory=list)
    """Per input: the Fake that gradients are taken of, or None."""
    passed: list[Any] = field(default_factory=list)
    """Per input: what the program is given."""
    histories: list[Any] = field(default_factory=list)
    """Per input: its grad_fn, and its version, before the program ran."""
    versions: list[int | None] = field(default_factory=list)
    same: list[tuple[int, int]] = field(default_factory=list)
    values: list[Node] = field(default_factory=list)
    """Forward outputs so far, the nodes whose memory they are, and for each the Fake autograd knows it by."""
    taken: set[Node] = field(default_factory=set)
    tensors: list[Any] = field(default_factory=list)
    memories: Counter[int] = field(default_factory=Counter)
    """How many inputs lie in each storage."""
    made: dict[int, tuple[FxNode, Ref]] = field(default_factory=dict)
    """By tensor, which call of the program made it, and as what."""


def trace_joint(gm: GraphModule, example_inputs: Sequence[Any]) -> Joint:
    """Examples are real tensors, Fakes, or numbers (SymInts where they may change)."""
    with torch._C.DisableTorchFunctionSubclass():  # Fakes have none, and each use of one would look for it
        return _trace_joint(gm, example_inputs)


def _trace_joint(gm: GraphModule, example_inputs: Sequence[Any]) -> Joint:
    watch_kernels()
    builder = GraphBuilder("joint")
    recorder = Recorder(builder)
    trace = _Trace(recorder, example_inputs)
    kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    autocast = tuple((k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k))
    grad_mode = torch.is_grad_enabled()
    shapes = find_shapes(example_inputs)
    learned = 0 if shapes is None else len(shapes.equalities)
    try:
        with recorder:
            _add_inputs(trace, [n.name for n in gm.graph.nodes if n.op == "placeholder"])
            results = run_fx(gm, trace, call_at if shapes is None else symbolic_at)
        torch._C._set_grad_enabled(grad_mode)  # the program may end inside of torch.no_grad()
        mutations = _derive_mutations(trace)
        outputs = _derive_outputs(trace, results)
        boundary = len(builder.nodes)
        groups, reached, chains = derive_ties(trace, outputs, results)
        anchors = find_anchors(trace, results, {p for _, before in chains for p in before})
        shown = [recorder.ref(x).storage for x in (*trace.passed, *results) if isinstance(x, torch.Tensor)]
        generations = [storage.generation for storage in shown]
        tangents, grad_inputs, grads = _trace_backward(trace, autocast)
        keeping = [position for _, position in tangents if _is_freed(trace.tensors[position].grad_fn)]
        if generations != [storage.generation for storage in shown]:
            raise UnsupportedMutation(detail="backward writes to an input or an output of the graph")
    finally:
        recorder.close()
        torch._C._set_grad_enabled(grad_mode)
    n, constants = len(example_inputs), tuple(recorder.constants)
    has_grad = tuple([grad_mode and leaf is not None for leaf in trace.leaves])
    builder.inputs = [*builder.inputs[:n], *recorder.constant_nodes, *(node for node, _ in tangents)]
    tensors = [(i, x) for i, x in enumerate(example_inputs) if isinstance(x, torch.Tensor)]
    loose = tuple(i for i, x in tensors if not isinstance(x, torch.nn.Parameter))
    if indexing := [node for node in builder.nodes[:boundary] if node.op.startswith((*_INDEXING, _LOSS))]:
        logs = [storage.log for storage in recorder.storages if storage.input is not None]
        replayed = {write.value for log in logs for write in log if write.op}
        kept = prune(builder.finish((*trace.values, *grads))).nodes
        _read_unread(builder, [node for node in indexing if node not in replayed.union(kept)])
    graph = builder.finish((*trace.values, *grads))
    open_to_writes = [i for i in loose if not (has_grad[i] and _is_leaf(example_inputs[i]))]
    unread = _unread(graph, boundary, open_to_writes, len(trace.values))
    graph = prune(graph)
    if shapes is not None:
        assume_narrow(graph, shapes)
    if shapes is not None and len(shapes.equalities) > learned:  # late, they hold from the beginning
        graph, outputs = simplify_graph(graph, shapes), list(_simplified((*outputs,), shapes, {}))
    signature = Signature(
        inputs=n, mutations=tuple(mutations), outputs=tuple(outputs), constants=len(constants),
        values=len(trace.values), grad_inputs=tuple(grad_inputs), unread=unread,
        tangents=tuple(position for _, position in tangents), groups=tuple(groups) if grads else (),
        reached=tuple(reached) if grads else (),
        chains=tuple(chain for chain in chains if grads or chain[0] < 0), keeping=tuple(keeping),
    )  # fmt: skip
    made = {out.index: x for out, x in zip(outputs, results) if out.kind in ("fresh", "alias")}
    inference = tuple(i for i, x in made.items() if x.is_inference())
    is_inference = 0 < len(inference) == len(made) and not torch.is_inference_mode_enabled()
    is_atomic = gm.meta.get("is_atomic", False) and any(map(_may_refuse, graph.nodes))
    return Joint(
        graph, signature, constants, gm, anchors=anchors, autocast=autocast, has_grad=has_grad,
        same=tuple(trace.same), loose=loose, is_inference=is_inference, is_atomic=is_atomic,
        counted=tuple(each is not None for each in trace.versions),
        inference=() if len(inference) == len(made) else inference,
    )  # fmt: skip


# -- inputs ------------------------------------------------------------------------------------------


def _add_inputs(trace: _Trace, names: Sequence[str]) -> None:
    recorder, seen = trace.recorder, {}  # type: Recorder, dict[int, int]
    for i, example in enumerate(trace.examples):
        name = names[i] if i < len(names) else f"input_{i}"
        if not isinstance(example, torch.Tensor):
            _add_number(trace, name, example)
            continue
        leaf: Any = example.__deepcopy__({}) if type(example) is Fake else fake_like(example)
        node = recorder.builder.input(name, fake_type(leaf))
        if id(example) in seen:  # the same tensor passed twice: one value
            first = seen[id(example)]
            trace.same.append((first, i))
            _append(trace, None, trace.passed[first])
            continue
        seen[id(example)] = i
        recorder.own(leaf, node, input=i)
        given = leaf
        if leaf.requires_grad and torch.is_grad_enabled() and not _is_leaf(example):
            recorder.is_silent = True
            given = leaf.clone()
            recorder.is_silent = False
            given.ref.storage.owner = given
        _append(trace, leaf if leaf.requires_grad else None, given)


def _append(trace: _Trace, leaf: Any, given: Any) -> None:
    trace.leaves.append(leaf)
    trace.passed.append(given)
    is_tensor = isinstance(given, torch.Tensor)
    trace.histories.append(given.grad_fn if is_tensor else None)
    trace.versions.append(given._version if is_tensor and not given.is_inference() else None)


def _is_leaf(example: torch.Tensor) -> bool:
    """Autograd forbids writing to a leaf, so only what is surely one is traced as one."""
    return example.is_leaf and type(example) is not Fake or isinstance(example, torch.nn.Parameter)


def _add_number(trace: _Trace, name: str, example: Any) -> None:
    expr = expr_of(example) if isinstance(example, torch.SymInt) else None
    dtype = F64 if isinstance(example, (float, torch.SymFloat)) else I64
    node = trace.recorder.builder.input(name, ScalarType(dtype, expr))
    if isinstance(example, torch.SymFloat):
        trace.recorder.numbers[str(example.node.expr)] = node
    _append(trace, None, example)


# -- running the program -----------------------------------------------------------------------------


def run_fx(gm: GraphModule, trace: _Trace, call: Any) -> list[Any]:
    """Each captured call, on Fakes; returns the program's outputs, flat."""
    env: dict[FxNode, Any] = {}
    given, recorder = iter(trace.passed), trace.recorder
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(given)
            continue
        recorder.enter(node.name, node.meta.get("loc"))
        args, kwargs = map_fx((node.args, node.kwargs), env.__getitem__)
        if node.op == "output":
            return list(args[0]) if isinstance(args[0], (list, tuple)) else [args[0]]
        target = node.target
        if node.op == "get_attr":
            found = operator.attrgetter(target)(gm)
            env[node] = recorder.constant(found) if isinstance(found, torch.Tensor) else found
            continue
        if node.op == "call_method":
            target = _RESOLVES.get(target) or getattr(type(args[0]), target)
        elif node.op == "call_module":
            target = gm.get_submodule(target)
        run = with_numbers if target in INSTEAD else call
        made = env[node] = run(recorder.loc, INSTEAD.get(target, target), args, kwargs)
        if type(made) is Fake and id(made) not in trace.made:
            trace.made[id(made)] = node, made.ref
    raise UnsupportedMutation(detail="the captured graph has no output")


def _resolve(op: str, x: Any) -> Any:
    """A Fake does not know that it is conjugated lazily, or negative as a part of such; its views do."""
    is_part = op == LAZY[1] and not _is_replayable(x.ref.way)
    return x.clone() if is_part or sum(step.op == op for step in x.ref.way) % 2 else x


LAZY = ("aten._conj.default", "aten._neg_view.default")
_RESOLVES = dict(zip(("resolve_conj", "resolve_neg"), (partial(_resolve, op) for op in LAZY)))


# -- what becomes of inputs and outputs --------------------------------------------------------------


def _derive_mutations(trace: _Trace) -> list[Mutation]:
    found: list[Mutation] = []
    memory = trace.recorder.memory
    for i, fake in enumerate(trace.passed):
        if not isinstance(fake, torch.Tensor) or fake.ref.storage.input != i:  # type: ignore[attr-defined]
            continue
        ref: Ref = fake.ref  # type: ignore[attr-defined]
        if ref.parent is not None:
            raise UnsupportedMutation(detail="an input's shape is changed in place (t_, squeeze_, set_)")
        value = memory.read(ref)
        version = trace.versions[i]
        writes = 0 if version is None else fake._version - version
        if value is trace.recorder.builder.inputs[i]:
            found += [_COUNTED(i)] * writes
            continue
        _check_overlap(trace, i)
        silent = not fake.requires_grad or fake.grad_fn is trace.histories[i]
        log = ref.storage.log
        is_scatter = len(log) == 1 and bool(log[0].op) and not log[0].ref.steps
        builder = trace.recorder.builder  # see lower: no copy is made where nothing else reads the input
        in_place = is_scatter and sum(builder.inputs[i] in call.operands for call in builder.nodes) == 1
        if silent and not in_place and _is_small(log, ref.type):
            made = [_partial(trace, i, write) for write in ref.storage.log]
        else:
            made = [Mutation(i, len(trace.values), under_no_grad=silent)]
            _add_value(trace, value, None if silent else fake)
        found += [replace(mutation, is_uncounted=version is not None and not writes) for mutation in made]
    return found


def _is_small(log: list[Write], whole: TensorType) -> bool:
    """The writes, repeated on the input, touch less than half of it."""
    touched = 0
    for write in log:
        if not write.op and not write.ref.steps:
            return False
        operands = nodes_in(write.args) if write.op else [write.value]
        touched += sum(bytes_of(node.type) for node in operands)
    return touched * 2 <= bytes_of(whole)


def _partial(trace: _Trace, i: int, write: Write) -> Mutation:
    steps = write.ref.steps
    if not write.op:
        return Mutation(i, _add_value(trace, write.value, None), True, steps)
    inputs = trace.recorder.builder.inputs

    def refer(arg: Arg) -> object:
        if isinstance(arg, tuple):
            return tuple(map(refer, arg))
        if not isinstance(arg, Node):
            return arg
        if arg in inputs[: len(trace.examples)]:
            return ValueRef("input", inputs.index(arg))
        return ValueRef("output", _add_value(trace, arg, None))

    return Mutation(i, -1, True, steps, write.op, tuple(map(refer, write.args)))


def _check_overlap(trace: _Trace, written: int) -> None:
    """Another input in the memory of one that is written would have to change too."""
    if not trace.memories:
        real = {id(x): x for x in trace.examples if isinstance(x, torch.Tensor) and type(x) is not Fake}
        trace.memories.update(x.untyped_storage()._cdata for x in real.values())
    target = trace.examples[written]
    if type(target) is not Fake and trace.memories[target.untyped_storage()._cdata] > 1:
        raise UnsupportedMutation(detail="an input is written while another input shares its memory")


def _add_value(trace: _Trace, node: Node, tensor: Any, kind: TensorType | None = None) -> int:
    """One more forward output. Outputs own their memory: no input and no other output shows through;
    and they are laid out as `kind` says."""
    memory = trace.recorder.memory
    source = memory.source_of(node)
    kind = kind or node.tensor
    if source.op == INPUT or source in trace.taken or kind != node.type:
        node = trace.recorder.builder.call("aten.clone.default", (node,), kind, name=f"{node.name}_copy")
    trace.taken.add(memory.source_of(node))
    trace.values.append(node)
    trace.tensors.append(tensor)
    return len(trace.values) - 1


def _derive_outputs(trace: _Trace, results: list[Any]) -> list[OutputIs]:
    shared: dict[int, int] = {}
    given = {id(r): r for r in results if isinstance(r, torch.Tensor)}
    for result in given.values():
        storage = trace.recorder.ref(result).storage
        shared[id(storage)] = shared.get(id(storage), 0) + 1
        owner: Any = storage.owner
        if storage.input is None and id(owner) not in given:
            if not (result._is_view() or result.requires_grad or owner.requires_grad):
                storage.owner = result  # what torch.ones made, as a second tensor
    bases: dict[int, int] = {}
    once = {id(result): result for result in results}
    made = {key: _derive_output(trace, result, shared, bases) for key, result in once.items()}
    return [made[id(result)] for result in results]


def _derive_output(trace: _Trace, result: Any, shared: dict[int, int], bases: dict[int, int]) -> OutputIs:
    if isinstance(result, torch.SymInt):
        return OutputIs("size", value=expr_of(result))
    if not isinstance(result, torch.Tensor):
        return OutputIs("const", value=result)
    ref = trace.recorder.ref(result)
    storage, wants_grad = ref.storage, result.requires_grad
    is_hidden = wants_grad and result.grad_fn is None and torch.is_grad_enabled()
    owner = None if storage.input is None else trace.passed[storage.input]
    if storage.input is not None and _has_history_of(owner, result) and _is_replayable(ref.steps):
        if result is owner:
            return OutputIs("input", storage.input, ref.type, requires_grad=wants_grad)
        steps = _replayed(owner, result, ref.way, shared[id(storage)] == 1)
        return OutputIs("view", storage.input, ref.type, steps, None, wants_grad, is_hidden)
    base: Any = storage.owner
    root = ref.root if base is None else trace.recorder.ref(base)  # perhaps a view of itself before t_
    own = len(root.way)
    is_lazy = any(step.op in LAZY for step in ref.steps)
    is_part = shared[id(storage)] > 1 or is_lazy or (ref.steps and not is_dense(ref.type))
    is_replayable = ref.way[:own] == root.way and _is_replayable(ref.steps)
    if is_part and storage.input is None and _has_history_of(base, result) and is_replayable:
        if id(storage) not in bases:
            value = trace.recorder.memory.read(root)
            bases[id(storage)] = _add_value(trace, value, base if base.requires_grad else None, root.type)
        index = bases[id(storage)]
        if result is base:
            return OutputIs("fresh", index, ref.type, requires_grad=wants_grad)
        steps = _replayed(base, result, ref.way[own:], False)
        return OutputIs("alias", index, ref.type, steps, None, wants_grad, is_hidden)
    is_detached = not result._is_view() or (result._base is not owner and shared[id(storage)] == 1)
    is_own = is_detached if storage.log else result._base is owner  # else a Function of the program made it
    if storage.input is not None and wants_grad and is_own and _is_replayable(ref.steps):
        trace.values.append(trace.recorder.builder.inputs[storage.input])  # nobody takes it from there
        trace.tensors.append(result)
        steps = (*ref.way, *[_DETACH] * bool(storage.log))
        return OutputIs("through", len(trace.values) - 1, ref.type, steps, None, True, input=storage.input)
    if storage.input is not None or shared[id(storage)] > 1:
        raise UnsupportedMutation(detail="outputs share memory, and autograd sees no views of one tensor")
    value = trace.recorder.memory.read(ref)
    index = _add_value(trace, value, result if wants_grad else None, ref.type)
    return OutputIs("fresh", index, ref.type, requires_grad=wants_grad)


def _replayed(base: Any, result: Any, steps: tuple[ViewStep, ...], is_alone: bool) -> tuple[ViewStep, ...]:
    if result._is_view() and result._base is base:
        return steps or (ViewStep("aten.alias.default"),)
    cut = _DETACH
    if is_alone and not base.is_inference():  # and writes to .data are not counted as the base's
        before, own = base._version, result._version
        torch.autograd.graph.increment_version(result)
        cut = _DETACH if base._version > before else ViewStep("aten.data.default")
        torch._C._autograd._unsafe_set_version_counter((result,), (own,))
    return (cut, *steps) if result._is_view() else (*steps, cut)  # what detach() gives is none, for autograd


def _is_replayable(steps: Sequence[ViewStep]) -> bool:
    """Lazily conjugated tensors have no view as real numbers; here they are not lazy."""
    ops = [step.op for step in steps]
    return not ("aten._conj.default" in ops and "aten.view_as_real.default" in ops)


def _has_history_of(base: Any, result: Any) -> bool:
    """Autograd too sees result as base or a view of it, and its gradient is a view's: not that of a write
    to a detached alias, nor that of a user's autograd.Function."""
    if not result.requires_grad or result is base:
        return True
    if not result._is_view() or result._base is not base:
        return False
    node, end = result.grad_fn, base.grad_fn
    while node is not None and node is not end:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return False
        following = [f for f, _ in node.next_functions if f is not None]
        node = following[0] if len(following) == 1 else None
    return True


# -- backward ----------------------------------------------------------------------------------------


def derive_ties(
    trace: _Trace, outputs: Sequence[OutputIs], results: list[Any]
) -> tuple[list[tuple[int, ...]], list[frozenset[int]], tuple[tuple[int, tuple[int, ...]], ...]]:
    """How autograd ties outputs. Groups: those together whose histories have a node in common that keeps
    tensors, since backward from one frees these for all; from the others, eager can call backward one after
    the other. For each output the inputs that have a gradient by it. And, in the program's order, outputs
    that are computed from others, with those that no third one is in between of: a view is ~i, its place, and
    is followed back to other views only."""
    shown = {output.index for output in outputs if output.kind in ("fresh", "alias")}
    given = {id(t) for t in trace.passed}
    shown |= {i for i, t in enumerate(trace.tensors) if t is not None and id(t) in given}  # with new values
    tensors = [(i, t) for i, t in enumerate(trace.tensors) if t is not None and t.requires_grad]
    groups: list[tuple[int, ...]] = [(i,) for i, _ in tensors]
    seen = [i for i, out in enumerate(outputs) if out.kind in ("alias", "view") and not out.under_no_grad]
    views = [(~i, results[i]) for i in seen if results[i].requires_grad]
    shown.update(i for i, _ in views)
    heads = {(t.grad_fn, t.output_nr): i for i, t in (*views, *tensors) if t.grad_fn is not None}
    if len(heads) < 2 and len(tensors) < 2:
        return groups, [], ()
    nodes = behind(node for node, _ in heads)
    above: dict[Any, set[int]] = {node: set() for node in nodes}
    before: dict[Any, set[int]] = {}
    for (node, _), i in heads.items():
        above[node].update((i,) if i >= 0 else ())
    for node in reversed(nodes):
        for following, _ in nodes[node]:
            above[following] |= above[node]
    for node, edges in nodes.items():
        found = ({heads[e]} if heads.get(e) in shown else before[e[0]] for e in edges)
        before[node] = set().union(*found)
    for tied in {frozenset(above[node]) for node in nodes if _saved_by(node.__class__)}:
        joined = [group for group in groups if not tied.isdisjoint(group)]
        groups = [g for g in groups if g not in joined] + [tuple(sorted(i for g in joined for i in g))]
    groups = sorted(groups) if len(groups) <= MOST_GROUPS else [tuple(i for i, _ in tensors)]
    inputs = {id(leaf): i for i, leaf in enumerate(trace.leaves) if leaf is not None}
    leaves = [(inputs.get(id(getattr(node, "variable", None))), above[node]) for node in nodes]
    reached = [frozenset(i for i, by in leaves if i is not None and head in by) for head, _ in tensors]
    chains: list[tuple[int, tuple[int, ...]]] = []
    for (node, _), i in sorted(heads.items(), key=lambda head: (head[0][0]._sequence_nr(), head[1])):
        leads = lambda p: i >= 0 or (p < 0 and outputs[~i].steps_from(outputs[~p]))  # noqa: B023, E731
        if i in shown and (others := tuple(sorted(filter(leads, before[node])))):
            chains.append((i, others))
    return groups, reached, tuple(chains)


def find_anchors(trace: _Trace, results: list[Any], positions: Iterable[int]) -> dict[int, FxNode]:
    """Of these outputs, those that are as the program made them, and where it did."""
    shown, nowhere = set(map(id, results)), (None, None)
    tensors = [(p, trace.tensors[p] if p >= 0 else results[~p]) for p in positions]
    made = [(p, t, *trace.made.get(id(t), nowhere)) for p, t in tensors if id(t) in shown]
    return {p: node for p, t, node, ref in made if node and t.ref is ref and not ref.storage.generation}


@cache
def _saved_by(kind: Any) -> list[str]:
    """Attributes of a node of that kind with what it keeps until backward; CopySlices keeps another node."""
    if issubclass(kind, torch.autograd.function.BackwardCFunction) or kind.__name__ == "CopySlices":
        return ["next_functions" if kind.__name__ == "CopySlices" else "saved_tensors"]
    return [name.removeprefix("_raw") for name in dir(kind) if name.startswith("_raw_saved_")]


def _is_freed(head: Any) -> bool:
    """Some node of this history keeps something, so that backward runs once."""
    kept = (getattr(node, name) for node in behind([head]) for name in _saved_by(node.__class__))
    return any(isinstance(value, torch.Tensor) or value for value in kept)


def _trace_backward(
    trace: _Trace, autocast: tuple[tuple[str, torch.dtype], ...]
) -> tuple[list[tuple[Node, int]], list[int], list[Arg]]:
    """Tangent inputs with the output they belong to, inputs that get gradients, the gradients."""
    recorder = trace.recorder
    wanted = [(i, leaf) for i, leaf in enumerate(trace.leaves) if leaf is not None]
    heads = [(i, t) for i, t in enumerate(trace.tensors) if t is not None and t.requires_grad]
    if not wanted or not heads or not torch.is_grad_enabled():
        return [], [], []
    tangents: list[tuple[Node, int]] = []
    fakes: list[Any] = []
    for position, tensor in heads:
        fake = _tangent_like(tensor)
        node = recorder.builder.input(f"tangent_{position}", type_of(fake))
        recorder.own(fake, node)
        tangents.append((node, position))
        fakes.append(fake)
    recorder.is_backward = True
    with ExitStack() as stack:
        for device, _ in autocast:  # eager runs backward outside of the autocast region
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(recorder)
        leaves = [leaf for _, leaf in wanted]
        try:
            grads = gradients_of([t for _, t in heads], leaves, fakes, retain=True, unused=True)
        except RuntimeError as error:
            raise UnsupportedMutation(detail=f"backward cannot be traced: {error}") from error
        outputs = [None if g is None else recorder.memory.read(recorder.ref(g)) for g in grads]
    kept = [(i, g) for (i, _), g in zip(wanted, outputs) if g is not None]
    return tangents, [i for i, _ in kept], [g for _, g in kept]


def _unread(graph: Graph, boundary: int, inputs: Iterable[int], values: int) -> tuple[int, ...]:
    """Of these inputs, and of the outputs, as ~i, those that eager's backward reads nothing of: until it
    runs, they may be written to."""
    read: set[Node] = set()
    for i, node in reversed([*enumerate(graph.nodes)]):
        if i >= boundary or (node in read and class_of(node.op) == "view"):
            read.update(node.operands)
    outputs = (~i for i in range(values) if graph.outputs[i] not in read)
    return (*(i for i in inputs if graph.inputs[i] not in read), *outputs)


def _tangent_like(tensor: torch.Tensor) -> Fake:
    """As the output is laid out in memory, if every element has its own place; else row-major."""
    op, given = torch.ops.aten.empty_strided.default, (tensor.shape, tensor.stride())  # type: Any, Any
    if not is_dense(type_of(tensor)):
        op, given = torch.ops.aten.empty.memory_format, (tensor.shape,)
    return infer(op, given, {"dtype": tensor.dtype, "device": tensor.device})  # type: ignore[no-any-return]


# -- symbols -----------------------------------------------------------------------------------------


def assume_narrow(graph: Graph, shapes: Shapes) -> None:
    """Symbolic tensors on a GPU have no more elements than 32-bit indices reach; those that have more are
    not symbolic."""
    made = {id(node.type): node.type for node in (*graph.inputs, *graph.nodes)}  # there are fewer types
    types = [part for type in made.values() for part in (type if isinstance(type, tuple) else (type,))]
    tensors = [type for type in types if isinstance(type, TensorType) and type.device.kind == "cuda"]
    counts = {shapes.simplify(type.numel) for type in tensors}
    reason, checked = "kernels of a GPU index with 32 bits", list[Expr]()
    for count in sorted((c for c in counts if not c.is_const), key=shapes.hint, reverse=True):
        if any(shapes.is_true(le(count, other)) for other in checked):
            continue
        if not shapes.decide(le(count, NARROW), reason):
            shapes.specialise_symbols(count, reason)
        checked.append(count)


def simplify_graph(graph: Graph, shapes: Shapes) -> Graph:
    """Every expression in terms of the symbols that are left."""
    made: dict[Any, Any] = {}
    simple = lambda value: _simplified(value, shapes, made)  # noqa: E731
    for node in (*graph.inputs, *graph.nodes):
        args, kind, kwargs = simple(node.args), simple(node.type), node.kwargs and simple(node.kwargs)
        is_same = args is node.args and kind is node.type and kwargs is node.kwargs
        made[node] = node if is_same else Node(node.op, args, kind, node.name, kwargs, node.loc)
    inputs, nodes = tuple(made[n] for n in graph.inputs), tuple(made[n] for n in graph.nodes)
    return Graph(graph.name, inputs, nodes, simple(graph.outputs))


def _simplified(value: Any, shapes: Shapes, made: dict[Any, Any]) -> Any:
    """The same object where nothing changes. `made`: what nodes became, extents, and types by identity."""
    kind = type(value)
    if kind is tuple:
        parts = [_simplified(part, shapes, made) for part in value]
        return value if all(map(operator.is_, parts, value)) else tuple(parts)
    if kind is Node:
        return made[value]
    if kind is Expr:
        return shapes.simplify(value)
    if kind is TensorType:
        if id(value) not in made:
            given = value.shape, value.stride
            for part in given:
                if part not in made:
                    made[part] = tuple(map(shapes.simplify, part))
            shape, stride = found = made[value.shape], made[value.stride]
            made[id(value)] = value if found == given else replace(value, shape=shape, stride=stride)
        return made[id(value)]
    if kind in (ScalarType, ViewStep, OutputIs):
        held = tuple(getattr(value, name) for name in kind.__match_args__)
        parts = _simplified(held, shapes, made)
        return value if parts is held else kind(*parts)
    return value


def _read_unread(builder: GraphBuilder, indexing: list[Node]) -> None:
    """An index out of range raises also where nobody needs what is there: a check of nothing reads it."""
    for node in indexing:
        value = node if isinstance(node.type, TensorType) else builder.get(node, 0)
        builder.call("aten._assert_tensor_metadata.default", (value,), ())


def prune(graph: Graph) -> Graph:
    """Without the nodes that nothing needs. Random ops stay, since dropping one would change later numbers,
    custom ops, which may do more than they return, and checks, which return nothing."""
    return graph.pruned(lambda node: class_of(node.op) == "random" or node.type == ())
