"""SPEC A1 to A5: views, mutation, aliasing and gradients behave as in eager.

The first part is a product: every way to make a view x every way to change it in place x what is
changed (an input, a view of an input, a fresh tensor, a buffer). The second part is by hand.
"""
from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

import dovetail
from tests.behaviour.running import ANY, Program, Suite, check_program

Step = Callable[[torch.Tensor], torch.Tensor]

VIEWS: Final[dict[str, Step]] = {
    "itself": lambda x: x,
    "row": lambda x: x[1],
    "slice": lambda x: x[:, 1:3],
    "step": lambda x: x[::2],
    "transpose": lambda x: x.t(),
    "reshape": lambda x: x.view(-1),
    "diagonal": lambda x: x.diagonal(),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "split": lambda x: x.split(2, 1)[1],
    "as_strided": lambda x: x.as_strided((2, 2), (4, 1), 1),
    "view_of_view": lambda x: x.t()[1:3].unsqueeze(0),
    "detach": lambda x: x.detach(),
}
CHANGES: Final[dict[str, Step]] = {
    "mul_": lambda v: v.mul_(2.0),
    "add_out": lambda v: torch.add(v, 1.0, out=v),
    "copy_": lambda v: v.copy_(torch.ones_like(v) * 3),
    "setitem": lambda v: (v.__setitem__((0,), 5.0), v)[1],
    "relu_": lambda v: v.relu_(),
}
TARGETS: Final = ("input", "fresh", "buffer")


def make_program(view: str, change: str, target: str) -> Callable[[], Any]:
    def make() -> Any:
        buffer = torch.arange(16.0).reshape(4, 4) - 7
        source = torch.arange(16.0).reshape(4, 4) - 5

        def f(x: torch.Tensor) -> Any:
            base = {"input": x, "fresh": x * 1.5, "buffer": buffer}[target]
            before = base + 1
            v = VIEWS[view](base)
            CHANGES[change](v)
            return base * 2, v + 1, before, VIEWS[view](base)

        return f, [(source,), (source + 3,)], lambda: buffer

    return make


MUTATIONS: Final = [
    Program("A2", f"{view}-{change}-{target}", make_program(view, change, target), same_storage=True)
    for view, change, target in itertools.product(VIEWS, CHANGES, TARGETS)
]
CHOSEN: Final = MUTATIONS[:: 3]


@pytest.mark.parametrize("program", CHOSEN, ids=[p.name for p in CHOSEN])
def test_mutation(program: Program) -> None:
    check_program(program, "dovetail")


def make_training_program(view: str, change: str) -> Callable[[], Any]:
    def make() -> Any:
        def f(x: torch.Tensor) -> Any:
            y = x * 2
            v = VIEWS[view](y)
            CHANGES[change](v)
            return y.sin(), (v * 3).sum()

        return f, (torch.randn(4, 4, requires_grad=True),)

    return make


# Not "split": eager refuses to change one of several views that one call made, and differentiate it.
TRAINING: Final = [
    Program("A2", f"{view}-{change}", make_training_program(view, change))
    for view, change in itertools.product(VIEWS, ("mul_", "copy_", "setitem")) if view not in ("detach", "split")
]


@pytest.mark.parametrize("program", TRAINING, ids=[p.name for p in TRAINING])
def test_mutation_with_gradient(program: Program) -> None:
    check_program(program, "dovetail")


suite = Suite()
case = suite.case


@case("A2", breaks=ANY)
def leaf_made_inside() -> Any:
    def f(x: torch.Tensor) -> Any:
        w = torch.ones(4, requires_grad=True)
        y = (x * w).sum()
        (grad,) = torch.autograd.grad(y, w)
        return w.requires_grad, grad

    return f, (torch.randn(3, 4),)


@case("A2", breaks=ANY)
def places_are_counted_from_where_memory_begins() -> Any:
    def f(x: torch.Tensor) -> Any:
        return x.as_strided((2, 2), (4, 1), 1) * 2, torch.as_strided(x[1:], (2,), (4,), 3) + 1, x.as_strided((2,), (1,))

    return f, [(torch.randn(n + 4, 4)[n:],) for n in (0, 2, 3)]


