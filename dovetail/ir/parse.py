"""Read a printed Graph back: the inverse of `show_graph`.

    def forward(x: f32[8, 64]):
        y = prims.exp(x)          # f32[8, 64]  model.py:3
        return (y,)

Used by DOVETAIL_OVERRIDE (edit a dumped stage and feed it back) and by tests. Symbols in shapes are
looked up by name in `known`, because their ranges are not part of the text.
"""
from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from dovetail.ir.expr import Expr, as_expr, eq, le, lt, maximum, minimum, sym, symbols
from dovetail.ir.graph import Arg, Graph, GraphBuilder, Node, nodes_in
from dovetail.ir.types import BY_NAME, CPU, Device, ScalarType, TensorType, Type, contiguous_stride

_BINARY: Final[dict[type, Callable[[Expr, Expr], Expr]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_COMPARE: Final[dict[type, Callable[[Expr, Expr], Expr]]] = {ast.Eq: eq, ast.Lt: lt, ast.LtE: le}
_CALLS: Final[dict[str, Callable[..., Expr]]] = {"min": minimum, "max": maximum}
_TENSOR: Final = re.compile(r"^(\w+)\[([^\]]*)\](?:\{([^}]*)\})?(?: (\w+)(?::(\d+))?)?$")
_LINE: Final = re.compile(r"^\s+(\w+) = ([\w.]+)\((.*)\)\s+# (.*)$")


class _Reader:
    """Evaluates argument text in the scope of what was defined so far."""

    def __init__(self, known: Mapping[str, Expr]) -> None:
        self.nodes: dict[str, Node] = {}
        self.known = dict(known)

    def arg(self, tree: ast.expr) -> Arg:
        if isinstance(tree, ast.Tuple):
            return tuple(self.arg(item) for item in tree.elts)
        if isinstance(tree, ast.Constant):
            return tree.value  # type: ignore[return-value]
        if isinstance(tree, ast.Name):
            return self.name(tree.id)
        if isinstance(tree, ast.UnaryOp):
            value = self.arg(tree.operand)
            return -value  # type: ignore[operator, return-value]
        if isinstance(tree, ast.BinOp):
            left, right = self.arg(tree.left), self.arg(tree.right)
            return _BINARY[type(tree.op)](left, right)  # type: ignore[arg-type]
        if isinstance(tree, ast.Compare):
            left, right = self.arg(tree.left), self.arg(tree.comparators[0])
            return _COMPARE[type(tree.ops[0])](left, right)  # type: ignore[arg-type]
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
            values = [self.arg(item) for item in tree.args]
            if tree.func.id == "device":
                kind, _, index = str(values[0]).partition(":")
                return Device(kind, int(index) if index else None)
            return _CALLS[tree.func.id](*values)
        raise ValueError(f"cannot read {ast.unparse(tree)}")

    def name(self, text: str) -> Arg:
        if text in self.nodes:
            return self.nodes[text]
        if text in ("inf", "nan"):
            return float(text)
        if text in self.known:
            return self.known[text]
        if text in BY_NAME:
            return BY_NAME[text]
        return self.known.setdefault(text, sym(text))

    def dims(self, text: str) -> tuple[Expr, ...]:
        if not text.strip():
            return ()
        tree = ast.parse(f"({text},)", mode="eval").body
        return tuple(as_expr(value) for value in self.arg(tree))  # type: ignore[union-attr, arg-type]

    def type(self, text: str) -> Type:
        text = text.strip()
        if text == "None":
            return None
        if text.startswith("("):
            return tuple(self.type(part) for part in _split_types(text[1:-1]))
        if found := _TENSOR.match(text):
            dtype, shape, stride, kind, index = found.groups()
            sizes = self.dims(shape)
            device = Device(kind, int(index) if index else None) if kind else CPU
            strides = self.dims(stride) if stride is not None else contiguous_stride(sizes)
            return TensorType(sizes, strides, BY_NAME[dtype], device)
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


def graph_symbols(graph: Graph) -> dict[str, Expr]:
    """Every shape symbol of a graph, by name."""
    found: dict[str, Expr] = {}
    for node in (*graph.inputs, *graph.nodes):
        for part in node.type if isinstance(node.type, tuple) else (node.type,):
            exprs = (*part.shape, *part.stride) if isinstance(part, TensorType) else ()
            found.update({s.name: s for expr in exprs for s in symbols(expr)})
    return found


def parse_graph(text: str, original: Graph | None = None) -> Graph:
    """The graph that `text` prints. With `original`, symbols and user locations are taken from it."""
    reader = _Reader(graph_symbols(original) if original else {})
    locations = {n.name: n.loc for n in (*original.inputs, *original.nodes)} if original else {}
    lines = [line for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    head = re.match(r"def (\w+)\((.*)\):$", lines[0])
    if head is None:
        raise ValueError(f"not a graph: {lines[0]}")
    builder = GraphBuilder(head.group(1))
    for parameter in _split_types(head.group(2)):
        name, _, type_text = parameter.strip().partition(": ")
        reader.nodes[name] = builder.input(name, reader.type(type_text), locations.get(name))
    for line in lines[1:-1]:
        found = _LINE.match(line)
        if found is None:
            raise ValueError(f"not a node: {line}")
        name, op, args, comment = found.groups()
        call = ast.parse(f"f({args})", mode="eval").body
        assert isinstance(call, ast.Call)
        reader.nodes[name] = builder.call(
            op,
            [reader.arg(item) for item in call.args],
            reader.type(comment.split("  ")[0]),
            [(str(keyword.arg), reader.arg(keyword.value)) for keyword in call.keywords],
            name,
            locations.get(name),
        )
    outputs = reader.arg(ast.parse(lines[-1].strip().removeprefix("return "), mode="eval").body)
    made = builder.finish(outputs if isinstance(outputs, tuple) else (outputs,))
    graph = replace(made, updates=original.updates) if original else made
    assert all(node in reader.nodes.values() for node in nodes_in(graph.outputs))
    return graph
