"""Clusters: what the fuser joins, before they become frozen Groups.

nest -> Cluster          loop variables renamed d0, d1, ...; reads and writes by buffer and index
join(a, b) -> Cluster | Reason

a: for k < 512:              e[k] = exp(x[k])
b: for i < 8 reduce j < 64:  s[i] = sum(e[64*i + j])
join: for d0 < 8 | d1 < 64:  e[64*d0 + d1] = exp(x[64*d0 + d1]);  s[d0] = sum(e[64*d0 + d1])
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, TypeAlias

from dovetail.errors import Reason
from dovetail.ir.expr import ONE, ZERO, Expr, add, floordiv, linear_in, mul, product, row_major, substitute
from dovetail.ir.loop import SCANS, Nest, Range, Scalar, Write, index_value, moved_write
from dovetail.util.noun import Noun, replace

UNKNOWN: Final = None
"""The index of a gather or a scatter: computed from data."""


class Member(Noun):
    """A nest in a cluster. kind: point, reduce or row (see ir.schedule)."""

    nest: Nest
    env: dict[Expr, Expr]
    kind: str
    step: int

    def moved(self, env: dict[Expr, Expr]) -> Member:
        moved = {var: substitute(x, env) for var, x in self.env.items()}
        return Member(self.nest, moved, self.kind, self.step)


class Cluster(Noun, eq=False):
    members: tuple[Member, ...]
    ranges: tuple[Range, ...]
    outer: int
    reads: dict[str, frozenset[Expr | None]]
    writes: dict[str, Expr | None]
    position: int
    alone: bool = False
    """Scatters keep to themselves: their writes may collide. Scans do: they have results all along a row."""

    @property
    def has_reduce(self) -> bool:
        return "reduce" in [member.kind for member in self.members]

    @property
    def points(self) -> Expr:
        return product(r.size for r in self.ranges)


def make_cluster(nest: Nest, step: int) -> Cluster:
    env: dict[Expr, Expr] = {}
    ranges: list[Range] = []
    outer = 0
    for position, item in enumerate((*nest.ranges, *nest.reduce)):
        if item.size is ONE:
            env[item.var] = ZERO
            continue
        fresh = Range.over(f"d{len(ranges)}", item.size)
        env[item.var] = fresh.var
        ranges.append(fresh)
        outer += position < len(nest.ranges)
    reads: dict[str, set[Expr | None]] = {}
    for buffer, index in nest.loads:
        reads.setdefault(buffer, set()).add(None if index is None else substitute(index, env))
    writes: dict[str, Expr | None] = {}
    alone = False
    for write in nest.writes:
        computed = not write.reduce and write.index_scalar is not None
        alone |= computed or write.reduce in SCANS
        for buffer in write.buffers:
            if computed:
                reads.setdefault(buffer, set()).add(UNKNOWN)
            alone |= buffer in writes
            writes[buffer] = None if computed else substitute(write.index, env)
    kind = "reduce" if any(write.reduce for write in nest.writes) else "point"
    frozen = {buffer: frozenset(found) for buffer, found in reads.items()}
    return Cluster((Member(nest, env, kind, step),), tuple(ranges), outer, frozen, writes, step, alone)


# -- joining ---------------------------------------------------------------------------------------


class Alignment(Noun):
    """Both sides' variables over common ranges. `row` names the side that only runs per outer point."""

    ranges: tuple[Range, ...]
    outer: int
    left: dict[Expr, Expr]
    right: dict[Expr, Expr]
    row: str = ""


def join(a: Cluster, b: Cluster) -> Cluster | Reason:
    """Both in one, a's members first, or the reason why not. `a` may produce what `b` reads."""
    reason = Reason("S02", "the loops run over different domains")
    for alignment in _alignments(a, b):
        left, right = _moved(a, alignment.left), _moved(b, alignment.right)
        why = _why_not_forward(left, right, alignment)
        if why is None:
            return _joined(left, right, alignment)
        reason = why
    return reason


def _alignments(a: Cluster, b: Cluster) -> Iterator[Alignment]:
    if found := _split_outer(a, b, a.ranges, b.ranges):
        yield found
    for buffer in _shared(a, b):
        if found := _align_by_stride(a, b, buffer):
            yield found
    if a.has_reduce and not b.has_reduce and (found := _with_inner(a, b, "right")):
        yield found
    if b.has_reduce and not a.has_reduce and (found := _with_inner(b, a, "left")):
        yield replace(found, left=found.right, right=found.left)


def _shared(a: Cluster, b: Cluster) -> list[str]:
    """Buffers both touch, what a writes for b first."""
    written = [buffer for buffer in b.reads if buffer in a.writes]
    return written + [buffer for buffer in b.reads if buffer in a.reads and buffer not in a.writes]


