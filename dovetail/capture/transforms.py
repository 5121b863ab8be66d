"""Torch constructs that take functions: transforms of torch.func, checkpoints, kernels, branches, loops.

    torch.func.vmap(lambda row: row @ w)(x)

    the function is interpreted once, on one example, into a graph of its own: (row, w) -> row @ w
    the outer graph gets one node that applies torch.func.vmap to that graph: transform(x, w)

    checkpoint(block, x)           block(x), interpreted; what it records is marked for recomputation
    kernel[grid](x, n, BLOCK=64)   a Triton kernel of the user's: one node, the op that launches it
    flex_attention(q, k, v, mod)   all scores, changed by mod under vmap; their softmax; times v
    torch.cond(x.sum() > 0, f, g, (x,))     a break: run_cond(x.sum() > 0, f, g, (x,)); f and g are compiled
    with fullgraph=True                     one op: dovetail::cond_1f3a(x.sum() > 0, x)

Arguments may be trees of tensors and constants, as torch.func allows them. Tensors and symbolic sizes that
the function reads from around it become inputs of its graph. The op of torch.cond runs the graph of the
function that is chosen, in eager; its backward runs it again and differentiates.
"""
from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from types import CellType, FunctionType
from typing import Any, Final

import torch
import torch.utils.checkpoint
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten
from torch.utils._pytree import _broadcast_to_and_flatten as broadcast_tree

from dovetail.capture.autograd import changes, copy_of
from dovetail.capture.builtins import Args, Kwargs, Special, on
from dovetail.capture.graphs import GraphBuilder, used_ids
from dovetail.capture.operations import truth
from dovetail.capture.origins import wrap
from dovetail.capture.text import version_of
from dovetail.capture.torch_calls import call_torch, perform, to_dtype
from dovetail.capture.trace import PLAIN, Trace, freeze, is_random
from dovetail.errors import ChosenArm, UnknownCall
from dovetail.fake.calls import with_numbers
from dovetail.fake.kernels import describe_launch, run_kernel, unwrapped
from dovetail.fake.tensor import Fake
from dovetail.ir.guard import Is
from dovetail.ir.source import cell_of
from dovetail.ops.flex import flex_attention
from dovetail.util.noun import Noun, replace

Make = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A transform with its settings: from a function to its gradient, its batched form..."""


class Inner(Noun):
    """A function interpreted into a graph: its tensors, then `free`, what it read from around it."""

    module: torch.fx.GraphModule
    free: tuple[Any, ...]
    examples: tuple[Any, ...]
    """The leaves of its result."""
    result: TreeSpec
    is_random: bool


class Transformed:
    """The target of a transform's node: the transform of a graph, called with trees made of the inputs."""

    def __init__(self, name: str, make: Make, inner: Inner, leaves: Sequence[Any], tree: TreeSpec) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "dovetail"
        self.make, self.module, self.result, self.tree = make, inner.module, inner.result, tree
        self.leaves = [None if isinstance(leaf, Fake) else leaf for leaf in leaves]
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Fake)]

    def __call__(self, *inputs: Any) -> Any:
        return with_numbers(None, self.run, inputs, {})

    def run(self, *inputs: Any) -> Any:
        free = inputs[len(self.places) :]
        leaves = list(self.leaves)
        for place, given in zip(self.places, inputs):
            leaves[place] = given

        def function(*args: Any, **kwargs: Any) -> Any:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            return tree_unflatten(self.module(*tensors, *free), self.result)

        args, kwargs = tree_unflatten(leaves, self.tree)
        return self.make(function)(*args, **kwargs)


