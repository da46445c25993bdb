# `make demo` and `make test` need nothing but Python: they create .venv themselves.
#
#   PYTHON       the interpreter that .venv is made from
#   CONSTRAINTS  the version pins; `make test CONSTRAINTS=` installs without any (a machine with a GPU)
#   ARGS         passed on to `make demo` and `make bench`

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
LINT := $(MAKE) --no-print-directory lint

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow matrix docs lint format bench clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@echo "==> Creating $(VENV) with $(PYTHON)"
	$(PYTHON) -m venv $(VENV)
	@echo "==> Installing Fusion and its tools into $(VENV) (the first time takes a few minutes)"
	$(BIN)/python -m pip install --progress-bar on $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[dev,demo]'
	@touch $@
	@echo "==> Installed"

demo: $(INSTALLED) ## compile a small model and show what was fused
	@$(BIN)/fusion demo $(ARGS)

lint: $(INSTALLED) ## ruff check, ruff format --check, mypy
	@echo "==> ruff check"
	@$(BIN)/ruff check .
	@echo "==> ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "==> mypy"
	@$(BIN)/mypy

# mypy has one process and would leave a core idle: lint runs beside the tests, and fails the target if it fails.
# A worker keeps the tests of a file together, where they share what is compiled, and takes others' when it has none left.
# Triton's interpreter has to be chosen before Triton is imported, hence a process of its own.
# Workers and the processes that tests start load bytecode, also where the environment asks Python to write none.
test test-slow: export PYTHONDONTWRITEBYTECODE =
test: $(INSTALLED) ## lint, and the tests but for the slow ones (those that need a GPU are skipped without one)
	@$(LINT) & lint=$$!; failed=0; \
	echo "==> pytest"; \
	$(BIN)/python -m pytest tests --ignore=tests/interpreter -n 2 --dist worksteal -m "not slow" || failed=1; \
	echo "==> pytest under Triton's interpreter"; \
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/interpreter -n 2 --dist worksteal -m "not slow" || failed=1; \
	wait $$lint || { echo "==> lint failed, see above"; failed=1; }; \
	exit $$failed

test-slow: $(INSTALLED) ## the slow tests: more cases, more architectures, and their kernels compiled for a GPU
	@failed=0; \
	$(BIN)/python -m pytest tests --ignore=tests/interpreter -n 2 --dist worksteal -m slow || failed=1; \
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/interpreter -n 2 --dist worksteal -m slow || failed=1; \
	exit $$failed

matrix: $(INSTALLED) ## install the wheel with each Python and PyTorch that is there, and use it
	@$(BIN)/python tests/matrix.py $(ARGS)

docs: $(INSTALLED) ## build the documentation into build/site; fails on a link that leads nowhere
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "==> open build/site/index.html"

format: $(INSTALLED) ## sort imports, apply safe fixes, format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(INSTALLED) ## run the benchmarks
	@$(BIN)/python -m benchmarks $(ARGS)

clean: ## remove .venv and everything else that was generated
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
