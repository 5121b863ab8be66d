"""Graph to graph: cleaning and rewriting of prims. `optimize(graph) -> Graph` runs the list;
`freeze(graph, steady) -> Frozen` comes before it where weights seldom change."""
from dovetail.passes.clean import reuse
from dovetail.passes.freeze import Frozen, freeze
from dovetail.passes.layout import channels_last_in_training
from dovetail.passes.optimize import PASSES, optimize

__all__ = ["PASSES", "Frozen", "channels_last_in_training", "freeze", "optimize", "reuse"]
