"""Users' Triton kernels on Fakes: a launch becomes one call of an op.

    add_kernel[grid](x, y, out, n, BLOCK=64)
        -> torch.ops.dovetail.add_kernel_5c1e(x, y, out, [n])
           add_kernel_5c1e(Tensor t0, Tensor t1, Tensor(w2!) t2, SymInt[] numbers) -> ()

The op is defined when a kernel is first seen with such arguments. Constants and the grid (for every
configuration of an autotuned kernel) are part of it; tensors and symbolic numbers are its arguments.
What a kernel writes to is read off its source (stores.py). A written view is passed as its base: a kernel
has the address, and may reach all of it.

Triton's `run` methods are replaced by one that looks for Fakes; other launches go on as they were.
"""
from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, Final

import torch

from dovetail.fake.stores import find_written
from dovetail.fake.tensor import Fake
from dovetail.util.library import define_op, restride
from dovetail.util.noun import Noun, field

KERNELS: Final = (
    ("triton.runtime.jit", "JITFunction"),
    ("triton.runtime.interpreter", "InterpretedFunction"),
    ("triton.runtime.autotuner", "Autotuner"),
    ("triton.runtime.autotuner", "Heuristics"),
    ("torch._higher_order_ops.triton_kernel_wrap", "TraceableTritonKernelWrapper"),
)
"""Classes with a `run` that launches a kernel; replaced once somebody has imported them."""

_originals: dict[type, Callable[..., Any]] = {}


def watch_kernels() -> None:
    """From here on, launches on Fakes arrive in run_kernel."""
    for module, name in KERNELS:
        cls = getattr(sys.modules.get(module), name, None)
        if cls is not None and cls not in _originals:
            _originals[cls] = cls.run
            cls.run = run_kernel


