# Both targets set themselves up: a virtual environment in .venv, the pinned packages of constraints.txt, boxcov itself.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# processes of the tests, one thread each: the cores of the machine, at most 8
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(8, os.cpu_count() or 1))')

.PHONY: demo test test-slow bench clean

demo: $(INSTALLED)
	$(BIN)/boxcov demo --out demo

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile

test-slow: $(INSTALLED)
	$(BIN)/pytest -m slow tests

bench: $(INSTALLED)
	$(BIN)/python benchmarks/core.py

clean:
	rm -rf .venv demo build dist

# curvlinops and backpack declare torchvision, which has no CPU build: they and the few packages they really use come without dependencies.
$(INSTALLED): pyproject.toml constraints.txt tests/requirements-oracles.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps -r tests/requirements-oracles.txt
	touch $@
