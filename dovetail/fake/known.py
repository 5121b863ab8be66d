"""What an op returns, without running any kernel: sizes by its shape rule, dtype and strides by table.

    aten.mm of f32[8, 64] and f32[64, 32]      ->  [((8, 32), (32, 1), torch.float32)]

torch's meta kernels know all ops, but most are written in Python: the first call of one imports
hundreds of modules (seconds), and each call takes 100 us. So the ops that models are made of are
known here; None means: ask the meta kernel.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, Final, TypeAlias

import torch

from dovetail.fake import form as forms
from dovetail.fake.form import Form, Shape, Unruled, channels_last, is_laid_out, iterator_strides
from dovetail.fake.rules import Call, index, pool, select, slice_, view
from dovetail.ir.expr import ONE, Expr

DTypes: TypeAlias = "Callable[[Call], torch.dtype | list[torch.dtype | None]]"
Layout: TypeAlias = "Callable[[Call, tuple[int, ...]], Sequence[int] | None]"


# -- dtypes --------------------------------------------------------------------------------------------


def first(c: Call) -> torch.dtype:
    return c.first.dtype  # type: ignore[return-value]


def asked(c: Call) -> torch.dtype:
    """The argument `dtype`, else the first tensor's."""
    return c.get("dtype") or first(c)


def summed(c: Call) -> torch.dtype:
    """Sums of integers and bools are int64."""
    found = asked(c)
    return found if c.get("dtype") or found.is_floating_point or found.is_complex else torch.int64


def of_numbers(c: Call, *values: Any) -> torch.dtype:
    """The argument `dtype`, else what eager makes of such numbers."""
    if any(type(value) is complex for value in values):
        raise Unruled
    is_bool, is_whole = (all(isinstance(v, kinds) for v in values) for kinds in (bool, (int, Expr)))
    plain = torch.int64 if is_whole else torch.get_default_dtype()
    return c.get("dtype") or (torch.bool if is_bool else plain)


def only(holds: Callable[[Call], bool], dtypes: DTypes) -> Any:
    """Only where that holds; other calls are left to the kernel."""

    def derive(c: Call) -> Any:
        if not holds(c):
            raise Unruled
        return dtypes(c)

    return derive


on_cpu = partial(only, lambda c: c.device == "cpu")
joined = only(lambda c: len({t.dtype for t in c.tensors}) == 1, first)
floating = only(lambda c: asked(c).is_floating_point, asked)
plain_float = only(lambda c: first(c) in (torch.float32, torch.float64), first)


def statistics(c: Call, on_gpu: torch.dtype | None = None) -> list[torch.dtype | None]:
    """A norm's results. The CPU keeps mean and variance in the input's type, or in that of its parameters if
    it is wider; a GPU those of half types in `on_gpu`, if that is known."""
    kinds = {t.dtype for t in c.tensors}
    if first(c) not in (torch.float16, torch.bfloat16) or (c.device != "cpu" and on_gpu is None):
        return [plain_float(c)] * 3
    kept = on_gpu if c.device != "cpu" else torch.float32 if torch.float32 in kinds else first(c)
    return [first(c), kept, kept]


def _of_weight(c: Call) -> torch.dtype:
    weight = c.get("weight")
    return weight.dtype if isinstance(weight, Form) else first(c)  # type: ignore[return-value]


def masked(c: Call) -> list[torch.dtype | None]:
    """As the first tensor, but parameters' gradients as the weight; None where output_mask has False."""
    dtypes = (first(c), *[_of_weight(c)] * 2)
    return [dtype if wanted else None for dtype, wanted in zip(dtypes, c["output_mask"])]


# -- strides -------------------------------------------------------------------------------------------


def contiguous(c: Call, shape: tuple[int, ...]) -> list[int]:
    return forms.dense_strides(shape, range(len(shape))[::-1])


def _numbers(form: Form) -> tuple[list[int], list[int]]:
    return [x.value for x in form.shape], [x.value for x in form.stride]


