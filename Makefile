# Everything a newcomer needs is `make demo` and `make test`: both make .venv and install on first use,
# and neither installs again while pyproject.toml stays as it is.

PYTHON ?= python3
TORCH ?= 2.13.0
VENV := .venv
BIN := $(VENV)/bin
# Not quiet: an installation that says nothing for minutes looks like one that hangs. uv is faster, where it is there.
INSTALL := $(if $(shell command -v uv),uv pip install --compile-bytecode --python $(BIN)/python,$(BIN)/pip --disable-pip-version-check install)

.PHONY: help hello demo test quick sample check compat bench bench-quick docs page browser clean

help:                     ## show the commands
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch comes first and exactly: any looser wording pulls a build with gigabytes of CUDA.
$(VENV)/.torch: | $(BIN)/python
	$(INSTALL) "torch==$(TORCH)"
	@touch $@

# Installing compiles the native kernels; hatch_build.py in place is what a change of the C files needs.
KERNELS := hatch_build.py $(wildcard src/gradgate/_native/*.[ch])

$(VENV)/.demo: $(VENV)/.torch pyproject.toml $(KERNELS)
	$(INSTALL) --editable ".[demo]"
	@touch $@

$(VENV)/.dev: $(VENV)/.demo pyproject.toml
	$(INSTALL) --editable ".[dev]"
	@touch $@

# The site is built from the sources alone: neither torch nor the package is installed for it.
DOCS = import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	$(INSTALL) $$($(BIN)/python -c '$(DOCS)')
	@touch $@

# torch is named again, so that no framework brings another one.
$(VENV)/.frameworks: $(VENV)/.dev
	$(INSTALL) "torch==$(TORCH)" --editable ".[frameworks]"
	@touch $@

hello:
	@echo "Handwritten digits, some of them broken: one network trained in four ways, side by side. Under two minutes."
	@test -e $(VENV)/.demo || echo "Before that, once: $(VENV) is made and torch is installed. That takes as long as its download."

demo: hello $(VENV)/.demo ## why this library exists, on real data, in under two minutes
	$(BIN)/gradgate demo

check: $(VENV)/.dev       ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

quick: $(VENV)/.dev       ## static checks, and a sample of the tests that are not slow, distributed or in a browser
	$(MAKE) --no-print-directory --jobs 2 check sample

sample:
	$(BIN)/python -m pytest --numprocesses 2 --quick

test: check docs $(VENV)/.frameworks ## everything that must pass
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# The same targets with another environment: make compat TORCH=2.15.0 PYTHON=python3.13
OTHER := .venv-torch$(TORCH)-$(notdir $(PYTHON))

compat:                   ## the tests on another torch or Python, and a row in docs/compatibility.md
	$(MAKE) --no-print-directory VENV=$(OTHER) $(OTHER)/.dev
	$(OTHER)/bin/python -m tests.compat $(TESTS)

bench: $(VENV)/.dev       ## every benchmark, its goal, and benchmarks/results.md
	$(BIN)/python -m benchmarks --write
	$(BIN)/python -m benchmarks.cited

bench-quick: $(VENV)/.dev ## the same with few rounds: a first look, with more noise
	$(BIN)/python -m benchmarks --quick --write
	$(BIN)/python -m benchmarks.cited

docs: $(VENV)/.docs       ## the documentation, strictly
	$(BIN)/zensical build --strict

page:                     ## the page of `gradgate report`, from web/ into the package (needs node and npm)
	cd web && npm ci --no-audit --no-fund && npm run check && npm run build

browser:                  ## chromium for the tests of the page, where it can be installed
	.ci/browser

clean:                    ## remove what was built, and the environment
	rm -rf $(VENV) .venv-torch* site web/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis
