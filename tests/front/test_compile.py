"""The front door on functions: what compile() takes, returns and refuses."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import pickle
from typing import Any

import pytest
import torch

import dovetail
from dovetail import control, errors


def scale(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    """Scale x."""
    return torch.sin(x) * by


@dovetail.compile
def decorated(x: torch.Tensor) -> torch.Tensor:
    return x.relu() + 1


class Holder:
    def __init__(self, k: float) -> None:
        self.k = k

    @dovetail.compile
    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.k

    @dovetail.compile(dynamic=False)
    @staticmethod
    def static(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @classmethod
    def plain(cls, x: torch.Tensor) -> torch.Tensor:
        return x - 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x / self.k


X = torch.randn(5, 7)


@pytest.mark.parametrize(
    "fn",
    [
        scale,
        lambda x: x.exp().sum(-1),
        functools.partial(scale, by=3.0),
        Holder(2.0),
        Holder(3.0).__call__,
        Holder.plain,
        torch.tanh,
        torch.nn.functional.gelu,
        torch.Tensor.abs,
    ],
    ids=[
        "function",
        "lambda",
        "partial",
        "callable",
        "bound",
        "classmethod",
        "builtin",
        "c function",
        "slot",
    ],
)
def test_callables_of_every_kind(fn: Any) -> None:
    dovetail.reset()
    torch.testing.assert_close(dovetail.compile(fn)(X), fn(X))
    assert dovetail.stats()["graphs"] == 1, dovetail.report()


def test_keywords_and_defaults() -> None:
    compiled = dovetail.compile(scale)
    torch.testing.assert_close(compiled(x=X, by=0.5), scale(X, 0.5))
    torch.testing.assert_close(compiled(X), scale(X))


def test_compiled_function_looks_like_the_original() -> None:
    compiled = dovetail.compile(scale)
    assert compiled.__name__ == "scale" and compiled.__doc__ == "Scale x." and compiled.__wrapped__ is scale
    assert inspect.signature(compiled) == inspect.signature(scale)
    assert compiled.__code__ is scale.__code__
    assert "scale" in repr(compiled)


def test_methods() -> None:
    torch.testing.assert_close(Holder(4.0).method(X), X * 4)
    torch.testing.assert_close(Holder.method(Holder(4.0), X), X * 4)
    torch.testing.assert_close(Holder.static(X), X + 1)
    torch.testing.assert_close(Holder(1.0).static(X), X + 1)


def test_pickle_and_deepcopy() -> None:
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    again = pickle.loads(pickle.dumps(dovetail.compile(scale, fullgraph=True)))
    assert again._dovetail_original is scale and again._dovetail_settings["fullgraph"]
    torch.testing.assert_close(again(X), scale(X))
    torch.testing.assert_close(copy.deepcopy(again)(X), scale(X))
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(dovetail.compile(lambda x: x))


def test_compiling_twice_compiles_the_original() -> None:
    once = dovetail.compile(scale)
    assert dovetail.compile(once)._dovetail_original is scale
    torch.testing.assert_close(dovetail.compile(once)(X), scale(X))


def test_disable_argument_gives_the_model_back() -> None:
    assert dovetail.compile(scale, disable=True) is scale
    assert dovetail.compile(disable=True)(scale) is scale


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"model": 3}, errors.BadArgument, "function or an nn.Module"),
    ({"model": torch.nn.Linear}, errors.BadArgument, "not the class Linear"),
    ({"mode": "fast"}, errors.UnknownMode, "reduce-overhead"),
    ({"options": {"fusee": True}}, errors.UnknownOption, "did you mean fuse"),
    ({"options": {"fuse": 1}}, errors.BadOption, "takes a bool"),
    ({"options": ["fuse"]}, errors.BadOption, "dict"),
    ({"backend": "inductor"}, errors.UnknownBackend, "dovetail, eager, aot_eager"),
    ({"backend": None}, errors.UnknownBackend, "None"),
    ({"fullgraph": 1}, errors.BadArgument, "fullgraph"),
    ({"dynamic": "yes"}, errors.BadArgument, "dynamic"),
]


@pytest.mark.parametrize(
    ("arguments", "kind", "text"), BAD, ids=[next(iter(a)) + str(i) for i, (a, *_) in enumerate(BAD)]
)
def test_mistakes_show_at_once(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        dovetail.compile(**({"model": scale} | arguments))
    assert isinstance(caught.value, dovetail.DovetailError)
    if "model" not in arguments:
        with pytest.raises(kind):  # the decorator form does not wait for the function either
            dovetail.compile(**arguments)


def test_a_backend_is_a_function_of_the_graph() -> None:
    seen: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        seen.append(module)
        return module.forward

    torch.testing.assert_close(dovetail.compile(scale, backend=backend)(X), scale(X))
    assert len(seen) == 1 and any(node.op == "call_function" for node in seen[0].graph.nodes)


def test_what_a_backend_makes_of_a_graph_is_for_the_sizes_it_was_shown() -> None:
    """Unless it is the graph itself, which is for any."""
    made: list[Any] = []

    def tracing(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        made.append([x.shape[0] if isinstance(x, torch.Tensor) else x for x in inputs])
        results = module(*inputs)
        return lambda *_: results

    def counting(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        made.append(module)
        return module.forward

    class Counting:
        def __init__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> None:
            made.append(inputs)
            self.module = module

        def __call__(self, *args: Any) -> Any:
            return self.module(*args)

    def timing(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        made.append(inputs)
        inner = functools.partial(lambda run, *args: run(*args), torch.fx.Interpreter(module).run)
        return lambda *args: inner(*args)

    def program(x: torch.Tensor, k: float) -> Any:
        return x.sum() * k, [part.shape[0] for part in x.chunk(4)]

    calls = [(torch.ones(n), k) for n, k in ((16, 1), (12, 1), (11, 1), (11, 0.5), (11, 2.5), (12, 1))]
    backends = ((tracing, 8), (counting, 4), (Counting, 4), (timing, 4))
    for (backend, most), dynamic in itertools.product(backends, (None, True)):  # type: Any, Any
        made.clear()
        compiled = dovetail.compile(program, backend=backend, dynamic=dynamic)
        for args in calls:
            torch.testing.assert_close(compiled(*args), program(*args))
        assert len(made) <= most


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "dovetail"])
def test_named_backends(backend: str) -> None:
    torch.testing.assert_close(dovetail.compile(scale, backend=backend)(X), scale(X))


# -- markers and stance ----------------------------------------------------------------------------


def test_stance_is_a_function_a_block_and_a_decorator() -> None:
    calls: list[int] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        calls.append(1)
        return module.forward

    compiled = dovetail.compile(scale, backend=backend)
    with dovetail.set_stance("force_eager"):
        torch.testing.assert_close(compiled(X), scale(X))
    assert not calls and control.stance() == "default"
    dovetail.set_stance("force_eager")
    compiled(X)
    dovetail.set_stance("default")
    assert not calls

    @dovetail.set_stance("force_eager")
    def inside() -> str:
        compiled(X)
        return control.stance()

    assert inside() == "force_eager" and control.stance() == "default" and not calls
    compiled(X)
    assert calls
    with pytest.raises(errors.UnknownStance, match="force_eager"):
        dovetail.set_stance("lazy")


def test_fail_on_recompile() -> None:
    compiled = dovetail.compile(scale, dynamic=False)
    compiled(X)
    with dovetail.set_stance("fail_on_recompile"):
        compiled(X)
        with pytest.raises(errors.RecompileError):
            compiled(X[:2])
    dovetail.reset()
    compiled(X)
    with dovetail.set_stance("eager_on_recompile"):
        torch.testing.assert_close(compiled(X[:2]), scale(X[:2]))
    assert dovetail.stats()["graphs"] == 1
    compiled(X[:2])
    assert dovetail.stats()["graphs"] == 2


def test_disable_runs_plain_python() -> None:
    seen: list[bool] = []

    @dovetail.disable
    def plain(x: torch.Tensor) -> torch.Tensor:
        seen.append(dovetail.is_compiling())
        return x + 1

    def f(x: torch.Tensor) -> torch.Tensor:
        return plain(x * 2) * 3

    torch.testing.assert_close(dovetail.compile(f)(X), (X * 2 + 1) * 3)
    assert seen == [False]
    with dovetail.disable():
        torch.testing.assert_close(dovetail.compile(f)(X), (X * 2 + 1) * 3)
    with pytest.raises(errors.BadArgument):
        dovetail.disable(3)


def test_torchs_own_disable_is_a_wall() -> None:
    inner = torch.compiler.disable(lambda x: x + 1)
    dovetail.reset()
    torch.testing.assert_close(dovetail.compile(lambda x: inner(x * 2) * 3)(X), (X * 2 + 1) * 3)
    assert dovetail.stats()["graphs"] == 2 and dovetail.stats()["graph_breaks"] == 1


def test_graph_break_is_counted() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        dovetail.graph_break()
        return y.cos()

    dovetail.reset()
    torch.testing.assert_close(dovetail.compile(f)(X), X.sin().cos())
    assert dovetail.stats()["graph_breaks"] == 1
    dovetail.graph_break()  # outside compiled code it does nothing


def test_constant_result_is_asked_once() -> None:
    asked: list[int] = []

    @dovetail.assume_constant_result
    def factor() -> float:
        asked.append(1)
        return 3.0

    compiled = dovetail.compile(lambda x: x * factor())
    for _ in range(3):
        torch.testing.assert_close(compiled(X), X * 3)
    assert len(asked) == 1


def test_is_compiling() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if dovetail.is_compiling() else x - 1

    assert torch.equal(f(X), X - 1)
    torch.testing.assert_close(dovetail.compile(f)(X), X + 1)


def test_marks_on_tensors() -> None:
    x = torch.randn(3, 4)
    assert dovetail.mark_dynamic(x, -1) is x and x._dovetail_dynamic_dims == {1}  # type: ignore[attr-defined]
    dovetail.mark_static(x)
    assert x._dovetail_static_dims == {0, 1}  # type: ignore[attr-defined]
    with pytest.raises(errors.BadArgument, match="dimension 2"):
        dovetail.mark_dynamic(x, 2)
    with pytest.raises(errors.BadArgument):
        dovetail.mark_dynamic([1], 0)  # type: ignore[arg-type]


def test_reset_forgets() -> None:
    compiled = dovetail.compile(scale)
    compiled(X)
    assert dovetail.stats()["graphs"]
    dovetail.reset()
    assert dovetail.stats()["graphs"] == 0
    compiled(X)
    assert dovetail.stats()["graphs"] == 1


def test_a_file_of_the_package_does_not_hide_the_function() -> None:
    import dovetail.compile as found  # noqa: PLC0415
    import dovetail.explain.query  # noqa: F401, PLC0415

    assert inspect.isfunction(found) and inspect.isfunction(dovetail.compile)
    assert inspect.isfunction(dovetail.explain)
    assert "compile" in dir(dovetail)
    with pytest.raises(AttributeError):
        dovetail.nothing  # noqa: B018
