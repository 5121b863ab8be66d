"""SPEC C8: dynamic shapes; a pure size change costs at most one recompile."""
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dovetail
from tests.behaviour.running import ANY, Suite

suite = Suite()
case = suite.case
SIZES = (5, 7, 9, 12, 30)


def batches(*tail: int) -> list[Any]:
    return [(torch.randn(n, *tail, requires_grad=True),) for n in SIZES]


@case("C8", dynamic=True)
def methods_of_symbolic_numbers() -> Any:
    def f(x: torch.Tensor) -> Any:
        n = x.shape[0]
        windows = n / 4
        if windows.is_integer():
            return x * windows
        powers = pow(n, 2, 5), -(n > 3), n.__format__("d")
        return x + n.bit_length(), n.numerator, windows.real, windows.as_integer_ratio(), powers

    return f, [(torch.ones(n),) for n in (8, 6, 12)]


@case("C8", dynamic=True)
def resized_as_another() -> Any:
    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        z, w, whole = x.clone().resize_as_(y), x.clone().resize_(y.shape), x.clone()
        part = whole[1:].resize_(2, 2).add_(1)
        return z.shape, w.shape, z.numel() + x, w * 2, z.stride(), part, whole

    return f, [(torch.arange(8.0), torch.ones(shape)) for shape in ((2, 3), (4, 2))]


@case("C8", dynamic=True)
def resized_by_out() -> Any:
    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        a, b, c, d = (x.clone() for _ in range(4))
        made = torch.mul(y, 2, out=a), torch.sum(y, 0, out=b), torch.cat([y, y], out=c), torch.mm(y, y.t(), out=d)
        return [(z.shape, z.stride(), z) for z in (a, b, c, d)], [z * 2 for z in made]

    return f, [(torch.arange(8.0), torch.ones(shape)) for shape in ((2, 3), (4, 2))]


@case("C8", dynamic=True, breaks=ANY)
def packed_sequences() -> Any:
    cells = [torch.nn.GRU(3, 4), torch.nn.RNN(3, 4), torch.nn.RNN(3, 4, nonlinearity="relu"), torch.nn.LSTM(3, 4)]

    def f(rows: torch.Tensor, batch_sizes: torch.Tensor) -> Any:
        packed = torch.nn.utils.rnn.PackedSequence(rows, batch_sizes)
        return [cell(packed)[0].data * 2 for cell in cells]

    return f, [(torch.randn(sum(sizes), 3), torch.tensor(sizes)) for sizes in ((3, 3, 2, 1), (2, 2, 1))]


@case("C8", recompiles=1)
def batch_size_changes() -> Any:
    return lambda x: torch.softmax(x * 2, -1).sum(0), batches(4)


@case("C8", recompiles=1)
def tensors_of_numbers_that_change() -> Any:
    def f(x: torch.Tensor, p: float, n: int) -> Any:
        return x * torch.tensor(p), torch.tensor([p, 1 - p, 2]), torch.tensor((n, 2)), torch.as_tensor(n, dtype=torch.float64)

    return f, [(torch.rand(3), 0.1 * i, 3 * i) for i in range(1, 6)]


@case("C8", breaks=1, recompiles=6)
def number_that_must_be_known_and_is_another_in_each_call() -> Any:
    def f(x: torch.Tensor, p: float) -> Any:
        return x.sin() * round(p, 2)

    return f, [(torch.rand(3), 0.07 * i) for i in range(1, 15)]


@case("C8", breaks=1, recompiles=6)
def place_in_a_list_that_is_another_in_each_call() -> Any:
    rates = [0.1 * i for i in range(20)]

    def f(x: torch.Tensor, step: int) -> Any:
        return x.sin() * rates[step]

    return f, [(torch.rand(3), i) for i in range(14)]


@case("C8", dynamic=True, recompiles=0)
def dynamic_from_the_start() -> Any:
    return lambda x: F.layer_norm(x, x.shape[-1:]) + x.mean(), batches(4)


@case("C8", dynamic=False, recompiles=4)
def never_dynamic() -> Any:
    return lambda x: x * 2 + x.shape[0], batches(4)


