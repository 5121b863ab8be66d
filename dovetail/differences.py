"""Find the first op whose compiled result differs from eager's, and say which is nearer the truth.

    print(dovetail.compare(model)(x))

    graph_0: 14 ops, 11 equal to eager bit for bit
    first to differ: gelu = torch._C._nn.gelu, model.py:31
        differs from eager by 3.1e-04; error against fp64: eager 2.9e-04, compiled 4.0e-05

Each captured graph is compiled once more with every intermediate value as an output, and run three
times on the same inputs and seed: compiled, in eager, and in eager with all floats as fp64.
"""
from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dovetail.compile import compile_graph
from dovetail.front import compile
from dovetail.options import make_options
from dovetail.util.loc import Loc
from dovetail.util.noun import Noun


class Difference(Noun):
    """One value of the program. Errors are largest absolute ones against fp64; None where fp64 has no say."""

    name: str
    op: str
    loc: Loc | None
    is_equal: bool
    is_close: bool
    by: float
    eager_error: float | None
    compiled_error: float | None

    def __str__(self) -> str:
        where = f", {self.loc}" if self.loc else ""
        text = f"{self.name} = {self.op}{where}\n    differs from eager by {self.by:.1e}"
        if self.eager_error is None or self.compiled_error is None:
            return text
        nearer = "compiled" if self.compiled_error <= self.eager_error else "eager"
        errors = f"eager {self.eager_error:.1e}, compiled {self.compiled_error:.1e}"
        return f"{text}; error against fp64: {errors} ({nearer} is nearer)"


class Comparison(Noun):
    """All values of all graphs, in the order of the program."""

    graphs: tuple[tuple[Difference, ...], ...]

    @property
    def first(self) -> Difference | None:
        """The first value that is further from eager than its type's rounding explains."""
        return next((item for graph in self.graphs for item in graph if not item.is_close), None)

    @property
    def worst(self) -> Difference | None:
        values = [item for graph in self.graphs for item in graph]
        return max(values, key=lambda item: item.by, default=None)

    def __str__(self) -> str:
        lines = []
        for number, graph in enumerate(self.graphs):
            equal = sum(item.is_equal for item in graph)
            lines.append(f"graph_{number}: {len(graph)} ops, {equal} equal to eager bit for bit")
        if self.first is not None:
            lines.append(f"first to differ: {self.first}")
        elif self.worst is not None and self.worst.by:
            lines.append(f"all within rounding of eager; largest difference: {self.worst}")
        else:
            lines.append("all equal to eager")
        return "\n".join(lines)


def copy_of(value: Any) -> torch.Tensor | None:
    return value.detach().clone() if isinstance(value, torch.Tensor) else None


def expose(module: GraphModule) -> tuple[GraphModule, list[str]]:
    """The same graph, returning copies of its values, taken before anything changes them, and their names."""
    graph = Graph()
    copies: dict[str, Node] = {}
    renamed: dict[Node, Node] = {}
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        renamed[node] = graph.node_copy(node, lambda old: renamed[old])
        if node.op not in ("placeholder", "get_attr"):
            copies[node.name] = graph.call_function(copy_of, (renamed[node],))
    graph.output(tuple(copies.values()))
    return GraphModule(module, graph), list(copies)


def widen(value: Any) -> Any:
    """Tensors with floats as fp64."""
    is_wider = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return value.to(torch.promote_types(value.dtype, torch.float64)) if is_wider else value


def run(function: Callable[..., Any], inputs: Sequence[Any]) -> Sequence[torch.Tensor | None]:
    torch.manual_seed(0)
    with torch.no_grad():
        return function(*copies_of(inputs))  # type: ignore[no-any-return]


def copies_of(inputs: Sequence[Any]) -> list[Any]:
    return [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in inputs]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest absolute difference; equal infinities and NaNs differ by nothing."""
    if a.shape != b.shape or a.numel() == 0:
        return float("inf") if a.shape != b.shape else 0.0
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    left, right = a.to(wide), b.to(wide)
    same = (left == right) | (left.isnan() & right.isnan())
    return float(torch.where(same, torch.zeros_like(left), left - right).abs().max())


def is_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    try:
        torch.testing.assert_close(a, b, equal_nan=True)
    except AssertionError:
        return False
    return True


def compare_graph(
    module: GraphModule, inputs: Sequence[Any], settings: dict[str, Any]
) -> tuple[Difference, ...]:
    exposed, names = expose(module)
    eager = run(exposed, inputs)
    try:
        exact = run(copy.deepcopy(exposed).double(), [widen(value) for value in inputs])
    except (RuntimeError, TypeError, ValueError):  # some op insists on another type
        exact = [None] * len(names)
    options = make_options(settings.get("mode"), settings.get("options"))
    with torch.no_grad():
        ours = compile_graph(exposed, copies_of(inputs), options)
    values = dict(zip(names, zip(run(ours, inputs), eager, exact), strict=True))
    rows = []
    for node in module.graph.nodes:
        a, b, true = values.get(node.name, (None, None, None))
        if a is not None and b is not None:
            true = true if a.is_floating_point() else None
            away = [None if true is None else distance(x, true) for x in (b, a)]
            same = torch.equal(a, b), is_close(a, b), distance(a, b)
            op = f"{getattr(node.target, '__name__', node.target)}"
            rows.append(Difference(node.name, op, node.meta.get("loc"), *same, *away))
    return tuple(rows)


def compare(model: Callable[..., Any], **settings: Any) -> Callable[..., Comparison]:
    """`compare(f)(*args)` runs f on copies of the arguments; the model itself is copied too."""

    def compared(*args: Any, **kwargs: Any) -> Comparison:
        graphs: list[tuple[GraphModule, list[Any]]] = []

        def keep(module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            graphs.append((module, copies_of(inputs)))
            return module.forward

        target = copy.deepcopy(model) if isinstance(model, torch.nn.Module) else model
        compile(target, **{**settings, "backend": keep})(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        return Comparison(tuple(compare_graph(module, inputs, settings) for module, inputs in graphs))

    return compared
