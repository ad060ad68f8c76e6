# Each target does all of its own set-up: from a fresh clone only python3 and pip are needed.

PYTHON ?= python3
# make test TORCH=2.15.0: with another release of torch, in an environment of its own (most builds are some GB).
TORCH  ?=
VENV   := .venv$(if $(TORCH),-$(TORCH))
BIN    := $(VENV)/bin
RUNS   := $(VENV)/.runs
READY  := $(VENV)/.ready
PINS   := $(VENV)/constraints.txt
PIP    := $(BIN)/python -m pip install --quiet -c $(PINS)

ARGS   ?=
DEMO   := examples/train_gpt.py --amp --sdpa --batch 12 $(ARGS)

export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: help demo test check bench conformance docs clean
.DEFAULT_GOAL := help

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

# Exit code 3 is a verdict: it does not fit.
demo: $(RUNS)  ## an ordinary training script, rehearsed on three cards that are not here
	@$(BIN)/understudy run --device h100,4090,t4 $(DEMO) || test $$? -eq 3
	@$(BIN)/understudy run --device 4090 $(DEMO) || test $$? -eq 3

test: $(READY)  ## the tests, without the long sweeps
	$(BIN)/python -m pytest -q -n 2 $(ARGS)

check: $(READY)  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

bench: $(READY)  ## side by side with torch's own mode; with AGAINST=<commit>, beside that version of this library
ifdef AGAINST
	$(BIN)/python -m benchmarks.against $(AGAINST) $(ARGS)
else
	$(BIN)/python -m benchmarks.run $(ARGS)
	$(BIN)/python -m benchmarks.prop $(if $(findstring --quick,$(ARGS)),--quick)
	$(BIN)/python -m benchmarks.symbolic $(if $(findstring --quick,$(ARGS)),--quick)
	$(BIN)/python -m benchmarks.make_fx $(if $(findstring --quick,$(ARGS)),--quick)
	$(BIN)/python -m benchmarks.captures $(if $(findstring --quick,$(ARGS)),--quick)
	$(BIN)/python -m benchmarks.export $(if $(findstring --quick,$(ARGS)),--quick)
	$(BIN)/python -m benchmarks.rehearsal $(if $(findstring --quick,$(ARGS)),--quick)
endif

conformance: $(READY)  ## the long sweeps: every operator against the real one, models against torch
	$(BIN)/python -m pytest -q -n 2 -m conformance $(ARGS)

docs: $(READY)  ## the pages and the API reference, as a site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

clean:  ## forget the virtual environment and the caches
	rm -rf .venv .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis build site src/*.egg-info

# Enough to run the library. torch comes first and by its exact version (see constraints.txt), so that
# nothing after it asks for another.
$(RUNS): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $(PINS)
	$(PIP) setuptools torch numpy
	$(PIP) --no-build-isolation -e .
	@touch $@

# Enough to work on it.
$(READY): $(RUNS)
	$(PIP) --no-build-isolation -e '.[dev]'
	@touch $@
