"""Library calls through Python.

    PythonCall("aten.sort.default", (Slot tensor 0, -1, False)) -> callable(x) -> [values, indices]
"""
from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from dovetail.ir.program import PythonCall, Slot
from dovetail.ir.types import Device, DType
from dovetail.util.library import call_in_grad_mode, find_op


def make_call(call: PythonCall) -> Callable[..., list[Any]]:
    """Takes the tensors, then the numbers; returns the wanted results, in order. One that the call left
    undefined is an empty tensor."""
    op = find_op(call.op)
    text_arguments = {arg.name for arg in op._schema.arguments if "str" in str(arg.type)}
    names = [arg.name for arg in op._schema.arguments]
    args = [_constant(arg, name in text_arguments) for arg, name in zip(call.args, names)]
    kwargs = {name: _constant(arg, name in text_arguments) for name, arg in call.kwargs}
    count = call.tensors
    function = partial(call_in_grad_mode, op) if call.op == "aten.mkldnn_rnn_layer.default" else _bound(op)

    def run(*given: Any) -> list[Any]:
        filled = [_fill(arg, given, count) for arg in args]
        named = {key: _fill(arg, given, count) for key, arg in kwargs.items()}
        result = function(*filled, **named)
        if not call.positions:
            return [result] if call.outputs else []
        return [torch.empty(0) if result[k] is None else result[k] for k in call.positions]

    return run


def _bound(op: OpOverload) -> Callable[..., Any]:
    """The op as torch binds it to Python, microseconds quicker to call, where its name means no other."""
    packet = op._overloadpacket
    is_only = op.namespace == "aten" and {"default", "out"}.issuperset(packet.overloads())
    return getattr(torch._C._VariableFunctions, packet.__name__, op) if is_only else op


def _constant(arg: object, is_text: bool) -> object:
    """Dovetail's nouns as torch's; slots stay."""
    if isinstance(arg, DType):
        return getattr(torch, arg.torch_name)
    if isinstance(arg, Device):
        return torch.device(str(arg))
    if isinstance(arg, str) and not is_text and arg.startswith("torch."):
        return getattr(torch, arg.removeprefix("torch."))
    if isinstance(arg, tuple):
        return [_constant(item, is_text) for item in arg]
    return arg


def _fill(arg: object, given: tuple[Any, ...], tensors: int) -> object:
    if isinstance(arg, Slot):
        if arg.kind == "tensor":
            return given[arg.index]
        number = given[tensors + arg.index]
        return number if arg.kind == "int" else struct.unpack("d", struct.pack("q", number))[0]
    if isinstance(arg, list):
        return [_fill(item, given, tensors) for item in arg]
    return arg
