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
from functools import partial, reduce
from types import MethodType, ModuleType
from typing import Any, Final

import torch

from dovetail.capture.attributes import RULES
from dovetail.capture.builtins import Args, Kwargs, on
from dovetail.capture.masks import Masked
from dovetail.capture.operations import IN_KEYS, as_hashable, set_item
from dovetail.capture.origins import BY_NAME, register, wrap_instance, wrap_tensor, wrap_value
from dovetail.capture.text import NUMBERS, as_numbers, known, native
from dovetail.capture.torch_calls import METHOD_RULES, call_torch
from dovetail.capture.trace import PLAIN, Raised, Trace, leaves
from dovetail.errors import DataDependentValue, UnknownCall
from dovetail.fake.tensor import Fake
from dovetail.ir.guard import TypeIs
from dovetail.ir.source import Applied, Source

MODULES: Final = frozenset({"numpy", "numpy.linalg", "numpy.fft"})
IMPURE: Final = frozenset("""load save savez savez_compressed savetxt loadtxt genfromtxt fromfile tofile
    memmap fromregex dump dumps seterr seterrcall setbufsize set_printoptions empty empty_like frompyfunc
    vectorize apply_along_axis apply_over_axes fromfunction piecewise fromiter""".split())
"""What reads or writes files or settings, runs the user's Python, or gives memory as it happens to be."""
LARGEST: Final = 4096
"""More elements than this are not written into a graph."""
_dtypes = "bool uint8 int8 int16 int32 int64 float16 float32 float64 complex64 complex128".split()
DTYPES: Final = {getattr(torch, name): name for name in _dtypes}
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
    fake = wrap_tensor(trace, tensor, Applied(source, trace.const(tensor_of, "tensor_of").name, tensor_of))
    return register(trace, value, Array(trace, fake), source)


BY_NAME["numpy.ndarray"] = wrap_array


def wrap_scalar(trace: Trace, value: Any, source: Source) -> Any:
    """One that changes from call to call is a number of the graph."""
    item = Applied(source, trace.const(item_of, "item_of").name, item_of)
    number = trace.dynamic.number(trace, value.item(), item) if trace.dynamic is not None else None
    if number is None:
        return wrap_value(trace, value, source)
    trace.guard(source, TypeIs(type(value)))
    fake = trace.call(torch.full, [(), number], {"dtype": TORCH_DTYPES[str(value.dtype)]})
    return register(trace, value, Array(trace, fake, True, number), source)


item_of: Final = operator.methodcaller("item")
for _name in ("int8", "int16", "int32", "int64", "float16", "float32", "float64"):
    BY_NAME[f"numpy.{_name}"] = wrap_scalar


class Array:
    """Stands in for an ndarray whose contents the tensor `fake` has, or for a scalar of NumPy's: of some, the
    `number` is known without a graph."""

    __slots__ = ("trace", "fake", "is_scalar", "number")
    __array_ufunc__ = None  # leave operators with an ndarray on the left to this class

    def __init__(self, trace: Trace, fake: Fake, is_scalar: bool = False, number: Any = None) -> None:
        self.trace, self.fake, self.is_scalar, self.number = trace, fake, is_scalar, number

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance() asks for it
        return self.dtype.type if self.is_scalar else numpy().ndarray

    @property
    def dtype(self) -> Any:
        return numpy().dtype(DTYPES[self.fake.dtype])

    def example(self) -> Any:
        """An array like this one, with one element."""
        return self.dtype.type(1) if self.is_scalar else numpy().ones((1,) * self.fake.dim(), self.dtype)

    def as_number(self, beside: Any) -> Any:
        """One that torch takes, or this array. As an operand after a tensor, one element counts as a tensor
        without dimensions does, unless the result depends on its dtype."""
        if self.number is not None or not (self.is_scalar and type(beside) is Fake and beside.dim()):
            return self if self.number is None else self.number
        return self.fake if torch.result_type(beside, self.fake) is beside.dtype else self

    def __len__(self) -> int:
        if self.is_scalar:  # torch asks for it where it takes an int, too
            raise DataDependentValue(self.trace.loc(), function="len of an array")
        return native(len, self.fake)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(len(self))])

    def index(self, key: Any) -> tuple[Any, bool]:
        """A key as torch takes it, and whether it is of one element."""
        keys = key if isinstance(key, tuple) else (key,)
        places = [position(self.trace, each) for each in keys]
        numbers = sum(type(place) in (int, torch.SymInt) for place in places)
        if numbers and any(isinstance(place, (Fake, list)) for place in places):
            raise UnknownCall(self.trace.loc(), function="indexing of an array by numbers and arrays")
        index = tuple(places) if isinstance(key, tuple) else places[0]
        return index, numbers == len(places) == self.fake.dim()

    def __getitem__(self, key: Any) -> Any:
        index, is_scalar = self.index(key)
        found = self.trace.call(operator.getitem, [self.fake, index], {})
        return found.leave() if type(found) is Masked else Array(self.trace, found, is_scalar)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Arrays of the caller's may share their memory, which tensors made of them would not tell."""
        set_item(self.trace, self.fake, self.index(key)[0], operand(self.trace, value, self.fake.dtype))
        for given, fake in zip(self.trace.inputs, self.trace.input_fakes):
            if isinstance(given.source, Applied) and (fake.is_inference() or fake._version):
                raise UnknownCall(self.trace.loc(), function="numpy's assignment to an array in place")


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
        if self.number is not None and name in ("bool", "int", "float", "index"):
            return getattr(self.dtype.type(known(self.number)), f"__{name}__")(*args)
        raise DataDependentValue(self.trace.loc(), function=f"{name} of an array")

    return method