def preserved(c: Call, shape: tuple[int, ...]) -> Sequence[int] | None:
    """As the first tensor is, made dense; or as the argument memory_format says."""
    wanted = c.values.get("memory_format")
    if wanted == torch.contiguous_format:
        return contiguous(c, shape)
    if wanted not in (None, torch.preserve_format):
        return channels_last(shape)
    size, stride = _numbers(c.first)
    return stride if forms.is_dense(size, stride) else iterator_strides(shape, [(size, stride)])


def _is_contiguous(form: Form) -> bool:
    size, stride = _numbers(form)
    return is_laid_out(size, stride, forms.dense_strides(size, range(len(size))[::-1]))


def from_contiguous(c: Call, shape: tuple[int, ...]) -> list[int] | None:
    """Row-major where all operands are, and not channels-last too; other cases are left to the kernel."""
    is_plain = all(_is_contiguous(t) and not _suggests_channels_last(t) for t in c.tensors)
    return contiguous(c, shape) if is_plain else None


def indexed(c: Call, shape: tuple[int, ...]) -> list[int] | None:
    """As the iterator goes over the memory and the index: strides of single elements take part."""
    at, *others = [d for d, given in enumerate(c["indices"]) if given is not None]
    if others or not _is_contiguous(index := c["indices"][at]):
        return from_contiguous(c, shape)
    placed = (1,) * at + tuple(_numbers(index)[0]) + (1,) * (c.first.ndim - at - 1)
    stride = _numbers(c.first)[1]
    stride[at : at + 1] = [0] * index.ndim
    return iterator_strides(shape, [(shape, stride), (placed, contiguous(c, placed))])


def as_image(c: Call, shape: tuple[int, ...]) -> list[int] | None:
    """Channels-last in, channels-last out."""
    if not _suggests_channels_last(c.first):
        return contiguous(c, shape) if all(map(_is_contiguous, c.tensors)) else None
    size, stride = _numbers(c.first)
    is_last = is_laid_out(size, stride, channels_last(size)) and len(size) == len(shape)
    return channels_last(shape) if is_last else None


def convolved(c: Call, shape: tuple[int, ...]) -> list[int] | None:
    """Channels-last where the input or the weight suggests it."""
    images = (c["input"], c["weight"])
    if any(map(_suggests_channels_last, images)):
        return channels_last(shape) or contiguous(c, shape)
    return contiguous(c, shape) if all(map(_is_contiguous, images)) else None


def concatenated(c: Call, shape: tuple[int, ...]) -> list[int] | None:
    """Channels-last where all parts suggest it."""
    is_last = all(map(_suggests_channels_last, c.tensors))
    return channels_last(shape) if is_last else contiguous(c, shape)


def rolled(c: Call, shape: tuple[int, ...]) -> list[int] | None:
    """Two parts put together the other way round, dim by dim; a part may be empty, and then it is plain."""
    moved = [shift % shape[dim] for shift, dim in zip(c["shifts"], c.get("dims", ())) if shape[dim]]
    return (concatenated if c.device == "cpu" and moved and all(moved) else contiguous)(c, shape)


def _suggests_channels_last(form: Form) -> bool:
    return forms.seems_channels_last(*_numbers(form))


def viewed(c: Call, shape: tuple[int, ...]) -> list[int] | None:
    """A view in all but name: the rule's own strides."""
    said = view(c)
    return [x.value for x in said.stride] if isinstance(said, Form) else None


def normalised(c: Call, shape: tuple[int, ...]) -> list[int] | None:
    """The CPU's batch norm keeps channels-last images, gaps or not, and makes everything else row-major."""
    if len(shape) != c.first.ndim or _is_contiguous(c.first):
        return contiguous(c, shape)
    is_sparse = c.device == "cpu" and _suggests_channels_last(c.first)
    is_image = is_sparse or is_laid_out(*_numbers(c.first), channels_last(shape))
    return channels_last(shape) if is_image else contiguous(c, shape) if c.device == "cpu" else None


