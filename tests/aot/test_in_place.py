"""A cache that is scattered into is written in place: nothing copies it."""

import pytest
import torch

import dovetail
from dovetail.aot.double import eager_after
from dovetail.errors import InternalWarning
from dovetail.events import EVENTS


def step(cache, position, new):
    cache.index_copy_(1, position, new)
    return (cache * 2).sum(1)


def step_with_handlers(cache, position, new):
    try:
        cache.index_copy_(1, position, new)
        found = (cache * 2).sum(1)
    except IndexError as error:
        found = str(error)
    return found


@pytest.mark.parametrize("step", [step, step_with_handlers])
def test_scatter_into_an_input_writes_the_input(step):
    with torch.no_grad():
        ours, theirs = torch.zeros(3, 64, 8), torch.zeros(3, 64, 8)
        compiled = dovetail.compile(step, fullgraph=True)
        address = ours.data_ptr()
        for at in (0, 5, 63):
            new = torch.randn(3, 1, 8)
            position = torch.tensor([at])
            torch.testing.assert_close(compiled(ours, position, new), step(theirs, position, new))
            assert torch.equal(ours, theirs) and ours.data_ptr() == address
        copies = [e for e in EVENTS.of("kernel") if "index_copy_" in e["origins"] and "_put" not in e["name"]]
        assert not copies
        if step is step_with_handlers:
            args = torch.tensor([64]), torch.randn(3, 1, 8)
            assert compiled(ours, *args) == step(theirs, *args) and torch.equal(ours, theirs)


def test_where_nothing_can_raise_handlers_make_no_copies(monkeypatch):
    def program(weight, grad):
        try:
            weight.lerp_(grad, 0.5)
        except RuntimeError:
            grad = grad - 1
        return grad * 2

    copied = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *args: copied.append(args))
    with torch.no_grad():
        ours, theirs, grad = torch.ones(8, 8), torch.ones(8, 8), torch.randn(8, 8)
        compiled = dovetail.compile(program, fullgraph=True)
        for _ in range(3):
            torch.testing.assert_close(compiled(ours, grad), program(theirs, grad))
            torch.testing.assert_close(ours, theirs)
    assert not copied


def test_an_input_that_is_also_read_before_is_copied():
    def program(cache, position, new):
        before = cache.sum(1)
        cache.index_copy_(1, position, new)
        return before, cache + 1

    with torch.no_grad():
        ours, theirs = torch.randn(3, 16, 8), torch.empty(3, 16, 8)
        theirs.copy_(ours)
        args = torch.tensor([4]), torch.randn(3, 1, 8)
        for a, b in zip(dovetail.compile(program)(ours, *args), program(theirs, *args)):
            torch.testing.assert_close(a, b)
        assert torch.equal(ours, theirs)


def test_a_result_that_is_the_new_value_is_not_the_input():
    def program(cache, position, new):
        value = cache.index_copy(1, position, new)
        cache.copy_(value)
        return value

    with torch.no_grad():
        ours = torch.zeros(2, 8, 4)
        out = dovetail.compile(program)(ours, torch.tensor([1]), torch.ones(2, 1, 4))
        out.add_(1)
        assert ours.sum() == 8


@pytest.mark.parametrize(
    "program",
    [lambda x: x[1:].add_(x[:-1]), lambda x: x.mul_(x.t()), lambda x: x.lerp_(x[0], 0.5), lambda x: x[1:].copy_(x[:-1])],
)
def test_reading_memory_that_is_written_elsewhere_raises_as_in_eager(program):
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        dovetail.compile(program)(torch.randn(4, 4))


def test_a_failure_that_eager_does_not_share_is_told():
    with pytest.warns(InternalWarning, match="ValueError: ours"):
        assert eager_after(ValueError("ours"), lambda x: (x,), False, 3) == [3]
    with pytest.raises(ZeroDivisionError):
        eager_after(ValueError("the program's"), lambda x: x / 0, False, 3)


def test_a_custom_op_that_raises_does_so_as_in_eager_after_the_writes():
    @torch.library.custom_op("dovetail_tests::refuses", mutates_args=())
    def refuses(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such thing")

    refuses.register_fake(torch.empty_like)

    def program(x):
        x.add_(1)
        return refuses(x)

    x = torch.zeros(4)
    with pytest.raises(KeyError, match="no such thing"):
        dovetail.compile(program)(x)
    assert torch.equal(x, torch.ones(4))


@pytest.mark.parametrize("program", [
    lambda x: x[:, 1:].add_(x[:, :-1]), lambda x: x.div_(x[:, :1]), lambda x: x[:, 1:].copy_(x[:, :-1]),
])  # fmt: skip
def test_what_one_write_does_to_what_it_reads_is_as_in_eager(program):
    for width in (5, 40):
        x = torch.rand(3, width) + 0.1
        assert torch.equal(dovetail.compile(program)(x.clone()), program(x.clone()))


LIBRARY = torch.library.Library("dovetail_in_place", "DEF")
LIBRARY.define("turn(Tensor! x, Tensor(b!) y) -> ()")
LIBRARY.define("spread(Tensor x, Tensor(a!)[] out) -> ()")
LIBRARY.impl("turn", lambda x, y: (y.sin_(), x.add_(y.sum()), None)[2], "CPU")
LIBRARY.impl("spread", lambda x, out: [o.copy_(x[i]) for i, o in enumerate(out)] and None, "CPU")
OPS = torch.ops.dovetail_in_place


@pytest.mark.parametrize("parts", [lambda x: (x[:, :2], x[:, 2:]), lambda x: (x, x.sin())])
def test_an_op_that_only_writes_needs_no_kernel_for_fakes(parts):
    def program(x):
        a, b = parts(x)
        out = [torch.empty(4) for _ in range(2)]
        OPS.turn(a, b)
        OPS.spread(x, out)
        return a * 2, b.exp(), out[1] + out[0]

    ours, theirs = torch.randn(3, 4), torch.empty(3, 4)
    theirs.copy_(ours)
    torch.testing.assert_close(dovetail.compile(program, fullgraph=True)(ours), program(theirs))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("parts", [lambda x: (x, x), lambda x: (x[:2], x[:, 1:2]), lambda x: (x, x.view(-1)[3:])])
def test_an_op_that_writes_to_memory_of_two_arguments_is_as_in_eager(parts):
    def program(x):
        OPS.turn(*parts(x))
        return x + 1

    ours, theirs = torch.randn(3, 4), torch.empty(3, 4)
    theirs.copy_(ours)
    torch.testing.assert_close((dovetail.compile(program)(ours), ours), (program(theirs), theirs))