for _name in "bool int float complex index str repr format array contains round".split():
    setattr(Array, f"__{_name}__", _needs_values(_name))


def array_attr(trace: Trace, array: Array, name: str) -> Any:
    if name in ATTRIBUTES:
        return ATTRIBUTES[name](array)
    if not callable(native(getattr, array.example(), name)):  # AttributeError, if NumPy has no such thing
        raise UnknownCall(trace.loc(), function=f"numpy.ndarray.{name}")
    if name not in vars(Array):
        setattr(Array, name, _method(name, name, lambda a, *rest, **named: getattr(a, name)(*rest, **named)))
    return MethodType(getattr(Array, name), array)


def _method(name: str, function: str, fn: Any = None, *, reverse: bool = False) -> Callable[..., Any]:
    def method(self: Array, *args: Any, **kwargs: Any) -> Any:
        given = [*args, self] if reverse else [self, *args]
        made = call_named(self.trace, function, given, kwargs, fn)
        is_safe = function not in DIVIDING or type(given[1]) in (int, float) and given[1] > 0
        if fn is None and function != "power" and is_safe and all(map(is_exact, given)):
            made.number = native(getattr(operator, name[2 + reverse : -2]), *as_numbers(given))
        return made

    method.__name__ = name
    return method


def is_exact(value: Any) -> bool:
    """A number that Python computes with as NumPy does."""
    kind = type(as_numbers(value))
    is_wide = str(getattr(value, "dtype", "int64")) in ("int64", "float64")
    return kind in (int, float) or kind in NUMBERS and is_wide


DIVIDING: Final = ("remainder", "floor_divide", "divide")
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
    is_own: Any = lambda x: type(x).__module__.startswith("numpy") and id(x) not in trace.origins
    return all(type(x) in PLAIN or isinstance(x, type) or is_own(x) for x in leaves(value))


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
    """A function or method of NumPy's on arrays; `fn` is that itself, unless it is the one of that name."""
    rule = CALLS.get(name)
    if rule is None:
        raise UnknownCall(trace.loc(), function=f"numpy.{name}")
    fn = getattr(numpy(), name, None) if fn is None else fn
    try:
        return rule(trace, fn, *args, **kwargs)
    except (TypeError, Raised) as error:  # arguments that the rule does not know: NumPy says what they do
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
    if fake.dtype.is_complex and not dtype.is_complex:
        raise UnknownCall(trace.loc(), function="a function of NumPy's of complex numbers")
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
ALONG_ONE: Final = (torch.prod, torch.cumsum, torch.cumprod, torch.argmax, torch.argmin)
KEYWORDS: Final = {"axis": "dim", "keepdims": "keepdim", "ddof": "correction"}


