"""flex_attention as three ops, which on a GPU never have the scores in memory.

    flex_attention(q, k, v, lambda score, b, h, i, j: score + bias[h] * (i - j), masks, scale, {})
        scores  = pairs(q, k, scale)             f32[batch, heads, queries, keys]
        changed = that function of all of them, under vmap: plain operators
        out     = attend(changed, allowed, v)    softmax(where(allowed, changed, -inf)) @ v
    and the gradients of those, made of the same and of mix(weights, x): weights @ x or weights.mT @ x

Capture interprets flex_attention() in place of torch's. On a GPU all that is as large as the scores, and read
by `attend` and `mix` alone, is done inside of their kernels, which visit the blocks of the mask's tables.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Set
from typing import Any, Final

import torch

from dovetail.ir.expr import Expr
from dovetail.ir.graph import Graph, Node, nodes_in
from dovetail.ops.prims import ELEMENTWISE, kind_of
from dovetail.util.library import define_op

LOG2_E: Final = 1 / math.log(2)
WIDEST: Final = 256
STEP: Final = 16
"""Lines that the matrix units take."""


def everywhere(function: Callable[..., Any], scores: int) -> Callable[..., Any]:
    """A function of so many scores, and of a batch, a head, a query and a key, for all of them at once."""
    for axis in (3, 2, 1, 0):
        function = torch.vmap(function, (0,) * scores + tuple(0 if i == axis else None for i in range(4)))
    return function


def flex_attention(
    query: torch.Tensor, key: Any, value: Any, score_mod: Any, block_mask: Any, scale: Any, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`block_mask`: lengths; for keys, then for queries, how many blocks and which, and the same for blocks
    without a mask; others; the lines of a block; the mask."""
    key, value = (x.expand(len(query), -1, -1, -1) for x in (key, value))
    places = [torch.arange(size, device=query.device) for size in (*query.shape[:3], key.size(2))]
    walk = list(block_mask[2:10]), list(block_mask[-3:-1])
    find, use = PAIRS, ATTEND
    if (why := why_not_in_tiles(query, value, score_mod, *walk[1])) is not None:
        tell(why)
        find, use = _pairs, _attend
    allowed = everywhere(block_mask[-1], 0)(*places)
    scores = everywhere(score_mod, 1)(find(query, key, scale, allowed, *walk), *places)
    return use(scores, allowed, value, *walk)  # type: ignore[no-any-return]


def why_not_in_tiles(query: torch.Tensor, value: Any, score_mod: Any, *blocks: int) -> str | None:
    """Why all scores have to be in memory; "" where that goes without saying."""
    if query.device.type != "cuda":
        return ""
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"matrix units have no {query.dtype}"
    if max(query.size(3), value.size(3)) > WIDEST or blocks[0] % STEP or blocks[1] % STEP:
        return f"heads are wider than {WIDEST}, or blocks are no multiples of {STEP}"
    return None


def tell(why: str) -> None:
    """Capture reports it."""


# -- the ops -----------------------------------------------------------------------------------------


