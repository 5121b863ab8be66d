"""Library calls through the dispatcher's C entry: any op whose arguments libtorch's shim can carry.

    aten.topk.default(x, 5)  ->  uint64_t stack1[] = {own(x), 5, ...};  dispatch(..., "aten::topk", stack1)

A value travels as 64 bits: an owned tensor handle, a number, or a pointer to a list, a string or a
present optional. An argument of another type (a Scalar, a dtype) sends the call through Python.
"""
from __future__ import annotations

import json
import struct
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._library.custom_ops import OPDEFS

from dovetail.codegen.cpp.exprs import c_expr
from dovetail.ir.expr import Expr
from dovetail.ir.loop import BufferRef, Extern, ExternArg, Scalar

if TYPE_CHECKING:
    from dovetail.codegen.host.program import HostWriter

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


@cache
def find_schema(op: str) -> Any:
    """The schema of an op by its printed name, or None."""
    namespace, name, overload = op.split(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return getattr(getattr(packet, overload, None), "_schema", None)


def encode(writer: HostWriter, arg: ExternArg, kind: str) -> str:
    """The text of a 64-bit value; statements that must come first go to the writer."""
    if kind.startswith("Optional["):
        return "0" if arg is None else f"some({encode(writer, arg, kind[9:-1])})"
    if kind.startswith("List[") and isinstance(arg, tuple):
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
    schema = find_schema(extern.op)
    if schema is None or extern.into:
        return False
    if not schema.returns or schema.name in OPDEFS:  # Python keeps the class of what a check or it raises
        return False
    if len(schema.returns) != len(extern.results) and not extern.positions:
        return False
    if any(str(result.type) != "Tensor" for result in schema.returns):
        return False
    given = dict(extern.kwargs)
    back = writer.mark()
    try:
        values = []
        for k, argument in enumerate(schema.arguments):
            arg = extern.args[k] if k < len(extern.args) else given.get(argument.name, _default(argument))
            values.append(encode(writer, arg, str(argument.type)))
    except NotCarried:
        back()
        return False
    _emit(writer, extern, values, len(schema.returns))
    return True


def _default(argument: Any) -> Any:
    value = argument.default_value
    return tuple(value) if isinstance(value, list) else value


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