def attended(c: Call, shape: tuple[int, ...]) -> list[int]:
    """The output is laid out as the query; the log-sum-exp is made as (batch, sequence, head)."""
    if len(shape) == 4:
        return iterator_strides(shape, [_numbers(c["query"])])
    return heads_inside(c, shape)


def heads_inside(c: Call, shape: tuple[int, ...]) -> list[int]:
    batch, sequence, head, *rest = contiguous(c, (shape[0], shape[2], shape[1], *shape[3:]))
    return [batch, head, sequence, *rest]


# -- the table -------------------------------------------------------------------------------------------


def _table(*rows: tuple[DTypes, Layout, str]) -> dict[str, tuple[DTypes, Layout]]:
    return {f"aten.{name}": (dtypes, layout) for dtypes, layout, names in rows for name in names.split()}


KNOWN: Final[dict[str, tuple[DTypes, Layout]]] = _table(
    (lambda c: c["weight"].dtype, contiguous, "embedding"),
    (first, contiguous, "mm bmm addmm baddbmm repeat tril triu"),
    (first, viewed, "_unsafe_view"),
    (first, convolved, "convolution"),
    (masked, convolved, "convolution_backward"),
    (masked, from_contiguous, "native_group_norm_backward native_batch_norm_backward"),
    (masked, contiguous, "native_layer_norm_backward _fused_rms_norm_backward"),
    (statistics, normalised, "native_batch_norm"),
    (on_cpu(statistics), normalised,
     "_native_batch_norm_legit _native_batch_norm_legit_no_training"),
    (on_cpu(lambda c: [*statistics(c), c["running_mean"].dtype, c["running_var"].dtype]), normalised,
     "_native_batch_norm_legit_functional"),
    (lambda c: [first(c), *[_of_weight(c)] * 2] if c.device == "cpu" else statistics(c), from_contiguous,
     "native_group_norm"),
    (partial(statistics, on_gpu=torch.float32), contiguous, "native_layer_norm"),
    (lambda c: [first(c)] * 2, contiguous, "_thnn_fused_gru_cell cudnn_grid_sampler_backward"),
    (lambda c: [first(c)] * 5 if c["has_bias"] else [*[first(c)] * 3, None, None], contiguous,
     "_thnn_fused_gru_cell_backward"),
    (lambda c: [plain_float(c), torch.float32], attended, "_scaled_dot_product_flash_attention_for_cpu"),
    (lambda c: [first(c)] * 3, heads_inside, "_scaled_dot_product_flash_attention_for_cpu_backward"),
    (first, from_contiguous, """
        gather index_select scatter scatter_add index_add index_copy glu mv slice_scatter select_scatter
        dot nll_loss_backward bernoulli constant_pad_nd _safe_softmax
        glu_backward log_sigmoid_backward soft_margin_loss_backward"""),
    (first, indexed, "index _unsafe_index"),
    (first, preserved, "flip index_put"),
    (lambda c: [first(c), torch.int64], preserved, "sort"),
    (lambda c: [first(c)] * 2, from_contiguous, "_prelu_kernel_backward"),
    (lambda c: torch.uint8 if first(c) == torch.uint8 else torch.bool, contiguous, "any all"),
    (first, contiguous, """
        embedding_dense_backward slice_backward select_backward masked_fill amax amin cudnn_grid_sampler
        mse_loss_backward smooth_l1_loss_backward huber_loss_backward"""),
    (on_cpu(lambda c: [first(c)] * 2), contiguous, "log_sigmoid_forward"),
    (summed, contiguous, "sum prod"),
    (floating, contiguous, "mean var std logsumexp linalg_vector_norm norm"),
    (lambda c: [floating(c)] * 2, contiguous, "var_mean std_mean"),
    (lambda c: torch.int64, contiguous, "argmax argmin"),
    (summed, from_contiguous, "cumsum cumprod"),
    (lambda c: torch.float32 if c["half_to_float"] else first(c), from_contiguous, "_softmax _log_softmax"),
    (lambda c: c.get("input_dtype", first(c)), contiguous,
     "_softmax_backward_data _log_softmax_backward_data"),
    (lambda c: [first(c), torch.int64], from_contiguous,
     "topk cummax cummin max_pool2d_with_indices max min median"),
    (asked, preserved, "fill clone _to_copy zeros_like ones_like full_like empty_like rand_like randn_like"),
    (lambda c: c.get("dtype") or torch.get_default_dtype(), contiguous, "zeros ones rand randn"),
    (lambda c: of_numbers(c, c.get("fill_value", c.get("s"))), contiguous, "full scalar_tensor"),
    (lambda c: of_numbers(c, c.get("start", 0), c["end"], c.get("step", 1)), contiguous, "arange"),
    (lambda c: c["dtype"] if isinstance(c["dtype"], torch.dtype) else torch.int64, contiguous, "randint"),
    (asked, contiguous, "new_zeros new_ones new_full new_empty"),
    (joined, concatenated, "cat"),
    (first, rolled, "roll"),
    (lambda c: [first(c), torch.bool], preserved, "native_dropout"),
    (joined, from_contiguous, "stack mse_loss smooth_l1_loss huber_loss"),
    (floating, from_contiguous, "soft_margin_loss"),
    (lambda c: (joined(c), floating(c))[1], from_contiguous,
     "binary_cross_entropy binary_cross_entropy_with_logits binary_cross_entropy_backward _cdist_forward"),
    (lambda c: [first(c)] * 2, contiguous, "nll_loss_forward nll_loss2d_forward"),
    (first, as_image, """
        avg_pool2d _adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d
        max_pool2d_with_indices_backward avg_pool2d_backward _adaptive_avg_pool2d_backward"""),
    (on_cpu(first), concatenated,
     "channel_shuffle upsample_nearest2d_backward upsample_bilinear2d_backward"),
    (on_cpu(first), as_image, """
        upsample_bicubic2d upsample_linear1d upsample_trilinear3d pixel_shuffle reflection_pad2d
        replication_pad2d reflection_pad3d replication_pad3d reflection_pad2d_backward
        replication_pad2d_backward reflection_pad3d_backward replication_pad3d_backward"""),
)  # fmt: skip
"""Op -> the dtype of its results, and their strides."""

