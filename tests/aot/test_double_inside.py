"""Second derivatives taken inside a compiled function: the captured program is differentiated, not compiled again."""
import torch
from torch import nn

import dovetail


def test_a_physics_informed_residual():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def residual(t):
        t = t.clone().requires_grad_()
        u = net(t)
        (slope,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        return slope + u

    t = torch.randn(5, 1)
    dovetail.reset()
    compiled = dovetail.compile(residual)
    for _ in range(3):
        ours, theirs = compiled(t), residual(t)
        torch.testing.assert_close(ours, theirs)
        grads = torch.autograd.grad(ours.square().sum(), list(net.parameters()), allow_unused=True)
        wanted = torch.autograd.grad(theirs.square().sum(), list(net.parameters()), allow_unused=True)
        for a, b in zip(grads, wanted):
            torch.testing.assert_close(a, b)
    assert dovetail.stats()["graphs"] <= 6


def test_a_derivative_by_a_tensor_that_the_function_makes():
    def penalty(real, fake, weight):
        mixed = real * 0.3 + fake * 0.7  # requires a gradient already: nothing marks it
        score = (mixed * weight).tanh().sum()
        (slope,) = torch.autograd.grad(score, mixed, create_graph=True)
        return (slope.norm(2, dim=1) - 1).square().mean() + score

    real, fake, weight = torch.randn(4, 3), torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    dovetail.reset()
    compiled = dovetail.compile(penalty)
    for _ in range(2):
        ours, theirs = compiled(real, fake, weight), penalty(real, fake, weight)
        torch.testing.assert_close(ours, theirs)
        for a, b in zip(torch.autograd.grad(ours, (fake, weight)), torch.autograd.grad(theirs, (fake, weight))):
            torch.testing.assert_close(a, b)
    assert dovetail.stats()["graph_breaks"] <= 3
