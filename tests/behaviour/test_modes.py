"""SPEC C9 and A5: grad mode, inference mode, autocast, random numbers, custom functions, functional transforms."""
from __future__ import annotations

import copy
import enum
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint

import dovetail
from tests.behaviour.running import ANY, BACKENDS, Suite

suite = Suite()
case = suite.case


def x34() -> torch.Tensor:
    return torch.randn(3, 4, requires_grad=True)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, k: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.k = k
        return x**3 * k

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * 7 * x * ctx.k, None


@torch.library.custom_op("dovetail_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, k: float) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy() * k)


@scaled.register_fake
def _(x: torch.Tensor, k: float) -> torch.Tensor:
    return torch.empty_like(x)


scaled.register_autograd(lambda ctx, grad: (grad * ctx.k, None), setup_context=lambda ctx, inputs, output: setattr(ctx, "k", inputs[1]))


@torch.library.custom_op("dovetail_tests::bump_", mutates_args=("x",))
def bump_(x: torch.Tensor, k: float) -> None:
    x.numpy()[...] += k


@case("C9")
def no_grad_block() -> Any:
    def f(x: torch.Tensor) -> Any:
        with torch.no_grad():
            y = x * 2
        z = x * 3
        return y, z, torch.is_grad_enabled()

    return f, (x34(),)


@case("C9")
def switches_of_torch() -> Any:
    def f(q: torch.Tensor) -> Any:
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
            y = F.scaled_dot_product_attention(q, q, q)
        torch.set_default_dtype(torch.float64)
        ones = torch.ones(2)
        torch.set_default_dtype(torch.float32)
        return y * 2, ones, torch.ones(2), torch.backends.cuda.flash_sdp_enabled()

    return f, (torch.randn(1, 2, 4, 8, requires_grad=True),)


@case("C9", breaks=1)
def a_switch_left_on_and_a_break_while_it_is() -> Any:
    def f(x: torch.Tensor) -> Any:
        torch.set_default_dtype(torch.float64)
        y = x + torch.ones(2)
        print("here")
        return y, torch.ones(2), torch.get_default_dtype()

    def after() -> Any:
        left = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        return left

    return f, (torch.ones(2),), after


@case("C9", breaks=ANY)
def the_largest_of_some_tensors() -> Any:
    """One of them, not a copy: which one is in the data."""

    def f(xs: list[torch.Tensor]) -> Any:
        low = min(xs[0].mean(), xs[1].mean())
        max(xs[0][0], xs[1][0]).detach().add_(1)
        return max(x.sum() for x in xs) * low, max(xs[0].sum() * float("nan"), xs[1].sum())

    return f, ([torch.randn(3, requires_grad=True) for _ in range(3)],)


@case("C9")
def conjugates_resolved() -> Any:
    def f(x: torch.Tensor) -> Any:
        return torch.view_as_real(x.conj().resolve_conj()), torch.resolve_neg(x.conj().imag), x.is_conj()

    return f, (torch.randn(3, 3, dtype=torch.complex64),)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "dovetail", lambda module, examples: module])