FILLS: Final = frozenset(
    "aten." + name
    for name in """
    fill_ zero_ bernoulli_ normal_ uniform_ random_ exponential_ masked_fill_ copy_ index_put_
    _index_put_impl_ scatter_ scatter_add_ index_add_ index_copy_ index_fill_""".split()
)
"""Ops that write to their first argument and return it."""
LISTED: Final = FILLS | KNOWN.keys()


PRESERVING: Final = ("aten.hardtanh", "aten._prelu_kernel", "aten.deg2rad", "aten.rad2deg", "aten.nan_to_num")
"""Elementwise ops whose result is made with empty_like, not by the iterator."""

UNUSUAL: Final = frozenset({
    "aten.pow.Scalar", "aten.ldexp.Tensor", "aten.mvlgamma.default", "aten.max.default", "aten.min.default",
    "aten.median.default",
})  # fmt: skip
"""Overloads that the rows above do not describe."""


def derive_known(func: Any, facts: Any, call: Call) -> list[Any] | None:
    """One (size, stride, dtype) per result; any list for an op that writes; None: ask the kernel."""
    if facts.base in LISTED and is_suspect(facts.base, call):
        raise Suspected
    if facts.base in FILLS:
        return []
    if facts.name in UNUSUAL:
        return None
    try:
        if facts.base in KNOWN:
            return _listed(facts, call)
        return [_elementwise(func, facts, call)]
    except Unruled:
        return None


def _listed(facts: Any, call: Call) -> list[Any] | None:
    dtypes_of, layout = KNOWN[facts.base]
    said, dtypes = facts.rule(call), dtypes_of(call)
    shapes = said if isinstance(said, list) else [said] * facts.count
    kinds = dtypes if isinstance(dtypes, list) else [dtypes] * facts.count
    if len(shapes) != facts.count or len(kinds) != facts.count:
        return None

    def made(shape: Any, dtype: torch.dtype) -> tuple[Any, ...]:
        size = () if shape is None else tuple(x.value for x in getattr(shape, "shape", shape))
        if shape is None or (stride := layout(call, size)) is None:
            raise Unruled
        return size, tuple(stride), dtype

    return [None if dtype is None else made(shape, dtype) for shape, dtype in zip(shapes, kinds)]


