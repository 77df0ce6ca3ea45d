# `make demo` and `make test` do all set-up; a second run reuses it.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
GPU_VENV ?= .venv-gpu
HAS_GPU := $(shell nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU')
READY := $(VENV)/.ready
SETUP_FILES := requirements/cpu.lock requirements/vllm-shim/pyproject.toml pyproject.toml

.DEFAULT_GOAL := help
.PHONY: help setup demo test coverage soak lint format clean gpu-test gpu-bench

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: $(READY) ## Make .venv with everything that is needed (once, about 2 minutes, 4 GB)

# The stamp is written last: an interrupted set-up starts over from a fresh environment.
$(READY): $(SETUP_FILES)
	@command -v gcc >/dev/null || { echo "medusa: gcc is needed to link kernels (Debian: apt-get install gcc)"; exit 1; }
	@command -v $(PYTHON) >/dev/null || { echo "medusa: $(PYTHON) was not found; Python 3.11 is needed: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "medusa: the lock is for Python 3.11, $(PYTHON) is $$($(PYTHON) --version): make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "medusa: setting up $(VENV) (once, about 2 minutes, 4 GB)"
	@rm -f $(READY)
	$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps -r requirements/cpu.lock || { echo "medusa: installing requirements/cpu.lock failed; if pip did not find torch ...+cpu, point PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels"; exit 1; }
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps --no-build-isolation ./requirements/vllm-shim
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@$(BIN)/python -c 'import torch, vllm, tvm_ffi, medusa_plugin'
	@touch $(READY)

demo: $(READY) ## Ask the embedded model, plain and with Medusa trees, side by side
	@mkdir -p build
	$(BIN)/medusa demo --json build/demo.json

lint: $(READY) ## Lint, format and type checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# One thread each: two OpenMP threads that wait for each other crawl when the cores are taken.
TEST_OPTIONS := --numprocesses=2 --dist=loadfile

test: lint ## Lint, types and all tests
	OMP_NUM_THREADS=1 $(BIN)/pytest $(TEST_OPTIONS)

coverage: $(READY) ## All tests again, with the lines of our packages that they run
	rm -f build/coverage*
	OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest $(TEST_OPTIONS)
	$(BIN)/coverage combine
	$(BIN)/coverage report

SOAK ?= --requests 10000
soak: $(READY) ## Compare 10,000 random requests with plain vLLM, about 10 minutes (SOAK="--requests N --seed S")
	PYTHONPATH=.:benchmarks $(BIN)/python -m tests.soak $(SOAK)

gpu-test: ## Test the CUDA kernels on this machine's GPU
ifeq ($(HAS_GPU),0)
	@echo "medusa: no GPU (nvidia-smi lists none): nothing was tested"
else
	@$(MAKE) --no-print-directory $(GPU_VENV)/.ready
	$(GPU_VENV)/bin/pytest tests/gpu
endif

gpu-bench: ## Measure the CUDA kernels on this machine's GPU
ifeq ($(HAS_GPU),0)
	@echo "medusa: no GPU (nvidia-smi lists none): nothing was measured"
else
	@$(MAKE) --no-print-directory $(GPU_VENV)/.ready
	$(GPU_VENV)/bin/python benchmarks/bench_gpu_ops.py
endif

# TVM's compiler has an environment of its own: tvm_ops/load.py says why.
$(GPU_VENV)/.ready: requirements/gpu.txt pyproject.toml
	@command -v nvcc >/dev/null || test -x /usr/local/cuda/bin/nvcc || { echo "medusa: nvcc is needed to compile the kernels: install the CUDA toolkit"; exit 1; }
	@echo "medusa: setting up $(GPU_VENV) with vLLM for CUDA, about 10 GB"
	$(PYTHON) -m venv --clear $(GPU_VENV)
	@$(GPU_VENV)/bin/pip install --quiet -r requirements/gpu.txt
	@$(GPU_VENV)/bin/pip install --quiet --no-deps --editable .
	@cache="$${MEDUSA_CACHE:-$$HOME/.cache/medusa}"; $(PYTHON) -m venv "$$cache/tvm" && "$$cache/tvm/bin/pip" install --quiet 'apache-tvm>=0.27,<0.28'
	@touch $@

format: $(READY) ## Format the sources
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove the environment and everything built
	rm -rf $(VENV) build *.egg-info requirements/vllm-shim/build requirements/vllm-shim/*.egg-info .mypy_cache .ruff_cache .pytest_cache
