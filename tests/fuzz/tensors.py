"""Random tensor programs: DAGs of ops with views, mutation, broadcasting, dtypes, reductions, control flow, sizes.

    make_program(17) -> Program whose f(x0, x1, ...) runs in eager for every input size

A statement is kept only if eager can run it for all input sizes and leaves finite, not too large
values, so every program is valid and its numbers can be compared. No branch is taken by comparing with a
whole number, which a sum may be but for rounding.
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
    "{a}.div(3, rounding_mode='floor')", "{a}.div({k}, rounding_mode='trunc')", "torch.true_divide({a}, 3)", "{a}.long() >> 1", "({a}.int() & 6) | 1", "~{a}.int()",
    "{a}.float().frac()", "F.relu6({a})", "F.threshold({a}, {k}, 0.5)", "{a}.float().sinh().clamp(-5, 5)", "torch.special.expit({a})",
    "{a}.float().log1p().nan_to_num(0)", "F.hardsigmoid({a}.float())", "F.softsign({a})", "F.logsigmoid({a}.float())", "F.celu({a}.float())",
    "F.prelu({a}.float(), torch.tensor(0.3))", "{a}.isnan() | ({a} > 1)", "torch.signbit({a})", "{a}.float().tan().clamp(-2, 2)", "{a} ** 3",
    "({a}.abs() + 1) ** -1.0", "2 ** {a}.clamp(-3, 3)", "{a}.float().round(decimals=1)", "{a}.clamp(min={j})", "{a} * n", "{a} + n // 2", "{a}.float() / n",
    "{a}.deg2rad()", "torch.exp2({a}.clamp(-3, 3))", "{a}.float().asinh()", "{a}.sgn()", "torch.sinc({a}.float())", "{a}.clamp_max(1)",
    "torch.lgamma({a}.float().abs() + 1)", "torch.special.erfcx({a}.float().clamp(-1, 3))", "{a}.int().bitwise_left_shift(2)", "{a}.int() ^ -1", "torch.bitwise_not({a}.bool())",
    "{a}.to(torch.uint8) + 200", "{a}.to(torch.int8) * 3", "{a}.short() // 3", "{a}.long() % -3", "{a}.half() * 3 + 0.1", "{a}.bfloat16().exp().clamp(0, 9)", "{a}.long().float() / 7",
    "F.hardshrink({a}.float())", "F.softshrink({a}.float())", "F.tanhshrink({a})", "F.selu({a}.float())", "F.gelu({a}.float(), approximate='tanh')", "F.rrelu({a}.float().contiguous(), training=False)",
    "torch.logit({a}.float().sigmoid() * 0.8 + 0.1)", "torch.erfinv({a}.float().tanh() * 0.9)", "{a}.float().acos().nan_to_num(1)", "{a}.float().cosh().clamp(max=5)", "torch.ldexp({a}.float(), torch.tensor(2))",
)
BINARY: Final = (
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "{a} / ({b}.abs() + 1)", "torch.maximum({a}, {b})", "torch.minimum({a}, {b})", "{a} < {b}",
    "{a} >= {b}", "torch.where({a} > {b}, {a}, {b})", "torch.where({a}.bool(), {b}, {k})", "torch.atan2({a}, {b}.abs() + 1)", "{a}.lerp({b}, 0.3)",
    "torch.addcmul({a}, {a}, {b}, value=0.5)", "{a}.masked_fill({b} > 0, {k})", "({a} > 0) & ({b} > 0)", "({a} > 0) ^ ({b} > 1)", "torch.hypot({a}, {b})",
    "torch.fmod({a}, {b}.abs() + 1)", "torch.cat([{a}, {b}], {d})", "torch.stack([{a}, {b}], {d})", "{a} @ {b}", "{a}.mT @ {b}", "{a}.logaddexp({b})",
    "torch.broadcast_tensors({a}, {b})[0]", "F.mse_loss({a}, {b})", "F.smooth_l1_loss({a}, {b}.detach())", "torch.outer({a}.flatten()[:3], {b}.flatten()[:4])",
    "torch.einsum('i...,j...->ij', {a}[None].flatten(1)[:, :3], {b}[None].flatten(1)[:, :3])", "torch.remainder({a}, {b}.abs() + 2)",
    "{a}.float().pow(({b}.float() % 2).abs())", "torch.bitwise_xor({a}.int(), {b}.int())", "torch.floor_divide({a}, {b}.abs() + 1)",
    "torch.div({a}, {b}.abs() + 1, rounding_mode='trunc')", "torch.add({a}, {b}, alpha=2)", "torch.sub({a}, {b}, alpha=0.5)",
    "torch.addcdiv({a}.float(), {b}.float(), {b}.float().abs() + 1)", "torch.heaviside({a}.float(), {b}.float())", "torch.copysign({a}.float(), {b}.float())",
    "{a}.float().dist({b}.float())", "torch.fmax({a}, {b})", "{a}.ne({b})", "torch.isclose({a}.float(), {b}.float())", "torch.where({b} > 0, {a}, {j})",
    "torch.where({a} > 0, {k}, {b})", "{a}.clamp({b}.amin(), {b}.amax())", "torch.clamp({a}, max={b})", "{a}.xlogy({b}.abs() + 1)",
    "{a}[..., None] * {b}.flatten()[:2]", "{a}.unsqueeze(-1) @ {b}.flatten()[None, :3].to({a}.dtype)", "torch.hstack([{a}, {b}])", "torch.vstack([{a}, {b}])",
    "torch.cat([{a}.flatten(), {b}.flatten()])", "torch.cat([{a}, {a}, {b}], {d})[1:]", "{a}.expand_as({b}) + {b}", "{a}.view_as({b})",
    "torch.tensordot({a}.float().flatten()[:3], {b}.float().flatten()[:3], 1)", "torch.cdist({a}.float().reshape(-1, 1)[:4], {b}.float().reshape(-1, 1)[:3])",
    "torch.baddbmm({a}.float().flatten()[0], torch.ones(1, 2, 3), {b}.float().flatten()[:3].reshape(1, 3, 1))", "F.cosine_similarity({a}.float(), {b}.float(), {d})",
    "torch.cross({a}.float().flatten()[:3], {b}.float().flatten()[:3], 0)", "torch.kron({a}.flatten()[:2], {b}.flatten()[:3])",
    "torch.searchsorted({a}.float().flatten().sort().values, {b}.float())", "F.binary_cross_entropy_with_logits({a}.float(), {b}.float().sigmoid())",
    "F.l1_loss({a}.float(), {b}.float(), reduction='none')", "{a}.float().index_add(0, torch.tensor([0, 1, 0]), {b}.float()[:3])", "torch.isin({a}.int(), {b}.int())",
    "{a}.masked_scatter({a} > 0, {b}.to({a}.dtype))",
    "torch.cat([{a}.long(), {b}.double()], {d})", "torch.stack([{a}.half(), {b}.half()]).sum(0)", "torch.dstack([{a}, {b}])", "torch.cat([{a}[:0], {b}], 0)", "torch.gcd({a}.long(), {b}.long())",
    "{a}.to(torch.uint8) - {b}.to(torch.uint8)", "{a}.int() // ({b}.int().abs() + 1)", "{a}.int() % ({b}.int().abs() + 2)", "torch.where({a}.bool(), {b}.half(), {b}.double())", "{a}.half() @ {b}.half()",
    "torch.nextafter({a}.float(), {b}.float())", "torch.logical_xor({a}, {b})", "torch.bmm({a}.float().reshape(1, 1, -1), {b}.float().reshape(1, -1, 1)[:, :{a}.numel()])",
    "torch.index_put({a}.float(), (torch.tensor([0, 1, 0]),), {b}.float().flatten()[0], accumulate=True)", "torch.scatter_reduce({a}.float(), 0, torch.zeros_like({b}, dtype=torch.long), {b}.float(), 'mean')",
    "{a}.float().scatter(0, ({b}.long() % 2).abs(), 0.5)", "{a}.index_copy(0, torch.tensor([1, 0]), {b}[:2].to({a}.dtype))", "torch.take({a}, ({b}.long().abs() % {a}.numel()))",
    "F.huber_loss({a}.float(), {b}.float())", "F.gaussian_nll_loss({a}.float(), {b}.float(), {a}.float().abs() + 1)", "F.poisson_nll_loss({a}.float().clamp(-2, 2), {b}.float().abs())",
    "F.bilinear({a}.float().flatten()[None, :2], {b}.float().flatten()[None, :3], torch.ones(2, 2, 3) * 0.1)", "torch.ger({a}.float().flatten()[:2], {b}.float().flatten()[:2]).mT",
)
REDUCE: Final = (
    "{a}.sum()", "{a}.sum({d})", "{a}.sum({d}, keepdim=True)", "{a}.mean({d})", "{a}.float().mean()", "{a}.amax({d})", "{a}.amin({d}, keepdim=True)",
    "{a}.argmax({d})", "{a}.float().var({d}, unbiased=False)", "{a}.float().std(unbiased=False)", "torch.logsumexp({a}.float(), {d})", "{a}.any({d})",
    "{a}.all()", "{a}.prod({d}).clamp(-50, 50)", "F.softmax({a}.float(), {d})", "F.log_softmax({a}.float(), {d})", "{a}.cumsum({d})", "{a}.max({d}).values",
    "{a}.float().norm(dim={d})", "{a}.min({d}).values", "F.normalize({a}.float(), dim={d})", "{a}.sort({d}).values", "{a}.topk(2, {d}).values",
    "F.layer_norm({a}.float(), {a}.shape[-1:])", "{a}.count_nonzero({d})", "{a}.argmin()", "{a}.median()", "torch.var_mean({a}.float(), {d}, unbiased=False)[0]",
    "{a}.sum((0, -1))", "{a}.float().mean((0, 1), keepdim=True)", "{a}.amax((0, -1))", "{a}.amin((-1, 0), keepdim=True)", "{a}.float().var((0, -1))",
    "{a}.float().std({d}, correction=0, keepdim=True)", "{a}.float().nansum({d})", "torch.aminmax({a}, dim={d}).max", "{a}.float().cumprod({d}).clamp(-9, 9)",
    "torch.cummax({a}, {d}).values", "torch.logcumsumexp({a}.float(), {d})", "{a}.median({d}).values", "{a}.float().quantile(0.4)", "{a}.kthvalue(1, {d}).values",
    "{a}.sum(dtype=torch.float64)", "{a}.sum({d}, dtype=torch.int64)", "{a}.float().norm(1)", "{a}.float().norm(p=float('inf'), dim={d})",
    "torch.linalg.vector_norm({a}.float(), 3, {d})", "{a}.all({d}, keepdim=True)", "{a}.nonzero()", "{a}.argsort({d}, stable=True)", "{a}.diff(dim={d})",
    "torch.std_mean({a}.float())[1]", "F.softmin({a}.float(), {d})", "{a}.float().mean(-1).sum()", "{a}.unique()", "torch.histc({a}.float(), 4, -2, 2)",
    "torch.bincount({a}.flatten().long().abs() % 5, minlength=5)", "{a}.float().trace()", "{a}.float().softmax(-1).argmax(-1)",
    "torch.logsumexp({a}.float(), (0, -1))", "{a}.any()", "{a}.prod().float().tanh()", "F.rms_norm({a}.float(), {a}.shape[-1:])", "{a}.max()",
    "{a}.min({d}, keepdim=True).indices", "{a}.float().renorm(2, 0, 1.0)", "{a}.flip({d}).cumsum({d}).flip({d})", "torch.trapezoid({a}.float(), dim={d})",
    "{a}.sum({d}) / {a}.shape[{d}]",
    "torch.unique_consecutive({a}.flatten())", "{a}.sort({d}, descending=True).indices", "{a}.topk(2, {d}, largest=False).indices", "{a}.mode({d}).values", "{a}.float().logsumexp(-1, keepdim=True)",
    "{a}.int().sum({d})", "{a}.bool().sum({d})", "{a}.to(torch.uint8).prod({d})", "{a}.half().sum()", "{a}.bfloat16().mean({d})", "{a}.long().cumsum({d})", "{a}.int().amax()", "{a}.bool().cumsum({d})",
    "torch.var_mean({a}.float(), {d})[0].nan_to_num(0)", "torch.linalg.norm({a}.float())", "torch.linalg.vector_norm({a}.float(), 0)",
)
VIEW: Final = (
    "{a}.t()", "{a}.transpose(0, {d})", "{a}.mT", "{a}.unsqueeze({d})", "{a}.squeeze()", "{a}[0]", "{a}[-1]", "{a}[:, 0]", "{a}[1:]", "{a}[::2]", "{a}[..., :2]",
    "{a}.reshape(-1)", "{a}.reshape({a}.shape[0], -1)", "{a}.view(-1)", "{a}.flatten()", "{a}.expand(2, *{a}.shape)", "{a}.permute(*reversed(range({a}.dim())))",
    "{a}.chunk(2, {d})[0]", "{a}.split(2, {d})[-1]", "{a}.narrow({d}, 0, 2)", "{a}.diagonal()", "{a}.unbind(0)[0]", "{a}.select({d}, 1)", "{a}[None]", "{a}.detach()",
    "{a}.contiguous()", "{a}.clone()", "{a}.flip({d})", "{a}.roll(1, {d})", "{a}.repeat(2, *[1] * ({a}.dim() - 1))", "F.pad({a}, (1, 1))", "F.pad({a}, (1, 0), value=2.0)",
    "{a}.tril()", "{a}.triu(1)", "{a}.as_strided((2, 2), (1, 1))", "{a}.unfold(0, 2, 1)", "{a}.swapaxes(0, {d})", "{a}.movedim(0, -1)", "{a}.unflatten(0, (-1, 1))",
    "{a}[torch.arange({a}.shape[0]) % 2]", "{a}[{a} > 0]", "{a}.gather(0, torch.zeros_like({a}, dtype=torch.long))", "{a}.index_select(0, torch.tensor([0, 1]))",
    "torch.take_along_dim({a}, {a}.argsort({d}), {d})", "{a}.repeat_interleave(2, {d})", "torch.meshgrid({a}.flatten()[:2], {a}.flatten()[:3], indexing='ij')[1]",
    "{a}.transpose(0, {d})[1:].unsqueeze({d})", "{a}[1:][:2].flatten()", "{a}[..., None].expand(*{a}.shape, 2)", "{a}[:, None]", "{a}[1:-1]", "{a}[:, [0, 2]]",
    "{a}[[1, 0]]", "{a}[torch.tensor([[0, 1], [1, 0]])]", "{a}[:, torch.tensor([2, 0])]", "{a}[torch.tensor([0, 1]), torch.tensor([2, 0])]",
    "{a}[torch.tensor([0, 1])[:, None], torch.tensor([2, 0, 1])]", "{a}[..., torch.tensor([1, 0]), None]", "{a}[-1:, ..., ::2]", "{a}[:n]", "{a}[: n // 2]",
    "{a}[n - 2:]", "{a}.reshape(n, -1)", "{a}.flatten()[n % 3:]", "{a}.tensor_split(3, {d})[1]", "{a}.split([1, {a}.shape[0] - 1])[1]", "{a}.hsplit(1)[0]",
    "F.pad({a}, (-1, 0))", "F.pad({a}, (0, 1, 1, 0))", "F.pad({a}.float()[None, None].flatten(0, -2), (1, 2), mode='reflect')",
    "F.pad({a}.float()[None, None].flatten(0, -2), (1, 1), mode='circular')", "F.pad({a}.float()[None, None].flatten(0, -2), (2, 1), mode='replicate')", "{a}.tile(2)",
    "{a}.tile(2, 1)", "{a}.rot90(1, (0, -1))", "torch.block_diag({a}.flatten()[:2], {a}.flatten()[:3])", "{a}.diag_embed()", "{a}.diag()", "{a}.fliplr()",
    "{a}.take(torch.tensor([0, 1, 1]))", "{a}.unfold(-1, 2, 1).sum(-1)", "{a}.as_strided((2, 2), (1, 2), 1)",
    "{a}.masked_select({a} > 0)", "{a}.mT.contiguous().mT", "{a}.contiguous().view({a}.shape[0], -1)", "{a}.select_scatter({a}.select(0, 0) * 2, 0, 1)",
    "{a}.slice_scatter({a}[:1] + 1, 0, 0, 1)", "{a}.diagonal(1)", "{a}.squeeze({d})", "{a}.ravel()[::3]", "{a}.index_select({d}, torch.tensor([1, 0, 1]))",
    "torch.atleast_2d({a})", "{a}.view(*{a}.shape, 1)", "{a}.repeat(2, *{a}.shape[:0], *[1] * ({a}.dim() - 1))", "{a}.broadcast_to(2, *{a}.shape)[1]", "{a}.T",
    "torch.roll({a}, (1, -1), (0, -1))", "{a}[{a}.shape[0] // 2]", "{a}[(({a}.flatten().long().abs()) % {a}.shape[0])[:4]]",
    "{a}.contiguous(memory_format=torch.channels_last)", "{a}.permute(0, 2, 3, 1)", "{a}.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)", "{a}.to(memory_format=torch.channels_last) * 2",
    "torch.split({a}, [1, 1, {a}.shape[0] - 2])[1]", "torch.cat({a}.split(1), 0)", "torch.stack({a}.unbind(-1), 0)", "torch.cat([q * 2 for q in {a}.chunk(3, {d})], {d})", "{a}[:0]", "{a}.narrow(0, 1, 0)",
    "F.pad({a}, (1, 1, 2, 0), value=-1.0)", "F.pad({a}, (-1, 2))", "F.pad({a}.float()[None], (1, 1), mode='replicate')", "{a}.expand(3, *{a}.shape).reshape(-1)", "{a}.unfold({d}, 2, 2)", "{a}[:, ::2][..., None]",
    "torch.as_strided({a}, (2,), (0,))", "{a}.reshape(-1, 1, 1).expand(-1, 2, 3)", "{a}.T.reshape(-1)[1:]", "{a}.mT.flatten().unsqueeze(0)", "torch.squeeze({a}, (0, -1))",
)
CAST: Final = ("{a}.float()", "{a}.double()", "{a}.to(torch.bfloat16)", "{a}.half()", "{a}.long()", "{a}.int()", "{a}.bool()", "{a}.to(torch.uint8)", "{a}.type_as({b})", "{a}.to({b}.dtype)", "{a}.short()", "{a}.to(torch.int8)", "{a}.to(torch.float64)", "{a}.half().float()", "{a}.char().float()", "{a}.to(torch.complex64).real", "{a}.bfloat16() * {b}.float().mean()", "{a}.half() + {b}.to(torch.int8)")
MAKE: Final = (
    "torch.zeros_like({a})", "torch.ones_like({a})", "torch.full_like({a}, {k})", "torch.arange({a}.shape[0])", "torch.zeros({a}.shape[0], 3)", "torch.rand_like({a}.float())",
    "torch.randn({a}.shape)", "torch.eye(3)", "{a}.new_full((2, 3), {k})", "torch.tensor([{k}, 1.0, {j}])", "F.dropout({a}.float(), 0.4)", "torch.linspace(0, {j} + 1, 4)",
    "F.one_hot(({a}.flatten()[:5].long() % 3).abs(), 3)", "torch.randint(0, 5, (3,))",
    "torch.arange(n)", "torch.arange(0, n, 2) * 0.5", "torch.zeros(n, 3)", "torch.full((n,), {k})", "torch.ones(3, n, dtype=torch.int32)",
    "torch.tril(torch.ones(n, n))", "torch.randperm(n)", "torch.empty(n, 3).fill_({k})", "torch.tensor(n)", "torch.tensor([n, 1])", "torch.scalar_tensor({k})",
    "torch.bernoulli(torch.full((n,), 0.5))", "torch.normal(0.0, 1.0, (n,))", "{a}.new_zeros(n)", "torch.zeros_like({a}, dtype=torch.float32)",
    "torch.arange(n)[:, None] >= torch.arange(n)", "torch.hann_window(4)", "torch.logspace(0, 1, 3)",
)
LAYER: Final = (
    "F.linear({a}.float().reshape(-1, {a}.shape[-1]), torch.ones(3, {a}.shape[-1]) * 0.1)", "F.conv1d({a}.float().reshape(1, 1, -1), torch.ones(2, 1, 3) * 0.2, padding=1)",
    "F.avg_pool1d({a}.float().reshape(1, 1, -1), 2, 1, 1)", "F.max_pool1d({a}.float().reshape(1, 1, -1), 2)", "F.embedding(({a}.flatten()[:6].long() % 4).abs(), {b}.float().flatten()[:4, None] * torch.ones(4, 3))",
    "F.scaled_dot_product_attention(*[{a}.float().reshape(1, 1, -1, 1)] * 3)", "F.cross_entropy({a}.float().reshape({a}.shape[0], -1), torch.zeros({a}.shape[0], dtype=torch.long))",
    "F.group_norm({a}.float().reshape(1, 1, -1), 1)", "F.interpolate({a}.float().reshape(1, 1, -1), scale_factor=2)", "torch.scatter_add(torch.zeros(5), 0, ({a}.flatten().long() % 5).abs(), {a}.float().flatten())",
    "F.conv2d({a}.float().flatten()[:12].reshape(1, 1, 3, 4), torch.ones(2, 1, 2, 2) * 0.3, stride=2)",
    "F.max_pool2d({a}.float().flatten()[:12].reshape(1, 1, 3, 4), 2, 1)",
    "F.avg_pool2d({a}.float().flatten()[:12].reshape(1, 1, 3, 4), 2, 1, 1, count_include_pad=False)", "F.adaptive_avg_pool1d({a}.float().reshape(1, 1, -1), 3)",
    "F.batch_norm({a}.float().reshape({a}.shape[0], -1), torch.zeros({a}.numel() // {a}.shape[0]), torch.ones({a}.numel() // {a}.shape[0]), training=True)",
    "F.interpolate({a}.float().flatten()[:12].reshape(1, 1, 3, 4), size=(5, 3), mode='bilinear')", "NET({a}.float().flatten()[:6].reshape(2, 3))",
    "NET({a}.float().reshape(-1, 3))", "NET.eval()({a}.float().reshape(-1, 3))", "NET.gate({a}.float())",
    "F.conv_transpose1d({a}.float().reshape(1, 1, -1), torch.ones(1, 2, 3) * 0.2)",
    "F.nll_loss(F.log_softmax({a}.float().reshape({a}.shape[0], -1), 1), torch.zeros({a}.shape[0], dtype=torch.long))",
    "F.embedding_bag(({a}.flatten()[:6].long() % 4).abs().reshape(2, -1), torch.ones(4, 3) * {k})", "F.glu({a}.float().reshape(-1, 2))",
    "F.multi_margin_loss({a}.float().reshape({a}.shape[0], -1), torch.zeros({a}.shape[0], dtype=torch.long))",
    "torch.scatter_reduce(torch.zeros(4), 0, ({a}.flatten().long() % 4).abs(), {a}.float().flatten(), 'amax')",
    "F.instance_norm({a}.float().flatten()[:6].reshape(1, 2, 3))",
    "F.scaled_dot_product_attention(*[{a}.float().flatten()[:12].reshape(1, 2, 3, 2)] * 3, is_causal=True)",
    "F.unfold({a}.float().flatten()[:12].reshape(1, 1, 3, 4), 2)", "F.pixel_shuffle({a}.float().flatten()[:4].reshape(1, 4, 1, 1), 2)",
    "F.kl_div({a}.float().log_softmax(-1), {a}.float().softmax(-1), reduction='sum') + 0.25",
    "F.conv2d({a}.float(), torch.ones(2, {a}.shape[1], 2, 2) * 0.1, torch.ones(2), padding=1)", "F.conv2d({a}.float(), torch.ones({a}.shape[1], 1, 1, 2) * 0.2, groups={a}.shape[1])",
    "F.conv_transpose2d({a}.float(), torch.ones({a}.shape[1], 2, 2, 2) * 0.1, stride=2)", "F.max_pool2d({a}.float(), 2, 1)", "F.avg_pool2d({a}.float(), 2, 1, ceil_mode=True)", "F.max_pool2d({a}.float(), 2, 1, return_indices=True)[1]",
    "F.adaptive_avg_pool2d({a}.float(), 2)", "F.adaptive_max_pool2d({a}.float(), (1, 2))", "F.batch_norm({a}.float(), None, None, training=True)", "F.group_norm({a}.float(), 1)", "F.instance_norm({a}.float())",
    "F.interpolate({a}.float(), scale_factor=2, mode='bilinear', align_corners=True)", "F.interpolate({a}.float(), size=(3, 2))", "F.layer_norm({a}.float(), {a}.shape[-2:])", "F.local_response_norm({a}.float(), 2)",
    "F.lp_pool2d({a}.float().abs() + 0.1, 2, 2)", "F.pixel_unshuffle({a}.float(), 2)", "F.channel_shuffle({a}.float(), 1)", "F.fold(F.unfold({a}.float(), 2), {a}.shape[-2:], 2)",
    "NET.conv({a}.float()[:, :2])", "NET.conv.eval()({a}.float()[:, :2])", "NET.train()({a}.float().reshape(-1, 3))", "NET.gru({a}.float().reshape(1, -1, 3))[0]", "F.multi_head_attention_forward(*[{a}.float().reshape(-1, 1, 2)] * 3, 2, 1, torch.ones(6, 2) * 0.1, None, None, None, False, 0.0, torch.eye(2), None)[0]",
)
MUTATE: Final = (
    "{a}.add_(1)", "{a}.mul_(0.5)", "{a}.relu_()", "{a}[0] = {k}", "{a}[..., 0] += 2", "{a}.copy_({b})", "{a}.clamp_(-2, 2)", "{a}.zero_()", "{a}.sub_({b})", "{a}.t().mul_(2)",
    "{a}.view(-1)[1:].add_(1)", "{a}.fill_({k})", "{a}.masked_fill_({a} > 1, 0)", "{a}[1:] = {a}[:-1].clone()", "{a} += {b}", "{a}.index_fill_(0, torch.tensor([0]), 1.0)",
    "torch.mul({a}, 2, out={a})", "{a}.transpose(0, -1)[0].neg_()", "{a}.index_put_((torch.tensor([0]),), {a}[0] * 0 + 1)", "{a}.scatter_(0, torch.zeros_like({a}, dtype=torch.long)[:1], 1)",
    "{a}[..., :2] *= 0.5", "{a}[{a} > 0] = 0", "{a}[[0, 1]] = {k}", "{a}[torch.tensor([1, 0])] += 1", "{a}[:, 1:].copy_({a}[:, :-1].clone())", "{a}.T.add_(1)",
    "{a}.flatten()[0].add_(1)", "{a}.unsqueeze(0)[0, 1:].mul_({k})", "{a}.index_add_(0, torch.tensor([0, 0]), {a}[:2].clone())",
    "{a}.masked_scatter_({a} > 0, {a}.flatten().clone())", "{a}.diagonal().zero_()", "torch.add({b}, 1, out={a})", "{a}.add_({b}, alpha=2)",
    "{a}.unbind(0)[0].sub_(1)", "{a}.chunk(2)[0].fill_({k})", "{a}.addcmul_({b}, {b})", "{a}.lerp_({b}, 0.5)", "{a}.sigmoid_()", "F.relu_({a})",
    "{a}.detach().add_(1)", "{a}.data.mul_(0.5)", "{a}.squeeze().clamp_(min=0)", "{a}.cumsum_(0)", "{a}.swapaxes(0, -1)[..., :1].zero_()",
    "{a}[0], {a}[1] = {a}[1].clone(), {a}[0].clone()", "{a}.expand(2, *{a}.shape)[0].add_(1)", "{a}.tril_()", "{a}.bitwise_and_(3)", "{a}.neg_().abs_()",
    "{a}.view(-1)[::2].zero_()", "{a}.random_(0, 4)", "{a}.uniform_()", "{a}.index_copy_(0, torch.tensor([1]), {a}[:1].clone())",
    "{a}.scatter_add_(0, torch.zeros_like({a}, dtype=torch.long), {a}.clone())", "{a} *= n", "{a}.transpose(0, -1).copy_({b})", "{a}.resize_as_({a})",
    "{a}.index_put_((torch.tensor([0, 1, 0]),), {a}[0].clone(), accumulate=True)", "{a}.scatter_reduce_(0, torch.zeros_like({a}, dtype=torch.long), {a}.clone(), 'amax')", "{a}.put_(torch.tensor([0, 1]), {a}.flatten()[:2].clone())",
    "{a}.index_reduce_(0, torch.tensor([0, 0]), {a}[:2].clone(), 'amin')", "{a}.squeeze_(0).unsqueeze_(0)", "{a}.t_().t_()", "{a}.floor_divide_(2)", "{a}.remainder_(3)", "{a}.logical_not_()", "{a}[..., -1:] = {b}[..., :1]",
    "{a}[{b} > 0] = 1", "{a}[:, 0], {a}[0] = 1, 2", "{a}.split(1)[-1].add_({k})", "{a}.permute(*reversed(range({a}.dim()))).mul_(2)", "{a}[1:2].copy_({b}[:1])", "torch.sub({a}, {b}, out={a})", "{a}.fill_diagonal_({k})",
)
COMPOUND: Final = (
    "acc = []\nfor i in range(n % 4 + 1):\n    acc.append({a} * (i + {k}))\n{t} = torch.stack(acc)", "{t} = {a}.clone()\nfor row in {t}.unbind(0):\n    row.mul_(0.5)", "{t} = {a}.clone()\n{t}[0] = {b}.float().mean()",
    "w = {a}.clone()\n{t} = w.view(-1)\nw.add_(1)", "w = {a} * 1\n{t} = w[1:]\n{t}.mul_(2)\n{t} = {t} + w[:-1]", "parts = {a}.split(2, {d})\n{t} = parts[0].sum() + parts[-1].float().mean()", "{t} = torch.zeros({b}.shape)\n{t}[:2] = {b}[:2]\n{t} += 1",
    "def inner(q, s={k}):\n    return torch.tanh(q) * s + {b}.float().mean()\n{t} = inner({a})", "{t} = {a}\nwhile {t}.dim() > 1:\n    {t} = {t}.sum(0)", "i = int({a}.float().abs().sum() * 4 + 0.37) % 2\n{t} = {b}[i]",
    "if {a}.float().mean().item() > {k} + 0.137:\n    {t} = {a} + 1\nelse:\n    {t} = {a} - 1", "print({a}.shape)\n{t} = {a} * 2", "with torch.autocast('cpu', dtype=torch.bfloat16):\n    {t} = {a}.float().reshape(-1, {a}.shape[-1]) @ torch.ones({a}.shape[-1], 3)",
    "with torch.no_grad():\n    {t} = {a} * 2\n    {t}.add_({b})", "{t} = {a}.detach().clone()\n{t}.requires_grad_({t}.is_floating_point())\n{t} = {t} * 2", "u, {t} = torch.sort({a}, {d})", "{t}, u = {a}.max({d})", "{t} = [q * 0.5 for q in {a}][-1]",
    "m = {a} > {k}\n{t} = {a}.clone()\n{t}[m] = {k}", "m = {a}.clone()\nm[m > 0] += 1\n{t} = m", "{t} = {a}.new_zeros({a}.shape[0], n)\n{t}[:, 0] = {a}.reshape({a}.shape[0], -1)[:, 0]", "w = {a}.clone()\nu = w[::2]\nw.mul_(3)\n{t} = u + 1\nu.add_({t})",
    "{t} = {a}.clone()\nu = {t}.T\nu[0] = {k}\n{t} = {t} * 1", "{t} = {a}\nfor i in range({b}.dim()):\n    {t} = {t} * 0.5 + {b}.shape[i]", "w = {a}.clone()\nw += w.T if w.dim() == 2 and w.shape[0] == w.shape[1] else w\n{t} = w", "k = {a}.shape[0] * 2 - n\n{t} = {b} * k if k > 0 else {b} - k",
    "{t} = {a}.float()\n{t} = {t} - {t}.mean(-1, keepdim=True)\n{t} = {t} / ({t}.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()", "{t} = {a}.tolist()\n{t} = torch.tensor({t})", "try:\n    {t} = {a} @ {b}\nexcept RuntimeError:\n    {t} = {a} + 1",
    "u = torch.empty_like({a}.float())\ntorch.sin({a}.float(), out=u)\n{t} = u", "w = {a}.clone()\nw.view(-1)[:2], {t} = 0, w.sum()", "w = [{a}, {b}]\nw.reverse()\n{t} = w[0] + w[1]", "n = n + 1\n{t} = {a} * n\nn = n - 1",
    "{t} = {a}\nfor i in range(3):\n    if {t}.float().sum() > i + 0.137:\n        {t} = {t} * 0.5\n    else:\n        {t} = {t} + {b}.float().mean()", "{t} = {a} * 1\nfor q in {b}.flatten()[:3]:\n    if q > 0.137:\n        {t} = {t} + q\n        continue\n    {t} = {t} - 1",
    "try:\n    {t} = {a} + 1\n    print({t}.sum() > 0.137)\n    {t} = {t} * 2\nfinally:\n    n = n + 0", "try:\n    {t} = {a} * 2\n    if {t}.float().sum() > 0.137:\n        raise ValueError('up')\n    {t} = {t} - 1\nexcept ValueError as error:\n    {t} = {a} + len(str(error))",
    "with torch.no_grad():\n    {t} = {a} * 2\n    if {t}.float().mean() > 0.137:\n        {t} = {t} + {b}\n    {t} = {t} * 0.5", "with torch.enable_grad():\n    {t} = ({a} * 2).sum()\n    print({t} > 1.137)\n    {t} = {t} + {b}", "w = [{a}, {b}]\nw.sort(key=lambda q: round(float(q.float().sum()), 1))\n{t} = w[0] * 2",
    "NET.count += 1\n{t} = {a} * NET.count", "NET.train()\nwith torch.no_grad():\n    {t} = NET({a}.float().reshape(-1, 3)) * 2", "NET.cache = {a}.detach()\n{t} = NET.cache + {b}", "{t} = {a}.float().clone().requires_grad_()\n{t} = torch.autograd.grad(({t} * {t}).sum(), {t})[0]",
    "{t} = torch.utils.checkpoint.checkpoint(lambda q: torch.tanh(q) * q, {a}.float(), use_reentrant=False)", "with torch.autocast('cpu', dtype=torch.bfloat16):\n    {t} = NET.conv({a}.float()[:, :2])\n{t} = {t}.float()", "{t} = torch.zeros(0, 3)\nfor q in {a}.float().reshape(-1, 3):\n    {t} = torch.cat([{t}, q[None]])",
)
KINDS: Final = ((UNARY, 22), (BINARY, 22), (REDUCE, 14), (VIEW, 20), (CAST, 5), (MAKE, 5), (LAYER, 6), (MUTATE, 10), (COMPOUND, 8))
INPUTS: Final = (
    "torch.randn(n, 3)", "torch.randn(n)", "torch.randn(3)", "torch.randn(1, 3)", "torch.randn(n, 1)", "torch.randn(())", "torch.randn(2, n, 3)", "torch.randn(3, n).t()",
    "torch.randint(-3, 4, (n, 3))", "torch.rand(n, 3) > 0.5", "torch.randn(n, 3).bfloat16()", "torch.randn(n, 3).half()", "torch.randn(n, 3).double()", "torch.randn(4, n, 3)[1:3]",
    "torch.randn(2, 3, n, 2)", "torch.randn(3, 4, 2).transpose(0, 2)", "torch.randn(n, 3, dtype=torch.float64).t()", "torch.randint(-9, 9, (2, n), dtype=torch.int8)", "torch.randint(0, 2, (3, 1)).short()", "torch.randn(0, 3)",
    "torch.tensor(2, dtype=torch.int64)", "torch.tensor(1.5, dtype=torch.float64)", "torch.randn(n, n)", "torch.randn(1, 1, 3).bfloat16()", "torch.randn(n + 1, 3)[1:]", "torch.randn(n, 2, 3).permute(2, 0, 1)", "torch.randn(n, 6)[:, ::2]", "torch.randint(0, 9, (n,)).to(torch.uint8)", "torch.randint(-5, 5, (3,)).int()", "torch.randn(1, 3).expand(n, 3)",
    "torch.randn(2, 3, n, 4).to(memory_format=torch.channels_last)", "torch.randn(1, 2, 3, n)", "torch.randn(2, 4, n, 3).contiguous(memory_format=torch.channels_last)[:, ::2]", "torch.randn(n, 4, 2, 2)", "torch.randn(2, n, 0)",
    "torch.randn(2, 2, n, n).bfloat16().to(memory_format=torch.channels_last)", "torch.rand(()) > 0.5", "torch.randint(0, 5, (n, 2), dtype=torch.int32).t()", "torch.randn(1).half()", "torch.randn(n, 3)[::2]",
)
IMAGES: Final = tuple(text for text in INPUTS if text.partition(")")[0].count(",") == 3)
"""One program in five is about tensors of four dimensions."""
PRELUDE: Final = """import torch.utils.checkpoint
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.weight = torch.nn.Parameter(torch.randn(3, 3) * 0.3)
        self.bias = torch.nn.Parameter(torch.zeros(3))
        self.scale = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.norm = torch.nn.BatchNorm1d(3)
        self.conv = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 2, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.MaxPool2d(2, 1))
        self.gru = torch.nn.GRU(3, 2, batch_first=True)
        self.register_buffer('calls', torch.zeros((), dtype=torch.long))
        self.register_buffer('mean', torch.zeros(3))
        self.count = 0
    def forward(self, v):
        self.calls += 1
        self.count += 1
        self.mean = self.mean * 0.9 + v.detach().mean(0) * 0.1
        v = self.norm(torch.tanh(F.linear(v, self.weight, self.bias)))
        return v if self.training else v - self.mean
    def gate(self, v):
        with torch.no_grad():
            self.mean.mul_(0.5).add_(v.mean())
        return v * self.scale + self.bias.sum()
