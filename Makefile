# On a fresh clone: `make demo` or `make test`. Each sets up the environment first.
PYTHON ?= python3
BIN := .venv/bin
TORCH := torch==2.13.0
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -rs
# torch cannot trace the checks of shapes, with which all other tests run.
COMPILED := $(PYTEST) --no-shape-checks tests/laws/test_compilation.py
# pip does not compile the modules, of which most are never imported; Python compiles the others once,
# unless this variable forbids it: then every process of every test would compile them again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-long test-slow quick lint docs lock clean

demo: .venv/ready
	$(BIN)/gigamask demo

# Two processes of one thread each.
test: .venv/ready
	$(PYTEST) --durations 15 -m "not long"
	$(COMPILED) -m "not long"

test-long: .venv/ready
	$(PYTEST) --durations 15 -m "long and not exhaustive" --no-shape-checks

test-slow: test-long
	$(PYTEST) --durations 15 -m exhaustive --no-shape-checks
	tests/other_machines.sh
	tests/versions.sh oldest .venv/oldest
	tests/versions.sh newest .venv/newest

quick: .venv/ready
	$(PYTEST) -m "not slow and not long" --no-shape-checks tests/unit tests/plugins/*/unit tests/laws/test_code_rules.py

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

docs: .venv/ready
	$(BIN)/mkdocs build --strict

# Lock the newest versions of everything that `make demo` and `make test` install, torch aside; and, with
# hashes, of what the core needs.
lock: .venv/ready
	$(BIN)/pip install -q uv
	echo '$(TORCH)' > .venv/torch.txt
	echo '# Made by `make lock`: what the tests run with, on each platform and Python. torch is chosen in the Makefile.' > .venv/lock.txt
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --no-annotate --no-header \
		--constraint .venv/torch.txt --extra dev pyproject.toml >> .venv/lock.txt
	mv .venv/lock.txt constraints.txt
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --no-annotate --no-header --generate-hashes \
		--constraint constraints.txt pyproject.toml --output-file requirements.lock

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --no-compile -c constraints.txt setuptools
	$(BIN)/pip install -q --no-compile --no-build-isolation -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv runs site
