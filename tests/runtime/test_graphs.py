"""Recording and replaying, on a machine without a GPU: a stand-in for CUDA graphs repeats what was recorded."""

from contextlib import contextmanager

import pytest
import torch

from dovetail.runtime import graphs
from dovetail.runtime.graphs import Recorded, Shared


class Graph:
    """Remembers the executable that ran while it was recorded, and runs it again into the same results."""

    current = None

    def replay(self):
        for result, again in zip(self.results, self.run(*self.given)):
            if isinstance(result, torch.Tensor) and result is not again:
                result.copy_(again)


@contextmanager
def recording(graph, **kwargs):
    Graph.current = graph
    yield
    Graph.current = None


class Executable:
    def __init__(self, run):
        self.run, self.calls = run, 0

    def __call__(self, *given):
        self.calls += 1
        results = self.run(*given)
        if Graph.current is not None:
            graph = Graph.current
            graph.run, graph.given, graph.results = self.run, given, results
        return results


class Stream:
    def __init__(self, index=0):
        self.waited = []

    def wait_stream(self, other):
        self.waited.append(other)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    stream = Stream()
    for name, value in {
        "CUDAGraph": Graph, "graph": recording, "Stream": Stream, "graph_pool_handle": lambda: (0, 1),
        "current_device": lambda: 0, "current_stream": lambda: stream, "synchronize": lambda: None,
        "is_current_stream_capturing": lambda: False,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(graphs, "is_on_cpu", lambda value: False)
    monkeypatch.setattr(graphs, "_shared", {})


def recorded(run, kept=0):
    executable = Executable(run)
    return Recorded(executable, "unit", torch.device("cuda", 0), kept), executable


def test_results_are_the_callers_to_keep():
    call, executable = recorded(lambda x, w: [x * w])
    w = torch.tensor([2.0, 3.0])
    inputs = [torch.full((2,), float(k)) for k in range(6)]
    results = [call(x, w)[0] for x in inputs]
    assert executable.calls == 3
    for x, result in zip(inputs, results):
        assert torch.equal(result, x * w)


def test_what_stays_is_not_copied_and_what_moves_is():
    call, _ = recorded(lambda x, w: [x + w])
    w = torch.ones(2)
    kept = [torch.full((2,), float(k)) for k in range(4)]
    for x in kept:
        call(x, w)
    assert [k for k, _ in call.recording.copied] == [0] and call.recording.fixed == [1]


def test_an_input_that_moved_once_is_copied_from_then_on():
    call, _ = recorded(lambda x, y: [x + y])
    xs, ys = [torch.full((2,), float(k)) for k in range(4)], [torch.full((2,), 10.0 * k) for k in range(4)]
    order = [(0, 0)] * 4 + [(1, 0)] * 3 + [(1, 1)] * 3 + [(k % 4, (k + 1) % 4) for k in range(8)]
    for i, j in order:
        assert torch.equal(call(xs[i], ys[j])[0], xs[i] + ys[j])
    assert call.gave_up == "" and call.recordings == 3


def test_numbers_are_told_apart():
    call, _ = recorded(lambda x, n: [x * n])
    x = torch.ones(2)
    for n in (-1, -1, -1, -1, -2, -2, 1, True, 1.0):
        assert torch.equal(call(x, n)[0], x * n)


def test_an_input_written_in_place_is_the_result():
    def run(cache, x):
        cache += x
        return [cache]

    call, _ = recorded(run)
    cache, x = torch.zeros(2), torch.ones(2)
    for n in range(1, 4):  # the third only records here, and is replayed
        assert call(cache, x)[0] is cache
    total = float(cache[0])
    assert call(cache, x)[0] is cache and float(cache[0]) == total + 1


def test_results_that_backward_still_needs_are_left_alone():
    call, executable = recorded(lambda x: [x + 1, x * 2], kept=1)
    saved = [call(torch.full((2,), float(k)))[1] for k in range(3)]
    calls = executable.calls
    call(torch.full((2,), 9.0))
    assert executable.calls == calls + 1, "the recording's memory is in use"
    assert torch.equal(saved[2], torch.full((2,), 4.0))
    saved.clear()
    call(torch.full((2,), 9.0))
    assert executable.calls == calls + 1


def test_streams_take_turns():
    first, second = Stream(), Stream()
    shared = Shared(None, None)
    for stream in (first, first, second, second, first):
        shared.take_turn(stream)
    assert first.waited == [second] and second.waited == [first]