def _on(
    function: Any, trace: Trace, fn: Any, *args: Any, in_common: bool = False, numbers: bool = False,
    most: int = 64, **kwargs: Any,
) -> Any:  # fmt: skip
    """The torch function with the same arguments. Its operands are brought to the dtype of the result, or to
    the one they have `in_common`. `numbers`: it takes numbers for tensors. `most`: up to how many dimensions
    NumPy means the same by it."""
    made = ask(fn, args, **kwargs)
    is_safe = made.dtype.kind in "fc" or type(args[-1]) is int and args[-1] > 0
    if not kwargs.keys() <= {*KEYWORDS, "dtype"} or function in FLOATS_ONLY and not is_safe:
        raise TypeError(f"of {made.dtype} with {[*kwargs]}")
    common = ask(numpy().result_type, args) if in_common else made.dtype
    operands = [operand(trace, arg, torch_dtype(trace, common), not numbers) for arg in args]
    if any(isinstance(tensor, Fake) and tensor.dim() > most for tensor in operands):
        raise TypeError(f"of more than {most} dimensions")
    return give(trace, trace.call(function, operands, renamed(kwargs)), made)


def renamed(kwargs: Kwargs) -> Kwargs:
    return {KEYWORDS[name]: value for name, value in kwargs.items() if name in KEYWORDS}


def _along(function: Any, trace: Trace, fn: Any, a: Any, axis: Any = None, **kwargs: Any) -> Any:
    """A function along an axis, or along all elements: sums and the like."""
    made = ask(fn, [a], axis=axis, **kwargs)
    if not kwargs.keys() <= {*KEYWORDS, "dtype"} or isinstance(axis, tuple) and function in ALONG_ONE:
        raise TypeError(f"with {[*kwargs]}")
    is_search = function in (torch.argmax, torch.argmin)
    fake = a.fake if is_search else cast(trace, a.fake, torch_dtype(trace, made.dtype))
    if axis is None and kwargs.get("keepdims"):
        axis = tuple(range(fake.dim()))
    elif axis is None:
        fake, axis = trace.call(torch.reshape, [fake, [-1]], {}), 0
    default = {"correction": 0} if function in (torch.var, torch.std) else {}
    return give(trace, trace.call(function, [fake], {"dim": axis, **default, **renamed(kwargs)}), made)


def _norm(trace: Trace, fn: Any, a: Any, ord: None = None, axis: Any = None, **kwargs: Any) -> Any:
    if ord is not None:
        raise TypeError(f"of order {ord}")
    return _along(torch.linalg.vector_norm, trace, fn, a, axis, **kwargs)


def _joined(function: Any, trace: Trace, fn: Any, arrays: Any, axis: int = 0) -> Any:
    """Arrays put together: concatenate, stack ..."""
    made = ask(numpy().concatenate, [[ask(numpy().ravel, [array]) for array in arrays]])
    parts = [operand(trace, array, torch_dtype(trace, made.dtype), True) for array in arrays]
    return Array(trace, trace.call(function, [parts, *([] if function in STACKED else [axis])], {}))


def _same(function: Any, trace: Trace, fn: Any, a: Any, *args: Any) -> Any:
    """A function that keeps the dtype. a.reshape(2, 3) is a.reshape((2, 3))."""
    is_many = function is torch.reshape and (len(args) > 1 or isinstance(args[0], (int, torch.SymInt)))
    return Array(trace, trace.call(function, [a.fake, *([args] if is_many else args)], {}))


def _transpose(trace: Trace, fn: Any, a: Any, *axes: Any) -> Any:
    given = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
    order = tuple(given) if given else tuple(reversed(range(a.fake.dim())))
    return Array(trace, trace.call(torch.permute, [a.fake, order], {}))


def _astype(trace: Trace, fn: Any, a: Any, dtype: Any, copy: bool = True) -> Any:
    wanted = torch_dtype(trace, numpy().dtype(dtype))
    if a.fake.dtype.is_complex and not wanted.is_complex:
        raise TypeError("of complex numbers")
    return Array(trace, trace.call(torch.Tensor.to, [a.fake, wanted], {"copy": copy}), a.is_scalar)


def from_tensor(trace: Trace, fake: Fake) -> Array:
    """x.numpy(), which shares the tensor's memory."""
    if fake.requires_grad or fake.device.type != "cpu" or fake.dtype not in DTYPES:
        raise DataDependentValue(trace.loc(), function="numpy")
    return Array(trace, fake)