@case("C8", dynamic=True)
def rounding_a_number_to_tens() -> Any:
    return lambda x, n: x + round(n, -1) + round(n), [(torch.zeros(2), 123), (torch.zeros(2), 127)]


@case("C8", recompiles=1)
def two_dimensions_change_together() -> Any:
    return lambda x: (x @ x.mT).relu(), [(torch.randn(n, n + 1),) for n in SIZES]


def last_tokens(batch: int) -> list[Any]:
    """Views of the same sizes, each with another stride."""
    whole = [torch.randn(batch, n, 8, requires_grad=True) for n in SIZES]
    return [(x[:, -1],) for x in whole]


@case("C8", recompiles=1)
def only_the_stride_changes() -> Any:
    layer = torch.nn.Linear(8, 4)
    return lambda x: (torch.softmax(layer(x), -1), x * x.stride(0), x.reshape(-1) + 1), last_tokens(3)


@case("C8", dynamic=True, recompiles=0)
def a_stride_dynamic_from_the_start() -> Any:
    return lambda x: (x.contiguous(), x.T.cumsum(0), x.view(3, 2, 4)[:, 1].exp()), last_tokens(3)


@case("C8", recompiles=1)
def the_stride_of_a_single_row_changes() -> Any:
    return lambda x: x.relu() + x.mean(0), last_tokens(1)


@case("C8")
def sizes_of_what_the_program_wrote_down() -> Any:
    def f(*crops: torch.Tensor) -> Any:
        widths = torch.tensor([crop.shape[-1] for crop in crops])
        ends = torch.cumsum(torch.unique_consecutive(widths, return_counts=True)[1], 0)
        start, made = 0, []
        for end in ends:
            made.append(torch.cat(crops[start:end]).mean(-1))
            start = end
        spread = crops[0].repeat_interleave(torch.tensor([2, 0, 3]), 0)
        return torch.cat(made), spread[torch.equal(ends, torch.tensor([2, 3])) :]

    return f, [(torch.randn(3, 4), torch.randn(2, 4), torch.randn(2, 6))] * 2


@case("C8", recompiles=1)
def samples_of_batches() -> Any:
    def f(x: torch.Tensor) -> Any:
        action = torch.distributions.Categorical(logits=x)
        noise = torch.distributions.Normal(x, 1.0).rsample() + torch.empty_like(x).normal_()
        return noise, torch.poisson(x.abs()), action.log_prob(action.sample())

    return f, batches(4)


@case("C8", recompiles=1)
def mask_of_a_growing_cache() -> Any:
    def f(query: torch.Tensor, keys: torch.Tensor) -> Any:
        seen = torch.ones(query.size(0), keys.size(0), dtype=torch.bool).tril(keys.size(0) - query.size(0))
        return (query @ keys.mT).masked_fill(~seen, -1e9).softmax(-1)

    return f, [(torch.randn(2, 4), torch.randn(n + 3, 4)) for n in SIZES]


@case("C8", recompiles=1)
def window_of_a_growing_cache() -> Any:
    def f(keys: torch.Tensor, at: int) -> Any:
        keys.mul_(0.5)
        return (keys.mT @ keys).sum(-1) * at

    return f, [(torch.randn(2, 3, n + 5, 4)[:, :, 2:n], n) for n in SIZES]


@case("C8", recompiles=2)
def rows_without_gaps_are_another_case() -> Any:
    f = lambda x: x.reshape(-1) * 2 if x.is_contiguous() else x.contiguous()
    return f, [(torch.randn(3, n, 8)[:, -1],) for n in (4, 5, 6, 1, 7)]


@case("C8", recompiles=2)
def rows_as_long_as_others_with_gaps() -> Any:
    rows = [torch.randn(3, 6), torch.randn(3, 5), torch.randn(3, 6)[:, 1:], torch.randn(3, 9)[:, :7], torch.randn(3, 8)]
    return lambda x: (x * 2, x[:, 1:].sum(), x.gather(1, x.argsort())), [(x,) for x in rows]


