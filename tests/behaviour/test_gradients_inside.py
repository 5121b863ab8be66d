"""torch.autograd.grad in a compiled function: part of its graph where all that is differentiated is known there."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dovetail


def network(inputs=2):
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def heat_equation():
    net, x = network(), torch.rand(32, 2, requires_grad=True)

    def loss(x):
        u = net(x)
        first = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        second = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)[0]
        return (first[:, 1] - second[:, 0]).square().mean()

    return loss, (x,), [*net.parameters(), x]


def gradient_penalty():
    net, a, b = network(8), torch.randn(16, 8), torch.randn(16, 8)

    def penalty(a, b):
        share = torch.rand(16, 1)
        x = (share * a + (1 - share) * b).requires_grad_(True)
        score = net(x)
        (grad,) = torch.autograd.grad(
            outputs=score, inputs=x, grad_outputs=torch.ones_like(score), create_graph=True, retain_graph=True
        )
        return ((grad.norm(2, dim=1) - 1) ** 2).mean()

    return penalty, (a, b), [*net.parameters()]


def energy_and_forces():
    net, places = network(3), torch.randn(10, 3, requires_grad=True)

    def forward(places):
        energy = net(places).sum()
        return energy, -torch.autograd.grad(energy, places, create_graph=True)[0]

    return forward, (places,), [*net.parameters()]


def forces_alone():
    net, places = network(3), torch.randn(10, 3)

    def forward(places):
        places = places.detach().clone().requires_grad_()
        return -torch.autograd.grad(net(places).sum(), places)[0]

    return forward, (places,), [*net.parameters()]


def inner_steps():
    w, x, y = nn.Parameter(torch.randn(4, 3)), torch.randn(8, 4), torch.randn(8, 3)

    def outer(w, x, y):
        for _ in range(3):
            (grad,) = torch.autograd.grad(F.mse_loss(x @ w, y), [w], create_graph=True)
            w = w - 0.1 * grad
        return F.mse_loss(x @ w, y)

    return outer, (w, x, y), [w]


def of_a_modules_parameters():
    net, x = network(), torch.rand(8, 2)

    def norm(x):
        grads = torch.autograd.grad(net(x).square().mean(), net.parameters(), create_graph=True)
        return sum(g.square().sum() for g in grads)

    return norm, (x,), [*net.parameters()]


def langevin():
    net, x = network(3), torch.randn(10, 3)

    @torch.no_grad()
    def step(x):
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            grad = torch.autograd.grad(net(leaf).sum(), leaf)[0]
        return x - 0.1 * grad

    return step, (x,), []


def through_a_convolution():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 1))
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    loss = lambda x: torch.autograd.grad(net(x).sum(), x, create_graph=True)[0].square().sum()  # noqa: E731
    return loss, (x,), [*net.parameters()]


def unused_and_zeros():
    w, v = (torch.randn(4, requires_grad=True) for _ in range(2))

    def both(w, v):
        first, nothing = torch.autograd.grad((w**3).sum(), [w, v], allow_unused=True, create_graph=True)
        assert nothing is None
        return first, *torch.autograd.grad((w * w).sum(), (w, v), materialize_grads=True)

    return both, (w, v), [w]


def losses_added_to_a_leaf():
    w = torch.randn(4, requires_grad=True)

    def total(w):
        loss, scale = torch.tensor(0.0, requires_grad=True), torch.ones(4, requires_grad=True)
        for power in (1, 2, 3):
            loss = loss + (scale * w**power).sum()
        return loss, torch.autograd.grad(loss, scale, create_graph=True)[0]

    return total, (w,), [w]


WHOLE = (
    heat_equation, gradient_penalty, energy_and_forces, forces_alone, inner_steps, of_a_modules_parameters,
    langevin, through_a_convolution, unused_and_zeros, losses_added_to_a_leaf,
)  # fmt: skip


# -- what cannot be part of the graph: the history outside, tensors that leave, hooks


def history_before_the_call():
    w = torch.randn(4, requires_grad=True)
    a = w * 2
    b = a * a  # of which the function knows nothing
    return lambda a, b: torch.autograd.grad((a * b).sum(), a, retain_graph=True)[0], (a, b), []


def hooked_input():
    w = torch.randn(4, requires_grad=True)
    w.register_hook(lambda grad: grad * 2)
    return lambda w: torch.autograd.grad((w * w).sum(), w, create_graph=True)[0], (w,), []


def leaf_that_leaves():
    def forward(x):
        leaf = (x * 2).requires_grad_()
        return (leaf * leaf).sum(), leaf.view(-1)

    return forward, (torch.randn(4),), []


def made_of_the_leaf_alone():
    def forward(x):
        leaf = (x * 2).requires_grad_()
        return (leaf * leaf).sum()

    return forward, (torch.randn(4),), []


def leaf_made_as_one():
    return lambda x: (x * 2, torch.zeros(2, requires_grad=True)), (torch.randn(4),), []


BROKEN = (history_before_the_call, hooked_input, leaf_that_leaves, made_of_the_leaf_alone, leaf_made_as_one)


def use(fn, args, leaves):
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(1)
    out = fn(*args)
    outs = out if isinstance(out, tuple) else (out,)
    for leaf in [out for out in outs if out.requires_grad and leaves]:
        leaf.sum().backward(retain_graph=True)
    state = [(out.requires_grad, out.is_leaf and not leaves) for out in outs]
    return [*outs, *(leaf.grad for leaf in leaves)], state


@pytest.mark.parametrize("backend", ["dovetail", "eager"])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("build", WHOLE, ids=lambda build: build.__name__)
def test_one_graph(build, dynamic, backend):
    if build is through_a_convolution and dynamic and torch.__version__ < "2.12":
        pytest.skip("this torch's second derivative of a convolution asks for sizes as numbers")
    torch.manual_seed(0)
    fn, args, leaves = build()
    wanted, state = use(fn, args, leaves)
    compiled = dovetail.compile(fn, fullgraph=True, dynamic=dynamic, backend=backend)
    for _ in range(2):
        got, now = use(compiled, args, leaves)
        assert now == state
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("build", BROKEN, ids=lambda build: build.__name__)
def test_a_break_where_the_graph_does_not_know_enough(build):
    torch.manual_seed(0)
    fn, args, leaves = build()
    wanted, state = use(fn, args, leaves)
    dovetail.reset()
    got, now = use(dovetail.compile(fn), args, leaves)
    assert now == state and dovetail.stats()["graph_breaks"] > 0
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("fn, text", [
    (lambda w: torch.autograd.grad(w * w, w), "only for scalar outputs"),
    (lambda w: torch.autograd.grad((w * w).sum(), [w, torch.ones(2, requires_grad=True)]), "used in the graph"),
    (lambda w: (lambda y: torch.autograd.grad(y, w)[0].sum() + torch.autograd.grad(y, w)[0])((w**3).sum()), "second time"),
])  # fmt: skip
def test_errors_are_eagers(fn, text):
    w = torch.randn(4, requires_grad=True)
    for call in (fn, dovetail.compile(fn)):
        with pytest.raises(RuntimeError, match=text):
            call(w)


def test_a_leaf_that_gets_a_history_is_noticed():
    fn = lambda a, b: torch.autograd.grad((a * b).sum(), a, retain_graph=True)[0]  # noqa: E731
    a, b = (torch.randn(4, requires_grad=True) for _ in range(2))
    compiled = dovetail.compile(fn)
    torch.testing.assert_close(compiled(a, b), fn(a, b))
    a = b * 2
    torch.testing.assert_close(compiled(a, a * a), fn(a, a * a))


@pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor.requires_grad_])
def test_a_hook_that_comes_later_is_noticed(kind):
    w = kind(torch.randn(4))
    fn = lambda w: torch.autograd.grad((w**3).sum(), w, create_graph=True)[0]  # noqa: E731
    compiled = dovetail.compile(fn)
    torch.testing.assert_close(compiled(w), fn(w))
    w.register_hook(lambda grad: grad * 2)
    torch.testing.assert_close(compiled(w), fn(w))
