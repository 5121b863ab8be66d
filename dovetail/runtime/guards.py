"""Guards as data -> a flat program for the native module.

    x: TensorIs, self.training: Is(False)      ->     slot 0 = argument 1     check slot 0: tensor
                                                      slot 1 = argument 0
                                                      slot 2 = slot 1 . __dict__["training"]
                                                      check slot 2: is False

A path is loaded once, just before the first guard that needs it, so the order is the order of reading.
"""
from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import chain
from typing import Any, Final, TypeAlias

import torch

from dovetail import _native
from dovetail.ir import guard as checks
from dovetail.ir import source as paths
from dovetail.ir.expr import Expr, fold_expr
from dovetail.ir.guard import Guard
from dovetail.ir.source import Source
from dovetail.runtime.torch_abi import (
    UnknownLayout,
    device_number,
    dtype_number,
    examples,
    find_address,
    find_functions,
    find_layout,
    raw_keys,
)
from dovetail.util.noun import Noun, field
from dovetail.util.torch_state import AUTOGRAD, PYTHON, READERS, TRACER

OPERATIONS: Final = (
    paths.Arg, paths.Cell, paths.Const, paths.Attr, paths.DictAttr, paths.Item, paths.DictKey,
    paths.Size, paths.Stride, paths.Applied,
    checks.Is, checks.Equals, checks.TypeIs, checks.Length, checks.DictKeys, checks.Lacks, checks.SameAs,
    checks.TensorIs, checks.ClassIs, checks.State, checks.Holds, checks.Predicate,
)  # fmt: skip
"""In the order of `enum Operation` in csrc/guards.h."""

NUMBER_OF: Final = {kind: number for number, kind in enumerate(OPERATIONS)}
NUMBER_OF[paths.KeyItem] = NUMBER_OF[paths.Item]
NUMBER_OF[checks.Bare] = NUMBER_OF[checks.Lacks]
ARITHMETIC: Final = (
    "const", "sym", "add", "mul", "floordiv", "mod", "min", "max", "eq", "lt", "le", "and", "not",
)  # fmt: skip
"""In the order of the enum in csrc/expression.c."""
CODE_OF: Final = {op: code for code, op in enumerate(ARITHMETIC)}

ANY: Final = -(1 << 63)
CONTEXT_TYPE: Final = ctypes.CFUNCTYPE(ctypes.c_void_p)

Instruction: TypeAlias = "tuple[int, int, int, int, object, object]"

# How a path is encoded: (number, object) of its last step.
LOADS: Final[dict[type, Callable[[Any], tuple[int, object]]]] = {
    **dict.fromkeys((paths.Arg, paths.Cell), lambda s: (s.index, None)),
    **dict.fromkeys((paths.Attr, paths.DictAttr), lambda s: (0, s.name)),
    paths.Const: lambda s: (0, s.value),
    paths.Item: lambda s: (s.key if type(s.key) is int and abs(s.key) < 1 << 62 else 0, s.key),
    paths.KeyItem: lambda s: (0, s.key),
    paths.DictKey: lambda s: (s.position, None),
    paths.Applied: lambda s: (0, s.function),
    **dict.fromkeys((paths.Size, paths.Stride), lambda s: (s.dim, None)),
}

# How a check is encoded: (number, object, extra). SameAs, State and Holds need more than that.
CHECKS: Final[dict[type, Callable[[Any], tuple[int, object, object]]]] = {
    **dict.fromkeys((checks.Is, checks.Equals), lambda c: (0, c.value, None)),
    checks.TypeIs: lambda c: (0, c.type, None),
    checks.Length: lambda c: (c.length, None, None),
    checks.DictKeys: lambda c: (0, c.keys, None),
    checks.Lacks: lambda c: (0, c.key, None),
    checks.ClassIs: lambda c: (0, tuple((base, base.__dict__.copy()) for base in c.type.__mro__), None),
    checks.Predicate: lambda c: (0, (c.test, c.text), None),
    checks.TensorIs: lambda c: (0, c.type, encode_tensor(c)),
}