@case("C8", recompiles=1)
def class_that_counts() -> Any:
    class Model:
        calls, rate = 0, 0.5

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            Model.calls += 1
            type(self).rate *= 0.5
            return x * self.calls + Model.rate

    model = Model()
    return lambda x: (model(x), Model.calls, Model.rate), [(torch.ones(3),)] * 12


@case("C8", recompiles=2)
def changing_float_is_compared() -> Any:
    def f(x: torch.Tensor, rate: float) -> torch.Tensor:
        scale = max(1.0, rate**-0.8)
        return x * scale if 1 / rate > 3.0 else x - rate

    return f, [(torch.ones(3), 0.1 + 0.05 * i) for i in range(12)]


@case("C8", recompiles=0)
def method_of_a_function_in_a_closure() -> Any:
    def times(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x * self

    return lambda x: times.__get__(3.0)(x), [(torch.ones(2),)] * 4


@case("C8", recompiles=1)
def tokens_counted_by_expert() -> Any:
    return lambda x: torch.histc(x[:, 0], bins=4, min=0, max=3).cumsum(0) + x.sum(), batches(4)


@case("C8", recompiles=1)
def size_arithmetic_in_python() -> Any:
    def f(x: torch.Tensor) -> Any:
        n = x.shape[0]
        half = n // 2
        y = x[:half] * (n - half)
        return y, torch.zeros(n * 2 + 1), x.reshape(2 * n, -1), n, (n + 1) % 3, torch.arange(n)

    return f, [(torch.randn(n, 4),) for n in SIZES]


@case("C8")
def branch_on_size() -> Any:
    def f(x: torch.Tensor) -> Any:
        if x.shape[0] > 8:
            return x.sum()
        return x.mean()

    return f, batches(3)


@case("C8")
def size_zero_and_one() -> Any:
    return lambda x, y: (x + y).sum(0), [(torch.randn(n, 3), torch.randn(n, 3)) for n in (4, 6, 1, 0, 8)]


@case("C8", recompiles=1)
def changing_python_int() -> Any:
    return lambda x, step: x * (step + 1) / 10, [(torch.ones(4), n) for n in range(3, 12)]


@case("C8", recompiles=2)
def place_that_changes() -> Any:
    """Of either sign, one graph for each; gradients go to the place, too."""

    def f(x: torch.Tensor, y: torch.Tensor, i: int) -> Any:
        written = y * 2
        written[:, i] = x[i, 0]
        return x[i] * x[:, i], written, x.select(1, i)

    places = (1, 2, 0, 3, -1, -2, -4, 3)
    return f, [(torch.randn(4, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True), i) for i in places]


@case("C8")
def python_int_beyond_64_bits() -> Any:
    def f(x: torch.Tensor, n: int) -> Any:
        hashed = (n * 6364136223846793005 + 1442695040888963407) % 2**64
        side = 1 if hashed > 2**63 else -1
        return x * (hashed % 1000) * side, x + n**5 % 13, n * n

    return f, [(torch.ones(4), n) for n in (3, 5, 2**31 + 1, 2**47, 2**62 + 5, -(2**65), 7)]


@case("C8")
def empty_batch_in_training() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.LayerNorm(3))
    return model, [(torch.randn(n, 4, requires_grad=True),) for n in (2, 0, 0, 3)]


@case("C8", recompiles=1)
def changing_python_float() -> Any:
    return lambda x, lr: x - lr * x.sign(), [(torch.ones(4), 0.1 * n) for n in range(1, 9)]


@case("C8")
def cat_and_split() -> Any:
    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        z = torch.cat([x, y])
        a, b = z.split([x.shape[0], y.shape[0]])
        return a * 2, b + 1, z[-1], z.chunk(2)[0]

    return f, [(torch.randn(n, 2), torch.randn(n + 1, 2)) for n in SIZES]


@case("C8")
def sequence_growing() -> Any:
    def f(cache: torch.Tensor, x: torch.Tensor) -> Any:
        cache = torch.cat([cache, x], 1)
        return cache, (cache * x).sum(-1)

    return f, [(torch.randn(2, n, 3), torch.randn(2, 1, 3)) for n in range(3, 11)]