def _asarray(trace: Trace, fn: Any, a: Any, dtype: Any = None) -> Any:
    if isinstance(a, (list, tuple)):
        raise TypeError("of a list of arrays")
    made = from_tensor(trace, a) if isinstance(a, Fake) else Array(trace, a.fake) if a.is_scalar else a
    is_copy = fn is numpy().array
    if dtype is None and not is_copy:
        return made
    return _astype(trace, fn, made, made.dtype if dtype is None else dtype, is_copy)


def _contiguous(trace: Trace, fn: Any, *args: Any, **kwargs: Any) -> Any:
    fake = trace.call(torch.atleast_1d, [_asarray(trace, fn, *args, **kwargs).fake], {})
    return Array(trace, trace.call(torch.Tensor.contiguous, [fake], {}))


def _copy(trace: Trace, fn: Any, a: Any) -> Any:
    """The method brings what it copies in order, the function does not."""
    made = trace.call(torch.clone, [a.fake], {})
    return Array(trace, made if fn is numpy().copy else trace.call(torch.Tensor.contiguous, [made], {}))


def _where(trace: Trace, fn: Any, condition: Any, a: Any, b: Any) -> Any:
    made = ask(fn, [condition, a, b])
    dtypes = (torch.bool, *[torch_dtype(trace, made.dtype)] * 2)
    operands = [operand(trace, value, dtype, True) for value, dtype in zip((condition, a, b), dtypes)]
    return give(trace, trace.call(torch.where, operands, {}), made)


FLOATS_ONLY: Final = (torch.reciprocal, torch.floor_divide, torch.remainder, torch.pow)
"""Of integers NumPy raises, or gives something else, where torch does not."""
STACKED: Final = (torch.vstack, torch.hstack)
FROM_TENSOR: Final = ("asarray", "array")



def _named(rule: Rule, names: str, **settings: bool) -> dict[str, Rule]:
    """Functions that have the same name in torch."""
    return {name: partial(rule, getattr(torch, name), **settings) for name in names.split()}


