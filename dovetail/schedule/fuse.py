"""Decide which nests share a kernel.

    Loops -> Schedule
    a[i] = x[i] + 1 ; b[i] = a[i] * 2      becomes one Group with `a` internal

Steps are taken in order. A nest first joins the kernels that produce what it reads (largest buffer
first), then one that reads what it reads. Every cluster has a position in the original order, and a
join is legal when the result can stand at one of the two positions with all its inputs before it and
all its readers after it; so no cycle can arise and no search for paths is needed. Work per nest is
bounded by its number of reads.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from dovetail.errors import Reason
from dovetail.events import EVENTS
from dovetail.ir.expr import ONE, Expr, product, symbols
from dovetail.ir.loop import ATTENTION, BufferRef, Extern, Loops, Nest, Range
from dovetail.ir.schedule import Group, Schedule
from dovetail.ir.types import F32, Device, TensorType
from dovetail.options import Options
from dovetail.schedule.cluster import Cluster, buffer_sizes, derive_levels, join, make_cluster, rewritten
from dovetail.util.library import has_mkldnn
from dovetail.util.noun import Noun, field, replace

ROW_BYTES: Final = 65536
"""A row kept inside a kernel between two passes must fit in this (half of a second-level cache share)."""
LONG_ROW: Final = 32768
FEW_ROWS: Final = 16
SMALL: Final = 4096
"""Elements below which the cost of a kernel is its launch."""
MOST_BUFFERS: Final = 100
START: Final = (-1, 0)
"""The time before the first step."""
HORIZON: Final = 256
"""How far apart two siblings may be: joining them keeps their results alive in between."""
NEAR: Final = 12
"""The same where memory matters more."""


class Fuser(Noun, frozen=False):
    options: Options
    sizes: dict[str, int]
    devices: dict[str, Device]
    clusters: dict[int, Cluster] = field(default_factory=dict)
    """By position."""
    producers: dict[str, set[int]] = field(default_factory=dict)
    """Buffer -> positions of what writes it; the parts of a concatenation have one each."""
    readers: dict[str, set[int]] = field(default_factory=dict)
    declined: list[tuple[str, Reason]] = field(default_factory=list)

    def add(self, nest: Nest, step: int) -> None:
        cluster = make_cluster(nest, step)
        self._register(cluster)
        if not self.options.fuse:
            return
        wanted = sorted(cluster.reads, key=lambda buffer: -self.sizes.get(buffer, 0))
        here, most = step, HORIZON if self.options.activation_memory_budget >= 1 else NEAR
        for buffer in () if cluster.alone else wanted:
            for other in sorted(self.producers.get(buffer, ())):
                here = self.try_joining(other, here, nest, is_sibling=False)
        for buffer in wanted:
            for other in sorted(self.readers.get(buffer, ()), reverse=True)[:3]:
                if other != here and abs(other - here) < most:
                    here = self.try_joining(other, here, nest, is_sibling=True)

    def note(self, position: int, reads: Iterable[str], writes: Iterable[str]) -> None:
        for names, table in ((reads, self.readers), (writes, self.producers)):
            for buffer in names:
                table.setdefault(buffer, set()).add(position)

    def _register(self, cluster: Cluster) -> None:
        self.clusters[cluster.position] = cluster
        self.note(cluster.position, cluster.reads, cluster.writes)

    def try_joining(self, other: int, here: int, nest: Nest, is_sibling: bool) -> int:
        """Join the clusters at two positions if that is allowed; the position of nest's cluster after it."""
        if other == here or other not in self.clusters:
            return here
        first, second = (self.clusters[min(other, here)], self.clusters[max(other, here)])
        result = self.why_not_fuse(first, second, is_sibling)
        if isinstance(result, Reason):
            if not is_sibling:
                self.declined.append((f"{first.members[-1].nest.name} + {nest.name}", result))
            return here
        for old in (first, second):
            del self.clusters[old.position]
            for buffer in old.reads:
                self.readers[buffer].discard(old.position)
            for buffer in old.writes:
                self.producers[buffer].discard(old.position)
        self._register(result)
        return result.position

    def why_not_fuse(self, first: Cluster, second: Cluster, is_sibling: bool) -> Cluster | Reason:
        """The joined cluster, or why there is none."""
        if (first.alone or second.alone) and not self._scatter_apart(first, second):
            return Reason("S01", "a scatter or a scan has a kernel of its own")
        if len({self.devices[name] for name in (*first.writes, *second.writes)}) > 1:
            return Reason("S11", "on different devices")
        both = first.writes.keys() & second.writes.keys()
        if both & (first.reads.keys() | second.reads.keys()):
            return Reason("S10", "both write parts of a buffer that one of them reads")
        if len(first.members) + len(second.members) > self.options.max_fusion_size:
            return Reason("S05", f"more than {self.options.max_fusion_size} loop nests")
        if len(first.reads | second.reads | first.writes | second.writes) > MOST_BUFFERS:
            return Reason("S06", f"more than {MOST_BUFFERS} buffers")
        position = self._position(first, second)
        if position is None:
            return Reason("S07", "something in between depends on the first and feeds the second")
        joined = join(first, second)
        if isinstance(joined, Reason):
            return joined
        if is_sibling and (why := self._why_not_share(first, second, joined)):
            return why
        return why if (why := _why_not_parallel(joined)) else replace(joined, position=position)

    def _scatter_apart(self, first: Cluster, second: Cluster) -> bool:
        """On a GPU two scatters of the same points to different places are one kernel."""
        where = {self.devices[name].kind for name in (*first.writes, *second.writes)}
        collide = (first.writes.keys() & second.reads.keys()) | (second.writes.keys() & first.reads.keys())
        return first.alone and second.alone and where == {"cuda"} and not collide

    def _position(self, first: Cluster, second: Cluster) -> int | None:
        a, b = first.position, second.position
        feeds = [p for x in second.reads for p in self.producers.get(x, ()) if p != b]
        if all(p <= a for p in feeds):
            return a
        uses = [p for x in first.writes for p in self.readers.get(x, ()) if p != a]
        return b if all(p >= b for p in uses) else None

    def _why_not_share(self, first: Cluster, second: Cluster, joined: Cluster) -> Reason | None:
        """Siblings must have a read in common that is worth a pass, or be tiny."""
        points = joined.points
        if points.is_const and points.value <= SMALL:
            return None
        for x in first.reads:
            if x in second.reads and (len(joined.reads[x]) == 1 or first.reads[x] & second.reads[x]):
                again = _repeats(joined, joined.reads[x])
                if self.sizes.get(x, 0) * again >= max(points.lo, 1) * 2:
                    return None
        return Reason("S08", "no large read in common")


