"""Random tensor programs: DAGs of ops with views, mutation, broadcasting, dtypes, reductions, control flow, sizes.

    make_program(17) -> Program whose f(x0, x1, ...) runs in eager for every input size

A statement is kept only if eager can run it for all input sizes and leaves finite, not too large
values, so every program is valid and its numbers can be compared.
"""
from __future__ import annotations

import random
import warnings
from typing import Any, Final

import torch
import torch.nn.functional as F

from tests.fuzz.program import Program, Stmt

UNARY: Final = (
    "torch.relu({a})", "torch.sigmoid({a})", "torch.tanh({a})", "{a}.sin()", "{a}.cos()", "torch.exp({a}.clamp(-4, 4))", "{a}.abs()",
    "-{a}", "{a}.neg().square()", "({a}.abs() + 0.5).log()", "({a}.abs() + 0.1).sqrt()", "({a}.abs() + 0.3).rsqrt()", "{a}.floor()",
    "{a}.sign()", "F.gelu({a})", "F.silu({a})", "F.leaky_relu({a}, 0.2)", "F.softplus({a})", "F.elu({a})", "{a}.clamp({k}, {k} + 2)",
    "torch.erf({a})", "{a} ** 2", "{a} * {k}", "{a} + {j}", "{j} - {a}", "{a} / 3", "{a} // 2", "{a} % 3", "1 / ({a}.abs() + 1)",
    "{a}.round()", "{a}.trunc()", "{a}.logical_not()", "{a}.isfinite()", "{a} > {k}", "{a} == {j}", "F.hardtanh({a})", "{a}.reciprocal().clamp(-3, 3)",
    "F.hardswish({a})", "torch.atan({a})", "{a}.expm1().clamp(-5, 5)", "F.mish({a})", "torch.nan_to_num({a})",
)
BINARY: Final = (
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "{a} / ({b}.abs() + 1)", "torch.maximum({a}, {b})", "torch.minimum({a}, {b})", "{a} < {b}",
    "{a} >= {b}", "torch.where({a} > {b}, {a}, {b})", "torch.where({a}.bool(), {b}, {k})", "torch.atan2({a}, {b}.abs() + 1)", "{a}.lerp({b}, 0.3)",
    "torch.addcmul({a}, {a}, {b}, value=0.5)", "{a}.masked_fill({b} > 0, {k})", "({a} > 0) & ({b} > 0)", "({a} > 0) ^ ({b} > 1)", "torch.hypot({a}, {b})",
    "torch.fmod({a}, {b}.abs() + 1)", "torch.cat([{a}, {b}], {d})", "torch.stack([{a}, {b}], {d})", "{a} @ {b}", "{a}.mT @ {b}", "{a}.logaddexp({b})",
    "torch.broadcast_tensors({a}, {b})[0]", "F.mse_loss({a}, {b})", "F.smooth_l1_loss({a}, {b}.detach())", "torch.outer({a}.flatten()[:3], {b}.flatten()[:4])",
    "torch.einsum('i...,j...->ij', {a}[None].flatten(1)[:, :3], {b}[None].flatten(1)[:, :3])", "torch.remainder({a}, {b}.abs() + 2)",
)
REDUCE: Final = (
    "{a}.sum()", "{a}.sum({d})", "{a}.sum({d}, keepdim=True)", "{a}.mean({d})", "{a}.float().mean()", "{a}.amax({d})", "{a}.amin({d}, keepdim=True)",
    "{a}.argmax({d})", "{a}.float().var({d}, unbiased=False)", "{a}.float().std(unbiased=False)", "torch.logsumexp({a}.float(), {d})", "{a}.any({d})",
    "{a}.all()", "{a}.prod({d}).clamp(-50, 50)", "F.softmax({a}.float(), {d})", "F.log_softmax({a}.float(), {d})", "{a}.cumsum({d})", "{a}.max({d}).values",
    "{a}.float().norm(dim={d})", "{a}.min({d}).values", "F.normalize({a}.float(), dim={d})", "{a}.sort({d}).values", "{a}.topk(2, {d}).values",
    "F.layer_norm({a}.float(), {a}.shape[-1:])", "{a}.count_nonzero({d})", "{a}.argmin()", "{a}.median()", "torch.var_mean({a}.float(), {d}, unbiased=False)[0]",
)
VIEW: Final = (
    "{a}.t()", "{a}.transpose(0, {d})", "{a}.mT", "{a}.unsqueeze({d})", "{a}.squeeze()", "{a}[0]", "{a}[-1]", "{a}[:, 0]", "{a}[1:]", "{a}[::2]", "{a}[..., :2]",
    "{a}.reshape(-1)", "{a}.reshape({a}.shape[0], -1)", "{a}.view(-1)", "{a}.flatten()", "{a}.expand(2, *{a}.shape)", "{a}.permute(*reversed(range({a}.dim())))",
    "{a}.chunk(2, {d})[0]", "{a}.split(2, {d})[-1]", "{a}.narrow({d}, 0, 2)", "{a}.diagonal()", "{a}.unbind(0)[0]", "{a}.select({d}, 1)", "{a}[None]", "{a}.detach()",
    "{a}.contiguous()", "{a}.clone()", "{a}.flip({d})", "{a}.roll(1, {d})", "{a}.repeat(2, *[1] * ({a}.dim() - 1))", "F.pad({a}, (1, 1))", "F.pad({a}, (1, 0), value=2.0)",
    "{a}.tril()", "{a}.triu(1)", "{a}.as_strided((2, 2), (1, 1))", "{a}.unfold(0, 2, 1)", "{a}.swapaxes(0, {d})", "{a}.movedim(0, -1)", "{a}.unflatten(0, (-1, 1))",
    "{a}[torch.arange({a}.shape[0]) % 2]", "{a}[{a} > 0]", "{a}.gather(0, torch.zeros_like({a}, dtype=torch.long))", "{a}.index_select(0, torch.tensor([0, 1]))",
    "torch.take_along_dim({a}, {a}.argsort({d}), {d})", "{a}.repeat_interleave(2, {d})", "torch.meshgrid({a}.flatten()[:2], {a}.flatten()[:3], indexing='ij')[1]",
)
CAST: Final = ("{a}.float()", "{a}.double()", "{a}.to(torch.bfloat16)", "{a}.half()", "{a}.long()", "{a}.int()", "{a}.bool()", "{a}.to(torch.uint8)", "{a}.type_as({b})", "{a}.to({b}.dtype)")
MAKE: Final = (
    "torch.zeros_like({a})", "torch.ones_like({a})", "torch.full_like({a}, {k})", "torch.arange({a}.shape[0])", "torch.zeros({a}.shape[0], 3)", "torch.rand_like({a}.float())",
    "torch.randn({a}.shape)", "torch.eye(3)", "{a}.new_full((2, 3), {k})", "torch.tensor([{k}, 1.0, {j}])", "F.dropout({a}.float(), 0.4)", "torch.linspace(0, {j} + 1, 4)",
    "F.one_hot(({a}.flatten()[:5].long() % 3).abs(), 3)", "torch.randint(0, 5, (3,))",
)
LAYER: Final = (
    "F.linear({a}.float().reshape(-1, {a}.shape[-1]), torch.ones(3, {a}.shape[-1]) * 0.1)", "F.conv1d({a}.float().reshape(1, 1, -1), torch.ones(2, 1, 3) * 0.2, padding=1)",
    "F.avg_pool1d({a}.float().reshape(1, 1, -1), 2, 1, 1)", "F.max_pool1d({a}.float().reshape(1, 1, -1), 2)", "F.embedding(({a}.flatten()[:6].long() % 4).abs(), {b}.float().flatten()[:4, None] * torch.ones(4, 3))",
    "F.scaled_dot_product_attention(*[{a}.float().reshape(1, 1, -1, 1)] * 3)", "F.cross_entropy({a}.float().reshape({a}.shape[0], -1), torch.zeros({a}.shape[0], dtype=torch.long))",
    "F.group_norm({a}.float().reshape(1, 1, -1), 1)", "F.interpolate({a}.float().reshape(1, 1, -1), scale_factor=2)", "torch.scatter_add(torch.zeros(5), 0, ({a}.flatten().long() % 5).abs(), {a}.float().flatten())",
)
MUTATE: Final = (
    "{a}.add_(1)", "{a}.mul_(0.5)", "{a}.relu_()", "{a}[0] = {k}", "{a}[..., 0] += 2", "{a}.copy_({b})", "{a}.clamp_(-2, 2)", "{a}.zero_()", "{a}.sub_({b})", "{a}.t().mul_(2)",
    "{a}.view(-1)[1:].add_(1)", "{a}.fill_({k})", "{a}.masked_fill_({a} > 1, 0)", "{a}[1:] = {a}[:-1].clone()", "{a} += {b}", "{a}.index_fill_(0, torch.tensor([0]), 1.0)",
    "torch.mul({a}, 2, out={a})", "{a}.transpose(0, -1)[0].neg_()", "{a}.index_put_((torch.tensor([0]),), {a}[0] * 0 + 1)", "{a}.scatter_(0, torch.zeros_like({a}, dtype=torch.long)[:1], 1)",
)
KINDS: Final = ((UNARY, 22), (BINARY, 22), (REDUCE, 14), (VIEW, 20), (CAST, 5), (MAKE, 5), (LAYER, 4), (MUTATE, 8))
INPUTS: Final = (
    "torch.randn(n, 3)", "torch.randn(n)", "torch.randn(3)", "torch.randn(1, 3)", "torch.randn(n, 1)", "torch.randn(())", "torch.randn(2, n, 3)", "torch.randn(3, n).t()",
    "torch.randint(-3, 4, (n, 3))", "torch.rand(n, 3) > 0.5", "torch.randn(n, 3).bfloat16()", "torch.randn(n, 3).half()", "torch.randn(n, 3).double()", "torch.randn(4, n, 3)[1:3]",
    "torch.randn(n, 6)[:, ::2]", "torch.randint(0, 9, (n,)).to(torch.uint8)", "torch.randint(-5, 5, (3,)).int()", "torch.randn(1, 3).expand(n, 3)",
)
CONDITIONS: Final = ("if {a}.shape[0] > 4:", "if {a}.dim() == 2:", "if {a}.sum() > 0:", "for i in range(3):", "for i in range({a}.shape[0]):", "with torch.no_grad():", "while {a}.shape[0] > 1000:")
MOST_ELEMENTS: Final = 3000


