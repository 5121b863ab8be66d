"""SPEC C9: custom autograd functions, torch.cond and subclasses of Parameter: captured, or left to Python, never wrong."""
from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import dovetail
from tests.behaviour.running import Suite
from tests.sweeps.peers import find_peer

suite = Suite()
case = suite.case
SCALE = 2.0


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * SCALE

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * SCALE * x.sign()


UNUSED: dict[str, Any] = {
    "an op of ATen": lambda x: torch.ops.aten.add_.Tensor(x, x, alpha=0.5),
    "a flag": lambda x: torch.nn.functional.relu(x, inplace=True),
    "a copy": lambda x: torch.ops.aten.copy_.default(x, x * 2),
    "a renormalised table": lambda x: torch.nn.functional.embedding(torch.tensor([0, 1]), x, max_norm=0.1),
    "a draw": lambda x: torch.nn.functional.dropout(x, 0.5),
    "a draw from": lambda x: x.random_(**{"from": -5, "to": 5}),
}


@pytest.mark.parametrize("name", UNUSED)
def test_effects_of_a_call_whose_result_nobody_uses(name: str) -> None:
    def program(x: torch.Tensor) -> None:
        UNUSED[name](x)

    found = []
    for run in (program, dovetail.compile(program)):
        torch.manual_seed(0)
        x = torch.randn(4, 3)
        run(x)
        found.append((x, torch.rand(1)))
    torch.testing.assert_close(*found)


@case("C9", breaks=2)
def function_that_prints() -> Any:
    class Loud(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            print("forward")
            return x * 3

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 3

    def f(x: torch.Tensor) -> Any:
        return Loud.apply(x.sin()) + 1

    return f, [(torch.ones(3, requires_grad=True),)] * 2


@case("C9", breaks=2)
def function_that_prints_without_gradients() -> Any:
    class Quiet(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                print("forward")
            return x * 3

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 3

    def f(x: torch.Tensor) -> Any:
        return Quiet.apply(x.sin()) + 1, torch.is_grad_enabled()

    return f, [(torch.ones(3, requires_grad=True),)] * 2


@case("C9", recompiles=1)
def function_with_settings() -> Any:
    class Settings:
        def __init__(self, factor: float) -> None:
            self.factor, self.name = factor, "linear"

    class Configured(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, how: Settings) -> torch.Tensor:
            ctx.how = how
            return x * how.factor

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad * ctx.how.factor * 2, None

    def f(x: torch.Tensor, how: Settings) -> Any:
        return Configured.apply(x.sin(), how) + 1

    one, two = Settings(2.0), Settings(3.0)
    calls = [(torch.ones(3, requires_grad=True), how) for how in (one, Settings(2.0), two, one)]
    return f, calls


@case("C9")
def function_with_setup_context() -> Any:
    class Split(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor, k: int = 2) -> Any:
            return x * k, x.sum()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.k = inputs[1]
            ctx.save_for_backward(inputs[0])

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad: torch.Tensor, other: torch.Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return grad * ctx.k + other * x.sign(), None

    def f(x: torch.Tensor) -> Any:
        y, total = Split.apply(x, 3)
        return y + total + Split.apply(x)[0]

    return f, [(torch.ones(3, requires_grad=True),)] * 2


@case("C5")
def parameter_of_a_class_of_its_own() -> Any:
    class Weight(torch.nn.Parameter):
        def twice(self) -> Any:
            return self * 2

        @property
        def half(self) -> Any:
            return self / 2

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Weight(torch.ones(3))
            self.weight.tag = 3

        def forward(self, x: torch.Tensor) -> Any:
            return x * self.weight.twice() + self.weight.half + self.weight.tag

    return Model(), [(torch.ones(3),)] * 2


class Image(torch.Tensor):
    gain = 3

    @property
    def area(self) -> int:
        return self.shape[-1] * self.shape[-2]

    def brighter(self, by: float) -> Any:
        return self * by + self.gain


class Logged(torch.Tensor):
    calls: list[str] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Logged.calls.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


@case("C9", recompiles=0)
def tensor_of_a_subclass() -> Any:
    def f(x: Any, y: torch.Tensor) -> Any:
        z = x.brighter(2) + y
        x.mul_(2)
        first, second = torch.cat([z.relu(), x]).chunk(2)
        kinds = type(second), isinstance(first, Image), isinstance(y, Image)
        return z, first.sum(-1), kinds, z.area, second.T, z.topk(2), (z > 0).any(), y * 2

    return f, [(torch.randn(3, 4).as_subclass(Image), torch.randn(3, 4, requires_grad=True)) for _ in range(2)]


@case("C9", recompiles=1)
def tensor_of_another_class() -> Any:
    return lambda x: x.sin() + 1, [(torch.randn(3).as_subclass(Image),), (torch.randn(3),), (torch.randn(3).as_subclass(Image),)]


@case("C9")
def tensor_that_becomes_one_of_a_subclass() -> Any:
    def f(x: torch.Tensor) -> Any:
        return x.sin().as_subclass(Image).brighter(2).cos()  # type: ignore[attr-defined]

    return f, [(torch.randn(3, requires_grad=True),)] * 2


@case("C9")
def plain_tensor_written_by_a_subclass() -> Any:
    def f(x: Any, y: torch.Tensor) -> Any:
        y = y * 2
        return y.add_(x), y + x

    return f, [(torch.randn(3).as_subclass(Image), torch.randn(3)) for _ in range(2)]


@case("C9")
def tensor_that_is_asked_for_its_plain_form() -> Any:
    def f(x: Any, y: torch.Tensor) -> Any:
        return y.sin() + torch.Tensor.as_subclass(x, torch.Tensor)

    return f, [(torch.randn(3).as_subclass(Logged), torch.randn(3))] * 2


@case("C9")
def tensor_that_says_what_functions_do() -> Any:
    Logged.calls.clear()

    def f(x: Any, y: torch.Tensor) -> Any:
        a = y.sin() + 1
        return (a * x).as_subclass(torch.Tensor), a.cos() * 2, x.shape

    return f, [(torch.randn(3).as_subclass(Logged), torch.randn(3)) for _ in range(2)], lambda: [*Logged.calls]


test_program = suite.test()


@pytest.mark.parametrize("backend", ["eager", "dovetail"])
def test_function_notices_a_global(backend: str) -> None:
    global SCALE
    compiled = dovetail.compile(lambda x: Scaled.apply(x) + 1, backend=backend, fullgraph=True)
    for SCALE in (2.0, 5.0):
        x = torch.ones(3, requires_grad=True)
        y = compiled(x)
        assert torch.equal(y, torch.full((3,), SCALE + 1))
        y.sum().backward()
        assert torch.equal(x.grad, torch.full((3,), SCALE))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["number of NumPy", "decimal"])
def test_immutable_numbers_are_guarded_by_value(kind: str) -> None:
    numpy, decimal = pytest.importorskip("numpy"), __import__("decimal")
    make = numpy.float64 if kind == "number of NumPy" else decimal.Decimal
    compiled = dovetail.compile(lambda x, k: x * float(k + make(1)), backend="eager")
    for value in (1.5, 2.5):
        assert torch.equal(compiled(torch.ones(2), make(value)), torch.full((2,), value + 1))


def test_arrays_are_not_read_without_a_guard() -> None:
    numpy = pytest.importorskip("numpy")
    peer = find_peer("dovetail")
    compiled = peer.compile(lambda x, a: x * float((a + 1).sum()), backend="eager")
    for value in (1.0, 2.0):
        assert torch.equal(compiled(torch.ones(2), numpy.full(2, value)), torch.full((2,), 2 * value + 2))


def test_cond_runs_the_chosen_arm_only() -> None:
    def f(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda t: t.sqrt(), lambda t: t * 3, (x + 0,)) * 2

    peer = find_peer("dovetail")
    peer.reset()
    compiled = peer.compile(f)
    for value, gradient in ((1.0, 1.0), (0.0, 6.0)):
        x = torch.full((3,), value, requires_grad=True)
        seen = peer.observe(lambda x=x: compiled(x))  # type: ignore[misc]
        assert torch.equal(seen.result, torch.full((3,), 2 * value))
        assert torch.equal(*torch.autograd.grad(seen.result.sum(), x), torch.full((3,), gradient))
    assert not seen.breaks and seen.graphs == 1, "the other arm, compiled when it is reached"


def test_numpy_on_constants_is_done_while_capturing() -> None:
    numpy = pytest.importorskip("numpy")

    def f(x: torch.Tensor) -> Any:
        steps = numpy.linspace(0, 1, 3, dtype=numpy.float32) * 2
        for step in steps:
            x = x + step * numpy.sqrt(x.shape[-1])
        scaled = x * torch.from_numpy(steps) + torch.tensor(numpy.float64(2))
        return scaled, steps, numpy.prod(x.shape), x * numpy.float32(0.5), numpy.int64(3) + x

    got = dovetail.compile(f, backend="eager", fullgraph=True)(torch.ones(2, 3))
    for ours, theirs in zip(got, f(torch.ones(2, 3)), strict=True):
        assert type(ours) is type(theirs) and ours.dtype == theirs.dtype
        torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(theirs))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("draw", ["random", "uniform"])