@case("A2", same_storage=True)
def variables_of_older_programs() -> Any:
    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        state = Variable(torch.zeros(3), requires_grad=False)
        detached, leaf = Variable(x * w), Variable(x * 2, True)
        (grad,) = torch.autograd.grad((leaf**2).sum(), leaf)
        seen = isinstance(detached, Variable), detached.requires_grad, leaf.requires_grad
        return x * w + state + detached, Variable(x), grad, seen

    return f, (torch.randn(2, 3), torch.randn(3, requires_grad=True))


@case("A2", same_storage=True)
def rows_of_a_computed_tensor_laid_out_anew() -> Any:
    x = torch.randn(3, 8, requires_grad=True)
    return lambda rows: rows.contiguous(), [((x * 2)[:, :4],), (x.T,)]


@case("A2", same_storage=True)
def outputs_alias_input() -> Any:
    return lambda x: (x, x.view(-1), x[0], x.t(), x * 1), (torch.randn(3, 4),)


@case("A2", same_storage=True)
def outputs_alias_each_other() -> Any:
    def f(x: torch.Tensor) -> Any:
        y = x + 1
        return y, y[0], y.view(-1), y.detach()

    return f, (torch.randn(3, 4, requires_grad=True),)


@case("A2")
def same_tensor_twice() -> Any:
    def f(a: torch.Tensor, b: torch.Tensor) -> Any:
        a.add_(1)
        return a * b, b + 1

    t = torch.ones(3)
    return f, [(t, t), (torch.ones(3), torch.ones(3))]


@case("A2", breaks=ANY)
def overlapping_inputs() -> Any:
    def f(a: torch.Tensor, b: torch.Tensor) -> Any:
        a.mul_(2)
        return a + b

    base = torch.arange(6.0)
    return f, [(base[:4], base[2:]), (torch.ones(4), torch.ones(4))]


@case("A2")
def input_mutated_then_returned() -> Any:
    def f(x: torch.Tensor) -> Any:
        x.add_(1)
        y = x * 2
        x.mul_(3)
        return x, y

    return f, (torch.ones(3),)


@case("A2")
def metadata_mutation() -> Any:
    def f(x: torch.Tensor) -> Any:
        y = x.clone()
        y.t_()
        y.unsqueeze_(0)
        return y * 2, y.squeeze_(0).shape

    return f, (torch.randn(2, 3),)


@case("A2")
def batch_norm_statistics() -> Any:
    m = torch.nn.BatchNorm1d(4)
    return m, [(torch.randn(8, 4),)] * 3, lambda: m.state_dict()


@case("A2")
def kv_cache_update() -> Any:
    cache = torch.zeros(2, 8, 3)

    def f(x: torch.Tensor, position: torch.Tensor) -> Any:
        cache.index_copy_(1, position, x)
        cache[:, :1] += 1
        return cache[:, :4].sum(-1)

    return f, [(torch.randn(2, 1, 3), torch.tensor([n])) for n in range(3)], lambda: cache


@case("A2")
def index_put_and_scatter() -> Any:
    def f(x: torch.Tensor, i: torch.Tensor) -> Any:
        y = x.clone()
        y[i] = 0.0
        y[:, 1] += 2.0
        z = torch.zeros_like(x).scatter_add_(0, i[:, None].expand(2, 4), x[:2])
        return y, z, x.index_add(0, i, x[:2]), x.gather(1, i[None].expand(3, 2))

    return f, (torch.randn(3, 4, requires_grad=True), torch.tensor([0, 2]))


@case("A4")
def several_outputs_some_unused() -> Any:
    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        return x * w, (x > 0), x.argmax(), x.detach() * 2, [w.sin()], None, 3

    return f, (torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True))


@case("A4")
def integer_and_bool_inputs() -> Any:
    def f(tokens: torch.Tensor, table: torch.Tensor, mask: torch.Tensor) -> Any:
        return (F.embedding(tokens, table) * mask[..., None]).sum(1)

    return f, (torch.randint(0, 5, (2, 3)), torch.randn(5, 4, requires_grad=True), torch.rand(2, 3) > 0.5)


