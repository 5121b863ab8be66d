"""New values of inputs are written straight over the old ones where nothing reads those any more."""
from __future__ import annotations

import copy

import pytest
import torch

import dovetail
from dovetail.events import EVENTS


def momentum(p, m, g):
    m.mul_(0.9).add_(g)
    p.add_(m, alpha=-0.1)


def swap(a, b):
    t = a.clone()
    a.copy_(b)
    b.copy_(t)


def transpose(a):
    a.copy_(a.t() * 2)


def returned(a, b):
    a.add_(b)
    return a * 2, a


def turned(a):
    a.copy_(a.flip(0) + a)
    return a.abs().sum()


def old_and_new(a, b):
    s = a.abs().sum()
    a.mul_(2)
    return s + a.abs().sum(), b * a


def normalised(a):
    a.copy_(torch.softmax(a, -1))


def spread(a):
    """A variance reads its rows twice."""
    found = a.var(1), a.std()
    a.mul_(2)
    return found


def spread_of_new(a):
    """What is read twice may be computed from the old value, once for each reading."""
    a.t().mul_(2)
    return torch.std_mean(a)


def same_value_twice(a, b):
    c = a + b
    a.copy_(c)
    b.copy_(c)


PROGRAMS = [momentum, swap, transpose, returned, turned, old_and_new, normalised, spread, spread_of_new, same_value_twice]


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("program", PROGRAMS)
def test_equal_to_eager(program, step):
    count = program.__code__.co_argcount
    given = [torch.randn(24, 24 * step)[:, ::step] for _ in range(count)]
    plain = copy.deepcopy(given)
    compiled = dovetail.compile(program)
    before = [x._version for x in given], [x._version for x in plain]
    for _ in range(2):
        with torch.no_grad():
            got, wanted = compiled(*given), program(*plain)
        torch.testing.assert_close(given, plain)
        torch.testing.assert_close(got, wanted)
    written = [[x._version > v for x, v in zip(xs, vs)] for xs, vs in zip((given, plain), before)]
    assert written[0] == written[1]


def places(program, *given):
    EVENTS.clear()
    with torch.no_grad():
        dovetail.compile(program)(*given)
    (plan,) = [event["value"] for event in EVENTS.of("stage") if event["stage"] == "70.plan"]
    return [place.kind for _, place in plan.places]


def test_an_update_costs_no_memory_of_its_own(monkeypatch):
    monkeypatch.setattr(EVENTS, "is_detailed", True)  # no stage is skipped for a cached result
    kinds = places(momentum, *(torch.randn(31, 7) for _ in range(3)))
    assert kinds.count("reuse") == 2 and "output" not in kinds


def counted(a, n):
    at = n.clone()
    n.add_(1)
    a.index_copy_(0, at, torch.ones(1, 700))


def test_an_update_waits_for_reads_of_the_old_value(monkeypatch):
    monkeypatch.setattr(EVENTS, "is_detailed", True)
    a, n = torch.randn(24, 700), torch.tensor([5])  # small updates wait until no index can fail
    plain = a.clone(), n.clone()
    counted(*plain)
    kinds = places(counted, a, n)
    assert "reuse" in kinds and "output" not in kinds
    assert torch.equal(a, plain[0]) and torch.equal(n, plain[1])
