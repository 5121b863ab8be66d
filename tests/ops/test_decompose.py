"""Decompositions against eager, through lowering, without code generation."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dovetail.events import EVENTS
from dovetail.ir.graph import GraphBuilder
from dovetail.ir.types import F32, tensor_type
from dovetail.lower import lower
from dovetail.ops import decompose, fates
from dovetail.ops.prims import PRIMS
from dovetail.ops.registry import DECOMPOSITIONS
from dovetail.passes import optimize
from tests.lower.interpret import run_loops
from tests.ops.tracing import check_call, traced
from tests.sweeps.torch_testing import op_db

UNDEFINED = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",  # no defined values
    "cauchy", "exponential", "geometric", "log_normal", "normal", "uniform", "randn", "randn_like", "rand_like", "randint",
    "randint_like", "multinomial", "bernoulli", "nn.functional.rrelu", "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d", "nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d",
    "nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout", "nn.functional.scaled_dot_product_attention",
    "nn.functional.multi_head_attention_forward",  # random
}  # fmt: skip
FAMILIES = (
    "add", "sub", "mul", "div", "pow", "clamp", "where", "sum", "mean", "var", "std_mean", "amax", "argmax", "any", "prod",
    "softmax", "log_softmax", "logsumexp", "cat", "stack", "slice_scatter", "select_scatter", "roll", "flip", "tril", "repeat",
    "index_select", "gather", "scatter_add", "index_put", "nn.functional.embedding", "nn.functional.layer_norm",
    "nn.functional.group_norm", "nn.functional.gelu", "nn.functional.silu", "nn.functional.pad", "nn.functional.nll_loss",
    "nn.functional.cross_entropy", "nn.functional.mse_loss", "arange", "eye", "diagonal", "masked_fill", "floor_divide",
    "remainder", "bitwise_left_shift", "linalg.vector_norm", "linalg.cross", "nan_to_num", "expand", "unbind", "split", "permute", "lerp",
)  # fmt: skip
SAMPLES = [op for op in op_db if op.name in FAMILIES]


@pytest.mark.parametrize("op", SAMPLES, ids=lambda op: f"{op.name}.{op.variant_test_name}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
def test_samples_equal_eager(op, dtype):
    if dtype not in op.supported_dtypes("cpu"):
        pytest.skip("eager has no such kernel")
    for _, sample in zip(range(4), op.sample_inputs("cpu", dtype)):
        check_call(op.op, sample.input, *sample.args, **sample.kwargs)


@pytest.mark.parametrize(
    "fn", [F.gelu, F.silu, torch.sigmoid, torch.exp, lambda x: x * 3 + x, lambda x: x.sum(-1)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_round_where_eager_rounds(fn, dtype):
    check_call(fn, torch.randn(8, 64, dtype=dtype))


@pytest.mark.parametrize("fn", [torch.maximum, torch.minimum, torch.fmax, torch.add, torch.eq, torch.div])
def test_special_values(fn):
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan")])
    check_call(fn, values[:, None].expand(7, 7).contiguous(), values)


def test_integer_division_rounds_as_eager():
    a = torch.tensor([7, -7, 7, -7, 0], dtype=torch.int32)
    b = torch.tensor([2, 2, -2, -2, 3], dtype=torch.int32)
    for mode in ("floor", "trunc"):
        check_call(lambda a, b, mode=mode: torch.div(a, b, rounding_mode=mode), a, b)
    check_call(torch.remainder, a, b)
    check_call(torch.fmod, a, b)


def test_norm_of_one_number_takes_no_power():
    for order in (-41.0, 60.0):
        check_call(lambda x, order=order: torch.linalg.vector_norm(x, order, dim=0), torch.tensor([[0.11, -0.2]]))


def test_unknown_op_stays_and_is_reported():
    graph, _, _ = traced(torch.kthvalue, torch.randn(8), 2)
    before = len(EVENTS.of("fallback"))
    ops = [node.op for node in decompose(graph).nodes]
    assert "aten.kthvalue.default" in ops
    assert len(EVENTS.of("fallback")) == before + 1


def test_last_node_keeps_name_and_type():
    builder = GraphBuilder()
    x = builder.input("x", tensor_type((8, 64), F32))
    y = builder.call("aten.gelu.default", (x,), x.type, name="hidden")
    graph = decompose(builder.finish((y,)))
    assert graph.nodes[-1].name == "hidden" and graph.nodes[-1].type == x.type
    assert all(node.op in PRIMS for node in graph.nodes)


def test_bias_is_opened_up_only_for_pointwise_work():
    x, w, b = torch.randn(4, 8), torch.randn(8, 16), torch.randn(16)
    alone, _, _ = traced(lambda x, w, b: torch.addmm(b, x, w), x, w, b)
    assert [node.op for node in decompose(alone).nodes] == ["aten.addmm.default"]
    fused, _, _ = traced(lambda x, w, b: torch.relu(torch.addmm(b, x, w)), x, w, b)
    assert decompose(fused).nodes[0].op == "aten.mm.default"


def test_decomposition_is_linear():
    builder = GraphBuilder()
    x = builder.input("x", tensor_type((8,), F32))
    for _ in range(10_000):
        x = builder.call("aten.add.Tensor", (x, 1.0), x.type)
    assert len(decompose(builder.finish((x,))).nodes) == 10_000


def test_every_decomposition_is_of_an_op_that_exists():
    for name in DECOMPOSITIONS:
        space, op, overload = name.split(".")
        packet = getattr(getattr(torch.ops, space), op, None)
        assert packet is None or overload in packet.overloads(), name  # an op may be missing in a release


def test_every_fate_is_one_of_four():
    table = fates()
    assert set(table.values()) == {"prim", "decomposition", "template", "fallback"}
    assert table["aten.add.Tensor"] == "prim" and table["aten.mm.default"] == "template"
    missing = [name.split(".")[1] for name in DECOMPOSITIONS if name not in table]
    assert not [name for name in missing if hasattr(torch.ops.aten, name)]  # of a later torch
    assert len(table) > 1500 and "aten.log_softmax.int" in table


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x + 0.1,
        lambda x: 0.1 - x,
        lambda x: x * 0.1,
        lambda x: x / 0.1,
        lambda x: x % 0.1,
        lambda x: x.abs() ** 0.1,
        lambda x: torch.add(x, x.flip(0), alpha=0.1),
        lambda x: x + torch.tensor(0.1),
        lambda x: F.leaky_relu(x, 0.1),
        lambda x: x == 0.1,
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_meet_half_types_as_in_eager(fn, dtype):
    x = torch.linspace(-2, 2, 1024).to(dtype)
    graph, inputs, _ = traced(fn, x)
    (got,) = run_loops(lower(optimize(decompose(graph))), inputs)
    assert torch.equal(got, fn(x))


def check_types(graph):
    """Every prim's type is what its rule says."""
    for node in graph.nodes:
        if node.op not in PRIMS:
            continue
        result = PRIMS[node.op].rule(node.args)
        types = node.type if isinstance(node.type, tuple) else (node.type,)
        results = result if isinstance(node.type, tuple) else (result,)
        for type, (shape, dtype) in zip(types, results, strict=True):
            assert (type.shape, type.dtype) == (shape, dtype), node


