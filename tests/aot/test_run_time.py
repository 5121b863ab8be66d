"""What autograd promises around a compiled region: leaves, hooks, accumulation, retain_graph, double backward."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import dovetail
from dovetail import aot
from dovetail.aot import double, functional
from dovetail.aot.joint import MOST_GROUPS
from dovetail.errors import UnsupportedMutation
from dovetail.runtime.guards import attach
from dovetail.util.library import restride
from tests.aot.running import as_module, check, compiled


def _mlp(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(F.gelu(F.linear(x, w, b)), (16,)) @ v


def _mlp_inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(4, 8), (16, 8), (16,), (16, 3)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def test_leaves_get_gradients_and_accumulate() -> None:
    ours, theirs = _mlp_inputs(), _mlp_inputs()
    call = compiled(_mlp, ours)
    for _ in range(2):
        call(*ours)[0].square().sum().backward()
        _mlp(*theirs).square().sum().backward()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_plain_tangent_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of others (is it sparse, which backward does it take) costs as much as a small kernel."""
    asked: list[object] = []

    def lack_memory(*tangents: Any) -> bool:
        asked.append(tangents)
        return False

    attach()
    monkeypatch.setattr(double, "lack_memory", lack_memory)
    x = torch.randn(3, 4, requires_grad=True)
    call = compiled(lambda x: x.sin(), [x])
    plain, others = torch.ones(3, 4), (torch.ones(()).expand(3, 4), torch.ones(4, 3).t(), torch.ones(3, 4)._neg_view())
    for tangent, times in ((plain, 0), *((other, 1) for other in others), (plain.requires_grad_(), 0)):
        asked.clear()
        (grad,) = torch.autograd.grad(call(x)[0], x, tangent)
        torch.testing.assert_close(grad, x.cos() * tangent)
        assert len(asked) == times


def test_hooks_run() -> None:
    x, *rest = _mlp_inputs()
    seen: list[torch.Tensor] = []
    x.register_hook(lambda g: seen.append(g) or g * 2)
    call = compiled(_mlp, [x, *rest])
    (out,) = call(x, *rest)
    out.register_hook(lambda g: seen.append(g))
    out.sum().backward()
    assert len(seen) == 2
    torch.testing.assert_close(x.grad, seen[1] * 2)


def test_retain_graph_and_second_backward() -> None:
    inputs = _mlp_inputs()
    (out,) = compiled(_mlp, inputs)(*inputs)
    out.sum().backward(retain_graph=True)
    first = inputs[0].grad.clone()
    out.sum().backward()
    torch.testing.assert_close(inputs[0].grad, first * 2)
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