def call_transform(trace: Trace, fn: FunctionType, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The call of what a transform of torch.func returned, as one node."""
    transform, names = TRANSFORMS[id(fn.__code__)]
    settings = {key: tree_map_only(torch.SymInt, int, found) for key, found in closure_of(trace, fn).items()}
    make = partial(transform, **{key: settings[key] for key in names if key in settings})
    leaves, tree = tree_flatten((tuple(args), dict(kwargs)))
    dims: Sequence[Any] = [None] * len(leaves)
    if transform is torch.func.vmap:
        found = broadcast_tree(settings["in_dims"], tree_flatten(tuple(args))[1])
        dims = [*found, *[0] * (len(leaves) - len(found))] if found is not None else dims
    examples = [stand_in(trace, leaf, dim) for leaf, dim in zip(leaves, dims)]
    inner_args, inner_kwargs = tree_unflatten(examples, tree)
    inner = trace_function(trace, settings["func"], list(inner_args), inner_kwargs)
    if inner.is_random and settings.get("chunk_size"):  # which sets the generator back for each chunk
        raise UnknownCall(trace.loc(), function="torch.func in chunks, of random numbers")
    return record_transform(trace, transform.__name__, make, inner, leaves, tree)


class Pullback:
    """The function that torch.func.vjp returns: each call of it is one node."""

    __slots__ = ("trace", "make", "inner", "point", "made_at")

    def __init__(self, trace: Trace, make: Make, inner: Inner, point: tuple[Any, ...]) -> None:
        self.trace, self.make, self.inner, self.point = trace, make, inner, point
        self.made_at = trace.step

    def __call__(self, *given: Any, **_: Any) -> Any:
        """Keywords say what to keep for another call, and nothing is thrown away."""
        leaves, tree = tree_flatten(((self.point, given), {}))
        return record_transform(self.trace, "vjp", self.make, self.inner, leaves, tree)


@on(torch.func.vjp)
def call_vjp(trace: Trace, args: list[Any], kwargs: dict[str, Any]) -> Any:
    function, *point = args
    inner = trace_function(trace, function, tree_map(lambda x: stand_in(trace, x, None), point), {})
    result = record_transform(trace, "call", lambda inner: inner, inner, *tree_flatten((tuple(point), {})))
    make: Make = lambda inner: lambda point, given: torch.func.vjp(inner, *point, **kwargs)[1](*given)
    pullback = Pullback(trace, make, inner, tuple(point))
    return (result[0], pullback, result[1]) if kwargs.get("has_aux") else (result, pullback)


@on(torch.Tensor.register_hook)
def _register_hook(trace: Trace, args: list[Any], kwargs: dict[str, Any]) -> None:
    """A hook on what the graph computes, of gradients only, is a part of the graph and stays for good."""
    place, before = trace.places[-1], changes(trace)
    is_kept = place.code.ops[place.at + 1] != "POP_TOP"
    cells = getattr(args[-1], "__closure__", None) or ()
    around = [cell.cell_contents for cell in cells if cell != CellType()]  # not empty
    around += [trace.writes[key].value for cell in cells if (key := (id(cell), "")) in trace.writes]
    is_kept |= any(isinstance(value, (list, dict, set)) for value in around)
    is_given = not isinstance(args[0], Fake) or {id(args[0]), id(args[0]._base)} & trace.origins.keys()
    if is_kept or kwargs or is_given:
        raise UnknownCall(trace.loc(), function="Tensor.register_hook")
    example: Any = args[0].detach()
    trace.owned[id(example)] = example
    inner = trace_function(trace, args[1], [example], {})
    if changes(trace) != before:
        raise UnknownCall(trace.loc(), function="Tensor.register_hook of a function with side effects")
    make: Make = lambda function: lambda tensor: tensor.register_hook(function) and None
    trace.hooked.append((args[0], trace.step))
    record_transform(trace, "register_hook", make, inner, *tree_flatten(((args[0],), {})))


@on(torch.func.jvp)
def call_jvp(trace: Trace, args: list[Any], kwargs: dict[str, Any]) -> Any:
    names = ("func", "primals", "tangents")
    given = {**dict(zip(names, args)), **kwargs}
    function, primals, tangents = (given.pop(name) for name in names)
    make: Make = partial(partial, torch.func.jvp, **{"strict": False, "has_aux": False, **given})
    inner = trace_function(trace, function, [stand_in(trace, primal, None) for primal in primals], {})
    leaves, tree = tree_flatten(((tuple(primals), tuple(tangents)), {}))
    return record_transform(trace, "jvp", make, inner, leaves, tree)


def record_transform(
    trace: Trace, name: str, make: Make, inner: Inner, leaves: Sequence[Any], tree: TreeSpec
) -> Any:
    plain = [leaf if isinstance(leaf, Fake) else freeze(trace, leaf) for leaf in leaves]
    target = Transformed(name, make, inner, plain, tree)
    inputs = [*(leaf for leaf in plain if isinstance(leaf, Fake)), *inner.free]
    result = perform(trace, target, inputs, {})
    return trace.record("call_function", target, tuple(inputs), {}, result)


def closure_of(trace: Trace, fn: FunctionType) -> dict[str, Any]:
    """The variables a transform's wrapper closes over."""
    found = {}
    for i, (name, cell) in enumerate(zip(fn.__code__.co_freevars, fn.__closure__ or ())):
        if id(cell) in trace.made_cells:
            found[name] = cell.cell_contents
        else:
            source = trace.source_of(fn) or trace.const(fn, fn.__name__)
            found[name] = wrap(trace, cell.cell_contents, cell_of(source, i))
    return found


Transform = tuple[Callable[..., Any], tuple[str, ...]]
SETTINGS: Final[tuple[Transform, ...]] = (
    (torch.func.grad, ("argnums", "has_aux")),
    (torch.func.grad_and_value, ("argnums", "has_aux")),
    (torch.func.vmap, ("in_dims", "out_dims", "randomness", "chunk_size")),
    (torch.func.jacrev, ("argnums", "has_aux", "chunk_size", "_preallocate_and_copy")),
    (torch.func.jacfwd, ("argnums", "has_aux", "randomness")),
)
"""Each transform, with those of its wrapper's variables that are its settings."""
TRANSFORMS: Final[dict[int, Transform]] = {id(row[0](torch.sin).__code__): row for row in SETTINGS}
"""By the code of what the transform returns: functools.wraps leaves no other mark on it."""


def stand_in(trace: Trace, leaf: Any, dim: int | None) -> Any:
    """Another Fake like this one, or like one slice of it: the inner graph's own input."""
    if isinstance(leaf, Fake) and dim is not None:
        leaf = leaf.select(dim, 0) if leaf.shape[dim] else leaf.new_empty(leaf.movedim(dim, 0).shape[1:])
    return copy_of(trace, leaf)


def trace_function(trace: Trace, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Inner:
    """Interpret a function into a graph of its own."""
    start, writes, around = len(trace.calls), len(trace.writes), trace.is_inner
    trace.is_inner = True
    leaves, result = tree_flatten(trace.call(function, list(args), dict(kwargs)))
    trace.is_inner = around
    leaves = [freeze(trace, leaf) for leaf in leaves]
    calls = trace.calls[start:]
    del trace.calls[start:]
    if len(trace.writes) != writes:
        raise UnknownCall(trace.loc(), function="torch.func of a function with side effects")
    used, numbers = used_ids(calls, leaves)
    examples = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Fake)]
    builder = GraphBuilder(trace)
    for i, example in enumerate(examples):
        builder.nodes[id(example)] = builder.graph.placeholder(f"arg_{i}")
    made = tree_leaves([call.result for call in calls])
    inside = {id(leaf) for leaf in (*made, *examples) if isinstance(leaf, Fake)}
    free: list[Any] = [trace.owned[i] for i in sorted(used - inside)]
    for i, fake in enumerate(free):
        builder.nodes[id(fake)] = builder.graph.placeholder(f"free_{i}")
    if numbers:
        for graph_input, symbol in trace.dynamic.inputs(trace.dynamic.names_in(numbers)):
            builder.symbol_nodes[symbol] = builder.graph.placeholder(symbol)
            free.append(graph_input.symbolic)
    for call in calls:
        builder.add(call)
    builder.graph.output([builder.arg(leaf) for leaf in leaves])
    module = torch.fx.GraphModule(torch.nn.Module(), builder.graph)
    return Inner(module, tuple(free), tuple(leaves), result, any(map(is_random, calls)))


