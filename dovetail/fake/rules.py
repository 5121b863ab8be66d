"""Sizes of results with symbolic sizes, one rule per op family.

    aten.mm      (s0, 64) x (64, 32)      ->  (s0, 32)
    aten.slice   (s0, 64), dim 0, 0:4     ->  a view (4, 64); assumed: 4 <= s0

A rule gets a Call, with arguments by the schema's names, and returns one shape (for all results),
a list of shapes (one per result), or a Form where the result is a view. dtypes, ranks and the order
of strides come from the meta kernel run on the hints, so a rule says sizes only.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import torch

from dovetail.fake import form as forms
from dovetail.fake.form import Form, Shape, Unruled
from dovetail.ir.expr import ONE, ZERO, Expr, add, as_expr, ceildiv, const, eq, floordiv, le, lt, mul, total
from dovetail.sym import Shapes

Result: TypeAlias = "Shape | Form | list[Any]"
_END: Final = (1 << 63) - 1


class Call:
    """An op's arguments by name: tensors as Forms, sizes as ints or Exprs, lists as tuples."""

    __slots__ = ("device", "shapes", "values")

    def __init__(self, shapes: Shapes, values: dict[str, Any], device: str = "cpu") -> None:
        self.shapes, self.values, self.device = shapes, values, device

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    @property
    def tensors(self) -> Iterator[Form]:
        for value in self.values.values():
            if isinstance(value, Form):
                yield value
            elif isinstance(value, tuple):
                yield from (v for v in value if isinstance(v, Form))

    @property
    def first(self) -> Form:
        found = next(self.tensors, None)
        if found is None:  # torch passes 0-d tensors made of Python numbers as those numbers
            raise Unruled
        return found

    def size(self, name: str) -> Shape:
        return tuple(map(as_expr, self.values[name]))

    def holds(self, condition: Expr) -> bool:
        return self.shapes.decide(condition, "an operator's result depends on it")


def _axis(dim: Any, rank: int) -> int:
    return int(dim) % max(rank, 1)


def axes_of(dim: Any, rank: int) -> set[int]:
    if dim is None or (isinstance(dim, tuple) and not dim):
        return set(range(rank))
    return {_axis(d, rank) for d in (dim if isinstance(dim, tuple) else (dim,))}


def _with(shape: Shape, axis: int, size: Expr | int) -> Shape:
    return (*shape[:axis], as_expr(size), *shape[axis + 1 :]) if shape else shape


# -- elementwise, reductions, products -------------------------------------------------------------


def pointwise(c: Call) -> Result:
    return forms.broadcast(c.shapes, *(t.shape for t in c.tensors))


def like(name: str) -> Callable[[Call], Result]:
    return lambda c: c[name].shape


def sized(name: str) -> Callable[[Call], Result]:
    return lambda c: c.size(name)


def likes(*names: str) -> Callable[[Call], Result]:
    """One result after each of these tensors; None where one is absent."""
    return lambda c: [c[name].shape if isinstance(c.values.get(name), Form) else None for name in names]


def reduction(c: Call) -> Result:
    x, dim = c.first, c.get("dim", c.get("axis"))
    axes = axes_of(dim, x.ndim)
    if c.get("keepdim", False):
        return tuple(ONE if d in axes else s for d, s in enumerate(x.shape))
    return tuple(s for d, s in enumerate(x.shape) if d not in axes)


def matmul(c: Call) -> Result:
    """Of matrices or of batches of them, or of a matrix and a vector; perhaps something is added."""
    a, b = c.get("mat1", c.get("batch1", c.get("mat", c.get("self")))), c.get("mat2", c.get("batch2"))
    if b is None:
        v = c.get("vec", c.get("tensor", c.get("other")))
        forms.same_size(c.shapes, a.shape[-1], v.shape[0])
        return a.shape[:-1]  # type: ignore[no-any-return]
    forms.same_size(c.shapes, a.shape[-1], b.shape[-2])
    batch = [forms.same_size(c.shapes, m, n) for m, n in zip(a.shape[:-2], b.shape[:-2])]
    shape = (*batch, a.shape[-2], b.shape[-1])
    return shape if a is c.get("self") else forms.broadcast(c.shapes, shape, c["self"].shape)


# -- views -----------------------------------------------------------------------------------------


