"""Tensors without data, on the device they pretend to be on.

    with FakeMode():
        x = fake_like(torch.randn(8, 64))      Fake: cpu, f32, (8, 64)
        x @ x.t()                              Fake: (8, 8); no arithmetic was done

A Fake is a wrapper subclass; every ATen call on one arrives in `infer`, which asks a shape rule of
ours or the op's meta kernel. Autograd runs above, in C++, as for any tensor.
"""
from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import CodeType, FunctionType
from typing import Any, Final, TypeAlias

import torch
from torch._compile import _disable_dynamo
from torch._library.triton import set_wrap_triton_enabled
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves, tree_map_only

from dovetail.errors import DataDependentSize, DataDependentValue, FailedFake, UnsupportedValue
from dovetail.fake.form import Extent, Form, derive_strides, hint_geometry, iterator_strides
from dovetail.fake.known import Suspected, derive_known
from dovetail.fake.record import Record, record
from dovetail.fake.symbolic import ask_kernel, bind, derive_forms, find_shapes, fix_symbols, hinted
from dovetail.ir.expr import const
from dovetail.sym import Shapes, make_symint
from dovetail.util.noun import replace

Args: TypeAlias = "tuple[Any, ...]"
Kwargs: TypeAlias = "dict[str, Any]"

_wrap: Final = torch.Tensor._make_wrapper_subclass
_META: Final = torch.device("meta")
_CPU: Final = torch.device("cpu")
KNOWN_LIMIT: Final = 64
"""Constants up to this many elements keep their value."""


ONLY_STRIDED: Final = "only strided tensors are captured"


