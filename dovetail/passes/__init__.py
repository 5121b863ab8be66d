"""Graph to graph: cleaning and rewriting of prims. `optimize(graph) -> Graph` runs the list of passes;
`freeze(graph, steady) -> Frozen` comes before it where weights seldom change."""
from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dovetail.ir.graph import Graph
from dovetail.passes.clean import drop_dead, merge_equal, reuse, simplify
from dovetail.passes.freeze import Frozen, freeze
from dovetail.passes.layout import channels_last_in_training
from dovetail.passes.pad import pad_products
from dovetail.passes.products import alone, open_products
from dovetail.passes.rows import join_rows
from dovetail.passes.split import split_reductions

__all__ = [
    "PASSES", "Frozen", "alone", "channels_last_in_training", "freeze", "open_products", "optimize", "reuse",
]  # fmt: skip

PASSES: Final[tuple[Callable[[Graph], Graph], ...]] = (
    drop_dead, simplify, merge_equal, drop_dead, pad_products, join_rows, merge_equal, drop_dead,
    split_reductions,
)  # fmt: skip


def optimize(graph: Graph) -> Graph:
    for run in PASSES:
        graph = run(graph)
    return graph
