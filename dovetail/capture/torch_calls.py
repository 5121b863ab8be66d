"""Torch functions and tensor methods: performed on Fakes, and recorded.

    torch.relu(x)      -> call_function torch.relu
    x.view(2, -1)      -> call_method view
    x.shape            -> read from the Fake; nothing recorded, the input's guard covers it

Which callables count as torch functions is decided by `is_torch_call`: everything written in C in
torch, and Python functions of torch that ask has_torch_function (torch's own mark of an op).
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodDescriptorType
from typing import Any, Final

import torch

from dovetail import errors
from dovetail.capture.attributes import MISSING, bind_class_value, call_property, find_in_mro, guard_class
from dovetail.capture.masks import Masked, call_masked
from dovetail.capture.operations import get_item, has_fake, set_item
from dovetail.capture.origins import NOT_ASKED, TENSOR_TYPES, wrap
from dovetail.capture.text import NUMBERS, LateText, as_numbers, native
from dovetail.capture.trace import HELD, Raised, Trace, Write, leaves
from dovetail.errors import BackwardCall, DataDependentValue, FailedFake, UnknownCall, UnsupportedValue
from dovetail.fake import type_of
from dovetail.fake.tensor import Fake
from dovetail.ir.guard import Predicate
from dovetail.ir.source import Attr, DictAttr
from dovetail.util.derivative import behind
from dovetail.util.torch_state import READERS

MARKS: Final = frozenset({"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"})

OP_MODULES: Final = frozenset({"torch", "torch.functional", "torch.nn.functional", "torch._tensor",
                               "torch._lowrank", "torch._lobpcg", "torch._linalg_utils"})  # fmt: skip
"""Where torch keeps ops that are written in Python."""

TENSOR_FUNCTIONS: Final[dict[int, str]] = {
    id(value): name
    for owner in (torch.Tensor, torch._C.TensorBase, Fake)
    for name, value in vars(owner).items()
    if isinstance(value, FunctionType)
}
"""Methods of tensors written in Python, by identity."""

STATEFUL: Final = tuple("""set_ _set_ _push _pop _enter _exit _jit _functorch _vmap _add_ _log_ _remove_
    _unset _increment _decrement _maybe_ _dispatch_t _saved_tensors_hooks_""".split())
"""C functions of torch whose names start so change hidden state."""

MOST_STEPS: Final = 256
"""Of a recurrent layer without a kernel for all of them."""
LIST_KERNELS: Final = ("_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_foreach", "_cuda_jiterator")
"""One kernel over lists of tensors already, that writes in place or takes their addresses: left to Python."""

INPUT_FIELDS: Final = ("is_leaf", "grad_fn", "_backward_hooks", "_base", "output_nr", "retains_grad")
"""What only the real tensor of an input can tell, until it is written."""
OWN_FIELDS: Final = frozenset({"meta", "constant", "_meta", "_constant"})
SCALED: Final = {"addcdiv_": "value", "addcdiv": "value", "addcmul_": "value", "addcmul": "value",
                 "add_": "alpha", "add": "alpha", "sub_": "alpha", "sub": "alpha"}  # fmt: skip
"""Methods with a factor that must be a number: a tensor there would have to be read (optimizers do that)."""
BEGINS: Final = "Tensor.requires_grad_ (a new autograd graph begins)"
REFUSED_METHODS: Final = frozenset("""register_post_accumulate_grad_hook share_memory_ storage untyped_storage
    _typed_storage set_ pin_memory retain_grad _use_count""".split())


def resolve(name: str, trace: Trace, fake: Fake) -> Any:
    """resolve_conj and resolve_neg: a Fake has no lazy conjugate to undo, what runs later may."""
    made = perform(trace, torch.ops.aten.alias, [fake], {})
    return trace.record("call_method", name, (fake,), {}, made)


def ask_lazy(trace: Trace, fake: Fake) -> bool:
    """is_conj and is_neg: no input is, and of what was computed only the real tensor can tell."""
    if id(fake) not in trace.origins and any("conj" in str(recorded.target) for recorded in trace.calls):
        raise DataDependentValue(trace.loc(), function="is_conj or is_neg")
    return False


def ask_input(name: str, trace: Trace, fake: Fake) -> Any:
    """is_shared, storage_offset ...: of an input, and so of its views, the real tensor tells at each call."""
    origin = trace.origins.get(id(fake)) or trace.origins.get(id(fake._base))
    if origin is None:
        return native(getattr(fake, name))
    answer = getattr(origin.original, name)()
    is_same = Predicate(lambda tensor: getattr(tensor, name)() == answer, f".{name}() == {answer}")
    trace.guard(origin.source, is_same)
    return answer if origin.stand_in is fake else native(getattr(fake, name))


METHOD_RULES: Final[dict[str, Callable[..., Any]]] = {
    **{name: partial(resolve, name) for name in ("resolve_conj", "resolve_neg")},
    **{n: partial(ask_input, n) for n in ("is_inference", "is_shared", "storage_offset", "_is_view")},
    **dict.fromkeys(("is_conj", "is_neg"), ask_lazy),
    "__getitem__": get_item,
    "__setitem__": set_item,
}
"""Methods of tensors that give something else than tensors, or that a Fake cannot tell."""


OPERANDS: Final = {"__getitem__": 2, "__setitem__": 3, "as_subclass": 2}
"""How many those of them take that take more than the tensor."""


def is_overriding(kind: Any) -> bool:
    """Whether a class says what functions do to its instances."""
    is_known = kind in TENSOR_TYPES or kind.__module__.startswith("torch.fx")
    return not is_known and getattr(kind, "__torch_function__", NOT_ASKED) is not NOT_ASKED


def is_torch_call(fn: Any) -> bool:
    kind = type(fn)
    if kind is FunctionType:
        return fn.__module__ in OP_MODULES and not MARKS.isdisjoint(fn.__code__.co_names)
    if kind is BuiltinFunctionType:
        return (fn.__module__ or "").startswith("torch")
    if kind is MethodDescriptorType:
        return issubclass(torch.Tensor, fn.__objclass__) and fn.__objclass__ is not object
    return isinstance(fn, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def call_torch(trace: Trace, fn: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Perform a torch function on the trace's values and record it if it made or changed tensors."""
    if any(type(arg) is Masked for arg in (*args, *kwargs.values())):
        return call_masked(trace, fn, args, kwargs)
    if kwargs.get("requires_grad") is True and torch.is_grad_enabled():
        made = call_torch(trace, fn, args, {**kwargs, "requires_grad": False})
        return call_tensor_method(trace, "requires_grad_", [made], {})
    args, kwargs = with_texts(args, kwargs)
    name, module = getattr(fn, "__name__", str(fn)), getattr(fn, "__module__", None)  # a method has none
    is_stateful = name.startswith(STATEFUL) and not has_fake(args)
    is_hidden = name == "kron" and kwargs.get("out") is not None  # it writes by a view that says it is none
    is_hidden |= bool(args) and hasattr(type(args[0]), "_pybind11_conduit_v1_")  # C++ with a state
    if is_stateful or is_hidden or name.startswith(LIST_KERNELS) or module == "torch._C._functorch":
        raise UnknownCall(trace.loc(), function=f"{module}.{name}")
    if trace.asks and is_torch_call(fn) and (said := trace.overridden(fn, args, kwargs)) is not MISSING:
        return said
    if name == "run_backward":
        raise BackwardCall(trace.loc(), function="torch.autograd.grad or backward")
    if name in METHOD_RULES and len(args) == 1 and not kwargs and isinstance(args[0], Fake):
        return METHOD_RULES[name](trace, args[0])
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        check_recurrent(trace, name, args)
    check_arguments(trace, fn, args, kwargs)
    if "as_strided" in name:
        ask_input("storage_offset", trace, [*args, *kwargs.values()][0])  # a place is counted from there
    result = perform(trace, fn, args, kwargs)
    if isinstance(result, torch.Tensor) and not isinstance(result, Fake) and has_fake(args):
        raise UnknownCall(trace.loc(), function=f"{module}.{name}, which makes a {type(result).__name__}")
    if has_fake(result) or (result is None and has_fake(args)):
        trace.record("call_function", fn, tuple(args), kwargs, result)
    elif not args and not kwargs and fn not in READERS.values() and "autocast" not in name:
        guard_answer(trace, fn, result)
    return result


