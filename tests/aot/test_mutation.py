"""Generated programs that write through views, against eager: results, inputs after, sharing, gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dovetail
from dovetail.aot import trace_joint
from tests.aot.running import check, sharing

VIEWS = {
    "itself": lambda x: x,
    "select": lambda x: x[1],
    "slice": lambda x: x[1:3],
    "step": lambda x: x[:, ::2],
    "t": lambda x: x.t(),
    "transpose": lambda x: x.transpose(0, 1),
    "view": lambda x: x.view(-1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "diagonal": lambda x: x.diagonal(),
    "as_strided": lambda x: x.as_strided((2, 2), (6, 2), 1),
    "split": lambda x: x.split(2)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "chunk": lambda x: x.chunk(2, 1)[0],
    "narrow": lambda x: x.narrow(1, 2, 3),
    "twice": lambda x: x[1:].t()[2:4],
    "detach": lambda x: x.detach()[0],
    "expand": lambda x: x[:1].expand(1, 6),
    "permute": lambda x: x.view(2, 2, 6).permute(2, 0, 1)[1],
    "squeeze": lambda x: x[None].squeeze(0)[2:],
    "unfold": lambda x: x.unfold(1, 2, 2)[0],
    "windows": lambda x: x.unfold(1, 3, 1)[:, 1],
    "expanded": lambda x: x.expand(3, 4, 6)[1, :, 2:],
    "movedim": lambda x: x.movedim(1, 0),
}

WRITES = {
    "add_": lambda v, y: v.add_(1.5),
    "mul_": lambda v, y: v.mul_(y.mean()),
    "copy_": lambda v, y: v.copy_(y.reshape(-1)[0]),
    "zero_": lambda v, y: v.zero_(),
    "fill_": lambda v, y: v.fill_(2.0),
    "out": lambda v, y: torch.add(v.detach().clone(), 1.0, out=v),
    "setitem": lambda v, y: v.__setitem__(0, 3.0),
    "masked": lambda v, y: v.__setitem__(v > 0, 0.25),
    "sigmoid_": lambda v, y: v.sigmoid_(),
}

RETURNS = {
    "both": lambda x, v, y: (x.sin(), v.cos()),
    "view": lambda x, v, y: (v, x * y),
    "input": lambda x, v, y: (x, y + x),
}


def _tensors(train: bool) -> list[Any]:
    return [torch.randn(4, 6, requires_grad=train), torch.randn(4, 6, requires_grad=train)]


CASES = list(itertools.product(VIEWS, WRITES, ("input", "fresh"), (False, True)))
# every view with two writes, every write with two views: the full product takes minutes
CHOSEN = [case for i, case in enumerate(CASES) if i % 3 == 0 or case[1] == "mul_"]


@pytest.mark.parametrize(("view", "write", "target", "train"), CHOSEN, ids=lambda v: str(v))
def test_write_through_view(view: str, write: str, target: str, train: bool) -> None:
    returned = RETURNS[list(RETURNS)[(len(view) + len(write)) % 3]]

    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        x = x if target == "input" else x + 1
        v = VIEWS[view](x)
        WRITES[write](v, y)
        return returned(x, v, y)

    check(program, lambda: _tensors(train))


def _no_grad_write(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = x * w
    with torch.no_grad():
        w.sub_(0.1)
    return y.exp()


def _kv_cache(x: torch.Tensor, cache: torch.Tensor) -> Any:
    cache = cache.detach()
    cache[:, 2:4] = x[:, :2].detach()
    return torch.cat([cache, x], 1).sum(1), cache[:, :3]


def _index_copy(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = x.clone()
    z.index_copy_(0, torch.tensor([2, 0]), y[:2])
    z.index_add_(0, torch.tensor([1, 1]), y[:2])
    return z, z.t()


def _aliases(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = x * y
    return z, z.t(), z[0], z.detach(), x.view(-1), y


def _hidden_base(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = (x + y).view(2, 12)
    return z[0], z[1]


def _swap(x: torch.Tensor, y: torch.Tensor) -> Any:
    t = x.clone()
    x.copy_(y)
    y.copy_(t)
    return x + y


def _same_twice(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = x.sin()
    return z, z, x, x


def _reshaped(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = x * 2
    z.t_()
    z.unsqueeze_(0)
    z.add_(1)
    return z


def _resized(x: torch.Tensor, y: torch.Tensor) -> Any:
    out = torch.empty(0)
    torch.mul(x.detach(), y.detach(), out=out)
    return out + x


def _resized_pair(x: torch.Tensor, y: torch.Tensor) -> Any:
    values, places = torch.empty(0), torch.empty(0, dtype=torch.long)
    torch.max(x.detach(), 1, out=(values, places))  # an overload that is not called "out"
    return values + x.sum(1), places + 1, tuple(places.size())


def _ints(x: torch.Tensor, y: torch.Tensor) -> Any:
    counts = torch.zeros(6, dtype=torch.long)
    counts += 1
    counts[2:].mul_(3)
    return counts, x * counts, (x > 0)


def _promote(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = torch.ones(4, 6, dtype=torch.float16)
    z.add_(x.detach())
    return z * y


def _dropout(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = F.dropout(x, 0.5)
    noise = (
        torch.empty_like(y).uniform_(-1, 1)
        + torch.rand(6)
        + torch.empty(4, 1).normal_() * torch.randn_like(y)
    )
    return z * noise, torch.bernoulli(torch.full((3,), 0.5)), torch.randperm(5)


def _dropout_of_permuted(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = F.dropout(x.view(2, 2, 6).permute(2, 0, 1) * 1, 0.5)
    w = (y.t() * 2).detach()
    w.normal_()
    w[:, ::2].uniform_(1, 2)
    return z, z * 2, w, torch.rand_like(w), w.bernoulli_(0.25)


def _foreach(x: torch.Tensor, y: torch.Tensor) -> Any:
    a, b = x.clone(), y.clone()
    torch._foreach_add_([a, b], 1.0)
    torch._foreach_mul_([a, b], [x * 2, y])
    torch._foreach_add_([a[:1], a[1:2]], [a[1:2], a[:1]])  # one after the other
    return a, b, *torch._foreach_max([a, b])


def _written_then_read(x: torch.Tensor, y: torch.Tensor) -> Any:
    v = x[0]
    before = v * 2
    x.mul_(3)
    after = v * 2
    v.add_(1)
    return before, after, x.sum()


def _data(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.detach().mul_(2)
    return x * y


def _copied_numbers(x: torch.Tensor, y: torch.Tensor) -> Any:
    z, counts = x * 2, torch.empty(6, dtype=torch.long)
    z[1:].copy_(3)
    return z * y, counts.copy_(2.7) + x


PROGRAMS = [
    _no_grad_write, _kv_cache, _index_copy, _aliases, _hidden_base, _swap, _same_twice, _reshaped, _resized,
    _resized_pair, _ints, _promote, _dropout, _dropout_of_permuted, _foreach, _written_then_read, _data,
    _copied_numbers,
]  # fmt: skip


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_program(program: Any, train: bool) -> None:
    check(program, lambda: _tensors(train))


def test_more_inputs_than_a_few_may_overlap() -> None:
    def program(parts: list[torch.Tensor], written: torch.Tensor) -> torch.Tensor:
        written.add_(1)
        return torch.stack([part.sum() for part in parts])

    call = dovetail.compile(program)
    parts = [torch.ones(3) for _ in range(40)]
    call(parts, torch.ones(3))
    memory, again = torch.ones(6), torch.ones(6)
    ours = call([*parts, memory[:3]][1:], memory[1:4])
    torch.testing.assert_close(ours, program([*parts, again[:3]][1:], again[1:4]))
    torch.testing.assert_close(memory, again)


def test_as_strided_beyond_an_input_runs_in_eager() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        x.as_strided((2, 2), (6, 2), 1).zero_()
        return x + 1

    memory, again = torch.rand(6, 6), torch.empty(6, 6)
    again.copy_(memory)
    torch.testing.assert_close(dovetail.compile(program)(memory[1:5]), program(again[1:5]))
    torch.testing.assert_close(memory, again)


def test_statistics_are_written_without_autograd_looking() -> None:
    """In training, forward writes new values of buffers where the old ones lie."""
    net, theirs = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)
    call = dovetail.compile(net)
    for _ in range(2):
        x = torch.randn(8, 4)
        out = call(x)
        out.square().sum().backward()
        theirs(x).square().sum().backward()
    for ours, expected in zip(net.state_dict().values(), theirs.state_dict().values()):
        torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(net.weight.grad, theirs.weight.grad)


def test_an_old_value_that_backward_needs_survives_the_update() -> None:
    def program(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        y = x * state.clone()
        state.mul_(2)
        return y

    x, ours, theirs = torch.randn(3, requires_grad=True), torch.ones(3), torch.ones(3)
    call = dovetail.compile(program)
    for _ in range(2):
        (got,) = torch.autograd.grad(call(x, ours).sum(), x)
        torch.testing.assert_close(got, theirs)
        theirs.mul_(2)
        torch.testing.assert_close(ours, theirs)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1)[2:]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return F.pad(-grad, (2, 0)).view(-1, 3)


class WritesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        ctx.saved_tensors[0].mul_(2)
        return grad.clone()


def _through(x: torch.Tensor) -> Any:
    return Reversed.apply(x), x.sin(), x.view(-1)


def _written_data(x: torch.Tensor) -> Any:
    x.data.mul_(2)
    x.data[0] = 1
    return x * 2


def _written_in_backward(x: torch.Tensor) -> Any:
    return WritesInBackward.apply(x) * 3


def _eig(x: torch.Tensor) -> Any:
    return torch.linalg.eig(x[:, :2].t() @ x[:, :2])[1].real.sum()


def _raises(x: torch.Tensor) -> Any:
    x.detach().add_(1)
    torch.linalg.cholesky(x.detach().t() @ x.detach() - 9)
    return x.detach().mul_(2)


def _written_with_a_gradient(x: torch.Tensor) -> Any:
    y = x.detach()
    y.mul_(FACTOR)
    return y, x * 2


def _squeezed(x: torch.Tensor) -> Any:
    x[0].unsqueeze_(0)
    return x[:1].squeeze_(0), x * 2


def _data_after_a_break(x: torch.Tensor) -> Any:
    y, part = x * x, x.data[1:]
    dovetail.graph_break()
    part.add_(1)
    return y, x * 2


def _out_of_another_type(x: torch.Tensor) -> Any:
    return torch.cumprod(x.detach()[0] * 5, 0, out=torch.zeros(3, dtype=torch.long)), x * 2


def _out_of_a_wrong_type(x: torch.Tensor) -> Any:
    return torch.amax(x.detach(), 0, out=torch.zeros(3, dtype=torch.double)), x * 2


FACTOR = torch.full((3,), 2.0, requires_grad=True)
SEEN = [_through, _written_data, _written_in_backward, _eig, _raises, _written_with_a_gradient, _squeezed,
        _data_after_a_break, _out_of_another_type, _out_of_a_wrong_type]  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("program", SEEN)
def test_what_a_caller_sees(program: Any, train: bool, dynamic: bool) -> None:
    """Memory, versions, values after a failure, errors of backward."""

    def outcome(call: Any) -> list[Any]:
        torch.manual_seed(0)
        x = torch.randn(4, 3, requires_grad=train)
        found: list[Any] = []
        try:
            results = call(x)
            results = results if isinstance(results, tuple) else (results,)
            found += [t.detach().clone() for t in results]
            found += [t.untyped_storage()._cdata == x.untyped_storage()._cdata for t in results]
            if train:
                sum((t * t.detach().cos()).sum() for t in results).backward()
        except RuntimeError as error:
            found.append(hash(str(error)[:60]))
        factor, FACTOR.grad = FACTOR.grad, None
        return [*found, x.detach(), x._version, x.grad if train else None, factor]

    dovetail.reset()
    torch.testing.assert_close(outcome(dovetail.compile(program, dynamic=dynamic)), outcome(program))


def test_aliases_count_their_writes_together() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made, values = torch.ones(2, 3).t(), x.data
        return made, made[0], x * 1, values, values[0]

    def versions(call: Any) -> list[int]:
        made, row, _, values, first = call(torch.ones(3, 2))
        row.add_(1)
        first.add_(1)
        return [made._version, row._version, values._version, first._version]

    assert versions(dovetail.compile(program)) == versions(program)


@pytest.mark.parametrize("train", [False, True])
def test_conjugates_are_as_lazy_as_in_eager(train: bool) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return y.conj(), (x + 1).mH, x.conj()[0], torch.resolve_conj(x.conj()), y.conj().clone(), (y + 1).imag

    x = torch.randn(3, 3, dtype=torch.complex64, requires_grad=train)
    for ours, theirs in zip(dovetail.compile(program)(x), program(x), strict=True):
        assert (ours.is_conj(), ours.is_neg(), ours.stride()) == (theirs.is_conj(), theirs.is_neg(), theirs.stride())
        assert sharing([x, ours]) == sharing([x, theirs])
        torch.testing.assert_close(ours, theirs)


def test_elements_that_share_memory_are_not_written() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.as_strided((2, 2), (1, 1)).mul_(0.5)
        return y

    torch.testing.assert_close(dovetail.compile(twice)(torch.ones(3)), twice(torch.ones(3)))

    def windows(x: torch.Tensor) -> torch.Tensor:
        view = x.unfold(0, 2, 1)
        view.lerp_(view.detach().cos(), 0.3)
        return x

    ours = dovetail.compile(windows, dynamic=True)(torch.ones(3, 4))
    torch.testing.assert_close(ours, windows(torch.ones(3, 4)))

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(x * 2, (2,), (0,)).mul_(2)

    for call in (program, dovetail.compile(program)):
        with pytest.raises(RuntimeError, match="single memory location"):
            call(torch.ones(3))


def _reshaped_base(x: torch.Tensor) -> Any:
    whole = torch.cat([x, x])
    part = whole.unsqueeze(0)
    whole.squeeze_()
    part.add_(x.sum())
    return whole, part


def _written_alias(x: torch.Tensor) -> Any:
    whole = x * 2
    part = whole.detach()
    part[0] = x.sum()
    return whole, part


@pytest.mark.parametrize("program", [_reshaped_base, _written_alias])
def test_outputs_share_memory_whatever_their_histories(program: Any) -> None:
    for call in (program, dovetail.compile(program)):
        first, second = call(torch.ones(3, requires_grad=True))
        assert first.data_ptr() == second.data_ptr()


def test_a_pooled_image_in_channels_last_is_a_plain_view() -> None:
    """Eager sets the strides of what it pools to one pixel, in place."""
    x = torch.randn(2, 4, 5, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    module = torch.fx.symbolic_trace(lambda x: F.adaptive_avg_pool2d(x, 1) * 2)
    assert "as_strided" not in str(trace_joint(module, [x]).graph)
    ours, theirs = dovetail.compile(module)(x), module(x)
    assert ours.stride() == theirs.stride()
    for made in (torch.autograd.grad(ours.square().sum(), x), torch.autograd.grad(theirs.square().sum(), x)):
        torch.testing.assert_close(made[0], 8 * theirs.detach() / 50 * torch.ones(5, 5))


@pytest.mark.parametrize("factor", [torch.linalg.eig, lambda x: torch.linalg.eigh(x @ x.mH), torch.linalg.svd])
def test_losses_that_depend_on_the_phase_of_a_vector_are_refused(factor: Any) -> None:
    x = torch.randn(3, 3, dtype=torch.complex64, requires_grad=True)
    loss = dovetail.compile(lambda x: sum(part.real.square().sum() for part in factor(x)))(x)
    with pytest.raises(RuntimeError, match="is ill-defined|depends on this"):
        loss.backward()