@case("A4")
def losses() -> Any:
    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        return F.cross_entropy(x, y), F.nll_loss(x.log_softmax(-1), y), F.mse_loss(x, x.detach() + 1), F.smooth_l1_loss(x, x * 0.5)

    return f, (torch.randn(4, 5, requires_grad=True), torch.randint(0, 5, (4,)))


@case("A1")
def normalisations() -> Any:
    def f(x: torch.Tensor) -> Any:
        return F.layer_norm(x, (4, 4)), F.group_norm(x, 2), F.instance_norm(x), F.rms_norm(x, (4,)), F.normalize(x, dim=1)

    return f, (torch.randn(2, 4, 4, 4, requires_grad=True),)


@case("A1")
def convolutions_and_pools() -> Any:
    w, t = torch.randn(4, 2, 3, 3), torch.randn(4, 2, 2, 2)

    def f(x: torch.Tensor) -> Any:
        y = F.conv2d(x, w, padding=1, stride=2)
        return y, F.conv_transpose2d(y, t, stride=2), F.avg_pool2d(x, 2), F.max_pool2d(x, 3, 1), F.adaptive_avg_pool2d(x, 2), F.interpolate(x, scale_factor=2)

    return f, (torch.randn(2, 2, 8, 8, requires_grad=True),)


@case("A4")
def non_contiguous_and_channels_last() -> Any:
    def f(x: torch.Tensor) -> Any:
        return x.relu(), x.permute(0, 2, 3, 1).contiguous() * 2, (x * 2).is_contiguous(memory_format=torch.channels_last)

    return f, (torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_(),)


@case("A4")
def input_needs_no_gradient_output_constant() -> Any:
    return lambda x: (torch.ones(3), x * 2), (torch.randn(3),)


test_program = suite.test()


def both(f: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return f, dovetail.compile(f)  # type: ignore[return-value]


def test_double_backward() -> None:
    f, g = both(lambda x, w: torch.tanh(x @ w).pow(2).sum(1))
    x, w = torch.randn(5, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)

    def penalty(run: Callable[..., Any]) -> Any:
        y = run(x, w)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad(grad.pow(2).sum() + y.sum(), [x, w])

    for ours, theirs in zip(penalty(g), penalty(f), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_retain_graph_accumulation_and_none() -> None:
    f, g = both(lambda x, unused: (x**2).sum())
    x, unused = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    y = g(x, unused)
    y.backward(retain_graph=True)
    y.backward()
    torch.testing.assert_close(x.grad, 4 * x.detach())
    assert unused.grad is None
    with pytest.raises(RuntimeError):
        y.backward()


def test_hooks_on_tensors_and_leaves() -> None:
    _, g = both(lambda x: x * 3)
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: grad * 10)
    y = g(x)
    y.register_hook(lambda grad: grad + 1)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 60.0))


def test_version_counter_error_as_in_eager() -> None:
    f, g = both(lambda x: x.exp())
    for run in (f, g):
        x = torch.ones(3, requires_grad=True)
        y = run(x)
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError):
            y.sum().backward()


def test_saved_tensors_are_freed() -> None:
    _, g = both(lambda x: (x.sin() * x).exp())
    x = torch.randn(1000, requires_grad=True)
    y = g(x)
    ref = weakref.ref(y.grad_fn)
    y.sum().backward()
    del y
    gc.collect()
    assert ref() is None


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


def test_saved_tensors_of_a_checkpoint_are_taken_once() -> None:
    """By a backward that eager runs inside of a compiled step: its frame is captured, too."""

    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        print(end="")
        return Product.apply(x, w).tanh()  # type: ignore[no-untyped-call, no-any-return]

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        checkpoint(block, x, w, use_reentrant=False).sum().backward()
        return w.grad * 2  # type: ignore[operator]

    found = []
    for run in both(step):
        torch.manual_seed(0)
        x, w = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
        found.append([run(x, w) for _ in range(3)])
    torch.testing.assert_close(found[1], found[0])


