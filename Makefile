# `make train` and `make test` work on a fresh machine: they make a virtual environment and install what they need.
#
#   make train ARGS="--steps 100"     more arguments for `minifloat train`
#   make test PYTEST_ARGS="-k linear" more arguments for pytest
#   make test PYTHON=python3.12       another interpreter for a new environment
#   make test VENV=$VIRTUAL_ENV       the environment in use, in place of .venv
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
ARGS ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
HAS_TORCH := import torch; assert torch.__version__ >= '2.11'
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal --durations 15
RESULT = tests/results/$(NOW)

# Where behaviour depends most on PyTorch's version, Python's, or the number of threads.
VERSION_TESTS := $(patsubst %,tests/%.py,test_import nn/test_linear nn/test_inplace test_recompute test_compile \
    convert/test_convert_huggingface optim/test_optim functional/test_etp parallel/test_fsdp \
    functional/test_node parallel/test_fsdp_checkpoint parallel/test_ddp tools/test_train_loop)
python_of = $(shell for python in $(1) $(PYTHON); do $$python -c '' 2>/dev/null && echo $$python && break; done)

.PHONY: help train test docs test-versions install-oldest test-oldest test-newest test-part installed-part test-all \
    mutants lint format clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 20

train: $(VENV)/.installed-train ## train a small model in FP8 and in BF16 and compare them
	$(BIN)/minifloat train --recipe current --against bf16 $(ARGS)

test: lint ## lint, type check, and run the default tests
	$(PYTEST) $(PYTEST_ARGS)

docs: export NO_MKDOCS_2_WARNING = 1 # an advertisement of the theme's successor
docs: $(VENV)/.installed-docs ## build the documentation into site/; a broken link is an error
	$(BIN)/python -m mkdocs build --strict

OLDEST = VENV=.venv-oldest TORCH=torch==2.11.0 THREADS=2 PYTHON=$(call python_of,python3.12)
NEWEST = VENV=.venv-newest TORCH=torch THREADS=3 PYTHON=$(call python_of,python3.13)

test-versions: test-oldest test-newest ## part of the tests with the oldest and the newest PyTorch, other Pythons, more threads
install-oldest: ; $(MAKE) installed-part $(OLDEST)
test-oldest: ; $(MAKE) test-part $(OLDEST)
test-newest: ; $(MAKE) test-part $(NEWEST)

installed-part test-part: HAS_TORCH := assert False  # not an interpreter's own
installed-part: $(VENV)/.installed-test
test-part: installed-part
	$(BIN)/python -c "import platform, torch; print('Python', platform.python_version(), 'PyTorch', torch.__version__)"
	OMP_NUM_THREADS=$(THREADS) $(PYTEST) $(VERSION_TESTS) $(PYTEST_ARGS)

# An empty -m selects all tests; those that need a GPU are skipped where there is none.
test-all: NOW := $(shell date -u +%Y-%m-%dT%H%MZ)
test-all: lint ## the larger set: slow and GPU tests too; the report goes to tests/results/
	mkdir -p tests/results
	{ $(BIN)/python -c "import platform, torch; print('python', platform.python_version(), 'torch', torch.__version__, \
	    'on', torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine())"; \
	  echo "commit $$(git describe --always --dirty 2>/dev/null || echo unknown)"; \
	  $(PYTEST) -q -m "" --junitxml $(RESULT).xml $(PYTEST_ARGS); \
	} 2>&1 | tee $(RESULT).txt

mutants: $(VENV)/.installed-test ## small wrong changes of the package, each of which some test must notice; takes hours
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutate $(ARGS)

lint: $(VENV)/.installed-test ## ruff, mypy, layers of imports, and ASCII in every source file
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	! LC_ALL=C grep -rn --include='*.py' --exclude-dir='.?*' '[^[:print:][:space:]]' .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.installed-test ## let ruff fix and format the sources
	$(BIN)/python -m ruff check --fix
	$(BIN)/python -m ruff format

clean: ## remove build products and caches; the environment stays
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.*' -prune -exec rm -rf {} +

# An interpreter that has a recent torch lends it to the environment: it may be a build for this very machine. Any other
# interpreter gets a sealed environment, which none of its packages can disturb.
$(BIN)/pip:
	$(PYTHON) -m venv $$($(PYTHON) -c "$(HAS_TORCH)" 2>/dev/null && echo --system-site-packages) $(VENV)

# One stamp for each extra; a changed pyproject.toml installs again. Everything in one pip call, so that a conflict shows
# before the large download. Left to itself pip would take the newest torch, hence the pin where there is none.
# Tests import torchtitan's models, which need no datasets, wandb and other things that its trainer wants.
ALONE := torchtitan==0.3.0 spmd_types==0.2.3

$(VENV)/.installed-%: pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --editable ".[$*]" \
	    $$($(BIN)/python -c "$(HAS_TORCH)" 2>/dev/null || echo $(TORCH))
	$(if $(filter test,$*),$(BIN)/python -m pip install --no-deps $(ALONE))
	touch $@