def encode_tensor(check: checks.TensorIs) -> tuple[object, ...]:
    dtype = check.dtype if isinstance(check.dtype, torch.dtype) else getattr(torch, str(check.dtype))
    index = ANY if check.device_kind in ("cpu", "meta") else check.device_index
    return (
        dtype_number(dtype), device_number(check.device_kind), index, int(check.requires_grad),
        tuple(check.shape), tuple(check.stride), check.dispatch,
    )  # fmt: skip


# -- torch's state -----------------------------------------------------------------------------------

# Functions of libtorch that answer for a reader: symbols, argument, bytes of the answer, value -> number.
_Native: TypeAlias = "tuple[str, Callable[[], int], int, Callable[[Any], int | None]]"


def _context() -> int:
    """The address of torch's global context."""
    address = find_address("_ZN2at13globalContextEv")
    return CONTEXT_TYPE(address)() if address else 0


def _enabled(value: bool) -> int | None:
    return 0 if value else None  # False stands for two states of torch's


AUTOCAST_ENABLED: Final = "_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE"
KEY_INCLUDED: Final = "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE"
KEY_EXCLUDED: Final = "_ZN3c104impl28tls_is_dispatch_key_excludedENS_11DispatchKeyE"
AUTOCAST_DTYPE: Final = "_ZN2at8autocast18get_autocast_dtypeEN3c1010DeviceTypeE"
NATIVE_READERS: Final[dict[str, _Native]] = {
    "grad_mode": ("_ZN3c108GradMode10is_enabledEv", int, 1, int),
    "inference_mode": ("_ZN3c1013InferenceMode10is_enabledEv", int, 1, int),
    "default_dtype": ("_ZN3c1031get_default_dtype_as_scalartypeEv", int, 1, dtype_number),
    "deterministic": ("_ZNK2at7Context23deterministicAlgorithmsEv", _context, 1, int),
    "torch_function": ("_ZN2at4impl22PythonTorchFunctionTLS18get_disabled_stateEv", int, 1, _enabled),
    "function_modes": ("_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv", int, 8, int),
    "dispatch_modes": ("_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv", int, 8, int),
    "jit_trace": (KEY_INCLUDED, partial(int, TRACER), 1, int),
    "below_autograd": (KEY_EXCLUDED, partial(int, AUTOGRAD), 1, int),
    "below_classes": (KEY_EXCLUDED, partial(int, PYTHON), 1, int),
    "autocast_cpu": (AUTOCAST_ENABLED, partial(device_number, "cpu"), 1, int),
    "autocast_cuda": (AUTOCAST_ENABLED, partial(device_number, "cuda"), 1, int),
    "autocast_cpu_dtype": (AUTOCAST_DTYPE, partial(device_number, "cpu"), 1, dtype_number),
    "autocast_cuda_dtype": (AUTOCAST_DTYPE, partial(device_number, "cuda"), 1, dtype_number),
    "autocast_cache": ("_ZN2at8autocast25is_autocast_cache_enabledEv", int, 1, int),
}


def encode_state(check: checks.State) -> tuple[tuple[object, ...], ...]:
    """One read per value: (name, value, callable, address, argument, width, number)."""
    reads: list[tuple[object, ...]] = []
    for name, value in check.values:
        symbol, argument, width, number_of = NATIVE_READERS.get(name, ("", int, 0, lambda _: None))
        number = number_of(value)
        address = find_address(symbol) if number is not None and symbol else 0
        if address and argument is _context and not _context():
            address = 0
        reads.append((name, value, READERS[name], address, argument() if address else 0, width, number or 0))
    return tuple(reads)


# -- conditions on sizes -----------------------------------------------------------------------------


def emit_postfix(value: Expr, reads: dict[str, int]) -> list[tuple[int, int]]:
    """s0 * 4 <= 64  ->  READ s0, PUSH 4, MUL, PUSH 64, LE"""

    def leaf(x: Expr) -> list[tuple[int, int]]:
        if x.op == "sym":
            return [(CODE_OF["sym"], reads[x.name])]
        return [(CODE_OF["const"], x.value if x.op == "const" else int(x.op == "true"))]

    return fold_expr(value, leaf, lambda op, *parts: [*chain(*parts), (CODE_OF[op], 0)])


# -- the program -------------------------------------------------------------------------------------


