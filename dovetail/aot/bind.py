"""Make the compiled graphs callable as the program they came from.

    forward, backward executables + Partition -> Bound(*inputs) -> list of outputs

What eager would have done around the arithmetic is one generated function: updated inputs are written
back, views of inputs are made as real views, gradients pass through one autograd.Function:

    def call(x, weight, mean):
        mean_new, y, mm = run_forward(x, weight, mean)
        write_back((mean,), (mean_new,))
        y, = apply(((x, weight, mean), mean_new, y, mm), x, weight)
        return [y, aten_t_default(y)]

    def forward(ctx, everything, *own):                    def backward(ctx, tangent_1):
        (x, weight, mean), … = everything                      if is_grad_enabled(): return differentiate(…)
        ctx.save_for_backward(x, weight, mm)                   x, weight, mm = ctx.saved_tensors
        return y,                                              g0, g1 = backward_for(…)([x, weight, mm, …])
                                                               return None, g0, g1

Outputs that autograd does not tie get a Function each.
"""
from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any, Final, TypeAlias

import torch
from torch.autograd import Function

from dovetail._native import lies_as
from dovetail.aot import double
from dovetail.aot.chain import Chained, Watch, keeps_graph, spare_hooks, tell_hooks
from dovetail.aot.interpret import as_strided
from dovetail.aot.joint import Joint, prune
from dovetail.aot.partition import Partition, Saved, class_of, dependents, with_symbols
from dovetail.fake import to_torch_device, to_torch_dtype
from dovetail.ir.expr import Expr, symbols
from dovetail.ir.graph import Arg, Graph, Node, exprs_in, moved_over, nodes_in, swapped
from dovetail.ir.signature import Mutation, OutputIs, ValueRef, ViewStep
from dovetail.ir.types import Device, DType, ScalarType, TensorType, contiguous_stride
from dovetail.ops.decompose import SUPPORTED
from dovetail.util.library import find_op, restride
from dovetail.util.noun import Noun, replace
from dovetail.util.writer import Writer

Executable: TypeAlias = "Callable[..., Sequence[Any]]"
Build: TypeAlias = "Callable[[Graph], Executable | None]"

_numbers: Final = itertools.count()


class Bound(Noun, eq=False):
    """`call(*inputs)` runs the program; `text` is its source."""

    call: Callable[..., list[Any]]
    text: str
    is_pure: bool = False
    """No input changes and nothing is differentiated: running it twice shows nowhere."""

    def __call__(self, *inputs: Any) -> list[Any]:
        return self.call(*inputs)


def bind(forward: Executable, build: Build | None, partition: Partition, joint: Joint) -> Bound:
    """`build` makes an executable of backward, for each set of outputs that are used; None where it fails,
    and eager's gradient has to do."""
    emitter = _Emitter(partition, joint)
    emitter.scope["run_forward"] = getattr(forward, "direct", forward)
    is_tied = bool(partition.signature.tangents)
    groups = by_group(partition) if is_tied else []
    parts = [_Part(group, f"_{i}" if i else "", joint.has_grad) for i, group in enumerate(groups)]
    for part in parts:
        eager = emitter.scope[f"eager{part.suffix}"] = double.Eager(joint, part.partition, part.places)
        emitter.copied.update(dict.fromkeys(eager.mutated) if eager.is_overwritten else ())
    emitter.emit_call(parts)
    for part in parts:
        emitter.emit_function(part, build)
    text = emitter.w.text
    filename = f"<dovetail bind {next(_numbers)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    exec(compile(text, filename, "exec"), emitter.scope)
    weakref.finalize(emitter.scope["call"], linecache.cache.pop, filename, None)
    for part in parts:
        emitter.scope[f"apply{part.suffix}"] = _make_function(emitter.scope, part.suffix)
    is_pure = not is_tied and not partition.signature.mutations
    return Bound(emitter.scope["call"], text, is_pure)


def _make_function(scope: dict[str, Any], suffix: str) -> Callable[..., Any]:
    """The autograd.Function over the generated forward and backward. Its own `apply` first asks whether a
    functorch transform is active, which costs as much as the rest; the base class does the work."""
    parts = {name: staticmethod(scope[f"{name}{suffix}"]) for name in ("forward", "backward")}
    made = tell_hooks(type("CompiledFunction", (Function,), parts))
    made._backward_cls.apply = scope[f"backward{suffix}"]  # the base class's would only find and call it
    made._backward_cls.random = made._backward_cls.watch = None  # where forward notes none
    return super(Function, made).apply  # type: ignore[misc, no-any-return]