def check_recurrent(trace: Trace, name: str, args: list[Any]) -> None:
    """A layer that goes step by step is compiled for the first length it meets, and not for each one."""
    is_symbolic = args[0].form is not None
    if getattr(args[1], "dtype", None) == torch.int64 and (is_symbolic or name != "lstm"):
        raise DataDependentValue(trace.loc(), function=f"{name} of a packed sequence")  # reads it, or crashes
    if is_symbolic and not trace.is_whole:
        sizes = [size for size in args[0].shape if isinstance(size, torch.SymInt)]
        trace.dynamic.shapes.restless |= trace.dynamic.names_in(sizes)
    elif name != "lstm" and not trace.is_whole and len(args) == 9:
        if (steps := args[0].shape[args[-1]] * args[4]) > MOST_STEPS:
            raise errors.LongLayer(trace.loc(), function=name, steps=steps)


def guard_answer(trace: Trace, read: Callable[[], Any], value: Any) -> None:
    """The program asked for a part of torch's state, such as get_num_threads."""
    is_same = Predicate(lambda read: read() == value, f"() == {value}")
    trace.guard(trace.const(read, read.__name__), is_same)


def with_texts(args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments for C code, which takes nothing but a str for a text, and no scalar that stands for one."""
    made = [arg.now() if type(arg) is LateText else as_numbers(arg) for arg in (*args, *kwargs.values())]
    return made[: len(args)], dict(zip(kwargs, made[len(args) :]))


def perform(trace: Trace, fn: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run on Fakes. torch's complaint about a Fake that lacks data is a break; others are the program's."""
    try:
        return native(fn, *args, **kwargs)
    except Raised as raised:
        text, name = str(raised.value), getattr(fn, "__name__", str(fn))
        is_fake = "Fake" in text or "meta" in text.lower() or "dispatch" in text
        if is_fake and isinstance(raised.value, (NotImplementedError, TypeError)):
            raise FailedFake(trace.loc(), function=name, detail=text[:200]) from raised.value
        raise


def check_arguments(trace: Trace, fn: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Python callables must not be run by torch behind the interpreter's back."""
    what = "requires_grad=True" if kwargs.get("requires_grad") is True and torch.is_grad_enabled() else ""
    for leaf in leaves([args, kwargs]):
        if type(leaf) is Fake or type(leaf) in HELD:
            continue
        if type(leaf) is Masked:
            leaf.leave()
        is_ours = type(leaf).__module__.startswith("dovetail.capture")
        if is_ours or hasattr(type(leaf), "__torch_function__") or isinstance(leaf, FunctionType):
            what = f"a {type_of_value(trace, leaf).__name__}"  # a tensor that is no Fake, torch.fx.Proxy
    if what:
        raise UnknownCall(trace.loc(), function=f"{getattr(fn, '__name__', fn)} with {what}")


def check_leaves(trace: Trace, value: Fake) -> None:
    """A tensor by which the graph differentiates must not leave it, nor what is made of such alone."""
    made = {id(leaf) for leaf, _, _ in trace.leaves}
    nodes = behind([value.grad_fn] if value.grad_fn is not None else [])
    leaves = {id(node.variable) for node in nodes if hasattr(node, "variable")}
    if id(value) in made or id(value._base) in made or (leaves and leaves <= made):
        _, loc, step = trace.leaves[0]
        raise UnknownCall(loc, function=BEGINS, step=step)


def call_tensor_method(trace: Trace, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """x.name(...), where args[0] is x."""
    if not args or not isinstance(args[0], Fake):
        return call_torch(trace, getattr(torch.Tensor, name), args, kwargs)
    if trace.asks and (said := trace.overridden(getattr(torch.Tensor, name), args, kwargs)) is not MISSING:
        return said
    if name == "backward":
        raise BackwardCall(trace.loc(), function="Tensor.backward")
    if name in METHOD_RULES and len(args) == OPERANDS.get(name, 1) and not kwargs:
        return METHOD_RULES[name](trace, *args)
    if name in REFUSED_METHODS:
        raise UnknownCall(trace.loc(), function=f"Tensor.{name}")
    if name == "requires_grad_":
        wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        if bool(wanted) == args[0].requires_grad:
            return args[0]
        if not wanted or id(args[0]) in trace.origins:
            raise UnknownCall(trace.loc(), function=BEGINS)
        trace.leaves.append((args[0], trace.loc(), trace.step))
    if name == "detach_" and args[0].requires_grad and id(args[0]) in trace.origins:
        raise UnknownCall(trace.loc(), function="Tensor.detach_ of an input (the caller sees it)")
    if name.startswith("as_strided"):
        ask_input("storage_offset", trace, args[0])
    if name == "new" and len(args) == 2 and type(args[1]) is torch.Size:  # a tuple would be its contents
        name = "new_empty"
    if name == "type" and isinstance(args[-1], type(torch.LongTensor)):
        args = [args[0], f"{args[-1].__module__}.{args[-1].__name__}"]
    if name == "new_tensor" and len(args) == 2:
        like = {"dtype": args[0].dtype, "device": args[0].device}
        return trace.call(torch.tensor, args[1:], {**like, **kwargs})
    if "from" in kwargs:  # a word of Python: the text of a graph cannot say it
        args, kwargs = [args[0], kwargs["from"]], {key: kwargs[key] for key in kwargs if key != "from"}
    if kwargs and name in SCALED and isinstance(kwargs.get(SCALED[name]), Fake):
        return scale_by_tensor(trace, name, args, kwargs)
    args, kwargs = with_texts(args, kwargs)
    check_arguments(trace, name, args, kwargs)
    result = perform(trace, getattr(args[0], name), args[1:], kwargs)
    if has_fake(result) or (result is None and not name.startswith("__")):
        trace.record("call_method", name, tuple(args), kwargs, result)
    return result


def scale_by_tensor(trace: Trace, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """x.addcdiv_(a, b, value=t) as x.add_(a * t / b): t stays a tensor. Eager rounds only what that gives."""
    stem, suffix = name.rstrip("_"), "_" if name.endswith("_") else ""
    x, first, *rest = args
    kind = torch.result_type(x, first)
    wide = torch.float32 if kind in (torch.float16, torch.bfloat16) else kind
    change = call_tensor_method(trace, "mul", [to_dtype(trace, first, wide), kwargs[SCALED[name]]], {})
    for other in rest:
        change = call_tensor_method(trace, "div" if stem == "addcdiv" else "mul", [change, other], {})
    result = call_tensor_method(trace, (stem if not rest else "add") + suffix, [x, change], {})
    return result if suffix else to_dtype(trace, result, kind)


def to_dtype(trace: Trace, value: Any, dtype: torch.dtype) -> Any:
    is_other = isinstance(value, Fake) and value.dtype is not dtype
    return call_tensor_method(trace, "to", [value, dtype], {}) if is_other else value


def tensor_attr(trace: Trace, fake: Fake, name: str, is_plain: bool = False) -> Any:
    """An attribute of a tensor. `is_plain`: as torch.Tensor has it."""
    origin, kind = trace.origins.get(id(fake)), type_of_value(trace, fake)
    if name == "__class__":
        return kind
    found, owner = (MISSING, None) if is_plain else find_in_mro(kind, name)
    if origin is not None and type(found) is MemberDescriptorType:  # a slot of a subclass
        return wrap(trace, native(getattr, origin.original, name), Attr(origin.source, name))
    if owner not in (None, *torch.Tensor.__mro__) and owner.__module__.split(".")[0] != "torch":
        guard_class(trace, kind)  # what a subclass defines itself
        return bind_class_value(trace, found, owner, fake, kind, name)
    asks = trace.asks and hasattr(torch.Tensor, name)
    if asks and (said := trace.overridden(getattr, [fake, name])) is not MISSING:
        return said
    if origin is not None:
        if is_overriding(kind) and name in ("grad", "_version", *INPUT_FIELDS):  # which a guard would ask for
            raise UnsupportedValue(trace.loc(), type=kind.__name__, detail=f"its .{name}")
        if name == "grad":
            return wrap(trace, origin.original.grad, Attr(origin.source, "grad"))
        if name == "_version":
            return wrap(trace, origin.original._version, Attr(origin.source, name)) + fake._version
        if name in INPUT_FIELDS and (name == "_base" or fake.is_inference() or not fake._version):
            return wrap(trace, getattr(origin.original, name), Attr(origin.source, name))
        own = getattr(origin.original, "__dict__", {})
        if name in own:
            return trace.remember((id(fake), name), wrap(trace, own[name], DictAttr(origin.source, name)))
        elif not hasattr(torch.Tensor, name):
            trace.bare(origin.source).missing.append(name)
    if name in OWN_FIELDS or not (hasattr(Fake, name) or name in fake.__dict__):
        raise Raised(AttributeError(f"'{kind.__name__}' object has no attribute '{name}'", name=name))
    value = native(getattr, fake, name)
    if isinstance(value, Fake) and value is not fake:
        trace.record("call_function", getattr, (fake, name), {}, value)
    return value


def store_tensor_attr(trace: Trace, fake: Fake, name: str, value: Any) -> None:
    found = find_in_mro(type_of_value(trace, fake), name)[0]
    if isinstance(found, property):
        return call_property(trace, found, "setter", name, fake, value)  # type: ignore[no-any-return]
    if hasattr(type(found), "__set__") and type(found) is not MemberDescriptorType:
        if name == "requires_grad" and value == fake.requires_grad:
            return
        reads = (call for call in reversed(trace.calls) if call.target is getattr and call.result is value)
        if name == "data" and any(call.args[0] is fake for call in reads):
            return  # x.data -= y: it is x's own memory that was written
        is_like = type(value) is Fake and fake.form is value.form is None and type_of(fake) == type_of(value)
        if id(fake) in trace.origins and name == "data" and is_like and not value.requires_grad:
            trace.record("call_method", "detach", (value,), {}, fake)  # from here on another name of value
        elif id(fake) not in trace.origins or name != "grad" or not (value is None or is_like):
            raise UnsupportedValue(trace.loc(), type="Tensor", detail=f"assigning to .{name}")
    trace.writes[(id(fake), name)] = Write(fake, name, value, "attr" if id(fake) in trace.origins else "tag")


Trace.tensor_attr, Trace.store_tensor_attr = tensor_attr, store_tensor_attr


def type_of_value(trace: Trace, value: Any) -> type:
    """type(value) as the user's program sees it."""
    if isinstance(value, Fake):
        origin = trace.origins.get(id(value))
        return type(origin.original) if origin is not None else trace.kinds.get(id(value), torch.Tensor)
    if type(value) in (LateText, Masked):
        return str if type(value) is LateText else torch.Tensor
    if type(value).__module__.startswith("dovetail.capture"):
        return value.__class__  # type: ignore[no-any-return]
    return NUMBERS.get(type(value), type(value))
