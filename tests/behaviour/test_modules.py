"""SPEC C5 and F3: nn.Modules as people build them, captured whole; a compiled module is a drop-in."""
from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dovetail
from tests.behaviour.running import ANY, Suite

suite = Suite()
case = suite.case


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 2), "b": nn.Linear(8, 3)})
        self.scale = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(depth)])

    def forward(self, x: torch.Tensor, head: str = "a") -> torch.Tensor:
        for layer, scale in zip(self.layers, self.scale, strict=True):
            x = layer(x) * scale
        for i in range(len(self.layers)):
            x = self.layers[i](x)
        for name, module in self.heads.items():
            if name == head:
                return module(x)
        return self.layers[-1](x)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.calls = 0
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += x.shape[0]
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        self.last = x.shape
        return x - self.mean


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.head = nn.Linear(4 * 4 * 4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).flatten(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("mask", torch.tril(torch.ones(6, 6, dtype=torch.bool)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (h.view(b, t, 2, 4).transpose(1, 2) for h in self.qkv(x).chunk(3, -1))
        weights = (q @ k.mT / 2.0).masked_fill(~self.mask[:t, :t], float("-inf")).softmax(-1)
        fast = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (weights @ v).transpose(1, 2).reshape(b, t, c) + fast.transpose(1, 2).reshape(b, t, c)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.out = nn.Linear(8, 10, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(tokens))


def x8() -> torch.Tensor:
    return torch.randn(2, 8)


@case("C5")
def mlp_block_train() -> Any:
    return Block(), (x8(),)


@case("C5")
def mlp_block_eval() -> Any:
    return Block().eval(), (x8(),)


@case("C5", same_storage=True)
def tensors_are_given_other_memory() -> Any:
    online, target = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).requires_grad_(False)
    before = target.weight.data

    def f(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        for own, other in zip(target.parameters(), online.parameters()):
            own.data = own.data * 0.5 + other.data * 0.5
            other.data -= 0.1
        first = x[0]
        x.data, y.data = y.data, x.data
        first.add_(1)
        made = z * 2
        z.data = made
        z.add_(1)
        return online(x) + target(y), first, made

    effects = lambda: (before, target.weight, online.weight)  # noqa: E731
    return f, [(torch.randn(2, 4), torch.randn(2, 4), torch.randn(3)) for _ in range(2)], effects


@case("C5", same_storage=True)
def parameters_are_given_other_memory_and_gradients() -> Any:
    model = torch.nn.Linear(4, 4)
    model(torch.randn(3, 4)).sum().backward()
    before = model.weight.data

    def f(x: torch.Tensor) -> Any:
        halves = [p.grad * 0.5 for p in model.parameters()]
        for p, half in zip(model.parameters(), halves):
            p.data = p.data - 0.1 * half
            p.grad = half
            half.add_(1)
        with torch.no_grad():
            model.weight.mul_(2)
        made = x * 2
        model.bias.data = made
        return made.mul_(2), model.weight.grad is halves[0], model.weight.requires_grad, model.weight.data + 1

    effects = lambda: (before, model.weight, model.bias, model.weight.grad, model.bias.grad)  # noqa: E731
    return f, [(torch.randn(4),) for _ in range(2)], effects


@case("C5", breaks=ANY)
def gradient_of_a_parameter_given_other_memory() -> Any:
    model = torch.nn.Linear(4, 4)

    def f(x: torch.Tensor) -> Any:
        before = model(x).sum()
        model.weight.data = model.weight.data * 2
        (grad,) = torch.autograd.grad(before, model.weight)
        model.weight.data = model.weight.data + 1
        return model(x), grad

    return f, [(torch.randn(3, 4),) for _ in range(2)], lambda: model.weight


@case("C5", recompiles=1)
def hooks_registered_and_removed_by_the_function() -> Any:
    """Each is given another number in each call, by torch, for all modules."""
    m = Block().eval()

    def f(x: torch.Tensor) -> Any:
        seen: list[Any] = []
        first = m.up.register_forward_hook(lambda module, args, out: seen.append(out))
        second = m.down.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        with m.up.register_forward_hook(lambda module, args, out: out + 1):
            y = m(x)
        first.remove()
        y = y + m(x)
        second.remove()
        return y, seen, first.id == second.id, len(m.up._forward_hooks), m(x)

    return f, [(x8(),)] * 5, lambda: (len(m.up._forward_hooks), len(m.down._forward_pre_hooks))


@case("C5", breaks=ANY)
def hooks_that_stay() -> Any:
    m, handles = Block().eval(), []

    def f(x: torch.Tensor) -> Any:
        handles.append(m.up.register_forward_hook(lambda module, args, out: out + 1))
        return m(x)

    def left() -> Any:
        return [list(m.up._forward_hooks).index(handle.id) for handle in handles]

    return f, [(x8(),)] * 4, left


@case("C5")
def module_containers() -> Any:
    m = Stack().eval()
    return m, [(x8(),), (x8(), "b"), (x8(), "none")]


@case("C5")
def buffers_and_attributes_mutated() -> Any:
    m = Counting()
    return m, [(torch.randn(3, 4),)] * 3, lambda: (m.calls, m.seen, m.mean, m.last)


@case("C5")
def assigned_buffers_are_seen_in_their_table() -> Any:
    class Decaying(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(4))
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> Any:
            before = self.mean
            self.mean = self.mean * 0.5 + x.mean(0)
            self.count += 1
            return before, [b + 1 for b in self.buffers()], self._buffers["mean"] - self.mean, dict(self.named_buffers())

    m = Decaying()
    return m, [(torch.randn(3, 4),)] * 2, lambda: m.state_dict()


@case("C5")
def convolution_batchnorm_train() -> Any:
    m = ConvNet()
    return m, [(torch.randn(2, 3, 8, 8),)] * 2, lambda: m.state_dict()


@case("C5")
def convolution_batchnorm_eval() -> Any:
    return ConvNet().eval(), (torch.randn(2, 3, 8, 8),)


@case("C5")
def attention() -> Any:
    return Attention(), (torch.randn(2, 6, 8, requires_grad=True),)


@case("C5")
def shared_parameters() -> Any:
    return Shared(), (torch.randint(0, 10, (2, 5)),)


@case("C5")
def train_then_eval() -> Any:
    m = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))

    def f(x: torch.Tensor, training: bool) -> torch.Tensor:
        m.train(training)
        return m(x)

    return f, [(x8(), True), (x8(), False), (x8(), True)], lambda: m.training


@case("C5")
def forward_hooks() -> Any:
    m = Block().eval()
    log: list[Any] = []
    m.up.register_forward_hook(lambda mod, args, out: out * 2)
    m.down.register_forward_pre_hook(lambda mod, args: (args[0] + 1,))
    m.register_forward_hook(lambda mod, args, out: log.append(out.shape))
    return m, [(x8(),)] * 2, lambda: log


@case("C5")
def hook_for_one_call() -> Any:
    model = nn.Linear(4, 4)

    def f(x: torch.Tensor) -> Any:
        handle = model.register_forward_hook(lambda module, args, out: out * 2)
        try:
            return model(x)
        finally:
            handle.remove()

    return f, [(torch.randn(2, 4),), (torch.randn(2, 4),)], lambda: len(model._forward_hooks)


@case("C5", breaks=ANY)
def module_made_inside() -> Any:
    def f(x: torch.Tensor) -> Any:
        return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))(x)

    return f, (torch.randn(2, 4),)


