"""Graph to graph: cleaning and rewriting of prims. `optimize(graph) -> Graph` runs the passes;
`freeze(graph, steady) -> Frozen` comes before it where weights seldom change."""
from __future__ import annotations

from dovetail.ir.graph import Graph
from dovetail.passes.clean import drop_dead, merge_equal, reuse
from dovetail.passes.freeze import Frozen, freeze
from dovetail.passes.layout import channels_last_where_it_pays
from dovetail.passes.products import alone, join_rows, join_sums, open_products, pad_products
from dovetail.passes.split import split_reductions


def optimize(graph: Graph) -> Graph:
    for run in (drop_dead, merge_equal, drop_dead):
        graph = run(graph)
    joined = join_rows(pad_products(join_sums(graph)))
    return split_reductions(graph if joined is graph else drop_dead(merge_equal(joined)))
