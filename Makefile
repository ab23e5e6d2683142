# Everything runs in a virtual environment inside the clone. Each target is idempotent.
#
#   make serve    environment, C++ kernels, the model, then `serve run app:deployment`
#   make gpu-check   what only a GPU can show, with the Python that runs it: a CUDA image needs nothing installed
#   make test     environment with test extras, then lint, types and the whole suite
#   make conformance    other people's suites and the official clients against the running application
#
# PYTHON            the interpreter to make the environment with (3.11 to 3.13)
# TORCH_INDEX_URL   an index to take torch from, e.g. PyTorch's own CPU index: without an NVIDIA card it saves gigabytes
# SUITES            those of `make conformance`; all by default (docs/conformance.md names them)
# ARGS              further settings of `make serve`, as key=value (it then ends in `serve run app:build key=value ...`)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch>=2.11,<2.14

export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: serve test lint bench conformance gpu-check build clean

# Checks settings and port, builds, fetches, and becomes `serve run app:deployment`, or with ARGS `app:build $(ARGS)`.
serve: $(VENV)/.serve
	$(BIN)/nanoserve serve $(ARGS)

test: $(VENV)/.test lint build
	$(BIN)/python -m pytest

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: build
	$(BIN)/python -m benchmarks.throughput

conformance: $(VENV)/.test build
	$(BIN)/python -m tests.conformance $(SUITES)

# With the environment if there is one, else with PYTHON as it is.
gpu-check:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu_check

build: $(VENV)/.serve
	$(BIN)/nanoserve build

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info < (3, 14); sys.exit(None if ok else \
	    "nanoserve needs Python 3.11, 3.12 or 3.13, and %s is %s: set PYTHON to another" \
	    % (sys.executable, sys.version.split()[0]))'
	$(PYTHON) -m venv $(VENV)

# torch comes first and apart, so that its index serves nothing else.
$(VENV)/.torch: $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet "$(TORCH)" $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL))
	touch $@

$(VENV)/.serve: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.test: $(VENV)/.serve pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@
