"""Library calls from the host program: straight into the C shim where it has the function, through the
dispatcher's C entry where that can carry the values, else through Python.

    aten.mm.default(a, b) into o     aoti_torch_cpu_mm_out(o, a, b)
    aten.topk.default(x, 5)          uint64_t stack1[] = {own(x), 5, ...}; dispatch(..., "aten::topk", stack1)
    aten.sort.default(x, -1, False)  python->call_with(python, 0, {x}, ...)
"""
from __future__ import annotations

import json
import struct
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from torch._library.custom_ops import OPDEFS

from dovetail.codegen.cpp.exprs import c_expr
from dovetail.ir.expr import Expr
from dovetail.ir.loop import BufferRef, Extern, ExternArg, Scalar
from dovetail.ir.program import PythonCall, Slot
from dovetail.util.library import find_op

if TYPE_CHECKING:
    from dovetail.codegen.host.program import HostWriter


def emit_extern(writer: HostWriter, extern: Extern) -> None:
    where = f"    // {extern.loc}" if extern.loc else ""
    writer(f"// {extern}{where}")
    if not DIRECT.get(extern.op, call_dispatcher)(writer, extern):
        call_python(writer, extern)


def shim(writer: HostWriter) -> str:
    """The part of the C shim for this program's device."""
    return writer.plan.schedule.loops.device.kind


# -- straight calls --------------------------------------------------------------------------------


def _into(function: str, writer: HostWriter, extern: Extern) -> bool:
    """An out= variant on tensors only."""
    if not extern.into or not all(isinstance(arg, BufferRef) for arg in extern.args):
        return False
    args = [writer.view(arg) for arg in extern.args if isinstance(arg, BufferRef)]
    numbers = _beta_alpha(extern) if function in ("addmm", "baddbmm") else []
    if numbers is None:
        return False
    out = writer.handle(extern.outputs[0])
    call = f"aoti_torch_{shim(writer)}_{function}_out({', '.join([out, *args, *numbers])})"
    writer(f'TRY_OP("{extern.op}", {call})')
    return True


def _beta_alpha(extern: Extern) -> list[str] | None:
    given = dict(extern.kwargs)
    values = [given.get("beta", 1), given.get("alpha", 1)]
    numbers = [v for v in values if isinstance(v, (int, float))]
    return [repr(float(v)) for v in numbers] if len(numbers) == len(values) else None


def _convolution(writer: HostWriter, extern: Extern) -> bool:
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = extern.args
    if not isinstance(x, BufferRef) or not isinstance(weight, BufferRef):
        return False
    bias_text = "nullptr"
    if isinstance(bias, BufferRef):
        bias_text = writer.fresh("bias")
        writer(f"Handle {bias_text}_ = {writer.view(bias)};")
        bias_text = f"&{bias_text}_"
    given = (stride, padding, dilation, output_padding)
    lists = [f"{writer.sizes(v)}, {len(v)}" for v in given if isinstance(v, tuple)]  # type: ignore[arg-type]
    a, b = writer.view(x), writer.view(weight)
    out = f"h_{extern.outputs[0]}"
    writer(f"Tensor {out};")
    flags = f"{lists[0]}, {lists[1]}, {lists[2]}, {int(bool(transposed))}, {lists[3]}, {groups}"
    call = f"aoti_torch_{shim(writer)}_convolution({a}, {b}, {bias_text}, {flags}, &{out}.handle)"
    writer(f'TRY_OP("{extern.op}", {call})')
    writer.settle(extern.outputs[0], out)
    return True


DIRECT: Final[dict[str, Callable[[HostWriter, Extern], bool]]] = {
    # What backward needs (the last result) is made only in grad mode: see util/library.py.
    "aten.mkldnn_rnn_layer.default": lambda writer, extern: (
        extern.results[-1] not in writer.read and call_dispatcher(writer, extern)),
    **{f"aten.{name}.default": partial(_into, name) for name in ("mm", "bmm", "addmm", "baddbmm")},
    "aten.convolution.default": _convolution,
    "aten.as_strided_scatter.default": lambda writer, extern: False,  # likewise
}  # fmt: skip


# -- through the dispatcher's C entry: any op whose arguments libtorch's shim can carry ------------

DISPATCH_HEAD: Final = """\
extern "C" {
int32_t torch_new_list_reserve_size(uint64_t, void**);
int32_t torch_list_push_back(void*, uint64_t);
int32_t torch_new_string_handle(const char*, uint64_t, void**);
}
static inline uint64_t own(Handle h) {
    Handle copy = nullptr;
    aoti_torch_new_tensor_handle(h, &copy);
    return (uint64_t)copy;
}
static inline uint64_t some(uint64_t value) {
    uint64_t* p = (uint64_t*)malloc(8);  // libtorch deletes it
    *p = value;
    return (uint64_t)p;
}
static uint64_t list(uint64_t n, const uint64_t* items) {
    void* made = nullptr;
    torch_new_list_reserve_size(n, &made);
    for (uint64_t k = 0; k < n; ++k) torch_list_push_back(made, items[k]);
    return (uint64_t)made;
}
static inline uint64_t text(const char* s, uint64_t n) {
    void* made = nullptr;
    torch_new_string_handle(s, n, &made);
    return (uint64_t)made;
}
static int32_t dispatch(Python* python, const char* op, const char* overload, uint64_t* stack) {
    TRY_OP(op, aoti_torch_call_dispatcher(op, overload, stack))
    return 0;
}
"""


