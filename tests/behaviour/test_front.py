"""SPEC F1, F2, F4, F5, C10: the front door as a newcomer uses it."""
from __future__ import annotations

import functools
import inspect
import threading
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

import dovetail


def double(x: torch.Tensor) -> torch.Tensor:
    """Twice x."""
    return x * 2


X = torch.ones(3)


def test_function_keeps_its_identity() -> None:
    c = dovetail.compile(double)
    assert c.__name__ == "double" and c.__doc__ == "Twice x." and inspect.signature(c) == inspect.signature(double)
    assert torch.equal(c(X), X * 2) and torch.equal(c(x=X), X * 2)


def test_decorator_with_and_without_arguments() -> None:
    @dovetail.compile
    def a(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @dovetail.compile(fullgraph=True, dynamic=False)
    def b(x: torch.Tensor) -> torch.Tensor:
        return x + 2

    assert torch.equal(a(X), X + 1) and torch.equal(b(X), X + 2)


def test_lambda_method_staticmethod_partial_callable() -> None:
    class Thing:
        k = 3.0

        @dovetail.compile
        def method(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.k

        def plain(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.k

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x - self.k

        @staticmethod
        @dovetail.compile
        def static(x: torch.Tensor) -> torch.Tensor:
            return x * 4

    t = Thing()
    assert torch.equal(t.method(X), X * 3)
    assert torch.equal(dovetail.compile(t.plain)(X), X * 3)
    assert torch.equal(dovetail.compile(t)(X), X - 3)
    assert torch.equal(Thing.static(X), X * 4)
    assert torch.equal(dovetail.compile(lambda x: x - 1)(X), X - 1)
    assert torch.equal(dovetail.compile(functools.partial(torch.add, X))(X), X * 2)


def test_compile_twice_and_nested() -> None:
    c = dovetail.compile(dovetail.compile(double))
    assert torch.equal(c(X), X * 2)

    @dovetail.compile
    def outer(x: torch.Tensor) -> torch.Tensor:
        return c(x) + 1

    assert torch.equal(outer(X), X * 2 + 1)


def test_disable_argument_returns_eager() -> None:
    before = dovetail.stats()["graphs"]
    assert torch.equal(dovetail.compile(double, disable=True)(X), X * 2)
    assert dovetail.stats()["graphs"] == before


@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_modes(mode: str | None) -> None:
    assert torch.equal(dovetail.compile(double, mode=mode)(X), X * 2)


@pytest.mark.parametrize(
    "bad", [{"mode": "fast"}, {"options": {"no_such_knob": 1}}, {"options": {"fuse": "yes"}}, {"backend": "nothing"}, {"options": 3}]
)
def test_bad_arguments_fail_at_once(bad: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        dovetail.compile(double, **bad)
    assert len(str(caught.value)) > 15


@pytest.mark.parametrize("bad", [3, "text", None and 0, [1]])
def test_uncompilable_things_fail_at_once(bad: Any) -> None:
    if bad is None:
        pytest.skip("None is the decorator form")
    with pytest.raises(TypeError):
        dovetail.compile(bad)


def test_unknown_argument_is_an_error() -> None:
    with pytest.raises(TypeError):
        dovetail.compile(double, fulgraph=True)  # type: ignore[call-arg]


def test_custom_backend_gets_graph_and_inputs() -> None:
    seen: list[Any] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        seen.append((graph, example_inputs))
        assert isinstance(graph, torch.fx.GraphModule) and graph.code
        return graph.forward

    f = dovetail.compile(lambda x, y: (x + y).relu() * 2, backend=backend)
    assert torch.equal(f(X, X + 1), torch.full((3,), 6.0))
    assert torch.equal(f(X, -X), torch.zeros(3))
    assert len(seen) == 1
    graph, inputs = seen[0]
    assert [tuple(t.shape) for t in inputs if isinstance(t, torch.Tensor)] == [(3,), (3,)]
    calls = [node for node in graph.graph.nodes if node.op.startswith("call")]
    assert len(calls) == 3 and all("test_front.py" in str(node.meta.get("stack_trace")) for node in calls)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "dovetail"])
def test_named_backends(backend: str) -> None:
    x = torch.randn(3, requires_grad=True)
    dovetail.compile(lambda t: t.sin().sum(), backend=backend)(x).backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_reset_forgets() -> None:
    f = dovetail.compile(double, backend="eager")
    f(X)
    before = dovetail.stats()["graphs"]
    dovetail.reset()
    assert torch.equal(f(X), X * 2)
    assert dovetail.stats()["graphs"] != before or dovetail.stats()["graphs"] >= 1


def test_stance_force_eager_and_fail_on_recompile() -> None:
    f = dovetail.compile(lambda x, k: x * len(k), backend="eager")
    with dovetail.set_stance("force_eager"):
        before = dovetail.stats()["graphs"]
        f(X, "ab")
        assert dovetail.stats()["graphs"] == before
    f(X, "ab")
    with dovetail.set_stance("fail_on_recompile"):
        f(X, "ab")
        with pytest.raises(dovetail.errors.RecompileError):
            f(X, "abc")


def test_what_an_allowed_function_makes_of_its_own_class_is_made_by_python() -> None:
    @dovetail.allow_in_graph
    def to_subclass(x: torch.Tensor) -> torch.Tensor:
        return TwoTensor(x.clone(), x + 1)

    made = dovetail.compile(lambda x: to_subclass(x * 2).view(-1))(torch.ones(2))
    assert type(made) is TwoTensor
    assert made.a.tolist() == [2.0, 2.0] and made.b.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_texts_and_values_become_floats(dynamic: bool | None) -> None:
    settings: dict[str, Any] = {"dynamic": dynamic, "options": {"fallback_to_eager": False}}
    program = dovetail.compile(lambda x, text: (x * float(text), float(x.sum())), **settings)
    for text in ("2.5", "3.5"):
        got, total = program(torch.ones(3), text)
        assert got.tolist() == [float(text)] * 3 and total == 3.0


def test_allow_in_graph_and_constant_result() -> None:
    @dovetail.allow_in_graph
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy()) if type(x) is torch.Tensor and x.numel() == 0 else x * 5

    calls: list[int] = []

    @dovetail.assume_constant_result
    def constant() -> int:
        calls.append(1)
        return 7

    f = dovetail.compile(lambda x: opaque(x) + constant(), fullgraph=True, backend="eager")
    assert torch.equal(f(X), X * 5 + 7) and torch.equal(f(X), X * 5 + 7)
    assert len(calls) == 1


def test_stats_and_explain() -> None:
    dovetail.reset()

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        print("hello")
        return y * 2

    explanation = dovetail.explain(f)(X)
    text = str(explanation)
    assert "test_front.py" in text and "print" in text
    for name in ("graphs", "graph_breaks", "recompiles", "kernels", "fallbacks", "compile_seconds"):
        assert name in dovetail.stats()


def test_threads_compile_and_call_at_once() -> None:
    @dovetail.compile
    def f(x: torch.Tensor, k: float) -> torch.Tensor:
        return (x * k).relu() + x.shape[0]

    wrong: list[Any] = []

    def work(n: int) -> None:
        for i in range(10):
            x = torch.full((n + 2,), float(i))
            if not torch.equal(f(x, float(n)), (x * float(n)).relu() + (n + 2)):
                wrong.append((n, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not wrong and not any(t.is_alive() for t in threads)


def test_exceptions_keep_the_users_traceback() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        raise LookupError("from the user")

    with pytest.raises(LookupError, match="from the user"):
        dovetail.compile(lambda x: inner(x + 1))(X)


def test_generators_and_coroutines_pass_through() -> None:
    def g(x: torch.Tensor) -> Any:
        yield x + 1
        yield x * 2

    a, b = dovetail.compile(g)(X)
    assert torch.equal(a, X + 1) and torch.equal(b, X * 2)


def test_recursive_function() -> None:
    @dovetail.compile
    def fact(x: torch.Tensor, n: int) -> torch.Tensor:
        return x if n <= 1 else fact(x, n - 1) * n

    assert torch.equal(fact(X, 4), X * 24)


def test_no_tensors_at_all() -> None:
    assert dovetail.compile(lambda a, b: a + b * 2)(1, 2) == 5
    assert dovetail.compile(lambda: "constant")() == "constant"


def test_zero_argument_and_many_argument_functions() -> None:
    assert torch.equal(dovetail.compile(lambda: torch.zeros(2) + 1)(), torch.ones(2))
    many = dovetail.compile(lambda *xs: sum(xs))
    assert torch.equal(many(*[X] * 40), X * 40)


def test_empty_and_zero_dimensional_tensors() -> None:
    f = dovetail.compile(lambda x: (x * 2 + 1).sum())
    assert f(torch.ones(0, 4)) == 0
    assert f(torch.tensor(3.0)) == 7


@pytest.mark.parametrize("fullgraph", [False, True])
def test_dispatch_modes_see_the_operations(fullgraph: bool) -> None:
    model = torch.nn.Linear(4, 3)
    compiled = dovetail.compile(model, fullgraph=fullgraph)
    x = torch.randn(2, 4)
    compiled(x)
    with FlopCounterMode(display=False) as counter:
        compiled(x)
    assert counter.get_total_flops() == 2 * 2 * 4 * 3


def test_jit_script_takes_the_original() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = dovetail.compile(torch.nn.Linear(4, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).relu()

    x, model = torch.randn(2, 4), dovetail.compile(Net())
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))


def test_jit_trace_records_the_operations() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    compiled = dovetail.compile(model)
    x, other = torch.randn(2, 4), torch.randn(2, 4)
    compiled(x)
    traced = torch.jit.trace(compiled, x)
    torch.testing.assert_close(traced(other), model(other))
    torch.testing.assert_close(compiled(other), model(other))