class Scaled(torch.autograd.Function):
    """Keeps no tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


@pytest.mark.parametrize("program", [
    lambda x: x * 2 + 1, lambda x: x / 3, lambda x: x * torch.ones(4), lambda x: torch.stack([x, x * 2]), lambda x: x**1,
    lambda x: torch.complex(x, x).real, lambda x: x.new_zeros(6).index_put_((torch.arange(4),), x)[1:],
    lambda x: torch.cat([x.new_zeros(2), x]).narrow(0, 1, 3).mul_(1), lambda x: x.exp(), lambda x: x + 1, lambda x: x.mean(),
    lambda x: x.view(2, 2).t().expand(3, 2, 2), lambda x: torch.cat([x, -x]), lambda x: x.double().cumsum(0).flip(0),
    lambda x: torch.addmm(x, torch.ones(3, 4), torch.ones(4, 4)), lambda x: F.linear(torch.ones(3, 4), torch.ones(4, 4), x),
    lambda x: torch.addcmul(x, torch.ones(4), torch.ones(4)), lambda x: Scaled.apply(x), lambda x: F.pad(x, (1, 1)),
])  # fmt: skip
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_second_backward_fails_where_eager_s_does(program: Any, dynamic: bool) -> None:
    """There some node has kept a tensor, whether our backward needs one or not."""
    seen = []
    for run in (program, dovetail.compile(program, dynamic=dynamic)):
        x = torch.ones(4, requires_grad=True)
        out = run(x).sum()
        out.backward()
        try:
            out.backward()
        except RuntimeError as error:
            seen.append(str(error))
        else:
            seen.append("")
    assert seen[0] == seen[1]


def test_outputs_are_differentiated_a_second_time_where_eager_s_are() -> None:
    x = torch.ones(4, requires_grad=True)
    scaled, moved = dovetail.compile(lambda x: (x * 2, x + 1))(x)
    for out in (scaled.sum(), moved.sum(), moved.sum()):
        out.backward()
    with pytest.raises(RuntimeError, match="second time"):
        scaled.sum().backward()


@pytest.mark.parametrize("has_weights", [True, False])
def test_attention_of_one_call_may_give_no_weights(has_weights: bool) -> None:
    layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    given = layer.in_proj_weight, layer.in_proj_bias, layer.out_proj.weight, layer.out_proj.bias

    def f(x: Any) -> Any:
        return torch._native_multi_head_attention(x, x, x, 8, 2, *given, None, has_weights)

    with torch.no_grad(), warnings.catch_warnings(action="error"):
        torch.testing.assert_close(dovetail.compile(f)(x), f(x))


def test_what_eager_keeps_nothing_of_is_differentiated_again() -> None:
    f = dovetail.compile(lambda x: torch.nn.functional.affine_grid(x, (2, 3, 4, 5), align_corners=False))
    x = torch.randn(2, 2, 3, requires_grad=True)
    out = f(x)
    out.sum().backward()
    out.sum().backward()
    leaves = [torch.randn(2, requires_grad=True) for _ in range(MOST_GROUPS + 1)]
    first, *_ = dovetail.compile(lambda given: [each + 1 for each in given])(leaves)
    for _ in range(2):  # of outputs in one group, though nothing ties them
        first.sum().backward()
    torch.testing.assert_close(leaves[0].grad, torch.full((2,), 2.0))
    assert all(leaf.grad is None for leaf in leaves[1:])


def test_write_to_saved_tensor_is_noticed() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    (out,) = compiled(lambda x, y: x * y, [x, y])(x, y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("write", [lambda y: y.add_(1), lambda y: y[0].mul_(2), lambda y: y.squeeze_(0)])
def test_an_output_that_eager_does_not_keep_may_be_written_to(write: Any) -> None:
    normalised = lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:])  # noqa: E731
    x, found = torch.randn(1, 6, requires_grad=True), []
    for f in (normalised, dovetail.compile(normalised)):
        y = f(x)
        write(y)
        found.append(torch.autograd.grad(y.sin().sum(), x))
    torch.testing.assert_close(*found)


def test_unused_output_has_no_tangent() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    a, b, c = compiled(lambda x, y: (x.sin(), y.cos() * x, (x > 0)), [x, y])(x, y)
    assert not c.requires_grad
    a.sum().backward()
    torch.testing.assert_close(x.grad, x.cos())
    assert y.grad is None or not y.grad.any()


def test_output_whose_tangent_matters_to_no_gradient() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    a, b = compiled(lambda x, y: (x.trunc(), torch.minimum(x, y)), [x, y])(x, y)
    got = torch.autograd.grad(b.sum(), [x, y])
    torch.testing.assert_close(got, torch.autograd.grad(torch.minimum(x, y).sum(), [x, y]))
    assert a.requires_grad


def test_function_that_only_writes() -> None:
    def program(x: torch.Tensor) -> tuple[()]:
        x[0] = -1.0
        return ()

    check(program, lambda: [torch.randn(4, 3)])


def test_expanded_tangent_is_laid_out_anew() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    (out,) = compiled(lambda x: x.t().sin(), [x])(x)
    out.backward(torch.ones(()).expand(4, 3))
    torch.testing.assert_close(x.grad, x.cos())


def test_a_single_gradient_is_wanted_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes as long as a small kernel."""
    asked: list[Any] = []
    monkeypatch.setattr(double.Eager, "unwanted", lambda *given: asked.append(given) or ())
    x = torch.randn(4, 4, requires_grad=True)
    scale = torch.randn(4)
    run = dovetail.compile(lambda x, scale: F.relu(x) * scale)
    for take in (lambda y: torch.autograd.grad(y.sum(), x)[0], lambda y: y.sum().backward() or x.grad):
        torch.testing.assert_close(take(run(x, scale)), (x > 0) * scale)
    assert not asked


def test_no_grad_means_no_backward() -> None:
    inputs = _mlp_inputs()
    with torch.no_grad():
        call = compiled(_mlp, inputs)
        (out,) = call(*inputs)
    assert not out.requires_grad
    torch.testing.assert_close(out, _mlp(*inputs).detach())


def test_detached_result_requires_no_grad() -> None:
    x = torch.randn(3, requires_grad=True)
    (out,) = compiled(lambda x: x.detach() * 2, [x])(x)
    assert not out.requires_grad


@pytest.mark.parametrize("program", [
    lambda x, y: (x * y).sin().sum(),
    lambda x, y: (x.exp() @ y.t()).tanh().square().sum(),
    lambda x, y: F.dropout(x, 0.5).pow(3).sum() * y.sum(),
])  # fmt: skip
def test_double_backward(program: Any) -> None:
    def penalty(call: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        torch.manual_seed(3)
        out = call(x, y)
        out = out[0] if isinstance(out, list) else out
        gx, gy = torch.autograd.grad(out, [x, y], create_graph=True)
        return torch.autograd.grad(gx.square().sum() + gy.sin().sum(), [x, y])

    torch.manual_seed(0)
    x, y = (torch.randn(3, 4, requires_grad=True, dtype=torch.float64) for _ in range(2))
    for a, b in zip(penalty(compiled(program, [x, y]), x, y), penalty(program, x, y)):
        torch.testing.assert_close(a, b)


def test_gradcheck() -> None:
    x, y = (torch.randn(3, 4, requires_grad=True, dtype=torch.float64) for _ in range(2))
    call = compiled(lambda x, y: F.softmax(x @ y.t(), -1), [x, y])
    assert torch.autograd.gradcheck(lambda x, y: call(x, y)[0], (x, y))
    assert torch.autograd.gradgradcheck(lambda x, y: call(x, y)[0], (x, y))


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.sin() * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * x.cos() * ctx.factor * 10, None


@pytest.mark.parametrize("program", [
    lambda x: _Reverse.apply(x),
    lambda x: _Reverse.apply(x * 2) + x,
    lambda x: _Scaled.apply(x, 2.0).exp(),
], ids=["reverse", "inside", "scaled"])  # fmt: skip
def test_custom_function(program: Any) -> None:
    check(program, lambda: [torch.randn(3, 4, requires_grad=True)], share=False)


def test_autocast() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(x, w)
            return y, F.softmax(y, -1), (y.float() @ w).relu()

    check(program, lambda: [torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)])


def test_ambient_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        check(
            lambda x, w: (F.linear(x, w).sin(), x @ w),
            lambda: [torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)],
        )


