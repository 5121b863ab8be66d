"""NumPy in captured code: an ndarray is a tensor of the graph that follows NumPy's rules.

    np.linspace(0, 1, 5)              of constants: computed while capturing
    np.sin(x.numpy()) + 1             torch.sin(x) + 1, recorded; an Array stands in for the ndarray
    def f(a): return a.mean(axis=0)   an argument is read as torch.from_numpy(a), which shares its memory

What NumPy would answer (dtype, array or scalar) NumPy itself is asked, for arrays of one element; operands
are brought to that dtype first, because torch promotes otherwise. A function that is in no table here breaks
the graph, and is called on the real array. NumPy is known by name; it is not imported.
"""
from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from types import MethodType, ModuleType
from typing import Any, Final

import torch

from dovetail.capture.attributes import RULES
from dovetail.capture.builtins import Args, Kwargs, Special, on
from dovetail.capture.operations import as_hashable
from dovetail.capture.origins import BY_NAME, PLAIN, register, wrap_instance, wrap_tensor
from dovetail.capture.text import NUMBERS, known, native
from dovetail.capture.torch_calls import METHOD_RULES, call_torch
from dovetail.capture.trace import Trace
from dovetail.errors import DataDependentValue, UnknownCall
from dovetail.fake.tensor import Fake
from dovetail.ir.guard import TypeIs
from dovetail.ir.source import Source, TensorOf

MODULES: Final = frozenset({"numpy", "numpy.linalg", "numpy.fft"})
IMPURE: Final = frozenset(
    {"load", "save", "savez", "savez_compressed", "savetxt", "loadtxt", "genfromtxt", "fromfile", "tofile",
     "memmap", "fromregex", "dump", "dumps", "seterr", "seterrcall", "setbufsize", "set_printoptions",
     "empty", "empty_like", "frompyfunc", "vectorize", "apply_along_axis", "apply_over_axes",
     "fromfunction", "piecewise", "fromiter"}
)  # fmt: skip
"""What reads or writes files or settings, runs the user's Python, or gives memory as it happens to be."""
LARGEST: Final = 4096
"""More elements than this are not written into a graph."""
DTYPES: Final = {
    getattr(torch, name): name
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
                 "complex64", "complex128")
}  # fmt: skip
TORCH_DTYPES: Final = {name: dtype for dtype, name in DTYPES.items()}


def numpy() -> Any:
    return sys.modules["numpy"]


def tensor_of(array: Any) -> torch.Tensor | None:
    """The tensor with an array's memory, if it can be one."""
    is_plain = str(array.dtype) in TORCH_DTYPES and array.dtype.isnative and array.flags.writeable
    if not is_plain or any(step < 0 or step % array.itemsize for step in array.strides):
        return None
    return torch.from_numpy(array)


def wrap_array(trace: Trace, value: Any, source: Source) -> Any:
    with torch._C._DisableTorchDispatch():
        tensor = tensor_of(value)
    if tensor is None or int(numpy().__version__.split(".")[0]) < 2:
        return wrap_instance(trace, value, source)
    trace.guard(source, TypeIs(type(value)))
    fake = wrap_tensor(trace, tensor, TensorOf(source, trace.const(tensor_of, "tensor_of").name, tensor_of))
    stand_in = Array(trace, fake)
    register(trace, value, stand_in, source)
    return stand_in


BY_NAME["numpy.ndarray"] = wrap_array