def _repeats(joined: Cluster, found: frozenset[Expr | None]) -> int:
    """How often a kernel with reductions reads again what it has read, walk by walk."""
    used = {symbol for index in found if index is not None for symbol in symbols(index)}
    if not joined.has_reduce or any(r.var not in used for r in joined.ranges[joined.outer :]):
        return 1
    return product(r.size for r in joined.ranges[: joined.outer] if r.var not in used).lo


def _why_not_parallel(joined: Cluster) -> Reason | None:
    """Few long rows are split among threads, which leaves nothing to run after a reduction but rows."""
    if not joined.has_reduce:
        return None
    rows = product(r.size for r in joined.ranges[: joined.outer])
    length = product(r.size for r in joined.ranges[joined.outer :])
    if not (rows.is_const and length.is_const and rows.value < FEW_ROWS and length.value >= LONG_ROW):
        return None
    levels = derive_levels(joined)
    late = [m for m, level in zip(joined.members, levels) if level and m.kind != "row"]
    return Reason("S09", "a few long rows: the reduction is split among threads") if late else None


# -- the result ------------------------------------------------------------------------------------


def schedule(loops: Loops, options: Options) -> Schedule:
    loops = choose_libraries(loops)
    fuser = Fuser(options, buffer_sizes(loops), {b.name: b.type.device for b in loops.buffers})
    externs: dict[int, Extern | Group] = {}
    for step, item in enumerate(loops.steps):
        if isinstance(item, Extern) or item.writes[0].reduce == ATTENTION:
            externs[step] = item if isinstance(item, Extern) else Group.alone(item)
            fuser.note(step, item.read_buffers, item.written_buffers)
        else:
            fuser.add(item, step)
    for subject, why in fuser.declined:
        EVENTS.emit("fusion", unit=loops.name, subject=subject, code=why.code, text=why.text)
    _join_updates(loops, fuser)
    kept = loops.returned
    groups = {position: make_group(cluster, kept, fuser) for position, cluster in fuser.clusters.items()}
    at: dict[int, Group | Extern] = {**externs, **groups}
    order = _freeing_soon(loops, _updates_last(loops, at, fuser), at, fuser.sizes)
    return Schedule(loops, tuple(at[p] for p in order), tuple(fuser.declined))


