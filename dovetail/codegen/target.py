"""What a target must offer: a function from a Group to a kernel and how to call it.

    cpp.emit_kernel(group, buffers, 64, 32 << 20)  ->  Launchable(Kernel(text, ...), its buffers, ...)

C++ is one; Triton is another. What does not depend on the target is here and in codegen/analysis.py.
"""
from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

from dovetail.codegen.analysis import Shape
from dovetail.ir.expr import Expr
from dovetail.ir.loop import Buffer
from dovetail.ir.program import Kernel
from dovetail.ir.schedule import Group
from dovetail.util.noun import Noun


class Launchable(Noun):
    """Parameters are the buffers `params`, then the size symbols, then run-time numbers."""

    kernel: Kernel
    params: tuple[str, ...]
    sizes: tuple[Expr, ...]
    numbers: tuple[str, ...]
    may_fail: bool = False
    grid: tuple[tuple[Expr, int], ...] = ()
    """On a GPU, for each grid axis: how many points it has, and which of the block sizes a program takes."""
    is_first: bool = False
    """The program's first kernel, which waits for what came before it before it reads anything."""


Target: TypeAlias = "Callable[[Group, dict[str, Buffer]], Launchable]"
"""One kind of device."""


def launchable(
    group: Group, shape: Shape, language: str, text: str, comment: str, reserved: Iterable[str],
    prelude: tuple[str, ...], *, salt: str = "", may_fail: bool = False,
    grid: tuple[tuple[Expr, int], ...] = (), **more: Any,
) -> Launchable:  # fmt: skip
    """`text` has tokens for names (see below); with the `salt` it says what the kernel is. `more` are fields
    of a Kernel that only this language has."""
    key = key_of(text + salt)
    name = f"{identifier(group.name)[:60]}_{key}"
    moved = sum(a.buffer.type.bytes.value for a in shape.args if a.buffer.type.bytes.is_const)
    origins = tuple(dict.fromkeys(origin for nest in group.nests for origin in nest.origins))
    spelled = comment + with_names(text, name, reserved)
    kernel = Kernel(name, language, spelled, key, moved, origins, prelude, **more)
    params = tuple(a.buffer.name for a in shape.args)
    return Launchable(kernel, params, shape.symbols, shape.numbers, may_fail, grid)


# -- names in the text of a kernel: tokens while it is being written -------------------------------


_TOKEN: Final = re.compile("\x01([^\x02]*)\x02")


def token(name: str) -> str:
    """A name in the text, until it is known how it is to be spelled: kernels that differ in names only
    have one key. The kernel's own name is the token of ""."""
    return f"\x01{name}\x02"


def key_of(text: str) -> str:
    seen: dict[str, int] = {}
    plain = _TOKEN.sub(lambda m: f"b{seen.setdefault(m[1], len(seen))}", text)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def with_names(text: str, kernel: str, reserved: Iterable[str]) -> str:
    """The user's names, changed where they are words of the language or of the kernel's own text."""
    taken = {*reserved, *re.findall(r"[A-Za-z_]\w*", _TOKEN.sub(" ", text))}
    chosen = {"": kernel}
    for name in dict.fromkeys(_TOKEN.findall(text)):
        spelled = identifier(name)
        while spelled in taken:
            spelled += "_"
        taken.add(spelled)
        chosen.setdefault(name, spelled)
    return _TOKEN.sub(lambda m: chosen[m[1]], text)


def identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)
