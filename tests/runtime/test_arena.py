"""Memory that is freed stays with the process, unless the user decided otherwise."""
from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import resource, torch, dovetail

def step(p, g, m):
    return p - g, m * 0.9 + g, p * m, g * m

compiled = dovetail.compile(step)
inputs = [torch.randn(1024, 1024) for _ in range(3)]
for _ in range(5):
    compiled(*inputs)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    compiled(*inputs)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def count_faults(**environment: str) -> int:
    settings = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    settings.pop("GLIBC_TUNABLES", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**settings, **environment}, capture_output=True, text=True
    )
    return int(done.stdout)


def test_results_do_not_touch_new_pages_each_call() -> None:
    assert count_faults() < 1000


def test_settings_of_the_user_win() -> None:
    assert count_faults(MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072") > 10_000