def test_partial_gradients_only() -> None:
    f, g = both(lambda x, w: (x * w).sum())
    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    torch.testing.assert_close(torch.autograd.grad(g(x, w), w)[0], x)


def test_no_grad_call_then_training_call() -> None:
    m = torch.nn.Linear(3, 2)
    c = dovetail.compile(m)
    x = torch.randn(4, 3)
    with torch.no_grad():
        assert not c(x).requires_grad
    out = c(x)
    assert out.requires_grad
    out.sum().backward()
    assert m.weight.grad is not None


@pytest.mark.parametrize("kind", ["gpt", "resnet", "lstm", "gan", "pinn"])
def test_training_curve_on_top_of_eager(kind: str) -> None:
    torch.testing.assert_close(TRAINERS[kind](dovetail.compile), TRAINERS[kind](lambda m: m), rtol=2e-4, atol=1e-5)


def train(model: torch.nn.Module, wrap: Callable[[Any], Any], loss: Callable[[Any, int], torch.Tensor], steps: int = 12) -> torch.Tensor:
    run = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    curve = []
    for n in range(steps):
        torch.manual_seed(100 + n)
        optimizer.zero_grad()
        value = loss(run, n)
        value.backward()
        optimizer.step()
        curve.append(value.detach())
    return torch.stack(curve)


class TinyGpt(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(11, 16), torch.nn.Linear(16, 11)
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.out(self.layer(self.embed(tokens), src_mask=mask))


def train_gpt(wrap: Callable[[Any], Any]) -> torch.Tensor:
    torch.manual_seed(0)
    tokens = torch.randint(0, 11, (4, 9))
    return train(TinyGpt(), wrap, lambda m, n: F.cross_entropy(m(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))


def train_resnet(wrap: Callable[[Any], Any]) -> torch.Tensor:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(2),
                              torch.nn.Flatten(), torch.nn.Linear(32, 4))
    x, y = torch.randn(8, 3, 8, 8), torch.randint(0, 4, (8,))
    return train(net, wrap, lambda m, n: F.cross_entropy(m(x), y))


def train_lstm(wrap: Callable[[Any], Any]) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(4, 6, 3)
    return train(torch.nn.LSTM(3, 5, batch_first=True), wrap, lambda m, n: m(x)[0].pow(2).mean())


def train_gan(wrap: Callable[[Any], Any]) -> torch.Tensor:
    torch.manual_seed(0)
    maker, judge = torch.nn.Linear(3, 4), torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    make, rate = wrap(maker), wrap(judge)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (maker, judge)]
    curve = []
    for n in range(12):
        torch.manual_seed(n)
        fake = make(torch.randn(8, 3))
        losses = [F.softplus(-rate(fake)).mean(), (F.softplus(rate(fake.detach())) + F.softplus(-rate(torch.randn(8, 4)))).mean()]
        for loss, optimizer, model in zip(losses, optimizers, (maker, judge), strict=True):
            grads = torch.autograd.grad(loss, list(model.parameters()))
            for p, grad in zip(model.parameters(), grads, strict=True):
                p.grad = grad
        for optimizer in optimizers:
            optimizer.step()
        curve += [loss.detach() for loss in losses]
    return torch.stack(curve)


