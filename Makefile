# On a fresh clone: `make demo` or `make test`. Each sets up the environment first.
PYTHON ?= python3
BIN := .venv/bin
# `make test` runs two processes of one thread each. pip does not compile the modules, of which most
# are never imported; Python compiles the others.

.PHONY: demo test quick lint docs clean

demo: .venv/ready
	$(BIN)/gigamask demo

test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal --durations 15 tests/unit tests/parity tests/device
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal --durations 15 --no-shape-checks tests/laws tests/journeys

quick: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not slow" --no-shape-checks

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

docs: .venv/ready
	$(BIN)/mkdocs build --strict

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --no-compile -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv runs site
