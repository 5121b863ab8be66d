"""How tensors lie in memory in this build of torch, found by looking at tensors whose metadata is known.

    find_layout()  ->  {"impl": 16, "keys": 96, "dtype": 184, ...}      offsets in bytes
    attach()           gives it to the native module, once

No torch header is compiled in, so one native module serves every torch version; instead each offset is
searched for, must be the only candidate or agree on all examples, and the native readers are then
checked on further tensors. A build where this fails raises, and nothing is compiled.
"""
from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterable
from typing import Final

import torch

from dovetail import _native
from dovetail.errors import DovetailError

IMPL_BYTES: Final = 192
"""How far into a TensorImpl to look."""
META_BYTES: Final = 200
"""The same for autograd's record."""


class UnknownLayout(DovetailError):
    code = "E20"
    message = "cannot read tensors of torch {version} from C: {detail}"
    hint = "use a torch release between 2.11 and 2.13"


def words_at(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(address))


def is_pointer(word: int) -> bool:
    return word > 0xFFFF and word % 8 == 0


def only(name: str, candidates: Iterable[int]) -> int:
    """The first candidate; none at all is an unknown layout."""
    for candidate in candidates:
        return candidate
    raise UnknownLayout(version=torch.__version__, detail=f"no place found for {name}")


def find_word(name: str, fits: Callable[[int], bool], first: int = 2, last: int = IMPL_BYTES // 8) -> int:
    """The offset of the first word, by its number, that fits."""
    return only(name, (8 * i for i in range(first, last) if fits(i)))


def impl_words(tensor: torch.Tensor) -> list[int]:
    return words_at(tensor._cdata, IMPL_BYTES // 8)


def find_bytes(name: str, wanted: Iterable[tuple[torch.Tensor, bytes]], step: int) -> int:
    """The offset of two bytes that are these in each of the tensors."""
    raw = [(ctypes.string_at(tensor._cdata, IMPL_BYTES), two) for tensor, two in wanted]
    return only(name, (i for i in range(16, IMPL_BYTES, step) if all(r[i : i + 2] == two for r, two in raw)))


def raw_keys(tensor: torch.Tensor) -> int:
    return int(torch._C._dispatch_keys(tensor).raw_repr())


def find_meta() -> int:
    """Of the pointer to autograd's record: NULL until the tensor requires a gradient."""
    tensor = torch.empty(2)
    before, after = impl_words(tensor), impl_words(tensor.requires_grad_(True))
    return find_word("autograd's record", lambda i: before[i] == 0 and is_pointer(after[i]))


def meta_of(tensor: torch.Tensor, offset: int) -> int:
    return words_at(tensor._cdata + offset, 1)[0]


def find_flag(meta: int) -> int:
    """Of the byte that requires_grad_() sets."""
    tensor = torch.empty(2, requires_grad=True)
    address = meta_of(tensor, meta)
    on = ctypes.string_at(address, META_BYTES)
    off = ctypes.string_at(meta_of(tensor.requires_grad_(False), meta), META_BYTES)
    again = ctypes.string_at(meta_of(tensor.requires_grad_(True), meta), META_BYTES)
    return only("requires_grad", (i for i in range(8, META_BYTES) if (on[i], off[i], again[i]) == (1, 0, 1)))


def find_grad_fn(meta: int) -> int:
    """Of the pointer to what computed the tensor: NULL in a leaf."""
    leaf = torch.empty(2, requires_grad=True)
    computed, count = leaf * 2, META_BYTES // 8
    before, after = (words_at(meta_of(tensor, meta), count) for tensor in (leaf, computed))
    return find_word("grad_fn", lambda i: before[i] == 0 and is_pointer(after[i]), 1, count)


@functools.cache
def libraries() -> tuple[ctypes.CDLL, ...]:
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    return tuple(ctypes.CDLL(os.path.join(folder, name)) for name in
                 ("libtorch_cpu.so", "libc10.so", "libtorch_python.so"))  # fmt: skip


def address_in(library: ctypes.CDLL, symbol: str) -> int:
    return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value or 0


def find_address(name: str) -> int:
    """The address of a function of torch's libraries; 0 if none has it."""
    return next((address_in(library, name) for library in libraries() if hasattr(library, name)), 0)


def find_layout() -> dict[str, int]:
    number, meta, leaf = libraries()[0], find_meta(), torch.empty(2, requires_grad=True)
    tensor, on_meta = torch.empty(23, 29, 31), torch.empty(2, device="meta")
    words, known = impl_words(tensor), [3, *tensor.shape, *tensor.stride()]
    own, keyed = words_at(id(tensor), 8), (tensor, on_meta, torch.empty(2, dtype=torch.complex64).conj())
    names = ("float32", "float64", "int8", "int64", "bool", "bfloat16", "complex64", "uint8")
    numbers = [(name, getattr(number, f"aoti_torch_dtype_{name}")()) for name in names]
    typed = [(torch.empty(2, dtype=getattr(torch, name)), n.to_bytes(2, "little")) for name, n in numbers]
    # two bytes, the kind of device and its index, which is -1 on the CPU
    kinds = (tensor, number.aoti_torch_device_type_cpu()), (on_meta, number.aoti_torch_device_type_meta())
    return {
        "impl": find_word("the TensorImpl pointer", lambda i: own[i] == tensor._cdata, last=8),
        "keys": find_word("the dispatch keys", lambda i: all(impl_words(t)[i] == raw_keys(t) for t in keyed)),
        "dtype": find_bytes("the dtype", typed, 2),
        "device": find_bytes("the device", [(each, bytes((kind, 0xFF))) for each, kind in kinds], 1),
        # the count of dimensions, which is followed by sizes and strides
        "extents": find_word("sizes and strides", lambda i: words[i : i + 4] + words[i + 6 : i + 9] == known),
        "meta": meta,
        "flag": find_flag(meta),
        "grad_fn": find_grad_fn(meta),
        "leaf_vtable": words_at(meta_of(leaf, meta), 1)[0],
    }


def find_functions() -> dict[str, int]:
    found = {
        "wrap": find_address("_Z16THPVariable_WrapRKN2at10TensorBaseE"),
        "delete_handle": find_address("aoti_torch_delete_tensor_object"),
        "new_handle": find_address("aoti_torch_new_tensor_handle"),
    }
    for name, address in found.items():
        if not address:
            raise UnknownLayout(version=torch.__version__, detail=f"libtorch has no function for {name}")
    return found


# -- checking what was found -----------------------------------------------------------------------


def examples() -> list[torch.Tensor]:
    leaf = torch.randn(4, 6, requires_grad=True)
    with torch.no_grad():
        detached_view = leaf[1:]
    with torch.inference_mode():
        inference = torch.ones(3)
    return [
        torch.empty(()), torch.empty(0), torch.ones(3, 4, dtype=torch.float16).t(), leaf, leaf * 2, leaf[0],
        leaf.detach(), detached_view, torch.nn.Parameter(torch.ones(2)), torch.empty(2, 3, 4, 5, 6, 7, 8),
        torch.ones(2, dtype=torch.complex64).conj(), torch.empty(3, device="meta"), inference,
        torch.nn.Parameter(torch.ones(2), requires_grad=False), torch.ones(5).expand(3, 5),
    ]  # fmt: skip


def check_layout() -> None:
    """The native readers say of every example what Python says."""
    kinds = {kind: device_number(kind) for kind in ("cpu", "meta")}
    for tensor in examples():
        _, kind, _, grad, keys = _native.tensor_numbers(tensor)
        expected = (kinds[tensor.device.type], int(tensor.requires_grad), raw_keys(tensor))
        extents = (*tensor.shape, *tensor.stride())
        if (kind, grad, keys) != expected or not _native.lies_as(tensor, tensor, extents):
            detail = f"read {(kind, grad, keys)} and other than {extents}, expected {expected}"
            raise UnknownLayout(version=torch.__version__, detail=detail)


@functools.cache
def attach() -> None:
    """Tell the native module about this torch. Cheap after the first time. Whatever modes the caller is in,
    the probes need plain CPU tensors with autograd."""
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        _native.attach_torch(torch.Tensor, *find_layout().values(), *find_functions().values())
        check_layout()


# -- numbers that guards compare ---------------------------------------------------------------------


@functools.cache
def dtype_number(dtype: torch.dtype) -> int:
    attach()
    return _native.tensor_numbers(torch.empty(0, dtype=dtype, device="meta"))[0]


@functools.cache
def device_number(kind: str) -> int:
    read: Callable[[], int] | None = getattr(libraries()[0], f"aoti_torch_device_type_{kind}", None)
    if read is None:
        raise UnknownLayout(version=torch.__version__, detail=f"no number for device {kind!r}")
    return read()
