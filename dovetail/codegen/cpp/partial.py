"""What the pieces of a walk that is split among threads leave behind, and how it is combined.

    float part3[64];  ...  part3[q] = t9;  ...  for (q = 1; q < pieces; ++q) t12 = t12 + part3[q];
"""
from __future__ import annotations

from typing import Final

from dovetail.codegen.cpp.ops import C_TYPE, combine, functions_of
from dovetail.codegen.cpp.reduce import Accumulator
from dovetail.codegen.cpp.values import KernelWriter, Scope, Value
from dovetail.ir.types import I64, DType
from dovetail.util.noun import Noun

PIECES: Final = 64
"""Most pieces a walk is split into."""


class Partial(Noun, frozen=False):
    """What the pieces of a split walk leave behind for one reduction."""

    writer: KernelWriter
    item: Accumulator
    name: str = ""

    def declare(self, scope: Scope) -> None:
        self.name = self.writer.fresh("part")
        scope(f"{C_TYPE[self.item.dtype]} {self.name}[{PIECES}];")
        if self.item.is_position:
            scope(f"{C_TYPE[self.item.place_dtype]} {self.name}_at[{PIECES}];")
        if self.item.needs_second:
            scope(f"{C_TYPE[self.item.dtype]} {self.name}_mean[{PIECES}];")
            scope(f"int64_t {self.name}_count[{PIECES}];")

    def leave(self, scope: Scope, count: str) -> None:
        item = self.item
        if item.is_position:
            top, at = item.best(scope)
            scope(f"{self.name}[q] = {top}; {self.name}_at[q] = {at};")
            return
        total = item.finish_squares(scope, f"max_i(1, {count})") if item.needs_second else item.total(scope)
        scope(f"{self.name}[q] = {total.text};")
        if item.needs_second:
            scope(f"{self.name}_mean[q] = {item.mean}; {self.name}_count[q] = {count};")

    def combine(self, scope: Scope) -> None:
        item = self.item
        if item.is_position:
            best = self.writer.fresh("best")
            item.pick_best(scope, best, f"{self.name}[{{}}]", f"{self.name}_at[{{}}]", "pieces")
            self._keep(0, item.found(f"{self.name}_at[{best}]"), I64, scope)
        elif item.needs_second:
            self._combine_squares(scope)
        else:
            total = self.writer.fresh()
            pattern = combine(item.kind, item.dtype, False)
            self.writer.functions |= functions_of(pattern, (item.dtype,))
            kind = C_TYPE[item.dtype]
            scope(f"{kind} {total} = {self.name}[0];")
            step = f"const {kind} v = {self.name}[q]; {total} = {pattern.format(total, 'v')};"
            scope(f"for (int64_t q = 1; q < pieces; ++q) {{ {step} }}")
            self._keep(0, total, item.dtype, scope)

    def _combine_squares(self, scope: Scope) -> None:
        """Means and squared deviations of pieces, weighted by their lengths."""
        kind, n = C_TYPE[self.item.dtype], self.name
        scope(f"{kind} {n}_m = {n}_mean[0], {n}_s = {n}[0]; int64_t {n}_n = {n}_count[0];")
        scope("for (int64_t q = 1; q < pieces; ++q) {")
        scope(f"    const int64_t all = {n}_n + {n}_count[q]; if (!{n}_count[q]) continue;")
        scope(f"    const {kind} apart = {n}_mean[q] - {n}_m, share = ({kind}){n}_count[q] / ({kind})all;")
        scope(f"    {n}_s += {n}[q] + apart * apart * share * ({kind}){n}_n;")
        scope(f"    {n}_m += apart * share; {n}_n = all;\n}}")
        self._keep(0, f"{n}_m", self.item.dtype, scope)
        self._keep(1, f"{n}_s", self.item.dtype, scope)

    def _keep(self, which: int, text: str, dtype: DType, scope: Scope) -> None:
        value = Value(text, dtype, False, scope.depth)
        self.writer.keep(self.item.write.buffers[which], self.item.write.index, value, scope)
