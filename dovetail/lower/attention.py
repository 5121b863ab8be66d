"""Attention as a loop nest whose kernel makes the scores tile by tile.

    pairs(q, k, 0.125)             0.125 * dot(q[b, h, i, e], k[b, h, j, e]), wherever it is read
    attend(scores, allowed, v)     for b, h, i reduce j, e, n0, n1:
                                       out[b, h, i, e] = attend(scores, allowed, v[b, h, j, e], 1, 128, 128)
    mix(weights, allowed, x)       the same; over queries it is for b, k, j reduce g, i, e, n0, n1

`dot` sums over e, a loop along a head. A program of the kernel has some lines, queries or keys, and walks
over the others in blocks of the mask, of which the two numbers are the sizes. After them, visit(number of
blocks, the n-th block) says which; those of the second visit need no mask. Codegen knows the loops by name.
"""
from __future__ import annotations

import math
from typing import Any, cast

from dovetail.ir import loop as ir
from dovetail.ir.expr import ONE, ZERO, Expr, as_expr, floordiv, symbols
from dovetail.ir.graph import Node
from dovetail.ir.types import F32, I64
from dovetail.lower.index import Index, element_of, index_exprs
from dovetail.lower.lazy import Lazy, cast_to, window


def _load(ref: ir.BufferRef, *index: Expr) -> ir.Scalar:
    """A table may have one line for all batches or heads."""
    places = tuple(ZERO if size is ONE and at.hi else at for at, size in zip(index, ref.type.shape))
    return ir.load(ref.buffer, element_of(ref, places), ref.type.dtype)


def _along(size: Expr) -> ir.Range:
    """The loop along a head: one variable for all of that size."""
    return ir.Range.over(f"e{size}", size)


def lower_pairs(low: Any, node: Node) -> Lazy:
    """A sum of products where somebody else reads it."""
    left, right = (low.in_memory(arg, False) for arg in node.args[:2])
    e, shared = _along(left.type.shape[3]), floordiv(left.type.shape[1], right.type.shape[1])
    scale = ir.constant(cast(float, node.args[2]), F32)

    def at(index: Index) -> ir.Scalar:
        b, h, i, j = index
        lines = _load(left, b, h, i, e.var), _load(right, b, floordiv(h, shared), j, e.var)
        return ir.scalar("dot", lines, F32)

    made = Lazy(node.tensor, at, None, (node.name,))
    if node in low.stored:
        loops = [ir.Range.over(name, size) for name, size in zip("bhij", node.tensor.shape)]
        ref, place = low.add_buffer(low.fresh(f"{node.name}_sum"), node.tensor), tuple(r.var for r in loops)
        factors = tuple(cast_to(x, F32) for x in at(place).operands)
        write = ir.Write((ref.buffer,), element_of(ref, place), ir.scalar("mul", factors, F32), "sum")
        low.add_nest(node, ref.buffer, loops, [e], [write], (node.name,))
        made = window(ref)
    return Lazy(node.tensor, lambda index: ir.scalar("mul", (made.at(index), scale), F32), None, (node.name,))


def lower_attention(low: Any, node: Node) -> None:
    """One nest for all that belong together, at the place of the last."""
    scores, _, _, tables, blocks, *more = cast("tuple[Any, ...]", node.args)
    b, h, i, j = (ir.Range.over(name, size) for name, size in zip("bhij", scores.tensor.shape))
    rows, columns, own, head = i, j, h, h.var
    refs = [x and low.in_memory(x, False) for x in tables]
    if more and more[1]:
        rows, columns, own, refs, blocks = j, i, ir.Range.over("k", as_expr(more[1])), refs[4:], blocks[::-1]
        group = floordiv(h.size, more[1])
        head = own.var if group is ONE else own.var * group + ir.Range.over("g", group).var
    way = [ir.constant(n, I64) for n in blocks]
    for n, (count, which) in enumerate(zip(refs[:4:2], refs[1:4:2])):
        if count is not None:
            at = b.var, head, floordiv(rows.var, blocks[0]), ir.Range.over(f"n{n}", which.type.shape[3]).var
            way.append(ir.scalar("visit", (_load(count, *at), _load(which, *at)), I64))
    nodes, writes, outer = _together(low, node), list[ir.Write](), (b, own, rows)
    for each in nodes:
        x, (body, holds) = low.in_memory(each.args[2], False), (low.value(arg) for arg in each.args[:2])
        body, holds = (value.at((b.var, head, i.var, j.var)) for value in (body, holds))
        if not more:
            body = ir.scalar("where", (holds, body, ir.constant(-math.inf, F32)), F32)
        e = _along(x.type.shape[3])
        line = _load(x, b.var, floordiv(head, floordiv(h.size, x.type.shape[1])), columns.var, e.var)
        scale = ir.constant(cast(float, each.args[5]) if more else 1.0, F32)
        value = ir.scalar("mix" if more else "attend", (body, holds, line, scale, *way), F32)
        types: Any = (each.type,) if more else each.type
        names = [each.name] if more else [low.fresh(f"{each.name}_{n}") for n in range(len(types))]
        made = [low.add_buffer(name, type, holds=each) for name, type in zip(names, types)]
        low.env[each] = window(made[0]) if more else tuple(map(window, made))
        place = tuple(loop.var for loop in (*outer, e))
        writes += [ir.Write((ref.buffer,), element_of(ref, place[: ref.type.ndim]), value, ir.ATTENTION)
                   for ref in made]  # fmt: skip
    used = {s for expr in index_exprs(write.value for write in writes) for s in symbols(expr)}
    inner = used.difference(loop.var for loop in outer)
    bounds = {s.name: cast(Expr, s.args[3]) for s in inner if s.args[3]}  # the sizes of shapes have none
    loops = tuple(ir.Range.over(*pair) for pair in sorted(bounds.items()))
    if nodes:
        origins = tuple(each.name for each in nodes)
        low.steps.append(ir.Nest(node.name, outer, loops, tuple(writes), node.loc, origins))


def _together(low: Any, node: Node) -> list[Node]:
    """Sums over queries are the gradients of keys and of values: one walk makes both, unless somebody needs
    the first before. Nothing where this is not the last of them."""
    key = lambda each: len(each.args) > 6 and each.args[6] and (each.op, each.args[1], *each.args[3:5])
    if not key(node):
        return [node]
    order, users = {each: n for n, each in enumerate(low.graph.nodes)}, low.graph.users()
    same = [each for each in order if key(each) == key(node)]
    last = order[same[-1]]
    joined = [each for each in same if order[each] == last or all(order[user] > last for user in users[each])]
    return [node] if node not in joined else joined if order[node] == last else []
