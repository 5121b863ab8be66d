"""Record what runs below autograd, as functional nodes.

    with Recorder(builder) as recorder:        y = torch.softmax(x, -1)
                                               softmax = aten._softmax.default(x, -1, False)   # f32[8, 128]

A Recorder is a dispatch mode: each ATen call is inferred on Fakes and becomes a node of the graph.
Views are not recorded when made but when read; writes become the functional twin of the op (see
alias.py and functional.py). So the graph has no aliasing and no mutation.
"""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate, combinations
from typing import Any, Final, TypeAlias

import torch
from torch._library.custom_ops import OPDEFS
from torch._library.triton import set_wrap_triton_enabled, triton_ops_to_kernels
from torch._ops import HigherOrderOperator
from torch.utils._pytree import tree_leaves

from dovetail.aot.alias import Memory, Ref, Storage, overlaps
from dovetail.aot.functional import Opaque, definition_of, twin_of, watch
from dovetail.errors import UnsupportedMutation
from dovetail.fake import Fake, expr_of, fake_like, from_torch_device, from_torch_dtype, infer, type_of
from dovetail.fake.record import Record
from dovetail.fake.record import record as facts_of
from dovetail.fake.tensor import FakeMode, key_of
from dovetail.ir.expr import ZERO
from dovetail.ir.graph import Arg, GraphBuilder, Node
from dovetail.ir.signature import ViewStep
from dovetail.ir.types import I64, ScalarType, TensorType, Type
from dovetail.ops.build import is_dense
from dovetail.util.loc import Loc

Args: TypeAlias = "tuple[Any, ...]"
Kwargs: TypeAlias = "dict[str, Any]"

_aten: Final = torch.ops.aten
_NO_ARGS: Final[dict[str, Any]] = {}

_SAME: Final[frozenset[type]] = frozenset((int, float, bool, complex, str, type(None)))
_CONVERT: Final[dict[type, Callable[[Any], Arg]]] = {
    **dict.fromkeys(_SAME, lambda x: x),
    torch.dtype: from_torch_dtype,
    torch.device: from_torch_device,
    **dict.fromkeys((torch.layout, torch.memory_format), str),
    torch.SymInt: expr_of,
}
"""How an argument that is no tensor and no list is written in a graph."""


Route: TypeAlias = "Callable[[Recorder, Any, tuple[Any, ...], dict[str, Any]], Any]"


