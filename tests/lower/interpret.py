"""The meaning of Loops, in slow torch: every nest is evaluated on grids of indices.

    run_loops(lower(graph), [x, w]) -> [y]

Loads out of range raise, unless a mask keeps them from happening.
"""
from __future__ import annotations

from typing import Any

import torch

from dovetail.fake import to_torch_device, to_torch_dtype
from dovetail.ir.expr import ZERO, Expr
from dovetail.ir.loop import Buffer, BufferRef, Extern, Loops, Nest, Scalar
from dovetail.ir.types import Device, DType
from tests.ops.eager import call_prim

_EXPR = {
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "mod": torch.remainder,
    "min": torch.minimum,
    "max": torch.maximum,
    "eq": torch.eq,
    "lt": torch.lt,
    "le": torch.le,
    "and": torch.logical_and,
    "not": torch.logical_not,
}


def run_loops(loops: Loops, inputs: list[Any]) -> list[Any]:
    return _Machine(loops, inputs).run()


class _Machine:
    def __init__(self, loops: Loops, inputs: list[Any]) -> None:
        self.loops = loops
        self.memory: dict[str, torch.Tensor] = {}
        self.symbols: dict[str, Any] = {}
        buffers = {b.name: b for b in loops.buffers}
        for name, value in zip(loops.inputs, inputs):
            if isinstance(value, torch.Tensor):
                self.memory[name] = _flat(value, buffers[name])
            else:
                self.symbols[name] = value

    def run(self) -> list[Any]:
        for buffer in self.loops.buffers:
            if buffer.kind != "input":
                self.memory[buffer.name] = _reals(torch.zeros(_span(buffer), dtype=to_torch_dtype(buffer.type.dtype)))
        for step in self.loops.steps:
            if isinstance(step, Nest):
                self.nest(step)
            else:
                self.extern(step)
        return [
            self.view(out) if isinstance(out, BufferRef) else self.plain(out) for out in self.loops.outputs
        ]

    def view(self, ref: BufferRef) -> torch.Tensor:
        shape = [s.value for s in ref.type.shape]
        stride = [s.value for s in ref.type.stride]
        memory = self.memory[ref.buffer]
        memory = memory.view(to_torch_dtype(ref.type.dtype)) if ref.type.dtype.kind == "complex" else memory
        return torch.as_strided(memory, shape, stride, memory.storage_offset() + ref.offset.value)

    # -- nests -------------------------------------------------------------------------------------

    def nest(self, nest: Nest) -> None:
        ranges = [*nest.ranges, *nest.reduce]
        sizes = [r.size.value for r in ranges]
        env: dict[Expr, torch.Tensor] = {}
        for place, each in enumerate(ranges):
            shape = [1] * len(ranges)
            shape[place] = sizes[place]
            env[each.var] = torch.arange(sizes[place]).reshape(shape)
        outer = sizes[: len(nest.ranges)]
        for write in nest.writes:
            value = self.scalar(write.value, env, None, {}).expand(sizes)
            if write.reduce is not None:
                values = _reduce(write.reduce, value, len(outer))
            else:
                values = (value,)
            if write.index_scalar is not None:
                where = self.scalar(write.index_scalar, env, None, {}).expand(sizes)
            else:
                where = self.expr(write.index, env)
                where = (
                    where.reshape(where.shape[: len(outer)]).expand(outer)
                    if write.reduce
                    else where.expand(sizes)
                )
            for name, got in zip(write.buffers, values):
                target = self.memory[name]
                assert got.dtype == target.dtype, (nest.name, got.dtype, target.dtype)
                flat = where.reshape(-1).contiguous()
                target[flat] = got.reshape(-1).contiguous()

    def expr(self, value: Expr, env: dict[Expr, torch.Tensor]) -> torch.Tensor:
        if value in env:
            return env[value]
        if value.op == "const":
            return torch.tensor(value.value)
        if value.op in ("true", "false"):
            return torch.tensor(value.op == "true")
        if value.op == "sym":
            return torch.tensor(self.symbols[value.name])
        parts = [self.expr(x, env) for x in value.operands]
        if value.op == "add":
            constant, terms = value.args
            total = torch.tensor(constant)
            for part, (_, n) in zip(parts, terms):
                total = total + part * n
            return total
        if value.op == "mul":
            total = parts[0]
            for part in parts[1:]:
                total = total * part
            return total
        return _EXPR[value.op](*parts)

    def scalar(self, node: Scalar, env: dict, mask: torch.Tensor | None, memo: dict) -> torch.Tensor:
        if node not in memo:
            memo[node] = self._scalar(node, env, mask, memo)
        return memo[node]

    def _scalar(self, node: Scalar, env: dict, mask: torch.Tensor | None, memo: dict) -> torch.Tensor:
        if node.op == "const":
            return torch.tensor(node.args[0], dtype=to_torch_dtype(node.dtype))
        if node.op == "index":
            return self.expr(node.args[0], env).to(to_torch_dtype(node.dtype))
        if node.op == "input":
            return torch.tensor(self.symbols[node.args[0]], dtype=to_torch_dtype(node.dtype))
        if node.op in ("load", "load_at"):
            index = (
                self.expr(node.args[1], env)
                if node.op == "load"
                else self.scalar(node.args[1], env, mask, memo)
            )
            memory = self.memory[node.args[0]]
            if mask is not None:
                index, seen = torch.broadcast_tensors(index, mask)
                index = torch.where(seen, index, 0)
            if index.numel() and (index.min() < 0 or index.max() >= memory.numel()):
                raise IndexError(f"{node} reads out of {memory.numel()} elements")
            got = memory[index] if memory.numel() else torch.zeros(index.shape, dtype=memory.dtype)
            assert got.dtype == to_torch_dtype(node.dtype), node
            return got
        if node.op == "masked":
            condition = self.scalar(node.args[0], env, mask, memo)
            inner = condition if mask is None else condition & mask
            value = self.scalar(node.args[1], env, inner, {})
            return torch.where(condition, value, self.scalar(node.args[2], env, mask, memo))
        operands = [self.scalar(x, env, mask, memo) for x in node.operands]
        if node.op == "check_index":
            index, size = operands
            if ((index < -size) | (index >= size)).any():
                raise IndexError("index out of range")
        if node.op == "cast":
            return call_prim("prims.convert", (operands[0], to_torch_dtype(node.dtype)))
        if node.op == "bitcast":
            return call_prim("prims.bitcast", (operands[0], to_torch_dtype(node.dtype)))
        assert not any(x.dtype.is_low_precision for x in node.operands), node
        got = call_prim(f"prims.{node.op}", tuple(operands))
        assert got.dtype == to_torch_dtype(node.dtype), (node, got.dtype)
        return got

    # -- library calls -----------------------------------------------------------------------------

    def extern(self, step: Extern) -> None:
        namespace, packet, overload = step.op.split(".")
        op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
        args = [self.plain(a) for a in step.args]
        got = op(*args, **{k: self.plain(v) for k, v in step.kwargs})
        results = [g for g in (got if isinstance(got, (tuple, list)) else (got,)) if g is not None]
        buffers = {b.name: b for b in self.loops.buffers}
        for name, value in zip(step.outputs, results):
            if step.into:  # the call fills memory laid out beforehand
                self.view(BufferRef(name, buffers[name].type, ZERO)).copy_(value)
            else:
                self.memory[name] = _flat(value, buffers[name])

    def plain(self, arg: Any) -> Any:
        if isinstance(arg, BufferRef):
            return self.view(arg)
        if isinstance(arg, tuple):
            return [self.plain(a) for a in arg]
        if isinstance(arg, Expr):
            return self.expr(arg, {}).item()
        if isinstance(arg, DType):
            return to_torch_dtype(arg)
        if isinstance(arg, Device):
            return to_torch_device(arg)
        if isinstance(arg, str) and arg.startswith("torch."):
            return getattr(torch, arg.removeprefix("torch."))
        return arg