def test_overlapping_inputs_that_are_written_are_refused() -> None:
    x = torch.randn(4, 4)
    with pytest.raises(UnsupportedMutation):
        aot.trace_joint(as_module(lambda a, b: a.add_(b.sin()), 2), [x, x[0]])


def test_duplicate_input() -> None:
    x = torch.randn(4, requires_grad=True)
    (out,) = compiled(lambda a, b: a * b.sin(), [x, x])(x, x)
    (grad,) = torch.autograd.grad(out.sum(), [x])
    (expected,) = torch.autograd.grad((x * x.sin()).sum(), [x])
    torch.testing.assert_close(grad, expected)


def test_batch_norm_updates_statistics() -> None:
    def program(x: torch.Tensor, w: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, mean, var, w, None, training=True).relu()

    def make() -> list[torch.Tensor]:
        return [torch.randn(4, 3, 5, requires_grad=True), torch.randn(3, requires_grad=True),
                torch.zeros(3), torch.ones(3)]  # fmt: skip

    check(program, make)


def test_inference_mode() -> None:
    with torch.inference_mode():
        check(lambda x, w: F.linear(x, w).view(-1)[1:], lambda: [torch.randn(4, 8), torch.randn(8, 8)])


def test_joint_and_signature_print() -> None:
    x = torch.randn(3, requires_grad=True)
    text = str(aot.trace_joint(as_module(torch.sin, 1), [x]))
    assert "aten.cos.default(x0)" in text and "output 0 is fresh 0 grad" in text


def test_aliasing_other_than_traced_runs_in_eager() -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a * b

    call = compiled(program, [torch.randn(4), torch.randn(4)])
    ours, theirs = torch.ones(4), torch.ones(4)
    torch.testing.assert_close(call(ours, ours), [program(theirs, theirs)])
    torch.testing.assert_close(ours, theirs)
    once = compiled(program, [ours, ours])
    a, b = torch.ones(4), torch.full((4,), 3.0)
    assert once(a, b)[0].tolist() == [6.0] * 4 and a.tolist() == [2.0] * 4


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant: bool) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        block = lambda h: F.dropout(torch.tanh(h @ w), 0.5)  # noqa: E731
        return checkpoint(block, x, use_reentrant=use_reentrant)

    x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    grads = []
    for f in (dovetail.compile(program, fullgraph=True), program):
        torch.manual_seed(0)
        x.grad = w.grad = None
        f(x, w).sum().backward()
        grads.append([x.grad, w.grad])
    torch.testing.assert_close(*grads)


def test_a_checkpoint_out_of_sight_may_not_draw_again() -> None:
    block = lambda t: F.dropout(t.sin(), 0.5).exp()  # noqa: E731
    with pytest.raises(UnsupportedMutation, match="draws numbers"):
        compiled(lambda x: checkpoint(block, x, use_reentrant=False), [torch.randn(4, requires_grad=True)])


@torch.library.custom_op("dovetail_aot_tests::scale", mutates_args=())
def _scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


