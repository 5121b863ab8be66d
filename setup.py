"""Builds dovetail._native. Everything else is in pyproject.toml. Needs a C compiler and no torch.

    python setup.py build_ext --inplace      build in the source tree, for working on it
"""
from glob import glob

from setuptools import Extension, setup

FLAGS = [
    "-std=c11", "-O2", "-fvisibility=hidden", "-fno-strict-aliasing", "-Wall", "-Wextra",
    "-Wno-unused-parameter", "-Wno-missing-field-initializers", "-Wno-cast-function-type",
]  # fmt: skip

setup(
    ext_modules=[
        Extension(
            "dovetail._native",
            sources=sorted(glob("dovetail/csrc/*.c") + glob("dovetail/csrc/cpython/*.c")),
            depends=sorted(glob("dovetail/csrc/*.h") + glob("dovetail/csrc/cpython/*.h")),
            include_dirs=["dovetail/csrc"],
            extra_compile_args=FLAGS,
        )
    ]
)
