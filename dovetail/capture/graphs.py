"""Recorded calls to a torch.fx.GraphModule.

    Trace, the Fakes that must come out -> GraphModule, its inputs

Inputs that no call uses and no output needs are left out (their guards stay).
"""
from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.amp.autocast_mode import autocast
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_aggregate

from dovetail.capture.operations import SYMBOLIC
from dovetail.capture.trace import Call, Trace, leaves
from dovetail.errors import UnsupportedValue
from dovetail.fake.tensor import Fake
from dovetail.ir.capture import GraphInput
from dovetail.util.noun import replace


class GraphBuilder:
    def __init__(self, trace: Trace) -> None:
        self.trace, self.graph = trace, torch.fx.Graph()
        self.nodes: dict[int, torch.fx.Node] = {}
        self.parts: dict[int, tuple[torch.fx.Node, tuple[Any, ...]]] = {}
        self.symbol_nodes: dict[str, torch.fx.Node] = {}
        self.folded: dict[Any, Any] = {}

    def build(self, outputs: Sequence[Any], name: str) -> tuple[torch.fx.GraphModule, tuple[GraphInput, ...]]:
        used, numbers = used_ids(self.trace.calls, outputs)
        inputs = []
        policy = self.trace.dynamic
        if numbers:
            plain = [number for number in numbers if not policy.is_computed(number)]
            for graph_input, symbol in policy.inputs(policy.names_in(plain)):
                self.symbol_nodes[symbol] = self.graph.placeholder(symbol)
                inputs.append(graph_input)
        for graph_input, fake in zip(self.trace.inputs, self.trace.input_fakes):
            if id(fake) in used:
                node = self.graph.placeholder(placeholder_name(graph_input))
                node.meta["loc"] = self.trace.frame.loc
                self.nodes[id(fake)] = node
                inputs.append(replace(graph_input, name=node.name))
        for graph_input, form in policy.computed(numbers) if numbers else ():
            self.symbol_nodes[form] = self.graph.placeholder(graph_input.name)
            inputs.append(graph_input)
        for call in self.trace.calls:
            self.add(call)
        self.graph.output(map_aggregate(tuple(outputs), self.arg))
        module = _LazyGraphModule(torch.nn.Module(), self.graph, class_name=name)
        module.meta["is_atomic"] = self.trace.is_atomic
        return module, tuple(inputs)

    def add(self, call: Call) -> None:
        args, kwargs = map_aggregate((tuple(call.args), call.kwargs), self.arg)
        node = self.graph.create_node(call.kind, call.target, (), kwargs)
        node.args = args  # given before, torch looks for symbolic numbers in them
        node.meta["loc"] = call.loc
        lines = [f'  File "{loc.file}", line {loc.line}, in {loc.function}' for loc in call.stack]
        node.meta["stack_trace"] = "\n".join(lines)
        if call.target == "detach":  # x.data = y makes x another name of y
            for known in (self.nodes, self.parts):
                known.pop(id(call.result), None)
        self.assign(call.result, node, ())

    def assign(self, value: Any, node: torch.fx.Node, path: tuple[Any, ...]) -> None:
        """Remember which node computes each tensor of a result."""
        if isinstance(value, (Fake, autocast)) or "InferenceMode" in type(value).__name__:
            if id(value) not in self.nodes:
                self.parts.setdefault(id(value), (node, path))
        elif isinstance(value, (tuple, list, dict)):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                self.assign(item, node, (*path, key))

    def arg(self, value: Any) -> Any:
        kind = type(value)
        if kind is Fake or id(value) in self.parts:
            return self.node_of(value)
        return self.trace.dynamic.node(self, value) if kind in SYMBOLIC else value

    def node_of(self, fake: Any) -> torch.fx.Node:
        node = self.nodes.get(id(fake))
        if node is None:
            if id(fake) not in self.parts:
                detail = "a tensor made outside of the graph"
                raise UnsupportedValue(self.trace.loc(), type="Tensor", detail=detail)
            node, path = self.parts[id(fake)]
            for key in path:
                node = self.graph.call_function(operator.getitem, (node, key))
            self.nodes[id(fake)] = node
        return node


def used_ids(calls: Sequence[Call], outputs: Sequence[Any]) -> tuple[set[int], list[Any]]:
    """Identities of the Fakes in arguments and outputs, and the symbolic numbers there."""
    used = list(leaves([[(call.args, call.kwargs) for call in calls], list(outputs)]))
    return {id(x) for x in used if isinstance(x, Fake)}, [x for x in used if isinstance(x, SYMBOLIC)]


def placeholder_name(graph_input: GraphInput) -> str:
    """The user's name for an input: self.fc.weight becomes self_fc_weight."""
    name = re.sub(r"[\W_]+", "_", str(graph_input.source)).strip("_")
    return name if name and not name[0].isdigit() else f"arg_{name}"
