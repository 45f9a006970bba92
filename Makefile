# Two commands on a fresh machine do everything, set-up included: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := $(sort $(wildcard packages/*))
SOURCES := $(wildcard packages/*/src packages/*/tests) $(wildcard conftest.py tests examples benchmarks website releases)
empty :=
space := $(empty) $(empty)
IMPORTED := $(subst $(space),:,$(foreach package,$(PACKAGES),$(CURDIR)/$(package)/src))

.PHONY: venv lint format test soak demo bench clean test-all test-rest test-times test-torch test-gpu test-vllm peers test-ray

venv: $(VENV)/.installed

$(VENV)/.requirements: requirements-dev.txt
	@test -n "$(PYTHON)" || { echo "regrow needs Python 3.11 or newer: install it, or run make PYTHON=/path/to/python"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	test -z "$(LOCKED)" || $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --require-hashes --no-deps -r requirements-dev.lock
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -r requirements-dev.txt
	touch $@

$(VENV)/.installed: $(VENV)/.requirements $(wildcard packages/*/pyproject.toml)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation $(addprefix -e ,$(addprefix ./,$(PACKAGES)))
	touch $@

# Examples by themselves: a file there may have the name of one in benchmarks.
lint: venv
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy $(filter-out examples,$(SOURCES))
	$(BIN)/mypy $(filter examples,$(SOURCES))
	$(BIN)/lint-imports
	@for package in $(PACKAGES); do printf '%-16s %6d lines\n' "$${package#packages/}" "$$(find $$package/src -name '*.py' -exec cat {} + | wc -l)"; done

format: venv
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

# Processes of tests import the same modules again and again: what they compile is kept, whatever the shell says.
export PYTHONDONTWRITEBYTECODE :=

# Test jobs wait much: three at a time left a quarter of two cores idle. docs/tests.md has what four take.
PYTEST := $(BIN)/python -m pytest -q --durations=10 -n 4 --dist loadfile --no-loadscope-reorder

# Each seam and each stage of a fault once.
test: venv
	$(PYTEST) -m "not full and not soak"

test-all: venv
	$(PYTEST) -m "not soak"

# The rest of the full matrix, in an order drawn from ORDER, as much as begins before UNTIL (seconds since the epoch).
ORDER ?= none
UNTIL ?= 1e12
test-rest: venv
	$(PYTEST) -m "full and not soak" --order $(ORDER) --until $(UNTIL) $$($(BIN)/python -m tests.tiers)

# Groups, FSDP2, pipelines, and kills in DDP and HSDP, under another torch: make test-torch OTHER=/path/to/python; see docs/torch-versions.md.
TORCH_TESTS := tests/unit/comm/test_comm_expected_names.py tests/unit/comm/test_fsdp_reset.py tests/process/test_comm_misuse.py \
	tests/process/test_comm_collectives.py tests/process/test_comm_parallel.py tests/process/test_kills.py tests/process/test_parallel_kills.py
test-torch:
	PYTHONPATH=$(IMPORTED) $(OTHER) -m pytest -q $(TORCH_TESTS) -m "not soak and not full" \
		-k "torch_names or comm or fsdp or every_stage"

# On one NVIDIA GPU, which the ranks share: make test-gpu OTHER=/path/to/python; see docs/cuda.md.
GPU_TESTS := tests/gpu tests/process/test_comm_parallel.py tests/process/test_kills.py tests/process/test_parallel_kills.py
SHARED_GPU := NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=1 CUBLAS_WORKSPACE_CONFIG=:4096:8
test-gpu:
	REGROW_TEST_DEVICE=cuda $(SHARED_GPU) PYTHONPATH=$(IMPORTED):$(PYTHONPATH) $(OTHER) -m pytest -q --durations=10 -n 5 --dist load \
		$(GPU_TESTS) -m "not soak" -k "$(GPU_CASES)"
GPU_CASES := gpu or comm_parallel or one_after_another and 1 or recovery and hydrate or stopped or at_every_stage or copies and fsdp2-1

# The penalty and batches in a real vLLM, in an environment of their own (3.5 GB): see docs/inference.md.
VLLM := build/vllm/venv
build/vllm/.installed: tests/vllm/requirements.txt tests/vllm/environment.sh
	mkdir -p build/vllm
	tests/vllm/environment.sh $(PYTHON) $(VLLM) $(addprefix ./,$(PACKAGES))
	touch $@
test-vllm: build/vllm/.installed
	PYTHONPATH=$(CURDIR) $(VLLM)/bin/python -m pytest -q --durations=15 --confcutdir=tests/vllm tests/vllm \
		packages/lz-penalty/tests/test_infer_lz_kernels.py

# Jobs on a local cluster of Ray, in an environment on top of .venv (0.3 GB more): see docs/guests.md.
RAY := build/ray/venv
build/ray/.installed: $(VENV)/.installed tests/ray/requirements.txt tests/ray/environment.sh
	mkdir -p build/ray
	tests/ray/environment.sh $(BIN)/python $(RAY) $(VENV)
	touch $@
test-ray: build/ray/.installed
	PYTHONPATH=$(CURDIR) $(RAY)/bin/python -m pytest -q --durations=5 tests/ray

# Runs everything once, and writes down how long each file took.
test-times: venv
	$(PYTEST) -m "not soak" --junitxml=build/tests.xml
	$(BIN)/python -m tests.durations build/tests.xml docs/tests.md

# The documentation as a site, in build/docs/html: its tools in an environment of their own. Once these are there it needs no network.
.PHONY: docs docs-serve dist
DOCS := build/docs
$(DOCS)/venv/.installed: website/requirements.txt
	test -x $(DOCS)/venv/bin/python || $(PYTHON) -m venv $(DOCS)/venv
	$(DOCS)/venv/bin/python -m pip install --disable-pip-version-check --progress-bar off --require-hashes -r website/requirements.txt
	touch $@
docs: venv $(DOCS)/venv/.installed
	$(BIN)/python -m website.assemble $(DOCS)
	cd $(DOCS) && PATH="$(CURDIR)/$(DOCS)/venv/bin:$$PATH" NO_MKDOCS_2_WARNING=1 venv/bin/mkdocs build --strict

# With the search, which a browser refuses to pages that it opens as files.
docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory $(DOCS)/html 8000

# Wheels and source distributions of all packages in dist/, checked, installed into empty environments, and tried there.
RELEASES := build/releases
$(RELEASES)/.installed: releases/requirements.txt
	test -x $(RELEASES)/bin/python || $(PYTHON) -m venv $(RELEASES)
	$(RELEASES)/bin/python -m pip install --disable-pip-version-check --progress-bar off --require-hashes -r releases/requirements.txt
	touch $@
dist: venv $(RELEASES)/.installed
	rm -rf dist
	for package in $(PACKAGES); do (cd $$package && $(CURDIR)/$(BIN)/python -m hatchling build -d $(CURDIR)/dist) || exit 1; done
	$(RELEASES)/bin/python -m twine check --strict dist/*
	$(BIN)/python -m releases.check dist $(BIN)/python

soak: venv
	$(BIN)/python -m pytest -q --durations=10 -m soak

demo: venv
	$(BIN)/regrow demo

bench: venv
	$(BIN)/python benchmarks/recovery.py --quick

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment of benchmarks/peers.py (6 GB: its torch comes with CUDA), in which regrow runs from this tree.
PEERS := build/peers/venv
peers: benchmarks/peers-requirements.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --disable-pip-version-check --progress-bar off -r benchmarks/peers-requirements.txt
	echo $(CURDIR)/packages/regrow/src > $$($(PEERS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/regrow.pth
