"""A compiled module is a drop-in for the original."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize

import dovetail


class Net(nn.Module):
    calls: int

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("shift", torch.ones(width))
        self.k = 3.0

    def forward(self, x: torch.Tensor, twice: bool = False) -> torch.Tensor:
        y = self.norm(self.lin(x)) * self.k + self.shift
        return y * 2 if twice else y

    def again(self, x: torch.Tensor) -> torch.Tensor:
        return self(self(x))


class Registered(nn.Module):
    known: list[type] = []

    def __init_subclass__(cls, *, tag: str) -> None:
        cls.known.append(cls)


class Tagged(Registered, tag="a"):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Double(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w * 2


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


X = torch.randn(6, 4)


def test_same_class_same_keys_same_parameters(net: Net) -> None:
    compiled = dovetail.compile(net)
    assert isinstance(compiled, Net) and isinstance(compiled, nn.Module) and compiled.__class__ is Net
    assert list(compiled.state_dict()) == list(net.state_dict())
    assert [id(p) for p in compiled.parameters()] == [id(p) for p in net.parameters()]
    assert [n for n, _ in compiled.named_modules()] == [n for n, _ in net.named_modules()]
    assert repr(compiled) == repr(net)
    assert inspect.signature(compiled.forward) == inspect.signature(net.forward)


def test_the_original_stays_eager(net: Net) -> None:
    dovetail.reset()
    compiled = dovetail.compile(net)
    net(X)
    assert dovetail.stats()["graphs"] == 0
    compiled(X)
    assert dovetail.stats()["graphs"] >= 1


def test_values_and_statistics(net: Net) -> None:
    twin = copy.deepcopy(net)
    compiled = dovetail.compile(twin)
    for _ in range(3):
        torch.testing.assert_close(compiled(X), net(X))
        torch.testing.assert_close(compiled(X, twice=True), net(X, twice=True))
    torch.testing.assert_close(twin.norm.running_mean, net.norm.running_mean)


def test_train_eval_to_act_on_both(net: Net) -> None:
    compiled = dovetail.compile(net)
    assert compiled.eval() is compiled and not net.training and not net.norm.training
    torch.testing.assert_close(compiled(X), net(X))
    net.train()
    assert compiled.training
    compiled.double()
    assert net.lin.weight.dtype == torch.float64
    torch.testing.assert_close(compiled(X.double()), net(X.double()))
    compiled.requires_grad_(False)
    assert not net.lin.weight.requires_grad


def test_attributes_are_shared(net: Net) -> None:
    compiled = dovetail.compile(net).eval()
    compiled.k = 7.0
    assert net.k == 7.0
    torch.testing.assert_close(compiled(X), net(X))
    net.lin = nn.Linear(4, 4)
    assert compiled.lin is net.lin
    torch.testing.assert_close(compiled(X), net(X))
    compiled.extra = nn.Parameter(torch.ones(2))
    assert "extra" in dict(net.named_parameters())
    del compiled.extra
    assert not hasattr(net, "extra") and not hasattr(compiled, "extra")
    with pytest.raises(AttributeError, match="nothing"):
        compiled.nothing  # noqa: B018


def test_methods_call_the_compiled_module(net: Net) -> None:
    dovetail.reset()
    compiled = dovetail.compile(net).eval()
    torch.testing.assert_close(compiled.again(X), net.again(X))
    assert dovetail.stats()["graphs"] >= 1
    torch.testing.assert_close(compiled.forward(X), net(X))


def test_forward_can_be_replaced(net: Net) -> None:
    compiled = dovetail.compile(net)
    compiled.forward = lambda x: x + 1
    torch.testing.assert_close(compiled(X), X + 1)
    torch.testing.assert_close(net(X), X + 1)
    del compiled.forward
    torch.testing.assert_close(compiled.eval()(X), net(X))


def test_hooks(net: Net) -> None:
    compiled = dovetail.compile(net).eval()
    seen: list[str] = []
    kept = [
        compiled.register_forward_hook(lambda module, args, out: seen.append("after")),
        compiled.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        net.lin.register_forward_hook(lambda module, args, out: out + 1),
    ]
    torch.testing.assert_close(compiled(X), net(X))
    assert seen == ["after", "after"]
    for hook in kept:
        hook.remove()
    torch.testing.assert_close(compiled(X), net(X))
    assert len(seen) == 2


def test_deepcopy_and_copy(net: Net) -> None:
    compiled = dovetail.compile(net, dynamic=False).eval()
    twin = copy.deepcopy(compiled)
    assert isinstance(twin, Net) and twin.lin is not net.lin and twin._dovetail_original is not net
    torch.testing.assert_close(twin(X), compiled(X))
    assert copy.copy(compiled).lin is net.lin


def test_save_and_load(net: Net) -> None:
    compiled = dovetail.compile(net).eval()
    compiled(X)
    for load in (
        lambda: pickle.loads(pickle.dumps(compiled)),
        lambda: torch.load(_saved(compiled), weights_only=False),
        lambda: torch.load(_saved(nn.Sequential(compiled)), weights_only=False),
    ):
        torch.testing.assert_close(load()(X), compiled(X))
    fresh = Net().eval()
    fresh.load_state_dict(torch.load(_saved(compiled.state_dict())))
    torch.testing.assert_close(fresh(X), compiled(X))


def _saved(thing: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return buffer


def test_parametrize(net: Net) -> None:
    compiled = dovetail.compile(net.lin)
    before = compiled(X)
    parametrize.register_parametrization(compiled, "weight", Double())
    torch.testing.assert_close(compiled.weight, net.lin.weight)
    torch.testing.assert_close(compiled(X), net.lin(X))
    assert not torch.allclose(compiled(X), before)
    parametrize.remove_parametrizations(compiled, "weight")
    torch.testing.assert_close(compiled(X), net.lin(X))


def test_as_part_of_another_module(net: Net) -> None:
    parent = nn.Sequential(dovetail.compile(net), nn.ReLU()).eval()
    assert not net.training and list(parent.state_dict())[0] == "0.shift"
    torch.testing.assert_close(parent(X), net(X).relu())
    torch.testing.assert_close(dovetail.compile(parent)(X), net(X).relu())


def test_training_reaches_the_original(net: Net) -> None:
    twin = copy.deepcopy(net)
    compiled = dovetail.compile(net)
    optimizer = torch.optim.SGD(compiled.parameters(), 0.1)
    other = torch.optim.SGD(twin.parameters(), 0.1)
    for _ in range(3):
        for model, step in ((compiled, optimizer), (twin, other)):
            step.zero_grad()
            model(X).square().mean().backward()
            step.step()
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_new_instances_of_its_class_are_plain(net: Net) -> None:
    compiled = dovetail.compile(net)
    other = type(compiled)(5)
    assert type(other) is Net and other.lin.in_features == 5
    assert type(compiled).forward is Net.forward
    traced = torch.fx.symbolic_trace(compiled.eval(), concrete_args={"twice": False})
    torch.testing.assert_close(traced(X), net(X))


def test_the_class_is_not_subclassed_behind_its_back() -> None:
    torch.testing.assert_close(dovetail.compile(Tagged())(X), X * 2)
    assert Registered.known == [Tagged]


def test_graph_modules_and_callables(net: Net) -> None:
    traced = torch.fx.symbolic_trace(net.eval(), concrete_args={"twice": False})
    compiled = dovetail.compile(traced)
    dovetail.reset()
    torch.testing.assert_close(compiled(X), net(X))
    assert dovetail.stats()["graphs"] == 1
    torch.testing.assert_close(copy.deepcopy(compiled)(X), net(X))


def test_nothing_is_kept_alive(net: Net) -> None:
    compiled = dovetail.compile(net)
    compiled(X)
    alive = weakref.ref(compiled)
    del compiled
    gc.collect()
    assert alive() is None


def test_no_class_is_kept_alive(net: Net) -> None:
    def run() -> Any:
        class Step:
            def __call__(self, x: torch.Tensor) -> torch.Tensor:
                return net(x) * 2

        step = Step()
        dovetail.compile(lambda x: step(x))(X)
        return weakref.ref(Step)

    alive = run()
    for _ in range(2):
        gc.collect()
    assert alive() is None


@pytest.mark.parametrize("is_inside", [True, False])
def test_data_parallel_training(is_inside: bool, net: Net, tmp_path: Path) -> None:
    x, twin = X.double(), copy.deepcopy(net.double())  # a bias before a norm has a gradient of 0, but for rounding
    (twin(x) * x).sum().backward()  # of its squares a normalised output has hardly a gradient
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        dovetail.reset()
        parallel = nn.parallel.DistributedDataParallel(dovetail.compile(net) if is_inside else net)
        model = parallel if is_inside else dovetail.compile(parallel)
        (model(x) * x).sum().backward()
    finally:
        time.sleep(0.5)  # a thread of the group lets go of its work, for which it may need this one's interpreter
        dist.destroy_process_group()
    assert dovetail.stats()["graphs"] >= 1
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
