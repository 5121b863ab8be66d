"""Library calls from the host program: straight into the C shim where it has the function, else
through Python.

    aten.mm.default(a, b) into o     aoti_torch_cpu_mm_out(o, a, b)
    aten.sort.default(x, -1, False)  python->call_with(python, 0, {x}, ...)
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from dovetail.codegen.cpp.exprs import c_expr
from dovetail.codegen.host.dispatch import call_dispatcher
from dovetail.ir.expr import Expr
from dovetail.ir.loop import BufferRef, Extern, ExternArg, Scalar
from dovetail.ir.program import PythonCall, Slot

if TYPE_CHECKING:
    from dovetail.codegen.host.program import HostWriter


def emit_extern(writer: HostWriter, extern: Extern) -> None:
    where = f"    // {extern.loc}" if extern.loc else ""
    writer(f"// {extern}{where}")
    rule = DIRECT.get(extern.op, call_dispatcher)
    if not rule(writer, extern):
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
    # What backward needs (the last result) is made only in grad mode: see runtime/load.py.
    "aten.mkldnn_rnn_layer.default": lambda writer, extern: (
        extern.results[-1] not in writer.read and call_dispatcher(writer, extern)),
    **{f"aten.{name}.default": partial(_into, name) for name in ("mm", "bmm", "addmm", "baddbmm")},
    "aten.convolution.default": _convolution,
}  # fmt: skip


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
