"""Shape symbols, what is assumed about them, and torch's symbolic numbers over them."""
from dovetail.sym.node import Node, hint_of, make_symfloat, make_symint
from dovetail.sym.real import Real, evaluate_real, show_real
from dovetail.sym.shapes import Assumption, FloatSymbol, Shapes, Symbol

__all__ = [
    "Assumption", "FloatSymbol", "Node", "Real", "Shapes", "Symbol", "evaluate_real", "hint_of",
    "make_symfloat", "make_symint", "show_real",
]  # fmt: skip
