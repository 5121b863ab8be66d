"""Cleaning: what goes, what must stay."""
from __future__ import annotations

from dataclasses import replace

from dovetail.ir.graph import Graph, GraphBuilder
from dovetail.ir.types import BF16, BOOL, F16, F32, F64, I64, Device, ScalarType, TensorType, tensor_type
from dovetail.ops.decompose import decompose
from dovetail.passes import optimize
from dovetail.passes.clean import drop_dead

X = tensor_type((8, 4), F32)


def ops(graph: Graph) -> list[str]:
    return [node.op.split(".")[1] for node in optimize(graph).nodes]


def test_dead_code_goes_but_random_stays():
    b = GraphBuilder()
    x = b.input("x", X)
    b.call("prims.sin", (x,), X)
    b.call("aten.rand_like.default", (x,), X)
    assert ops(b.finish((b.call("prims.cos", (x,), X),))) == ["rand_like", "cos"]


def test_equal_work_is_done_once():
    b = GraphBuilder()
    x = b.input("x", X)
    first, second = b.call("prims.sin", (x,), X), b.call("prims.sin", (x,), X)
    total = b.call("prims.add", (first, second), X)
    assert ops(b.finish((total,))) == ["sin", "add"]


def test_attention_is_done_once_unless_it_drops_out():
    kind = tensor_type((2, 4, 8, 16), F32, Device("cuda"))
    statistics = tensor_type((2, 4, 8), F32, Device("cuda"))
    for chance, times in ((0.0, 1), (0.5, 2)):
        b = GraphBuilder()
        x = b.input("x", kind)
        op, given = "aten._scaled_dot_product_efficient_attention.default", (x, x, x, None, False, chance)
        made = [b.call(op, given, (kind, statistics, None, None)) for _ in range(2)]
        total = b.call("prims.add", tuple(b.get(node, 0) for node in made), kind)
        assert [node.op for node in optimize(b.finish((total,))).nodes].count(op) == times


def test_constants_of_different_type_or_sign_differ():
    b = GraphBuilder()
    x = b.input("x", X)
    parts = [b.call("prims.mul", (x, value), X) for value in (0.0, -0.0)]
    assert ops(b.finish((b.call("prims.div", tuple(parts), X),))) == ["mul", "mul", "div"]


def test_views_merge():
    b = GraphBuilder()
    x = b.input("x", X)
    y = b.call("prims.reshape", (x, (32,)), tensor_type((32,), F32))
    z = b.call("prims.reshape", (y, (4, 8)), tensor_type((4, 8), F32))
    w = b.call("prims.permute", (b.call("prims.permute", (z, (1, 0)), X), (1, 0)), tensor_type((4, 8), F32))
    assert ops(b.finish((b.call("prims.neg", (w,), tensor_type((4, 8), F32)),))) == ["reshape", "neg"]


def test_inputs_that_look_alike_stay_apart():
    b = GraphBuilder()
    x, y = b.input("x", X), b.input("y", X)
    shown = [b.call("prims.reshape", (each, (8, 4)), X) for each in (x, y)]
    final = optimize(b.finish((b.call("prims.sub", tuple(shown), X),)))
    assert [node.operands for node in final.nodes] == [(x, y)]


def test_rounding_conversions_stay():
    b = GraphBuilder()
    x = b.input("x", X)
    down = b.call("prims.convert", (x, BF16), tensor_type((8, 4), BF16))
    up = b.call("prims.convert", (down, F32), X)
    assert ops(b.finish((b.call("prims.neg", (up,), X),))) == ["convert", "convert", "neg"]
    wide = b.call("prims.convert", (x, F64), tensor_type((8, 4), F64))
    back = b.call("prims.convert", (wide, F32), X)
    assert ops(b.finish((b.call("prims.neg", (back,), X),))) == ["neg"]


def test_a_copy_in_the_same_layout_goes():
    b = GraphBuilder()
    x = b.input("x", X)
    copy = b.call("prims.copy", (x,), X)
    assert ops(b.finish((b.call("prims.neg", (copy,), X),))) == ["neg"]
    other = TensorType(X.shape, (X.shape[1] // 4, X.shape[0]), F32)
    turned = b.call("prims.copy", (x,), other)
    assert ops(b.finish((turned,))) == ["copy"]


def test_a_choice_by_a_number_given_at_run_time_stays():
    b = GraphBuilder()
    x, k = b.input("x", X), b.input("k", ScalarType(BOOL))
    mask = b.call("prims.full", (X.shape, k, BOOL, X.device), replace(X, dtype=BOOL))
    assert ops(b.finish((b.call("prims.where", (mask, x, 0.0), X),))) == ["full", "where"]


def test_a_mask_that_lets_everything_pass_goes():
    half = tensor_type((2, 4, 8, 16), F16, Device("cuda", 0))
    row, scores = (tensor_type(shape, BOOL, half.device) for shape in ((1, 1, 8, 1), (2, 1, 8, 8)))
    b = GraphBuilder()
    q = b.input("q", half)
    for start, bias in ((0, None), (-1, "node")):
        count = b.call("prims.iota", (8, start, 1, I64, half.device), tensor_type((8,), I64, half.device))
        moved = b.call("prims.add", (count, 0), count.type)
        first = b.call("prims.reshape", (moved, (1, 1, 8, 1)), replace(row, dtype=I64))
        seen = b.call("prims.ge", (first, 0), row)
        wide = b.call("prims.broadcast", (seen, (2, 1, 8, 8), (0, 1, 2, 3)), scores)
        mask = b.call("prims.where", (wide, 0.0, float("-inf")), replace(scores, dtype=F16))
        op = "aten._scaled_dot_product_cudnn_attention.default"
        done = optimize(b.finish((b.call(op, (q, q, q, mask, False), half),))).nodes
        assert (done[-1].args[3] is None) is (bias is None)
        assert (len(done) == 1) is (bias is None)


def test_division_by_a_power_of_two_is_a_product():
    b = GraphBuilder()
    x = b.input("x", X)
    graph = decompose(b.finish([b.call("aten.div.Tensor", (x, by), X) for by in (3.0, -8.0, float("inf"))]))
    assert [(node.op.split(".")[1], node.args[1]) for node in graph.nodes] == [
        ("div", 3.0), ("mul", -0.125), ("div", float("inf"))]  # fmt: skip


def test_a_norm_is_clean_as_it_is_made():
    """What a rule changes, all that is computed from it is made anew for."""
    b = GraphBuilder()
    x = b.input("x", X)
    row = tensor_type((8, 1), F32)
    norm = b.call("aten.native_layer_norm.default", (x, X.shape[1:], None, None, 1e-5), (X, row, row))
    graph = drop_dead(decompose(b.finish((b.get(norm, 0),))))
    assert optimize(graph).nodes == graph.nodes
