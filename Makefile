# Sets up a virtual environment in .venv and works in it. A second run starts at once: the stamp files in .venv tell
# what has been installed, and only a change of what they depend on installs again.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

# CMake, Ninja and the tests' programs are those of the virtual environment.
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: help serve test lint compare clean

help: ## show this
	@sed -n 's/^\([a-z]*\):.*## /make \1|/p' Makefile | column -t -s '|'

serve: $(VENV)/.installed ## serve the default model (or MODEL=...) on 127.0.0.1:8000; installs what is needed first
	@exec $(BIN)/headrace serve $(MODEL) $(ARGS)

test: lint ## lint, type check, import rules, and all tests
	$(BIN)/pytest -n 2 --dist loadfile $(ARGS)

lint: $(VENV)/.installed-dev ## what `make test` does, without the tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

compare: $(VENV)/.installed-dev ## Headrace against its peers from PyPI, on this machine; an hour the first time
	$(BIN)/python bench/compare/compare.py --output-json build/compare/compare.json $(ARGS)
	$(BIN)/python bench/compare/served.py --output-json build/compare/served.json

clean: ## remove .venv and everything that was built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests bench -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@python=$$(for name in $(PYTHON) python3.11 python3 python3.12 python3.13 python3.14; do \
	    $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done); \
	if [ -z "$$python" ]; then \
	    echo "error: Headrace needs Python 3.11 or newer; none found (make PYTHON=/path/to/python3)" >&2; exit 1; \
	fi; \
	echo "creating $(VENV) with $$($$python --version)"; \
	$$python -m venv $(VENV)

# No build isolation: CMake's files under build/ stay valid, so that a change of a kernel compiles that kernel only.
define install
	@command -v $${CXX:-c++} >/dev/null || \
	    { echo "error: Headrace compiles its kernels and needs a C++20 compiler, such as g++" >&2; exit 1; }
	@echo "installing $(1) (the first time this takes minutes: torch is large)"
	@$(PIP) install -c constraints.txt scikit-build-core nanobind cmake ninja
	@$(PIP) install -c constraints.txt --no-build-isolation -e '$(1)'
endef

INPUTS := $(BIN)/python pyproject.toml constraints.txt $(wildcard csrc/*)

$(VENV)/.installed: $(INPUTS)
	$(call install,.)
	@touch $@

$(VENV)/.installed-dev: $(INPUTS)
	$(call install,.[dev])
	@touch $(VENV)/.installed $@
