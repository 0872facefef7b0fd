# Everything a newcomer needs is `make demo` and `make test`: both make .venv and install on first use,
# and neither installs again while pyproject.toml stays as it is.

PYTHON ?= python3
TORCH ?= 2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet

.PHONY: help demo test quick check compat bench bench-quick docs page browser clean

help:                     ## show the commands
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile

# torch comes first and exactly: any looser wording pulls a build with gigabytes of CUDA.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install "torch==$(TORCH)"
	@touch $@

# Installing compiles the native kernels; hatch_build.py in place is what a change of the C files needs.
KERNELS := hatch_build.py $(wildcard src/gradgate/_native/*.[ch])

$(VENV)/.demo: $(VENV)/.torch pyproject.toml $(KERNELS)
	$(PIP) install --editable ".[demo]"
	@touch $@

$(VENV)/.dev: $(VENV)/.demo pyproject.toml
	$(PIP) install --editable ".[dev]"
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(PIP) install --editable ".[docs]"
	@touch $@

# torch is named again, so that no framework brings another one.
$(VENV)/.frameworks: $(VENV)/.dev
	$(PIP) install "torch==$(TORCH)" --editable ".[frameworks]"
	@touch $@

demo: $(VENV)/.demo       ## why this library exists, on real data, in under two minutes
	$(BIN)/gradgate demo

check: $(VENV)/.dev       ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

quick: check              ## static checks, and the tests that are neither slow nor distributed nor in a browser
	$(BIN)/python -m pytest --numprocesses 2 -m "not slow and not distributed and not browser"

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