class Recorder(FakeMode):
    """`constants` are real tensors met on the way; they become inputs of the graph."""

    def __init__(self, builder: GraphBuilder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.builder, self.memory = builder, Memory(builder)
        self.constants: list[torch.Tensor] = []
        self.constant_nodes: list[Node] = []
        self.constant_fakes: dict[int, tuple[torch.Tensor, Fake]] = {}
        """by identity, with the tensor itself: another one made later may not take its place in memory"""
        self.name, self.loc = "value", None  # type: tuple[str, Loc | None]
        self.is_backward = False
        self.is_silent = False
        self.storages: list[Storage] = []
        self.watched: dict[Any, Callable[[], None]] = {}
        """custom ops whose backward is watched, and what ends that"""
        self.numbers: dict[str, Node] = {}
        """run-time floats by name"""
        self.sequence: list[int] = []
        self.places: list[tuple[str, Loc | None]] = []

    supports_higher_order_operators = True  # they arrive here, and are refused

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if any([kind is not Fake for kind in types]):  # a tensor around Fakes: its class does it to them
            return NotImplemented
        route = _routes.get(func)
        if route is None:
            if isinstance(func, HigherOrderOperator):
                raise UnsupportedMutation(self.loc, detail=f"{func} is not recorded")
            route = _routes[func] = _route(func, facts_of(func))
        if self.is_backward:
            self._locate()
            if torch.is_grad_enabled() and facts_of(func).is_random:
                raise UnsupportedMutation(self.loc, detail="forward run again in backward draws numbers")
        return route(self, func, args, kwargs or _NO_ARGS)

    def close(self) -> None:
        """Custom ops are as they were. Nothing leads from a Fake back to itself through what autograd saved,
        which Python's collector does not see."""
        for end in self.watched.values():
            end()
        for storage in self.storages:
            storage.owner = None

    # -- where in the program

    def enter(self, name: str, loc: Loc | None) -> None:
        """From here on, calls belong to the captured node `name`."""
        self.name, self.loc = name, loc
        self.sequence.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self.places.append((name, loc))

    def _locate(self) -> None:
        """In backward, a call belongs to the forward node whose gradient is being computed."""
        node = torch._C._current_autograd_node()
        if node is not None and self.sequence:
            at = bisect_right(self.sequence, node._sequence_nr()) - 1
            name, self.loc = self.places[max(at, 0)]
            self.name = f"{name}_grad"

    # -- tensors

    def own(self, fake: Fake, node: Node, input: int | None = None, part: int | None = None) -> None:
        """fake is new memory that holds node, or that part of it."""
        storage = Storage(fake, ZERO if input is None else expr_of(fake.storage_offset()), input)
        self.storages.append(storage)
        kind: Any = node.type
        fake.ref = Ref(storage, kind if part is None else kind[part], node, 0, part=part)

    def ref(self, tensor: torch.Tensor) -> Ref:
        return getattr(tensor, "ref", None) or self.ref(self.constant(tensor))

    def constant(self, tensor: torch.Tensor) -> Fake:
        """A tensor from outside the program: an input more, or a number."""
        if id(tensor) in self.constant_fakes:
            return self.constant_fakes[id(tensor)][1]
        if type(tensor) is Fake:
            if tensor.constant is None:
                raise UnsupportedMutation(self.loc, detail="a tensor made outside the recorded program")
            fake, real = tensor, tensor.constant
        elif tensor.requires_grad and torch.is_grad_enabled():
            detail = "a tensor with a gradient that is no input of the graph"
            raise UnsupportedMutation(self.loc, detail=detail)
        else:
            with torch._C._DisableTorchDispatch():
                real = tensor.detach()
            fake = fake_like(real)
        self.constants.append(real)
        self.constant_fakes[id(tensor)] = (tensor, fake)
        node = self.builder.input(f"constant_{len(self.constants) - 1}", type_of(fake))
        self.constant_nodes.append(node)
        self.own(fake, node)
        return fake

    def args(self, values: Iterable[Any]) -> tuple[Arg, ...]:
        """Each as `arg` says; of most that is said here, since there are many."""
        read = self.memory.read
        return tuple([
            read(x.ref) if type(x) is Fake and x.ref else x if type(x) in _SAME else self.arg(x)
            for x in values
        ])  # fmt: skip

    def arg(self, value: Any) -> Arg:
        convert = _CONVERT.get(type(value))
        if convert is not None:
            return convert(value)
        if isinstance(value, torch.Tensor):
            return self.memory.read(self.ref(value))
        if isinstance(value, (list, tuple)):
            return tuple(value) if NUMBERS.issuperset(map(type, value)) else self.args(value)
        if isinstance(value, torch.SymFloat):
            node = self.numbers.get(str(value.node.expr))
            return float(value) if node is None else node  # arithmetic on it is done once, and guarded
        detail = f"an argument of type {type(value).__name__} in a recorded call"
        raise UnsupportedMutation(self.loc, detail=detail)

    # -- calls

    def call(self, op: str, args: tuple[Arg, ...], type: Type, kwargs: Kwargs | None = None) -> Node:
        shown = [(name, self.arg(value)) for name, value in kwargs.items()] if kwargs else ()
        return self.builder.call(op, args, type, shown, self.name, self.loc)

    def results(self, node: Node, result: Any, part: int | None = None) -> None:
        """Give the tensors of an op's result, or of that part of it, their nodes."""
        if isinstance(result, torch.Tensor):
            if result.ref is None:  # type: ignore[attr-defined]
                self.own(result, node, part=part)  # type: ignore[arg-type]
        elif isinstance(result, (list, tuple)):
            node = node if part is None else self.builder.get(node, part)
            for i, each in enumerate(result):
                self.results(node, each, i)

    def view(self, fake: Fake, parent: Ref, step: ViewStep | None, *seen: Any) -> None:
        label = self.name if step is None else f"{self.name}_{step.op.split('.')[1]}"
        ref = Ref(parent.storage, fake_type(fake), None, -1, parent, step, label, self.loc, *seen)
        fake.ref = ref

    def stride(self, fake: Fake, root: Ref, *seen: Any) -> None:
        """A view as geometry within the storage, counted from its first element."""
        kind = type_of(fake)
        if kind.dtype != root.type.dtype:  # a root of complex numbers, say, counts its elements differently
            raise UnsupportedMutation(self.loc, detail="strides of a tensor seen as another element type")
        offset = expr_of(fake.storage_offset()) - root.storage.offset
        step = ViewStep("aten.as_strided.default", (kind.shape, kind.stride, offset))
        are_plain = kind.is_contiguous and root.type.is_contiguous and root.storage.input is None
        if are_plain and offset == ZERO and kind.numel == root.type.numel:
            step = ViewStep("aten.view.default", (kind.shape,))
        self.view(fake, root, step, *seen)

    def write(self, fake: Any, node: Node) -> None:
        """node is the new value of fake, cast to its element type if need be."""
        ref = self.ref(fake)
        if any(overlaps(part.type) for part in ref.above):  # where one place has several values: go around
            self.stride(fake, ref.root, ref.via or ref.parent, ref.taken or ref.step)
            ref = self.ref(fake)
        if node.tensor.dtype != ref.type.dtype:
            node = self.call("aten._to_copy.default", (node,), ref.type, {"dtype": fake.dtype})
        fake.constant = None
        self.memory.write(ref, node, self.loc)


_types: Final[dict[object, TensorType]] = {}


def fake_type(fake: Any) -> TensorType:
    """type_of, remembered by the key that fakes of the same metadata share, and by what symbols are known."""
    types, key = _types, key_of(fake)
    if fake.form is not None:
        types, key = fake.shapes.remembered, (key, len(fake.shapes.equalities))
    return types.get(key) or types.setdefault(key, type_of(fake))


def result_type(result: Any) -> Type:
    if isinstance(result, torch.Tensor):
        return fake_type(result)
    if isinstance(result, (list, tuple)):
        return tuple([result_type(part) for part in result])
    if isinstance(result, (int, torch.SymInt)):
        return ScalarType(I64, expr_of(result))
    return None


# -- how each kind of op is recorded -------------------------------------------------------------------


def record_call(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """An op that only computes."""
    if args and type(args[0]) in NUMBERS and isinstance(func._schema.arguments[0].type, torch.TensorType):
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs))):
            return record_lift(recorder, _aten.lift_fresh.default, (of_number(func, args, kwargs),), {})
    nodes = recorder.args(args)
    result = infer(func, args, kwargs)
    if result is None:  # a check, or what acts on the outside
        recorder.call(facts_of(func).name, nodes, (), kwargs)
    elif not isinstance(result, (int, float, bool, torch.SymInt)):
        recorder.results(recorder.call(facts_of(func).name, nodes, result_type(result), kwargs), result)
    return result


