"""What eager refuses, a compiled program refuses with the same kind of error."""
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dovetail

REFUSED = """
    x.sum(5)  x.sum((0,-2))  x.amax(-3)  x.var(7)  x.softmax(4)  x.argmax(3)  x.cumsum(2)  x.sort(3)  x.flip(3)  x.logsumexp(4)
    x@I(3,2)  x@R(3,2).double()  torch.mv(x,I(3))  torch.dot(R(3),R(4))  torch.bmm(R(2,3,4),R(3,4,5))  F.linear(x,I(4,3))
    torch.cat([x,R(2)])  torch.cat([x,x],2)  torch.stack([x,x],4)  torch.stack([x,R(3,2)])  x.repeat(2)  x.masked_fill_(R(5)>0,1)
    x.gather(0,I(3))  x.gather(2,I(2,3))  x.gather(0,I(1,4))  x.scatter(0,I(1,3),I(1,3))  x.scatter_add_(0,I(1,4),R(1,4))
    x.index_add_(0,I(2),R(3,3))  x.index_copy(0,I(2),I(2,3))  x.index_put((I(2),),I(2,3))  x.index_put_((I(2),),R(2,4))
    x.copy_(R(4))  x.select_scatter(R(2),0,0)  x.slice_scatter(R(2,2),0,0,1)  F.max_pool2d(R(1,1,2,2),5)  F.avg_pool2d(R(1,1,2,2),5)
    F.glu(R(3,3))  F.pixel_shuffle(R(1,3,2,2),2)  I(3).var()  R(0,3).amax(0)  R(0,3).max(0)  R(3).tril()  (x>0).abs()  I(3).mul_(R(3))
    F.conv2d(R(1,3,4,4),R(2,3,3,3).double())  F.layer_norm(x,(1,2,3))  F.huber_loss(x,x,delta=-1.)  F.relu(x>0)
    torch.native_group_norm(R(4,2,3).mT,None,None,4,3,2,1,1e-5)
    (x>0)[0]@(x>0)[0]  (x>0)@(x>0)[0]  (x>0)@(x>0).mT  (x>0)[None]@(x>0).mT[None]  torch.vdot((x>0)[0],(x>0)[0])
""".split()


def rand(*size: int) -> torch.Tensor:
    return torch.rand(*size)


def ones(*size: int) -> torch.Tensor:
    return torch.ones(*size, dtype=torch.int64)


def error_of(function: Any) -> type[BaseException] | None:
    try:
        function(torch.rand(2, 3))
    except Exception as error:
        return type(error)
    return None


@pytest.mark.parametrize("text", REFUSED)
def test_refused_as_eager_does(text: str) -> None:
    function = eval(f"lambda x: {text}", {"torch": torch, "F": F, "R": rand, "I": ones})
    wanted = error_of(function)
    assert wanted is not None
    for dynamic in (None, True):
        assert error_of(dovetail.compile(function, backend="aot_eager", dynamic=dynamic)) is wanted


BINARY = [F.binary_cross_entropy, F.binary_cross_entropy_with_logits]


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss, *BINARY])
@pytest.mark.parametrize("types", [(torch.bool, torch.float32), (torch.float32, torch.float64), (torch.int64, torch.float32)])
def test_losses_promote(loss: Any, types: tuple[torch.dtype, torch.dtype]) -> None:
    x, y = (torch.tensor([1.0, 0.0, 1.0]).to(dtype) * 0.5 if dtype.is_floating_point else torch.tensor([1, 0, 1]).to(dtype) for dtype in types)
    try:
        want = loss(x, y)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            dovetail.compile(lambda x, y: loss(x, y))(x, y)
        return
    torch.testing.assert_close(dovetail.compile(lambda x, y: loss(x, y))(x, y), want)


def test_a_source_of_another_shape() -> None:
    """masked_scatter takes its elements one after the other: their shape says nothing about the result's."""
    x, source = torch.randn(4, 3), torch.randn(4, 3)
    program = dovetail.compile(lambda x, source: x.t().masked_scatter(x.t() > 0, source), dynamic=True)
    assert torch.equal(program(x, source), x.t().masked_scatter(x.t() > 0, source))


@pytest.mark.parametrize("grad", [False, True])
def test_a_result_that_was_transposed_in_place(grad: bool) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x * 2).t_()
        return y, y[0]

    x, z = (torch.ones(2, 3, requires_grad=grad) for _ in range(2))
    want, got = program(x), dovetail.compile(program)(z)
    assert [t.stride() for t in got] == [t.stride() for t in want] and got[1]._base is got[0]
    if grad:
        (want[0].sum() + want[1].sum()).backward()
        (got[0].sum() + got[1].sum()).backward()
        assert torch.equal(x.grad, z.grad)


def test_dot_of_symbolic_sizes_that_differ() -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a = a[1:]
        try:
            return a @ b
        except RuntimeError:
            return a

    compiled = dovetail.compile(f)
    for n in (4, 2, 5, 4):
        a, b = torch.rand(n), torch.rand(3)
        torch.testing.assert_close(compiled(a, b), f(a, b))


@pytest.mark.parametrize("loss", BINARY)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("turned", [False, True])
def test_binary_losses_are_known(loss: Any, reduction: str, turned: bool) -> None:
    """Weighted too; as eager lays them out, and refused where eager refuses."""
    x, y, w = (torch.rand(4, 3).t() if turned else torch.rand(3, 4) for _ in range(3))
    program = dovetail.compile(lambda x, y, w: loss(x, y, w, reduction=reduction))
    for leaf in (x, x.clone().requires_grad_()):
        got, want = program(leaf, y, w), loss(leaf, y, w, reduction=reduction)
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()
        if leaf.requires_grad:
            grads = [torch.autograd.grad(made.sum(), leaf)[0] for made in (got, want)]
            torch.testing.assert_close(*grads)
            assert grads[0].stride() == grads[1].stride()