class Array:
    """Stands in for an ndarray whose contents the tensor `fake` has, or for a scalar of NumPy's."""

    __slots__ = ("trace", "fake", "is_scalar")
    __array_ufunc__ = None  # leave operators with an ndarray on the left to this class

    def __init__(self, trace: Trace, fake: Fake, is_scalar: bool = False) -> None:
        self.trace, self.fake, self.is_scalar = trace, fake, is_scalar

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance() asks for it
        return self.dtype.type if self.is_scalar else numpy().ndarray

    @property
    def dtype(self) -> Any:
        return numpy().dtype(DTYPES[self.fake.dtype])

    def example(self) -> Any:
        """An array like this one, with one element."""
        return self.dtype.type(1) if self.is_scalar else numpy().ones((1,) * self.fake.dim(), self.dtype)

    def __len__(self) -> int:
        return native(len, self.fake)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(len(self))])

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        places = [position(self.trace, each) for each in keys]
        numbers = sum(type(place) in (int, torch.SymInt) for place in places)
        if numbers and any(isinstance(place, (Fake, list)) for place in places):
            raise UnknownCall(self.trace.loc(), function="indexing of an array by numbers and arrays")
        index = tuple(places) if isinstance(key, tuple) else places[0]
        found = self.trace.call(operator.getitem, [self.fake, index], {})
        return Array(self.trace, found, numbers == len(places) == self.fake.dim())

    def __setitem__(self, key: Any, value: Any) -> None:
        keys = key if isinstance(key, tuple) else (key,)
        places = [position(self.trace, each) for each in keys]
        made = operand(self.trace, value, self.fake.dtype)
        index = tuple(places) if isinstance(key, tuple) else places[0]
        self.trace.call(operator.setitem, [self.fake, index, made], {})


def position(trace: Trace, key: Any) -> Any:
    """One index, as torch takes it."""
    if isinstance(key, slice) and known(key.step) is not None and known(key.step) < 0:
        raise UnknownCall(trace.loc(), function="indexing of an array by a negative step")
    if type(key) is Array:
        return key.fake
    is_array = type(key).__module__ == "numpy" and getattr(key, "ndim", 0) > 0
    return operand(trace, key, None) if is_array else key.item() if hasattr(key, "item") else key


def _needs_values(name: str) -> Callable[..., Any]:
    def method(self: Array, *args: Any) -> Any:
        raise DataDependentValue(self.trace.loc(), function=f"{name} of an array")

    return method


for _name in ("bool", "int", "float", "complex", "index", "str", "repr", "format", "array", "contains"):
    setattr(Array, f"__{_name}__", _needs_values(_name))


def array_attr(trace: Trace, array: Array, name: str) -> Any:
    if name in ATTRIBUTES:
        return ATTRIBUTES[name](array)
    native(getattr, array.example(), name)  # AttributeError, if NumPy has no such thing
    if name not in vars(Array):
        setattr(Array, name, _method(name, name))
    return MethodType(getattr(Array, name), array)


def _method(name: str, function: str, *, reverse: bool = False) -> Callable[..., Any]:
    def method(self: Array, *args: Any, **kwargs: Any) -> Any:
        return call_named(self.trace, function, [*args, self] if reverse else [self, *args], kwargs)

    method.__name__ = name
    return method


ATTRIBUTES: Final[dict[str, Callable[[Array], Any]]] = {
    "shape": lambda array: tuple(array.fake.shape),
    "size": lambda array: array.fake.numel(),
    "ndim": lambda array: array.fake.dim(),
    "dtype": lambda array: array.dtype,
    "itemsize": lambda array: array.dtype.itemsize,
    "T": lambda array: call_named(array.trace, "transpose", [array], {}),
    "__class__": lambda array: array.__class__,
}


# -- calls -------------------------------------------------------------------------------------------


def is_numpy(value: Any) -> bool:
    """A value, a function or a class of NumPy's own."""
    kind = value if isinstance(value, type) else type(value)
    return kind.__module__ == "numpy" or getattr(value, "__module__", None) in MODULES


def is_known(trace: Trace, value: Any) -> bool:
    """Whether NumPy may read the value now: it is a constant of the trace."""
    if isinstance(value, (list, tuple)):
        return all(is_known(trace, item) for item in value)
    if isinstance(value, slice):
        return is_known(trace, [value.start, value.stop, value.step])
    if type(value) in PLAIN or isinstance(value, type):
        return True
    return type(value).__module__.startswith("numpy") and id(value) not in trace.origins


def has_array(value: Any) -> bool:
    return type(value) is Array or isinstance(value, (list, tuple)) and any(map(has_array, value))


