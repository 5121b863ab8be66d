"""torch.func.grad and vmap of captured functions, and torch.cond.

    torch.func.vmap(lambda row: row @ w)(x)

    the function is interpreted once, on one example, into a graph of its own: (row, w) -> row @ w
    the outer graph gets one node that applies torch.func.vmap to that graph: transform(x, w)

Tensors that the function reads from around it become inputs of its graph. torch.cond breaks the graph and
runs the arm that is chosen, compiled on its own; with fullgraph=True it computes both arms, which it requires
to be free of side effects, and chooses by torch.where.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, Final

import torch

from dovetail.capture.builtins import on
from dovetail.capture.graphs import GraphBuilder, used_ids
from dovetail.capture.operations import truth
from dovetail.capture.origins import wrap
from dovetail.capture.torch_calls import perform
from dovetail.capture.trace import Trace, freeze
from dovetail.errors import ChosenArm, UnknownCall
from dovetail.fake.tensor import Fake
from dovetail.ir.source import ClosureOf

UNCHANGED: Final = object()
FILE: Final = "torch/_functorch/apis.py"


class Transformed:
    """The target of a transform's node: the transform of a graph, whose last inputs come from outside."""

    def __init__(self, name: str, make: Callable[..., Any], module: torch.fx.GraphModule, count: int) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "dovetail"
        self.make, self.module, self.count = make, module, count

    def __call__(self, *inputs: Any) -> Any:
        free = inputs[self.count :]
        return self.make(lambda *args: self.module(*args, *free))(*inputs[: self.count])


def call_transform(trace: Trace, fn: FunctionType, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """If fn is what torch.func.grad or vmap returned: its call as one node. Else UNCHANGED."""
    if not fn.__code__.co_filename.endswith(FILE):
        return UNCHANGED
    rule = RULES.get(fn.__code__.co_qualname)
    if rule is None:
        return UNCHANGED
    if kwargs or not all(isinstance(arg, Fake) for arg in args):
        raise UnknownCall(trace.loc(), function=f"{fn.__qualname__} with arguments that are not tensors")
    settings = closure_of(trace, fn)
    make, examples = rule(trace, settings, args)
    module, free = trace_function(trace, settings["func"], examples, len(args))
    target = Transformed(fn.__code__.co_qualname.split(".")[0], make, module, len(args))
    inputs = [*args, *free]
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


def _grad(trace: Trace, settings: dict[str, Any], args: list[Any]) -> tuple[Any, list[Any]]:
    options = {"argnums": settings["argnums"], "has_aux": settings["has_aux"]}
    return partial(torch.func.grad, **options), [stand_in(trace, arg) for arg in args]


def _grad_and_value(trace: Trace, settings: dict[str, Any], args: list[Any]) -> tuple[Any, list[Any]]:
    options = {"argnums": settings["argnums"], "has_aux": settings["has_aux"]}
    return partial(torch.func.grad_and_value, **options), [stand_in(trace, arg) for arg in args]


def _vmap(trace: Trace, settings: dict[str, Any], args: list[Any]) -> tuple[Any, list[Any]]:
    names = ("in_dims", "out_dims", "randomness", "chunk_size")
    options = {name: settings[name] for name in names if name in settings}
    dims = options["in_dims"]
    dims = [dims] * len(args) if isinstance(dims, int) else list(dims)
    examples = [stand_in(trace, arg if dim is None else arg.select(dim, 0)) for arg, dim in zip(args, dims)]
    return partial(torch.func.vmap, **options), examples


RULES: Final[dict[str, Callable[[Trace, dict[str, Any], list[Any]], tuple[Any, list[Any]]]]] = {
    "grad.<locals>.wrapper": _grad,
    "grad_and_value.<locals>.wrapper": _grad_and_value,
    "vmap.<locals>.wrapped": _vmap,
}


def stand_in(trace: Trace, fake: Any) -> Any:
    """Another Fake like this one: the inner graph's own input."""
    made = fake.detach().requires_grad_(fake.requires_grad and fake.is_floating_point())
    trace.owned[id(made)] = made
    return made


def trace_function(
    trace: Trace, function: Any, examples: Sequence[Any], count: int
) -> tuple[torch.fx.GraphModule, list[Any]]:
    """Interpret a function into a graph of its own; also the outer tensors it needs, as further inputs."""
    start, writes = len(trace.calls), len(trace.writes)
    result = freeze(trace, trace.call(function, list(examples), {}))
    calls = trace.calls[start:]
    del trace.calls[start:]
    if len(trace.writes) != writes:
        raise UnknownCall(trace.loc(), function="torch.func of a function with side effects")
    used, numbers = used_ids(calls, [result])
    if numbers:
        raise UnknownCall(trace.loc(), function="torch.func of a function of symbolic sizes")
    builder = GraphBuilder(trace)
    for i, example in enumerate(examples):
        builder.nodes[id(example)] = builder.graph.placeholder(f"arg_{i}")
    inside = {id(fake) for call in calls for fake in fakes_in(call.result)} | {id(e) for e in examples}
    free = [trace.owned[i] for i in sorted(used - inside)]
    for i, fake in enumerate(free):
        builder.nodes[id(fake)] = builder.graph.placeholder(f"free_{i}")
    for call in calls:
        builder.add(call)
    builder.graph.output(builder.arg(result))
    return torch.fx.GraphModule(torch.nn.Module(), builder.graph), free


def fakes_in(value: Any) -> list[Any]:
    if isinstance(value, Fake):
        return [value]
    if isinstance(value, (list, tuple)):
        return [fake for item in value for fake in fakes_in(item)]
    return []


# -- torch.cond --------------------------------------------------------------------------------------


@on(torch.cond)
def call_cond(trace: Trace, args: list[Any], kwargs: dict[str, Any]) -> Any:
    names = ("pred", "true_fn", "false_fn", "operands")
    given = {"operands": (), **dict(zip(names, args)), **kwargs}
    pred, operands = given["pred"], list(given["operands"])
    if not isinstance(pred, Fake):
        return trace.call(given["true_fn" if truth(trace, pred) else "false_fn"], operands, {})
    if not trace.is_whole:
        raise ChosenArm(trace.loc())
    yes = trace.call(given["true_fn"], operands, {})
    no = trace.call(given["false_fn"], operands, {})
    return choose(trace, pred, yes, no)


def choose(trace: Trace, pred: Any, yes: Any, no: Any) -> Any:
    """torch.where through a result of lists, tuples and dicts."""
    if isinstance(yes, Fake) and isinstance(no, Fake) and yes.shape == no.shape and yes.dtype == no.dtype:
        return trace.call(torch.where, [pred, yes, no], {})
    if type(yes) is type(no) and isinstance(yes, (list, tuple)) and len(yes) == len(no):
        return type(yes)([choose(trace, pred, a, b) for a, b in zip(yes, no)])
    if isinstance(yes, dict) and isinstance(no, dict) and list(yes) == list(no):
        return {key: choose(trace, pred, yes[key], no[key]) for key in yes}
    if type(yes) is type(no) and not isinstance(yes, Fake) and yes == no:
        return yes
    raise UnknownCall(trace.loc(), function="torch.cond with branches of different results")
