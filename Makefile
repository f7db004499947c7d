# The two commands that always work on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-failed test-long kernels lint types check oracle bench clean

demo: $(STAMP)
	$(BIN)/python -m ppruntime.launch.demo

test: $(STAMP)
	$(MAKE) --no-print-directory lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m "not long and not compiles"

# What the last `make test` saw fail, once more and with the machine to itself.
test-failed: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --last-failed --last-failed-no-failures none -m "not long and not compiles"

# What `make test` has no time for.
test-long: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist loadfile -m long

# Compiles the kernels for Hopper, without one: no spills, wide accesses, tensor-core products.
kernels: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m compiles

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# Compares the models with other people's implementations, in environments of their own.
oracle: $(STAMP)
	bash tests/oracle/run.sh

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools wheel
	$(BIN)/python -m pip install --quiet -c constraints.txt torch numpy triton
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev,tokenizers]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info