@pytest.mark.parametrize("op", SAMPLES, ids=lambda op: f"{op.name}.{op.variant_test_name}")
def test_types_follow_the_rules(op):
    for _, sample in zip(range(3), op.sample_inputs("cpu", torch.float32) if op.supports_dtype(torch.float32, "cpu") else ()):
        graph, _, _ = traced(op.op, sample.input, *sample.args, **sample.kwargs)
        decomposed = decompose(graph)
        check_types(decomposed)
        check_types(optimize(decomposed))


def test_a_bias_between_two_matrix_products_stays_in_the_library():
    x, w, b = torch.randn(4, 8), torch.randn(8, 8), torch.randn(8)
    graph, _, _ = traced(lambda x, w, b: torch.addmm(b, torch.addmm(b, x, w), w), x, w, b)
    assert [node.op for node in decompose(graph).nodes] == ["aten.addmm.default"] * 2


@pytest.mark.parametrize("index", [[10, 0], [-1, 0]])
def test_positions_out_of_range_fail(index):
    index, rows = torch.tensor(index), torch.randn(10, 4)
    for program in (F.embedding, lambda i, x: x.index_copy(0, i, x[:2])):
        graph, inputs, _ = traced(program, index, rows)
        with pytest.raises(IndexError):
            run_loops(lower(optimize(decompose(graph))), inputs)


def test_a_position_that_was_found_says_nothing_of_another():
    def program(x, index):
        marked = torch.zeros(3, 4).scatter(1, x.argmax(1, keepdim=True), 1.0)
        return marked + torch.zeros(3, 4).scatter(1, index, 1.0)

    graph, _, _ = traced(program, torch.randn(3, 4), torch.tensor([[0], [2], [9]]))
    assert [node.op for node in decompose(graph).nodes].count("aten.scatter.value") == 1


@pytest.mark.parametrize(("start", "end", "step"), [(0, None, 2), (1, None, 2), (2, 7, 3), (0, 1, 2)])
def test_slices_with_steps_are_written_back(start, end, step):
    x = torch.randn(3, 9, 5)
    part = x[:, start:end:step].contiguous()
    aten = torch.ops.aten
    check_call(lambda g: aten.slice_backward(g, [3, 9, 5], 1, start, end or 99, step), part)
    check_call(lambda x, g: aten.slice_scatter(x, g, 1, start, end, step), x, part)
    check_call(lambda x, g: aten.slice_scatter(x, g, 1, start, end, step), x.long(), part.long())


def test_windows_side_by_side_are_a_view():
    x = torch.randn(2, 3, 16, 14)
    check_call(lambda x: x.unfold(2, 4, 4).unfold(3, 4, 4) * 2, x)
    graph, _, _ = traced(lambda x: x.unfold(2, 4, 4).unfold(3, 4, 4), x)
    assert all(node.op in PRIMS for node in decompose(graph).nodes)


def test_lists_as_positions_are_not_mixed_up():
    """Tensors made of them live as long as the recording: memory that is free again has no identity."""
    x = torch.arange(125.0).reshape(5, 5, 5)
    lists = [[0, 2, 3], [1, 3, 3], [0, 0, 2], [4, 0, 1]]
    for _ in range(40):
        graph, inputs, _ = traced(lambda x: x[lists[0], lists[1], lists[2]] + x[lists[3], lists[0], lists[2]], x)
        (got,) = run_loops(lower(optimize(decompose(graph))), inputs)
        assert torch.equal(got, x[lists[0], lists[1], lists[2]] + x[lists[3], lists[0], lists[2]])
