"""A graph of prims to loops.

    Graph -> Loops

Nodes are visited in order. Pointwise and view prims become Lazy values; a node that `decide` says is
stored becomes a Buffer and a Nest that inlines what it reads; every other op becomes an Extern.

    s = prims.add(x, b); o = prims.sum(s, (1,))      one nest:  o[i] = sum over j of x[64*i + j] + b[j]
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

from dovetail.fake.kernels import IN_PLACE
from dovetail.ir import loop as ir
from dovetail.ir.expr import ONE, ZERO, Expr
from dovetail.ir.graph import GET, Arg, Graph, Node
from dovetail.ir.types import F32, F64, I64, DType, ScalarType, TensorType, contiguous_stride
from dovetail.lower import lazy
from dovetail.lower.decide import find_loose, find_stored
from dovetail.lower.index import Index, element_of, index_exprs, memory_order, merge_ranges, regions
from dovetail.lower.lazy import Lazy, window
from dovetail.ops.build import is_dense
from dovetail.ops.prims import kind_of
from dovetail.ops.registry import STRIDE_FREE, is_view_call
from dovetail.util.noun import replace


def lower(graph: Graph) -> ir.Loops:
    return _Lowering(graph).run()


class _Lowering:
    """The walk over one graph: buffers and steps so far, and the Lazy of every node seen."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.buffers: dict[str, ir.Buffer] = {}
        self.steps: list[ir.Nest | ir.Extern] = []
        self.env: dict[Node, Lazy | tuple[Lazy | None, ...]] = {}
        users = graph.users()
        self.stored, self.loose = find_stored(graph, users), find_loose(graph, users)
        self.writers: dict[str, int] = {}
        self.returned: set[str] = set()
        self.updated: set[str] = set()
        """Inputs written in place."""
        self.views: set[str] = set()
        """Results of library calls that lie in the memory of an argument."""
        self.owners: dict[str, Node] = {}
        """Buffers that a user's kernel has written: whose value each holds."""
        self.taken: set[str] = {node.name for node in (*graph.inputs, *graph.nodes)}

    def run(self) -> ir.Loops:
        for node in self.graph.inputs:
            if isinstance(node.type, TensorType):
                self.env[node] = window(self.add_buffer(node.name, node.type, "input"))
        for node in self.graph.nodes:
            self.visit(node)
        outputs = tuple(self.output(out) for out in self.graph.outputs)
        written = {out.buffer for out in outputs if isinstance(out, ir.BufferRef)}
        made = [each for name, each in self.buffers.items() if name in written and each.kind == "temp"]
        self.buffers |= {each.name: replace(each, kind="output") for each in made}
        names = tuple(_input_name(node) for node in self.graph.inputs)
        kinds = "".join(
            ("f" if node.type.dtype.is_float else "i") if isinstance(node.type, ScalarType) else "t"
            for node in self.graph.inputs
        )
        pairs = [(outputs[out], self.graph.inputs[given].name) for out, given in self.graph.updates]
        found = [(ref.buffer, name) for ref, name in pairs if isinstance(ref, ir.BufferRef)]
        updates = tuple(pair for pair in found if self.buffers[pair[0]].kind != "input")
        buffers, steps = tuple(self.buffers.values()), tuple(self.steps)
        return ir.Loops(self.graph.name, buffers, steps, outputs, names, kinds, updates)

    # -- one node ----------------------------------------------------------------------------------

    def visit(self, node: Node) -> None:
        if node.op == GET:
            source = self.env[cast(Node, node.args[0])]
            found = cast("tuple[Lazy | None, ...]", source)[cast(int, node.args[1])]
            if found is not None:
                self.env[node] = found
            return
        kind = kind_of(node.op)
        if kind in ("reduction", "scan"):
            self.reduce(node, kind == "scan")
        elif kind is None:
            self.extern(node)
        elif kind == "scatter":
            self.put(node)
        else:
            value = RULES.get(node.op, _pointwise)(self, node)
            is_stored = node in self.stored and kind != "pair" and node.op != "prims.empty"
            self.env[node] = self.store(node, value) if is_stored else value

    def value(self, arg: Arg) -> Lazy:
        return self.env[arg]  # type: ignore[index, return-value]

    # -- memory ------------------------------------------------------------------------------------

    def add_buffer(
        self, name: str, type: TensorType, kind: str = "temp", holds: Node | None = None
    ) -> ir.BufferRef:
        self.buffers[name] = ir.Buffer(name, type, kind, holds in self.loose)
        return ir.BufferRef(name, type, ZERO)

    def fresh(self, stem: str) -> str:
        name, n = stem, 0
        while name in self.taken:
            name, n = f"{stem}_{n}", n + 1
        self.taken.add(name)
        return name

    def nest_name(self, stem: str) -> str:
        """Nests are named after what they write; several writers of one buffer are numbered."""
        count = self.writers.get(stem, 0)
        self.writers[stem] = count + 1
        return stem if not count else self.fresh(f"{stem}_{count}")

    def store(self, node: Node, value: Lazy, name: str | None = None) -> Lazy:
        """Write a value to a buffer of its own, in its type's memory order."""
        ref = self.add_buffer(name or node.name, storable(node.tensor), holds=node)
        self.write_all(node, ref, value)
        return window(ref)

    def write_all(self, node: Node, ref: ir.BufferRef, value: Lazy) -> None:
        """One nest, or one for each region between the value's cuts. Loops know complex numbers as pairs."""
        ref, value = lazy.as_reals(ref), window(lazy.as_reals(value.ref)) if value.ref else value
        if not value.cuts:
            return self.write_region(node, ref, value)
        loads = 0
        if ref.type.device.kind != "cpu":
            places = _index(ref.type, {d: ir.Range.over(d, n) for d, n in enumerate(ref.type.shape)})
            loads = sum(node.op in ("load", "load_at") for node in ir.iter_scalars(value.at(places)))
        for start, shape in regions(ref.type, value.cuts, loads):
            type = TensorType(shape, ref.type.stride, ref.type.dtype, ref.type.device)
            place = ir.BufferRef(ref.buffer, type, element_of(ref, start))
            self.write_region(node, place, lazy.shifted(value, start))

    def write_region(self, node: Node, ref: ir.BufferRef, value: Lazy) -> None:
        order = memory_order(ref.type.shape, ref.type.stride)
        loops = {d: ir.Range.over(n, ref.type.shape[d]) for n, d in enumerate(order)}
        index = _index(ref.type, loops)
        write = ir.Write((ref.buffer,), element_of(ref, index), value.at(index))
        origins = tuple(dict.fromkeys((*value.origins, node.name)))
        self.add_nest(node, self.nest_name(ref.buffer), [loops[d] for d in order], [], [write], origins)

    def add_nest(
        self, node: Node, name: str, ranges: list[ir.Range], reduce: list[ir.Range], writes: list[ir.Write],
        origins: tuple[str, ...],
    ) -> None:  # fmt: skip
        """Append a nest with its loops merged. A nest over nothing reads nothing."""
        if any(each.size is ZERO for each in ranges):
            writes = [ir.Write(w.buffers, w.index, lazy.as_constant(0, w.value.dtype)) for w in writes]
            reduce = []
        roots = [root for write in writes for root in (write.value, write.index_scalar) if root is not None]
        exprs = index_exprs(roots)
        outer, left = merge_ranges(tuple(ranges), (*exprs, *[write.index for write in writes]), "")
        inner, right = merge_ranges(tuple(reduce), exprs, "r")
        env = {**left, **right}
        memo: dict[ir.Scalar, ir.Scalar] = {}
        final = tuple(ir.moved_write(write, env, memo, {}) for write in writes)
        self.steps.append(ir.Nest(name, outer, inner, final, node.loc, origins))

    # -- reductions --------------------------------------------------------------------------------

    def reduce(self, node: Node, is_scan: bool) -> None:
        """A scan, of floats on the CPU in fp64 as in eager, has its loop among the results' dimensions."""
        x = self.value(node.args[0])
        source = cast(Node, node.args[0]).tensor
        dims = cast("tuple[int, ...]", node.args[1])
        types = cast("tuple[TensorType, ...]", node.type if isinstance(node.type, tuple) else (node.type,))
        type = storable(types[0])
        kept = [d for d in range(source.ndim) if is_scan or d not in dims]
        order = [d for d in memory_order(type.shape, type.stride) if kept[d] not in dims]
        outer = {kept[d]: ir.Range.over(n, type.shape[d]) for n, d in enumerate(order)}
        inner_order = [d for d in memory_order(source.shape, source.stride) if d in dims]
        if "arg" in node.op:  # positions count in the tensor's own order
            inner_order.sort()
        inner = {d: ir.Range.over(f"r{n}", source.shape[d]) for n, d in enumerate(inner_order)}
        index, several = _index(source, inner | outer), len(types) > 1
        names = [self.fresh(f"{node.name}_{i}") if several else node.name for i in range(len(types))]
        refs = [self.add_buffer(name, storable(kind), holds=node) for name, kind in zip(names, types)]
        place = element_of(refs[0], tuple(index[d] for d in kept))
        kind, value = node.op.removeprefix("prims."), x.at(index)
        if is_scan and value.dtype.is_float and value.dtype is not F64:
            value = lazy.cast_to(value, F64 if source.device.kind == "cpu" else F32)
        if inner:
            writes = [ir.Write(tuple(names), place, value, kind)]
        else:
            writes = [ir.Write((name,), place, got) for name, got in zip(names, _over_one(kind, value))]
        origins = tuple(dict.fromkeys((*x.origins, node.name)))
        self.add_nest(node, node.name, [outer[kept[d]] for d in order], list(inner.values()), writes, origins)
        results = tuple(window(ref) for ref in refs)
        self.env[node] = results if isinstance(node.type, tuple) else results[0]

    def put(self, node: Node) -> None:
        """put(x, indices, dims, values): a copy of x, then the values written into it, or added."""
        x, values = self.value(node.args[0]), self.value(node.args[3])
        base = cast(Node, node.args[0])
        if self.is_update(node, base, node):  # nobody sees the old value again: write into it
            ref = ir.BufferRef(base.name, base.tensor, ZERO)
            self.updated.add(base.name)
        else:
            ref = self.add_buffer(node.name, storable(node.tensor))
            self.write_all(node, ref, x)
        indices = [self.value(arg) for arg in cast("tuple[Node, ...]", node.args[1])]
        dims = cast("tuple[int, ...]", node.args[2])
        type = values.type
        loops = {d: ir.Range.over(d, size) for d, size in enumerate(type.shape)}
        index = tuple(loops[d].var for d in range(type.ndim))
        rank = indices[0].type.ndim
        found = {d: i.at(index[:rank]) for d, i in zip(dims, indices)}
        rest = iter(index[rank:])
        parts: list[ir.Scalar | Expr] = [found[d] if d in found else next(rest) for d in range(ref.type.ndim)]
        where = cast("ir.Scalar | Expr", lazy.gathered(ref, parts).args[1])
        place = where if isinstance(where, ir.Scalar) else ir.index_value(where)
        write = ir.Write((ref.buffer,), ZERO, values.at(index), None, place, node.op == "prims.put_add")
        self.add_nest(node, self.fresh(f"{node.name}_put"), list(loops.values()), [], [write], (node.name,))
        self.env[node] = window(ref)

    def is_update(self, result: Node, base: Node, node: Node) -> bool:
        """The result is the new value of the input `base`, which only the node that makes it reads."""
        pairs = {(self.graph.outputs[out], self.graph.inputs[given]) for out, given in self.graph.updates}
        if (result, base) not in pairs or base in self.graph.outputs:
            return False
        return [n for n in self.graph.nodes if base in n.operands] == [node]

    # -- library calls -----------------------------------------------------------------------------

    def extern(self, node: Node) -> None:
        form = IN_PLACE.get(node.op)
        if form is not None:
            self.in_place(node, *form)
            return
        exact = node.op not in STRIDE_FREE
        args = tuple(self.extern_arg(arg, exact) for arg in node.args)
        kwargs = tuple((key, self.extern_arg(arg, exact)) for key, arg in node.kwargs)
        several = isinstance(node.type, tuple)
        types = cast("tuple[TensorType | None, ...]", node.type if several else (node.type,))
        made = {
            i: self.add_buffer(self.fresh(f"{node.name}_{i}") if several else node.name, type)
            for i, type in enumerate(types) if isinstance(type, TensorType)
        }  # fmt: skip
        outputs, places = tuple(ref.buffer for ref in made.values()), tuple(made) if several else ()
        aliases = is_view_call(node.op)
        self.views.update(outputs if aliases else ())
        step = ir.Extern(node.name, node.op, args, kwargs, outputs, not exact, node.loc, aliases, places)
        self.steps.append(step)
        if several:
            self.env[node] = tuple(window(made[i]) if i in made else None for i in range(len(types)))
        elif made:
            self.env[node] = window(made[0])

    def in_place(self, node: Node, op: str, written: tuple[int, ...]) -> None:
        """A user's kernel: it writes to buffers that hold the old values and that nobody else reads."""
        several = isinstance(node.type, tuple)
        users = self.graph.users()
        parts = {cast(int, n.args[1]): n for n in users[node] if n.op == GET} if several else {0: node}
        args = [arg if k in written else self.extern_arg(arg, True) for k, arg in enumerate(node.args)]
        results: list[Lazy] = []
        for n, k in enumerate(written):
            arg, result = cast(Node, node.args[k]), parts.get(n)
            ref = self.private(node, arg, result, users[arg] == [node])
            if result is not None:
                self.owners[ref.buffer] = result
            args[k] = ref
            results.append(window(ref))
        outputs = tuple(cast(ir.BufferRef, args[k]).buffer for k in written)
        given = cast("tuple[ir.ExternArg, ...]", tuple(args))
        self.steps.append(ir.Extern(node.name, op, given, (), outputs, loc=node.loc, is_in_place=True))
        self.env[node] = tuple(results) if several else results[0]

    def last_of(self, result: Node) -> Node:
        """Where one kernel after the other writes to the same memory, what the last of them makes."""
        users = self.graph.users()
        while len(users[result]) == 1:
            (after,) = users[result]
            form = IN_PLACE.get(after.op)
            if form is None or after.args.count(result) != 1 or after.args.index(result) not in form[1]:
                break
            if isinstance(after.type, tuple):
                place = form[1].index(after.args.index(result))
                found = [n for n in users[after] if n.op == GET and n.args[1] == place]
                if len(found) != 1:
                    break
                after = found[0]
            result = after
        return result

    def private(self, node: Node, arg: Node, result: Node | None, is_last: bool) -> ir.BufferRef:
        """A buffer with arg's value that only this node uses: arg's own where possible, else a copy."""
        name = self.fresh(f"{node.name}_memory")
        if arg.op == "prims.empty":
            return self.add_buffer(name, arg.tensor)
        if result is not None and self.is_update(self.last_of(result), arg, node):
            self.updated.add(arg.name)
            return ir.BufferRef(arg.name, arg.tensor, ZERO)
        value = self.value(arg)
        if is_last and arg not in self.graph.outputs and value.ref is not None:
            ref, whole = value.ref, self.buffers[value.ref.buffer]
            is_own = self.owners.get(ref.buffer) is arg or (
                ref.buffer not in self.owners and ref.buffer == arg.name and whole.kind == "temp"
            )
            if is_own and whole.type.is_laid_as(arg.tensor):
                return ref
        ref = self.add_buffer(name, arg.tensor)
        self.write_all(arg, ref, value)
        return ref

    def extern_arg(self, arg: Arg, exact: bool) -> ir.ExternArg:
        if isinstance(arg, tuple):
            return tuple(self.extern_arg(item, exact) for item in arg)
        if not isinstance(arg, Node):
            return arg
        if isinstance(arg.type, ScalarType):
            return arg.type.expr if arg.type.expr is not None else ir.input_value(arg.name, arg.type.dtype)
        return self.in_memory(arg, exact)

    def in_memory(self, node: Node, exact: bool = True) -> ir.BufferRef:
        """The value as a window onto memory, with eager's strides if `exact`; copied if need be."""
        value = self.value(node)
        if value.ref is not None and (not exact or value.ref.type.is_laid_as(node.tensor)):
            return value.ref
        stored = self.store(node, value, self.fresh(f"{node.name}_copy"))
        if value.ref is None:
            self.env[node] = stored
        return cast(ir.BufferRef, stored.ref)

    def output(self, out: Arg) -> ir.BufferRef | Expr | int | float | bool | None:
        if not isinstance(out, Node):
            return cast("Expr | int | float | bool | None", out)
        if isinstance(out.type, ScalarType):
            return out.type.expr
        ref = self.in_memory(out)
        shared = self.buffers[ref.buffer].kind == "input" and ref.buffer not in self.updated
        shared |= ref.buffer in self.views or ref.type.dtype is not self.buffers[ref.buffer].type.dtype
        if ref.buffer in self.returned or shared:
            copied = self.store(out, window(ref), self.fresh(f"{out.name}_copy"))
            ref = cast(ir.BufferRef, copied.ref)
        if not ref.type.is_laid_as(out.tensor) and all(stride.lo > 0 for stride in out.tensor.stride):
            value = window(ref)  # its strides leave holes: whoever takes it (backward, say) counts on them
            ref = self.add_buffer(self.fresh(f"{out.name}_spread"), out.tensor)
            self.write_all(out, ref, value)
        self.returned.add(ref.buffer)
        return ref