def train_pinn(wrap: Callable[[Any], Any]) -> torch.Tensor:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def residual(m: Any, n: int) -> torch.Tensor:
        t = torch.linspace(0, 1, 20)[:, None].requires_grad_()
        u = m(t)
        (du,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        return (du + u).pow(2).mean() + (u[0] - 1).pow(2).sum()

    return train(net, wrap, residual)


TRAINERS: Final = {"gpt": train_gpt, "resnet": train_resnet, "lstm": train_lstm, "gan": train_gan, "pinn": train_pinn}


def test_only_one_of_a_complex_and_a_real_result_is_differentiated() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turned = torch.view_as_complex(x) * 2j
        return turned, torch.view_as_real(turned).square().sum()

    x = torch.randn(4, 2, requires_grad=True)
    compiled = dovetail.compile(f, options={"fallback_to_eager": False})
    grads = [torch.autograd.grad(function(x)[1], x)[0] for function in (f, compiled)]
    torch.testing.assert_close(grads[1], grads[0])


COMPUTED: Final[dict[str, Step]] = {
    "whole": lambda w: w * 1.5,
    "view": lambda w: (w * 1.5)[:, :],
    "leaf": lambda w: w,
    "no gradients": lambda w: (w * 1.5).detach(),
    "transposed": lambda w: (w.t() * 1.5).t(),
}
WRITES: Final[dict[str, Step]] = {
    "all of it": lambda x: (x.mul_(2), x * 2)[1],
    "a part": lambda x: (x[1:].mul_(2), x * 2)[1],
    "an item": lambda x: (x.__setitem__(0, 5.0), x * 2)[1],  # type: ignore[func-returns-value]
    "a layer": lambda x: F.relu(x, inplace=True) + 1,
    "what is returned": lambda x: x.mul_(3),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("backend", ["eager", "dovetail"])
def test_writing_to_what_the_caller_computed(name: str, backend: str) -> None:
    """One graph; and a leaf, which eager refuses, or a view is not taken for it later."""

    def observe(function: Step, kind: str) -> Any:
        w = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        x = COMPUTED[kind](w)
        try:
            y = function(x)
        except RuntimeError as refused:
            return str(refused)
        loss = y.sum() + (x * torch.arange(4.0)).sum()
        if loss.requires_grad:
            loss.backward()
        return y, x, w.grad, x.is_leaf, x.requires_grad

    dovetail.compile(WRITES[name], backend=backend, fullgraph=True)(torch.ones(3, 4, requires_grad=True) * 2)
    for order in (COMPUTED, reversed(COMPUTED)):
        dovetail.reset()
        compiled = dovetail.compile(WRITES[name], backend=backend)
        for kind in order:
            found, wanted = observe(compiled, kind), observe(WRITES[name], kind)
            assert found == wanted if isinstance(wanted, str) else all(
                torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(found, wanted, strict=True)
            )


class Tables:
    """Tensors that are made once, unless a compiler says that it is at work, or in any case."""

    @functools.lru_cache
    def eager(self) -> torch.Tensor:
        return torch.ones(3, 3).tril()

    @functools.lru_cache
    def always(self) -> torch.Tensor:
        return torch.ones(3, 3).triu()

    def either(self) -> torch.Tensor:
        return torch.ones(3, 3).tril() if torch.compiler.is_compiling() else self.eager()


TABLES = Tables()


class Mixing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, is_first: bool) -> torch.Tensor:
        ctx.is_first = is_first
        return x @ (TABLES.either() if is_first else TABLES.always())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad @ (TABLES.either() if ctx.is_first else TABLES.always()).T, None


@pytest.mark.parametrize("is_first", [True, False])
def test_a_cache_that_a_custom_function_fills_holds_real_tensors(is_first: bool) -> None:
    x = torch.randn(2, 3, requires_grad=True)

    def f(x: torch.Tensor) -> torch.Tensor:
        return Mixing.apply(x, is_first).sin()  # type: ignore[no-untyped-call]

    compiled = dovetail.compile(f, fullgraph=is_first)(x)
    grads = [torch.autograd.grad(out.sum(), x)[0] for out in (compiled, f(x))]
    torch.testing.assert_close(*grads)
    assert type(TABLES.eager()) is type(TABLES.always()) is torch.Tensor


@pytest.mark.parametrize("materialize", [True, False])
def test_a_function_whose_second_output_nobody_used(materialize: bool) -> None:
    """Its backward is given zeros for it, unless it asked for None: gradients of zeros, or no gradient."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ctx.set_materialize_grads(materialize)
            return tuple(x * 2 for x in xs)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            return tuple(None if g is None else g * 3 for g in grads)

    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        return Doubled.apply(x, y)

    given = []
    for call in (program, dovetail.compile(program)):
        x, y = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
        call(x, y)[0].sum().backward()
        given.append((x.grad, y.grad))
    torch.testing.assert_close(given[1], given[0])
    assert (given[1][1] is None) is not materialize
