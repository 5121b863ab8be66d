# make demo | test | lint | bench      from a fresh checkout: makes .venv, installs, builds, runs
# make fuzz | soak | training | sweep-ops | sweep-models | bench-peers      what docs/results is made with, likewise
# make native PYTHON=python3           builds the native module in place with nothing but a C compiler

PYTHON ?= $(or $(shell command -v python3.11 || command -v python3.12 || command -v python3.13),python3)
VENV := .venv
BIN := $(VENV)/bin/python
CC ?= cc
CFLAGS := -std=c11 -O2 -fvisibility=hidden -fno-strict-aliasing -Wall -Wextra -Wno-unused-parameter \
          -Wno-missing-field-initializers -Wno-cast-function-type
SOURCES := $(wildcard dovetail/csrc/*.c dovetail/csrc/cpython/*.c)
HEADERS := $(wildcard dovetail/csrc/*.h dovetail/csrc/cpython/*.h)
ASK := import sysconfig as s; print
INCLUDE = $(shell $(1) -c "$(ASK)(s.get_paths()['include'])")
SUFFIX = $(shell $(1) -c "$(ASK)(s.get_config_var('EXT_SUFFIX'))")
PIP := $(BIN) -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint bench bench-peers bench-gpu sweep-ops sweep-models sweep-gpu training fuzz soak native clean

demo: $(VENV)/base
	$(BIN) examples/demo.py

test: $(VENV)/models
	OMP_NUM_THREADS=1 $(BIN) -m pytest -q -n auto --maxprocesses=4 tests

lint: $(VENV)/test
	$(BIN) -m ruff check dovetail tests benchmarks
	$(BIN) -m mypy --strict --follow-imports=silent dovetail/ir
	$(BIN) -m mypy dovetail

bench: $(VENV)/models
	$(BIN) -m benchmarks.bench

bench-peers: $(VENV)/test
	$(PIP) -e .[peers]
	$(BIN) -m benchmarks.peers

bench-gpu:
	$(PYTHON) -m benchmarks.gpu

sweep-ops: $(VENV)/test
	$(BIN) -m tests.sweeps.ops

sweep-models: $(VENV)/models
	$(BIN) -m tests.sweeps.models

# On the machine with the GPU, with whatever torch it has: the op matrix, then the models.
sweep-gpu:
	$(PYTHON) -m tests.sweeps.ops --device cuda --jobs 6 --results build/sweeps/ops-cuda.jsonl
	$(PYTHON) -m tests.sweeps.models --device cuda --jobs 3

training: $(VENV)/models
	$(BIN) -m tests.aot.training --write

fuzz: $(VENV)/test
	$(BIN) -m tests.fuzz

soak: $(VENV)/test
	OMP_NUM_THREADS=1 $(BIN) -m tests.soak  # a child of two threads hangs in libgomp, in plain torch, too

# -- the environment, in three steps, each with a stamp

$(VENV)/made:
	$(PYTHON) -c "import sys; assert (3, 11) <= sys.version_info[:2] <= (3, 13), 'needs Python 3.11 to 3.13'"
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/base: $(VENV)/made pyproject.toml constraints.txt setup.py $(SOURCES) $(HEADERS)
	$(PIP) -e .
	touch $@

$(VENV)/test: $(VENV)/base
	$(PIP) -e .[test]
	touch $@

# timm and torchvision would pull in another torch, so they come without what they depend on.
$(VENV)/models: $(VENV)/test
	$(PIP) --no-deps timm torchvision pillow
	touch $@

# -- the native module alone, in place

native: NATIVE = dovetail/_native$(call SUFFIX,$(PYTHON))
native: $(SOURCES) $(HEADERS)
	$(CC) -shared -fPIC $(CFLAGS) -I$(call INCLUDE,$(PYTHON)) -Idovetail/csrc $(SOURCES) -o $(NATIVE)
	$(PYTHON) -c "import dovetail._native"

clean:
	rm -rf $(VENV) build dist *.egg-info dovetail/_native*.so
