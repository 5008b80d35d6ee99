# Both targets set themselves up: a virtual environment in .venv, the pinned packages of constraints.txt, boxcov itself.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# processes of the tests, one thread each: the cores of the machine, at most 8
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(8, os.cpu_count() or 1))')

WHEEL := .venv/wheel/bin/python

.PHONY: demo test test-slow wheel audit hashes bench clean

demo: $(INSTALLED)
	$(BIN)/boxcov demo --out demo

# the tests run against the wheel, the examples in the docstrings against src/
test: $(INSTALLED) wheel
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(WHEEL) -m pytest -n $(WORKERS) --dist loadfile tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile src

test-slow: $(INSTALLED)
	$(BIN)/pytest -m slow tests

# the wheel in an environment of its own, which has the other packages from .venv: a path in a .pth file, so that the editable boxcov there is not seen
wheel: $(INSTALLED)
	rm -rf dist .venv/wheel
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist .
	$(BIN)/python tools/wheel.py dist/boxcov-*.whl
	$(BIN)/python -m venv --without-pip .venv/wheel
	$(BIN)/python -m pip --python $(WHEEL) install --quiet --disable-pip-version-check --no-deps dist/boxcov-*.whl
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > .venv/packages
	mv .venv/packages "$$($(WHEEL) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages.pth"
	$(WHEEL) tools/wheel.py dist/boxcov-*.whl --installed

# known weaknesses of the pinned packages, for which pip-audit must reach pypi.org, and their licences; make audit AUDIT='-s osv' asks OSV
audit: $(INSTALLED)
	$(BIN)/python tools/licences.py
	test -x .venv/audit/bin/pip-audit || $(BIN)/python -m venv .venv/audit
	.venv/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1
	.venv/audit/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r constraints.txt $(AUDIT)

# build/requirements.txt, with the hash of every file that this platform would install
hashes: $(INSTALLED)
	mkdir -p build
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --dry-run --ignore-installed --report build/report.json -c constraints.txt torch==2.13.0 '.[test]'
	$(BIN)/python tools/hashes.py build/report.json > build/requirements.txt

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