@case("C8")
def loop_over_dynamic_dimension() -> Any:
    def f(x: torch.Tensor) -> Any:
        total = torch.zeros(2)
        for i in range(x.shape[0]):
            total = total + x[i] * i
        return total

    return f, [(torch.randn(n, 2),) for n in (3, 4, 5)]


@case("C8")
def convolution_over_sizes() -> Any:
    conv = torch.nn.Conv2d(2, 3, 3, padding=1)
    return lambda x: F.max_pool2d(conv(x).relu(), 2).mean((2, 3)), [(torch.randn(2, 2, n, n + 2),) for n in (8, 10, 14)]


@case("C8")
def attention_over_lengths() -> Any:
    def f(q: torch.Tensor) -> Any:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    return f, [(torch.randn(2, 2, n, 8),) for n in SIZES]


@case("C8")
def expand_view_permute() -> Any:
    def f(x: torch.Tensor) -> Any:
        b, t, c = x.shape
        y = x.view(b, t, 2, c // 2).permute(0, 2, 1, 3).contiguous().view(b * 2, t, -1)
        return y.transpose(1, 2), x[:, None].expand(b, 3, t, c).sum(1)

    return f, [(torch.randn(2, n, 4, requires_grad=True),) for n in SIZES]


@case("C8")
def symbolic_comparison_results_returned() -> Any:
    def f(x: torch.Tensor) -> Any:
        n = x.shape[0]
        return x + 1, n > 6, n == 7, min(n, 8), max(n, 8), float(n), str(n), [n] * 2

    return f, [(torch.ones(n),) for n in SIZES]


@case("C8", recompiles=1)
def positions_in_tensors() -> Any:
    """A schedule read by the number of the step, a row of a table, one element written."""
    levels, rows = torch.linspace(1, 0, 9), torch.nn.Parameter(torch.randn(9, 3))

    def f(x: torch.Tensor, step: int) -> Any:
        done = torch.zeros(9, 3)
        done[step], done[step + 1, 0], done[1:, step - 2] = x, 2.0, 3.0
        return x * (levels[step + 1] - levels[step]) + rows[step] + rows[step - 9, 1], done

    return f, [(torch.randn(3), step) for step in (2, 3, 4)]


@case("C8", recompiles=2)
def a_position_outside_is_an_error() -> Any:
    levels = torch.arange(5.0)
    return lambda x, i: x * levels[i], [(torch.randn(3), i) for i in (1, 2, 4, 5, 3)]


test_program = suite.test()


def count_recompiles(run: Any) -> int:
    before = dovetail.stats()["recompiles"]
    run()
    return int(dovetail.stats()["recompiles"] - before)


@pytest.mark.parametrize("backend", ["eager", "dovetail"])
def test_mark_dynamic_avoids_the_recompile(backend: str) -> None:
    f = dovetail.compile(lambda x: x.sin() + x.shape[0], backend=backend)
    first = torch.randn(5, 3)
    dovetail.mark_dynamic(first, 0)

    def run() -> None:
        for x in (first, torch.randn(6, 3), torch.randn(17, 3)):
            torch.testing.assert_close(f(x), x.sin() + x.shape[0])

    assert count_recompiles(run) == 0


def test_a_tensor_of_fewer_dimensions_after_one_with_a_symbol() -> None:
    f = dovetail.compile(lambda x: x.sin() + x.shape[-1], backend="eager", options={"fallback_to_eager": False})
    for x in (torch.randn(4, 3), torch.randn(4, 5), torch.randn(4)):
        torch.testing.assert_close(f(x), x.sin() + x.shape[-1])


def test_parameters_given_one_by_one_compile_once_per_number_of_dimensions() -> None:
    f = dovetail.compile(lambda w: w.detach().sin().sum(0), backend="eager")
    weights = [torch.nn.Parameter(torch.randn(*size)) for n in range(2, 9) for size in ((n, n + 1), (n,))]

    def run() -> None:
        for w in weights:
            torch.testing.assert_close(f(w), w.detach().sin().sum(0))

    assert count_recompiles(run) == 3, "one for the bias, one more of each"


def test_recompile_limit_runs_eager_and_says_so() -> None:
    f = dovetail.compile(lambda x, s: x * len(s), backend="eager", options={"recompile_limit": 3})
    with pytest.warns(UserWarning):
        for n in range(8):
            assert torch.equal(f(torch.ones(2), "a" * n), torch.ones(2) * n)


class Rounds(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.layer = torch.nn.Linear(4, 6), torch.nn.Linear(4, 4)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(6))

    def over_a_range(self, x: torch.Tensor) -> torch.Tensor:
        h, outs = torch.zeros(4), []
        for t in range(x.shape[0]):
            h = torch.tanh(self.layer(x[t]) + h)
            outs.append(h)
        return torch.stack(outs)

    def over_rows(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(4)
        for row in x.sin():
            h = torch.tanh(self.layer(row) + h)
        return h

    def over_parts(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.layer(row) * t for t, row in enumerate(x.unbind(0))])

    def over_experts(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for i in range(6):
            rows, k = torch.where(chosen == i)
            out.index_add_(0, rows, self.experts[i](x[rows]) * weights[rows, k, None])
        return out


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["over_a_range", "over_rows", "over_parts", "over_experts"])
def test_loops_of_any_length_are_never_left_to_eager(name: str) -> None:
    """Compiled whole for the first lengths, and then round by round; the index of a loop that breaks is one
    of many numbers."""
    torch.manual_seed(0)
    f = getattr(Rounds(), name)
    compiled = dovetail.compile(f, backend="eager")

    def run(sizes: Any) -> None:
        for n in sizes:
            x = torch.randn(n, 4)
            torch.testing.assert_close(compiled(x), f(x))
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), f(x))

    run(range(2, 40))
    assert count_recompiles(lambda: run(range(40, 60))) == 0