def _split_outer(
    a: Cluster, b: Cluster, left: tuple[Range, ...], right: tuple[Range, ...]
) -> Alignment | None:
    """Order the common ranges outer first; None if the sides disagree on what is outer."""
    parts = refine(left, right)
    if parts is None:
        return None
    order: list[tuple[bool, int, int]] = []
    for k, (_, i, j) in enumerate(parts):
        at_left, at_right = a.ranges.index(left[i]), b.ranges.index(right[j])
        inner_left, inner_right = at_left >= a.outer, at_right >= b.outer
        if a.has_reduce and b.has_reduce and inner_left != inner_right:
            return None
        inner = inner_left if a.has_reduce else inner_right
        order.append((inner, at_left if a.has_reduce or not b.has_reduce else at_right, k))
    order.sort()
    outer = sum(not inner for inner, _, _ in order)
    return _aligned(parts, left, right, [k for _, _, k in order], outer)


def _aligned(
    parts: Parts, left: Sequence[Range], right: Sequence[Range], order: Sequence[int], outer: int
) -> Alignment:
    ranges = [Range.over(f"d{n}", parts[k][0]) for n, k in enumerate(order)]
    made = [each for _, each in sorted(zip(order, ranges))]
    lefts, rights = [i for _, i, _ in parts], [j for _, _, j in parts]
    return Alignment(tuple(ranges), outer, _rebuild(left, made, lefts), _rebuild(right, made, rights))


def _align_by_stride(a: Cluster, b: Cluster, buffer: str) -> Alignment | None:
    """Match loops that visit `buffer` alike although they are nested in another order."""
    at_a = a.writes.get(buffer) if buffer in a.writes else next(iter(a.reads[buffer]))
    at_b = next(iter(b.reads[buffer]))
    if at_a is None or at_b is None:
        return None
    left, right = by_stride(a.ranges, at_a), by_stride(b.ranges, at_b)
    return None if left is None or right is None else _split_outer(a, b, left, right)


def _with_inner(owner: Cluster, other: Cluster, row: str) -> Alignment | None:
    """The owner's outer ranges are refined; its inner ranges follow unchanged."""
    outer, old = owner.ranges[: owner.outer], owner.ranges[owner.outer :]
    parts = refine(outer, other.ranges)
    if parts is None:
        return None
    count = len(parts)
    found = _aligned(parts, outer, other.ranges, range(count), count)
    inner = tuple(Range.over(f"d{count + k}", r.size) for k, r in enumerate(old))
    left = found.left | {was.var: new.var for was, new in zip(old, inner)}
    return Alignment((*found.ranges, *inner), count, left, found.right, row)


def _moved(cluster: Cluster, env: dict[Expr, Expr]) -> Cluster:
    """The cluster over other variables."""
    if all(old is new for old, new in env.items()):
        return cluster
    place = lambda x: None if x is None else substitute(x, env)
    reads = {buffer: frozenset(map(place, found)) for buffer, found in cluster.reads.items()}
    writes = {buffer: place(x) for buffer, x in cluster.writes.items()}
    members = tuple(member.moved(env) for member in cluster.members)
    return replace(cluster, members=members, reads=reads, writes=writes)


def _why_not_forward(a: Cluster, b: Cluster, alignment: Alignment) -> Reason | None:
    """What b reads of a's results must be exactly what a computed at the same point."""
    inner = {r.var for r in alignment.ranges[alignment.outer :]}
    kinds = {buffer: m.kind for m in a.members for w in m.nest.writes for buffer in w.buffers}
    for buffer, found in b.reads.items():
        if buffer not in a.writes:
            continue
        if found != {a.writes[buffer]} or a.writes[buffer] is None:
            return Reason("S03", f"{buffer} is read at another position than it is written")
        if alignment.row == "right" and kinds[buffer] == "point":
            return Reason("S04", f"{buffer} has a whole row where one value is read")
    if inner and alignment.row == "left" and any(m.kind != "point" for m in a.members):
        return Reason("S04", "a reduction cannot run once per row of another")
    return None


def _joined(a: Cluster, b: Cluster, alignment: Alignment) -> Cluster:
    left, right = a.members, b.members
    if alignment.row == "left":
        left = tuple(replace(m, kind="row") for m in left)
    if alignment.row == "right":
        right = tuple(replace(m, kind="row") for m in right)
    reads = dict(a.reads)
    for buffer, found in b.reads.items():
        reads[buffer] = reads.get(buffer, frozenset()) | found
    # A buffer that both write is written in parts.
    parts: dict[str, Expr | None] = {buffer: UNKNOWN for buffer in a.writes if buffer in b.writes}
    members = (*left, *right)
    writes = a.writes | b.writes | parts
    return Cluster(members, alignment.ranges, alignment.outer, reads, writes, a.position, a.alone or b.alone)


