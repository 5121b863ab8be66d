"""Gradients of gradients: the gradient of the captured program is a program too, and is compiled.

    grad(f, x, create_graph=True)     backward runs with grad mode on. The program
                                          inputs, tangents -> autograd.grad(f(inputs), inputs, tangents)
                                      is traced and compiled like any other, and its result has a backward;
                                      that one, differentiated again, is compiled in turn

It is built when first asked for, once per geometry of inputs and tangents, up to a few, or with the symbols
that the program has; beyond them, or where it cannot be compiled, PyTorch runs and differentiates the
captured program. Both recompute forward, with the same random numbers; the compiled one only what backward
does not find saved.
"""
from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import cache, cached_property
from typing import Any, Final

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule

from dovetail.aot.interpret import bind_symbols
from dovetail.aot.joint import Joint
from dovetail.aot.partition import Partition
from dovetail.errors import InternalWarning
from dovetail.events import EVENTS
from dovetail.fake import fake_like
from dovetail.ir.expr import FALSE, Expr, evaluate, symbols
from dovetail.ir.graph import Known, Node, exprs_in, nodes_in
from dovetail.ir.types import TensorType
from dovetail.sym import Shapes, make_symint
from dovetail.util.noun import Noun

MOST_COMPILED: Final = 4
"""Geometries for which the gradient's program is compiled."""

MOST_WANTED: Final = 8
"""Inputs for whose gradients alone backward is cut."""

with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):  # wherever the first call is made
    NEVER_ASKED: Final = torch.zeros(0, requires_grad=True)
    """A leaf that every Chained has: autograd.grad, asked about others, leaves it out."""
    STRANGER: Final[Any] = NEVER_ASKED.view_as(NEVER_ASKED).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


@cache
def plain_on(kind: str) -> torch.Tensor:
    """A tensor on such a device that has nothing special about it."""
    with torch.inference_mode(False):
        return torch.zeros(0, device=kind)


_BATCH_NORMS: Final = (
    "aten._native_batch_norm_legit_functional.default", "aten._batch_norm_with_update_functional.default",
)  # fmt: skip
"""In training their running statistics are updated, and play no part in the rest."""


class _Asked(Noun):
    """Which gradients: of the inputs less the `unwanted`, or of the outputs `goals`, where what flows through
    one of them to another does not count. is_cut: their own tangents flow on from such outputs. `anchors`
    are those that are given to the program, after its inputs."""

    unwanted: tuple[int, ...] = ()
    goals: tuple[int, ...] = ()
    is_cut: bool = False
    anchors: tuple[int, ...] = ()


