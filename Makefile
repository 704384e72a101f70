# `make demo` and `make test` require only Python 3.11 or newer; the rest is installed on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TRITON := $(VENV)/.triton
RAY := $(VENV)/.ray
# One more than the cores that the tests are meant for: many wait for other processes.
JOBS ?= 3
SUPPORTED := import sys; sys.exit(sys.version_info < (3, 11))

PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup
# These run models, or compile on first use.
HEAVY := $(foreach name,assets decoding engine workers,tests/unit/$(name) tests/property/$(name))

.PHONY: demo test test-fast test-full test-ray lint format types imports proto gpu-check image-check bench assets clean
.DELETE_ON_ERROR:

$(STAMP): pyproject.toml constraints.txt
	@test ! -x $(BIN)/python || $(BIN)/python -c '$(SUPPORTED)' || { \
		echo "$(VENV) is of a Python older than 3.11: remove it, or give VENV=another" >&2; exit 1; }
	@# A failed attempt may have left an environment without pip.
	@$(BIN)/python -c 'import pip' 2>/dev/null || { \
		$(PYTHON) -c '$(SUPPORTED)' || { \
			echo "Python 3.11 or newer is needed: make PYTHON=python3.12" >&2; exit 1; }; \
		echo "==> making the virtual environment in $(VENV) (first use only)"; \
		$(PYTHON) -m venv $(VENV); }
	@echo "==> installing pinned dependencies (torch first; some minutes on a slow line)"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

# A torch with CUDA has its own Triton, and tests its kernels with that.
$(TRITON): $(STAMP)
	@$(BIN)/python -c 'import triton' 2>/dev/null || \
		$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cuda-test]'
	@touch $(TRITON)

$(RAY): $(STAMP)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	@touch $(RAY)

demo: $(STAMP)  ## stream one completion and show where the time went
	@$(BIN)/paceline demo

# Which tests a tier has: the markers in pyproject.toml, and tests/README.md.
test: lint types imports $(STAMP)  ## lint, types, import rules and all regular tests
	$(PYTEST) -m "not full and not ray"

test-fast: $(STAMP)  ## tests without compiled code, models or other processes: a minute or two
	$(PYTEST) -m "not full and not slow" $(addprefix --ignore=,$(HEAVY)) tests/unit tests/property

test-full: $(TRITON) test  ## `test`, then long matrices, long faults and heavy runs
	$(PYTEST) -m full

# In one process: all of it shares one cluster.
test-ray: $(RAY)  ## Ray Serve on a cluster of several nodes on this machine: some minutes
	$(BIN)/python -m pytest -m ray tests/ray

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

proto: $(STAMP)  ## generate the stubs in paceline/v1 from proto/
	$(BIN)/python -m tools.generate_proto

gpu-check: $(STAMP)  ## check and time a CUDA device in eight minutes; GPU_CHECK='--only noise' passes options
	@$(BIN)/python -m tools.gpu_check $(GPU_CHECK)

image-check: $(STAMP)  ## build deploy/Dockerfile without a container engine and run its demo (root; buildah, debootstrap)
	@$(BIN)/python -m tools.image_check $(IMAGE_CHECK)

bench: $(STAMP)  ## compare with plain decoding and transformers (an hour or more)
	$(BIN)/paceline bench

assets: $(STAMP)  ## retrain the embedded pair (several hours on two cores)
	$(BIN)/python -m paceline.assets.training all

clean:
	rm -rf $(VENV) build