# -- kernels and checkpoints -----------------------------------------------------------------------

@on(run_kernel)
def _run_kernel(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    """kernel.run(*args, grid=grid, warmup=False, **kwargs), which kernel[grid](...) ends in."""
    kernel, *rest = args
    rest_named = {key: value for key, value in kwargs.items() if key not in ("grid", "warmup")}
    grid = kwargs.get("grid", getattr(kernel, "grid", None))
    for value in (unwrapped(kernel), *rest, *rest_named.values()):
        source = None if type(value) in PLAIN or isinstance(value, Fake) else trace.source_of(value)
        if source is not None:
            trace.guard(source, Is(value))
    evaluate = lambda meta: trace.call(grid, [meta], {})
    op, operands = describe_launch(kernel, rest, rest_named, grid, evaluate)
    return call_torch(trace, op, operands, {})


on(torch.library.wrap_triton)(lambda trace, args, kwargs: args[0])  # only torch's own tracing needs a wrapper


def _out_dtype(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    """An op whose result is of a type that holds it: operands are widened first, as in eager."""
    _, op, dtype, *operands = args
    given = {x.dtype for x in operands}
    if op is torch.ops.aten.mm.default and dtype is torch.int32 and given == {torch.int8}:
        if operands[0].is_cuda:
            return trace.call(torch._int_mm, operands, {})
    wide = reduce(torch.promote_types, given, dtype)
    return to_dtype(trace, trace.call(op, [to_dtype(trace, x, wide) for x in operands], kwargs), dtype)


BY_NAME: Final[dict[tuple[str, str], Special]] = {
    ("torch._higher_order_ops.out_dtype", "OutDtypeOperator.__call__"): _out_dtype,
    ("torch._higher_order_ops.wrap", "Wrap.__call__"): (
        lambda trace, args, kwargs: trace.call(args[1], args[2:], kwargs)),
    ("torch._higher_order_ops.flex_attention", "FlexAttentionHOP.__call__"): (
        lambda trace, args, kwargs: trace.call(flex_attention, args[1:], kwargs)),
    **{("torch.fx.experimental.symbolic_shapes", name): lambda trace, args, kwargs: truth(trace, args[0])
       for name in ("expect_true", "guard_or_true", "guard_or_false", "statically_known_true")},
}  # fmt: skip
"""Functions of modules that must not be imported here; known by name when somebody else has."""

_options = "use_reentrant context_fn determinism_check debug preserve_rng_state early_stop"
CHECKPOINT_OPTIONS: Final = _options.split()

_modes: Final = (f"_{kind}TorchDispatchMode" for kind in ("Caching", "Cached"))
SELECTIVE: Final = {nullcontext, *(getattr(torch.utils.checkpoint, mode) for mode in _modes)}


@on(torch.utils.checkpoint.checkpoint)
def _checkpoint(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    """Recomputing does not change results, save where it writes to buffers a second time. The partitioner
    is told of the wish; one that says which ops to save leaves it to the partitioner."""
    rest = {key: value for key, value in kwargs.items() if key not in CHECKPOINT_OPTIONS}
    if {*map(type, kwargs.get("context_fn", tuple)())} - SELECTIVE:
        raise UnknownCall(trace.loc(), function="torch.utils.checkpoint in contexts of the program's own")
    count = lambda: sum(fake._version for fake in trace.input_fakes if not fake.is_inference())
    start, before = len(trace.calls), count()
    result = trace.call(args[0], args[1:], rest)
    if torch.is_grad_enabled() and count() > before:
        raise UnknownCall(trace.loc(), function="torch.utils.checkpoint of what writes to buffers")
    for call in trace.calls[start:] if "context_fn" not in kwargs else ():
        call.loc = call.loc and replace(call.loc, region=start + 1)
    return result


# -- torch.cond and while_loop: the values of tensors decide whether and how often functions run ---

Run = Callable[..., Any]
"""Tensors to a list of tensors, each time by running graphs."""
looks: Any = lambda fakes: [(fake.shape, fake.dtype, fake.device) for fake in fakes]


def run_cond(pred: Any, true_fn: Run, false_fn: Run, operands: Any = ()) -> Any:
    """torch.cond as Python: its own way outside of a compiler is to start torch's."""
    return (true_fn if pred else false_fn)(*operands)


def run_while(cond_fn: Run, body_fn: Run, carried_inputs: Any) -> Any:
    while cond_fn(*carried_inputs):
        carried_inputs = body_fn(*carried_inputs)
    return carried_inputs


AS_PYTHON: Final[dict[str, Run]] = {"cond": run_cond, "while_loop": run_while}


@on(torch.cond)
def call_cond(trace: Trace, args: list[Any], kwargs: dict[str, Any]) -> Any:
    given = {"operands": (), **dict(zip(("pred", "true_fn", "false_fn", "operands"), args)), **kwargs}
    pred, operands = given["pred"], list(given["operands"])
    if not isinstance(pred, Fake):
        return trace.call(given["true_fn" if truth(trace, pred) else "false_fn"], operands, {})
    yes, no = (trace_arm(trace, given[name], operands, "cond") for name in ("true_fn", "false_fn"))
    if looks(yes.examples) != looks(no.examples) or yes.result != no.result:
        raise UnknownCall(trace.loc(), function="torch.cond with branches of different results")
    run: Run = lambda arms, pred, *operands: run_cond(pred, arms[0], arms[1], operands)
    return call_op(trace, "cond", run, [yes, no], [pred, *tree_leaves(operands)])


def call_while(trace: Trace, args: list[Any], kwargs: dict[str, Any]) -> Any:
    names = ("cond_fn", "body_fn", "carried_inputs")
    given = {**dict(zip(names, args)), **kwargs}
    carried = list(given["carried_inputs"])
    asks, does = (trace_arm(trace, given[name], carried, "while_loop") for name in names[:2])
    if looks(does.examples) != looks(tree_leaves(carried)):
        raise UnknownCall(trace.loc(), function="while_loop whose body changes the form of what it carries")
    run: Run = lambda arms, *now: run_while(lambda *now: arms[0](*now)[0], arms[1], now)
    return call_op(trace, "while_loop", run, [asks, does], tree_leaves(carried))


BY_NAME[("torch._higher_order_ops.while_loop", "while_loop")] = call_while
BY_NAME[("torch._higher_order_ops.cond", "CondOp.__call__")] = (  # in which torch's own way ends
    lambda trace, args, kwargs: call_cond(trace, args[1:], kwargs))  # fmt: skip


def trace_arm(trace: Trace, function: Any, operands: list[Any], name: str) -> Inner:
    """A function as a graph of tensors, if it only computes. Where a break is no error, it is compiled on its
    own instead."""
    if not trace.is_whole:
        raise ChosenArm(trace.loc(), name=name)
    before = [(fake, version_of(fake)) for fake in trace.owned.values()]
    inner = trace_function(trace, function, tree_map(lambda leaf: stand_in(trace, leaf, None), operands), {})
    is_plain = all(isinstance(x, Fake) for x in (*tree_leaves(operands), *inner.free, *inner.examples))
    is_writing = any(version_of(fake) != version for fake, version in before)
    if not is_plain or is_writing or inner.is_random:
        what = "a function of more than tensors, or one that changes them or draws random numbers"
        raise UnknownCall(trace.loc(), function=f"{name} of {what}")
    return inner


def call_op(trace: Trace, name: str, run: Run, arms: list[Inner], operands: list[Any]) -> Any:
    """Define the op that runs these graphs as `run` says, and call it. Results look like the last one's."""
    like, one_or_all = arms[-1].examples, lambda parts: parts[0] if len(parts) == 1 else tuple(parts)
    counts = [len(operands), *(len(arm.free) for arm in arms)]

    def real(*given: Any) -> Any:
        rest = iter(given)
        own, *free = [list(itertools.islice(rest, count)) for count in counts]
        made = run([lambda *x, a=arm, f=more: a.module(*x, *f) for arm, more in zip(arms, free)], *own)
        return one_or_all([part.clone(memory_format=torch.contiguous_format) for part in made])

    def backward(context: Any, *grads: Any) -> Any:
        given = [tensor.detach() for tensor in context.saved_tensors]
        places = [i for i, needed in enumerate(context.needs_input_grad) if needed]
        with torch.enable_grad():  # type: ignore[no-untyped-call]
            made = real(*[tensor.requires_grad_(i in places) for i, tensor in enumerate(given)])
        outs = [made] if len(like) == 1 else made
        pairs = [(out, grad) for out, grad in zip(outs, grads) if out.requires_grad and grad is not None]
        found = {i: torch.zeros_like(given[i]) for i in places}
        if pairs:
            differentiated, tangents = zip(*pairs)
            inputs = [given[i] for i in places]
            grads = torch.autograd.grad(differentiated, inputs, tangents, materialize_grads=True)
            found = dict(zip(places, grads))
        return tuple(found.get(i) for i in range(len(given)))

    tensors = [*operands, *(fake for arm in arms for fake in arm.free)]
    takes = ", ".join(f"Tensor t{i}" for i in range(len(tensors)))
    gives = "Tensor" if len(like) == 1 else f"({', '.join('Tensor' for _ in like)})"
    unique = f"dovetail::{name}_{uuid.uuid4().hex}"
    op: Any = torch.library.custom_op(unique, real, mutates_args=(), schema=f"({takes}) -> {gives}")
    empty = lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device)
    op.register_fake(lambda *_: one_or_all([*map(empty, like)]))
    save = lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    op.register_autograd(backward, setup_context=save)
    made = call_torch(trace, op._opoverload, tensors, {})
    return tree_unflatten([made] if len(like) == 1 else list(made), arms[-1].result)
