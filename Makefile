# make venv    the pinned environment in .venv, with the `onecurve` command
# make demo    the capstone: four ranks, four invariants, a verified resume
# make test    the fast tests; `make slow` the long sweeps
# make lint    ruff and mypy

PYTHON ?= python3
BIN := .venv/bin
# the working directory may hold spaces, so nothing below uses an absolute path
export OMP_NUM_THREADS ?= 1

.PHONY: venv demo test slow lint format clean

venv: .venv/installed

.venv/installed: constraints.txt pyproject.toml setup.py
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "onecurve needs Python 3.10 or newer; make venv PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: venv
	$(BIN)/python code/main.py

test: venv
	$(BIN)/python -m pytest -q

# an S3-compatible server to test the mirror against: large, and needed by nobody else
.venv/s3: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt s3fs 'moto[server]'
	touch $@

slow: .venv/s3
	$(BIN)/python -m pytest -q -m slow

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache
