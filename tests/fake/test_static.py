"""Static inference against real execution, and how a Fake looks to user code."""
from __future__ import annotations

import contextlib
import copy
import itertools
import subprocess
import sys
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

import dovetail
from dovetail.errors import DataDependentValue, FailedFake
from dovetail.fake import Fake, FakeMode, fake_like, type_of
from dovetail.fake.form import dense_strides, iterator_strides
from tests.fake.crossref import Crossref, describe
from tests.sweeps.torch_testing import OPS

LISTED = ("all", "any", "cdist", "fill", "norm", "nn.functional.glu", "nn.functional.logsigmoid", "nn.functional.prelu",
          "nn.functional.soft_margin_loss", "nn.functional.triplet_margin_loss")  # fmt: skip
SLICE = list(dict.fromkeys([*LISTED, *(name for name in sorted(OPS)[::8] if "jiterator" not in name)]))
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def _check(op: Any, dtype: torch.dtype, layout: str) -> None:
    needs_grad = op.supports_autograd and dtype == torch.float32
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=needs_grad))
    with Crossref() as seen:
        for sample in samples[:: max(1, len(samples) // 2)]:
            inputs = (sample.input, sample.args, sample.kwargs)
            if layout == "channels_last":
                inputs = tree_map_only(torch.Tensor, _channels_last, inputs)
            try:
                result = op.op(inputs[0], *inputs[1], **inputs[2])
                outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
                leaves = [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.requires_grad]
                if outputs:
                    torch.autograd.grad(outputs, leaves, [torch.ones_like(t) for t in outputs], allow_unused=True)
            except (FailedFake, NotImplementedError) as error:
                pytest.skip(str(error))
    assert not seen.differences


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.dim() != 4:
        return tensor
    return tensor.detach().contiguous(memory_format=torch.channels_last).requires_grad_(tensor.requires_grad)


@pytest.mark.parametrize("name", SLICE)
def test_op_metadata(name: str) -> None:
    op = OPS[name]
    for dtype in DTYPES:
        if dtype in op.dtypes:
            _check(op, dtype, "as is")


@pytest.mark.parametrize("name", [n for n in sorted(OPS) if n.startswith(("nn.functional.conv", "nn.functional.max_pool",
    "nn.functional.batch_norm", "nn.functional.interpolate", "cat", "nn.functional.pad", "clone"))])  # fmt: skip
def test_op_metadata_channels_last(name: str) -> None:
    _check(OPS[name], torch.float32, "channels_last")


def test_fake_like_keeps_metadata() -> None:
    base = torch.randn(6, 8, requires_grad=True)
    for tensor in (base, base[1:, ::2], base.t(), torch.zeros(3, dtype=torch.int8)):
        fake = fake_like(tensor)
        assert describe(fake) == describe(tensor)
        assert fake.requires_grad == tensor.requires_grad and fake.is_leaf


def test_parameters_stay_parameters() -> None:
    fake = fake_like(torch.nn.Parameter(torch.randn(3)))
    assert isinstance(fake, torch.nn.Parameter) and fake.requires_grad
    assert isinstance(copy.deepcopy(fake), torch.nn.Parameter)


def test_metas_keep_the_offset() -> None:
    fake = fake_like(torch.randn(4, 4)[1:, ::2])
    assert fake.storage_offset() == 4 and describe(fake.meta)[:3] == describe(fake)[:3]
    assert fake.meta.storage_offset() == 4


def test_views_and_in_place() -> None:
    with FakeMode():
        x = torch.zeros(4, 6)
        view = x[1:, ::2]
        assert view._base is x and view.meta.storage_offset() == 6
        version = x._version
        assert view.add_(1) is view and x._version > version
        x.t_()
        assert x.shape == (6, 4) and x.stride() == (1, 6)
        x.unsqueeze_(0).resize_(2, 3)
        assert x.shape == (2, 3)


def test_gradients_reach_leaves() -> None:
    x = fake_like(torch.randn(8, 64, requires_grad=True))
    weight = fake_like(torch.nn.Parameter(torch.randn(32, 64)))
    loss = F.layer_norm(F.linear(x, weight).relu(), (32,)).sum()
    assert loss.grad_fn is not None
    grads = torch.autograd.grad(loss, [x, weight])
    assert [tuple(g.shape) for g in grads] == [(8, 64), (32, 64)]


def test_known_values() -> None:
    with FakeMode():
        x = torch.tensor([1, 2, 3])
        assert (x + 1).tolist() == [2, 3, 4] and bool(x.sum() == 6)
        part = x[1:]
        part.add_(1)
        assert x.tolist() == [1, 3, 4]
        part.mul_(torch.arange(2))
        with pytest.raises(DataDependentValue):
            x.tolist()


UNKNOWN = [
    lambda x: x.sum().item(), lambda x: bool(x.sum() > 1), lambda x: x.nonzero(), lambda x: x[x > 0],
    lambda x: torch.unique(x), lambda x: x.tolist(), lambda x: x.numpy(), lambda x: torch.equal(x, x),
    lambda x: x.data_ptr(), lambda x: float(x[0]), lambda x: x.masked_select(x > 0),
]  # fmt: skip


@pytest.mark.parametrize("use", UNKNOWN)
def test_values_are_refused(use: Any) -> None:
    with FakeMode(), pytest.raises(DataDependentValue):
        use(fake_like(torch.arange(5)))


def test_devices() -> None:
    cuda = Fake(torch.empty(3, device="meta"), torch.device("cuda", 0))
    host = fake_like(torch.tensor(2.0))
    assert cuda.is_cuda and (cuda * host).device == cuda.device
    with pytest.raises(RuntimeError, match="same device"):
        cuda + fake_like(torch.zeros(3))


def test_numbers_and_tensors_promote_differently() -> None:
    """A remembered result must not be taken for another one: 1, 1.0, True and a tensor are four cases."""
    x = fake_like(torch.zeros(3, dtype=torch.int32))
    tensor = fake_like(torch.zeros(20, 1, dtype=torch.int64))
    got = [torch.add(x, other) for other in (1, 1.0, True, tensor)]
    assert [g.dtype for g in got] == [torch.int32, torch.float32, torch.int32, torch.int64]
    assert got[3].shape == (20, 3)


def test_autocast_and_inference_mode() -> None:
    x = fake_like(torch.randn(4, 4))
    with torch.autocast("cpu"):
        assert (x @ x).dtype == torch.bfloat16
    with torch.inference_mode():
        assert F.linear(x, x).reshape(2, 8).shape == (2, 8)


def test_type_of() -> None:
    assert str(type_of(fake_like(torch.zeros(64, 8).t()))) == "f32[8, 64]{1, 8}"


def test_sparse_is_refused() -> None:
    with pytest.raises(FailedFake):
        fake_like(torch.zeros(3, 3).to_sparse())


def test_common_ops_import_no_compiler() -> None:
    """Python meta kernels import hundreds of modules; a model's usual ops must not need any."""
    code = """
import sys, torch, torch.nn.functional as F
from dovetail.fake import Fake, FakeMode, fake_like
before = set(sys.modules)
x = fake_like(torch.randn(2, 8, 16, requires_grad=True))
w = fake_like(torch.randn(16, 16, requires_grad=True))
image = fake_like(torch.randn(2, 3, 8, 8))
with FakeMode():
    q = (x @ w).view(2, 8, 2, 8).transpose(1, 2)
    h = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(2, 8, 16)
    h = F.layer_norm(F.gelu(h + x), (16,)) * torch.arange(16)
    loss = F.cross_entropy(h.reshape(16, 16), torch.zeros(16, dtype=torch.long)) + h.softmax(-1).mean()
    torch.autograd.grad(loss, [x, w])
    y = F.max_pool2d(F.relu(F.conv2d(image, torch.randn(4, 3, 3, 3))), 2)
    y = F.batch_norm(y, torch.zeros(4), torch.ones(4), w[0, :4], training=True)
    F.interpolate(F.hardswish(y), scale_factor=2).sum().backward()
with torch.inference_mode(), FakeMode():
    F.rms_norm(F.linear(fake_like(torch.randn(2, 16)), w), (16,))
with FakeMode():
    y = F.glu(x) + F.prelu(F.logsigmoid(x), w[0, :1])[..., :8] + F.soft_margin_loss(x, x.detach() + 1)
    torch.autograd.grad((y * F.triplet_margin_loss(x, x + 1, x + 2)).sum(), [x])
    torch.cdist(x, x).sum() * (y > 0).any() + torch.fill(y, 1)
half = [Fake(torch.empty(n, device="meta", dtype=torch.bfloat16), torch.device("cuda", 0)) for n in (16, 16)]
with FakeMode():
    F.layer_norm(half[0], (16,), half[1], half[1])
print(sorted(m for m in set(sys.modules) - before if m.startswith(("sympy", "torch._dynamo"))))
"""

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("weight", [(3, 3, 1, 1), (8, 3, 3, 3), (8, 1, 3, 3)])
@pytest.mark.parametrize("which", ["input", "weight", "both"])
def test_convolutions_follow_either_operands_layout(weight: tuple[int, ...], which: str) -> None:
    x, w = torch.randn(2, 3 if weight[1] == 3 else 8, 9, 9), torch.randn(weight)
    x = x.contiguous(memory_format=torch.channels_last) if which != "weight" else x
    w = w.contiguous(memory_format=torch.channels_last) if which != "input" else w

    def convolve(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(x, w, groups=x.shape[1] // w.shape[1])

    assert dovetail.compile(convolve)(x, w).stride() == convolve(x, w).stride()


def test_strides_of_single_elements_are_kept_where_eager_keeps_them() -> None:
    x = torch.randn(1, 3, 4).transpose(0, 1)
    for f in (F.hardtanh, F.relu6, F.relu, lambda x: F.prelu(x, torch.ones(1)), torch.nan_to_num, torch.deg2rad):
        for dynamic in (False, True):
            assert dovetail.compile(f, dynamic=dynamic)(x).stride() == f(x).stride()


@pytest.mark.parametrize("shape", [(4, 4, 1), (1, 4, 4), (2, 4, 1, 3), (4, 1)])
@pytest.mark.parametrize("call", [lambda x, i: x[:, i], lambda x, i: x[i], lambda x, i: x.flip(0), lambda x, i: x.sort(0).indices])
def test_strides_of_single_elements_take_part_in_indexing(shape: tuple[int, ...], call: Any) -> None:
    index = torch.tensor([0, 0])
    for order in itertools.permutations(range(len(shape))):
        for gap in (0, 1, 2):
            x = torch.empty_strided(shape, dense_strides([n + gap for n in shape], order)).zero_()
            assert call(fake_like(x), fake_like(index)).stride() == call(x, index).stride(), (shape, order, gap)


def test_an_unbatched_volume_keeps_its_channels_innermost() -> None:
    volumes = torch.randn(1, 4, 6, 6, 6).to(memory_format=torch.channels_last_3d)
    for x in (volumes[0], volumes, volumes[0].contiguous(), volumes[0, :2], volumes[0, :1]):
        assert F.max_pool3d(fake_like(x), 2).stride() == F.max_pool3d(x, 2).stride()


def test_a_number_to_the_power_of_a_tensor_is_row_major() -> None:
    for x in (torch.randn(4, 5).t(), torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)):
        assert dovetail.compile(lambda x: 2**x)(x).stride() == (2**x).stride()


@pytest.mark.parametrize("arguments", [(1, 2), (1,), ((1, 2), (1, 2)), (0, 1), ((0, 1), (1, 2)), (-1, -1)])
def test_rolled_images_keep_their_layout(arguments: tuple[Any, ...]) -> None:
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    rolled = dovetail.compile(lambda x: torch.roll(x, *arguments))(x)
    assert rolled.stride() == torch.roll(x, *arguments).stride() and torch.equal(rolled, torch.roll(x, *arguments))


def _laid_out(random: Random) -> torch.Tensor:
    """A small tensor with its dimensions in any order, gaps, and many of them of one element."""
    size = [random.choice((1, 1, 2, 3, 4)) for _ in range(random.randint(1, 5))]
    order = random.sample(range(len(size)), len(size))
    tensor = torch.zeros([size[d] for d in order]).permute([order.index(d) for d in range(len(size))])
    if len(size) == 4 and random.random() < 0.4:
        tensor = tensor.to(memory_format=torch.channels_last)
    return tensor[tuple(slice(None, None, random.choice((1, 1, 1, 2))) for _ in size)]


def test_results_are_laid_out_as_eagers_iterator_does() -> None:
    random = Random(7)
    for _ in range(600):
        x = _laid_out(random)
        others = (torch.empty_like(x), x.contiguous(), _laid_out(random))
        geometry = (x.size(), x.stride())
        assert iterator_strides(x.shape, [geometry]) == list((-x).stride()), geometry
        assert iterator_strides(x.shape, [geometry, ((), ())]) == list((x * 2).stride()), geometry
        for y in others:
            with contextlib.suppress(RuntimeError):  # shapes that do not go together
                want, pair = x + y, [geometry, (y.size(), y.stride())]
                assert iterator_strides(want.shape, pair) == list(want.stride()), pair


def at_most(x: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    return torch.clamp(x, max=bound)


@pytest.mark.parametrize("function", [torch.add, torch.eq, torch.true_divide, torch.atan2, torch.logical_and, torch.where, torch.clamp_max, at_most], ids=lambda f: f.__name__)
def test_results_of_expanded_tensors_of_several_types_are_laid_out_as_in_eager(function: Any) -> None:
    """The CPU copies an operand of another type than it computes in, and the copy is not expanded."""
    image, rows = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.ones(4).expand(2, 3, 4, 4)
    for one, other in itertools.product((torch.bool, torch.int32, torch.int64, torch.bfloat16, torch.float32, torch.float64), repeat=2):
        if function is at_most and torch.bool in (one, other):
            continue
        for x, y in ((rows.to(one), image.to(other)), (torch.ones(4, dtype=one).expand(2, 3, 4, 4), image.to(other))):
            for pair in ((x, y), (y, x)):
                call = ((rows if pair[0] is x else image).bool(), *pair) if function is torch.where else pair
                with FakeMode():
                    made = function(*map(fake_like, call))
                want = function(*call)
                assert (made.stride(), made.dtype) == (want.stride(), want.dtype), (one, other, pair[0] is x)


ACTIVATIONS = (F.hardswish, F.hardsigmoid, F.hardtanh, F.mish, F.leaky_relu, F.elu, F.softplus, F.softshrink, F.hardshrink,
               lambda x: F.prelu(x, torch.ones(())), lambda x: 1 - x, lambda x: F.hardswish(x + 0, inplace=True))  # fmt: skip


@pytest.mark.parametrize("function", ACTIVATIONS)
def test_activations_and_their_gradients_are_laid_out_as_in_eager(function: Any) -> None:
    random = Random(3)
    for _ in range(20):
        real, mode = _laid_out(random), contextlib.nullcontext()
        found = []
        for x in (real, fake_like(real)):
            with FakeMode() if type(x) is Fake else mode:
                y = function(x.requires_grad_())
                (gradient,) = torch.autograd.grad(y, x, y.detach())
            found.append([(t.size(), [s for n, s in zip(t.size(), t.stride()) if n > 1], t.dtype) for t in (y, gradient)])
        assert found[0] == found[1]


@pytest.mark.parametrize("size", [(2, 4, 1, 1), (1, 4, 1, 3), (2, 4, 3, 1), (2, 1, 3, 3)])
def test_images_of_one_pixel_or_channel_stay_channels_last(size: tuple[int, ...]) -> None:
    def f(x: torch.Tensor) -> Any:
        y = x.double()
        return (y, F.interpolate(y, size=(3, 2)), F.avg_pool2d(y, 1), F.adaptive_avg_pool2d(y, 2), F.pad(y, (1, 1, 1, 1)),
                torch.cat([part * 2 for part in y.chunk(3, -1)], -1), y.flip(1), y[torch.tensor([0, 0])], y.tril())  # fmt: skip

    x = torch.randn(size).to(memory_format=torch.channels_last)
    assert [t.stride() for t in dovetail.compile(f)(x)] == [t.stride() for t in f(x)]


def test_division_of_two_types_is_laid_out_by_its_first_operand() -> None:
    x, y = torch.randn(2, 4), torch.ones(4, 2, dtype=torch.int32).t()
    assert dovetail.compile(torch.floor_divide)(x, y).stride() == torch.floor_divide(x, y).stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_norms_keep_their_statistics_as_the_cpu_does(dtype: torch.dtype, parameters: torch.dtype) -> None:
    aten = torch.ops.aten
    images, voxels = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5, 6)
    layouts = [voxels.to(memory_format=torch.channels_last_3d), images.to(memory_format=torch.channels_last),
               images, images.transpose(0, 3), torch.randn(4, 3)]  # fmt: skip
    for x, is_training in itertools.product(layouts, [True, False]):
        w = torch.ones(x.shape[1], dtype=parameters if dtype is torch.bfloat16 else dtype)
        rest = (w, w, is_training, 0.1, 1e-5)
        calls = [(aten._native_batch_norm_legit_functional.default, (x.to(dtype), w, w, *rest)),
                 (aten.native_batch_norm.default, (x.to(dtype), w, w, w.clone(), w.clone(), *rest[2:])),
                 (aten._native_batch_norm_legit_no_training.default, (x.to(dtype), w, w, w, w, 0.1, 1e-5)),
                 (aten.native_layer_norm.default, (x.to(dtype).transpose(1, -1), w.shape, w, w, 1e-5))]  # fmt: skip
        for op, given in calls:
            real = op(*given)
            with FakeMode():
                fakes = op(*[fake_like(a) if isinstance(a, torch.Tensor) else a for a in given])
            assert [(t.size(), t.stride(), t.dtype) for t in fakes] == [(t.size(), t.stride(), t.dtype) for t in real]


@pytest.mark.parametrize("shape", [(5, 5, 5), (5, 0, 5), (4, 4)])
def test_a_result_of_a_given_number_of_rows(shape: tuple[int, ...]) -> None:
    """PyTorch's meta kernel says columns, as nonzero gives them; the CPU gives rows."""
    x = torch.rand(shape)
    found = dovetail.compile(lambda x: torch.nonzero_static(x, size=6))(x)
    wanted = torch.nonzero_static(x, size=6)
    assert torch.equal(found, wanted) and found.stride() == wanted.stride()


@pytest.mark.parametrize("function", [torch.cov, torch.corrcoef])
def test_a_number_that_was_made_a_tensor_is_known(function: Any) -> None:
    """torch.cov divides by a tensor of one number, and looks whether that is positive."""
    x, z = (torch.arange(8.0).view(2, 4).sin().requires_grad_() for _ in range(2))
    compiled = dovetail.compile(lambda x: function(x) * 2, fullgraph=True)
    for made in (function(x) * 2, compiled(z)):
        made[0, 1].backward()
    torch.testing.assert_close(compiled(x), function(x) * 2)
    torch.testing.assert_close(z.grad, x.grad)