def _join_updates(loops: Loops, fuser: Fuser) -> None:
    """Small new values of inputs that nothing reads (the counters of a model's layers) are one kernel."""
    here, bases = None, dict(loops.updates)
    for position in sorted(fuser.clusters):
        cluster = fuser.clusters[position]
        if _bases(cluster, bases, fuser) and cluster.points.is_const and cluster.points.value <= SMALL:
            last = cluster.members[-1].nest
            here = position if here is None else fuser.try_joining(here, position, last, is_sibling=True)


def _updates_last(loops: Loops, at: dict[int, Group | Extern], fuser: Fuser) -> list[int]:
    """New values of inputs that nothing reads come after the last read of the old ones: then they can be
    written over them."""
    late: dict[int, int] = {}
    bases = dict(loops.updates)
    for position, cluster in fuser.clusters.items():
        if old := _bases(cluster, bases, fuser):
            late[position] = max([position, *(p for name in old for p in fuser.readers.get(name, ()))])
    return sorted(at, key=lambda position: (late.get(position, position), position in late))


def _freeing_soon(
    loops: Loops, order: list[int], at: dict[int, Group | Extern], sizes: dict[str, int]
) -> list[int]:
    """A kernel or a product after which more memory is free than before runs as soon as it can."""
    if any(isinstance(step, Extern) and step.aliases for step in at.values()):
        return order  # who shares memory with whom is not known here
    lasting = {buffer.name for buffer in loops.buffers if buffer.kind != "temp"}
    used = [(at[p].read_buffers, at[p].written_buffers) for p in order]
    last = {name: k for k, (reads, writes) in enumerate(used) for name in (*reads, *writes)}
    written: dict[str, tuple[int, int]] = {}
    touched: dict[str, tuple[int, int]] = {}
    when: dict[int, tuple[int, int]] = {}
    """The time of each step: after which one of the old order, and which it is itself."""
    for k, (position, (reads, writes)) in enumerate(zip(order, used)):
        step, time = at[position], (k, k)
        dying = [b for b in reads if last[b] == k and b not in lasting and b not in writes]
        if dying and (isinstance(step, Group) or step.into):
            inner = step.internal if isinstance(step, Group) else ()
            made = sum([sizes[b] for b in writes if b not in written and b not in inner])
            if sum([sizes[b] for b in dying]) > made:
                before = [written.get(b, START) for b in reads] + [touched.get(b, START) for b in writes]
                time = (max(before + [touched[b] for b in dying])[0], k)
        when[position] = time
        written |= dict.fromkeys(writes, time)
        touched |= dict.fromkeys(writes, time) | {b: max(time, touched.get(b, START)) for b in reads}
    return sorted(order, key=when.__getitem__)


def _bases(cluster: Cluster, bases: dict[str, str], fuser: Fuser) -> list[str]:
    """The inputs that a cluster makes new values of, where that is all it does."""
    if any(name not in bases or fuser.readers.get(name) for name in cluster.writes):
        return []
    return [bases[name] for name in cluster.writes]