class Eager:
    """The program as captured, and how its results correspond to the forward graph's values."""

    def __init__(self, joint: Joint, partition: Partition, places: Sequence[int | None]) -> None:
        self.joint, self.partition, self.signature = joint, partition, partition.signature
        signature = partition.signature
        self.places = places
        """The input that each argument of the autograd.Function is; None for one that is no input."""
        self.mutated = frozenset(m.input for m in signature.mutations)
        self.compiled: dict[tuple[Any, ...], Callable[..., Any] | None] = {}
        """Gradient programs by geometry; None where compiling failed."""
        self.conditions: dict[tuple[Any, ...], list[Expr]] = {}
        """What those for symbolic sizes assume of them."""
        self.met: set[object] = set()
        """The same, asked for: what was never asked for before, as by a single retain_grad(), is eager's."""
        self.given = partition.forward.inputs[: signature.inputs]
        saved = [s.index if s.source == "output" else None for _, s in partition.kept(TensorType)]
        self.saved = [i if i is None else partition.forward.outputs[i] for i in saved]
        """For each tensor that autograd keeps, the node of forward that made it; None for inputs."""
        own = [before for i, before in signature.chains if i in signature.tangents]
        self.cuts = tuple(sorted({p for before in own for p in before}))
        """Outputs that others are computed from; see chain.py."""
        made, views = partition.forward.outputs, signature.outputs  # type: Any, Any
        self.anchored = {p: made[p] if p >= 0 else views[~p] for p in self.cuts if p in joint.anchors}
        self.programs: dict[tuple[int, ...], GraphModule] = {(): joint.program}
        self.has_cuda = any(c.is_cuda for c in joint.constants) or torch.cuda.is_available()

    def random_state(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return torch.get_rng_state(), torch.cuda.get_rng_state_all() if self.has_cuda else []

    def gradients(
        self, ctx: Any, tangents: Sequence[Any], goals: tuple[int, ...] = (), is_cut: bool = False
    ) -> Sequence[Any]:
        """Of the inputs that get one, in order, or of the outputs `goals`; differentiable where grad mode
        is on."""
        is_kept = torch.is_grad_enabled()
        anchors = ctx.watch.unchanged(self.anchored) if goals or is_cut else {}
        inputs: Sequence[Any] = (*ctx.inputs, *anchors.values())
        asked = _Asked(() if goals else self.unwanted(ctx), goals, is_cut, tuple(anchors))
        is_plain = is_kept and ctx.random is None and not self.joint.autocast
        with nullcontext() if is_plain else self.as_it_was(ctx.random):
            if (is_kept or is_cut or goals) and not lack_memory(*tangents):
                pairs = zip(ctx.saved_tensors, self.saved) if self.saved else ()
                kept = [tensor for tensor, node in pairs if node is not None]
                program, given = self.program_for(inputs, tangents, kept, asked)
                if program is not None:
                    grads = program(*given)
                    return grads if is_kept else [None if g is None else g.detach() for g in grads]
            # as views, since hooks and retain_grad() are for autograd's own pass
            inputs = [x.view_as(x) if getattr(x, "requires_grad", False) else x for x in inputs]
            own = [x.clone() if i in self.mutated else x for i, x in enumerate(inputs)]
            results = eager_results(self.joint.in_eager(self.program_at(asked.anchors))(*own))
            return self.differentiated(inputs, own, tangents, results, asked, is_kept)

    def as_it_was(self, random: tuple[torch.Tensor, list[torch.Tensor]] | None) -> ExitStack:
        """Grad mode, random numbers and autocast of the forward pass."""
        stack = ExitStack()
        stack.enter_context(torch.enable_grad())
        if random is not None:
            stack.enter_context(torch.random.fork_rng(range(len(random[1])), enabled=True))
            torch.set_rng_state(random[0])
            if random[1]:
                torch.cuda.set_rng_state_all(random[1])
        for device, dtype in self.joint.autocast:
            stack.enter_context(torch.autocast(device, dtype=dtype))
        return stack

    def unwanted(self, ctx: Any) -> tuple[int, ...]:
        """Which gradients nobody asked for: grad(u, x) does not want those of the parameters, and backward()
        wants all. To ask about a leaf that is wanted takes long: after some of them, all are taken to be, and
        the last one left is, without asking."""
        if executes(STRANGER):
            return ()
        edges = iter(ctx.next_functions)
        tensors = [i for i in self.places if i is not None and isinstance(self.given[i].type, TensorType)]
        at = {i: next(edges)[0] for i in tensors}
        found: list[int] = []
        for n, i in enumerate(self.signature.grad_inputs):
            if len(found) < len(self.signature.grad_inputs) - 1 and not executes(at[i]):
                found.append(n)
            elif n - len(found) >= MOST_WANTED:
                return ()
        return tuple(found)

    def differentiated(
        self, inputs: Sequence[Any], own: Sequence[Any], tangents: Sequence[Any], results: list[Any],
        asked: _Asked, is_kept: bool = True,
    ) -> list[Any]:  # fmt: skip
        """Gradients of the program's results. `own` are the inputs that it was given, and may have
        written to."""
        values, tangent_of = self.values(own, results), dict(zip(self.signature.tangents, tangents))
        heads = [(values[p], t) for p, t in tangent_of.items() if t is not None]
        unwanted, anchors = asked.unwanted, dict(zip(asked.anchors, inputs[self.signature.inputs :]))
        count = range(len(asked.goals or self.signature.grad_inputs))
        at = lambda p: anchors[p] if p in anchors else values[p] if p >= 0 else results[~p]  # noqa: E731
        wanted = [at(p) for p in asked.goals]
        wanted = wanted or [inputs[i] for n, i in enumerate(self.signature.grad_inputs) if n not in unwanted]
        run = torch.autograd.Variable._execution_engine.run_backward  # type: ignore[attr-defined]
        with ExitStack() as stack:
            for device, _ in self.joint.autocast:  # backward runs outside of the autocast region
                stack.enter_context(torch.autocast(device, enabled=False))
            for p in asked.goals or (self.cuts if asked.is_cut else ()):
                if p not in anchors:
                    stack.enter_context(_replaced_gradient(at(p), tangent_of.get(p)))
            ends, given = tuple(v for v, _ in heads), tuple(t for _, t in heads)
            grads = iter(run(ends, given, is_kept, is_kept, tuple(wanted), True, False))
        return [None if n in unwanted else next(grads) for n in count]

    def program_for(
        self, inputs: Sequence[Any], tangents: Sequence[Any], kept: list[Any], asked: _Asked
    ) -> tuple[Callable[..., Any] | None, tuple[Any, ...]]:
        """The compiled gradient, and what to call it with; None: let PyTorch do it."""
        graph, count = self.partition.forward, self.signature.inputs
        sizes = bind_symbols(graph, inputs[:count])
        tangents = [t if t is None else t.resolve_conj().resolve_neg() for t in tangents]
        if sizes:  # then they are row-major, which takes no symbols for their strides
            tangents = [t if t is None else t.contiguous() for t in tangents]
        given = (*inputs, *(t for t in tangents if t is not None), *kept)
        key = asked, *(_geometry(x, not sizes) for x in (*inputs, *tangents))
        is_symbolic = bool(sizes) and all(evaluate(each, sizes) for each in self.conditions.get(key, ()))
        if sizes and not is_symbolic:
            key = asked, *(_geometry(x, True) for x in (*inputs, *tangents))
        if key not in self.compiled:
            before = sum(other[0].goals == asked.goals for other in self.compiled)
            is_first = (asked.is_cut or bool(asked.goals)) and key not in self.met
            self.met.add(key)
            if self.joint.again is None or before >= MOST_COMPILED or is_first:
                return None, ()
            module = self.as_program(tangents, len(kept), asked)
            made = [node for node in self.saved if isinstance(node, Node)]
            at = {node: len(given) - len(made) + i for i, node in enumerate(made)}
            anchors = [self.anchored[p] for p in asked.anchors]
            at |= {node: i for i, node in enumerate(anchors, count) if isinstance(node, Node)}
            known = Known(graph, count, at)
            examples: Sequence[Any] = given
            if is_symbolic:
                heads = [graph.outputs[p] for p, t in zip(self.signature.tangents, tangents) if t is not None]
                types = [each.type for each in (*self.given, *anchors, *heads, *made) if each is not None]
                shapes = Shapes()
                examples = _symbolic(given, types, sizes, shapes)
            made_for = self.compiled[key] = self.joint.again(module, examples, (*self.joint.known, known))
            if is_symbolic:  # where that fails, numbers are tried the next time
                assumed = [each.condition for each in shapes.assumptions]
                self.conditions[key] = [FALSE] if made_for is None else assumed
        return self.compiled[key], given

    def as_program(self, tangents: Sequence[Any], kept: int, asked: _Asked) -> GraphModule:
        """inputs, tangents, saved values -> gradients, as a graph of the captured calls and one more."""
        module = self.program_at(asked.anchors)
        graph = FxGraph()
        given = [node for node in module.graph.nodes if node.op == "placeholder"]
        inputs = [graph.placeholder(node.name) for node in given]
        present = [t is not None for t in tangents]
        numbers = [i for i, here in enumerate(present, len(inputs)) if here]
        places = [graph.placeholder(f"dovetail_tangent_{len(inputs)}_{i}") for i in numbers]
        for i in range(kept):
            graph.placeholder(f"dovetail_saved_{len(inputs)}_{i}")
        copied = lambda x: graph.call_function(torch.clone, (x,))  # noqa: E731
        own = [copied(x) if i in self.mutated else x for i, x in enumerate(inputs)]
        results = graph.graph_copy(module.graph, dict(zip(given, own)))

        def gradient(inputs: Any, own: Any, results: Any, places: Any) -> list[Any]:
            left = iter(places)
            given = [next(left) if here else None for here in present]
            return self.differentiated(inputs, own, given, eager_results(results), asked)

        graph.output(graph.call_function(gradient, (inputs, own, results, places)))
        return GraphModule(module, graph)

    def program_at(self, anchors: tuple[int, ...]) -> GraphModule:
        """The program with these outputs as inputs, too, which it takes for what it makes, and returns."""
        if anchors not in self.programs:
            module, graph, made = self.joint.program, FxGraph(), dict[Any, Any]()
            graph.output(graph.graph_copy(module.graph, made))
            graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder"))
            for node in (made[self.joint.anchors[p]] for p in anchors):
                given = graph.placeholder(f"dovetail_anchor_{node.name}")
                node.replace_all_uses_with(given, lambda user: user.op != "output")
            self.programs[anchors] = GraphModule(module, graph)
            self.programs[anchors].meta.update(module.meta)
        return self.programs[anchors]

    @cached_property
    def needed(self) -> set[Node]:
        """What backward was given, and all that this was computed from."""
        graph = self.partition.forward
        ends, saved = {"output": graph.outputs, "input": graph.inputs}, self.partition.saved
        needed = set(nodes_in([ends[s.source][s.index] for s in saved if s.expr is None]))
        for node in reversed(graph.nodes):
            if node in needed:
                running = node.args[3:5] if node.op in _BATCH_NORMS and node.args[5] is not False else ()
                needed.update(operand for operand in node.operands if operand not in running)
        return needed

    @property
    def is_overwritten(self) -> bool:
        """That depends on the old value of an input that has a new one by now."""
        return any(self.given[i] in self.needed for i in self.mutated)

    def values(self, inputs: Sequence[Any], results: list[Any]) -> list[Any]:
        found: list[Any] = [None] * self.signature.values
        for mutation in self.signature.mutations:
            found[mutation.output] = inputs[mutation.input]
        for output, result in zip(self.signature.outputs, results):
            if output.kind in ("fresh", "through"):
                found[output.index] = result
            elif output.kind == "alias" and found[output.index] is None:
                found[output.index] = result._base if result._base is not None else result
        return found


def eager_results(results: Any) -> list[Any]:
    """What a captured program returned, as a flat list."""
    return list(results) if isinstance(results, (list, tuple)) else [results]


def eager_after(error: Exception, program: Callable[..., Any], is_atomic: bool, *inputs: Any) -> list[Any]:
    """What eager makes of a call whose compiled code raised: the same error as a rule, after the program's
    writes, or where that is_atomic before. Where it does not raise, the error is ours, and not silent."""
    if is_atomic:
        program(*(x.clone() if isinstance(x, torch.Tensor) else x for x in inputs))
    results = eager_results(program(*inputs))
    shown = f"{type(error).__name__}: {error}"
    EVENTS.emit("fallback_to_eager", function="a call", error=shown)
    text = f"Dovetail's code failed where eager's does not, which ran:\n{shown}"
    warnings.warn(text, InternalWarning, stacklevel=3)
    return results


def differentiate(eager: Eager, ctx: Any, tangents: Sequence[Any]) -> tuple[Any, ...]:
    """The gradients of the inputs, themselves differentiable."""
    if ctx.inputs is None:
        _ = ctx.saved_tensors  # raises as eager does when the graph was freed
    for i, (value, version) in enumerate(zip(ctx.inputs, ctx.versions)):
        is_other = version is not None and value._version != version and i not in eager.mutated
        if is_other and eager.given[i] in eager.needed:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: input {i} of a compiled region, whose backward is being differentiated"
            )
    grads = eager.gradients(ctx, tangents, is_cut=bool(eager.cuts) and ctx.watch.is_cut)
    at: dict[int | None, Any] = dict(zip(eager.signature.grad_inputs, grads))
    return tuple(at.get(i) for i in eager.places)


