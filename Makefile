# Everything runs in .venv, which the first target that needs it makes. PYTHON chooses the interpreter (3.11 or later).
PYTHON ?= python3
BIN := .venv/bin
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')

# One thread per rank: ranks on a small machine otherwise fight for its cores.
TORCHRUN = OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node
PYTEST = $(BIN)/python -m pytest -q
RANKS = 2 3 4

.PHONY: venv example test test-versions fuzz faults mutation sanitize lint bench

venv: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[megatron,example,test,bench,lint]'
	touch $@

# The main job: a GPT with its vocabulary over 2 CPU ranks, or over all GPUs.
example: venv
	$(TORCHRUN) $(if $(filter 0,$(GPUS)),2,$(GPUS)) examples/pretrain_gpt.py $(ARGS)

# Each part fails when it collected nothing (pytest exits with 5), and the first one also when the kernels were not
# really run. Distributed tests run on 2, 3 and 4 gloo ranks; with several GPUs also over NCCL, one rank a GPU.
test: venv
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= $(PYTEST) -n auto tests/unit \
		--must-pass-on torch-cpu --must-pass-on triton-interpreter
	OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(PYTEST) -n auto tests/compiled tests/megatron
	OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(PYTEST) tests/compile
	for ranks in $(RANKS); do \
		TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= $(TORCHRUN) $$ranks -m pytest -q tests/distributed \
			--must-pass-on torch-cpu --must-pass-on triton-interpreter || exit 1; \
	done
	OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(PYTEST) -n auto tests/training
	OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(PYTEST) tests/example
ifneq ($(GPUS),0)
	$(PYTEST) tests/unit tests/gpu --ignore tests/gpu/test_compile_on_gpu.py --must-pass-on triton-cuda
	$(PYTEST) tests/gpu/test_compile_on_gpu.py
endif
ifneq ($(filter-out 0 1,$(GPUS)),)
	$(TORCHRUN) $(GPUS) -m pytest -q tests/distributed --must-pass-on triton-cuda
endif

# The plugin in the releases of megatron-core (or VERSIONS="0.12.3 ..."); over all of them it makes README's table. The
# training program of the later ones needs Python 3.12: make PYTHON=python3.12 test-versions.
test-versions: venv
	$(BIN)/python -m tests.releases $(VERSIONS)

# The long runs that docs/robustness.md tells of.
fuzz: venv
	OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(BIN)/python -W ignore -m tests.fuzz --examples 7000 --jobs 2 $(ARGS)

faults: venv
	OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(PYTEST) tests/faults

mutation: venv
	$(BIN)/python -m tests.mutation $(ARGS)

SANITIZERS = memcheck racecheck synccheck initcheck
sanitize: venv
	for tool in $(SANITIZERS); do \
		PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 9 \
			$(BIN)/python -m tests.gpu.sanitizer_cases || exit 1; \
	done

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: venv
	$(BIN)/python -m benchmarks.logits $(ARGS)
