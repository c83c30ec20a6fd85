PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo demo-hybrid test fuzz lint bench bench-network aot aot-triton-3.6 clean

demo: $(INSTALLED)  ## train a small transformer with every strategy and compare them
	$(BIN)/python examples/train_lm.py --compare

demo-hybrid: $(INSTALLED)  ## the same for a hybrid of linear and softmax attention, on 1 and 2 processes
	$(BIN)/python examples/train_hybrid.py --compare

test: $(INSTALLED)  ## run all tests
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not alone"
	$(BIN)/python -m pytest -m alone

fuzz: $(INSTALLED)  ## 2,000 random calls of every strategy on 2 to 4 ranks, against the oracle
	$(BIN)/python -m tests.fuzz

lint: $(INSTALLED)  ## linters and the type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)  ## run the benchmarks; results go to benchmarks/results
	$(BIN)/pip install -q -c constraints.txt -e '.[peers]'
	$(BIN)/python benchmarks/strategies.py
	$(BIN)/python benchmarks/kernels.py

bench-network: $(INSTALLED)  ## the same for communication, on emulated links; needs root
	$(BIN)/python benchmarks/seam.py
	$(BIN)/python benchmarks/links.py
	$(BIN)/python benchmarks/linear.py

aot: $(INSTALLED)  ## compile every kernel configuration for sm_80, sm_90 and gfx942, and hold it to its gates
	$(BIN)/python -m tests.aot

aot-triton-3.6: $(INSTALLED)  ## the same with the oldest Triton that is supported
	$(BIN)/pip install -q --disable-pip-version-check --no-deps --target .venv/triton-3.6 --upgrade triton==3.6.0
	PYTHONPATH=.venv/triton-3.6 $(BIN)/python -m tests.aot

$(INSTALLED): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "seqpar needs Python 3.11 or newer; set PYTHON=/path/to/it")'
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/pip install -q --disable-pip-version-check -e '.[bench,dev]'
	@touch $@

clean:
	rm -rf .venv build *.egg-info
