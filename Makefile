# Every target sets up .venv with the pinned packages of constraints.txt and boxcov itself.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# test processes, the number of cores, at most 8; and the threads of each
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(8, os.cpu_count() or 1))')
THREADS ?= 1
WHEEL := .venv/wheel/bin/python
ADAPTERS := .venv/adapters
# where torchvision finds libraries, and Ultralytics its settings
ADAPTERS_ENV := LD_LIBRARY_PATH=$(CURDIR)/$(ADAPTERS)/cuda YOLO_CONFIG_DIR=$(CURDIR)/$(ADAPTERS) \
	YOLO_OFFLINE=true YOLO_AUTOINSTALL=false

.PHONY: demo test lint docs results pictures notebook walks small-posterior test-slow test-adapters test-upstream wheel release audit hashes bench clean

demo: $(INSTALLED)
	$(BIN)/boxcov demo --out demo

# the tests, and the examples in the docstrings, run against the wheel
test: $(INSTALLED)
	$(MAKE) -j 2 lint docs wheel
	OMP_NUM_THREADS=$(THREADS) $(WHEEL) -m pytest -n $(WORKERS) --dist loadfile tests --pyargs boxcov

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell .

# the documentation site in build/site; needs no network
docs: $(INSTALLED)
	$(BIN)/python tools/results.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# write the tables of the documentation from docs/results/data/*.json
results: $(INSTALLED)
	$(BIN)/python tools/results.py

# draw the pictures of README and documentation; screenshots need Chromium
pictures: $(INSTALLED) demo
	$(BIN)/python tools/pictures.py

# run the notebook and store its outputs
notebook: $(INSTALLED)
	$(BIN)/python tools/notebook.py

# measure which files typical calls enter, and write them to docs/concepts/architecture.md
walks: $(INSTALLED)
	$(BIN)/python tools/walk.py

# build/small-posterior.safetensors: posterior and error model of `small`, as in the package; six
# minutes on one core
small-posterior: $(INSTALLED)
	mkdir -p build
	$(BIN)/boxcov fit --detector centerpoint:small --data simulated:clear --count 100 \
		--n-data 3500 --compress 0.01 --out build/posterior.safetensors --force
	$(BIN)/boxcov calibrate --posterior build/posterior.safetensors --data simulated:clear \
		--count 300 --copies 0 --out build/small-posterior.safetensors --force

# kills, damaged files, mutants and long runs; build/test-slow.xml has the outcome and the seconds
# of each
test-slow: $(INSTALLED)
	OMP_NUM_THREADS=$(THREADS) $(BIN)/pytest -n $(WORKERS) --dist worksteal --durations 40 --junitxml build/test-slow.xml -m slow tests

# the adapters of other libraries, with torchvision, Ultralytics, pyarrow, supervision and rerun
test-adapters: $(ADAPTERS)/.installed
	$(ADAPTERS_ENV) $(ADAPTERS)/bin/python tests/environments/cuda_stubs.py $(ADAPTERS)/cuda
	$(ADAPTERS_ENV) OMP_NUM_THREADS=$(THREADS) $(ADAPTERS)/bin/python -m pytest -n $(WORKERS) \
		--dist loadfile $(addprefix tests/detectors/,torchvision ultralytics transformers yolox) \
		tests/export tests/cli/test_libraries.py

# CenterPoint beside the code of mmdetection3d
test-upstream: .venv/mmdet3d/.installed
	.venv/mmdet3d/bin/python -m pytest -m slow tests/upstream

# The wheel in its own environment. A .pth file adds the other packages of .venv, but not the
# editable boxcov there.
wheel: $(INSTALLED)
	rm -rf dist .venv/wheel
	PIP_CONSTRAINT=constraints.txt $(PIP) wheel --no-deps -w dist .
	$(BIN)/python tools/wheel.py dist/boxcov-*.whl
	$(BIN)/python -m venv --without-pip .venv/wheel
	$(PIP) --python $(WHEEL) install --no-deps dist/boxcov-*.whl
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > .venv/packages
	mv .venv/packages "$$($(WHEEL) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages.pth"
	$(WHEEL) tools/wheel.py dist/boxcov-*.whl --installed

# sdist and wheel in dist/, tried in bare environments of every Python; notes from the CHANGELOG
release: $(INSTALLED)
	rm -rf dist
	test -x .venv/release/bin/twine || $(BIN)/python -m venv .venv/release
	.venv/release/bin/python -m pip install --quiet --disable-pip-version-check build==1.6.1 twine==7.0.0
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt .venv/release/bin/python -m build --outdir dist .
	.venv/release/bin/twine check --strict dist/*
	$(BIN)/python tools/wheel.py dist/boxcov-*.whl
	$(BIN)/python tools/release.py dist

# licences and known vulnerabilities of the pinned packages; needs pypi.org, or AUDIT='-s osv'
audit: $(INSTALLED)
	$(BIN)/python tools/licences.py
	test -x .venv/audit/bin/pip-audit || $(BIN)/python -m venv .venv/audit
	.venv/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1
	.venv/audit/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r constraints.txt $(AUDIT)

# build/requirements.txt with the hash of every file that this platform would install
hashes: $(INSTALLED)
	mkdir -p build
	$(PIP) install --dry-run --ignore-installed --report build/report.json -c constraints.txt '.[test]'
	$(BIN)/python tools/hashes.py build/report.json > build/requirements.txt

bench: $(INSTALLED)
	$(BIN)/python benchmarks/core.py

clean:
	rm -rf .venv demo build dist

# The packages of tests/environments/NAME.txt; those of .venv and boxcov's sources by a .pth file.
.venv/%/.installed: tests/environments/%.txt $(INSTALLED)
	rm -rf $(@D)
	$(BIN)/python -m venv --without-pip $(@D)
	$(PIP) --python $(@D)/bin/python install --no-deps -c constraints.txt -r $<
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $(@D)/packages
	echo $(CURDIR)/src >> $(@D)/packages
	mv $(@D)/packages "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages.pth"
	touch $@

# curvlinops and backpack declare torchvision, which has no CPU build: they are installed without
# dependencies, together with the packages they use.
$(INSTALLED): pyproject.toml constraints.txt tests/requirements-oracles.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt -e '.[test]'
	$(PIP) install -c constraints.txt --no-deps -r tests/requirements-oracles.txt
	touch $@