def shares_memory(written: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Some written tensor lies in the memory of another input. (Tensors made of arrays may overlap without
    having a storage in common.)"""
    places = [(x.untyped_storage(), i < len(written)) for i, x in enumerate((*written, *others))]
    spans = [(s.data_ptr(), s.data_ptr() + s.nbytes(), is_written) for s, is_written in places]
    end = end_written = 0
    for start, stop, is_written in sorted(spans):
        if start < (end if is_written else end_written):
            return True
        end = max(end, stop)
        end_written = max(end_written, stop) if is_written else end_written
    return False


def write_back(
    targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor], is_counted: bool = True
) -> None:
    """The targets get new values. An executable may have written in place: then their versions say so."""
    places = [i for i, (target, value) in enumerate(zip(targets, values)) if value is not target]
    if places:
        written = [targets[i] if is_counted else targets[i].data for i in places]
        torch._foreach_copy_(written, [values[i] for i in places])
    if is_counted and len(places) < len(targets):
        written = [t for t, value in zip(targets, values) if value is t and not t.is_inference()]
        torch._C._increment_version(written)  # type: ignore[arg-type]


class _Part(Noun, eq=False):
    """One autograd.Function; the names of what belongs to it end in `suffix`."""

    partition: Partition
    suffix: str
    has_grad: tuple[bool, ...]

    @property
    def places(self) -> list[int | None]:
        """The input that each argument is; the first is none of them, but all that there is."""
        tied = [i for i, has_grad in enumerate(self.has_grad) if has_grad]
        return [None, *reversed(self.partition.signature.grad_inputs or tied)]

    @property
    def tangents(self) -> tuple[Node, ...]:
        backward = self.partition.backward
        return () if backward is None else backward.inputs[len(self.partition.saved) :]

    @property
    def symbols(self) -> list[Expr]:
        """Those that backward takes as numbers, or that tangents are made or checked with."""
        found = {s.expr: None for s in self.partition.saved if s.expr is not None}
        for node in self.tangents:
            for expr in (*node.tensor.shape, *node.tensor.stride):
                found.update(dict.fromkeys(sorted(symbols(expr), key=lambda e: e.serial)))
        return list(found)


class _Emitter:
    """Writes call, forward and backward of one graph."""

    def __init__(self, partition: Partition, joint: Joint) -> None:
        self.partition, self.joint, self.signature = partition, joint, partition.signature
        self.w = Writer()
        graph = partition.forward
        self.input_nodes = graph.inputs[: self.signature.inputs]
        self.inputs = [f"inputs[{i}]" for i in range(len(self.input_nodes))]
        """As the text calls them: a name for each would take Python long to read where there are hundreds."""
        self.copied: dict[int, None] = {}
        """Inputs of which the gradient's gradient needs the old values, when they have new ones."""
        self.results = [f"v{i}" for i in range(len(graph.outputs))]
        self.views: dict[int, str] = {}
        self.written = {m.output: m.input for m in self.signature.mutations if not m.under_no_grad}
        self.above = {i: before[0] for i, before in self.signature.chains if i < 0}
        self.chains = [chain for chain in self.signature.chains if chain[0] >= 0]
        self.unseen = frozenset(output for output, _ in joint.updates)
        """Results that are written back in forward, where autograd does not see them."""
        is_random = any(class_of(node.op) == "random" for node in graph.nodes)
        self.noted = {"random": "eager.random_state()"} if is_random else {}
        """What backward gets to know of the call, and how it is found out."""
        self.noted |= {"watch": "Watch()"} if self.chains else {}
        self.scope: dict[str, Any] = {
            "torch": torch,
            "set_grad_enabled": torch._C._set_grad_enabled,
            "keeps_graph": keeps_graph,
            "run_eager": joint.in_eager(joint.program),
            "never_asked": double.NEVER_ASKED, "stranger": double.STRANGER,
            "will_execute": torch._C._will_engine_execute_node,  # type: ignore[attr-defined]
            "version_of": attrgetter("_version"),
            **{each.__name__: each for each in (torch.is_grad_enabled, restride, shares_memory, write_back)},
            **{each.__name__: each for each in (lies_as, double.lack_memory, double.differentiate)},
            **{each.__name__: each for each in (double.eager_results, double.eager_after, Watch)},
            "chained": super(Function, Chained).apply,  # type: ignore[misc]
            **{f"constant_{i}": value for i, value in enumerate(joint.constants)},
        }

    # -- pieces

    def given(self) -> str:
        return ", ".join(["*inputs", *(f"constant_{i}" for i in range(self.signature.constants))])

    def emit_run(self, target: str, executable: str, given: str) -> None:
        """One call of an executable, outside of autocast: its casts are in the graph."""
        switches = [f"torch.autocast({kind!r}, enabled=False)" for kind, _ in self.joint.autocast]
        if self.joint.is_inference:
            switches.append("torch._C._InferenceMode(True)")
        with self.w.block(f"with {', '.join(switches)}:") if switches else nullcontext():
            self.w(f"{target}{executable}({given})")

    @contextmanager
    def without_grad(self) -> Iterator[None]:
        """`with torch.no_grad()` costs microseconds, this does not."""
        with self.w.block("set_grad_enabled(False)\ntry:"):
            yield
        with self.w.block("finally:"):
            self.w("set_grad_enabled(True)")

    @contextmanager
    def raising_as_eager(self) -> Iterator[None]:
        """Where forward raises, eager does, with its own words, and after the program's writes to inputs."""
        with self.w.block("try:"):
            yield
        if self.joint.updates and not self.joint.is_atomic:
            written = _tuple(self.inputs[given] for _, given in self.joint.updates)
            self.w(f"except Exception: write_back({written}, {written}); raise")  # their versions say so
            return
        self.w("except Exception as raised: error = raised")
        with self.w.block("else: error = None\nif error is not None:"):  # it is not our error's context
            self.w(f"return eager_after(error, run_eager, {self.joint.is_atomic}, *inputs)")

    def emit_sizes(self, exprs: Iterable[Expr]) -> None:
        """Read the symbols of exprs from the inputs."""
        wanted = {s.name for expr in exprs for s in symbols(expr)}
        for name, node in zip(self.inputs, self.input_nodes) if wanted else ():
            kind = node.type
            if isinstance(kind, ScalarType):
                found = [(kind.expr, name)] if kind.expr is not None else []
            else:
                found = [(expr, f"{name}.size({dim})") for dim, expr in enumerate(node.tensor.shape)]
                found += [(expr, f"{name}.stride({dim})") for dim, expr in enumerate(node.tensor.stride)]
            for expr, text in found:
                if expr.op == "sym" and expr.name in wanted:
                    wanted.discard(expr.name)
                    self.w(f"{expr.name} = {text}")

    def emit_write_back(self, mutations: list[Mutation]) -> None:
        whole = [m for m in mutations if not m.steps and m.output >= 0 and m.under_no_grad]
        for rest in ("", ", False"):
            group = [m for m in whole if m.is_uncounted is bool(rest)]
            targets, values = [self.inputs[m.input] for m in group], [self.results[m.output] for m in group]
            if group:
                self.emit_write(group, f"write_back({_tuple(targets)}, {_tuple(values)}{rest})")
        for mutation in (m for m in mutations if m not in whole):
            target = f"{self.inputs[mutation.input]}{'.data' if mutation.is_uncounted else ''}"
            target = self.viewed(target, mutation.steps)
            given = [self.literal(arg) for arg in mutation.args or (ValueRef("output", mutation.output),)]
            self.emit_write([mutation], f"{self.operator(mutation.op)}({', '.join([target, *given])})")

    def emit_write(self, mutations: list[Mutation], text: str) -> None:
        """Unseen by autograd where it would look."""
        is_hidden = any(m.under_no_grad and self.joint.has_grad[m.input] for m in mutations)
        with self.without_grad() if is_hidden else nullcontext():
            self.w(text)

    def emit_checks(self) -> None:
        """Inputs that alias otherwise than while tracing: this call runs the captured program in eager."""
        conditions = [f"{self.inputs[i]} is not {self.inputs[j]}" for i, j in self.joint.same]
        written = sorted({m.input for m in self.signature.mutations})
        others = [i for i in self.joint.loose if i not in {*written, *(j for _, j in self.joint.same)}]
        if written and len(written) + len(others) > 1:
            groups = [_tuple(self.inputs[i] for i in group) for group in (written, others)]
            conditions.append(f"shares_memory({', '.join(groups)})")
        if conditions:
            with self.w.block(f"if {' or '.join(conditions)}:"):
                self.w("return eager_results(run_eager(*inputs))")

    def emit_return(self) -> None:
        shown: list[str] = []
        for value in (self.results[i] for i in self.joint.inference):
            self.w(f"with torch._C._InferenceMode(True): {value} = {value}.new_empty(0).set_({value})")
        for position in self.above.values():
            self.before(position)
        for i, out in enumerate(self.signature.outputs):
            shown.append(self.views.get(~i) or self.output(i, out))
            if out.under_no_grad:
                with self.without_grad():
                    self.w(f"hidden_{i} = {shown.pop()}")
                shown.append(f"hidden_{i}")
        self.w(f"return [{', '.join(shown)}]")

    def output(self, position: int, output: OutputIs) -> str:
        if output.kind == "const":
            self.scope[f"const_{position}"] = output.value
            return f"const_{position}"
        if output.kind == "size":
            return str(output.value)
        if output.kind in ("fresh", "through"):
            return self.results[output.index]
        base = self.results[output.index] if output.kind == "alias" else self.inputs[output.index]
        if (above := self.above.get(~position)) is None:
            return self.viewed(base, output.steps)
        return self.viewed(self.before(above), output.steps_from(self.signature.outputs[~above]), base)

    def viewed(self, text: str, steps: Iterable[ViewStep], root: str = "") -> str:
        """Strides among the steps count from the root, which is `text` if not named."""
        root = root or text
        for step in steps:
            name, given = self.operator(step.op), ", ".join([text, *map(self.literal, step.args)])
            if step.op == "aten.as_strided.default":
                self.scope[name], given = as_strided, f"{given}, {root}"
            text = f"{name}({given})"
        return text

    def operator(self, op: str) -> str:
        """The name that the text calls the op by."""
        name = op.replace(".", "_")
        self.scope[name] = find_op(op)
        return name

    def literal(self, arg: object) -> str:
        if isinstance(arg, ValueRef):
            return self.inputs[arg.index] if arg.source == "input" else self.results[arg.index]
        if isinstance(arg, tuple):
            return f"({', '.join(map(self.literal, arg))}{',' if len(arg) == 1 else ''})"
        if isinstance(arg, DType):
            return str(to_torch_dtype(arg))
        if isinstance(arg, Device):
            return f"torch.{to_torch_device(arg)!r}"
        if isinstance(arg, str) and arg.startswith("torch."):
            return arg
        return str(arg) if isinstance(arg, Expr) else repr(arg)

    def output_exprs(self) -> list[Expr]:
        outputs, mutations = self.signature.outputs, self.signature.mutations
        found = [o.value for o in outputs if isinstance(o.value, Expr)]
        steps = [s for o in outputs for s in o.steps] + [s for m in mutations for s in m.steps]
        return found + list(exprs_in((*(s.args for s in steps), *(m.args for m in mutations))))

    # -- the call

    def emit_call(self, parts: list[_Part]) -> None:
        """Forward runs once, and each Function takes its own of what it made."""
        with self.w.block("def call(*inputs):"):
            self.w(f"# inputs: {', '.join(node.name for node in self.input_nodes)}")
            self.emit_checks()
            self.emit_sizes(self.output_exprs())
            for name, made in self.noted.items() if parts else ():
                self.w(f"{name} = {made}")
            for i in self.copied:
                self.w(f"old_{i} = {self.inputs[i]}.clone()")
            if self.results or self.partition.forward.nodes:
                with self.raising_as_eager():
                    with self.without_grad() if any(self.joint.has_grad) else nullcontext():
                        target = f"{_targets(self.results)} = " if self.results else ""
                        self.emit_run(target, "run_forward", self.given())
                        self.emit_write_back([m for m in self.signature.mutations if m.output in self.unseen])
                        for out in self.signature.outputs:
                            if out.kind == "through":
                                base = self.literal(ValueRef("input", out.input))
                                self.w(f"{self.results[out.index]} = {self.viewed(base, out.steps)}")
            for part in parts:
                passed = [self.results[i] for i in part.partition.signature.tangents]
                given = [self.everything, *(self.inputs[i] for i in part.places if i is not None)]
                self.w(f"{_targets(passed)} = apply{part.suffix}({', '.join(given)})")
            self.emit_chains(parts, [m for m in self.signature.mutations if m.output not in self.unseen])
            self.emit_return()
        self.w("")

    def emit_chains(self, parts: list[_Part], mutations: list[Mutation]) -> None:
        """And the inputs that others are computed from, or that are themselves, get their new values."""
        self.emit_write_back([m for m in mutations if m.output not in dict(self.chains)])
        part_of = {i: part for part in parts for i in part.partition.signature.tangents}
        for i, before in self.chains:
            value, given = self.results[i], [self.before(p) for p in before]
            views = _tuple(self.before(p) for p in self.with_above(before) if p < 0 or p in self.written)
            self.scope[f"made_{i}"] = self.scope[f"eager{part_of[i].suffix}"], i, before
            self.w(f"{value} = chained({value}, never_asked, watch, made_{i}, {views}, {', '.join(given)})")
            self.emit_write_back([m for m in mutations if m.output == i])
        followed = {p for _, before in self.chains for p in self.with_above(before)}
        if followed:
            self.w(f"watch.follow({', '.join(f'({p}, {self.before(p)})' for p in sorted(followed))})")

    def with_above(self, positions: Iterable[int]) -> list[int]:
        """And those that these are views of."""
        found = list(positions)
        for p in (p for p in found if p < 0):
            view = self.signature.outputs[~p]
            roots = [i for i, input in self.written.items() if input == view.index]
            roots = [view.index] if view.kind == "alias" else roots
            found += [self.above[p]] if p in self.above else roots
        return found

    def before(self, position: int) -> str:
        """An output that another is computed from; a view is made here, once, and kept in `views`."""
        if position >= 0:
            return self.inputs[self.written[position]] if position in self.written else self.results[position]
        if position not in self.views:
            made = self.output(~position, self.signature.outputs[~position])
            self.views[position] = f"view_{~position}"
            self.w(f"{self.views[position]} = {made}")
        return self.views[position]

    @property
    def everything(self) -> str:
        return _tuple([*self.noted, "inputs", *(f"old_{i}" for i in self.copied), *self.results])

    # -- the functions

    def emit_function(self, part: _Part, build: Build | None) -> None:
        with self.w.block(f"def forward{part.suffix}(ctx, everything, *own):"):
            self.w(f"{self.everything} = everything")
            self.w("ctx.set_materialize_grads(False)")
            if part.partition.signature.grad_inputs:
                self.emit_forward(part)
            self.w(f"return {_tuple(self.results[i] for i in part.partition.signature.tangents)}")
        self.w("")
        if part.partition.signature.grad_inputs:
            backward = part.partition.backward
            assert backward is not None and build is not None
            self.scope[f"backward_for{part.suffix}"] = _Backwards(part.partition, build)
            self.emit_backward(part, backward)
        else:  # outputs that require a gradient, and no input that gets one: a norm that counts, say
            with self.w.block(f"def backward{part.suffix}(ctx, *tangents):"):
                self.w(f"return {_tuple(['None'] * len(part.places))}")

    def emit_forward(self, part: _Part) -> None:
        partition = part.partition
        for name in self.noted:
            self.w(f"ctx.{name} = {name}")
        if kept := [self.saved_name(part, s) for _, s in partition.kept(TensorType)] or self.freed(part):
            self.w(f"ctx.save_for_backward({', '.join(kept)})")
        if numbers := [self.saved_name(part, s) for _, s in partition.kept(ScalarType)]:
            self.w(f"ctx.numbers = {_tuple(numbers)}")
        if sizes := part.symbols:
            self.emit_sizes(sizes)
            self.w(f"ctx.sizes = {_tuple(e.name for e in sizes)}")
        inputs = [f"old_{i}" if i in self.copied else name for i, name in enumerate(self.inputs)]
        self.w(f"ctx.inputs = {_tuple(inputs) if self.copied else 'inputs'}")
        # which double backward compares
        given = zip(inputs, self.joint.counted)
        versions = _tuple(f"{x}._version" if is_counted else "None" for x, is_counted in given)
        is_plain = all(self.joint.counted) and not self.copied
        self.w(f"ctx.versions = {'tuple(map(version_of, inputs))' if is_plain else versions}")

    def freed(self, part: _Part) -> list[str]:
        """What is saved where backward needs nothing, and eager's keeps something: a second one must fail."""
        return ["never_asked"] * (not {*self.signature.keeping}.isdisjoint(part.partition.signature.tangents))

    def saved_name(self, part: _Part, saved: Saved) -> str:
        index, own = saved.index, part.partition.signature.tangents
        if saved.source == "output":  # less the history that it has for another Function
            is_foreign = index in self.signature.tangents and index not in own
            return f"{self.results[index]}{'.detach()' if is_foreign else ''}"
        if index >= len(self.inputs):
            return f"constant_{index - len(self.inputs)}"
        name, is_tensor = self.inputs[index], isinstance(self.input_nodes[index].type, TensorType)
        # autograd saves no tensor of inference mode, but eager may have saved what was made of it
        return f"{name}.new_empty(0).set_({name})" if is_tensor and not self.joint.counted[index] else name

    def emit_backward(self, part: _Part, backward: Graph) -> None:
        partition, suffix = part.partition, part.suffix
        tangents = {position: f"tangent_{position}" for position in partition.signature.tangents}
        by_eager = f"return differentiate(eager{suffix}, ctx, {_tuple(tangents.values())})"
        used = [tangents[position] for position in partition.tangents]
        with self.w.block(f"def backward{suffix}(ctx, {', '.join(tangents.values())}):"):
            if sizes := part.symbols:
                self.w(f"{_targets([e.name for e in sizes])} = ctx.sizes")
            self.emit_unusual(part, list(tangents.values()), used, by_eager)
            if kept := [f"saved_{i}" for i, _ in partition.kept(TensorType)] or self.freed(part):
                with self.w.block("try:"):
                    self.w(f"{_targets(kept)} = ctx.saved_tensors")
                with self.w.block("except RuntimeError:"):
                    self.w("if ctx.inputs is None or is_usual: raise")
                    self.w(f"{by_eager}  # that was written to which only the missing may need")
            if numbers := [f"saved_{i}" for i, _ in partition.kept(ScalarType)]:
                self.w(f"{_targets(numbers)} = ctx.numbers")
            is_single = len(partition.signature.grad_inputs) == 1  # which is wanted, or nobody would ask
            unwanted = f"() if will_execute(stranger) else eager{suffix}.unwanted(ctx)"
            self.w(f"unwanted = {'()' if is_single else unwanted}")
            self.w(f"consume = backward_for{suffix}.usual if is_usual and not unwanted else None")
            with self.w.block("if consume is None:"):
                missing = _tuple(f"{name} is None" for name in used)
                self.w(f"consume = backward_for{suffix}({missing}, unwanted, ctx.inputs)")
                self.w(f"if consume is None: {by_eager}")
            given = [f"saved_{i}" if s.expr is None else s.expr.name for i, s in enumerate(partition.saved)]
            self.emit_grads(part, backward, [*given, *used])

    def emit_unusual(self, part: _Part, tangents: list[str], used: list[str], by_eager: str) -> None:
        """What is to be done about tangents that are none, or are not as backward reads them."""
        strides = [self.literal(node.tensor.stride) for node in part.tangents]
        extents = [self.literal((*node.tensor.shape, *node.tensor.stride)) for node in part.tangents]
        kinds = [node.tensor.device.kind for node in part.tangents]
        self.scope |= {f"plain_{kind}": double.plain_on(kind) for kind in kinds}
        usual = [f"lies_as({name}, plain_{kind}, {at})" for name, kind, at in zip(used, kinds, extents)]
        not_now, given = ["is_grad_enabled()", *["ctx.watch.is_cut"] * bool(self.chains)], ", ".join(tangents)
        self.w(f"is_usual = {' and '.join([*usual, *map('not {}'.format, not_now)]) if used else False}")
        with self.w.block("if not is_usual:"):
            with self.w.block(f"if {' and '.join(f'{name} is None' for name in tangents)}:"):
                self.w(f"return {_tuple(['None'] * len(part.places))}")
            with self.w.block(f"if {' or '.join([*not_now, f'lack_memory({given})'])}:"):
                self.w(by_eager)
            for node, name, stride, lies in zip(part.tangents, used, strides, usual):  # or is laid out anew
                made = f"{name}.resolve_conj().resolve_neg().contiguous()"
                made = made if node.tensor.is_contiguous else f"restride({name}, {stride})"
                self.w(f"{name} = {name} if {name} is None or {lies} else {made}")
            self.w(f"is_usual = {' and '.join(f'{name} is not None' for name in tangents)}")

    def emit_grads(self, part: _Part, backward: Graph, given: list[str]) -> None:
        """Gradients that are inputs of backward pass through; each other is computed once. Whoever runs
        backward gets the only references to the saved tensors, unless the graph is retained."""
        passed = dict(zip(backward.inputs, given))
        targets: dict[Arg, str] = {}
        for i, output in enumerate(backward.outputs):
            targets.setdefault(output, passed.get(output, f"g{i}"))  # type: ignore[arg-type]
        self.w(f"given = [{', '.join(given)}]")
        self.w("if not is_usual: given = [value for value in given if value is not None]")
        kept = {passed[output] for output in targets if output in passed}
        if gone := [name for name in dict.fromkeys(given) if name.startswith("saved_") and name not in kept]:
            self.w(f"del {', '.join(gone)}")
        if self.freed(part):  # else eager's may run again
            self.w("if not keeps_graph(): ctx.inputs = ctx.random = ctx.maybe_clear_saved_tensors()")
        outputs = [f"g{i}" for i in range(len(backward.outputs))]
        self.emit_run(f"{_targets(outputs)} = ", "consume", "given")
        pairs = zip(part.partition.signature.grad_inputs, backward.outputs)
        at: dict[int | None, str] = {i: targets[output] for i, output in pairs}
        self.w(f"return {_tuple(at.get(i, 'None') for i in part.places)}")


def _consumer(executable: Executable) -> Callable[[list[Any]], Sequence[Any]]:
    """A call that takes its inputs out of a list; one that cannot free them early just runs."""
    direct = getattr(executable, "direct", executable)
    return getattr(direct, "consume", None) or (lambda given: executable(*given))


class _Backwards:
    """Backward without missing tangents and unwanted gradients, by which they are; built when needed."""

    def __init__(self, part: Partition, build: Build) -> None:
        self.part, self.build = part, build
        self.made: dict[object, tuple[Callable[[list[Any]], Sequence[Any]] | None, list[int]]] = {}
        self.usual: Callable[[list[Any]], Sequence[Any]] | None = None
        """The one for all tangents and all gradients."""

    def __call__(
        self, missing: tuple[bool, ...], unwanted: tuple[int, ...], inputs: Sequence[Any] | None
    ) -> Callable[[list[Any]], Sequence[Any]] | None:
        key = missing, unwanted
        if key not in self.made:
            if unwanted and len(self.made) >= double.MOST_COMPILED:
                return self(missing, (), inputs)
            graph, reached = used_backward(self.part, missing, unwanted)
            made = None if graph is None else self.build(graph)
            apart = [i for i in self.part.signature.grad_inputs if i not in reached]
            self.made[key] = None if made is None else _consumer(made), apart
            if not (any(missing) or unwanted or apart):
                self.usual = self.made[key][0]
        consume, apart = self.made[key]
        for i in apart if inputs else ():  # which are gone where backward comes again and needs none
            spare_hooks(inputs[i])  # type: ignore[index]
        return consume


def _targets(names: Sequence[str]) -> str:
    return ", ".join(names) + ("," if len(names) == 1 else "")


def _tuple(names: Iterable[str]) -> str:
    names = list(names)
    return f"({_targets(names)})"


# -- backward for outputs that nobody used ---------------------------------------------------------


def expected_backwards(whole: Partition) -> list[Graph]:
    """What backward is built of where all outputs are used and all gradients wanted."""
    parts = [part for part in by_group(whole) if part.backward and part.signature.grad_inputs]
    found = [used_backward(part, (False,) * len(part.tangents), ())[0] for part in parts]
    return [graph for graph in found if graph is not None]


def used_backward(
    part: Partition, missing: tuple[bool, ...], unwanted: Collection[int]
) -> tuple[Graph | None, set[int]]:
    """The graph that computes what is wanted of the tangents that are there, and the inputs that these reach.
    None where a Function of the program takes zeros for what is missing: eager's gradient is zeros, too."""
    backward, signature = part.backward, part.signature
    assert backward is not None
    tangents = backward.inputs[len(part.saved) :]
    away = {p for p, is_missing in zip(part.tangents, missing) if is_missing}
    ways = [way for p, way in zip(signature.tangents, signature.reached) if p not in away]
    reached = {i for way in ways or [frozenset(signature.grad_inputs)] for i in way}
    outputs = enumerate(zip(backward.outputs, signature.grad_inputs))
    wanted = {output for n, (output, i) in outputs if n not in unwanted and i in reached}
    gone = [node for node, is_missing in zip(tangents, missing) if is_missing]
    left = zip(backward.outputs, without(backward, tangents, gone).outputs)
    is_lost = any(after is None and before in wanted for before, after in left)
    return None if is_lost else narrowed(backward, tangents, gone, wanted), reached


def narrowed(
    backward: Graph, tangents: Collection[Node], missing: Collection[Node], wanted: set[Arg]
) -> Graph:
    """The same outputs, computed from the other tangents only. None stands for an output that is not wanted,
    has no tangent, is an input or comes twice: who asks for those has them."""
    graph = without(backward, tangents, missing)
    left = wanted - set(backward.inputs)
    outputs: list[Arg] = []
    for before, output in zip(backward.outputs, graph.outputs):
        outputs.append(output if before in left else None)
        left.discard(before)
    return prune(replace(graph, outputs=tuple(outputs)))


def without(backward: Graph, tangents: Collection[Node], missing: Collection[Node]) -> Graph:
    """The same outputs, computed from the other tangents only; None for those that nothing is left of.

        def backward(saved, tangent_0, tangent_1):         def backward(saved, tangent_0):
            a = mul(tangent_0, saved)                          a = mul(tangent_0, saved)
            b = div(tangent_1, saved)                          return (a,)
            return (add(a, b),)

    An output without a gradient is not one with a gradient of zeros: where saved is 0, b would be NaN.
    Backward is linear in its tangents, so what is computed from missing ones alone is nothing; eager does not
    compute it either, and takes zeros for it where it meets something else. A gradient of nothing is None."""
    nodes: list[Node] = []
    tied, nothing = set(tangents), set(missing)
    """What depends on any tangent, and on missing ones alone."""
    new: dict[Node, Node] = {}
    for node in backward.nodes:
        given = [operand for operand in node.operands if operand in tied]
        rest = [operand for operand in node.operands if operand not in nothing]
        if node.op == "prims.add" and len(node.operands) == 2 and [x.type for x in rest] == [node.type]:
            new[node] = new.get(rest[0], rest[0])  # also a gradient that is zero whatever comes
            tied.update((node,) if rest[0] in tied else ())
            continue
        if given:
            tied.add(node)
        if given and nothing.issuperset(given):
            nothing.add(node)
            continue
        for operand in given:
            if operand in nothing and operand not in new:
                new[operand] = _zeros_like(operand)
                nodes.append(new[operand])
        moved = moved_over(node, new)
        if moved is not node:
            new[node] = moved
        nodes.append(moved)
    outputs = swapped([None if output in nothing else output for output in backward.outputs], new)
    inputs = tuple(node for node in backward.inputs if node not in missing)
    return replace(backward, inputs=inputs, nodes=tuple(nodes), outputs=outputs)


def by_group(whole: Partition) -> list[Partition]:
    """A backward for each group of outputs that autograd ties, with what it needs saved: there the others'
    tangents are always missing."""
    signature, backward = whole.signature, whole.backward
    if backward is None or len(signature.groups) < 2:
        return [whole]
    tangents = backward.inputs[len(whole.saved) :]
    found: list[Partition] = []
    tied = dependents(backward, tangents)
    reached_from = dict(zip(signature.tangents, signature.reached))
    for group in signature.groups:
        reached = frozenset[int]().union(*(reached_from[i] for i in group))
        missing = [node for node, i in zip(tangents, whole.tangents) if i not in group]
        pairs = zip(backward.outputs, signature.grad_inputs)  # a gradient of nothing but zeros is not tied
        outputs = tuple(output if output in tied or i in reached else None for output, i in pairs)
        graph = without(replace(backward, outputs=outputs), tangents, missing)
        kept = [n for n, output in enumerate(graph.outputs) if output is not None]
        graph = prune(replace(graph, outputs=tuple(graph.outputs[n] for n in kept)))
        used = {*nodes_in(graph.outputs), *(operand for node in graph.nodes for operand in node.operands)}
        own = [entry for entry in zip(backward.inputs, whole.saved) if entry[0] in used]
        left = [i for i in whole.tangents if i in group]
        inputs = (*(node for node, _ in own), *graph.inputs[len(graph.inputs) - len(left) :])
        grads = tuple(signature.grad_inputs[n] for n in kept)
        ways = tuple(reached_from[i] for i in group)
        part = replace(signature, tangents=group, grad_inputs=grads, reached=ways)
        saved = tuple(entry for _, entry in own)
        graph, saved = with_symbols(replace(graph, inputs=inputs), saved)
        found.append(replace(whole, backward=graph, signature=part, saved=saved, tangents=tuple(left)))
    return found


def _zeros_like(node: Node) -> Node:
    kind = node.tensor
    zeros = replace(kind, stride=contiguous_stride(kind.shape))
    name = f"{node.name}_missing"
    if kind.dtype not in SUPPORTED:
        where = (("dtype", kind.dtype), ("device", kind.device))
        return Node("aten.zeros.default", (kind.shape,), zeros, name, where, node.loc)
    return Node("prims.full", (kind.shape, 0, kind.dtype, kind.device), zeros, name, loc=node.loc)