class Fake(torch.Tensor):
    """`meta` is the same tensor on the meta device, made when first asked for; `constant` its value
    where that is known; `key` stands for its geometry, None where not looked up yet."""

    _meta: torch.Tensor | None = None
    constant: torch.Tensor | None = None
    key: object = None
    form: Form | None = None
    """Symbolic geometry; None where all of it is numbers. `meta` then has the sizes of the hints."""
    shapes: Shapes | None = None
    ref: Any = None
    """Where its value is, for who records a program."""

    @staticmethod
    def __new__(
        cls, meta: torch.Tensor, device: torch.device, requires_grad: bool = False,
        constant: torch.Tensor | None = None,
    ) -> Fake:  # fmt: skip
        geometry = meta.size(), meta.stride(), meta.storage_offset()
        self = _without_meta(*geometry, meta.dtype, device, requires_grad=requires_grad)
        self._meta, self.constant = meta, constant
        return self

    @property
    def meta(self) -> torch.Tensor:
        if self._meta is None:
            size, stride, offset = hint_geometry(self)
            self._meta = _empty_meta(size, stride, self.dtype, offset)
        return self._meta

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Fake({self.dtype}, {tuple(self.shape)}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        return infer(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Fake:
        found = memo.get(id(self))
        if found is None:
            given = self.dtype, self.device
            with _mode_of(self):
                found = _without_meta(*hint_geometry(self), *given, requires_grad=self.requires_grad)
            if self.form is not None and self.shapes is not None:
                found = _symbolic(found, self.form, self.shapes, self.requires_grad)
            own = {"_meta": None, "constant": None, "key": None, **found.__dict__}
            found.__dict__.update({k: v for k, v in self.__dict__.items() if k not in own})
            memo[id(self)] = found
        return found  # type: ignore[no-any-return]

    def tolist(self) -> Any:
        return _value(self, "tolist").tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise DataDependentValue(function="numpy")

    __array__ = numpy

    def data_ptr(self) -> int:
        raise DataDependentValue(function="data_ptr")


class FakeMode(TorchDispatchMode):
    """Makes factories (torch.zeros...) return Fakes too."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would otherwise import its own compiler to hide this mode from it."""
        return False

    def __enter__(self) -> FakeMode:
        """As torch does it, less the flags for its own compiler, which are the same for all threads."""
        _push_mode(self)
        return self

    def __exit__(self, *_: object) -> None:
        _pop_mode()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if types and Fake not in types and not any("Tensor" in str(x.type) for x in func._schema.returns):
            raise UnsupportedValue(type=types[0].__name__, detail="its class says what sizes it has")
        return infer(func, args, kwargs or {})


_NO_MODE: Final = nullcontext()


def _mode_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """What to make a Fake under: one of inference mode has no version, and autograd does not save it."""
    return torch._C._InferenceMode(True) if tensor.is_inference() else _NO_MODE


def _without_meta(size: Any, stride: Any, offset: Any, dtype: Any, device: Any, **given: Any) -> Fake:
    return _wrap(Fake, size, stride, offset, None, dtype, torch.strided, device, **given)


def _empty_meta(size: Any, stride: Any, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    with torch._C._DisableTorchDispatch():
        if not offset:
            return torch.empty_strided(size, stride, dtype=dtype, device=_META)
        whole = torch.empty(_span(size, stride) + offset, dtype=dtype, device=_META)
        return whole.as_strided(size, stride, offset)


def _hint_bytes(fake: Fake) -> int:
    """Of its storage, up to its last element. PyTorch would add them up symbolically."""
    size, stride, offset = hint_geometry(fake)
    return (offset + _span(size, stride)) * fake.itemsize


def _span(size: Any, stride: Any) -> int:
    """From the first element to the end of the last."""
    return 1 + sum((n - 1) * step for n, step in zip(size, stride)) if all(size) else 0


def _symbolic(fake: Fake, form: Form, shapes: Shapes, requires_grad: bool = False) -> Fake:
    """The fake of the hints with symbolic geometry; itself where there are only numbers."""
    form = form.map(shapes)
    if form.is_static:
        return fake
    size, stride = ([make_symint(shapes, x) for x in each] for each in (form.shape, form.stride))
    given = {"storage_size": _hint_bytes(fake), "requires_grad": requires_grad}
    with _mode_of(fake):
        made = _without_meta(size, stride, make_symint(shapes, form.offset), fake.dtype, fake.device, **given)
    made._meta, made.form, made.shapes = fake._meta, form, shapes
    return made


def make_static(fake: Fake, reason: str) -> None:
    """Fix every symbol of the Fake's geometry: it has the sizes of its meta from now on."""
    if fake.form is None or fake.shapes is None:
        return
    for value in (*fake.form.shape, *fake.form.stride, fake.form.offset):
        fake.shapes.specialise_symbols(value, reason)
    _become(fake, fake.meta)


def _become(fake: Fake, meta: torch.Tensor, form: Form | None = None, shapes: Shapes | None = None) -> None:
    """t_, resize_...: the same Fake with the geometry that meta has, or the symbolic one behind it."""
    made = Fake(meta, fake.device)
    if form is not None and shapes is not None:
        made = _symbolic(made, form, shapes)
    fake.data, fake._meta, fake.key = made, meta, None
    fake.form, fake.shapes = made.form, shapes


# -- from real tensors -------------------------------------------------------------------------------


def fake_like(
    tensor: torch.Tensor, *, shapes: Shapes | None = None, extent: Extent = lambda dim: None
) -> Fake:
    """A Fake with the tensor's metadata; a leaf, whatever the tensor is. `extent` says which sizes are
    symbolic, with symbols of `shapes`, and which strides: those that are not products of sizes."""
    if type(tensor) is Fake:
        return tensor
    with torch._C.DisableTorchFunction():  # modes have nothing to say about reading attributes
        _check_plain(tensor)
        what = tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device
        with _mode_of(tensor):
            fake = _without_meta(*what, requires_grad=tensor.requires_grad)
    fake.key = _keys.get(what) or _keys.setdefault(what, object())
    if shapes is not None:
        sizes = tuple(extent(d) or const(int(n)) for d, n in enumerate(tensor.shape))
        strides = derive_strides(shapes, sizes, tensor.stride(), extent) or ()
        form = Form(sizes, strides, const(int(tensor.storage_offset())), tensor.dtype)
        fake = _symbolic(fake, form, shapes, tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        fake._is_param = True  # type: ignore[attr-defined]
    return fake


def _check_plain(tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise FailedFake(function=f"a tensor of layout {tensor.layout}", detail=ONLY_STRIDED)
    if tensor.is_conj() or tensor.is_neg():
        detail = "call resolve_conj() or resolve_neg() first"
        raise FailedFake(function="a lazily conjugated tensor", detail=detail)
    if tensor.requires_grad and not (tensor.is_floating_point() or tensor.is_complex()):
        raise FailedFake(function="a tensor of integers with a gradient", detail="it was written to")


def _meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device with the same sizes, strides, offset and dtype."""
    _check_plain(tensor)
    return _empty_meta(tensor.size(), tensor.stride(), tensor.dtype, int(tensor.storage_offset()))


# -- inference ---------------------------------------------------------------------------------------


def infer(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The result of an ATen op, as Fakes."""
    facts = record(func)
    if facts.is_view and torch.is_inference_mode_enabled() is not (mode := args[0].is_inference()):
        with torch._C._InferenceMode(mode):  # type: ignore[attr-defined]
            return infer(func, args, kwargs)  # what a view shows decides whether it is an inference tensor
    found = _remembered(func, facts, args, kwargs)
    if found is not None:
        return found
    if facts.fate in _SPECIAL:
        return _SPECIAL[facts.fate](func, facts, args, kwargs)
    return _run(func, facts, args, kwargs)


def _remembered(func: Any, facts: Record, args: Args, kwargs: Kwargs) -> Any:
    """The result of a call whose like is remembered; None for one that cannot be. What is symbolic is
    remembered by its Shapes, until more sizes are known to be equal: what else is assumed changes nothing."""
    fakes: list[Fake] = []
    met: list[Shapes] = []
    known: list[Fake] = []
    key = _memo_key(func, args, kwargs, (fakes, met, known)) if facts.is_free else None
    if key is None or (met and facts.written_fake is not None):
        return None
    if known and (facts.mutates or len(known) == len(fakes)):
        return None  # values are made of values
    memo, make = (met[0].remembered, _run) if met else (_memo, _by_meta)
    key = (*key, len(met[0].equalities)) if met else key
    made = memo.get(key)
    if made is None:
        if len(memo) > MEMO_LIMIT:
            memo.clear()
        made = memo[key] = _template(make(func, facts, args, kwargs), fakes)
    return _from_template(made, fakes)


def _run(func: Any, facts: Record, args: Args, kwargs: Kwargs) -> Any:
    """By the meta kernel; if something is symbolic, on the hints and then by the op's shape rule."""
    shapes = find_shapes(args) or find_shapes(kwargs.values())
    if shapes is None:
        return _by_meta(func, facts, args, kwargs)
    if facts.written_fake is not None:  # made for symbolic sizes, as any code on fakes
        with FakeMode(), set_wrap_triton_enabled(False):  # kernels see that there is no data
            return facts.written_fake(*args, **kwargs)
    call = bind(facts, args, kwargs, shapes)
    plain_args, plain_kwargs = hinted(args), {k: hinted(v) for k, v in kwargs.items()}
    result = _by_meta(func, facts, plain_args, plain_kwargs)
    results = list(result) if isinstance(result, (list, tuple)) else [result]
    for out in results if facts.is_out else ():
        if type(out) is Fake and out.form and hint_geometry(out)[0] != tuple(out.meta.size()):
            fix_symbols(facts, call, "a result was resized by")
            _become(out, out.meta)
    given = set(map(id, tree_leaves((args, kwargs))))
    is_new = [isinstance(r, torch.Tensor) and id(r) not in given for r in results]
    found = [r if new or facts.changes_shape else None for r, new in zip(results, is_new)]
    metas = [r.meta if isinstance(r, Fake) else r for r in found]
    rule = facts.rule or (lambda call: ask_kernel(func, facts, args, kwargs))
    forms = derive_forms(facts, rule, call, metas)
    if facts.changes_shape:
        _become(args[0], args[0].meta, forms[0] if forms else None, shapes)
        return args[0]
    if forms is None:
        return result
    pairs = zip(results, forms)
    made = [_symbolic(r, f, shapes) if type(r) is Fake and f is not None else r for r, f in pairs]
    return type(result)(made) if isinstance(result, (list, tuple)) else made[0]


# -- remembered results: models repeat their layers, and some meta kernels take 100 us ----------------

_keys: Final[dict[tuple[Any, ...], object]] = {}
"""One for each (size, stride, offset, dtype, device) or (form, ...); equal only to itself."""
_memo: Final[dict[tuple[Any, ...], Any]] = {}
MEMO_LIMIT: Final = 100_000
_PLAIN: Final = frozenset({
    int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
})  # fmt: skip
_SCALARS: Final = frozenset({float, bool, complex})


def key_of(fake: Fake) -> object:
    if fake.key is None:
        geometry = hint_geometry(fake) if fake.form is None else (fake.form,)
        what = (*geometry, fake.dtype, fake.device)
        fake.key = _keys.get(what) or _keys.setdefault(what, object())
    return fake.key


def _memo_key(func: Any, args: Args, kwargs: Kwargs, found: _Found) -> tuple[Any, ...] | None:
    """What decides the result's metadata; None where something else does, such as the device that is the
    default."""
    key: list[Any] = [func._op, torch.get_default_dtype()]  # quicker to hash
    if not _extend_key(key, args, found):
        return None
    for name, value in kwargs.items():
        key.append(name)
        if not _extend_key(key, (value,), found):
            return None
    return tuple(key) if found[0] or kwargs.get("device") is not None else None


_Found: TypeAlias = "tuple[list[Fake], list[Shapes], list[Fake]]"
"""Fakes met among arguments, the Shapes of what is symbolic, and Fakes whose values are known."""


def _extend_key(key: list[Any], values: Any, found: _Found) -> bool:
    for value in values:
        kind = type(value)
        if kind is Fake:
            key.append(key_of(value))
            found[0].append(value)
            if value.form is not None:
                found[1].append(value.shapes)
            if value.constant is not None:
                found[2].append(value)
        elif kind in _PLAIN:
            key.append(value)
        elif kind in _SCALARS:
            key.append(kind)  # 1, 1.0 and True are equal, and promote differently
            key.append(value)
        elif kind is list or kind is tuple or kind is torch.Size:
            if _PLAIN.issuperset(map(type, value)):
                key.append(tuple(value))
                continue
            key.append(len(value))
            if not _extend_key(key, value, found):
                return False
        elif kind is torch.SymInt:
            key.append(value.node.expr)
            found[1].append(value.node.shapes)
        else:
            return False
    return True


def _template(result: Any, fakes: list[Fake]) -> Any:
    """What to build again: an int is an input, a tuple a new tensor, a list [type, templates]."""
    if type(result) is Fake:
        for i, fake in enumerate(fakes):
            if fake is result:
                return i
        like = result.form and _copied(result, True)
        geometry = result.size(), result.stride(), result.dtype, result.device, result.storage_offset()
        return (*geometry, key_of(result), like)
    if isinstance(result, (list, tuple)):
        return [type(result), [_template(r, fakes) for r in result]]
    return [None, result]


def _copied(fake: Fake, is_first: bool = False) -> Fake:
    """Another tensor, and what PyTorch has found out of its symbolic geometry, which takes long."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        made: Fake = torch.Tensor._make_subclass(Fake, fake.data)
        if is_first:
            torch.ops.aten.sym_is_contiguous.default(made)
    made.form, made.shapes = fake.form, fake.shapes
    return made


def _from_template(made: Any, fakes: list[Fake]) -> Any:
    if type(made) is tuple:
        size, stride, dtype, device, offset, key, like = made
        if like is None:
            fake = _without_meta(size, stride, offset, dtype, device)
        elif not torch.is_inference_mode_enabled():
            fake = _copied(like)
        else:
            fake = _without_meta(size, stride, offset, dtype, device, storage_size=_hint_bytes(like))
            fake.form, fake.shapes = like.form, like.shapes
        fake.key = key
        return fake
    if type(made) is int:
        return fakes[made]
    kind, parts = made
    return parts if kind is None else kind([_from_template(part, fakes) for part in parts])


def _tensors_in(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors_in(value)
    return found


Inputs: TypeAlias = "list[tuple[Any, torch.Tensor]]"
"""The tensors among the arguments, and each as one on the meta device."""


def _by_meta(func: Any, facts: Record, args: Args, kwargs: Kwargs) -> Any:
    """By what is known of the op, else by running its meta kernel."""
    try:
        found = _by_table(func, facts, args, kwargs) if facts.is_known else None
    except Suspected:
        found, facts = None, replace(facts, fate="probe")  # eager's own kernel says what is wrong
    if found is not None:
        return found[0]
    quiet_references()
    fakes = _tensors_in((*args, *kwargs.values()))
    metas = {id(x): x.meta if type(x) is Fake else x if x.is_meta else _meta_like(x) for x in fakes}
    new_args, new_kwargs = tree_map_only(torch.Tensor, lambda x: metas[id(x)], ([*args], kwargs))
    inputs = [(fake, metas[id(fake)]) for fake in fakes]
    device = _result_device(facts, fakes, new_args, new_kwargs)
    result = _run_kernel(func, facts, device, new_args, new_kwargs)
    corrected = CORRECTIONS.get(facts.name)
    if corrected is not None:
        result = corrected(device, new_args, result)
    if facts.mutates:
        return _written(func, facts, inputs, args, kwargs, result, device)
    constant = _constant(func, facts, fakes, args, kwargs)
    wrapped = _wrap_result(result, device, inputs, constant)
    if facts.name in _ON_HOST and device.type != "cpu":
        on_host = _ON_HOST[facts.name]
        return tuple(Fake(r.meta, _CPU) if i in on_host else r for i, r in enumerate(wrapped))
    return wrapped


_NO_SHAPES: Final = Shapes()


def _by_table(func: Any, facts: Record, args: Args, kwargs: Kwargs) -> tuple[Any] | None:
    """What fake/known.py says of the op, in a tuple; None where it says nothing."""
    fakes = _tensors_in((*args, *kwargs.values()))
    if facts.mutates and any(type(f) is not Fake or f.constant is not None for f in fakes):
        return None
    call = bind(facts, args, kwargs, _NO_SHAPES, on_hints=True)
    results = derive_known(func, facts, call)
    if results is None:
        return None
    if facts.mutates and facts.count == 1:
        return (args[0],)
    device = _result_device(facts, fakes, list(args), dict(kwargs))
    constant = _constant(func, facts, fakes, args, kwargs)
    known = constant if isinstance(constant, (list, tuple)) else [constant] * len(results)
    made = [r if r is None else _from_template((*r, device, 0, None, None), []) for r in results]
    for fake, value in zip(made, known):
        if value is not None and fake is not None:
            fake.constant = value
    return (made[0] if facts.count == 1 else tuple(made),)


def _run_kernel(func: Any, facts: Record, device: torch.device, args: list[Any], kwargs: Kwargs) -> Any:
    with torch._C._DisableTorchDispatch():
        if facts.fate == "probe" and device.type == "cpu":
            return probe(func, args, kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            is_missing = isinstance(error, NotImplementedError)
            if is_missing and facts.fate == "probe":
                return probe(func, args, kwargs)
            if not is_missing and "no fake impl" not in str(error) and '"meta"' not in str(error):
                raise  # what the program knows
            if facts.mutates and not facts.count:
                return None  # nothing it returns would have a shape: an op that only writes needs no kernel
            raise FailedFake(function=facts.name, detail=re.split(r"\. |\n", str(error))[0]) from error


WRAPPER: Final = next(
    (c for c in _disable_dynamo.__code__.co_consts if isinstance(c, CodeType) and c.co_name == "inner"), None
)
MARK: Final = "__dynamo_disable"


@cache
def quiet_references() -> int:
    """Keep torch's Python meta kernels from loading another compiler; how many there are. Torch wraps some so
    that its own compiler never looks inside, and the wrapper imports that compiler on its first call, which
    takes seconds. It asks for an attribute first, which says: the function itself is what to call."""
    families = ("torch._refs", "torch._meta_registrations", "torch._decomp", "torch._prims")
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(families)]
    stack = [value for m in modules for value in vars(m).values() if type(value) is FunctionType]
    seen: set[FunctionType] = set()
    while stack:
        value = stack.pop()
        if value.__closure__ and value not in seen:
            seen.add(value)  # a wrapper holds the wrapped function in its closure
            held = [cell.cell_contents for cell in value.__closure__]
            stack += (functions := [each for each in held if type(each) is FunctionType])
            for inner in functions if value.__code__ is WRAPPER else ():
                setattr(inner, MARK, inner)
    return sum(function.__code__ is WRAPPER for function in seen)


PROBE_LIMIT: Final = 1 << 22
"""Elements that a probe may touch."""


def probe(func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
    """Run the kernel on zeros, the CPU's for tensors on the meta device; keep the metadata of its results.
    It draws from no generator given."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if sum(x.numel() for x in tensors) > PROBE_LIMIT:
        return func(*args, **kwargs)
    made: dict[int, torch.Tensor] = {}
    for x in tensors:
        where = _CPU if x.is_meta else x.device
        made[id(x)] = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=where).zero_()
    real_args, real_kwargs = tree_map_only(torch.Tensor, lambda x: made[id(x)], (args, kwargs))
    if real_kwargs.get("generator") is not None:
        real_kwargs["generator"] = torch.Generator()
    with torch.no_grad():
        result = func(*real_args, **real_kwargs)
    return tree_map_only(torch.Tensor, _meta_like, result)


CORRECTIONS: Final[dict[str, Callable[..., Any]]] = {
    # Only the CPU fills the buffer that backward reads.
    "aten.log_sigmoid_forward.default": lambda device, args, result: (
        result if device.type == "cpu" else (result[0], result[1].new_empty(0))),
    **dict.fromkeys(("aten.pow.Scalar", "aten.im2col.default", "aten.rrelu_with_noise.default"),
                    lambda device, args, made: made.contiguous()),
    "aten.rrelu_with_noise_functional.default": lambda device, args, made: (made[0].contiguous(), made[1]),
    "aten._native_multi_head_attention.default": lambda device, args, made: (
        made if args[10:11] != [False] else (made[0], None)),
}  # fmt: skip
"""Where the meta kernel describes another device than the one that is faked, or is wrong."""


def _wrap_result(result: Any, device: torch.device, inputs: Inputs, constant: Any = None) -> Any:
    if isinstance(result, torch.Tensor):
        for fake, meta in inputs:
            if meta is result:
                return fake
        if result.layout is not torch.strided:
            raise FailedFake(function=f"a tensor of layout {result.layout}", detail=ONLY_STRIDED)
        return Fake(result, device, constant=constant)
    if isinstance(result, (list, tuple)):
        known = constant if isinstance(constant, (list, tuple)) else (None,) * len(result)
        return type(result)(_wrap_result(r, device, inputs, k) for r, k in zip(result, known))
    return result


_ON_HOST: Final = {
    "aten._scaled_dot_product_efficient_attention.default": (2, 3),
    "aten._efficient_attention_forward.default": (2, 3),
}
"""Results that are on the CPU wherever the operands are: seed and offset of the random generator."""


def _result_device(
    facts: Record, fakes: list[torch.Tensor], new_args: list[Any], new_kwargs: Kwargs
) -> torch.device:
    """Where the results live; points the op's own `device` argument at meta."""
    asked = None
    if facts.device_at is not None:
        if facts.device_at < len(new_args):
            asked, new_args[facts.device_at] = new_args[facts.device_at], _META
        else:
            asked, new_kwargs["device"] = new_kwargs.get("device"), _META
        if new_kwargs.get("pin_memory"):
            new_kwargs["pin_memory"] = False
    if asked is not None or not fakes:
        return _with_index(torch.get_default_device() if asked is None else torch.device(asked))
    first = fakes[0].device
    return _mixed_device(facts, fakes) if any(fake.device != first for fake in fakes) else first


def _with_index(device: torch.device) -> torch.device:
    if device.type in ("cpu", "meta") or device.index is not None:
        return device
    current = torch.cuda.current_device() if device.type == "cuda" and torch.cuda.is_available() else 0
    return torch.device(device.type, current)


_TAKES_MIXED: Final = frozenset({
    "aten.copy_", "aten.copy", "aten.index", "aten._unsafe_index", "aten.index_put", "aten.index_put_",
    "aten._unsafe_index_put", "aten._index_put_impl_", "aten._foreach_copy_", "aten._foreach_copy",
})  # fmt: skip
"""Ops that take tensors of several devices; the result is on the first one's."""


def _mixed_device(facts: Record, fakes: list[torch.Tensor]) -> torch.device:
    """The device of tensors on several: a 0-dim CPU tensor counts as a number."""
    first = fakes[0].device
    if facts.name.rsplit(".", 1)[0] in _TAKES_MIXED:
        return first
    devices = {f.device for f in fakes if f.dim() or f.device.type != "cpu"}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {names}")
    return devices.pop() if devices else first


def _written(
    func: Any, facts: Record, inputs: Inputs, args: Args, kwargs: Kwargs,
    result: Any, device: torch.device,
) -> Any:  # fmt: skip
    """After an op that writes to arguments: the same Fakes come back, with their new sizes."""
    fakes = [fake for fake, _ in inputs]
    if any(type(f) is Fake and f.constant is not None for f in fakes):
        _update_constants(func, facts, fakes, args, kwargs)
    if facts.changes_shape or facts.is_out:
        for fake, meta in inputs:
            if facts.is_pointwise and fake.size() != meta.size():  # torch's meta kernels know one layout only
                operands = [(m.size(), m.stride()) for _, m in inputs if m is not meta]
                meta = _empty_meta(meta.size(), iterator_strides(meta.size(), operands), meta.dtype)
            is_other = fake.size() != meta.size() or fake.stride() != meta.stride()
            if type(fake) is Fake and fake.form is None and is_other:
                _become(fake, meta)
    return _wrap_result(result, device, inputs)


# -- known values --------------------------------------------------------------------------------------


def _is_known(fake: torch.Tensor) -> bool:
    """A value that nothing has overwritten: `_forget` empties the storage of one that was."""
    value = fake.constant if type(fake) is Fake else None
    return value is not None and (not value.numel() or value.untyped_storage().nbytes() > 0)


def _real(value: Any) -> Any:
    if type(value) is Fake:
        return value.constant
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(map(_real, value))
    return value


def _constant(func: Any, facts: Record, fakes: list[torch.Tensor], args: Args, kwargs: Kwargs) -> Any:
    """The value of the result where all inputs are known and small, or numbers as in torch.div(7, 2)."""
    is_arithmetic = facts.is_pointwise or facts.base == "aten.scalar_tensor"
    if not fakes and not (is_arithmetic and all(type(arg) in (int, float) for arg in args)):
        return None
    if facts.is_random or not all(map(_is_known, fakes)):
        return None
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        kept = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
        value = func(*map(_real, args), **{k: _real(v) for k, v in kept.items()})
    if isinstance(value, torch.Tensor):
        return value if value.numel() <= KNOWN_LIMIT else None
    return value if isinstance(value, (list, tuple, bool)) else None


def _update_constants(
    func: Any, facts: Record, fakes: list[torch.Tensor], args: Args, kwargs: Kwargs
) -> None:
    """Write to known values too, or forget those that are overwritten by unknown ones."""
    if all(map(_is_known, fakes)) and not facts.is_random:
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            func(*map(_real, args), **{k: _real(v) for k, v in kwargs.items()})
        return
    aliases = (argument.alias_info for argument in func._schema.arguments)
    written = [value for alias, value in zip(aliases, args) if alias is not None and alias.is_write]
    for fake in tree_leaves((written, kwargs)):
        _forget(fake)


def _forget(fake: Any) -> None:
    if type(fake) is Fake and fake.constant is not None:
        fake.constant.untyped_storage().resize_(0)  # views of it see this too
        fake.constant = None


def _value(fake: Any, function: str) -> torch.Tensor:
    if type(fake) is not Fake:
        return fake  # type: ignore[no-any-return]
    if not _is_known(fake):
        raise DataDependentValue(function=function)
    return fake.constant  # type: ignore[return-value]


# -- ops with a treatment of their own -------------------------------------------------------------------


def _lift(func: Any, facts: Record, args: Args, kwargs: Kwargs) -> Any:
    """torch.tensor(...): a real tensor enters; its value is known."""
    (tensor,) = args
    if type(tensor) is Fake:
        return tensor
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        is_small = tensor.device.type == "cpu" and tensor.numel() <= KNOWN_LIMIT
        constant = tensor.detach().clone() if is_small else None
    return Fake(_meta_like(tensor), tensor.device, constant=constant)


def _item(func: Any, facts: Record, args: Args, kwargs: Kwargs) -> Any:
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        return _value(args[0], "item").item()


def _dependent(func: Any, facts: Record, args: Args, kwargs: Kwargs) -> Any:
    if kwargs.get("output_size") is not None:  # of repeat_interleave
        return _run(func, facts, args, kwargs)
    known = _constant(func, facts, _tensors_in((*args, *kwargs.values())), args, kwargs)
    if known is not None:  # of numbers that the program wrote down, such as sizes in torch.tensor([...])
        return tree_map_only(torch.Tensor, lambda tensor: _lift(func, facts, (tensor,), {}), known)
    is_size = torch.Tag.dynamic_output_shape in func.tags
    raise (DataDependentSize if is_size else DataDependentValue)(function=facts.name.split(".")[1])


def _decompose(func: Any, facts: Record, args: Args, kwargs: Kwargs) -> Any:
    """A composite op (seen in inference mode only): run it as the ops it is made of. They come back through
    the mode; were they to come to the tensors instead, torch would import its distributed ones."""
    with FakeMode():
        return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _index(func: Any, facts: Record, args: Args, kwargs: Kwargs) -> Any:
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
        raise DataDependentSize(function="indexing with a mask")
    return _run(func, facts, args, kwargs)


def _plain_geometry(func: Any, facts: Record, args: Args, kwargs: Kwargs) -> Any:
    """C++ code that knows no symbolic sizes asks for numbers, so they are assumed."""
    (fake,) = args
    if facts.fate == "numel":
        return math.prod(map(int, fake.size()))
    return [int(n) for n in getattr(fake, facts.fate)()]


_SPECIAL: Final[dict[str, Callable[..., Any]]] = {
    "lift": _lift,
    "item": _item,
    "dependent": _dependent,
    "decompose": _decompose,
    "index": _index,
    # Lazy conjugate and negative: the op stays in the graph, so the Fake needs no bit.
    "alias": lambda func, facts, args, kwargs: infer(torch.ops.aten.alias.default, args, {}),
    **dict.fromkeys(("size", "stride", "numel"), _plain_geometry),
}