def make_group(cluster: Cluster, kept: set[str], fuser: Fuser) -> Group:
    """Freeze a cluster: readable variable names, buffers that stay inside, levels."""
    levels = derive_levels(cluster)
    count = cluster.outer
    env: dict[Expr, Expr] = {}
    ranges: list[Range] = []
    for k, item in enumerate(cluster.ranges):
        ranges.append(Range.over(k if k < count else f"r{k - count}", item.size))
        env[item.var] = ranges[-1].var
    members = tuple(member.moved(env) for member in cluster.members)
    named = replace(cluster, ranges=tuple(ranges), members=members)
    nests = tuple(rewritten(member, named) for member in members)
    internal = _internal(named, levels, kept, fuser)
    names = list(dict.fromkeys(nest.name for nest in nests))
    name = "_".join(names if len(names) <= 3 else [names[0], names[-1]])
    return Group(name, nests, count, internal, tuple(ranges), levels)


def _internal(cluster: Cluster, levels: tuple[int, ...], kept: set[str], fuser: Fuser) -> tuple[str, ...]:
    """Buffers nobody else reads. One that outlives its pass over the row must fit beside it; a GPU's kernel
    computes it again instead."""
    length = product(r.size for r in cluster.ranges[cluster.outer :])
    written: dict[str, tuple[int, str]] = {}
    later: set[str] = set()
    for member, level in zip(cluster.members, levels):
        for buffer in member.nest.read_buffers:
            if buffer in written and written[buffer] != (level, "row") and written[buffer][0] < level:
                later.add(buffer)
        written |= dict.fromkeys(member.nest.written_buffers, (level, member.kind))
    found: list[str] = []
    for buffer, (_, kind) in written.items():
        if buffer in kept or fuser.readers.get(buffer, set()) - {cluster.position}:
            continue
        if cluster.alone or fuser.producers[buffer] != {cluster.position}:
            continue
        is_kept = kind == "point" and buffer in later and fuser.devices[buffer].kind == "cpu"
        if is_kept and not (length.is_const and length.value * 8 <= ROW_BYTES):
            continue
        found.append(buffer)
    return tuple(found)


# -- the library function for a product of matrices ------------------------------------------------


FEWEST_ROWS: Final = 32
SMALLEST_PRODUCT: Final = 1 << 22
LINEAR: Final = "mkldnn._linear_pointwise.default"


def choose_libraries(loops: Loops) -> Loops:
    """o = aten.mm(x, w.t()) becomes o = mkldnn._linear_pointwise(x, w, ...): oneDNN is a tenth faster than
    the BLAS behind aten.mm once the product is large enough to hide its setup."""
    if loops.device.kind != "cpu" or not has_mkldnn("_linear_pointwise"):
        return loops
    steps = tuple(_linear(step) if isinstance(step, Extern) else step for step in loops.steps)
    return replace(loops, steps=steps)


def _linear(extern: Extern) -> Extern:
    if extern.op != "aten.mm.default" or extern.kwargs or not extern.into:
        return extern
    x, w = extern.args
    if not isinstance(x, BufferRef) or not isinstance(w, BufferRef) or not is_worth_it(x.type, w.type):
        return extern
    turned = replace(w.type, shape=w.type.shape[::-1], stride=w.type.stride[::-1])
    args = (x, replace(w, type=turned), None, "none", (), "")
    return replace(extern, op=LINEAR, args=args, into=False)


def is_worth_it(x: TensorType, w: TensorType) -> bool:
    """Large, single precision, rows of x one after another, w dense in either order."""
    if x.dtype is not F32 or w.dtype is not F32 or not x.is_contiguous:
        return False
    sizes = (*x.shape, w.shape[1])
    if not all(size.is_const for size in sizes):
        return False
    rows, depth, columns = (size.value for size in sizes)
    dense = w.is_contiguous or (w.stride[0] is ONE and w.stride[1] is w.shape[0])
    return dense and rows >= FEWEST_ROWS and rows * depth * columns >= SMALLEST_PRODUCT
