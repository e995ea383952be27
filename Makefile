# Two commands: `make demo` and `make test`. Both need Python 3.11+ with pip and nothing else.
PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed-pyproject.toml

# One thread per test process: WORKERS processes already fill the cores. The compiler gets no pool of its own, and its
# cache stays in the checkout, so that a second run reuses what the first one compiled.
TEST_ENV := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/.cache/torchinductor

.PHONY: help setup test demo lint format bench clean

help:
	@echo "make demo    install into $(VENV) and show the library at work"
	@echo "make test    install into $(VENV) and run the tests (WORKERS=$(WORKERS), ARGS='-k name')"
	@echo "make lint    ruff and mypy        make format   apply ruff's formatting"
	@echo "make bench   geometry against its rivals"
	@echo "make setup   only install         make clean    remove caches and builds (keeps $(VENV))"

# Instant when pyproject.toml is the one that was installed: contents are compared, not dates.
setup:
	@cmp -s pyproject.toml $(STAMP) || $(MAKE) --no-print-directory $(VENV)-install

.PHONY: $(VENV)-install
$(VENV)-install:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
		{ echo "hyptree needs Python 3.11 or newer, $(PYTHON) is older: make setup PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -e ".[test]"
	@$(BIN)/python -c "import torch, torchvision; torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)" 2>/dev/null || \
		{ echo "torch and torchvision in $(VENV) come from different builds: rm -r $(VENV), then \`env -u PIP_FIND_LINKS" \
		"-u PIP_EXTRA_INDEX_URL make setup\` so that both come from one index" >&2; exit 1; }
	@cp pyproject.toml $(STAMP)

test: setup
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

demo: setup
	$(BIN)/hyptree demo $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/hyptree bench geometry $(ARGS)

clean:
	rm -rf build dist .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