@case("C5")
def hooks_with_kwargs() -> Any:
    class M(nn.Module):
        def forward(self, x: torch.Tensor, k: float = 1.0) -> torch.Tensor:
            return x * k

    m = M()
    m.register_forward_pre_hook(lambda mod, args, kwargs: (args, {**kwargs, "k": 3.0}), with_kwargs=True)
    return lambda x: m(x, k=2.0), (x8(),)


@case("C5", breaks=ANY)
def full_backward_hook() -> Any:
    m = nn.Linear(4, 4)
    log: list[Any] = []
    m.register_full_backward_hook(lambda mod, gi, go: log.append(go[0].shape))
    return lambda x: m(x).relu(), (torch.randn(2, 4, requires_grad=True),), lambda: log


@case("C5")
def methods_other_than_forward() -> Any:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x).tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.encode(x) + self.encode(-x)

    m = M()
    return m.encode, (x8(),)


@case("C5")
def module_introspection() -> Any:
    m = Stack(2).eval()

    def f(x: torch.Tensor) -> Any:
        count = sum(p.numel() for p in m.parameters())
        names = [name for name, _ in m.named_children()]
        linears = [mod for mod in m.modules() if isinstance(mod, nn.Linear)]
        device = next(m.parameters()).device
        return linears[0](x).sum() * count, names, device, "a" in m.heads, len(m.layers), m.training

    return f, (x8(),)


