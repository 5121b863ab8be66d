"""SPEC C3, C9: items of tensors at places that only the graph knows, and what is built on them."""
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import dovetail
from tests.behaviour.running import ANY, Suite

suite = Suite()
case = suite.case
PLACES = [torch.tensor(i) for i in (1, 2, -1)]
X = torch.randn(4, 4)


def calls(wants_grad: bool = True) -> list[Any]:
    return [(X.clone().requires_grad_(wants_grad), i) for i in PLACES]


@case("C3", recompiles=0)
def row_and_column_at_a_place() -> Any:
    return lambda x, i: (x[i] * 2, x[:, i].sum() + x[i, 0] + x[None, ..., i].mean(), -x[i, 1:, None]), calls()


def masked_calls() -> list[Any]:
    return [(torch.randn(5, 3, requires_grad=True),) for _ in range(2)] + [(torch.zeros(5, 3),)]


@case("C3", recompiles=0)
def one_learned_value_for_all_items_of_a_mask() -> Any:
    def f(x: torch.Tensor, token: torch.Tensor) -> Any:
        y, z = x * 2, x.sin()
        y[x[:, 0] > 0] = token
        z[x > 0.5] = token.mean().double()
        z[x[:, 0] < 0, 1] = token[0]
        return y, z

    return f, [(torch.randn(5, 3, requires_grad=True), torch.randn(3, requires_grad=True)) for _ in range(3)]


@case("C3", breaks=ANY)
def masks_that_differ_in_how_they_are_made() -> Any:
    def f(x: torch.Tensor) -> Any:
        x, y = x.detach(), x.detach() * 2
        y[torch.ge(x, other=0.5)] = x[torch.ge(x, other=-0.5)]
        return y

    def g(x: torch.Tensor) -> Any:
        x, y = x.detach(), x.detach() * 2
        y[torch.isclose(x, y, 0.0, 9.0)] = x[torch.isclose(x, y, 0.0)]
        return y

    return lambda x, first: (f if first else g)(x), [(*call, first) for call in masked_calls() for first in (True, False)]


@case("C3", recompiles=0)
def learned_values_added_to_items_of_a_mask() -> Any:
    def f(x: torch.Tensor, labels: torch.Tensor, token: torch.Tensor) -> Any:
        x = x * 1
        x[labels == -1] = 0.0
        x[labels == -1] += token
        x[labels == 1] *= token[0]
        return x

    x, token = torch.randn(5, 3, requires_grad=True), torch.randn(1, 3, requires_grad=True)
    return f, [(x, labels, token) for labels in (torch.tensor([0, 1, -1, 1, 0]), torch.zeros(5).long())]


@case("C3", breaks=2)
def products_of_items_of_a_mask() -> Any:
    """C code must never see what stands in for the items."""

    def f(x: torch.Tensor) -> Any:
        rows = x[:, 0] > -9
        kinds = isinstance(x[rows], torch.Tensor), type(x[rows]) is torch.Tensor
        return x[rows] @ torch.ones(3, 2), kinds

    return f, masked_calls()


@case("C3", recompiles=1)
def items_of_a_mask_changed_in_place() -> Any:
    def f(x: torch.Tensor) -> Any:
        y, rows = x * 2, x[:, 0] > 0
        y[y > 1] += 3.0
        y[rows] = torch.exp(-x[rows]) * x[rows] + 1
        y[~rows, 1:] *= 0.5
        y[x < -0.3] = 1 / x[x < -0.3].abs().sqrt()
        y[rows.view(-1)] = x[rows.view(-1)]
        return y

    return f, masked_calls()


@case("C3", recompiles=1)
def items_of_a_mask_summed() -> Any:
    def f(x: torch.Tensor) -> Any:
        m = x > 0.2
        counts = x.long()[m].sum(), x[x[:, 0] > 0].bfloat16().mean()
        rows = x[x[:, 1] > 0].mean(0), x[x[:, 1] > 0].sum(dim=0)
        return x[m].sum(), (x[m].log() ** 2).mean(), F.mse_loss(x[m], x.exp()[m]), counts, rows

    return f, masked_calls()


@case("C3", recompiles=0)
def loss_of_the_labelled_tokens() -> Any:
    def f(logits: torch.Tensor, labels: torch.Tensor) -> Any:
        kept = labels >= 0
        loss = F.cross_entropy(logits[kept], labels[kept], label_smoothing=0.1)
        return loss + F.smooth_l1_loss(logits[kept], logits.detach()[kept] * 2, reduction="sum")

    labels = [torch.tensor([[1, -1, 2], [0, -5, -1]]), torch.full((2, 3), -1)]
    return f, [(torch.randn(2, 3, 4, requires_grad=True), label) for label in labels]


