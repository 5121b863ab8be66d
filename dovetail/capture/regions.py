"""Torch constructs that take functions: checkpointing, Triton kernels, branches and loops.

    checkpoint(block, x)           block(x), interpreted; what it records is marked for recomputation
    kernel[grid](x, n, BLOCK=64)   a Triton kernel of the user's: one node, the op that launches it
    flex_attention(q, k, v, mod)   all scores, changed by mod under vmap; their softmax; times v
    torch.cond(x.sum() > 0, f, g, (x,))     a break: run_cond(x.sum() > 0, f, g, (x,)); f and g are compiled
    with fullgraph=True                     one op: dovetail::cond_1f3a(x.sum() > 0, x)

For the op each function is interpreted into a graph of its own, as torch.func's transforms do it. The op runs
those that are chosen, in eager; its backward runs them again and differentiates.
"""
from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map, tree_unflatten

from dovetail.capture.builtins import Args, Kwargs, Special, on
from dovetail.capture.operations import truth
from dovetail.capture.text import version_of
from dovetail.capture.torch_calls import call_torch
from dovetail.capture.trace import PLAIN, Trace
from dovetail.capture.transforms import Inner, stand_in, trace_function
from dovetail.errors import ChosenArm, UnknownCall
from dovetail.fake.kernels import describe_launch, run_kernel, unwrapped
from dovetail.fake.tensor import Fake
from dovetail.ir.guard import Is
from dovetail.ops.flex import flex_attention
from dovetail.util.noun import replace