class Builder:
    """Grows one program while running it in eager for each input size."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sizes = (4, 4, self.random.choice((5, 7, 2))) if self.random.random() < 0.4 else (4, 4)
        self.inputs = [self.pick_input() for _ in range(self.random.randint(1, 4))]
        self.scopes: list[dict[str, Any]] = []
        for call in range(len(self.sizes)):
            torch.manual_seed(call)
            scope = {"torch": torch, "F": F, "n": self.sizes[call]}
            values = [eval(text, scope) for text in self.inputs]
            self.scopes.append({"torch": torch, "F": F, **{f"x{i}": value for i, value in enumerate(values)}})
        self.made = 0

    def pick_input(self) -> str:
        text = self.random.choice(INPUTS)
        wants = "int" not in text and ">" not in text and "uint" not in text and "expand" not in text and "[" not in text
        return text + ".requires_grad_()" if wants and self.random.random() < 0.4 else text

    def names(self) -> list[str]:
        return [name for name, value in self.scopes[0].items() if isinstance(value, torch.Tensor)]

    def fill(self, template: str) -> str:
        """Put names and numbers into a template, recent values more often."""
        known = self.names()
        recent = known[-4:] if self.random.random() < 0.7 else known
        return template.format(a=self.random.choice(recent), b=self.random.choice(known), k=self.random.choice((0.5, -1.0, 1.5, 2.0)),
                               j=self.random.choice((0, 1, 2)), d=self.random.choice((0, -1, 1)))

    def attempt(self, stmt: Stmt) -> bool:
        """Run a statement in copies of all scopes; keep the effects only if all went well."""
        text = "\n".join(stmt.lines(0))
        trials = []
        for call, scope in enumerate(self.scopes):
            trial = {name: copy_value(value) for name, value in scope.items()} if mutates(text) else dict(scope)
            torch.manual_seed(100 + call)
            try:
                exec(text, trial)
            except Exception:  # eager cannot run it: not a program
                return False
            if not all(acceptable(value) for value in trial.values()):
                return False
            trials.append(trial)
        for scope, trial in zip(self.scopes, trials, strict=True):
            trial.pop("__builtins__", None)
            scope.update(trial)
        return True

    def statement(self, inside: bool = False) -> Stmt:
        group = self.random.choices([kind for kind, _ in KINDS], [weight for _, weight in KINDS])[0]
        text = self.fill(self.random.choice(group))
        if group is MUTATE:
            return Stmt(text)
        if inside:
            target = self.random.choice([name for name in self.names() if name.startswith("v")] or ["v0"])
            return Stmt(f"{target} = {text}")
        self.made += 1
        return Stmt(f"v{self.made} = {text}")

    def block(self) -> Stmt:
        head = self.fill(self.random.choice(CONDITIONS))
        return Stmt(head, tuple(self.statement(inside=True) for _ in range(self.random.randint(1, 3))))


def copy_value(value: Any) -> Any:
    """Mutation trials on plain copies: whether eager accepts the mutation of a leaf is checked by the real run."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def mutates(text: str) -> bool:
    return "_(" in text or "] =" in text or "+=" in text or "out=" in text


def acceptable(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return True
    if value.numel() > MOST_ELEMENTS:
        return False
    if not value.is_floating_point() or not value.numel():
        return True
    return bool(torch.isfinite(value).all()) and float(value.detach().abs().max()) < 1e3


def make_program(seed: int) -> Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        builder = Builder(seed)
        body: list[Stmt] = []
        wanted = builder.random.randint(3, 14)
        for _ in range(12 * wanted):
            if len(body) >= wanted:
                break
            stmt = builder.block() if builder.random.random() < 0.08 else builder.statement()
            if builder.attempt(stmt):
                body.append(stmt)
        names = [f"v{i}" for i in range(1, builder.made + 1) if f"v{i}" in builder.scopes[0]]
        count = min(len(names), builder.random.randint(1, 4))
        returns = tuple(sorted({*names[-1:], *builder.random.sample(names, count)})) if names else ("x0",)
        return Program(seed, (), builder.sizes, tuple(f"x{i}" for i in range(len(builder.inputs))), tuple(builder.inputs), tuple(body), returns)
