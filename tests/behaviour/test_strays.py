"""Programs that reach into corners: attributes of tensors and dicts, state kept by torch, objects of C code.

Each was wrong once in somebody's code, silently. A break is fine here; another result than eager's is not.
"""
from __future__ import annotations

import collections
import copy
import inspect
import itertools
import os
import tempfile
import types
import warnings
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true
from torch.overrides import TorchFunctionMode

import dovetail
from tests.behaviour.running import ANY, Suite

suite = Suite()


def stray(f: Any) -> Any:
    """A program of one tensor."""

    def make() -> tuple[Any, ...]:
        return f, (torch.arange(1.0, 7.0).view(2, 3),)

    make.__name__ = f.__name__
    suite.case("C4", breaks=ANY)(make)
    return f


@stray
def attributes_of_a_new_tensor(x: torch.Tensor) -> Any:
    y, z = x * 2, x + 1
    y.label, y.key, y.other, z.other, y.gone = "a", 3, z, y, 1  # type: ignore[attr-defined]
    del y.gone  # type: ignore[attr-defined]
    dovetail.graph_break()
    return y, y.label, y.key, y.other is z, z.other is y, hasattr(y, "gone")  # type: ignore[attr-defined]


@stray
def attributes_of_an_ordered_dict(x: torch.Tensor) -> Any:
    made: Any = collections.OrderedDict(a=x + 1)
    made.note = [1, 2]
    again = copy.deepcopy(made)
    names = nn.Sequential(nn.Linear(2, 2)).state_dict()
    dovetail.graph_break()
    return made["a"], made.note, again.note, again.note is made.note, sorted(names._metadata)


@stray
def buffers_by_assignment(x: torch.Tensor) -> Any:
    module = nn.Module()
    module.state = nn.Buffer(x + 1, persistent=False)
    first = len(module.state_dict())
    module.state = nn.Buffer(x + 2)
    dovetail.graph_break()
    return first, len(module.state_dict()), [name for name, _ in module.named_buffers()], module.state


@stray
def made_under_a_device(x: torch.Tensor) -> Any:
    with torch.device("meta"):
        y, norm = torch.ones(3), nn.BatchNorm1d(3)
    return x + 1, str(y.device), str(norm.weight.device), str(torch.ones(2).device)


def counted() -> Any:
    yield from (1, 2)


@stray
def kinds_of_generators(x: torch.Tensor) -> Any:
    made = nn.Linear(2, 2).parameters(), (i for i in range(2)), counted()
    kinds = [(isinstance(g, types.GeneratorType), inspect.isgenerator(g), type(g).__name__) for g in made]
    return x + 1, kinds, [sum(1 for _ in g) for g in made]


class Scaled:
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@stray
def what_a_test_puts_in_place_of_a_method(x: torch.Tensor) -> Any:
    with mock.patch.object(Scaled, "scale", return_value=torch.ones(3)) as scale:
        return Scaled().scale(x) + x, scale.call_count, callable(scale), callable(iter([1]))


OFFSETS = np.array([0, 5, 9])


@stray
def new_tensors_of_arrays(x: torch.Tensor) -> Any:
    return x + x.new_tensor(OFFSETS), x.new_tensor([1, 2]), x.new_tensor(OFFSETS, dtype=torch.int32)


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(3, 2), 0
        self.register_backward_hook(self.note)  # type: ignore[arg-type]

    def note(self, *_: Any) -> None:
        self.seen += 1

    def forward(self, x: torch.Tensor) -> Any:
        return {"loss": self.layer(x).sum()}


@stray
def a_hook_on_a_node_of_autograd(x: torch.Tensor) -> Any:
    module = Hooked()
    module(x)["loss"].backward()
    return module.seen, module.layer.bias.grad


@stray
def copy_of_a_tensor_with_a_gradient(x: torch.Tensor) -> Any:
    x.grad = torch.ones_like(x)
    x.label, z = "a", x + 1  # type: ignore[attr-defined]
    z.label = "b"  # type: ignore[attr-defined]
    y, z = copy.deepcopy((x, z))
    return y + 1, y.grad, y.label, z.label  # type: ignore[attr-defined]


@stray
def results_that_are_resized(x: torch.Tensor) -> Any:
    found = []
    for order in itertools.permutations(range(3)):
        y = x.repeat(4, 1, 2)[:, :, ::2].permute(order)
        for op in (torch.eq, torch.add):
            out = torch.empty(0, dtype=op(y, y).dtype)
            found.append((op(y, y[0], out=out).stride(), out.shape, out))
    return found


@stray
def kron_into_a_tensor(x: torch.Tensor) -> Any:
    out = torch.zeros(4, 9)
    return torch.kron(x, x, out=out) is out, out + 1


@stray
def orders_of_a_norm(x: torch.Tensor) -> Any:
    a = x.numpy()
    return [np.linalg.norm(a[0], order) for order in (0, 1, np.inf)], np.linalg.norm(a, 1), np.linalg.norm(a, axis=0).tolist()


class Resource:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __del__(self) -> None:
        self.log.append("gone")


@stray
def what_a_variable_keeps_alive(x: torch.Tensor) -> Any:
    log: list[str] = []
    resource = Resource(log)  # noqa: F841
    folder = tempfile.TemporaryDirectory()
    path = folder.name
    y = x * 2
    dovetail.graph_break()
    return y, list(log), os.path.exists(path)


