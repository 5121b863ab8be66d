"""Gradients of every op of op_db and every module of module_db through trace, partition and bind, against eager.

python -m tests.aot.sweep [ops|modules] [substring]      the full run: minutes; the tests run a slice
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from dovetail.errors import Break
from tests.aot.running import compiled, flat
from tests.sweeps.torch_testing import module_db, op_db

SAMPLES = 4
NONDETERMINISTIC = (
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "empty_permuted",
)


def op_programs(op: Any, dtype: torch.dtype = torch.float64) -> Iterator[tuple[Any, list[torch.Tensor]]]:
    """(function of tensors, tensors) for the first samples of an op."""
    for i, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd)):
        if i >= SAMPLES:
            return
        leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def program(*tensors: torch.Tensor, leaves: Any = leaves, spec: Any = spec, at: Any = at) -> Any:
            filled = list(leaves)
            for i, tensor in zip(at, tensors):
                filled[i] = tensor
            first, args, kwargs = tree_unflatten(filled, spec)
            return tuple(tree_flatten(op.op(first, *args, **kwargs))[0])

        yield program, [leaves[i] for i in at]


def _loss(results: list[Any]) -> Any:
    heads = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    return (
        sum(((r * r.conj()).real if r.is_complex() else r * r.detach().cos()).sum() for r in heads)
        if heads
        else None
    )


def outcome(call: Any, tensors: list[torch.Tensor], second: bool) -> list[Any]:
    """Outputs, gradients, and gradients of gradients if asked."""
    torch.manual_seed(42)  # as op_db's own wrappers of random ops do, which trace away
    results = flat(call(*tensors))
    wanted = [t for t in tensors if t.requires_grad]
    loss = _loss(results)
    if loss is None or not wanted:
        return [results, [], []]
    grads = list(torch.autograd.grad(loss, wanted, allow_unused=True, create_graph=second))
    penalty = _loss([g for g in grads if g is not None]) if second else None
    more = list(torch.autograd.grad(penalty, wanted, allow_unused=True)) if penalty is not None else []
    return [results, grads, more]


def why_differs(program: Any, tensors: list[torch.Tensor], second: bool) -> str | None:
    """None if eager and we agree (or eager itself refuses)."""
    try:
        expected = outcome(program, tensors, second)
    except Exception:  # noqa: BLE001  not ours to judge
        return None
    try:
        got = outcome(compiled(program, tensors), tensors, second)
    except Break as refused:
        return f"refused: {refused.text}"
    except Exception as error:  # noqa: BLE001
        return f"error: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    for what, ours, theirs in zip(("output", "gradient", "second gradient"), got, expected):
        for i, (a, b) in enumerate(zip(ours, theirs)):
            if b is None or not isinstance(b, torch.Tensor):
                if a is not None and isinstance(a, torch.Tensor) and a.any():
                    return f"{what} {i}: eager has none"
                continue
            if a is None:
                if b.any():
                    return f"{what} {i} is missing"
                continue
            try:
                torch.testing.assert_close(a, b, equal_nan=True)
            except AssertionError as error:
                return f"{what} {i} differs: {str(error).splitlines()[0]}"
    return None


def check_op(op: Any) -> str | None:
    for program, tensors in op_programs(op):
        second = op.supports_gradgrad
        why = why_differs(program, tensors, second)
        if why is not None:
            return why
    return None


def check_module(entry: Any, training: bool) -> str | None:
    dtype = torch.float64 if torch.float64 in entry.dtypes else torch.float32
    for i, sample in enumerate(
        entry.module_inputs_func(entry, device="cpu", dtype=dtype, requires_grad=True, training=training)
    ):
        if i >= SAMPLES or sample.forward_input is None:
            return None
        torch.manual_seed(0)
        make = sample.constructor_input
        module = entry.module_cls(*make.args, **make.kwargs)
        module.to(dtype).train(training)
        if any(isinstance(p, torch.nn.parameter.UninitializedTensorMixin) for p in module.parameters()):
            return None
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        names = list(state)
        leaves, spec = tree_flatten((sample.forward_input.args, sample.forward_input.kwargs))
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def program(*tensors: torch.Tensor) -> Any:
            filled = list(leaves)
            for i, tensor in zip(at, tensors[len(names) :]):
                filled[i] = tensor
            args, kwargs = tree_unflatten(filled, spec)
            bound = dict(zip(names, tensors))
            return tuple(tree_flatten(torch.func.functional_call(module, bound, args, kwargs))[0])

        fresh = lambda: [  # noqa: E731  buffers are written, so each run has its own
            t.detach().clone().requires_grad_(t.requires_grad)
            for t in (*state.values(), *(leaves[i] for i in at))
        ]
        why = _why_module_differs(program, fresh)
        if why is not None:
            return why
    return None


def _why_module_differs(program: Any, fresh: Any) -> str | None:
    ours, theirs = fresh(), fresh()
    try:
        expected = outcome(program, theirs, False)
    except Exception:  # noqa: BLE001
        return None
    try:
        got = outcome(compiled(program, fresh()), ours, False)
    except Break as refused:
        return f"refused: {refused.text}"
    except Exception as error:  # noqa: BLE001
        return f"error: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    pairs = [*zip(got[0], expected[0]), *zip(got[1], expected[1]), *zip(ours, theirs)]
    for i, (a, b) in enumerate(pairs):
        if isinstance(b, torch.Tensor) and isinstance(a, torch.Tensor):
            try:
                torch.testing.assert_close(a, b, equal_nan=True)
            except AssertionError as error:
                return f"value {i} differs: {str(error).splitlines()[0]}"
    return None


def main() -> None:
    warnings.simplefilter("ignore")
    kind = sys.argv[1] if len(sys.argv) > 1 else "ops"
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    counts: Counter[str] = Counter()
    if kind == "ops":
        for op in op_db:
            if only in op.name and op.name not in NONDETERMINISTIC and torch.float64 in op.dtypes:
                why = check_op(op)
                counts["same" if why is None else why.split(":")[0]] += 1
                if why is not None:
                    print(
                        f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}: {why}",
                        flush=True,
                    )
    else:
        for entry in module_db:
            for training in (True, False):
                if only in entry.name:
                    why = check_module(entry, training)
                    counts["same" if why is None else why.split(":")[0]] += 1
                    if why is not None:
                        print(f"{entry.name} {'train' if training else 'eval'}: {why}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
