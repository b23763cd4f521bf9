# Everything runs in .venv, made here from pyproject.toml.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: dev demo test bench up down clean

dev: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed, this is " + sys.version.split()[0] + "; run `make PYTHON=python3.12 ...`")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[spark,demo,bench,dev]'
	@touch $(STAMP)

demo: dev
	$(BIN)/python -m rocketlet.demo $(ARGS)

test: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(ARGS)

bench: dev
	$(BIN)/python -m bench $(ARGS)

up:
	docker compose up --build --detach
	@echo 'name server: localhost:9876; watch with `docker compose logs -f consumer spark`'

down:
	docker compose down --volumes

clean:
	rm -rf .venv build dist demo-output .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