def _input_name(node: Node) -> str:
    """A symbolic integer goes by its symbol, which is what index expressions mention."""
    if isinstance(node.type, ScalarType) and node.type.expr is not None and node.type.expr.op == "sym":
        return node.type.expr.name
    return node.name


def _over_one(kind: str, value: ir.Scalar) -> tuple[ir.Scalar, ...]:
    """A reduction over one element."""
    if kind.startswith("arg"):
        return (ir.constant(0, I64),)
    if kind == "welford":
        gap = ir.scalar("sub", (value, value), value.dtype)
        return value, ir.scalar("mul", (gap, gap), value.dtype)
    return (value,)


def storable(type: TensorType) -> TensorType:
    """The type itself if its elements fill memory without gaps or overlap, else in its order without gaps."""
    if is_dense(type):
        return type
    has_order = all(stride.lo > 0 for stride in type.stride)
    order = memory_order(type.shape, type.stride) if has_order else list(range(type.ndim))
    steps = dict(zip(order, contiguous_stride(tuple(type.shape[d] for d in order))))
    return TensorType(type.shape, tuple(steps.get(d, ONE) for d in range(type.ndim)), type.dtype, type.device)


def _index(type: TensorType, loops: dict[int, ir.Range]) -> Index:
    return tuple(loops[d].var if d in loops else ZERO for d in range(type.ndim))


