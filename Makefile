# Two commands on a fresh machine do everything, set-up included: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard src tests examples benchmarks)

.PHONY: venv lint format test soak demo bench clean

venv: $(VENV)/.installed

$(VENV)/.requirements: requirements-dev.txt
	@test -n "$(PYTHON)" || { echo "regrow needs Python 3.11 or newer: install it, or run make PYTHON=/path/to/python"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -r requirements-dev.txt
	touch $@

$(VENV)/.installed: $(VENV)/.requirements pyproject.toml
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .
	touch $@

# Examples by themselves: a file there may have the name of one in benchmarks.
lint: venv
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy $(filter-out examples,$(SOURCES))
	$(BIN)/mypy $(filter examples,$(SOURCES))
	$(BIN)/lint-imports

format: venv
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

test: venv
	$(BIN)/python -m pytest -q --durations=10 -m "not soak"

soak: venv
	$(BIN)/python -m pytest -q --durations=10 -m soak

demo: venv
	$(BIN)/regrow demo

bench: venv
	$(BIN)/python benchmarks/recovery.py --quick

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
