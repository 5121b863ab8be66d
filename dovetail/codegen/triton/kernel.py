"""One Group as one Triton kernel.

    Group -> Launchable(Kernel(text, block sizes), arguments, launch grid)

    @triton.jit
    def softmax(x, o, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):      # for i < 4096 | r0 < 1024
        xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
        rindex = tl.arange(0, RBLOCK)[None, :]
        ...

A kernel's tile has one or two axes. Points: all loops flattened into `x`; or, where some accesses are
contiguous along another loop than others (a transpose), that loop is an axis of its own, so both sides
move whole lines. Rows: outer loops are `x`, inner loops are `r`, which is either the whole row at once
(persistent: every pass reads registers) or a loop over blocks, each pass reading the row anew and
recomputing what earlier passes made.
"""
from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Final

from dovetail.codegen import analysis
from dovetail.codegen.analysis import Launchable, Pass, Shape, certain, launchable, token
from dovetail.codegen.triton import tiling
from dovetail.codegen.triton.ops import COMBINE, FAST, POINTER, REDUCE, SEARCH, TL_TYPE, TRITON, identity
from dovetail.codegen.triton.tiling import Axis, find_streams, positions, power
from dovetail.ir.expr import ONE, Expr, mul, spell, substitute, sym, symbols
from dovetail.ir.loop import SCANS, Buffer, Nest, Scalar, Write, iter_scalars, scalar
from dovetail.ir.program import FOLLOW, Blocks
from dovetail.ir.schedule import Group
from dovetail.ir.types import BF16, BOOL, F32, F64, I32, I64, NARROW, DType
from dovetail.util.noun import Noun, field
from dovetail.util.writer import Writer

PRELUDE: Final = Path(__file__).with_name("prelude.py").read_text()
"""Functions every kernel may call, as `dv`."""
MOST_EARLY: Final = 3
"""Loads of constants that are made first: each takes registers."""

PLAIN: Final = {**SCANS, "welford": "sum"}
"""How blocks of a row combine."""

MANY_LOADS: Final = 8
LOADS_A_THREAD: Final = 64
"""Loads that a thread has registers for, where an element takes many."""

class Tile(Noun):
    """A value in the kernel: its text, its type, and which axes it varies along."""

    text: str
    dtype: DType
    axes: frozenset[str]


def is_number(buffer: Buffer) -> bool:
    """A single number in the CPU's memory (the step of an optimizer): the kernel is given its value."""
    type, room = buffer.type, buffer.type.storage_bytes
    is_single = room.is_const and room.value == type.dtype.bytes
    return is_single and type.device.kind == "cpu" and type.dtype in (F32, F64, I32, I64)


