"""torch.func's transforms (grad, vmap, jacrev, jvp...) of captured functions.

    torch.func.vmap(lambda row: row @ w)(x)

    the function is interpreted once, on one example, into a graph of its own: (row, w) -> row @ w
    the outer graph gets one node that applies torch.func.vmap to that graph: transform(x, w)

Arguments may be trees of tensors and constants, as torch.func allows them. Tensors and symbolic sizes that
the function reads from around it become inputs of its graph.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import CellType, FunctionType
from typing import Any, Final

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten
from torch.utils._pytree import _broadcast_to_and_flatten as broadcast_tree

from dovetail.capture.autograd import changes, copy_of
from dovetail.capture.builtins import on
from dovetail.capture.graphs import GraphBuilder, used_ids
from dovetail.capture.origins import wrap
from dovetail.capture.torch_calls import perform
from dovetail.capture.trace import Trace, freeze, is_random
from dovetail.errors import UnknownCall
from dovetail.fake.calls import with_numbers
from dovetail.fake.tensor import Fake
from dovetail.ir.source import ClosureOf
from dovetail.util.noun import Noun

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
        return with_numbers(self.run, inputs, {})

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
            found[name] = wrap(trace, cell.cell_contents, ClosureOf(source, i))
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