# -- rules: prim -> Lazy ---------------------------------------------------------------------------


def _pointwise(low: _Lowering, node: Node) -> Lazy:
    """Any prim that is a scalar operation of the loop IR."""
    result, op, args = node.tensor, node.op.removeprefix("prims."), node.args
    values: Any = [low.env[x] if type(x) is Node and type(x.type) is TensorType else x for x in args]
    operands = [v for v in values if type(v) is Lazy]
    operand_type = operands[op == "where" and operands[0] is values[0]].type.dtype

    def at(index: Index) -> ir.Scalar:
        scalars = [v.at(index) if type(v) is Lazy else lazy.as_constant(v, operand_type) for v in values]
        return lazy.apply(op, tuple(scalars), result.dtype)

    cuts = dict.fromkeys([cut for v in operands for cut in v.cuts])
    return Lazy(result, at, None, _origins(node, operands), tuple(cuts))


def _origins(node: Node, values: list[Lazy]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*[name for v in values for name in v.origins], node.name]))[-32:]


def _mapped(change: Callable[[ir.Scalar, DType], ir.Scalar], low: _Lowering, node: Node) -> Lazy:
    """Each element by itself, to the node's dtype."""
    x, dtype = low.value(node.args[0]), node.tensor.dtype
    origins = _origins(node, [x])
    return Lazy(node.tensor, lambda index: change(x.at(index), dtype), None, origins, x.cuts)


