"""What a value is: element type, device, shape and strides.

    f32[s0, 64]            TensorType((s0, 64), (64, 1), F32, Device("cpu"))
    f32[64, 8]{1, 64}      strides are shown where they are not row-major
"""
from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final, TypeAlias

from dovetail.ir.expr import ONE, ZERO, Expr, add, as_expr, const, mul, product, total
from dovetail.util.noun import Noun, Single


class DType(Noun, eq=False):
    """An element type; each is there once. `kind` is one of bool, int, uint, float, complex."""

    name: str
    kind: str
    bits: int
    torch_name: str

    @property
    def bytes(self) -> int:
        return self.bits // 8

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_integer(self) -> bool:
        """Integers proper: not bool."""
        return self.kind in ("int", "uint")

    @property
    def is_low_precision(self) -> bool:
        """fp16 and bf16: eager computes in fp32 and rounds at every op."""
        return self.kind == "float" and self.bits == 16

    @property
    def real(self) -> DType:
        """What a complex number is a pair of; itself for the others."""
        return BY_NAME[f"f{self.bits // 2}"] if self.kind == "complex" else self

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        return self.name.upper()  # the name that it has here


NARROW: Final = (1 << 31) - (1 << 16)
"""Elements that kernels of a GPU reach with 32-bit indices, what a last block counts beyond them included."""
MATRIX_STEP: Final = 16
"""Matrix units of a GPU take this many elements of a row at once."""

BOOL: Final = DType("bool", "bool", 8, "bool")
U8, U16, U32, U64 = (DType(f"u{bits}", "uint", bits, f"uint{bits}") for bits in (8, 16, 32, 64))
I8, I16, I32, I64 = (DType(f"i{bits}", "int", bits, f"int{bits}") for bits in (8, 16, 32, 64))
F16, F32, F64 = (DType(f"f{bits}", "float", bits, f"float{bits}") for bits in (16, 32, 64))
BF16: Final = DType("bf16", "float", 16, "bfloat16")
C32, C64, C128 = (DType(f"c{bits}", "complex", bits, f"complex{bits}") for bits in (32, 64, 128))
F8E4M3: Final = DType("f8e4m3", "float", 8, "float8_e4m3fn")
F8E5M2: Final = DType("f8e5m2", "float", 8, "float8_e5m2")

DTYPES: Final = (
    BOOL, U8, U16, U32, U64, I8, I16, I32, I64, F16, BF16, F32, F64, C32, C64, C128, F8E4M3, F8E5M2,
)  # fmt: skip
PAIRS: Final = {F16: C32, F32: C64, F64: C128}
BY_NAME: Final = {dtype.name: dtype for dtype in DTYPES}
BY_TORCH_NAME: Final = {dtype.torch_name: dtype for dtype in DTYPES}


class Device(Single, eq=False):
    kind: str
    index: int | None = None

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


CPU: Final = Device("cpu")
_known: Final = lru_cache(4096)
"""Of types, which are few, and asked for often."""


class TensorType(Single, eq=False):
    shape: tuple[Expr, ...]
    stride: tuple[Expr, ...]
    dtype: DType
    device: Device = CPU

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    @_known
    def numel(self) -> Expr:
        return product(self.shape)

    @property
    @_known
    def bytes(self) -> Expr:
        return mul(self.numel, self.dtype.bytes)

    @property
    @_known
    def storage_bytes(self) -> Expr:
        """From the first to the last element."""
        if any(size is ZERO for size in self.shape):
            return ZERO
        reach = total((ONE, *(mul(add(size, -1), stride) for size, stride in zip(self.shape, self.stride))))
        return mul(reach, self.dtype.bytes)

    @property
    @_known
    def is_contiguous(self) -> bool:
        """Proved row-major; a dimension of size 1 may have any stride."""
        expected = ONE
        for size, stride in zip(reversed(self.shape), reversed(self.stride)):
            if size is not ONE and stride is not expected:
                return False
            expected = mul(expected, size)
        return True

    def is_laid_as(self, other: TensorType) -> bool:
        """Of the same sizes, with equal strides wherever they matter."""
        strides = zip(self.shape, self.stride, other.stride)
        return self.shape == other.shape and all(size is ONE or a is b for size, a, b in strides)

    def __str__(self) -> str:
        dims = ", ".join(map(str, self.shape))
        layout = "" if self.is_contiguous else "{" + ", ".join(map(str, self.stride)) + "}"
        where = "" if self.device.kind == "cpu" else f" {self.device}"
        return f"{self.dtype}[{dims}]{layout}{where}"


class ScalarType(Noun):
    """A Python number that is a run-time input of the graph; `expr` names it in shapes."""

    dtype: DType
    expr: Expr | None = None

    def __str__(self) -> str:
        return f"{self.dtype}" if self.expr is None else f"{self.dtype}({self.expr})"


Type: TypeAlias = "TensorType | ScalarType | tuple[Type, ...] | None"

UNKNOWN_SIZE: Final = 64
"""What a symbolic size counts as when bytes are compared."""


@_known
def bytes_of(type: Type) -> int:
    if isinstance(type, tuple):
        return sum(map(bytes_of, type))
    if not isinstance(type, TensorType):
        return 8
    count = type.dtype.bytes
    for size in type.shape:
        count *= size.value if size.is_const else UNKNOWN_SIZE
    return count


def contiguous_stride(shape: Iterable[Expr | int]) -> tuple[Expr, ...]:
    """Row-major strides; as in eager, a size of 0 counts as 1."""
    strides: list[Expr] = []
    step = ONE
    for size in reversed([as_expr(s) for s in shape]):
        strides.append(step)
        step = mul(step, size if size.lo > 0 or not size.is_const else max(size.value, 1))
    return tuple(reversed(strides))


def as_reals(type: TensorType) -> TensorType:
    """The same memory with the two parts of complex numbers in a last dimension."""
    if type.dtype.kind != "complex":
        return type
    shape, stride = (*type.shape, const(2)), (*(mul(step, 2) for step in type.stride), ONE)
    return TensorType(shape, stride, type.dtype.real, type.device)


def tensor_type(shape: Iterable[Expr | int], dtype: DType, device: Device = CPU) -> TensorType:
    """A row-major tensor."""
    dims = tuple(as_expr(s) for s in shape)
    return TensorType(dims, contiguous_stride(dims), dtype, device)