@case("C5")
def parameter_created_lazily_elsewhere() -> Any:
    w = nn.Parameter(torch.randn(8, 3))
    return lambda x: x @ w + w.sum(), (x8(),)


@case("C5")
def sequential_slicing_and_modulelist_ops() -> Any:
    m = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh())
    return lambda x: (m[:2](x), m[-1](x), [layer(x) for layer in m][0]), (x8(),)


@case("C5")
def lstm_and_gru() -> Any:
    rnn, gru = nn.LSTM(4, 6, batch_first=True), nn.GRUCell(4, 6)

    def f(x: torch.Tensor) -> Any:
        out, (h, c) = rnn(x)
        state = torch.zeros(2, 6)
        for t in range(x.shape[1]):
            state = gru(x[:, t], state)
        return out, h, c, state

    return f, (torch.randn(2, 3, 4),)


@case("C5")
def transformer_encoder_layer() -> Any:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (torch.randn(2, 5, 8),)


@case("C5")
def custom_call_override() -> Any:
    class M(nn.Linear):
        def __call__(self, x: torch.Tensor, twice: bool = False) -> torch.Tensor:  # type: ignore[override]
            y = super().__call__(x)
            return y * 2 if twice else y

    m = M(8, 4)
    return lambda x: m(x, twice=True), (x8(),)


@case("C5")
def module_with_getattr_and_property() -> Any:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        @property
        def width(self) -> int:
            return self.inner.out_features

        def __getattr__(self, name: str) -> Any:
            if name == "alias":
                return self.inner
            return super().__getattr__(name)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.alias(x) * self.width

    return M(), (x8(),)


@case("C5")
def parametrized_weight() -> Any:
    m = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))
    return m, (x8(),)


@case("C5")
def lazy_modules() -> Any:
    return torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.ReLU(), torch.nn.LazyLinear(2)), [(torch.randn(2, 4),)] * 3


test_program = suite.test()


# -- F3: a compiled module is a drop-in ------------------------------------------------------------


def compiled(model: nn.Module) -> nn.Module:
    return dovetail.compile(model, backend="eager")  # type: ignore[return-value]


def test_same_class_keys_and_parameters() -> None:
    m = Stack()
    c = compiled(m)
    assert isinstance(c, Stack) and isinstance(c, nn.Module)
    assert list(c.state_dict()) == list(m.state_dict())
    assert all(a is b for a, b in zip(c.parameters(), m.parameters(), strict=True))
    assert [n for n, _ in c.named_modules()] == [n for n, _ in m.named_modules()]


def test_train_eval_to_and_attributes_act_on_the_original() -> None:
    m = Stack()
    c = compiled(m)
    c.eval()
    assert not m.training and not m.layers[0].training
    c.train()
    assert m.training
    c.to(torch.float64)
    assert m.layers[0].up.weight.dtype is torch.float64
    c.extra = 5
    assert m.extra == 5 and c.extra == 5
    m.other = 6
    assert c.other == 6
    del c.extra
    assert not hasattr(m, "extra")
    assert c(x8().double()).dtype is torch.float64


def test_load_state_dict_and_optimizer_are_noticed() -> None:
    m = Block().eval()
    c = compiled(m)
    x = x8()
    with torch.no_grad():
        before = c(x)
        c.load_state_dict({k: v * 2 for k, v in m.state_dict().items()})
        torch.testing.assert_close(c(x), m(x))
        assert not torch.allclose(before, c(x))
    optimizer = torch.optim.SGD(c.parameters(), lr=0.5)
    c(x).sum().backward()
    optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(c(x), m(x))


def test_deepcopy_and_pickle() -> None:
    c = compiled(Block().eval())
    x = x8()
    want = c(x)
    twin = copy.deepcopy(c)
    torch.testing.assert_close(twin(x), want)
    with torch.no_grad():
        twin.down.weight.zero_()
    torch.testing.assert_close(c(x), want)
    again = pickle.loads(pickle.dumps(c))
    torch.testing.assert_close(again(x), want)
    file = io.BytesIO()
    torch.save(c, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(x), want)