def _elementwise(func: Any, facts: Any, call: Call) -> tuple[Any, ...]:
    size = tuple(x.value for x in facts.rule(call))
    if facts.mutates and size != tuple(x.value for x in call.first.shape):
        raise Unruled
    dtype = _promoted(func, facts, call)
    operands = [_cast(call, t, dtype) if call.device == "cpu" else _numbers(t) for t in call.tensors]
    if any(isinstance(call.values.get(name), (int, float, complex, Expr)) for name in ("self", "other")):
        operands.append(([], []))  # a number in a tensor's place
    is_like = facts.base in PRESERVING and forms.is_dense(*operands[0])
    stride = operands[0][1] if is_like else iterator_strides(size, operands)
    return size, tuple(stride), dtype


def _cast(call: Call, operand: Form, made: torch.dtype) -> tuple[list[int], list[int]]:
    """The CPU first copies what has another dtype than it computes in: then nothing is expanded any more."""
    size, stride = _numbers(operand)
    if 0 in stride and operand not in (call.get("condition"), call.get("mask")):
        start = made if made.is_floating_point else torch.bool
        common = reduce(torch.promote_types, (t.dtype or start for t in call.tensors), start)
        return size, iterator_strides(size, [(size, stride)]) if operand.dtype != common else stride
    return size, stride