def executes(node: Any) -> bool:
    """The backward pass that is running wants what it would give this node."""
    try:
        return torch._C._will_engine_execute_node(node)  # type: ignore[attr-defined, no-any-return]
    except RuntimeError:  # a leaf that torch.autograd.grad was asked about
        return True


def _replaced_gradient(tensor: torch.Tensor, gradient: Any) -> Any:
    """While entered, this is what flows on from tensor in a backward pass; None: nothing does."""
    at, node = tensor.output_nr, tensor.grad_fn
    assert node is not None
    return node.register_prehook(lambda given: (*given[:at], gradient, *given[at + 1 :]))


def lack_memory(*tangents: torch.Tensor | None) -> bool:
    """One of them is sparse, or batched (grad(..., is_grads_batched=True), vmap): kernels cannot read it."""
    try:
        _ = [tangent.data_ptr() for tangent in tangents if tangent is not None]
    except RuntimeError:
        return True
    return False


def _symbolic(given: Sequence[Any], types: list[Any], sizes: dict[str, int], shapes: Shapes) -> list[Any]:
    """Examples with the symbols that the types name; what has no symbols is its own example."""
    for symbol in {symbol for expr in exprs_in(tuple(types)) for symbol in symbols(expr)}:
        shapes.adopt(symbol, sizes[symbol.name])
    return [
        fake_like(value, shapes=shapes, extent=(*kind.shape, *kind.stride).__getitem__)
        if isinstance(kind, TensorType) else value if kind.expr is None else make_symint(shapes, kind.expr)
        for value, kind in zip(given, types)
    ]  # fmt: skip


def _geometry(value: Any, is_exact: bool) -> object:
    """What a compiled program is compiled for; not exact where sizes are symbols."""
    if not isinstance(value, torch.Tensor):
        return value if is_exact or not isinstance(value, int) else type(value)
    sizes = (value.shape, value.stride()) if is_exact else (value.dim(),)
    return *sizes, value.dtype, value.device, value.requires_grad
