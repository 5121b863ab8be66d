"""Prepared weights: every kind of change is noticed, nothing else is prepared again."""
from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dovetail
from dovetail.events import EVENTS
from dovetail.ir.types import F32, tensor_type
from dovetail.runtime.frozen import Frozen


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16)
        self.deep, self.head = nn.Conv2d(16, 32, 3, groups=16), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).relu()
        return self.head(self.deep(x).mean((2, 3)))


def make() -> tuple[nn.Module, Any, torch.Tensor]:
    torch.manual_seed(0)
    model = Net().eval()
    settings = {"fallback_to_eager": False, "notice_slow": False}
    return model, dovetail.compile(model, options=settings), torch.randn(2, 3, 8, 8)


def preparations() -> int:
    return EVENTS.counts["frozen"]


def agree(model: nn.Module, compiled: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=2e-5, atol=2e-6)


def step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    model(torch.randn(2, 3, 8, 8)).square().sum().backward()
    optimizer.step()


def adam(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model(torch.randn(2, 3, 8, 8)).square().sum().backward()
    optimizer.step()


def compiled_write(model: nn.Module) -> None:
    @dovetail.compile
    def write(weight: torch.Tensor, rows: torch.Tensor) -> None:
        weight[rows] = 0.5

    with torch.no_grad():
        write(model.conv.weight, torch.arange(4))


def load(model: nn.Module, **settings: Any) -> None:
    torch.manual_seed(1)
    other = Net()
    nn.init.uniform_(other.norm.running_var, 0.5, 2.0)
    model.load_state_dict(other.state_dict(), **settings)


def swap_back_and_forth(model: nn.Module) -> None:
    """New memory may lie where the old was."""
    for _ in range(20):
        model.conv.weight.data = torch.randn(16, 3, 3, 3)


def write_numpy(model: nn.Module) -> None:
    model.conv.weight.detach().numpy()[:] = 0.25


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "sgd": step,
    "adam": adam,
    "load_state_dict": load,
    "load_state_dict(assign)": lambda model: load(model, assign=True),
    "data": lambda model: setattr(model.conv.weight, "data", torch.randn(16, 3, 3, 3)),
    "data, often": swap_back_and_forth,
    "data.mul_": lambda model: model.conv.weight.data.mul_(3),
    "data[0]": lambda model: model.norm.weight.data[3].fill_(3.0),
    "numpy": write_numpy,
    "running_mean": lambda model: model.norm.running_mean.fill_(0.7),
    "running_var": lambda model: model.norm.running_var.mul_(2.0),
    "in place": lambda model: nn.init.normal_(model.deep.weight),
    "one element": lambda model: model.deep.weight.detach()[3, 0, 1, 1].add_(2.0),
    "new parameter": lambda model: setattr(model.conv, "weight", nn.Parameter(torch.randn(16, 3, 3, 3))),
    "compiled write": compiled_write,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: str) -> None:
    model, compiled, x = make()
    agree(model, compiled, x)
    agree(model, compiled, x)
    assert preparations() > 0
    with torch.no_grad():
        before = model(x)
    CHANGES[change](model)
    with torch.no_grad():
        assert not torch.allclose(before, model(x))
    before_preparations = preparations()
    agree(model, compiled, x)
    agree(model, compiled, x)
    assert preparations() == before_preparations + 1


def test_unchanged_weights_are_prepared_once() -> None:
    model, compiled, x = make()
    start = preparations()
    for _ in range(5):
        agree(model, compiled, x)
    assert preparations() == start + 1
    model.head.weight.requires_grad_(False)
    model.conv.weight.requires_grad_(False)
    agree(model, compiled, x)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), model(x), rtol=2e-5, atol=2e-6)


def test_training_takes_weights_as_they_are() -> None:
    model, compiled, x = make()
    agree(model, compiled, x)
    start = preparations()
    model.train()
    compiled(x).sum().backward()
    assert preparations() == start
    assert model.conv.weight.grad is not None
    with torch.no_grad():
        compiled(x)  # batch statistics: the running ones are written
    model.eval()
    agree(model, compiled, x)


def test_gradients_with_frozen_mode_of_the_module() -> None:
    model, compiled, x = make()
    agree(model, compiled, x)
    start = preparations()
    x.requires_grad_()
    compiled(x).sum().backward()
    assert x.grad is not None and preparations() == start


def test_off() -> None:
    model, _, x = make()
    start = preparations()
    agree(model, dovetail.compile(model, options={"freeze": False}), x)
    assert preparations() == start


def test_weights_that_never_rest_get_a_plain_program() -> None:
    model, compiled, x = make()
    start = preparations()
    for _ in range(8):
        agree(model, compiled, x)
        model.conv.weight.detach().mul_(1.1)
    assert preparations() <= start + 4  # three in vain, and word of having given up
    agree(model, compiled, x)


def test_threads() -> None:
    model, compiled, x = make()
    agree(model, compiled, x)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                agree(model, compiled, x)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    model.norm.running_mean.fill_(0.3)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


class Strided(nn.Module):
    """What depends on memory sees eager's layout."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.a(x).relu()
        z = self.b(y)
        return z.as_strided((2, 5), (z.stride(0), 1)), y.sigmoid(), torch.linalg.norm(z, dim=(2, 3)), z


def test_memory_that_shows() -> None:
    model, x = Strided().eval(), torch.randn(2, 3, 8, 8)
    compiled = dovetail.compile(model, options={"fallback_to_eager": False})
    agree(model, compiled, x)
    with torch.no_grad():
        assert [y.stride() for y in compiled(x)] == [y.stride() for y in model(x)]


def test_values_go_with_the_weights() -> None:
    made = torch.zeros(5)
    held = weakref.ref(made)
    weight = torch.ones(3)
    types = [tensor_type((3,), F32)]
    values = [made]
    del made
    frozen = Frozen(lambda *given: list(given), lambda weights: [values.pop()], list, "test", (0,), types)
    assert frozen(weight)[1] is held()
    assert held() is not None
    del weight
    gc.collect()
    assert held() is None
