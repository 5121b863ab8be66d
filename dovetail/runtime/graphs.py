"""Record a program's GPU work once and replay it: CUDA graphs.

    Recorded(executable, unit, device, kept): called like the executable

The first calls run as they are and show which inputs stay where they are (parameters, caches); the
third is recorded. From then on inputs that move are copied into the recording's own buffers, the
recording is replayed, and results are copied out, so they are the caller's to keep. The last `kept`
results (tensors saved for backward) are not copied: they are dead before the next call, or, where
they are not, that call runs without the recording. Recordings of one device share their memory, so they
run one after another, whatever threads and streams they are called from.

Whatever a recording cannot do (a result still alive, an address that changed too often, a library call
that synchronises) is run as it is, counted, and reported with its reason.
"""
from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch

from dovetail.events import EVENTS
from dovetail.util.library import restride
from dovetail.util.noun import Noun, field

WARM_UPS: Final = 2
MOST_RECORDINGS: Final = 3
"""Recordings of one program before addresses that keep changing make it give up."""


class Shared(Noun, frozen=False, eq=False):
    """What the recordings of one device have in common."""

    pool: Any
    """Where their memory comes from;"""
    stream: Any
    """the stream they are recorded on;"""
    last: Any = None
    """the stream the last of them ran on."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take_turn(self, now: Any) -> None:
        """Run after whatever used the memory before."""
        if self.last is not None and self.last != now:
            now.wait_stream(self.last)
        self.last = now


_shared: dict[int, Shared] = {}
_making: Final = threading.Lock()


def shared_on(index: int) -> Shared:
    with _making:
        if index not in _shared:
            _shared[index] = Shared(torch.cuda.graph_pool_handle(), torch.cuda.Stream(index))
        return _shared[index]


class Recording(Noun, frozen=False):
    graph: torch.cuda.CUDAGraph
    fixed: list[int]
    """Positions of the inputs that must be where they were,"""
    addresses: list[object]
    """and where that is."""
    copied: list[tuple[int, torch.Tensor]]
    """Positions of the others, and the buffers they are copied into."""
    results: list[Any]
    written: dict[int, int]
    """Results that are an input written in place, by position: which input."""


class Recorded(Noun, frozen=False):
    executable: Callable[..., list[Any]]
    unit: str
    device: torch.device
    kept: int = 0
    recording: Recording | None = None
    recordings: int = 0
    seen: list[list[object]] = field(default_factory=list)
    moving: set[int] = field(default_factory=set)
    """Inputs that were seen in more than one place."""
    gave_up: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, *inputs: Any) -> list[Any]:
        if self.gave_up or torch.cuda.is_current_stream_capturing() or not self.lock.acquire(blocking=False):
            return self.executable(*inputs)
        try:
            return self._call(inputs)
        finally:
            self.lock.release()

    def _call(self, inputs: tuple[Any, ...]) -> list[Any]:
        recording = self.recording
        if recording is None:
            if len(self.seen) < WARM_UPS:
                self.seen.append([_address(x) for x in inputs])
                return self.executable(*inputs)
            recording = self._record(inputs)
        elif (now := [_address(inputs[k]) for k in recording.fixed]) != recording.addresses:
            pairs = zip(recording.fixed, now, recording.addresses)
            self.moving.update(k for k, at, was in pairs if at != was)
            self.recording = None
            if self.recordings < MOST_RECORDINGS:
                return self._call(inputs)
            self._give_up("inputs keep moving in memory")
            return self.executable(*inputs)
        elif any(map(_is_used, recording.results[len(recording.results) - self.kept :])):
            reason = "results of the last call are still in use"
            EVENTS.emit("cudagraph", unit=self.unit, used=False, reason=reason)
            return self.executable(*inputs)
        if recording is None:
            return self.executable(*inputs)
        return self._replay(recording, inputs)

    def _here(self) -> AbstractContextManager[Any]:
        """Streams and recordings are those of the current device."""
        is_current = self.device.index is None or self.device.index == torch.cuda.current_device()
        return nullcontext() if is_current else torch.cuda.device(self.device)

    def _replay(self, recording: Recording, inputs: tuple[Any, ...]) -> list[Any]:
        with self._here():
            shared = shared_on(torch.cuda.current_device())
            with shared.lock:
                shared.take_turn(torch.cuda.current_stream())
                for k, buffer in recording.copied:
                    buffer.copy_(inputs[k])
                recording.graph.replay()
                return self._out(recording, inputs)

    def _out(self, recording: Recording, inputs: tuple[Any, ...]) -> list[Any]:
        """User results are copied, unless they are an input written in place; saved ones are new tensors
        on the recording's memory."""
        end = len(recording.results) - self.kept
        out = [
            inputs[recording.written[k]] if k in recording.written
            else x.clone() if isinstance(x, torch.Tensor) else x
            for k, x in enumerate(recording.results[:end])
        ]  # fmt: skip
        return [*out, *(x.view_as(x) if isinstance(x, torch.Tensor) else x for x in recording.results[end:])]

    def _record(self, inputs: tuple[Any, ...]) -> Recording | None:
        now = [_address(x) for x in inputs]
        self.moving.update(k for at in self.seen for k in range(len(inputs)) if at[k] != now[k])
        if any(map(is_on_cpu, inputs)):
            self._give_up("an input is on the CPU")
            return None
        moves = [k in self.moving and isinstance(x, torch.Tensor) for k, x in enumerate(inputs)]
        buffers = [restride(x, x.stride()) if moved else None for x, moved in zip(inputs, moves)]
        given = [x if buffer is None else buffer for x, buffer in zip(inputs, buffers)]
        graph = torch.cuda.CUDAGraph()
        try:
            with self._here():
                shared = shared_on(torch.cuda.current_device())
                place = {"pool": shared.pool, "stream": shared.stream}
                with shared.lock, torch.cuda.graph(graph, capture_error_mode="thread_local", **place):
                    results = self.executable(*given)
        except RuntimeError as error:
            torch.cuda.synchronize()
            self._give_up(str(error).splitlines()[0])
            return None
        fixed = [k for k, buffer in enumerate(buffers) if buffer is None]
        copied = [(k, buffer) for k, buffer in enumerate(buffers) if buffer is not None]
        places = {id(inputs[k]): k for k in fixed}
        written = {n: places[id(x)] for n, x in enumerate(results) if id(x) in places}
        self.recording = Recording(graph, fixed, [now[k] for k in fixed], copied, results, written)
        self.recordings += 1
        EVENTS.emit("cudagraph", unit=self.unit, used=True, reason="", copied=len(copied))
        return self.recording

    def _give_up(self, reason: str) -> None:
        self.gave_up, self.recording = reason, None
        EVENTS.emit("cudagraph", unit=self.unit, used=False, reason=reason)


def _address(value: Any) -> object:
    """Numbers count as their text: another number needs another recording."""
    return value.data_ptr() if isinstance(value, torch.Tensor) else repr(value)


def is_on_cpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _is_used(x: Any) -> bool:
    """Someone besides the recording holds the tensor's memory."""
    if not isinstance(x, torch.Tensor):
        return False
    return int(torch._C._storage_Use_Count(x.untyped_storage()._cdata)) > 2