@pytest.mark.parametrize("mode", [torch.autocast("cpu", torch.bfloat16), torch.no_grad(), torch.inference_mode()])
def test_modes_are_as_they_were_where_a_graph_raises(mode: Any, backend: Any) -> None:
    def f(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        with mode:
            y = (x @ x)[i]
        return y * 2

    compiled = dovetail.compile(f, backend=backend)
    for _ in range(2):
        with pytest.raises(IndexError):
            compiled(torch.randn(3, 3), torch.tensor([7]))
        assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        assert torch.autocast_increment_nesting() == 1
        torch.autocast_decrement_nesting()
    torch.testing.assert_close(compiled(torch.ones(3, 3), torch.tensor([0])), f(torch.ones(3, 3), torch.tensor([0])))


@pytest.mark.parametrize("name", ["scatter", "index", "embedding", "embedding_bag", "take", "put", "one_hot"])
@pytest.mark.parametrize("at", [-99, 99])
@pytest.mark.parametrize("is_read", [True, False])
def test_positions_out_of_range_raise_what_eager_raises(name: str, at: int, is_read: bool) -> None:
    def f(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        found: dict[str, Any] = {
            "scatter": lambda: x.scatter(0, i[:, None], 1.0),
            "index": lambda: x[i], "embedding": lambda: torch.nn.functional.embedding(i, x),
            "take": lambda: x.take(i), "one_hot": lambda: torch.nn.functional.one_hot(i, 3),
            "put": lambda: x.clone().put_(i, x[0, :2]),
            "embedding_bag": lambda: torch.nn.functional.embedding_bag(i[None], x),
        }  # fmt: skip
        made = found[name]() * 2
        return made if is_read else x + 1  # type: ignore[no-any-return]

    compiled = dovetail.compile(f, options={"fallback_to_eager": False})
    x, good, bad = torch.randn(3, 3), torch.tensor([0, 2]), torch.tensor([0, at])
    torch.testing.assert_close(compiled(x, good), f(x, good))
    with pytest.raises((IndexError, RuntimeError)) as eager:
        f(x, bad)
    with pytest.raises(eager.type):
        compiled(x, bad)


@case("C9")
def no_grad_decorator_and_nesting() -> Any:
    @torch.no_grad()
    def frozen(x: torch.Tensor) -> Any:
        with torch.enable_grad():
            inner = x * 5
        return x * 2, inner

    def f(x: torch.Tensor) -> Any:
        with torch.set_grad_enabled(False):
            a = x + 1
        return frozen(x), a, x.sin()

    return f, (x34(),)


@case("C9")
def grad_mode_outside_changes() -> Any:
    def g(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sum()

    return g, [(x34(),), (torch.randn(3, 4),), (x34(),)]


@case("C9", breaks=ANY)
def grad_mode_left_changed() -> Any:
    def f(x: torch.Tensor, on: bool) -> Any:
        torch.set_grad_enabled(on)
        return x * 2

    return f, [(x34(), False), (x34(), True)], lambda: torch.is_grad_enabled()


@case("C9")
def inference_mode_block() -> Any:
    def f(x: torch.Tensor) -> Any:
        with torch.inference_mode():
            y = x * 2
            inside = torch.is_inference_mode_enabled()
        return x + 1, inside, y.shape

    return f, (torch.randn(3, 4),)


@case("C9")
def autocast_bfloat16() -> Any:
    lin = torch.nn.Linear(4, 5)

    def f(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = lin(x)
            z = F.softmax(y, -1)
            with torch.autocast("cpu", enabled=False):
                w = y.float() @ y.float().T
        return y, z, w, x @ x.T

    return f, (x34(),)


@case("C9")
def dropout_same_numbers() -> Any:
    return lambda x: F.dropout(x, 0.3) + F.dropout(x * 2, 0.5), [(x34(),), (x34(),)]


@case("C9")
def random_factories_same_numbers() -> Any:
    def f(x: torch.Tensor) -> Any:
        return (torch.rand(3), torch.randn_like(x), torch.randint(0, 10, (4,)), torch.bernoulli(torch.full((5,), 0.5)),
                torch.normal(0.0, 1.0, (3,)), torch.randperm(6), torch.empty(3).uniform_(), torch.rand_like(x) + x,
                torch.multinomial(torch.ones(6), 3), torch.empty(4).exponential_())

    return f, (x34(),)


@case("C9", breaks=ANY)
def manual_seed_inside() -> Any:
    def f(x: torch.Tensor) -> Any:
        torch.manual_seed(42)
        return x + torch.rand(3, 4)

    return f, [(x34(),), (x34(),)]


@case("C9", breaks=ANY)
def generator_argument() -> Any:
    def f(x: torch.Tensor) -> Any:
        g = torch.Generator().manual_seed(3)
        return x + torch.rand(3, 4, generator=g)

    return f, (x34(),)


@case("C9")
def custom_autograd_function() -> Any:
    return lambda x: Cube.apply(x.sin(), 2.0) + 1, (x34(),)


class Way(enum.IntEnum):
    UP, DOWN = 1, 2


class Kind(enum.Enum):
    ODD, EVEN = 1, 2


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: Way, kind: Kind) -> torch.Tensor:
        ctx.way = way
        return x * 2 if way is Way.UP and kind is Kind.ODD else x * 3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 2 if ctx.way is Way.UP else grad * 3, None, None


@case("C9")
def custom_autograd_function_of_enums() -> Any:
    return lambda x, way: Turned.apply(x, way, Kind.ODD) + 1, [(x34(), Way.UP), (x34(), Way.DOWN)]


@case("C9")
def custom_autograd_function_without_grad() -> Any:
    return lambda x: Cube.apply(x, 2.0) * 2, (torch.randn(3),)


@case("C9")
def custom_op() -> Any:
    return lambda x: torch.ops.dovetail_tests.scaled(x * 2, 3.0).relu() + scaled(x, 0.5), (x34(),)


@case("C9")
def custom_op_mutating() -> Any:
    def f(x: torch.Tensor) -> Any:
        y = x * 2
        bump_(y, 3.0)
        return y + 1

    return f, (torch.randn(3),)


@case("C9", breaks=ANY)
def checkpointing() -> Any:
    lin = torch.nn.Linear(4, 4)

    def block(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.tanh(lin(x)), 0.5)

    return lambda x: checkpoint(block, x, use_reentrant=False) * 2, (x34(),)


@case("C9", breaks=ANY, tensors=False)
def func_grad() -> Any:
    return lambda x: torch.func.grad(lambda t: (t**3).sum())(x), (torch.randn(4),)


@case("C9")
def func_vmap() -> Any:
    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        return torch.func.vmap(lambda row: (row * w).sum())(x)

    return f, (x34(), torch.randn(4, requires_grad=True))


@case("C9")
def func_vmap_over_nothing() -> Any:
    return lambda x, w: torch.func.vmap(lambda a, b: a * b + 1)(x[:0], w[:0]), (x34(), torch.randn(3, 4))


@case("C9")
def func_vmap_itself_compiled() -> Any:
    return torch.func.vmap(lambda a, b: (a * b).sum()), (x34(), torch.randn(3, 4))


@case("C9")
def func_per_sample_gradients() -> Any:
    model = torch.nn.Linear(3, 2)

    def loss(weights: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return torch.nn.functional.mse_loss(torch.func.functional_call(model, weights, (x,)), y)

    def f(weights: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, x, y)

    weights = {name: value.detach() for name, value in model.named_parameters()}
    return f, [(weights, torch.randn(n, 3), torch.randn(n, 2)) for n in (5, 4, 6)]


@case("C9")
def func_derivatives() -> Any:
    def energy(x: torch.Tensor) -> torch.Tensor:
        return (x**3).sum() / x.shape[0]

    def f(x: torch.Tensor) -> Any:
        tangents = torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))
        return torch.func.jacrev(torch.sin)(x), torch.func.jacfwd(torch.cos)(x), torch.func.hessian(energy)(x), tangents

    return f, [(torch.randn(n),) for n in (3, 4, 5)]


@case("C9", breaks=ANY)
def func_in_chunks() -> Any:
    """Which draw the same numbers for each chunk, and whose size is a number that changes."""

    def f(x: torch.Tensor, chunk: int) -> Any:
        noisy = torch.func.vmap(lambda row: torch.rand_like(row) + row, randomness="same", chunk_size=chunk)
        slopes = torch.func.jacrev(torch.sin, chunk_size=chunk, _preallocate_and_copy=True)
        return noisy(x), slopes(x), torch.func.vmap(torch.cos, chunk_size=chunk)(x)

    return f, [(torch.ones(6, 2), chunk) for chunk in (1, 2, 3, 4)]


@case("C9", tensors=False)
def func_of_slices_that_are_written() -> Any:
    def copied(x: torch.Tensor, y: torch.Tensor) -> Any:
        view = x[0, ::2]
        x.copy_(y)
        return x, view

    def push(x: torch.Tensor, xt: torch.Tensor, y: torch.Tensor, yt: torch.Tensor) -> Any:
        return torch.func.jvp(copied, (x, y), (xt, yt))

    def f(x: torch.Tensor, xt: torch.Tensor) -> Any:
        return torch.func.vmap(push, in_dims=(1, 2, 1, 1))(x.clone(), xt, x + 1, x + 2)

    return f, (torch.randn(2, 2, 6), torch.randn(2, 6, 2))


@case("C9", recompiles=0)
def pullbacks() -> Any:
    weight = torch.randn(4, requires_grad=True)

    def f(x: torch.Tensor, many: torch.Tensor) -> Any:
        values, pull, kept = torch.func.vjp(lambda t: ((t * weight).tanh(), {"kept": t + 1}), x, has_aux=True)
        pairs, pull_pairs = torch.func.vjp(lambda a, b: {"sum": a.sin() + b, "product": a * b}, x, x * 2)
        rows = torch.func.vmap(pull)(many)[0]
        return values, pull(x)[0] + pull(many[0])[0], kept, pull_pairs(pairs), rows

    return f, [(torch.randn(4, requires_grad=True), torch.randn(3, 4)) for _ in range(2)]


@case("C9", recompiles=0)
def hooks_on_what_is_computed() -> Any:
    def f(x: torch.Tensor, mask: torch.Tensor, most: float) -> Any:
        y = x * 2
        y.register_hook(lambda grad: (grad * mask).clamp(-most, most))
        y.register_hook(lambda grad: None)
        y.mul_(3)
        z = y.view_as(y)
        z.register_hook(torch.neg)
        return (y.sin() + z.cos()).sum()

    return f, [(torch.randn(4, requires_grad=True), torch.randn(4), most) for most in (0.1, 0.1)]


@case("C9", breaks=4)
def hooks_on_what_is_returned() -> Any:
    def f(x: torch.Tensor) -> Any:
        y = x.sin()
        y.register_hook(torch.neg)
        return y.exp().sum(), y

    def g(x: torch.Tensor) -> Any:
        total, y = f(x)
        y.retain_grad()  # sees the gradient behind the hook
        total.backward()
        return y.grad, x.grad

    return g, [(torch.randn(4, requires_grad=True),) for _ in range(2)]


@case("C9", breaks=3)
def hooks_on_a_view_that_is_returned() -> Any:
    def f(x: torch.Tensor, mask: torch.Tensor, most: float) -> Any:
        y = x * 2
        y.register_hook(lambda grad: (grad * mask).clamp(-most, most))
        y.register_hook(lambda grad: None)
        y.mul_(3)
        z = y.view_as(y)
        z.register_hook(torch.neg)
        return (y.sin() + z.cos()).sum(), z

    return f, [(torch.randn(4, requires_grad=True), torch.randn(4), most) for most in (0.1, 0.1)]


@case("C9", breaks=1)
def hooks_on_a_view_beside_what_it_shows() -> Any:
    def f(x: torch.Tensor) -> Any:
        y = x * 2
        z = y.view(2, 2)
        z.register_hook(lambda grad: grad + 1)
        return z, y

    return f, [(torch.randn(4, requires_grad=True),) for _ in range(2)]


@case("C9", breaks=1)
def hooks_on_a_view_of_an_input() -> Any:
    def f(x: torch.Tensor) -> Any:
        y = x.view(2, 2)
        y.register_hook(lambda grad: grad + 1)
        return y.t(), y

    return f, [(torch.randn(4, requires_grad=True),) for _ in range(2)]


@case("C3", breaks=1)
def hooks_with_side_effects() -> Any:
    seen: list[torch.Tensor] = []

    def f(x: torch.Tensor) -> Any:
        y = x * 2
        y.register_hook(lambda grad: seen.append(grad * 2))
        return y.sin().sum()

    return f, [(torch.randn(4, requires_grad=True),) for _ in range(2)], lambda: seen


@case("C9")
def a_gradient_is_deleted() -> Any:
    weight = torch.ones(4, requires_grad=True)
    weight.grad = torch.ones(4)

    def f(x: torch.Tensor) -> Any:
        del weight.grad
        return x * weight, weight.grad is None

    return f, (torch.randn(4),), lambda: weight.grad


@case("C3", breaks=2)
def hooks_that_fill_a_list_of_the_function() -> Any:
    def f(x: torch.Tensor) -> Any:
        y = x * 2
        print("ready")
        seen = [0.0]

        def hook(grad: torch.Tensor) -> None:
            seen[0] += 1.0

        y.register_hook(hook)
        return y.sin().sum(), seen

    return f, [(torch.randn(4, requires_grad=True),) for _ in range(2)]


@case("C3", breaks=1)
def a_copy_of_a_leaf() -> Any:
    weight = torch.randn(4, requires_grad=True)

    def f(x: torch.Tensor) -> Any:
        return x * 2 + copy.deepcopy(weight) + copy.deepcopy(x.detach())

    return f, (torch.randn(4, requires_grad=True),)


@case("C9", breaks=ANY, tensors=False)
def forward_mode_inside() -> Any:
    def f(x: torch.Tensor, tangent: torch.Tensor) -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(forward_ad.make_dual(x, tangent).sin() * 2).tangent

    return f, (torch.randn(3), torch.randn(3))


@case("C9", breaks=ANY)
def autograd_grad_inside() -> Any:
    def f(x: torch.Tensor) -> Any:
        y = (x**3).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return g * 2

    return f, (x34(),)


@case("C9", breaks=ANY)
def backward_inside() -> Any:
    w = torch.nn.Parameter(torch.ones(4))

    def f(x: torch.Tensor) -> Any:
        loss = (x @ w).pow(2).sum()
        loss.backward()
        return loss.detach()

    return f, [(torch.ones(2, 4),)] * 2, lambda: w.grad


@case("C9", breaks=ANY)
def torch_cond() -> Any:
    def f(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t * 2, (x,))

    return f, [(torch.ones(3),), (-torch.ones(3),)]


@case("C9", breaks=ANY)
def while_loop() -> Any:
    def f(x: torch.Tensor) -> Any:
        from torch._higher_order_ops import while_loop as loop

        return loop(lambda i, t: i < 4, lambda i, t: (i + 1, t * 2), (torch.tensor(0), x))

    return f, (torch.ones(3),)


@case("C9", breaks=ANY)
def numpy_calls() -> Any:
    def f(x: torch.Tensor) -> Any:
        a = np.sin(x.numpy()) + np.ones(4)
        return torch.from_numpy(a.sum(keepdims=True)), np.prod((2, 3)), x * np.sqrt(2.0)

    return f, (torch.ones(4),)


@case("C9", breaks=ANY)
def sgd_training_step() -> Any:
    m = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = m(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, [(torch.ones(3, 4),)] * 4, lambda: m.state_dict()


@case("C9", breaks=ANY)
def adamw_step() -> Any:
    ws = [torch.nn.Parameter(torch.ones(n, 3)) for n in (1, 2, 3)]
    optimizer = torch.optim.AdamW(ws, lr=0.1)

    def step(k: float) -> Any:
        for w in ws:
            w.grad = torch.full_like(w, k)
        optimizer.step()

    return step, [(0.5,), (1.0,), (2.0,), (3.0,)], lambda: ws


@case("C9")
def functional_call() -> Any:
    m = torch.nn.Linear(4, 2)
    twin = {k: v.detach() * 2 for k, v in m.named_parameters()}
    return lambda x: torch.func.functional_call(m, twin, (x,)), (torch.randn(3, 4),)


@case("C9")
def default_dtype_inside_factory() -> Any:
    return lambda x: torch.zeros(3) + x[0, :3] + torch.tensor(2.5), (x34(),)


@case("C9")
def is_compiling_markers() -> Any:
    def f(x: torch.Tensor) -> Any:
        return x + 1 if isinstance(torch.compiler.is_compiling(), bool) else x

    return f, (x34(),)


@case("C9")
def half_precision_rounding() -> Any:
    def f(x: torch.Tensor) -> Any:
        y = x * 1.001 + 0.1
        return (y - x) * 100, y.sum(), torch.softmax(y, -1), F.gelu(y.abs())

    return f, [(torch.randn(8, 16).bfloat16(),), (torch.randn(8, 16).half(),)]


@case("C9", breaks=ANY)
def packed_saved_tensor_hooks() -> Any:
    def f(x: torch.Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
            return (x.sin() * x).exp()

    return f, (x34(),)


test_program = suite.test()


@pytest.mark.parametrize("backend", ["eager", "dovetail"])
def test_rng_state_advances_as_in_eager(backend: str) -> None:
    f = dovetail.compile(lambda x: F.dropout(x, 0.5), backend=backend)
    x = torch.ones(100)
    torch.manual_seed(3)
    ours = [f(x), f(x), torch.rand(3)]
    torch.manual_seed(3)
    theirs = [F.dropout(x, 0.5), F.dropout(x, 0.5), torch.rand(3)]
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def test_is_compiling_is_true_inside_and_false_outside() -> None:
    seen = []

    @dovetail.compile(backend="eager")
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if dovetail.is_compiling() else x * 3

    assert torch.equal(f(torch.ones(2)), torch.full((2,), 2.0)), seen
    assert not dovetail.is_compiling()


def test_compiled_function_under_transforms() -> None:
    """Under torch.func and with dual numbers a compiled function runs in eager, and is compiled again after."""
    dovetail.reset()
    x, tangent = torch.randn(3), torch.randn(3)
    compiled = dovetail.compile(lambda x: x.sin() * 2)
    for _ in range(2):
        with forward_ad.dual_level():
            result = compiled(forward_ad.make_dual(x, tangent))
            torch.testing.assert_close(forward_ad.unpack_dual(result).tangent, tangent * x.cos() * 2)
        torch.testing.assert_close(torch.func.vmap(compiled)(x), x.sin() * 2)
        torch.testing.assert_close(compiled(x), x.sin() * 2)
    assert dovetail.stats()["graphs"] == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_modes_after_an_exception_in_the_graph(backend: str) -> None:
    def f(x: torch.Tensor) -> Any:
        with torch.no_grad():
            return torch.linalg.inv(x)

    with pytest.raises(torch.linalg.LinAlgError):
        dovetail.compile(f, backend=backend)(torch.zeros(2, 2))
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_switched_on_inside(mode: Any) -> None:
    """One graph where nothing needs them, as in distributions; in Python where something does. A check of an
    inference tensor breaks: nothing counts how often that was written."""
    weight = torch.nn.Parameter(torch.ones(3))

    def unneeded(x: torch.Tensor) -> Any:
        y = x + weight
        with torch.enable_grad():
            y = y * 2
        return y, torch.distributions.Categorical(logits=y).entropy(), torch.is_grad_enabled()

    def needed(x: torch.Tensor) -> Any:
        y = x + 1
        with torch.enable_grad():
            z = y * weight
        return z, torch.is_grad_enabled()

    for program in (unneeded, needed):
        whole = program is unneeded and mode is torch.no_grad
        compiled = dovetail.compile(program, fullgraph=whole, options={"fallback_to_eager": False})
        for x in (torch.arange(3.0), torch.arange(3.0, requires_grad=True)):
            with mode():
                found, wanted = compiled(x), program(x)
            torch.testing.assert_close(found, wanted)
            assert [t.requires_grad for t in found[:-1]] == [t.requires_grad for t in wanted[:-1]]


@pytest.mark.parametrize("backend", ["aot_eager", "dovetail"])
def test_tensors_of_inference_mode_beside_what_is_trained(backend: str) -> None:
    """They have no version, and autograd saves none of them; but what is computed of them it does."""
    with torch.inference_mode():
        features = torch.arange(6.0).reshape(2, 3)

    def program(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return (x + 1) * weight + x, x.detach(), x[0]

    found, wanted = [], []
    for call, results in ((dovetail.compile(program, backend=backend), found), (program, wanted)):
        weight = torch.ones(3, requires_grad=True)
        out = call(features, weight)
        out[0].sum().backward()
        results += [*out, weight.grad, *(t.is_inference() for t in out)]
    torch.testing.assert_close(found, wanted)
    for call in (dovetail.compile(lambda x, w: x * w, backend=backend), dovetail.compile(torch.mul, backend=backend)):
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            call(features, torch.ones(3, requires_grad=True))


def asks_for_modes(x: torch.Tensor) -> torch.Tensor:
    found = torch._C._len_torch_function_stack() + 10 * torch._C._len_torch_dispatch_stack()
    asked = (torch._C._is_torch_function_mode_enabled(), is_in_torch_dispatch_mode())
    return x + found + 100 * asked[0] + 1000 * asked[1]


def test_modes_of_capture_are_not_the_programs() -> None:
    dovetail.reset()
    compiled = dovetail.compile(asks_for_modes, backend="eager", fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(torch.zeros(2)), torch.zeros(2))
    assert dovetail.stats()["recompiles"] == 0
    with torch.device("cpu"):
        assert torch.equal(compiled(torch.zeros(2)), asks_for_modes(torch.zeros(2)))


@pytest.mark.parametrize("dynamic", [None, True])
def test_an_inference_tensor_beside_a_normal_one(dynamic: bool | None) -> None:
    def program(x: torch.Tensor) -> Any:
        with torch.inference_mode():
            y = x * 2
            turned = (x + 3).t()
        return y, x + 1, y[1:], turned

    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    found, wanted = dovetail.compile(program, dynamic=dynamic, fullgraph=True)(x), program(x)
    torch.testing.assert_close(found, wanted)
    for made, eager in zip(found, wanted):
        assert (made.is_inference(), made.stride()) == (eager.is_inference(), eager.stride())
    assert found[2].untyped_storage().data_ptr() == found[0].untyped_storage().data_ptr()
    found[1].sum().backward()
    assert x.grad.eq(1).all()