def run_kernel(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """kernel.run(*args, grid=..., warmup=..., **kwargs), whoever calls it."""
    given = [*args, *kwargs.values()]
    if any(type(value) is Fake for value in given):
        grid = kwargs.pop("grid", getattr(kernel, "grid", None))
        kwargs.pop("warmup", None)
        op, operands = describe_launch(kernel, args, kwargs, grid, lambda meta: grid(meta))
        return op(*operands)
    if any(isinstance(value, torch.Tensor) and value.is_meta for value in given):
        return None  # a custom op's fake: only sizes matter
    original = next(_originals[cls] for cls in type(kernel).__mro__ if cls in _originals)
    return original(kernel, *args, **kwargs)


# -- what a kernel is ----------------------------------------------------------------------------------


def unwrapped(kernel: Any) -> Any:
    """wrap_triton(kernel) is the kernel."""
    return kernel.kernel if type(kernel).__name__ == "TraceableTritonKernelWrapper" else kernel


def layers_of(kernel: Any) -> Iterator[Any]:
    """The kernel and what it decorates, down to the Python function."""
    while not isinstance(kernel, FunctionType):
        yield kernel
        kernel = kernel.fn
    yield kernel


def _configs(layers: Sequence[Any]) -> list[dict[str, Any]]:
    """The keyword arguments that each configuration of an autotuned kernel adds."""
    tuned = next((layer for layer in layers if type(layer).__name__ == "Autotuner"), None)
    return [{}] if tuned is None else [config.all_kwargs() for config in tuned.configs]


def _all_arguments(layers: Sequence[Any], given: dict[str, Any]) -> dict[str, Any]:
    """What a grid function sees: defaults, arguments, and what heuristics say."""
    parameters = inspect.signature(layers[-1]).parameters.values()
    found = {p.name: p.default for p in parameters if p.default is not p.empty} | given
    for layer in layers:
        if type(layer).__name__ == "Heuristics":
            for name, rule in layer.values.items():
                found[name] = rule(found)
    return found


def written_names(kernel: Any) -> frozenset[str]:
    """Parameters that a launch may write through: the kernel's stores, and what hooks may touch."""
    *decorators, function = layers_of(kernel)
    written = find_written(function)
    for layer in decorators:
        written |= {*getattr(layer, "reset_to_zero", ()), *getattr(layer, "restore_value", ())}
        hooked = getattr(layer, "user_defined_pre_hook", False) or getattr(layer, "user_defined_post_hook", 0)
        if hooked or any(config.pre_hook for config in getattr(layer, "configs", ())):
            written |= frozenset(inspect.signature(function).parameters)
    return frozenset(written)


# -- a launch as a call of an op -----------------------------------------------------------------------


class Hole(Noun):
    """Where a run-time value goes in the arguments. A tensor may be a window onto its operand."""

    kind: str
    index: int
    size: tuple[Any, ...] | None = None
    stride: tuple[Any, ...] | None = None
    offset: Any = 0


class _Operands(Noun, frozen=False):
    """The run-time values of a launch, each once."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    numbers: list[Any] = field(default_factory=list)
    floats: list[Any] = field(default_factory=list)
    layouts: list[tuple[Any, ...]] = field(default_factory=list)
    """The strides of each tensor, which the kernel may have been told of."""
    written: set[int] = field(default_factory=set)
    roots: dict[int, torch.Tensor] = field(default_factory=dict)
    """id of the base of a written tensor -> the base"""

    def hole(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (tuple, list)):
            return tuple(self.hole(item) for item in value)
        for kind, places in ((torch.SymInt, self.numbers), (torch.SymFloat, self.floats)):
            if isinstance(value, kind):
                places.append(value)
                return Hole("int" if kind is torch.SymInt else "float", len(places) - 1)
        return value

    def _tensor(self, value: torch.Tensor) -> Hole:
        root = self.roots.get(id(_root(value)))
        operand = value if root is None else root
        index = next((k for k, t in enumerate(self.tensors) if t is operand), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(operand)
            self.layouts.append(tuple(self.hole(step) for step in operand.stride()))
            if root is not None:
                self.written.add(index)
        if operand is value:
            return Hole("tensor", index)
        stride = tuple(self.hole(step) for step in value.stride())
        size = tuple(self.hole(n) for n in value.shape)
        offset = self.hole(value.storage_offset() - operand.storage_offset())
        return Hole("tensor", index, size, stride, offset)


def _root(tensor: torch.Tensor) -> torch.Tensor:
    base = tensor._base
    return tensor if base is None else base


def describe_launch(
    kernel: Any, args: Sequence[Any], kwargs: dict[str, Any], grid: Any,
    evaluate: Callable[[dict[str, Any]], Any],
) -> tuple[Any, list[Any]]:  # fmt: skip
    """The op that a launch is, and its operands. `evaluate` calls the grid where it is a function."""
    kernel = unwrapped(kernel)
    layers = list(layers_of(kernel))
    names = list(inspect.signature(layers[-1]).parameters)
    bound = dict(zip(names, args)) | kwargs
    configs = _configs(layers)
    grids = [evaluate(_all_arguments(layers, bound | c)) if callable(grid) else grid for c in configs]
    operands = _Operands()
    written = written_names(kernel)
    for name, value in bound.items():
        if name in written and isinstance(value, torch.Tensor):
            operands.roots[id(_root(value))] = _root(value)
    given = {name: operands.hole(value) for name, value in bound.items()}
    shown = [tuple(operands.hole(n) for n in (g if isinstance(g, (tuple, list)) else (g,))) for g in grids]
    chosen = [{k: v for k, v in config.items() if k in names} for config in configs]
    launch = Launch(kernel, given, operands.layouts, shown, chosen)
    op = _find_op(launch, operands, layers[-1].__name__)
    return op, [*operands.tensors, operands.numbers, *operands.floats]


class Launch(Noun, eq=False):
    """A launch with holes for what is known at run time."""

    kernel: Any
    given: dict[str, Any]
    layouts: list[tuple[Any, ...]]
    grids: list[tuple[Any, ...]]
    configs: list[dict[str, Any]]

    def is_same(self, other: Launch) -> bool:
        """Objects that print alike need not be the same; those are compared by identity."""
        pairs = zip(self.given.items(), other.given.items())
        same = all(a == b and (type(x) is type(y) and x == y) for (a, x), (b, y) in pairs)
        return self.kernel is other.kernel and same

    def __call__(
        self, given: Sequence[torch.Tensor], numbers: Sequence[int], floats: Sequence[float],
        written: Sequence[int],
    ) -> None:  # fmt: skip
        def fill(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(fill(item) for item in value)
            if not isinstance(value, Hole):
                return value
            if value.kind != "tensor":
                return (numbers if value.kind == "int" else floats)[value.index]
            tensor = tensors[value.index]
            if value.size is None:
                return tensor
            offset = tensor.storage_offset() + fill(value.offset)
            return tensor.as_strided(fill(value.size), fill(value.stride), offset)

        layouts = [fill(layout) for layout in self.layouts]
        tensors = [t if t.stride() == layout else restride(t, layout) for t, layout in zip(given, layouts)]
        grids = [fill(grid) for grid in self.grids]

        def choose(meta: dict[str, Any]) -> tuple[int, ...]:
            for config, grid in zip(self.configs, grids):
                if all(meta[name] == value for name, value in config.items()):
                    return grid
            return grids[0]

        named = {name: fill(value) for name, value in self.given.items()}
        self.kernel[choose if len(grids) > 1 else grids[0]](**named)
        for k in written:
            if tensors[k] is not given[k]:
                given[k].copy_(tensors[k])


# -- ops -----------------------------------------------------------------------------------------------

IN_PLACE: Final[dict[str, tuple[str, tuple[int, ...]]]] = {}
"""The functional form of a launch, which aot makes -> the op that writes, and what it writes to."""
_launches: dict[str, list[tuple[Launch, Any]]] = {}
"""text that describes a launch -> the launches that read so, and their ops"""


def _find_op(launch: Launch, operands: _Operands, name: str) -> Any:
    """The op of an equal launch from before, or a new one. Its name says what it takes, not who made it, so
    that programs kept on disk find it again."""
    takes = [f"Tensor(w{k}!) t{k}" if k in operands.written else f"Tensor t{k}"
             for k in range(len(operands.tensors))]  # fmt: skip
    takes += ["SymInt[] numbers", *(f"float f{k}" for k in range(len(operands.floats)))]
    text = f"{name} {', '.join(takes)} {launch.given} {launch.layouts} {launch.grids} {launch.configs}"
    known = _launches.setdefault(text, [])
    for other, op in known:
        if other.is_same(launch):
            return op
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    stem = f"{re.sub(r'[^A-Za-z0-9]', '_', name)}_{digest}" + (f"_{len(known)}" if known else "")
    tensors, written = len(operands.tensors), sorted(operands.written)

    def run(*given: Any) -> None:
        launch(given[:tensors], given[tensors], given[tensors + 1 :], written)

    op = define_op(f"{stem}({', '.join(takes)}) -> ()", run, lambda *given: None)
    known.append((launch, op))
    return op