@case("C3", breaks=1)
def items_of_a_mask_multiplied() -> Any:
    def f(x: torch.Tensor) -> Any:
        y = x.exp()
        items = y[y > 1.0] * 2
        return torch.outer(items, items).sum() + y

    return f, masked_calls()[:1]


@case("C3", breaks=1)
def items_of_a_mask_that_was_changed() -> Any:
    def f(x: torch.Tensor) -> Any:
        m = x > 0
        y, items = x * 1, x[m]
        m.logical_not_()
        y[m] = 2.0
        return y, items.sum()

    return f, masked_calls()[2:]


@case("C3", breaks=1)
def rows_put_by_a_mask() -> Any:
    def f(x: torch.Tensor, m: torch.Tensor) -> Any:
        y = x.exp() + 1
        y[m] = x[:2] * 3  # its gradient has as many rows as the mask says
        return y.sin() * 2

    return f, [(X.clone().requires_grad_(), torch.tensor(m)) for m in ([True, False, True, False], [False, False, True, True])]


@case("C3", recompiles=0)
def row_of_the_largest() -> Any:
    return lambda x, i: x[x[:, 0].argmax()].exp() + x[i.int()], calls()


@case("C3", recompiles=0)
def assigned_at_a_place() -> Any:
    def f(x: torch.Tensor, i: torch.Tensor) -> Any:
        y = x.clone()
        y[i] = 5
        y[:, i] = x[0] * 2
        y[i, i] += 1
        y[i] *= x[i]
        return y

    return f, calls()


@case("C3", recompiles=0)
def assigned_to_an_argument() -> Any:
    def f(x: torch.Tensor, i: torch.Tensor) -> Any:
        x[i] = x[0].double() + 1
        return x.sum()

    return f, calls(False)


@case("C3", breaks=1)
def view_at_a_place_is_written() -> Any:
    def f(x: torch.Tensor, i: torch.Tensor) -> Any:
        row = x[i]
        row += 1
        return x * 2

    return f, calls(False)


@case("C3", breaks=1)
def tensor_is_written_after_its_view() -> Any:
    def f(x: torch.Tensor, i: torch.Tensor) -> Any:
        row = x[i]
        x.add_(1)
        return row * 2

    return f, calls(False)


@case("C3", breaks=1, same_storage=True)
def view_at_a_place_is_returned() -> Any:
    return lambda x, i: (x[i], x + 1), calls(False)


@case("C4", recompiles=0)
def largest_and_smallest_of_tensors() -> Any:
    return lambda x, i: (max(x[0, 0], x[1, 1], x[2, 2]) * x, min([x.sum(), x.mean()]) + 1), calls(False)


@case("C4", breaks=1)
def what_is_not_the_largest_has_no_gradient() -> Any:
    """Not even zero: the slope of this root is infinite, and infinity times zero is no number."""
    return lambda x, i: max((x - x).sum().sqrt(), x.square().sum()) * x, calls()


@case("C4", breaks=1)
def largest_of_tensors_is_written() -> Any:
    def f(x: torch.Tensor, i: torch.Tensor) -> Any:
        top = max(x[0, 0], x[1, 1])
        top += 1
        return x * 2

    return f, calls(False)


test_program = suite.test()

BIAS, DOCUMENTS, TABLE = torch.randn(2), torch.randint(0, 3, (2, 16)), torch.randn(2, 16)


def by_distance(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return torch.tanh(score / 20) * 20 + BIAS[h] * (i - j) + TABLE[b][i]


def within_document(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (DOCUMENTS[b, i] == DOCUMENTS[b, j]) & (i >= j)


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_flex_attention_is_captured() -> None:
    masks = create_block_mask(within_document, 2, None, 16, 16, device="cpu")
    f = lambda q, k, v: flex_attention(q, k, v, by_distance, masks, enable_gqa=True, return_lse=True)
    q, k, v = torch.randn(2, 2, 16, 8), torch.randn(2, 1, 16, 8), torch.randn(2, 1, 16, 8)
    expected = f(q, k, v)
    compiled = dovetail.compile(f, fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), expected)

    def g(q: Any, k: Any, v: Any) -> Any:
        own = create_block_mask(within_document, 2, None, 16, 16, device="cpu")
        return flex_attention(q, k, v, by_distance, own, enable_gqa=True, return_lse=True)

    torch.testing.assert_close(dovetail.compile(g, fullgraph=True)(q, k, v), expected)


def test_a_place_out_of_range() -> None:
    f = dovetail.compile(lambda x, i: x[i] * 2)
    torch.testing.assert_close(f(X, torch.tensor(-4)), X[0] * 2)
    with pytest.raises(IndexError, match="out of"):
        f(X, torch.tensor(4))
