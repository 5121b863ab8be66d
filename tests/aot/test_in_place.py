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


def test_scatter_into_an_input_writes_the_input():
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