def test_optimizer_step_counter_does_not_recompile() -> None:
    w = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([w], lr=0.1)
    twin = torch.nn.Parameter(torch.ones(4))
    reference = torch.optim.Adam([twin], lr=0.1)
    step = dovetail.compile(optimizer.step)
    before = 0
    for n in range(8):
        w.grad = torch.full((4,), float(n))
        twin.grad = w.grad.clone()
        step()
        reference.step()
        torch.testing.assert_close(w, twin)
        if n == 3:
            before = dovetail.stats()["recompiles"]
    assert dovetail.stats()["recompiles"] == before


def image(n: int) -> torch.Tensor:
    return torch.rand(2, 4, 2 * n, 2 * n + 2)


def rows(n: int) -> torch.Tensor:
    return torch.rand(n, 6)


def gram(x: torch.Tensor) -> torch.Tensor:
    return x @ x.t() + 6 * torch.eye(x.shape[0])


OF_ANY_SIZE: dict[str, tuple[Any, Any]] = {
    "batch norm": (lambda x: F.hardswish(F.batch_norm(x, torch.ones(x.shape[1]), torch.ones(x.shape[1]), training=True)), image),
    "max_pool1d": (lambda x: torch.cat(F.max_pool1d(x, 3, 2, padding=1, return_indices=True)) + F.max_pool1d(x, 3, 2, 1)[:1], rows),
    "unfold": (lambda x: F.unfold(x, 3, padding=1, stride=2), image),
    "fold": (lambda x: F.fold(x, (4, 4), 2), lambda n: torch.rand(n, 12, 9)),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), image),
    "rot90": (lambda x: x.rot90(1, (-1, -2)), image),
    "affine grid": (lambda x: F.grid_sample(x, F.affine_grid(torch.eye(2, 3).expand(2, 2, 3), x.shape)), image),
    "unpool": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), image),
    "diag_embed": (lambda x: x.diag_embed(1), rows),
    "searchsorted": (lambda x: torch.searchsorted(x.sort(1)[0], x), rows),
    "solve": (lambda x: torch.linalg.solve(gram(x), x), rows),
    "determinants": (lambda x: gram(x).logdet() + torch.linalg.det(gram(x)), rows),
    "eigenvalues": (lambda x: torch.linalg.eigvalsh(gram(x)), rows),
    "pdist": (lambda x: F.pdist(x), rows),
    "margins": (lambda x: F.multi_margin_loss(x, x.argmax(1), reduction="none"), rows),
    "rrelu": (lambda x: F.rrelu(x - 1, training=True), rows),
}