def _full(low: _Lowering, node: Node) -> Lazy:
    value, dtype = 0 if node.op == "prims.empty" else node.args[1], node.tensor.dtype
    return Lazy(node.tensor, lambda index: lazy.as_constant(value, dtype), None, (node.name,))


def _as_strided(low: _Lowering, node: Node) -> Lazy:
    base = low.in_memory(cast(Node, node.args[0]))
    shape, stride, offset = cast("tuple[tuple[Expr, ...], tuple[Expr, ...], Expr]", node.args[1:])
    kind = TensorType(shape, stride, node.tensor.dtype, node.tensor.device)
    return window(ir.BufferRef(base.buffer, kind, base.offset + offset))


def _view_as_complex(low: _Lowering, node: Node) -> Lazy:
    """Pairs that lie in memory as they should are there already."""
    value = low.value(node.args[0])
    ref = lazy.as_complex(value.ref) if value.ref else None
    return window(ref) if ref else low.store(node, value)


def _take(low: _Lowering, node: Node) -> Lazy:
    base = low.value(node.args[0])
    indices = tuple(low.value(arg) for arg in cast("tuple[Node, ...]", node.args[1]))
    return lazy.take(base, node.tensor, indices, cast("tuple[int, ...]", node.args[2]))


def _view(rule: Callable[..., Lazy], *places: int) -> Callable[[_Lowering, Node], Lazy]:
    """A rule on the first operand and these arguments."""
    return lambda low, node: rule(low.value(node.args[0]), node.tensor, *(node.args[p] for p in places))