@on(run_kernel)
def _run_kernel(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    """kernel.run(*args, grid=grid, warmup=False, **kwargs), which kernel[grid](...) ends in."""
    kernel, *rest = args
    rest_named = {key: value for key, value in kwargs.items() if key not in ("grid", "warmup")}
    grid = kwargs.get("grid", getattr(kernel, "grid", None))
    for value in (unwrapped(kernel), *rest, *rest_named.values()):
        source = None if type(value) in PLAIN or isinstance(value, Fake) else trace.source_of(value)
        if source is not None:
            trace.guard(source, Is(value))
    evaluate = lambda meta: trace.call(grid, [meta], {})
    op, operands = describe_launch(kernel, rest, rest_named, grid, evaluate)
    return call_torch(trace, op, operands, {})


on(torch.library.wrap_triton)(lambda trace, args, kwargs: args[0])  # only torch's own tracing needs a wrapper


@on(TorchFunctionMode.__enter__, TorchFunctionMode.__exit__)
def _use_mode(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    """The mode of create_block_mask makes x[i] of a tensor i a gather, as capture does in any case."""
    if type(args[0]).__name__ != "TransformGetItemToIndex":
        raise UnknownCall(trace.loc(), function=f"{type(args[0]).__name__}, a mode for torch functions")
    return args[0] if len(args) == 1 else None


# Capture enters one mode of each kind around the program's own, of which only default devices are captured.
on(torch._C._len_torch_function_stack)(lambda *_: torch._C._len_torch_function_stack() - 1)
on(torch._C._is_torch_function_mode_enabled)(lambda *_: torch._C._len_torch_function_stack() > 1)
on(torch._C._len_torch_dispatch_stack)(lambda *_: 0)
on(is_in_torch_dispatch_mode)(lambda *_: False)

BY_NAME: Final[dict[tuple[str, str], Special]] = {
    ("torch._higher_order_ops.wrap", "Wrap.__call__"): (
        lambda trace, args, kwargs: trace.call(args[1], args[2:], kwargs)),
    ("torch._higher_order_ops.flex_attention", "FlexAttentionHOP.__call__"): (
        lambda trace, args, kwargs: trace.call(flex_attention, args[1:], kwargs)),
    **{("torch.fx.experimental.symbolic_shapes", name): lambda trace, args, kwargs: truth(trace, args[0])
       for name in ("expect_true", "guard_or_true", "guard_or_false", "statically_known_true")},
}  # fmt: skip
"""Functions of modules that must not be imported here; known by name when somebody else has."""

CHECKPOINT_OPTIONS: Final = (
    "use_reentrant", "context_fn", "determinism_check", "debug", "preserve_rng_state", "early_stop",
)  # fmt: skip


@on(torch.utils.checkpoint.checkpoint)
def _checkpoint(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    """Recomputing does not change results, save where it writes to buffers a second time. The partitioner
    is told of the wish; one that says which ops to save leaves it to the partitioner."""
    rest = {key: value for key, value in kwargs.items() if key not in CHECKPOINT_OPTIONS}
    start, before = len(trace.calls), writes_to_inputs(trace)
    result = trace.call(args[0], args[1:], rest)
    if torch.is_grad_enabled() and writes_to_inputs(trace) > before:
        raise UnknownCall(trace.loc(), function="torch.utils.checkpoint of what writes to buffers")
    for call in trace.calls[start:] if "context_fn" not in kwargs else ():
        call.loc = call.loc and replace(call.loc, region=start + 1)
    return result


def writes_to_inputs(trace: Trace) -> int:
    return sum(fake._version for fake in trace.input_fakes if not fake.is_inference())


# -- torch.cond and while_loop: the values of tensors decide whether and how often functions run ---


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
    given = {"operands": (), **dict(zip(("pred", "true_fn", "false_fn", "operands"), args)), **kwargs}
    pred, operands = given["pred"], list(given["operands"])
    if not isinstance(pred, Fake):
        return trace.call(given["true_fn" if truth(trace, pred) else "false_fn"], operands, {})
    yes, no = (trace_arm(trace, given[name], operands, "cond") for name in ("true_fn", "false_fn"))
    if looks(yes.examples) != looks(no.examples) or yes.result != no.result:
        raise UnknownCall(trace.loc(), function="torch.cond with branches of different results")
    run: Run = lambda arms, pred, *operands: run_cond(pred, arms[0], arms[1], operands)
    return call_op(trace, "cond", run, [yes, no], [pred, *tree_leaves(operands)])


def call_while(trace: Trace, args: list[Any], kwargs: dict[str, Any]) -> Any:
    names = ("cond_fn", "body_fn", "carried_inputs")
    given = {**dict(zip(names, args)), **kwargs}
    carried = list(given["carried_inputs"])
    asks, does = (trace_arm(trace, given[name], carried, "while_loop") for name in names[:2])
    if looks(does.examples) != looks(tree_leaves(carried)):
        raise UnknownCall(trace.loc(), function="while_loop whose body changes the form of what it carries")
    run: Run = lambda arms, *now: run_while(lambda *now: arms[0](*now)[0], arms[1], now)
    return call_op(trace, "while_loop", run, [asks, does], tree_leaves(carried))


BY_NAME[("torch._higher_order_ops.while_loop", "while_loop")] = call_while
BY_NAME[("torch._higher_order_ops.cond", "CondOp.__call__")] = (  # in which torch's own way ends
    lambda trace, args, kwargs: call_cond(trace, args[1:], kwargs))  # fmt: skip


def looks(fakes: Sequence[Any]) -> list[Any]:
    return [(fake.shape, fake.dtype, fake.device) for fake in fakes]


def trace_arm(trace: Trace, function: Any, operands: list[Any], name: str) -> Inner:
    """A function as a graph of tensors, if it only computes. Where a break is no error, it is compiled on its
    own instead."""
    if not trace.is_whole:
        raise ChosenArm(trace.loc(), name=name)
    before = [(fake, version_of(fake)) for fake in trace.owned.values()]
    inner = trace_function(trace, function, tree_map(lambda leaf: stand_in(trace, leaf, None), operands), {})
    is_plain = all(isinstance(x, Fake) for x in (*tree_leaves(operands), *inner.free, *inner.examples))
    is_writing = any(version_of(fake) != version for fake, version in before)
    if not is_plain or is_writing or inner.is_random:
        what = "a function of more than tensors, or one that changes them or draws random numbers"
        raise UnknownCall(trace.loc(), function=f"{name} of {what}")
    return inner


def one_or_all(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else tuple(parts)


def call_op(trace: Trace, name: str, run: Run, arms: list[Inner], operands: list[Any]) -> Any:
    """Define the op that runs these graphs as `run` says, and call it. Results look like the last one's."""
    like = arms[-1].examples
    counts = [len(operands), *(len(arm.free) for arm in arms)]

    def real(*given: Any) -> Any:
        rest = iter(given)
        own, *free = [list(itertools.islice(rest, count)) for count in counts]
        made = run([lambda *x, a=arm, f=more: a.module(*x, *f) for arm, more in zip(arms, free)], *own)
        return one_or_all([part.clone(memory_format=torch.contiguous_format) for part in made])

    def backward(context: Any, *grads: Any) -> Any:
        given = [tensor.detach() for tensor in context.saved_tensors]
        places = [i for i, needed in enumerate(context.needs_input_grad) if needed]
        with torch.enable_grad():  # type: ignore[no-untyped-call]
            made = real(*[tensor.requires_grad_(i in places) for i, tensor in enumerate(given)])
        outs = [made] if len(like) == 1 else made
        pairs = [(out, grad) for out, grad in zip(outs, grads) if out.requires_grad and grad is not None]
        found = {i: torch.zeros_like(given[i]) for i in places}
        if pairs:
            differentiated, tangents = zip(*pairs)
            inputs = [given[i] for i in places]
            grads = torch.autograd.grad(differentiated, inputs, tangents, materialize_grads=True)
            found = dict(zip(places, grads))
        return tuple(found.get(i) for i in range(len(given)))

    tensors = [*operands, *(fake for arm in arms for fake in arm.free)]
    takes = ", ".join(f"Tensor t{i}" for i in range(len(tensors)))
    gives = "Tensor" if len(like) == 1 else f"({', '.join('Tensor' for _ in like)})"
    unique = f"dovetail::{name}_{uuid.uuid4().hex}"
    op: Any = torch.library.custom_op(unique, real, mutates_args=(), schema=f"({takes}) -> {gives}")
    empty = lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device)
    op.register_fake(lambda *_: one_or_all([*map(empty, like)]))
    save = lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    op.register_autograd(backward, setup_context=save)
    made = call_torch(trace, op._opoverload, tensors, {})
    return tree_unflatten([made] if len(like) == 1 else list(made), arms[-1].result)
