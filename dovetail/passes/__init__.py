"""Graph to graph: cleaning and rewriting of prims. `optimize(graph) -> Graph` runs the list."""
from dovetail.passes.optimize import PASSES, optimize

__all__ = ["PASSES", "optimize"]