def _promoted(func: Any, facts: Any, call: Call) -> torch.dtype:
    """The dtype, by trying the op on single elements: promotion asks for dtypes and for rank 0 only."""
    values = {name: _single(value) for name, value in call.values.items()}
    given = [name for name in facts.names if name in values]
    kwonly = set(facts.keyword_only)
    args = [values[name] for name in given if name not in kwonly]
    kwargs = {name: values[name] for name in given if name in kwonly}
    try:
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            return func(*args, **kwargs).dtype  # type: ignore[no-any-return]
    except (RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise Suspected from error


def _single(value: Any) -> Any:
    if isinstance(value, Form):
        return torch.ones((1,) * min(value.ndim, 1), dtype=value.dtype)
    if isinstance(value, tuple):
        return [_single(v) for v in value]
    return value


# -- calls that eager may refuse: eager's own kernel answers them ----------------------------------


class Suspected(Exception):
    """Eager may refuse the call."""


def is_suspect(base: str, c: Call) -> bool:
    """aten.copy_ of f32[4] into f32[2, 3], say. A call suspected for nothing costs time only, so a check may
    be stricter than eager."""
    checks = CHECKS.get(base.removesuffix("_"), ())
    try:
        return not _has_plain_axes(base, c) or not all(check(c) for check in checks)
    except (IndexError, Unruled):  # a rank too low, or a mask, whose number of elements is not known
        return base not in _MASKED


def _has_plain_axes(base: str, c: Call) -> bool:
    """Every axis is one of the first tensor's, and named once."""
    dims: Any = c.get("dim", c.get("dims"))
    if dims is None:
        return True
    sizes = c.values.get("input_sizes")
    rank = len(sizes) if sizes is not None else c.first.ndim + (base == "aten.stack")
    axes = dims if isinstance(dims, tuple) else (dims,)
    rank = max(rank, 1)
    return all(-rank <= d < rank for d in axes) and len({d % rank for d in axes}) == len(axes)


def _fits(inner: Shape, outer: Shape) -> bool:
    """Whether inner can be broadcast to outer."""
    return len(inner) <= len(outer) and all(a is b or a is ONE for a, b in zip(inner[::-1], outer[::-1]))


def _is_within(inner: Shape, outer: Shape, free: int | None = None) -> bool:
    pairs = enumerate(zip(inner, outer))
    return len(inner) == len(outer) and all(a.value <= b.value or d == free for d, (a, b) in pairs)


def _index_fits(c: Call) -> bool:
    """gather and scatter: within the tensor but for the axis, and within what is written."""
    x, at, source = c["self"], c["index"].shape, c.values.get("src")
    fits = not isinstance(source, Form) or _is_within(at, source.shape)
    return fits and _is_within(at, x.shape, c["dim"] % max(x.ndim, 1))


def _rows_fit(c: Call) -> bool:
    """index_add and its like: one slice of the source for each index."""
    x, at, source = c["self"], c["index"], c.values.get("source")
    d = c["dim"] % max(x.ndim, 1)
    wanted = (*x.shape[:d], at.numel, *x.shape[d + 1 :])
    return at.ndim == 1 and (not isinstance(source, Form) or source.shape == wanted)


def _margins_fit(c: Call) -> bool:
    margins, sizes = (x if isinstance(x, tuple) else (x,) for x in (c.get("padding", 0), c["kernel_size"]))
    return bool(2 * max(margins, default=0) <= min(sizes))


SOURCES: Final = ("src", "source", "values")
_MASKED: Final = frozenset({"aten.index_put", "aten.index_put_", "aten._index_put_impl_"})

_ROWS: Final[tuple[tuple[Callable[[Call], bool], str], ...]] = (
    (lambda c: len({t.dtype for t in c.tensors}) == 1,
     "mm bmm addmm baddbmm mv dot convolution huber_loss soft_margin_loss"),
    (lambda c: c.get("index", c.get("indices")).dtype in (torch.int32, torch.int64),
     "index_select embedding gather scatter scatter_add index_add index_copy index_fill"),
    (lambda c: c.first.dtype != torch.bool, "mm bmm addmm baddbmm mv addmv dot vdot"),
    (lambda c: {c.first.dtype} >= {x.dtype for n in SOURCES if type(x := c.get(n)) is Form},
     "scatter scatter_add index_add index_copy index_put _index_put_impl"),
    (lambda c: len({t.shape for t in c.tensors}) == 1, "dot"),
    (_index_fits, "gather scatter scatter_add"),
    (_rows_fit, "index_add index_copy index_fill"),
    (lambda c: _fits(c["values"].shape, index(c)), "index_put _index_put_impl"),  # type: ignore[arg-type]
    (lambda c: _fits(getattr(c["src"], "shape", ()), c["self"].shape), "copy"),
    (lambda c: _fits(c["mask"].shape, c["self"].shape) and c["mask"].dtype == torch.bool, "masked_fill"),
    (lambda c: c["src"].shape == select(c).shape, "select_scatter"),  # type: ignore[union-attr]
    (lambda c: c["src"].shape == slice_(c).shape, "slice_scatter"),  # type: ignore[union-attr]
    (lambda c: all(size.value > 0 for size in pool(2, c)), "max_pool2d_with_indices avg_pool2d"),  # type: ignore[union-attr]
    (_margins_fit, "max_pool2d_with_indices avg_pool2d"),
    (lambda c: len(c["repeats"]) >= c.first.ndim, "repeat"),
    (lambda c: c.first.ndim > 1, "tril triu"),
    (lambda c: asked(c).is_floating_point or asked(c).is_complex,
     "var std var_mean std_mean binary_cross_entropy_with_logits"),
    (lambda c: c.first.numel.value > 0, "amax amin argmax argmin max min median"),
    (lambda c: c["delta"] > 0, "huber_loss"),
    (lambda c: _is_contiguous(c.first) or _suggests_channels_last(c.first), "native_group_norm"),
    (lambda c: c["p"] >= 0, "_cdist_forward"),
    (lambda c: c["beta"] >= 0, "smooth_l1_loss"),
)
CHECKS: Final[dict[str, list[Callable[[Call], bool]]]] = {}
"""Op -> what must hold."""
for _check, _names in _ROWS:
    for _name in _names.split():
        CHECKS.setdefault(f"aten.{_name}", []).append(_check)
