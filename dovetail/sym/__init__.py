"""Shape symbols, what is assumed about them, and torch's symbolic numbers over them."""
from dovetail.sym.node import Node, hint_of, make_symfloat, make_symint
from dovetail.sym.real import Real, iter_leaves
from dovetail.sym.shapes import Assumption, FloatSymbol, Shapes, Symbol
