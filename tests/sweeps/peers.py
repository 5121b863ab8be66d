"""The compilers a harness can be pointed at, behind one signature.

    peer = find_peer("dovetail")            also: dovetail-eager, torch, torch-eager, torch-aot, eager
    compiled = peer.compile(f, dynamic=True)
    seen = peer.observe(lambda: compiled(x))     Observed(result=..., graphs=1, breaks=0, fallbacks=("aten.sort",), ...)

Every sweep, fuzzer and benchmark takes `--peer`, so that the harness itself can be checked against
torch.compile, and a difference is known to be ours.
"""
from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final

import torch


@dataclass(frozen=True, slots=True)
class Observed:
    """What one call returned and what the compiler said it did meanwhile."""

    result: Any
    graphs: int = 0
    breaks: int = 0
    recompiles: int = 0
    kernels: int = 0
    fallbacks: tuple[str, ...] = ()
    eager: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(slots=True)
class Peer:
    """A way to compile. `strict` makes an internal failure an exception instead of a quiet run in eager."""

    name: str
    settings: dict[str, object] = field(default_factory=dict)

    def compile(self, model: Callable[..., Any], **settings: object) -> Callable[..., Any]:
        return torch.compile(model, **{**self.settings, **settings})  # type: ignore[call-overload, no-any-return]

    def reset(self) -> None:
        torch.compiler.reset()

    def observe(self, call: Callable[[], Any]) -> Observed:
        return Observed(call(), graphs=1)


class Eager(Peer):
    def compile(self, model: Callable[..., Any], **settings: object) -> Callable[..., Any]:
        return model

    def reset(self) -> None:
        """Eager remembers nothing."""


class Dovetail(Peer):
    """Dovetail, read through its event stream."""

    def compile(self, model: Callable[..., Any], **settings: object) -> Callable[..., Any]:
        chosen = {**self.settings, **settings}
        chosen["options"] = {"fallback_to_eager": False, **(chosen.get("options") or {})}  # type: ignore[dict-item]
        return self.package.compile(model, **chosen)  # type: ignore[no-any-return]

    @property
    def package(self) -> ModuleType:
        return importlib.import_module("dovetail")

    def reset(self) -> None:
        self.package.reset()

    def observe(self, call: Callable[[], Any]) -> Observed:
        stream = importlib.import_module("dovetail.events").EVENTS
        seen: list[Any] = []
        stream.listeners.append(seen.append)
        try:
            result = call()
        finally:
            stream.listeners.remove(seen.append)
        kinds = [event.kind for event in seen]
        named = [event for event in seen if event.kind in ("graph_break", "skip", "fallback_to_eager")]
        return Observed(
            result,
            graphs=kinds.count("graph"),
            breaks=kinds.count("graph_break"),
            recompiles=kinds.count("recompile"),
            kernels=kinds.count("kernel"),
            fallbacks=tuple(str(event.get("op", event.get("name", "?"))) for event in seen if event.kind == "fallback"),
            eager=tuple(str(event.fields) for event in seen if event.kind in ("skip", "fallback_to_eager")),
            reasons=tuple(f"{event.kind}: {event.get('text', event.fields)}" for event in named),
            seconds=sum(float(event.get("seconds", 0.0)) for event in seen if event.kind == "stage"),
        )


PEERS: Final[dict[str, Peer]] = {
    "dovetail": Dovetail("dovetail"),
    "dovetail-eager": Dovetail("dovetail-eager", {"backend": "eager"}),
    "dovetail-aot": Dovetail("dovetail-aot", {"backend": "aot_eager"}),
    "torch": Peer("torch"),
    "torch-eager": Peer("torch-eager", {"backend": "eager"}),
    "torch-aot": Peer("torch-aot", {"backend": "aot_eager"}),
    "eager": Eager("eager"),
}


def find_peer(name: str) -> Peer:
    if name not in PEERS:
        raise SystemExit(f"unknown peer {name!r}; known: {', '.join(PEERS)}")
    return PEERS[name]