CALLS: Final[dict[str, Rule]] = {
    **_named(_on, "sin cos tan sinh cosh tanh exp exp2 expm1 log log2 log10 log1p sqrt square negative"
             " positive floor ceil trunc reciprocal maximum minimum fmax fmin hypot logaddexp arcsin arccos"
             " arctan arctan2 arcsinh arccosh arctanh absolute abs copysign matmul"),
    **_named(_on, "add subtract multiply divide bitwise_and bitwise_or bitwise_xor floor_divide remainder"
             " einsum", numbers=True),
    **_named(_on, "isnan isinf isfinite signbit not_equal less less_equal greater greater_equal",
             in_common=True, numbers=True),
    **_named(_on, "logical_not logical_and logical_or logical_xor", in_common=True),
    "equal": partial(_on, torch.eq, in_common=True, numbers=True),
    "power": partial(_on, torch.pow, numbers=True), "rint": partial(_on, torch.round),
    "invert": partial(_on, torch.bitwise_not), "clip": partial(_on, torch.clamp),
    "dot": partial(_on, torch.matmul, most=2), "outer": partial(_on, torch.outer, most=1),
    **_named(_along, "sum mean std var amax amin any all prod cumsum cumprod argmax argmin"),
    "max": partial(_along, torch.amax), "min": partial(_along, torch.amin), "norm": _norm,
    **_named(_joined, "concatenate stack vstack hstack"), "where": _where, "astype": _astype,
    "item": lambda trace, fn, a: complex(a) if a.number is None else a.number,  # which says what it lacks
    **dict.fromkeys((*FROM_TENSOR, "asanyarray"), _asarray), "ascontiguousarray": _contiguous, "copy": _copy,
    **_named(_same, "zeros_like ones_like reshape ravel squeeze tile swapaxes moveaxis broadcast_to"),
    "transpose": _transpose, "expand_dims": partial(_same, torch.unsqueeze),
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


def _in_place(name: str) -> Any:
    def method(self: Array, other: Any) -> Any:
        if self.is_scalar:
            return NotImplemented
        ask(getattr(operator, f"__i{name}__"), [self, other])  # raises where the result does not fit
        self[...] = getattr(self, f"__{name}__")(other)
        return self

    return method


for _name, _function in (OPERATORS | COMPARED).items():
    setattr(Array, f"__{_name}__", _method(f"__{_name}__", _function))
for _name, _function in OPERATORS.items():
    setattr(Array, f"__r{_name}__", _method(f"__r{_name}__", _function, reverse=True))
    setattr(Array, f"__i{_name}__", _in_place(_name))

RULES[Array], IN_KEYS["Array"], IN_KEYS["ndarray"] = array_attr, position, position
METHOD_RULES["numpy"] = METHOD_RULES["__array__"] = from_tensor


# -- back to tensors ---------------------------------------------------------------------------------

def _of_numbers(trace: Trace, value: Any, kwargs: Kwargs) -> Any:
    """A tensor of numbers and items that change from call to call, which torch.tensor would have to know."""
    items = [*leaves(value)]
    kinds, changing = {*map(type, items)}, {torch.SymInt, torch.SymFloat, Fake}
    if kinds.isdisjoint(changing) or not kinds <= {int, float, *changing} or kwargs.get("requires_grad"):
        return None
    fakes = [item for item in items if type(item) is Fake]
    if type(value) is Fake or any(f.dim() or f.requires_grad or f.device.type != "cpu" for f in fakes):
        return None  # a warning is due where there are gradients
    default = torch.int64 if kinds <= {int, torch.SymInt, Fake} else torch.get_default_dtype()
    if fakes:
        default = reduce(torch.promote_types, [default] * (kinds != {Fake}) + [fake.dtype for fake in fakes])
        if kwargs.get("dtype") not in (None, default, torch.float32, torch.float64) or default.is_complex:
            return None  # values that another type does not hold are an error
    like = {**kwargs, "dtype": kwargs.get("dtype") or default}
    make: Rule = lambda part: (
        trace.call(torch.stack, [[*map(make, part)]], {}) if type(part) in (list, tuple)
        else trace.call(torch.Tensor.to, [part], like) if type(part) is Fake
        else trace.call(torch.full, [(), part], like))  # fmt: skip
    return make(value)


def _from_array(function: Any, trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    array: Any = args[0] if args else None
    if type(array) is Array:
        copy = torch.clone if function is torch.tensor else torch.Tensor.detach
        tensor = trace.call(copy, [array.fake], {})
    elif len(args) == 1 and (made := _of_numbers(trace, array, kwargs)) is not None:
        return made
    elif not type(array).__module__.startswith("numpy"):
        if has_array(array):
            raise UnknownCall(trace.loc(), function=f"torch.{function.__name__} of a list of arrays")
        if any(type(leaf).__module__ == "numpy" for leaf in leaves(array)):  # which the graph has as numbers
            kwargs = {"dtype": native(function, array).dtype, **kwargs}
        return call_torch(trace, function, args, kwargs)
    else:
        if array.ndim:
            array.flags.writeable = False  # a tensor may share its memory: a later write is left to eager
        tensor = operand(trace, array, None, True)
    return trace.call(torch.Tensor.to, [tensor, *args[1:]], kwargs) if kwargs or args[1:] else tensor


for _maker in (torch.from_numpy, torch.tensor, torch.as_tensor, torch.asarray):
    on(_maker)(partial(_from_array, _maker))


def _typed(kind: Any, trace: Trace, args: Args, kwargs: Kwargs) -> Any:
    """torch.LongTensor([1, 2]), torch.Tensor(2, 3)"""
    kinds = list, tuple, getattr(sys.modules.get("numpy"), "ndarray", list)
    like = {"dtype": native(kind).dtype, "device": native(kind).device}
    sizes = args[0] if len(args) == 1 and type(args[0]) is torch.Size else args
    if all(isinstance(size, (int, torch.SymInt)) for size in sizes) and not kwargs:
        return trace.call(torch.empty, [list(sizes) if args else [0]], like)
    if len(args) != 1 or kwargs or not isinstance(args[0], kinds):
        raise UnknownCall(trace.loc(), function=f"torch.{kind.__name__}")
    return _from_array(torch.as_tensor, trace, args, {"dtype": like["dtype"]})


for _kind in ("", "Long", "Int", "Short", "Byte", "Bool", "Float", "Double", "Half", "BFloat16"):
    on(getattr(torch, f"{_kind}Tensor"))(partial(_typed, getattr(torch, f"{_kind}Tensor")))