def test_hooks_on_the_compiled_module_run() -> None:
    c = compiled(Block().eval())
    log: list[int] = []
    handle = c.register_forward_hook(lambda m, a, out: log.append(1))
    c(x8())
    c(x8())
    handle.remove()
    c(x8())
    assert log == [1, 1]


def test_the_original_stays_eager() -> None:
    m = Block().eval()
    c = compiled(m)
    c(x8())
    before = dovetail.stats()["graphs"]
    m(torch.randn(3, 8, 8))
    assert dovetail.stats()["graphs"] == before


class Tallied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.count, self.extra = nn.Linear(8, 8), 0, 1
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.total += x.sum()
        self.last = x * 2
        return self.lin(x) * self.count

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self(self(x))


def use_both(m: Tallied, c: nn.Module, x: torch.Tensor) -> list[Any]:
    y = c(x) + m.count + c.count  # type: ignore[operator]
    c.count = m.count + 5
    m.count += 1
    c.noted = y
    if hasattr(m, "extra"):
        del c.extra
    y = y + c.count + m.count + m.last + m.total + c.twice(x) + c.forward(x) + nn.Module.__call__(c, x)
    return [y, c is m, isinstance(c, Tallied), "extra" in vars(c), m.noted, sum(p.sum() for p in c.parameters()), [c]]


def test_a_compiled_module_in_compiled_code() -> None:
    """It is captured with what calls it: one graph, and attributes of one are those of the other."""
    torch.manual_seed(0)
    plain = Tallied()
    m = copy.deepcopy(plain)
    inner = compiled(m)
    outer = dovetail.compile(lambda x: use_both(m, inner, x), backend="eager", fullgraph=True)
    for x in (x8(), x8() + 1):
        want, got = use_both(plain, compiled(plain), x), outer(x)
        assert got.pop()[0] is inner and isinstance(want.pop()[0], Tallied)
        torch.testing.assert_close(got, want)
        assert plain.count == m.count and not hasattr(m, "extra")
        torch.testing.assert_close(m.total, plain.total)
    stacked = dovetail.compile(nn.Sequential(compiled(Block()), nn.ReLU(), compiled(Block())), fullgraph=True)
    stacked(x8()).sum().backward()
    assert all(p.grad is not None for p in stacked.parameters())


def test_forward_of_a_compiled_module_in_a_wrapper() -> None:
    """As libraries for training do it."""
    m = Block().eval()
    c = compiled(m)
    x, run = x8(), c.forward
    want = m(x) + 1
    c.forward = lambda x: run(x).float() + 1
    before = dovetail.stats()["graph_breaks"]
    torch.testing.assert_close(c(x), want)
    assert dovetail.stats()["graph_breaks"] == before


def test_submodule_replaced_by_compiled_one() -> None:
    m = Stack().eval()
    want = m(torch.ones(2, 8))
    m.layers[0] = compiled(m.layers[0])
    torch.testing.assert_close(m(torch.ones(2, 8)), want)
    assert list(m.state_dict()) == list(Stack().state_dict())


@pytest.mark.parametrize("method", ["double", "half", "requires_grad_", "zero_grad", "share_memory"])
def test_module_methods_return_a_usable_module(method: str) -> None:
    c = compiled(Block().eval())
    result = getattr(c, method)()
    assert result is c or result is None


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))
        self.inner = nn.Identity()
        self.seen.add_(1)


def test_init_of_a_module_made_before() -> None:
    def init(module: Any) -> int:
        Counted.__init__(module)
        return len(module.seen) + len(list(module.inner.parameters()))

    dovetail.reset()
    module = Counted.__new__(Counted)
    assert dovetail.compile(init, backend="eager")(module) == 3 and module.seen.tolist() == [1, 1, 1]
    assert not dovetail.stats()["fallbacks_to_eager"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_of_torchscript_are_one_break_each() -> None:
    x, model = torch.randn(3, 4), nn.Linear(4, 4)
    traced, scripted = torch.jit.trace(model, x), torch.jit.script(model)

    def f(x: torch.Tensor, module: Any) -> torch.Tensor:
        return module(x.sin()).cos()

    for module in (traced, scripted):
        dovetail.reset()
        torch.testing.assert_close(dovetail.compile(f, backend="eager")(x, module), f(x, module))
        stats = dovetail.stats()
        assert not stats["fallbacks_to_eager"] and stats["graph_breaks"] == 1