class _Program(Noun, frozen=False):
    """Appends loads and checks; a path has one slot."""

    instructions: list[Instruction] = field(default_factory=list)
    slots: dict[object, int] = field(default_factory=dict)
    paths: list[Source] = field(default_factory=list)
    by_identity: dict[int, int] = field(default_factory=dict)

    def slot_of(self, source: Source) -> int:
        """Paths mostly share their objects, so identity answers first; the guards keep them alive."""
        slot = self.by_identity.get(id(source))
        if slot is None:
            base = source.base
            before = -1 if base is None else self.slot_of(base)
            slot = self.by_identity[id(source)] = self.step(source, before)
        return slot

    def step(self, source: Source, base: int) -> int:
        """Equal steps from one slot give one slot. 1, 1.0 and True are different keys, as are constants."""
        kind = type(source)
        number, value = LOADS[kind](source)
        key = (kind, base, number, type(value), id(value) if kind is paths.Const else value)
        if key in self.slots:
            return self.slots[key]
        slot = self.slots[key] = len(self.paths)
        self.paths.append(source)
        self.instructions.append((NUMBER_OF[kind], slot, base, number, value, None))
        return slot

    def add(self, guard: Guard) -> None:
        check = guard.check
        code, encode = NUMBER_OF[type(check)], CHECKS.get(type(check))
        if isinstance(check, checks.Bare):
            slot = self.slot_of(guard.source)
            tables = [self.step(paths.DictAttr(guard.source, name), slot) for name in check.empty]
            self.instructions += [(NUMBER_OF[checks.Length], at, -1, 0, None, None) for at in tables]
            self.instructions += [(code, slot, -1, 1, name, None) for name in check.missing]
        elif encode is not None:
            self.instructions.append((code, self.slot_of(guard.source), -1, *encode(check)))
        elif isinstance(check, checks.State):
            self.instructions.append((code, -1, -1, 0, encode_state(check), None))
        elif isinstance(check, checks.Holds):
            read = ", ".join(f"{name} is {source}" for name, source in check.reads)
            text = f"{check} ({read}; {guard.loc or 'assumed'})"
            self.instructions.append((code, -1, -1, 0, text, self.condition(check)))
        elif isinstance(check, checks.SameAs):
            slot, other = self.slot_of(guard.source), self.slot_of(check.other)
            self.instructions.append((code, slot, other, int(check.same), None, None))

    def condition(self, check: checks.Holds) -> tuple[object, object]:
        reads: list[tuple[int, int, int]] = []
        for _, source in check.reads:
            if isinstance(source, (paths.Size, paths.Stride)):
                reads.append((self.slot_of(source.of), int(isinstance(source, paths.Stride)), source.dim))
            else:
                reads.append((self.slot_of(source), -1, 0))
        numbers = {name: number for number, (name, _) in enumerate(check.reads)}
        return tuple(reads), tuple(emit_postfix(check.condition, numbers))


def make_guards(guards: Iterable[Guard], fetch: Iterable[Source] = ()) -> _native.Guards:
    """The native form. A frame that fits also gets the values at the paths `fetch`, which are passed to the
    entry after the closure cells: the guards have found most of them already."""
    attach()
    return _built(guards, fetch)


def _built(guards: Iterable[Guard], fetch: Iterable[Source] = ()) -> _native.Guards:
    program = _Program()
    for guard in guards:
        program.add(guard)
    fetched = tuple(map(program.slot_of, fetch))
    return _native.Guards(tuple(program.instructions), tuple(program.paths), fetched)


@cache
def attach() -> None:
    """Tell the native module about this torch, and check that guards read of tensors what Python says of
    them. Whatever modes the caller is in, the probes need plain CPU tensors with autograd."""
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        _native.attach_torch(torch.Tensor, *find_layout().values(), *find_functions().values())
        for x in examples():
            form = tuple(x.shape), x.stride(), raw_keys(x)
            check = checks.TensorIs(type(x), x.dtype, x.device.type, -1, x.requires_grad, *form)
            if why := _built([Guard(paths.Arg(0, "tensor"), check)]).why((x,), None, {}):
                raise UnknownLayout(version=torch.__version__, detail=why)