@pytest.mark.parametrize("name", OF_ANY_SIZE)
def test_a_function_of_any_size_is_compiled_twice(name: str) -> None:
    function, make = OF_ANY_SIZE[name]
    dovetail.reset()
    compiled = dovetail.compile(function)
    for n in (5, 7, 10):
        x = make(n).requires_grad_()
        for f in (function, compiled):
            torch.manual_seed(0)
            made = f(x)
            gradients = torch.autograd.grad(made.sum(), x) if made.requires_grad else ()
            if f is function:
                want = made, gradients
        torch.testing.assert_close((made, gradients), want, rtol=1e-4, atol=1e-5)
    assert dovetail.stats()["recompiles"] <= 1


@pytest.mark.parametrize("given", [{}, {"batch_first": True, "bidirectional": True, "num_layers": 2}, {"bias": False, "num_layers": 2}])
def test_an_lstm_takes_sequences_of_any_length(given: dict[str, Any]) -> None:
    dovetail.reset()
    model = torch.nn.LSTM(6, 8, **given)
    compiled = dovetail.compile(model)
    with torch.no_grad():
        for batch, length in ((2, 5), (3, 7), (4, 10)):
            x = torch.rand(batch, length, 6)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    assert dovetail.stats()["recompiles"] <= 1


class Growing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("rows", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = torch.cat([self.rows, self.norm(x)])
        return self.rows.abs().sum(0) * len(self.rows)


def test_buffers_are_symbolic_only_when_their_size_changes() -> None:
    """Also where everything else is: those of a norm never are, and one that grows costs one recompile."""
    dovetail.reset()
    (eager, model), results = (Growing(), Growing()), []
    compiled = dovetail.compile(model, dynamic=True)
    for n in SIZES:
        x = torch.randn(n, 4)
        results.append((compiled(x), eager(x)))
    torch.testing.assert_close(*zip(*results))
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert dovetail.stats()["recompiles"] == 1


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_layers_are_not_compiled_for_every_length(kind: Any) -> None:
    """In training they go step by step: from the second length on they run as themselves, the rest compiled."""

    class Tagger(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.steps, self.last = torch.nn.Linear(3, 4), kind(4, 5, batch_first=True), torch.nn.Linear(5, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.steps(self.first(x).relu())[0].tanh())

    dovetail.reset()
    model = Tagger()
    compiled = dovetail.compile(model)
    for length in range(2, 16):
        x = torch.randn(2, length, 3)
        wanted = torch.autograd.grad(model(x).sum(), [*model.parameters()])
        torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), [*model.parameters()]), wanted)
    stats = dovetail.stats()
    assert stats["recompiles"] <= 4 and stats["graph_breaks"] == 2 and not stats["skips"]


def test_many_steps_of_a_recurrent_layer_are_not_compiled_one_by_one() -> None:
    dovetail.reset()
    layer = torch.nn.GRU(3, 4, num_layers=2)
    for length in (100, 200):
        x = torch.randn(length, 2, 3)
        torch.testing.assert_close(dovetail.compile(lambda x: layer(x)[0].tanh() + 1)(x), layer(x)[0].tanh() + 1)
        assert dovetail.stats()["graph_breaks"] == 2 * (length > 100)
    assert {item.code for item in dovetail.report().breaks} == {"B26"}


def test_sizes_that_outlive_a_break_are_symbols() -> None:
    def flat_and_back(x: torch.Tensor, like: torch.Size) -> tuple[torch.Tensor, torch.Size]:
        shape = x.size()
        y = x.view(-1) * 2
        dovetail.graph_break()
        return (y + 1).view(shape).expand(like), shape

    dovetail.reset()
    compiled = dovetail.compile(flat_and_back)
    for rows in range(4, 15):
        x = torch.randn(rows, 3)
        result, shape = compiled(x, torch.Size((2, rows, 3)))
        assert torch.equal(result, flat_and_back(x, torch.Size((2, rows, 3)))[0])
        assert type(shape) is torch.Size and shape == x.shape
    assert dovetail.stats()["recompiles"] == 2, "of the function and of what follows the break"