NET = Net()"""
CONDITIONS: Final = ("if {a}.shape[0] > 4:", "if {a}.dim() == 2:", "if {a}.sum() > 0.137:", "for i in range(3):", "for i in range({a}.shape[0]):", "with torch.no_grad():", "while {a}.shape[0] > 1000:",
    "if n > 4:", "for i in range(n % 3):", "if {a}.dtype == torch.float32 or {a}.is_floating_point():", "if not ({a}.abs() > 0.01).any():", "if {a}.float().max() > 1.137 and n > 2:", "with torch.enable_grad():", "if {a}.requires_grad:")
MOST_ELEMENTS: Final = 3000
ROUNDING: Final = 1e-6
"""A number smaller than this is likely to be zero but for rounding, and its sign, or that it is not zero, chance."""


class Builder:
    """Grows one program while running it in eager for each input size."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sizes = self.random.choice(((4, 4), (4, 4), (5, 5), (4, 4, 7), (4, 6, 9), (4, 2, 4), (3, 5, 1, 8)))
        self.choices = IMAGES if seed % 5 == 4 else INPUTS
        self.inputs = [self.pick_input() for _ in range(self.random.randint(1, 4))]
        self.scopes: list[dict[str, Any]] = []
        for call in range(len(self.sizes)):
            torch.manual_seed(call)
            scope = {"torch": torch, "F": F, "n": self.sizes[call]}
            values = [eval(text, scope) for text in self.inputs]
            exec(PRELUDE, scope)
            self.scopes.append({**scope, **{f"x{i}": value for i, value in enumerate(values)}})
        self.made = 0

    def pick_input(self) -> str:
        text = self.random.choice(self.choices)
        wants = "int" not in text and "int64" not in text and ">" not in text and "uint" not in text and "expand" not in text and "[" not in text
        return text + ".requires_grad_()" if wants and "." not in text.split(")")[-1] and self.random.random() < 0.4 else text

    def names(self) -> list[str]:
        return [name for name, value in self.scopes[0].items() if isinstance(value, torch.Tensor)]

    def fill(self, template: str, target: str = "") -> str:
        """Put names and numbers into a template, recent values more often."""
        known = self.names()
        recent = known[-4:] if self.random.random() < 0.7 else known
        return template.format(a=self.random.choice(recent), b=self.random.choice(known), k=self.random.choice((0.5, -1.0, 1.5, 2.0)),
                               j=self.random.choice((0, 1, 2)), d=self.random.choice((0, -1, 1)), t=target)

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
        if group is COMPOUND:
            self.made += not inside
            return Stmt(self.fill(self.random.choice(group), self.old_target() if inside else f"v{self.made}"))
        text = self.fill(self.random.choice(group))
        if group is MUTATE:
            return Stmt(text)
        if inside:
            return Stmt(f"{self.old_target()} = {text}")
        self.made += 1
        return Stmt(f"v{self.made} = {text}")

    def old_target(self) -> str:
        return self.random.choice([name for name in self.names() if name.startswith("v")] or ["v0"])

    def block(self) -> Stmt:
        head = self.fill(self.random.choice(CONDITIONS))
        return Stmt(head, tuple(self.statement(inside=True) for _ in range(self.random.randint(1, 3))))


def copy_value(value: Any) -> Any:
    """Mutation trials on plain copies: whether eager accepts the mutation of a leaf is checked by the real run."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def mutates(text: str) -> bool:
    return "_(" in text or "] =" in text or "+=" in text or "*=" in text or "out=" in text or "], {" in text


def acceptable(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return True
    if value.numel() > MOST_ELEMENTS:
        return False
    if not value.is_floating_point() or not value.numel():
        is_wide = value.dtype in (torch.int32, torch.int64)  # the least number: what C++ made of not-a-number
        return not is_wide or not bool((value == torch.iinfo(value.dtype).min).any())
    sizes = value.detach().abs()
    return bool(torch.isfinite(value).all()) and float(sizes.max()) < 1e3 and not bool(((sizes > 0) & (sizes < ROUNDING)).any())


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
        parameters = (*(f"x{i}" for i in range(len(builder.inputs))), "n")
        return Program(seed, (Stmt(PRELUDE),), builder.sizes, parameters, (*builder.inputs, "n"), tuple(body), returns)
