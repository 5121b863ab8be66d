"""torch.cond and while_loop: functions of which the values of tensors decide whether and how often they run.

    torch.cond(x.sum() > 0, f, g, (x,))     a break: run_cond(x.sum() > 0, f, g, (x,)); f and g are compiled
    with fullgraph=True                     one op: dovetail::cond_1f3a(x.sum() > 0, x)

For the op each function is interpreted into a graph of its own, as torch.func's transforms do it. The op runs
those that are chosen, in eager; its backward runs them again and differentiates.
"""
from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from dovetail.capture.builtins import on
from dovetail.capture.operations import truth
from dovetail.capture.regions import BY_NAME
from dovetail.capture.torch_calls import call_torch
from dovetail.capture.trace import Trace
from dovetail.capture.transforms import Inner, stand_in, trace_function
from dovetail.errors import ChosenArm, UnknownCall
from dovetail.fake.tensor import Fake

Run = Callable[..., Any]
"""Tensors to a list of tensors, each time by running graphs."""


def run_cond(pred: Any, true_fn: Run, false_fn: Run, operands: Any = ()) -> Any:
    """torch.cond as Python: its own way outside of a compiler is to start torch's."""
    return (true_fn if pred else false_fn)(*operands)


def run_while(cond_fn: Run, body_fn: Run, carried_inputs: Any) -> Any:
    while cond_fn(*carried_inputs):
        carried_inputs = body_fn(*carried_inputs)
    return carried_inputs


AS_PYTHON: Final[dict[str, Run]] = {"cond": run_cond, "while_loop": run_while}


@on(torch.cond)
def call_cond(trace: Trace, args: list[Any], kwargs: dict[str, Any]) -> Any:
    names = ("pred", "true_fn", "false_fn", "operands")
    given = {"operands": (), **dict(zip(names, args)), **kwargs}
    pred, operands = given["pred"], list(given["operands"])
    if not isinstance(pred, Fake):
        return trace.call(given["true_fn" if truth(trace, pred) else "false_fn"], operands, {})
    yes, no = (trace_arm(trace, given[name], operands, "cond") for name in ("true_fn", "false_fn"))
    looks = [[look(made) for made in arm.examples] for arm in (yes, no)]
    if looks[0] != looks[1] or yes.result != no.result:
        raise UnknownCall(trace.loc(), function="torch.cond with branches of different results")
    count = len(tree_flatten(operands)[0])
    split = 1 + count + len(yes.free)

    def run(pred: Any, *tensors: Any) -> Any:
        if pred:
            return yes.module(*tensors[: split - 1])
        return no.module(*tensors[:count], *tensors[split - 1 :])

    return call_op(trace, "cond", run, [pred, *tree_flatten(operands)[0], *yes.free, *no.free], yes)


def call_while(trace: Trace, args: list[Any], kwargs: dict[str, Any]) -> Any:
    names = ("cond_fn", "body_fn", "carried_inputs")
    given = {**dict(zip(names, args)), **kwargs}
    carried = list(given["carried_inputs"])
    asks, does = (trace_arm(trace, given[name], carried, "while_loop") for name in names[:2])
    leaves, tree = tree_flatten(tuple(carried))
    if [look(made) for made in does.examples] != [look(leaf) for leaf in leaves]:
        raise UnknownCall(trace.loc(), function="while_loop whose body changes the form of what it carries")
    count, split = len(leaves), len(leaves) + len(asks.free)

    def run(*tensors: Any) -> Any:
        now, to_ask, to_do = tensors[:count], tensors[count:split], tensors[split:]
        while asks.module(*now, *to_ask)[0]:
            now = does.module(*now, *to_do)
        return now

    return call_op(trace, "while_loop", run, [*leaves, *asks.free, *does.free], does)


BY_NAME[("torch._higher_order_ops.while_loop", "while_loop")] = call_while


def trace_arm(trace: Trace, function: Any, operands: Sequence[Any], name: str) -> Inner:
    """A function as a graph of tensors, if it only computes. Where a break is no error, it is compiled on its
    own instead."""
    if not trace.is_whole:
        raise ChosenArm(trace.loc(), name=name)
    leaves, tree = tree_flatten(tuple(operands))
    before = [(fake, fake._version) for fake in trace.owned.values()]
    examples = [stand_in(trace, leaf, None) for leaf in leaves]
    inner = trace_function(trace, function, list(tree_unflatten(examples, tree)), {})
    is_plain = all(isinstance(value, Fake) for value in (*leaves, *inner.free, *inner.examples))
    is_writing = any(fake._version != version for fake, version in before)
    if not is_plain or is_writing or inner.is_random:
        what = "a function of more than tensors, or one that changes them or draws random numbers"
        raise UnknownCall(trace.loc(), function=f"{name} of {what}")
    return inner


def look(fake: Any) -> Any:
    return fake.shape, fake.dtype, fake.device


def call_op(trace: Trace, name: str, run: Run, tensors: list[Any], like: Inner) -> Any:
    """Define the op that runs these graphs, and call it."""

    def real(*given: Any) -> Any:
        taken = {tensor.untyped_storage().data_ptr() for tensor in given}
        made = [part.contiguous() for part in run(*given)]
        made = [part.clone() if part.untyped_storage().data_ptr() in taken else part for part in made]
        return made[0] if len(made) == 1 else tuple(made)

    def fake(*given: Any) -> Any:
        made = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in like.examples]
        return made[0] if len(made) == 1 else tuple(made)

    def backward(context: Any, *grads: Any) -> Any:
        given = [tensor.detach() for tensor in context.saved_tensors]
        places = [i for i, needed in enumerate(context.needs_input_grad) if needed]
        with torch.enable_grad():  # type: ignore[no-untyped-call]
            made = run(*[tensor.requires_grad_(i in places) for i, tensor in enumerate(given)])
        pairs = [(out, grad) for out, grad in zip(made, grads) if out.requires_grad and grad is not None]
        results = [torch.zeros_like(x) if i in places else None for i, x in enumerate(given)]
        if pairs:
            outs, tangents = zip(*pairs)
            found = torch.autograd.grad(outs, [given[i] for i in places], tangents, allow_unused=True)
            for i, grad in zip(places, found):
                results[i] = results[i] if grad is None else grad
        return tuple(results)

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    takes = ", ".join(f"Tensor t{i}" for i in range(len(tensors)))
    gives = ", ".join("Tensor" for _ in like.examples)
    schema = f"({takes}) -> {gives if len(like.examples) == 1 else f'({gives})'}"
    unique = f"dovetail::{name}_{uuid.uuid4().hex}"
    op: Any = torch.library.custom_op(unique, real, mutates_args=(), schema=schema)
    op.register_fake(fake)
    op.register_autograd(backward, setup_context=save)
    made = call_torch(trace, op._opoverload, tensors, {})
    return tree_unflatten([made] if len(like.examples) == 1 else list(made), like.result)
