"""A program whose weights were prepared by a prologue, which runs again when a weight has changed.

    Frozen(main, prologue, …, (1, 4), types)(*inputs)  ->  main(*inputs, *prologue(inputs[1], inputs[4]))

Before every call the watched inputs are compared with what they were: the storage itself (held on to
weakly, so that no other takes its address), the offset in it, the version that every in-place write
counts up, and samples of the bytes. The prepared values are let go when a weight is.
"""
from __future__ import annotations

import functools
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dovetail import _native
from dovetail.events import EVENTS
from dovetail.ir.types import TensorType
from dovetail.runtime.guards import attach
from dovetail.runtime.torch_abi import IMPL_BYTES, UnknownLayout, is_pointer, only, words_at
from dovetail.util.noun import Noun

COUNTER_WORDS: Final = 4
STORAGE_WORDS: Final = 8
MOST_IN_VAIN: Final = 3
"""Preparations before it is asked whether they pay."""
CALLS_TO_PAY: Final = 8
"""Calls that a preparation should serve."""


@functools.cache
def attach_watch() -> None:
    """Find where tensors keep their state in this build of torch, and check it."""
    attach()
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        tensor = torch.zeros(60013)[31337:]
        before = 1000
        torch._C._autograd._unsafe_set_version_counter((tensor,), (before,))  # type: ignore[attr-defined]
        tensors = tensor, tensor.detach(), torch.zeros(60013)[31337:]
        words, alias, other = (words_at(each._cdata, IMPL_BYTES // 8) for each in tensors)
        shared = [w if w == a and w != o else 0 for w, a, o in zip(words, alias, other)]
        storage = tensor.untyped_storage()
        inside = words_at(storage._cdata, STORAGE_WORDS)
        where = lambda words, wanted: (8 * i for i, word in enumerate(words) if word == wanted)
        held, offset = only("the storage", where(words, storage._cdata)), where(words, 31337)
        memory = only("the memory", where(inside, storage.data_ptr()))
        places = held, only("the storage offset", offset), *find_version(shared, before), memory
        _native.attach_watch(*places)
        check_watch()


@functools.cache
def can_watch() -> bool:
    """Whether tensors of this build of torch can be watched; if not, nothing is frozen."""
    try:
        attach_watch()
    except UnknownLayout as error:
        EVENTS.emit("warning", text=str(error))
        return False
    return True


def find_version(words: Sequence[int], version: int) -> tuple[int, int]:
    """(offset of the pointer to the counter, offset of the version in the counter). Words are 0 unless
    aliases of the tensor have the same, and other tensors another."""
    pointers = [(8 * i, w) for i, w in enumerate(words) if i > 1 and is_pointer(w) and w < 1 << 47]
    counts = [(at, 8 * k, n) for at, w in pointers for k, n in enumerate(words_at(w, COUNTER_WORDS))]
    found = (1000 * at + k for at, k, count in counts if count & 0xFFFFFFFF == version)
    return divmod(only("the version", found), 1000)


def check_watch() -> None:
    """What is read changes when and only when it should."""
    tensor = torch.arange(5000.0)[100:]
    spec = make_spec((0,), (20, 4))
    first = _native.tensor_states((tensor,), spec)
    views = [tensor.detach(), tensor.view(-1)]
    same = [_native.tensor_states((each,), spec) for each in (tensor, *views)]
    tensor.detach().add_(1)
    counted = _native.tensor_states((tensor,), make_spec((0,), (0, 4)))
    tensor.data.zero_()
    sampled = _native.tensor_states((tensor,), spec)
    other = _native.tensor_states((tensor.clone(),), spec)
    if any(each != first for each in same) or counted[:24] == first[:24] or sampled[24:] == first[24:]:
        only("the state of a tensor", ())
    if other[:8] == first[:8]:
        only("the storage of a tensor", ())


def make_spec(positions: Sequence[int], *sizes: tuple[int, int]) -> bytes:
    """Per watched input: its position, the bytes it fills (0: not to be read) and those of an item."""
    return b"".join(struct.pack("qqq", at, *size) for at, size in zip(positions, sizes))


class _Held(Noun, eq=False):
    states: bytes
    values: list[Any]
    storages: list[StorageWeakRef]
    owners: list[weakref.ref[Any]]


class Frozen:
    """Safe to call from several threads: what is held is replaced as a whole. Weights that turn out to
    change all the time (a target network in a training loop) get the program that `otherwise` makes,
    which takes them as they are."""

    def __init__(
        self, main: Callable[..., list[Any]], prologue: Callable[[Sequence[Any]], list[Any]],
        otherwise: Callable[[], Callable[..., list[Any]]], name: str, watched: Sequence[int],
        types: Sequence[TensorType],
    ) -> None:  # fmt: skip
        attach_watch()
        self.main, self.prologue, self.otherwise = main, prologue, otherwise
        self.name, self.watched = name, tuple(watched)
        self.spec = make_spec(watched, *((t.storage_bytes.value, t.dtype.bytes) for t in types))
        self.held: _Held | None = None
        self.plain: Callable[..., list[Any]] | None = None
        self.calls = self.preparations = 0

    def __call__(self, *inputs: Any) -> list[Any]:
        if self.plain is not None:
            return self.plain(*inputs)
        states = _native.tensor_states(inputs, self.spec)
        held = self.held
        self.calls += 1
        if held is None or held.states != states:
            if self.is_restless():
                return self(*inputs)
            held = self.prepare(inputs, states)
        return self.main(*inputs, *held.values)

    def is_restless(self) -> bool:
        """Too few calls found the weights as they were; from then on there is a plain program."""
        if self.preparations < MOST_IN_VAIN or self.calls > self.preparations * CALLS_TO_PAY:
            return False
        EVENTS.emit("frozen", unit=self.name, given_up=True)
        self.plain, self.held = self.otherwise(), None
        return True

    def prepare(self, inputs: tuple[Any, ...], states: bytes) -> _Held:
        """States are older than values, so that a write in between is noticed by the next call."""
        self.preparations += 1
        weights = [inputs[i] for i in self.watched]
        EVENTS.emit("frozen", unit=self.name, weights=len(weights), again=self.preparations > 1)
        with torch.no_grad():
            values = self.prologue(weights)
        storages = [StorageWeakRef(each.untyped_storage()) for each in weights]
        let_go = functools.partial(_let_go, weakref.ref(self))
        self.held = held = _Held(states, values, storages, [weakref.ref(each, let_go) for each in weights])
        return held


def _let_go(owner: weakref.ref[Frozen], gone: weakref.ref[Any]) -> None:
    """A weight is gone, so what was made of it will not be asked for again."""
    frozen = owner()
    if frozen is not None and frozen.held is not None and gone in frozen.held.owners:
        frozen.held = None