RULES: Final[dict[str, Callable[[_Lowering, Node], Lazy]]] = {
    "prims.convert": partial(_mapped, lazy.cast_to),
    "prims.bitcast": partial(_mapped, lambda value, dtype: ir.scalar("bitcast", (value,), dtype)),
    "prims.copy": partial(_mapped, lambda value, dtype: value),
    **dict.fromkeys(("prims.full", "prims.empty"), _full),
    "prims.iota": lambda low, node: lazy.iota(node.tensor, node.args[1], node.args[2]),
    "prims.reshape": _view(lazy.reshape),
    "prims.permute": _view(lazy.permute, 1),
    "prims.broadcast": _view(lazy.broadcast, 2),
    "prims.slice": _view(lazy.slice_, 1, 2, 4),
    "prims.flip": _view(lazy.flip, 1),
    "prims.pad": _view(lazy.pad, 1, 3),
    "prims.cat": lambda low, node: lazy.cat(
        tuple(map(low.value, cast("tuple[Node, ...]", node.args[0]))), node.tensor, cast(int, node.args[1])
    ),
    "prims.as_strided": _as_strided,
    "prims.view_as_real": lambda low, node: window(lazy.as_reals(low.in_memory(node.operands[0]))),
    "prims.view_as_complex": _view_as_complex,
    "prims.take": _take,
    "prims.gather": lambda low, node: lazy.gather(
        low.value(node.args[0]), node.tensor, cast(int, node.args[1]), low.value(node.args[2])
    ),
}
