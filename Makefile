# `make demo` and `make test` set themselves up: packages are installed into .venv once, the demo needs only a few.
PYTHON ?= python3
VENV   ?= .venv
EXTRAS ?= dev,report,art,foolbox,onnx,onnxruntime
# Processes of the tests, for two cores: some tests wait.
JOBS   ?= 3

BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SMALL  := $(VENV)/.installed-demo
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo docs test test-all kernels lint format coverage torture reproduce bench gpu-test wheel check-wheel check-oldest audit-dependencies clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 20

$(SMALL): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "wball needs Python 3.10 or later: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[report]'
	@touch $@

$(STAMP): $(SMALL)
	$(PIP) -e '.[$(EXTRAS)]'
	@touch $@

demo: $(SMALL) ## evaluate two bundled models on bundled digits, write out/demo/report.html (a minute, no download)
	$(BIN)/python -m wball.demo

docs: $(STAMP) ## refresh the tables from results/ and build the documentation into out/site
	$(PIP) -e '.[docs]'
	$(BIN)/python tools/docs/tables.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir out/site

test: $(STAMP) ## style, types, and the tests that take a few seconds each
	@$(MAKE) --no-print-directory -j2 lint kernels
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -q -m "not slow"

test-all: $(STAMP) ## style, types, and all tests
	@$(MAKE) --no-print-directory -j2 lint kernels
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -q

kernels: $(STAMP) ## compile the CPU kernels once for all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m wball info --compile

lint: $(STAMP) ## style, types, layers and size
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/size.py

format: $(STAMP) ## rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

coverage: $(STAMP) ## the tests in one process, with a table of what they reach
	OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest -q
	$(BIN)/coverage report --skip-covered

torture: $(STAMP) ## 100,000 seeded cases of the public API; findings are printed
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m torture --jobs $(JOBS) $(ARGS)

reproduce: $(STAMP) ## recipes of the paper: make reproduce ARGS="mnist-curves --quick"
	$(BIN)/python -m reproduction $(ARGS)

bench: $(STAMP) ## time the public calls into results/calls_<device>.json
	$(BIN)/python -m benchmarks calls $(ARGS)

gpu-test: $(STAMP) ## what needs a GPU, and the kernels' tests there instead of in Triton's interpreter (JOBS=8 compile at once)
	WBALL_TEST_DEVICE=cuda OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -q tests -k "triton or tiles or gpu"

wheel: $(STAMP) ## build sdist and wheel into dist/
	$(BIN)/python -m build --outdir dist .

check-wheel: $(STAMP) ## the same, and try the wheel in an empty environment from another folder
	bash tools/check_wheel.sh $(BIN)/python

check-oldest: $(STAMP) ## types against the oldest supported torch and Python (downloads 60 MB)
	bash tools/check_oldest.sh $(BIN)/python

audit-dependencies: $(STAMP) ## known vulnerabilities of what is installed (asks the network)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(BIN)/python -m pip_audit --skip-editable

clean: ## remove the environment and everything generated
	rm -rf $(VENV) build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