_scale.register_fake(lambda x, factor: torch.empty_like(x))
_scale.register_autograd(
    lambda ctx, grad: (grad * ctx.factor, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)


@torch.library.custom_op("dovetail_aot_tests::bump", mutates_args=("x",))
def _bump(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    return x.sum()


_bump.register_fake(lambda x, y: x.new_empty(()))


@torch.library.custom_op("dovetail_aot_tests::bump_only", mutates_args=("x",))
def _bump_only(x: torch.Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("dovetail_aot_tests::grouped", mutates_args=())
def _grouped(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    starts = [0, *ends.tolist()[:-1]]
    return torch.cat([x[a:b] * w[i] for i, (a, b) in enumerate(zip(starts, ends.tolist()))])


def _grouped_backward(ctx: Any, grad: torch.Tensor) -> Any:
    x, w = ctx.saved_tensors
    spans = list(zip([0, *ctx.ends.tolist()[:-1]], ctx.ends.tolist()))
    by_weight = torch.stack([(grad[a:b] * x[a:b]).sum(0) for a, b in spans])
    return torch.cat([grad[a:b] * w[i] for i, (a, b) in enumerate(spans)]), by_weight, None


def _grouped_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.ends = inputs[2]


_grouped.register_fake(lambda x, w, ends: torch.empty_like(x))
_grouped.register_autograd(_grouped_backward, setup_context=_grouped_context)


def test_custom_op_whose_backward_reads_values() -> None:
    make = lambda: [  # noqa: E731
        torch.randn(6, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True), torch.tensor([2, 6])
    ]  # fmt: skip
    check(lambda x, w, ends: _grouped(x.sin(), w, ends).exp(), make)
    assert _grouped._backward_fn is _grouped_backward


def test_gradients_of_such_a_backward_are_laid_out_as_what_they_belong_to(monkeypatch: Any) -> None:
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (w,) = ctx.saved_tensors
        by_weight = torch.zeros_like(w)
        by_weight[int(ctx.at)] = grad.sum(0)
        return grad, by_weight, None

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.at = inputs[2]

    with torch.library._scoped_library("dovetail_aot_laid", "FRAGMENT"):
        op = torch.library.custom_op("dovetail_aot_laid::row", lambda x, w, at: x + w[int(at)], mutates_args=(),
                                     schema="(Tensor x, Tensor w, Tensor at) -> Tensor")  # fmt: skip
        op.register_fake(lambda x, w, at: torch.empty_like(x))
        op.register_autograd(backward, setup_context=keep)
        copies: list[tuple[int, ...]] = []
        monkeypatch.setattr(functional, "restride", lambda t, stride: copies.append(stride) or restride(t, stride))
        make = lambda: [torch.randn(5, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True), torch.tensor(2)]  # noqa: E731
        check(lambda x, w, at: op(x.sin(), w.t(), at).exp(), make)
        assert copies == [(4, 1)], "what came in goes out again, so it is copied; the weights' gradient is not"


def test_custom_ops() -> None:
    check(lambda x: _scale(x, 2.0).sin(), lambda: [torch.randn(3, requires_grad=True)])
    check(
        lambda x, y: (_bump(x, y), _bump(x[0], y[0]), x * 2), lambda: [torch.randn(3, 2), torch.randn(3, 2)]
    )


def test_custom_ops_that_give_none_or_write_to_lists_too() -> None:
    with torch.library._scoped_library("dovetail_aot_older", "DEF") as library:
        library.define("put(Tensor(a!) to, Tensor x) -> None")
        library.impl("put", lambda to, x: [to.copy_(x)].clear(), "CompositeExplicitAutograd")
        library.define("both(Tensor(a!) x, Tensor(b!)[] more) -> ()")
        library.impl("both", lambda x, more: [t.sin_() for t in (x, *more)].clear(), "CPU")
        ops = torch.ops.dovetail_aot_older
        call = dovetail.compile(lambda x, y: (ops.put(x, y), x + 1), fullgraph=True)
        torch.testing.assert_close(call(torch.zeros(1), torch.ones(1))[1], torch.full((1,), 2.0))
        call = dovetail.compile(lambda x, y: (ops.both(x, [y]), x + y), options={"fallback_to_eager": False})
        torch.testing.assert_close(call(torch.ones(1), torch.ones(1))[1], torch.ones(1).sin() * 2)


def test_custom_op_defined_anew() -> None:
    for factor in (1.0, 5.0):
        with torch.library._scoped_library("dovetail_aot_anew", "DEF") as library:
            library.define("put(Tensor(a!) to, Tensor x) -> ()")
            library.impl("put", lambda to, x: None, "Meta")

            def put(to: torch.Tensor, x: torch.Tensor, factor: float = factor) -> None:
                to.copy_(x * factor)

            library.impl("put", put, "CPU")

            def program(x: torch.Tensor) -> torch.Tensor:
                to = torch.zeros(3)
                torch.ops.dovetail_aot_anew.put(to, x)
                return to * 2

            check(program, lambda: [torch.randn(3)])


@pytest.mark.parametrize("train", [False, True])
def test_function_transforms(train: bool) -> None:
    programs = [
        lambda x: torch.func.grad(lambda t: (t.sin() * t).sum())(x),
        lambda x: torch.vmap(lambda t: t.softmax(0) @ t)(x),
        lambda x: torch.func.jacrev(lambda t: t.sin().sum(0))(x),
        lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1],
    ]
    for program in programs:
        check(program, lambda: [torch.randn(3, 4, requires_grad=train)])


def test_gradient_inside_the_program() -> None:
    check(
        lambda x: torch.autograd.grad((x.sin() * x).sum(), x, create_graph=True)[0] * 2,
        lambda: [torch.randn(3, requires_grad=True)],
    )


def test_small_write_is_repeated_on_the_input() -> None:
    def program(cache: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        cache[0, 1:3] = new * 2
        cache.index_copy_(
            1, at, new[:, None].expand(2, 1, 4).transpose(0, 1).reshape(1, 2, 4).expand(8, 2, 4)
        )
        return cache.sum(1)

    make = lambda: [torch.randn(8, 32, 4), torch.tensor([5, 7]), torch.randn(2, 4)]  # noqa: E731
    check(program, make)
    joint = aot.trace_joint(as_module(program, 3), make())
    first, second = joint.signature.mutations
    assert first.steps and second.op == "aten.index_copy_.default"


def test_what_is_repeated_on_the_input_is_not_computed_too() -> None:
    def program(cache: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, at, new)
        cache.index_copy_(0, at + 1, new * 2)
        return new.sum()

    make = lambda: [torch.randn(64, 4), torch.tensor([5, 7]), torch.randn(2, 4)]  # noqa: E731
    check(program, make)
    joint = aot.trace_joint(as_module(program, 3), make())
    assert [m.op for m in joint.signature.mutations] == ["aten.index_copy_.default"] * 2
    assert not any("index_copy" in node.op or "assert" in node.op for node in joint.graph.nodes)


def test_constant_attribute() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.add, (x, graph.get_attr("table"))),))
    root = torch.nn.Module()
    root.register_buffer("table", torch.arange(4.0))
    joint = aot.trace_joint(torch.fx.GraphModule(root, graph), [torch.randn(2, 4)])
    assert len(joint.constants) == 1 and type(joint.constants[0]) is torch.Tensor


def test_backward_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UnsupportedMutation, match="backward cannot be traced"):
        compiled(lambda x: x // 2, [torch.randn(3, requires_grad=True)])


def test_writing_to_an_expanded_input_is_refused() -> None:
    with pytest.raises(UnsupportedMutation, match="share memory"):
        compiled(lambda x: x.masked_fill_(x > 1, 0), [torch.randn(1, 3).expand(4, 3)])


@pytest.mark.parametrize("backend", ["aot_eager", "dovetail"])
def test_an_output_nobody_used_has_no_gradient(backend: str) -> None:
    """Zeros instead would meet the infinite slope of a square root at 0, and make NaN."""

    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x * w, (x * 0).sqrt() + w.sum(), torch.cat([x, w]).norm()

    run = dovetail.compile(f, backend=backend)
    for used in ((0,), (0, 2), (1, 2), (2,), (0, 1, 2)):
        x, w = (torch.rand(3, requires_grad=True) for _ in range(2))
        theirs = torch.autograd.grad(sum(f(x, w)[i].sum() for i in used), (x, w))  # type: ignore[arg-type]
        ours = torch.autograd.grad(sum(run(x, w)[i].sum() for i in used), (x, w))
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("create_graph", [False, True])
def test_autograd_calls_backward_without_any_gradient(create_graph: bool) -> None:
    """A later region gives no gradient back to an input that it only compares: the engine still calls."""

    class Compares(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad * 2, None

    norm = dovetail.compile(lambda x: (x * 0).norm().sqrt())
    x = torch.rand(3, requires_grad=True)
    (grad,) = torch.autograd.grad(Compares.apply(x, norm(x)).sum(), x, create_graph=create_graph)
    torch.testing.assert_close(grad, torch.full((3,), 2.0))


def test_tangents_without_memory_go_through_eager() -> None:
    """Batched and sparse ones: kernels could not read them."""
    x = torch.randn(3, requires_grad=True)
    f = lambda x: x.exp() * x.flip(0)  # noqa: E731
    call = dovetail.compile(f, options={"fallback_to_eager": False})
    for grads in ({"grad_outputs": torch.eye(3), "is_grads_batched": True}, {"grad_outputs": torch.ones(3)}):
        for got, expected in zip(torch.autograd.grad(call(x), x, **grads), torch.autograd.grad(f(x), x, **grads)):
            torch.testing.assert_close(got, expected)
            assert not got.requires_grad
    twice = []
    for g in (call, f):  # the gradient's program, which runs in eager here
        (grad,) = torch.autograd.grad(g(x).sum(), x, create_graph=True)
        twice += torch.autograd.grad(grad, x, torch.eye(3), is_grads_batched=True)
    torch.testing.assert_close(*twice)
    weight = torch.randn(5, 3, requires_grad=True)
    double = dovetail.compile(lambda w: w * 2)
    F.embedding(torch.tensor([1, 1, 2]), double(weight), sparse=True).sum().backward()
    assert weight.grad is not None and weight.grad.is_sparse
    assert weight.grad.to_dense().sum().item() == 18.0


def test_a_backward_of_the_users_is_not_compiled_for_gradients_in_a_batch() -> None:
    times = dovetail.compile(lambda x, grad: 2 * x * grad)

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return times(ctx.saved_tensors[0], grad)

    x = torch.randn(3, requires_grad=True)
    (rows,) = torch.autograd.grad(Square.apply(x), x, torch.eye(3), is_grads_batched=True)
    torch.testing.assert_close(rows, torch.diag(2 * x.detach()))


def test_custom_ops_run_for_what_they_do() -> None:
    calls: list[str] = []

    @torch.library.custom_op("dovetail_tests::note", mutates_args=())
    def note(x: torch.Tensor) -> None:
        calls.append("note")

    @torch.library.custom_op("dovetail_tests::keep", mutates_args=())
    def keep(x: torch.Tensor) -> torch.Tensor:
        calls.append("keep")
        return x.clone()

    note.register_fake(lambda x: None)
    keep.register_fake(torch.empty_like)

    def program(x: torch.Tensor) -> torch.Tensor:
        note(x)
        keep(x * 2)
        return x + 1

    call = dovetail.compile(program)
    for x in (torch.ones(3), torch.ones(3, requires_grad=True)):
        call(x)
        assert calls == ["note", "keep"]
        calls.clear()


def test_hooks_see_saved_tensors_of_the_run_only() -> None:
    """They may write them to disk: what is saved while tracing has no data."""
    seen: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        seen.append(tensor.clone())
        return len(seen) - 1

    call = dovetail.compile(lambda x: torch.exp(x))
    for _ in range(2):
        x = torch.randn(4, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda place: seen[place] * 2):
            out = call(x)
        out.sum().backward()
        torch.testing.assert_close(x.grad, 2 * out.detach())
    assert all(type(tensor) is torch.Tensor for tensor in seen)


def _towers(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two outputs that share a leaf, a value without history and an op that saves nothing; and a third."""
    both = x.view(-1)
    first = (both * w).sin()
    return first, (both + y).exp() * w * first.detach(), F.dropout(y.square(), 0.5), (y > 0).sum()


@pytest.mark.parametrize("dynamic", [False, True])
def test_outputs_that_autograd_does_not_tie(dynamic: bool) -> None:
    """Each can be differentiated alone, once, and the inputs of the others notice nothing."""

    def train(call: Any) -> list[Any]:
        torch.manual_seed(0)
        x, y, w = (torch.randn(shape, requires_grad=True) for shape in ((2, 3), (6,), (6,)))
        seen: list[list[Any]] = [[], [], []]
        for calls, tensor in zip(seen, (x, y, w)):
            tensor.register_hook(lambda g, calls=calls: calls.append(g.clone()))
        outputs = call(x, y, w)
        outputs[0].sum().backward()
        outputs[2].sum().backward()
        (again,) = torch.autograd.grad(outputs[1].sum(), y, create_graph=True)
        again.square().sum().backward()
        outputs = call(x, y, w)
        sum(out.sum() for out in outputs[:3]).backward()
        return [*outputs, seen, x.grad, y.grad, w.grad]

    for a, b in zip(train(dovetail.compile(_towers, dynamic=dynamic)), train(_towers), strict=True):
        torch.testing.assert_close(a, b)


def test_outputs_apart_keep_only_their_own() -> None:
    x, y = (torch.randn(1000, requires_grad=True) for _ in range(2))
    first, second = compiled(lambda x, y: (x.exp(), (y * 2).tanh()), [x, y])(x, y)
    assert len(first.grad_fn.saved_tensors) == 1
    first.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        first.sum().backward()
    second.sum().backward()
    torch.testing.assert_close(y.grad, 2 * (1 - second**2))


def _writes(a: torch.Tensor) -> torch.Tensor:
    a.mul_(2)
    a[0] = 1.0
    return a.sin()


def _forgets(a: torch.Tensor) -> torch.Tensor:
    a.detach_()
    return a * 2


def _shows(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    b = a * 2
    with torch.no_grad():
        return b, b[0], a.view(-1)


def _is_flat(a: torch.Tensor) -> torch.Tensor:
    """Its gradient is zero whatever comes; not None, though another output has none."""
    larger, flat = a.square(), a.div(-1.0, rounding_mode="trunc")
    larger.tolist()
    return flat


@pytest.mark.parametrize("program", [_writes, _forgets, _shows, _is_flat])
@pytest.mark.parametrize("dynamic", [False, True])
def test_computed_inputs_and_their_histories(program: Any, dynamic: bool) -> None:
    def train(call: Any) -> list[Any]:
        torch.manual_seed(0)
        leaf = torch.randn(2, 3, requires_grad=True)
        a = leaf * 1
        outputs = call(a)
        outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
        seen = [(x.detach().clone(), x.requires_grad, x.is_leaf) for x in (a, *outputs)]
        sum((x * x.detach().sin()).sum() for x in (a, *outputs)).backward() if seen[0][1] else None
        return [seen, leaf.grad]

    torch.testing.assert_close(train(dovetail.compile(program, dynamic=dynamic)), train(program))


@pytest.mark.parametrize("dynamic", [False, True])
def test_views_among_outputs_are_views_of_what_they_are_in_eager(dynamic: bool) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = x[1], x.sin()[1:]
        beyond = a[2:].as_strided((2, 2), (1, 1), 6)
        return (a[1:], a, x[1][1:], a.view(-1), a.unfold(0, 2, 1)[1:], a.detach(), x.detach()[1], b[0], b, b[0],
                beyond)  # fmt: skip

    def train(call: Any) -> list[Any]:
        x = torch.arange(15.0).view(3, 5).requires_grad_()
        made = call(x)
        seen = [[t._is_view(), t._base is x, t.requires_grad] for t in made]
        own = [t for t in made if t.requires_grad]
        seen += [*torch.autograd.grad(own[0].sum(), own, allow_unused=True, retain_graph=True)]
        seen += [torch.autograd.grad(t.sum(), own[1], allow_unused=True, retain_graph=True)[0] for t in own]
        for t in own:
            t.retain_grad()
        sum(t.square().sum() for t in own).backward()
        return [*seen, *(t.grad for t in own), x.grad]

    for ours, eager in zip(train(dovetail.compile(program, dynamic=dynamic)), train(program), strict=True):
        assert (ours is None) == (eager is None)
        torch.testing.assert_close(ours, eager) if eager is not None else None


@pytest.mark.parametrize("name", ["unfold", "windows", "parts", "spread", "diagonal", "alias", "slices", "strides"])
def test_views_of_an_input_that_shares_memory_with_itself_get_the_gradient_of_eager(name: str) -> None:
    program: Any = {
        "unfold": lambda x: x.unfold(1, 2, 1),
        "windows": lambda x: x.unfold(1, 3, 1).unfold(0, 2, 1).movedim(0, 1),
        "parts": lambda x: x.unfold(1, 3, 1)[:, 1:].permute(2, 0, 1).select(0, 1),
        "spread": lambda x: x.unfold(1, 2, 1).unsqueeze(0).expand(2, -1, -1, -1),
        "diagonal": lambda x: x.unfold(0, 2, 1).diagonal(),
        "alias": lambda x: torch.ops.aten._reshape_alias(x, (1, *x.shape), (0, *x.stride())),
        "slices": lambda x: x[1:, ::2].diagonal(),
        "strides": lambda x: x.as_strided((3, 3), (1, 0)),
    }[name]

    def train(call: Any, memory: torch.Tensor) -> list[Any]:
        x = memory.detach().requires_grad_()
        y = call(x)
        (y * torch.arange(y.numel()).view_as(y)).sum().backward()
        before = y.detach().clone()
        with torch.no_grad():
            y.as_strided((1,), (1,)).mul_(3)
        return [before, y, y.stride(), y._is_view(), x, x.grad]

    ours = dovetail.compile(program)
    for memory in (lambda: torch.arange(6.0).view(6, 1).expand(6, 7), lambda: torch.arange(40.0).unfold(0, 5, 2)):
        torch.testing.assert_close(train(ours, memory()), train(program, memory()))


def test_what_is_made_in_inference_mode_is_an_inference_tensor() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 3))

    @torch.inference_mode()
    def program(x: torch.Tensor) -> Any:
        y = x.view(2, 4) @ weight
        return y, y.t(), x.view(4, 2), weight.t()[0] * 2

    x = torch.randn(8)
    made = dovetail.compile(program, fullgraph=True)(x)
    assert [t.is_inference() for t in made] == [True, True, False, True]
    torch.testing.assert_close(made, program(x))


def test_anomaly_detection_names_the_op() -> None:
    x = torch.zeros(4, requires_grad=True)
    call = dovetail.compile(lambda x: (torch.sqrt(x) * 0 / x).sum())
    call(x)
    with pytest.raises(RuntimeError, match="DivBackward0"), pytest.warns(UserWarning, match="Error detected"):
        with torch.autograd.set_detect_anomaly(True):
            call(x).backward()


def test_zeros_are_a_gradient_only_where_autograd_leads() -> None:
    x, w = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    outputs = dovetail.compile(lambda x, w: (x.floor(), w * 2))(x, w)
    first, second = (torch.autograd.grad(out.sum(), [x, w], allow_unused=True) for out in outputs)
    assert first[1] is None and torch.equal(first[0], torch.zeros(4))
    assert second[0] is None and torch.equal(second[1], torch.full((4,), 2.0))


def _stages(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each output is computed from those before."""
    first = torch.tanh(x @ w)
    second = F.dropout(first, 0.5) @ v
    return first, second, (second**2).sum() + first.sum() * 0.1


def _turned(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """An output that is a view of another one."""
    first = torch.tanh(x @ w)
    second = first.t()
    return first, second, ((second.t() @ v) ** 2).sum() + second.sum() * 0.1


def _cut(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of an input, one a view of the other."""
    first = x[1:]
    second = first.unfold(0, 2, 1)
    return first, second, ((second[:, :, 0] @ w @ v) ** 2).sum() + second.sum() * 0.1


def _look(first: Any, second: Any, loss: Any, leaves: list[Any]) -> list[Any]:
    """What eager lets one ask about outputs that others are computed from."""
    grads = [*torch.autograd.grad(loss, first, retain_graph=True)]
    grads += torch.autograd.grad(loss, [first, second, *leaves], retain_graph=True)
    grads += torch.autograd.grad(second.sum(), first, retain_graph=True)
    grads += torch.autograd.grad(first.sum(), loss, retain_graph=True, allow_unused=True)
    (again,) = torch.autograd.grad(loss, first, create_graph=True)
    grads += torch.autograd.grad(again.square().sum(), leaves, retain_graph=True)
    loss.backward(inputs=[first], retain_graph=True)
    (loss + first.square().sum()).backward(retain_graph=True)
    return [*grads, first.grad]


def _hook(first: Any, second: Any, loss: Any, leaves: list[Any]) -> list[Any]:
    seen: list[torch.Tensor] = []
    first.register_hook(lambda grad: grad * 2)
    second.register_hook(seen.append)
    del first, second
    loss.backward()
    return seen


def _again(first: Any, second: Any, loss: Any, leaves: list[Any]) -> list[Any]:
    """Gradients are functions of these outputs, too."""
    (own,) = torch.autograd.grad(loss, first, create_graph=True)
    wanted = [first, second, *leaves]
    grads = torch.autograd.grad(own.pow(3).sum(), wanted, create_graph=True)
    grads += torch.autograd.grad(sum(grad.sum() for grad in grads[:2]), wanted, create_graph=True)
    (other,) = torch.autograd.grad(loss, leaves[-1], create_graph=True)
    first.retain_grad()
    (loss + other.square().sum()).backward()
    return [*grads, first.grad]


def _nothing(first: Any, second: Any, loss: Any, leaves: list[Any]) -> list[Any]:
    loss /= 2
    loss.backward()
    return []


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("ask", [_look, _again, _hook, _nothing])
@pytest.mark.parametrize("program", [_stages, _turned, _cut])
def test_gradients_of_outputs_that_others_are_computed_from(program: Any, ask: Any, dynamic: bool) -> None:
    def train(call: Any) -> list[Any]:
        torch.manual_seed(0)
        shapes = ((5, 4), (4, 4), (4, 3))
        leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        found: list[Any] = []
        for _ in range(3):  # asked for once more, it is compiled
            found += ask(*call(*leaves), leaves)
        return [*found, *(leaf.grad for leaf in leaves)]

    for a, b in zip(train(dovetail.compile(program, dynamic=dynamic)), train(program), strict=True):
        torch.testing.assert_close(a, b)


def _hooked(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    v = x[1:]
    v.register_hook(lambda grad: grad * 2)
    return v, v[1:], v.square().sum()


@pytest.mark.parametrize(
    "program",
    [lambda x: (x[1:], x[1:].square().sum()), lambda x: (v := x[1:], v.exp().sum()),
     lambda x: (y := x.sin(), v := y[1:], w := v[1:], w.exp().sum() + y[0]), _hooked],
)  # fmt: skip
def test_hooks_stay_when_the_views_are_gone(program: Any) -> None:
    def train(call: Any) -> Any:
        x = torch.arange(4.0, requires_grad=True)
        made = list(call(x))
        for i in range(len(made) - 1):
            made[i].register_hook(lambda grad, i=i: None if grad is None else grad * (i + 3))
        last = made.pop()
        made.clear()
        (last * 2 if last.dim() == 0 else last.sum()).backward()
        return x.grad

    torch.testing.assert_close(train(dovetail.compile(program)), train(program))


@pytest.mark.parametrize("ask", ["retain", "hook", "grad"])
@pytest.mark.parametrize("has_view", [False, True])
def test_the_gradient_of_an_input_with_a_new_value(has_view: bool, ask: str) -> None:
    """Others are computed from it, or from a view of it."""

    def program(h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        view = h[1:]
        h.tanh_() if has_view else h.mul_(2)
        return (view, (view @ w).square().sum()) if has_view else (w, (h @ w).square().sum())

    def train(call: Any) -> list[Any]:
        leaf, w = torch.linspace(0, 1, 12).view(4, 3).requires_grad_(), torch.ones(3, 2, requires_grad=True)
        h = leaf * 2
        if ask == "retain":
            h.retain_grad()
        loss = call(h, w)[1]
        if ask == "hook":
            h.register_hook(lambda grad: grad * 3)
        seen = torch.autograd.grad(loss, h, retain_graph=True) if ask == "grad" else ()
        (loss + h.sum()).backward()
        return [*seen, leaf.grad, w.grad, *([h.grad] if ask == "retain" else [])]

    torch.testing.assert_close(train(dovetail.compile(program)), train(program))


@pytest.mark.parametrize("backend", ["aot_eager", "dovetail"])
def test_hooks_on_inputs_are_called_once_where_gradients_are_differentiated(backend: str) -> None:
    def program(n: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return n**2 + y * n

    found = []
    for call in (program, dovetail.compile(program, backend=backend)):
        x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        n, seen = x * 1, []
        n.retain_grad()
        n.register_hook(lambda grad, seen=seen: seen.append(grad.tolist()))
        (grad,) = torch.autograd.grad(call(n, y).sum(), y, create_graph=True, allow_unused=True)
        call(n, y).sum().backward(create_graph=True)
        found.append((grad.tolist(), seen, n.grad.tolist(), x.grad.tolist(), y.grad.tolist()))
    assert found[0] == found[1]


def test_what_torch_computes_of_numbers_may_be_a_size() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        chunks = torch.div(x.size(1), 4, rounding_mode="trunc") - 1
        return x.new_ones((2, chunks + 1)) * chunks

    x = torch.ones(1, 16)
    torch.testing.assert_close(dovetail.compile(program, fullgraph=True)(x), program(x))


class TwoHeads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.trunk(x).relu()
        return self.first(y), self.second(y)


def test_hooks_of_a_head_whose_output_nobody_used_are_not_called() -> None:
    torch.manual_seed(0)
    net, x, seen = TwoHeads(), torch.randn(5, 3), list[Any]()
    for name, parameter in net.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.append((name, gradient.clamp(-1, 1))))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((name, p.grad + 1)))
    found = []
    for call in (net, dovetail.compile(net)):
        for heads in ((0,), (1,), (0, 1), (0,)):
            net.zero_grad()
            outputs = call(x)
            sum(outputs[i].square().sum() for i in heads).backward()  # type: ignore[union-attr]
        found.append(sorted(seen, key=lambda entry: (entry[0], float(entry[1].sum()))))
        seen.clear()
    torch.testing.assert_close([value for _, value in found[1]], [value for _, value in found[0]])
    assert [name for name, _ in found[0]] == [name for name, _ in found[1]]


def test_contexts_that_a_checkpoint_is_given() -> None:
    """Torch's own, which say what to save, are the partitioner's business; others may change results."""
    x, w = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)

    def within(contexts: Any) -> Any:
        return lambda x: checkpoint(lambda x: (x @ w).sin(), x, use_reentrant=False, context_fn=contexts)

    rounded = within(lambda: [torch.autocast("cpu", torch.bfloat16) for _ in range(2)])
    torch.testing.assert_close(dovetail.compile(rounded)(x), rounded(x))
    saving = within(partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]))
    torch.testing.assert_close(dovetail.compile(saving, fullgraph=True)(x), saving(x))


def test_a_write_between_that_backward_refuses_is_no_failure() -> None:
    """Also where forward says what is kept for backward, which then cannot be looked at."""

    def f(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = x @ n.t()
        n.mul_(2)
        return product, n * 1

    x, n = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True) * 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        product, scaled = dovetail.compile(f)(x, n)
    assert scaled.sum().backward() is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("program", [
    lambda x: x.sin() * 2,
    lambda x: x * (1 + 2j),
    lambda x: (x * (1 + 2j)).conj(),
    lambda x: torch.fft.ihfft(x),
    lambda x: (x * (1 + 2j)).conj().imag,
])  # fmt: skip
def test_gradients_that_are_lazily_conjugated_or_negated(program: Any) -> None:
    """Kernels read memory, where such a tensor has other numbers."""
    x = torch.randn(6, requires_grad=True)
    call = dovetail.compile(program)
    plain = torch.randn_like(program(x))
    for tangent in (plain, plain._neg_view(), plain.conj(), plain.conj()._neg_view()):
        (ours,) = torch.autograd.grad(call(x), x, tangent)
        (theirs,) = torch.autograd.grad(program(x), x, tangent)
        torch.testing.assert_close(ours, theirs)


def test_a_gradient_that_lies_as_expected_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Any] = []
    noted = lambda x, stride: copied.append(stride) or restride(x, stride)  # type: ignore[func-returns-value]  # noqa: E731
    noted.__name__ = "restride"
    monkeypatch.setattr(sys.modules["dovetail.aot.bind"], "restride", noted)
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    grad = torch.randn(2, 3, 4, 4)
    compiled = dovetail.compile(lambda x: (x.sin(), x.sum()))
    for given, copies in ((grad.to(memory_format=torch.channels_last), 0), (grad, 1)):
        y, _ = compiled(x)  # nobody asks for the sum's part
        y.backward(given)
        torch.testing.assert_close(x.grad, grad * x.cos())
        assert len(copied) == copies
        x.grad = None