def test_a_method_in_c_that_its_object_hides_behind_an_attribute_is_still_that_method(draw: str) -> None:
    def make() -> Any:
        source = random.Random(3)
        given = source.random
        source.random = lambda: given() / 2  # type: ignore[method-assign]
        arguments = (1, 3) if draw == "uniform" else ()
        return lambda x: x * getattr(source, draw)(*arguments) + source.random()

    x = torch.ones(2)
    ours, eager = dovetail.compile(make(), backend="eager"), make()
    for _ in range(3):
        assert torch.equal(ours(x), eager(x))


@pytest.mark.filterwarnings("error")
def test_an_op_of_indices_takes_none_among_them() -> None:
    def f(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._unsafe_masked_index(x * 2, at > 0, [None, at], 0.0)

    x, at = torch.arange(12.0).view(3, 4), torch.tensor([0, 1, 3])
    assert torch.equal(dovetail.compile(f)(x, at), f(x, at))


def test_methods_of_extension_modules_are_left_to_python() -> None:
    numpy = pytest.importorskip("numpy")

    def f(x: torch.Tensor) -> Any:
        order = numpy.random.RandomState(0).permutation(3)
        return (x + 1)[torch.from_numpy(order)]

    x = torch.arange(3.0)
    assert torch.equal(dovetail.compile(f, backend="eager")(x), f(x))


def test_ops_with_results_of_another_type() -> None:
    """The op of torch's that libraries of quantized numbers take while they are compiled."""
    from torch._higher_order_ops.out_dtype import out_dtype

    a, b = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((4, 8), (8, 3)))
    for given in ((a, b), (a.float(), b.float())):
        function = lambda x, y: out_dtype(torch.ops.aten.mm.default, torch.int32, x, y) + 1
        torch.testing.assert_close(dovetail.compile(function, fullgraph=True)(*given), function(*given))