def view(c: Call) -> Result:
    x = c["self"]
    shape = forms.complete_shape(c.shapes, c.get("size", c.get("shape")), x.numel)
    strides = forms.view_strides(c.shapes, x, shape)
    if strides is None:
        raise Unruled
    return Form(shape, strides, x.offset)


def expand(c: Call) -> Result:
    x, size = c["self"], c["size"]
    lead = len(size) - x.ndim
    shape, stride = [], []
    for d, wanted in enumerate(size):
        old = x.shape[d - lead] if d >= lead else ONE
        keep = d >= lead and isinstance(wanted, int) and wanted == -1
        new = old if keep else as_expr(wanted)
        if old is not new and not c.holds(eq(old, new)):
            c.shapes.assume(eq(old, 1), "it is expanded")
            stride.append(ZERO)
        else:
            stride.append(x.stride[d - lead] if d >= lead else ZERO)
        shape.append(new)
    return Form(tuple(shape), tuple(stride), x.offset)


def _reordered(x: Form, order: Sequence[int]) -> Form:
    return Form(tuple(x.shape[d] for d in order), tuple(x.stride[d] for d in order), x.offset)


def transpose(c: Call) -> Result:
    x = c["self"]
    order = list(range(x.ndim))
    if x.ndim:
        a, b = _axis(c["dim0"], x.ndim), _axis(c["dim1"], x.ndim)
        order[a], order[b] = order[b], order[a]
    return _reordered(x, order)


def _bound_index(c: Call, index: Any, size: Expr) -> Expr:
    """An index of a slice: negative counts from the end, clamped into [0, size]."""
    at = as_expr(index)
    if c.holds(lt(at, 0)):
        at = add(at, size)
        return ZERO if c.holds(lt(at, 0)) else at
    return size if at.op == "const" and at.value >= _END else at if c.holds(le(at, size)) else size


def slice_(c: Call) -> Result:
    x, step = c["self"], as_expr(c.get("step", 1))
    d = _axis(c.get("dim", 0), x.ndim)
    start = _bound_index(c, c.get("start", 0), x.shape[d])
    end = _bound_index(c, c.get("end", _END), x.shape[d])
    size = ceildiv(add(end, mul(start, -1)), step) if c.holds(le(start, end)) else ZERO
    stride = _with(x.stride, d, mul(x.stride[d], step))
    return Form(_with(x.shape, d, size), stride, forms.shifted(x.offset, x.stride[d], start))


def select(c: Call) -> Result:
    x, index = c["self"], as_expr(c["index"])
    d = _axis(c["dim"], x.ndim)
    if c.holds(lt(index, 0)):
        index = add(index, x.shape[d])
    offset = forms.shifted(x.offset, x.stride[d], index)
    return Form(x.shape[:d] + x.shape[d + 1 :], x.stride[:d] + x.stride[d + 1 :], offset)


def squeeze(c: Call) -> Result:
    x, dim = c["self"], c.get("dim")
    axes = axes_of(dim, x.ndim) if dim != () else set()
    kept = [d for d in range(x.ndim) if d not in axes or not c.holds(eq(x.shape[d], 1))]
    return _reordered(x, kept)


def unsqueeze(c: Call) -> Result:
    x = c["self"]
    d = c["dim"] % (x.ndim + 1)
    step = mul(x.shape[d], x.stride[d]) if d < x.ndim else ONE
    return Form((*x.shape[:d], ONE, *x.shape[d:]), (*x.stride[:d], step, *x.stride[d:]), x.offset)


def _pieces(x: Form, d: int, sizes: Sequence[Expr]) -> list[Form]:
    pieces, start = [], ZERO
    for size in sizes:
        pieces.append(Form(_with(x.shape, d, size), x.stride, forms.shifted(x.offset, x.stride[d], start)))
        start = add(start, size)
    return pieces


def split(c: Call) -> Result:
    x, step = c["self"], as_expr(c["split_size"])
    d = _axis(c.get("dim", 0), x.ndim)
    count = c.shapes.specialise(ceildiv(x.shape[d], step), "the number of pieces of a split")
    last = add(x.shape[d], mul(step, 1 - count))
    return _pieces(x, d, [step] * (count - 1) + [last])


def split_with_sizes(c: Call) -> Result:
    x, sizes = c["self"], c.size("split_sizes")
    d = _axis(c.get("dim", 0), x.ndim)
    forms.same_size(c.shapes, total(sizes), x.shape[d])
    return _pieces(x, d, sizes)