class Emitter(Noun, frozen=False):
    group: Group
    buffers: dict[str, Buffer]
    w: Writer = field(default_factory=Writer)
    tiles: dict[Scalar, Tile] = field(default_factory=dict)
    """Scalars computed in the current pass."""
    values: dict[str, Tile] = field(default_factory=dict)
    """What a buffer written by this kernel holds, where it is in registers."""
    formulas: dict[str, Scalar] = field(default_factory=dict)
    """How a per-point buffer is computed, for passes that must recompute it."""
    masks: list[Tile] = field(default_factory=list)
    """Conditions under which the current scalar is computed."""
    env: dict[Expr, Expr] = field(default_factory=dict)
    """Loop variables in terms of the axes' positions."""
    still: dict[Expr, Expr] = field(default_factory=dict)
    """Those that are the same for a whole block, in terms of its first position."""
    ahead: dict[Scalar, Tile] = field(default_factory=dict)
    """Weights of the block of a row that comes next."""
    is_first: bool = False
    """What comes before this kernel is not known: it may write what the program only reads."""
    count: int = 0
    shape: Shape = field(init=False)
    axes: tuple[Axis, ...] = field(init=False)
    is_looped: bool = field(init=False)
    blocks: tuple[Blocks, ...] = field(init=False)
    masked: tuple[str, ...] = field(init=False)
    """Names of the axes along which a tile may reach past the end."""
    late: list[str] = field(default_factory=list)
    """Stores, until all of a block's loads are under way: a load is not moved before a store. A row held in
    registers has been loaded by then, and needs them."""
    certain: frozenset[Scalar] = frozenset()
    """Conditions that hold for every point of the current stretch of a row."""
    written: frozenset[str] = field(init=False)
    shortened: frozenset[Scalar] = field(init=False)
    """erf and tanh that are read only to add 1 to them."""
    summed: frozenset[Scalar] = frozenset()
    """exp(x - max(x)) of bfloat16s that is only summed."""
    addresses: frozenset[Scalar] = field(init=False)

    def __post_init__(self) -> None:
        self.choose()
        self.written = frozenset(self.group.written_buffers)
        self.shortened = find_shortened(analysis.scalars_of(self.group)) if self.is_rounded else frozenset()
        self.masked = tuple(axis.name for axis in self.axes if not self._is_exact(axis))
        self.addresses = frozenset() if self._is_wide() else find_addresses(self.group)

    def choose(self) -> None:
        """The axes of the tile and their block sizes."""
        self.group = tiling.as_rows(self.group)
        self.shape = analysis.analyse(self.group, self.buffers)
        self.axes = tiling.make_axes(self.group, self.shape)
        row = self.axes[-1].size if self.has_rows else ONE
        longest = tiling.PERSISTENT if self.axes[0].size is not ONE else 2 * tiling.PERSISTENT
        if self.shape.contiguous in self.axes[0].loops:
            longest = tiling.LONG_COLUMN
        self.is_looped = not (row.is_const and row.value <= longest)
        loads = sum(node.op in ("load", "load_at") for node in analysis.scalars_of(self.group))
        each = power(max(LOADS_A_THREAD // loads, 1) + 1) // 2 if loads > MANY_LOADS else 64
        found = tiling.choose_blocks(self.axes, self.shape, self.is_looped, find_streams(self.group), each)
        self.blocks = tuple(dict.fromkeys(found))
        shifted = [write for both in pairwise(self.shape.passes) for write in find_shifted(*both)]
        others = (w.value for w in analysis.writes_in(self.group.nests) if w not in shifted)
        summed = {write.value for write in shifted if _is_of_bf16(write.value)}
        self.summed = frozenset(summed.difference(iter_scalars(*others)))
        if shifted and self.is_looped and self.axes[0].size.lo >= tiling.MANY_ROWS and self.neighbours > 1:
            self.blocks = (Blocks(1, r=2048, warps=4), *self.blocks)

    @property
    def is_rounded(self) -> bool:
        """All results are rounded to 16 bits, so the last bits of fp32 arithmetic do not show."""
        written = [a.buffer for a in self.shape.args if a.is_written]
        return all(buffer.is_loose or buffer.type.dtype.is_low_precision for buffer in written)

    @property
    def has_rows(self) -> bool:
        return bool(self.group.inner)

    @property
    def neighbours(self) -> int:
        """How many elements of a row share a running maximum: those that one thread loads at once."""
        return 1 if self.shape.contiguous in self.axes[0].loops else 8

    @property
    def rows(self) -> frozenset[str]:
        """The axes that a reduction leaves."""
        return frozenset(a.name for a in self.axes if a.name != "r")

    def _is_exact(self, axis: Axis) -> bool:
        """Whatever the choice of blocks, they cover the axis without a rest."""
        sizes = [blocks.constants((axis.block,))[axis.block] for blocks in self.blocks]
        return axis.size.is_const and 0 < axis.size.value and all(axis.size.value % n == 0 for n in sizes)

    def _mask(self, axes: Iterable[str]) -> list[str]:
        return [f"{name}mask" for name in self.masked if name in axes]

    def fresh(self, stem: str = "t") -> str:
        self.count += 1
        return f"{stem}{self.count}"

    # -- the whole

    def emit(self) -> Launchable:
        self._indices()
        if self.is_first:
            self.w(FOLLOW)
        self._load_constants()
        if not self.is_first:
            self.w(FOLLOW)
        self._load_picked()
        passes = list(self.shape.passes)
        while passes:
            step, shifted = passes.pop(0), {}
            if self.has_rows and self.is_looped and passes and (shifted := find_shifted(step, passes[0])):
                passes.pop(0)
            self._pass(step, shifted)
        self._store_late()
        wide = "i64" if self._is_wide() else "i32"
        constants = tuple(axis.block for axis in self.axes)
        params = [token(a.buffer.name) for a in self.shape.args]
        params += [*(s.name for s in self.shape.symbols), *map(token, self.shape.numbers)]
        head = f"def {token('')}({', '.join([*params, *(f'{c}: tl.constexpr' for c in constants)])}):"
        body = "\n".join("    " + line if line else "" for line in self.w.lines)
        text = f"@triton.jit\n{head}\n{body}\n"
        comment = "".join(f"# {line}\n" for line in str(self.group).splitlines())
        given = [is_number(a.buffer) and not a.is_written for a in self.shape.args]
        signature = [POINTER[a.buffer.type.dtype][value:] for a, value in zip(self.shape.args, given)]
        signature += [wide] * len(self.shape.symbols) + ["fp64"] * len(self.shape.numbers)
        unaligned = [k for k, a in enumerate(self.shape.args) if a.is_written and a.buffer.kind == "input"]
        sizes = [a.buffer.type.storage_bytes for a in self.shape.args]
        return launchable(
            self.group, self.shape, "triton", text, comment, keyword.kwlist, (PRELUDE,),
            salt=f"{signature}{unaligned}{self.blocks}", grid=self.grid, signature=tuple(signature),
            unaligned=tuple(unaligned), fuses=self.is_rounded, constants=constants, blocks=self.blocks,
            sizes=tuple(size.value if size.is_const else 0 for size in sizes),
            points=tuple(size.value if size.is_const else 0 for size, _ in self.grid),
        )  # fmt: skip

    @property
    def grid(self) -> tuple[tuple[Expr, int], ...]:
        return tuple((axis.size, k) for k, axis in enumerate(self.axes) if axis.name != "r")

    def _is_wide(self) -> bool:
        """Some index may not fit in 32 bits. Symbolic ones do: see aot/joint.py."""
        if any(a.buffer.type.numel.hi > NARROW for a in self.shape.args if a.buffer.type.numel.is_const):
            return True
        return any(expr.hi > NARROW for expr in analysis.group_exprs(self.group) if not symbols(expr))

    def _indices(self) -> None:
        """Positions along each axis, and the loop variables they stand for."""
        wide = ".to(tl.int64)" if self._is_wide() else ""
        tiles = {"x": "tl.program_id(0)"}
        if "y" in self.rows:  # neighbours in time read and write along the same lines
            self.w("tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)")
            tiles = {"y": "(tile // tl.num_programs(1))", "x": "(tile % tl.num_programs(1))"}
        for axis in self.axes:
            reach = f"tl.arange(0, {axis.block}){axis.place}"
            if axis.name == "r":
                if not self.is_looped:
                    self.w(f"rindex = {reach}{wide}")
                    self._loops_of(axis)
                continue
            self.w(f"{axis.name}index = {tiles[axis.name]}{wide} * {axis.block} + {reach}")
            self._loops_of(axis)
        if len(self.rows) == 1:
            self._find_still(self.axes[0], wide)

    def _find_still(self, axis: Axis, wide: str) -> None:
        """Outer loops that no block takes two steps of: what is loaded at one is loaded once a block."""
        blocks, inner, still = {blocks.x for blocks in self.blocks}, ONE, set()
        for loop in reversed(axis.loops if blocks != {1} else ()):
            if inner.is_const and all(inner.value % n == 0 for n in blocks):
                still.add(loop.var)
            inner = mul(inner, loop.size)
        first = sym("xfirst", 0, max(axis.size.hi - 1, 0), axis.size)
        self.still = {var: at for var, at in positions(axis, first).items() if var in still}
        loads = [index for nest in self.group.nests for _, index in nest.loads]
        if any(index is not None and self._is_still(index) for index in loads):
            self.w(f"xfirst = tl.program_id(0){wide} * {axis.block}")

    def _is_still(self, index: Expr) -> bool:
        used = symbols(index).intersection(loop.var for loop in self.axes[0].loops)
        return bool(used) and used <= self.still.keys()

    def _loops_of(self, axis: Axis) -> None:
        if axis.name in self.masked:
            self.w(f"{axis.name}mask = {axis.name}index < {_text(axis.size)}")
        self.env |= positions(axis, axis.index)

    def _index(self, expr: Expr) -> str:
        """In terms of the positions along the axes: a walk in memory order becomes the position itself."""
        return _text(substitute(expr, self.env))

    def _load_constants(self) -> None:
        """Weights that a row is multiplied by are on their way before the kernel before this one is done."""
        if not self.has_rows:
            return
        sure = certain(analysis.roots_in(self.group.nests), self.certain)
        early: set[Scalar] = set()
        if self.is_looped:
            self._load_ahead(sure)
            return
        for node in [node for node in analysis.scalars_of(self.group) if node in sure]:
            read = {n for n in iter_scalars(node) if n.op in ("load", "load_at")}
            is_constant = all(self.buffers[str(n.args[0])].kind == "constant" for n in read)
            if node.op in ("load", "masked") and is_constant and 0 < len(read | early) <= MOST_EARLY:
                early |= read
                self._value(node)
        if self.axes[0].size is ONE:  # one program waits for all the others: it reduces what it can before
            self._at_once(nest for nest in self.shape.passes[0].points if self._is_settled(nest))

    def _is_settled(self, nest: Nest) -> bool:
        read = (self.buffers[name] for name, _ in nest.loads)
        is_inside = all(write.reduce and write.buffers[0] in self.group.internal for write in nest.writes)
        return is_inside and all(buffer.kind == "constant" for buffer in read)

    def _load_ahead(self, sure: set[Scalar]) -> None:
        """Of a row taken in blocks, the first one; the walk then loads each a block before it is needed."""
        streams, writes = find_streams(self.group), analysis.writes_in(self.group.nests)
        is_again = sum(bool(step.points) for step in self.shape.passes) > 1
        is_again |= any(write.reduce == "welford" for write in writes)
        if "r" in self.masked or not any(streams.values()) or is_again:
            return
        rows = {name for name, is_vector in streams.items() if not is_vector}
        rows = {name for name in rows if self.buffers[name].kind == "constant"}
        loads = [node for node in analysis.scalars_of(self.group) if node.op == "load" and node in sure]
        found = [node for node in loads if node.args[0] in rows]
        if 0 < len(found) <= MOST_EARLY:
            self._begin_block(self.axes[-1], "0")
            self.ahead = {node: self._load(node) for node in found}

    def _go_ahead(self, axis: Axis) -> None:
        """Take the block that is loaded, and load the next."""
        here = self.env
        self.w(f"rnext = rindex + {axis.block}")
        self.env = here | positions(axis, sym("rnext", 0, max(axis.size.hi - 1, 0), axis.size))
        for node, tile in self.ahead.items():
            self.tiles[node] = self._define(tile.text, tile.dtype, tile.axes)
            buffer, index = token(str(node.args[0])), self._index(node.args[1])  # type: ignore[arg-type]
            self.w(f"{tile.text} = tl.load({buffer} + ({index}), rnext < {_text(axis.size)}, other=0)")
        self.env = here

    def _load_picked(self) -> None:
        """What a row picks by an index is two loads one after the other: on their way before the row."""
        if not self.has_rows or self.is_looped:
            return
        roots = analysis.roots_in(nest for step in self.shape.passes for nest in step.rows)
        sure = certain(roots, self.certain)
        for node in iter_scalars(*roots):
            if node.op == "load_at" and node in sure:
                read = {str(n.args[0]) for n in iter_scalars(node) if n.op in ("load", "load_at")}
                if self.written.isdisjoint(read):
                    self._value(node)

    # -- passes

    def _pass(self, step: Pass, shifted: dict[Write, Write]) -> None:
        for write in analysis.writes_in(step.rows):
            self._store(write, self._value(write.value))
        if not step.points:
            return
        if self.has_rows and self.is_looped:
            self._looped(step, shifted)
        else:
            self._at_once(step.points)

    def _at_once(self, nests: Iterable[Nest]) -> None:
        for write in analysis.writes_in(nests):
            if write.reduce and write.buffers[0] in self.values:  # before
                continue
            tile = self._value(write.value)
            if not write.reduce:
                self._store(write, tile)
                continue
            if write.reduce in SCANS:
                kept = self._kept(self._full(tile), identity(SCANS[write.reduce], tile.dtype))
                scan = f"tl.{write.reduce}({kept}, 1)"
                self._store(write, self._define(scan, tile.dtype, self.rows | {"r"}))
                continue
            for buffer, result in zip(write.buffers, self._reduced(write, tile)):
                self._keep(buffer, write, result)

    def _reduced(self, write: Write, tile: Tile) -> list[Tile]:
        """The row's result(s), with the whole row in the tile."""
        rows = self.rows
        if write.reduce == "welford":
            count = _text(self.axes[-1].size)
            full = self._full(tile)
            kept = self._kept(full, "0")
            mean = self._define(f"tl.sum({kept}, 1)[:, None] / {count}", tile.dtype, rows)
            apart = self._define(self._kept(f"{full} - {mean.text}", "0"), tile.dtype, tile.axes | rows)
            square = self._define(f"tl.sum({apart.text} * {apart.text}, 1)[:, None]", tile.dtype, rows)
            return [mean, square]
        if write.reduce in ("argmax", "argmin"):
            return [self._position(write, *self._candidates(write, tile))]
        nothing = identity(str(write.reduce), tile.dtype)
        return [self._folded(write, self._kept(self._full(tile), nothing), tile.dtype)]

    def _folded(self, write: Write, text: str, dtype: DType) -> Tile:
        folded = REDUCE[str(write.reduce)].format(text, 1)
        after = " != 0" if dtype is BOOL else ""
        return self._define(f"{folded}[:, None]{after}", dtype, self.rows)

    def _candidates(self, write: Write, tile: Tile) -> tuple[str, str]:
        """Values and their positions for a search; past the end the worst."""
        assert write.index_scalar is not None
        at = self._full(self._value(write.index_scalar))
        worst = identity(str(write.reduce), tile.dtype)
        return self._kept(self._full(tile), worst), self._kept(at, str(1 << 62))

    def _position(self, write: Write, value: str, where: str) -> Tile:
        name = self.fresh("at")
        self.w(f"_, {name} = tl.reduce(({value}, {where}), 1, {SEARCH[str(write.reduce)]})")
        return self._define(f"{name}[:, None]", I64, self.rows)

    def _looped(self, step: Pass, shifted: dict[Write, Write]) -> None:
        """One walk over the row in blocks; a second one for deviations from the mean. Sums of exponentials
        under the maximum come with it: what was summed is scaled down whenever the maximum grows."""
        writes = analysis.writes_in(step.points)
        reductions = [w for w in writes if w.reduce]
        grown = {*shifted, *shifted.values()}
        started = (*reductions, *shifted)
        accumulators = {w: self._start(w, self.neighbours if w in grown else 1) for w in started}

        def take_block() -> None:
            for write in writes:
                tile = self._value(write.value)
                if not write.reduce:
                    self._store(write, tile)
                    self.formulas[write.buffers[0]] = write.value
                elif write.reduce in ("argmax", "argmin"):
                    name, (value, where) = accumulators[write], self._candidates(write, tile)
                    pair, best = f"{name}, {name}_at", SEARCH[write.reduce]
                    self.w(f"{pair} = {best}({pair}, {value}, {where})")
                else:
                    kind = PLAIN.get(write.reduce, write.reduce)
                    nothing = identity(kind, tile.dtype)
                    value = self._kept(self._full(tile), nothing)
                    name = accumulators[write]
                    if write.reduce in SCANS:  # it carries the row's result so far
                        so_far = COMBINE[kind].format(name, f"tl.{write.reduce}({value}, 1)")
                        self._store(write, self._define(so_far, tile.dtype, self.rows | {"r"}))
                        value = f"{REDUCE[kind].format(value, 1)}[:, None]"
                    if total := next((accumulators[s] for s, top in shifted.items() if top is write), ""):
                        self.w(f"{name}, {total} = dv.grow({name}, {total}, {value})")
                    else:
                        self.w(f"{name} = {COMBINE[kind].format(name, value)}")

        self._walk(analysis.roots_in(step.points), take_block)
        for write in writes:  # a value per point belongs to a block that is gone: later passes make it anew
            if not write.reduce or write.reduce in SCANS:
                self.values.pop(write.buffers[0], None)
        for write in reductions:
            self._finish(write, accumulators[write])
        for write, top in shifted.items():
            apart = f"{accumulators[top]} - {self.values[top.buffers[0]].text}"
            scaled = f"{accumulators[write]} * libdevice.exp({apart})"
            self._keep(write.buffers[0], write, self._folded(write, scaled, write.value.dtype))

    def _walk(self, roots: list[Scalar], take_block: Callable[[], None]) -> None:
        """Take the row block by block: whole blocks without a mask, so that their accesses can be wide,
        then the rest. What does not change along the row is loaded before."""
        self._store_late()
        axis, masked = self.axes[-1], self.masked
        size, bounds = _text(axis.size), self._bounds(roots)
        stretches = [("0", size, masked, self.certain)]
        if ("r" in masked or bounds) and axis.size.is_const and not self.masks:
            whole = f"{min([axis.size.value, *bounds.values()])} // {axis.block} * {axis.block}"
            unmasked = tuple(m for m in masked if m != "r")
            stretches = [("0", whole, unmasked, frozenset(bounds)), (whole, size, masked, frozenset())]
        self.tiles.clear()
        self.certain = stretches[0][-1]
        self._load_before(roots)
        before = self.tiles
        for start, end, self.masked, self.certain in stretches:
            with self.w.block(f"for roffset in range({start}, {end}, {axis.block}):"):
                self._begin_block(axis)
                self.tiles = dict(before)
                if self.ahead:
                    self._go_ahead(axis)
                take_block()
                self._store_late()
        self.masked = masked
        self.tiles.clear()

    def _begin_block(self, axis: Axis, start: str = "roffset") -> None:
        wide = ".to(tl.int64)" if self._is_wide() else ""
        self.w(f"rindex = {start} + tl.arange(0, {axis.block}){axis.place}{wide}")
        self._loops_of(axis)

    def _bounds(self, roots: list[Scalar]) -> dict[Scalar, int]:
        """Conditions of the form `r < bound`, as the end of a padded row has them."""
        found: dict[Scalar, int] = {}
        loops = self.axes[-1].loops
        for node in iter_scalars(*map(self._with_formulas, roots)):
            expr = node.operands[0].args[0] if node.op == "masked" else None
            if isinstance(expr, Expr) and expr.op == "lt" and len(loops) == 1:
                left, bound = expr.args
                if left is loops[0].var and isinstance(bound, Expr) and bound.is_const:
                    found[node.operands[0]] = bound.value
        return found

    def _load_before(self, roots: list[Scalar]) -> None:
        """Loads that are the same for every block of a row."""
        for root in map(self._with_formulas, roots):
            unmasked = certain((root,), self.certain)
            for node in iter_scalars(root):
                if node.op != "load" or node not in unmasked or str(node.args[0]) in self.values:
                    continue
                name, at = str(node.args[0]), self._axes_of(node.args[1])  # type: ignore[arg-type]
                if "r" not in at and name not in self.written:
                    self.tiles[node] = self._load(node)

    def _start(self, write: Write, neighbours: int = 1) -> str:
        """Accumulators for each place in a block, or for some neighbours together."""
        name = self.fresh("acc")
        dtype = write.value.dtype
        kind = PLAIN.get(str(write.reduce), str(write.reduce))
        shape = f"({', '.join(a.block for a in self.axes)}{f' // {neighbours}' if neighbours > 1 else ''})"
        shape = f"({self.axes[0].block}, 1)" if write.reduce in SCANS else shape
        self.w(f"{name} = tl.full({shape}, {identity(kind, dtype)}, {TL_TYPE[dtype]})")
        if write.reduce in ("argmax", "argmin"):
            self.w(f"{name}_at = tl.full({shape}, {1 << 62}, tl.int64)")
        return name

    def _finish(self, write: Write, name: str) -> None:
        if write.reduce in ("argmax", "argmin"):
            self._keep(write.buffers[0], write, self._position(write, name, f"{name}_at"))
        elif write.reduce == "welford":
            self._deviations(write, name)
        elif write.reduce not in SCANS:
            self._keep(write.buffers[0], write, self._folded(write, name, write.value.dtype))

    def _deviations(self, write: Write, name: str) -> None:
        rows, dtype, count = self.rows, write.value.dtype, _text(self.axes[-1].size)
        mean = self._define(f"tl.sum({name}, 1)[:, None] / {count}", dtype, rows)
        self._keep(write.buffers[0], write, mean)
        squares = self._start(write)

        def take_block() -> None:
            full = self._full(self._value(write.value))
            self.w(f"apart = {self._kept(f'{full} - {mean.text}', '0')}")
            self.w(f"{squares} += apart * apart")

        self._walk([write.value], take_block)
        self._keep(write.buffers[1], write, self._define(f"tl.sum({squares}, 1)[:, None]", dtype, rows))

    # -- values

    def _value(self, root: Scalar) -> Tile:
        root = self._with_formulas(root)
        unmasked = certain((root,), self.certain)
        for node in iter_scalars(root):
            if node in unmasked and node not in self.tiles:
                make = self._masked if node.op == "masked" else self._compute
                self.tiles[node] = make(node)
        return self.tiles[root]

    def _masked(self, node: Scalar) -> Tile:
        condition, value, other = node.args
        if condition in self.certain:
            return self.tiles[value]  # type: ignore[index]
        test = self.tiles[condition]  # type: ignore[index]
        self.masks.append(test)
        saved, self.tiles = self.tiles, {**self.tiles}
        inside = self._value(value)  # type: ignore[arg-type]
        self.tiles = saved
        self.masks.pop()
        default = self.tiles[other]  # type: ignore[index]
        axes = test.axes | inside.axes | default.axes
        return self._define(f"tl.where({test.text}, {inside.text}, {default.text})", node.dtype, axes)

    def _with_formulas(self, root: Scalar) -> Scalar:
        """Loads of values from an earlier walk over the row become the computation itself."""
        if not self.formulas:
            return root
        built: dict[Scalar, Scalar] = {}
        for node in iter_scalars(root):
            formula = self.formulas.get(str(node.args[0])) if node.op == "load" else None
            if formula is not None and str(node.args[0]) not in self.values:
                built[node] = self._with_formulas(formula)
            else:
                args = tuple(built.get(a, a) if isinstance(a, Scalar) else a for a in node.args)
                built[node] = node if args == node.args else scalar(node.op, args, node.dtype)
        return built[root]

    def _compute(self, node: Scalar) -> Tile:
        known = self.tiles
        if node.op == "const":
            return Tile(_constant(node.args[0], node.dtype), node.dtype, frozenset())
        if node.op == "index":
            expr: Expr = node.args[0]  # type: ignore[assignment]
            text = self._index(expr)
            if node.dtype is not BOOL and node not in self.addresses:
                text = f"tl.cast({text}, {TL_TYPE[node.dtype]})"
            return self._define(text, node.dtype, self._axes_of(expr))
        if node.op == "input":
            return Tile(token(str(node.args[0])), node.dtype, frozenset())
        if node.op == "load":
            return self._load(node)
        if node.op == "load_at":
            at = known[node.args[1]]  # type: ignore[index]
            return self._read(str(node.args[0]), at.text, at.axes, node.dtype)
        operands = [known[x] for x in node.operands]
        if (short := _one_plus(node)) is not None and short in self.shortened:
            return self._define(f"dv.one_plus_{short.op}({known[short.operands[0]].text})", node.dtype,
                                known[short].axes)  # fmt: skip
        if node in self.summed and self.is_rounded:
            x, top = (known[part].text for part in node.operands[0].operands)
            return self._define(f"dv.under({x}, {top})", node.dtype, operands[0].axes)
        entry = (FAST.get(node.op) if self.is_rounded else None) or TRITON[node.op]
        template = entry if isinstance(entry, str) else entry(node.dtype, tuple(x.dtype for x in operands))
        axes = frozenset().union(*(x.axes for x in operands)) if operands else frozenset()
        texts = [self._as_tensor(x) if ".to(" in template else x.text for x in operands]
        masks = [*self._mask(axes), *(test.text for test in self.masks)]
        inside = f", {' & '.join(masks)}" if masks else ""
        if node.op == "check_index" and node in self.addresses:
            template += ".to(tl.int32)"
        if node in self.shortened:  # never read itself
            return Tile(template.format(*texts, inside=inside), node.dtype, axes)
        return self._define(template.format(*texts, inside=inside), node.dtype, axes)

    def _as_tensor(self, tile: Tile) -> str:
        """A number has no methods; a tile of one element does."""
        if tile.axes or tile.text.isidentifier():
            return tile.text
        return f"tl.full({[1] * len(self.axes)}, {tile.text}, {TL_TYPE[tile.dtype]})"

    def _load(self, node: Scalar) -> Tile:
        buffer, index = str(node.args[0]), node.args[1]
        if buffer in self.values:
            return self.values[buffer]
        assert isinstance(index, Expr)
        if self._is_still(index):
            at = _text(substitute(index, self.env | self.still))
            return self._read(buffer, at, self._axes_of(index) - {"x"}, node.dtype)
        return self._read(buffer, self._index(index), self._axes_of(index), node.dtype)

    def _read(self, buffer: str, index: str, axes: frozenset[str], dtype: DType) -> Tile:
        if is_number(self.buffers[buffer]):
            given = Tile(token(buffer), dtype, frozenset())
            return self._define(self._as_tensor(given), dtype, given.axes)
        masks = self._mask(axes) + [test.text for test in self.masks]
        mask = f", {' & '.join(masks)}, other=0" if masks else ""
        after = ".to(tl.int1)" if dtype is BOOL else ""
        every = axes.union(*(test.axes for test in self.masks))  # a mask needs a pointer of its own shape
        index += "".join(f" + 0 * {name}index" for name in sorted(every - axes) if not axes)
        return self._define(f"tl.load({token(buffer)} + ({index}){mask}){after}", dtype, every)

    def _axes_of(self, expr: Expr) -> frozenset[str]:
        used = symbols(expr)
        return frozenset(a.name for a in self.axes if any(r.var in used for r in a.loops))

    def _define(self, text: str, dtype: DType, axes: frozenset[str]) -> Tile:
        name = self.fresh()
        self.w(f"{name} = {text}")
        return Tile(name, dtype, axes)

    def _full(self, tile: Tile) -> str:
        """The tile with every axis present, so that reducing it counts each point."""
        if tile.axes >= {a.name for a in self.axes}:
            return tile.text
        shape = ", ".join(a.block for a in self.axes)
        return f"tl.broadcast_to({self._as_tensor(tile)}, ({shape}))"

    def _kept(self, text: str, nothing: str) -> str:
        """A tile in which points past the end contribute nothing to a reduction."""
        masks = self._mask(("x", "r"))
        return f"tl.where({' & '.join(masks)}, {text}, {nothing})" if masks else f"({text})"

    # -- results

    def _keep(self, buffer: str, write: Write, tile: Tile) -> None:
        self.values[buffer] = tile
        if buffer not in self.group.internal:
            self._write(buffer, self._index(write.index), self._axes_of(write.index), tile)

    def _store_late(self) -> None:
        self.w(*self.late)
        self.late.clear()

    def _store(self, write: Write, tile: Tile) -> None:
        buffer = write.buffers[0]
        if write.index_scalar is not None:
            at = self._value(write.index_scalar)
            self._write(buffer, at.text, at.axes | tile.axes, tile, "atomic_add" if write.adds else "store")
        else:
            self._keep(buffer, write, tile)

    def _write(self, buffer: str, index: str, axes: frozenset[str], tile: Tile, by: str = "store") -> None:
        missing = [a.name for a in self.axes if a.name not in axes and (a.name != "r" or "r" in tile.axes)]
        if missing:  # a pointer must have every axis the value has; only the axis' first point stores
            index += "".join(f" + 0 * {name}index" for name in missing)
            axes |= set(missing)
        masks = self._mask(axes)
        mask = f", {' & '.join(masks)}" if masks else ""
        dtype = self.buffers[buffer].type.dtype
        value = f"{self._as_tensor(tile)}.to(tl.int1)" if dtype is BOOL else tile.text
        store = self.w if self.has_rows and not self.is_looped else self.late.append
        order = ', sem="relaxed"' if by == "atomic_add" else ""
        store(f"tl.{by}({token(buffer)} + ({index}), {value}{mask}{order})")


def find_shifted(step: Pass, after: Pass) -> dict[Write, Write]:
    """Where the second pass only sums exp(x - max(x)): its sums, and their maxima in the first pass."""
    tops = {w.buffers[0]: w for w in analysis.writes_in(step.points) if w.reduce == "max"}
    found: dict[Write, Write] = {}
    for write in analysis.writes_in(after.points):
        apart = write.value.operands[0] if write.value.op == "exp" else write.value
        x, shift = apart.operands if apart.op == "sub" else (apart, apart)
        top = tops.get(str(shift.args[0])) if shift.op == "load" else None
        if write.reduce != "sum" or apart is write.value or top is None or top.value is not x:
            return {}
        found[write] = top
    return {} if after.rows else found


def _is_of_bf16(shifted: Scalar) -> bool:
    """The x in exp(x - max(x)) is."""
    x = shifted.operands[0].operands[0]
    return x.op == "cast" and x.operands[0].dtype is BF16


def find_addresses(group: Group) -> frozenset[Scalar]:
    """What is part of positions in memory and of nothing else: 32 bits hold it."""
    writes = analysis.writes_in(group.nests)
    found = {write.index_scalar for write in writes if write.index_scalar is not None}
    other = {write.value for write in writes} | {at for w in writes if w.reduce and (at := w.index_scalar)}
    for node in reversed([*analysis.scalars_of(group)]):
        if node.dtype is not I64 or node.op not in ("add", "mul", "index", "check_index"):
            other.add(node)
        for place, operand in enumerate(node.operands):
            is_part = node in found and node not in other and (node.op != "check_index" or place == 1)
            (found if is_part or node.op == "load_at" else other).add(operand)
    return frozenset(found - other)


ONE_PLUS: Final = ("erf", "tanh")


def find_shortened(nodes: Iterable[Scalar]) -> frozenset[Scalar]:
    plus: set[Scalar] = set()
    others: set[Scalar] = set()
    for node in nodes:
        short = _one_plus(node)
        for operand in node.operands:
            (plus if operand is short else others).add(operand)
    return frozenset(plus - others)


def _one_plus(node: Scalar) -> Scalar | None:
    """The erf or tanh in 1 + erf(x), as GELU has it."""
    if node.op != "add":
        return None
    a, b = node.operands
    if a.op == "const":
        a, b = b, a
    return a if a.op in ONE_PLUS and b.op == "const" and b.args[0] == 1 else None


# -- text ------------------------------------------------------------------------------------------


def _constant(value: object, dtype: DType) -> str:
    if dtype is BOOL:
        return f"({int(bool(value))} != 0)"
    if dtype.is_float:
        number = float(value)  # type: ignore[arg-type]
        if number != number or number in (float("inf"), float("-inf")):
            return f"float('{number}')"
        return repr(number)
    return str(int(value))  # type: ignore[call-overload]


_WORDS: Final = {
    "true": "(0 == 0)", "false": "(0 == 1)", "not": "({0} == 0)", "and": "({0} & {1})",
    "min": "tl.minimum({0}, {1})", "max": "tl.maximum({0}, {1})", "eq": "({0} == {1})", "lt": "({0} < {1})",
    "le": "({0} <= {1})", **dict.fromkeys(("floordiv", "floordiv_any"), "({0} // {1})"),
    **dict.fromkeys(("mod", "mod_any"), "({0} % {1})"),
}  # fmt: skip


def _text(expr: Expr) -> str:
    """An index as Triton text. Operands are non-negative, so // and % mean the same as in Python."""
    return spell(expr, _WORDS)
