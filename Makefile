PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test lint bench clean

demo: $(INSTALLED)  ## train a small transformer with every strategy and compare them
	$(BIN)/python examples/train_lm.py --compare

test: $(INSTALLED)  ## run all tests
	$(BIN)/python -m pytest

lint: $(INSTALLED)  ## linters and the type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)  ## run the benchmarks; results go to benchmarks/results
	$(BIN)/pip install -q -c constraints.txt -e '.[peers]'
	$(BIN)/python benchmarks/strategies.py

$(INSTALLED): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "seqpar needs Python 3.11 or newer; set PYTHON=/path/to/it")'
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/pip install -q --disable-pip-version-check -e '.[bench,dev]'
	@touch $@

clean:
	rm -rf .venv build *.egg-info