def complaint(function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:
        return type(error), str(error).split("\n")[0]


@suite.case("C4")
def builtins_with_too_many_or_too_few_arguments() -> Any:
    def f(x: torch.Tensor) -> Any:
        wrong = [(len,), (len, [1], 2), (sum,), (round,), (sorted, [1], [2]), (abs,), (getattr, x), (hasattr, x), (isinstance, x),
                 (next,), (iter, 1, 2, 3), (divmod, 1), (setattr, x), (any,), (issubclass, int), (repr,), (hash, 1, 2), (x,)]
        named = [complaint(lambda: len(obj=[1])), sum([1, 2], start=3), round(2.567, ndigits=1), sorted([1, 2], reverse=True)]  # type: ignore[call-arg]
        return x + 1, [complaint(*each) for each in wrong], named

    return f, [(torch.ones(2),)] * 2


@stray
def what_eager_says_is_wrong(x: torch.Tensor) -> Any:
    half = x.long()
    wrong = [(torch.matmul, x, x), (torch.normal, x, x[0, :2]), (x.view, 4), (F.linear, x, x.t()), (F.embedding, x, x),
             (torch.addr, half, half[0], half[1]), (F.fold, x.repeat(3, 2), [4, 5], [2, 3]), (x.index_select, 0, x[0])]
    return x + 1, complaint(lambda: x @ x), [complaint(*each) for each in wrong]


@stray
def what_only_a_meta_kernel_refuses(x: torch.Tensor) -> Any:
    lengths = torch.tensor([3, 2])
    packed = nn.utils.rnn.pack_padded_sequence(x[:, :, None], lengths, batch_first=True)
    return x + 1, packed.data, F.interpolate(x[:0, :, None], size=(4,))


class Counts(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@stray
def what_a_function_mode_sees(x: torch.Tensor) -> Any:
    x = x + 1
    with Counts() as mode:
        y = x.sin() + torch.ones(3)
    return y * 2, mode.seen


@stray
def draws_of_a_generator(x: torch.Tensor) -> Any:
    own = torch.Generator().manual_seed(3)
    drawn = [x.clone().log_normal_(generator=own), x.clone().cauchy_(generator=own), x.clone().geometric_(0.5, generator=own)]
    return drawn, own.get_state().sum()


@stray
def warnings_that_raise(x: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            warnings.warn("old", stacklevel=1)
        except UserWarning:
            return x * 2
    return x


@stray
def truth_of_many_elements(x: torch.Tensor) -> Any:
    return complaint(lambda: [x, x + 1].index(x[0])), abs(torch.tensor(-3)) + x


@stray
def method_taken_from_the_class(x: torch.Tensor) -> Any:
    both = [x, x + 1]
    list.remove(both, x)
    return both, list.index(["a", x], x), dict.get({"a": 2}, "a"), dict.fromkeys("ab", x)


@stray
def property_of_a_module_of_torch(x: torch.Tensor) -> Any:
    state = torch.utils.deterministic
    state.fill_uninitialized_memory = False
    now = torch._C._get_deterministic_fill_uninitialized_memory()
    state.fill_uninitialized_memory = True
    return x + 1, now, torch._C._get_deterministic_fill_uninitialized_memory()


class Recorded:
    seen: list[str] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func.__name__)
        return cls()


@suite.case("C4", breaks=ANY, recompiles=ANY)
def functions_of_what_is_no_tensor() -> Any:
    def f(x: torch.Tensor, graph: Any) -> Any:
        Recorded.seen.clear()
        proxy = torch.fx.Proxy(graph.placeholder("x"))
        torch.relu(proxy), torch.neg(proxy), torch.relu(Recorded()), torch.add(x, Recorded())
        return x * 2, list(Recorded.seen), len(proxy.node.users), len(graph.nodes)

    return f, [(torch.ones(2), torch.fx.Graph()) for _ in range(3)]


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


@stray
def futures(x: torch.Tensor) -> Any:
    later = torch.futures.Future()
    later.set_result(x * 2)
    forks = [torch.jit.fork(scripted, x[0]), torch.jit.fork(torch.cos, x[1])]
    return later.wait() + 1, [torch.jit.wait(fork) for fork in forks]


@stray
def base_of_an_array(x: torch.Tensor) -> Any:
    array = x.numpy()[1:] * 2
    return torch.from_numpy(array.copy() if array.base is not None and array.size < array.base.size // 2 else array)


@suite.case("C4", breaks=0, recompiles=ANY)
def conditions_that_are_checked() -> Any:
    def f(x: torch.Tensor, n: int) -> Any:
        torch._check(n + 5 == x.shape[0] + 5, lambda: f"{n} rows")
        return x * 2 if guard_or_false(x.shape[0] == 4) else x + statically_known_true(n > 2)

    return f, [(torch.ones(n, 2), n) for n in (3, 5, 4, 6)]


test_stray = suite.test()


def test_what_torch_warns_of_is_shown_once_and_names_the_users_line() -> None:
    def f(x: torch.Tensor) -> Any:
        return F.softmax(x) * 2, torch.tensor(x)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        run = dovetail.compile(f)
        for _ in range(2):
            run(torch.randn(2, 3))
    assert [w.category for w in seen] == [UserWarning] * 2
    assert {(w.filename, w.lineno) for w in seen} == {(__file__, f.__code__.co_firstlineno + 1)}
