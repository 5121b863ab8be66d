"""Launch: C programs written by hand, called with tensors."""
from __future__ import annotations

import ctypes
import gc
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail._native import Launch
from dovetail.runtime.guards import attach
from dovetail.runtime.torch_abi import find_address

PROGRAM = r"""
#include <stdint.h>
#include <stddef.h>
typedef struct Python Python;
struct Python {
    int32_t (*call_with)(Python *, int32_t, void **, int32_t, const int64_t *, int32_t, void **, int32_t);
    void (*fail)(Python *, const char *);
};
int32_t (*new_handle)(void *, void **);
int32_t (*data_ptr)(void *, void **);
int32_t (*delete_handle)(void *);

/* outputs: a copy of input 1's handle, input 0's */
int32_t swap(void **in, int64_t *ints, double *floats, void **out, void *python) {
    return new_handle(in[1], &out[0]) || new_handle(in[0], &out[1]);
}
/* in[0][i] = in[0][i] * floats[0] + ints[0] for 4 elements; no output for the second */
int32_t scale(void **in, int64_t *ints, double *floats, void **out, void *python) {
    float *x;
    if (data_ptr(in[0], (void **)&x)) return 1;
    for (int i = 0; i < 4; i++) x[i] = x[i] * floats[0] + ints[0];
    return new_handle(in[0], &out[0]);
}
int32_t fails(void **in, int64_t *ints, double *floats, void **out, void *python) {
    new_handle(in[0], &out[0]);
    ((Python *)python)->fail(python, "out of luck");
    return 3;
}
int32_t through_python(void **in, int64_t *ints, double *floats, void **out, void *python) {
    Python *p = python;
    void *made[1];
    int32_t failed = p->call_with(p, 0, in, 2, NULL, 0, made, 1);
    if (failed) return failed;
    failed = p->call_with(p, 1, made, 1, ints, 1, out, 2);
    delete_handle(made[0]);
    return failed;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: Any) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("launch")
    (folder / "program.c").write_text(PROGRAM)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "program.c", "-o", "program.so"], cwd=folder, check=True)
    attach()
    loaded = ctypes.CDLL(str(folder / "program.so"))
    for name, symbol in (("new_handle", "aoti_torch_new_tensor_handle"), ("data_ptr", "aoti_torch_get_data_ptr"),
                         ("delete_handle", "aoti_torch_delete_tensor_object")):  # fmt: skip
        ctypes.c_void_p.in_dll(loaded, name).value = find_address(symbol)
    return loaded


def launch(library: ctypes.CDLL, name: str, kinds: str, n_outputs: int, callables: Any = ()) -> Launch:
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address
    return Launch(address, kinds, n_outputs, callables, library)


def test_tensors_in_and_out(library: ctypes.CDLL) -> None:
    run = launch(library, "swap", "tt", 2)
    a, b = torch.ones(2), torch.nn.Parameter(torch.zeros(3))
    first, second = run(a, b)
    assert first is b and second is a


def test_numbers_fill_their_own_arrays(library: ctypes.CDLL) -> None:
    x = torch.arange(4.0)
    (y,) = launch(library, "scale", "fti", 1)(0.5, x, 3)
    assert y is x and x.tolist() == [3.0, 3.5, 4.0, 4.5]


def test_wrong_arguments(library: ctypes.CDLL) -> None:
    run = launch(library, "scale", "fti", 1)
    for args in ((), (1.0, torch.ones(4)), (1.0, 2, 3), (1.0, torch.ones(4), "a"), ("a", torch.ones(4), 1)):
        with pytest.raises(TypeError):
            run(*args)
    with pytest.raises(OverflowError):
        run(1.0, torch.ones(4), 1 << 70)
    with pytest.raises(ValueError, match="kinds"):
        launch(library, "scale", "x", 1)


def test_failure_raises_its_text(library: ctypes.CDLL) -> None:
    x = torch.ones(2)
    before = sys.getrefcount(x)
    with pytest.raises(RuntimeError, match="out of luck"):
        launch(library, "fails", "t", 1)(x)
    assert sys.getrefcount(x) == before


def test_calls_back_to_python(library: ctypes.CDLL) -> None:
    run = launch(library, "through_python", "tti", 2, (torch.add, lambda t, n: (t * n, t - n)))
    product, difference = run(torch.ones(3), torch.full((3,), 2.0), 10)
    assert product.tolist() == [30.0] * 3 and difference.tolist() == [-7.0] * 3


@pytest.mark.parametrize("bad", [lambda a, b: 1 / 0, lambda a, b: (a, b), lambda a, b: "text", lambda a, b: 5])
def test_exceptions_in_callbacks(library: ctypes.CDLL, bad: Any) -> None:
    run = launch(library, "through_python", "tti", 2, (bad, torch.add))
    with pytest.raises((ZeroDivisionError, RuntimeError, TypeError)):
        run(torch.ones(3), torch.ones(3), 1)


def test_missing_callable(library: ctypes.CDLL) -> None:
    with pytest.raises(IndexError):
        launch(library, "through_python", "tti", 2)(torch.ones(3), torch.ones(3), 1)


def test_gil_is_free_while_it_runs(library: ctypes.CDLL) -> None:
    arrived, release = threading.Event(), threading.Event()

    def wait(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        arrived.set()
        assert release.wait(20)
        return a

    run = launch(library, "through_python", "tti", 2, (wait, lambda t, n: (t, t)))
    thread = threading.Thread(target=run, args=(torch.ones(1), torch.ones(1), 1))
    thread.start()
    assert arrived.wait(20)
    release.set()
    thread.join(20)
    assert not thread.is_alive()


def test_nothing_leaks(library: ctypes.CDLL) -> None:
    swap = launch(library, "swap", "tt", 2)
    back = launch(library, "through_python", "tti", 2, (torch.add, lambda t, n: (t, t)))
    a, b = torch.ones(1000), torch.ones(1000)

    def loop(n: int) -> None:
        for _ in range(n):
            swap(a, b)
            back(a, b, 1)

    loop(300)
    gc.collect()
    counts = sys.getrefcount(a), sys.getrefcount(b)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loop(20_000)
    assert (sys.getrefcount(a), sys.getrefcount(b)) == counts
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4000  # KiB; a leak would be 80 MB
