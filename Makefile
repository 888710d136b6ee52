# make tune       install, then tune the quickstart suite on the GPU if torch sees one, else on the CPU
# make test       install, then run every check that needs no GPU: what CI runs
# make test-gpu   install, then the tests of this machine's GPU, those that want it to themselves last
# make sanitize   install, then kernels of ours on this machine's GPU under compute-sanitizer
#
# All work on a fresh clone. PYTHON picks the interpreter, ARGS goes to `tilewright tune`,
# or to tests/gpu/sanitize.py.

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3,$(shell command -v $(p) 2>/dev/null)))
PIP := $(BIN)/python -m pip --disable-pip-version-check install $(if $(CI),--quiet)
PYTEST_WORKERS ?= 2
GPU_WORKERS ?= 8

.PHONY: tune test test-gpu sanitize check format compiler

tune: $(VENV)/requirements.stamp compiler
	$(BIN)/tilewright tune --suite quickstart $(ARGS)

test: check
	$(BIN)/pytest -m "not gpu" -n $(PYTEST_WORKERS)

test-gpu: $(VENV)/requirements-dev.stamp
	$(BIN)/pytest tests/gpu tests/conformance -m "gpu and not alone" -n $(GPU_WORKERS)
	$(BIN)/pytest tests/gpu tests/conformance -m "gpu and alone"

sanitize: $(VENV)/requirements-dev.stamp
	$(BIN)/python tests/gpu/sanitize.py $(ARGS)

check: $(VENV)/requirements-dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/requirements-dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no python3 found: install Python 3.11 or 3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || { \
	  echo "$(PYTHON) is not Python 3.11 or 3.12: run make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# A stamp is newer than the pinned list it was installed from, so pip runs only when a list changes.
$(VENV)/requirements.stamp: requirements.txt pyproject.toml | $(BIN)/python
	@echo "installing requirements.txt into $(VENV) (torch is 0.2 GB for a CPU, 3 GB with CUDA)"
	$(PIP) -r requirements.txt
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/requirements-dev.stamp: requirements-dev.txt $(VENV)/requirements.stamp
	$(PIP) -r requirements-dev.txt
	touch $@

compiler:
	@command -v g++ >/dev/null || command -v clang++ >/dev/null || test -n "$$TILEWRIGHT_CXX" || \
	  echo "no C++ compiler: CPU kernels cannot be generated and PyTorch's own run instead;" \
	       "on Debian: apt-get install g++" >&2
