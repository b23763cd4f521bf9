# Everything runs in .venv, made here from pyproject.toml.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
MODULE := .venv/module
# A test that fails beside others is tried once more; the summary names it under RERUN, for it is a defect all the same.
SIDE_BY_SIDE := -n auto --dist loadscope --no-loadscope-reorder --reruns 1
# What the compiled module does is also tested in Python, in one process beside the other tests.
WIRE_TESTS := $(filter-out %/test_bodies.py %/test_http2.py %/test_filters.py %/test_lite_topics.py, \
	$(wildcard tests/protocol/test_*.py tests/broker/messages/test_*.py tests/broker/remoting/test_*.py))
# Some environments forbid bytecode. Tests start hundreds of processes, and each would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help dev fmt lint types test cover docs demo bench dist image up down clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo '  ARGS="..." passes options on: make test ARGS="tests/client -k retry"'

dev: $(MODULE) ## make .venv with all extras, and this package in it; build the compiled module if there is a compiler

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed, this is " + sys.version.split()[0] + "; run `make PYTHON=python3.12 ...`")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	ROCKETLET_PURE=1 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[spark,demo,bench,docs,dev]'
	$(BIN)/python -m compileall -q -j 0 .venv/lib || true # pip would use one core
	@touch $(STAMP)

$(MODULE): $(STAMP) setup.py protocol/_fast.pyx protocol/crc32.h
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $(MODULE)

fmt: dev ## format the code and fix what the linter can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: .style ## check style, format and names, and the length of the lines of documents
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/test_names.py tests/docs/test_site.py -k 'names or too_long'

types: $(STAMP) ## check types, strictly
	$(BIN)/mypy

test: .style ## lint, types and all tests, side by side, those of the wire without the compiled module, too: what CI runs
	@$(MAKE) --no-print-directory --jobs 3 types .tests $(if $(ARGS),,.pure-tests)

.tests: dev $(if $(ARGS),,tests/__pycache__)
	$(BIN)/python -m pytest $(or $(ARGS),$(SIDE_BY_SIDE))

# In a new clone each worker would compile all tests, for a minute of processor time together.
tests/__pycache__: | dev
	@$(BIN)/python -m pytest --collect-only --quiet > /dev/null || true

.pure-tests: dev
	ROCKETLET_PURE=1 $(BIN)/python -m pytest --quiet --reruns 1 -p no:cacheprovider $(WIRE_TESTS)

cover: dev ## measure which lines the tests reach (without Java, Go and Spark)
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -m 'not java and not go and not spark and not pyright' $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

docs: .docs/installed ## build the site of the docs into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 .docs/bin/mkdocs build --strict

.docs/installed: pyproject.toml
	$(PYTHON) -m venv .docs
	.docs/bin/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	npm install --silent --no-save --prefix .docs 'mermaid@>=11 <12' || echo 'npm is missing: diagrams are shown as text'
	@touch .docs/installed

demo: dev ## a year of flights through two brokers, four consumers and two Spark queries
	$(BIN)/python -m rocketlet.demo $(ARGS)

bench: dev ## measure beside Apache RocketMQ and JetStream
	$(BIN)/python -m bench $(ARGS)

dist: dev ## build the wheel and the source distribution into dist/
	$(BIN)/python -m build

image: ## build the images: rocketlet, and rocketlet-spark
	docker build --tag rocketlet .
	docker build --tag rocketlet-spark --target spark .

up: ## run a cluster, a producer, consumers and Spark in Docker
	docker compose up --build --detach
	@echo 'name server: localhost:9876; watch with `docker compose logs -f consumer spark`'

down: ## stop them and delete their data
	docker compose down --volumes

clean: ## delete .venv and everything that was built
	rm -rf .venv build dist protocol/_fast.c protocol/_fast.*.so site demo-output htmlcov .coverage* .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
