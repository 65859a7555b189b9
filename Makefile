# `make` alone says what there is. Everything is installed into .venv and .venv-tl4 beside this file and
# nowhere else; a stamp in each remembers what was installed, so that only the first call takes a minute.

PYTHON     ?= python3
WORKERS    ?= 2
ARGS       ?=
TORCH_ARGS ?=

# pip is told what to take by the constraints; torch goes first, alone, so that TORCH_ARGS concern only it.
PIP = -m pip install --quiet --no-input --disable-pip-version-check
# Nothing here asks a hub for anything.
OFFLINE = HF_HUB_OFFLINE=1
# One process per core, one thread per process. An ARGS of your own is appended: make test ARGS='-k additive'
PYTEST = -m pytest -n $(WORKERS) $(ARGS)

.PHONY: help demo synthetic test test-tl4 lint format types docs bench clean distclean

help: ## this list
	@awk -F ': [^#]*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo "Variables: PYTHON=$(PYTHON)  WORKERS=$(WORKERS) (test processes)  ARGS= (more for pytest, or synthetic)  TORCH_ARGS= (more for pip, for torch only)"

demo: .venv/run.stamp ## from nothing: install, then fit the heads of the demo model and save the table in out/
	mkdir -p out
	$(OFFLINE) .venv/bin/tl-posdisent fit --model demo --out out/demo.csv

synthetic: .venv/run.stamp ## train five position encodings on two tasks and save the tables in out/synthetic/ (minutes)
	$(OFFLINE) .venv/bin/tl-posdisent synthetic --preset small $(ARGS)

test: .venv/dev.stamp ## all tests and doctests
	$(OFFLINE) OMP_NUM_THREADS=1 .venv/bin/python $(PYTEST)

test-tl4: .venv-tl4/dev.stamp ## the same with the newest TransformerLens 4
	$(OFFLINE) OMP_NUM_THREADS=1 .venv-tl4/bin/python $(PYTEST)

lint: .venv/dev.stamp ## ruff: mistakes and formatting
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .

format: .venv/dev.stamp ## let ruff put right what lint complains of, as far as it can
	.venv/bin/python -m ruff check --fix .
	.venv/bin/python -m ruff format .

types: .venv/dev.stamp ## mypy, strict
	.venv/bin/python -m mypy

docs: .venv/docs.stamp ## the documentation, into docs/_build/html; a warning is an error
	$(OFFLINE) .venv/bin/python -m sphinx -W --keep-going -q docs docs/_build/html

bench: .venv/bench.stamp ## all benchmarks: tables on the screen, JSON in out/bench/
	for script in dense_fit dense_limit linear_fit controlled plane whole_model head_ablation; do \
	    $(OFFLINE) .venv/bin/python benchmarks/$$script.py || exit 1; done

clean: ## remove results, builds and caches
	rm -rf out build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name '.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## the same, and both environments
	rm -rf .venv .venv-tl4

# --- the environments ---------------------------------------------------------------------------------------

.venv/run.stamp: pyproject.toml requirements/dev.txt
	@echo "Installing torch, TransformerLens and this package into .venv; from nothing that takes about a minute."
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python $(PIP) -c requirements/dev.txt $(TORCH_ARGS) torch
	.venv/bin/python $(PIP) -c requirements/dev.txt -e .
	touch $@

.venv/dev.stamp: .venv/run.stamp
	@echo "Installing the tools for tests and checks into .venv."
	.venv/bin/python $(PIP) -c requirements/dev.txt -e '.[dev]'
	touch $@

.venv/bench.stamp: .venv/run.stamp
	@echo "Installing what the benchmarks measure against into .venv."
	.venv/bin/python $(PIP) -c requirements/dev.txt -e '.[bench]'
	touch $@

.venv/docs.stamp: .venv/run.stamp
	@echo "Installing Sphinx into .venv."
	.venv/bin/python $(PIP) -c requirements/dev.txt -e '.[docs]'
	touch $@

.venv-tl4/dev.stamp: pyproject.toml requirements/tl4.txt
	@echo "Installing torch, TransformerLens 4, this package and the tools into .venv-tl4."
	test -x .venv-tl4/bin/python || $(PYTHON) -m venv .venv-tl4
	.venv-tl4/bin/python $(PIP) -c requirements/tl4.txt $(TORCH_ARGS) torch
	.venv-tl4/bin/python $(PIP) -c requirements/tl4.txt -e '.[dev]'
	touch $@
