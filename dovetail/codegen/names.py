"""Names in the text of a kernel: tokens while it is being written, the user's names in the end.

    token("x") + "[i] = 0"   ->   key: the hash of "b0[i] = 0"      text: "x[i] = 0"

Kernels that differ in names only have one key. The kernel's own name is the token of "".
"""
from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Final

_TOKEN: Final = re.compile("\x01([^\x02]*)\x02")


def token(name: str) -> str:
    """A name in the text, until it is known how it is to be spelled."""
    return f"\x01{name}\x02"


def key_of(text: str) -> str:
    seen: dict[str, int] = {}
    plain = _TOKEN.sub(lambda m: f"b{seen.setdefault(m[1], len(seen))}", text)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def symbol_of(name: str, key: str) -> str:
    return f"{identifier(name)[:60]}_{key}"


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