class NotCarried(Exception):
    """The shim has no form for this value."""


def encode(writer: HostWriter, arg: ExternArg, kind: str) -> str:
    """The text of a 64-bit value: an owned tensor handle, a number, or a pointer to a list, a string or a
    present optional. Statements that must come first go to the writer."""
    if kind.startswith("Optional["):
        return "0" if arg is None else f"some({encode(writer, arg, kind[9:-1])})"
    if kind.startswith("List[") and isinstance(arg, (tuple, list)):  # the schema has its defaults as lists
        items = [encode(writer, item, kind[5:-1]) for item in arg]
        name = writer.fresh("items")
        writer(f"const uint64_t {name}[] = {{{', '.join(items) or '0'}}};")
        return f"list({len(items)}, {name})"
    if kind == "Tensor" and isinstance(arg, BufferRef):
        return f"own({writer.view(arg)})"
    if kind == "int" and isinstance(arg, Expr):
        return f"(uint64_t)({c_expr(arg)})"
    if kind == "int" and type(arg) is int:
        return f"(uint64_t){arg}l"
    if kind == "float" and isinstance(arg, Scalar):
        return f"(uint64_t)bits_of({arg.args[0]})"
    if kind == "float" and type(arg) in (int, float):
        bits = struct.unpack("Q", struct.pack("d", float(arg)))[0]  # type: ignore[arg-type]
        return f"{bits}ul /* {arg} */"
    if kind == "bool" and type(arg) is bool:
        return str(int(arg))
    if kind == "str" and isinstance(arg, str) and not arg.startswith("torch."):
        return f"text({json.dumps(arg)}, {len(arg.encode())})"
    raise NotCarried(kind)


def call_dispatcher(writer: HostWriter, extern: Extern) -> bool:
    """Emit the call if all its values can be carried; False leaves the writer as it was."""
    schema = find_op(extern.op)._schema
    if extern.into or not schema.returns or schema.name in OPDEFS:
        return False  # through Python, which keeps the class of what a check or a custom op raises
    is_partial = len(schema.returns) != len(extern.results) and not extern.positions
    if is_partial or any(str(result.type) != "Tensor" for result in schema.returns):
        return False
    given = dict(extern.kwargs)
    back = writer.mark()
    try:
        values = []
        for k, argument in enumerate(schema.arguments):
            arg = extern.args[k] if k < len(extern.args) else given.get(argument.name, argument.default_value)
            values.append(encode(writer, arg, str(argument.type)))
    except NotCarried:
        back()
        return False
    _emit(writer, extern, values, len(schema.returns))
    return True


def _emit(writer: HostWriter, extern: Extern, values: list[str], results: int) -> None:
    stack = writer.fresh("stack")
    namespace, name, overload = extern.op.split(".")
    room = max(len(values), results)
    writer(f"uint64_t {stack}[{room}] = {{{', '.join(values)}}};")
    overload = "" if overload == "default" else overload
    writer(f'if (dispatch(python, "{namespace}::{name}", "{overload}", {stack})) return 1;')
    places = extern.positions or range(len(extern.results))
    for k, output in zip(places, extern.results):
        writer(f"Tensor h_{output}{{(Handle){stack}[{k}]}};")
    for k in sorted(set(range(results)) - set(places)):  # an undefined tensor, most often
        writer(f"Tensor {writer.fresh('unused')}{{(Handle){stack}[{k}]}};")
    for output in extern.results:
        writer.settle(output, f"h_{output}")


# -- through Python --------------------------------------------------------------------------------


def call_python(writer: HostWriter, extern: Extern) -> None:
    tensors: list[str] = []
    numbers: list[str] = []

    def slot(arg: ExternArg) -> object:
        if isinstance(arg, BufferRef):
            tensors.append(writer.view(arg))
            return Slot("tensor", len(tensors) - 1)
        if isinstance(arg, Expr) and not arg.is_const:
            numbers.append(c_expr(arg))
            return Slot("int", len(numbers) - 1)
        if isinstance(arg, Expr):
            return arg.value
        if isinstance(arg, Scalar):
            numbers.append(f"bits_of({arg.args[0]})")
            return Slot("float", len(numbers) - 1)
        if isinstance(arg, tuple):
            return tuple(slot(item) for item in arg)
        return arg

    args = tuple(slot(arg) for arg in extern.args)
    kwargs = tuple((key, slot(arg)) for key, arg in extern.kwargs)
    index, count = len(writer.python_calls), len(extern.results)
    called = PythonCall(extern.op, args, kwargs, len(tensors), count, extern.positions)
    writer.python_calls.append(called)
    given, ints, got = (writer.fresh(stem) for stem in ("in", "number", "out"))
    writer(f"Handle {given}[] = {{{', '.join(tensors) or 'nullptr'}}};")
    writer(f"const int64_t {ints}[] = {{{', '.join(numbers) or '0'}}};")
    writer(f"Handle {got}[{max(count, 1)}] = {{}};")
    takes = f"{given}, {len(tensors)}, {ints}, {len(numbers)}, {got}, {count}"
    writer(f"if (python->call_with(python, {index}, {takes})) return 1;")
    for k, name in enumerate(extern.results):
        owned = writer.fresh("made") if extern.into else f"h_{name}"
        writer(f"Tensor {owned}{{{got}[{k}]}};")
        if extern.into:
            writer(f'TRY("{extern.op}", aoti_torch_copy_({writer.handle(name)}, {owned}, 0))')
        else:
            writer.settle(name, owned)
