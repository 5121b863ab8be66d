"""What a key is made of.

    parts = {"text": …, "torch": "2.13.0", "cpu": "avx512"}   ->   key_of("kernel", parts)  "kernel-3f2a…"

The parts are kept with the entry (long ones as their hash), so `dovetail cache explain` can say which
of them differs between what is wanted and what is there.
"""
from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from dovetail.cache.store import Stored

SHORT = 200
"""Longest part that is kept as it is."""


def key_of(kind: str, parts: Mapping[str, str]) -> str:
    joined = "\0".join(f"{name}\0{value}" for name, value in sorted(parts.items()))
    return f"{kind}-{hashlib.sha256(joined.encode()).hexdigest()[:40]}"


def short_parts(kind: str, parts: Mapping[str, str]) -> dict[str, str]:
    """The parts as an entry keeps them."""
    return {"kind": kind} | {
        name: value if len(value) <= SHORT else "sha256:" + hashlib.sha256(value.encode()).hexdigest()[:16]
        for name, value in parts.items()
    }


def explain_miss(wanted: Mapping[str, str], entries: Iterable[Stored]) -> list[str]:
    """How `wanted` (short parts) differs from the entry nearest to it, part by part."""
    of_kind = [entry for entry in entries if entry.parts.get("kind") == wanted.get("kind")]
    if not of_kind:
        return [f"no entry of kind {wanted.get('kind')}"]

    def differing(entry: Stored) -> list[str]:
        names = sorted({*wanted, *entry.parts})
        return [name for name in names if wanted.get(name) != entry.parts.get(name)]

    nearest = min(of_kind, key=lambda entry: len(differing(entry)))
    return [
        f"{name}: wanted {wanted.get(name)}, stored {nearest.parts.get(name)}" for name in differing(nearest)
    ] or ["the entry is there"]
