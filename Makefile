# Everything a fresh machine needs: `make quickstart` and `make test` set themselves up.
#
# The dependencies (11 GB) live in a cache folder keyed by a hash of what pyproject.toml has installed, so
# that a clean clone on the same machine starts in seconds. `.venv` is this clone's own thin environment: it
# sees the cached packages through a .pth file and has the project installed in editable mode.
#
# `make test PYTHON=python3.12` runs everything with another Python: the hash covers its version, and `.venv`
# is made anew when it changes. `make test SGLANG=0.5.17` likewise, with another SGLang; 0.5.20
# and 0.5.23 are the others. 0.5.20 gets an empty cuda-tile; `make surface` is what was run with it.
#
# `make test-slow PYTHON=python3.12 BRIDGE=0.5.0`, or 0.6.2, likewise with another Megatron-Bridge, which needs Python 3.12.

SHELL := /bin/bash
PYTHON ?= python3.11
CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/verl-sglang-sync
SGLANG ?= 0.5.14
BRIDGE ?= 0.3.1
ENVIRONMENT = tests/support/environment.py
# Empty where PYTHON is not there, or cannot have such releases: the reason is on stderr.
KEY := $(shell $(PYTHON) $(ENVIRONMENT) key $(SGLANG) $(BRIDGE))
DEPS := $(CACHE)/$(KEY)
# Newer SGLangs import GPU kernels everywhere; not empty where there is no GPU for them.
STAND_INS = $(if $(wildcard /dev/nvidiactl),,$(filter-out 0.5.14,$(SGLANG)))
RUN = PYTHONDONTWRITEBYTECODE=1 .venv/bin/python
PYTEST_ARGS ?=
# pip warns of every package that an index in the user's own pip configuration lacks, where that index is a folder.
NO_INDEX_WARNINGS = 2> >(grep -v "is ignored: it is neither" >&2)

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-slow fault-storm lint unit surface dist clean

help: ## show the targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*##/\t/' | expand -t 14

setup: .venv/.ready-$(KEY) ## build the environment (once per machine) and this clone's .venv

$(DEPS)/.complete:
	@$(PYTHON) --version > /dev/null || { echo "PYTHON=$(PYTHON): no such Python; name one that is 3.11 or 3.12" >&2; exit 1; }
	@test -n "$(KEY)"
	@mkdir -p $(CACHE)
	@echo "building the dependency cache (about 3 minutes, 11 GB)"
	@flock $(CACHE)/$(KEY).lock bash -euo pipefail -c '\
	  if [ ! -f $(DEPS)/.complete ]; then \
	    rm -rf $(DEPS); $(PYTHON) $(ENVIRONMENT) build $(SGLANG) $(BRIDGE) $(DEPS) $(NO_INDEX_WARNINGS); \
	    touch $(DEPS)/.complete; \
	  fi'

.venv/.ready-$(KEY): $(DEPS)/.complete pyproject.toml
	@rm -rf .venv
	@$(PYTHON) -m venv --without-pip .venv
	@$(DEPS)/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' \
	  > "$$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/dependencies.pth"
	@$(if $(STAND_INS),echo $(CURDIR)/tests/support/cpu_stand_ins \
	  > "$$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/cpu_stand_ins.pth")
	@.venv/bin/python -m pip install -q --no-deps --no-build-isolation -e .
	@touch $@

# mypy takes 1 s with the cache of another clone's run, 25 s without.
lint: setup ## ruff, the rules of plain English and mypy
	$(DEPS)/bin/ruff check .
	$(DEPS)/bin/ruff format --check .
	$(RUN) tools/plain_english.py
	@if [ ! -d .mypy_cache ] && [ -d $(DEPS)/mypy_cache ]; then cp -a $(DEPS)/mypy_cache .mypy_cache; fi
	$(RUN) -m mypy
	@if [ ! -d $(DEPS)/mypy_cache ]; then \
	  cp -a .mypy_cache $(DEPS)/mypy_cache.$$$$ && mv -T $(DEPS)/mypy_cache.$$$$ $(DEPS)/mypy_cache || rm -rf $(DEPS)/mypy_cache.$$$$; \
	fi

unit: setup ## the tests that start no servers
	$(RUN) -m pytest -q -m "not e2e and not gpu" $(PYTEST_ARGS)

surface: setup ## the tests of what we use of verl and SGLang; with VERL=FOLDER of a checkout of verl's repository
	PYTHONPATH=$(VERL) $(RUN) -m pytest -q tests/contract/test_upstream_surface.py tests/contract/test_upstream_behaviour.py $(PYTEST_ARGS)

test: lint ## lint, and the tests, in two lanes (the GPU ones skip with a reason where there is no GPU)
	$(RUN) -m pytest -q -m "not slow" --two-lanes $(PYTEST_ARGS)

test-slow: setup ## the rest: more models, Megatron, broadcasts, faults, two hosts, in two lanes (20 minutes)
	$(RUN) -m pytest -q -m slow --two-lanes $(PYTEST_ARGS)

FAULTS ?= 2000
SEED ?= 1
SECONDS_EACH ?= 1300

fault-storm: setup ## FAULTS=2000 random faults on real engines and trainers, SEED=1 (45 minutes); see docs/reliability.md
	STORM_FAULTS=$(FAULTS) STORM_SEED=$(SEED) STORM_SECONDS=$(SECONDS_EACH) $(RUN) -m pytest -q -s tests/e2e/test_fault_storm.py $(PYTEST_ARGS)

BUILD ?= build/env/bin/pyproject-build --quiet

build/env/bin/pyproject-build:
	@$(PYTHON) -m venv build/env
	@build/env/bin/python -m pip install -q build $(NO_INDEX_WARNINGS)

dist: $(firstword $(BUILD)) ## sdist and wheel in dist/, without the dependencies (seconds)
	@rm -rf dist
	@$(BUILD) --outdir dist .

quickstart: setup ## 2 GRPO steps on the CPU with real verl and SGLang, then proof that the weights arrived
	$(RUN) recipes/quickstart.py

clean: ## remove this clone's environment and outputs (the dependency cache stays)
	rm -rf .venv build dist outputs plugins/*.egg-info