NUMBERS: Final = frozenset({int, float, bool, complex})


def of_number(func: Any, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """An op of a wrapped number, which the dispatcher hands over as a number: a constant."""
    with torch._C._DisableTorchDispatch():
        made: torch.Tensor = func(torch.tensor(args[0]), *args[1:], **kwargs)
        return made.resolve_conj().resolve_neg()


def record_custom(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A custom op with a backward of its own, which may turn out not to be traceable."""
    definition = definition_of(func)
    if definition is not None and func not in recorder.watched:
        recorder.watched[func] = watch(definition, lambda call: record_opaque(recorder, call))
    return record_call(recorder, func, args, kwargs)


def record_opaque(recorder: Recorder, call: Opaque) -> list[Any]:
    """The gradients that an untraceable backward gives."""
    empty, strided = _aten.empty.memory_format, _aten.empty_strided.default
    made = [infer(strided if stride else empty, (x.shape, stride) if stride else (x.shape,), _factory(x))
            for x, stride in zip(call.like, call.strides)]  # fmt: skip
    nodes = recorder.args(call.tensors)
    recorder.results(recorder.call(call.op, (nodes,), result_type(made)), made)
    return made


def record_composite(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """An op made of others: seen whole in inference mode, or one of those below."""
    is_implicit = facts_of(func).fate == "decompose"
    key = f"Composite{'Implicit' if is_implicit else 'Explicit'}Autograd"
    with recorder:
        return func._op_dk(getattr(torch._C.DispatchKey, key), *args, **kwargs)


def record_kernels(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """torch.library.triton_op: what it is made of, down to its kernels."""
    with recorder, set_wrap_triton_enabled(False):
        return OPDEFS[func._schema.name]._abstract_fn(*args, **kwargs)


SAME: Final = (_aten.detach.default, _aten.alias.default)
"""Views that are the same tensor again."""


def record_view(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    if not isinstance(args[0], torch.Tensor):
        return of_number(func, args, kwargs)
    result = infer(func, args, kwargs)
    given = recorder.args((*args[1:], *kwargs.values()))
    if isinstance(result, (list, tuple)):
        raise UnsupportedMutation(recorder.loc, detail=f"{func} returns several views")
    step = None if func in SAME else ViewStep(facts_of(func).name, given)
    recorder.view(result, recorder.ref(args[0]), step)
    return result


def record_as_strided(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    root = recorder.ref(args[0]).root
    if func is _aten.unfold.default and from_torch_dtype(args[0].dtype) != root.type.dtype:
        return record_view(recorder, func, args, kwargs)
    result = infer(func, args, kwargs)
    taken = ViewStep(facts_of(func).name, recorder.args(args[1:]))
    recorder.stride(result, root, recorder.ref(args[0]), taken if func in _TAKEN else None)
    if func is not _aten.as_strided.default or root.storage.input is None:
        return result
    shape, stride, offset = recorder.ref(result).steps[-1].args  # type: Any, Any, Any
    last = sum(((size - 1) * step for size, step in zip(shape, stride)), offset)
    is_outside = offset.hi < 0 or (last.lo >= root.type.numel.hi and all(size.lo > 0 for size in shape))
    if is_outside or not is_dense(root.type):  # its value is its own elements, not those around or between
        detail = "as_strided of an input beyond the input's own elements"
        raise UnsupportedMutation(recorder.loc, detail=detail)
    return result


_TAKEN: Final = (_aten.unfold.default, _aten._reshape_alias.default)


def record_pieces(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Each piece of a split is a slice, each of unbind what is at one place."""
    result, is_split = infer(func, args, kwargs), func is not _aten.unbind.int
    (dim,) = args[1 + is_split :] or (kwargs.get("dim", 0),)
    ends = [0, *accumulate(piece.shape[dim] for piece in result)] if is_split else range(len(result) + 1)
    for piece, start, end in zip(result, ends, ends[1:]):
        cut = (dim, recorder.arg(start), recorder.arg(end), 1) if is_split else (dim, start)
        op = "aten.slice.Tensor" if is_split else "aten.select.int"
        recorder.view(piece, recorder.ref(args[0]), ViewStep(op, cut))
    return result


def record_write(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """An op that writes: record its functional twin, then write the results back."""
    facts = facts_of(func)
    if facts.is_random and not kwargs and not recorder.ref(args[0]).type.is_contiguous:
        if not any(isinstance(arg, torch.Tensor) for arg in args[1:]):
            return record_draw(recorder, func, args)
    twin = twin_of(func)
    taken = {name: value for name, value in kwargs.items() if name not in twin.outs}
    args = (*args, *twin.defaults[len(args) :])
    computed = infer(twin.op, args, taken)
    outs = tree_leaves([kwargs[name] for name in twin.outs])
    if any(out.dtype != made.dtype for out, made in zip(outs, tree_leaves(computed))):
        raise UnsupportedMutation(recorder.loc, detail="out= of a tensor of another element type")
    nodes = recorder.args(args)
    node = recorder.call(facts_of(twin.op).name, nodes, result_type(computed), taken)
    targets = [kwargs[n] if n in kwargs else args[twin.positions[n]] for n in twin.written]
    are_several = isinstance(computed, tuple)  # a list of tensors counts as one
    fresh = len(computed) - len(targets) if are_several else 0
    pairs = zip(targets, computed[fresh:] if are_several else (computed,))
    are_kept = all(type(t) is Fake and t.constant is None and new.key is key_of(t) for t, new in pairs)
    is_self = not (fresh or facts.is_out) and facts.count == 1 and func.namespace == "aten"
    is_told = are_kept and (is_self or fresh == facts.count > 1)  # no form or known value changes
    result = infer(func, args, kwargs) if not is_told else targets[0] if is_self else computed[:fresh]
    is_made = twin.op.namespace == "dovetail"
    if is_made or facts.is_pointwise:
        is_alone = is_made and func.namespace != "dovetail"  # programs of a kernel run at once
        _check_shared(recorder, targets, (*args, *kwargs.values()), is_alone)
    for i, target in enumerate(targets, fresh):
        _write_all(recorder, target, recorder.builder.get(node, i) if are_several else node)
    if facts.name in REPLAYED and not kwargs:
        written = recorder.ref(args[0]).storage.log[-1]
        written.op, written.args = facts.name, nodes[1:]
    made = result if isinstance(result, (list, tuple)) else (result,)
    for i, fake in zip(range(fresh), [f for f in made if getattr(f, "ref", None) is None]):
        recorder.results(node, fake, i)
    return result


REPLAYED: Final = frozenset(("aten.index_copy_.default", "aten.index_put_.default", "aten.scatter_.src"))
"""Writes to few elements of a large tensor; on an input, doing them again beats copying all of it."""


def record_draw(recorder: Recorder, func: Any, args: Args) -> Any:
    """x.uniform_() and its kind on memory that is not row-major."""
    fake, ref = args[0], recorder.ref(args[0])
    numbers = recorder.args(a for a in args[1:] if a is not None)
    given = (recorder.memory.read(ref), facts_of(func).name.split(".")[1], ref.type.stride, numbers)
    infer(func, args, {})
    recorder.write(fake, recorder.call("dovetail.draw.default", given, ref.type))
    return fake


def _check_shared(recorder: Recorder, targets: list[Any], given: Args, is_alone: bool = False) -> None:
    """What x[1:].add_(x[:-1]) reads is written elsewhere: eager refuses it, or does it in some order. What
    two arguments of an op share that is alone with its memory would be two in its twin, which writes to
    copies."""
    at: dict[int, list[Any]] = {}
    for x in tree_leaves(given):
        if type(x) is Fake:
            at.setdefault(id(recorder.ref(x).storage), []).append(x)
    pairs = [pair for shown in at.values() for pair in combinations(shown, 2)]
    written = {id(target) for target in tree_leaves(targets)} if pairs else set()
    for x, y in pairs:
        if not written.isdisjoint((id(x), id(y))) and _meet(x, y, is_alone):
            raise UnsupportedMutation(recorder.loc, detail="a part of what is written is read as well")


def _meet(x: Fake, y: Fake, is_alone: bool) -> bool:
    """Some byte is of both: forms are sizes and strides in bytes, and where they start."""
    forms: Any = [((*t.meta.shape, t.itemsize), (*(step * t.itemsize for step in t.meta.stride()), 1),
                   t.meta.storage_offset() * t.itemsize) for t in (x, y)]  # fmt: skip
    ends = [start + sum((n - 1) * step for n, step in zip(*form)) for *form, start in forms]
    if forms[0] == forms[1] and not is_alone or max(start for *_, start in forms) > min(ends):
        return False
    with torch._C._DisableTorchDispatch():
        seen = torch.zeros(max(ends) + 1, dtype=torch.bool, device="cpu")
        seen.as_strided(*forms[0]).fill_(True)
        return bool(seen.as_strided(*forms[1]).any())


def _write_all(recorder: Recorder, target: Any, node: Node) -> None:
    if target is None:
        return
    if isinstance(target, (list, tuple)):
        for i, item in enumerate(target):
            recorder.write(item, recorder.builder.get(node, i))
    elif node.tensor.shape == (ref := recorder.ref(target)).type.shape:
        recorder.write(target, node)
    elif ref.storage.input is None and not ref.steps and ref.type.dtype == node.tensor.dtype:
        recorder.write(target, node)
        same: Ref | None = ref
        while same is not None:  # out= of another shape, an empty tensor mostly, is resized
            same.type, same = node.tensor, same.parent
    else:
        raise UnsupportedMutation(recorder.loc, detail="out= of a tensor that has another shape")


def record_copy(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """self.copy_(source): where nothing changes on the way, the source's value itself."""
    target, source = args[:2]
    if not isinstance(source, torch.Tensor):
        return record_write(recorder, _aten.fill_.Scalar, (target, source), {})
    ref, value = recorder.ref(target), recorder.memory.read(recorder.ref(source))
    if value.type != ref.type:
        value = recorder.call("aten.copy.default", (recorder.memory.read(ref), value), ref.type)
    _check_shared(recorder, [target], (target, source))
    infer(func, args, kwargs)
    recorder.write(target, value)
    return target


def record_reshaped(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """t_, squeeze_ and so on: from here on the tensor is a view of what it was."""
    fake, before = args[0], recorder.ref(args[0])
    infer(func, args, kwargs)
    packet, overload = str(func).split(".")[1:]
    if packet == "as_strided_":
        recorder.stride(fake, before.root)
        return fake
    name = f"aten.{packet[:-1]}.{'int' if packet == 'transpose_' else overload}"
    recorder.view(fake, before, ViewStep(name, recorder.args(args[1:])))
    return fake


def record_resize(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """resize_ of an empty tensor is new memory; to fewer elements, a view of the old."""
    fake, before = args[0], recorder.ref(args[0])
    if before.storage.input is not None:
        raise UnsupportedMutation(recorder.loc, detail="resize_ of an input of the graph")
    infer(func, args, kwargs)
    after = type_of(fake)
    if after == before.type:
        return fake
    if before.type.numel.hi == 0:
        node = recorder.call("aten.empty.memory_format", (after.shape,), after, _factory(fake))
        recorder.own(fake, node)
    elif (expr_of(fake.storage_offset()) + after.numel).hi <= before.root.type.numel.lo:
        recorder.stride(fake, before.root)
    else:
        raise UnsupportedMutation(recorder.loc, detail="resize_ to more elements")
    return fake


def record_set(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """self.set_(source): self becomes another name of source."""
    fake, source = args[:2]
    if recorder.ref(fake).storage.input is not None:
        raise UnsupportedMutation(recorder.loc, detail="set_ of an input of the graph")
    result = infer(func, args, kwargs)
    recorder.view(fake, recorder.ref(source), None)
    return result


def record_lift(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """torch.tensor(...) in the program: one number is a fill, more are a constant input."""
    (real,) = args
    if type(real) is Fake:
        return real
    result = infer(func, args, kwargs)
    kind = type_of(result)
    if real.numel() == 1 and real.device.type == "cpu":
        value = real.detach().reshape(()).item()
        node = recorder.call("aten.full.default", (kind.shape, value), kind, _factory(result))
        recorder.own(result, node)
    else:
        result.ref = recorder.ref(recorder.constant(real.clone()))
    return result


def record_clone(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Silent for an input that is no leaf: autograd must see another tensor, of the same strides, the graph
    need not."""
    if not recorder.is_silent:
        return record_call(recorder, func, args, kwargs)
    result = infer(_aten.detach.default, args, kwargs)
    result.ref = recorder.ref(args[0])
    return result


def record_batch_norm(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """In training it updates the running statistics, else it only reads them, whatever its schema says."""
    if not args[5] or args[3] is None:
        result = record_call(recorder, _aten.native_batch_norm.default, args, kwargs)
    else:
        result = record_write(recorder, _aten._native_batch_norm_legit.default, args, kwargs)
    if func is not _aten.cudnn_batch_norm.default:
        return result
    named = _factory(args[0]) | {"dtype": torch.uint8}  # which our backward does not need
    return (*result, record_call(recorder, _aten.empty.memory_format, ([0],), named))


def _factory(fake: torch.Tensor) -> dict[str, Any]:
    return {"dtype": fake.dtype, "device": fake.device}


def record_cudnn_backward(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    inputs, grad, weight, _, _, mean, invstd, eps = args[:8]
    native = (grad, inputs, weight, None, None, mean, invstd, True, eps, [True, True, True])
    return record_call(recorder, _aten.native_batch_norm_backward.default, native, {})


def record_rnn(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Its workspace, for backward, has a size that only the library knows: ask it, with zeros."""
    output, hidden, cell, workspace = infer(func, args, kwargs)
    if torch.is_grad_enabled():  # and then no size is symbolic
        with torch._C._DisableTorchDispatch():
            zeros = [torch.zeros(a.shape, dtype=a.dtype) if isinstance(a, torch.Tensor) else a for a in args]
            real = func(*zeros, **kwargs)[3]
        workspace = infer(_aten.new_empty.default, (workspace, list(real.shape)), {})
    result = (output, hidden, cell, workspace)
    nodes = recorder.args(args)
    recorder.results(recorder.call(facts_of(func).name, nodes, result_type(result), kwargs), result)
    return result


def record_eig(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Its backward refuses losses that depend on the phase of a vector, which takes numbers to see; not so
    where torch calls it for the values only, or the vectors are real."""
    has_phase = func is _aten.linalg_eig.default or args[0].is_complex()
    if has_phase and torch.is_grad_enabled() and args[0].requires_grad and "vals" not in recorder.name:
        raise UnsupportedMutation(recorder.loc, detail=f"{func} checks its gradient's values")
    return record_call(recorder, func, args, kwargs)


_routes: Final[dict[Any, Route]] = {}

ROUTES: Final[dict[str, Route]] = {
    **{f"aten.{x}.default": record_as_strided for x in ("as_strided", "_reshape_alias", "unfold", "real")},
    **{f"aten.{name}split.Tensor": record_pieces for name in ("", "unsafe_")},
    **{f"aten.{name}split_with_sizes.default": record_pieces for name in ("", "unsafe_")},
    "aten.unbind.int": record_pieces,
    "aten.copy_.default": record_copy,
    "aten.clone.default": record_clone,
    **{f"aten.{name}.default": record_lift for name in ("lift_fresh", "lift", "lift_fresh_copy")},
    "aten.resize_.default": record_resize,
    "aten.resize_as_.default": lambda recorder, func, args, kwargs: record_resize(
        recorder, _aten.resize_.default, (args[0], list(args[1].shape)), kwargs
    ),
    "aten.set_.source_Tensor": record_set,
    **{f"aten.{x}.default": record_composite
       for x in ("_euclidean_dist", "binary_cross_entropy_with_logits")},
    **{f"aten.{x}.default": record_eig for x in ("linalg_eig", "_linalg_eigh", "_linalg_svd")},
    "aten.mkldnn_rnn_layer.default": record_rnn,
    **{f"aten.{kind}.default": record_batch_norm
       for kind in ("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit")},
    # With batch statistics the running ones play no part; leaving them out keeps them free to change.
    "aten.native_batch_norm_backward.default": lambda recorder, func, args, kwargs: record_call(
        recorder, func, (*args[:3], None, None, *args[5:]) if args[7] else args, kwargs
    ),
    "aten.cudnn_batch_norm_backward.default": record_cudnn_backward,
}  # fmt: skip
"""Ops whose schema does not tell the whole story."""


def _route(func: Any, facts: Record) -> Route:
    if facts.name in ROUTES:
        return ROUTES[facts.name]
    if facts.fate == "decompose" or facts.name.startswith("aten._foreach_"):
        return record_composite
    if facts.changes_shape:
        return record_reshaped
    if func._schema.name in triton_ops_to_kernels and func._schema.name in OPDEFS:
        return record_kernels
    if facts.mutates:
        return record_write
    if not facts.name.startswith("aten."):
        return record_custom
    return record_view if facts.is_view else record_call
