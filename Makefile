# Every target does its own set-up. `make demo` and `make test` are all a new user needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo pages test test-rest test-all exploits check check-dependencies clean

setup: $(VENV)/.ready

# torch goes in first and by exact version, so that no other requirement picks another build of it.
$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/kernelwright optimize polynomial_with_common_terms --device auto --budget 3 --judge 1 --processes 5 --out demo-run

# Look-up tables from code; every published number from records: summaries, marked blocks of pages, the picture.
pages: setup
	$(BIN)/python .ci/make_reference.py
	$(BIN)/python benchmarks/make_pages.py

# Two processes on two cores: a third one imports everything once more, and waits. One thread each: spinning thread pools would
# slow all. What is compiled once is kept, whatever the caller's environment says: the tests start some hundred processes,
# and rewriting all assertions takes ten seconds. Freed memory is kept too: to give back and fault in every tensor of a megabyte takes as long as to fill it.
TEST_ENVIRONMENT := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= MALLOC_MMAP_THRESHOLD_=33554432 \
	MALLOC_TRIM_THRESHOLD_=268435456 MALLOC_TOP_PAD_=67108864
PYTEST := $(TEST_ENVIRONMENT) $(BIN)/python -m pytest -n 2 --dist worksteal

# One path a feature, one cheat a defence, a few examples a property. OPTIONS are pytest's.
test: setup
	$(PYTEST) --hypothesis-profile quick $(OPTIONS)

# What `make test` leaves out, but for what takes minutes: a C++ compiler's, and the rest of what a test samples.
test-rest: setup
	$(PYTEST) -m 'exhaustive and not compilation and not long' $(OPTIONS)

# Everything, and which branches of the judge's trusted code no test takes.
test-all: setup
	$(PYTEST) -m '' --cov --cov-report= $(OPTIONS)
	$(BIN)/python tests/branches.py

exploits: setup
	$(PYTEST) -m '' tests/exploits $(OPTIONS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/python .ci/check_prose.py
	$(BIN)/python .ci/make_reference.py --check

# Resolves the dependencies for each version of Python; takes minutes and the network, so it is no part of `check`.
check-dependencies: setup
	$(BIN)/python .ci/check_dependencies.py

clean:
	rm -rf $(VENV) demo-run