def _span(buffer: Buffer) -> int:
    """Elements from the first to the last."""
    if any(s.value == 0 for s in buffer.type.shape):
        return 0
    return 1 + sum((s.value - 1) * t.value for s, t in zip(buffer.type.shape, buffer.type.stride))


def _flat(value: torch.Tensor, buffer: Buffer) -> torch.Tensor:
    value = value.detach()
    want = tuple(s.value for s in buffer.type.stride)
    shape = tuple(s.value for s in buffer.type.shape)
    assert tuple(value.shape) == shape, (buffer, value.shape)
    if any(n != 1 and a != b for n, a, b in zip(shape, value.stride(), want)):
        raise AssertionError(f"{buffer.name}: strides {value.stride()} where {want} were expected")
    return _reals(torch.as_strided(value, (_span(buffer),), (1,), value.storage_offset()))


def _reals(memory: torch.Tensor) -> torch.Tensor:
    """As loops see complex numbers."""
    return torch.view_as_real(memory).view(-1) if memory.is_complex() else memory


def _reduce(kind: str, value: torch.Tensor, outer: int) -> tuple[torch.Tensor, ...]:
    flat = value.reshape([*value.shape[:outer], -1])
    result = call_prim(f"prims.{kind}", (flat, (outer,)))
    return result if isinstance(result, tuple) else (result,)