def unbind(c: Call) -> Result:
    x = c["self"]
    d = _axis(c.get("dim", 0), x.ndim)
    count = c.shapes.specialise(x.shape[d], "the number of results of unbind")
    shape, stride = x.shape[:d] + x.shape[d + 1 :], x.stride[:d] + x.stride[d + 1 :]
    return [Form(shape, stride, forms.shifted(x.offset, x.stride[d], const(i))) for i in range(count)]


def as_strided(c: Call) -> Result:
    offset = c.values.get("storage_offset")
    return Form(c.size("size"), c.size("stride"), c["self"].offset if offset is None else as_expr(offset))


def diagonal(c: Call) -> Result:
    x, k = c["self"], as_expr(c.get("offset", 0))
    a, b = _axis(c.get("dim1", 0), x.ndim), _axis(c.get("dim2", 1), x.ndim)
    is_below = c.holds(lt(k, 0))
    rows = add(x.shape[a], k) if is_below else x.shape[a]
    columns = x.shape[b] if is_below else add(x.shape[b], mul(k, -1))
    size = rows if c.holds(le(rows, columns)) else columns
    offset = forms.shifted(x.offset, *(x.stride[a], mul(k, -1)) if is_below else (x.stride[b], k))
    kept = [d for d in range(x.ndim) if d not in (a, b)]
    rest = _reordered(x, kept)
    return Form((*rest.shape, size), (*rest.stride, add(x.stride[a], x.stride[b])), offset)


def unfold(c: Call) -> Result:
    x, size, step = c["self"], as_expr(c["size"]), as_expr(c["step"])
    d = _axis(c["dimension"], x.ndim)
    count = add(floordiv(add(x.shape[d], mul(size, -1)), step), 1)
    stride = (*_with(x.stride, d, mul(x.stride[d], step)), x.stride[d])
    return Form((*_with(x.shape, d, count), size), stride, x.offset)


# -- joining, padding, repeating -------------------------------------------------------------------


def cat(c: Call) -> Result:
    parts = [p for p in c["tensors"] if p.shape != (ZERO,)] or list(c["tensors"])[:1]
    d = _axis(c.get("dim", 0), parts[0].ndim)
    shape = parts[0].shape
    for other in parts[1:]:
        _agree(c, _with(other.shape, d, shape[d]), shape)
    return _with(shape, d, total(p.shape[d] for p in parts))


def stack(c: Call) -> Result:
    parts = c["tensors"]
    shape = parts[0].shape
    for other in parts[1:]:
        _agree(c, other.shape, shape)
    d = c.get("dim", 0) % (len(shape) + 1)
    return (*shape[:d], const(len(parts)), *shape[d:])


