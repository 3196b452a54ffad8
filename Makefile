# `make demo` and `make test` do all their own set-up: a virtual environment in .venv, programs in .tools.
# Nothing is installed on the machine itself. PYTHON chooses the interpreter, ARGS goes to the demo or to pytest.

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TOOLS := .tools

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow bench lint bundle figures tools clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## watch a training run die: ARGS="--seed 6 --hold 60" and so on
	@$(BIN)/gradexporter demo $(ARGS)

test: $(VENV)/.dev tools ## all tests but the slow ones
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)

test-slow: $(VENV)/.slow tools ## the slow tests alone
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(ARGS)

bench: $(VENV)/.dev ## what a training step costs with us, and whether it keeps to the targets: ARGS="--quick --model mlp"
	@$(BIN)/python tests/benchmarks $(ARGS)

lint: $(VENV)/.dev ## ruff, mypy, import contracts, generated files up to date
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/gradexporter bundle --check

bundle: $(VENV)/.dev ## rewrite rules, dashboard and metrics table from the catalogue
	$(BIN)/gradexporter bundle

figures: $(VENV)/.dev ## rewrite the README picture from the demo
	$(BIN)/python tools/figures.py

# Prometheus and Alertmanager of this machine's Debian release and of a newer one, Helm 3 and Helm 4.
tools: $(VENV)/.created ## programs that tests run, unpacked into .tools
	@type prometheus promtool prometheus-alertmanager amtool >/dev/null 2>&1 || \
	$(call unpack,base,tools/fetch_prometheus.sh $(TOOLS)/base)
	@$(call unpack,new,tools/fetch_prometheus.sh $(TOOLS)/new forky trixie)
	@$(call unpack,helm3,$(BIN)/python tools/fetch_helm.py 3 $(TOOLS)/helm3)
	@$(call unpack,helm4,$(BIN)/python tools/fetch_helm.py 4 $(TOOLS)/helm4)

# A program that this machine cannot get is a message here and a skipped test later, under CI a failed one.
unpack = test -e $(TOOLS)/$(1)/.done || { $(2) && touch $(TOOLS)/$(1)/.done; } || \
	echo "make tools: .tools/$(1) could not be filled; the tests that need it are skipped" >&2

clean: ## remove everything that these targets made
	rm -rf $(VENV) $(TOOLS) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	{ echo "gradexporter needs Python 3.10 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first and pinned: an open range takes the newest build, which on Linux may be gigabytes of CUDA.
$(VENV)/.demo: pyproject.toml constraints.txt $(VENV)/.created
	$(PIP) install -c constraints.txt torch
	$(PIP) install -q -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.slow: $(VENV)/.dev
	$(PIP) install -q -c constraints.txt -e '.[slow]'
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $@

# DeepSpeed is built by a setup that imports torch, so by the one that is here.
$(VENV)/.slow: $(VENV)/.dev
	$(PIP) install -q -c constraints.txt setuptools wheel ninja
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PIP) install -q -c constraints.txt --no-build-isolation deepspeed
	@touch $@