def call_numpy(trace: Trace, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """A function, a class, or a bound method."""
    name = getattr(fn, "__name__", type(fn).__name__)
    owner = getattr(fn, "__self__", None)
    if owner is None or isinstance(owner, ModuleType):
        if has_array([*args, *kwargs.values()]) or name in FROM_TENSOR and type(args[0]) is Fake:
            return call_named(trace, name, args, kwargs, fn)
        owner = 0
    args = [as_hashable(arg) for arg in args]
    if name in IMPURE or not is_known(trace, [*args, *kwargs.values(), owner]):
        raise UnknownCall(trace.loc(), function=f"numpy.{name}")
    return native(fn, *args, **kwargs)


def call_named(trace: Trace, name: str, args: Args, kwargs: Kwargs, fn: Any = None) -> Any:
    """A function or method of NumPy's on arrays; `fn` is the function, for a method the one of that name."""
    rule = CALLS.get(name)
    if rule is None:
        raise UnknownCall(trace.loc(), function=f"numpy.{name}")
    fn = getattr(numpy(), name, None) if fn is None else fn
    try:
        return rule(trace, fn, *args, **kwargs)
    except TypeError as error:  # arguments that the rule does not know
        raise UnknownCall(trace.loc(), function=f"numpy.{name}: {error}") from None


def ask(fn: Any, args: Sequence[Any], **kwargs: Any) -> Any:
    """What NumPy gives for arrays of one element."""
    with numpy().errstate(all="ignore"):
        return native(fn, *map(example, args), **kwargs)


def example(value: Any) -> Any:
    """A value of that kind that NumPy can take."""
    if type(value) is Array:
        return value.example()
    return NUMBERS[type(value)](1) if type(value) in NUMBERS else value


def torch_dtype(trace: Trace, dtype: Any) -> torch.dtype:
    found = TORCH_DTYPES.get(str(dtype))
    if found is None:
        raise UnknownCall(trace.loc(), function=f"a function of NumPy's with dtype {dtype}")
    return found


def cast(trace: Trace, fake: Any, dtype: torch.dtype) -> Any:
    return fake if fake.dtype is dtype else trace.call(torch.Tensor.to, [fake, dtype], {})


def operand(trace: Trace, value: Any, dtype: torch.dtype | None, is_tensor: bool = False) -> Any:
    """A value as an argument of a torch function: a tensor of this dtype, or a number."""
    if type(value) is Array:
        return value.fake if dtype is None else cast(trace, value.fake, dtype)
    if type(value) in NUMBERS:
        return trace.call(torch.full, [[], value], {"dtype": dtype}) if is_tensor else value
    if isinstance(value, Fake) or not is_known(trace, value) or getattr(value, "size", 1) > LARGEST:
        raise UnknownCall(trace.loc(), function="a function of NumPy's on an array that is not known")
    array = numpy().asarray(value)
    if array.ndim or is_tensor:
        named = {"dtype": torch_dtype(trace, array.dtype) if dtype is None else dtype}
        return trace.call(torch.tensor, [array.tolist()], named)
    return array.item()


def give(trace: Trace, result: Any, made: Any) -> Array:
    """The Array of a result, as NumPy would make it."""
    fake = cast(trace, result, torch_dtype(trace, made.dtype))
    return Array(trace, fake, not isinstance(made, numpy().ndarray))


Rule = Callable[..., Any]


def _elementwise(function: Any, is_test: bool = False, takes_numbers: bool = False) -> Rule:
    def rule(trace: Trace, fn: Any, *args: Any) -> Any:
        made = ask(fn, args)
        dtype = torch_dtype(trace, ask(numpy().result_type, args) if is_test else made.dtype)
        is_safe = dtype.is_floating_point or type(args[-1]) is int and args[-1] > 0
        if function in FLOATS_ONLY and not is_safe:
            raise UnknownCall(trace.loc(), function=f"numpy.{fn.__name__} of integers")
        operands = [operand(trace, arg, dtype, not takes_numbers) for arg in args]
        return give(trace, trace.call(function, operands, {}), made)

    return rule


def _reduction(function: Any, *, one_dim: bool = False, keeps_dtype: bool = False) -> Rule:
    def rule(
        trace: Trace, fn: Any, a: Any, axis: Any = None, *, keepdims: bool = False, **named: Any
    ) -> Any:
        if not named.keys() <= {"dtype", "ddof"}:
            raise TypeError(f"{[*named]}")
        made = ask(fn, [a], axis=axis, keepdims=keepdims, **named)
        fake = a.fake if keeps_dtype else cast(trace, a.fake, torch_dtype(trace, made.dtype))
        dims = axis
        if axis is None and (one_dim or not keepdims):
            fake, dims = trace.call(torch.reshape, [fake, [-1]], {}), 0
        elif axis is None:
            dims = list(range(fake.dim()))
        if one_dim and (axis is None and keepdims or isinstance(axis, tuple)):
            raise UnknownCall(trace.loc(), function=f"numpy.{fn.__name__} over several axes")
        named = {"correction": named.get("ddof", 0)} if function in (torch.var, torch.std) else {}
        return give(trace, trace.call(function, [fake], {"dim": dims, "keepdim": keepdims, **named}), made)

    return rule


def _running(function: Any) -> Rule:
    """cumsum and cumprod"""

    def rule(trace: Trace, fn: Any, a: Any, axis: Any = None) -> Any:
        made = ask(fn, [a], axis=axis)
        fake = cast(trace, a.fake, torch_dtype(trace, made.dtype))
        fake = trace.call(torch.reshape, [fake, [-1]], {}) if axis is None else fake
        return give(trace, trace.call(function, [fake], {"dim": axis or 0}), made)

    return rule


def _joined(function: Any) -> Rule:
    """Arrays put together: concatenate, stack ..."""

    def rule(trace: Trace, fn: Any, arrays: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if len(given) > 1 or not kwargs.keys() <= {"axis"} or None in given:
            raise TypeError(f"{[*kwargs]}")
        made = ask(numpy().concatenate, [[ask(numpy().ravel, [array]) for array in arrays]])
        parts = [operand(trace, array, torch_dtype(trace, made.dtype)) for array in arrays]
        return Array(trace, trace.call(function, [parts], {"dim": given[0]} if given else {}))

    return rule


def _product(function: Any, limit: int = 2) -> Rule:
    def rule(trace: Trace, fn: Any, a: Any, b: Any) -> Any:
        made = ask(fn, [a, b])
        operands = [operand(trace, value, torch_dtype(trace, made.dtype), True) for value in (a, b)]
        if not all(1 <= tensor.dim() <= limit for tensor in operands):
            raise TypeError("of arrays with so many dimensions")
        return give(trace, trace.call(function, operands, {}), made)

    return rule


def _same(function: Callable[..., Any]) -> Rule:
    """A function of the tensor that keeps its dtype."""

    def rule(trace: Trace, fn: Any, a: Any, *args: Any, **kwargs: Any) -> Any:
        return Array(trace, function(trace, operand(trace, a, None, True), *args, **kwargs))

    return rule


def _flat(args: tuple[Any, ...]) -> list[Any]:
    """a.reshape(2, 3) and a.reshape((2, 3))"""
    return list(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else list(args)


def _transpose(trace: Trace, fake: Any, *axes: Any) -> Any:
    order = _flat(axes) if axes and axes[0] is not None else list(reversed(range(fake.dim())))
    return trace.call(torch.permute, [fake, order], {})


def _copy(trace: Trace, fake: Any) -> Any:
    return trace.call(torch.clone, [fake], {})


def _squeeze(trace: Trace, fake: Any, axis: Any = None) -> Any:
    return trace.call(torch.squeeze, [fake] if axis is None else [fake, axis], {})


def _astype(trace: Trace, fn: Any, a: Any, dtype: Any, *, copy: bool = True) -> Any:
    wanted = torch_dtype(trace, numpy().dtype(dtype))
    if a.fake.dtype.is_complex and not wanted.is_complex:
        raise UnknownCall(trace.loc(), function="numpy.astype of complex numbers")
    return Array(trace, trace.call(torch.Tensor.to, [a.fake, wanted], {"copy": copy}), a.is_scalar)


def from_tensor(trace: Trace, fake: Fake) -> Array:
    """x.numpy(), which shares the tensor's memory."""
    if fake.requires_grad or fake.device.type != "cpu" or fake.dtype not in DTYPES:
        raise DataDependentValue(trace.loc(), function="numpy")
    return Array(trace, fake)


def _asarray(trace: Trace, fn: Any, a: Any, dtype: Any = None, *, copy: bool = False) -> Any:
    if isinstance(a, (list, tuple)):
        raise TypeError("a list of arrays")
    made = from_tensor(trace, a) if isinstance(a, Fake) else Array(trace, a.fake)
    is_copy = copy or fn is numpy().array
    if dtype is not None or is_copy:
        return _astype(trace, fn, made, made.dtype if dtype is None else dtype, copy=is_copy)
    return made if isinstance(a, Fake) or a.is_scalar else a


def _where(trace: Trace, fn: Any, condition: Any, a: Any, b: Any) -> Any:
    made = ask(fn, [condition, a, b])
    dtype = torch_dtype(trace, made.dtype)
    dtypes = (torch.bool, dtype, dtype)
    operands = [operand(trace, value, kind, True) for value, kind in zip((condition, a, b), dtypes)]
    return give(trace, trace.call(torch.where, operands, {}), made)


def _clip(trace: Trace, fn: Any, a: Any, low: Any = None, high: Any = None) -> Any:
    made = ask(fn, [a, low, high])
    dtype = torch_dtype(trace, made.dtype)
    low, high = (None if v is None else operand(trace, v, dtype, True) for v in (low, high))
    return give(trace, trace.call(torch.clamp, [operand(trace, a, dtype), low, high], {}), made)


def _filled(value: int) -> Rule:
    def rule(trace: Trace, fn: Any, a: Any, dtype: Any = None) -> Any:
        wanted = a.fake.dtype if dtype is None else torch_dtype(trace, numpy().dtype(dtype))
        return Array(trace, trace.call(torch.full_like, [a.fake, value], {"dtype": wanted}))

    return rule


def _einsum(trace: Trace, fn: Any, text: str, *arrays: Any) -> Any:
    made = ask(fn, [text, *arrays])
    operands = [operand(trace, array, torch_dtype(trace, made.dtype)) for array in arrays]
    return give(trace, trace.call(torch.einsum, [text, *operands], {}), made)


def _norm(trace: Trace, fn: Any, a: Any, *, axis: Any = None, keepdims: bool = False) -> Any:
    return _reduction(torch.linalg.vector_norm)(trace, fn, a, axis, keepdims=keepdims)


FLOATS_ONLY: Final = (torch.reciprocal, torch.floor_divide, torch.remainder, torch.pow)
"""Of integers NumPy raises, or gives something else, where torch does not."""
FROM_TENSOR: Final = ("asarray", "array")

CALLS: Final[dict[str, Rule]] = {
    **{name: _elementwise(getattr(torch, name)) for name in (
        "sin", "cos", "tan", "sinh", "cosh", "tanh", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p",
        "sqrt", "square", "negative", "positive", "floor", "ceil", "trunc", "reciprocal", "maximum",
        "minimum", "fmax", "fmin", "hypot", "logaddexp", "arcsin", "arccos", "arctan", "arcsinh", "arccosh",
        "arctanh", "arctan2", "absolute", "copysign",
    )},
    "abs": _elementwise(torch.abs), "fabs": _elementwise(torch.abs), "rint": _elementwise(torch.round),
    "conjugate": _elementwise(torch.conj_physical), "invert": _elementwise(torch.bitwise_not),
    **{name: _elementwise(getattr(torch, name), takes_numbers=True) for name in (
        "add", "subtract", "multiply", "divide", "bitwise_and", "bitwise_or", "bitwise_xor")},
    "floor_divide": _elementwise(torch.floor_divide, takes_numbers=True),
    "remainder": _elementwise(torch.remainder, takes_numbers=True),
    "power": _elementwise(torch.pow, takes_numbers=True),
    **{name: _elementwise(getattr(torch, name), is_test=True) for name in (
        "isnan", "isinf", "isfinite", "signbit", "logical_not", "logical_and", "logical_or", "logical_xor")},
    **{name: _elementwise(getattr(torch, name), is_test=True, takes_numbers=True) for name in (
        "not_equal", "less", "less_equal", "greater", "greater_equal")},
    "equal": _elementwise(torch.eq, is_test=True, takes_numbers=True),
    **{name: _reduction(getattr(torch, name)) for name in ("sum", "mean", "std", "var", "amax", "amin")},
    "max": _reduction(torch.amax), "min": _reduction(torch.amin),
    "any": _reduction(torch.any), "all": _reduction(torch.all),
    "prod": _reduction(torch.prod, one_dim=True), "norm": _norm,
    "argmax": _reduction(torch.argmax, one_dim=True, keeps_dtype=True),
    "argmin": _reduction(torch.argmin, one_dim=True, keeps_dtype=True),
    "cumsum": _running(torch.cumsum), "cumprod": _running(torch.cumprod),
    "concatenate": _joined(torch.cat), "stack": _joined(torch.stack), "vstack": _joined(torch.vstack),
    "hstack": _joined(torch.hstack),
    "matmul": _product(torch.matmul, 64), "dot": _product(torch.matmul), "outer": _product(torch.outer, 1),
    "einsum": _einsum, "where": _where, "clip": _clip, "astype": _astype,
    **dict.fromkeys((*FROM_TENSOR, "asanyarray", "ascontiguousarray"), _asarray),
    "zeros_like": _filled(0), "ones_like": _filled(1),
    "reshape": _same(lambda trace, x, *shape: trace.call(torch.reshape, [x, _flat(shape)], {})),
    "ravel": _same(lambda trace, x: trace.call(torch.reshape, [x, [-1]], {})),
    "flatten": _same(lambda trace, x: trace.call(torch.reshape, [_copy(trace, x), [-1]], {})),
    "copy": _same(_copy),
    "transpose": _same(_transpose), "squeeze": _same(_squeeze),
    "expand_dims": _same(lambda trace, x, axis: trace.call(torch.unsqueeze, [x, axis], {})),
    "swapaxes": _same(lambda trace, x, a, b: trace.call(torch.swapaxes, [x, a, b], {})),
    "moveaxis": _same(lambda trace, x, a, b: trace.call(torch.moveaxis, [x, a, b], {})),
    "broadcast_to": _same(lambda trace, x, shape: trace.call(torch.broadcast_to, [x, list(shape)], {})),
    "tile": _same(lambda trace, x, reps: trace.call(torch.tile, [x, _flat((reps,))], {})),
}  # fmt: skip

OPERATORS: Final = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "power", "matmul": "matmul", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor",
}  # fmt: skip
COMPARED: Final = {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater",
    "ge": "greater_equal", "neg": "negative", "pos": "positive", "invert": "invert", "abs": "abs",
}  # fmt: skip


def _in_place(operation: str) -> Callable[..., Any]:
    def method(self: Array, other: Any) -> Any:
        if self.is_scalar:
            return NotImplemented
        ask(lambda a, b: getattr(operator, f"i{operation}")(a, b), [self, other])  # may NumPy store it there?
        made = call_named(self.trace, OPERATORS[operation], [self, other], {})
        self.trace.call(torch.Tensor.copy_, [self.fake, made.fake], {})
        return self

    return method


for _name, _function in OPERATORS.items():
    setattr(Array, f"__{_name}__", _method(f"__{_name}__", _function))
    setattr(Array, f"__r{_name}__", _method(f"__r{_name}__", _function, reverse=True))
    if _name not in ("and", "or"):
        setattr(Array, f"__i{_name}__", _in_place(_name))
for _name, _function in COMPARED.items():
    setattr(Array, f"__{_name}__", _method(f"__{_name}__", _function))

RULES[Array] = array_attr
METHOD_RULES["numpy"] = METHOD_RULES["__array__"] = from_tensor


# -- back to tensors ---------------------------------------------------------------------------------


def _from_array(function: Any) -> Special:
    def rule(trace: Trace, args: Args, kwargs: Kwargs) -> Any:
        array: Any = args[0] if args else None
        if type(array) is Array:
            copy = torch.clone if function is torch.tensor else torch.Tensor.detach
            tensor = trace.call(copy, [array.fake], {})
            return trace.call(torch.Tensor.to, [tensor, *args[1:]], kwargs) if kwargs or args[1:] else tensor
        if not type(array).__module__.startswith("numpy"):
            return call_torch(trace, function, args, kwargs)
        if array.ndim:
            array.flags.writeable = False  # a tensor may share its memory: a later write is left to eager
        tensor = operand(trace, array, None, True)
        return trace.call(torch.Tensor.to, [tensor, *args[1:]], kwargs) if kwargs or args[1:] else tensor

    return rule


for _maker in (torch.from_numpy, torch.tensor, torch.as_tensor, torch.asarray):
    on(_maker)(_from_array(_maker))