def pad(c: Call) -> Result:
    shape, amounts = list(c["self"].shape), c.get("pad", c.get("padding"))
    for i in range(len(amounts) // 2):
        shape[-1 - i] = add(shape[-1 - i], add(amounts[2 * i], amounts[2 * i + 1]))
    return tuple(shape)


def repeat(c: Call) -> Result:
    x, times = c["self"], c.size("repeats")
    shape = (ONE,) * (len(times) - x.ndim) + x.shape
    return tuple(mul(a, b) for a, b in zip(shape, times))


# -- convolution, pooling, resizing ----------------------------------------------------------------


def per_axis(value: Any, count: int) -> tuple[Any, ...]:
    items = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return items * count if len(items) == 1 else items


def convolution(c: Call) -> Result:
    x, w = c["input"], c["weight"]
    n = x.ndim - 2
    names = ("stride", "padding", "dilation", "output_padding")
    strides, pads, gaps, extra = (per_axis(c[name], n) for name in names)
    if c["transposed"]:
        reach = [mul(add(x.shape[i + 2], -1), strides[i]) for i in range(n)]
        spans = [mul(add(w.shape[i + 2], -1), gaps[i]) for i in range(n)]
        sizes = [add(reach[i], spans[i]) + (1 - 2 * as_expr(pads[i]) + extra[i]) for i in range(n)]
        return (x.shape[0], mul(w.shape[1], c["groups"]), *sizes)
    forms.same_size(c.shapes, x.shape[1], mul(w.shape[1], c["groups"]))
    if isinstance(c.values.get("bias"), Form):
        forms.same_size(c.shapes, c["bias"].shape[0], w.shape[0])
    sizes = [_window(x.shape[i + 2], w.shape[i + 2], strides[i], pads[i], gaps[i]) for i in range(n)]
    return (x.shape[0], w.shape[0], *sizes)


def convolution_backward(c: Call) -> Result:
    x, w = c["input"].shape, c["weight"].shape
    return [x, w, c.size("bias_sizes") if c.get("bias_sizes") else w[:1]]


def _window(size: Expr, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Expr:
    """How many positions a sliding window has."""
    span = add(mul(add(kernel, -1), dilation), 1)
    return add(floordiv(add(add(size, mul(padding, 2)), mul(span, -1)), stride), 1)


def pool(n: int, c: Call) -> Result:
    x = c["self"]
    kernel = per_axis(c["kernel_size"], n)
    strides = per_axis(c.get("stride") or kernel, n)
    pads, gaps = per_axis(c.get("padding", 0), n), per_axis(c.get("dilation", 1), n)
    sizes = []
    for i in range(n):
        size = x.shape[i - n]
        if not c.get("ceil_mode", False):
            sizes.append(_window(size, kernel[i], strides[i], pads[i], gaps[i]))
            continue
        span = add(mul(add(kernel[i], -1), gaps[i]), 1)
        out = add(ceildiv(add(add(size, mul(pads[i], 2)), mul(span, -1)), strides[i]), 1)
        starts_inside = lt(mul(add(out, -1), strides[i]), add(size, pads[i]))
        sizes.append(out if c.holds(starts_inside) else add(out, -1))
    return (*x.shape[:-n], *sizes)


def pixel_shuffle(c: Call) -> Result:
    *lead, channels, height, width = c["self"].shape
    r = c["upscale_factor"]
    return (*lead, _divided(c, channels, r * r), mul(height, r), mul(width, r))


def _divided(c: Call, size: Expr, by: int) -> Expr:
    """size // by, which eager demands to be exact."""
    part = floordiv(size, by)
    forms.same_size(c.shapes, mul(part, by), size)
    return part


# -- norms, attention, losses ----------------------------------------------------------------------


def layer_norm(c: Call) -> list[Shape]:
    x, inner = c["input"], c.size("normalized_shape")
    n = len(inner)
    _agree(c, x.shape[x.ndim - n :], inner)
    for name in ("weight", "bias"):
        if isinstance(c.values.get(name), Form):
            _agree(c, c[name].shape, inner)
    stats = x.shape[: x.ndim - n] + (ONE,) * n
    return [x.shape, stats, stats]


def _agree(c: Call, sizes: Shape, others: Shape) -> None:
    if len(sizes) != len(others):
        raise Unruled
    for a, b in zip(sizes, others):
        forms.same_size(c.shapes, a, b)


def _channels_agree(c: Call, size: Expr) -> None:
    for name in ("weight", "bias", "running_mean", "running_var"):
        if isinstance(c.values.get(name), Form):
            _agree(c, c[name].shape, (size,))


def batch_norm(c: Call, training: bool = True) -> Result:
    """The CPU returns no statistics where it uses the running ones."""
    x = c["input"]
    _channels_agree(c, x.shape[1])
    stats = x.shape[1:2] if c.get("training", training) or c.device != "cpu" else (ZERO,)
    return [x.shape, stats, stats]


def gru_cell_backward(c: Call) -> Result:
    batch, width = c["grad_hy"].shape
    gates = mul(width, 3)
    return [(batch, gates), (batch, gates), (batch, width), (gates,), (gates,)]


def group_norm(c: Call) -> Result:
    x, count = c["input"], as_expr(c["N"])
    _agree(c, x.shape[:2], (count, as_expr(c["C"])))
    _channels_agree(c, x.shape[1])
    stats = (count, as_expr(c["group"]))
    return [c["input"].shape, stats, stats]


def attention(c: Call) -> Result:
    """Output and log-sum-exp; further results (seeds, bounds) have fixed sizes."""
    q, k, v = c["query"].shape, c["key"].shape, c["value"].shape
    _agree(c, (q[0], k[0], q[3], k[2]), (k[0], v[0], k[3], v[2]))
    return [(*q[:-1], v[-1]), q[:3]]


def nll_loss(c: Call) -> Result:
    x = c["self"]
    spread = (x.shape[0], *x.shape[2:]) if x.ndim > 1 else ()
    return [spread if c["reduction"] == 0 else (), ()]


# -- indexing --------------------------------------------------------------------------------------


def along(size: Callable[[Call, Expr], Expr], c: Call) -> Result:
    """As the tensor, but for the size along `dim`, which is made of the old one."""
    x, dim = c["self"], c["dim"]
    d = _axis(dim[-1] if isinstance(dim, tuple) else dim, x.ndim)
    return _with(x.shape, d, size(c, x.shape[d])) if x.ndim else ()


def index(c: Call) -> Result:
    x, indices = c["self"], list(c["indices"])
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        raise Unruled
    indices += [None] * (x.ndim - len(indices))
    places = [d for d, i in enumerate(indices) if i is not None]
    picked = forms.broadcast(c.shapes, *(i.shape for i in indices if i is not None))
    kept = [s for s, i in zip(x.shape, indices) if i is None]
    is_together = not places or places == list(range(places[0], places[-1] + 1))
    at = places[0] if places and is_together else 0
    return (*kept[:at], *picked, *kept[at:])


def cdist(c: Call) -> Shape:
    a, b = c["x1"], c["x2"]
    forms.same_size(c.shapes, a.shape[-1], b.shape[-1])
    return (*forms.broadcast(c.shapes, a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-2])


# -- factories -------------------------------------------------------------------------------------


def arange(c: Call) -> Result:
    start, end, step = c.get("start", 0), c["end"], c.get("step", 1)
    if not all(isinstance(v, (int, Expr)) for v in (start, end, step)):
        raise Unruled
    span, step = add(end, mul(start, -1)), as_expr(step)
    if step.hi < 0:
        return (ceildiv(mul(span, -1), mul(step, -1)),)
    return (ceildiv(span, step) if c.holds(le(0, span)) else ZERO,)


# -- the table -------------------------------------------------------------------------------------

Rule: TypeAlias = Callable[[Call], Result]


def view_as_real(c: Call) -> Result:
    x = c["self"]
    return Form((*x.shape, const(2)), (*(mul(s, 2) for s in x.stride), ONE), mul(x.offset, 2))


def view_as_complex(c: Call) -> Result:
    x = c["self"]
    return Form(x.shape[:-1], tuple(floordiv(s, 2) for s in x.stride[:-1]), floordiv(x.offset, 2))


def _table(*rows: tuple[Rule, str]) -> dict[str, Rule]:
    return {f"aten.{name}": rule for rule, names in rows for name in names.split()}


RULES: Final[dict[str, Rule]] = _table(
    (lambda c: c.first.shape, """
        _softmax _log_softmax _safe_softmax cumsum cumprod logcumsumexp cummax cummin
        clone _to_copy flip roll native_dropout zeros_like ones_like full_like empty_like rand_like randn_like
        randint_like bernoulli triu tril sort scatter scatter_add scatter_reduce index_put
        _unsafe_index_put index_add index_copy index_fill slice_scatter select_scatter as_strided_scatter
        diagonal_scatter _softmax_backward_data _log_softmax_backward_data channel_shuffle exponential uniform
        random cauchy log_normal geometric normal_functional fill zero _index_put_impl gelu"""),
    (reduction, """
        sum mean amax amin var std var_mean std_mean logsumexp all any argmax argmin prod max min nansum
        norm linalg_vector_norm median nanmedian count_nonzero mode aminmax kthvalue"""),
    (matmul, "mm addmm _addmm_activation _int_mm bmm baddbmm mv addmv dot vdot"),
    (lambda c: (), "scalar_tensor trace dist _is_all_true _is_any_true"),
    (pointwise, "complex polar masked_fill normal linalg_cross copy"),
    (likes("self", "self"), "log_sigmoid_forward _prelu_kernel_backward"),
    (lambda c: () if c["reduction"] else pointwise(c), """
        binary_cross_entropy_with_logits mse_loss smooth_l1_loss huber_loss binary_cross_entropy
        soft_margin_loss"""),
    *((rule, rule.__name__) for rule in (
        view_as_real, view_as_complex, expand, transpose, select, squeeze, unsqueeze, unbind, as_strided,
        diagonal, unfold, cat, repeat, convolution_backward, pixel_shuffle, arange,
    )),
    (lambda c: _reordered(c["self"], [_axis(d, c["self"].ndim) for d in c["dims"]]), "permute"),
    (view, "view _unsafe_view _reshape_alias _reshape_copy"),
    (lambda c: _reordered(c["self"], range(c["self"].ndim)[::-1]), "t"),
    (slice_, "slice"),
    (split, "split split_copy unsafe_split"),
    (split_with_sizes, "split_with_sizes unsafe_split_with_sizes"),
    (lambda c: c["self"], "detach alias _conj _neg_view"),
    (stack, "stack _stack"),
    (pad, """
        constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
        replication_pad3d"""),
    (convolution, "convolution convolution_overrideable _convolution"),
    (partial(pool, 2), "max_pool2d_with_indices avg_pool2d"),
    (lambda c: (*c["self"].shape[: -len(c["output_size"])], *c.size("output_size")),
     "_adaptive_avg_pool2d _adaptive_avg_pool3d"),
    (lambda c: (*c.first.shape[:2], *c.size("output_size")), """
        upsample_nearest1d upsample_linear1d _upsample_nearest_exact1d upsample_nearest2d upsample_bilinear2d
        upsample_bicubic2d _upsample_nearest_exact2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
        upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact3d"""),
    (lambda c: (*c.first.shape[:2], *c["grid"].shape[1:-1]),
     "grid_sampler_2d grid_sampler_3d cudnn_grid_sampler"),
    (likes("self", "grid"), "cudnn_grid_sampler_backward"),
    (lambda c: [c["hx"].shape, (c["hx"].shape[0], mul(c["hx"].shape[1], 5))], "_thnn_fused_gru_cell"),
    (gru_cell_backward, "_thnn_fused_gru_cell_backward"),
    (lambda c: (*c.size("size")[:1], *c.size("size")[2:], const(len(c["size"]) - 2)),
     "affine_grid_generator"),
    (lambda c: (as_expr(c["n"]),), "randperm"),
    (layer_norm, "native_layer_norm"),
    (likes("input", "weight", "bias"), "native_layer_norm_backward"),
    (likes("input", "weight"), "_fused_rms_norm_backward"),
    (batch_norm, "native_batch_norm _native_batch_norm_legit _batch_norm_with_update"),
    (lambda c: batch_norm(c, False), "_native_batch_norm_legit_no_training"),
    (lambda c: [*batch_norm(c), *likes("running_mean", "running_var")(c)],  # type: ignore[misc]
     "_native_batch_norm_legit_functional"),
    (likes("input", "weight", "weight"), """
        native_batch_norm_backward native_group_norm_backward batch_norm_backward"""),
    (group_norm, "native_group_norm"),
    (attention, """
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
        _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable"""),
    (likes("query", "key", "value", "attn_bias"), """
        _scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward
        _scaled_dot_product_fused_attention_overrideable_backward"""),
    (nll_loss, "nll_loss_forward nll_loss2d_forward"),
    (lambda c: (*c["indices"].shape, *c["weight"].shape[1:]), "embedding"),
    (lambda c: (as_expr(c["num_weights"]), c["grad_output"].shape[-1]), "embedding_dense_backward"),
    (like("index"), "gather take"),
    (partial(along, lambda c, n: c["index"].numel), "index_select"),
    (index, "index _unsafe_index"),
    (partial(along, lambda c, n: as_expr(c["k"])), "topk"),
    (partial(along, lambda c, n: _divided(c, n, 2)), "glu"),
    (cdist, "_cdist_forward"),
    (lambda c: (as_expr(c["n"]), as_expr(c.get("m", c["n"]))), "eye"),
    (sized("size"), "zeros ones full empty rand randn randint new_zeros new_ones new_full new_empty"),
    (lambda c: Form(c.size("size"), c.size("stride")), "empty_strided new_empty_strided"),
)  # fmt: skip


def find_rule(name: str, is_pointwise: bool, is_foreach: bool, arguments: Sequence[str]) -> Rule | None:
    """The rule of an op by its name without overload; in-place ops and _copy ops use the plain one's. The
    gradient of an argument, if it is all that the op gives, has the argument's size."""
    for candidate in (name, name.removesuffix("_"), name.removesuffix("_copy")):
        if candidate in RULES:
            return RULES[candidate]
    if is_foreach or is_pointwise:  # of lists, a result after each tensor of the first one
        return (lambda c: [t.shape for t in c["self"]]) if is_foreach else pointwise
    if not name.endswith("_backward"):
        return None
    told = next((known for known in ("input_size", "input_sizes") if known in arguments), None)
    return sized(told) if told else like("self") if "self" in arguments else None
