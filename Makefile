# make demo    set up a fresh machine and run the main job
# make test    set up a fresh machine and run lint, format, types and tests
#
# Everything lands in the repository (.venv, .cache); what the system's Python already has is reused.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# The CPU build where a configured index has it, else whatever 2.13.0 there is. With an NVIDIA driver, pip's choice.
CPU_TORCH := torch==2.13.0+cpu
ANY_TORCH := torch==2.13.0
GPU_TORCH := torch>=2.11

export TRITON_CACHE_DIR := $(CURDIR)/.cache/triton
export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/.cache/inductor
export MPLCONFIGDIR := $(CURDIR)/.cache/matplotlib
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup demo test lint types unit test-matrix test-gpu wheel clean

setup: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -m venv --system-site-packages $(VENV)
	$(BIN)/python -c 'import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)' 2>/dev/null \
	  || { [ -e /proc/driver/nvidia/version ] && $(BIN)/pip install --quiet '$(GPU_TORCH)'; } \
	  || $(BIN)/pip install --quiet '$(CPU_TORCH)' 2>/dev/null \
	  || $(BIN)/pip install --quiet '$(ANY_TORCH)'
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@

demo: $(READY)
	$(BIN)/tide demo $(ARGS)

test: lint types unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy knows packages by their folders, so the installed layout is laid out for it: links, made anew each time.
types: $(READY)
	rm -rf build/types && mkdir -p build/types/tide_triton
	ln -s $(CURDIR)/tide_triton/* build/types/tide_triton/
	ln -s $(CURDIR)/layouts $(CURDIR)/kernels build/types/tide_triton/
	cd build/types && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.cache/mypy \
	  --package tide_triton

unit: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

# Parity in every combination of Slot-Reuse and ring depth, of which `make test` runs one in six.
test-matrix: $(READY)
	$(BIN)/python -m pytest -m matrix -n $(JOBS)

# Two NVIDIA GPUs; skipped, and said so, elsewhere.
test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu -rs

wheel: $(READY)
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf build dist .cache .venv *.egg-info
