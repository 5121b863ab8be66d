"""Graphs of prims to loop nests and library calls: `lower(graph) -> Loops`."""
from dovetail.lower.graph import lower
