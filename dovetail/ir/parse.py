"""Read a printed Graph back: the inverse of `show_graph`.

    def forward(x: f32[8, 64]):
        y = prims.exp(x)          # f32[8, 64]  model.py:3
        return (y,)

Used by DOVETAIL_OVERRIDE (edit a dumped stage and feed it back) and by tests. Symbols in shapes are
looked up by name in `known`, because their ranges are not part of the text.
"""
from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from dovetail.ir.expr import Expr, as_expr, maximum, minimum, sym, symbols
from dovetail.ir.graph import Graph, GraphBuilder, exprs_in, nodes_in
from dovetail.ir.types import BY_NAME, CPU, Device, ScalarType, TensorType, Type, contiguous_stride

_TENSOR: Final = re.compile(r"^(\w+)\[([^\]]*)\](?:\{([^}]*)\})?(?: (\w+(?::\d+)?))?$")
_LINE: Final = re.compile(r"^\s+(\w+) = ([\w.]+)\((.*)\)\s+# (.*)$")
_FUNCTION: Final = re.compile(r"\b(min|max|device|given)\(")


def _device(text: str) -> Device:
    kind, _, index = text.partition(":")
    return Device(kind, int(index) if index else None)


_FUNCTIONS: Final[dict[str, Callable[..., object]]] = {
    "function_min": minimum, "function_max": maximum, "function_device": _device,
    "function_given": lambda *args, **kwargs: (args, kwargs.items()),
}  # fmt: skip


class _Scope(dict[str, Any]):
    """What names in the text stand for; one that is not known is a symbol. A graph's text is Python's, so
    Python reads it."""

    def __missing__(self, name: str) -> Expr:
        return self.setdefault(name, sym(name))  # type: ignore[no-any-return]

    def read(self, text: str) -> Any:
        """The value of an expression; a node may be called max, too."""
        return eval(_FUNCTION.sub(r"function_\1(", text), {"__builtins__": {}}, self)

    def dims(self, text: str) -> tuple[Expr, ...]:
        return tuple(map(as_expr, self.read(f"({text},)"))) if text.strip() else ()

    def type(self, text: str) -> Type:
        text = text.strip()
        if text == "None":
            return None
        if text.startswith("("):
            return tuple(self.type(part) for part in _split_types(text[1:-1]))
        if found := _TENSOR.match(text):
            dtype, shape, stride, device = found.groups()
            sizes = self.dims(shape)
            strides = self.dims(stride) if stride is not None else contiguous_stride(sizes)
            return TensorType(sizes, strides, BY_NAME[dtype], _device(device) if device else CPU)
        name, _, expr = text.partition("(")
        return ScalarType(BY_NAME[name], self.dims(expr[:-1])[0] if expr else None)


def _split_types(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for position, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]] if text[start:].strip() else parts


def parse_graph(text: str, original: Graph | None = None) -> Graph:
    """The graph that `text` prints. With `original`, symbols and user locations are taken from it."""
    before = (*original.inputs, *original.nodes) if original else ()
    known = {s.name: s for node in before for expr in exprs_in(node.type) for s in symbols(expr)}
    scope = _Scope({**BY_NAME, **known, **_FUNCTIONS, "inf": float("inf"), "nan": float("nan")})
    locations = {node.name: node.loc for node in before}
    lines = [line for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    head = re.match(r"def (\w+)\((.*)\):$", lines[0])
    if head is None:
        raise ValueError(f"not a graph: {lines[0]}")
    builder = GraphBuilder(head.group(1))
    for parameter in _split_types(head.group(2)):
        name, _, type_text = parameter.strip().partition(": ")
        scope[name] = builder.input(name, scope.type(type_text), locations.get(name))
    for line in lines[1:-1]:
        found = _LINE.match(line)
        if found is None:
            raise ValueError(f"not a node: {line}")
        name, op, given, comment = found.groups()
        args, kwargs = scope.read(f"given({given})")
        type = scope.type(comment.split("  ")[0])
        scope[name] = builder.call(op, args, type, kwargs, name, locations.get(name))
    outputs = scope.read(lines[-1].strip().removeprefix("return "))
    made = builder.finish(outputs if isinstance(outputs, tuple) else (outputs,))
    graph = replace(made, updates=original.updates) if original else made
    assert all(node in scope.values() for node in nodes_in(graph.outputs))
    return graph