# -- what the join means ---------------------------------------------------------------------------


def derive_levels(cluster: Cluster) -> tuple[int, ...]:
    """For each member, how many reductions of the cluster come before it."""
    ready: dict[str, int] = {}
    levels: list[int] = []
    for member in cluster.members:
        level = max((ready[buffer] for buffer in member.nest.read_buffers if buffer in ready), default=0)
        levels.append(level)
        ready |= dict.fromkeys(member.nest.written_buffers, level + (member.kind == "reduce"))
    return tuple(levels)


def rewritten(member: Member, cluster: Cluster) -> Nest:
    """The member's nest over the cluster's variables."""
    nest, outer, inner = member.nest, cluster.ranges[: cluster.outer], cluster.ranges[cluster.outer :]
    memo: dict[Scalar, Scalar] = {}
    writes = tuple([moved_write(_positioned(write, nest), member.env, memo, {}) for write in nest.writes])
    loops = {"point": ((*outer, *inner), ()), "reduce": (outer, inner)}.get(member.kind, (outer, ()))
    is_same = (*loops, writes) == (nest.ranges, nest.reduce, nest.writes)
    return nest if is_same else Nest(nest.name, *loops, writes, nest.loc, nest.origins)


def _positioned(write: Write, nest: Nest) -> Write:
    """An argmax counts positions in its own order of loops, whatever order they will run in."""
    if write.reduce not in ("argmax", "argmin"):
        return write
    place = row_major([r.var for r in nest.reduce], [r.size for r in nest.reduce])
    return replace(write, index_scalar=index_value(place))


# -- two iteration domains brought to common loop variables ----------------------------------------


Parts: TypeAlias = "tuple[tuple[Expr, int, int], ...]"
"""Sizes of common ranges, the outermost first, and the positions of the ranges they are of on either side."""


def divide(value: Expr, by: Expr) -> Expr | None:
    """value / by when that is exact, else None. Loops of no steps at all fit each other."""
    if by is ZERO:
        return ONE if value is ZERO else None
    quotient = floordiv(value, by)
    return quotient if mul(quotient, by) is value else None


@lru_cache(4096)
def refine(left: tuple[Range, ...], right: tuple[Range, ...]) -> Parts | None:
    """[k < 512], [i < 8, j < 64]  ->  (8, 0, 0), (64, 0, 1):  k = 64*d0 + d1,  i = d0,  j = d1

    Two domains, ordered lists of ranges, with the same number of points are the same walk over memory when
    one is a finer split of the other, which becomes common. None if the walks differ. (Layers repeat.)"""
    parts: list[tuple[Expr, int, int]] = []
    i, j = len(left) - 1, len(right) - 1
    a, b = (left[i].size if i >= 0 else ONE), (right[j].size if j >= 0 else ONE)
    while i >= 0 or j >= 0:
        if a is ONE and i >= 0:
            i -= 1
            a = left[i].size if i >= 0 else ONE
        elif b is ONE and j >= 0:
            j -= 1
            b = right[j].size if j >= 0 else ONE
        elif i < 0 or j < 0:
            return None
        elif (quotient := divide(b, a)) is not None:
            parts.append((a, i, j))
            a, b = ONE, quotient
        elif (quotient := divide(a, b)) is not None:
            parts.append((b, i, j))
            a, b = quotient, ONE
        else:
            return None
    return tuple(reversed(parts))


def _rebuild(old: Sequence[Range], new: Sequence[Range], owner: Sequence[int]) -> dict[Expr, Expr]:
    """Each old variable as a row-major combination of the new ones that it was split into."""
    env: dict[Expr, Expr] = {r.var: ZERO for r in old}
    scale = [ONE] * len(old)
    for part, position in zip(reversed(new), reversed(owner)):
        var = old[position].var
        env[var] = add(env[var], mul(part.var, scale[position]))
        scale[position] = mul(scale[position], part.size)
    return env


def by_stride(ranges: Sequence[Range], index: Expr) -> tuple[Range, ...] | None:
    """The ranges ordered as `index` walks memory, outermost first; None if it does not visit each
    point of the domain at its own address."""
    found: list[tuple[int, Range]] = []
    for item in ranges:
        if item.size is ONE:
            continue
        parts = linear_in(index, item.var)
        if parts is None or parts[0].lo <= 0:
            return None
        found.append((parts[0].lo, item))
    found.sort(key=lambda pair: -pair[0])
    return tuple([item for _, item in found])
