# Two commands: `make demo` and `make test`. Both need Python 3.11+ with pip and nothing else.
PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
# An index that has torch and torchvision, for a new $(VENV): https://download.pytorch.org/whl/cpu has them without CUDA.
TORCH_INDEX ?=
# The versions that are tested, and so installed; /dev/null for the newest of everything.
CONSTRAINTS ?= constraints.txt
BIN     := $(VENV)/bin
# pip builds hyptree itself under the same constraints; which of the two names it reads depends on its version.
PIP     := PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS) $(BIN)/python -m pip

# One thread per test process: WORKERS processes already fill the cores. The compiler gets no pool of its own, and its
# cache stays in the checkout, so that a second run reuses what the first one compiled.
TEST_ENV := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/.cache/torchinductor

.PHONY: help setup demo test test-oldest test-newest lint format docs bench refresh clean
.NOTPARALLEL:

help:
	@echo "make demo    install into $(VENV) what hyptree needs and show the library at work"
	@echo "make test    install into $(VENV) and run the tests (WORKERS=$(WORKERS), ARGS='-k name')"
	@echo "make lint    ruff and mypy        make format   apply ruff's formatting"
	@echo "make docs    the site, in site/   make bench    geometry against its rivals"
	@echo "make setup   only install         make clean    remove caches and builds (keeps $(VENV))"
	@echo "make test-oldest, test-newest     the tests with the oldest versions that pyproject.toml allows, with the newest"
	@echo "make refresh                      pin the newest versions in constraints.txt (with the oldest Python)"
	@echo "New $(VENV) without CUDA:         make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu"

setup: install-test

# What is installed for what. Instant when it was installed from the same two files: contents are compared, not dates.
WHAT_demo := .
WHAT_test := .[test]
WHAT_docs := .[docs]
install-%:
	@cat pyproject.toml $(CONSTRAINTS) | cmp -s - $(VENV)/.installed-$* || $(MAKE) --no-print-directory $(VENV)-$*

$(VENV)-%:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
		{ echo "hyptree needs Python 3.11 or newer, $(PYTHON) is older: make setup PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(PIP) install --no-deps --index-url $(TORCH_INDEX) torch torchvision)
	$(PIP) install -e "$(WHAT_$*)"
	@$(BIN)/python -c "import torch, torchvision; torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)" 2>/dev/null || \
		{ echo "torch and torchvision in $(VENV) come from different builds: rm -r $(VENV), then \`env -u PIP_FIND_LINKS" \
		"-u PIP_EXTRA_INDEX_URL make setup\` so that both come from one index" >&2; exit 1; }
	@cat pyproject.toml $(CONSTRAINTS) | tee $(if $(filter test,$*),$(VENV)/.installed-demo) > $(VENV)/.installed-$*

demo: install-demo
	$(BIN)/hyptree demo $(ARGS)

test: setup
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-newest:
	rm -rf .cache/newest
	$(MAKE) test VENV=.cache/newest CONSTRAINTS=/dev/null

# The lower bounds of pyproject.toml as constraints.
test-oldest:
	@mkdir -p .cache
	grep -oE '"[A-Za-z0-9_-]+(\[[a-z]+\])?>=[0-9.]+"' pyproject.toml | sed -E 's/"|\[.*\]//g; s/>=/==/' | sort -u > .cache/oldest.txt
	$(MAKE) test VENV=.cache/oldest CONSTRAINTS=.cache/oldest.txt

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install-docs
	$(BIN)/mkdocs build --strict $(ARGS)

bench: setup
	$(BIN)/hyptree bench geometry $(ARGS)

refresh:
	rm -rf .cache/newest
	$(MAKE) setup VENV=.cache/newest CONSTRAINTS=/dev/null WHAT_test='.[dev,onnx,parquet]'
	.cache/newest/bin/python -m pip freeze --all --exclude pip --exclude-editable | sed 's/+.*//' > constraints.txt
	rm -rf .cache/newest

clean:
	rm -rf build dist site .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