def _spread(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(like.size(1) // x.size(1), 1)


def _pairs(a: torch.Tensor, b: torch.Tensor, scale: float, *_: Any) -> torch.Tensor:
    """All products of a line of a and a line of b; several heads of a share one of b."""
    return (a @ _spread(b, a).mT).to(torch.promote_types(a.dtype, torch.float32)) * scale


def _attend(scores: torch.Tensor, allowed: torch.Tensor, value: torch.Tensor, *_: Any) -> Any:
    """As in torch, the statistics are logarithms to the base 2, and a query without keys gets zeros."""
    scores = torch.where(allowed, scores, -math.inf)
    weights = torch._safe_softmax(scores, -1).to(value.dtype)
    return weights @ _spread(value, scores), scores.logsumexp(-1) * LOG2_E, scores.amax(-1) * LOG2_E


def _mix(
    weights: torch.Tensor, allowed: Any, x: torch.Tensor, tables: Any, blocks: Any, scale: float, heads: int
) -> torch.Tensor:
    """For each query the lines of its keys; for each key of so many `heads` the lines of its queries."""
    weights = weights.to(x.dtype)
    if not heads:
        return weights @ _spread(x, weights) * scale
    return (weights.mT @ x).unflatten(1, (heads, -1)).sum(2) * scale


_WALK: Final = "Tensor?[] tables, int[] blocks"
PAIRS: Final = define_op(f"pairs(Tensor a, Tensor b, float scale, Tensor allowed, {_WALK}) -> Tensor", _pairs)
ATTEND: Final = define_op(
    f"attend(Tensor scores, Tensor allowed, Tensor value, {_WALK}) -> (Tensor, Tensor, Tensor)", _attend)
MIX: Final = define_op(
    f"mix(Tensor weights, Tensor allowed, Tensor x, {_WALK}, float scale, int heads) -> Tensor", _mix)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    made = output if isinstance(output, tuple) else ()
    ctx.save_for_backward(*(x for x in (*inputs, *made) if isinstance(x, torch.Tensor)))
    ctx.others = [x for x in inputs if not isinstance(x, torch.Tensor)]


def _none(tables: list[Any], blocks: Any) -> tuple[Any, None]:
    """Their gradients; a list that is not all tensors counts as one thing."""
    return (None if None in tables else [None] * len(tables)), None


def _pairs_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (a, b, allowed), (scale, *walk) = ctx.saved_tensors, ctx.others
    into_b = MIX(grad, allowed, a, *walk, scale, b.size(1))
    return MIX(grad, allowed, b, *walk, scale, 0), into_b, None, None, *_none(*walk)


def _attend_backward(ctx: Any, grad: torch.Tensor, grad_lse: torch.Tensor, _: Any) -> tuple[Any, ...]:
    """Weights are made again, from the scores and the logarithms of their sums."""
    (scores, allowed, value, out, lse, _), walk = ctx.saved_tensors, ctx.others
    shift = torch.where(lse == -math.inf, 0.0, lse)[..., None]
    weights = torch.where(allowed, torch.exp2(scores * LOG2_E - shift), 0.0)
    common = (out.to(scores.dtype) * grad.to(scores.dtype)).sum(-1) - grad_lse * LOG2_E
    into_scores = weights * (PAIRS(grad, value, 1.0, allowed, *walk) - common[..., None])
    return into_scores, None, MIX(weights, allowed, grad, *walk, 1.0, value.size(1)), *_none(*walk)


def _mix_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (weights, allowed, x), (*walk, scale, heads) = ctx.saved_tensors, ctx.others
    into_x = MIX(weights, allowed, grad, *walk, scale, 0 if heads else x.size(1))
    both = (x, grad) if heads else (grad, x)
    return PAIRS(*both, scale, allowed, *walk), None, into_x, *_none(*walk), None, None


for _op, _backward in ((PAIRS, _pairs_backward), (ATTEND, _attend_backward), (MIX, _mix_backward)):
    torch.library.register_autograd(_op, _backward, setup_context=_keep)


# -- what of it need not be in memory ----------------------------------------------------------------


_READ: Final = {"attention": slice(2), "pairs": slice(3, 4), "gather": slice(1, None)}
"""Arguments that may be as large as all scores."""


def find_virtual(graph: Graph, others_count: bool = True) -> Set[Node]:
    """What is as large as all scores and worked out where `attend` and `mix` read it. What others read (a
    library call that score_mod makes, a sum over all scores) is in memory, and the pairs it is made of."""
    found: dict[Node, tuple[Expr, ...]] = {}
    elsewhere = set(nodes_in(graph.outputs)) if others_count else set()
    for node in reversed(graph.nodes):
        kind, lines = kind_of(node.op), () if node in elsewhere else found.get(node, ())
        if kind == "attention":
            lines = nodes_in(node.args)[0].tensor.shape[-2:]
        read = nodes_in(node.args[_READ.get(str(kind), slice(None))]) if lines else []
        inside = [x for x in read if kind_of(x.op) in ELEMENTWISE and x.tensor.shape[-2:] == lines]
        found |= dict.fromkeys(inside, lines)
        elsewhere.update(x for x in node.operands if x not in inside and others_count)
    return found.keys() - elsewhere
