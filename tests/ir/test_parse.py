"""A printed graph reads back as the same graph."""
import copy
import pickle
from dataclasses import replace

from dovetail.ir.expr import sym
from dovetail.ir.graph import GraphBuilder, show_graph
from dovetail.ir.parse import parse_graph
from dovetail.ir.types import BF16, F32, I64, Device, TensorType, as_expr, tensor_type
from dovetail.util.loc import Loc


def make_graph():
    s0 = sym("s0", 2)
    b = GraphBuilder("forward")
    x = b.input("x", tensor_type((s0, 64), F32))
    w = b.input("w", TensorType((as_expr(64), as_expr(8)), (as_expr(1), as_expr(64)), BF16, Device("cuda", 0)))
    y = b.call("prims.sum", (x, (1,)), tensor_type((s0,), F32), loc=Loc("model.py", 3))
    z = b.call("aten.topk.default", (y, 1, -1, True), (tensor_type((1,), F32), tensor_type((1,), I64)))
    v = b.get(z, 0)
    u = b.call("aten.full.default", ((s0 * 2 + 1, s0 // 4), float("-inf")), tensor_type((s0 * 2 + 1, s0 // 4), F32),
               [("dtype", F32), ("device", Device("cuda", 0)), ("pin", None)])
    return b.finish((v, u, None, s0, 3, w))


def test_graph_text_round_trip():
    graph = make_graph()
    again = parse_graph(show_graph(graph), graph)
    assert show_graph(again) == show_graph(graph)
    assert again.nodes[0].type.shape[0] is graph.nodes[0].type.shape[0]


def test_equal_types_are_one() -> None:
    """However they are made; what another process has written, too."""
    made = TensorType((as_expr(8),), (as_expr(1),), BF16, Device("cuda", 0))
    other = replace(replace(made, dtype=F32), dtype=BF16, device=Device(index=0, kind="cuda"))
    assert other is made and pickle.loads(pickle.dumps(made)) is made and copy.deepcopy(made) is made
    assert replace(made, device=Device("cuda")) is not made
